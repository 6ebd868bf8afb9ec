"""What a run trains: the user's state, the steps that are done, and the ranks. All parts of a `Run` refer to it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

from ...comm import Communicator, World, world
from ...comm.core import members
from ..disk.errors import agreed
from ..disk.remote_path import Location
from ..disk.storage import located
from .random_state import RandomState

KEY = "run"
PREFIX = "step-"
Build = Callable[[World], dict[str, Any]]


class Training:
    """folder: of the run's checkpoints.   comm: the run's own, of this world."""

    folder: Location
    state: dict[str, Any]
    comm: Communicator

    def __init__(self) -> None:
        self.done = 0  # the number of steps that are done
        self._is_in_step = False

    def settle(self, state: dict[str, Any] | Build, folder: str | os.PathLike[str]) -> None:
        """Make the state on this world, unless it is there. Collective."""
        with agreed(world().comm):
            self.folder = located(folder).resolve()  # the program may change its working directory
        self.state = state(world()) if callable(state) else state
        if KEY in self.state:
            raise ValueError(f"Run: the key {KEY!r} of the state is taken by the run itself; use another")
        self.comm = world().mesh.communicator("run")

    def drop(self) -> None:
        """Free the state, before it is made anew, and forget the step under way."""
        self.state, self._is_in_step = {}, False
        gc.collect()  # models form circles

    def begin_step(self) -> None:
        """A step is under way from now on."""
        self._is_in_step = True

    def end_step(self) -> None:
        """Count the step that was under way."""
        if self._is_in_step:
            members.is_newcomer = False
        self.done += self._is_in_step
        self._is_in_step = False

    @property
    def name(self) -> str:
        """That of the checkpoint of the steps that are done."""
        return f"{PREFIX}{self.done:08d}"

    def contents(self) -> dict[str, Any]:
        """What a checkpoint has now."""
        return {**self.state, KEY: {"step": self.done, "random": RandomState()}}

    def check_alike(self, what: str, **arguments: object) -> None:
        """Raise ValueError on every rank if the ranks' arguments differ. Collective."""
        everyone = self.comm.exchange(arguments)
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            raise ValueError(f"{what}: rank 0 has {everyone[0]}, rank {other} has {everyone[other]}; expected the same")

"""A training run that resumes: from its last checkpoint, on any number of ranks, after whatever ended it.

    with shardrt.Run("runs/a", {"model": model, "optimizer": optimizer}) as run:
        for step in run.steps(1000):
            train(step)

on entry           rank 0 finds the newest committed checkpoint, and all ranks load it; if it is damaged, the one before
after each step    1. the ranks agree whether one of them was told to stop: then they save, wait for it, and exit
                   2. they check the save that is under way; an error in it is raised on every rank
                   3. if it is time, they begin the next save: training goes on while it is written
at the end         the last step is saved, unless it is already, and the ranks wait for it; so also after a `break`
on an exception    nothing is saved; the save that is under way completes, or leaves the older checkpoint
on a lost rank     with `survive`: the others make the state anew on the world that is left, and load the newest copy in
                   memory (`survival/copies.py`), or checkpoint

The folder has the checkpoints `step-00000100`, ..., by the number of steps done. Beside the user's state a checkpoint has the
entry `run`: the number of steps, and the random numbers of all ranks. Checkpoints of other names are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, Self

from ...comm import World
from ..disk.remote_path import Location
from .continuing import Continuing
from .loop import Loop
from .resuming import Resuming
from .saves import Saves
from .stopping import Stopping
from .survival.membership import Survival
from .training import Training


class Run:
    """Resumes from the newest checkpoint in a folder, saves while it trains, and stops when Slurm wants it to.

    folder: of this run's checkpoints, on a file system that all ranks share, or the URL of one in a store.
    state: as `save` and `load` take it: a save takes its plain values as they are then, and a load at the start replaces them.
        The key "run" is reserved. Or a function that makes it on the world that it is given; `Run.state` is what it has made.
    every: the steps between two saves; or the time, as "90s", "10min" or "1.5h", from entry and from each save to the next, by
        rank 0's clock: the save begins at the end of the step in which it has passed, unless one is still under way.
    keep: how many of the newest checkpoints remain.   keep_every: steps that are multiples of this are saved too, and their
        checkpoints are never deleted.
    on_damage: "older": if the newest checkpoint is damaged, the newest one that is not is loaded, with a warning, and what is
        damaged is kept as `step-00000200.damaged`; if all are, that is an error. "raise": a damaged newest one is an error.
    survive: go on without ranks that are lost, in a job of `shardrt.launch --survive`: see `train` and `recover`.
    On SIGUSR1 or SIGTERM, to any rank, all ranks stop after the same step, save, and exit with code 75 (EX_TEMPFAIL);
    `scripts/slurm/train.sbatch` then requeues the job. A second signal, a second later or more, does what it would do without
    a `Run`.
    Collective: every rank makes the same `Run` and runs the same steps.
    Raises: ValueError for bad arguments; RuntimeError before `shardrt.init()`, or for `survive` in another job; from entry
    and from `steps` a CheckpointError on every rank, with the reason, if one of them cannot load or save.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: dict[str, Any] | Callable[[World], dict[str, Any]],
        every: int | str = 100,
        keep: int = 3,
        on_damage: Literal["older", "raise"] = "older",
        *,
        keep_every: int | None = None,
        survive: Survival | None = None,
    ) -> None:
        self._training = Training()
        self._saves = Saves(self._training, every, keep, keep_every)
        self._stopping = Stopping(self._training, self._saves)
        self._resuming = Resuming(self._training, self._saves, on_damage)
        self._continuing = Continuing(self._training, self._saves, self._stopping, self._resuming, state, survive)
        self._loop = Loop(self._training, self._saves, self._stopping, self._continuing)
        self._training.settle(state, folder)

    @property
    def state(self) -> dict[str, Any]:
        """What is saved and loaded."""
        return self._training.state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._training.state = state

    @property
    def folder(self) -> Location:
        """Where the checkpoints of this run are."""
        return self._training.folder

    @property
    def done(self) -> int:
        """The number of steps that are done."""
        return self._training.done

    def __enter__(self) -> Self:
        self._continuing.open()
        self._saves.start_clock()
        self._stopping.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._loop.finish()
        finally:
            self._continuing.close(delete=kind is None)
            self._stopping.close()

    def train(self, total: int, step: Callable[[int], object]) -> None:
        """Call `step(index)` for the steps that remain of `total`, and save the last. When ranks are lost, `recover`.

        With `shardrt.launch --replace`, processes in the place of lost ranks join between steps: `state` is then another.
        Raises: as `steps`; RankLost if too few ranks are left.
        """
        self._loop.train(total, step)

    def recover(self) -> None:
        """Go on without the ranks that are lost: make the state anew on those that are left, and load the newest there is.

        That is the newest copy, or checkpoint, that is whole; `done` is then its step. Collective over the ranks that are left.
        The program keeps nothing of the old state: its memory is needed for the new one.
        Raises: RankLost if fewer than `min_ranks` are left, or nothing is there to go on from.
        """
        self._continuing.recover()

    def steps(self, total: int) -> Iterator[int]:
        """The indices of the steps that remain of `total`; each is done when the next one is asked for.

        After a `break`, which every rank makes in the same step, that step is done too: it comes after the optimizer's step.
        A further call of `steps` then goes on with the next one.
        Raises: SystemExit when the run stops; ValueError on every rank if they have other totals.
        """
        return self._loop.steps(total, may_grow=False)

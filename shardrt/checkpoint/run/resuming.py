"""From which checkpoint, or copy in memory, a run goes on: the newest that is whole."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...comm import world
from ..disk.errors import CheckpointError, DamagedCheckpointError, agreed
from ..disk.files import METADATA
from ..disk.remote_path import Location
from ..disk.storage import storage_of
from ..formats.dcp.metadata_reader import read_stored
from ..loading.load import load, load_copy
from ..saving.save import end_previous
from .random_state import RandomState
from .saves import Saves
from .survival.copies import MemoryCopies
from .training import KEY, PREFIX, Training

_log = logging.getLogger("shardrt")


class Resuming:
    """Loads the newest checkpoint or copy. on_damage: see `Run`."""

    def __init__(self, training: Training, saves: Saves, on_damage: str) -> None:
        if on_damage not in ("older", "raise"):
            raise ValueError(f"Run(on_damage={on_damage!r}): expected 'older' or 'raise'")
        self._training, self._saves, self._on_damage = training, saves, on_damage

    def resume(self, copies: MemoryCopies | None) -> None:
        """Load the newest that is whole, if there is any. Collective. Raises: DamagedCheckpointError if none is whole.

        copies: those of the run, if it makes any.
        """
        found, damaged = self._newest_first(copies), dict[Location, str]()  # with the reasons
        for folder in found:
            try:
                self._load(folder, copies)
                break
            except DamagedCheckpointError as error:
                if self._on_damage == "raise":
                    raise
                damaged[folder] = str(error)
        if len(damaged) < len(found):
            self._saves.report_progress()
            self._set_aside(damaged)
        elif found:
            raise DamagedCheckpointError(
                f"all checkpoints in {str(self._training.folder)!r} are damaged; to start anew, move them elsewhere. "
                + "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
            )

    def _load(self, found: Location, copies: MemoryCopies | None) -> None:
        """Load this one. Collective. Raises: CheckpointError, on every rank."""
        training = self._training
        if copies is not None and found.parent == copies.folder:
            copies.bring(found.name, {METADATA})
        with agreed(world().comm):
            rows = read_stored(found).tensors.get(f"{KEY}.random.rows")
            if rows is None:
                raise CheckpointError(f"{str(found)!r} was not saved by a run: rename it, or give the run another folder")
        random = RandomState(tuple(rows.shape))
        # A dict, since a load reads only the names in it: the rows of other ranks are not read.
        own: dict[str, Any] = {"step": 0, "random": random.state_dict()}
        loaded = {**training.state, KEY: own}
        if copies is not None and found.parent == copies.folder:
            load_copy(found, loaded, partial(copies.bring, found.name))
        else:
            load(found, loaded)
        training.state.update({key: loaded[key] for key in training.state})
        random.load_state_dict(own["random"])
        training.done = own["step"]
        self._saves.resume(found)

    def _set_aside(self, damaged: Mapping[Location, str]) -> None:
        """Rename what could not be loaded, on rank 0, now that an older one is loaded."""
        for folder, reason in damaged.items() if world().rank == 0 else ():
            try:
                where = f"now '{storage_of(folder).set_aside_damaged(folder)}'"
            except CheckpointError as error:
                where = f"left where it is ({error})"
            message = "'%s' is damaged, and %s; the run goes on from step %d: %s"
            _log.warning(message, folder, where, self._training.done, reason)

    def _newest_first(self, copies: MemoryCopies | None) -> list[Location]:
        """The copies and the committed checkpoints, as rank 0 sees these. Collective."""
        end_previous()  # the save of a run in this process that ended with an exception
        self._training.check_alike("Run", **self._saves.arguments, on_damage=self._on_damage)
        in_memory = [] if copies is None else copies.newest_first()
        found = [*in_memory, *self._seen_by_rank_0(self._training.folder)]
        return sorted(found, key=lambda folder: int(folder.name.removeprefix(PREFIX)), reverse=True)

    def _seen_by_rank_0(self, parent: Location) -> list[Location]:
        comm, found = world().comm, list[Location]()
        with agreed(comm):
            found = list(storage_of(parent).newest_first(parent, PREFIX))
        first = comm.exchange([folder.name for folder in found])[0]
        with agreed(comm):
            if found and not first:
                where = f"is there on rank {comm.rank}, but not on rank 0"
                raise CheckpointError(f"{found[0]} {where}: use a folder that all ranks share")
        return [parent / name for name in first]

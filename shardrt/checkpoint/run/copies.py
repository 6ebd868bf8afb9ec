"""Copies of a run's state in the node's memory, from which the ranks that are left go on when others are lost.

A copy is a checkpoint in a folder of /dev/shm: files in memory outlive the process that wrote them, and a load reads them on
any number of ranks. A rank that is lost while a copy is written leaves the one before whole: the new one takes the files of
the second-newest, whose pages are there already. (To get pages takes as long as to write them.)
Gemini has such copies in memory of several nodes (Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with
In-Memory Checkpoints", SOSP 2023); these are on one.

The ranks keep a file of the folder open to write. So `stale_files.py` knows a folder whose job was killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ...comm import world
from ..disk.folders import Keep
from ..errors import CheckpointError, agreed
from ..saving.save import Background
from ..saving.writing import prepare

_MEMORY = Path("/dev/shm")
_PREFIX = "shardrt-copies-"  # `stale_files.py` knows it, and the next
_HELD = "held"
_KEPT = Keep(newest=2)


class MemoryCopies:
    """The copies of one run. Making it is collective.

    folder: where they are, by the names of a run's checkpoints.
    Raises: CheckpointError on every rank, where the ranks are on several nodes, or have no memory that is a folder.
    """

    def __init__(self) -> None:
        self._background: Background | None = None
        self._files: list[Path] = []  # this rank's files, of the newest two copies
        self.is_empty = True  # none has been taken
        self._held = -1
        self.join("")

    def join(self, made: str) -> None:
        """Let all ranks know of the copies, also new ones, which make theirs now. Collective. made: their folder, if it is."""
        here = world()
        with agreed(here.comm):
            if here.nodes > 1:
                raise CheckpointError(
                    f"copies in memory on {here.nodes} nodes: expected one, since no copy would outlive its node. Without "
                    "copies_every the run goes on from its checkpoints"
                )
            if here.rank == 0 and not made:
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY)
        found, self.is_empty = here.comm.exchange((made, self.is_empty))[0]
        self.folder = Path(found)
        with agreed(here.comm):
            if self._held >= 0:
                os.close(self._held)
            self._held = os.open(self.folder / _HELD, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, name: str, state: dict[str, Any]) -> None:
        """Copy the state. Collective; returns when all ranks have.

        Raises: CheckpointError on every rank, if there is too little memory.
        """
        here = world()
        if self._background is None or self._background.has_ended:  # of a world that has lost ranks
            self._background, self._files = Background("copies"), []
        prepared, items = prepare(here, self.folder / name, state, _KEPT)
        file, nbytes = prepared.plan.file, prepared.plan.nbytes
        files, self._files = self._files, []  # should this copy fail, the next takes none
        with agreed(here.comm):
            spare = files.pop(0) if len(files) == 2 else None
            if spare is not None and spare.is_file() and spare.stat().st_size == nbytes:
                spare.rename(prepared.folder / file)
                nbytes = 0
        needed = sum(here.comm.exchange(nbytes))
        with agreed(here.comm):
            free = shutil.disk_usage(_MEMORY).free
            if needed > free:
                prepared.abandon()
                raise CheckpointError(
                    f"a copy of the run takes {needed:,} more bytes of {_MEMORY}, which has {free:,} left: let it be larger "
                    "(docker run --shm-size), or do without copies_every"
                )
        self._background.start(prepared, items, is_copied=False).wait()
        self._files = [*files, self.folder / name / file]
        self.is_empty = False

    def close(self, *, delete: bool) -> None:
        """Make no more copies. Not collective. delete: nobody needs them; after an exception, the other ranks may."""
        if self._background is not None:
            self._background.abandon()
        os.close(self._held)
        if delete and world().rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

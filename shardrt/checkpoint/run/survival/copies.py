"""Copies of a run's state in memory, from which the ranks that are left go on when others are lost.

A copy is a checkpoint in a folder of /dev/shm: files in memory outlive the process that wrote them, and a load reads them on
any number of ranks. A rank that is lost while a copy is written leaves the one before whole: the new one takes the files of
the second-newest, whose pages are there already. (To get pages takes as long as to write them.) Copies have no checksums.

On the host, training waits for a copy, which would otherwise be made twice. On a GPU the state is copied to pinned memory, on a
stream of its own, and a thread writes the files, while training goes on; it waits for what is then sent to other nodes.

On several nodes, each has such a folder, with the files of its ranks, and then gets those of the node before it as well: so a
copy outlives one node, and any that do not follow each other. Before a load, the files that a node's ranks need, and it lacks,
are sent to it. Gemini has such copies (Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP 2023).

The ranks keep a file of the folder open to write. So `stale_files.py` knows a folder whose job was killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....comm import world
from ...disk.drafts import this_machine
from ...disk.errors import CheckpointError, agreed
from ...disk.files import METADATA
from ...disk.folders import Keep
from ...saving.plan import file_of
from ...saving.save import AsyncSave, Background
from ...saving.writing import prepare
from .moves import ARRIVING, FileMove, move

_MEMORY = Path("/dev/shm")
_PREFIX = "shardrt-copies-"  # `stale_files.py` knows it, and the next
_HELD = "held"
_NEWEST = 2
_KEPT = Keep(newest=_NEWEST)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A copy that is written.   moves: of its files, when it is.   kept: this rank's files, with it."""

    saving: AsyncSave
    sizes: dict[str, int]
    moves: list[FileMove]
    kept: list[Path]


class MemoryCopies:
    """The copies of one run. Making it is collective.

    folder: where they are on each node, by the names of a run's checkpoints.
    Raises: CheckpointError on every rank, where a rank has no memory that is a folder.
    """

    def __init__(self) -> None:
        self._background: Background | None = None
        self._under_way: _UnderWay | None = None
        self._files: list[Path] = []  # this rank's files, of the newest two copies
        self._taken: dict[str, dict[str, int]] = {}  # the bytes of the files of the newest two copies, by name
        self._held = -1
        self._is_adopted = False  # whether the newest covers losses in this world, or none was there
        self.join("")

    def adopt(self, name: str) -> bool:
        """In a new world, let this copy alone cover losses: it is the one that was loaded. Collective. Returns: if it is there.

        Its files are sent to a second node, if need be. Others are deleted: their room is needed for the next.
        """
        if self._is_adopted:
            return bool(self._taken)
        self._is_adopted = True
        whole = self.folder / name in self.newest_first()
        self._keep_only([name] if whole else [])
        if whole:
            moves = self._to_second_homes(name)
            self._check_room(0, moves, "a copy of the run")
            move(self._comm, self.folder / name, moves, world().stream)
        return whole

    @property
    def outlives_nodes(self) -> bool:
        """Whether the files are on several nodes."""
        return len(set(self._homes)) > 1

    def join(self, made: str) -> None:
        """Let all ranks know of the copies, also new ones, which make theirs now. Collective. made: their folder, if it is."""
        here = world()
        with agreed(here.comm):
            if here.rank == 0 and not made:
                made = tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY)
        found, self._taken = here.comm.exchange((made, self._taken))[0]
        self.folder = Path(found)
        with agreed(here.comm):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            held, self._held = self._held, os.open(self.folder / _HELD, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if held >= 0:
                os.close(held)
            (self.folder / f"{ARRIVING}{here.rank}").unlink(missing_ok=True)
        status = self.folder.stat()
        places = here.comm.exchange((this_machine(), status.st_dev, status.st_ino))
        self._homes = [places.index(each) for each in places]  # of each rank, the first rank that has its folder
        self._comm = here.mesh.communicator("copies.files")
        self._is_adopted, self._under_way = False, None

    def take(self, name: str, state: dict[str, Any]) -> None:
        """Copy the state. Collective; returns when all ranks have; on a GPU, when they have begun, see `poll` and `finish`.

        Raises: CheckpointError on every rank, if there is too little memory.
        """
        self.finish()
        here = world()
        if self._background is None or self._background.has_ended:  # of a world that has lost ranks
            self._background, self._files = Background("copies"), []
        if len(self._taken) == _NEWEST and (self.outlives_nodes or len(self._files) < _NEWEST):  # whose files serve no other
            self._keep_only(list(self._taken)[1:])
        prepared, items = prepare(here, self.folder / name, state, _KEPT, self._homes)
        file, nbytes = prepared.plan.file, prepared.plan.nbytes
        files, self._files = self._files, []  # should this copy fail, the next takes none
        with agreed(here.comm):
            spare = files.pop(0) if len(files) == 2 else None
            if spare is not None and spare.is_file() and spare.stat().st_size == nbytes:
                spare.rename(prepared.folder / file)
                nbytes = 0
        moves = self._to_next_home(prepared.sizes)
        try:
            self._check_room(nbytes, moves, "a copy of the run")
        except CheckpointError:
            prepared.abandon()
            raise
        sizes = {file_of(rank): size for rank, size in enumerate(prepared.sizes) if size}
        is_copied = here.device.type == "cuda"
        saving = self._background.start(prepared, items, is_copied=is_copied)
        self._under_way = _UnderWay(saving, sizes, moves, [*files, self.folder / name / file])
        if not is_copied:
            self.finish()

    def poll(self) -> None:
        """Finish the copy under way, if all ranks have written it. Collective."""
        if self._under_way is None:
            return
        try:
            has_written = self._under_way.saving.poll()
        except CheckpointError:
            self._under_way = None
            raise
        if has_written:
            self.finish()

    def finish(self) -> None:
        """Wait for the copy under way, if there is one: from now on it covers losses. Collective. Raises: as `take`."""
        if (found := self._under_way) is None:
            return
        self._under_way = None
        found.saving.wait()
        if found.moves:
            self._check_room(0, found.moves, "a copy of the run")  # since it began, others may have taken it
        folder = Path(found.saving.folder)
        move(self._comm, folder, found.moves, world().stream)
        with agreed(self._comm):
            found.sizes[METADATA] = (folder / METADATA).stat().st_size
        self._files = found.kept
        self._taken = dict([*self._taken.items(), (folder.name, found.sizes)][-_NEWEST:])

    def cover(self, name: str, state: dict[str, Any]) -> None:
        """Let the copy of this name cover losses from now on; it is made, unless it is the newest. Collective."""
        self.finish()
        if name not in list(self._taken)[-1:]:
            self.take(name, state)
            self.finish()

    def newest_first(self) -> list[Path]:
        """The copies of which the nodes have all files, between them. Collective."""
        present = self._present()
        whole = (name for name, sizes in self._taken.items() if all(files_at(present, name, each) for each in sizes))
        return [self.folder / name for name in reversed(list(whole))]

    def bring(self, name: str, files: set[str]) -> None:
        """Send files of a copy, which ranks of a node need, to that node, if it lacks them. Collective.

        files: that this rank needs.   Raises: CheckpointError on every rank, if there is too little memory.
        """
        present, sizes = self._present(), self._taken[name]
        needed = self._comm.exchange(files)
        moves = list[FileMove]()
        for home in sorted(set(self._homes)):
            wanted = {file for rank, each in enumerate(needed) if self._homes[rank] == home for file in each}
            for file in sorted(wanted):
                if home not in (sources := files_at(present, name, file)):
                    moves.append(FileMove(file, sizes[file], sources[len(moves) % len(sources)], home))
        self._check_room(0, moves, "what this node needs of a copy")
        move(self._comm, self.folder / name, moves, world().stream)

    def close(self, *, delete: bool) -> None:
        """Make no more copies. Not collective. delete: nobody needs them; after an exception, the other ranks may."""
        if self._background is not None:
            self._background.abandon()
        os.close(self._held)
        if delete and self._is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _is_first(self) -> bool:
        """Whether this is the first of the ranks that have this folder."""
        return self._homes[world().rank] == world().rank

    def _keep_only(self, names: Sequence[str]) -> None:
        """Delete the other copies, and what is left of some that were not finished."""
        self._taken = {name: self._taken[name] for name in names}
        for folder in self.folder.iterdir() if self._is_first else ():
            if folder.is_dir() and folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)

    def _to_second_homes(self, name: str) -> list[FileMove]:
        """The files of a copy that one node has alone to the next one, and `.metadata` to all. Collective."""
        homes, present = sorted(set(self._homes)), self._present()
        moves = list[FileMove]()
        for file, nbytes in self._taken[name].items():
            having = files_at(present, name, file)
            following = homes[(homes.index(having[0]) + 1) % len(homes)]
            lacking = [home for home in homes if home not in having] if file == METADATA else [following]
            if file == METADATA or len(having) == 1 < len(homes):
                moves += [FileMove(file, nbytes, having[0], home) for home in lacking]
        return moves

    def _to_next_home(self, sizes: Sequence[int]) -> list[FileMove]:
        """Each rank's file to a rank of the next node."""
        homes = sorted(set(self._homes))
        if len(homes) == 1:
            return []
        ranks = {home: [rank for rank, each in enumerate(self._homes) if each == home] for home in homes}
        following = dict(zip(homes, [*homes[1:], homes[0]], strict=True))
        moves = list[FileMove]()
        for rank, size in enumerate(sizes):
            if size:
                own, targets = ranks[self._homes[rank]], ranks[following[self._homes[rank]]]
                moves.append(FileMove(file_of(rank), size, rank, targets[own.index(rank) % len(targets)]))
        return moves

    def _present(self) -> list[dict[str, set[str]]]:
        """The files of each copy that the first rank of each folder finds in it; of other ranks, none. Collective."""
        found = dict[str, set[str]]()
        with agreed(self._comm):
            for name, sizes in self._taken.items() if self._is_first else ():
                paths = [self.folder / name / file for file in sizes]
                found[name] = {path.name for path in paths if path.is_file() and path.stat().st_size == sizes[path.name]}
        return self._comm.exchange(found)

    def _check_room(self, nbytes: int, moves: Sequence[FileMove], what: str) -> None:
        """Raise CheckpointError on every rank, if memory lacks for this rank's bytes and for moves on one node. Collective."""
        own, home = self._comm.exchange(nbytes), self._homes[self._comm.rank]
        needed = sum(each for rank, each in enumerate(own) if self._homes[rank] == home)
        needed += sum(each.nbytes for each in moves if self._homes[each.target] == home)
        with agreed(self._comm):
            free = shutil.disk_usage(_MEMORY).free
            if needed > free:
                raise CheckpointError(
                    f"{what} takes {needed:,} more bytes of {_MEMORY}, which has {free:,} left: let it be larger "
                    "(docker run --shm-size), or do without copies_every"
                )


def files_at(present: Sequence[Mapping[str, set[str]]], name: str, file: str) -> list[int]:
    """The ranks that have a file of a copy."""
    return [rank for rank, found in enumerate(present) if file in found.get(name, ())]

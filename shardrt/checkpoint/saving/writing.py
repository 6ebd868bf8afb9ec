"""The steps of a save that all ranks take together, in any format; and those of DCP, with a file for each rank.

step       ranks   what                                                                       collective
prepare    all     names and values of the state, the plan, rank 0 makes the folder           yes
write      all     this rank's file: header, memory and footer of each tensor; fsync          no
commit     rank 0  .metadata, the rename; old checkpoints are deleted                         no

All ranks agree after `write`, and after `commit`. Both are done in a thread (`save.py`). `safetensors.py` has the other format.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any, Generic, TypeVar

import torch

from ...comm.startup.bootstrap import World
from ..disk.drafts import this_machine
from ..disk.errors import CheckpointError, agreed
from ..disk.files import Bytes, Writer
from ..disk.folders import Keep
from ..disk.remote_path import Location
from ..disk.storage import Storage, located, storage_of
from ..formats.dcp.marks import MARK_NBYTES, SaveMark, new_save_id
from ..formats.dcp.metadata_writer import ending
from ..formats.torch_file.items import BlockCrcs, item_footer, item_header, without_gaps
from ..state.entries import entries
from .plan import PlannedItem, SavePlan, file_of, make_plan
from .sources import ItemSource, Pieces, PiecesOf, in_runs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared(ABC, Generic[T]):
    """A save of items of type `T` that all ranks have agreed on, and whose folder is there.   target: its final path."""

    target: Location

    @abstractmethod
    def source(self, item: T, pieces_of: PiecesOf) -> ItemSource:
        """What is written for an item.   pieces_of: is called before this returns."""

    @abstractmethod
    def writer(self, file: str) -> AbstractContextManager[Writer]:
        """One of the files that this rank writes, or writes to. It is safe in the storage once the `with` block ends."""

    @abstractmethod
    def commit(self) -> None:
        """Make the save visible, on rank 0; nothing on the others."""

    @abstractmethod
    def abandon(self) -> None:
        """Delete what was written, on rank 0, once no rank writes any more."""

    def write(self, items: Iterable[ItemSource]) -> None:
        """Write this rank's part. Returns when its bytes, and the names of its files, are safe in the storage."""
        for file, of_file in groupby(items, key=lambda item: item.file):
            with self.writer(file) as writer:
                for item in of_file:
                    item.write(writer)


@dataclass(frozen=True, slots=True)
class PreparedFolder(Prepared[PlannedItem]):
    """A checkpoint in DCP's format: each rank has a file of its own.

    folder: where it is written.   draft: on rank 0, what `Storage.begin` has returned; None on other ranks.
    plan: without its items, which hold the tensors.   sizes: of the ranks' files.   save_id: the same on every rank.
    ranks: whose files lie in the folder; None: all ranks'.   has_checksums: whether items have some.
    """

    storage: Storage
    folder: Location
    draft: Any
    keep: Keep
    plan: SavePlan
    sizes: tuple[int, ...]
    save_id: str
    ranks: Sequence[int] | None = None
    has_checksums: bool = True

    def source(self, item: PlannedItem, pieces_of: PiecesOf) -> ItemSource:
        if isinstance(item.value, bytes):
            return ItemSource(self.plan.file, iter([(item.offset, item.value)]))
        memory = without_gaps(item.value.memory)
        pieces = pieces_of(memory)
        return ItemSource(
            self.plan.file,
            framed(item.offset, memory.dtype, memory.shape, memory.stride(), pieces, has_checksums=self.has_checksums),
            not isinstance(pieces, list),
        )

    @contextmanager
    def writer(self, file: str) -> Iterator[Writer]:
        mark = SaveMark(self.save_id, file).encode()
        with self.storage.writer(self.folder / file) as writer:
            writer.write(0, [mark])
            yield writer
            writer.write(self.plan.nbytes - MARK_NBYTES, [mark])

    def commit(self) -> None:
        if self.draft is not None:
            ranks = range(len(self.sizes)) if self.ranks is None else self.ranks
            files = {file_of(rank): self.sizes[rank] for rank in ranks if self.sizes[rank]}
            self.storage.commit(self.draft, files, [self.plan.metadata, ending(self.save_id)], self.keep)

    def abandon(self) -> None:
        if self.draft is not None:
            self.storage.abandon(self.draft)


def prepare(
    world: World, folder: str | os.PathLike[str], state: dict[str, Any], keep: Keep, homes: Sequence[int] | None = None
) -> tuple[PreparedFolder, tuple[PlannedItem, ...]]:
    """Agree on what is saved and where, and make the folder; returns what this rank writes as well. Collective.

    homes: for each rank the number of the memory that `folder` lies in: each has such a folder, which the first of its ranks
        makes and commits, with the files of its ranks, without checksums. None: all ranks share one.
    Raises: CheckpointError if a rank refuses its arguments, if rank 0 cannot make the folder, or if the ranks give
    different folders, or states that do not fit together.
    """
    with agreed(world.comm):
        where = located(folder)
        storage = storage_of(where)
        target = storage.check_target(where, keep)
        found = entries(state)
    plan = make_plan(found, world.comm)
    answers = world.comm.exchange((str(where.absolute()), keep, plan.nbytes, new_save_id(), this_machine()))
    check_same_target([answer[:2] for answer in answers])
    *_, save_id, machine = answers[0] if homes is None else (*answers[0][:4], this_machine())
    written_in, draft = storage.folder_of(target, machine, save_id), None
    own = None if homes is None else [rank for rank, home in enumerate(homes) if home == homes[world.rank]]
    with agreed(world.comm):
        if world.rank == (0 if own is None else own[0]):
            draft = storage.begin(target, written_in)
    sizes = tuple(answer[2] for answer in answers)
    made = PreparedFolder(target, storage, written_in, draft, keep, replace(plan, items=()), sizes, save_id, own, homes is None)
    return made, plan.items


def check_same_target(answers: Sequence[tuple[str, object]]) -> None:
    """Raise CheckpointError if the ranks save in different folders, or with other arguments.   answers: both, for each rank."""
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise CheckpointError(
                f"the ranks save in different folders: rank 0 in {answers[0][0]!r} with {answers[0][1]}, rank {rank} in "
                f"{answer[0]!r} with {answer[1]}. Give all ranks the same, on a file system that they share"
            )


def framed(
    place: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], pieces: Pieces, *, has_checksums: bool
) -> Iterator[tuple[int, Bytes]]:
    """The bytes of a tensor's item, with their places.   place: of the item in the file.   pieces: the memory, as it lies."""
    header, crcs = item_header(dtype, sizes, strides), BlockCrcs()
    yield place, header
    start, nbytes = place + len(header), prod(sizes) * dtype.itemsize
    for at, piece in in_runs(pieces, [start], nbytes):
        if has_checksums:
            crcs.update(piece)
        yield at, piece
    yield start + nbytes, item_footer(dtype, sizes, strides, crcs.values if has_checksums else None)

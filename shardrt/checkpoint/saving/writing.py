"""The steps of a save that all ranks take together, and the file that each of them writes.

step       ranks   what                                                                       collective
prepare    all     names and values of the state, the plan, rank 0 makes the folder           yes
write      all     this rank's file: header, memory and footer of each tensor; fsync          no
commit     rank 0  .metadata, the rename; old checkpoints are deleted                         no

All ranks agree after `write`, and after `commit`. Both are done in a thread (`saving.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...comm.bootstrap import World
from ..disk.drafts import this_machine
from ..disk.files import Writer
from ..disk.folders import Keep
from ..disk.remote_path import Location
from ..disk.storage import Storage, located, storage_of
from ..errors import CheckpointError, agreed
from ..formats.dcp.marks import MARK_NBYTES, Mark, new_save_id
from ..formats.dcp.metadata_pickle import ending
from ..formats.torch_file.items import BlockCrcs, item_footer, item_header
from ..state.entries import entries
from .plan import Item, SavePlan, file_of, make_plan
from .sources import Source

_PIECE = 4 << 20  # bytes that are checked and written at a time: what the caches hold


@dataclass(frozen=True, slots=True)
class Prepared:
    """A save that all ranks have agreed on, and whose folder is there.

    target: where it will be.   folder: where it is written.   draft: that folder, on rank 0, as the storage has begun it.
    plan: without its items, which hold the tensors.   sizes: of the ranks' files.   save_id: the same on every rank.
    """

    world: World
    storage: Storage
    target: Location
    folder: Location
    draft: Any
    keep: Keep
    plan: SavePlan
    sizes: tuple[int, ...]
    save_id: str

    def write(self, items: Iterable[Source]) -> None:
        """Write this rank's file. Returns when its bytes, and its name, are safe in the storage."""
        if not self.plan.nbytes:
            return
        mark = Mark(self.save_id, self.plan.file).encode()
        with self.storage.writer(self.folder / self.plan.file) as writer:
            writer.write(0, [mark])
            for item in items:
                _write_item(writer, item)
            writer.write(self.plan.nbytes - MARK_NBYTES, [mark])

    def commit(self) -> None:
        """Make the save visible, on rank 0; nothing on the others."""
        if self.draft is not None:
            files = {file_of(rank): nbytes for rank, nbytes in enumerate(self.sizes) if nbytes}
            self.storage.commit(self.draft, files, [self.plan.metadata, ending(self.save_id)], self.keep)

    def abandon(self) -> None:
        """Delete what was written, on rank 0, once no rank writes any more."""
        if self.draft is not None:
            self.storage.abandon(self.draft)


def prepare(
    world: World, folder: str | os.PathLike[str], state: dict[str, Any], keep: Keep
) -> tuple[Prepared, tuple[Item, ...]]:
    """Agree on what is saved and where, and make the folder; returns what this rank writes as well. Collective.

    Raises: CheckpointError if a rank refuses its arguments, if rank 0 cannot make the folder, or if the ranks give other
    folders, or states that do not fit together.
    """
    with agreed(world.comm):
        where = located(folder)
        storage = storage_of(where)
        target = storage.check_target(where, keep)
        found = entries(state)
    plan = make_plan(found, world.comm)
    answers = world.comm.exchange((str(where.absolute()), keep, plan.nbytes, new_save_id(), this_machine()))
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2]:
            raise CheckpointError(
                f"the ranks save in different folders: rank 0 in {answers[0][0]!r} with {answers[0][1]}, rank {rank} in "
                f"{answer[0]!r} with {answer[1]}. Give all ranks the same, on a file system that they share"
            )
    *_, save_id, machine = answers[0]
    written_in, draft = storage.folder_of(target, machine, save_id), None
    with agreed(world.comm):
        if world.rank == 0:
            draft = storage.begin(target, written_in)
    sizes = tuple(answer[2] for answer in answers)
    return Prepared(world, storage, target, written_in, draft, keep, replace(plan, items=()), sizes, save_id), plan.items


def _write_item(writer: Writer, item: Source) -> None:
    place, crcs = item.offset, BlockCrcs()
    if item.dtype is not None:
        header = item_header(item.dtype, item.sizes, item.strides)
        writer.write(place, [header])
        place += len(header)
    for piece in item.pieces:
        for start in range(0, len(piece), _PIECE):
            part = piece[start : start + _PIECE]
            if item.dtype is not None:
                crcs.update(part)
            writer.write(place, [part])
            place += len(part)
        if not isinstance(item.pieces, list):
            writer.flush()
    if item.dtype is not None:
        writer.write(place, [item_footer(item.dtype, item.sizes, item.strides, crcs.values)])

"""`save_safetensors`: final files, of which each rank writes its own byte ranges.

every rank   works out which tensors there are and who writes them, as `plan.py` does for checkpoints
rank 0       makes `<folder>.<machine>-<id>.safetensors.tmp/<folder>` with files that have their headers and their sizes
every rank   writes and syncs its parts, in the thread of the saves; the ranks agree that they have
rank 0       links the folder's other files into it, and exchanges the folders
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ...comm import world
from ..disk.drafts import Draft, folder_of, locked_if_ended, this_machine
from ..disk.errors import CheckpointError, agreed
from ..disk.files import Writer, explained
from ..disk.folders import OCCUPIED, exchange, sync_folder
from ..disk.removal import warned
from ..disk.storage import on_disk
from ..formats.dcp.marks import new_save_id
from ..formats.geometry import TensorPart, byte_runs, memory_of, parts, pieces
from ..formats.safetensors import (
    DTYPE_NAMES,
    INDEX_NAME,
    Array,
    FileLayout,
    TensorInfo,
    check_metadata,
    lay_out,
    split_into_files,
)
from ..formats.sizes import parse_size
from ..state.entries import Entry
from ..state.models import named_tensors
from .assignment import assign
from .copies_alike import check_copies
from .descriptions import Described, describe
from .plan import agree
from .save import AsyncSave, begin, finish
from .sources import ItemSource, PiecesOf, in_runs
from .writing import Prepared, check_same_target

_log = logging.getLogger("shardrt")

_KIND = ".safetensors"  # in the names of drafts
_MODEL_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


class Slice(NamedTuple):
    """A part of a tensor, and where the tensor will lie."""

    array: Array
    part: TensorPart


def slices(array: Array, tensor: torch.Tensor) -> Iterator[Slice]:
    """This rank's parts of a tensor, in pieces of at most 16 MiB where they are converted or put into another order."""
    for part in parts(tensor):
        if part.memory.dtype == array.dtype and part.memory.is_contiguous():
            yield Slice(array, part)
        else:
            yield from (Slice(array, piece) for piece in pieces(part, max(array.dtype.itemsize, part.memory.dtype.itemsize)))


def create_files(folder: Path, layout: FileLayout) -> None:
    """Make a folder, if there is none, and files with their headers and sizes."""
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, header in layout.headers.items():
            with Writer(folder / file) as writer:
                writer.write(0, [header])
                os.truncate(folder / file, layout.nbytes(file))
        if (index := layout.index_file()) is not None:
            with Writer(folder / INDEX_NAME) as writer:
                writer.write(0, [index])


@dataclass(frozen=True, slots=True)
class PreparedExport(Prepared[Slice]):
    """Files of safetensors that all ranks write to.   folder: where they are written.   draft: on rank 0, contains it."""

    folder: Path
    draft: Draft | None

    def source(self, item: Slice, pieces_of: PiecesOf) -> ItemSource:
        array, (box, memory) = item
        starts, nbytes = byte_runs(box, array.shape, array.dtype.itemsize)
        found = pieces_of(memory.to(array.dtype).resolve_conj().resolve_neg().contiguous())
        pieces = in_runs(found, [array.offset + start for start in starts], nbytes)
        return ItemSource(array.file.name, pieces, not isinstance(found, list))

    @contextmanager
    def writer(self, file: str) -> Iterator[Writer]:
        with Writer(self.folder / file, new=False) as writer:
            yield writer

    def commit(self) -> None:
        if self.draft is not None:
            _take_place(self.folder, self.draft)

    def abandon(self) -> None:
        if self.draft is not None:
            _abandon(self.draft)


def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save the model's tensors as `transformers.from_pretrained` loads them. Collective.

    model: sharded or not, of any placements but `Partial`; not on the meta device. Tensors have their names in the whole model.
        A tensor with several names is stored once, under the name that `_tied_weights_keys` of transformers' models keeps.
        Extra state that is no tensor is left out.
    folder: becomes `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index if there is more than
        max_shard_size. Its other files stay, and older files of these names go. The old folder is exchanged for the new one in
        one step: if anything fails, it stays as it is. Save the configuration with `model.config.save_pretrained(folder)`.
    max_shard_size: the most bytes of tensors in a file; "5GB" is 5 * 10**9 bytes. A larger tensor has its own file.
    dtype: of the floating-point tensors in the files, but for those of one byte; None: as they are.
    metadata: strings for the files' headers, beside {"format": "pt"}.
    Cost: no communication but comparisons; each rank writes its shards, shares the writing of what others have too, and
        converts at most 16 MiB at a time. Each run of bytes is a write: with columns, in runs of 4 KiB, a save takes up to
        three times as long as with rows.
    Raises: CheckpointError on every rank, for arguments, placements and dtypes that cannot be saved, with the system's reason
    if a file cannot be written, and if ranks have different tensors of one name. It also raises the error of an earlier
    save, if that has not been raised yet.
    """
    finish(begin(lambda: _prepare(model, folder, max_shard_size, dtype, metadata), is_copied=False))


def async_save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> AsyncSave:
    """Save as `save_safetensors` does, but return when the model has been copied. Collective.

    The files are written in a thread: `poll` and `wait` of what it returns are those of `async_save`, with which it shares the
    thread and the memory for copies; one save is under way at a time. The arguments are those of `save_safetensors`.
    Memory: a copy of this rank's part of the model, in the dtypes of the files.
    """
    return begin(lambda: _prepare(model, folder, max_shard_size, dtype, metadata), is_copied=True)


def _prepare(
    model: nn.Module,
    folder: str | os.PathLike[str],
    max_shard_size: int | str,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str] | None,
) -> tuple[PreparedExport, list[Slice]]:
    """Agree on the export, and make its files; returns what this rank writes as well. Collective."""
    comm, draft = world().comm, None
    with agreed(comm):
        target, nbytes, texts = _target(folder), parse_size(max_shard_size), {"format": "pt", **(metadata or {})}
        check_metadata(texts, "save_safetensors")
    answers = comm.exchange((str(Path(folder).absolute()), (nbytes, dtype, texts), this_machine(), new_save_id()))
    check_same_target([answer[:2] for answer in answers])
    beside = folder_of(target, *answers[0][2:], _KIND)
    with agreed(comm):
        tensors = _tensors(model)
        described = describe([Entry(name, tensor, (name,)) for name, tensor in tensors.items()], comm.rank)
    # Each name is stored, even if two are the same memory: these files have no way to say so.
    everyones = agree(tuple(each._replace(tied=None) for each in described), {}, comm)
    check_copies(everyones.kinds, tensors, comm)
    assigned = list(assign(everyones))
    with agreed(comm):
        infos = {each.entry.name: _stored_info(each.entry, dtype) for each in assigned}
        layout = lay_out(infos, split_into_files(infos, nbytes), texts, beside / target.name)
        own = {each.entry.name for each in assigned if each.includes(comm.rank)}
        found = [piece for name, array in layout.in_order() if name in own for piece in slices(array, tensors[name])]
    with agreed(comm):
        if comm.rank == 0:
            draft = _drafted(target, beside, layout)
    return PreparedExport(target, beside / target.name, draft), found


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is saved of the model."""
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()  # models of transformers make these anew
    return {each.name: memory_of(each.name, each.tensor.detach()) for each in named_tensors(model) if each.name not in ignored}


def _drafted(target: Path, beside: Path, layout: FileLayout) -> Draft:
    """Make the files in a draft, after what killed exports have left is deleted."""
    with warned():
        _clean(target)
    draft = Draft(target, beside)
    try:
        create_files(beside / target.name, layout)
    except BaseException:
        _abandon(draft)
        raise
    return draft


def _target(folder: str | os.PathLike[str]) -> Path:
    target = Path(os.path.realpath(on_disk(folder)))
    if target.is_mount() or (target.exists() and not target.is_dir()):
        raise ValueError(f"folder={str(target)!r}: expected a folder that is no mount point, or nothing")
    return target


def _stored_info(entry: Described, wanted: torch.dtype | None) -> TensorInfo:
    """A tensor as it is in the files. Raises ValueError for a dtype that they cannot have."""
    own = entry.dtype
    assert own is not None, "a tensor"
    stored = wanted if wanted is not None and own.is_floating_point and own.itemsize > 1 else own
    if stored not in DTYPE_NAMES:
        raise ValueError(f"tensor '{entry.name}' of {stored}: safetensors files cannot hold it; give a dtype that they can")
    return TensorInfo(stored, torch.Size(entry.shape))


def _take_place(folder: Path, draft: Draft) -> None:
    """Put the folder in a draft in the place of the target, whose other files are linked into it first."""
    target = draft.target
    # Invariant: another job that deletes the draft renames it first, and then this fails.
    with explained("rename", folder):
        sync_folder(folder)
        if not _renamed(folder, target):
            shutil.copystat(target, folder)
            shutil.copytree(target, folder, symlinks=True, ignore=_replaced(target), copy_function=_link, dirs_exist_ok=True)
            sync_folder(folder)
            exchange(folder, target)
    try:  # the new files are there from here on: an error below is no failure of the export
        sync_folder(target.parent)
        _give_up(draft.folder, target)
    except CheckpointError as error:
        _log.warning("%s has the new files, but: %s", target, error)
    finally:
        draft.release()


def _renamed(folder: Path, target: Path) -> bool:
    """Rename a folder; False if the target is there, which other programs may make at any time."""
    try:
        if not (is_there := target.exists()):
            os.rename(folder, target)
    except OSError as error:
        if error.errno not in OCCUPIED:
            raise
        return False
    return not is_there


def _abandon(draft: Draft) -> None:
    shutil.rmtree(draft.folder, ignore_errors=True)
    draft.release()


def _give_up(beside: Path, target: Path) -> None:
    """Delete the folder of an export. Files that came meanwhile move to `target`, if it lacks them."""
    folder = beside / target.name
    with explained("delete", beside):
        if folder.exists():
            if target.exists():
                _move_missing(folder, target, set(filter(_MODEL_FILES.fullmatch, os.listdir(folder))))
            shutil.rmtree(folder)
        shutil.rmtree(beside)


def _move_missing(folder: Path, target: Path, but: Set[str] = frozenset()) -> None:
    """Move what `target` lacks, at any depth, from `folder` into it.   but: names in `folder` that stay."""
    for name in {*os.listdir(folder)} - but:
        old, new = folder / name, target / name
        if not os.path.lexists(new):
            os.rename(old, new)
        elif all(path.is_dir() and not path.is_symlink() for path in (old, new)):
            _move_missing(old, new)


def _clean(target: Path) -> None:
    """Delete what killed exports of `target` have left. What another job writes stays, with a warning."""
    left = re.compile(rf"{re.escape(target.name)}\.(?P<machine>[0-9a-f]{{8}})-[0-9a-f]{{32}}{re.escape(_KIND)}\.tmp")
    with explained("list", target.parent):
        names = os.listdir(target.parent) if target.parent.exists() else ()
    for beside, found in ((target.with_name(name), left.fullmatch(name)) for name in names):
        if found is not None:
            with warned(), locked_if_ended(beside, found["machine"]) as has_ended:
                if not has_ended:
                    _log.warning("%s stays: another job writes there, or did in the last hour", beside)
                    continue
                # Hazard: under its old name, an export that lives after all would put it, half deleted, in the target's place.
                gone = folder_of(target, this_machine(), new_save_id(), _KIND)
                with explained("delete", beside):
                    os.rename(beside, gone)
                _give_up(gone, target)


def _replaced(target: Path) -> Callable[[str, list[str]], list[str]]:
    """For copytree: the names in `target` that the new files replace."""
    return lambda folder, names: [name for name in names if folder == str(target) and _MODEL_FILES.fullmatch(name)]


def _link(source: str, copy: str) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, copy, follow_symlinks=False)

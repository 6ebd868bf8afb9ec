"""The contents of a checkpoint of any format: where each box of a tensor and each object lies; and what a format is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...tensor.placement.placement import Box
from ..disk.errors import CheckpointError, DamagedCheckpointError, reason, shown
from ..disk.files import METADATA, Reader, explained
from ..disk.remote_path import Location
from ..disk.storage import storage_of

T = TypeVar("T")
ReadBytes = Callable[[int, int], bytes]  # (offset in a chunk, number of bytes) -> the bytes

_MOST_CHARACTERS, _MOST_KEYS = 4096, 256  # of a name; of a path
_MOST_EMPTY = 10_000  # list items without an entry: stock torch stores no name for an empty dict


class Columns(NamedTuple):
    """The chunks of a tensor of d dims, one row each; all int64 on the CPU.

    offsets, sizes: (chunks, d), of each chunk's box.   file: (chunks,), the index of its file in the list of files.
    start, length: (chunks,), the bytes of its item in that file.
    """

    offsets: torch.Tensor
    sizes: torch.Tensor
    file: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One tensor of a file. Positions are bytes from the start of the item.

    The element at `index` lies at `start + dtype.itemsize * sum(index * strides)`.
    data_start, data_nbytes: the memory that the archive stores: it may be more than the tensor's, if the tensor was a part of a
    larger storage.
    crc: the CRC-32 of all of that memory; None if the writer has computed none, or if it is not needed.
    crcs_start: where the CRC-32 of each 16 KiB of that memory begin, 4 bytes each, little-endian; None in items of other
    writers, and of 16 KiB and less.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    start: int
    data_start: int
    data_nbytes: int
    crc: int | None
    crcs_start: int | None


class Format(NamedTuple):
    """What reading has to know of the files of a format.

    check_file: gets a file that was just opened and the id of the save; raises CheckpointError if it is of another save.
    find_item: gets `ReadBytes`, dtype, sizes and length of a chunk, and a text for messages; finds the elements in the chunk.
    has_checksums: whether chunks have checksums; to compare them, more is read than what is needed.
    """

    name: str
    check_file: Callable[[Reader, str | None], None]
    find_item: Callable[[ReadBytes, torch.dtype, tuple[int, ...], int, str], StoredItem]
    has_checksums: bool


class StoredChunk(NamedTuple):
    """A box of a tensor, and its item: `length` bytes at `offset` of a file."""

    box: Box
    file: str
    offset: int
    length: int


class StoredObject(NamedTuple):
    """An object that torch.save wrote: `length` bytes at `offset` of a file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.   shape: the global one.   columns: its chunks.   files: the names of the files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    columns: Columns
    files: tuple[str, ...]

    @cached_property
    def chunks(self) -> list[StoredChunk]:
        """All chunks. Cost: some microseconds of Python for each."""
        return self._at(slice(None))

    def overlapping(self, box: Box) -> list[StoredChunk]:
        """The chunks that have elements of `box`."""
        offsets, sizes = torch.tensor(box.offsets).long(), torch.tensor(box.sizes).long()
        columns = self.columns
        after = torch.maximum(columns.offsets, offsets)
        before = torch.minimum(columns.offsets + columns.sizes, offsets + sizes)
        return self._at((after < before).all(1))

    def _at(self, chosen: slice | torch.Tensor) -> list[StoredChunk]:
        rows = zip(*(column[chosen].tolist() for column in self.columns), strict=True)
        return [
            StoredChunk(Box(tuple(offsets), tuple(sizes)), self.files[file], start, length)
            for offsets, sizes, file, start, length in rows
        ]


class Lazy(Mapping[str, T], Generic[T]):
    """Values that are made when they are first asked for, and kept."""

    def __init__(self, makers: dict[str, Callable[[], T]]) -> None:
        self._makers, self._made = makers, dict[str, T]()

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Stored:
    """The contents of a checkpoint, by name, in the order in which they were written.

    paths: the keys that lead to each value in the state that was saved; some names may have none.
    save_id: "shardrt-" and the id of the save, or "shardrt-1" from older versions; what torch's DCP has written; or None.
    """

    folder: Location
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: dict[str, tuple[str | int, ...]]
    save_id: str | None
    format: Format
    _checked: set[str] = field(default_factory=set)  # the files whose marks have been compared

    def __post_init__(self) -> None:
        # Hazard: a load makes a list as long as an index in a path says, and a damaged one could take all memory.
        most = len(self.tensors) + len(self.objects) + _MOST_EMPTY
        for name, keys in self.paths.items():
            if any(isinstance(key, int) and key >= most for key in keys):
                raise ValueError(f"{shown(keys)} as the path of {shown(name)}, expected indices below {most}")

    def open(self, file: str) -> Reader:
        """A file of the checkpoint. Raises CheckpointError if it cannot be read, or is of another save."""
        path = self.folder / file
        try:
            reader = storage_of(path).reader(path)
        except CheckpointError as error:
            with explained("open", path):
                # A checkpoint that another job deletes at this time has no .metadata either.
                if isinstance(error.__cause__, FileNotFoundError) and (self.folder / METADATA).exists():
                    what = "is missing: .metadata says that it has a part of this checkpoint"
                    raise DamagedCheckpointError(f"{str(path)!r} {what}") from error
            raise
        if file not in self._checked:
            try:
                self.format.check_file(reader, self.save_id)
            except CheckpointError:
                reader.close()
                raise
            self._checked.add(file)
        return reader


def without_checksums(stored: Stored) -> Stored:
    """The same, to be read without comparing checksums: it has none."""
    find_item = stored.format.find_item

    def found(*arguments: Any) -> StoredItem:
        return replace(find_item(*arguments), crc=None, crcs_start=None)

    return replace(stored, format=stored.format._replace(find_item=found, has_checksums=False))


@contextmanager
def damage_of(path: Location, what: str = "") -> Iterator[None]:
    """Turn an error of the `with` block into damage of the file; a CheckpointError or OSError passes as it is."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{path}:{what} not the metadata of a checkpoint ({reason(error)})") from error


def checked_name(name: Any) -> str:
    """The name, unchanged. Raises ValueError if it is no string, is too long, or joins too many keys."""
    if not isinstance(name, str) or len(name) > _MOST_CHARACTERS or name.count(".") >= _MOST_KEYS:
        raise ValueError(f"{shown(name)} in the place of a name")
    return name


def checked_keys(keys: Any) -> tuple[str | int, ...]:
    """The path of a value, unchanged. Raises ValueError unless it is a tuple of strings and integers, each of bounded size."""
    if not isinstance(keys, tuple) or len(keys) > _MOST_KEYS or not all(map(_is_key, keys)):
        raise ValueError(f"{shown(keys)} in the place of a path of keys")
    return keys


def _is_key(key: object) -> bool:
    return len(key) <= _MOST_CHARACTERS if isinstance(key, str) else type(key) is int and key >= 0


def checked_tensor(path: Location, name: str, tensor: StoredTensor) -> StoredTensor:
    """The tensor, unchanged. Raises CheckpointError if it is larger than any memory, or has a chunk that lies outside of it."""
    if prod(tensor.shape) * tensor.dtype.itemsize >= 1 << 63:
        raise DamagedCheckpointError(f"{path}: tensor {shown(name)} of shape {tensor.shape} is larger than any memory; damaged")
    columns = tensor.columns
    if not len(columns.file):
        return tensor
    # Cost: few operations. One that overflows has a negative operand, which is found as well.
    after = torch.tensor(tensor.shape).long() - columns.offsets
    boxes = (columns.offsets, columns.sizes, after, after - columns.sizes)
    lowest = torch.cat([columns.file, columns.start, columns.length, *(each.flatten() for each in boxes)]).min()
    if lowest < 0 or columns.file.max() >= len(tensor.files):
        raise DamagedCheckpointError(
            f"{path}: tensor {shown(name)} of shape {tensor.shape} has chunks that lie outside of it; damaged"
        )
    return tensor


def checked_object(path: Location, name: str, found: StoredObject) -> StoredObject:
    """The object, unchanged. Raises CheckpointError unless its offset and length are integers >= 0."""
    if any(type(number) is not int or number < 0 for number in (found.offset, found.length)):
        place = f"{shown(found.length)} bytes at {shown(found.offset)}"
        raise DamagedCheckpointError(f"{path}: object {shown(name)} has {place}; damaged")
    return found


def check_file_name(path: Location, name: object) -> None:
    """Raise CheckpointError unless it is the name of a file that would lie in the checkpoint's folder."""
    if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise DamagedCheckpointError(f"{path}: refers to the file {shown(name)}; expected one in the checkpoint's folder")

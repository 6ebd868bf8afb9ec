"""The contents of a checkpoint of any format: which box of a tensor, and which object, lies where; and what a format is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...tensor.placement import Box
from ..disk.files import METADATA, Reader, explained
from ..disk.remote_path import Location
from ..disk.storage import storage_of
from ..errors import CheckpointError, DamagedCheckpointError, reason, shown

T = TypeVar("T")
ReadBytes = Callable[[int, int], bytes]  # (offset in a chunk, number of bytes) -> the bytes

_MOST_CHARACTERS, _MOST_KEYS = 4096, 256  # of a name; of a path
_MOST_EMPTY = 10_000  # items of a list that hold nothing: stock torch stores no name for an empty dict


@dataclass(frozen=True, slots=True)
class Columns:
    """The chunks of a tensor of d dims, one row each; all int64 on the CPU.

    offsets, sizes: (chunks, d), of the box.   file: (chunks,), a number in the list of files.
    start, length: (chunks,), the bytes of the item in its file.
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

    check_file: raises CheckpointError for a file, just opened, that is not of the save of this id.
    find_item: finds the elements of the chunk of this dtype and these sizes, in so many bytes; the text is for messages.
    has_checksums: whether chunks have any, for which more than what is needed is read.
    """

    name: str
    check_file: Callable[[Reader, str | None], None]
    find_item: Callable[[ReadBytes, torch.dtype, tuple[int, ...], int, str], StoredItem]
    has_checksums: bool


class StoredChunk(NamedTuple):
    """A box of a tensor, and the bytes of its item."""

    box: Box
    file: str
    offset: int
    length: int


class StoredObject(NamedTuple):
    """The bytes of an object that torch.save wrote."""

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
        columns = self.columns
        boxes = zip(columns.offsets[chosen].tolist(), columns.sizes[chosen].tolist(), strict=True)
        places = zip(
            columns.file[chosen].tolist(), columns.start[chosen].tolist(), columns.length[chosen].tolist(), strict=True
        )
        return [
            StoredChunk(Box(tuple(offsets), tuple(sizes)), self.files[file], start, length)
            for (offsets, sizes), (file, start, length) in zip(boxes, places, strict=True)
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

    paths: the keys that lead to each value in the state that was saved; may lack names.
    save_id: "shardrt-" and the id of the save, "shardrt-1" of older versions, what torch's DCP has there, or None.
    """

    folder: Location
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: dict[str, tuple[str | int, ...]]
    save_id: str | None
    format: Format
    _checked: set[str] = field(default_factory=set)  # the files whose marks have been compared

    def __post_init__(self) -> None:
        # Hazard: a list is made as long as an index says.
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


@contextmanager
def damage_of(path: Location, what: str = "") -> Iterator[None]:
    """Report errors on values of unexpected types as damage of the file."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{path}:{what} not the metadata of a checkpoint ({reason(error)})") from error


def checked_name(name: Any) -> str:
    """A name in a checkpoint. Raises ValueError for what is none, or too long to be one."""
    if not isinstance(name, str) or len(name) > _MOST_CHARACTERS or name.count(".") >= _MOST_KEYS:
        raise ValueError(f"{shown(name)} in the place of a name")
    return name


def checked_keys(keys: Any) -> tuple[str | int, ...]:
    """The path of a value. Raises ValueError for what is none."""
    if not isinstance(keys, tuple) or len(keys) > _MOST_KEYS or not all(map(_is_key, keys)):
        raise ValueError(f"{shown(keys)} in the place of a path of keys")
    return keys


def _is_key(key: object) -> bool:
    return len(key) <= _MOST_CHARACTERS if isinstance(key, str) else type(key) is int and key >= 0


def checked_tensor(path: Location, name: str, tensor: StoredTensor) -> StoredTensor:
    """The tensor. Raises CheckpointError if its chunks lie outside of it."""
    if prod(tensor.shape) * tensor.dtype.itemsize >= 1 << 63:
        raise DamagedCheckpointError(f"{path}: tensor {shown(name)} of shape {tensor.shape} is larger than any memory; damaged")
    columns = tensor.columns
    if not len(columns.file):
        return tensor
    # Cost: of few operations, and of none that wraps around where those before it are not negative.
    after = torch.tensor(tensor.shape).long() - columns.offsets
    boxes = (columns.offsets, columns.sizes, after, after - columns.sizes)
    lowest = torch.cat([columns.file, columns.start, columns.length, *(each.flatten() for each in boxes)]).min()
    if lowest < 0 or columns.file.max() >= len(tensor.files):
        raise DamagedCheckpointError(
            f"{path}: tensor {shown(name)} of shape {tensor.shape} has chunks that lie outside of it; damaged"
        )
    return tensor


def checked_object(path: Location, name: str, found: StoredObject) -> StoredObject:
    """The object. Raises CheckpointError if its place is none."""
    if any(type(number) is not int or number < 0 for number in (found.offset, found.length)):
        place = f"{shown(found.length)} bytes at {shown(found.offset)}"
        raise DamagedCheckpointError(f"{path}: object {shown(name)} has {place}; damaged")
    return found


def check_file_name(path: Location, name: object) -> None:
    """Raise CheckpointError for the name of a file that is not in the folder."""
    if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise DamagedCheckpointError(f"{path}: refers to the file {shown(name)}; expected one in the checkpoint's folder")

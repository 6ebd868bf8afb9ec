"""What a checkpoint folder holds: reads the `.metadata` that `metadata_writer.py` or torch's DCP wrote.

One of shardrt is read by its index: only lists of names are unpickled, and a tensor's chunks are read when it is asked for.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...disk.errors import CheckpointError, DamagedCheckpointError, shown
from ...disk.files import METADATA
from ...disk.remote_path import Location
from ...disk.storage import latest, located, storage_of
from ..stored import (
    Columns,
    Lazy,
    Stored,
    StoredObject,
    StoredTensor,
    check_file_name,
    checked_keys,
    checked_name,
    checked_object,
    checked_tensor,
    damage_of,
)
from ..torch_file.pickles import DTYPES, Global, integers, restricted_load
from .foreign_metadata import stored_in
from .format import DCP
from .metadata_writer import (
    ENDING_NBYTES,
    FIRST_PLACE,
    LAST_OPCODES,
    MAGIC,
    SAVED_BY,
    TRAILER,
    chunk_template,
    save_id_of,
    storage_template,
)

SMALL = 1 << 24  # bytes up to which a file is read at once


def read_stored(folder: str | os.PathLike[str]) -> Stored:
    """Read the `.metadata` in `folder`.

    Raises CheckpointError if there is none, it is damaged, or its pickle refers to globals that no checkpoint needs. Damage
    of one tensor's chunks is raised when that tensor is asked for.
    """
    path = located(folder) / METADATA
    try:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        source = _Source(path)
        with damage_of(path):
            index = source.index()
            if index is not None:
                return _by_index(source, *index)
            return stored_in(source.read(0, source.nbytes), path)
    except OSError as error:
        newest = None
        with suppress(OSError, CheckpointError):
            newest = latest(folder)
        words = f"a folder is a checkpoint once its save has ended and '{METADATA}' is in it"
        words += "" if newest is None else f"; the newest in '{os.fspath(folder)}' is '{newest}'"
        raise CheckpointError(f"{path}: {error.strerror or error}; {words}") from error


class _Source:
    """The bytes of a `.metadata`: read at once if it is small, else in parts."""

    def __init__(self, path: Location) -> None:
        self.path = path
        with storage_of(path).reader(path) as reader:
            self.nbytes = reader.size()
            self._contents = bytes(reader.read(0, self.nbytes)) if self.nbytes <= SMALL else None

    def read(self, start: int, nbytes: int) -> bytes:
        """The `nbytes` bytes at `start`. Raises CheckpointError if the file has fewer."""
        found = b""
        if self._contents is not None:
            found = self._contents[start : start + nbytes]
        elif start + nbytes <= self.nbytes:
            with storage_of(self.path).reader(self.path) as reader:
                found = bytes(reader.read(start, nbytes))
        if len(found) != nbytes:
            raise DamagedCheckpointError(
                f"{self.path}: expected {nbytes} bytes at {start}, found {len(found)}; the file is cut off"
            )
        return found

    def checked(self, start: int, nbytes: int, crc: int, what: str) -> bytes:
        """The bytes of `read`. Raises CheckpointError if they do not have this CRC-32.   what: their name in messages."""
        found = self.read(start, nbytes)
        if zlib.crc32(found) != crc:
            raise DamagedCheckpointError(
                f"{self.path}: {what}: expected CRC-32 {crc:08x}, found {zlib.crc32(found):08x}; it is damaged"
            )
        return found

    def index(self) -> tuple[str, Any, Any] | None:
        """The id of the save, and what `MetadataWriter` wrote as the index; None if there is none."""
        save_id = save_id_of(self.read(self.nbytes - ENDING_NBYTES, ENDING_NBYTES)) if self.nbytes >= ENDING_NBYTES else None
        end = self.nbytes - (len(LAST_OPCODES) if save_id is None else ENDING_NBYTES) - TRAILER.size
        if end < 0:
            return None
        nbytes, crc, magic = TRAILER.unpack(self.read(end, TRAILER.size))
        if magic != MAGIC or nbytes > end:
            return None
        where = f"{self.path}: index"
        index = self.checked(end - nbytes, nbytes, crc, "index")
        return save_id or "1", *restricted_load(index, dict[Global, object]().__getitem__, where)  # it refers to no globals


def _by_index(source: _Source, save_id: str, files: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Stored:
    tensors = dict[str, Callable[[], StoredTensor]]()
    objects, paths = dict[str, StoredObject](), dict[str, tuple[str | int, ...]]()
    for file in files:
        check_file_name(source.path, file)
    for place, (name, path, kind, *rest) in enumerate(rows, FIRST_PLACE + len(files)):
        if checked_name(name) in paths:
            raise ValueError(f"the name {shown(name)} comes twice")
        paths[name] = checked_keys(path)
        if kind is None:
            number, start, length = integers(rest)
            objects[name] = checked_object(source.path, name, StoredObject(files[number], start, length))
        else:
            shape, *numbers = rest
            dtype = DTYPES[checked_name(kind)]
            tensors[name] = _IndexedTensor(source, files, place, name, dtype, integers(shape), *integers(numbers))
    return Stored(source.path.parent, Lazy(tensors), objects, paths, SAVED_BY + save_id, DCP)


@dataclass(frozen=True, slots=True)
class _IndexedTensor:
    """A tensor's row of the index; a call makes it a `StoredTensor`."""

    source: _Source
    files: tuple[str, ...]
    place: int  # of the name in the pickle's memo
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int  # of chunks
    chunks_at: int
    chunks_crc: int
    infos_at: int
    infos_crc: int

    def __call__(self) -> StoredTensor:
        """Read the chunks."""
        source, dims, what = self.source, len(self.shape), f"chunks of tensor {shown(self.name)}"
        chunks, infos = chunk_template(self.shape), storage_template(self.shape)
        boxes = chunks.values(source.checked(self.chunks_at, self.count * chunks.nbytes, self.chunks_crc, what))
        rows = infos.values(source.checked(self.infos_at, self.count * infos.nbytes, self.infos_crc, what))
        if boxes is None or rows is None or not bool((rows[0] == self.place).all()):
            raise DamagedCheckpointError(f"{source.path}: {what}: not where the index has them; the file is damaged")
        empty = torch.empty(self.count, 0, dtype=torch.int64)
        offsets, sizes = (torch.stack(each, 1) if each else empty for each in (boxes[:dims], boxes[dims:]))
        columns = Columns(offsets, sizes, rows[-3] - FIRST_PLACE, rows[-2], rows[-1])
        return checked_tensor(source.path, self.name, StoredTensor(self.shape, self.dtype, columns, self.files))

"""Where the elements of a stored tensor lie: reads the zip archives that `items.py` or any `torch.save` wrote."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from ...errors import CheckpointError, DamagedCheckpointError, shown
from .items import BLOCK_CRCS, CENTRAL, END, END64, IN_EXTRA, LEGACY_STORAGES, LOCAL, LOCATOR
from .pickles import DTYPES, Ordered, Size, integers, restricted_load

_EXTRA = struct.Struct("<2H")  # kind and size of an extra field

ReadBytes = Callable[[int, int], bytes]  # (offset in the item, number of bytes) -> the bytes

_EDGE = 1024  # bytes read at each end of an item at first: all of what `items.py` writes but the memory
_PICKLE_LIMIT = 1 << 20
_MOST_ARGUMENTS, _MOST_CHARACTERS = 8, 100  # of a tensor; of a storage's key


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


class _Record(NamedTuple):
    offset: int  # of its local header
    nbytes: int
    crc: int
    flags: int
    method: int


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype | None  # None: untyped


class _Tensor(NamedTuple):
    """What the pickle says."""

    storage: _Storage
    dtype: torch.dtype
    offset: int  # in elements
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def rebuilt(cls, storage: _Storage, offset: int, sizes: Any, strides: Any, *rest: Any) -> _Tensor:
        """In the place of `torch._utils._rebuild_tensor_v2` and, with a dtype, `_v3`."""
        (offset,) = integers([offset])
        if not isinstance(storage, _Storage) or len(rest) > _MOST_ARGUMENTS:
            raise ValueError(f"a tensor of {shown(storage)} and {len(rest)} more")
        _, _, *more = rest  # requires_grad, hooks
        dtype = storage.dtype
        if dtype is None:
            dtype, *more = more
        if any(more) or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor with {shown(more)}, expected a plain one with a dtype")
        return cls(storage, dtype, offset, integers(sizes), integers(strides))

    @classmethod
    def of_parameter(cls, tensor: _Tensor, *_: Any) -> _Tensor:
        """In the place of `torch._utils._rebuild_parameter`."""
        return tensor


def read_item(read: ReadBytes, length: int, where: str) -> StoredItem:
    """Find the tensor in an item of `length` bytes, by its first and last 1024 bytes, and more if it needs them.

    read: gives bytes of the item.   where: the file and the tensor's name, for messages.
    Raises CheckpointError for what is not an archive with one tensor in it, is damaged, compressed or encrypted.
    """
    source = _Source(read, length, where)
    records, root = _directory(source)
    for name, expected in (("byteorder", b"little"), (".data/byteorder", b"little")):
        if (record := records.get(root + name)) and source.contents(record, name) != expected:
            raise source.error(f"its byte order is {shown(source.contents(record, name))}; only {expected!r} can be read")
    tensor = _tensor(source, source.contents(records[f"{root}data.pkl"], "data.pkl"))
    name = f"{root}data/{tensor.storage.key}"
    if name not in records:
        raise source.error(f"the archive has no record {shown(name)}, which its pickle refers to; the file is damaged")
    stored = records[name]
    itemsize, last = tensor.dtype.itemsize, sum((n - 1) * s for n, s in zip(tensor.sizes, tensor.strides, strict=True))
    if prod(tensor.sizes) and (tensor.offset + last + 1) * itemsize > stored.nbytes:
        raise source.error(
            f"a tensor of shape {tensor.sizes} and strides {tensor.strides} at element {tensor.offset} of {tensor.dtype} needs "
            f"more than the {stored.nbytes} bytes that are stored; the file is damaged"
        )
    begin = source.data_start(stored, name)
    crcs = records.get(root + BLOCK_CRCS)
    return StoredItem(
        tensor.dtype,
        tensor.sizes,
        tensor.strides,
        begin + tensor.offset * itemsize,
        begin,
        stored.nbytes,
        stored.crc if source.has_crcs else None,
        None if crcs is None else source.data_start(crcs, BLOCK_CRCS),
    )


class _Source:
    """The bytes of an item, with both ends read at once and kept."""

    def __init__(self, read: ReadBytes, length: int, where: str) -> None:
        self.length, self._read, self._where = length, read, where
        self.has_crcs = True
        self._first = self._checked(0, min(length, _EDGE))
        self._last_start = max(0, length - _EDGE)
        self._last = self._first if length <= _EDGE else self._checked(self._last_start, length - self._last_start)

    def error(self, message: str) -> CheckpointError:
        return DamagedCheckpointError(f"{self._where}: {message}")

    def span(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self.length:
            raise self.error(
                f"its archive refers to bytes {offset} to {offset + size} of {self.length}; the file is damaged or cut off"
            )
        if offset + size <= len(self._first):
            return self._first[offset : offset + size]
        if offset >= self._last_start:
            return self._last[offset - self._last_start :][:size]
        return self._checked(offset, size)

    def data_start(self, record: _Record, name: str) -> int:
        signature, _, flags, method, *_, name_length, extra_length = LOCAL.unpack(self.span(record.offset, LOCAL.size))
        if signature != b"PK\3\4":
            raise self.error(f"no record where the archive's directory has {shown(name)}; the file is damaged")
        if (record.flags | flags) & 1 or record.method or method:
            kind = "encrypted" if (record.flags | flags) & 1 else "compressed"
            raise CheckpointError(
                f"{self._where}: record {shown(name)} is {kind}; expected one that is stored as it is: save with plain "
                "torch.save"
            )
        start = record.offset + LOCAL.size + name_length + extra_length
        if start + record.nbytes > self.length:
            raise self.error(
                f"record {shown(name)} of {record.nbytes} bytes ends behind the item; the file is damaged or cut off"
            )
        return start

    def contents(self, record: _Record, name: str) -> bytes:
        if record.nbytes > _PICKLE_LIMIT:
            raise self.error(f"record {shown(name)} has {record.nbytes} bytes; expected {_PICKLE_LIMIT} at most for one tensor")
        found = self.span(self.data_start(record, name), record.nbytes)
        if self.has_crcs and zlib.crc32(found) != record.crc:
            raise self.error(
                f"the checksum of record {shown(name)} is {zlib.crc32(found):08x}, not {record.crc:08x}; it is damaged"
            )
        return found

    def _checked(self, offset: int, size: int) -> bytes:
        found = self._read(offset, size)
        if len(found) != size:
            raise self.error(f"expected {size} bytes at {offset}, found {len(found)}; the file is cut off")
        return found


def _directory(source: _Source) -> tuple[dict[str, _Record], str]:
    """The records of the archive by name, and the name of the folder they are in."""
    tail_start = max(0, source.length - _EDGE)
    tail = source.span(tail_start, source.length - tail_start)
    end = tail.rfind(b"PK\5\6")
    if end < 0 or len(tail) - end < END.size:
        raise source.error(
            "no zip archive ends here, as torch.save writes one; the file is damaged, cut off, or of another format"
        )
    *_, count, nbytes, start, _ = END.unpack_from(tail, end)
    locator = tail_start + end - LOCATOR.size
    if locator >= 0 and source.span(locator, 4) == b"PK\6\7":
        _, _, position, _ = LOCATOR.unpack(source.span(locator, LOCATOR.size))
        *_, count, nbytes, start = END64.unpack(source.span(position, END64.size))
    if nbytes > _PICKLE_LIMIT:
        raise source.error(f"an archive whose directory has {nbytes} bytes; expected one tensor")
    records = _records(source, source.span(start, nbytes), count)
    # Hazard: one that is 0 has to be compared as well, since what was lost on the disk is often read as zeros.
    source.has_crcs = any(record.crc for record in records.values())  # none after torch.serialization.set_crc32_options(False)
    roots = [name.removesuffix("data.pkl") for name in records if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise source.error(f"expected an archive with one tensor; found the records {shown(list(records))}")
    return records, roots[0]


def _records(source: _Source, directory: bytes, count: int) -> dict[str, _Record]:
    records, place = {}, 0
    for _ in range(count):
        if directory[place : place + 4] != b"PK\1\2" or place + CENTRAL.size > len(directory):
            raise source.error("the archive's directory is damaged")
        fields = CENTRAL.unpack_from(directory, place)
        flags, method, crc, stored, nbytes, name_length, extra_length, comment_length = (*fields[3:5], *fields[7:13])
        place += CENTRAL.size
        name = directory[place : place + name_length].decode("utf-8", "replace")
        extra = directory[place + name_length : place + name_length + extra_length]
        nbytes, _, offset = _with_zip64((nbytes, stored, fields[16]), extra)
        records[name] = _Record(offset, nbytes, crc, flags, method)
        place += name_length + extra_length + comment_length
    return records


def _with_zip64(sizes: tuple[int, int, int], extra: bytes) -> list[int]:
    """Size, stored size and offset, those that do not fit 32 bits from the Zip64 field of `extra`."""
    field, place = b"", 0
    while len(extra) >= place + 4:
        kind, size = _EXTRA.unpack_from(extra, place)
        if kind == 1:
            field = extra[place + 4 : place + 4 + size]
        place += 4 + size
    found = []
    for value in sizes:
        if value == IN_EXTRA and len(field) >= 8:
            value, field = int.from_bytes(field[:8], "little"), field[8:]
        found.append(value)
    return found


# ---------------------------------------------------------------------- the pickle


_STORAGES = {name: dtype for dtype, name in LEGACY_STORAGES.items()}


def _tensor(source: _Source, data: bytes) -> _Tensor:
    where = source.error("data.pkl").args[0]
    found = restricted_load(data, _find, where, _storage)
    if not isinstance(found, _Tensor):
        raise source.error(f"expected a tensor in the archive, found {type(found).__name__}")
    if len(found.sizes) != len(found.strides) or min(found.offset, *found.sizes, *found.strides, 0) < 0:
        raise source.error(f"expected sizes and strides of a tensor, found {found.sizes} and {found.strides}")
    return found


def _find(module: str, name: str) -> object:
    """What stands for a global of a tensor's pickle."""
    if module == "torch" and name in _STORAGES:
        return _STORAGES[name]
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return _GLOBALS[module, name]


def _storage(pid: Any) -> _Storage:
    kind, dtype, key, *_ = pid
    if kind != "storage" or not (dtype is _UNTYPED or isinstance(dtype, torch.dtype)) or not _is_key(key):
        raise ValueError(f"persistent id {shown(pid)}, expected that of a storage")
    return _Storage(key, dtype if isinstance(dtype, torch.dtype) else None)


def _is_key(key: object) -> bool:
    return isinstance(key, str) and len(key) <= _MOST_CHARACTERS


_UNTYPED = "torch.UntypedStorage"
_GLOBALS: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor.rebuilt,
    ("torch._utils", "_rebuild_tensor_v3"): _Tensor.rebuilt,
    ("torch._utils", "_rebuild_parameter"): _Tensor.of_parameter,
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("torch", "Size"): Size,
    ("collections", "OrderedDict"): Ordered,
}

"""One tensor in a checkpoint file: the bytes that `torch.save` writes, made as header + memory + footer.

    item     a zip archive without compression, at a multiple of 64 bytes in a file
    header   archive/data.pkl    dtype, sizes and strides as a pickle       archive/byteorder   archive/version
             and the local header of archive/data/0, padded so that the memory starts at a multiple of 64 bytes
    memory   the tensor's bytes as they lie: the strides say in which order
    footer   archive/.data/crc32, the CRC-32 of each 16 KiB of the memory (if it has more than one), and the zip's directory

The length of an item follows from its dtype, number of dims and bytes alone: integers in the pickle have a fixed width.
The formats are those of PKWARE's APPNOTE (with its Zip64 records) and of `torch.serialization`. `stored_items.py` reads items.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from math import prod
from operator import xor
from typing import NamedTuple, TypeVar

import torch

Number = TypeVar("Number", int, torch.Tensor)

ALIGNMENT = 64  # of items in a file, and of the memory in an item
BLOCK = 1 << 14  # bytes under one CRC-32
BLOCK_CRCS = ".data/crc32"  # the record with the CRC-32 of each block, little-endian

LEGACY_STORAGES = {  # the dtypes that torch.save names by a class of storages
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4s4H2IH")
IN_EXTRA = 0xFFFFFFFF  # stands for a size that is in the Zip64 field
_DESCRIPTOR = struct.Struct("<4sI2Q")
_VERSION, _UTF8, _DESCRIPTOR_FOLLOWS, _DATE = 45, 1 << 11, 1 << 3, 0x21  # 45: with Zip64; 0x21: 1980-01-01
_MEMORY = b"archive/data/0"


class _Record(NamedTuple):
    """A file of the archive."""

    name: bytes
    offset: int  # of its local header in the item
    nbytes: int
    crc: int


def item_length(dtype: torch.dtype, ndim: int, nbytes: Number) -> Number:
    """The bytes of the item of a tensor with `ndim` dims and `nbytes` bytes of memory.   nbytes: int64 for many tensors."""
    blocks, (short, two) = -(-nbytes // BLOCK), _footer_lengths()
    return header_length(dtype, ndim) + nbytes + short + (blocks > 1) * (two - short + 4 * (blocks - 2))


@cache
def header_length(dtype: torch.dtype, ndim: int) -> int:
    """The bytes of an item before the tensor's memory: a multiple of 64."""
    return len(item_header(dtype, (0,) * ndim, (0,) * ndim))


def item_header(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> bytes:
    """What comes before the tensor's memory, which has `prod(sizes)` elements without gaps, in the order of `strides`."""
    out, _ = _records_before(dtype, sizes, strides)
    nbytes = prod(sizes) * dtype.itemsize
    offset = len(out)
    start = offset + LOCAL.size + len(_MEMORY) + 20 + 4
    padding = -start % ALIGNMENT
    extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) + struct.pack("<2s1H", b"FB", padding) + b"Z" * padding
    flags = _UTF8 | _DESCRIPTOR_FOLLOWS
    out += LOCAL.pack(b"PK\3\4", _VERSION, flags, 0, 0, _DATE, 0, IN_EXTRA, IN_EXTRA, len(_MEMORY), len(extra))
    return bytes(out + _MEMORY + extra)


def item_footer(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], crcs: Sequence[int] | None) -> bytes:
    """What comes after the tensor's memory.

    crcs: the CRC-32 of each 16 KiB of it, as `BlockCrcs` has them; None: zeros are in their place. The other arguments are
    those of `item_header`.
    """
    nbytes = prod(sizes) * dtype.itemsize
    crc = 0 if crcs is None else combined_crc(crcs, nbytes)
    header = header_length(dtype, len(sizes))
    before, records = _records_before(dtype, sizes, strides)
    records.append(_Record(_MEMORY, len(before), nbytes, crc))
    out = bytearray(_DESCRIPTOR.pack(b"PK\7\x08", crc, nbytes, nbytes))
    if nbytes > BLOCK:
        blocks = bytes(4 * -(-nbytes // BLOCK)) if crcs is None else array("I", crcs).tobytes()
        _add(out, records, BLOCK_CRCS, blocks, header + nbytes)
    start = header + nbytes + len(out)
    directory = b"".join(_central(record) for record in records)
    out += directory
    count = len(records)
    out += END64.pack(b"PK\6\6", END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(directory), start)
    out += LOCATOR.pack(b"PK\6\7", 0, start + len(directory), 1)
    return bytes(out + END.pack(b"PK\5\6", 0, 0, count, count, len(directory), IN_EXTRA, 0))


@cache
def _footer_lengths() -> tuple[int, int]:
    """The bytes of a footer without checksums of blocks, and of one with those of two blocks."""
    return tuple(len(item_footer(torch.uint8, (n * BLOCK,), (1,), (0,) * n)) for n in (1, 2))  # type: ignore[return-value]


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if its memory has no gaps and no element twice, in any order of dims; else a contiguous copy.

    Cost: a copy of a tensor that is a part of a larger one, or is expanded.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != step and tensor.numel():
            return tensor.contiguous()
        step *= size
    return tensor


# ---------------------------------------------------------------------- checksums


class BlockCrcs:
    """The CRC-32 of each 16 KiB of bytes that come in pieces."""

    def __init__(self) -> None:
        self._values = array("I")
        self._rest = 0  # bytes in the last block, 0 if it is full

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next bytes, contiguous. Cost: zlib's CRC of them, without Python's lock."""
        view, start = memoryview(piece).cast("B"), 0
        while start < len(view):
            block = view[start : start + BLOCK - self._rest]
            if self._rest:
                self._values[-1] = zlib.crc32(block, self._values[-1])
            else:
                self._values.append(zlib.crc32(block))
            start += len(block)
            self._rest = (self._rest + len(block)) % BLOCK

    @property
    def values(self) -> Sequence[int]:
        """The CRC-32 of each block so far; the last block may be shorter."""
        return self._values


def combined_crc(crcs: Sequence[int], nbytes: int) -> int:
    """The CRC-32 of all `nbytes` bytes from those of their blocks of 16 KiB.

    A CRC is linear over bits: appending n bytes multiplies the CRC so far by a matrix, here kept as four tables (as in zlib's
    crc32_combine, by Mark Adler).
    """
    crc = 0
    if not crcs:
        return crc
    for block in crcs[:-1]:
        crc = _appended(crc, BLOCK) ^ block
    return _appended(crc, nbytes - BLOCK * (len(crcs) - 1)) ^ crcs[-1]


def _appended(crc: int, nbytes: int) -> int:
    """The CRC after `nbytes` zero bytes, without the inversions at the start and the end."""
    if nbytes == BLOCK:
        low, second, third, high = _block_tables()
        return low[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ high[crc >> 24]
    # zlib.crc32(zeros, crc) is affine in crc: its linear part is what appending does.
    zeros = bytes(nbytes)
    return zlib.crc32(zeros, crc) ^ zlib.crc32(zeros)


@cache
def _block_tables() -> tuple[list[int], ...]:
    """A table for each of the four bytes of a CRC: what `_appended` gives, after a block, for each value of that byte."""
    zeros = bytes(BLOCK)
    base = zlib.crc32(zeros)
    columns = [zlib.crc32(zeros, 1 << bit) ^ base for bit in range(32)]
    return tuple([_combination(columns[first : first + 8], byte) for byte in range(256)] for first in range(0, 32, 8))


def _combination(columns: Sequence[int], byte: int) -> int:
    return reduce(xor, (column for bit, column in enumerate(columns) if byte >> bit & 1), 0)


# ---------------------------------------------------------------------- the archive and its pickle


def _records_before(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> tuple[bytearray, list[_Record]]:
    """The records before the memory."""
    out, records = bytearray(), list[_Record]()
    _add(out, records, "data.pkl", _pickle(dtype, sizes, strides), 0)
    _add(out, records, "byteorder", b"little", 0)
    _add(out, records, "version", b"3\n", 0)
    return out, records


def _add(out: bytearray, records: list[_Record], name: str, data: bytes, start: int) -> None:
    """Append a record. start: where `out` begins in the item."""
    record = _Record(f"archive/{name}".encode(), start + len(out), len(data), zlib.crc32(data))
    records.append(record)
    sizes = (record.crc, record.nbytes, record.nbytes, len(record.name), 0)
    out += LOCAL.pack(b"PK\3\4", _VERSION, _UTF8, 0, 0, _DATE, *sizes) + record.name + data


def _central(record: _Record) -> bytes:
    """The record's entry in the directory, with all sizes in the Zip64 field."""
    flags = _UTF8 | (_DESCRIPTOR_FOLLOWS if record.name == _MEMORY else 0)
    extra = struct.pack("<2H3Q", 1, 24, record.nbytes, record.nbytes, record.offset)
    sizes = (record.crc, IN_EXTRA, IN_EXTRA, len(record.name), len(extra), 0, 0, 0, 0, IN_EXTRA)
    return CENTRAL.pack(b"PK\1\2", _VERSION, _VERSION, flags, 0, 0, _DATE, *sizes) + record.name + extra


def _pickle(dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> bytes:
    """What torch.save puts into data.pkl for a tensor on the CPU, with integers of 8 bytes, and nothing memoised."""
    storage = LEGACY_STORAGES.get(dtype)
    numel = prod(sizes)
    stored = (b"ctorch\n%b\n" % storage.encode(), numel) if storage else (_UNTYPED, numel * dtype.itemsize)
    return b"".join(
        (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v%d\n" % (2 if storage else 3),
            b"((" + _text("storage") + stored[0] + _text("0") + _text("cpu") + _integers([stored[1]]) + b"tQ",
            _integers([0]),
            b"(" + _integers(sizes) + b"t(" + _integers(strides) + b"t",
            b"\x89ccollections\nOrderedDict\n)R",  # requires_grad, hooks
            b"" if storage else b"ctorch\n%b\n" % str(dtype).removeprefix("torch.").encode(),
            b"tR.",
        )
    )


_UNTYPED = b"ctorch.storage\nUntypedStorage\n"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _integers(values: Iterable[int]) -> bytes:
    return b"".join(b"\x8a\x08" + struct.pack("<q", value) for value in values)

"""Writes the `.metadata` of a checkpoint: a pickle of torch's `Metadata` that torch's DCP reads, made without its classes.

The pickle is written in one pass, a tensor at a time, whatever the number of ranks. What it builds:

    Metadata   state_dict_metadata   {name: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
               planner_data          {name: path of keys in the user's state}
               storage_data          {MetadataIndex(name, offsets): _StorageInfo(file, offset, length)}
               shardrt_index         bytes that torch ignores: where in this file each tensor's chunks are
               storage_meta          StorageMeta, whose `save_id` says that we wrote it, and has the id of the save

Chunks are rows of equal length (`rows.py`): one that builds a `ChunkStorageMetadata`, and one for its entry in `storage_data`.
With the index, a reader takes the rows of a tensor without unpickling anything; each set of rows has a CRC-32.

The last of these, `storage_meta`, is the `ending`: nothing else differs in another save of the same tensors.

Cost: for 100,000 ranks and 1,000 tensors, which have 10 million chunks, 1.3 GB in less than a minute; memory for one tensor.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, BinaryIO

import torch

from ..stored import Columns
from .rows import Template

SAVED_BY = "shardrt-"  # begins our `save_id`; the id of the save follows, or "1" in older versions
INDEX_KEY = "shardrt_index"
TRAILER = struct.Struct("<QI8s")  # ends the index: its number of bytes, their CRC-32, and MAGIC
MAGIC = b"shardrt1"
LAST_OPCODES = b"ub."  # the pickle's last bytes; in older versions, all that follows the index

FIRST_PLACE = 256  # memo places from here on are those of the files, then of the names; constants are below
Path = Sequence[str | int]  # the keys that lead to a value in the user's state
_CLASSES = "torch.distributed.checkpoint.metadata"

# The parts of a template for an integer: its opcode, and its bytes.
_INTEGER, _WIDE_INTEGER, _MEMO_PLACE = (b"J", 4), (b"\x8a\x08", 8), (b"j", 4)


def chunk_template(shape: Sequence[int]) -> Template:
    """The rows of `chunks` of a tensor: its integers are those of `offsets`, then those of `sizes`."""
    return _templates(len(shape), _is_wide(shape))[0]


def storage_template(shape: Sequence[int]) -> Template:
    """The rows of `storage_data` of a tensor: its integers are the memo place of the name, `offsets`, the memo place
    of the file, start and length.
    """
    return _templates(len(shape), _is_wide(shape))[1]


@cache
def _templates(dims: int, is_wide: bool) -> tuple[Template, Template]:
    before, after = _tuple_opcodes(dims)
    integer = _WIDE_INTEGER if is_wide else _INTEGER
    box = (_get(_TORCH_SIZE), before, *integer * dims, after, b"\x85R")
    chunk = (_get(_CHUNK), b")\x81}(", _get(_OFFSETS), *box, _get(_SIZES), *box, b"ub")
    index = (_get(_INDEX), b")\x81}(", _get(_FQN), *_MEMO_PLACE, _get(_OFFSET), *box, b"ub")
    file = (_get(_INFO), b")\x81}(", _get(_RELATIVE_PATH), *_MEMO_PLACE)
    place = (_get(_OFFSET), *_WIDE_INTEGER, _get(_LENGTH), *_WIDE_INTEGER, b"ub")
    return Template(chunk), Template((*index, *file, *place))


class MetadataWriter:
    """Writes a `.metadata` into `out`, opened for writing in binary: `add_tensor` or `add_object` for each name, then `finish`.
    The caller writes the `ending`.

    files: the names of the checkpoint's files; columns refer to them by number.
    """

    def __init__(self, out: BinaryIO, files: Sequence[str]) -> None:
        self._out, self._files = out, tuple(files)
        self._place = 0  # bytes written
        # A tensor's entry: name, path, dtype's name, shape, number of chunks, position and CRC-32 of its rows in `chunks`, and
        # of those in `storage_data`. An object's: name, path, None, number of its file, start, length.
        self._index = list[tuple[Any, ...]]()
        self._properties = dict[torch.dtype, int]()  # memo places
        self._write(b"\x80\x04" + b"".join(value + _put(place) + b"0" for place, value in enumerate(_CONSTANTS)))
        for place, file in enumerate(self._files, FIRST_PLACE):
            self._write(_text(file) + _put(place) + b"0")

    def add_tensor(self, name: str, path: Path, dtype: torch.dtype, shape: Sequence[int], columns: Columns) -> None:
        """Add a tensor.   shape: the global one.   columns: its chunks, which may be none."""
        self._properties_of(dtype)
        memo = self._add_name(name, path)
        self._write(_get(_METADATA) + _long_get(memo) + _get(_TENSOR) + b")\x81}(")
        self._write(_get(_PROPERTIES) + _get(self._properties[dtype]) + _get(_SIZE) + _sizes(shape) + _get(_CHUNKS) + b"](")
        count = len(columns.file)
        chunks = chunk_template(shape).rows(count, [*columns.offsets.unbind(1), *columns.sizes.unbind(1)])
        chunks_at = self._write(chunks)
        self._write(b"eubs0" + _get(_STORAGE) + b"(")
        names = torch.full_like(columns.file, memo)
        values = [names, *columns.offsets.unbind(1), columns.file + FIRST_PLACE, columns.start, columns.length]
        infos = storage_template(shape).rows(count, values)
        infos_at = self._write(infos)
        self._write(b"u0")
        place = (chunks_at, zlib.crc32(chunks), infos_at, zlib.crc32(infos))
        self._index.append((name, tuple(path), _name_of(dtype), tuple(map(int, shape)), count, *place))

    def add_object(self, name: str, path: Path, file: int, start: int, length: int) -> None:
        """Add an object.   file, start, length: the number of its file, and its bytes there."""
        memo = self._add_name(name, path)
        self._write(_get(_METADATA) + _long_get(memo) + _get(_BYTES) + b")\x81s0" + _get(_STORAGE))
        self._write(_get(_INDEX) + b")\x81}" + _get(_FQN) + _long_get(memo) + b"sb")
        info = b"j" + struct.pack("<I", file + FIRST_PLACE) + _get(_OFFSET) + _number(start) + _get(_LENGTH) + _number(length)
        self._write(_get(_INFO) + b")\x81}(" + _get(_RELATIVE_PATH) + info + b"ubs0")
        self._index.append((name, tuple(path), None, file, start, length))

    def finish(self) -> None:
        """Write the parts that refer to all names, and the index."""
        self._write(_global(_CLASSES, "Metadata") + b")\x81}(")
        self._write(_text("state_dict_metadata") + _get(_METADATA) + _text("planner_data") + _get(_PLANNER))
        self._write(_text("storage_data") + _get(_STORAGE))
        self._write(_text("version") + _text("1.0.0") + _text(INDEX_KEY))
        index = pickle.dumps((self._files, self._index), protocol=4)
        index += TRAILER.pack(len(index), zlib.crc32(index), MAGIC)
        self._write(b"\x8e" + struct.pack("<Q", len(index)) + index)

    def _add_name(self, name: str, path: Path) -> int:
        """Memoise the name, and write its path; returns the memo place."""
        place = FIRST_PLACE + len(self._files) + len(self._index)
        pieces = b"".join(_text(key) if isinstance(key, str) else _number(int(key)) for key in path)
        self._write(_get(_PLANNER) + _text(name) + _put(place) + b"(" + pieces + b"ts0")
        return place

    def _properties_of(self, dtype: torch.dtype) -> None:
        """Memoise a `TensorProperties`: (dtype, layout, requires_grad, memory_format, pin_memory)."""
        if dtype not in self._properties:
            place = self._properties[dtype] = len(_CONSTANTS) + len(self._properties)
            self._write(_global(_CLASSES, "TensorProperties") + b")\x81(" + _global("torch", _name_of(dtype)))
            self._write(_get(_LAYOUT) + b"\x89" + _get(_MEMORY_FORMAT) + b"\x89tb" + _put(place) + b"0")

    def _write(self, data: bytes | bytearray) -> int:
        """Append the data; returns where they begin in the file."""
        start = self._place
        self._out.write(data)
        self._place += len(data)
        return start


def ending(save_id: str) -> bytes:
    """The end of a `.metadata`, after the index.   save_id: 32 hexadecimal digits."""
    return _BEFORE_ID + save_id.encode() + _AFTER_ID


def save_id_of(data: bytes) -> str | None:
    """The id of the save in the last ENDING_NBYTES bytes of a `.metadata`; None if they are not an `ending`."""
    save_id = data[len(_BEFORE_ID) : -len(_AFTER_ID)].decode("ascii", "replace")
    return save_id if data == ending(save_id) else None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------- opcodes


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def _get(place: int) -> bytes:
    return b"h" + bytes([place])


def _long_get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def _tuple_opcodes(dims: int) -> tuple[bytes, bytes]:
    """The opcodes before and after the elements of a tuple."""
    return (b"", b")\x85\x86\x87"[dims : dims + 1]) if dims < 4 else (b"(", b"t")


def _is_wide(shape: Sequence[int]) -> bool:
    return max(shape, default=0) >= 1 << 31


def _sizes(shape: Sequence[int]) -> bytes:
    before, after = _tuple_opcodes(len(shape))
    return _get(_TORCH_SIZE) + before + b"".join(_number(int(size)) for size in shape) + after + b"\x85R"


_CONSTANTS = (
    _global(_CLASSES, "ChunkStorageMetadata"),
    _text("offsets"),
    _text("sizes"),
    _global("torch", "Size"),
    _global(_CLASSES, "MetadataIndex"),
    _text("fqn"),
    _text("offset"),
    _global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    _text("relative_path"),
    _text("length"),
    _global(_CLASSES, "TensorStorageMetadata"),
    _text("properties"),
    _text("size"),
    _text("chunks"),
    _global(_CLASSES, "BytesStorageMetadata"),
    _global("torch.serialization", "_get_layout") + _text("torch.strided") + b"\x85R",
    _global(_CLASSES, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R",
    _global(_CLASSES, "StorageMeta"),
    b"}",
    b"}",
    b"}",
)
# Where the constants are in the memo; the last three are the dicts of `Metadata`.
(_CHUNK, _OFFSETS, _SIZES, _TORCH_SIZE, _INDEX, _FQN, _OFFSET, _INFO, _RELATIVE_PATH, _LENGTH, _TENSOR, _PROPERTIES) = range(12)
(_SIZE, _CHUNKS, _BYTES, _LAYOUT, _MEMORY_FORMAT, _STORAGE_META, _METADATA, _STORAGE, _PLANNER) = range(12, 21)

_BEFORE_ID = _text("storage_meta") + _get(_STORAGE_META) + b")\x81}(" + _text("checkpoint_id") + b"N" + _text("save_id")
_BEFORE_ID += _text(SAVED_BY + 32 * "0")[:-32]
_AFTER_ID = _text("load_id") + b"N" + _text("modules") + b"]" + b"ub" + LAST_OPCODES
ENDING_NBYTES = len(ending(32 * "0"))

"""The safetensors format: what a header says, how it is checked, and which tensor goes into which file of a model.

    8 bytes      length of the header, little-endian
    header       JSON: {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    data         the tensors, contiguous in row-major order, one after the other without holes; offsets count from here

A folder has `model.safetensors`, or files `model-00001-of-00003.safetensors` and `model.safetensors.index.json`, which says in
which file each tensor is. Format: https://github.com/huggingface/safetensors; files and index: huggingface_hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..disk.errors import CheckpointError, DamagedCheckpointError, reason, shown
from ..disk.files import Reader
from .stored import Columns, Format, ReadBytes, Stored, StoredItem, StoredTensor

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_NBYTES = 100_000_000
_MOST_DIMS, _MOST_CHARACTERS = 64, 4096  # of a shape; of a name

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Array(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class TensorInfo(NamedTuple):
    """What is known of a tensor without its values."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


# ---------------------------------------------------------------------- writing


def encode_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, and where each tensor begins in the file.

    The tensors lie in the order of the reference implementation: large items first, so that every tensor is aligned to its item
    size, and by name. Data begins at a multiple of 8 bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        dtype, shape = tensors[name]
        offsets[name] = end
        end += tensors[name].nbytes
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"a safetensors header of {len(text):,} bytes for {len(tensors):,} tensors: expected at most "
            f"{MAX_HEADER_NBYTES:,}; choose a smaller max_shard_size"
        )
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + offset for name, offset in offsets.items()}


def split_into_files(tensors: Mapping[str, TensorInfo], max_nbytes: int) -> dict[str, list[str]]:
    """File names and the tensors in each, in order. A tensor above `max_nbytes` has its own file, as in huggingface_hub."""
    files: list[list[str]] = []
    filling: list[str] = []
    filled = 0
    for name, info in tensors.items():
        if info.nbytes > max_nbytes:
            files.append([name])
            continue
        if filled + info.nbytes > max_nbytes:
            files.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += info.nbytes
    if filling or not files:
        files.append(filling)
    if len(files) == 1:
        return {SINGLE_NAME: files[0]}
    return {f"model-{index + 1:05d}-of-{len(files):05d}.safetensors": names for index, names in enumerate(files)}


class FileLayout(NamedTuple):
    """What goes where in the files of a folder, or in one file.

    names: the tensors of each file.   headers: the bytes that each file begins with.   arrays: where each tensor lies.
    """

    names: dict[str, list[str]]
    headers: dict[str, bytes]
    arrays: dict[str, Array]

    def nbytes(self, file: str) -> int:
        """The bytes of a file."""
        return len(self.headers[file]) + sum(self.arrays[name].nbytes for name in self.names[file])

    def in_order(self) -> list[tuple[str, Array]]:
        """The tensors as they lie, file by file."""
        return sorted(self.arrays.items(), key=lambda item: (item[1].file, item[1].offset))

    def index_file(self) -> bytes | None:
        """The bytes of `model.safetensors.index.json`; None for a single file, which has no index."""
        if len(self.names) == 1:
            return None
        arrays = self.arrays.values()
        nbytes, numel = sum(array.nbytes for array in arrays), sum(array.shape.numel() for array in arrays)
        weight_map = {name: file for file, names in self.names.items() for name in names}
        index = {"metadata": {"total_parameters": numel, "total_size": nbytes}, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def lay_out(
    infos: Mapping[str, TensorInfo], names: dict[str, list[str]], metadata: Mapping[str, str], folder: Path
) -> FileLayout:
    """Place tensors in the files that have these names. Raises ValueError for a header that is too long."""
    made = FileLayout(names, {}, {})
    for file, own in names.items():
        made.headers[file], offsets = encode_header({name: infos[name] for name in own}, metadata)
        made.arrays.update({name: Array(folder / file, *infos[name], offsets[name]) for name in own})
    return made


# ---------------------------------------------------------------------- reading


def read_stored(path: Path) -> Stored:
    """The contents of a file, or of a folder with a `model.safetensors` or an index. Raises as `read_arrays` does."""
    arrays = read_arrays(path)
    files = tuple(dict.fromkeys(array.file.name for array in arrays.values()))
    numbers = {file: number for number, file in enumerate(files)}
    tensors = {
        name: StoredTensor(tuple(array.shape), array.dtype, _chunk(array, numbers), files) for name, array in arrays.items()
    }
    return Stored(path if path.is_dir() else path.parent, tensors, {}, {name: (name,) for name in arrays}, None, SAFETENSORS)


def _chunk(array: Array, numbers: Mapping[str, int]) -> Columns:
    """A tensor as one chunk."""
    sizes = torch.tensor([array.shape], dtype=torch.int64)
    places = torch.tensor([[numbers[array.file.name]], [array.offset], [array.nbytes]])
    return Columns(torch.zeros_like(sizes), sizes, *places.unbind(0))


def _find_item(read: ReadBytes, dtype: torch.dtype, sizes: tuple[int, ...], length: int, where: str) -> StoredItem:
    strides = torch.empty(sizes, device="meta").stride()
    return StoredItem(dtype, sizes, strides, 0, 0, length, None, None)


SAFETENSORS = Format("safetensors", lambda reader, save_id: None, _find_item, has_checksums=False)


def read_arrays(path: Path) -> dict[str, Array]:
    """The tensors of a file, or of a folder with a `model.safetensors` or an index.

    Raises CheckpointError for a folder that has neither, and for what the format does not allow; the message names the file.
    """
    if not path.is_dir():
        return read_file(path)
    if (path / SINGLE_NAME).is_file():
        return read_file(path / SINGLE_NAME)
    if not (path / INDEX_NAME).is_file():
        raise CheckpointError(f"'{path}' has no {SINGLE_NAME} and no {INDEX_NAME}: pass the file, or a folder with one of them")
    return _read_indexed(path)


def read_file(file: Path) -> dict[str, Array]:
    """The tensors of one file, by its header. Raises CheckpointError as `read_arrays` does."""
    with Reader(file) as reader:
        file_nbytes = reader.size()
        length = int.from_bytes(reader.read(0, 8), "little") if file_nbytes >= 8 else 0
        if file_nbytes < 8 or length > min(MAX_HEADER_NBYTES, file_nbytes - 8):
            raise _bad(file, f"a header of {length:,} bytes in a file of {file_nbytes:,}, at most {MAX_HEADER_NBYTES:,}")
        text = reader.read(8, length)
    header = _parse_json(file, text)
    check_metadata(header.pop("__metadata__", {}), f"'{file}'")
    arrays = {name: _array(file, name, entry, 8 + length) for name, entry in header.items()}
    _check_coverage(file, arrays, 8 + length, file_nbytes)
    return arrays


def check_metadata(metadata: Any, where: str) -> None:
    """Raise CheckpointError unless it is a dict from strings to strings."""
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for pair in metadata.items() for text in pair):
        raise CheckpointError(f"{where}: metadata {shown(metadata)}: expected a dict from strings to strings")


def _bad(file: Path, found: str) -> CheckpointError:
    return DamagedCheckpointError(f"'{file}' is no safetensors file: {found}; it was cut off or changed: get it again")


def _parse_json(file: Path, text: bytes | bytearray) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in pairs:
            if name in made:
                raise _bad(file, f"the key {shown(name)} comes twice")
            made[name] = value
        return made

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _bad(file, f"what should be JSON is not ({reason(error)})") from error
    if not isinstance(parsed, dict) or not text.startswith(b"{"):
        raise _bad(file, "the JSON is no object")
    return parsed


def _array(file: Path, name: str, entry: Any, begin: int) -> Array:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"} or len(name) > _MOST_CHARACTERS:
        raise _bad(file, f"the entry of {shown(name)} is {shown(entry)}, not dtype, shape and data_offsets")
    shape, offsets = (_counts(file, name, entry[key]) for key in ("shape", "data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(file, f"{shown(name)} has the data_offsets {shown(offsets)}")
    if (dtype := DTYPES.get(entry["dtype"] if isinstance(entry["dtype"], str) else "")) is None:
        known = ", ".join(DTYPES)
        raise CheckpointError(f"'{file}': tensor {shown(name)} has the dtype {shown(entry['dtype'])}; known are {known}")
    expected, found = prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != found or prod(filter(None, shape)) * dtype.itemsize >= 1 << 63:
        raise _bad(file, f"{shown(name)} of shape {shown(tuple(shape))} and {dtype} has {found} bytes, not {shown(expected)}")
    return Array(file, dtype, torch.Size(shape), begin + offsets[0])


def _counts(file: Path, name: str, values: Any) -> list[int]:
    if (
        not isinstance(values, list)
        or len(values) > _MOST_DIMS
        or not all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    ):
        raise _bad(file, f"{shown(name)} has {shown(values)} where at most {_MOST_DIMS} integers >= 0 are expected")
    return values


def _check_coverage(file: Path, arrays: Mapping[str, Array], begin: int, end: int) -> None:
    for name, array in sorted(arrays.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if array.offset != begin:
            what = "a hole before" if array.offset > begin else "an overlap with"
            raise _bad(file, f"there is {what} {shown(name)}, whose data begin at byte {array.offset} instead of {begin}")
        begin += array.nbytes
    if begin != end:
        raise _bad(file, f"its tensors end at byte {begin:,}, the file at {end:,}")


def _read_indexed(folder: Path) -> dict[str, Array]:
    index = folder / INDEX_NAME
    with Reader(index) as reader:
        if (nbytes := reader.size()) > MAX_HEADER_NBYTES:
            raise _bad(index, f"an index of {nbytes:,} bytes, at most {MAX_HEADER_NBYTES:,}")
        parsed = _parse_json(index, reader.read(0, nbytes))
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"'{index}': expected a 'weight_map' from names of tensors to names of files")
    found = dict[str, Array]()
    for file in dict.fromkeys(weight_map.values()):
        # Hazard: the index is data from elsewhere; a path in it must not lead out of the folder.
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"'{index}': {shown(file)} is no file of the folder")
        found |= {name: array for name, array in read_file(folder / file).items() if weight_map.get(name) == file}
    if lacking := sorted(weight_map.keys() - found.keys()):
        raise CheckpointError(
            f"'{index}' says that {shown(lacking[0])} is in {shown(weight_map[lacking[0]])}, but it is not "
            f"({len(lacking)} such tensors)"
        )
    return found

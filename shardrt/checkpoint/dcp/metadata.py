"""What a checkpoint folder holds: reads the `.metadata` that `metadata_pickle.py` or torch's DCP wrote.

Ours is read by its index: nothing is unpickled but lists of names, and of a tensor's chunks only what is asked for. Others are
unpickled with a fixed list of globals (`pickles.py`), in whose places stand the classes below; no path is built from it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ...tensor.placement import Box
from ..errors import CheckpointError
from .metadata_pickle import FIRST_PLACE, LAST_OPCODES, MAGIC, SAVE_ID, TRAILER, Columns, chunk_template, storage_template
from .pickles import DTYPES, Ignored, Sealed, restricted_load

T = TypeVar("T")

METADATA = ".metadata"
SMALL = 1 << 24  # bytes of a file that is read at once


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
    save_id: who wrote it: "shardrt-1", or what torch's DCP has there.
    """

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: dict[str, tuple[str | int, ...]]
    save_id: str | None


def read_stored(folder: str | os.PathLike[str]) -> Stored:
    """Read the `.metadata` in `folder`.

    Raises CheckpointError if there is none, it is damaged, or its pickle refers to globals that no checkpoint needs; a tensor's
    own damage is raised when it is asked for.
    """
    path = Path(folder) / METADATA
    try:
        source = _Source(path)
        with _damage(path):
            index = source.index()
            if index is not None:
                return _by_index(source, *index)
            return _by_pickle(path, restricted_load(source.span(0, source.nbytes), _find, str(path)))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}; a folder is a checkpoint once its save has ended and '{METADATA}' is in it"
        ) from error


@contextmanager
def _damage(path: Path, what: str = "") -> Iterator[None]:
    """Report errors on values of unexpected types as damage of the file."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path}:{what} not the metadata of a checkpoint ({type(error).__name__}: {error})") from error


class _Source:
    """The bytes of a `.metadata`: read at once if it is small, else in parts."""

    def __init__(self, path: Path) -> None:
        self.path, self.nbytes = path, os.stat(path).st_size
        self._contents = path.read_bytes() if self.nbytes <= SMALL else None

    def span(self, start: int, nbytes: int) -> bytes:
        """These bytes. Raises CheckpointError if the file has fewer."""
        if self._contents is not None:
            found = self._contents[start : start + nbytes]
        else:
            with open(self.path, "rb") as file:
                file.seek(start)
                found = file.read(nbytes)
        if len(found) != nbytes:
            raise CheckpointError(f"{self.path}: expected {nbytes} bytes at {start}, found {len(found)}; the file is cut off")
        return found

    def checked(self, start: int, nbytes: int, crc: int, what: str) -> bytes:
        """These bytes. Raises CheckpointError if they have another CRC-32."""
        found = self.span(start, nbytes)
        if zlib.crc32(found) != crc:
            raise CheckpointError(
                f"{self.path}: {what}: expected CRC-32 {crc:08x}, found {zlib.crc32(found):08x}; it is damaged"
            )
        return found

    def index(self) -> tuple[Any, Any] | None:
        """What `MetadataWriter` wrote as the index; None if there is none."""
        end = self.nbytes - len(LAST_OPCODES) - TRAILER.size
        if end < 0:
            return None
        nbytes, crc, magic = TRAILER.unpack(self.span(end, TRAILER.size))
        if magic != MAGIC or nbytes > end:
            return None
        where = f"{self.path}: index"
        return restricted_load(self.checked(end - nbytes, nbytes, crc, "index"), _no_globals, where)


def _by_index(source: _Source, files: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Stored:
    tensors = dict[str, Callable[[], StoredTensor]]()
    objects, paths = dict[str, StoredObject](), dict[str, tuple[str | int, ...]]()
    for file in files:
        _check_file_name(source.path, file)
    for place, (name, path, kind, *rest) in enumerate(rows, FIRST_PLACE + len(files)):
        paths[name] = path
        if kind is None:
            file, start, length = rest
            objects[name] = _checked_object(source.path, name, StoredObject(files[file], start, length))
        else:
            tensors[name] = _IndexedTensor(source, files, place, name, DTYPES[kind], *rest)
    return Stored(Lazy(tensors), objects, paths, SAVE_ID)


@dataclass(frozen=True, slots=True)
class _IndexedTensor:
    """A tensor's row of the index."""

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
        source, dims, what = self.source, len(self.shape), f"chunks of tensor '{self.name}'"
        chunks, infos = chunk_template(self.shape), storage_template(self.shape)
        boxes = chunks.values(source.checked(self.chunks_at, self.count * chunks.nbytes, self.chunks_crc, what))
        rows = infos.values(source.checked(self.infos_at, self.count * infos.nbytes, self.infos_crc, what))
        if boxes is None or rows is None or not bool((rows[0] == self.place).all()):
            raise CheckpointError(f"{source.path}: {what}: not where the index has them; the file is damaged")
        empty = torch.empty(self.count, 0, dtype=torch.int64)
        offsets, sizes = (torch.stack(each, 1) if each else empty for each in (boxes[:dims], boxes[dims:]))
        columns = Columns(offsets, sizes, rows[-3] - FIRST_PLACE, rows[-2], rows[-1])
        return _checked(source.path, self.name, StoredTensor(self.shape, self.dtype, columns, self.files))


def _checked(path: Path, name: str, tensor: StoredTensor) -> StoredTensor:
    if prod(tensor.shape) * tensor.dtype.itemsize >= 1 << 63:
        raise CheckpointError(f"{path}: tensor '{name}' of shape {tensor.shape} is larger than any memory; damaged")
    columns = tensor.columns
    if not len(columns.file):
        return tensor
    # Cost: of few operations, and of none that wraps around where those before it are not negative.
    after = torch.tensor(tensor.shape).long() - columns.offsets
    boxes = (columns.offsets, columns.sizes, after, after - columns.sizes)
    lowest = torch.cat([columns.file, columns.start, columns.length, *(each.flatten() for each in boxes)]).min()
    if lowest < 0 or columns.file.max() >= len(tensor.files):
        raise CheckpointError(f"{path}: tensor '{name}' of shape {tensor.shape} has chunks that lie outside of it; damaged")
    return tensor


def _checked_object(path: Path, name: str, found: StoredObject) -> StoredObject:
    if any(type(number) is not int or number < 0 for number in (found.offset, found.length)):
        raise CheckpointError(f"{path}: object '{name}' has {found.length!r} bytes at {found.offset!r}; damaged")
    return found


def _check_file_name(path: Path, name: object) -> None:
    if not isinstance(name, str) or not name or os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise CheckpointError(f"{path}: refers to the file {name!r}; expected one in the checkpoint's folder")


# ---------------------------------------------------------------------- pickles of torch's DCP


class _Metadata(metaclass=Sealed):
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: dict[_Index, _Info]
    storage_meta: _StorageMeta | None = None


class _Tensor(metaclass=Sealed):
    properties: _Properties
    size: tuple[int, ...]
    chunks: list[_Chunk]


class _Properties(metaclass=Sealed):
    dtype: torch.dtype

    def __setstate__(self, state: tuple[Any, ...] | dict[str, Any]) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


class _Chunk(metaclass=Sealed):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Object(metaclass=Sealed):
    """In the place of `BytesStorageMetadata`."""


class _Index(metaclass=Sealed):
    fqn: str
    offset: tuple[int, ...] | None = None


class _Info(metaclass=Sealed):
    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None = None


class _StorageMeta(metaclass=Sealed):
    save_id: str | None = None


_CLASSES = "torch.distributed.checkpoint.metadata"
_GLOBALS: dict[tuple[str, str], object] = {
    (_CLASSES, "Metadata"): _Metadata,
    (_CLASSES, "TensorStorageMetadata"): _Tensor,
    (_CLASSES, "TensorProperties"): _Properties,
    (_CLASSES, "ChunkStorageMetadata"): _Chunk,
    (_CLASSES, "BytesStorageMetadata"): _Object,
    (_CLASSES, "MetadataIndex"): _Index,
    (_CLASSES, "StorageMeta"): _StorageMeta,
    (_CLASSES, "_MEM_FORMAT_ENCODING"): Ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.serialization", "_get_layout"): Ignored,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{(module, name): Ignored for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


def _find(module: str, name: str) -> object:
    """What stands for a global of a checkpoint's metadata."""
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    return _GLOBALS[module, name]


def _no_globals(module: str, name: str) -> object:
    raise KeyError(module, name)


def _by_pickle(path: Path, metadata: object) -> Stored:
    if not isinstance(metadata, _Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise CheckpointError(f"{path}: expected the metadata of a checkpoint, found {type(metadata).__name__.lstrip('_')}")
    infos: dict[str, dict[Any, _Info]] = {}
    for index, info in (getattr(metadata, "storage_data", None) or {}).items():
        infos.setdefault(index.fqn, {})[index.offset] = info
    tensors = dict[str, Callable[[], StoredTensor]]()
    objects = dict[str, Callable[[], StoredObject]]()
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, _Tensor):
            tensors[name] = _PickledTensor(path, name, value, infos.get(name, {}))
        else:
            objects[name] = _PickledObject(path, name, infos.get(name, {}))
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths = {name: keys for name, keys in planned.items() if isinstance(name, str) and isinstance(keys, tuple)}
    meta = metadata.storage_meta
    return Stored(Lazy(tensors), Lazy(objects), paths, meta.save_id if isinstance(meta, _StorageMeta) else None)


@dataclass(frozen=True, slots=True)
class _PickledTensor:
    """A tensor of a metadata that was unpickled."""

    path: Path
    name: str
    found: _Tensor
    infos: dict[Any, _Info]

    def __call__(self) -> StoredTensor:
        with _damage(self.path, f" tensor '{self.name}':"):
            shape, chunks = tuple(self.found.size), self.found.chunks
            infos = [_info(self.path, self.name, self.infos, tuple(chunk.offsets)) for chunk in chunks]
            files = tuple(dict.fromkeys(info.relative_path for info in infos))
            numbers = {file: number for number, file in enumerate(files)}
            rows = [(*chunk.offsets, *chunk.sizes) for chunk in chunks]
            boxes = torch.tensor(rows, dtype=torch.int64).view(len(chunks), 2, len(shape))
            places = torch.tensor([(numbers[i.relative_path], i.offset, i.length) for i in infos], dtype=torch.int64)
            columns = Columns(boxes[:, 0], boxes[:, 1], *places.view(-1, 3).unbind(1))
            return _checked(self.path, self.name, StoredTensor(shape, self.found.properties.dtype, columns, files))


@dataclass(frozen=True, slots=True)
class _PickledObject:
    """An object of a metadata that was unpickled."""

    path: Path
    name: str
    infos: dict[Any, _Info]

    def __call__(self) -> StoredObject:
        with _damage(self.path, f" object '{self.name}':"):
            info = _info(self.path, self.name, self.infos, None)
            found = StoredObject(info.relative_path, info.offset, info.length)
            return _checked_object(self.path, self.name, found)


def _info(path: Path, name: str, infos: dict[Any, _Info], offset: tuple[int, ...] | None) -> _Info:
    info = infos.get(offset)
    if info is None:
        raise CheckpointError(f"{path}: '{name}' has no place for what begins at {offset}; the file is damaged")
    if info.transform_descriptors:
        raise CheckpointError(f"{path}: '{name}' was written through {info.transform_descriptors}; save without extensions")
    _check_file_name(path, info.relative_path)
    return info

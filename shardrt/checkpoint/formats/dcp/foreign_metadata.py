"""Reads the `.metadata` that torch's DCP wrote, or a version of shardrt that wrote no index.

It is unpickled with a fixed list of globals (`pickles.py`), for which the classes below stand in; no `pathlib` path is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...disk.errors import CheckpointError, DamagedCheckpointError, shown
from ...disk.remote_path import Location
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
from ..torch_file.pickles import GLOBAL_DTYPES, Global, Ignored, PickledRecord, StandIn, integers, new_dict, restricted_load
from .format import DCP


class _Metadata(PickledRecord):
    state_dict_metadata: dict[str, Any]
    planner_data: Any = None
    storage_data: dict[_Index, _Info]
    storage_meta: _StorageMeta | None = None


class _TensorMetadata(PickledRecord):
    properties: _Properties
    size: tuple[int, ...]
    chunks: list[_Chunk]


class _Properties(StandIn):
    dtype: torch.dtype

    def __setstate__(self, state: tuple[Any, ...] | dict[str, Any]) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


class _Chunk(PickledRecord):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Object(PickledRecord):
    """Stands in for `BytesStorageMetadata`."""


class _Index(PickledRecord):
    fqn: str
    offset: tuple[int, ...] | None = None


class _Info(PickledRecord):
    relative_path: str
    offset: int
    length: int
    transform_descriptors: list[str] | None = None


class _StorageMeta(PickledRecord):
    save_id: str | None = None


_CLASSES = "torch.distributed.checkpoint.metadata"
_GLOBALS: dict[Global, object] = {  # what stands in for each
    **GLOBAL_DTYPES,
    (_CLASSES, "Metadata"): _Metadata,
    (_CLASSES, "TensorStorageMetadata"): _TensorMetadata,
    (_CLASSES, "TensorProperties"): _Properties,
    (_CLASSES, "ChunkStorageMetadata"): _Chunk,
    (_CLASSES, "BytesStorageMetadata"): _Object,
    (_CLASSES, "MetadataIndex"): _Index,
    (_CLASSES, "StorageMeta"): _StorageMeta,
    (_CLASSES, "_MEM_FORMAT_ENCODING"): Ignored,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Info,
    ("torch.serialization", "_get_layout"): Ignored,
    ("torch", "Size"): integers,
    ("collections", "OrderedDict"): new_dict,
    **{(module, name): Ignored for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


def stored_in(data: bytes, path: Location) -> Stored:
    """The contents of a checkpoint, by the bytes of its `.metadata`.   path: of that file; the other files lie beside it.

    Raises CheckpointError if it cannot be read, or refers to globals that no checkpoint needs.
    """
    metadata = restricted_load(data, _GLOBALS.__getitem__, str(path))
    if not isinstance(metadata, _Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise DamagedCheckpointError(
            f"{path}: expected the metadata of a checkpoint, found {type(metadata).__name__.lstrip('_')}"
        )
    infos: dict[str, dict[Any, _Info]] = {}  # by name, and by the offsets of a chunk
    for index, info in (getattr(metadata, "storage_data", None) or {}).items():
        offset = None if index.offset is None else integers(index.offset)
        infos.setdefault(checked_name(index.fqn), {})[offset] = info
    tensors = dict[str, Callable[[], StoredTensor]]()
    objects = dict[str, Callable[[], StoredObject]]()
    for name, value in metadata.state_dict_metadata.items():
        places = infos.get(checked_name(name), {})
        if isinstance(value, _TensorMetadata):
            tensors[name] = partial(_stored_tensor, path, name, value, places)
        else:
            objects[name] = partial(_stored_object, path, name, places)
    planned = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths = {
        checked_name(name): checked_keys(keys)
        for name, keys in planned.items()
        if isinstance(name, str) and isinstance(keys, tuple)  # planners of other authors may keep anything else there
    }
    save_id = metadata.storage_meta.save_id if isinstance(metadata.storage_meta, _StorageMeta) else None
    return Stored(path.parent, Lazy(tensors), Lazy(objects), paths, None if save_id is None else checked_name(save_id), DCP)


def _stored_tensor(path: Location, name: str, found: _TensorMetadata, places: dict[Any, _Info]) -> StoredTensor:
    with damage_of(path, f" tensor {shown(name)}:"):
        shape, chunks = integers(found.size), found.chunks
        if len(chunks) > len(places):  # the same chunk comes several times
            raise ValueError(f"{len(chunks)} chunks at {len(places)} places")
        rows = [integers((*integers(chunk.offsets), *integers(chunk.sizes))) for chunk in chunks]
        infos = [_info(path, name, places, chunk.offsets) for chunk in chunks]
        files = tuple(dict.fromkeys(info.relative_path for info in infos))
        numbers = {file: number for number, file in enumerate(files)}
        boxes = torch.tensor(rows, dtype=torch.int64).view(len(chunks), 2, len(shape))
        in_files = torch.tensor([integers((numbers[i.relative_path], i.offset, i.length)) for i in infos], dtype=torch.int64)
        columns = Columns(boxes[:, 0], boxes[:, 1], *in_files.view(-1, 3).unbind(1))
        return checked_tensor(path, name, StoredTensor(shape, found.properties.dtype, columns, files))


def _stored_object(path: Location, name: str, places: dict[Any, _Info]) -> StoredObject:
    with damage_of(path, f" object {shown(name)}:"):
        info = _info(path, name, places, None)
        return checked_object(path, name, StoredObject(info.relative_path, info.offset, info.length))


def _info(path: Location, name: str, places: dict[Any, _Info], offset: tuple[int, ...] | None) -> _Info:
    info = places.get(offset)
    if info is None:
        raise DamagedCheckpointError(f"{path}: {shown(name)} has no place for what begins at {offset}; the file is damaged")
    if info.transform_descriptors:
        through = shown(info.transform_descriptors)
        raise CheckpointError(f"{path}: {shown(name)} was written through {through}; save without extensions")
    check_file_name(path, info.relative_path)
    return info

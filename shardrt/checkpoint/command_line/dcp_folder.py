"""Checkpoints in DCP's format as one process reads and writes them: whole tensors, one at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..disk.files import METADATA, Bytes, Writer, bytes_of, explained
from ..disk.folders import sync_folder
from ..disk.remote_path import Location
from ..formats.dcp.marks import MARK_NBYTES, Mark, new_save_id, own_id
from ..formats.dcp.metadata import read_stored
from ..formats.dcp.metadata_pickle import SAVED_BY, MetadataWriter, ending
from ..formats.safetensors import TensorInfo
from ..formats.stored import Columns
from ..formats.torch_file.items import ALIGNMENT, BlockCrcs, item_footer, item_header
from ..loading.contents import Contents
from ..loading.reading import fetches, read_all
from ..state.names import Path as Keys
from ..state.objects import encode
from .kinds import Checkpoint

FILE = "__0_0.distcp"
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")


class DcpCheckpoint(Checkpoint):
    """A folder with .metadata, of any writer."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self._stored = read_stored(folder)
        self._contents = Contents(self._stored)
        self.kind = "dcp, written by shardrt" if (self._stored.save_id or "").startswith(SAVED_BY) else "dcp"
        self.save_id = own_id(self._stored.save_id)
        self.tensors = {
            name: TensorInfo(tensor.dtype, torch.Size(tensor.shape)) for name, tensor in self._stored.tensors.items()
        }
        self.objects: Sequence[str] = list(self._stored.objects)
        self.paths = {name: self._stored.paths.get(name, (name,)) for name in (*self.tensors, *self.objects)}

    def ranks(self) -> dict[str, list[int]]:
        """The ranks that wrote each tensor, by the names of files."""
        found = {}
        for name, tensor in self._stored.tensors.items():
            files = (tensor.files[number] for number in tensor.columns.file.unique().tolist())
            found[name] = [int(match[1]) for file in files if (match := _RANK_FILE.fullmatch(file))]
        return found

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored.tensors[name]
        found = torch.empty(stored.shape, dtype=stored.dtype)
        read_all(self._stored, fetches(name, stored, found))
        return found

    def object(self, name: str) -> Any:
        return self._contents.value(name)


class _Stored(NamedTuple):
    """An item that was written."""

    name: str
    keys: Keys
    info: TensorInfo | None  # None: an object
    start: int
    length: int


class DcpWriter:
    """Writes a new folder, with all tensors in one file: `tensor` or `object` for each name, then `finish`."""

    def __init__(self, folder: Path) -> None:
        with explained("create", folder):
            folder.mkdir()
        self._folder = folder
        self._writer = Writer(folder / FILE)
        self._items: list[_Stored] = []
        self._save_id = new_save_id()
        self._mark = Mark(self._save_id, FILE).encode()
        self._writer.write(0, [self._mark])
        self._end = MARK_NBYTES

    def tensor(self, name: str, keys: Keys, value: torch.Tensor) -> None:
        """value: contiguous, on the CPU."""
        sizes, strides, memory = tuple(value.shape), value.stride(), bytes_of(value)
        crcs = BlockCrcs()
        crcs.update(memory)
        buffers: list[Bytes] = [
            item_header(value.dtype, sizes, strides),
            memory,
            item_footer(value.dtype, sizes, strides, crcs.values),
        ]
        self._add(name, keys, TensorInfo(value.dtype, value.shape), buffers)

    def object(self, name: str, keys: Keys, value: Any) -> None:
        """value: what torch.load(weights_only=True) has read."""
        self._add(name, keys, None, [encode(name, value)])

    def finish(self) -> None:
        """Write .metadata; returns when everything has reached the disk."""
        self._writer.write(self._end, [self._mark])
        self._writer.close()
        with explained("write", self._folder / METADATA), open(self._folder / METADATA, "wb") as file:
            out = MetadataWriter(file, [FILE])
            for name, keys, info, start, length in self._items:
                if info is None:
                    out.add_object(name, keys, 0, start, length)
                else:
                    out.add_tensor(name, keys, info.dtype, info.shape, _one_chunk(info.shape, start, length))
            out.finish()
            file.write(ending(self._save_id))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def _add(self, name: str, keys: Keys, info: TensorInfo | None, buffers: list[Bytes]) -> None:
        start, length = self._end, sum(map(len, buffers))
        if info is not None and not info.shape.numel():
            length = 0  # no chunk: nothing to write
        else:
            self._writer.write(start, buffers)
            self._writer.flush()  # the caller's memory goes
        self._items.append(_Stored(name, keys, info, start, length))
        self._end = start + length + -length % ALIGNMENT


def _one_chunk(shape: torch.Size, start: int, length: int) -> Columns:
    """The whole tensor as one chunk; none if it is empty."""
    chunks = 1 if shape.numel() else 0

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([values] * chunks, dtype=torch.int64).reshape(chunks, len(values))

    offsets, sizes = column([0] * len(shape)), column(shape)
    file, begin, nbytes = (column([value]).reshape(chunks) for value in (0, start, length))
    return Columns(offsets, sizes, file, begin, nbytes)

"""Checkpoints as one process reads them: names with whole tensors and objects.

kind          where                                                      found by
dcp           a folder, of shardrt or of torch.distributed.checkpoint    .metadata in it
safetensors   a file, or a folder with an index                          the names of files
torch         a file of torch.save                                       everything else
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..disk.errors import CheckpointError, shown
from ..disk.files import METADATA, Reader
from ..disk.remote_path import Location
from ..disk.storage import latest, on_disk
from ..formats import safetensors
from ..formats.dcp import metadata_reader as dcp
from ..formats.dcp.marks import own_id
from ..formats.dcp.metadata_writer import SAVED_BY
from ..formats.safetensors import INDEX_NAME, SINGLE_NAME, TensorInfo
from ..formats.stored import Stored
from ..formats.torch_file.archive import SIGNATURE, Archive
from ..formats.torch_file.expansion import check_archive
from ..formats.torch_file.pickles import refusal
from ..loading.contents import Contents
from ..loading.reading import fetches, read_all
from ..state.names import Path as Keys
from ..state.names import joined
from ..state.trees import flattened

SUFFIX = ".safetensors"
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")


class Checkpoint(ABC):
    """A checkpoint on disk.

    tensors: names with dtypes and shapes.   objects: names of everything else.
    paths: for each name its keys in nested dicts and lists.
    """

    kind: str  # the format, and who wrote it if that is known
    save_id: str | None = None  # of the save, if shardrt wrote it
    tensors: Mapping[str, TensorInfo]
    objects: Sequence[str]
    paths: Mapping[str, Keys]

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, contiguous, on the CPU. Raises CheckpointError for damaged data."""

    @abstractmethod
    def object(self, name: str) -> Any:
        """An object. Raises CheckpointError for one that is not plain data."""

    def ranks(self) -> dict[str, list[int]]:
        """The ranks that wrote each tensor, as the names of files say; empty if no file is named after a rank."""
        return {}


class StoredCheckpoint(Checkpoint):
    """A folder with a .metadata file, whichever program wrote it, or files in the safetensors format."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._contents = Contents(stored)
        self.save_id = own_id(stored.save_id)
        self.kind = stored.format.name + (", written by shardrt" if (stored.save_id or "").startswith(SAVED_BY) else "")
        self.tensors = {name: TensorInfo(tensor.dtype, torch.Size(tensor.shape)) for name, tensor in stored.tensors.items()}
        self.objects: Sequence[str] = list(stored.objects)
        self.paths = {name: stored.paths.get(name, (name,)) for name in (*self.tensors, *self.objects)}

    def ranks(self) -> dict[str, list[int]]:
        found = {}
        for name, tensor in self._stored.tensors.items():
            files = (tensor.files[number] for number in tensor.columns.file.unique().tolist())
            found[name] = [int(match[1]) for file in files if (match := _RANK_FILE.fullmatch(file))]
        return found if any(found.values()) else {}

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored.tensors[name]
        found = torch.empty(stored.shape, dtype=stored.dtype)
        read_all(self._stored, fetches(name, stored, found))
        return found

    def object(self, name: str) -> Any:
        return self._contents.value(name)


class TorchCheckpoint(Checkpoint):
    """A file of torch.save, with nested dicts and lists. Tensors in a zip archive stay on disk (mmap) until they are read."""

    kind = "torch"

    def __init__(self, path: Path) -> None:
        try:
            with Reader(path) as reader:
                nbytes = reader.size()
                if is_zip := bytes(reader.read(0, min(4, nbytes))) == SIGNATURE:
                    archive = Archive(lambda start, size: bytes(reader.read(start, size)), nbytes, f"'{path}'")
                    check_archive(archive, f"'{path}'")
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"'{path}' is no file of torch.save that can be read: {refusal(error)}") from error
        if not isinstance(tree, Mapping):
            raise CheckpointError(f"'{path}' has a {type(tree).__name__}; expected a dict, as a state dict is")
        self._values, self.paths = dict[str, Any](), dict[str, Keys]()
        for keys, value in flattened(tree, ()):
            name = joined(keys)
            if name in self.paths:
                raise CheckpointError(
                    f"'{path}' has two values of the name {shown(name)}, at {shown(self.paths[name])} and {shown(keys)}: "
                    "rename one"
                )
            self._values[name], self.paths[name] = value, keys
        tensors = {name: value for name, value in self._values.items() if isinstance(value, torch.Tensor)}
        self.tensors = {name: TensorInfo(value.dtype, value.shape) for name, value in tensors.items()}
        self.objects = [name for name in self._values if name not in tensors]

    def tensor(self, name: str) -> torch.Tensor:
        value: torch.Tensor = self._values[name]
        if value.layout != torch.strided:
            raise CheckpointError(f"tensor {shown(name)} has the layout {value.layout}: save its values and indices as tensors")
        return value.detach().resolve_conj().resolve_neg().contiguous()

    def object(self, name: str) -> Any:
        return self._values[name]


def open_checkpoint(path: Location) -> Checkpoint:
    """Open the checkpoint at `path`. Raises CheckpointError if there is none of a known kind, or if it cannot be read."""
    if not path.exists():
        raise CheckpointError(f"no file or folder '{path}'")
    if (path / METADATA).is_file():
        return StoredCheckpoint(dcp.read_stored(path))
    path = on_disk(path)
    if not path.is_dir():
        return StoredCheckpoint(safetensors.read_stored(path)) if path.suffix == SUFFIX else TorchCheckpoint(path)
    if (path / SINGLE_NAME).is_file() or (path / INDEX_NAME).is_file():
        return StoredCheckpoint(safetensors.read_stored(path))
    newest = None
    with suppress(OSError):
        newest = latest(path)
    inside = "" if newest is None else f"; the newest checkpoint in it is '{newest}'"
    raise CheckpointError(f"'{path}' is no checkpoint: it has no {METADATA}, {SINGLE_NAME} or {INDEX_NAME}{inside}")

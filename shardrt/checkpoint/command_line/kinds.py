"""Checkpoints as one process reads them: names with whole tensors and objects. Here those of safetensors and of torch.save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..disk.files import Reader, bytes_of
from ..errors import CheckpointError, reason, shown
from ..formats.safetensors import Array, TensorInfo, read_arrays
from ..formats.torch_file.archive import SIGNATURE, Archive
from ..formats.torch_file.expansion import check_archive
from ..state.names import Path as Keys
from ..state.names import joined
from ..state.trees import flattened


class Checkpoint(ABC):
    """A checkpoint on disk.

    tensors: names with dtypes and shapes.   objects: names of everything else.
    paths: for each name its keys in nested dicts and lists.
    """

    kind: str  # and who wrote it, if that is known
    tensors: Mapping[str, TensorInfo]
    objects: Sequence[str]
    paths: Mapping[str, Keys]

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, contiguous, on the CPU. Raises CheckpointError for damaged data."""

    @abstractmethod
    def object(self, name: str) -> Any:
        """An object; one that is no plain data is refused by CheckpointError."""


class SafetensorsCheckpoint(Checkpoint):
    """Files of the safetensors format. A name is one key: there are no nested dicts."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self._arrays = read_arrays(path)
        self.tensors = {name: TensorInfo(array.dtype, array.shape) for name, array in self._arrays.items()}
        self.objects: Sequence[str] = ()
        self.paths = {name: (name,) for name in self._arrays}

    def tensor(self, name: str) -> torch.Tensor:
        array: Array = self._arrays[name]
        found = torch.empty(array.shape, dtype=array.dtype)
        with Reader(array.file) as reader:
            reader.read_into(array.offset, [bytes_of(found)])
        return found

    def object(self, name: str) -> Any:
        raise KeyError(name)


class TorchCheckpoint(Checkpoint):
    """A file of torch.save, with nested dicts and lists. Tensors of a zip stay on disk (mmap) until they are read."""

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
            raise CheckpointError(f"'{path}' is no file that torch.load(weights_only=True) reads: {reason(error)}") from error
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

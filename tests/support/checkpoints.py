"""What tests of checkpoints share: a folder that all ranks see, a small state, and what torch's own reader finds on disk."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from shardrt.checkpoint.formats.stored import StoredChunk
from shardrt.checkpoint.formats.torch_file.stored_items import read_item
from shardrt.checkpoint.loading import load as loading
from shardrt.comm import World
from toys import OddMLP, batch, shard_blocks


class Holder:
    """Something whose state has any form."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"inside": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["inside"]


@contextmanager
def shared_folder(world: World, within: str | None = None) -> Iterator[Path]:
    """A new folder that all ranks see; deleted when all have left the `with` block."""
    folder = world.comm.exchange(tempfile.mkdtemp(prefix="checkpoint-", dir=within) if world.rank == 0 else "")[0]
    try:
        yield Path(folder)
        world.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder)


def small_state(steps: int = 1) -> dict[str, Any]:
    """A sharded model, its optimizer after some steps, a scheduler, and values."""
    torch.manual_seed(0)
    model = shard_blocks(OddMLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "step": 0}
    for _ in range(steps):
        train(state)
    return state


def train(state: dict[str, Any]) -> None:
    """One step."""
    state["optimizer"].zero_grad()
    state["model"](batch(state["step"]).float()).square().mean().backward()
    state["optimizer"].step()
    state["scheduler"].step()
    state["step"] += 1


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole tensors of `small_state` by their names in a checkpoint. Collective."""
    names = {param: name for name, param in state["model"].named_parameters()}
    found = {f"model.{name}": param for param, name in names.items()}
    for param, values in state["optimizer"].state.items():
        found |= {f"optimizer.state.{names[param]}.{key}": value for key, value in values.items()}
    return {name: whole(tensor.detach()).clone() for name, tensor in found.items()}


@contextmanager
def reading() -> Iterator[list[tuple[int, int]]]:
    """How many bytes each load of the block reads, and how many it would need if no dtype changed."""
    found: list[tuple[int, int]] = []

    def count(text: str, *args: Any) -> None:
        if text.startswith("loaded"):
            found.append((args[1], args[2]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading._log, "debug", count)
        yield found


def flip(folder: Path, chunk: StoredChunk, at: int) -> None:
    """Change a bit of a chunk's memory, `at` bytes from its start or, if negative, its end."""
    with open(folder / chunk.file, "r+b") as file:

        def read(offset: int, nbytes: int) -> bytes:
            file.seek(chunk.offset + offset)
            return file.read(nbytes)

        item = read_item(read, chunk.length, "test")
        assert -item.data_nbytes <= at < item.data_nbytes
        place = item.data_start + at % item.data_nbytes
        byte = read(place, 1)[0] ^ 4
        file.seek(chunk.offset + place)
        file.write(bytes([byte]))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, shardrt.DTensor) else tensor


def stock_load(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint as torch's own reader loads it in one process: whole tensors, and objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = FileSystemReader(folder)
        state: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in reader.read_metadata().state_dict_metadata.items()
        }
        load(state, storage_reader=reader, no_dist=True)
    return state


def assert_holds(folder: Path, expected: dict[str, torch.Tensor], **objects: Any) -> None:
    """The checkpoint has these tensors, bitwise, and these objects."""
    found = stock_load(folder)
    tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value), name
    assert {name: found[name] for name in objects} == objects


def freeze(module: nn.Module) -> None:
    """Overwrite all parameters in place."""
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(-7.0)

"""Checkpoints of PyTorch's DCP: what FSDP2 writes is read here, and what is written here is read by stock DCP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt.checkpoint.__main__ import main
from shardrt.comm import World
from toys import shard_blocks

WIDTH, HIDDEN = 12, 22
NAMES = ("exp_avg", "exp_avg_sq", "step")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Uneven rows on 2 to 4 ranks, a buffer, and matrices for the columns and rows of tensor parallelism."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale


def plan(styles: Any) -> dict[str, Any]:
    return {"blocks.*.up": styles.ColwiseParallel(), "blocks.*.down": styles.RowwiseParallel()}


def train(model: nn.Module, rank: int, steps: int = 2) -> torch.optim.AdamW:
    """An optimizer with two groups, after some steps."""
    decay = [param for param in model.parameters() if param.dim() > 1]
    other = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": other, "weight_decay": 0.0}], lr=1e-2)
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, of either side."""
    full: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All values, whole, by name. Collective."""
    found = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        found |= {f"optimizer.state.{name}.{key}": whole(state[key]) for key in NAMES}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ---------------------------------------------------------------------- the side of FSDP2


@contextmanager
def process_group(world: World, folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world.size}", rank=world.rank, world_size=world.size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def fsdp2(seed: int, kind: str) -> tuple[nn.Module, int]:
    """A model of FSDP2 on all ranks, and this rank's place along the data-parallel axes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    model, size = Net(seed), dist.get_world_size()
    if kind == "2-D":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallel.parallelize_module(model, mesh["tp"], plan(parallel))
        mesh = mesh["dp"]
    elif kind == "HSDP":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, dist.get_rank() // 2 if kind == "2-D" else dist.get_rank()


def their_state(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


@on_ranks(2, 4)
def write_by_fsdp2(world: World, kind: str, flat: bool, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with process_group(world, folder):
        model, place = fsdp2(1, kind)
        optimizer = train(model, place)
        values = everything(model, optimizer)
        dcp.save(their_state(model, optimizer, flat), checkpoint_id=folder / "theirs")
        if world.rank == 0:
            torch.save(values, folder / "expected.pt")


# ---------------------------------------------------------------------- the side of shardrt


def ours(world: World, seed: int, kind: str) -> tuple[nn.Module, int]:
    """A model of shardrt, and this rank's place along the data-parallel axes."""
    model, size = Net(seed), world.size
    if kind == "2-D":
        mesh = shardrt.DeviceMesh(world.comm, (size // 2, 2), ("dp", "tp"))
        shardrt.parallel.parallelize_module(model, mesh["tp"], plan(shardrt.parallel))
        mesh = mesh["dp"]
    elif kind == "HSDP":
        mesh = shardrt.DeviceMesh(world.comm, (2, size // 2), ("replicate", "shard"))
    else:
        mesh = shardrt.DeviceMesh(world.comm, (size,), ("shard",))
    shard_blocks(model, mesh=mesh)
    return model, world.rank // 2 if kind == "2-D" else world.rank


@on_ranks(1, 2, 3, 4)
def read_by_shardrt(world: World, kind: str, checkpoint: Path, expected: Path) -> None:
    """Into a model with other values, and an optimizer that has no state yet, and has other hyperparameters."""
    model, _ = ours(world, 2, kind)
    optimizer = train(model, 0, steps=0)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    shardrt.checkpoint.load(checkpoint, {"model": model, "optimizer": optimizer})
    assert_same(everything(model, optimizer), torch.load(expected))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-2, 1e-2), (1e-2, 0.0)]


READERS = {1: "1-D", 2: "2-D", 3: "1-D", 4: "HSDP"}  # by the number of ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "flat"),
    [("1-D", False), pytest.param("HSDP", False, marks=pytest.mark.all), ("2-D", True)],
    ids=["1-D", "HSDP", "2-D"],
)
def test_what_fsdp2_wrote_is_read_on_any_number_of_ranks(tmp_path: Path, kind: str, flat: bool) -> None:
    """flat: the optimizer's state as torchtitan writes it, hyperparameters by parameter."""
    write_by_fsdp2(size=4, kind=kind, flat=flat, folder=tmp_path)
    for size, reader in READERS.items():
        read_by_shardrt(size=size, kind=reader, checkpoint=tmp_path / "theirs", expected=tmp_path / "expected.pt")


@on_ranks(2, 3, 4)
def write_by_shardrt(world: World, kind: str, folder: Path) -> None:
    model, place = ours(world, 1, kind)
    optimizer = train(model, place)
    values = everything(model, optimizer)
    shardrt.checkpoint.save(folder / "ours", {"model": model, "optimizer": optimizer, "epoch": 3})
    if world.rank == 0:
        torch.save(values, folder / "expected.pt")


@on_ranks(2, 4)
def read_by_fsdp2(world: World, kind: str, flat: bool, folder: Path) -> None:
    """Into a model with other values, by the steps of a script for FSDP2."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    with process_group(world, folder):
        model, place = fsdp2(2, kind)
        optimizer = train(model, place, steps=0)
        state = their_state(model, optimizer, flat)
        dcp.load(state, checkpoint_id=folder / "ours")
        set_model_state_dict(model, state["model"])
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        assert_same(everything(model, optimizer), torch.load(folder / "expected.pt"))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "kind", "readers"),
    [
        (2, "1-D", [(4, "2-D"), (2, "1-D")]),
        pytest.param(4, "2-D", [(2, "1-D")], marks=pytest.mark.all),
        pytest.param(3, "1-D", [(4, "HSDP")], marks=pytest.mark.all),
    ],
    ids=["1-D", "2-D", "3 ranks"],
)
def test_stock_dcp_reads_what_was_written_here(tmp_path: Path, size: int, kind: str, readers: list[tuple[int, str]]) -> None:
    write_by_shardrt(size=size, kind=kind, folder=tmp_path)
    for number, their_kind in readers:
        read_by_fsdp2(size=number, kind=their_kind, flat=False, folder=tmp_path)


@on_ranks(2)
def test_the_layout_of_torchtitan(world: World, tmp_path: Path) -> None:
    """A model without a key of its own, and hyperparameters by parameter: written here, read by the steps of torchtitan."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    model, place = ours(world, 1, "1-D")
    optimizer, options = train(model, place), StateDictOptions(flatten_optimizer_state_dict=True)
    flat = shardrt.checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
    shardrt.checkpoint.save(tmp_path / "ours", {"": model, "optimizer": flat})
    expected = everything(model, optimizer)
    with process_group(world, tmp_path):
        model, _ = fsdp2(2, "1-D")
        optimizer = train(model, 0, steps=0)
        state = their_state(model, optimizer, flat=True)
        state |= state.pop("model")
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        set_optimizer_state_dict(model, optimizer, state.pop("optimizer"), options=options)
        set_model_state_dict(model, state)
        assert_same(everything(model, optimizer), expected)


@pytest.mark.ranks
def test_files_of_torch_save(tmp_path: Path) -> None:
    """torch's converters, both ways."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    write_by_shardrt(size=4, kind="2-D", folder=tmp_path)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "saved.pt")
    saved, expected = torch.load(tmp_path / "saved.pt"), torch.load(tmp_path / "expected.pt")
    assert saved["epoch"] == 3
    alone = Net(2)
    alone.load_state_dict(saved["model"])
    states = saved["optimizer"]["state"]
    found = {f"model.{name}": tensor for name, tensor in alone.state_dict().items()}
    found |= {f"optimizer.state.{name}.{key}": states[name][key] for name in states for key in NAMES}
    assert_same(found, expected)
    torch_save_to_dcp(tmp_path / "saved.pt", tmp_path / "again")
    read_by_shardrt(size=2, kind="1-D", checkpoint=tmp_path / "again", expected=tmp_path / "expected.pt")


@pytest.mark.ranks
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_by_shardrt(size=4, kind="2-D", folder=tmp_path)
    folder, expected = tmp_path / "ours", torch.load(tmp_path / "expected.pt")
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (weight,) = (line.split() for line in lines if line.startswith("model.blocks.1.up.weight "))
    assert weight == ["model.blocks.1.up.weight", "(22,", "12)", "float32", "1,056", "0-3"]
    assert f"{folder}: dcp, written by shardrt" in lines
    assert lines[-2:] == ["written by ranks 0-3", "step 2"]
    assert main(["verify", str(folder)]) == 0
    assert main(["convert", str(folder), str(tmp_path / "whole.pt"), "--to", "torch"]) == 0
    saved = torch.load(tmp_path / "whole.pt")
    assert saved["epoch"] == 3
    for name, tensor in expected.items():
        if name.startswith("model."):
            assert torch.equal(saved["model"][name.removeprefix("model.")], tensor), name
    assert saved["optimizer"]["param_groups"][1]["weight_decay"] == 0.0
    flip_a_byte(folder / "__2_0.distcp")
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 1
    damage, summary = capsys.readouterr().out.splitlines()
    assert re.match(r"__2_0.distcp: (tensor|object) '.*': ", damage)
    assert re.search(r" 1 of \d+ items are damaged", summary)


def flip_a_byte(file: Path) -> None:
    """In the memory of the first item, which begins at a multiple of 64 bytes."""
    data = bytearray(file.read_bytes())
    place = -(-data.index(b"archive/data/0") // 64) * 64
    data[place + 64] ^= 16
    file.write_bytes(data)

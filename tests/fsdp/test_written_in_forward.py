"""Parameters that a module writes while it runs: codebooks, clipped and normalised weights."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused, settings_of
from shardrt import MixedPrecisionPolicy
from shardrt.comm import World
from toys import compare, logged, shard_blocks, step_all, uncompiled


def clip_through_data(weight: Any) -> None:
    weight.data.clamp_(-0.05, 0.05)


def clip(weight: Any) -> None:
    with torch.no_grad():
        weight.clamp_(-0.05, 0.05)


def assign(weight: Any) -> None:
    weight.data = nn.functional.normalize(weight.data, dim=-1)


def write_a_row(weight: Any) -> None:
    weight.data[-1].mul_(0.9)


WRITES: dict[str, Callable[[Any], None]] = {
    "clip through data": clip_through_data,
    "clip": clip,
    "assign": assign,
    "a row": write_a_row,
}


class Writes(nn.Module):
    def __init__(self, write: Callable[[Any], None], width: int) -> None:
        super().__init__()
        self.write, self.before = write, True
        self.lin, self.out = nn.Linear(5, width), nn.Linear(width, 5)
        self.codes = nn.Parameter(torch.randn(7, 5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            self.write(self.lin.weight)
            self.write(self.codes)
        y: torch.Tensor = self.out(self.lin(x)) + self.codes.sum(0)
        if not self.before:
            self.write(self.codes)
        return y


class Whole(nn.Module):
    def __init__(self, write: Callable[[Any], None], width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writes(write, width) for _ in range(2))
        self.codes = nn.Parameter(torch.randn(3, 5))
        self.write, self.recomputes = write, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.codes)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x + self.codes.sum(0)


def train(model: Any, steps: int) -> None:
    """Steps, and evaluations between them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5 / model.blocks[0].lin.out_features)
    for step in range(steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["usual", "kept", "recomputed", "gathered", "large", "a part is kept", "replicas", "after use"])
@uncompiled()
def test_writes_are_kept(world: World, how: str) -> None:
    """Those that all ranks make alike, by whatever means: as in one process, step after step."""
    for case, write in WRITES.items():
        torch.manual_seed(0)
        whole = Whole(write, width=30_000 if how == "large" and case in ("clip", "assign") else 6).double()
        for block in whole.blocks:
            block.before = how != "after use"
        whole.recomputes = how == "recomputed"
        model = copy.deepcopy(whole)
        with settings_of(world, node_memory=how != "gathered"):
            options: dict[str, Any] = {}
            if how == "replicas" and world.size == 2:
                options["mesh"] = shardrt.init_device_mesh(world.device.type, (2, 1), mesh_dim_names=("r", "s"))
            if how in ("kept", "a part is kept"):
                options["reshard_after_forward"] = False if how == "kept" else world.size
            shard_blocks(model, **options)
            for each in (whole, model):
                train(each, 3 if how == "large" else 4)
            compare(whole, model, 1e-9, f"{case}, {how}")


@on_ranks(2)
@pytest.mark.parametrize("node_memory", [True, False])
@uncompiled()
def test_precision_of_what_is_not_written(world: World, node_memory: bool) -> None:
    """Modules compute with bfloat16; elements that they do not write stay as they are."""
    with settings_of(world, node_memory=node_memory):
        torch.manual_seed(0)
        model = Writes(write_a_row, 6)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        shardrt.fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        with torch.inference_mode():
            model(torch.ones(2, 5))
        for name, param in model.named_parameters():
            found, expected = param.full_tensor(), before[name]
            written = name in ("codes", "lin.weight")
            assert torch.equal(found[:-1] if written else found, expected[:-1] if written else expected)
            if written:
                torch.testing.assert_close(found[-1], expected[-1] * 0.9, rtol=0.02, atol=0.02)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.rows = nn.Embedding(9, 3, max_norm=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.codes.data.mul_(0.5).add_(x.mean(0))
        y: torch.Tensor = self.codes.sum(0) + self.rows(torch.arange(9))
        return y


@on_ranks(2)
@uncompiled()
def test_writes_by_a_ranks_batch_are_named(world: World) -> None:
    """Each rank keeps its own; a warning names the parameter, once."""
    with logged() as messages:
        model = shardrt.fully_shard(nn.Sequential(shardrt.fully_shard(Codebook())))
        for _ in range(3):
            model(torch.full((2, 3), world.rank + 1.0)).sum().backward()
    named = [message for message in messages if "is written in the forward of '0': each of 2 ranks" in message]
    assert [message.split("'")[1] for message in named] == (["0.codes", "0.rows.weight"] if world.rank == 0 else [])
    own = model[0].codes.to_local()
    assert torch.equal(own, torch.full_like(own, 1.75 * (world.rank + 1)))
    assert (model[0].rows.weight.full_tensor().norm(dim=1) <= 0.1001).all()


@on_ranks(1, 2)
@uncompiled()
def test_an_assignment_of_another_shape(world: World) -> None:
    model = shardrt.fully_shard(Writes(lambda weight: None, 6))

    def wrong(weight: Any) -> None:
        weight.data = torch.zeros(2, 2)

    model.write = wrong
    refused(
        r"'lin.weight'.data = a tensor of shape \(2, 2\) in the forward.*expected \(6, 5\)",
        lambda: model(torch.ones(2, 5)),
        RuntimeError,
    )


class Quantised(nn.Linear):
    """Computes with other weights than it has, and puts its own back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.weight.data
        self.weight.data = (before * 4).round() / 4
        out = super().forward(x)
        self.weight.data = before
        return out


class Exchanging(nn.Module):
    """first: the forward from which on it exchanges its parameters."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((4, 6), 0.1)), nn.Parameter(torch.full((4, 6), 0.3))
        self.forwards, self.first = 0, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards >= self.first:
            self.a.data, self.b.data = self.b.data, self.a.data
        return x @ self.a.t()


class Late(nn.Linear):
    """Begins to assign its weight when nobody looks at each forward any more."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards in (19, 21, 22):
            self.weight.data = self.weight.data * 0.5
        return super().forward(x)


ASSIGNING: dict[str, Callable[[], nn.Module]] = {
    "quantised": lambda: Quantised(6, 4),
    "exchanging": lambda: Exchanging(1),
    "exchanging late": lambda: Exchanging(19),
    "late": lambda: Late(6, 4),
}


@pytest.mark.parametrize("kind", ASSIGNING)
@pytest.mark.parametrize("after", [True, False])
@on_ranks(2, more=(1, 3))
def test_data_that_is_assigned_in_a_forward(world: World, kind: str, after: bool) -> None:
    """It has the new values, and what was taken of it before keeps the old ones."""
    whole = nn.Sequential(ASSIGNING[kind](), nn.Linear(4, 3)).double()
    sharded: Any = copy.deepcopy(whole)
    shardrt.fully_shard(sharded[0], reshard_after_forward=after)
    shardrt.fully_shard(sharded)
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (whole, sharded)]
    for step in range(26):
        x = torch.randn(2 * world.size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for model, optimizer, rows in zip((whole, sharded), optimizers, (x, x.chunk(world.size)[world.rank]), strict=True):
            model(rows).square().mean().backward()
            step_all(optimizer)
        compare(whole, sharded, 1e-10, f"step {step}")

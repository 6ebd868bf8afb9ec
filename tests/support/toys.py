"""Small models with deliberate edge cases, and a loop that trains one sharded and unsharded and compares."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from shardrt.comm import ReduceOp, World
from shardrt.comm.core.streams import InlineStream
from shardrt.fsdp.memory import context
from shardrt.fsdp.params import in_place, visible
from shardrt.fsdp.schedule.param_group import ParamGroup

Sharder = Callable[[nn.Module], object]
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class OddBlock(nn.Module):
    """Uneven rows, fewer rows than ranks, a 1-element and a 0-dim parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.gate = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class OddMLP(nn.Module):
    def __init__(self, width: int = 13, layers: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList(OddBlock(width) for _ in range(layers))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class UsedTwice(OddMLP):
    """The first block runs again after the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.out(x)


class Skipping(OddMLP):
    """The second block does not run while `skip` is set."""

    skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if not (self.skip and index == 1):
                x = block(x)
        return self.out(x)


class Branching(OddMLP):
    """One tensor is the input of three blocks and of the sum at the end; one block has two inputs and uses only the first."""

    def __init__(self, width: int = 13) -> None:
        super().__init__(width, layers=5)
        self.blocks[3] = FirstOfTwo(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.blocks[0](self.inp(x))
        b = self.blocks[1](a) + self.blocks[2](a)
        c = self.blocks[3](b, a)
        d = self.blocks[4](a)
        return self.out(a + c + d)


class FirstOfTwo(nn.Module):
    """Does not use its second input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = OddBlock(width)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class TiedGPT(nn.Module):
    """A causal transformer whose head and embedding share their weight."""

    def __init__(self, vocab: int = 11, width: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 3, 2 * width + 1, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.tokens.weight.dtype)
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def without_scalars(model: nn.Module) -> nn.Module:
    """Replace the 0-dim parameters of `model` by 1-element ones, for code that does not support scalars."""
    for module in model.modules():
        if isinstance(module, OddBlock):
            module.scale = nn.Parameter(module.scale.detach().reshape(1))
    return model


def shard_blocks(model: nn.Module, blocks: str = "blocks", **options: object) -> nn.Module:
    """One group per block and one for the remaining parameters. blocks: the module whose children they are, "" for `model`."""
    for block in model.get_submodule(blocks).children():
        shardrt.fully_shard(block, **options)  # type: ignore[arg-type]
    return shardrt.fully_shard(model, **options)  # type: ignore[arg-type]


def paired(whole: nn.Module, **options: Any) -> tuple[Any, Any]:
    """A model, and a sharded copy of it."""
    return whole, shard_blocks(copy.deepcopy(whole), **options)


@contextmanager
def buckets_of(nbytes: int) -> Iterator[None]:
    """Set the size of a bucket; 0: one group at a time. By default each of these models fits in one bucket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "BUCKET_BYTES", nbytes)
        yield


@contextmanager
def overlapping() -> Iterator[None]:
    """Groups are gathered ahead on the caller's thread as well, as where gathers run beside compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InlineStream, "overlaps", True)
        yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """As in a process that has compiled nothing: other tests of this job may have."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (in_place, visible):
            patch.setattr(module, "compiler_in_use", lambda: False)
        yield


def batch(step: int, rows: int = 12) -> torch.Tensor:
    """The global batch of a step for the odd MLPs, float64."""
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def tokens(step: int, rows: int = 12) -> torch.Tensor:
    """The global batch of a step for the GPT."""
    return torch.randint(0, 11, (rows, 7), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean over the rows, so that the mean over equal parts equals the mean over all rows."""
    out = model(x)
    if x.is_floating_point():
        return ((out - x[:, :3]) ** 2).mean()
    return nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def step_all(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def mean_over_ranks(world: World, value: torch.Tensor) -> torch.Tensor:
    """The average of a scalar."""
    out = torch.empty_like(value.detach())
    world.comm.all_reduce(out, value.detach(), ReduceOp.AVG, stream=world.stream).synchronize()
    return out


def train_side_by_side(
    world: World,
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    *,
    shard: Sharder = shard_blocks,
    microbatches: int = 1,
    before_step: Callable[[int, nn.Module], None] = lambda step, model: None,
    tolerance: float = 1e-12,
) -> nn.Module:
    """Train `model` on full batches and a sharded copy on this rank's rows of each, and compare them.

    Compared after every step: the loss, every gradient (and which parameters have none), every parameter.
    Steps alternate between groups in buckets and single groups.
    """
    whole, sharded = model, copy.deepcopy(model)
    shard(sharded)
    # A large eps: otherwise Adam scales gradients of pure rounding noise to the size of a real step.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, sharded)]
    for step, x in enumerate(batches):
        before_step(step, whole)
        before_step(step, sharded)
        expected = loss_of(whole, x)
        expected.backward()
        mine = x.chunk(world.size)[world.rank]
        total = torch.zeros_like(expected)
        with buckets_of(context.BUCKET_BYTES if step % 2 else 0):
            for index, micro in enumerate(mine.chunk(microbatches)):
                sharded.set_requires_gradient_sync(index == microbatches - 1)  # type: ignore[operator]
                loss = loss_of(sharded, micro) / microbatches
                loss.backward()
                total += loss.detach()
        torch.testing.assert_close(mean_over_ranks(world, total), expected.detach(), rtol=tolerance, atol=tolerance)
        compare(whole, sharded, tolerance, f"step {step}")
        step_all(*optimizers)
        compare(whole, sharded, tolerance, f"after step {step}")
    return sharded


def compare(whole: nn.Module, sharded: nn.Module, tolerance: float, when: str) -> None:
    """Compare every parameter and gradient of the sharded model with the unsharded one's. Collective."""
    pairs = zip(whole.named_parameters(), sharded.named_parameters(), strict=True)
    for (name, expected), (sharded_name, param) in pairs:
        assert name == sharded_name
        assert isinstance(param, shardrt.DTensor)

        def describe(text: str, name: str = name) -> str:
            return f"{name} {when}: {text}"

        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=tolerance, atol=tolerance, msg=describe)
        assert (param.grad is None) == (expected.grad is None), f"{name} {when}: a gradient on one side only"
        if expected.grad is not None:
            assert isinstance(param.grad, shardrt.DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=tolerance, atol=tolerance, msg=describe)


def check_backward(
    world: World, whole: nn.Module, sharded: nn.Module, x: torch.Tensor, tolerance: float = 1e-12, loss: Loss = loss_of
) -> None:
    """A backward of `whole` on a batch, and one of `sharded` on this rank's rows; compare gradients and parameters."""
    loss(whole, x).backward()
    loss(sharded, x.chunk(world.size)[world.rank]).backward()
    compare(whole, sharded, tolerance, "after a backward")


@contextmanager
def logged() -> Iterator[list[str]]:
    """The warnings that the package logs in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    vars(handler).update(emit=lambda record: lines.append(record.getMessage()))
    handler.addFilter(lambda record: record.levelno == logging.WARNING)
    logging.getLogger("shardrt").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("shardrt").removeHandler(handler)


@contextmanager
def warns_of_create_graph() -> Iterator[None]:
    """In the block torch warns of a backward that keeps its graph, as it does once in a process."""
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="create_graph=True"):
            yield
    finally:
        torch.set_warn_always(False)


def gathers_of(model: Any) -> list[str]:
    """Spy on the groups of a sharded model: names in the order in which their gathers start, and frees as "-name"."""
    events: list[str] = []
    for group in model.param_group.with_descendants():

        def unshard(group: ParamGroup = group, original: Callable[[], None] = group.unshard) -> None:
            if not group.state.gathered:
                events.append(group.name)
            original()

        def reshard(group: ParamGroup = group, original: Callable[..., None] = group.reshard, **options: int | None) -> None:
            if group.state.gathered:
                events.append(f"-{group.name}")
            original(**options)

        group.unshard, group.reshard = unshard, reshard
    return events


class Elsewhere(shardrt.CPUOffloadPolicy):
    """Keeps shards separate from gathered parameters on the CPU too, as if the mesh were on another device."""

    def applies_to(self, device: torch.device) -> bool:
        return True

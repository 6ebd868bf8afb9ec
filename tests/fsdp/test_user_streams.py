"""Modules called on streams of the user's own, with the events between activations that a user records.

On the stand-in for CUDA a race fails the test (`worker.py`). On the host there is one stream, and these are ordinary steps.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks
from shardrt.comm import World
from shardrt.comm.core.streams import CudaStream
from toys import OddMLP, batch, compare, loss_of, paired, shard_blocks, step_all, train_side_by_side, uncompiled


@functools.cache
def side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()


def on_side_stream(index: int) -> AbstractContextManager[object]:
    """In the block, the stream of this number is current; on the host nothing changes."""
    return torch.cuda.stream(side_stream(index)) if torch.get_default_device().type == "cuda" else nullcontext()


@contextmanager
def after_the_current(stream: AbstractContextManager[object]) -> Iterator[None]:
    """In the block, this stream is current and has waited for the one that was, which waits for it at the end."""
    if isinstance(stream, nullcontext):
        yield
        return
    here = torch.cuda.current_stream()
    with stream:
        there = torch.cuda.current_stream()
        there.wait_stream(here)
        yield
    here.wait_stream(there)


def run_on(index: int, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run a module on a side stream, as a user does."""
    with after_the_current(on_side_stream(index)):
        out = run(x)
        if x.is_cuda:
            x.record_stream(torch.cuda.current_stream())
    if out.is_cuda:
        out.record_stream(torch.cuda.current_stream())
    return out


class OneOnSide(OddMLP):
    """The second block runs on a side stream."""

    shift = 0  # of the numbers of streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = run_on(self.shift, block, x) if index == 1 else block(x)
        return self.out(x)


class EachOnItsOwn(OneOnSide):
    """Each block runs on a stream of its own; the first runs again after the last, on another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate([*self.blocks, self.blocks[0]]):
            x = run_on(self.shift + index, block, x)
        return self.out(x)


class SideBySide(OneOnSide):
    """Two blocks have the same input, each on a stream of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        return self.out(run_on(self.shift, self.blocks[1], x) + run_on(self.shift + 1, self.blocks[2], x))


class Checkpointed(OneOnSide):
    """Each block runs on a stream of its own, and again in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = run_on(self.shift + index, functools.partial(checkpoint, block, use_reentrant=False), x)
        return self.out(x)


MODELS = [OneOnSide, EachOnItsOwn, SideBySide, Checkpointed]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("build", MODELS)
@on_ranks(1, 2)
@uncompiled()
def test_modules_on_streams_of_the_users(world: World, build: type[OneOnSide], microbatches: int) -> None:
    """Groups in buckets and single ones, by turns. Streams change between steps.

    But not where autograd adds up gradients of two calls: on the stream of the first forward whose graph, or one that followed
    it, is alive.
    """

    def shift(step: int, model: nn.Module) -> None:
        model.shift = 0 if build is EachOnItsOwn else step // 2

    train_side_by_side(world, build().double(), map(batch, range(6)), microbatches=microbatches, before_step=shift)


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"reshard_after_forward": 1}])
@pytest.mark.parametrize("build", MODELS)
@on_ranks(2)
@uncompiled()
def test_parameters_that_stay_gathered(world: World, build: type[OneOnSide], options: dict[str, Any]) -> None:
    """All of them or a part. The stream of a second call has not waited for the gather yet."""
    train_side_by_side(world, build().double(), map(batch, range(4)), shard=lambda model: shard_blocks(model, **options))


@on_ranks(1, 2)
@uncompiled()
def test_a_backward_on_another_stream_than_the_forward(world: World) -> None:
    """The stream on which the backward is called sees all gradients; the optimizer runs there."""
    whole, model = paired(OddMLP().double())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (whole, model)]
    for step in range(3):
        for each, x in ((whole, batch(step)), (model, batch(step).chunk(world.size)[world.rank])):
            with after_the_current(on_side_stream(0)):
                loss = loss_of(each, x)
            with after_the_current(on_side_stream(1)):
                loss.backward()
        compare(whole, model, 1e-12, f"step {step}")
        step_all(*optimizers)
    compare(whole, model, 1e-12, "at the end")


@on_ranks(1)
def test_gathers_and_reductions_have_priority(world: World) -> None:
    """Over compute and over the all-reduces of replicas. Streams of the host have none."""
    roles = ("gather", "reduce", "all_reduce")
    found = [stream._stream.priority for stream in map(world.stream_for, roles) if isinstance(stream, CudaStream)]
    assert found == ([-1, -1, 0] if world.device.type == "cuda" else [])

"""How a sum of gradients becomes an average: in the collective, or before it, where a library multiplies before it adds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt.comm import Communicator, DeviceMesh, Op, PreMulSum, ReduceOp, Stream, Work, World
from toys import OddMLP, batch, buckets_of, loss_of, shard_blocks

MESHES = {"shards": 1, "replicas": 2}  # and the number of replicas
FLOATS = [torch.float64, torch.float32, torch.bfloat16]


@contextmanager
def library_that_multiplies(world: World, multiplies: bool) -> Iterator[None]:
    """In the block, new communicators are of a library that multiplies terms of an average, or of one that does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.comm.backend), "multiplies_terms", multiplies)
        yield


@contextmanager
def ops_used() -> Iterator[set[Op]]:
    """The operations of all reductions of floating-point tensors in the block."""
    found: set[Op] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter", "all_reduce"):
            patch.setattr(Communicator, name, _spy(getattr(Communicator, name), found))
        yield found


def _spy(call: Callable[..., Work], found: set[Op]) -> Callable[..., Work]:
    def spy(self: Communicator, out: torch.Tensor, inp: torch.Tensor, op: Op, *, stream: Stream) -> Work:
        if inp.is_floating_point():
            found.add(op)
        return call(self, out, inp, op, stream=stream)

    return spy


def sharded(world: World, replicas: int, dtype: torch.dtype) -> Any:
    """A model in float64, or float32 for smaller `dtype`s, of which gradients are reduced in `dtype`."""
    shape, names = ((world.size,), ("shard",)) if replicas == 1 else ((replicas, world.size // replicas), ("replica", "shard"))
    torch.manual_seed(0)
    model = OddMLP().to(torch.promote_types(dtype, torch.float32))
    return shard_blocks(model, mesh=DeviceMesh(world.comm, shape, names), mp_policy=shardrt.MixedPrecisionPolicy(None, dtype))


def grads_of(model: nn.Module, world: World, micros: int = 2) -> list[torch.Tensor]:
    """This rank's gradients after micro-batches of which the last one is reduced."""
    x = batch(0, 24).to(next(model.parameters()).dtype).chunk(world.size)[world.rank]
    for index, rows in enumerate(x.chunk(micros)):
        model.set_requires_gradient_sync(index == micros - 1)
        loss_of(model, rows).backward()
    return [param.grad.to_local() for param in model.parameters()]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("factor", [None, 8.0])
@on_ranks(2, 4, more=(1,))
def test_dividing_before_a_sum_has_the_bits_of_an_average(
    world: World, factor: float | None, mesh: str, dtype: torch.dtype
) -> None:
    """For factors that are powers of two. Small groups and large ones, with accumulated gradients."""
    replicas = min(MESHES[mesh], world.size)
    for bucket in (0, 1 << 20):
        found = []
        for multiplies in (False, True):
            with library_that_multiplies(world, multiplies), buckets_of(bucket):
                model = sharded(world, replicas, dtype)
                for module in (model, *model.blocks):
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                with ops_used() as ops:
                    found.append(grads_of(model, world))
                assert not ops - ({ReduceOp.SUM} if multiplies else {ReduceOp.SUM, ReduceOp.AVG, PreMulSum(1 / 8)})
        for summed, averaged in zip(*found, strict=True):
            assert torch.equal(summed, averaged)


@on_ranks(2, 3)
def test_a_collective_gets_sums_where_it_would_multiply_first(world: World) -> None:
    """NCCL has no average without that. On the host an average is exact in float32, so it is taken."""
    with ops_used() as ops:
        grads_of(sharded(world, 1, torch.bfloat16), world)
    assert ops == {ReduceOp.SUM if world.device.type == "cuda" else ReduceOp.AVG}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_ranks(2, 3)
def test_other_factors(world: World, dtype: torch.dtype) -> None:
    """Ranks and factors that are no powers of two, also one that is set between micro-batches: within rounding of float64."""
    for multiplies in (False, True):
        for factors in ((None, None), (3.0, 3.0), (None, 5.0), (7.0, 3.0)):
            with library_that_multiplies(world, multiplies):
                model = sharded(world, 1, dtype)
            torch.manual_seed(0)
            whole = OddMLP().double()
            x = batch(0, 4 * world.size)
            for index, factor in enumerate(factors):
                for module in (model, *model.blocks):
                    module.set_requires_gradient_sync(index == 1, recurse=False)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                rows = x.chunk(world.size)[world.rank].chunk(2)[index]
                loss_of(model, rows.to(next(model.parameters()).dtype)).backward()
                for rank in range(world.size):
                    rows = x.chunk(world.size)[rank].chunk(2)[index]
                    (loss_of(whole, rows) / (factors[1] or world.size)).backward()
            for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
                assert expected.grad is not None
                error = (mine.grad.full_tensor().double() - expected.grad).abs().max() / expected.grad.abs().max()
                assert error < 32 * torch.finfo(dtype).eps, (multiplies, factors, error)


class Custom:
    """A user's reduce-scatter."""

    def __init__(self) -> None:
        self.ops: set[Op] = set()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, op: Op, comm: Communicator, stream: Stream) -> Work:
        self.ops.add(op)
        return comm.reduce_scatter(out, inp, op, stream=stream)


@on_ranks(2)
def test_a_custom_collective_averages(world: World) -> None:
    """It gets the operation that averages, unless sums alone are asked for, whatever the library does."""
    with library_that_multiplies(world, True):
        for sums in (False, True):
            model, custom = sharded(world, 1, torch.float64), Custom()
            block = model.blocks[1]
            block.set_custom_reduce_scatter(custom)
            block.set_force_sum_reduction_for_comms(sums)
            expected = grads_of(copy.deepcopy(sharded(world, 1, torch.float64)), world)
            assert all(torch.equal(*pair) for pair in zip(grads_of(model, world), expected, strict=True))
            assert custom.ops == {ReduceOp.SUM if sums else ReduceOp.AVG}

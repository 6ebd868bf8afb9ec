"""Tensor parallelism compared with one process: changes of layout, loss on parts of the vocabulary, training 1-D and 2-D."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import nn

import shardrt
from common.models import BYTES, GPT, GPTConfig, shard
from common.parallel import gpt_plan
from gpu.checks import Found
from gpu.training import BFLOAT16, FLOAT32, cast_loss, distance, full
from shardrt import Replicate, Shard
from shardrt.comm import World
from shardrt.parallel import PrepareModuleInput, cross_entropy, parallelize_module

STEPS = 3


def one_axis(world: World) -> shardrt.DeviceMesh:
    return shardrt.DeviceMesh(world.comm, (world.size,), ("tp",))


def layouts(world: World) -> None:
    """Each change of layout at a module's input, and of its gradient in backward, for sizes that do not divide."""
    mesh, generator = one_axis(world), torch.Generator().manual_seed(0)
    whole = torch.randn(3, 2 * world.size + 1, 5, generator=generator).to(world.device)
    scale = torch.randn(whole.shape, generator=generator).to(world.device)
    for given, wanted in product((Replicate(), Shard(0), Shard(1), Shard(-1)), repeat=2):
        module = nn.Identity()
        parallelize_module(module, mesh, PrepareModuleInput(input_layouts=given, desired_input_layouts=wanted))
        local = shardrt.distribute_tensor(whole, mesh, [given]).to_local().detach().requires_grad_()
        found = module(shardrt.DTensor.from_local(local, mesh, [given], shape=whole.shape, stride=whole.stride()))
        weights = shardrt.distribute_tensor(scale, mesh, [wanted])
        torch.testing.assert_close(found.full_tensor(), whole, rtol=0, atol=0)
        (found.to_local() * weights.to_local()).sum().backward()
        expected = shardrt.distribute_tensor(scale, mesh, [given]).to_local()
        torch.testing.assert_close(local.grad, expected, rtol=0, atol=0, msg=f"{given} -> {wanted}")


def vocabulary_loss(world: World) -> None:
    """Cross-entropy on parts of a vocabulary that does not divide, with targets that are ignored."""
    mesh, generator = one_axis(world), torch.Generator().manual_seed(0)
    logits = torch.randn(7, 101, generator=generator).to(world.device)
    targets = torch.randint(101, (7,), generator=generator).to(world.device)
    targets[2] = -100
    plain = logits.clone().requires_grad_()
    expected = F.cross_entropy(plain, targets)
    expected.backward()
    parts = shardrt.distribute_tensor(logits, mesh, [Shard(1)])
    local = parts.to_local().detach().requires_grad_()
    found = cross_entropy(
        shardrt.DTensor.from_local(local, mesh, [Shard(1)], shape=logits.shape, stride=logits.stride()), targets
    )
    found.backward()
    torch.testing.assert_close(found, expected)
    assert plain.grad is not None, "backward has run"
    torch.testing.assert_close(local.grad, shardrt.distribute_tensor(plain.grad, mesh, [Shard(1)]).to_local())


def gpt_tensor_parallel(world: World) -> Found:
    return train(world, world.size)


def gpt_tensor_parallel_async(world: World) -> Found:
    return train(world, world.size, async_tp=True)


def gpt_two_dimensional(world: World) -> Found:
    return train(world, max(1, world.size // 2))


def gpt_two_dimensional_bfloat16(world: World) -> Found:
    return train(world, max(1, world.size // 2), policy=BFLOAT16, tolerance=5e-2)


def train(
    world: World,
    tp: int,
    *,
    async_tp: bool = False,
    policy: shardrt.MixedPrecisionPolicy = FLOAT32,
    tolerance: float = 1e-4,
) -> Found:
    """Train a GPT on `tp` tensor-parallel ranks, sharded over the others, and in each process whole.

    tolerance: the allowed distance of the parameters, relative to the distance that training moved them.
    """
    mesh = shardrt.DeviceMesh(world.comm, (world.size // tp, tp), ("dp", "tp"))
    config = GPTConfig(layers=2, heads=8, channels=128, context=64)
    plain, split, start = (GPT(config).to(world.device) for _ in range(3))
    parallelize_module(split, mesh["tp"], gpt_plan(shardrt.parallel, shardrt, async_tp=async_tp))
    shard(split, partial(shardrt.fully_shard, mesh=mesh["dp"], mp_policy=policy))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, split)]
    generator, dp = torch.Generator().manual_seed(0), mesh["dp"]
    for _ in range(STEPS):
        batches = torch.randint(BYTES, (dp.size, 4, config.context + 1), generator=generator).to(world.device)
        torch.stack([cast_loss(plain, batch, policy.param_dtype) for batch in batches]).mean().backward()
        cross_entropy(split(batches[dp.rank, :, :-1]), batches[dp.rank, :, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    apart, moved = distance(full(split), list(plain.parameters())), distance(plain.parameters(), start.parameters())
    found = Found()
    found.figure("apart", apart / moved)
    assert apart <= tolerance * moved, f"{apart:.2e} from the whole model's parameters, which moved {moved:.2e}"
    return found


CHECKS = (
    layouts,
    vocabulary_loss,
    gpt_tensor_parallel,
    gpt_tensor_parallel_async,
    gpt_two_dimensional,
    gpt_two_dimensional_bfloat16,
)

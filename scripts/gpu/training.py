"""A few steps of sharded training compared with unsharded training."""

from __future__ import annotations

import copy
import shutil
import sysconfig
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import shardrt
from common.models import BYTES, GPT, GPTConfig, next_byte_loss, shard
from gpu.checks import Check, Found
from shardrt.comm import World

STEPS = 3
FLOAT32 = shardrt.MixedPrecisionPolicy()
BFLOAT16 = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

# ---------------------------------------------------------------------- odd sizes, every way to shard


def training(world: World) -> None:
    train(world)


def training_replicas(world: World) -> None:
    train(world, mesh=shardrt.DeviceMesh(world.comm, (world.size, 1), ("replicate", "shard")))


def training_offloaded(world: World) -> None:
    train(world, offload_policy=shardrt.CPUOffloadPolicy())


def training_post_forward_shard(world: World) -> None:
    train(world, reshard_after_forward=1)


def training_comm_memory(world: World) -> Found:
    train(world, comm_memory=True)
    return Found("NCCL's own memory" if world.mesh.communicator("gather").pool() else "plain memory")


def train(world: World, *, comm_memory: bool = False, **options: Any) -> None:
    """Compare norms and parameters of layers of odd sizes, with clipped gradients."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 33)) for _ in range(3))
    plain = nn.Sequential(nn.Linear(5, 33), *blocks, nn.Linear(33, 3)).to(world.device)
    sharded = copy.deepcopy(plain)
    for block in (*list(sharded)[1:-1], sharded):
        made = cast(shardrt.FSDPModule, shardrt.fully_shard(block, **options))
        made.set_allocate_memory_from_process_group_for_comm(comm_memory)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    norms = []
    for batch in torch.randn(STEPS, world.size, 8, 5).to(world.device):
        plain(batch).square().mean().backward()
        sharded(batch[world.rank]).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        norms.append(shardrt.clip_grad_norm_(sharded.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(norms[1::2], norms[::2])
    torch.testing.assert_close(full(sharded), [param.detach() for param in plain.parameters()])


def full(model: nn.Module) -> list[torch.Tensor]:
    """The full parameters of a sharded model. Collective."""
    return [cast(shardrt.DTensor, param).full_tensor() for param in model.parameters()]


def random_numbers(world: World) -> None:
    """A model built on the meta device and initialized shard by shard is the same on a mesh of all ranks and of one."""
    alone = world.comm.split(world.rank, 0, "alone")
    assert alone is not None, "every rank passed a colour"
    made = []
    for mesh in (world.mesh, shardrt.DeviceMesh(alone)):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Linear(33, 129)
        shardrt.fully_shard(model, mesh=mesh).to_empty(device=world.device)
        model.reset_parameters()
        made.append(full(model))
        model(torch.ones(2, 33, device=world.device)).sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True)), "they differ"


def training_quantized(world: World) -> Found:
    """Weights and gradients that travel as codes are near those of one process; those of the biases travel whole."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(512, 96), nn.GELU(), nn.Linear(96, 512)).to(world.device)
    sharded, start = copy.deepcopy(plain), copy.deepcopy(plain)
    policy = shardrt.QuantizationPolicy(gather=torch.int8, reduce=torch.int8, min_numel=1024)
    shardrt.fully_shard(sharded, quantization_policy=policy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    for batch in torch.randn(STEPS, world.size, 8, 512).to(world.device):
        plain(batch).square().mean().backward()
        sharded(batch[world.rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return compare_moved(0.05, plain, sharded, start)


# ---------------------------------------------------------------------- a GPT


def gpt_float32(world: World) -> Found:
    return compare_gpt(world, 1e-4, FLOAT32)


def gpt_bfloat16(world: World) -> Found:
    return compare_gpt(world, 2e-2, BFLOAT16)


def gpt_compiled_float32(world: World) -> Found:
    return _without_compiler() or compare_gpt(world, 1e-3, FLOAT32, compiled=True)


def gpt_compiled_bfloat16(world: World) -> Found:
    return _without_compiler() or compare_gpt(world, 5e-2, BFLOAT16, compiled=True)


def _without_compiler() -> Found | None:
    """A skip with the reason, if torch.compile cannot work here."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return Found(skipped="no C compiler on the PATH")
    return None if header.exists() else Found(skipped=f"no {header}")


def compare_gpt(world: World, tolerance: float, policy: shardrt.MixedPrecisionPolicy, *, compiled: bool = False) -> Found:
    """Train a GPT; tolerance: see `compare_moved`."""
    config = GPTConfig(layers=3, heads=4, channels=128, context=64)
    plain, sharded, start = (GPT(config).to(world.device) for _ in range(3))
    for block in sharded.blocks if compiled else ():
        block.compile()
    shard(sharded, lambda module: shardrt.fully_shard(module, mp_policy=policy))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batches = torch.randint(BYTES, (world.size, 4, config.context + 1), generator=generator).to(world.device)
        loss = torch.stack([cast_loss(plain, batch, policy.param_dtype) for batch in batches]).mean()
        loss.backward()
        next_byte_loss(sharded(batches[world.rank, :, :-1]), batches[world.rank, :, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return compare_moved(tolerance, plain, sharded, start)


def compare_moved(tolerance: float, plain: nn.Module, sharded: nn.Module, start: nn.Module) -> Found:
    """tolerance: the allowed distance of the parameters, relative to the distance that training moved them from `start`."""
    apart, moved = distance(full(sharded), list(plain.parameters())), distance(plain.parameters(), start.parameters())
    found = Found()
    found.figure("apart", apart / moved)
    assert apart <= tolerance * moved, f"{apart:.2e} from the unsharded parameters, which moved {moved:.2e}"
    return found


def cast_loss(model: nn.Module, batch: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    params = {name: param.to(dtype or param.dtype) for name, param in model.named_parameters()}
    return next_byte_loss(torch.func.functional_call(model, params, batch[:, :-1]), batch[:, 1:])


@torch.no_grad()
def distance(some: Any, others: Any) -> float:
    return float(torch.stack([(a - b).double().norm() for a, b in zip(some, others, strict=True)]).norm())


PARITY: tuple[Check, ...] = (
    training,
    training_replicas,
    training_offloaded,
    training_post_forward_shard,
    training_comm_memory,
    training_quantized,
    random_numbers,
    gpt_float32,
    gpt_bfloat16,
)
COMPILED: tuple[Check, ...] = (gpt_compiled_float32, gpt_compiled_bfloat16)

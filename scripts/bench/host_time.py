"""The host time of a group, for the step benchmark: what sharding adds to the tiny model's forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from bench.workers import WARMUP, process_group
from common.models import CASES, shard


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds per group, forward plus backward."""

    median_us: float
    best_us: float  # from the fastest steps, which other load disturbs least


def host_time(steps: int, fully_shard: Callable[[nn.Module], object], kind: type) -> HostTime:
    """Alternate between a sharded and a whole tiny model, in a world of one rank: neither side communicates there.

    kind: of a sharded module.
    """
    case = CASES["tiny"]
    whole, sharded = case.build(), case.build()
    shard(sharded, fully_shard)
    inputs, targets = case.batch(torch.Generator().manual_seed(0))

    def forward_backward(model: nn.Module) -> float:
        start = time.perf_counter()
        case.loss(model(inputs), targets).backward()
        seconds = time.perf_counter() - start
        model.zero_grad()
        return seconds

    pairs = [(forward_backward(sharded), forward_backward(whole)) for _ in range(WARMUP + steps)]
    groups = sum(isinstance(module, kind) for module in sharded.modules())
    return per_group(pairs[WARMUP:], groups)


def per_group(pairs: list[tuple[float, float]], groups: int) -> HostTime:
    """pairs: seconds of a step of the sharded model, and of the whole model's after it."""
    sharded, whole = zip(*pairs, strict=True)
    extra = median(a - b for a, b in pairs)
    return HostTime(extra / groups * 1e6, (min(sharded) - min(whole)) / groups * 1e6)


def shardrt_host(steps: int) -> HostTime:
    import shardrt

    shardrt.init("cpu")
    found = host_time(steps, shardrt.fully_shard, shardrt.FSDPModule)
    shardrt.finalize()
    return found


def fsdp2_host(steps: int) -> HostTime:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    with process_group("cpu"):
        return host_time(steps, fully_shard, FSDPModule)


HOST_WORKERS = {"host-shardrt": shardrt_host, "host-fsdp2": fsdp2_host}

"""Values and placements of sharded tensors: every kind of placement, uneven, with empty shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardrt import FlatShard, RaggedShard, Replicate, Shard
from shardrt.comm import Work
from shardrt.comm.core.calls import CollectiveCall, Hook
from shardrt.tensor.placement.placement import Placement


def uneven(total: int, size: int) -> tuple[int, ...]:
    """`total` in `size` parts: the first empty, the last the largest."""
    return (*range(size - 1), total - sum(range(size - 1))) if total > sum(range(size - 1)) else (0,) * (size - 1) + (total,)


class Log(Hook):
    """Records collectives: (axis, name, elements of the input)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []

    def called(self, calls: Sequence[CollectiveCall], work: Work) -> None:
        for call in calls:
            assert call.inp is not None
            self.calls.append((call.comm.name.split(".")[-2], call.name, call.inp.numel()))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values that are the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample_placements(shape: tuple[int, ...], size: int) -> list[Placement]:
    """Every kind of placement but `Partial` on one axis, with empty shards."""
    numel = torch.Size(shape).numel()
    last = len(shape) - 1
    return [
        Replicate(),
        Shard(0),
        Shard(last),
        RaggedShard(0, uneven(shape[0], size)),
        RaggedShard(last, uneven(shape[last], size)),
        FlatShard(0, uneven(numel, size)),
        FlatShard(last, uneven(numel, size)),
    ]

"""How a sum of gradients becomes an average, as FSDP2 does it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..comm import Op, PreMulSum, ReduceOp


class Scaling(NamedTuple):
    """Where gradients are multiplied on their way through a reduction, and by what."""

    before: float  # gradients are multiplied by it when they are packed
    op: Op  # of the reduce-scatter
    all_reduce_op: Op
    after: float  # what was reduced is multiplied by it

    @classmethod
    @lru_cache(maxsize=256)  # a divide factor may differ in every step
    def of(
        cls, dtype: torch.dtype, ranks: int, shard_ranks: int, divide_factor: float | None, sums: bool, at_pack: bool
    ) -> Scaling:
        """float16 is divided by about sqrt(ranks) before and after, which keeps it in range.

        at_pack: others are divided when they are packed, which costs nothing, and then only added up. Else by the collective.
        sums: collectives must only sum, so what was reduced is divided, unless that is done already.
        """
        factor = float(ranks) if divide_factor is None else divide_factor
        if dtype is torch.float16:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(1 / before, ReduceOp.SUM, ReduceOp.SUM, before / factor)
        if at_pack:
            return cls(1 / factor, ReduceOp.SUM, ReduceOp.SUM, 1.0)
        if sums:
            return cls(1.0, ReduceOp.SUM, ReduceOp.SUM, 1 / factor)
        if divide_factor is None:
            return cls(1.0, ReduceOp.AVG, ReduceOp.AVG, 1.0)
        average = factor == shard_ranks
        return cls(1.0, ReduceOp.AVG if average else PreMulSum(1 / factor), ReduceOp.SUM, 1.0)

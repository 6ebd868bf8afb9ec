"""How the tensors of an all-gather extension are gathered: by rows, as the ranks own them, or a tensor of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..tensor.rank_counts import RankCounts

Gathered = tuple[torch.dtype, tuple[int, ...]]  # what describes a tensor: its shape, of one dim at least


class TensorPlan(NamedTuple):
    """How one of the tensors is gathered."""

    dtype: torch.dtype
    row: tuple[int, ...]  # the shape of one
    own_rows: int  # that this rank sends
    most_rows: int  # that any rank sends: the others leave the rest of their part of the output unwritten
    rows: int  # of the output

    @classmethod
    def of(cls, tensor: Gathered, by_rows: bool, owned: RankCounts) -> TensorPlan:
        """tensor: this rank's.   by_rows: each rank's has as many rows as the rank owns, or as the first one does."""
        dtype, (count, *row) = tensor
        most, rows = (owned.largest, owned.total) if by_rows else (count, count * len(owned))
        return cls(dtype, tuple(row), count, most, rows)


def has_own_rows(tensor: Gathered, owned: RankCounts, rank: int) -> bool:
    """Whether it has as many rows as the rank owns, or padded ones."""
    return tensor[1][0] in (owned[rank], owned.largest)


def plan_gathers(name: str, everyone: Sequence[Sequence[Gathered]], owned: RankCounts, rank: int) -> list[TensorPlan]:
    """Plan the gathers, by the dtypes and shapes of every rank's tensors and the rows it owns.

    Raises ValueError, on every rank alike, if they are not compatible.
    """
    planned, chunk = [], owned.largest
    for given in zip(*everyone, strict=True) if len({len(tensors) for tensors in everyone}) == 1 else [()]:
        kinds = {(dtype, shape[1:]) for dtype, shape in given}
        counts = [shape[0] for _, shape in given]
        by_rows = all(has_own_rows(tensor, owned, each) for each, tensor in enumerate(given))
        if len(kinds) != 1 or not (by_rows or len(set(counts)) == 1):
            found = "; ".join(f"rank {each}: {tensors}" for each, tensors in enumerate(everyone))
            raise ValueError(
                f"fsdp_pre_all_gather of '{name}': expected tensors of the same dtypes and shapes on all ranks, or of {owned} "
                f"rows, padded to {chunk} or not; found {found}"
            )
        planned.append(TensorPlan.of(given[rank], by_rows, owned))
    return planned

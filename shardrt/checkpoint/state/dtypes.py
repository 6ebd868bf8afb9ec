"""Which conversions of a load lose something, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_LISTED = 8  # names


class Rounded(NamedTuple):
    """A tensor that is loaded into a dtype of fewer digits, or of a smaller range."""

    name: str
    stored: torch.dtype
    own: torch.dtype

    def __str__(self) -> str:
        return f"'{self.name}' from {self.stored} to {self.own}"


def narrows(stored: torch.dtype, own: torch.dtype) -> bool:
    """Whether values lose digits or range in another dtype: float32 in bfloat16, int64 in int32, floats in integers."""
    if stored == own or stored == torch.bool:
        return False
    if is_float(stored):
        return not is_float(own) or _has_more(torch.finfo(stored), torch.finfo(own))
    return own == torch.bool or not (is_float(own) or torch.iinfo(stored).max <= torch.iinfo(own).max)


def is_float(dtype: torch.dtype) -> bool:
    """Whether it has real or complex numbers with digits behind the point."""
    return dtype.is_floating_point or dtype.is_complex


def sentence(found: Sequence[Rounded], rank: int) -> str:
    """What the ranks log; empty for none."""
    if not found:
        return ""
    more = f", and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f"{len(found)} tensors go into narrower dtypes (rank {rank}): {', '.join(map(str, found[:_LISTED]))}{more}"


def _has_more(one: torch.finfo, other: torch.finfo) -> bool:
    return one.eps < other.eps or one.max > other.max

"""What `DTensor.stride()` says: the order of the dims of a dense tensor of the global shape. Local shards may lie otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from .placement import Spec


def with_stride_of(spec: Spec, like: torch.Tensor) -> Spec:
    """The spec with the dims in the order in which they lie in `like`, which has as many."""
    return spec if like.is_contiguous() else replace(spec, stride=_in_order(spec.shape, like.stride()))


def with_stride(spec: Spec, stride: Sequence[int]) -> Spec:
    """The spec with this stride. Raises ValueError if it is not that of a dense tensor of the global shape."""
    shape, given = spec.shape, tuple(stride)
    dense = _in_order(shape, given) if len(given) == len(shape) else None
    expected = _contiguous(shape) if dense is None else dense
    if len(given) != len(shape) or any(n > 1 and a != b for n, a, b in zip(shape, given, expected, strict=True)):
        raise ValueError(
            f"stride {given} of a tensor of shape {tuple(shape)}: expected that of a dense one, such as {expected}"
        )
    return replace(spec, stride=dense)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _in_order(shape: torch.Size, like: Sequence[int]) -> tuple[int, ...] | None:
    """The stride of a dense tensor whose dims lie in the order that the stride `like` has them in; None if contiguous."""
    inner_first = sorted(range(len(shape)), key=lambda dim: (like[dim], -dim))
    numels = accumulate((max(1, shape[dim]) for dim in inner_first), lambda total, size: total * size, initial=1)
    found = dict(zip(inner_first, numels, strict=False))
    stride = tuple(found[dim] for dim in range(len(shape)))
    return None if stride == _contiguous(shape) else stride

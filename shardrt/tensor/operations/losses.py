"""Losses of two tensors of one shape, element by element: on the local shards, and reduced over the ranks."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from .elementwise import on_local_shards
from .reductions import to_scalar

aten = torch.ops.aten

LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",  # autograd has elementwise operations for its backward
    "huber_loss",
    "mse_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)


class _Reduction(IntEnum):
    """The reductions of a loss, by the numbers that torch's operators have for them."""

    NONE = 0
    MEAN = 1
    SUM = 2


_SCALARS = {_Reduction.MEAN: aten.mean.default, _Reduction.SUM: aten.sum.default}


def loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss. Without a reduction it is sharded as its arguments are; else a plain scalar, the same on every rank.

    Cost of a reduction: an all-reduce of one element over the axes that shard the arguments.
    """
    given = _by_name(func, args, kwargs)
    reduction = _Reduction(given["reduction"])
    elements = on_local_shards(func, tuple({**given, "reduction": _Reduction.NONE.value}.values()), {})
    if reduction is _Reduction.NONE:
        return elements
    scalar = _SCALARS[reduction]
    return to_scalar(scalar, (elements,), {})


def loss_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a loss. A mean is one over all elements: a local shard's kernel would divide by its own number."""
    given = _by_name(func, args, kwargs)
    if given["reduction"] == _Reduction.MEAN:
        numel = torch.broadcast_shapes(given["self"].shape, given["target"].shape).numel()
        given |= {"reduction": _Reduction.SUM.value, "grad_output": given["grad_output"] / numel}
    return on_local_shards(func, tuple(given.values()), {})


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments, in the order of the operator's schema."""
    arguments = func._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}

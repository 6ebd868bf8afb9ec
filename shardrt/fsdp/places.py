"""Which weights of a group have a place for their gradients in its packed buffer, and when."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ..torch_internals import post_accumulate_grad_hooks
from . import context
from .autograd import ModuleCalls, Phase
from .context import Streams
from .in_place import LinearWeight, Place
from .param import GatheredParameter, ShardedParam
from .reduce import GradientReduction


def give_places(
    trainable: Sequence[ShardedParam], reduction: GradientReduction, calls: ModuleCalls, streams: Streams
) -> list[tuple[nn.Parameter, Place]]:
    """The large matrices among the unsharded parameters of a large group, and their places.

    Cost: a matrix that is smaller than a quarter of a bucket is copied faster than the calls of Python take.
    """
    found: list[tuple[nn.Parameter, Place]] = []
    for position, param in enumerate(trainable):
        weight = param.unsharded
        is_plain = type(weight) in (nn.Parameter, GatheredParameter, LinearWeight) and param.outer is None
        is_large = len(param.shape) == 2 and param.shape.numel() * param.dtype.itemsize > context.BUCKET_BYTES // 4
        if is_plain and is_large and reduction.has_place(position):
            found.append((weight, partial(_place, position, reduction, calls, streams)))
    return found


def _place(
    position: int, reduction: GradientReduction, calls: ModuleCalls, streams: Streams, weight: nn.Parameter
) -> torch.Tensor | None:
    """A tensor for this gradient, which is computed now; None if it cannot lie in the packed buffer.

    Outside of the backward of the group's modules nobody would pack it. Post-accumulate hooks of the user's might keep it.
    """
    is_expected = calls.phase is Phase.BACKWARD and weight.grad is None
    is_ours = len(post_accumulate_grad_hooks(weight) or ()) <= calls.watches_gradients
    return reduction.place(position, streams.compute) if is_expected and is_ours else None

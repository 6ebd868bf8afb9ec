"""Gradients that need no reduction: what autograd has made becomes the sharded gradients, without a copy.

So it is on a single rank, where gradients are accumulated in the parameters' own dtypes and nothing is done to them on their
way: no factor, no hook, no custom collective, no zeros for parameters without a gradient. As in a model that is not sharded,
each step makes gradients of its own, and `zero_grad()` frees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from ...comm import Stream
from ...kernels import add_into
from ...tensor.replaced import user_hooks
from ..base.events import Named
from ..base.policy import Settings
from ..params.param import ShardedParam
from .sharded_grads import ShardedGrads, observers, tell_observers

Grads = Sequence[torch.Tensor | None]  # one for each trainable parameter; None: it has none


class UnpackedGrads:
    """Publishes the gradients of a group as they are, on the compute stream, or keeps them for a later backward."""

    kept: Grads  # of backwards without synchronisation; () for none; written by leave(), with_kept() and a reset
    _params: Sequence[ShardedParam]
    _sharded: Sequence[nn.Parameter]
    _group: Named

    def __init__(self, params: Sequence[ShardedParam], group: Named) -> None:
        self.kept = ()
        self._params = params
        self._sharded = [param.sharded for param in params]
        self._group = group

    def with_kept(self, grads: Grads, compute: Stream) -> Grads:
        """These gradients and those that were kept, added up; nothing is kept any more."""
        kept, self.kept = self.kept, ()
        if not kept:
            return grads
        both = [(old, new) for old, new in zip(kept, grads, strict=True) if old is not None and new is not None]
        compute.submit(partial(add_into, [old for old, _ in both], [new for _, new in both]))
        return [new if old is None else old for old, new in zip(kept, grads, strict=True)]

    def takes(self, grads: Grads, settings: Settings) -> bool:
        """The settings ask for nothing to be done to gradients, and these are plain dense tensors in the parameters' dtypes.

        And of no graph, as `backward(create_graph=True)` makes them.
        """
        if settings.reduce_hook is not None or settings.reduce_unused or settings.divide_factor not in (None, 1):
            return False
        for grad, param in zip(grads, self._params, strict=True):
            if grad is not None and (
                type(grad) is not torch.Tensor
                or grad.dtype is not param.dtype
                or grad.layout is not torch.strided
                or grad.requires_grad
            ):
                return False
        return True

    def leave(self, grads: Grads, sharded: ShardedGrads, compute: Stream, *, publish: bool) -> None:
        """Make these the sharded gradients, or keep them."""
        if observers.all:
            for grad in grads:
                if grad is not None:
                    tell_observers(self._group, grad.untyped_storage())
        if publish:
            compute.submit(partial(self._publish, grads, sharded, compute))
        else:
            self.kept = grads

    def _publish(self, grads: Grads, earlier: ShardedGrads, compute: Stream) -> None:
        """On `compute`."""
        positions, older, newer = [], [], []
        for position, grad in enumerate(grads):
            if grad is None:
                continue
            positions.append(position)
            param, sharded = self._params[position], self._sharded[position]
            if grad.dim() == 0:
                grad = grad.view(1)  # as the local tensor of a scalar is
            if user_hooks(sharded):
                grad = earlier.hooked(position, grad)
            if sharded.grad is None:
                sharded.grad = param.sharded_like(grad)
            else:
                older.append(earlier.older(position, compute))
                newer.append(grad)
        if older:
            add_into(older, newer)
        earlier.call_hooks(positions, compute)

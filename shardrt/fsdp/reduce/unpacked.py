"""Gradients that need no reduction: what autograd has made becomes the sharded gradients, without a copy.

This holds on a single rank where gradients are accumulated in the parameters' own dtypes and nothing is done to them on their
way: no factor, no hook, no custom collective, no zeros for parameters without a gradient. As in a model that is not sharded,
each step makes gradients of its own, and `zero_grad()` frees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ...comm import Stream
from ...kernels import add_into
from ...tensor.dtensor.replaced import user_hooks
from ..base import events
from .packed_grads import Grads, KeptGrads, PackedGrads
from .reduce import GradientReduction, ReductionSpec


class UnpackedReduction(GradientReduction):
    """Publishes the gradients of a single rank as they are, on the compute stream, or keeps them for a later backward.

    It packs them where the settings ask for something to be done to them.
    """

    @staticmethod
    def suits(spec: ReductionSpec) -> bool:
        """Whether nothing is to be reduced, converted, moved or added up for these trainable parameters."""
        return (
            spec.comm.size == 1
            and spec.replicas is None
            and all(param.dtype == spec.dtype and param.local.device == spec.comm.device for param in spec.chosen)
            and all(param.outer is None or param.outer.partial_mesh is None for param in spec.chosen)
        )

    def _keep(self, grads: Mapping[int, torch.Tensor], stream: Stream) -> None:
        self._accumulated = KeptGrads([grads.get(position) for position in range(len(self.params))], stream)

    def pack(self, grads: Grads, compute: Stream) -> PackedGrads | None:
        if isinstance(held := self._accumulated, KeptGrads):
            self._accumulated = None
            grads = _added(held.grads, grads, compute)
        if self._accumulated is not None or not self._takes(grads):
            return super().pack(grads, compute)
        if events.observers:
            for grad in grads:
                if grad is not None:
                    self.grads.tell_observers(grad.untyped_storage())
        if self._spec.settings.sync_gradients:
            compute.submit(partial(self._publish, grads, compute))
        else:
            self._accumulated = KeptGrads(grads, compute)
        return None

    def _takes(self, grads: Grads) -> bool:
        """Whether these gradients can be published as they are.

        The settings must ask for nothing to be done to them, and they must be plain dense tensors in the parameters' dtypes
        that are in no graph, unlike those of `backward(create_graph=True)`.
        """
        settings = self._spec.settings
        if settings.reduce_hook is not None or settings.reduce_unused or settings.divide_factor not in (None, 1):
            return False
        if self._spec.dtype.is_complex and any(grad is not None and grad.is_conj() for grad in grads):
            return False  # as torch's optimizers cannot take one that is conjugated lazily
        for grad, param in zip(grads, self.params, strict=True):
            if grad is not None and (
                type(grad) is not torch.Tensor
                or grad.dtype is not param.dtype
                or grad.layout is not torch.strided
                or grad.requires_grad
            ):
                return False
        return True

    def _publish(self, grads: Grads, compute: Stream) -> None:
        """Make these the sharded gradients, or add them to earlier ones. This runs on `compute`."""
        positions, older, newer, earlier = [], [], [], self.grads
        for position, grad in enumerate(grads):
            if grad is None:
                continue
            positions.append(position)
            param = self.params[position]
            sharded = param.sharded
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


def _added(kept: Grads, grads: Grads, compute: Stream) -> Grads:
    """Gradients that were kept and newer ones, added up."""
    both = [(old, new) for old, new in zip(kept, grads, strict=True) if old is not None and new is not None]
    compute.submit(partial(add_into, [old for old, _ in both], [new for _, new in both]))
    return [new if old is None else old for old, new in zip(kept, grads, strict=True)]

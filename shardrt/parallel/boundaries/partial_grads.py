"""Parameters of parallelized modules without `fully_shard`: what the forward reads, and how gradients come back.

A parameter is a `DTensor`; the forward reads a plain leaf tensor that shares its memory, and autograd accumulates the leaf's
gradient. When the backward ends, the gradients that are partial over the axis are summed by one all-reduce for each dtype, and
all are published as `param.grad`.

Cost: a hook in Python for each parameter and backward. Autograd through the DTensor itself costs ten times as much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar, overload
from weakref import ref

import torch

from ...comm import ReduceOp, current_stream
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.replaced import hooked, user_hooks
from ...torch_internals import post_accumulate_grad_hooks, queue_backward_callback
from .axis import Axis, Part, axis_of
from .relayout import REPLICATE, relayout

_numbers = count()
_UNSHARED = 3  # references to a gradient that nobody else holds: a field, a variable, an argument


class Leaf:
    """The plain leaf tensor of one parameter. Held by the parameter itself."""

    __slots__ = ("__weakref__", "_gradient", "axis", "local", "number", "param", "tensor")

    def __init__(self, param: DTensor, terms: bool) -> None:
        self.param = ref(param)
        self.number = next(_numbers)  # the same order on every rank
        self.axis: Axis | None = axis_of(param.spec.mesh) if terms or param.grad_placements is not None else None
        self.local = param._local_tensor
        self.tensor = self.local.detach().requires_grad_()
        self.tensor.register_post_accumulate_grad_hook(_hook(ref(self)))
        self._gradient: DTensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def publish(self, grad: torch.Tensor) -> None:
        """Add `grad` to the parameter's gradient, and call its hooks."""
        param = self.param()
        if param is None:
            return
        if user_hooks(param):
            grad = hooked(param, DTensor(grad, param.spec))._local_tensor
        before: torch.Tensor | None = param.grad
        if before is None:
            param.grad = self._wrapped(grad, param)
        elif isinstance(before, DTensor):
            before._local_tensor.add_(grad)
        else:  # an operation gathered the parameter, in the user's own forward: that gradient is the full one
            param.grad = DTensor(param.spec.local_shard(before).add(grad), param.spec)
        for hook in (post_accumulate_grad_hooks(param) or {}).values():
            hook(param)

    def _wrapped(self, grad: torch.Tensor, param: DTensor) -> DTensor:
        made = self._gradient
        if made is None or made.spec is not param.spec or sys.getrefcount(made) > _UNSHARED:
            made = self._gradient = DTensor(grad, param.spec)
        made._local_tensor = grad
        return made


@overload
def visible(param: torch.Tensor, *, terms: bool = False) -> torch.Tensor: ...


@overload
def visible(param: torch.Tensor | None, *, terms: bool = False) -> Any: ...


def visible(param: torch.Tensor | None, *, terms: bool = False) -> torch.Tensor | None:
    """What a forward reads in the place of a parameter: a plain local tensor. Under `fully_shard` it is one already.

    terms: whether the gradient of each rank is a term of a sum.
    """
    if type(param) is not DTensor:
        return param
    if not (param.requires_grad and torch.is_grad_enabled()):
        return param._local_tensor
    if not param.is_leaf:  # torch.func.functional_call has put it in the parameter's place
        local = param.to_local()
        return relayout(axis_of(param.spec.mesh), Part(local, REPLICATE), REPLICATE, summed=terms).local
    leaf: Leaf | None = param.__dict__.get("tp_leaf")
    if leaf is None or leaf.local is not param._local_tensor:
        leaf = param.__dict__["tp_leaf"] = Leaf(param, terms)
    return leaf.tensor


def run_exposed(module: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, terms: bool = False) -> Any:
    """Run a forward with plain local tensors in the place of the registered parameters. terms: see `visible`."""
    registries = [child._parameters for child in module.modules()]
    saved = [(params, name, p) for params in registries for name, p in params.items() if p is not None]
    for params, name, param in saved:
        params[name] = visible(param, terms=terms)
    try:
        return forward(*args, **kwargs)
    finally:
        for params, name, param in saved:
            params[name] = param


class _Backward:
    """A backward that runs, and its leaves with a complete gradient. The engine calls this at its end.

    The engine alone holds it, and lets go of it as well when the backward fails.
    """

    __slots__ = ("__weakref__", "leaves")
    running: ClassVar[ref[_Backward] | None] = None

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []

    def __call__(self) -> None:
        leaves, self.leaves = self.leaves, []
        _Backward.running = None
        _publish(leaves)

    def __del__(self) -> None:
        for leaf in self.leaves:
            leaf.tensor.grad = None


def _hook(leaf: ref[Leaf]) -> Callable[[torch.Tensor], None]:
    def ready(tensor: torch.Tensor) -> None:
        if (found := leaf()) is not None:
            running = None if _Backward.running is None else _Backward.running()
            if running is None:
                running = _Backward()
                _Backward.running = ref(running)
                queue_backward_callback(running)
            running.leaves.append(found)

    return ready


@torch.no_grad()
def _publish(leaves: list[Leaf]) -> None:
    gradients = {}
    for leaf in leaves:
        grad, leaf.tensor.grad = leaf.tensor.grad, None
        if grad is not None:
            gradients[leaf] = grad.detach()  # create_graph=True makes a graph, which would keep the activations
    _reduce({leaf: grad for leaf, grad in gradients.items() if leaf.axis is not None and leaf.axis.size > 1})
    for leaf, grad in gradients.items():
        leaf.publish(grad)


def _reduce(gradients: dict[Leaf, torch.Tensor]) -> None:
    """Sum partial gradients over their axes, in place. Cost: one all-reduce for each axis and dtype."""
    together: dict[tuple[Axis, torch.dtype], list[torch.Tensor]] = {}
    for leaf in sorted(gradients, key=lambda leaf: leaf.number):
        assert leaf.axis is not None
        together.setdefault((leaf.axis, gradients[leaf].dtype), []).append(gradients[leaf])
    for (axis, _), grads in together.items():
        for grad, each in zip(grads, summed(axis, grads), strict=True):
            grad.copy_(each)


def summed(axis: Axis, terms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sums over the axis of tensors of one dtype, by one all-reduce: views of one new tensor."""
    flat = torch.cat([term.reshape(-1) for term in terms])
    stream = current_stream(flat.device)
    axis.partial.all_reduce(flat, flat, ReduceOp.SUM, stream=stream).wait(stream)
    return [part.view(term.shape) for part, term in zip(flat.split([term.numel() for term in terms]), terms, strict=True)]

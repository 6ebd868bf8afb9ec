"""Gradients of linear layers' weights, computed in the buffer from which they are reduced.

| step      | where                            | what                                                                    |
|-----------|----------------------------------|-------------------------------------------------------------------------|
| forward   | `F.linear(x, weight, bias)`      | `LinearWeight` takes the call; torch computes as it always does         |
| backward  | the node of that call            | gradient = grad^T x, written to the weight's `Place` (one `mm` with out) |
| backward  | torch's `AccumulateGrad`         | makes that tensor the weight's `.grad`: nobody else refers to it        |
| pack      | `GradientReduction.pack`         | skips what lies in its place already                                    |

Elsewhere a gradient is allocated, written, and copied into the buffer; here it is written once. This is done only where all
streams run on the caller's thread. Where reductions overlap compute, few groups would get the buffer in time, so gradients are
copied. Every result has the bits of torch's own `F.linear`: it is the same matrix product of the same operands. The operations
and the tensors saved for backward are the same too, since an activation checkpoint compares them with those of a recomputation,
which may run torch's `F.linear`.

A weight gets an ordinary gradient instead wherever its place cannot be had (`GradientReduction.place`), or where somebody might
keep the gradient: hooks of the user's, `torch.autograd.grad`, `create_graph=True`. Torch's own `F.linear` runs where it is
given something unusual, under autocast, in torch.func's transforms and in forward-mode AD; and in a process that compiles,
since the compiler cannot follow the class of the weight.

Hazard: a hook of an autograd node (`out.grad_fn.register_hook`) that keeps a view of such a gradient must clone it: the memory
is used again. The gradient itself may be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.weak import TensorWeakRef

from ...comm import Stream
from ...comm.program.version import release
from ...torch_internals import (
    Wanted,
    as_plain_tensors,
    aten_operator,
    compiler_in_use,
    current_transform,
    forward_mode_is_active,
    may_be_kept,
    post_accumulate_grad_hooks,
    same_storage,
    wanted,
)
from ..base.autograd import GroupPhase, ModuleCalls
from ..base.trees import tensors_in
from ..memory import context
from ..memory.context import Streams
from .param import GatheredParameter, RunningParameter, ShardedParam

_unsafe_view = aten_operator("_unsafe_view")
_VIEW_WITH_BIAS = release(torch.__version__) < (2, 15)

Place = Callable[[nn.Parameter], torch.Tensor | None]  # makes a tensor in the gradient's place, or None


def computes_in_place() -> bool:
    """Whether linear layers that run now may compute their weights' gradients in place."""
    return torch.is_grad_enabled() and not compiler_in_use()


class LinearWeight(RunningParameter):
    """The class of an unsharded weight while its modules run with gradients, except while the user can reach it.

    Cost: 1 us for each operation on it, and 40 us for each linear layer in forward and backward. So only large weights have it.
    """

    place: Place | None = None  # a copy has none

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(kind is not LinearWeight for kind in types):  # other classes decide the result, and know plain parameters
            with _as_parameters([each for each in tensors_in([args, kwargs]) if type(each) is LinearWeight]):
                return func(*args, **(kwargs or {}))
        with as_plain_tensors():
            if func is linear and not kwargs and _is_usual(*args):
                return _linear(*args)
            return func(*args, **(kwargs or {}))


@contextmanager
def _as_parameters(weights: Iterable[LinearWeight]) -> Iterator[None]:
    """Inside the block, the class of these weights is `nn.Parameter`."""
    for weight in weights:
        weight.__class__ = nn.Parameter  # type: ignore[assignment]
    try:
        yield
    finally:
        for weight in weights:
            if type(weight) is nn.Parameter and "place" in weight.__dict__:  # nobody has taken it away meanwhile
                weight.__class__ = LinearWeight


def _is_usual(x: Any, weight: Any, bias: Any = None) -> bool:
    """Whether these arguments of `F.linear` are those of a layer in ordinary training, without autocast and transforms."""
    return (
        type(x) is torch.Tensor
        and type(weight) is LinearWeight
        and weight.requires_grad
        and x.layout is torch.strided
        and not x.is_nested
        and x.dim() > 1
        and x.is_contiguous()
        and (x.dtype, x.device) == (weight.dtype, weight.device)
        and _is_plain_training(x.device)
    )


def _is_plain_training(device: torch.device) -> bool:
    return (
        torch.is_grad_enabled()
        and current_transform() is None
        and not forward_mode_is_active()
        and not (torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type))
    )


def _linear(x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dim() == 2:
        return _Linear.apply(x, weight, bias)
    made = _Linear.apply(x.flatten(0, -2), weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    is_view = bias is not None and _VIEW_WITH_BIAS  # as torch has it
    return made.view(shape) if is_view or _unsafe_view is None else _unsafe_view(made, shape)


class _Linear(torch.autograd.Function):
    """`F.linear` of matrices: (rows, in) @ (out, in)^T + (out,) -> (rows, out)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        transposed = weight.t()
        saved = transposed if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(*((saved, x) if bias is None else (x, saved)))  # in the order in which torch saves them
        ctx.weight, ctx.has_bias = weight, bias is not None
        return x.mm(transposed) if bias is None else torch.addmm(bias, x, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, transposed = ctx.saved_tensors if ctx.has_bias else ctx.saved_tensors[::-1]
        to_x, to_weight = (Wanted.NO if node is None else wanted(node) for node, _ in ctx.next_functions[:2])
        of_bias = grad if ctx.has_bias else None  # autograd sums it over the rows, to the bias's shape
        with as_plain_tensors():
            if torch.is_grad_enabled():  # create_graph=True: by operations that autograd records
                return grad.mm(ctx.weight), grad.t().mm(x), of_bias
            of_weight = None if to_weight is Wanted.NO else _weight_grad(ctx.weight, grad, x, to_weight)
            return None if to_x is Wanted.NO else grad.mm(transposed.t()), of_weight, of_bias


def _weight_grad(weight: LinearWeight, grad: torch.Tensor, x: torch.Tensor, use: Wanted) -> torch.Tensor:
    """Compute grad^T x, in the strides of the weight, and in the weight's place if there is one for it."""
    place = None
    if use is Wanted.ACCUMULATED and not may_be_kept(weight) and (make := getattr(weight, "place", None)) is not None:
        place = make(weight)  # (a later forward without gradients may have removed `weight.place`)
    if weight.is_contiguous():  # the two products have the same bits, but torch takes the one that needs no transposition
        return torch.mm(grad.t(), x, out=place)
    if place is None:
        return x.t().mm(grad).t()
    torch.mm(x.t(), grad, out=place.t())
    return place


class Given:
    """Tensors in a packed buffer that were given to autograd as gradients, and are not packed yet.

    Autograd may hold one as the gradient, drop it, add it to another gradient or copy it; a hook may keep it. Weak references
    tell which of them are still alive.
    """

    _given: dict[int, TensorWeakRef]  # by the position of the parameter

    def __init__(self) -> None:
        self._given = {}

    def __contains__(self, position: int) -> bool:
        return position in self._given

    def give(self, position: int, view: torch.Tensor) -> torch.Tensor:
        """Make another tensor in the memory of `view`, to be the gradient at this position."""
        made = view.detach()
        self._given[position] = TensorWeakRef(made)
        return made

    def arrived(
        self, grads: Sequence[torch.Tensor | None], views: Mapping[int, torch.Tensor], stream: Stream
    ) -> frozenset[int]:
        """Returns: the positions whose gradient lies in its view.

        A given tensor that somebody still holds gets memory of its own, since `stream` is about to write the buffer.
        """
        in_place = frozenset(position for position in self._given if _same_place(grads[position], views[position]))
        if any(reference() is not None for reference in self._given.values()):
            stream.submit(self.give_up)
        self._given.clear()
        return in_place

    def copy_away(self, grads: Sequence[torch.Tensor | None], views: Mapping[int, torch.Tensor]) -> None:
        """Give memory of its own to what autograd holds, accumulated gradients too: others are about to write the buffer."""
        for position in self._given:
            grad = grads[position]
            if grad is not None and _same_place(grad, views[position]):
                grad.data = grad.clone()
        self.give_up()

    def give_up(self) -> None:
        """Give memory of its own to what somebody still holds: the buffer is about to be written or freed."""
        for reference in self._given.values():
            if (held := reference()) is not None:
                held.data = held.clone()
        self._given.clear()


def _same_place(grad: torch.Tensor | None, view: torch.Tensor) -> bool:
    return (
        grad is not None
        and same_storage(grad.untyped_storage(), view.untyped_storage())
        and (grad.storage_offset(), grad.stride()) == (view.storage_offset(), view.stride())
    )


# ---------------------------------------------------------------------- which weights, and when


def give_places(
    trainable: Sequence[ShardedParam],
    has_place: Callable[[int], bool],
    place: Callable[[int, Stream], torch.Tensor | None],
    calls: ModuleCalls,
    streams: Streams,
) -> list[tuple[nn.Parameter, Place]]:
    """The large matrices among the unsharded parameters of a large group, and their places.

    has_place, place: those of the group's `GradientReduction`.
    Cost: to copy a matrix smaller than a quarter of a bucket takes less time than the Python calls, so these are left out.
    """
    found: list[tuple[nn.Parameter, Place]] = []
    for position, param in enumerate(trainable):
        weight = param.unsharded
        is_plain = type(weight) in (nn.Parameter, GatheredParameter, RunningParameter, LinearWeight) and param.outer is None
        is_large = len(param.shape) == 2 and param.shape.numel() * param.dtype.itemsize > context.BUCKET_BYTES // 4
        if is_plain and is_large and has_place(position):
            found.append((weight, partial(_place, partial(place, position), calls, streams)))
    return found


def _place(
    place: Callable[[Stream], torch.Tensor | None], calls: ModuleCalls, streams: Streams, weight: nn.Parameter
) -> torch.Tensor | None:
    """A tensor for this gradient, which is computed now; None if it cannot lie in the packed buffer.

    It cannot outside of the backward of the group's modules, where nobody would pack it, nor if the user has post-accumulate
    hooks, which might keep it.
    """
    is_expected = calls.phase is GroupPhase.BACKWARD and weight.grad is None
    is_ours = len(post_accumulate_grad_hooks(weight) or ()) <= calls.watches_gradients
    return place(streams.compute) if is_expected and is_ours else None

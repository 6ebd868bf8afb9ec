"""Boundaries: where an activation changes its placement, forward and backward.

Activations are plain local tensors. N ranks; a gradient has the placement of its tensor, `Replicate` in the place of `Partial`:

| from       | to         | forward        | backward       |
|------------|------------|----------------|----------------|
| sharded    | replicated | all-gather     | cut            |
| replicated | sharded    | cut            | all-gather     |
| partial    | replicated | all-reduce     | as is          |
| partial    | sharded    | reduce-scatter | all-gather     |
| replicated | partial    | rank 0's, zeros elsewhere | as is |
| sharded    | sharded, another dim | all-to-all | all-to-all |

A module whose weight is split makes only a term of its input's gradient: it reads a twin of a replicated tensor, which shares
its memory and whose gradient is partial. All readers of one tensor share one twin, and so one collective:

| from       | to         | forward        | backward       |
|------------|------------|----------------|----------------|
| replicated | twin       | as is          | all-reduce     |
| sharded    | twin       | all-gather     | reduce-scatter |

These are the functions f, g and their sequence-parallel forms of Megatron-LM (Shoeybi et al. 2019, Korthikanti et al. 2022).

Gradients of gradients: in a backward with create_graph=True, each boundary's backward is a boundary again, with its two columns
exchanged. A gradient of a partial tensor is then read as a twin, and the gradient of a twin is partial, as in the tables.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...comm import Communicator
from ...comm.core.calls import now
from ...tensor.dtensor.dtensor import DTensor, dtensor_of
from ...tensor.placement.placement import Partial, Placement, Replicate, Shard, Spec
from ...tensor.placement.redistribute import Change
from ...torch_internals import current_backward, in_backward
from .axis import Axis, Part, Pending, owned

REPLICATE, PARTIAL = Replicate(), Partial()

# What the backward of a node passes on, its attribute `passes`: bits, so that both may arrive. 0: as what arrives, from a node
# that does not communicate over the axis. Where its first output is replicated, so that whole gradients are to arrive there,
# its attribute `whole` says what that is the output of.
TERMS, WHOLE, AS_ARRIVES = 1, 2, 0


def relayout(axis: Axis, part: Part, target: Placement, *, summed: bool = False) -> Part:
    """This rank's part by another placement. Differentiable. Collective.

    summed: what reads the result has, on each rank, a term of its gradient.
    Raises NotImplementedError for a placement that is not in the table.
    """
    local, source, _ = part
    source, target = nonnegative(source, local.dim()), nonnegative(target, local.dim())
    if axis.size == 1:
        return Part(local, target)
    if source == target and not summed:
        return part
    if not (_is_known(source) and _is_known(target)):
        raise NotImplementedError(
            f"a tensor parallel boundary from {source} to {target} on {axis.mesh}: expected Shard, Replicate, or Partial, a sum"
        )
    shape = axis.shape(part)
    if isinstance(target, Shard):
        axis.remember(shape[target.dim])
    there = Change(axis.comm, shape, source, target)
    back = Change(axis.comm, shape, PARTIAL if summed else _of_gradient(target), _of_gradient(source))
    passes, whole = WHOLE if source == REPLICATE else TERMS, now.subject if target == REPLICATE and not summed else None
    return Part(_Relayout.apply(local, there, back, passes, whole), target, shape)


def all_reduced(comm: Communicator, terms: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of a communicator, of which each has a term: partial to replicated."""
    there, back = (Change(comm, terms.shape, old, REPLICATE) for old in (PARTIAL, REPLICATE))
    return terms if comm.size == 1 else _Relayout.apply(terms, there, back, WHOLE)


def shared_gather(axis: Axis, part: Part) -> torch.Tensor:
    """All of a tensor that is split, for code that reads it as it likes, and with a twin for modules with split weights."""
    if axis.size == 1 or not (torch.is_grad_enabled() and part.local.requires_grad):
        return axis.changed(part, REPLICATE)
    full, twin = _MakeTwin.apply(part.local, TwinGradient(axis, part.placement), axis.shape(part))
    full.tp_twin = twin, full._version
    return full


def twin_of(axis: Axis, tensor: torch.Tensor) -> torch.Tensor | None:
    """The twin of a replicated tensor, which counts the caller as one more reader; None if no gradient is needed."""
    if not (tensor.requires_grad and torch.is_grad_enabled()) or axis.size == 1:
        return None
    twin: torch.Tensor | None
    twin, version = getattr(tensor, "tp_twin", (None, 0))
    # Hazard: the tensor may have been written to since, and a twin whose backward has run counts its readers no more. A
    # recomputation, whose readers may have no backward, must not count as readers of the forward.
    if twin is None or version != tensor._version or not gradient_of(twin).counts(axis):
        _, twin = _MakeTwin.apply(tensor, TwinGradient(axis, REPLICATE), tensor.shape)
        if tensor.grad_fn is not None:  # a leaf would keep itself alive, by way of its twin's graph
            tensor.tp_twin = twin, tensor._version  # type: ignore[attr-defined]
    gradient = gradient_of(twin)
    gradient.readers += 1
    gradient.left += 1
    return twin


def gradient_of(twin: torch.Tensor) -> TwinGradient:
    return twin.grad_fn.gradient  # type: ignore[union-attr]


class TwinGradient:
    """The gradient of a twin: those of its readers, which are summed here, and reduced once.

    A reader's backward calls `add` and returns no gradient. The last one starts the reduction, and computes the gradient of its
    weight beside it. If a reader's backward does not run, the reduction starts when the twin's does.
    Sum and reduction are in the readers' dtype (under autocast: its), or in the wider one of two.
    With create_graph=True readers return their gradients instead, so that autograd sums them.
    Invariant: it has no tensor of the forward: graphs refer to it, and a cycle would keep activations until Python's collector
    runs.
    """

    __slots__ = ("axis", "backward", "closed", "left", "pending", "placement", "readers", "recomputed", "sum")

    def __init__(self, axis: Axis, placement: Placement) -> None:
        self.axis, self.placement = axis, placement  # of the tensor that the twin was made of, and so of the reduced gradient
        self.readers = self.left = 0
        self.closed, self.recomputed = False, in_backward()
        self.backward = -1  # the one that `sum`, `left` and `pending` belong to
        self.sum: torch.Tensor | None = None
        self.pending: Pending | None = None

    def counts(self, axis: Axis) -> bool:
        """Whether a module on `axis` that runs now may be one more reader."""
        return not self.closed and self.axis is axis and self.recomputed is in_backward()

    def add(self, grad: torch.Tensor) -> None:
        """Add a reader's gradient, a contiguous tensor of its own."""
        self._forget_other_backward()
        found = self.sum
        if found is None:
            self.sum = grad
        else:  # under autocast, some readers may compute in float32
            self.sum = found.add_(grad) if found.dtype is grad.dtype else found + grad
        self.left -= 1
        if self.left == 0:
            self.pending = self.axis.start(Part(self.sum, PARTIAL), self.placement)

    def take(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The reduced gradient. grad: of readers that are not ours, such as a subclass's own forward."""
        self._forget_other_backward()
        axis, found, pending = self.axis, self.sum, self.pending
        self.closed, self.sum, self.pending, self.left = True, None, None, self.readers
        if torch.is_grad_enabled():
            return None if grad is None else relayout(axis, Part(grad, PARTIAL), self.placement).local
        done = None if pending is None else pending.result()
        if pending is not None:
            found = grad
        elif grad is not None:
            found = grad if found is None else found + grad
        if found is None:
            return done
        reduced = axis.changed(Part(found, PARTIAL), self.placement)
        return reduced if done is None else done + reduced

    def _forget_other_backward(self) -> None:
        """Drop what a backward left that failed, or that needed readers' gradients but not the twin's."""
        if self.backward != (running := current_backward()):
            if self.pending is not None:
                self.pending.result()
            self.backward, self.sum, self.pending, self.left = running, None, None, self.readers


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, there: Change, back: Change, passes: int, whole: str | None = None
    ) -> torch.Tensor:
        ctx.there, ctx.back, ctx.passes, ctx.whole = there, back, passes, whole
        return owned(there(local))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if torch.is_grad_enabled():
            return _Relayout.apply(grad, ctx.back, ctx.there, WHOLE), None, None, None, None
        return ctx.back(grad), None, None, None, None


class _MakeTwin(torch.autograd.Function):
    """This rank's part of a tensor to its twin, and, if it is split, to the whole tensor as other code reads it."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, gradient: TwinGradient, shape: torch.Size
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.dtype = gradient, local.dtype
        if gradient.placement == REPLICATE:
            ctx.passes = WHOLE
            return None, local.detach()  # not a view: writes to the tensor stay possible, and are noticed where it was saved
        ctx.passes, ctx.whole = TERMS, now.subject
        full = owned(gradient.axis.changed(Part(local, gradient.placement, shape), REPLICATE))
        return full, full.detach()

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_of_twin: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        reduced = ctx.gradient.take(grad_of_twin)
        reduced = reduced if reduced is None else reduced.to(ctx.dtype)
        if grad is not None:
            own = relayout(ctx.gradient.axis, Part(grad, REPLICATE), ctx.gradient.placement).local
            reduced = own if reduced is None else own + reduced
        return reduced, None, None


def _is_known(placement: Placement) -> bool:
    return type(placement) is Shard or placement in (REPLICATE, PARTIAL)


def _of_gradient(placement: Placement) -> Placement:
    return REPLICATE if placement == PARTIAL else placement


# ---------------------------------------------------------------------- DTensors at boundaries


def local_of(axis: Axis, value: torch.Tensor, layout: Placement, name: str) -> Part:
    """This rank's part of an input, by a DTensor's own placement, or, of a plain tensor, by `layout`.

    name: of the module, for messages. Raises ValueError for a DTensor on another mesh, TypeError for what is not a tensor.
    """
    if type(value) is DTensor:
        spec = value.spec
        if spec.mesh is not axis.mesh:
            raise ValueError(f"the input of '{name}' is a DTensor on {spec.mesh}: expected one on {axis.mesh}")
        local, version = getattr(value, "tp_local", (None, 0))
        if local is None or _version(value) != version:
            local = value.to_local()
        return Part(local, spec.placements[0], spec.shape)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the input of '{name}' on {axis.mesh}: expected a tensor by {layout}, found a {type(value).__name__}")
    return Part(value, nonnegative(layout, value.dim()))


def as_dtensor(axis: Axis, part: Part) -> DTensor:
    """The DTensor of an activation: the operations that need other ranks' elements are refused. Differentiable."""
    placement = nonnegative(part.placement, part.local.dim())
    made = dtensor_of(part.local, _activation_spec(axis, placement, axis.shape(part)))
    # Cost: what reads the local tensor again needs no autograd nodes for the way through the DTensor, 20 us.
    made.tp_local = part.local, _version(made)  # type: ignore[attr-defined]
    return made


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was written to. Tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


@functools.lru_cache(maxsize=1024)
def _activation_spec(axis: Axis, placement: Placement, shape: torch.Size) -> Spec:
    """One object for all activations of a shape: operations compare specs by identity first."""
    return Spec(axis.mesh, (placement,), shape, gathers=False)


def nonnegative(placement: Placement, dims: int) -> Placement:
    """The placement with a dim that counts from the front."""
    if type(placement) is Shard and not 0 <= placement.dim < dims:
        if not -dims <= placement.dim < dims:
            raise ValueError(f"{placement} of an activation of {dims} dims: expected {-dims} <= dim < {dims}")
        return Shard(placement.dim % dims)
    return placement

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

A module whose weight is split makes only a term of its input's gradient: it reads a `Twin` of a replicated tensor, which shares
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
from collections.abc import Callable
from typing import Any

import torch

from ..comm import Communicator, ReduceOp, current_stream
from ..comm.calls import now
from ..tensor.dtensor import DTensor, dtensor_of
from ..tensor.placement import Partial, Placement, Replicate, Shard, Spec
from ..tensor.redistribute import change_axis
from ..torch_internals import current_backward, in_backward
from .axis import Axis, Pending, owned

Change = Callable[[torch.Tensor], torch.Tensor]
REPLICATE, PARTIAL = Replicate(), Partial()

# What the backward of a node passes on, its attribute `passes`: bits, so that both may arrive. 0: as what arrives, from a node
# that does not communicate over the axis. Where its first output is replicated, so that whole gradients are to arrive there,
# its attribute `whole` says what that is the output of.
TERMS, WHOLE, AS_ARRIVES = 1, 2, 0


def relayout(axis: Axis, local: torch.Tensor, source: Placement, target: Placement, total: int | None = None) -> torch.Tensor:
    """The local part by `target` of a tensor of which `local` is the part by `source`. Differentiable. Collective.

    total: the size of the dim that `source` splits, if the caller knows it.
    Raises NotImplementedError for a change that is not in the table.
    """
    source, target = _nonnegative(source, local.dim()), _nonnegative(target, local.dim())
    if source == target or axis.size == 1:
        return local
    row = _ROWS.get((type(source), type(target)))
    if row is None:
        raise NotImplementedError(f"a tensor parallel boundary from {source} to {target} on {axis.mesh}: expected {_KNOWN}")
    passes, whole = WHOLE if source == REPLICATE else TERMS, now.subject if target == REPLICATE else None
    return _Relayout.apply(local, *row(axis, local, source, target, total), passes, whole)


def shared_gather(axis: Axis, local: torch.Tensor, dim: int, total: int | None = None) -> torch.Tensor:
    """All parts of `dim`, for code that reads the tensor as it likes, and with a twin for modules with split weights.

    total: the size of `dim`, if the caller knows it.
    """
    if axis.size == 1:
        return local
    total = axis.total(local.shape[dim]) if total is None else total
    if not (torch.is_grad_enabled() and local.requires_grad):
        return axis.gather(local, dim, total)
    terms = Terms(axis, dim)
    full, seen = _SharedGather.apply(local, terms, total)
    full.tp_twin = Twin(seen, terms, full._version)
    return full


def twin_of(axis: Axis, tensor: torch.Tensor) -> Twin | None:
    """The twin of a replicated tensor, which counts the caller as one more reader; None if no gradient is needed."""
    if not (tensor.requires_grad and torch.is_grad_enabled()) or axis.size == 1:
        return None
    twin: Twin | None = getattr(tensor, "tp_twin", None)
    # Hazard: the tensor may have been written to since, and a twin whose backward has run counts its readers no more. A
    # recomputation, whose readers may have no backward, must not count as readers of the forward.
    if twin is None or not (twin.version == tensor._version and twin.terms.counts(axis)):
        terms = Terms(axis, None)
        twin = Twin(_Share.apply(tensor, terms), terms, tensor._version)
        if tensor.grad_fn is not None:  # a leaf would keep itself alive, by way of its twin's graph
            tensor.tp_twin = twin  # type: ignore[attr-defined]
    twin.terms.readers += 1
    twin.terms.left += 1
    return twin


def with_summed_gradient(axis: Axis, local: torch.Tensor) -> torch.Tensor:
    """A replicated tensor whose gradient on each rank is a term of a sum."""
    return local if axis.size == 1 else _Relayout.apply(local, _as_is, axis.all_reduce, WHOLE)


def gathered_with_summed_gradient(axis: Axis, local: torch.Tensor, dim: int, total: int) -> torch.Tensor:
    """All parts of `dim`, `total` long: a replicated tensor whose gradient on each rank is a term of a sum."""
    if axis.size == 1:
        return local
    there, back = (lambda part: axis.gather(part, dim, total)), (lambda terms: axis.reduce_scatter(terms, dim))
    return _Relayout.apply(local, there, back, TERMS)


def summed_with_summed_gradient(axis: Axis, terms: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks: a replicated tensor whose gradient on each rank is a term of a sum."""
    return terms if axis.size == 1 else _Relayout.apply(terms, axis.all_reduce, axis.all_reduce, TERMS)


def all_reduced(comm: Communicator, terms: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of a communicator, of which each has a term: partial to replicated."""
    return terms if comm.size == 1 else _Relayout.apply(terms, functools.partial(_summed, comm), _as_is, WHOLE)


class Twin:
    """A replicated tensor as its readers with split weights see it. version: of the tensor, when the twin was made.

    Invariant: no graph refers to a twin, but to its terms, which have no tensor of the forward: a cycle would keep activations
    until Python's collector runs.
    """

    __slots__ = ("tensor", "terms", "version")

    def __init__(self, tensor: torch.Tensor, terms: Terms, version: int) -> None:
        self.tensor, self.terms, self.version = tensor, terms, version

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None


class Terms:
    """The gradients of a twin's readers, which are summed here, and reduced once.

    A reader's backward calls `add` and returns no gradient. The last one starts the reduction, and computes the gradient of its
    weight beside it. If a reader's backward does not run, the reduction starts when the boundary's does.
    Sum and reduction are in the readers' dtype (under autocast: its), or in the wider one of two.
    With create_graph=True readers return their gradients instead, so that autograd sums them.
    """

    __slots__ = ("axis", "backward", "closed", "dim", "left", "pending", "readers", "recomputed", "sum")

    def __init__(self, axis: Axis, dim: int | None) -> None:
        self.axis, self.dim = axis, dim  # dim: of the reduce-scatter; None: an all-reduce
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
            axis, dim = self.axis, self.dim
            self.pending = axis.start_all_reduce(self.sum) if dim is None else axis.start_reduce_scatter(self.sum, dim)

    def take(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The reduced gradient. grad: of readers that are not ours, such as a subclass's own forward."""
        self._forget_other_backward()
        axis, found, pending = self.axis, self.sum, self.pending
        self.closed, self.sum, self.pending, self.left = True, None, None, self.readers
        if torch.is_grad_enabled():
            return None if grad is None else relayout(axis, grad, PARTIAL, REPLICATE if self.dim is None else Shard(self.dim))
        done = None if pending is None else pending.result()
        if pending is not None:
            found = grad
        elif grad is not None:
            found = grad if found is None else found + grad
        if found is None:
            return done
        reduced = axis.all_reduce(found) if self.dim is None else axis.reduce_scatter(found, self.dim)
        return reduced if done is None else done + reduced

    def _forget_other_backward(self) -> None:
        """Drop what a backward left that failed, or that needed readers' gradients but not the boundary's."""
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


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, terms: Terms) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.terms, ctx.dtype, ctx.passes = terms, tensor.dtype, WHOLE
        return tensor.detach()  # not a view: writes to the tensor stay possible, and are noticed where it was saved

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        reduced = ctx.terms.take(grad)
        return reduced if reduced is None else reduced.to(ctx.dtype), None


class _SharedGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, terms: Terms, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.terms, ctx.dtype, ctx.passes, ctx.whole = terms, local.dtype, TERMS, now.subject
        full = owned(terms.axis.gather(local, terms.dim, total))  # type: ignore[arg-type]
        return full, full.detach()

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_of_twin: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        reduced = ctx.terms.take(grad_of_twin)
        if grad is None:
            return reduced if reduced is None else reduced.to(ctx.dtype), None, None
        axis, dim = ctx.terms.axis, ctx.terms.dim
        own = relayout(axis, grad, REPLICATE, Shard(dim)) if torch.is_grad_enabled() else axis.cut(grad, dim)
        return own if reduced is None else own + reduced.to(ctx.dtype), None, None


# ---------------------------------------------------------------------- the table


def _gather_row(axis: Axis, local: torch.Tensor, source: Any, target: Any, total: int | None) -> tuple[Change, Change]:
    dim = source.dim
    size = axis.total(local.shape[dim]) if total is None else total
    return lambda part: axis.gather(part, dim, size), lambda grad: axis.cut(grad, dim)


def _cut_row(axis: Axis, local: torch.Tensor, source: Any, target: Any, total: int | None) -> tuple[Change, Change]:
    dim, size = target.dim, local.shape[target.dim]
    axis.remember(size)
    return lambda full: axis.cut(full, dim), lambda grad: axis.gather(grad, dim, size)


def _reduce_row(axis: Axis, local: torch.Tensor, source: Any, target: Any, total: int | None) -> tuple[Change, Change]:
    return axis.all_reduce, _as_is


def _scatter_row(axis: Axis, local: torch.Tensor, source: Any, target: Any, total: int | None) -> tuple[Change, Change]:
    dim, size = target.dim, local.shape[target.dim]
    axis.remember(size)
    return lambda full: axis.reduce_scatter(full, dim), lambda grad: axis.gather(grad, dim, size)


def _term_row(axis: Axis, local: torch.Tensor, source: Any, target: Any, total: int | None) -> tuple[Change, Change]:
    return lambda full: target.local_shard(full, axis.rank).clone(), _as_is


def _exchange_row(axis: Axis, local: torch.Tensor, source: Any, target: Any, total: int | None) -> tuple[Change, Change]:
    sizes = list(local.shape)
    sizes[source.dim] = axis.total(sizes[source.dim]) if total is None else total
    axis.remember(sizes[target.dim])
    shape = torch.Size(sizes)
    return (
        lambda part: change_axis(axis.comm, shape, part, source, target),
        lambda grad: change_axis(axis.comm, shape, grad, target, source),
    )


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _summed(comm: Communicator, terms: torch.Tensor) -> torch.Tensor:
    out, stream = terms.clone(memory_format=torch.contiguous_format), current_stream(comm.device)
    comm.all_reduce(out, out, ReduceOp.SUM, stream=stream).wait(stream)
    return out


_ROWS = {
    (Shard, Replicate): _gather_row,
    (Replicate, Shard): _cut_row,
    (Partial, Replicate): _reduce_row,
    (Partial, Shard): _scatter_row,
    (Replicate, Partial): _term_row,
    (Shard, Shard): _exchange_row,
}
_KNOWN = ", ".join(f"{source.__name__} to {target.__name__}" for source, target in _ROWS)


# ---------------------------------------------------------------------- DTensors at boundaries


def local_of(axis: Axis, value: torch.Tensor, layout: Placement, name: str) -> tuple[torch.Tensor, Placement, int | None]:
    """The local tensor, its placement (a DTensor's own; `layout` of a plain tensor), and the size of its split dim, if known.

    name: of the module, for messages. Raises ValueError for a DTensor on another mesh, TypeError for what is not a tensor.
    """
    if type(value) is DTensor:
        spec = value.spec
        if spec.mesh is not axis.mesh:
            raise ValueError(f"the input of '{name}' is a DTensor on {spec.mesh}: expected one on {axis.mesh}")
        placement = spec.placements[0]
        total = spec.shape[placement.dim] if isinstance(placement, Shard) else None
        local, version = getattr(value, "tp_local", (None, 0))
        if local is None or _version(value) != version:
            local = value.to_local()
        return local, placement, total
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the input of '{name}' on {axis.mesh}: expected a tensor by {layout}, found a {type(value).__name__}")
    return value, _nonnegative(layout, value.dim()), None


def as_dtensor(axis: Axis, local: torch.Tensor, placement: Placement, total: int | None = None) -> DTensor:
    """The DTensor of an activation: the operations that need other ranks' elements are refused. Differentiable.

    total: the size of the dim that `placement` splits, if the caller knows it.
    """
    shape = local.shape
    placement = _nonnegative(placement, local.dim())
    if isinstance(placement, Shard):
        size = axis.total(shape[placement.dim]) if total is None else total
        shape = torch.Size((*shape[: placement.dim], size, *shape[placement.dim + 1 :]))
    made = dtensor_of(local, _activation_spec(axis, placement, shape))
    # Cost: what reads the local tensor again needs no autograd nodes for the way through the DTensor, 20 us.
    made.tp_local = local, _version(made)  # type: ignore[attr-defined]
    return made


def _version(tensor: torch.Tensor) -> int:
    """How often the tensor was written to. Tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


@functools.lru_cache(maxsize=1024)
def _activation_spec(axis: Axis, placement: Placement, shape: torch.Size) -> Spec:
    """One object for all activations of a shape: operations compare specs by identity first."""
    return Spec(axis.mesh, (placement,), shape, gathers=False)


def _nonnegative(placement: Placement, dims: int) -> Placement:
    """The placement with a dim that counts from the front."""
    if type(placement) is Shard and not 0 <= placement.dim < dims:
        if not -dims <= placement.dim < dims:
            raise ValueError(f"{placement} of an activation of {dims} dims: expected {-dims} <= dim < {dims}")
        return Shard(placement.dim % dims)
    return placement

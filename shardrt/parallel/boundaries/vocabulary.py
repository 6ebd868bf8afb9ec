"""Embeddings and cross-entropy over a vocabulary that is sharded over a mesh: each rank has consecutive rows or columns of it.

| what            | collectives forward                                                             | backward |
|-----------------|---------------------------------------------------------------------------------|----------|
| embedding       | none here; the caller reduces the ranks' terms                                  | none     |
| `cross_entropy` | MAX of (row maxima, columns of each rank), SUM of (sum of exp, target's logit)  | none     |

The cross-entropy is that of Megatron-LM (`tensor_parallel/cross_entropy.py`), with shards of any size.

Legend: N ranks; M rows of logits (tokens); V classes in all, C on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ...comm import Communicator, DeviceMesh, ReduceOp, current_stream
from ...tensor.dtensor.dtensor import DTensor, dtensor_of
from ...tensor.placement.placement import Placement, Replicate, Shard, Spec
from .axis import Part, axis_of
from .relayout import PARTIAL, REPLICATE, all_reduced, relayout

_CHUNK_NUMEL, _HOST_CHUNK_NUMEL = 2**24, 2**18  # Cost: so many float32 are temporary memory; on a CPU they fit in its cache


def masked_embedding(
    tokens: torch.Tensor, weight: torch.Tensor, first_row: int, num_embeddings: int, *, padding_idx: int | None = None
) -> torch.Tensor:
    """This rank's term of the embedding of `tokens`: the sum of the terms over the ranks is `F.embedding` with the full table.

    tokens: any shape, int32 or int64, the same on every rank.   weight: this rank's (rows, C) of the table, perhaps no rows.
    first_row: the number of its first row in the table of `num_embeddings` rows.
    padding_idx: a row of the full table that gets no gradient.
    Returns: (*tokens.shape, C), of weight's dtype, in memory of its own; zeros where the token's row is on another rank.
    Raises IndexError for tokens outside of the table; on a GPU the device asserts instead, as in torch.
    """
    bad = _out_of_range(tokens, num_embeddings, f"a token of an embedding of {num_embeddings} rows")
    rows = weight.shape[0]
    if rows == 0:  # a row that no token has: the result depends on the weight all the same
        weight = torch.cat([weight, weight.new_zeros((1, weight.shape[1]))])
    local = tokens - first_row
    index = local.clamp(0, max(0, rows - 1))
    elsewhere = (local != index) if rows > 0 else torch.ones_like(local, dtype=torch.bool)
    padding = None if padding_idx is None else padding_idx % num_embeddings - first_row
    found = F.embedding(
        index if bad is None else index.masked_fill(bad, -1),
        weight,
        padding if padding is not None and 0 <= padding < rows else None,
    )
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    mesh: DeviceMesh | None = None,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` of logits whose classes are sharded over a mesh. Collective; the same result on every rank.

    logits: this rank's (..., C), floating-point; ranks have consecutive classes in rank order, any number of them, also none.
    Or a `DTensor` whose last dim is sharded over one axis of its mesh, with other dims sharded or replicated over the others.
    target: (...) classes, integers from 0 to V - 1 or `ignore_index`, the same on every rank; or a `DTensor`, whose dims are
    sharded as those of the logits.
    mesh: 1-D; with a `DTensor` None or its own mesh.
    weight: (V,) a factor for each class, the same on every rank.   label_smoothing: from 0 to 1.
    reduction: "none", "sum" or "mean", which divides by the sum of the weights of the targets that are not ignored.
    Returns: a plain tensor of the logits' dtype (float32 under autocast); (...) for "none", else a scalar. Everything between
    is float32, or float64 for float64 logits. If other dims of the logits are sharded, "sum" and "mean" are over all rows, and
    "none" is a `DTensor` sharded as the target.
    Cost: 2 all-reduces of M + N and 2 M numbers (3 M with label smoothing), and none in the backward, for which the logits
    are kept. If other dims are sharded, one of 2 numbers more. A gradient of its gradient takes a few all-reduces of M numbers,
    and tensors of the size of the logits.
    Raises IndexError for targets outside of the classes, on every rank; on a GPU the device asserts instead, as in torch.
    Raises ValueError for shapes, meshes and options that do not fit, NotImplementedError for targets that are probabilities.
    """
    rows_spec = batch = None
    if isinstance(logits, DTensor):
        mesh, rows_spec = _mesh_of_classes(logits, mesh)
        target, batch = _rows_of_target(target, rows_spec), rows_spec.shard_mesh
        logits = logits.to_local()
    target, weight = _replicated(target, "target"), None if weight is None else _replicated(weight, "weight")
    if mesh is None or mesh.ndim != 1:
        raise ValueError(f"cross_entropy on {mesh}: expected the mesh of one axis that shards the classes, such as mesh['tp']")
    _check_arguments(logits, target, reduction, label_smoothing)
    rows = logits.reshape(-1, logits.shape[-1]) if logits.shape[-1] else logits.reshape(target.numel(), 0)
    options = _LossOptions(mesh, weight, ignore_index, label_smoothing)
    losses, factors = _CrossEntropy.apply(rows, target.reshape(-1).long(), options)
    autocast = not logits.is_meta and torch.is_autocast_enabled(logits.device.type)
    dtype = losses.dtype if autocast else logits.dtype
    if reduction == "none":
        losses = losses.view(target.shape).to(dtype)
        return losses if rows_spec is None or batch is None else dtensor_of(losses, rows_spec)
    sums = torch.stack([losses.sum(), factors.sum()])
    total, count = sums if batch is None else all_reduced(batch.communicator("loss"), sums)
    return (total if reduction == "sum" else total / count).to(dtype)


# ---------------------------------------------------------------------- checks


def _mesh_of_classes(logits: DTensor, mesh: DeviceMesh | None) -> tuple[DeviceMesh, Spec]:
    """The axis that shards the last dim, and how the rows lie on the whole mesh. Raises ValueError for others."""
    spec, dim = logits.spec, logits.dim() - 1
    others = [placement for placement in spec.placements if not shards(placement, dim)]
    known = all(type(placement) in (Shard, Replicate) for placement in others)
    if mesh not in (None, spec.mesh) or len(others) != len(spec.placements) - 1 or not known:
        where = "" if mesh is None else f" on {mesh}"
        raise ValueError(
            f"cross_entropy{where} of logits of {spec}: expected their last dim to be sharded, over one axis of their mesh, "
            "and the others sharded or replicated over other axes"
        )
    name = next(name for name, p in zip(spec.mesh.axis_names, spec.placements, strict=True) if shards(p, dim))
    rows = tuple(Replicate() if shards(placement, dim) else placement for placement in spec.placements)
    return spec.mesh[name], replace(spec, placements=rows, shape=spec.shape[:dim])


def shards(placement: Placement, dim: int) -> bool:
    """Whether a placement shards this dim in rank order."""
    return isinstance(placement, Shard) and placement.dim == dim


def _rows_of_target(target: torch.Tensor, rows: Spec) -> torch.Tensor:
    """This rank's rows of a target."""
    if isinstance(target, DTensor) and target.spec.mesh is rows.mesh and target.spec.placements == rows.placements:
        return target.to_local()
    if not isinstance(target, DTensor) and rows.shard_mesh is None:
        return target
    if isinstance(target, DTensor) or target.shape != rows.shape:
        found = target.spec if isinstance(target, DTensor) else f"a plain tensor of shape {tuple(target.shape)}"
        raise ValueError(
            f"cross_entropy with a target of {found}: expected a DTensor of {rows}, or the whole target, the same on every rank"
        )
    return rows.local_shard(target).contiguous()


def _replicated(value: torch.Tensor, what: str) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    if any(placement != Replicate() for placement in value.placements):
        raise ValueError(f"cross_entropy with a {what} of {value.spec}: expected the same {what} on every rank (Replicate)")
    return value.to_local()


def _check_arguments(logits: torch.Tensor, target: torch.Tensor, reduction: str, label_smoothing: float) -> None:
    if target.is_floating_point():
        raise NotImplementedError(
            f"cross_entropy with a target of {target.dtype}, which are probabilities, on logits with sharded classes: expected "
            "class indices"
        )
    if logits.dim() == 0 or not logits.is_floating_point() or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy of logits of shape {tuple(logits.shape)}, {logits.dtype}, with a target of shape "
            f"{tuple(target.shape)}: expected floating-point logits (..., classes) and a target (...)"
        )
    if reduction not in ("none", "sum", "mean") or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"cross_entropy with reduction={reduction!r}, label_smoothing={label_smoothing}: expected 'none', 'sum' or 'mean', "
            "and a number from 0 to 1"
        )


def _out_of_range(values: torch.Tensor, limit: int | torch.Tensor, what: str) -> torch.Tensor | None:
    """Raise IndexError if a value is not in 0 ... limit - 1. On a GPU (Cost: a host sync) return which ones are not instead."""
    bad = (values < 0) | (values >= limit)
    if values.device.type != "cpu":
        return bad
    if bad.any():
        raise IndexError(f"{what} is out of range: expected 0 to {limit - 1}, found {int(values[bad][0])}")
    return None


# ---------------------------------------------------------------------- cross-entropy


@dataclass(frozen=True, slots=True)
class _LossOptions:
    mesh: DeviceMesh
    weight: torch.Tensor | None  # (V,)
    ignore_index: int
    smoothing: float


@dataclass(frozen=True, slots=True)
class _Targets:
    """What the targets of M rows mean on this rank."""

    index: torch.Tensor  # (M, 1) a column of this rank, the target's if it is here
    elsewhere: torch.Tensor  # (M,) whether the target is another rank's, or ignored
    ignored: torch.Tensor  # (M,)
    factors: torch.Tensor  # (M,) how much each row counts

    @classmethod
    def of(cls, target: torch.Tensor, columns: _OwnClasses, weight: torch.Tensor | None, ignore_index: int) -> _Targets:
        ignored = target == ignore_index
        target = target.masked_fill(ignored, 0)
        bad = _out_of_range(target, columns.total, "a target of cross_entropy")
        local = target - columns.first
        index = local.clamp(0, max(0, columns.count - 1))
        elsewhere = (local != index) | ignored
        # Hazard: a target out of range has no rank; an index of -1 makes the device assert.
        index = index if bad is None else index.masked_fill(bad, -1)
        factors = (~ignored).to(columns.dtype) if weight is None else weight[target].masked_fill_(ignored, 0)
        return cls(index.unsqueeze(1), elsewhere, ignored, factors)


@dataclass(frozen=True, slots=True)
class _OwnClasses:
    """The classes of this rank: `count` of `total`, from `first` on. On a GPU two of them are 0-dim tensors, to save a sync."""

    count: int
    first: int | torch.Tensor
    total: int | torch.Tensor
    dtype: torch.dtype  # of the statistics


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row, and the factor by which it counts."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, options: _LossOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:  # logits (M, C), target (M,)
        comm, smoothing = options.mesh.communicator("tp"), options.smoothing
        ctx.mesh = options.mesh
        maxima, columns = _maxima(logits, comm)
        weight = _class_weights(options.weight, columns)
        targets = _Targets.of(target, columns, weight, options.ignore_index)
        spread = _own_class_weights(weight, columns, logits.device) if smoothing else None
        sums = _sums(logits, maxima, targets, spread)
        stream = current_stream(comm.device)
        comm.all_reduce(sums, sums, ReduceOp.SUM, stream=stream).wait(stream)
        log_sum = sums[0].log()
        hard = both = targets.factors * (1 - smoothing)
        losses = (log_sum - sums[1]).mul_(hard)
        if spread is not None:
            ctx.share = share = smoothing / columns.total
            soft = share * (columns.total if weight is None else weight.sum())
            losses += log_sum * soft - sums[2] * share
            both = hard + soft
        ctx.save_for_backward(logits, maxima, targets.index, targets.elsewhere, targets.ignored, hard, both / sums[0], spread)
        ctx.mark_non_differentiable(targets.factors)
        return losses.masked_fill_(targets.ignored, 0), targets.factors

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            return _gradient_with_graph(ctx, grad), None, None
        logits, maxima, index, elsewhere, ignored, hard, scale, spread = ctx.saved_tensors
        made = torch.empty_like(logits)
        grad = grad.masked_fill(ignored, 0)
        at_target = (grad * hard).neg_().masked_fill_(elsewhere, 0).unsqueeze(1)
        scale = (grad * scale).masked_fill_(ignored, 0).unsqueeze(1)
        for rows in _chunks(logits):
            out = made[rows] if made.dtype == maxima.dtype else None
            chunk = torch.sub(logits[rows], maxima[rows], out=out).exp_().mul_(scale[rows])
            if spread is not None:
                chunk.addr_(grad[rows] * ctx.share, spread, alpha=-1)
            chunk.scatter_add_(1, index[rows], at_target[rows])
            if out is None:
                made[rows] = chunk
        return made, None, None


def _gradient_with_graph(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the logits, (M, C), by operations that autograd records. grad: (M,)."""
    logits, maxima, index, elsewhere, ignored, hard, scale, spread = ctx.saved_tensors
    axis = axis_of(ctx.mesh)
    grad = relayout(axis, Part(grad.masked_fill(ignored, 0), REPLICATE), REPLICATE, summed=True).local
    exponentials = (logits.to(maxima.dtype) - maxima).exp()
    sums = relayout(axis, Part(exponentials.sum(1), PARTIAL), REPLICATE, summed=True).local
    factors = (scale * sums).masked_fill(ignored, 0).detach()
    made = exponentials * (grad * factors / sums).unsqueeze(1)
    if spread is not None:
        made = made - torch.outer(grad * ctx.share, spread)
    if logits.shape[1]:
        at_target = -(grad * hard).masked_fill(elsewhere, 0)
        made = made.scatter_add(1, index, at_target.unsqueeze(1))
    return made.to(logits.dtype)


def _maxima(logits: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, _OwnClasses]:
    """The maximum of each row over all ranks, (M, 1), and where this rank's columns lie. One all-reduce for both."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows, count = logits.shape
    values = logits.new_full((rows + comm.size,), -torch.inf, dtype=dtype)
    if count > 0:
        values[:rows] = logits.amax(-1)
    values[rows + comm.rank] = count
    stream = current_stream(comm.device)
    comm.all_reduce(values, values, ReduceOp.MAX, stream=stream).wait(stream)
    counts = values[rows:].long()
    first, total = counts[: comm.rank].sum(), counts.sum()
    if counts.device.type == "cpu":
        return values[:rows, None], _OwnClasses(count, int(first), int(total), dtype)
    return values[:rows, None], _OwnClasses(count, first, total, dtype)


def _class_weights(weight: torch.Tensor | None, columns: _OwnClasses) -> torch.Tensor | None:
    if weight is None:
        return None
    if isinstance(columns.total, int) and weight.shape != (columns.total,):
        raise ValueError(f"cross_entropy with a weight of shape {tuple(weight.shape)}: expected ({columns.total},)")
    return weight.detach().to(columns.dtype)


def _own_class_weights(weight: torch.Tensor | None, columns: _OwnClasses, device: torch.device) -> torch.Tensor:
    """(C,) the factors of this rank's classes in the part of the loss that is the same for all classes."""
    if weight is None:
        return torch.ones(columns.count, dtype=columns.dtype, device=device)
    return weight[torch.arange(columns.count, device=device) + columns.first]


def _sums(logits: torch.Tensor, maxima: torch.Tensor, targets: _Targets, spread: torch.Tensor | None) -> torch.Tensor:
    """This rank's terms of: sum of exp, the target's logit, the weighted sum of logits. The row's maximum is subtracted."""
    sums = maxima.new_zeros((2 if spread is None else 3, logits.shape[0]))
    if logits.shape[1] == 0:
        return sums
    for rows in _chunks(logits):
        chunk = logits[rows] - maxima[rows]
        if spread is not None:
            torch.mv(chunk, spread, out=sums[2, rows])
        torch.sum(chunk.exp_(), 1, out=sums[0, rows])
    found = logits.gather(1, targets.index).sub(maxima).squeeze(1)
    sums[1] = found.masked_fill_(targets.elsewhere, 0)
    return sums


def _chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices of the rows, of a bounded number of elements each. None if this rank has no columns."""
    rows, count = logits.shape
    numel = _HOST_CHUNK_NUMEL if logits.device.type == "cpu" else _CHUNK_NUMEL
    step = max(1, numel // max(1, count))
    return (slice(start, min(start + step, rows)) for start in range(0, rows if count else 0, step))

"""Linear layers whose weight is split over the axis, with their communication beside the matmuls.

Legend: x (..., in), weight (out, in), y (..., out). Column-wise, `out` is split: y is sharded, the gradient of x a term of a
sum. Row-wise, `in` is split: x is sharded, y a term of a sum; the bias is added after the reduction.

| function         | forward                       | backward, in order                                                       |
|------------------|-------------------------------|--------------------------------------------------------------------------|
| column           | matmul                        | gradient of x; its reduction beside the gradient of the weight           |
| gathered_column  | all-gather, matmul            | the same; x is gathered beside its gradient, which is reduce-scattered   |
| row              | matmul, all-reduce            | gradients of x and of the weight                                         |
| row, `dim`       | matmul, reduce-scatter        | all-gather, gradients of x and of the weight                             |

With create_graph=True the backwards are operations that autograd records, and no communication runs beside a matmul.

`gathered_column` keeps only this rank's part of x between forward and backward: Megatron-LM's `layers.py`
(Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ...comm.core.calls import now
from ...tensor.placement.placement import Placement, Shard
from .axis import Axis, Part, owned
from .chunks import gather_matmul, matmul_scatter
from .relayout import PARTIAL, REPLICATE, TERMS, TwinGradient, gradient_of, relayout

Gradients = tuple[torch.Tensor | None, ...]


def column(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, twin: torch.Tensor | None) -> torch.Tensor:
    """This rank's columns of the layer for a replicated x. twin: of x, None if x needs no gradient."""
    x, weight, bias = _autocast(x if twin is None else twin, weight, bias)
    return F.linear(x, weight, bias) if twin is None else _Column.apply(x, weight, bias, gradient_of(twin))


def gathered_column(axis: Axis, x: Part, weight: torch.Tensor, bias: torch.Tensor | None, async_tp: bool) -> torch.Tensor:
    """This rank's columns of the layer for an x that is split in another dim than the last."""
    return _GatheredColumn.apply(*_autocast(x.local, weight, bias), axis, x.placement, axis.shape(x), async_tp)


def row(
    axis: Axis, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: Placement, async_tp: bool
) -> torch.Tensor:
    """The layer for an x of which this rank has its part of the last dim. target: of y, split over the ranks or replicated."""
    x, weight, bias = _autocast(x, weight, bias)
    if axis.size == 1:
        return F.linear(x, weight, bias)
    if isinstance(target, Shard) and target.dim < x.dim() - 1:
        axis.remember(x.shape[target.dim])
    return _RowwiseProduct.apply(x, weight, bias, axis, target, async_tp)


def _autocast(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The arguments in the dtype that autocast would compute in."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or x.dtype is torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gradient: TwinGradient
    ) -> torch.Tensor:
        ctx.gradient, ctx.passes = gradient, TERMS
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return owned(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        rows = _rows(grad)
        term = (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        has_graph = torch.is_grad_enabled()
        if not has_graph:
            ctx.gradient.add(term)  # the first reader's is summed into: it is a tensor of its own
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_weight = rows.t() @ _rows(x) if needs_weight else None
        return term if has_graph else None, grad_weight, rows.sum(0) if needs_bias else None, None


class _GatheredColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        axis: Axis,
        source: Shard,
        shape: torch.Size,
        async_tp: bool,
    ) -> torch.Tensor:
        ctx.axis, ctx.source, ctx.shape, ctx.passes = axis, source, shape, TERMS
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        if async_tp:
            return owned(gather_matmul(axis, x, weight, bias, source.dim, shape))
        return owned(F.linear(axis.changed(Part(x, source, shape), REPLICATE), weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        axis, source = ctx.axis, ctx.source
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = _rows(grad)
        if torch.is_grad_enabled():
            return *_GatheredColumn._with_graph(ctx, grad, rows), rows.sum(0) if needs_bias else None, None, None, None, None
        gathered = axis.start(Part(x, source, ctx.shape), REPLICATE) if needs_weight else None
        reduced = axis.start(Part((rows @ weight).view(ctx.shape), PARTIAL), source) if needs_x else None
        grad_weight = None if gathered is None else rows.t() @ _rows(gathered.result())
        grad_bias = rows.sum(0) if needs_bias else None
        return None if reduced is None else reduced.result(), grad_weight, grad_bias, None, None, None, None

    @staticmethod
    def _with_graph(ctx: Any, grad: torch.Tensor, rows: torch.Tensor) -> Gradients:
        """The gradients of x and of the weight."""
        axis, source = ctx.axis, ctx.source
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = relayout(axis, Part((rows @ weight).view(ctx.shape), PARTIAL), source).local
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ _rows(relayout(axis, Part(x, source, ctx.shape), REPLICATE, summed=True).local)
        return grad_x, grad_weight


class _RowwiseProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        axis: Axis,
        target: Placement,
        async_tp: bool,
    ) -> torch.Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.axis, ctx.target, ctx.shape = axis, target, torch.Size((*x.shape[:-1], weight.shape[0]))
        ctx.passes, ctx.whole = TERMS, now.subject if target == REPLICATE else None
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        if async_tp and isinstance(target, Shard) and target.dim < x.dim() - 1:
            out = matmul_scatter(axis, x, weight, target.dim)
        else:
            out = axis.changed(Part(F.linear(x, weight), PARTIAL), target, in_place=True)
        return owned(out if bias is None else out.add_(bias))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        grad_bias = _rows(grad).sum(0) if ctx.needs_input_grad[2] else None
        if x is not None or weight is not None:
            grad = relayout(ctx.axis, Part(grad, ctx.target, ctx.shape), REPLICATE, summed=torch.is_grad_enabled()).local
        rows = _rows(grad)
        grad_x = None if weight is None else (rows @ weight).view(*grad.shape[:-1], weight.shape[1])
        return grad_x, None if x is None else rows.t() @ _rows(x), grad_bias, None, None, None

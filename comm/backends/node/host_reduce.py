"""Reductions on the host: torch reduces the rows in order.

MPI has no bfloat16, adds float16 in float16, and does not define the order of a reduction. Here rows are reduced from the first
to the last, low precision in float32 and rounded once, so that a result depends only on the values and their order: bitwise
the same on every rank, in every run, with every MPI, on one node or several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...core.calls import Op, PreMulSum, ReduceOp

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


_NARROW = frozenset({torch.bfloat16, torch.float16})
# torch does not add these; sums and products have the same bits as those of signed integers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are reduced in."""
    return torch.float32 if dtype in _NARROW else dtype


def reduce_rows(
    rows: Sequence[torch.Tensor], op: Op, out: torch.Tensor, partial: torch.Tensor | None = None, divisor: int = 1
) -> None:
    """Reduce rows of equal length, in order, into `out` (which may be one of them).

    partial: the result of the preceding rows, in the wide dtype. divisor: of an AVG, given with the last rows.
    """
    if out.dtype in _SIGNED:
        _reduce_unsigned(rows, op, out, partial)
        return
    if isinstance(op, PreMulSum):
        rows = [row.to(wide(row.dtype)) * op.factor for row in rows]
        combine = torch.add
    else:
        combine = _COMBINE[op]
    terms = rows if partial is None else [partial, *rows]
    total = terms[0].float() if terms[0].dtype in _NARROW else terms[0]
    for term in terms[1:-1]:
        total = combine(total, term)
    if len(terms) > 1:
        total = combine(total, terms[-1], out=None if out.dtype in _NARROW else out)
    if op is ReduceOp.AVG and divisor > 1:
        total.div_(divisor)
    if total is not out and total.data_ptr() != out.data_ptr():
        out.copy_(total)


def _reduce_unsigned(rows: Sequence[torch.Tensor], op: Op, out: torch.Tensor, partial: torch.Tensor | None) -> None:
    """Reduce as signed integers; for MIN and MAX with the highest bit flipped, which preserves their order."""
    signed = _SIGNED[out.dtype]
    flip = torch.iinfo(signed).min if op in (ReduceOp.MIN, ReduceOp.MAX) else 0
    views = [row.view(signed) ^ flip for row in (rows if partial is None else [partial, *rows])]
    result = out.view(signed)
    reduce_rows(views, op, result)
    result ^= flip

"""The host's reductions, where they stop half-way: on a node that passes its result on, unrounded."""

import math

import pytest
import torch

from shardrt.comm import PreMulSum, ReduceOp
from shardrt.comm.backends.node.host_reduce import reduce_rows
from shardrt.comm.core.calls import Op


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, PreMulSum(0.75)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_in_low_precision_are_added_in_float32_into_a_wide_result(dtype: torch.dtype, op: Op) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(1000, generator=generator).to(dtype) for _ in range(4)]
    factor = op.factor if isinstance(op, PreMulSum) else 1.0
    total = torch.zeros(1000)
    for row in rows:
        total = total + row.float() * factor
    first, last = torch.empty(1000), torch.empty(1000, dtype=dtype)
    reduce_rows(rows[:2], op, first)
    assert torch.equal(first, rows[0].float() * factor + rows[1].float() * factor)
    reduce_rows(rows[2:], op, last, first, divisor=4)
    assert torch.equal(last, (total / 4 if op is ReduceOp.AVG else total).to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_against_pythons(dtype: torch.dtype) -> None:
    """With the highest bit set and not, and sums that go round."""
    most = 2 ** (8 * dtype.itemsize) - 1
    values = [[0, 1, most, most, most // 2], [5, most, most, 3, most // 2 + 1], [7, 2, most - 1, 9, 1]]
    expected = {
        ReduceOp.SUM: [sum(column) & most for column in zip(*values, strict=True)],
        ReduceOp.PRODUCT: [math.prod(column) & most for column in zip(*values, strict=True)],
        ReduceOp.MIN: [min(column) for column in zip(*values, strict=True)],
        ReduceOp.MAX: [max(column) for column in zip(*values, strict=True)],
    }
    rows = [torch.tensor(row, dtype=dtype) for row in values]
    for op, wanted in expected.items():
        out, partial = torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype)
        reduce_rows(rows, op, out)
        assert out.tolist() == wanted
        reduce_rows(rows[:1], op, partial)
        reduce_rows(rows[1:], op, out, partial)
        assert out.tolist() == wanted
    assert [row.tolist() for row in rows] == values

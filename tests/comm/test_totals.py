"""Sums and means of scalars over ranks, against numbers worked out by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from ranks import on_ranks
from shardrt.comm import MismatchError, World

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@on_ranks(1, 2, 3)
def test_a_mean_in_one_line(world: World) -> None:
    n = world.size
    for dtype in FLOATS:
        loss = (torch.tensor(1.0 + world.rank, dtype=dtype, device=world.device, requires_grad=True) * 2).sum()
        mean = world.mean(loss)
        assert mean.item() == n + 1  # the mean of 2, 4, 6
        assert (mean.dtype, mean.shape, mean.device, mean.requires_grad) == (dtype, (), loss.device, False)
        assert loss.item() == 2 * (1 + world.rank), "the rank's own stays as it is"
        with torch.inference_mode():
            assert world.mean(loss).item() == n + 1
    assert world.mean(world.rank).item() == (n - 1) / 2
    assert world.mean(float(world.rank)).dtype == torch.float64


@on_ranks(1, 2, 3)
def test_several_sums_at_once(world: World) -> None:
    n, r, device = world.size, world.rank, world.device
    ranks = n * (n - 1) // 2  # 0 + 1 + 2
    before = world.comm._number
    correct, seen, loss, hit, matrix, small, precise = world.sum(
        torch.tensor(10 + r, device=device),
        5,
        torch.tensor(0.5, dtype=torch.bfloat16, device=device),
        torch.tensor(True, device=device),
        torch.arange(6.0, device=device).view(2, 3).t() + r,
        torch.tensor([100], dtype=torch.int8, device=device),
        torch.tensor([1e-12], dtype=torch.float64, device=device),
    )
    assert world.comm._number == before + 3, "in int64, float32 and float64"
    assert [correct.item(), seen.item(), loss.item(), hit.item(), small.item()] == [10 * n + ranks, 5 * n, 0.5 * n, n, 100 * n]
    assert [t.dtype for t in (correct, seen, loss, hit, small)] == [
        torch.int64,
        torch.int64,
        torch.bfloat16,
        *[torch.int64] * 2,
    ]
    assert matrix.tolist() == [[n * (i + 3 * j) + ranks for j in range(2)] for i in range(3)]
    assert precise.item() == float(n * Fraction(1e-12))
    assert world.sum() == ()


@on_ranks(1, 3)
def test_low_precision_is_added_in_float32(world: World) -> None:
    """In bfloat16, 256 + 1 is 256."""
    value = torch.tensor(256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16, device=world.device)
    assert world.sum(value).item() == 256 + world.size - 1
    half = torch.tensor(60000.0, dtype=torch.float16, device=world.device)
    assert world.mean(half).item() == half.item(), "the sum is beyond float16"


@on_ranks(2)
def test_values_that_cannot_be_reduced(world: World) -> None:
    one = torch.ones((), device=world.device)
    with pytest.raises(ValueError, match=r"mean on .*rank \d of 2.*: expected a floating-point dtype .*found torch.int64"):
        world.mean(one, one.long())
    with pytest.raises(ValueError, match=r"sum on .*: expected a dtype that can be added, found torch.complex64"):
        world.sum(one.to(torch.complex64))
    with pytest.raises(TypeError, match=r"sum on .*: expected tensors and numbers, found a str"):
        world.sum("1")  # type: ignore[call-overload]
    if world.device.type == "cpu":
        with pytest.raises(MismatchError, match=r"all_reduce float32 1 sum; rank 1: all_reduce float32 2 sum"):
            world.sum(one if world.rank == 0 else torch.ones(2))

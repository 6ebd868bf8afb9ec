"""Every collective of the MPI backend, on real ranks, against values computed by hand."""

import pytest
import torch

from ranks import on_ranks
from shardrt.comm import ReduceOp, World, new_stream

pytestmark = pytest.mark.mpi

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]
SIZES = [0, 1, 3, 1009]


def rank_values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, exact in every dtype, different on every rank."""
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
@on_ranks(1, 2, 3, 4)
def test_gather_and_broadcast(world: World, threaded: bool) -> None:
    stream = new_stream(world.device, "test", threaded=threaded)
    for dtype in [*DTYPES, torch.bool, torch.float8_e4m3fn]:
        for n in [*SIZES, 40_009]:
            expected = torch.cat([rank_values(r, n, dtype) for r in range(world.size)])
            mine = rank_values(world.rank, n, dtype)
            out = torch.full((world.size * n,), 99, dtype=torch.int64).to(dtype)
            world.comm.all_gather(out, mine, stream=stream).synchronize()
            assert torch.equal(out, expected)
            in_place = torch.zeros_like(out)
            own = in_place[world.rank * n : (world.rank + 1) * n]
            own.copy_(mine)
            world.comm.all_gather(in_place, own, stream=stream).synchronize()
            assert torch.equal(in_place, expected)
            root = world.size - 1
            world.comm.broadcast(out[:n], mine, root, stream=stream).synchronize()
            assert torch.equal(out[:n], rank_values(root, n, dtype))
    stream.close()


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.value)
@on_ranks(1, 2, 3, 4)
def test_reductions(world: World, op: ReduceOp, threaded: bool) -> None:
    stream = new_stream(world.device, "test", threaded=threaded)
    combine = {
        ReduceOp.SUM: lambda rows: rows.sum(0),
        ReduceOp.AVG: lambda rows: rows.mean(0),
        ReduceOp.MIN: lambda rows: rows.amin(0),
        ReduceOp.MAX: lambda rows: rows.amax(0),
        ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    }[op]
    for dtype in DTYPES:
        if op is ReduceOp.AVG and not dtype.is_floating_point:
            continue
        for n in [*SIZES, 70_001]:
            rows = torch.stack([rank_values(r, world.size * n, dtype) for r in range(world.size)])
            # The exact values are small integers; averages and products are rounded once, to the dtype.
            expected = combine(rows.double()).to(dtype) if dtype.is_floating_point else combine(rows.long()).to(dtype)
            own = slice(world.rank * n, (world.rank + 1) * n)
            inp = rows[world.rank].clone()
            out = torch.empty(n, dtype=dtype)
            world.comm.reduce_scatter(out, inp, op, stream=stream).synchronize()
            assert torch.equal(out, expected[own]), (dtype, n)
            world.comm.reduce_scatter(inp[own], inp, op, stream=stream).synchronize()
            assert torch.equal(inp[own], expected[own]), (dtype, n)
            inp = rows[world.rank].clone()
            everything = torch.empty_like(inp)
            world.comm.all_reduce(everything, inp, op, stream=stream).synchronize()
            assert torch.equal(everything, expected), (dtype, n)
            world.comm.all_reduce(inp, inp, op, stream=stream).synchronize()
            assert torch.equal(inp, expected), (dtype, n)
    stream.close()


@on_ranks(2, 3, 4)
def test_reductions_block_by_block(world: World) -> None:
    """Large reductions go in blocks; small blocks show the same on small tensors, ranges of different length included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.comm.mpi._BLOCK_NBYTES", 64)
        patch.setattr("shardrt.comm.mpi._SMALL_NBYTES", 0)
        for numel in (1, 5, 16, 17, 1009):
            rows = torch.stack([rank_values(r, world.size * numel, torch.float64) for r in range(world.size)])
            own = slice(world.rank * numel, (world.rank + 1) * numel)
            out = torch.empty(numel, dtype=torch.float64)
            world.comm.reduce_scatter(out, rows[world.rank], ReduceOp.SUM, stream=world.stream)
            assert torch.equal(out, rows.sum(0)[own])
            everything = rows[world.rank][:numel].clone()
            world.comm.all_reduce(everything, everything, ReduceOp.MAX, stream=world.stream)
            assert torch.equal(everything, rows[:, :numel].amax(0))


@on_ranks(3)
def test_low_precision_is_summed_in_float32(world: World) -> None:
    """1 + 2**-8 + 2**-8: in bfloat16 each addition rounds back to 1; in float32 the sum is 1 + 2**-7, which bfloat16 has."""
    value = 1.0 if world.rank == 0 else 2.0**-8
    for n in (1, 100_000):
        out = torch.empty(n, dtype=torch.bfloat16)
        world.comm.all_reduce(out, torch.full((n,), value, dtype=torch.bfloat16), ReduceOp.SUM, stream=world.stream)
        assert torch.equal(out, torch.full((n,), 1 + 2.0**-7, dtype=torch.bfloat16))


@on_ranks(2, 3, 4)
def test_reductions_are_the_same_bits_in_rank_order(world: World) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(world.size, world.size * 50_021, generator=generator)
    expected = rows[0].clone()
    for row in rows[1:]:
        expected += row
    n = 50_021
    own = slice(world.rank * n, (world.rank + 1) * n)
    out = torch.empty(n)
    world.comm.reduce_scatter(out, rows[world.rank], ReduceOp.SUM, stream=world.stream)
    assert torch.equal(out, expected[own])
    for numel in (100, world.size * n):  # the small and the large algorithm
        everything = torch.empty(numel)
        world.comm.all_reduce(everything, rows[world.rank][:numel].contiguous(), ReduceOp.SUM, stream=world.stream)
        assert torch.equal(everything, expected[:numel])


@on_ranks(1, 3, 4)
def test_split(world: World) -> None:
    parity = world.comm.split(world.rank % 2, -world.rank, "parity")
    assert parity is not None
    members = [r for r in range(world.size) if r % 2 == world.rank % 2][::-1]
    assert (parity.rank, parity.size) == (members.index(world.rank), len(members))
    assert parity.exchange(world.rank) == members
    out = torch.empty(len(members), dtype=torch.int64)
    parity.all_gather(out, torch.tensor([world.rank]), stream=world.stream)
    assert out.tolist() == members
    parity.barrier(stream=world.stream).synchronize()
    parity.close()
    parity.close()
    with pytest.raises(RuntimeError, match="closed"):
        parity.all_gather(out, out[:1], stream=world.stream)
    alone = world.comm.split(0 if world.rank == 0 else None, 0, "first")
    assert (alone is None) == (world.rank != 0)
    if alone is not None:
        alone.close()


@on_ranks(1, 2)
def test_bad_arguments_are_refused(world: World) -> None:
    comm, stream, n = world.comm, world.stream, world.size
    good = torch.zeros(2)
    with pytest.raises(ValueError, match=rf"out.numel\(\) == N \* inp.numel\(\), found {2 * n + 1} against 2"):
        comm.all_gather(torch.zeros(2 * n + 1), good, stream=stream)
    with pytest.raises(ValueError, match=r"inp.numel\(\) == N \* out.numel\(\)"):
        comm.reduce_scatter(good, torch.zeros(2 * n + 1), ReduceOp.SUM, stream=stream)
    with pytest.raises(ValueError, match="one dtype"):
        comm.all_reduce(torch.zeros(2, dtype=torch.float64), good, ReduceOp.SUM, stream=stream)
    with pytest.raises(ValueError, match="inp is not contiguous"):
        comm.all_reduce(torch.zeros(2, 3), torch.zeros(3, 2).t(), ReduceOp.SUM, stream=stream)
    with pytest.raises(ValueError, match="AVG of torch"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), ReduceOp.AVG, stream=stream)
    with pytest.raises(ValueError, match="root 7 is no rank"):
        comm.broadcast(good, good, 7, stream=stream)
    with pytest.raises(ValueError, match="complex64 cannot be reduced"):
        comm.all_reduce(good.to(torch.complex64), good.to(torch.complex64), ReduceOp.SUM, stream=stream)
    with pytest.raises(ValueError, match="is on meta"):
        comm.broadcast(torch.zeros(2, device="meta"), good, 0, stream=stream)

"""Every collective by every path: in one node and in several, ordinary buffers and shared windows, inline and threaded.

Expected values come from all ranks' inputs, which every rank can compute; reductions are compared bit by bit with a left fold
over the ranks. `Paths` makes ranks treat themselves as nodes, so one machine shows what several do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from mpi4py import MPI

from ranks import on_ranks, refused
from shardrt.comm import Communicator, PreMulSum, ReduceOp, RemoteError, Stream, World, new_stream
from shardrt.comm.backends.mpi import MpiBackend

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.uint32, torch.uint64, torch.bool]
MOVED = [*DTYPES, torch.float64, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64]
SIZES = [0, 1, 3, 1009, 40_009]
NODES: dict[str, Callable[[int], int]] = {
    "one-node": lambda rank: 0,
    "pairs": lambda rank: rank // 2,
    "alone": lambda rank: rank,
    "mixed": lambda rank: rank % 2,  # not in runs: as one node without shared memory
}

PATHS = [("one-node", False), ("one-node", True), ("pairs", False), ("pairs", True), ("alone", True), ("mixed", False)]
every_path = pytest.mark.parametrize(
    ("nodes", "threaded"), PATHS, ids=[f"{n}-{'threaded' if t else 'inline'}" for n, t in PATHS]
)
windows = pytest.mark.parametrize("window", [False, True], ids=["ordinary", "window"])


@contextmanager
def path(world: World, nodes: str, *, threaded: bool = False) -> Iterator[tuple[Communicator, Stream]]:
    """A communicator whose ranks are on nodes by `NODES[nodes]`, and a stream; large from 4 KiB, in small blocks."""
    stream = new_stream(world.device, "test", threaded=threaded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.comm.backends.mpi._SMALL_NBYTES", 4096)
        patch.setattr("shardrt.comm.backends.node.node_algorithms._CHUNK_NBYTES", 30_000)
        patch.setattr("shardrt.comm.backends.messages._MESSAGE_NBYTES", 25_000)
        patch.setattr("shardrt.comm.backends.mpi._EXCHANGE_NBYTES", 50_000)
        patch.setattr("shardrt.comm.backends.mpi._MIN_SLOT_NBYTES", 1)
        patch.setattr("shardrt.comm.backends.node.staging._PATIENCE_S", 1e3)  # on a busy machine as well
        comm = Communicator(MpiBackend(MPI.COMM_WORLD.Dup(), nodes, NODES[nodes](world.rank)))
        yield comm, stream
        stream.close()
        comm.close()


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, exact in every dtype, different on every rank."""
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


def noise(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose sum depends on the order, where the dtype has such."""
    generator = torch.Generator().manual_seed(rank)
    if not dtype.is_floating_point:
        return torch.randint(0, 5, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Buffers:
    """Buffers of one communicator, of its own memory or torch's, none of them aligned; a window is made once and reused."""

    def __init__(self, comm: Communicator, window: bool) -> None:
        self._room = comm.empty(6 * 40_009 * 8, torch.uint8) if window else None
        self._used = 0

    def holding(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._room is None:
            return torch.cat([tensor.new_zeros(1), tensor])[1:]
        begin = self._used + tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        self._used = -(-end // 16) * 16
        return self._room[begin:end].view(tensor.dtype).copy_(tensor)

    def poisoned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.holding(torch.full((numel * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype))

    def reset(self) -> None:
        self._used = 0


@windows
@every_path
@on_ranks(3, 4, more=(1, 2))
def test_all_gather(world: World, nodes: str, threaded: bool, window: bool) -> None:
    with path(world, nodes, threaded=threaded) as (comm, stream):
        buffers = Buffers(comm, window)
        for dtype in MOVED:
            for n in SIZES:
                n = n // world.size
                buffers.reset()
                expected = torch.cat([values(rank, n, dtype) for rank in range(world.size)])
                out, inp = buffers.poisoned(n * world.size, dtype), buffers.holding(values(world.rank, n, dtype))
                comm.all_gather(out, inp, stream=stream).synchronize()
                assert same(out, expected), (dtype, n)
                inp.zero_()  # as soon as the call is done, the input is the caller's
                in_place = buffers.poisoned(n * world.size, dtype)
                own = in_place[world.rank * n : (world.rank + 1) * n].copy_(values(world.rank, n, dtype))
                comm.all_gather(in_place, own, stream=stream).synchronize()
                assert same(in_place, expected), (dtype, n)
                assert same(out, expected), (dtype, n)


def fold(rows: list[torch.Tensor], op: ReduceOp | PreMulSum) -> torch.Tensor:
    """The reduction by hand: from the first rank to the last, in float32 at least, rounded once."""
    dtype = rows[0].dtype
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}.get(dtype, dtype)
    wide = torch.int64 if dtype in (torch.uint32, torch.uint64) else wide  # torch adds none of these; the values are small
    terms = [row.to(wide) for row in rows]
    if isinstance(op, PreMulSum):
        terms, op = [term * op.factor for term in terms], ReduceOp.SUM
    total = terms[0]
    for term in terms[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total = total + term
        elif op is ReduceOp.PRODUCT:
            total = total * term
        else:
            total = torch.minimum(total, term) if op is ReduceOp.MIN else torch.maximum(total, term)
    return (total / len(rows) if op is ReduceOp.AVG else total).to(dtype)


@windows
@every_path
@on_ranks(3, 4, more=(1, 2))
def test_reductions(world: World, nodes: str, threaded: bool, window: bool) -> None:
    with path(world, nodes, threaded=threaded) as (comm, stream):
        buffers, N = Buffers(comm, window), world.size
        for dtype in DTYPES:
            for op in (*ReduceOp, PreMulSum(0.3)):
                if not dtype.is_floating_point and (op is ReduceOp.AVG or isinstance(op, PreMulSum)):
                    continue
                for n in (0, 1, 3, 40_009 // N):
                    buffers.reset()
                    rows = [noise(rank, n * N, dtype) for rank in range(N)]
                    expected, own = fold(rows, op), slice(world.rank * n, (world.rank + 1) * n)
                    inp, out = buffers.holding(rows[world.rank]), buffers.poisoned(n, dtype)
                    comm.reduce_scatter(out, inp, op, stream=stream).synchronize()
                    assert same(out, expected[own]), (dtype, op, n)
                    everything = buffers.poisoned(n * N, dtype)
                    comm.all_reduce(everything, inp, op, stream=stream).synchronize()
                    assert same(everything, expected), (dtype, op, n)
                    root, kept = N - 1, everything.zero_()
                    comm.reduce(kept if world.rank == root else None, inp, op, root, stream=stream).synchronize()
                    assert same(kept, expected if world.rank == root else torch.zeros_like(kept)), (dtype, op, n)
                    assert same(inp, rows[world.rank])
                    comm.all_reduce(kept.copy_(inp), kept, op, stream=stream).synchronize()
                    assert same(kept, expected), (dtype, op, n)
                    comm.reduce_scatter(inp[own], inp, op, stream=stream).synchronize()
                    assert same(inp[own], expected[own]), (dtype, op, n)


@on_ranks(3)
def test_low_precision_is_summed_in_float32(world: World) -> None:
    """1 + 2**-8 + 2**-8: in bfloat16 each addition rounds back to 1; in float32 the sum is 1 + 2**-7, which bfloat16 has."""
    value = 1.0 if world.rank == 0 else 2.0**-8
    for n in (1, 100_000):
        out = torch.empty(n, dtype=torch.bfloat16)
        world.comm.all_reduce(out, torch.full((n,), value, dtype=torch.bfloat16), ReduceOp.SUM, stream=world.stream)
        assert torch.equal(out, torch.full((n,), 1 + 2.0**-7, dtype=torch.bfloat16))


@on_ranks(1, 2, 3, 4)
def test_windows_and_ordinary_buffers_mix(world: World) -> None:
    """Each rank may bring its own kind of buffer, at a place of its own."""
    with path(world, "one-node") as (comm, stream):
        n = 20_011
        room = comm.empty(3 * world.size * n, torch.float32)
        inp = torch.empty(world.size * n) if world.rank == 0 and world.size > 2 else room[world.rank * n :][: world.size * n]
        rows = [noise(rank, world.size * n, torch.float32) for rank in range(world.size)]
        out = torch.empty(n)
        comm.reduce_scatter(out, inp.copy_(rows[world.rank]), ReduceOp.SUM, stream=stream)
        assert same(out, fold(rows, ReduceOp.SUM)[world.rank * n : (world.rank + 1) * n])


@every_path
@on_ranks(2, 4)
def test_tensors_of_inference_mode(world: World, nodes: str, threaded: bool) -> None:
    """The stream's thread is outside of the mode, and so may the caller be."""
    with path(world, nodes, threaded=threaded) as (comm, stream):
        with torch.inference_mode():
            tensor = torch.ones(1009)
            comm.all_reduce(tensor, tensor, ReduceOp.SUM, stream=stream)
            stream.synchronize()
        comm.all_reduce(tensor, tensor, ReduceOp.SUM, stream=stream).synchronize()
        assert tensor.eq(world.size**2).all()


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
@on_ranks(1, 2, 3, 4)
def test_moves(world: World, threaded: bool) -> None:
    with path(world, "one-node", threaded=threaded) as (comm, stream):
        N, r = world.size, world.rank
        for dtype in MOVED:
            for n in [*SIZES[:-1], 9001]:
                for root in {0, N - 1}:
                    everyones = torch.cat([values(rank, n, dtype) for rank in range(N)])
                    out = torch.zeros_like(everyones) if r == root else None
                    comm.gather(out, values(r, n, dtype), root, stream=stream).synchronize()
                    assert out is None or same(out, everyones)
                    part = torch.zeros(n, dtype=dtype)
                    comm.scatter(part, everyones if r == root else None, root, stream=stream).synchronize()
                    assert same(part, values(r, n, dtype))
                    comm.broadcast(part, values(r, n, dtype), root, stream=stream).synchronize()
                    assert same(part, values(root, n, dtype))
                    if out is not None:
                        own = out[r * n : (r + 1) * n]
                        comm.scatter(own, out, root, stream=stream).synchronize()
                        comm.gather(out, own, root, stream=stream).synchronize()
                        assert same(out, everyones)
                    else:
                        comm.scatter(part, None, root, stream=stream).synchronize()
                        comm.gather(None, part, root, stream=stream).synchronize()
                inp = torch.cat([values(r * N + to, n, dtype) for to in range(N)])
                expected = torch.cat([values(source * N + r, n, dtype) for source in range(N)])
                out = torch.zeros_like(inp)
                comm.all_to_all(out, inp, stream=stream).synchronize()
                assert same(out, expected)
                comm.all_to_all(inp, inp, stream=stream).synchronize()
                assert same(inp, expected)


@on_ranks(1, 2, 3, 4)
def test_all_to_all_with_counts(world: World) -> None:
    """Rank s sends (s + 2 * t) % 5 elements to rank t, some of them none."""
    N, r = world.size, world.rank
    count = [[(s + 2 * t) % 5 * 1000 for t in range(N)] for s in range(N)]
    inp = torch.arange(sum(count[r])) + 100_000 * r
    starts = [[0, *accumulate(row)] for row in count]
    expected = [torch.arange(starts[s][r], starts[s][r + 1]) + 100_000 * s for s in range(N)]
    out = torch.zeros(sum(count[s][r] for s in range(N)), dtype=torch.int64)
    world.comm.all_to_all(out, inp, [count[s][r] for s in range(N)], count[r], stream=world.stream).synchronize()
    assert same(out, torch.cat(expected))


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
@on_ranks(1, 2, 3, 4)
def test_groups(world: World, threaded: bool) -> None:
    """Sends before receives, to oneself too, far larger than what MPI buffers, and collectives among them."""
    with path(world, "one-node", threaded=threaded) as (comm, stream):
        N, r, n = world.size, world.rank, 300_001
        received = [torch.zeros(n) for _ in range(N)]
        gathered, total = torch.zeros(N), torch.full((n,), float(r))
        with comm.group() as work:
            for to in range(N):
                comm.send(torch.full((n,), 10.0 * r + to), to, stream=stream)
            for source in range(N):
                last = comm.recv(received[source], source, stream=stream)
            comm.all_gather(gathered, torch.tensor([float(r)]), stream=stream)
            comm.all_reduce(total, total, ReduceOp.SUM, stream=stream)
            assert last is work
            assert not work.is_done()
            refused("still open", work.synchronize, RuntimeError)
            with pytest.raises(RuntimeError, match="open already"), comm.group():
                pass
        work.synchronize()
        assert all(same(got, torch.full((n,), 10.0 * source + r)) for source, got in enumerate(received))
        assert gathered.tolist() == list(range(N))
        assert total.unique().tolist() == [sum(range(N))]
        with pytest.raises(ZeroDivisionError), comm.group():  # noqa: PT012
            comm.all_reduce(total, total, ReduceOp.SUM, stream=stream)
            raise ZeroDivisionError
        comm.barrier(stream=stream).synchronize()  # the failed group's call was not made
        assert total.unique().tolist() == [sum(range(N))]


@pytest.mark.parametrize("route", ["one-node", "pairs"])
@on_ranks(2, 3, more=(1, 4))
def test_many_small_calls_of_a_group(world: World, route: str) -> None:
    """The bits of the same calls one by one, of any dtype and size; more than one exchange holds, some too large for it."""
    with path(world, route, threaded=False) as (comm, stream):
        N, r = world.size, world.rank
        dtypes, sizes = (torch.float32, torch.bfloat16, torch.float64, torch.int32), (0, 1, 3, 257, 1009, 2048, 40_009)
        given = [noise(r, N * n, dtype) for _ in range(3) for dtype in dtypes for n in sizes]
        grouped, alone = ([_outs(inp, N) for inp in given] for _ in range(2))
        with comm.group():
            for inp, outs in zip(given, grouped, strict=True):
                _make_calls(comm, stream, inp, outs)
        for inp, outs in zip(given, alone, strict=True):
            _make_calls(comm, stream, inp, outs)
        assert all(same(*pair) for many, one in zip(grouped, alone, strict=True) for pair in zip(many, one, strict=True))


def _outs(inp: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [inp.new_zeros(ranks * inp.numel()), inp.new_zeros(inp.numel() // ranks), torch.zeros_like(inp), inp.clone()]


def _make_calls(comm: Communicator, stream: Stream, inp: torch.Tensor, outs: list[torch.Tensor]) -> None:
    gathered, scattered, total, in_place = outs
    comm.all_gather(gathered, inp, stream=stream)
    comm.reduce_scatter(scattered, inp, ReduceOp.SUM, stream=stream)
    comm.all_reduce(total, inp, ReduceOp.MAX, stream=stream)
    comm.all_reduce(in_place, in_place, ReduceOp.SUM, stream=stream)


@on_ranks(2)
def test_small_calls_of_a_group_share_an_exchange(world: World) -> None:
    """Twenty gathers of 2 KiB take one."""
    with path(world, "one-node", threaded=False) as (comm, stream):
        inp, outs = torch.zeros(512), [torch.zeros(1024) for _ in range(20)]
        before = comm.backend._shared_memory.reached  # type: ignore[attr-defined]
        with comm.group():
            for out in outs:
                comm.all_gather(out, inp, stream=stream)
        assert comm.backend._shared_memory.reached == before + 1  # type: ignore[attr-defined]


@on_ranks(2, 3, 4)
def test_send_and_receive(world: World) -> None:
    """Round the ring, one at a time."""
    n = 100_003
    token = torch.full((n,), 7.0) if world.rank == 0 else torch.zeros(n)
    if world.rank > 0:
        world.comm.recv(token, world.rank - 1, stream=world.stream).synchronize()
    world.comm.send(token + 1, (world.rank + 1) % world.size, stream=world.stream).synchronize()
    if world.rank == 0:
        world.comm.recv(token, world.size - 1, stream=world.stream).synchronize()
    assert token.unique().tolist() == [7.0 + (world.rank or world.size)]


@on_ranks(2, 3)
def test_calls_on_two_streams_run_in_order(world: World) -> None:
    """The second call, on another thread, waits for the first."""
    one, two = (new_stream(world.device, name, threaded=True) for name in ("one", "two"))
    for step in range(20):
        first, second = torch.full((5000,), float(step)), torch.full((5000,), 2.0 * step)
        world.comm.all_reduce(first, first, ReduceOp.SUM, stream=one)
        world.comm.all_reduce(second, second, ReduceOp.SUM, stream=two).synchronize()
        assert first.unique().tolist() == [step * world.size]
        assert second.unique().tolist() == [2 * step * world.size]
    one.close()
    two.close()


@pytest.mark.parametrize("power", [21, pytest.param(31, marks=pytest.mark.all)])
@on_ranks(2)
def test_more_than_2_31_elements(world: World, power: int) -> None:
    """2 GiB and a little, in uint8: counts and offsets that no int32 holds; and the same path with few elements."""
    n = 2**power + 6
    marks = [0, 2 ** (power - 1), 2**power - 1, 2**power, n - 1]
    big = torch.zeros(n, dtype=torch.uint8)
    if world.rank == 0:
        big[marks] = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    world.comm.broadcast(big, big, 0, stream=world.stream).synchronize()
    assert big[marks].tolist() == [1, 2, 3, 4, 5]
    half = big[: n // 2] if world.rank == 0 else big[n // 2 :]
    world.comm.reduce_scatter(half, big, ReduceOp.SUM, stream=world.stream).synchronize()
    world.comm.all_gather(big, half, stream=world.stream).synchronize()
    assert big[marks].tolist() == [2, 4, 6, 8, 10]
    assert int(torch.count_nonzero(big)) == len(marks)


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
    refused("closed", lambda: parity.all_gather(out, out[:1], stream=world.stream), RuntimeError)
    alone = world.comm.split(0 if world.rank == 0 else None, 0, "first")
    assert (alone is None) == (world.rank != 0)
    if alone is not None:
        alone.close()


@on_ranks(1, 2, 3)
def test_agreement(world: World) -> None:
    """An exception on one rank is one on every rank, and all go on together."""
    comm, failing = world.comm, world.size - 1

    @comm.agree()
    def prepare(step: int) -> None:
        if world.rank == failing and step == 1:
            raise KeyError("vocabulary")

    prepare(0)
    with pytest.raises(RemoteError, match=rf"rank {failing} raised KeyError: 'vocabulary'") as caught:
        prepare(1)
    assert caught.value.failure.rank == failing
    assert "in prepare" in str(caught.value)
    assert (caught.value.__cause__ is not None) == (world.rank == failing)
    prepare(2)
    total = torch.ones(1)
    comm.all_reduce(total, total, ReduceOp.SUM, stream=world.stream).synchronize()
    assert total.item() == world.size


@on_ranks(2, 3)
def test_bad_arguments_are_refused(world: World) -> None:
    comm, stream, N = world.comm, world.stream, world.size
    good = torch.zeros(2 * N)
    refused(r"root 7 is not a rank; expected 0 <= root < ", lambda: comm.reduce(good, good, ReduceOp.SUM, 7, stream=stream))
    refused(r"to -1 is not a rank", lambda: comm.send(good, -1, stream=stream))
    refused(r"source is this rank itself", lambda: comm.recv(good, world.rank, stream=stream))
    refused(r"this rank is the root, but out is None", lambda: comm.gather(None, good, world.rank, stream=stream))
    with pytest.raises(ValueError, match=rf"expected inp.numel\(\) == N \* out.numel\(\), found {2 * N} against {2 * N} el"):
        comm.scatter(good, good, world.rank, stream=stream)
    with pytest.raises(ValueError, match=rf"expected out.numel\(\) == inp.numel\(\) == N \* n, found {2 * N + 1} against"):
        comm.all_to_all(torch.zeros(2 * N + 1), torch.zeros(2 * N + 1), stream=stream)
    with pytest.raises(ValueError, match=rf"expected {N} in_counts, none below 0, that add up to the {2 * N} elements there"):
        comm.all_to_all(good, good.clone(), [2] * N, [1] * N, stream=stream)
    with pytest.raises(ValueError, match=r"PreMulSum\(factor=2.0\) of torch.int64 is not defined"):
        comm.all_reduce(good.long(), good.long(), PreMulSum(2.0), stream=stream)
    eighth = good.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"float8_e4m3fn cannot be reduced; expected one of bfloat16, bool, float16"):
        comm.all_reduce(eighth, eighth, ReduceOp.SUM, stream=stream)
    pair = torch.zeros(2)
    with pytest.raises(ValueError, match=rf"out.numel\(\) == N \* inp.numel\(\), found {2 * N + 1} against 2"):
        comm.all_gather(torch.zeros(2 * N + 1), pair, stream=stream)
    with pytest.raises(ValueError, match=r"inp.numel\(\) == N \* out.numel\(\)"):
        comm.reduce_scatter(pair, torch.zeros(2 * N + 1), ReduceOp.SUM, stream=stream)
    refused("one dtype", lambda: comm.all_reduce(torch.zeros(2, dtype=torch.float64), pair, ReduceOp.SUM, stream=stream))
    with pytest.raises(ValueError, match="inp is not contiguous"):
        comm.all_reduce(torch.zeros(2, 3), torch.zeros(3, 2).t(), ReduceOp.SUM, stream=stream)
    with pytest.raises(ValueError, match="AVG of torch"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), ReduceOp.AVG, stream=stream)
    refused("root 7 is not a rank", lambda: comm.broadcast(pair, pair, 7, stream=stream))
    with pytest.raises(ValueError, match=r"MAX of torch.complex64 is not defined; use SUM or AVG"):
        comm.all_reduce(pair.to(torch.complex64), pair.to(torch.complex64), ReduceOp.MAX, stream=stream)
    refused("is on meta", lambda: comm.broadcast(torch.zeros(2, device="meta"), pair, 0, stream=stream))
    other = new_stream(world.device, "other", threaded=True)
    with pytest.raises(ValueError, match=r"a group's calls share one stream"), comm.group():  # noqa: PT012
        comm.barrier(stream=stream)
        comm.barrier(stream=other)
    other.close()
    comm.barrier(stream=stream).synchronize()

"""Large collectives through the node's shared memory: where ranks pause, and where one of them raises in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import memmove

import pytest
import torch
from mpi4py import MPI

from ranks import on_ranks
from shardrt.comm import Communicator, ReduceOp, RemoteError, World
from shardrt.comm.backends.mpi import MpiBackend
from shardrt.comm.backends.node.staging import StagedCollectives
from shardrt.comm.core.streams import INLINE

pytestmark = pytest.mark.mpi

CHUNK_NBYTES = 1 << 15  # of what a rank writes between two barriers


@contextmanager
def staging(world: World, patience_s: float) -> Iterator[Communicator]:
    """A communicator whose calls are compared, with small chunks; ranks pause after one that takes longer than `patience_s`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.comm.backends.mpi._EXCHANGE_NBYTES", CHUNK_NBYTES)
        patch.setattr("shardrt.comm.backends.mpi._MIN_SLOT_NBYTES", 1)
        patch.setattr("shardrt.comm.backends.node.staging._PATIENCE_S", patience_s)
        patch.setattr("shardrt.comm.backends.node.staging._PAUSE", 2)
        comm = Communicator(MpiBackend(MPI.COMM_WORLD.Dup(), "staging", 0), world.comm.hooks)
        yield comm
        comm.close()


def staged(comm: Communicator) -> StagedCollectives:
    assert isinstance(comm.backend, MpiBackend)
    found = comm.backend._algorithms._staged
    assert found is not None
    return found


def reached(comm: Communicator) -> int:
    """The number of barriers in shared memory."""
    assert isinstance(comm.backend, MpiBackend)
    assert comm.backend._shared_memory is not None
    return comm.backend._shared_memory.reached


def rows(size: int, numel: int) -> list[torch.Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]


def check(comm: Communicator, numel: int) -> None:
    """An all-reduce in place, a reduce-scatter, and an all-gather of its results, bit by bit."""
    given = rows(comm.size, numel * comm.size)
    expected = given[0].clone()
    for row in given[1:]:
        expected += row
    total, part, everything = given[comm.rank].clone(), torch.empty(numel), torch.empty(numel * comm.size)
    comm.all_reduce(total, total, ReduceOp.SUM, stream=INLINE)
    comm.reduce_scatter(part, given[comm.rank], ReduceOp.SUM, stream=INLINE)
    comm.all_gather(everything, part, stream=INLINE)
    assert torch.equal(total, expected)
    assert torch.equal(everything, expected)


@on_ranks(2, 3)
def test_each_chunk_takes_a_barrier_and_no_message(world: World) -> None:
    with staging(world, 1e3) as comm:
        numel = 3 * CHUNK_NBYTES // 4 + 5  # four chunks
        before = reached(comm)
        comm.all_gather(torch.empty(numel * comm.size), torch.ones(numel), stream=INLINE)
        assert reached(comm) == before + 4 + 1  # the comparison of the call takes one
        check(comm, numel)


@on_ranks(2, 3, 4)
def test_ranks_pause_together(world: World) -> None:
    """After a call that takes too long they make so many by messages, and try again."""
    with staging(world, -1.0) as comm:
        numel = 3 * CHUNK_NBYTES // 4 + 5
        pauses = []
        for _ in range(4):
            before = reached(comm)
            comm.all_gather(torch.empty(numel * comm.size), torch.ones(numel), stream=INLINE)
            pauses.append((staged(comm)._pause, reached(comm) - before - 1))
        assert pauses == [(2, 4), (1, 0), (0, 0), (2, 4)]
        for numel in (CHUNK_NBYTES // 4, CHUNK_NBYTES // 2 + 1, 5 * CHUNK_NBYTES // 4 + 3):
            for _ in range(3):
                check(comm, numel)


@pytest.mark.parametrize("late", [0, -1], ids=["first", "last"])
@on_ranks(2, 3)
def test_one_late_rank_is_enough(world: World, late: int) -> None:
    """The rank that is late itself, and those that have waited for it, agree on it."""
    with staging(world, 0.02) as comm, pytest.MonkeyPatch.context() as patch:
        number = 3 if world.rank == late % world.size else 0
        patch.setattr("shardrt.comm.backends.node.staging.memmove", calling(number, lambda: time.sleep(0.3)))
        comm.all_gather(torch.empty(CHUNK_NBYTES * comm.size), torch.ones(CHUNK_NBYTES), stream=INLINE)
        assert comm.exchange(staged(comm)._pause) == [2] * comm.size


@on_ranks(2)
def test_where_nothing_is_staged(world: World) -> None:
    """Ranks that share cores, in parts as well, and too many ranks for a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        shared = MpiBackend(MPI.COMM_WORLD.Dup(), "shared", 0, has_cores=False)
        part = shared.split(0, world.rank, "part")
        patch.setattr("shardrt.comm.backends.mpi._MIN_SLOT_NBYTES", 1 << 20)
        many = MpiBackend(MPI.COMM_WORLD.Dup(), "many", 0)
        for backend in (part, many, shared):
            assert backend is not None
            assert backend._algorithms._staged is None
            backend.close()


def calling(number: int, act: Callable[[], object]) -> Callable[[int, int, int], object]:
    """`memmove`, which calls `act` in its call of this number."""
    count = 0

    def move(to: int, source: int, nbytes: int) -> object:
        nonlocal count
        count += 1
        if count == number:
            act()
        return memmove(to, source, nbytes)

    return move


def fail() -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("of_a_part", [False, True], ids=["own", "part"])
@on_ranks(2, 3)
def test_a_rank_raises_in_the_middle(world: World, of_a_part: bool) -> None:
    """As a signal handler may: every rank raises it at the end of the block, whose ranks then go on together."""
    with staging(world, 1e3) as comm:
        part = comm.split(0, world.rank, "part") if of_a_part else comm
        assert part is not None
        for number in (2, 3, 7, 10):
            with pytest.MonkeyPatch.context() as patch:
                if world.rank == 1:
                    patch.setattr("shardrt.comm.backends.node.staging.memmove", calling(number, fail))
                with pytest.raises(RemoteError, match="rank 1 raised ArithmeticError: on purpose"):
                    comm.agree()(check)(part, 3 * CHUNK_NBYTES)
            check(part, CHUNK_NBYTES)
            check(comm, 10)
        if of_a_part:
            part.close()


@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught"])
@on_ranks(2, 3)
def test_a_rank_raises_after_the_last_meeting(world: World, is_caught: bool) -> None:
    """The others complete the call, and find it out at the end of the block: also where the rank catches its exception."""
    with staging(world, 1e3) as comm:

        def gather() -> None:
            with suppress(*[ArithmeticError] * is_caught):
                comm.all_gather(torch.empty(CHUNK_NBYTES * comm.size), torch.ones(CHUNK_NBYTES), stream=INLINE)

        error = "left a call through an exception" if is_caught else "rank 1 raised ArithmeticError: on purpose"
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:  # four chunks, each written, put in place, and read from the others
                patch.setattr("shardrt.comm.backends.node.staging.memmove", calling(4 * (comm.size + 1), fail))
            with pytest.raises(RemoteError, match=error):
                comm.agree()(gather)()
        check(comm, CHUNK_NBYTES)

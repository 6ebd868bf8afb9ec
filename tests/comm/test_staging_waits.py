"""An exception in a wait of a chunked collective, as a signal handler raises it: on threads as ranks, without MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, cast

import pytest
import torch

from shardrt.comm import ReduceOp
from shardrt.comm.backends.meeting import QUIT
from shardrt.comm.backends.node import shared_memory
from shardrt.comm.backends.node.shared_memory import SharedMemoryExchange, WindowOffset
from shardrt.comm.backends.node.staging import StagedCollectives
from shardrt.comm.core.calls import Interrupted
from shardrt.comm.startup.binding import has_cores

CAPACITY = 4096
NUMEL = CAPACITY  # of a rank's range: four chunks of a gather
WAIT_S = 60.0  # until a rank counts as hanging


class Windows:
    """The memory of all ranks, of one of which this is the view."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self.parts, self.on_fence = parts, nothing

    def fence(self) -> None:
        self.on_fence()

    def view(self, rank: int, start: WindowOffset, dtype: torch.dtype, first: int, numel: int) -> torch.Tensor:
        begin = start.offset + first * dtype.itemsize
        return self.parts[rank][begin : begin + numel * dtype.itemsize].view(dtype)


class Comm:
    """What an exchange needs of MPI. on_look: runs where the rank waits."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.on_look = rank, size, nothing

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Barrier(self) -> None:
        pass

    def Iprobe(self) -> None:
        time.sleep(0.0001)
        self.on_look()


def nothing() -> None:
    pass


class Rank:
    """A rank that is a thread."""

    def __init__(self, parts: list[torch.Tensor], rank: int) -> None:
        self.rank, self.size = rank, len(parts)
        self.comm, self.windows = Comm(rank, self.size), Windows(parts)
        comm, windows = cast(Any, (self.comm, self.windows))
        self.exchange = SharedMemoryExchange(comm, windows, CAPACITY, "staged")
        self.staged = StagedCollectives(self.exchange, rank, self.size)

    def gather(self) -> list[float]:
        out = torch.empty(NUMEL * self.size)
        assert self.staged.gather(out.split(NUMEL), torch.full((NUMEL,), float(self.rank)))
        return out[::NUMEL].tolist()

    def all_reduce(self) -> list[float]:
        inp = torch.full((CAPACITY,), float(self.rank))
        bounds = [CAPACITY * rank // self.size for rank in range(self.size + 1)]
        assert self.staged.all_reduce(inp, inp, bounds, ReduceOp.SUM)
        return inp.unique().tolist()

    def outcome(self, call: Callable[[], object]) -> str:
        """The exception that `call` raises, or else the next comparison, before this rank leaves as in `agree()`."""
        try:
            call()
            self.exchange.barrier(7)
        except ArithmeticError as error:  # as `Communicator` does
            self.exchange.leave(QUIT)
            return type(error).__name__
        except Interrupted as error:
            return type(error).__name__
        finally:
            self.exchange.leave()
        return "none"

    def is_arrived(self, barrier: int) -> bool:
        return self.exchange._own[0] >= barrier


def make_ranks(size: int) -> list[Rank]:
    parts = [torch.zeros(shared_memory._WORDS_NBYTES + 2 * CAPACITY, dtype=torch.uint8) for _ in range(size)]
    return [Rank(parts, rank) for rank in range(size)]


def on_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls return; "hangs" of one that does not end, which keeps nobody from ending the process."""
    found = ["hangs"] * len(calls)

    def run(number: int) -> None:
        found[number] = calls[number]()

    threads = [Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + WAIT_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return found


def go_on(ranks: list[Rank]) -> None:
    """The end of an `agree()`, and what the ranks do then."""
    reached = max(rank.exchange.reached for rank in ranks)
    for each in ranks:
        each.comm.on_look = each.windows.on_fence = nothing
        each.exchange.rejoin(reached)
        each.staged.rejoin()
    expected = [float(rank) for rank in range(len(ranks))]
    assert on_threads([each.gather for each in ranks]) == [expected] * len(ranks)


@pytest.mark.parametrize("patience_s", [1e3, -1.0], ids=["in time", "late"])
@pytest.mark.parametrize("name", ["gather", "all_reduce"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_raises_where_it_waits(size: int, name: str, patience_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each meeting, all ranks end: also where they find out in it that one is late."""
    monkeypatch.setattr("shardrt.comm.backends.node.staging._PATIENCE_S", patience_s)
    for meeting in range(1, 5):
        ranks = make_ranks(size)
        first, last = ranks[0], ranks[-1]

        def fail(first: Rank = first, meeting: int = meeting) -> None:
            if first.exchange.reached == meeting:
                raise ArithmeticError

        def come_later(first: Rank = first, last: Rank = last, meeting: int = meeting) -> None:
            if last.exchange.reached == meeting and not last.is_arrived(meeting):
                wait_until(lambda: first.exchange._left != 0)

        first.comm.on_look, last.windows.on_fence = fail, come_later
        found = on_threads([partial(each.outcome, getattr(each, name)) for each in ranks])
        assert found == ["ArithmeticError", *["Interrupted"] * (size - 1)], meeting
        go_on(ranks)


def test_a_rank_finds_out_one_meeting_early() -> None:
    """It reads the others' words of a meeting when one of them has left the next one; a third rank is there already."""
    ranks = make_ranks(3)
    first, second, last = ranks

    def fail() -> None:
        if first.exchange.reached == 3 and second.is_arrived(3):
            raise ArithmeticError

    def sleep_after_arriving() -> None:
        if last.exchange.reached == 2 and last.is_arrived(2):
            wait_until(lambda: first.exchange._left != 0)

    first.comm.on_look, last.windows.on_fence = fail, sleep_after_arriving
    found = on_threads([partial(each.outcome, each.gather) for each in ranks])
    assert found == ["ArithmeticError", "Interrupted", "Interrupted"]
    assert last.exchange.reached < first.exchange.reached
    go_on(ranks)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S / 2
    while not condition() and time.monotonic() < end:
        time.sleep(0.0001)


def test_cores_of_a_node() -> None:
    """Ranks may be bound to a core each, or share some."""
    assert has_cores([0b01, 0b10])
    assert has_cores([0b11, 0b11])
    assert not has_cores([0b11, 0b11, 0b11])
    assert not has_cores([0b01, 0b01])

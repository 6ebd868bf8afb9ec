"""The states by which watchdogs end a job, on two nodes: rows of the other node arrive late."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from shardrt.comm.ending.status_table import Alarm, ProgramPhase
from shardrt.comm.monitor.timing import Timing
from shardrt.comm.monitor.watchdog.states import Decision, Move

NODES = [0, 0, 1, 1]
STEP_S = 0.05
POLL, INTERVAL, LIMIT = 3, 20, 100  # in steps: of the watchdog, of the side channel without an alarm, of an operation
DELAY = 6  # of a message, at most
OPERATE, LEAVE, END = 0, 1, 2  # where a program is: two operations of all ranks


@dataclass
class View:
    """What a node knows of all ranks: their alarms, and the operation that each has reached (-1: none)."""

    alarms: bytearray = field(default_factory=lambda: bytearray(len(NODES)))
    reached: list[int] = field(default_factory=lambda: [-1] * len(NODES))
    holder: int | None = None

    def copy_from(self, other: View, ranks: list[int]) -> None:
        for rank in ranks:
            self.alarms[rank], self.reached[rank] = other.alarms[rank], other.reached[rank]

    def snapshot(self) -> View:
        return View(bytearray(self.alarms), list(self.reached))


@dataclass
class Rank:
    """A rank, which is the operation that it waits in, and its rows as well.

    arrives: the step in which it comes to the first operation; None: never.   takes: steps until an operation that everyone has
    reached comes through here, and until a report or last words are written.
    """

    rank: int
    view: View
    arrives: int | None
    takes: int
    everyone_is_here: bool = False
    since: int = 0  # it has been in the operation
    through: int | None = None  # the step in which the operation comes through
    has_finished: bool = False
    ending: Move | None = None

    def __post_init__(self) -> None:
        self.decision = Decision(self, self.rank, NODES, Timing())

    def alarms(self) -> bytes:
        return bytes(self.view.alarms)

    def set_alarm(self, rank: int, alarm: Alarm) -> None:
        self.view.alarms[rank] = alarm

    def set_phase(self, rank: int, phase: ProgramPhase) -> None:
        assert phase is ProgramPhase.FINISHED

    def claim(self) -> bool:
        if self.view.holder is None:
            self.view.holder = self.rank
        return self.view.holder == self.rank

    def release(self) -> None:
        self.view.holder = None

    @property
    def at(self) -> int:
        return self.view.reached[self.rank]

    def is_under_way(self) -> bool:
        return OPERATE <= self.at < END

    def go_on(self, now: int, everyone_at: int) -> None:
        """The main thread. everyone_at: the operation that all ranks have reached."""
        if self.at < OPERATE:
            if now == self.arrives:
                self.view.reached[self.rank], self.since = OPERATE, now
        elif self.at == END:
            self.has_finished = self.has_finished or self.decision.finish()
        elif everyone_at >= self.at and self.through is None:
            self.through = now + self.takes
        elif now == self.through:
            self.view.reached[self.rank], self.since, self.through = self.at + 1, now, None

    def watch(self, now: int) -> None:
        """The watchdog."""
        self.everyone_is_here = min(self.view.reached) >= self.at
        overdue = self if self.is_under_way() and now - self.since >= LIMIT else None
        move = self.decision.act(self.decision.look(POLL * STEP_S, overdue), overdue)
        if move in (Move.COMMIT, Move.FOLLOW):
            self.ending = move


class Job:
    """Four ranks on two nodes. The second node sends its rows, and the first one replies with its own."""

    def __init__(self, arrives: list[int | None], takes: list[int], delays: list[int]) -> None:
        self.views = [View(), View()]
        self.ranks = [Rank(r, self.views[NODES[r]], *own) for r, own in enumerate(zip(arrives, takes, strict=True))]
        self.delays = delays
        self.sent = View()  # the message that is on its way, where to (None: none is), and the step when it is there
        self.to: int | None = None
        self.arrival = self.next = 0

    def run(self) -> None:
        """Until each rank has finished or ends."""
        for now in range(20 * LIMIT):
            if all(rank.has_finished or rank.ending for rank in self.ranks):
                return
            everyone_at = min(rank.at for rank in self.ranks)
            for rank in self.ranks:
                if rank.ending is None:
                    rank.go_on(now, everyone_at)
                    if not rank.has_finished and (now + rank.takes) % POLL == 0:
                        rank.watch(now)
            self.carry(now)
        raise AssertionError("a job hangs")

    def carry(self, now: int) -> None:
        """The side channel."""
        if self.to is None:
            if any(self.views[1].alarms) or now >= self.next:
                self.next = now + INTERVAL
                self.send(now, 0)
        elif now >= self.arrival:
            self.views[self.to].copy_from(self.sent, [rank for rank, node in enumerate(NODES) if node != self.to])
            if self.to == 0:
                self.send(now, 1)
            else:
                self.to = None

    def send(self, now: int, to: int) -> None:
        self.sent, self.to = self.views[1 - to].snapshot(), to
        self.arrival = now + self.delays[now % len(self.delays)]


STEPS = st.integers(1, DELAY)


@example(spread=[55, 32, 0, 19], late=None, rank=2, takes=[4, 6, 3, 2], delays=[5])  # alarms one turn apart
@given(
    spread=st.lists(st.integers(0, 60), min_size=4, max_size=4),
    late=st.none() | st.integers(0, 3 * LIMIT),
    rank=st.integers(0, 3),
    takes=st.lists(STEPS, min_size=4, max_size=4),
    delays=st.lists(STEPS, min_size=1, max_size=7),
)
def test_two_nodes(spread: list[int], late: int | None, rank: int, takes: list[int], delays: list[int]) -> None:
    """All ranks finish, or all of them end with one report. One rank is late, or never comes."""
    job = Job([*spread[:rank], late, *spread[rank + 1 :]], takes, delays)
    job.run()
    moves = [rank.ending for rank in job.ranks]
    assert moves == [None] * 4 or (None not in moves and moves.count(Move.COMMIT) == 1), moves

"""The states by which the ranks' watchdogs decide to end a job, in every interleaving, and what the watchdog is made of."""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrt.comm.ending import report, status_table
from shardrt.comm.ending.report import write
from shardrt.comm.ending.status_table import Alarm, ProgramPhase, StatusEntry, StatusTable, TimeInside
from shardrt.comm.monitor import exit_handlers
from shardrt.comm.monitor.timing import Timing
from shardrt.comm.monitor.watchdog import stragglers
from shardrt.comm.monitor.watchdog.states import Decision, Move
from shardrt.comm.monitor.watchdog.stragglers import Comparison, Straggler, Stragglers
from shardrt.comm.startup import bootstrap

# ---------------------------------------------------------------------- a model of ranks


LONG_S = 1e6  # longer than any turn


class Do(Enum):
    """What a rank's program does, one after the other."""

    OPERATE = "an operation of all ranks"
    LEAVE = "reach the end of the program: an operation of all ranks, while it is LEAVING"
    STAY = "something is left to do"
    FINISH = "end"
    HANG = "never go on"


PROGRAM = (Do.LEAVE, Do.STAY, Do.OPERATE, Do.LEAVE, Do.FINISH)


class Watching(Enum):
    """Where a rank's watchdog is."""

    IDLE = "between two looks"
    CHOSEN = "it has chosen a move"
    COMMITTED = "it writes the report"
    FOLLOWS = "it writes what it knows"
    ENDS = "it ends the job"


class Rows:
    """The rows of all ranks in plain memory."""

    def __init__(self, size: int) -> None:
        self.alarm, self.phase = bytearray(size), bytearray([ProgramPhase.RUNNING] * size)
        self.holder: int | None = None

    def of(self, rank: int) -> RankRows:
        return RankRows(self, rank)


@dataclass
class RankRows:
    """The same, as one rank uses them."""

    shared: Rows
    rank: int

    def alarms(self) -> bytes:
        return bytes(self.shared.alarm)

    def set_alarm(self, rank: int, alarm: Alarm) -> None:
        assert rank == self.rank, "only its own rank writes a row"
        self.shared.alarm[rank] = alarm

    def set_phase(self, rank: int, phase: ProgramPhase) -> None:
        assert rank == self.rank, "only its own rank writes a row"
        assert self.shared.phase[rank] != ProgramPhase.FINISHED, "nothing follows FINISHED"
        self.shared.phase[rank] = phase

    def claim(self) -> bool:
        if self.shared.holder in (None, self.rank):
            self.shared.holder = self.rank
        return self.shared.holder == self.rank

    def release(self) -> None:
        assert self.shared.holder == self.rank, "only its holder gives a claim back"
        self.shared.holder = None


@dataclass
class Rank:
    """A rank of the model: its program and its watchdog."""

    rank: int
    program: tuple[Do, ...]
    decision: Decision
    at: int = 0  # in the program
    inside: bool = False  # an operation
    watching: Watching = Watching.IDLE
    chosen: tuple[Move, Seen | None] = (Move.WATCH, None)


@dataclass
class Seen:
    """An overdue operation, as a look has seen it."""

    model: Model = field(repr=False)
    rank: int
    at: int
    everyone_is_here: bool

    def is_under_way(self) -> bool:
        own = self.model.ranks[self.rank]
        return own.inside and own.at == self.at


class Model:
    """Ranks that make steps in any order. A step is one that no other rank can see half of."""

    def __init__(self, programs: tuple[tuple[Do, ...], ...]) -> None:
        size = len(programs)
        self.rows = Rows(size)
        self.ranks = [
            Rank(r, program, Decision(self.rows.of(r), r, [0] * size, Timing())) for r, program in enumerate(programs)
        ]
        self.reports = 0
        self.committed: list[Seen] = []

    def clone(self) -> Model:
        """A copy, whose locks are the same: only one thread runs."""
        new = copy.copy(self)
        new.rows = copy.copy(self.rows)
        new.rows.alarm, new.rows.phase = bytearray(self.rows.alarm), bytearray(self.rows.phase)
        new.committed = list(self.committed)
        new.ranks = []
        for rank in self.ranks:
            other = copy.copy(rank)
            other.decision = copy.copy(rank.decision)
            other.decision.rows = new.rows.of(rank.rank)
            if (seen := rank.chosen[1]) is not None:
                other.chosen = rank.chosen[0], replace(seen, model=new)
            new.ranks.append(other)
        return new

    def key(self) -> tuple[Any, ...]:
        """What tells this state from others."""
        ranks = []
        for r in self.ranks:
            (move, seen), own = r.chosen, r.decision
            ranks += [r.at, r.inside, r.watching, move, seen and (seen.at, seen.everyone_is_here)]
            ranks += [own._everyone_was_here, own._has_finished, own._is_ending, own._settled_s > 0.0, *own._ahead]
        return tuple(ranks), bytes(self.rows.alarm), bytes(self.rows.phase), self.rows.holder, self.reports

    # ------------------------------------------------------------------ steps

    def steps(self) -> Iterator[tuple[str, int]]:
        """The steps that can be made now: a method, and the rank that makes it."""
        for r in self.ranks:
            if self._ends(r):
                continue
            if r.inside:
                if self._has_come(r):
                    yield "complete", r.rank
            elif r.at < len(r.program) and r.program[r.at] is not Do.HANG:
                yield "go_on", r.rank
            if r.at == len(r.program):  # `close` has ended the watchdog, unless it is in the middle of a step
                if r.watching is Watching.CHOSEN:
                    yield "act", r.rank
            elif r.watching is Watching.IDLE:
                yield from ((name, r.rank) for name in ("look", "look_overdue", "look_late") if self._may_look(name, r))
            else:
                yield {Watching.CHOSEN: "act", Watching.COMMITTED: "report", Watching.FOLLOWS: "follow"}[r.watching], r.rank

    def step(self, name: str, rank: int) -> None:
        getattr(self, name)(self.ranks[rank])

    def go_on(self, r: Rank) -> None:
        """The main thread: enter an operation, or do what needs no other rank."""
        match r.program[r.at]:
            case Do.OPERATE:
                r.inside = True
            case Do.LEAVE:
                r.decision.rows.set_phase(r.rank, ProgramPhase.LEAVING)
                r.inside = True
            case Do.STAY:
                r.decision.rows.set_phase(r.rank, ProgramPhase.RUNNING)
                r.at += 1
            case Do.FINISH:
                r.at += r.decision.finish()

    def complete(self, r: Rank) -> None:
        """An operation that every rank has reached comes through on this one."""
        r.inside = False
        r.at += 1

    def look(self, r: Rank) -> None:
        self._look(r, 0.0, overdue=False)

    def look_overdue(self, r: Rank) -> None:
        self._look(r, 0.0, overdue=True)

    def look_late(self, r: Rank) -> None:
        self._look(r, LONG_S, overdue=True)

    def act(self, r: Rank) -> None:
        move, seen = r.chosen
        done = r.decision.act(move, seen)
        r.chosen = Move.WATCH, None
        r.watching = Watching.IDLE
        if done is Move.COMMIT:
            assert seen is not None
            assert seen.is_under_way(), "an operation that came through does not end the job"
            assert not seen.everyone_is_here, "what everyone has reached comes through"
            r.watching = Watching.COMMITTED
        elif done is Move.FOLLOW:
            assert max(self.rows.alarm) >= Alarm.COMMITTED, "nobody acts on an alarm that is only raised"
            r.watching = Watching.FOLLOWS

    def report(self, r: Rank) -> None:
        self.reports += 1
        r.decision.rows.set_alarm(r.rank, Alarm.REPORTED)
        r.watching = Watching.ENDS

    def follow(self, r: Rank) -> None:
        if r.decision.rows.alarms()[r.rank]:
            r.decision.rows.set_alarm(r.rank, Alarm.FOLLOWED)
        r.watching = Watching.ENDS

    def _look(self, r: Rank, elapsed: float, overdue: bool) -> None:
        seen = Seen(self, r.rank, r.at, self._has_come(r)) if overdue else None
        r.chosen = r.decision.look(elapsed, seen), seen
        r.decision._settled_s = LONG_S if r.decision._settled_s else 0.0
        if r.chosen[0] is not Move.WATCH:
            r.watching = Watching.CHOSEN

    def _may_look(self, name: str, r: Rank) -> bool:
        """An operation is overdue whenever this rank is in one; one that everyone has reached takes less than a turn."""
        if name == "look":
            return not r.inside or not self.rows.alarm[r.rank]
        return r.inside and not (name == "look_late" and self._has_come(r))

    def _has_come(self, r: Rank) -> bool:
        """True if every rank has reached the operation that this one is in: the n-th of each."""
        return all((o.at, o.inside) >= (r.at, r.inside) and o.program[: r.at + 1] == r.program[: r.at + 1] for o in self.ranks)

    def _ends(self, r: Rank) -> bool:
        return r.watching is Watching.ENDS

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        """In every state."""
        assert self.reports <= 1, "one report a job"
        if any(map(self._ends, self.ranks)):
            assert ProgramPhase.FINISHED not in self.rows.phase, (
                "a rank that has finished in order with all others is never ended"
            )
        assert sum(alarm >= Alarm.COMMITTED for alarm in self.rows.alarm) <= 1

    def check_end(self) -> None:
        """When no rank can make a step."""
        if ProgramPhase.FINISHED in self.rows.phase:
            assert set(self.rows.phase) == {ProgramPhase.FINISHED}
            assert all(r.at == len(r.program) for r in self.ranks)
        else:
            assert all(map(self._ends, self.ranks)), "a job hangs"
            assert self.reports == 1, "a job ends without its report"


IN_ORDER = (PROGRAM,) * 2
LEFT_OUT = (PROGRAM, PROGRAM[2:])
HUNG = (PROGRAM, (Do.HANG,))


@pytest.mark.parametrize("programs", [IN_ORDER, LEFT_OUT, HUNG], ids=["in order", "left out", "hung"])
def test_every_interleaving_of_two_ranks(programs: tuple[tuple[Do, ...], ...]) -> None:
    """Each state that can be reached, with any delay of any rank between any two steps; each leads to an end."""
    first = Model(programs)
    known, waiting = {first.key(): 0}, [first]
    before: dict[int, list[int]] = defaultdict(list)
    ends = set()
    while waiting:
        model = waiting.pop()
        number, changes = known[model.key()], False
        for step in list(model.steps()):
            after = model.clone()
            after.step(*step)
            after.check()
            key = after.key()
            if key not in known:
                known[key] = len(known)
                waiting.append(after)
            before[known[key]].append(number)
            changes |= known[key] != number
        if not changes:
            model.check_end()
            ends.add(number)
    leads_to_end = list(ends)
    for number in leads_to_end:
        new = set(before.pop(number, ())) - ends
        ends |= new
        leads_to_end += new
    assert ends == set(known.values()), "a job goes round in circles"


@given(data=st.data(), left_out=st.integers(0, 3), rank=st.integers(0, 2))
def test_interleavings_of_three_ranks(data: st.DataObject, left_out: int, rank: int) -> None:
    """One of them may leave out the first operations."""
    programs: list[tuple[Do, ...]] = [PROGRAM] * 3
    programs[rank] = PROGRAM[left_out:]
    model = Model(tuple(programs))
    for choice in data.draw(st.lists(st.integers(0, 11), max_size=100)):
        if steps := list(model.steps()):
            model.step(*steps[choice % len(steps)])
            model.check()


# ---------------------------------------------------------------------- the rows


def test_a_row_has_one_writer_for_each_state() -> None:
    """What the main thread writes leaves the alarm, and the reverse; a note is cut, and may hold names of any bytes."""
    table = StatusTable(StatusTable.create(2))
    table.introduce(0, 3)
    table.introduce(1, 4)
    table.set_alarm(1, Alarm.RAISED)
    table.set_note(1, "#3 barrier, caf\udce9.py:7" + 300 * "x")
    table.set_phase(1, ProgramPhase.FINISHED)
    table.set_waited(1, 1.5, 7)
    row = table.header(1)
    assert (row.phase, row.alarm, row.stacks, row.waited, row.operations) == (ProgramPhase.FINISHED, Alarm.RAISED, 4, 1.5, 7)
    assert row.note.startswith("#3 barrier, caf\\udce9.py:7xxx")
    assert len(row.note) == 200
    assert table.alarms() == bytes([Alarm.NONE, Alarm.RAISED])
    assert table.header(0).note == ""
    table.close()


def test_one_process_of_a_node_holds_the_claim() -> None:
    fd = StatusTable.create(2)
    first, second = (StatusTable(os.open(f"/proc/self/fd/{fd}", os.O_RDWR)) for _ in range(2))
    os.close(fd)
    assert first.claim()
    assert first.claim()
    assert not second.claim()
    first.release()
    assert second.claim()
    second.close()  # as the end of its process would
    assert first.claim()
    first.close()


# ---------------------------------------------------------------------- stragglers


def named(comparison: Comparison, waits: list[list[float]], operations: int = 10) -> list[str]:
    """The lines of a job that spends so many of each ten seconds inside operations; a window has six."""
    waited, done, lines = [0.0] * len(waits[0]), 0, []
    comparison.add(0.0, waited, [0] * len(waited))
    for slice_ in waits:
        waited, done = [a + b for a, b in zip(waited, slice_, strict=True)], done + operations
        if (found := comparison.add(10.0, waited, [done] * len(waited))) is not None:
            lines.append(f"{found.rank}: {found}")
    return lines


def test_a_straggler_is_named_once() -> None:
    """Rank 1 arrives last: all others wait at least four seconds of ten more than it does."""
    comparison = Comparison(0.25)
    expected = "1: in the last 60 s all others waited for it 40% of the time, 400.0 ms on average at each of 60 operations"
    assert named(comparison, [[5.0, 1.0, 6.0]] * 18) == [expected]
    assert named(comparison, [[5.0, 6.0, 1.0]] * 6) == [expected.replace("1:", "2:")]
    assert named(comparison, [[5.0, 6.0, 5.0]] * 6) == []
    assert len(named(comparison, [[5.0, 6.0, 1.0]] * 6)) == 1, "it has been better meanwhile"


@pytest.mark.parametrize(
    ("waits", "operations"),
    [
        ([[5.0, 3.0, 6.0]] * 12, 10),
        ([[5.0, 1.0, 1.0]] * 12, 10),
        ([[9.0, 1.0, 9.0], [9.0, 1.0, 9.0], [1.0, 1.0, 1.0]] * 4, 1),
        ([[9.0, 0.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]] * 4, 100),
        ([[5.0, 1.0, 6.0], [1.0, 5.0, 6.0]] * 6, 100),
    ],
    ids=["below the share", "two alike", "few operations", "now and then", "in turn"],
)
def test_no_straggler(waits: list[list[float]], operations: int) -> None:
    assert named(Comparison(0.25), waits, operations) == []


def test_a_rank_that_takes_no_part_is_no_straggler() -> None:
    comparison = Comparison(0.25)
    for n in range(12):
        assert comparison.add(10.0, [5.0 * n, 0.0, 5.0 * n], [100 * n, n, 100 * n]) is None


def test_a_node_that_cannot_be_heard_hides_no_straggler() -> None:
    comparison = Comparison(0.25)
    lines = [comparison.add(10.0, [5.0 * n, n, 5.0 * n, 7.0], [100 * n, 100 * n, 100 * n, 90]) for n in range(7)]
    assert str(lines[-1]).startswith("in the last 60 s all others waited for it 40% of the time")


def simulated(waits: list[list[tuple[int, int]]], step_ms: int, share: float) -> list[Straggler]:
    """Whom rank 0 names in 12 seconds. waits: of each rank, begin and end in ms of each step, on a communicator each."""
    clock = mock.Mock(return_value=0.0)
    named: list[Straggler | None] = []
    with mock.patch.object(status_table, "monotonic", clock), mock.patch.object(stragglers, "monotonic", clock):
        table = StatusTable(StatusTable.create(len(waits)))
        inside = [TimeInside() for _ in waits]
        parts = [Stragglers(table, rank, Timing(straggler=share, straggler_s=2.0), own) for rank, own in enumerate(inside)]
        events: list[tuple[float, Any]] = []
        for rank, own in enumerate(waits):
            table.introduce(rank, stacks=0)
            for index, (begin, end) in enumerate(own):
                entry = StatusEntry(table, rank, index, index + 1, "", inside[rank])
                for start in range(0, 15_000, step_ms):
                    events += [(start + begin, partial(entry.begin, 0, "")), (start + end, entry.end)]
        ticks = range(0, 15_000, round(1000 * Timing().poll_s))
        events += [(tick, lambda part=part: named.append(part.tick())) for part in reversed(parts) for tick in ticks]
        for at, event in sorted(events, key=itemgetter(0)):
            clock.return_value = at / 1000
            event()
        table.close()
    return [found for found in named if found is not None]


@pytest.mark.parametrize("step_ms", [50, 150, 500])
def test_short_waits_count_as_long_as_they_are(step_ms: int) -> None:
    late, waiting = (step_ms * 9 // 10, step_ms), (step_ms // 2, step_ms)
    (found,) = simulated([[waiting], [late], [waiting]], step_ms, 0.25)
    assert found.rank == 1
    assert found.share == pytest.approx(0.4, abs=0.02)
    assert found.late_s == pytest.approx(0.4 * step_ms / 1000, rel=0.05)


def test_waits_count_alike_in_one_piece_in_several_and_side_by_side() -> None:
    whole, pieces, overlap, nested = [(20, 40)], [(0, 5), (10, 25)], [(10, 25), (15, 30)], [(10, 30), (15, 20)]
    assert simulated([whole, pieces, overlap, nested], 50, 0.01) == []


# ---------------------------------------------------------------------- what is written at the end


def fill(fd: int) -> None:
    """Write until the descriptor takes no more; it blocks again afterwards."""
    os.set_blocking(fd, False)
    with suppress(BlockingIOError):
        while True:
            os.write(fd, bytes(4096))
    os.set_blocking(fd, True)


def test_a_write_ends_although_nobody_reads(tmp_path: Path) -> None:
    """On a pipe, also one that has room for a part; on a socket; and a file is continued where it ends."""
    (out, pipe), (left, right) = os.pipe(), socket.socketpair()
    write(pipe, b"read", 0.1)
    assert os.read(out, 100) == b"read"
    write(pipe, bytes(1 << 20), 0.1)
    write(pipe, b"not read", 0.1)
    fill(left.fileno())
    write(left.fileno(), bytes(1 << 20), 0.1)
    with open(tmp_path / "file", "wb") as file:
        file.write(b"one, ")
        file.flush()
        write(file.fileno(), b"two", 0.1)
    assert (tmp_path / "file").read_bytes() == b"one, two"
    assert os.get_blocking(pipe)
    os.close(out)
    with pytest.raises(BrokenPipeError):
        write(pipe, b"nobody", 0.1)
    os.close(pipe)
    left.close()
    right.close()


def fail_in_thread(err: int, dump: int) -> NoReturn:
    """What a rank's process does; it must not go on."""

    def fail() -> None:
        raise ValueError("caf\udce9")

    os.dup2(err, 2)
    report._READ_S = 0.1
    aborter = mock.Mock(end_job=exit_handlers._exit)
    exit_handlers.ExitHandlers(0, aborter, lambda: "nothing", lambda why: os.write(dump, json.dumps(why).encode()), Timing())
    threading.Thread(target=fail, name="loader").start()
    time.sleep(20)
    exit_handlers._exit(0)


@pytest.mark.parametrize("is_read", [True, False])
def test_an_exception_of_any_text_ends_the_job(is_read: bool) -> None:
    """In a thread, also with a standard error that nobody reads: the dump has what could not be shown."""
    (out, err), (dumped, dump) = os.pipe(), os.pipe()
    if not is_read:
        fill(err)
    if not (child := os.fork()):
        fail_in_thread(err, dump)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    why = json.loads(os.read(dumped, 10_000))
    assert "uncaught exception in thread 'loader', nothing under way" in why
    assert "caf\udce9" in why
    shown = os.read(out, 1 << 20).decode()
    assert ("[0] ValueError: caf\\udce9\n" in shown) is is_read
    for fd in (out, err, dumped, dump):
        os.close(fd)


@pytest.mark.parametrize(
    ("status", "code"),
    [("3", 3), ("True", 1), ("False", 17), ("256", 17), ("-1", 255), ("None", 100), ("'x'", 100),
     ("1.5", 100), ("1 << 40", 101)],
)  # fmt: skip
def test_os_exit_takes_what_it_takes_without_a_world(status: str, code: int) -> None:
    """What is no integer is a TypeError (here 100), and one that C cannot have an OverflowError (101)."""
    if not (child := os.fork()):
        aborter = mock.Mock(end_job=exit_handlers._exit)
        exit_handlers.ExitHandlers(0, aborter, lambda: "nothing", lambda why: None, Timing())
        try:
            os._exit(status=eval(status))
        except BaseException as error:
            exit_handlers._exit({"TypeError": 100, "OverflowError": 101}.get(type(error).__name__, 102))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def fail_at_exit(err: int) -> NoReturn:
    """The end of a rank's process, whose standard output is gone."""
    os.dup2(err, 2)
    sys.stdout.close()
    with (
        mock.patch.object(report, "_READ_S", 0.1),
        mock.patch.object(bootstrap, "finalize", side_effect=ValueError("caf\udce9")),
    ):
        bootstrap._finalize_at_exit()
    exit_handlers._exit(0)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_program_whose_end_fails_ends_with_1(is_read: bool) -> None:
    out, err = os.pipe()
    if not is_read:
        fill(err)
    if not (child := os.fork()):
        fail_at_exit(err)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert ("[0] ValueError: caf\\udce9\n" in os.read(out, 1 << 20).decode()) is is_read
    os.close(out)
    os.close(err)

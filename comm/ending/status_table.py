"""What every rank is doing, in memory that the ranks of a node share: a row can be read when its rank's process has ended.

A row has a header and an entry for each communicator that its rank has used lately. Rows of other nodes are copies, received
through `sidechannel.py`. The memory has no name, so nothing is left behind, however a job ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from time import monotonic

from .processes import state_of

_ROW_NBYTES = 2176
# pid, seen, stacks, phase, state, note, alarm, waited, operations, idle, steps, forwards, accumulates, chain
_HEADER = Struct("<qdiBc200sBdIdII?I")
_SEEN_AT, _PHASE_AT, _STATE_AT, _NOTE_AT, _ALARM_AT, _WAITED_AT, _IDLE_AT = 8, 20, 21, 22, 222, 223, 235
_PROGRESS_AT, _CHAIN_AT = 243, 252
_NOTE_NBYTES, _HEADER_NBYTES = 200, 256
WHAT_NBYTES = 64
_ENTRY = Struct(f"<Q24sqqqd{WHAT_NBYTES}s")  # key, communicator, ended, count, number, since, what
_BEGUN = Struct(f"<qqd{WHAT_NBYTES}s")
_ENDED_AT, _BEGUN_AT = 32, 40
_SEEN, _COUNT, _WAITED, _IDLE, _PROGRESS = Struct("<d"), Struct("<q"), Struct("<dI"), Struct("<d"), Struct("<II?")
_CHAIN = Struct("<I")
ENTRIES = (_ROW_NBYTES - _HEADER_NBYTES) // _ENTRY.size


class ProgramPhase(IntEnum):
    """Where a rank's program is. Its main thread writes it."""

    STARTING = 0
    RUNNING = 1
    LEAVING = 2  # it has reached its end
    FINISHED = 3  # so has every other rank's


class Alarm(IntEnum):
    """What a rank's watchdog has found. `monitor/watchdog/states.py` says who raises it when, and what then follows."""

    NONE = 0
    RAISED = 1  # an operation is overdue
    FOLLOWED = 2  # it has written what it knows, for the report of another rank
    COMMITTED = 3  # it ends the job, and writes the report
    REPORTED = 4  # the report is written


class Header:
    """The header of a rank's row. Cost: no dataclass, whose import would take as long as a guard's whole start.

    seen: when its watchdog was last awake, by the monotonic clock of its node.   stacks: descriptor of the file that a signal
    makes it write its stacks to.   state: that of its process in /proc, as its node's first rank saw it.   note: its last call,
    once it is LEAVING.   waited: seconds that it has been inside operations.   operations: how many it has begun.   idle:
    seconds since it, or a rank that it waits for, has worked; negative: that it is still given.   steps, forwards, accumulates:
    of its `Progress`.   chain: how many ranks wait for each other, from this one to one that does not wait; in a circle it
    grows beyond the number of ranks.
    """

    def __init__(
        self,
        pid: int,
        seen: float,
        stacks: int,
        phase: int,
        state: bytes,
        note: bytes,
        alarm: int,
        waited: float,
        operations: int,
        idle: float,
        steps: int,
        forwards: int,
        accumulates: bool,
        chain: int,
    ) -> None:
        self.pid, self.seen, self.stacks = pid, seen, stacks
        self.phase, self.alarm = ProgramPhase(phase), Alarm(alarm)
        self.state, self.note = state.decode(), _text(note)
        self.waited, self.operations, self.idle = waited, operations, idle
        self.steps, self.forwards, self.accumulates, self.chain = steps, forwards, accumulates, chain


class Operation:
    """The newest operation of a rank on one communicator.

    count: number of operations so far; equal to `ended` when the newest one is done.   since: when it began, by the monotonic
    clock of its node.
    """

    def __init__(self, key: int, comm: bytes, ended: int, count: int, number: int, since: float, what: bytes) -> None:
        self.key, self.ended, self.count, self.number, self.since = key, ended, count, number, since
        self.comm, self.what = _text(comm), _text(what)

    @property
    def is_under_way(self) -> bool:
        """True if the rank is inside it."""
        return self.ended != self.count

    def described(self, now: float) -> str:
        """It in words.   now: by the clock of its node."""
        state = "in" if self.is_under_way else "last"
        return f"{state} #{self.number} {self.what} on '{self.comm}', begun {now - self.since:.1f} s ago"


class StatusTable:
    """The rows of all ranks. fd: descriptor of the memory, which the node's first rank has created; the table closes it.

    Hazard: the claim belongs to the open file: each process opens the memory itself, and no descriptor is handed on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, 0)
        self.size = len(self._memory) // _ROW_NBYTES

    def close(self) -> None:
        """Free the memory. Its entries must not be used any more."""
        self._memory.close()
        os.close(self.fd)

    @staticmethod
    def create(size: int) -> int:
        """Create memory for `size` rows; returns its descriptor."""
        fd = os.memfd_create("shardrt-table")
        os.ftruncate(fd, _ROW_NBYTES * size)
        return fd

    def introduce(self, rank: int, stacks: int) -> None:
        """Fill in the header of this process's row."""
        values = os.getpid(), monotonic(), stacks, ProgramPhase.RUNNING, b"R", b"", Alarm.NONE, 0.0, 0, 0.0, 0, 0, False, 0
        _HEADER.pack_into(self._memory, rank * _ROW_NBYTES, *values)

    def set_phase(self, rank: int, phase: ProgramPhase) -> None:
        """Set the phase of this process's rank. Called by its main thread."""
        self._memory[rank * _ROW_NBYTES + _PHASE_AT] = phase

    def set_note(self, rank: int, note: str) -> None:
        """Keep the last call of a rank that is about to leave."""
        at = rank * _ROW_NBYTES + _NOTE_AT
        self._memory[at : at + _NOTE_NBYTES] = _field(note)[:_NOTE_NBYTES].ljust(_NOTE_NBYTES, b"\0")

    def set_alarm(self, rank: int, alarm: Alarm) -> None:
        """Set the alarm of this process's rank. Called by its watchdog."""
        self._memory[rank * _ROW_NBYTES + _ALARM_AT] = alarm

    def alarms(self) -> bytes:
        """Every rank's alarm."""
        return self._memory[_ALARM_AT::_ROW_NBYTES]

    def claim(self) -> bool:
        """Take the claim of this node, which one process can hold until it ends. False: another one holds it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Give the claim back."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    def set_waited(self, rank: int, seconds: float, operations: int) -> None:
        """Record how long this process's rank has been inside operations, and how many."""
        _WAITED.pack_into(self._memory, rank * _ROW_NBYTES + _WAITED_AT, seconds, operations & 0xFFFFFFFF)

    def set_idle(self, rank: int, seconds: float) -> None:
        """Record for how long this process's rank has not worked."""
        _IDLE.pack_into(self._memory, rank * _ROW_NBYTES + _IDLE_AT, seconds)

    def set_progress(self, rank: int, steps: int, forwards: int, *, accumulates: bool) -> None:
        """Record how far the training of this process's rank is."""
        _PROGRESS.pack_into(self._memory, rank * _ROW_NBYTES + _PROGRESS_AT, steps, forwards, accumulates)

    def set_chain(self, rank: int, ranks: int) -> None:
        """Record how many ranks wait for each other, from this process's rank on."""
        _CHAIN.pack_into(self._memory, rank * _ROW_NBYTES + _CHAIN_AT, ranks)

    def chain(self, rank: int) -> int:
        """How many ranks wait for each other, from a rank on."""
        return int(_CHAIN.unpack_from(self._memory, rank * _ROW_NBYTES + _CHAIN_AT)[0])

    def beat(self, rank: int) -> None:
        """Record that this process's watchdog is awake."""
        _SEEN.pack_into(self._memory, rank * _ROW_NBYTES + _SEEN_AT, monotonic())

    def note_process(self, rank: int) -> None:
        """Record the process state of a rank of this node, for the other nodes."""
        self._memory[rank * _ROW_NBYTES + _STATE_AT] = ord(state_of(self.header(rank).pid))

    def header(self, rank: int) -> Header:
        """The header of a rank's row."""
        return Header(*_HEADER.unpack_from(self._memory, rank * _ROW_NBYTES))

    def heartbeats(self) -> list[bytes]:
        """When the watchdog of each rank was last awake, as it is stored. Cost: 0.3 us for each; a header takes 8."""
        return [self._memory[at : at + _SEEN.size] for at in range(_SEEN_AT, len(self._memory), _ROW_NBYTES)]

    def operations(self, rank: int) -> Iterator[Operation]:
        """A rank's newest operation on each communicator."""
        for index in range(ENTRIES):
            entry = _ENTRY.unpack_from(self._memory, rank * _ROW_NBYTES + _HEADER_NBYTES + index * _ENTRY.size)
            if entry[0]:  # a key
                yield Operation(*entry)

    def last_operation(self, rank: int, now: float | None = None) -> str:
        """A rank's newest operation, in words.   now: by the clock of the rank's node; None: it is this one."""
        last = max(self.operations(rank), key=lambda operation: operation.since, default=None)
        return "no operation yet" if last is None else last.described(monotonic() if now is None else now)

    def rows(self, ranks: Sequence[int]) -> bytes:
        """The rows of some ranks, one after the other."""
        return b"".join(self._memory[rank * _ROW_NBYTES : (rank + 1) * _ROW_NBYTES] for rank in ranks)

    def put_rows(self, ranks: Sequence[int], rows: bytes) -> None:
        """Store the rows of ranks of another node."""
        for index, rank in enumerate(ranks):
            row = rows[index * _ROW_NBYTES : (index + 1) * _ROW_NBYTES]
            self._memory[rank * _ROW_NBYTES : (rank + 1) * _ROW_NBYTES] = row


class TimeInside:
    """How long this rank has been inside operations, of any communicator, and how many it has begun.

    Operations on several threads may overlap, and count once. Cost: 0.2 us for each.
    """

    def __init__(self) -> None:
        self.operations = 0
        self._seconds = self._until = 0.0  # up to which `_seconds` counts, while the rank is inside one
        self._entries: set[int] = set()  # with an operation under way

    def begin(self, entry: int, now: float) -> None:
        """An operation begins."""
        if not self._entries:
            self._until = now
        self._entries.add(entry)
        self.operations += 1

    def end(self, entry: int) -> None:
        """It has ended. Invariant: all time is added before the entry goes, so that threads need no lock."""
        now = monotonic()
        self._seconds += now - self._until
        self._until = now
        self._entries.discard(entry)

    def seconds(self) -> float:
        """The time so far, with that of an operation under way."""
        return self._seconds + (monotonic() - self._until if self._entries else 0.0)


class StatusEntry:
    """This rank's current operation on one communicator. Cost: 0.6 us to begin and 0.3 us to end an operation."""

    def __init__(self, table: StatusTable, rank: int, index: int, key: int, comm: str, inside: TimeInside) -> None:
        self.index = index
        self._inside = inside
        self.ended = self.count = 0
        self.number, self.what = -1, ""
        self._memory = table._memory
        self._at = rank * _ROW_NBYTES + _HEADER_NBYTES + index * _ENTRY.size
        _ENTRY.pack_into(self._memory, self._at, key, _field(comm), 0, 0, -1, 0.0, b"")

    def begin(self, number: int, what: str) -> None:
        """The rank begins this operation."""
        self.count += 1
        self.number, self.what = number, what
        now = monotonic()
        _BEGUN.pack_into(self._memory, self._at + _BEGUN_AT, self.count, number, now, _field(what))
        self._inside.begin(self.index, now)

    def end(self) -> None:
        """The operation has ended."""
        self.ended = self.count
        _COUNT.pack_into(self._memory, self._at + _ENDED_AT, self.count)
        self._inside.end(self.index)


@lru_cache(maxsize=4096)
def _field(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # names of files and communicators may hold anything


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")

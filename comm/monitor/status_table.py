"""What every rank is doing, in memory that the ranks of a node share: a row can be read even if its rank's process is gone.

A row has a header and an entry for each communicator that its rank has used lately. Rows of other nodes are copies, received
through `sidechannel.py`. The memory has no name, so nothing is left behind, however a job ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from time import time

_ROW_NBYTES = 2048
_HEADER = Struct("<qdiBc91s")  # pid, seen, stacks, state, process, note
_STATE_AT, _PROCESS_AT, _NOTE_AT, _SEEN_AT = 20, 21, 22, 8
_HEADER_NBYTES = 128
WHAT_NBYTES = 64
_ENTRY = Struct(f"<Q24sqqqd{WHAT_NBYTES}s")  # key, communicator, ended, count, number, since, what
_BEGUN = Struct(f"<qqd{WHAT_NBYTES}s")
_ENDED_AT, _BEGUN_AT = 32, 40
_SEEN, _COUNT = Struct("<d"), Struct("<q")
ENTRIES = (_ROW_NBYTES - _HEADER_NBYTES) // _ENTRY.size


class State(IntEnum):
    """The state of a rank, as it reports it itself."""

    STARTING = 0
    RUNNING = 1
    LEAVING = 2  # its program has reached its end
    FINISHED = 3  # so has every other rank's
    ALARM = 4  # it has an overdue operation
    REPORTED = 5  # it has written its report


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a rank's row."""

    pid: int
    seen: float  # when its watchdog was last awake, in seconds since the epoch
    stacks: int  # descriptor of the file that a signal makes it write its stacks to
    state: State
    process: str  # its state in /proc, as its node's first rank saw it
    note: str  # its last call, once it is LEAVING


@dataclass(frozen=True, slots=True)
class Operation:
    """The newest operation of a rank on one communicator."""

    key: int
    comm: str
    ended: int
    count: int  # number of operations so far; equal to `ended` when the newest one is done
    number: int
    since: float
    what: str

    def __str__(self) -> str:
        state = "last" if self.ended == self.count else "in"
        return f"{state} #{self.number} {self.what} on '{self.comm}', begun {time() - self.since:.1f} s ago"


class Table:
    """The rows of all ranks. fd: descriptor of the memory, which the node's first rank has created."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(fd, _ROW_NBYTES * size)

    def close(self) -> None:
        """Free the memory. Its entries must not be used any more."""
        self._memory.close()

    @staticmethod
    def create(size: int) -> int:
        """Create memory for `size` rows; returns its descriptor."""
        fd = os.memfd_create("shardrt-table")
        os.ftruncate(fd, _ROW_NBYTES * size)
        return fd

    def introduce(self, rank: int, stacks: int) -> None:
        """Fill in the header of this process's row."""
        _HEADER.pack_into(self._memory, rank * _ROW_NBYTES, os.getpid(), time(), stacks, State.RUNNING, b"R", b"")

    def set_state(self, rank: int, state: State, note: str = "") -> None:
        """Set the state of `rank`. note: the last call, for LEAVING."""
        row = rank * _ROW_NBYTES
        if note:
            text = note.encode()[:91]
            self._memory[row + _NOTE_AT : row + _NOTE_AT + len(text)] = text
        self._memory[row + _STATE_AT] = state

    def states(self) -> bytes:
        """Every rank's state."""
        return self._memory[_STATE_AT::_ROW_NBYTES]

    def beat(self, rank: int) -> None:
        """Record that this process's watchdog is awake."""
        _SEEN.pack_into(self._memory, rank * _ROW_NBYTES + _SEEN_AT, time())

    def note_process(self, rank: int) -> None:
        """Record the process state of a rank of this node, for the other nodes."""
        self._memory[rank * _ROW_NBYTES + _PROCESS_AT] = ord(process_letter(self.header(rank).pid))

    def header(self, rank: int) -> Header:
        """The header of a rank's row."""
        pid, seen, stacks, state, process, note = _HEADER.unpack_from(self._memory, rank * _ROW_NBYTES)
        return Header(pid, seen, stacks, State(state), process.decode(), _text(note))

    def operations(self, rank: int) -> Iterator[Operation]:
        """A rank's newest operation on each communicator."""
        for index in range(ENTRIES):
            at = rank * _ROW_NBYTES + _HEADER_NBYTES + index * _ENTRY.size
            key, comm, ended, count, number, since, what = _ENTRY.unpack_from(self._memory, at)
            if key:
                yield Operation(key, _text(comm), ended, count, number, since, _text(what))

    def rows(self, ranks: Sequence[int]) -> bytes:
        """The rows of some ranks, one after the other."""
        return b"".join(self._memory[rank * _ROW_NBYTES : (rank + 1) * _ROW_NBYTES] for rank in ranks)

    def put_rows(self, ranks: Sequence[int], rows: bytes) -> None:
        """Store the rows of ranks of another node."""
        for index, rank in enumerate(ranks):
            row = rows[index * _ROW_NBYTES : (index + 1) * _ROW_NBYTES]
            self._memory[rank * _ROW_NBYTES : (rank + 1) * _ROW_NBYTES] = row


class StatusEntry:
    """This rank's current operation on one communicator. Cost: 0.5 us to begin and 0.2 us to end an operation."""

    def __init__(self, table: Table, rank: int, index: int, key: int, comm: str) -> None:
        self.index = index
        self.ended = self.count = 0
        self.number, self.what = -1, ""
        self._memory = table._memory
        self._at = rank * _ROW_NBYTES + _HEADER_NBYTES + index * _ENTRY.size
        _ENTRY.pack_into(self._memory, self._at, key, comm.encode(), 0, 0, -1, 0.0, b"")

    def begin(self, number: int, what: str) -> None:
        """The rank begins this operation."""
        self.count += 1
        self.number, self.what = number, what
        _BEGUN.pack_into(self._memory, self._at + _BEGUN_AT, self.count, number, time(), _field(what))

    def end(self) -> None:
        """The operation has ended."""
        self.ended = self.count
        _COUNT.pack_into(self._memory, self._at + _ENDED_AT, self.count)


@lru_cache(maxsize=4096)
def _field(what: str) -> bytes:
    return what.encode()


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def process_letter(pid: int) -> str:
    """The state of a process of this machine as in /proc, X for one that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"

"""What a rank can find out about others that do not answer: from table, /proc, and stacks that a signal makes them write."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ending.processes import has_ended, state_of
from ...ending.stacks import Stacks, stacks_of
from ...ending.status_table import Alarm, ProgramPhase, StatusTable
from ...ending.words import describe_state
from ..timing import Timing
from .waits import AFTER_EXCEPTION, Wait, has_reached

if TYPE_CHECKING:
    from mpi4py import MPI

_SILENT_EXCHANGES = 3
_LEFT = (ProgramPhase.LEAVING, ProgramPhase.FINISHED)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Where a rank's process is."""

    node: int  # the lowest rank of the process's node
    host: str
    pid: int
    table: int  # file descriptor of the node's table, on its first rank


def share_table(comm: MPI.Intracomm, node: int, stacks: Stacks) -> tuple[StatusTable, list[RankProcess]]:
    """Open the node's table, which its first rank creates. Collective over all ranks. Returns: the table, all processes.

    Raises: RuntimeError on every rank if one of them cannot open it.
    """
    made = StatusTable.create(comm.Get_size()) if comm.Get_rank() == node else -1
    processes = comm.allgather(RankProcess(node, socket.gethostname(), os.getpid(), made))
    first = processes[node]
    try:
        table, error = StatusTable(os.open(f"/proc/{first.pid}/fd/{first.table}", os.O_RDWR)), None
        table.introduce(comm.Get_rank(), stacks.fd)
    except OSError as problem:
        error = problem
    for rank, failed in enumerate(comm.allgather(error)):
        if failed is not None:
            raise RuntimeError(f"rank {rank} cannot open the memory of another process of its node, of the same user: {failed}")
    if made >= 0:
        os.close(made)
    return table, processes


class NamespaceError(RuntimeError):
    """Ranks of a node do not know each other's processes by their numbers. Every rank raises it."""


def check_namespaces(comm: MPI.Intracomm, node: int) -> None:
    """Raise NamespaceError on every rank if ranks of a node have no common PID namespace. Collective over all ranks.

    Hazard: a number that is a rank's process there is another process here, with other files; signals would go to it.
    """
    # It is zero where /proc shows another namespace.
    own = os.stat("/proc/self/ns/pid").st_ino if os.readlink("/proc/self") == str(os.getpid()) else 0
    places = comm.allgather((node, socket.gethostname(), own))
    for rank, (first, host, namespace) in enumerate(places):
        if rank != first and (namespace == 0 or namespace != places[first][2]):
            raise NamespaceError(
                f"host {host}: rank {rank} is in a PID namespace of its own, as in a container for each rank: the ranks of a "
                "node cannot tell how the others are. Start all ranks of a node in one container, or let their containers "
                "share a PID namespace, and a /proc that shows it (docker run --pid=host; apptainer without --pid and "
                "--containall)"
            )


class Heartbeats:
    """Which nodes do not send their rows: the first rank of each does, through rank 0. Clocks of nodes may differ."""

    def __init__(self, table: StatusTable, nodes: Sequence[Sequence[int]], timing: Timing) -> None:
        self._table = table
        self._most_s = _SILENT_EXCHANGES * timing.interval_s
        self._seen = {node[0]: 0.0 for node in nodes}
        self._silent_s = dict(self._seen)

    def tick(self, elapsed: float) -> None:
        """Look for new rows, `elapsed` seconds after the last time."""
        for rank, before in self._seen.items():
            self._seen[rank] = seen = self._table.header(rank).seen
            self._silent_s[rank] = self._silent_s[rank] + elapsed if seen == before else 0.0

    def is_silent(self, rank: int) -> bool:
        """True if the first rank of a node has sent nothing new for some exchanges. If that is rank 0, this node is cut off."""
        return self._silent_s[rank] > self._most_s

    def silence(self, rank: int) -> float:
        """Seconds since something new has come from the first rank of a node."""
        return self._silent_s[rank]


class Peers:
    """The ranks, as rank `rank` sees them. here: those of its node.   nodes: the ranks of each node, that of rank 0 first."""

    def __init__(self, rank: int, table: StatusTable, processes: Sequence[RankProcess], timing: Timing) -> None:
        self.processes = processes
        nodes = sorted({process.node for process in processes})
        self.nodes = [[r for r, process in enumerate(processes) if process.node == node] for node in nodes]
        self.here = next(ranks for ranks in self.nodes if rank in ranks)
        self._rank = rank
        self._table = table
        self._timing = timing

    def missing(self, wait: Wait) -> list[int]:
        """The ranks that have not reached the operation: they are before it, or in another one of the same number."""
        return [rank for rank in wait.ranks if not any(has_reached(o, wait) for o in self._table.operations(rank))]

    def is_lost(self, rank: int) -> bool:
        """True if the rank makes no more calls: it has left its program or a block of `agree()`, or its process has ended."""
        if self.has_left(rank) or has_ended(self._process_state(rank)):
            return True
        return any(o.what == AFTER_EXCEPTION and o.ended != o.count for o in self._table.operations(rank))

    def has_left(self, rank: int) -> bool:
        """True if the rank's program has reached its end."""
        return self._table.header(rank).phase in _LEFT

    def is_in_operation(self, rank: int) -> bool:
        """True if the rank waits for others."""
        return any(operation.is_under_way for operation in self._table.operations(rank))

    def kill(self, rank: int) -> None:
        """Kill the process of a rank of this node."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGKILL)

    def idle(self, rank: int, heartbeats: Heartbeats) -> float:
        """Seconds since a rank, or one that it waits for, was seen to work; negative: that it is still given."""
        return self._table.header(rank).idle + self._silence(rank, heartbeats)

    def _silence(self, rank: int, heartbeats: Heartbeats) -> float:
        """Seconds since a rank's watchdog was awake, as far as it is known here. No clocks of two nodes are compared."""
        seen = self._table.header(rank).seen
        if rank in self.here:
            return max(0.0, time.monotonic() - seen)
        first = self.processes[rank].node
        return max(0.0, self._table.header(first).seen - seen) + heartbeats.silence(first)

    def is_silent(self, rank: int, heartbeats: Heartbeats) -> bool:
        """Whether a rank's watchdog has not been awake for so long that its row may be out of date."""
        return self._silence(rank, heartbeats) > (self._timing.silent_s if rank in self.here else self._timing.silent_nodes_s)

    def describe(self, rank: int, heartbeats: Heartbeats) -> str:
        """A rank, its process, and its last operation."""
        process, header = self.processes[rank], self._table.header(rank)
        silent = self._silence(rank, heartbeats)
        condition = describe_state(self._process_state(rank), "running")
        if header.phase in _LEFT:
            condition = f"has left its program, after {header.note}"
        elif condition == "running" and self.is_silent(rank, heartbeats):
            condition = f"running, but its watchdog has been silent for {silent:.0f} s"
        last = self._table.last_operation(rank, header.seen + silent)
        return f"rank {rank}: host {process.host}, pid {process.pid}, {condition}; {last}"

    def stacks_here(self) -> list[str]:
        """The stacks of this rank, and of those of its node that did not raise the alarm. Takes `settle_s` seconds."""
        headers = {rank: self._table.header(rank) for rank in self.here}
        silent = [rank for rank, row in headers.items() if row.alarm is Alarm.NONE and row.phase is not ProgramPhase.FINISHED]
        ranks = [*(rank for rank in silent if rank != self._rank), self._rank]
        return stacks_of({rank: headers[rank] for rank in ranks}, self._timing.settle_s)

    def _process_state(self, rank: int) -> str:
        header = self._table.header(rank)
        return state_of(header.pid) if rank in self.here else header.state

"""What a guard sees of the ranks of its node: their processes, the phases of their guards, and their status table.

The standard library only; see `__main__.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Mapping
from enum import Enum
from struct import Struct

from .processes import Process, launcher_of, processes, variable_of

VARIABLE = "SHARDRT_GUARD"  # descriptor of the pipe to the guard, and process of the rank
# The number of ranks, and the rank.
# Hazard: inside an allocation hydra's ranks all carry the SLURM variables of its own one-per-node step, so a launcher's own
# variables come first, and Slurm's count only inside a step.
_RANKS = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"), ("SLURM_NTASKS", "SLURM_PROCID"))
# The rank on the node, and the ranks of the node. Slurm sets PMI_SIZE as well, for MPICH, but not hydra's MPI_LOCALNRANKS.
_HYDRAS = "MPI_LOCALNRANKS"
_LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", _HYDRAS),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


class Phase(Enum):
    """How far the rank is; the value is the guard's process name, at most 15 characters."""

    START = "shardrt-start"
    INIT = "shardrt-init"
    OVERDUE = "shardrt-overdue"  # the rank is in init(), and the guard is about to end the job
    RUN = "shardrt-run"
    ENDING = "shardrt-ending"
    DONE = "shardrt-done"


def launcher_variables(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The launcher's variables of the number of ranks, and of this process's rank. None without a launcher."""
    for size, rank in _RANKS:
        if environment.get(size) and (size != "SLURM_NTASKS" or "SLURM_STEP_ID" in environment):
            return size, rank
    return None


class Place:
    """The rank's place in its job, as the launcher's variables say it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises: LookupError or ValueError outside of a job of several ranks."""
        size, self.variable = launcher_variables(environment) or _RANKS[0]
        self.size, self.rank = int(environment[size]), int(environment[self.variable])
        if self.size < 2:
            raise LookupError("a rank alone")
        local_rank, local_size = next((names for names in _LOCAL_RANKS if environment.get(names[1])), _LOCAL_RANKS[0])
        self.is_first = environment.get(local_rank, "0") == "0"
        counts = environment.get(local_size, "")  # Slurm's: "2(x3)" for three nodes, or "2(x2),1" if they are not alike
        count = counts.partition("(")[0]
        self.local_size = int(count) if count.isdecimal() and "," not in counts else None
        self.is_hydras = local_size == _HYDRAS


class Neighbour:
    """A rank of the node: the process that the launcher started for it, and the phase of its guard."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank, self.process = rank, process
        self.phase = Phase.START
        self.cpu_s = 0.0  # that a rank which has not come has used, with its descendants

    @property
    def has_come(self) -> bool:
        """True if the rank is in init() or beyond."""
        return self.phase is not Phase.START


class Node:
    """The ranks of the job on this machine: children of one process, the launcher's, with the variable of their rank."""

    def __init__(self, parent: int, place: Place) -> None:
        """parent: of the rank's process."""
        self._place = place
        self._ranks: dict[int, int] = {}  # by process
        launcher = launcher_of(parent, place.variable, str(place.rank))
        self.is_visible = launcher > 0
        self._launcher = launcher or parent
        self.local_size = place.local_size if self.is_visible else None  # how many of them are to be seen, if it is known

    def look(self) -> tuple[dict[int, Neighbour], int]:
        """The ranks whose processes are there, by rank, in order; and how many processes may still become ranks."""
        found = {process.pid: process for process in processes()}
        children = [process for process in found.values() if process.parent == self._launcher]
        ranks = {p.pid: Neighbour(rank, p) for p in children if (rank := self._rank_of(p)) is not None}
        starting = sum(1 for process in children if process.pid not in ranks and not process.is_ending)
        phases = {phase.value: phase for phase in Phase if phase is not Phase.START}
        for process in [process for process in found.values() if process.name in phases]:
            top = process
            while top.pid not in ranks and top.parent in found:
                top = found[top.parent]
            if top.pid in ranks:
                ranks[top.pid].phase = phases[process.name]
        below: dict[int, list[Process]] = {}
        for process in found.values():
            below.setdefault(process.parent, []).append(process)
        for neighbour in ranks.values():
            if not neighbour.has_come:
                neighbour.cpu_s = _cpu_s(neighbour.process, below)
        return {neighbour.rank: neighbour for neighbour in sorted(ranks.values(), key=lambda it: it.rank)}, starting

    def others(self) -> list[Process]:
        """The processes of the other ranks."""
        neighbours = self.look()[0].values() if self.is_visible else ()
        return [neighbour.process for neighbour in neighbours if neighbour.rank != self._place.rank]

    def _rank_of(self, process: Process) -> int | None:
        if process.pid not in self._ranks:
            with contextlib.suppress(OSError, ValueError):  # it cannot be read, or is no rank
                self._ranks[process.pid] = int(variable_of(process.pid, self._place.variable) or "")
        return self._ranks.get(process.pid)


def _cpu_s(process: Process, below: Mapping[int, list[Process]]) -> float:
    """Seconds that a process and its descendants have used, but for guards.   below: the children of each process."""
    own = 0.0 if process.name.startswith("shardrt-") else process.cpu_s
    return own + sum(_cpu_s(child, below) for child in below.get(process.pid, ()))


class Table:
    """The node's status table (`monitor/status_table.py`), as far as the guard reads it. Raises: OSError.

    The rank `pid` sends the rest.   fd: its descriptor.   deadline_s: without a heartbeat.   held_s: the same, if no rank is in
    an operation.   row_nbytes, header_nbytes, entry: the layout of a rank's row: the number of its process (eight bytes), its
    heartbeat (eight), the descriptor of its stacks (four); after the header, entries of the format `entry`.   signal: that
    makes a rank write its stacks.   ranks: of the node.
    """

    def __init__(self, pid: int, fd: str, deadline_s: str, held_s: str, *layout: str) -> None:
        row_nbytes, header_nbytes, entry, number, ranks = layout
        self._fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._memory = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        self._row_nbytes, self._header_nbytes, self._entry = int(row_nbytes), int(header_nbytes), Struct(entry)
        self._heartbeats: list[bytes] = []
        self.deadline_s, self.held_s = float(deadline_s), float(held_s)
        self.signal, self.ranks = int(number), [int(rank) for rank in ranks.split(",")]

    def has_beaten(self) -> bool:
        """Whether any rank's watchdog has been awake since the last call."""
        before = self._heartbeats
        self._heartbeats = [self._memory[at + 8 : at + 16] for at in range(0, len(self._memory), self._row_nbytes)]
        return self._heartbeats != before

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self._number(rank * self._row_nbytes, 8)

    def stacks(self, rank: int) -> int:
        """The descriptor of the file of a rank's stacks."""
        return self._number(rank * self._row_nbytes + 16, 4)

    def last_operation(self, rank: int) -> str:
        """A rank's newest operation, in words."""
        from .report import last_operation

        return last_operation(self._entries(rank), self._entry)

    def is_in_operation(self) -> bool:
        """Whether a rank of the node is inside an operation."""
        from .report import is_in_operation

        return any(is_in_operation(self._entries(rank), self._entry) for rank in self.ranks)

    def processes(self) -> dict[int, Process]:
        """The processes of the node's ranks that are there, by rank."""
        found = {}
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                found[rank] = Process(self.pid(rank))
        return found

    def claim(self) -> bool:
        """Whether no other process of this node reports the end of the job. None will until this process ends."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _entries(self, rank: int) -> bytes:
        row = rank * self._row_nbytes
        return self._memory[row + self._header_nbytes : row + self._row_nbytes]

    def _number(self, at: int, nbytes: int) -> int:
        return int.from_bytes(self._memory[at : at + nbytes], sys.byteorder)

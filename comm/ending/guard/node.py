"""What a guard sees of the ranks of its node: their processes, the phases of their guards, and their status table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from enum import Enum

from ..processes import Process, launcher_of, processes, variable_of
from ..status_table import StatusTable

SURVIVE = "SHARDRT_SURVIVE"  # set to 1 by `shardrt.launch --survive`
REPLACE = "SHARDRT_REPLACE"  # the same for --replace
JOINING = "SHARDRT_JOINING"  # set in a process that takes the place of a lost rank, until its init()
VARIABLE = "SHARDRT_GUARD"  # names the descriptor of the pipe to the guard, and the rank's process
# Variables for the number of ranks, and for the rank.
# Hazard: inside an allocation hydra's ranks all carry the SLURM variables of its own one-per-node step, so a launcher's own
# variables come first, and Slurm's count only inside a step.
_RANKS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),  # hydra, Flux, PALS, srun --mpi=pmi2
    ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),  # LSF's jsrun
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)
# Set for each process by torchrun, Accelerate's and DeepSpeed's launchers, Ray Train, and a PyTorchJob of Kubernetes: these
# start processes without MPI. Some sites set them for jobs of mpirun and srun as well.
WORLD_SIZE, RANK = "WORLD_SIZE", "RANK"
RANKS_ALONE = ("PMIX_RANK", "PALS_RANKID")  # a rank's number, of launchers that may say no more
OF_PROCESSES = (
    *(WORLD_SIZE, RANK, "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK", "ROLE_WORLD_SIZE", "ROLE_RANK"),
    *("NODE_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)
# Variables for a rank's number on its node, and for the number of the node's ranks.
# Slurm sets PMI_SIZE as well, for MPICH, but not hydra's MPI_LOCALNRANKS.
_HYDRAS = "MPI_LOCALNRANKS"
_LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", _HYDRAS),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


class RankPhase(Enum):
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


def is_first_rank(environment: Mapping[str, str]) -> bool:
    """Whether this process is rank 0 or no rank, as far as a launcher's variables say so."""
    variables = launcher_variables(environment)
    ranks = (RANK, *RANKS_ALONE) if variables is None else variables[1:]
    return all(environment.get(rank) in (None, "", "0") for rank in ranks)


class RankPlace:
    """The rank's place in its job, as the launcher's variables say it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises: LookupError or ValueError outside of a job of several ranks, and for a process in the place of a lost one.

        Hazard: such processes have numbers of a job of their own, from 0.
        """
        if JOINING in environment:
            raise LookupError("in the place of a lost rank")
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
        self.phase = RankPhase.START
        self.cpu_s = 0.0  # the processor time of a rank that has not come, and of its descendants

    @property
    def has_come(self) -> bool:
        """True if the rank is in init() or beyond."""
        return self.phase is not RankPhase.START


class Node:
    """The ranks of the job on this machine: children of one process, the launcher's, with the variable of their rank."""

    def __init__(self, parent: int, place: RankPlace) -> None:
        """Find the launcher. parent: the parent of the rank's process."""
        self._place = place
        self._ranks: dict[int, int] = {}  # the rank of each process
        launcher = launcher_of(parent, place.variable, str(place.rank))
        self.is_visible = launcher > 0
        self._launcher = launcher or parent
        self.local_size = place.local_size if self.is_visible else None  # how many ranks are to be seen here, if it is known

    def look(self) -> tuple[dict[int, Neighbour], int]:
        """The ranks whose processes are there, by rank, in order; and how many processes may still become ranks."""
        found = {process.pid: process for process in processes()}
        children = [process for process in found.values() if process.parent == self._launcher]
        ranks = {p.pid: Neighbour(rank, p) for p in children if (rank := self._rank_of(p)) is not None}
        starting = sum(1 for process in children if process.pid not in ranks and not process.is_ending)
        phases = {phase.value: phase for phase in RankPhase if phase is not RankPhase.START}
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
            with contextlib.suppress(OSError, ValueError):  # its environment cannot be read, or it is no rank
                if variable_of(process.pid, JOINING) is not None:
                    return None
                self._ranks[process.pid] = int(variable_of(process.pid, self._place.variable) or "")
        return self._ranks.get(process.pid)


def _cpu_s(process: Process, below: Mapping[int, list[Process]]) -> float:
    """Seconds that a process and its descendants have used, but for guards.   below: the children of each process."""
    own = 0.0 if process.is_guard else process.cpu_s
    return own + sum(_cpu_s(child, below) for child in below.get(process.pid, ()))


class NodeStatus:
    """The status table of the node, as its guards read it. Raises: OSError.

    The rank `pid` sends the rest.   fd: its descriptor of the table.   deadline_s: how long heartbeats may be missing.
    held_s: the same, if no rank is in an operation.   ranks: those of the node.   rank: that of `pid`, which changes if others
    are lost.
    """

    def __init__(self, pid: int, fd: str, deadline_s: str, held_s: str, ranks: str, rank: str) -> None:
        self.table = StatusTable(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        self._heartbeats: list[bytes] = []
        self.deadline_s, self.held_s = float(deadline_s), float(held_s)
        self.ranks, self.rank = [int(each) for each in ranks.split(",")], int(rank)

    def has_beaten(self) -> bool:
        """Whether any rank's watchdog has been awake since the last call."""
        before = self._heartbeats
        self._heartbeats = self.table.heartbeats()
        return self._heartbeats != before

    def is_in_operation(self) -> bool:
        """Whether a rank of the node is inside an operation."""
        return any(operation.is_under_way for rank in self.ranks for operation in self.table.operations(rank))

    def processes(self) -> dict[int, Process]:
        """The processes of the node's ranks that are there, by rank."""
        found = {}
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                found[rank] = Process(self.table.header(rank).pid)
        return found

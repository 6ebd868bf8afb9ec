"""A guard's work: it follows the phases of its rank, and ends the job where the rank cannot. The table is in `__main__.py`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from ..processes import Process
from ..report import EXIT_CODE, code_of_job, report, tell_launcher
from ..stacks import stacks_of
from ..words import describe_end, describe_process, name_ranks, still_works
from .node import SURVIVE, Neighbour, Node, NodeStatus, RankPhase, RankPlace

_POLL_S = 1.0
_SCAN_S = 2.0  # between two looks at the ranks of the node
_OTHERS_SCAN_S = 10.0  # the same, for guards of other ranks than the first in init()
_ENDED_S = 2.0  # for a rank's own guard to end the job, before another rank's guard is overdue
_GRACE_S = 1.0  # for the other ranks to fail as well: then nobody waits, and the launcher ends the job
_FLUSH_S = 0.5  # for the launcher to pass on the report, and for ranks to write their stacks
_ABORT_S = 3.0  # for the launcher to end the rank
_PASSED_ON = (-signal.SIGINT, -signal.SIGTERM)  # exit codes of ends by signals that launchers pass on to all ranks
_STOPPED_S = 1.0  # for a rank to be stopped, where the others go on without it
_ENDING_S = 15.0  # for the rank, or another guard, to end the job


class Election:
    """Which of the node's guards ends the job in init(): that of the first rank among those that are overdue.

    Ranks come to their limits at different times, so it is not the first of all that wait.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._overdue: set[int] = set()  # ranks that were overdue at any time
        self._ending_s = 0.0

    def is_mine(self, neighbours: Mapping[int, Neighbour], elapsed_s: float) -> bool:
        """Whether this rank's guard is the one, if it is overdue itself. elapsed_s: seconds since the last call.

        While another guard ends the job, none is. Hazard: a launcher may let the other ranks live when that guard has killed
        its own, as `srun` does by default: some time later the next guard follows.
        """
        ending = {n.rank for n in neighbours.values() if n.phase is RankPhase.ENDING}
        ending |= {rank for rank in self._overdue if rank not in neighbours or neighbours[rank].process.is_ending}
        self._ending_s = self._ending_s + elapsed_s if ending else 0.0
        overdue = {n.rank for n in neighbours.values() if n.phase is RankPhase.OVERDUE and _waits(n)}
        self._overdue |= overdue
        return (not ending or self._ending_s > _ENDING_S) and self._rank == min(overdue, default=self._rank)


def _waits(neighbour: Neighbour) -> bool:
    """Whether a rank is in init(), and can go on."""
    process = neighbour.process
    return neighbour.phase in (RankPhase.INIT, RankPhase.OVERDUE) and not process.is_stopped and not process.is_ending


class Guard:
    """Guards the process `pid`, of the descriptor `process`, until one of them ends. Raises: OSError if it has ended."""

    def __init__(self, pid: int, process: int, place: RankPlace) -> None:
        self._pid, self._process, self._place = pid, process, place
        self._host = os.uname().nodename
        self._pmi = _descriptor("PMI_FD") if place.is_hydras else None  # Slurm's PMI speaks another protocol
        _keep_only({0, 2, self._process} | ({1, self._pmi} if self._pmi is not None else set()))
        # Hazard: the rank itself has no environment to be read while it starts its program, and when it has ended.
        self._node = Node(Process(pid).parent, place)
        self._status: NodeStatus | None = None
        self._pending = b""  # the beginning of a message
        self._limit_s, self._patience_s, self._code = float("inf"), float("inf"), EXIT_CODE
        self._worked: dict[int, tuple[float, float]] = {}  # by rank: the CPU time it had used, and how long this one had waited
        self._absent_s = 0.0  # how long it had waited when a rank was last seen not to have come
        self._told = 0  # how often it has said that it waits for ranks that work
        self._election = Election(place.rank)
        self._survives = os.environ.get(SURVIVE) == "1"  # a lost rank does not end the job
        self._stopped_s = 0.0
        self._poll_s = _POLL_S / 4 if self._survives else _POLL_S
        self._scan_s, self._since_scan_s = _SCAN_S, 0.0
        self._ended_from_s = float("inf")  # the second of the wait in init() from which a rank is known to have ended
        self._set_phase(RankPhase.START)

    def watch(self) -> None:
        """Return when the rank has ended, or needs no guard any more."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.register(0, select.POLLIN)
        before = time.monotonic()
        while self.phase is not RankPhase.DONE:
            ready = [fd for fd, _ in poll.poll(None if self.phase is RankPhase.START else self._poll_s * 1000)]
            if 0 in ready:
                if not self._read():
                    poll.unregister(0)
            elif self._process in ready:
                self._rank_has_ended()
                return
            now = time.monotonic()
            # Hazard: a job that was suspended as a whole and resumed is not late: at most one second counts.
            self._look(min(now - before, self._poll_s))
            before = now

    # ------------------------------------------------------------------ what the rank sends

    def _read(self) -> bool:
        """Take the rank's messages; False when the pipe has ended."""
        data = os.read(0, 65536)
        *messages, self._pending = (self._pending + data).split(b"\n")
        for message in messages:
            word, *arguments = message.decode().split(" ")
            getattr(self, f"_on_{word}")(*arguments)
        return bool(data)

    def _on_start(self) -> None:
        self._set_phase(RankPhase.START)  # init() has raised an exception, which the program may have caught

    def _on_init(self, limit_s: str, patience_s: str) -> None:
        self._limit_s, self._patience_s = float(limit_s), float(patience_s)
        self._worked, self._absent_s, self._told = {}, 0.0, 0
        self._scan_s = 0.0  # at once: what the others use is counted from now on
        self._set_phase(RankPhase.INIT)

    def _on_table(self, *arguments: str) -> None:
        with contextlib.suppress(OSError):  # the rank has ended since
            self._status = NodeStatus(self._pid, *arguments)

    def _on_run(self) -> None:
        self._set_phase(RankPhase.RUN)

    def _on_end(self, code: str) -> None:
        self._code = int(code)
        tell_launcher(self._code, [""])
        self._set_phase(RankPhase.ENDING)

    def _on_done(self) -> None:
        self._set_phase(RankPhase.DONE)

    def _set_phase(self, phase: RankPhase) -> None:
        self._waited_s = 0.0
        self._show(phase)

    def _show(self, phase: RankPhase) -> None:
        self.phase = phase
        with open("/proc/self/comm", "w") as file:
            file.write(phase.value)

    # ------------------------------------------------------------------ what the guard sees

    def _look(self, elapsed_s: float) -> None:
        with contextlib.suppress(OSError):
            if Process(self._pid).is_stopped:  # the whole job may be; if it is not, another rank's guard counts
                if self._survives and self.phase is RankPhase.RUN:
                    self._look_at_stopped(elapsed_s)
                return
        self._stopped_s = 0.0
        self._waited_s += elapsed_s
        if self.phase in (RankPhase.INIT, RankPhase.OVERDUE):
            self._look_at_start(elapsed_s)
        elif self.phase is RankPhase.RUN and self._status is not None:
            self._look_at_status(self._status)
        elif self.phase is RankPhase.ENDING and self._waited_s > _ENDING_S:
            self._end_job(self._code)

    def _look_at_stopped(self, elapsed_s: float) -> None:
        """Kill the rank if it is stopped for long while others of the node are not: it is then a lost rank."""
        others = self._node.others()
        self._stopped_s = 0.0 if all(other.is_stopped for other in others) else self._stopped_s + elapsed_s
        if self._stopped_s >= _STOPPED_S:
            report(
                None, self._place.rank, [f"host {self._host}, pid {self._pid}: stopped for {self._stopped_s:.0f} s, and killed"]
            )
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _look_at_start(self, elapsed_s: float) -> None:
        self._since_scan_s += elapsed_s
        if self._waited_s < self._limit_s and (self._since_scan_s < self._scan_s or not self._node.is_visible):
            return
        neighbours, starting = self._node.look()
        one_has_ended = any(neighbour.process.is_ending and not neighbour.has_come for neighbour in neighbours.values())
        one_has_ended |= len(neighbours) + starting < (self._node.local_size or 0)
        self._ended_from_s = min(self._ended_from_s, self._waited_s) if one_has_ended else float("inf")
        is_overdue = self._waited_s >= min(self._limit_s, self._ended_from_s + _ENDED_S)
        absent = [neighbour for neighbour in neighbours.values() if not neighbour.has_come]
        is_overdue &= one_has_ended or not self._all_work(absent) or self._waited_s >= self._patience_s
        is_mine = self._election.is_mine(neighbours, self._since_scan_s)
        self._since_scan_s = 0.0
        if is_overdue and self.phase is RankPhase.OVERDUE and is_mine:
            self._show(RankPhase.ENDING)
            self._end_job(EXIT_CODE, *self._start_report(neighbours))
        self._show(RankPhase.OVERDUE if is_overdue else RankPhase.INIT)
        first = min((rank for rank, neighbour in neighbours.items() if _waits(neighbour)), default=self._place.rank)
        if absent and not is_overdue and first == self._place.rank and self._waited_s >= self._limit_s * (self._told + 1):
            self._told = int(self._waited_s // self._limit_s)
            waits = f"waited {self._waited_s:.0f} s in shardrt.init() for "
            ranks = [neighbour.rank for neighbour in absent]
            report(None, self._place.rank, [waits + still_works(ranks, self._patience_s)])
        # Cost: 128 guards that looked at 3,000 processes every two seconds would take three cores.
        often_s = _POLL_S if is_overdue else _SCAN_S
        self._scan_s = often_s if one_has_ended or first == self._place.rank else _OTHERS_SCAN_S

    def _all_work(self, absent: Sequence[Neighbour]) -> bool:
        """Whether all ranks that have not come have used a processor since SHARDRT_START_TIMEOUT, or the last has just come."""
        for neighbour in absent:
            before, _ = self._worked.setdefault(neighbour.rank, (neighbour.cpu_s, 0.0))
            if neighbour.cpu_s > before:
                self._worked[neighbour.rank] = neighbour.cpu_s, self._waited_s
        if absent:
            self._absent_s = self._waited_s
        worked_s = min((self._worked[each.rank][1] for each in absent), default=self._absent_s)
        return self._waited_s < self._limit_s + worked_s

    def _start_report(self, neighbours: Mapping[int, Neighbour]) -> list[str]:
        host = f"host {self._host}"
        limit_s, variable = self._limit_s, "SHARDRT_START_TIMEOUT"
        if self._waited_s >= self._patience_s:
            limit_s, variable = self._patience_s, "SHARDRT_PATIENCE"
        limit = "no limit" if limit_s == float("inf") else f"limit {limit_s:.0f} s"
        came = [rank for rank, neighbour in neighbours.items() if neighbour.has_come]
        count = max(self._node.local_size or 0, len(neighbours))
        ranks = range(self._place.size) if count == self._place.size else neighbours.keys()
        described = {rank: describe_process(neighbour.process.pid) for rank, neighbour in neighbours.items()}
        lines = [
            f"waited {self._waited_s:.0f} s in shardrt.init() ({limit}, {variable})",
            f"{host}: {len(came)} of {count} ranks came to shardrt.init(): {name_ranks(came)}",
            *(f"missing rank {rank}: {host}, {described.get(rank, 'ended')}" for rank in ranks if rank not in came),
        ]
        stopped = [rank for rank in came if neighbours[rank].process.is_stopped]
        lines += [f"rank {rank} in shardrt.init(): {host}, {described[rank]}" for rank in stopped]
        if len(came) == count < self._place.size and not stopped:
            elsewhere = "" if self._node.local_size else ", in other containers, or have ended"
            lines.append(f"the ranks that did not come are on other hosts{elsewhere}")
        return lines

    def _look_at_status(self, status: NodeStatus) -> None:
        """End the job when every watchdog of the node has been silent for long, unless all ranks are stopped.

        Their ranks hold Python's lock in C code, or are stopped, or the watchdogs have ended. Hazard: where nobody waits in an
        operation, that C code may just take long: to parse a large file, for example.
        """
        if status.has_beaten():
            self._waited_s = 0.0
        if self._waited_s < status.deadline_s or (self._waited_s < status.held_s and not status.is_in_operation()):
            return
        table, ranks = status.table, status.ranks
        running = [rank for rank, process in status.processes().items() if process.will_run()]
        if len(running) < len(ranks) or not table.claim():  # of a rank that has ended, the launcher or its guard ends the job
            return
        rows = {rank: table.header(rank) for rank in ranks}
        stacks = stacks_of(rows, _FLUSH_S)
        self._end_job(
            EXIT_CODE,
            f"host {self._host}: no watchdog of {name_ranks(ranks)} has been awake for {self._waited_s:.0f} s "
            "(SHARDRT_TIMEOUT): they hold Python's lock in C code, or are stopped",
            *(f"rank {rank}: {describe_process(row.pid)}; {table.last_operation(rank)}" for rank, row in rows.items()),
            *stacks,
        )

    # ------------------------------------------------------------------ the end

    def _rank_has_ended(self) -> None:
        is_first = self._is_first()
        try:
            code = Process(self._pid).exit_code()
        except OSError:
            code = None  # the launcher has collected the rank already
        if self.phase is RankPhase.ENDING:
            self._end_job(self._code)
        elif self._survives and self.phase is RankPhase.RUN:
            if self._others_live():
                self._has_ended_in_run(code)
        elif (self.phase is RankPhase.START and not code) or self._is_by_launcher(code, is_first=is_first):
            return
        elif self.phase is not RankPhase.RUN:
            self._has_ended_at_start(code, is_first=is_first)
        else:
            self._has_ended_in_run(code)

    def _is_first(self) -> bool:
        """Whether this is the first rank of a job on one machine that ends: its end is then the cause of the others' ends."""
        others = self._node.others()
        return len(others) == self._place.size - 1 and all(other.will_run() for other in others)

    def _is_by_launcher(self, code: int | None, *, is_first: bool) -> bool:
        """Whether the launcher has ended the rank, with all others, or knows by itself that the job has to end.

        Hazard: Open MPI's and Slurm's take the exit code of a process before a guard can see it.
        """
        if is_first and code != -signal.SIGTERM:
            return False
        if self._pmi is None:
            return code in (None, -signal.SIGTERM, -signal.SIGKILL)
        return code == -signal.SIGKILL and not self._others_live()

    def _has_ended_at_start(self, code: int | None, *, is_first: bool) -> None:
        """End the job, unless the other ranks have ended alike: as from a Ctrl-C, which the launcher passes on to all.

        Hazard: MPICH's launcher notices that a rank has ended when another one writes something, and then kills those. Its exit
        code may be theirs.
        """
        time.sleep(_GRACE_S)
        speaks = self._place.is_first and self._place.local_size != self._place.size and code not in _PASSED_ON
        speaks |= is_first and code == -signal.SIGKILL
        if speaks or self._others_live():
            where = "before" if self.phase is RankPhase.START else "in"
            self._end_job(code_of_job(code), f"{self._describe(code)} {where} shardrt.init()")
        elif is_first:
            tell_launcher(code_of_job(code), [""])

    def _has_ended_in_run(self, code: int | None) -> None:
        last = "" if self._status is None else f"; {self._status.table.last_operation(self._status.rank)}"
        line = f"{self._describe(code)} before shardrt.finalize(){last}"
        if self._survives:
            report(None, self._place.rank, [f"{line}; the other ranks go on without it"])
            return
        if code is None and self._pmi is None:  # if it is not 0, the launcher ends the job; else the ranks that wait do
            report(None, self._place.rank, [line])
        elif self._status is None or self._status.table.claim():
            self._end_job(code_of_job(code), line)

    def _others_live(self) -> bool:
        """Whether another rank of this machine (where they cannot be seen: of the node) lives, and has not been killed."""
        others = self._node.others()
        if self._status is not None and not self._node.is_visible:
            others = [process for rank, process in self._status.processes().items() if rank != self._place.rank]
        return any(other.will_run() for other in others)

    def _describe(self, code: int | None) -> str:
        return f"host {self._host}, pid {self._pid}, {describe_end(code)}"

    def _end_job(self, code: int, *lines: str) -> None:
        """Report, end the job, and this process."""
        if lines:
            first = f"{lines[0]}; ending the job with exit code {code}"
            report(code, self._place.rank, [first, *lines[1:]])
            time.sleep(_FLUSH_S)
        ended = select.poll()
        ended.register(self._process, select.POLLIN)
        if self._pmi is not None:
            with contextlib.suppress(OSError):  # the launcher has ended
                os.write(self._pmi, f"cmd=abort exitcode={code}\n".encode())
                ended.poll(_ABORT_S * 1000)
        if not ended.poll(0):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        sys.exit()


def _descriptor(variable: str) -> int | None:
    """The open descriptor that a variable names."""
    text = os.environ.get(variable, "")
    try:
        os.fstat(int(text))
    except (ValueError, OSError):
        return None
    return int(text)


def _keep_only(kept: set[int]) -> None:
    """Close every descriptor but these, and put /dev/null where standard output was.

    Hazard: MPICH's proxy sees that a rank has ended when its output does, takes its exit code, and kills the others, or lets
    them wait. With the rank's output and PMI descriptor open, the guard sees it first. Nobody else may wait for their end.
    """
    if 1 not in kept:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(fd)

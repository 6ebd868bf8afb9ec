"""No silent hang: a thread on every rank that ends the job, with a report, when an operation takes too long or cannot end.

Each rank writes what it does into the status table (`status_table.py`), and its watchdog checks the rank's own operations
several times a second. An operation is overdue after SHARDRT_TIMEOUT seconds (600; 0: never), or after a few seconds if it
waits for a rank that has left its program or whose process is gone. Then every rank that waits raises the alarm in its row; the
lowest of them writes the report, with the stacks of the ranks of its node; each rank writes its flight recorder's dump; the job
ends with exit code 17.

A rank that is stopped, or runs C code that holds the GIL, cannot report; other ranks report it. A signal makes `faulthandler`
dump its stacks, without the GIL, to a file that the reporting process can open.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NoReturn

import torch

from ..calls import BLOCKING, CallList, CollectiveCall, Hook, Member, Work
from ..fingerprint import name_ranks
from ..recorder import Recorder, is_past
from ..streams import is_capturing, observe
from .exit_handlers import EXIT_CODE, NOTHING, Aborter, log
from .sidechannel import SideChannel
from .status_table import ENTRIES, WHAT_NBYTES, Operation, State, StatusEntry, Table, process_letter
from .timing import Timing

if TYPE_CHECKING:
    from mpi4py import MPI

_STACKS_SIGNAL = signal.SIGRTMIN + 6
_PROCESS_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "gone", "D": "in the kernel"}
_ALARMED = (State.ALARM, State.REPORTED)


@dataclass(frozen=True, slots=True)
class _Process:
    node: int
    host: str
    pid: int
    table: int  # file descriptor of the node's table, on its first rank


@dataclass(frozen=True, slots=True)
class _Wait:
    """An operation that this rank is waiting in."""

    comm: str
    ranks: tuple[int, ...]
    key: int
    number: int
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"#{self.number} {self.what} on '{self.comm}'"


class _Watched:
    """The status entry of a communicator, and for how long it has not changed."""

    def __init__(self, comm: Member, status: StatusEntry, key: int) -> None:
        self.name, self.ranks, self.own, self.status, self.key = comm.name, comm.ranks, comm.rank, status, key
        self.pending: deque[tuple[int, str, Work]] = deque()  # on a CUDA device
        self.peers: list[int] = []  # of sends and receives without a collective
        self.shown = 0
        self.seconds = 0.0

    def begin(self, calls: CallList) -> None:
        """This rank begins these calls."""
        what = calls.description
        self.peers = [] if what.shared else [call.args[0] for call in calls if isinstance(call.args[0], int)]
        self.status.begin(calls[0].number, what.shared or what.text)

    def advance(self, elapsed: float) -> _Wait | None:
        """Add `elapsed` seconds if the operation has not changed since the last call. Returns: the operation, as `wait`."""
        while self.pending and is_past(self.pending[0][2]):
            self.pending.popleft()
        wait = self.wait()
        shown = id(self.pending[0][2]) if self.pending else self.status.count
        self.seconds = self.seconds + elapsed if wait is not None and shown == self.shown else 0.0
        self.shown = shown
        return wait

    def wait(self) -> _Wait | None:
        """The operation that this rank is in: on a CUDA device, the oldest that has been enqueued and is not done."""
        number, what = self.status.number, self.status.what
        if self.pending:
            number, what, _ = self.pending[0]
        elif self.status.ended == self.status.count:
            return None
        members = {*self.peers, self.own} if self.peers else range(len(self.ranks))
        return _Wait(self.name, tuple(self.ranks[m] for m in sorted(members)), self.key, number, what, self.seconds)


class Watchdog(Hook):
    """The hook and the thread of this rank. Creating and `close()` are collective over `comm`, which has all ranks."""

    def __init__(
        self, comm: MPI.Intracomm, node: int, device: torch.device, recorder: Recorder, aborter: Aborter, timing: Timing
    ) -> None:
        self._rank = comm.Get_rank()
        self._timing = timing
        self._device = device
        self._recorder = recorder
        self._aborter = aborter
        # Two for each communicator: collectives may run on a thread while the caller waits for something else.
        self._watched: dict[tuple[Member, bool], _Watched] = {}
        self._opening = threading.Lock()
        self._stacks = os.memfd_create("shardrt-stacks")
        self._table, self._processes = self._share_table(comm, node)
        self._node = [rank for rank, process in enumerate(self._processes) if process.node == node]
        nodes = [
            [r for r, p in enumerate(self._processes) if p.node == first] for first in sorted({p.node for p in self._processes})
        ]
        self._channel = SideChannel(comm, self._table, nodes, timing) if len(nodes) > 1 else None
        if self._channel is not None and self._channel.missing and self._rank == 0:
            log(self._rank, f"the watchdog has no connection to the nodes of {name_ranks(self._channel.missing)}")
        if threading.current_thread() is threading.main_thread():
            # Hazard: some libraries save and restore every handler that Python knows; this signal's default kills the process.
            signal.signal(_STACKS_SIGNAL, lambda *_: None)
        faulthandler.register(_STACKS_SIGNAL, file=self._stacks, all_threads=True)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardrt-watchdog", daemon=True)
        self._thread.start()

    def _share_table(self, comm: MPI.Intracomm, node: int) -> tuple[Table, list[_Process]]:
        """Open the node's table, which its first rank creates."""
        made = Table.create(comm.Get_size()) if self._rank == node else -1
        processes = comm.allgather(_Process(node, socket.gethostname(), os.getpid(), made))
        first = processes[node]
        try:
            fd = os.open(f"/proc/{first.pid}/fd/{first.table}", os.O_RDWR)
            table, error = Table(fd, comm.Get_size()), None
            os.close(fd)
            table.introduce(self._rank, self._stacks)
        except OSError as problem:
            error = problem
        for rank, failed in enumerate(comm.allgather(error)):
            if failed is not None:
                raise RuntimeError(
                    f"rank {rank} cannot open the memory of another process of its node, of the same user: {failed}"
                )
        if made >= 0:
            os.close(made)
        return table, processes

    # ------------------------------------------------------------------ the hook

    def called(self, calls: CallList, work: Work) -> None:
        if calls[0].comm.is_async and not is_capturing():
            self._watch(calls[0]).pending.append((calls[0].number, calls.description.shared, work))

    def before(self, calls: CallList) -> None:
        self._watch(calls[0]).begin(calls)

    def after(self, calls: CallList) -> None:
        self._watch(calls[0]).status.end()

    def _watch(self, call: CollectiveCall) -> _Watched:
        key = (call.comm, call.name in BLOCKING)
        return self._watched.get(key) or self._open(*key)

    def _open(self, comm: Member, blocking: bool) -> _Watched:
        """A status entry for a new communicator; when all are taken, that of the oldest communicator that is idle."""
        key = int.from_bytes(blake2b(f"{comm.name} {comm.ranks} {blocking}".encode(), digest_size=8).digest())
        with self._opening:
            index = len(self._watched)
            if index == ENTRIES:
                oldest = next(key for key, watched in self._watched.items() if watched.wait() is None)
                index = self._watched.pop(oldest).status.index
            watched = self._watched[comm, blocking] = _Watched(
                comm, StatusEntry(self._table, self._rank, index, key, comm.name), key
            )
        return watched

    def under_way(self) -> str:
        """Describe the operations that this rank is in."""
        waits = [wait for watched in list(self._watched.values()) if (wait := watched.wait()) is not None]
        return " and ".join(map(str, waits)) or NOTHING

    def leave(self) -> None:
        """This rank's program has reached its end: an operation that waits for it will never complete."""
        self._table.set_state(self._rank, State.LEAVING, self._recorder.last_call())

    def stay(self) -> None:
        """All ranks have reached the end of their programs, and something is left to do."""
        self._table.set_state(self._rank, State.RUNNING)

    def close(self) -> None:
        """End the thread. All ranks have reached the end of their programs."""
        self._table.set_state(self._rank, State.FINISHED)
        self._stopping.set()
        self._thread.join()
        faulthandler.unregister(_STACKS_SIGNAL)
        os.close(self._stacks)
        self._table.close()
        if self._channel is not None:
            self._channel.close()

    # ------------------------------------------------------------------ watching

    def _run(self) -> None:
        observe(self._device)
        before = time.monotonic()
        while not self._stopping.wait(self._timing.poll_s):
            now = time.monotonic()
            # Hazard: a job that was suspended as a whole and resumed is not overdue: at most one second counts.
            overdue = self._overdue(min(now - before, 1.0))
            before = now
            self._tick()
            if overdue is not None or any(state in _ALARMED for state in self._table.states()):
                self._end(overdue)

    def _tick(self) -> None:
        self._table.beat(self._rank)
        if self._channel is not None and self._rank == self._node[0]:
            for rank in self._node:
                self._table.note_process(rank)
            self._channel.tick()

    def _overdue(self, elapsed: float) -> _Wait | None:
        self._recorder.poll()
        for watched in list(self._watched.values()):
            wait = watched.advance(elapsed)
            late = watched.seconds >= self._timing.timeout_s
            if wait is not None and (
                late or (watched.seconds >= self._timing.lost_s and any(map(self._is_lost, self._missing(wait))))
            ):
                return wait
        return None

    def _missing(self, wait: _Wait) -> list[int]:
        """The ranks that have not reached the operation: they are before it, or in another one of the same number."""
        return [rank for rank in wait.ranks if not any(_has_reached(o, wait) for o in self._table.operations(rank))]

    def _is_lost(self, rank: int) -> bool:
        return self._table.header(rank).state in (State.LEAVING, State.FINISHED) or self._process_state(rank) in "XZ"

    def _process_state(self, rank: int) -> str:
        header = self._table.header(rank)
        return process_letter(header.pid) if rank in self._node else header.process

    # ------------------------------------------------------------------ the end

    def _end(self, overdue: _Wait | None) -> NoReturn:
        overdue = self._settle(overdue)
        alarmed = [rank for rank, state in enumerate(self._table.states()) if state in _ALARMED]
        reporter = alarmed[0]
        first_here = next((rank for rank in alarmed if rank in self._node), self._node[0])
        if overdue is not None and reporter == self._rank:
            log(self._rank, *self._report(overdue), *self._stacks_of_node())
        elif first_here == self._rank:
            log(self._rank, *self._stacks_of_node())
        elif overdue is not None:
            log(self._rank, f"waits in {overdue}; last call: {self._recorder.last_call()}")
        try:
            self._recorder.dump(why=str(overdue or f"an operation of rank {reporter} never completed"))
        except OSError as error:
            log(self._rank, f"no dump: {error}")
        if overdue is not None:
            self._table.set_state(self._rank, State.REPORTED)
        end = time.monotonic() + self._timing.report_s
        while time.monotonic() < end and self._table.states()[reporter] != State.REPORTED:
            time.sleep(self._timing.poll_s)
            self._tick()
        self._aborter.end_job(EXIT_CODE)

    def _settle(self, overdue: _Wait | None) -> _Wait | None:
        """Raise the alarm if this rank waits too long, and give the others time to do so: they are overdue moments later."""
        end = time.monotonic() + (self._timing.settle_s if self._channel is None else self._timing.settle_nodes_s)
        while time.monotonic() < end:
            overdue = overdue or self._overdue(self._timing.poll_s)
            if overdue is not None:
                self._table.set_state(self._rank, State.ALARM)
            time.sleep(self._timing.poll_s)
            self._tick()
        return overdue

    def _report(self, overdue: _Wait) -> list[str]:
        missing = self._missing(overdue)
        present = [rank for rank in overdue.ranks if rank not in missing]
        folder = self._recorder.folder
        return [
            f"waited {overdue.seconds:.0f} s in {overdue} (limit {self._timing.timeout_s:.0f} s, SHARDRT_TIMEOUT); "
            f"ending the job with exit code {EXIT_CODE}",
            f"present: {name_ranks(present)}; missing: {name_ranks(missing) if missing else 'none'}",
            *(f"missing {self._describe_rank(rank)}" for rank in missing),
            f"dumps: {folder}; python -m shardrt.comm.recorder merge {folder}",
        ]

    def _describe_rank(self, rank: int) -> str:
        """A rank, its process, and its last operation."""
        process, header = self._processes[rank], self._table.header(rank)
        condition = _PROCESS_STATES.get(self._process_state(rank), "running")
        if header.state in (State.LEAVING, State.FINISHED):
            condition = f"has left its program, after {header.note}"
        elif condition == "running" and (silent := time.time() - header.seen) > (
            self._timing.silent_s if rank in self._node else self._timing.silent_nodes_s
        ):
            condition = f"running, but its watchdog has been silent for {silent:.0f} s"
        last = max(self._table.operations(rank), key=lambda operation: operation.since, default=None)
        return f"rank {rank}: host {process.host}, pid {process.pid}, {condition}; {last or 'no operation yet'}"

    def _stacks_of_node(self) -> list[str]:
        """The stacks of this rank, and of those of its node that did not raise the alarm."""
        silent = [rank for rank in self._node if rank != self._rank and self._table.states()[rank] not in _ALARMED]
        for rank in silent:
            if self._process_state(rank) not in "XZ":
                os.kill(self._processes[rank].pid, _STACKS_SIGNAL)
        os.kill(os.getpid(), _STACKS_SIGNAL)
        time.sleep(self._timing.settle_s)
        lines = []
        for rank in [*silent, self._rank]:
            process, header = self._processes[rank], self._table.header(rank)
            try:
                with open(f"/proc/{process.pid}/fd/{header.stacks}", errors="replace") as file:
                    stacks = file.read().splitlines() or ["(none: the process does not answer)"]
            except OSError as error:
                stacks = [f"(none: {error.strerror})"]
            lines += [f"stacks of rank {rank}:", *(f"  {line}" for line in stacks)]
        return lines


def _has_reached(operation: Operation, wait: _Wait) -> bool:
    if operation.key != wait.key:
        return False
    return operation.number > wait.number or (operation.number == wait.number and operation.what == wait.what[:WHAT_NBYTES])

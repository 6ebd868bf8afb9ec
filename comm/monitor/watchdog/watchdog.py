"""No silent hang: a thread on every rank that ends the job, with a report, when an operation takes too long or cannot end.

Each rank writes what it does into the status table (`ending/status_table.py`), and its watchdog checks the rank's own
operations several times a second. An operation is overdue after SHARDRT_TIMEOUT seconds (600; 0: never), or after a few seconds
if it waits for a rank that has left its program or whose process has ended, or in a circle for one that waits for this one
(`circles.py`), or at once if its communicator has an error on the GPU; while all ranks that it waits for work (`activity.py`),
or wait for ranks that do, only after SHARDRT_PATIENCE (3600). A request to a store (`requests.py`) is overdue after
SHARDRT_TIMEOUT, and counts as work until then. Then the rank raises the alarm in its row. If the operation does not come
through meanwhile, one of the ranks that raised it writes the report, with the stacks of the ranks of its node (`states.py` says
which one, and when); each rank writes its flight recorder's dump; the job ends with exit code 17.

A rank that is stopped, or runs C code that holds the GIL, cannot report; other ranks report it, with its stacks
(`ending/stacks.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, NoReturn

import torch

from ...core.calls import BLOCKING, CallList, CollectiveCall, Failure, Hook, Member, Work
from ...core.fingerprint import fingerprint_of
from ...core.streams import is_capturing, observe
from ...ending.report import EXIT_CODE, log
from ...ending.stacks import Stacks
from ...ending.status_table import ENTRIES, Alarm, ProgramPhase, StatusEntry, TimeInside
from ...ending.words import name_ranks, still_works
from ...recorder.recorder import Recorder
from ..exit_handlers import NOTHING, Aborter
from ..guarding import RankGuard
from ..progress import described, progress
from ..requests import requests
from ..timing import Timing
from .activity import Activity
from .circles import ADVICE, Callers, chain_of
from .peers import Heartbeats, Peers, share_table
from .sidechannel import SideChannel
from .states import Decision, Move
from .stragglers import Stragglers
from .waits import NO_ANSWER, OverdueWait, StoreWait, Wait, Watched

if TYPE_CHECKING:
    from mpi4py import MPI


class Watchdog(Hook):
    """The hook and the thread of this rank. Creating and `close()` are collective over `comm`, which has all ranks.

    survives: a lost rank does not end the job, so that ranks which do not come to an operation are killed.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: int,
        device: torch.device,
        recorder: Recorder,
        aborter: Aborter,
        timing: Timing,
        *,
        survives: bool = False,
    ) -> None:
        self._rank = comm.Get_rank()
        self._timing = timing
        self._survives = survives
        self._device = device
        self._recorder = recorder
        self._aborter = aborter
        # Two for each communicator: collectives may run on a thread while the caller waits for something else.
        self._watched: dict[tuple[Member, bool], Watched] = {}
        self._opening = threading.Lock()
        self._stacks = Stacks()
        self._table, processes = share_table(comm, node, self._stacks)
        self._peers = peers = Peers(self._rank, self._table, processes, timing)
        self._channel = SideChannel(comm, self._table, peers.nodes, timing) if len(peers.nodes) > 1 else None
        if self._channel is not None and self._channel.missing and self._rank == 0:
            log(self._rank, f"the watchdog has no connection to the nodes of {name_ranks(self._channel.missing)}")
        self._decision = Decision(self._table, self._rank, [process.node for process in processes], timing)
        self._inside = TimeInside()
        self._callers = Callers()
        self._stragglers = Stragglers(self._table, self._rank, timing, self._inside)
        self._heartbeats = Heartbeats(self._table, peers.nodes, timing)
        self._cut_short = ""  # the call that an exception has taken the main thread out of, until its next
        # The exception with which this rank has left the block of an agree(), until all have left.
        self._failure: Failure | None = None
        progress.restart()
        self._stopping = threading.Event()
        self._killed_at = -inf  # when it has killed ranks
        self._given_until = 0.0  # until when `patience` gives time, by time.monotonic()
        self._thread = threading.Thread(target=self._run, name="shardrt-watchdog", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the hook

    def called(self, calls: CallList, work: Work) -> None:
        self._callers.add(get_ident())
        if calls[0].comm.is_async and not is_capturing():
            self._watch(calls[0]).pending.append((calls[0].number, calls.description.shared, work))

    def before(self, calls: CallList) -> None:
        self._callers.add(get_ident())
        self._cut_short = ""
        self._watch(calls[0]).begin(calls)

    def after(self, calls: CallList) -> None:
        self._watch(calls[0]).status.end()

    def cut_short(self, calls: CallList) -> None:
        self._cut_short = str(self._watch(calls[0]).wait() or "")

    def failed(self, failure: Failure | None) -> None:
        self._failure = failure

    def _watch(self, call: CollectiveCall) -> Watched:
        key = (call.comm, call.name in BLOCKING)
        return self._watched.get(key) or self._open(*key)

    def _open(self, comm: Member, blocking: bool) -> Watched:
        """A status entry for a new communicator; when all are taken, that of the oldest communicator that is idle."""
        key = fingerprint_of(f"{comm.name} {comm.ranks} {blocking}")
        with self._opening:
            index = len(self._watched)
            if index == ENTRIES:
                oldest = next(key for key, watched in self._watched.items() if watched.wait() is None)
                index = self._watched.pop(oldest).status.index
            status = StatusEntry(self._table, self._rank, index, key, comm.name, self._inside)
            watched = self._watched[comm, blocking] = Watched(comm, status, key, comm.size == self._table.size)
        return watched

    def under_way(self) -> str:
        """Describe the operations that this rank is in."""
        waits = [wait for watched in list(self._watched.values()) if (wait := watched.wait()) is not None]
        asked = requests.advance(0.0)
        return " and ".join(map(str, [*waits, *([asked] if asked else [])])) or self._cut_short or NOTHING

    def share_table(self, guard: RankGuard) -> None:
        """Let the guard of this rank read the status table."""
        guard.share_table(self._table.fd, self._timing, self._peers.here, self._rank)

    def leave(self) -> None:
        """This rank's program has reached its end: an operation that waits for it will never complete."""
        self._table.set_note(self._rank, self._recorder.last_call())
        self._table.set_phase(self._rank, ProgramPhase.LEAVING)

    def stay(self) -> None:
        """All ranks have reached the end of their programs, and something is left to do."""
        self._table.set_phase(self._rank, ProgramPhase.RUNNING)

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """In the block, for up to so many seconds, neither this rank's operations are overdue nor those that wait for it."""
        before = self._given_until
        self._given_until = max(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._given_until = before

    def abandon(self) -> None:
        """End the thread: this world has lost ranks, and no call of it is waited for. `free` comes later."""
        self._stopping.set()
        self._thread.join()
        self._watched.clear()  # it keeps communicators, and their memory
        self._table.set_phase(self._rank, ProgramPhase.FINISHED)

    def kill_late(self) -> list[int]:
        """Kill the ranks of this node that have not abandoned the world; returns them."""
        alive = [rank for rank in self._peers.here if rank != self._rank and not self._peers.is_lost(rank)]
        for rank in alive:
            self._peers.kill(rank)
        return alive

    def close(self) -> None:
        """End the thread. All ranks have reached the end of their programs. Does not return if a rank is ending the job."""
        until = time.monotonic() + self._timing.report_s
        while not self._decision.finish(patient=time.monotonic() < until):
            time.sleep(self._timing.poll_s)
        self._stopping.set()
        self._thread.join()
        self.free()

    def free(self) -> None:
        """Free what the thread has used."""
        self._stacks.close()
        self._table.close()
        if self._channel is not None:
            self._channel.close()

    # ------------------------------------------------------------------ watching

    def _run(self) -> None:
        observe(self._device)
        self._activity = Activity()
        before = time.monotonic()
        while not self._stopping.wait(self._timing.poll_s):
            now = time.monotonic()
            # Hazard: a job that was suspended as a whole and resumed is not overdue: at most one second counts.
            elapsed, before = min(now - before, 1.0), now
            overdue = self._overdue(elapsed)
            self._tick(elapsed)
            move = self._decision.look(elapsed, overdue, self._heartbeats.is_silent(0))
            if move is Move.COMMIT and self._survives and self._has_killed(overdue):
                move = Move.WITHDRAW
            if (done := self._decision.act(move, overdue)) in (Move.COMMIT, Move.FOLLOW):
                self._end(done, overdue)

    def _overdue(self, elapsed: float) -> OverdueWait | None:
        self._recorder.poll()
        self._activity.tick()
        overdue, idle, chains, last = self._late_request(elapsed), list[float](), list[int](), None
        for (comm, _), watched in self._watched.copy().items():  # other threads add to it; list() would fail then
            wait = watched.advance(elapsed)
            if wait is None or overdue is not None:
                continue
            if (error := comm.async_error()) is not None:
                overdue = OverdueWait(wait, self._peers.missing(wait), watched.is_where_it_was, error)
            if overdue is not None or watched.seconds < min(self._timing.lost_s, self._timing.timeout_s):
                chains.append(0)
                continue
            missing = self._peers.missing(wait)
            chains.append(chain_of(self._table, missing))
            # A circle of ranks that wait for each other grows older with each look.
            idle.append(elapsed + max((self._peers.idle(rank, self._heartbeats) for rank in missing), default=inf))
            if any(map(self._peers.is_lost, missing)) or self._is_late(watched, wait, missing, idle[-1]):
                overdue = OverdueWait(wait, missing, watched.is_where_it_was)
            last = OverdueWait(wait, missing, watched.is_where_it_was, in_circle=True)
        given = self._given_until - time.monotonic()
        if self._is_in_circle(min(chains, default=0) if given <= 0.0 else 0):
            overdue = overdue or last
        if idle:  # what this rank does while it waits does not count as work
            self._activity.idle_s = 0.0
        self._table.set_idle(self._rank, -given if given > 0.0 else max(idle, default=self._activity.idle_s))
        return overdue

    def _late_request(self, elapsed: float) -> OverdueWait | None:
        """The oldest request to a store, if it takes too long. Until then, whoever waits for this rank knows that it works."""
        asked = requests.advance(elapsed)
        if asked is None:
            return None
        self._activity.idle_s = 0.0
        if asked.seconds < self._timing.timeout_s or time.monotonic() < self._given_until:
            return None
        wait = StoreWait("", (self._rank,), 0, 0, str(asked), asked.seconds)
        return OverdueWait(wait, [], lambda: asked.is_under_way)

    def _is_in_circle(self, chain: int) -> bool:
        """Whether so many ranks that wait for each other, from this one on, are a circle of ranks."""
        if chain and (
            self._survives  # its end is that of a lost rank
            or self._table.header(self._rank).phase is not ProgramPhase.RUNNING  # who waits for it knows
            or not self._callers.wait()
        ):
            chain = 0
        self._table.set_chain(self._rank, chain)
        return chain > self._table.size

    def _is_late(self, watched: Watched, wait: Wait, missing: list[int], idle: float) -> bool:
        """Whether a wait for these ranks takes too long. idle: for how long the one that works least has not worked."""
        timing = self._timing
        if watched.seconds < timing.timeout_s or time.monotonic() < self._given_until:
            return False
        if idle >= 0.0 and (idle >= timing.timeout_s or watched.seconds >= timing.patience_s):
            return True
        waiting = [rank for rank in wait.ranks if rank not in missing]
        if watched.seconds >= timing.timeout_s * (watched.told + 1) and self._rank == waiting[0]:
            watched.told = int(watched.seconds // timing.timeout_s)
            works = still_works(missing, timing.patience_s)
            log(self._rank, f"{name_ranks(waiting)} waited {watched.seconds:.0f} s in {wait} for {works}")
        return False

    def _tick(self, elapsed: float = 0.0) -> None:
        self._table.beat(self._rank)
        self._table.set_progress(self._rank, progress.steps, progress.forwards, accumulates=progress.accumulates)
        if (late := self._stragglers.tick()) is not None:
            host = self._peers.processes[late.rank].host
            log(self._rank, f"rank {late.rank} on {host} is late: {late} (SHARDRT_STRAGGLER={self._timing.straggler:g})")
        if self._channel is None:
            return
        if self._rank == self._peers.here[0]:
            for rank in self._peers.here:
                self._table.note_process(rank)
            self._channel.tick()
        self._heartbeats.tick(elapsed)

    # ------------------------------------------------------------------ the end

    def _end(self, move: Move, overdue: OverdueWait | None) -> NoReturn:
        """Write what this rank knows, and end the job when all have written theirs."""
        reports, has_raised = move is Move.COMMIT, self._table.alarms()[self._rank] != Alarm.NONE
        speaks = reports or self._speaks_for_node()
        stacks = self._peers.stacks_here() if speaks else []
        lines = self._report(overdue) if reports else self._last_words(overdue)
        if self._failure is not None:
            lines += ["raised in a block of agree(), which the others have not left:", *self._failure.trace.splitlines()]
        try:
            self._recorder.dump(why="\n".join([*lines, *stacks]))
        except Exception as error:  # the report is worth more
            lines.append(f"no dump: {error}")
        if reports:
            lines.append(f"dumps: {self._recorder.folder}; python -m shardrt.comm.recorder merge {self._recorder.folder}")
        if overdue is not None or speaks or self._failure is not None:
            log(self._rank, *lines, *stacks)
        if reports:
            settle_s = self._timing.settle_s if self._channel is None else self._timing.settle_nodes_s
            self._await(self._have_followed, settle_s)
            self._table.set_alarm(self._rank, Alarm.REPORTED)
        elif speaks or has_raised:
            self._table.set_alarm(self._rank, Alarm.FOLLOWED)
        self._await(lambda: Alarm.REPORTED in self._table.alarms(), self._timing.report_s)
        self._aborter.end_job(EXIT_CODE)

    def _speaks_for_node(self) -> bool:
        """True if this rank writes the stacks of its node: the lowest that raised the alarm, or else the lowest at all."""
        here = self._peers.here
        alarms = [self._table.alarms()[rank] for rank in here]
        speaker = next((rank for rank, alarm in zip(here, alarms, strict=True) if alarm), here[0])
        return max(alarms) < Alarm.COMMITTED and speaker == self._rank

    def _have_followed(self) -> bool:
        """True if every node that can be heard has written its part, and each of its ranks that raised the alarm."""
        alarms, silent = self._table.alarms(), self._heartbeats.is_silent
        nodes = [[alarms[rank] for rank in node] for node in self._peers.nodes if self._rank in node or not silent(node[0])]
        return all(any(node) and Alarm.RAISED not in node for node in nodes)

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(self._timing.poll_s)
            self._tick()

    def _last_words(self, overdue: OverdueWait | None) -> list[str]:
        if overdue is None:
            return ["an operation of another rank never completed"]
        reason = "" if overdue.error is None else f", in which NCCL failed: {overdue.error}"
        return [f"waits in {overdue.wait}{reason}; last call: {self._recorder.last_call()}"]

    def _has_killed(self, overdue: OverdueWait | None) -> bool:
        """Kill the ranks of this node that do not come, so that they are lost ranks.

        Returns: whether there were some, or another rank has just killed them: MPI is about to tell of their end.
        """
        assert overdue is not None, "an operation"
        if time.monotonic() < self._killed_at + self._timing.lost_s:
            return True
        alive = [rank for rank in overdue.missing if rank in self._peers.here and not self._peers.is_lost(rank)]
        # Hazard: one of them may only wait for another rank. In a circle, all do.
        alive = [rank for rank in alive if not self._peers.is_in_operation(rank)] or alive
        if alive:
            self._killed_at = time.monotonic()
            log(
                self._rank, *self._report(overdue)[1:], f"{self._reason(overdue)}; {name_ranks(alive)} killed: the others go on"
            )
        for rank in alive:
            self._peers.kill(rank)
        has_ended = any(self._peers.is_lost(rank) for rank in overdue.missing)
        if not alive and has_ended and self._killed_at == -inf:
            self._killed_at = time.monotonic()
            return True
        return bool(alive)

    def _report(self, overdue: OverdueWait | None) -> list[str]:
        assert overdue is not None, "an operation"
        wait, missing = overdue.wait, overdue.missing
        if isinstance(wait, StoreWait):
            return [f"{self._reason(overdue)}; ending the job with exit code {EXIT_CODE}", NO_ANSWER]
        present = [rank for rank in wait.ranks if rank not in missing]
        return [
            f"{self._reason(overdue)}; ending the job with exit code {EXIT_CODE}",
            f"present: {name_ranks(present)}; missing: {name_ranks(missing) if missing else 'none'}",
            *(f"missing {self._peers.describe(rank, self._heartbeats)}" for rank in missing),
            *self._unequal_progress(wait, missing),
            *([ADVICE] if overdue.in_circle or any(map(self._peers.has_left, missing)) else []),
        ]

    def _unequal_progress(self, wait: Wait, missing: list[int]) -> list[str]:
        """A line if ranks wait for each other, or have left, and have not run as many micro-batches."""
        silent = any(self._peers.is_silent(rank, self._heartbeats) for rank in missing)
        if silent or not all(self._peers.is_in_operation(rank) or self._peers.is_lost(rank) for rank in missing):
            return []
        found = dict[str, list[int]]()
        for rank in wait.ranks:
            header = self._table.header(rank)
            place = described(header.steps, header.forwards, accumulates=header.accumulates)
            found.setdefault(place, []).append(rank)
        if len(found) == 1:
            return []
        places = "; ".join(f"{name_ranks(ranks)}: {place}" for place, ranks in found.items())
        return [
            f"training is not at the same place: {places}. In each step, every rank runs as many micro-batches: agree on the "
            "number first, as by min(world.comm.exchange(n)); or let a rank that has fewer run more, with their loss times 0"
        ]

    def _reason(self, overdue: OverdueWait) -> str:
        wait, limit_s, variable = overdue.wait, self._timing.timeout_s, "SHARDRT_TIMEOUT"
        if overdue.error is not None:
            return f"NCCL failed in {wait}: {overdue.error}"
        if overdue.in_circle:
            others = name_ranks(overdue.missing)
            return f"waited {wait.seconds // 1:.0f} s in {wait}, and no rank can go on: {others} cannot come, waiting elsewhere"
        if wait.seconds >= self._timing.patience_s:
            limit_s, variable = self._timing.patience_s, "SHARDRT_PATIENCE"
        return f"waited {wait.seconds // 1:.0f} s in {wait} (limit {limit_s:.0f} s, {variable})"

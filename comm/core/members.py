"""The ranks of a world that survives the loss of some of them (`shardrt.launch --survive`), and the error of a loss.

It stands on ULFM, MPI's user-level failure mitigation: MPI tells which processes have ended (`Get_failed`), makes every rank's
calls of a communicator fail (`Revoke`), and makes a communicator of the ranks that are left (`Shrink`).

A loss is noticed where a call of MPI fails, or by a thread that asks MPI several times a second. Who notices it revokes every
communicator of the world. So each rank's call raises `RankLost`: what waits in MPI, since the call fails; what waits in shared
memory or looks for messages, since it asks `check_lost` (`backends/waiting.py`); and every later call, before it begins.
A world that has lost a rank stays so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, TypeVar

from ..ending.report import flush_output, log
from ..ending.words import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOK_S = 0.05
_LAST_S = 0.2  # for the last messages to arrive, where MPI is not ended
_FT_ENABLE = "OMPI_MCA_mpi_ft_enable"
_TOLD_S = 2.0  # for MPI to say who has ended, when another rank has revoked a communicator


class RankLost(RuntimeError):
    """Processes of ranks have ended, and the job survives that: every other rank raises it, in its current or next call.

    All calls of the world's communicators raise it from now on. `World.recover()` makes a world of the ranks that are left.
    hosts: of each lost rank, by its number in this world.   where: what this rank was in.
    """

    def __init__(self, hosts: Mapping[int, str], rank: int, where: str) -> None:
        self.hosts, self.rank, self.where = dict(hosts), rank, where
        lost = ", ".join(f"{name_ranks([each])} (host {host})" for each, host in sorted(self.hosts.items()))
        super().__init__(f"lost {lost or 'a rank'}; rank {rank} was in {where}; world.recover() makes a world of the others")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The lost ranks, by their numbers in the world that has lost them."""
        return tuple(sorted(self.hosts))


class NotRecovered(RankLost):
    """A loss that nothing covers: too few ranks are left, or nothing is there to go on from. It ends the job."""

    def __init__(self, why: str) -> None:
        RuntimeError.__init__(self, f"ranks are lost, and the run cannot go on: {why}")
        self.hosts, self.rank, self.where = {}, -1, ""


class Members:
    """The ranks of one world, which are those of `comm`. Creating is not collective."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.under_way: Callable[[], str] = lambda: "the start of the world"
        self.abort: Callable[[], None] = lambda: None  # ends what runs on the GPU
        self._lost: RankLost | None = None
        self._revocable: list[MPI.Comm] = [comm]
        self.hosts: list[str] = []  # by rank
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardrt-members", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Learn the ranks' hosts. Collective over them."""
        self.hosts = self.comm.allgather(socket.gethostname())

    @property
    def has_lost(self) -> bool:
        """Whether a rank has been lost, as far as this one knows."""
        return self._lost is not None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are lost."""
        return () if self._lost is None else self._lost.ranks

    def check(self) -> None:
        """Raise RankLost if a rank has been lost."""
        if (lost := self._lost) is not None:
            raise RankLost(lost.hosts, lost.rank, lost.where)

    def add(self, comm: MPI.Comm) -> None:
        """Revoke this communicator as well when a rank is lost."""
        with self._lock:
            self._revocable.append(comm)
            if self._lost is not None:
                revoke(comm)

    def remove(self, comm: MPI.Comm) -> None:
        """Do not revoke this communicator: it is about to be freed."""
        with self._lock:
            if comm in self._revocable:
                self._revocable.remove(comm)

    def notice(self) -> None:
        """A rank is lost: let the calls of all ranks fail."""
        with self._lock:
            if self._lost is None:
                until = time.monotonic() + _TOLD_S
                while not (failed := self._failed()) and time.monotonic() < until:
                    time.sleep(_LOOK_S / 10)
                hosts = {rank: self.hosts[rank] if self.hosts else "?" for rank in failed}
                self._lost = RankLost(hosts, self.comm.Get_rank(), self.under_way())
                for comm in self._revocable:
                    revoke(comm)
                self.abort()

    def suspect(self, *, is_loss: bool) -> None:
        """A call of MPI has failed. is_loss: by its error, since a rank is lost; else the thread is given time to hear of one.

        Several requests fail with an error of their own (ERR_IN_STATUS), and messages to ranks of other nodes with others.
        """
        if is_loss:
            self.notice()
        until = time.monotonic() + _TOLD_S
        while self._lost is None and time.monotonic() < until:
            time.sleep(_LOOK_S / 10)

    def revoke(self) -> None:
        """Let the calls of all ranks fail, and theirs after this one's, since this rank has failed to make the world."""
        with self._lock:
            for comm in self._revocable:
                revoke(comm)

    def shrink(self) -> MPI.Intracomm:
        """A communicator of the ranks that are left, in their old order. Collective over them; more may be lost meanwhile."""
        self.stop()
        found = self.comm.Shrink()
        assert isinstance(found, type(self.comm)), "of that class"
        return found

    def agree(self, has_made: bool) -> bool:
        """Whether every rank is there and has made the world: the same on all of them. Collective."""
        from mpi4py import MPI

        try:
            return bool(self.comm.Agree(has_made)) and has_made
        except MPI.Exception:  # a rank is lost, on all of the others alike
            return False

    def end(self) -> None:
        """End the thread. All ranks have made their last calls; what the others still receive of them gets the time."""
        self.stop()
        until = time.monotonic() + (_LAST_S if has_lost else 0.0)
        while time.monotonic() < until:
            self._failed()
            time.sleep(_LOOK_S / 10)

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _failed(self) -> list[int]:
        from mpi4py import MPI

        MPI.COMM_SELF.Iprobe()  # so that MPI hears of ended processes
        failed, everyone = self.comm.Get_failed(), self.comm.group
        try:
            found: list[int] = list(failed.Translate_ranks(None, everyone))
        finally:
            failed.Free()
            everyone.Free()
        return found

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            if self._lost is not None or self.comm.Is_revoked() or self._failed():
                self.notice()
                return


def check_ulfm(comm: MPI.Intracomm, *, has_started_mpi: bool) -> None:
    """Raise RuntimeError where this MPI does not survive the loss of processes. has_started_mpi: `init` has."""
    from mpi4py import MPI

    if not has_started_mpi:  # mpi4py would end it, and Open MPI's end may never return when processes have been lost
        raise RuntimeError("SHARDRT_SURVIVE=1, but the program has started MPI: let shardrt.init() start it")
    try:
        comm.Get_failed().Free()
        found = os.environ.get(_FT_ENABLE) == "1"  # by mpirun --with-ft ulfm; MPICH ends the others
    except (MPI.Exception, NotImplementedError):
        found = False
    if not found:
        raise RuntimeError(
            f"SHARDRT_SURVIVE=1 under {MPI.Get_library_version().splitlines()[0].strip()}: ranks cannot outlive others here; "
            "start the job with shardrt.launch --survive, in an environment with Open MPI 5"
        )


class Limit(threading.Timer):
    """If it is not cancelled in time, the ranks of this node that did not come are lost; if all did, this one is.

    kill_late: kills those that did not come, and returns them.
    """

    def __init__(self, seconds: float, rank: int, kill_late: Callable[[], list[int]]) -> None:
        super().__init__(min(seconds, threading.TIMEOUT_MAX), self._end)
        self.name, self.daemon, self._rank, self._kill_late = "shardrt-limit", True, rank, kill_late
        self.start()

    def _end(self) -> None:
        late = self._kill_late()
        log(self._rank, f"world.recover() takes longer than SHARDRT_TIMEOUT; killing {name_ranks(late or [self._rank])}")
        if not late:
            end_this_process()


def end_this_process() -> NoReturn:
    """End this process so that the other ranks lose it.

    Hazard: of a process that ends with a code, Open MPI's launcher tells the others nothing.
    """
    flush_output()
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()
    raise AssertionError("killed")


def leave_launcher() -> None:
    """Tell Open MPI's launcher that this process ends in order, without the end of MPI, in a job that has lost ranks.

    Hazard: the end of MPI may never return then; and the launcher takes a process that was started in the place of another for
    one that has failed if it ends without a word.
    """
    with suppress(OSError):  # Open MPI has it in itself
        library = ctypes.CDLL("libpmix.so.2", os.RTLD_NOW | os.RTLD_NOLOAD)
        error = 0
        while not error and library.PMIx_Initialized():  # as often as it was started
            error = library.PMIx_Finalize(None, 0)


def revoke(comm: MPI.Comm) -> None:
    """Let the calls of a communicator fail, on all of its ranks. No-op where it has been freed."""
    from mpi4py import MPI

    with suppress(MPI.Exception):  # it has been freed
        comm.Revoke()


# Written by `startup/`.
current: Members | None = None  # of the world; None where a lost rank ends the job
has_lost = False  # whether this process has been in a world that lost ranks
is_newcomer = False  # whether it has taken the place of a lost rank, and has done no step of a run yet: it ends alone
Comm = TypeVar("Comm", bound="MPI.Comm")


def current_members() -> Members:
    """The ranks of the world of a job that survives."""
    assert current is not None, "of a job that survives"
    return current


def check_lost() -> None:
    """Raise RankLost if the world has lost a rank."""
    if current is not None:
        current.check()


def raise_lost(error: BaseException, of: Members | None) -> None:
    """Raise RankLost from an exception that a loss has caused in the world of these members."""
    if of is None or isinstance(error, RankLost) or not isinstance(error, Exception):
        return
    from mpi4py import MPI

    if isinstance(error, MPI.Exception):
        of.suspect(is_loss=error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED))
    try:
        of.check()
    except RankLost as lost:
        raise lost from error


def revocable(comm: Comm) -> Comm:
    """`comm`, whose calls fail when a rank is lost."""
    if current is not None:
        current.add(comm)
    return comm


def free(comm: MPI.Comm) -> None:
    """Free a communicator that may be `revocable`. Collective over its ranks."""
    if current is not None:
        current.remove(comm)
    comm.Free()

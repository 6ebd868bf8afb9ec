"""Processes that take the place of lost ranks (`shardrt.launch --replace`).

The ranks that are left start them by MPI (`Spawn`), in a thread beside their work: a new process takes seconds until it comes
to `shardrt.init()`. When it is there, the same thread connects it with each rank, and the ranks make a world with it between
two steps (`World.grow`).

Hazards: a call of Open MPI that needs a first connection to a process waits for ever if that process has ended, so only this
thread makes such calls. Nobody is told that a process has ended which was started so, but for those that have a connection.
If it ends within the milliseconds of `Merge`, that never returns, and no further communicator can be made: the job ends.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from ..core import members
from ..core.members import end_this_process, revoke
from ..ending.guard.node import JOINING
from ..ending.report import log, tell_launcher_of_joined

if TYPE_CHECKING:
    from mpi4py import MPI

_MERGE_S = 10.0  # for what takes milliseconds
_DUMPED_S = 1.0  # for the stacks to be written
_LONGEST_S = 1e9  # 30 years: the kernel's timers take no more than 292
_GUARD = Path(__file__).parents[1] / "ending" / "guard" / "__main__.py"


class Coming(Enum):
    """How far processes in the place of lost ranks are."""

    STARTING = "starting"
    THERE = "there"  # they wait in init(), connected with this rank
    FAILED = "failed"


class Replacement:
    """More processes of this program, which start: one on each of these hosts, or elsewhere, if one of them is gone.

    Made by `World.replace`. They have failed if they are not there after `limit_s`.
    """

    def __init__(self, ranks: MPI.Intracomm, hosts: Sequence[str], limit_s: float) -> None:
        self._ranks, self._hosts, self._until = ranks.Dup(), hosts, time.monotonic() + limit_s
        self._made: list[MPI.Comm] = []  # with the new processes: an intercommunicator, and the communicator made of it
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="shardrt-spawn", daemon=True)
        self._thread.start()

    @property
    def coming(self) -> Coming:
        """How far they are. Each rank may know another."""
        if not self._thread.is_alive() and len(self._made) == 2:
            return Coming.THERE
        return Coming.STARTING if time.monotonic() < self._until else Coming.FAILED

    def taken(self) -> MPI.Intracomm:
        """A communicator of the ranks, in their order, and after them of the processes, which are there."""
        found = self._made[1]
        assert isinstance(found, type(self._ranks)), "Merge makes these"
        self._made = []
        return found

    def abandon(self) -> None:
        """Nobody waits for the processes any more: they end. It does not wait."""
        self._is_abandoned = True
        threading.Thread(target=self._revoke, name="shardrt-revoke", daemon=True).start()

    def _revoke(self) -> None:
        for comm in (self._ranks, *self._made):
            revoke(comm)

    def _run(self) -> None:
        """Start them. Hazard: if one of them ends before it has started MPI, this waits for ever."""
        from mpi4py import MPI

        try:
            spawned = self._spawned()
            self._made.append(spawned)
            _connect(spawned)
            if self._is_abandoned:
                self._revoke()
                return
            self._ranks.Barrier()
            self._made.append(self._merged(spawned))
        except MPI.Exception as error:
            if self._ranks.Get_rank() == 0 and not self._is_abandoned:
                log(0, f"no processes could be started in the place of the ranks lost on {', '.join(self._hosts)}: {error}")
            self._revoke()

    def _merged(self, spawned: MPI.Intercomm) -> MPI.Intracomm:
        limit = threading.Timer(_MERGE_S, self._end)
        limit.name, limit.daemon = "shardrt-limit", True
        limit.start()
        try:
            return spawned.Merge(high=False)
        finally:
            limit.cancel()

    def _end(self) -> None:
        log(self._ranks.Get_rank(), "a process in the place of a lost rank ended while it was connected; ending this rank")
        end_this_process()

    def _spawned(self) -> MPI.Intercomm:
        from mpi4py import MPI

        isolated = ["-s", "-P"] if os.environ.get("PYTHONHOME") else ["-I"]  # the flags of launch.isolated
        command = [*isolated, "-S", str(_GUARD), "--join", *sys.orig_argv]
        there = MPI.Info.Create({"host": ",".join(self._hosts)})
        try:
            return self._ranks.Spawn(sys.executable, command, len(self._hosts), there)
        except MPI.Exception:  # a host is gone
            return self._ranks.Spawn(sys.executable, command, len(self._hosts))


def _connect(made: MPI.Intercomm) -> None:
    """Exchange a message with each of the other processes."""
    from mpi4py import MPI

    requests = [made.Irecv(bytearray(1), other) for other in range(made.Get_remote_size())]
    requests += [made.Isend(bytes(1), other) for other in range(made.Get_remote_size())]
    MPI.Request.Waitall(requests)


# ---------------------------------------------------------------------- in such a process


def is_joining() -> bool:
    """Whether this process was started in the place of a lost rank, and has not come to the others yet."""
    return JOINING in os.environ


@contextmanager
def joining(limit_s: float) -> Iterator[None]:
    """The block is init(). Until it has come to the others (`joined`), such a process ends when the limit has passed.

    That is so also inside MPI, with Python's lock: by SIGALRM. It ends with any error.
    """
    if not is_joining():
        yield
        return
    limit_s = min(limit_s, _LONGEST_S)
    faulthandler.dump_traceback_later(limit_s)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _DUMPED_S)
    try:
        yield
    except Exception as error:
        log(0, f"a process in the place of a lost rank did not come to the others, and ends: {type(error).__name__}: {error}")
        end_this_process()
    del os.environ[JOINING]
    tell_launcher_of_joined()


def joined() -> MPI.Intracomm:
    """A communicator of the ranks that have started this process, and of those started with it. Collective over them."""
    from mpi4py import MPI

    members.has_lost = members.is_newcomer = True
    ranks = MPI.Comm.Get_parent()
    _connect(ranks)
    made = ranks.Merge(high=True)
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0.0)  # from here on, the others revoke `made` if they do not come
    return made

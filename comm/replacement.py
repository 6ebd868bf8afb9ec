"""Processes that take the place of lost ranks (`shardrt.launch --replace`).

The ranks that are left start them by MPI (`Spawn`), in a thread beside their work: a new process takes seconds until it comes
to `shardrt.init()`. There it waits. When all are there, the ranks make a world with them, between two steps (`World.grow`).

Where ranks are lost meanwhile, nobody waits for the new processes, which may then wait inside MPI for ever: they have a limit.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from . import members
from .ending.report import log
from .guard.node import JOINING
from .members import Members, end_this_process, revocable

if TYPE_CHECKING:
    from mpi4py import MPI

_GUARD = Path(__file__).parent / "guard" / "__main__.py"


class Replacement:
    """`count` more processes of this program, which start. Creating is collective over the ranks of these members."""

    def __init__(self, of: Members, count: int) -> None:
        self.count = count
        self._rank = of.comm.Get_rank()
        self._comm = revocable(of.comm.Dup())
        self._made: MPI.Intercomm | None = None
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="shardrt-spawn", daemon=True)
        self._thread.start()

    @property
    def is_there(self) -> bool | None:
        """Whether the processes have started MPI; None: not yet."""
        return None if self._thread.is_alive() else not self._has_failed

    def merged(self) -> MPI.Intracomm | None:
        """A communicator of the ranks, in their order, and of the processes after them. Collective over all of them.

        None if one of them is lost; other ranks may then have got one, which is of no use.
        """
        from mpi4py import MPI

        assert self._made is not None, "they are there"
        revocable(self._made)
        try:
            return self._made.Merge(high=False)
        except MPI.Exception:
            with suppress(MPI.Exception):
                self._made.Revoke()
            return None

    def _run(self) -> None:
        from mpi4py import MPI

        isolated = ["-s", "-P"] if os.environ.get("PYTHONHOME") else ["-I"]  # the flags of launch.isolated
        command = [*isolated, "-S", str(_GUARD), "--join", *sys.orig_argv]
        try:
            self._made = self._comm.Spawn(sys.executable, command, self.count)
        except MPI.Exception as error:
            self._has_failed = True
            log(self._rank, f"{self.count} processes in the place of lost ranks could not be started: {error}")


# ---------------------------------------------------------------------- in such a process


def is_joining() -> bool:
    """Whether this process was started in the place of a lost rank."""
    return JOINING in os.environ


@contextmanager
def joining(limit_s: float) -> Iterator[None]:
    """In the block, which is init(), such a process ends when the limit has passed: also inside MPI, with Python's lock."""
    if is_joining():
        faulthandler.dump_traceback_later(min(limit_s, threading.TIMEOUT_MAX), exit=True)
    try:
        yield
    finally:
        if is_joining():
            faulthandler.cancel_dump_traceback_later()
            del os.environ[JOINING]


def joined() -> MPI.Intracomm:
    """A communicator of the ranks that have started this process, and of those started with it. Collective over them."""
    from mpi4py import MPI

    members.has_lost = True
    return MPI.Comm.Get_parent().Merge(high=True)


def finish_joining(made: Members) -> None:
    """Let all ranks agree that they have made the world; without that, this process ends."""
    if not made.agree(has_made=True):
        end_this_process()

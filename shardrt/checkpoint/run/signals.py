"""Stopping on a signal: note it, and have all ranks agree at which step they stop.

A launcher or Slurm sends SIGUSR1 or SIGTERM to all ranks, which see it at different steps, or to one of them only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from ...comm import Communicator
from ...comm.monitor.exit_handlers import Deferred, handler_of

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
DUE = 1 << 8  # what `agreed` returns if something is due; no signal has this number
_REPEATS_S = 1.0  # a signal that comes again in this time is the same one, from Slurm and from the launcher


@dataclass
class Noted:
    """The signal that has been noted. Runs in one process share it: what came too late for one of them stops the next.

    number: of the signal, or 0.   since: when the main thread noted it.   arrived: when the thread of the exit handlers saw it.
    """

    number: int = 0
    since: float = 0.0
    arrived: float | None = None

    def clear(self) -> None:
        """The signal has been dealt with."""
        self.number, self.arrived = 0, None


class StopSignals(Deferred):
    """In its `with` block, SIGUSR1 and SIGTERM are only noted; a second one does what it did before the block.

    Where the job ended at once on SIGTERM before, it does so on the second one, even if the main thread hangs in a call.
    Outside of the main thread, where Python has no handlers, it notes nothing, and only the other ranks' signals count.
    Forked children, such as workers that load data, ignore SIGUSR1, which Slurm sends to them as well; SIGTERM ends them.
    """

    def __init__(self, noted: Noted) -> None:
        self._pid = os.getpid()
        self._noted = noted
        self._before: dict[int, Any] = {}  # the handlers from before, as `signal` returns them
        self._restore: dict[int, Callable[[], object]] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._restore = {number: handler_of(number) for number in SIGNALS}
            self._before = {number: signal.signal(number, self) or signal.SIG_DFL for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            number, handler = self._before.popitem()
            restore = self._restore[number]
            if signal.getsignal(number) is self:
                signal.signal(number, handler)
                restore()

    def agreed(self, comm: Communicator, *, is_due: bool = False) -> int:
        """The signal that the lowest rank with one has noted; if no rank has, `DUE` if something is due on any rank, else 0.
        Collective: the same on all ranks.

        Cost: a wait for all ranks on the host, 5 us at 2 ranks. No wait for the device.
        """
        own = self._noted.number or (DUE if is_due else 0)
        with comm.watched("agree", None):
            answers = comm.compare_in_call(own, lambda: own)
        return own if answers is None else min(filter(None, answers), key=lambda number: number == DUE)

    def arrived(self, number: int) -> Any:
        now, noted = time.monotonic(), self._noted
        if noted.arrived is None:
            noted.arrived = now
        return self._before.get(number) if now > noted.arrived + _REPEATS_S else None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        noted = self._noted
        if os.getpid() != self._pid:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)  # the handler from before may end the whole job
                os.kill(os.getpid(), number)
        elif not noted.number:
            noted.number, noted.since = number, time.monotonic()
        elif time.monotonic() > noted.since + _REPEATS_S:
            self.__exit__(None, None, None)
            os.kill(os.getpid(), number)

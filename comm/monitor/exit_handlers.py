"""If one rank fails, all ranks exit with a report: handlers for exceptions, signals, os._exit and the launcher's death.

Without them, MPI leaves the other ranks waiting for ever. Exit codes of the job: 1 for an uncaught exception, 130 for Ctrl-C,
143 for SIGTERM, and that of os._exit, or 17 if it is 0. Handlers that the program has installed stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, SupportsIndex

from ..core import members
from ..core.members import RankLost, end_this_process
from ..ending.report import EXIT_CODE, flush_output, is_read, log, tell_launcher_of_lost
from .guarding import RankGuard
from .timing import Timing

_PACKAGES = ("<frozen", os.path.dirname(os.__file__), str(Path(__file__).parents[2]))  # shardrt's own, and Python's

_PR_SET_PDEATHSIG = 1
_exit = os._exit
NOTHING = "no communication"


@contextlib.contextmanager
def handler_kept(number: signal.Signals) -> Iterator[None]:
    """Keep this signal's handler, whoever installed it, through a block that may replace it."""
    restore = handler_of(number)
    try:
        yield
    finally:
        restore()


def handler_of(number: signal.Signals) -> Callable[[], object]:
    """Returns what restores the handler that this signal has now. It may be one in C, which `signal` does not know."""
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(1024)  # more than a struct sigaction
    libc.sigaction(number, None, handler)
    return lambda: libc.sigaction(number, handler, None)


class Aborter:
    """Ends the job, in threads that are started early: at the interpreter's exit, where finalize runs, none can be started.

    abort_communicators: ends what runs on the GPU; None if there is none. It may block, so it has a thread of its own.
    """

    def __init__(self, timing: Timing, guard: RankGuard, abort_communicators: Callable[[], None] | None) -> None:
        self._timing = timing
        self._guard = guard
        self._last_act = abort_communicators
        self._acts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._actor = threading.Thread(target=self._act, name="shardrt-abort-nccl", daemon=True)
        if abort_communicators is not None:
            self._actor.start()
        self._codes: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shardrt-abort", daemon=True)
        self._thread.start()

    def end_job(self, code: int) -> NoReturn:
        """End the job with this exit code."""
        self._guard.end(code)
        self._codes.put(code)
        # Hazard: if another thread holds stdout or a lock of MPI's, the abort may never return.
        self._thread.join(self._timing.abort_s)
        _exit(code)

    def end_rank(self) -> NoReturn:
        """End this process alone: the other ranks lose it."""
        self._guard.done()
        end_this_process()

    def close(self) -> None:
        """End the threads."""
        if self._last_act is not None:
            self._acts.put(None)
            self._actor.join()
        self._codes.put(None)
        self._thread.join()

    def _run(self) -> None:
        code = self._codes.get()
        if code is None:
            return
        flush_output()
        with contextlib.suppress(OSError):
            if not is_read(2, 0.0):  # `log` has waited; the abort writes a line of its own
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # Hazard: on an abort mpirun drops output that it has not passed on yet, such as a report.
        time.sleep(self._timing.flush_s)
        if self._last_act is not None:
            # Hazard: the program goes on with wrong values where it waited for a kernel that is aborted: this comes last.
            self._acts.put(self._last_act)
            self._actor.join(self._timing.abort_nccl_s)
        from mpi4py import MPI

        (MPI.COMM_WORLD if members.current is None else members.current.comm).Abort(code)

    def _act(self) -> None:
        if (act := self._acts.get()) is not None:
            act()


_installed: ExitHandlers | None = None


def end_rank(rank: int, code: int, title: str, trace: list[str]) -> NoReturn:
    """Report, and end the job; this process alone, if it has no other ranks, or has left them."""
    if _installed is not None:
        _installed.end(code, title, trace)
    log(rank, title, *"".join(trace).splitlines())
    flush_output()
    _exit(code)


class Deferred(ABC):
    """A handler that puts a signal off until the main thread has time for it. The next one may be for the handler before it."""

    @abstractmethod
    def __call__(self, number: int, frame: FrameType | None) -> None: ...

    @abstractmethod
    def arrived(self, number: int) -> Any:
        """Called in another thread when a signal comes. Returns: the handler that it is for, if not this one, or None."""


class ExitHandlers:
    """Handles exceptions and signals of this process until `close()`. Hooks and handlers are process-wide: create one only.

    under_way: describes this rank's operations.   dump: writes the flight recorder, with the reason that it is given.
    survives: the job goes on without this rank, unless a signal or the loss of another rank ends it.
    """

    def __init__(
        self,
        rank: int,
        aborter: Aborter,
        under_way: Callable[[], str],
        dump: Callable[[str], object],
        timing: Timing,
        *,
        survives: bool = False,
    ) -> None:
        global _installed
        _installed = self
        self._rank = rank
        self._timing = timing
        self._survives = survives
        self._aborter = aborter
        self._under_way = under_way
        self._dump = dump
        self._ending = threading.Lock()
        self._hooks = sys.excepthook, threading.excepthook
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        # Hazard: after os._exit, MPICH's mpirun kills the other ranks at once, before any can report, and may return 0.
        setattr(os, "_exit", self._on_exit)  # noqa: B010
        self._interrupted = threading.Event()
        self._ours = {signal.SIGINT: self._on_interrupt, signal.SIGTERM: self._on_terminate}
        self._taken = {s: h for s in self._ours if (h := signal.getsignal(s)) in (signal.SIG_DFL, signal.default_int_handler)}
        self._wakeups = socket.socketpair()
        self._thread = threading.Thread(target=self._watch_signals, name="shardrt-signals", daemon=True)
        self._thread.start()
        self._take_signals()
        # Without this, Open MPI's ranks outlive their launcher.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def close(self) -> None:
        """Restore the hooks and handlers, and end the thread."""
        self.forget()
        self._wakeups[0].send(b"\0")
        self._thread.join()
        for end in self._wakeups:
            end.close()

    def forget(self) -> None:
        """Restore the hooks and handlers. A forked child needs no more than this: it must not end its parent's job."""
        global _installed
        _installed = None
        sys.excepthook, threading.excepthook = self._hooks
        setattr(os, "_exit", _exit)  # noqa: B010
        if self._taken:
            signal.set_wakeup_fd(-1)
        for number, handler in self._taken.items():
            if signal.getsignal(number) == self._ours[number]:
                signal.signal(number, handler)

    def end(self, code: int, title: str, trace: list[str], *, is_own: bool = False) -> NoReturn:
        """Report, and end the job; if it survives what is this rank's `own` fault, this rank. Only the first thread does."""
        alone = is_own and self._survives
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        what = "this rank" if alone else "the job"
        lines = [f"{title}, {self._under_way()} under way; ending {what}", *"".join(trace).splitlines()]
        try:
            self._dump("\n".join(lines))
        except Exception as error:
            lines.append(f"no dump: {error}")
        finally:
            log(self._rank, *lines)
            if alone:
                tell_launcher_of_lost(code)
                self._aborter.end_rank()
            self._aborter.end_job(code)

    # ------------------------------------------------------------------ exceptions

    def _on_exception(self, kind: type[BaseException], value: BaseException | None, trace: TracebackType | None) -> None:
        trace_lines = traceback.format_exception(kind, value, trace)
        if issubclass(kind, KeyboardInterrupt):
            self.end(130, "interrupted (SIGINT)", _programs_line(traceback.format_tb(trace)))
        if issubclass(kind, RankLost):  # nobody recovers, or the others do
            self.end(EXIT_CODE, "uncaught exception", trace_lines, is_own=members.is_newcomer)
        self.end(1, "uncaught exception", trace_lines, is_own=True)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit:  # threads may end with it
            return
        name = args.thread.name if args.thread else "?"
        trace = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        self.end(1, f"uncaught exception in thread '{name}'", trace, is_own=True)

    def _on_exit(self, status: SupportsIndex) -> NoReturn:
        """As `os._exit`: takes what stands for an integer, raises for anything else, and the code is its last byte."""
        status = operator.index(status)
        if not -(1 << 31) <= status < 1 << 31:
            _exit(status)  # raises OverflowError
        self.end(
            status % 256 or EXIT_CODE, f"os._exit({status}) before shardrt.finalize()", traceback.format_stack(), is_own=True
        )

    # ------------------------------------------------------------------ signals

    def _take_signals(self) -> None:
        """Handle the signals that the program does not handle.

        Hazard: Python runs a handler when the main thread returns from MPI, maybe never; the thread sees the signal at once.
        """
        if threading.current_thread() is not threading.main_thread():
            self._taken = {}
        if not self._taken:
            return
        self._wakeups[0].setblocking(False)
        before = signal.set_wakeup_fd(self._wakeups[0].fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop has set it, which handles signals itself
            signal.set_wakeup_fd(before)
            self._taken = {}
        for number in self._taken:
            signal.signal(number, self._ours[number])

    def _watch_signals(self) -> None:
        while (number := self._wakeups[1].recv(1)) != b"\0":
            handler = signal.getsignal(number[0])
            while isinstance(handler, Deferred):
                handler = handler.arrived(number[0])
            if number[0] not in self._taken or handler != self._ours[signal.Signals(number[0])]:
                continue
            where = traceback.format_stack(sys._current_frames()[threading.main_thread().ident or 0])
            if number[0] == signal.SIGTERM:
                self.end(143, "terminated (SIGTERM)", where)
            elif not self._interrupted.wait(self._timing.interrupt_s) and self._under_way() != NOTHING:
                self.end(130, "interrupted (SIGINT)", _programs_line(where))
            self._interrupted.clear()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted.set()
        raise KeyboardInterrupt

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self.end(143, "terminated (SIGTERM)", traceback.format_stack(frame))


def _programs_line(frames: list[str]) -> list[str]:
    """Of frames in words, outermost first, the program's last: whoever interrupts a job has asked for no error's traceback."""
    return [frame for frame in frames if not any(f'"{place}' in frame for place in _PACKAGES) and "-packages" not in frame][-1:]

"""The rank's side of its guard (`ending/guard/`): finds or starts it, and tells it how far the rank is."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..ending.guard.node import VARIABLE, RankPlace
from ..ending.processes import LAUNCHED, is_launched
from ..ending.report import REPORTS
from .timing import Timing


class RankGuard:
    """The guard of this process; without other ranks, or where no guard can be started, its methods do nothing.

    Cost: a start takes 1 ms of the rank, and 12 ms of a core.
    """

    def __init__(self) -> None:
        self._pid = 0  # the rank's process
        self._pipe: int | None = None

    @contextlib.contextmanager
    def starting(self, limit_s: float, patience_s: float) -> Iterator[None]:
        """The block is init(): it may take `limit_s` seconds (SHARDRT_START_TIMEOUT).

        patience_s: the same, while it waits for ranks that work (SHARDRT_PATIENCE).
        """
        self._pid = os.getpid()
        if self._pipe is None:
            self._pipe = _inherited() or _start()
        os.environ.pop(LAUNCHED, None)  # what this rank starts is no rank
        try:
            self._send(f"init {limit_s} {patience_s}")
            yield
            self._send("run")
        except Exception:
            self._send("start")
            raise

    def share_table(self, fd: int, timing: Timing, ranks: Sequence[int], rank: int) -> None:
        """Let the guard read the status table of the node of these ranks, by this process's descriptor `fd`. rank: this one."""
        # The watchdogs of other nodes are to report first.
        deadline_s = timing.timeout_s + timing.settle_nodes_s + timing.report_s
        held_s = max(deadline_s, timing.held_s)
        self._send(f"table {fd} {deadline_s} {held_s} {','.join(map(str, ranks))} {rank}")

    def end(self, code: int) -> None:
        """The rank has reported a failure, and ends the job with this exit code."""
        self._send(f"end {code}")

    def done(self) -> None:
        """The rank needs no guard any more."""
        self._send("done")
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _send(self, message: str) -> None:
        if self._pipe is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._pipe, f"{message}\n".encode())


def _inherited() -> int | None:
    """The pipe to the guard that shardrt.launch started for this process."""
    pipe, _, pid = os.environ.pop(VARIABLE, "").partition(":")
    if pid != str(os.getpid()):  # a parent has left it
        return None
    os.set_inheritable(int(pipe), False)
    return int(pipe)


def _start() -> int | None:
    """Start a guard; returns the pipe to it, or None where there can be none.

    Hazard: a frozen program is its own sys.executable, and would run a second time.
    """
    if not sys.executable or hasattr(sys, "frozen"):
        return None
    try:
        RankPlace(os.environ)
        process = os.pidfd_open(os.getpid())
    except (LookupError, ValueError, OSError, AttributeError):  # the last where Python was built for an older Linux
        return None
    reader, writer = os.pipe()
    isolated = ("-s", "-P") if os.environ.get("PYTHONHOME") else ("-I",)  # these are the flags of launch.isolated
    program = Path(__file__).parents[1] / "ending" / "guard" / "__main__.py"
    command = [sys.executable, *isolated, "-S", str(program), str(os.getpid()), str(process)]
    os.set_inheritable(process, True)
    environment = {name: value for name, value in os.environ.items() if name != REPORTS or is_launched(os.environ)}
    try:
        os.posix_spawn(sys.executable, command, environment, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
    except OSError:
        os.close(writer)
        return None
    finally:
        os.close(reader)
        os.close(process)
    return writer

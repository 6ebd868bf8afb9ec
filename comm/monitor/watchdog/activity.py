"""Whether a rank works while others wait for it: how long ago it has last used a processor, by itself or in its children."""

from __future__ import annotations

import contextlib
import os
from time import monotonic, process_time, thread_time

from ...ending.processes import Process, children

_SHARE = 0.01  # of a core: threads that only look for something use less
_WINDOW_S = 1.0


class Activity:
    """When this process has last worked. The thread that calls `tick` does not count: it is the watchdog's.

    Cost: 2 us for each call; of a process that does not work, once a second, 10 us for each thread and each child.
    """

    def __init__(self) -> None:
        self._since = monotonic()  # when `tick` has last looked
        self._own_s, self._children_s = self._own(), _of_children()
        self.idle_s = 0.0  # seconds since it has worked, in steps of a second

    def tick(self) -> None:
        """Look whether the process has worked, if it is time."""
        now = monotonic()
        elapsed = now - self._since
        if elapsed < _WINDOW_S:
            return
        self._since = now
        before, self._own_s = self._own_s, self._own()
        works = self._own_s - before >= _SHARE * elapsed
        if not works:
            before, self._children_s = self._children_s, _of_children()
            works = self._children_s - before >= _SHARE * elapsed
        self.idle_s = 0.0 if works else self.idle_s + elapsed

    @staticmethod
    def _own() -> float:
        return process_time() - thread_time()


def _of_children() -> float:
    """Seconds that all descendants have used, those that have ended included; without the guard."""
    ended = os.times()
    found = ended.children_user + ended.children_system
    pids = children("self")
    while pids:
        pid = pids.pop()
        with contextlib.suppress(OSError):  # it has ended
            process = Process(pid)
            if not process.is_guard:
                found += process.cpu_s
                pids += children(pid)
    return found

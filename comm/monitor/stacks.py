"""The stacks of a rank, also of one that is inside C code: a signal makes `faulthandler` write them to a file in memory.

Any process of the node, of the same user, may send the signal and open the file through /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading

STACKS_SIGNAL = signal.SIGRTMIN + 6


class Stacks:
    """The file of this process, until `close()`. fd: its descriptor."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("shardrt-stacks")
        # Hazard: the default of this signal ends the process, and other ranks may still send it when `close` has been called.
        # `unregister` restores the handler that `register` finds.
        if threading.current_thread() is threading.main_thread():
            # Some libraries save and restore every handler that Python knows.
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        else:
            ctypes.CDLL(None).signal(ctypes.c_int(STACKS_SIGNAL), ctypes.c_void_p(signal.SIG_IGN))
        faulthandler.register(STACKS_SIGNAL, file=self.fd, all_threads=True)

    def close(self) -> None:
        """Close the file. The signal is ignored from now on."""
        faulthandler.unregister(STACKS_SIGNAL)
        os.close(self.fd)


def request_stacks(pid: int) -> None:
    """Make a process write its stacks, which takes moments."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)


def read_stacks(pid: int, fd: int) -> list[str]:
    """The lines that a process has written. fd: of its `Stacks`."""
    try:
        with open(f"/proc/{pid}/fd/{fd}", errors="backslashreplace") as file:
            return file.read().splitlines() or ["(none: the process does not answer)"]
    except OSError as error:
        return [f"(none: {error.strerror})"]

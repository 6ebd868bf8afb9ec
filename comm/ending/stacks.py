"""The stacks of a rank, also of one that is inside C code: a signal makes `faulthandler` write them to a file in memory.

Any process of the node, of the same user, may send the signal and open the file through /proc.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from .status_table import Header

STACKS_SIGNAL = signal.SIGRTMIN + 6


class Stacks:
    """The file of this process, until `close()`. fd: its descriptor."""

    def __init__(self) -> None:
        import ctypes  # here: guards read stacks only, and are to start fast
        import faulthandler
        import threading

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
        import faulthandler

        faulthandler.unregister(STACKS_SIGNAL)
        os.close(self.fd)


def stacks_of(rows: Mapping[int, Header], wait_s: float) -> list[str]:
    """Have ranks of this node write their stacks, which takes moments; returns the lines, after `wait_s` seconds."""
    for row in rows.values():
        if row.stacks >= 0:
            with suppress(OSError):
                os.kill(row.pid, STACKS_SIGNAL)
    time.sleep(wait_s)
    return [line for rank, row in rows.items() for line in (f"stacks of rank {rank}:", *(f"  {it}" for it in _read(row)))]


def _read(row: Header) -> list[str]:
    try:
        with open(f"/proc/{row.pid}/fd/{row.stacks}", errors="backslashreplace") as file:
            return file.read().splitlines() or ["(none: the process does not answer)"]
    except OSError as error:
        return [f"(none: {error.strerror})"]

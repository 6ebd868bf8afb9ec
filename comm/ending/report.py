"""What ranks, guards and the launcher write when they end a job, and the exit code that they end it with."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from .processes import standard_error

EXIT_CODE = 17  # of a job that hangs, or in which a rank has ended early with code 0
REPORTS = "SHARDRT_REPORTS"  # the file in which shardrt.launch reads what guards report
# In the place of an exit code, where a job survives the loss of ranks: a rank has come to init(), has ended with the code that
# follows, has come to the end of its program, or has taken the place of a lost one (and its process).
BEGUN, LOST, FINISHED, JOINED = "begun", "lost:", "finished", "joined:"
PROGRESS = "SHARDRT_PROGRESS"  # the file in which a job that may be started again says how far it came
_READ_S = 3.0  # for someone to read what a rank writes to its standard output or error


def code_of_job(code: int | None) -> int:
    """The exit code of a job that ends since a rank has ended with this one. code: negative for a signal, None for unknown."""
    return EXIT_CODE if not code else code if code > 0 else 128 - code


def report(code: int | None, rank: int, lines: Sequence[str]) -> None:
    """Write lines for the user: to shardrt.launch if it is on this machine, with the job's exit code, or to standard error.

    code: None if the job goes on.
    """
    marked = _marked(rank, lines)
    if not tell_launcher(code, marked):
        with suppress(OSError):  # it is closed
            write(2, _encoded(marked))


def log(rank: int, *lines: str) -> None:
    """Write lines to standard error, in one write if they are short, so that lines of several ranks do not mix.

    Never raises, and gives up after a few seconds: standard error may be closed, or a pipe that nobody reads.
    """
    with suppress(OSError):
        fd = standard_error()
        try:
            write(fd, _encoded(_marked(rank, lines)), _READ_S)
        finally:
            if fd != 2:
                os.close(fd)


def _marked(rank: int, lines: Sequence[str]) -> list[str]:
    return [f"[{rank}] {line}" for line in (f"rank {rank}: {lines[0]}", *lines[1:])]


def tell_launcher(code: int | None, lines: Sequence[str]) -> bool:
    """Tell shardrt.launch, if it is on this machine, the job's exit code, and what to print. Whether it is."""
    return _tell([f"{'-' if code is None else code} {line}" for line in lines])


def _tell(lines: Sequence[str]) -> bool:
    try:
        fd = os.open(os.environ.get(REPORTS, ""), os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    os.write(fd, _encoded(lines))
    os.close(fd)
    return True


def tell_launcher_of_start() -> None:
    """Tell shardrt.launch that a rank of a job that survives the loss of others has come to init()."""
    _tell([f"{BEGUN} "])


def tell_launcher_of_joined() -> None:
    """Tell shardrt.launch that this process has taken the place of a lost rank."""
    _tell([f"{JOINED}{os.getpid()} "])


def tell_launcher_of_lost(code: int) -> None:
    """Tell shardrt.launch the exit code of a rank that has ended while the job goes on: that of the job, if no rank is left."""
    _tell([f"{LOST}{code} "])


def tell_launcher_of_end() -> None:
    """Tell shardrt.launch that the ranks of a job that survives the loss of others have come to the end of their programs."""
    _tell([f"{FINISHED} "])


def _encoded(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def is_read(fd: int, seconds: float) -> bool:
    """False if what has been written to the descriptor is not read for so long."""
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    return bool(ready.poll(1000 * seconds))


def flush_output() -> None:
    """Flush standard output, unless nobody reads it. Never raises: it may be closed, a full disk, or None."""
    with suppress(Exception):
        if is_read(1, _READ_S):
            sys.stdout.flush()


def write(fd: int, data: bytes, seconds: float = 1.0) -> None:
    """Write, but drop what nobody reads within some seconds. Raises: OSError.

    A pipe or a terminal is opened once more: the flag for writes that do not block belongs to the open file, which other
    processes share. What cannot be opened takes small writes, each after it has become writable.
    """
    until = time.monotonic() + seconds
    own = _open_again(fd)
    target, most = (fd, select.PIPE_BUF) if own is None else (own, len(data))
    try:
        while data and is_read(target, max(0.0, until - time.monotonic())):
            with suppress(BlockingIOError):
                data = data[os.write(target, data[:most]) :]
    finally:
        if own is not None:
            os.close(own)


def _open_again(fd: int) -> int | None:
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        return None  # a file has a position, which a second open file would not share
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None

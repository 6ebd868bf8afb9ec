"""What a guard writes when it ends a job; see `__main__.py`, which imports this file only then. The standard library only.

Ranks write their own reports by `write` as well.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from struct import Struct

from .processes import Process, standard_error

REPORTS = "SHARDRT_REPORTS"  # the file in which shardrt.launch reads them
_WRITE_S = 1.0  # for a reader of standard error
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended", "D": "in the kernel", "R": "running"}


def report(code: int | None, rank: int, lines: Sequence[str]) -> None:
    """Write lines for the user: to shardrt.launch if it is on this machine, with the job's exit code, or to standard error.

    code: None if the job goes on.
    """
    marked = [f"[{rank}] {line}" for line in (f"rank {rank}: {lines[0]}", *lines[1:])]
    if not tell_launcher(code, marked):
        with suppress(OSError):  # it is closed
            write(2, _encoded(marked), _WRITE_S)


def tell_launcher(code: int | None, lines: Sequence[str]) -> bool:
    """Tell shardrt.launch, if it is on this machine, the job's exit code, and what to print. Whether it is."""
    try:
        fd = os.open(os.environ.get(REPORTS, ""), os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    os.write(fd, _encoded([f"{'-' if code is None else code} {line}" for line in lines]))
    os.close(fd)
    return True


def _encoded(lines: Sequence[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")


def write_error(data: bytes, seconds: float) -> None:
    """As `write`, to where the user reads this process's standard error."""
    fd = standard_error()
    try:
        write(fd, data, seconds)
    finally:
        if fd != 2:
            os.close(fd)


def write(fd: int, data: bytes, seconds: float) -> None:
    """Write, but drop what nobody reads within some seconds. Raises: OSError.

    A pipe or a terminal is opened once more: the flag for writes that do not block belongs to the open file, which other
    processes share. What cannot be opened takes small writes, each after it has become writable.
    """
    until = time.monotonic() + seconds
    own = _open_again(fd)
    target, most = (fd, select.PIPE_BUF) if own is None else (own, len(data))
    ready = select.poll()
    ready.register(target, select.POLLOUT)
    try:
        while data and ready.poll(max(0.0, 1000 * (until - time.monotonic()))):
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


def name_ranks(ranks: Sequence[int]) -> str:
    """As fingerprint.name_ranks, which needs torch."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else "no rank"


def still_works(ranks: Sequence[int], patience_s: float) -> str:
    """That ranks are waited for, and how long."""
    limit = "without a limit" if patience_s == float("inf") else f"for up to {patience_s:.0f} s"
    return f"{name_ranks(ranks)}, which {'are' if len(ranks) > 1 else 'is'} at work; waiting on, {limit} (SHARDRT_PATIENCE)"


def describe_end(code: int | None) -> str:
    """How a process has ended. code: negative for a signal, None for unknown."""
    if code is None:
        return "ended"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"


def describe_process(pid: int) -> str:
    """A process and its state."""
    try:
        letter = Process(pid).state
        with open(f"/proc/{pid}/wchan") as file:
            where = file.read()
    except ProcessLookupError:
        letter, where = "X", ""
    except OSError:  # of wchan
        where = ""
    return f"pid {pid}, {_STATES.get(letter, 'asleep')}{f', in {where}' if where not in ('', '0') else ''}"


# ---------------------------------------------------------------------- the table


def last_operation(row: bytes, entries: Struct) -> str:
    """The newest operation in a rank's row, from its first entry on."""
    newest, text = 0.0, "no operation yet"
    for key, comm, ended, count, number, since, what in _entries(row, entries):
        if key and since > newest:
            state = "last" if ended == count else "in"
            newest = since
            text = f"{state} #{number} {_text(what)} on '{_text(comm)}', begun {time.time() - since:.1f} s ago"
    return text


def is_in_operation(row: bytes, entries: Struct) -> bool:
    """Whether a rank is inside an operation, by its row from the first entry on."""
    return any(key and ended != count for key, _, ended, count, *_ in _entries(row, entries))


def _entries(row: bytes, entries: Struct) -> Iterator[tuple[int, bytes, int, int, int, float, bytes]]:
    for at in range(0, len(row) - entries.size + 1, entries.size):
        yield entries.unpack_from(row, at)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="backslashreplace")


def stacks(pids: Sequence[int], files: Sequence[int], number: int, wait_s: float) -> list[list[str]]:
    """The stacks of ranks, which a signal makes them write. files: their descriptors; number: of the signal."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue
    time.sleep(wait_s)
    return [_read_stacks(pid, fd) for pid, fd in zip(pids, files, strict=True)]


def _read_stacks(pid: int, fd: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/fd/{fd}", errors="backslashreplace") as file:
            return file.read().splitlines() or ["(none: the process does not answer)"]
    except OSError as error:
        return [f"(none: {error.strerror})"]

"""How ranks, processes and their ends are called in reports."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from .processes import state_of

_LISTED = 8  # ranks, or rows of neighbours, in a message
_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended", "D": "in the kernel", "R": "running"}


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 5"; of many, "ranks 0 to 499, 502, 504 to 511", and no more than a few of these."""
    if not ranks:
        return "no rank"
    if len(ranks) <= _LISTED:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    rows = [[rank for _, rank in row] for _, row in groupby(enumerate(ranks), lambda place: place[1] - place[0])]
    shown = [f"{row[0]} to {row[-1]}" if len(row) > 1 else str(row[0]) for row in rows[:_LISTED]]
    more = sum(map(len, rows[_LISTED:]))
    return f"ranks {', '.join(shown)}{f' and {more} more' if more else ''}"


def still_works(ranks: Sequence[int], patience_s: float) -> str:
    """Says that these ranks are waited for, and how long."""
    limit = "without a limit" if patience_s == float("inf") else f"for up to {patience_s:.0f} s"
    return f"{name_ranks(ranks)}, which {'are' if len(ranks) > 1 else 'is'} at work; waiting on, {limit} (SHARDRT_PATIENCE)"


def describe_end(code: int | None) -> str:
    """Says how a process has ended. code: negative for a signal, None for unknown."""
    if code is None:
        return "ended"
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"


def describe_state(state: str, alive: str) -> str:
    """Names the state of a process, as /proc has it. alive: what to call one that waits for something."""
    return _STATES.get(state, alive)


def describe_process(pid: int) -> str:
    """Describes a process of this machine: its number and state, and where in the kernel it waits, if that can be read."""
    state, where = state_of(pid), ""
    with suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        where = file.read()
    return f"pid {pid}, {describe_state(state, 'asleep')}{f', in {where}' if where not in ('', '0') else ''}"

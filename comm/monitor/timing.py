"""Time constants of the monitor, in one place, so that a test can shorten them."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Timing:
    """All in seconds. The defaults are for real jobs, whose ranks share cores and whose networks stall."""

    timeout_s: float = 600.0  # after which an operation is overdue; SHARDRT_TIMEOUT
    poll_s: float = 0.15  # between two checks of the watchdog
    lost_s: float = 4.0  # before an operation that waits for a lost rank ends the job: the rank may be about to exit in order
    settle_s: float = 0.5  # for the other ranks of the node to raise the alarm as well, or to write their stacks
    settle_nodes_s: float = 3.0  # the same, of several nodes
    silent_s: float = 2.0  # without a heartbeat, after which a watchdog of this node is reported as silent
    silent_nodes_s: float = 6.0  # the same, of another node
    report_s: float = 5.0  # for the reporting rank to write its report
    interval_s: float = 1.0  # between two exchanges of the side channel
    connect_s: float = 10.0  # for a connection of the side channel
    flush_s: float = 0.5  # for the launcher to pass on the output before the job is aborted
    abort_s: float = 5.0  # for an abort, before the process exits by itself
    interrupt_s: float = 2.0  # for the main thread to return from MPI and handle a Ctrl-C

    @classmethod
    def from_environment(cls) -> Timing:
        """The defaults, with SHARDRT_TIMEOUT and, for tests only, SHARDRT_MONITOR_TIMING: "poll_s=0.05,lost_s=1".

        Raises: ValueError for a variable that is malformed.
        """
        values = {"timeout_s": _timeout()}
        names = {field.name for field in fields(cls)}
        text = os.environ.get("SHARDRT_MONITOR_TIMING", "")
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if name not in names:
                raise ValueError(f"SHARDRT_MONITOR_TIMING={text!r}: {name!r} is not one of {', '.join(sorted(names))}")
            values[name] = _seconds("SHARDRT_MONITOR_TIMING", value)
        return cls(**values)


def _timeout() -> float:
    return _seconds("SHARDRT_TIMEOUT", os.environ.get("SHARDRT_TIMEOUT", "600")) or float("inf")


def _seconds(variable: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise ValueError(f"{variable}={text!r}: expected seconds, or 0 for no limit")
    return seconds

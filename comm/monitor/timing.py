"""Time constants of the monitor, in one place, so that a test can shorten them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..core.settings import EnvironmentSettings, seconds


@dataclass(frozen=True, slots=True)
class Timing:
    """All but `straggler` are in seconds. The defaults are for real jobs, whose ranks share cores and whose networks stall."""

    timeout_s: float = 600.0  # after which an operation is overdue; SHARDRT_TIMEOUT
    patience_s: float = 3600.0  # the same, while it waits for ranks that work; SHARDRT_PATIENCE
    poll_s: float = 0.15  # between two checks of the watchdog
    lost_s: float = 4.0  # before an operation that waits for a lost rank ends the job: the rank may be about to exit in order
    settle_s: float = 0.5  # for the other ranks of the node to raise the alarm as well, or to write their stacks
    settle_nodes_s: float = 1.5  # the same, of several nodes
    turn_s: float = 2.0  # more for each node that may report first, and for a lower rank of the node
    silent_s: float = 2.0  # without a heartbeat, after which a watchdog of this node is reported as silent
    silent_nodes_s: float = 6.0  # the same, of another node
    held_s: float = 600.0  # without an awake watchdog on a node none of whose ranks is in an operation: C code holds the GIL
    report_s: float = 5.0  # for the reporting rank to write its report
    interval_s: float = 1.0  # between two exchanges of the side channel, without an alarm
    connect_s: float = 10.0  # for a connection of the side channel
    flush_s: float = 0.5  # for the launcher to pass on the output before the job is aborted
    abort_nccl_s: float = 1.0  # for NCCL to end the kernels that wait, before the job is aborted; within abort_s
    abort_s: float = 5.0  # for an abort, before the process exits by itself
    interrupt_s: float = 2.0  # for the main thread to return from MPI and handle a Ctrl-C
    straggler_s: float = 10.0  # between two comparisons of the ranks' progress; a window has six
    straggler: float = 0.25  # share of the time, from which a rank that the others wait for is named; 0: none

    @classmethod
    def from_settings(cls, settings: EnvironmentSettings) -> Timing:
        """The defaults, with the variables and, for tests only, SHARDRT_MONITOR_TIMING: "poll_s=0.05".

        Raises: ValueError for SHARDRT_MONITOR_TIMING that is malformed; all ranks have the same.
        """
        values = {name: getattr(settings, name) for name in ("timeout_s", "patience_s", "straggler")}
        names = {field.name for field in fields(cls)}
        for item in filter(None, settings.monitor_timing.split(",")):
            name, _, text = item.partition("=")
            value = seconds(text)
            if name not in names or value is None:
                raise ValueError(
                    f"SHARDRT_MONITOR_TIMING={settings.monitor_timing!r}: {item!r} is not NAME=SECONDS with one of the names "
                    f"{', '.join(sorted(names))}"
                )
            values[name] = value
        return cls(**values)

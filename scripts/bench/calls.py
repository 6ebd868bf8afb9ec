"""When this rank was inside collectives, for the step benchmark."""

from __future__ import annotations

from time import perf_counter

from bench.timing import Call
from shardrt.comm.core.calls import CallList, Hook


class CallTimes(Hook):
    """Notes when calls on the caller's thread begin and end, by a clock that all processes of a machine share.

    Cost: 1 us for each call.
    """

    def __init__(self) -> None:
        self._begun = 0.0  # the call that runs now
        self._ended: list[Call] = []

    def before(self, calls: CallList) -> None:
        self._begun = perf_counter()

    def after(self, calls: CallList) -> None:
        call = calls[0]
        self._ended.append((f"{call.comm.name} {call.comm.ranks} {call.number}", self._begun, perf_counter()))

    def take(self) -> list[Call]:
        """The calls since the last call of this."""
        taken, self._ended = self._ended, []
        return taken

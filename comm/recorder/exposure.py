"""Exposed communication: the time in which computation stood still for it.

| where communication runs                | what counts                                                          |
|-----------------------------------------|----------------------------------------------------------------------|
| on the caller's thread (inline streams) | all of it: collectives, and calls that block the caller              |
| in threads of the host                  | the caller's waits for them, and what it calls on its own stream     |
| on CUDA streams                         | the waits of the caller's stream, and the collectives on it          |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeGuard

import torch

from ..core.calls import CallList, Hook
from ..core.streams import INLINE, CudaStream, InlineStream, Stream, TimedWaits, is_capturing, time_waits
from ..groups.control import hooked


class Exposure(Hook):
    """Adds up exposed communication of this rank, in `timed` blocks.

    Cost: 1 us for each collective on the caller's thread, 3 us for each open communicator and block; on a GPU, 6 us for a wait.
    """

    _begun: float  # of the calls on the caller's thread that run now
    _begun_on_gpu: torch.cuda.Event
    _seconds: float  # of what has ended
    _gaps: TimedWaits  # on a GPU: the events around what may not have passed yet

    def __init__(self) -> None:
        self._seconds = 0.0
        self._gaps = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time what the caller does in the `with` block. One at a time on a GPU."""
        waited = INLINE.waited
        time_waits(self._gaps)
        try:
            with hooked(self):
                yield
        finally:
            time_waits(None)
        self._seconds += INLINE.waited - waited
        self._add_gaps()

    def take(self) -> float:
        """Seconds since the last call of this. A GPU's are complete once it has run what was enqueued."""
        self._add_gaps()
        found, self._seconds = self._seconds, 0.0
        return found

    def before(self, calls: CallList) -> None:
        stream = calls[0].stream
        if _is_callers(stream):
            self._begun_on_gpu = stream.timed_event()
        elif _is_on_callers_thread(calls):
            self._begun = perf_counter()

    def after(self, calls: CallList) -> None:
        stream = calls[0].stream
        if _is_callers(stream):
            self._gaps.append((self._begun_on_gpu, stream.timed_event()))
        elif _is_on_callers_thread(calls):
            self._seconds += perf_counter() - self._begun

    def _add_gaps(self) -> None:
        while self._gaps and self._gaps[0][1].query():
            begin, end = self._gaps.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3


def _is_callers(stream: Stream) -> TypeGuard[CudaStream]:
    """Whether it is the CUDA stream that the caller computes on, and runs now."""
    return isinstance(stream, CudaStream) and stream.name == Stream.name and not is_capturing()


def _is_on_callers_thread(calls: CallList) -> bool:
    return isinstance(calls[0].stream, InlineStream) and not calls[0].comm.is_async

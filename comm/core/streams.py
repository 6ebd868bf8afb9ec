"""Streams and events: one set of verbs for CUDA and for the host.

A stream runs what is submitted to it in order; an event marks a point in it; `stream.wait(event)` orders two streams;
only `synchronize()` blocks the caller. The runtime is written once against these verbs:

| verb            | CudaStream                        | InlineStream (host)     | ThreadedStream (host)             |
|-----------------|-----------------------------------|-------------------------|-----------------------------------|
| `submit(fn)`    | runs `fn` now, this stream current | runs `fn` now          | queues `fn` for the worker thread |
| `record()`      | a CUDA event                      | an event already past   | an event the worker will set      |
| `wait(event)`   | the GPU waits                     | the caller waits        | the worker waits                  |

An inline stream *is* the caller's thread, so it is also the host's compute stream. Ranks that share cores with their
communication gain nothing from a worker (a hand-over costs tens of microseconds), hence inline is the default on one node.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter, time

import torch

from .members import RankLost, check_lost


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def query(self) -> bool:
        """True once everything submitted before the event has run."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the caller until the event has passed. Raises RuntimeError if its stream has failed."""


class Stream(ABC):
    """An ordered queue of work on one device."""

    device: torch.device
    name: str = "compute"  # what runs on it; the caller's stream keeps this name
    overlaps: bool = True  # what runs on it runs beside the caller
    handle: int = 0  # the raw cudaStream_t for NCCL; 0 on the host, where no library takes one

    @abstractmethod
    def submit(self, fn: Callable[[], object]) -> None:
        """Run `fn` after everything submitted before it."""

    @abstractmethod
    def record(self) -> Event:
        """An event that passes once everything submitted so far has run."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Run what is submitted from now on only after `event` has passed."""

    def now(self) -> float:
        """The time in seconds since the epoch; on a simulated stream, that of its own clock."""
        return time()

    def synchronize(self) -> None:
        """Block the caller until everything submitted so far has run."""
        self.record().synchronize()

    def recover(self) -> None:
        """Block as `synchronize()`; a stream that has failed runs again what is submitted from now on."""
        self.synchronize()

    def close(self) -> None:
        """Finish what was submitted and end the thread, if there is one."""
        self.synchronize()


class _PastEvent(Event):
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


PAST = _PastEvent()


class InlineStream(Stream):
    """The caller's own thread: what is submitted has run when `submit` returns."""

    device = torch.device("cpu")
    overlaps = False
    waited: float  # seconds in which the caller stood still for events of other streams

    def __init__(self, name: str = Stream.name) -> None:
        self.name = name
        self.waited = 0.0

    def submit(self, fn: Callable[[], object]) -> None:
        fn()

    def record(self) -> Event:
        return PAST

    def wait(self, event: Event) -> None:
        if event is PAST:
            return
        start = perf_counter()
        try:
            event.synchronize()
        finally:
            self.waited += perf_counter() - start


class _WorkerEvent(Event):
    def __init__(self, stream: ThreadedStream) -> None:
        self._stream = stream
        self._passed = threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self.wait()
        self._stream.raise_failure()

    def wait(self) -> None:
        """As `synchronize`, but never raises."""
        self._passed.wait()

    def mark_passed(self) -> None:
        self._passed.set()


class ThreadedStream(Stream):
    """An ordered worker thread, for communication that progresses while the caller computes.

    The first exception of a submitted function ends the stream's work: later functions are skipped, events still pass (so
    that no caller hangs), and every `synchronize` raises a RuntimeError caused by it.
    """

    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"shardrt-{name}", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], object]) -> None:
        if not self._thread.is_alive():
            raise RuntimeError(f"stream '{self.name}' is closed: submit nothing after close()")
        self._queue.put(fn)

    def record(self) -> _WorkerEvent:
        event = _WorkerEvent(self)
        self.submit(event.mark_passed)
        return event

    def wait(self, event: Event) -> None:
        if not event.query():
            self.submit(event.synchronize)

    def recover(self) -> None:
        event = self.record()
        event.wait()
        self._failure = None

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self.raise_failure()

    def close_later(self) -> None:
        """End the thread once it has run what was submitted. Does not wait for it."""
        self._queue.put(None)

    def raise_failure(self) -> None:
        """Raise RuntimeError if a submitted function has raised; RankLost if that did."""
        if isinstance(self._failure, RankLost):
            check_lost()
        if self._failure is not None:
            raise RuntimeError(f"work on stream '{self.name}' failed: {self._failure!r}") from self._failure

    def _run(self) -> None:
        with torch.no_grad():  # grad mode is per thread, and starts enabled
            while (fn := self._queue.get()) is not None:
                is_mark = getattr(fn, "__func__", None) is _WorkerEvent.mark_passed
                if self._failure is not None and not is_mark:
                    continue
                try:
                    fn()
                except BaseException as error:
                    self._failure = error


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.cuda = event

    def query(self) -> bool:
        return self.cuda.query()

    def synchronize(self) -> None:
        self.cuda.synchronize()


class CudaStream(Stream):
    """A `torch.cuda.Stream`; `handle` is the raw pointer NCCL is given."""

    def __init__(self, stream: torch.cuda.Stream, name: str = Stream.name) -> None:
        self._stream = stream
        self.name = name
        self.device = stream.device
        self.handle = stream.cuda_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and (self.device, self.handle) == (other.device, other.handle)

    def __hash__(self) -> int:
        return hash((self.device, self.handle))

    def submit(self, fn: Callable[[], object]) -> None:
        # As torch.cuda.stream(), which asks for the current device in Python, twice. Cost: 3 us instead of 20.
        device, before = torch.cuda.current_device(), _current(self.device)
        torch.cuda.set_stream(self._stream)
        try:
            fn()
        finally:
            torch.cuda.set_stream(before._stream)
            if device != self.device.index:
                torch.cuda.set_device(device)

    def record(self) -> Event:
        return _CudaEvent(self._stream.record_event())

    def timed_event(self) -> torch.cuda.Event:
        """An event of which the time can be read once it has passed (`elapsed_time`). Cost: 2 us."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, _CudaEvent):
            event.synchronize()
        elif timed_waits is None or self.name != Stream.name or is_capturing():
            self._stream.wait_event(event.cuda)
        else:
            begin = self.timed_event()
            self._stream.wait_event(event.cuda)
            timed_waits.append((begin, self.timed_event()))


TimedWaits = deque[tuple[torch.cuda.Event, torch.cuda.Event]]

timed_waits: TimedWaits | None = None  # of callers' CUDA streams, if somebody times them; written by time_waits()
INLINE = InlineStream()
simulated: list[Stream] = []  # streams of a dry world that run now, the innermost last; written by comm/startup/dry.py
_STREAMS = 256  # of callers, that are remembered: torch has 32 of each priority on each GPU, users may bring others
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def time_waits(into: TimedWaits | None) -> None:
    """From now on, put an event before and one after each wait of a caller's CUDA stream into this list; None: into none.

    Cost: 4 us for each wait.
    """
    global timed_waits
    timed_waits = into


def observe(device: torch.device) -> None:
    """Prepare the calling thread, which does nothing else on a GPU, to query events of `device`.

    Hazard: a new thread is bound to the first GPU, and would create a context there; and while another thread captures a CUDA
    graph, its queries would invalidate the capture.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def is_capturing() -> bool:
    """True while calls are captured in a CUDA graph: nothing runs yet, and querying their events is an error."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> Stream:
    """The stream the caller computes on: torch's current CUDA stream, or on the host the caller's own thread.

    In a dry world, whose device is the meta device: the simulated stream that runs.
    """
    if device.type == "cuda":
        return _current(device)
    if simulated and device.type == "meta":
        return simulated[-1]
    return INLINE


def _current(device: torch.device) -> CudaStream:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _of_handle(index, torch._C._cuda_getCurrentRawStream(index))


@lru_cache(_STREAMS)
def _of_handle(index: int, handle: int) -> CudaStream:
    """The current stream of this GPU, which has this handle. Cost: 10 us at the first call, little at later ones."""
    return CudaStream(torch.cuda.current_stream(index))


def new_stream(device: torch.device, name: str, *, threaded: bool = False, priority: int = 0) -> Stream:
    """A stream beside the caller's: a CUDA stream, or on the host a worker thread if `threaded`, else the caller's thread.

    priority: the CUDA stream's. -1: a GPU that is busy starts its kernels before those of other streams.
    """
    if device.type == "cuda":
        return CudaStream(torch.cuda.Stream(device, priority), name)
    return ThreadedStream(name) if threaded else InlineStream(name)

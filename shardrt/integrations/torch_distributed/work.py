"""What a call of a process group returns: torch's `Work`, over what has been launched on a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from ...comm import Event, Stream, current_stream
from ...comm.streams import ThreadedStream


class Launched(Protocol):
    """A part of a work that may still run."""

    def wait(self) -> None:
        """Order the caller's stream after it; on the host, block the caller. Raises what it has failed with."""

    def is_done(self) -> bool:
        """Whether it is done. Never blocks."""

    def report(self, done: Callable[[BaseException | None], object]) -> bool:
        """Call `done` when it has come to its end, and the stream's work on its results is ordered. False: wait first."""


class LaunchedCollective:
    """Collectives on a stream, up to an event. kept: tensors that must live until then."""

    def __init__(self, stream: Stream, kept: Sequence[object], *, blocks: bool = False) -> None:
        self._stream, self._kept, self._blocks = stream, kept, blocks
        self._event: Event = stream.record()

    def wait(self) -> None:
        if self._blocks:
            self._event.synchronize()
        current_stream(self._stream.device).wait(self._event)
        self._kept = ()

    def is_done(self) -> bool:
        return self._event.query()

    def report(self, done: Callable[[BaseException | None], object]) -> bool:
        if isinstance(self._stream, ThreadedStream):
            self._stream.report(done)
        else:
            self._stream.submit(lambda: done(None))  # on CUDA, the future notes an event of the stream that is current
        return True


class ProcessGroupWork(Work):
    """The work of one call. A call without `async_op` is done, or ordered on the caller's stream, when it returns.

    result: the tensors that the call has written, as torch's futures have them.
    """

    def __init__(self, parts: Sequence[Launched], result: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.parts, self._result, self._device = list(parts), result, device
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the caller's stream after the call; on the host, block the caller. The watchdog has the time limit."""
        for part in self.parts:
            part.wait()
        return True

    def synchronize(self) -> None:
        """Order the caller's stream after the call, as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is done. Never blocks."""
        return all(part.is_done() for part in self.parts)

    def is_success(self) -> bool:
        """Whether the call is done and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the call has failed with, once it is done."""
        if self.is_completed():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call has written."""
        return self._result

    def source_rank(self) -> int:
        """Of a receive that is done: the rank that has sent, by its number in the group."""
        return int(getattr(self.parts[0], "source", -1))

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of `result`, which completes when the call does."""
        if self._future is None:
            self._future = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
            if self.is_completed() and self._device.type == "cpu":
                self._complete(self.exception())
            elif len(self.parts) != 1 or not self.parts[0].report(self._complete):
                self.wait()
                self._complete(None)
        return self._future

    def _complete(self, failure: BaseException | None) -> None:
        assert self._future is not None, "it was asked for"
        if failure is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(failure)

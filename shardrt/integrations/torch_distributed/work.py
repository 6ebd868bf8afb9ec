"""What a call of a process group returns: torch's `Work`, over what has been launched on a communicator."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, ClassVar, Protocol

import torch
from torch.distributed.distributed_c10d import Work

from ...comm import Event, Stream, current_stream

_NAP_S = 0.0002
_MOST_UNCLAIMED = 64


class LaunchedPart(Protocol):
    """A part of a work that may still run."""

    def wait(self) -> None:
        """Order the caller's stream after it; on the host, block the caller. Raises what it has failed with."""

    def is_done(self) -> bool:
        """Whether it is done. Never blocks."""


class LaunchedCollective:
    """Collectives on a stream, up to an event. kept: tensors that must live until then.   maker: the stream that made them."""

    def __init__(self, stream: Stream, kept: Sequence[object], maker: Stream, *, blocks: bool = False) -> None:
        self._stream, self._kept, self._maker, self._blocks = stream, kept, maker, blocks
        self._event: Event = stream.record()

    def wait(self) -> None:
        if self._blocks:
            self._event.synchronize()
        here = current_stream(self._stream.device)
        here.wait(self._event)
        if here == self._maker:  # only then is their memory given to others after the event
            self._kept = ()

    def is_done(self) -> bool:
        return self._event.query()


class _CallFuture(torch.futures.Future[Any]):
    """A future on which Python code waits as on its work, so that the watchdog sees whom it waits for."""

    parts: Sequence[LaunchedPart] = ()

    def wait(self) -> Any:
        with suppress(Exception):  # the future raises it as well
            for part in self.parts:
                part.wait()
        return super().wait()


class ProcessGroupWork(Work):
    """The work of one call. A call without `async_op` is done, or ordered on the caller's stream, when it returns.

    result: the tensors that the call has written, as torch's futures have them.
    """

    _unclaimed: ClassVar[deque[ProcessGroupWork]] = deque(maxlen=_MOST_UNCLAIMED)  # the newest that Python code has dropped

    def __init__(self, parts: Sequence[LaunchedPart], result: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self.parts, self._result, self._device = list(parts), result, device
        self._future: _CallFuture | None = None
        self._is_claimed = False  # whether anybody has waited for it, or has its future
        self._is_collective = all(isinstance(part, LaunchedCollective) for part in parts)

    def __del__(self) -> None:
        # Hazard: a caller in C++, such as DistributedDataParallel's reducer for `join`, keeps only torch's half of a work that
        # was returned to Python code; without this half, its wait never ends. It waits, then asks for the future.
        if not self._is_claimed and self._is_collective:
            self._unclaimed.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the caller's stream after the call; on the host, block the caller. The watchdog has the time limit."""
        self._is_claimed = True
        for part in self.parts:
            part.wait()
        return True

    def synchronize(self) -> None:
        """Order the caller's stream after the call, as `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order the caller's stream after the call, as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is done. Never blocks."""
        return all(part.is_done() for part in self.parts)

    def is_success(self) -> bool:
        """Whether the call is done and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
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
        """A future of `result`, which completes when the call does, and on CUDA is ordered after it.

        Cost: on the host, if the call is not done yet, a thread that waits for it and runs what follows it, which may make and
        wait for further calls.
        """
        if self._future is None:
            on_cuda = self._device.type == "cuda"
            self._future = _CallFuture(devices=[self._device] if on_cuda else None)
            self._future.parts = self.parts
            self._is_claimed = True
            with suppress(ValueError):
                self._unclaimed.remove(self)
            if on_cuda:
                with torch.cuda.stream(torch.cuda.Stream(self._device)):  # the caller's does not wait
                    self.wait()
                    self._complete()
            elif self.is_completed():
                self._complete()
            else:
                Thread(target=self._complete_later, name="shardrt-torch-future", daemon=True).start()
        return self._future

    def _complete_later(self) -> None:
        while not self.is_completed():  # the wait for a message is its maker's
            time.sleep(_NAP_S)
        self._complete()

    def _complete(self) -> None:
        assert self._future is not None, "it was asked for"
        if self._device.type == "cpu" and (failure := self.exception()) is not None:
            self._future.set_exception(failure)
        else:
            self._future.set_result(self._result)

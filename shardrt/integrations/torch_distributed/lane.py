"""The tensors of one device type in a process group: their communicator, the stream of asynchronous calls, and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from ...comm import Communicator, Event, Stream, current_stream, new_stream
from ...comm.backends.tagged import MessageRequest, TaggedMessages
from ...comm.core.streams import is_capturing
from .contiguous import Staging
from .work import LaunchedCollective, ProcessGroupWork

Call = Callable[[Communicator, Stream, Staging], None]
_Message = Callable[[Communicator, Stream, Staging], object]


class TensorLane:
    """The part of a process group for tensors on `comm.device`. Creating is collective over its ranks.

    A call without `async_op` runs on the caller's stream, another one on a stream of the lane's own: on the host, a thread.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        self.comm, self._name = comm, name
        self.device = comm.device
        self._side: Stream | None = None
        self._under_way: deque[LaunchedCollective] = deque()  # each keeps its tensors, even if its work is dropped

    def call(self, call: Call, result: Sequence[torch.Tensor], *, is_async: bool, blocks: bool = False) -> ProcessGroupWork:
        """Launch a call. blocks: its work's `wait` blocks the host."""
        flush_messages()
        here = current_stream(self.device)
        stream = self._side_stream() if is_async and self.comm.size > 1 else here
        if stream is not here:
            stream.wait(here.record())
        staging = Staging(stream)
        call(self.comm, stream, staging)
        launched = LaunchedCollective(stream, staging.kept, here, blocks=blocks)
        if not is_capturing() and not launched.is_done():
            self._keep(launched)
        return ProcessGroupWork([launched], list(result), self.device)

    def _side_stream(self) -> Stream:
        if self._side is None:
            self._side = new_stream(self.device, f"{self._name}.async", threaded=True)
        return self._side

    def _keep(self, launched: LaunchedCollective) -> None:
        while self._under_way and self._under_way[0].is_done():
            self._under_way.popleft()
        self._under_way.append(launched)

    def close(self) -> None:
        """End the thread and close the communicator. Collective; waits for the calls that were made."""
        if self._side is not None:
            with suppress(RuntimeError):  # a call has failed: its work raises
                self._side.close()
            self._side = None
        self.comm.close()


class HostLane(TensorLane):
    """That of CPU tensors: messages have tags, and wait neither for each other nor for collectives."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm, name)
        self._messages = TaggedMessages(comm)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> ProcessGroupWork:
        """Start to send."""
        flush_messages()
        return ProcessGroupWork([_HostMessage(self._messages.isend(tensor.contiguous(), to, tag))], [tensor], self.device)

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int) -> ProcessGroupWork:
        """Start to receive."""
        flush_messages()
        received = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        message = _HostMessage(self._messages.irecv(received, source, tag), None if received is tensor else tensor)
        return ProcessGroupWork([message], [tensor], self.device)

    def close(self) -> None:
        if not self.comm.is_closed:  # as when ranks are lost
            self._messages.close()
        super().close()


class _HostMessage:
    """A message that has been started. into: a tensor that is not contiguous, which gets what was received."""

    def __init__(self, request: MessageRequest, into: torch.Tensor | None = None) -> None:
        self._request, self._into = request, into

    @property
    def source(self) -> int:
        return self._request.source

    def wait(self) -> None:
        self._request.wait()
        if self._into is not None:
            self._into.copy_(self._request.tensor)
            self._into = None

    def is_done(self) -> bool:
        return self._request.is_done()


class DeviceLane(TensorLane):
    """That of CUDA tensors. Messages that are started one after the other are launched together, as NCCL needs it where two
    ranks send to each other: when one is waited for, or another call is made, of whatever group.

    Messages of a pair arrive in order; tags do not count, as with NCCL.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm, name)
        comm.barrier(stream=current_stream(self.device)).synchronize()  # connects the ranks: messages alone would not

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> ProcessGroupWork:
        """Send with the messages around it."""
        return self._add(tensor, lambda comm, stream, staging: comm.send(staging.inp(tensor), to, stream=stream))

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int) -> ProcessGroupWork:
        """Receive with the messages around it. Raises NotImplementedError without a rank."""
        if source is None:
            raise NotImplementedError(f"recv on {self.comm}: NCCL receives from one rank; give src")
        if not tensor.is_contiguous():
            raise ValueError(f"recv on {self.comm}: expected a contiguous tensor, found strides {tensor.stride()}")
        return self._add(tensor, lambda comm, stream, staging: comm.recv(tensor, source, stream=stream))

    def _add(self, tensor: torch.Tensor, message: _Message) -> ProcessGroupWork:
        if _open is None or _open.lane is not self:
            flush_messages()
        batch = _open or _begin(self)
        batch.messages.append((tensor, message, current_stream(self.device).record()))
        return ProcessGroupWork([batch], [tensor], self.device)


class _MessageBatch:
    """Messages that are launched together."""

    def __init__(self, lane: DeviceLane) -> None:
        self.lane = lane
        self.messages: list[tuple[torch.Tensor, _Message, Event]] = []  # each with an event of the stream that started it
        self._work: ProcessGroupWork | None = None
        self._error: Exception | None = None

    def launch(self) -> None:
        """Launch them. What they fail with, each of their works raises."""
        try:
            self._work = self.lane.call(self._together, [], is_async=True)
        except Exception as error:
            self._error = error

    def _together(self, comm: Communicator, stream: Stream, staging: Staging) -> None:
        with comm.group():
            for tensor, message, started in self.messages:
                stream.wait(started)
                staging.kept.append(tensor)
                message(comm, stream, staging)

    def _launched(self) -> ProcessGroupWork:
        if self is _open:
            flush_messages()
        if self._error is not None:
            raise self._error
        assert self._work is not None, "flushed"
        return self._work

    def wait(self) -> None:
        self._launched().wait()

    def is_done(self) -> bool:
        return self._launched().is_completed()


_open: _MessageBatch | None = None  # the messages that were started and not launched; written by the two functions below


def _begin(lane: DeviceLane) -> _MessageBatch:
    global _open
    _open = _MessageBatch(lane)
    return _open


def flush_messages() -> None:
    """Launch the messages of CUDA tensors that were started."""
    global _open
    if _open is not None:
        batch, _open = _open, None
        batch.launch()

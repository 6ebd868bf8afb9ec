"""The tensors of one device type in a process group: their communicator, the stream of asynchronous calls, and messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from ...comm import Communicator, Stream, current_stream, new_stream
from ...comm.backends.tagged import MessageRequest, TaggedMessages
from .staging import Staging
from .work import LaunchedCollective, ProcessGroupWork

Call = Callable[[Communicator, Stream, Staging], None]


class Lane:
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
        here = current_stream(self.device)
        stream = self._side_stream() if is_async and self.comm.size > 1 else here
        if stream is not here:
            stream.wait(here.record())
        staging = Staging(stream)
        call(self.comm, stream, staging)
        launched = LaunchedCollective(stream, staging.kept, blocks=blocks)
        if not launched.is_done():
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
            self._side.close()
            self._side = None
        self.comm.close()


class HostLane(Lane):
    """That of CPU tensors: messages have tags, and wait neither for each other nor for collectives."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm, name)
        self._messages = TaggedMessages(comm)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> ProcessGroupWork:
        """Start to send."""
        return ProcessGroupWork([_Message(self._messages.isend(tensor.contiguous(), to, tag))], [tensor], self.device)

    def recv(self, tensor: torch.Tensor, source: int | None, tag: int) -> ProcessGroupWork:
        """Start to receive."""
        received = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        message = _Message(self._messages.irecv(received, source, tag), None if received is tensor else tensor)
        return ProcessGroupWork([message], [tensor], self.device)

    def close(self) -> None:
        self._messages.close()
        super().close()


class _Message:
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

    def report(self, done: Callable[[BaseException | None], object]) -> bool:
        return False


class DeviceLane(Lane):
    """That of CUDA tensors. Messages that are started one after the other are launched together, when one is waited for.

    So two ranks may send to each other, and messages of a pair arrive in order; tags do not count, as with NCCL.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm, name)
        comm.barrier(stream=current_stream(self.device)).synchronize()  # connects the ranks: messages alone would not
        self._batch: _Batch | None = None

    def call(self, call: Call, result: Sequence[torch.Tensor], *, is_async: bool, blocks: bool = False) -> ProcessGroupWork:
        self.flush()
        return super().call(call, result, is_async=is_async, blocks=blocks)

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

    def flush(self) -> None:
        """Launch the messages that were started."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            batch.launch(super().call)

    def _add(self, tensor: torch.Tensor, call: Callable[[Communicator, Stream, Staging], object]) -> ProcessGroupWork:
        if self._batch is None:
            self._batch = _Batch(self.flush)
        self._batch.calls.append((tensor, call))
        return ProcessGroupWork([self._batch], [tensor], self.device)

    def close(self) -> None:
        self.flush()
        super().close()


class _Batch:
    """Messages that are launched together; `flush` launches them."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self.calls: list[tuple[torch.Tensor, Callable[[Communicator, Stream, Staging], object]]] = []
        self._flush = flush
        self._work: ProcessGroupWork | None = None

    def launch(self, launch: Callable[..., ProcessGroupWork]) -> None:
        def together(comm: Communicator, stream: Stream, staging: Staging) -> None:
            with comm.group():
                for tensor, call in self.calls:
                    staging.kept.append(tensor)
                    call(comm, stream, staging)

        self._work = launch(together, [], is_async=True)

    def _launched(self) -> ProcessGroupWork:
        if self._work is None:
            self._flush()
        assert self._work is not None, "flushed"
        return self._work

    def wait(self) -> None:
        self._launched().wait()

    def is_done(self) -> bool:
        return self._launched().is_completed()

    def report(self, done: Callable[[BaseException | None], object]) -> bool:
        return False

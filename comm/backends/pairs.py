"""Sends and receives of a communicator: messages whose tags say what they are, so that the receiver can compare.

A receiver looks at a message before it takes it: at its size, and at its dtype, in the tag. One that it does not expect it
refuses: it tells the sender, drops the message, and both raise MismatchError: the sender in this send, or, if the
message was small and has been sent already, in a later call with this receiver, when that is done.

Hazard: under Open MPI, a receive of a larger message than its buffer writes beyond the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

import torch
from mpi4py import MPI

from ..core.calls import Interrupted, MismatchError
from ..core.fingerprint import describe_call
from .messages import memory, messages
from .waiting import looks

_LEFT, _REFUSED, _FIRST_TAG = 0, 1, 2
_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
_TAGS = {dtype: _FIRST_TAG + 2 * at for at, dtype in enumerate(_DTYPES)}  # and one more for the last part of a message

Transfer = tuple[torch.Tensor, int]  # a contiguous tensor, and the other rank


class _MessagePart(NamedTuple):
    """A part of a message, before it is taken."""

    message: MPI.Message
    tag: int
    nbytes: int

    @property
    def is_last(self) -> bool:
        return bool(self.tag & 1)


class Pairs:
    """This rank's sends and receives, over `comm`, on which nothing else sends messages. name: of the communicator."""

    def __init__(self, comm: MPI.Comm, name: str) -> None:
        self._comm, self._name, self._rank = comm, name, comm.Get_rank()
        self._has_left = False
        self._starting = Lock()  # sends: none may follow the message that this rank has left
        self._left: set[int] = set()  # ranks that this one has heard of that they have left
        # Hazard: what was interrupted still reads and writes the tensors, until all ranks have rejoined.
        self._interrupted: list[tuple[list[MPI.Request], Sequence[Transfer]]] = []

    def run(self, sends: Sequence[Transfer], receives: Sequence[Transfer], meanwhile: Callable[[], None]) -> None:
        """Send and receive at once; `meanwhile` runs when the sends have been started.

        Raises: MismatchError for a message that is not of the receiver's size and dtype, when all others are done;
        Interrupted if this rank, or one that it waits for, has left.
        """
        requests: list[MPI.Request] = []
        try:
            with self._starting:
                self._raise_if_left()
                for tensor, to in sends:
                    requests += self._start_send(tensor, to)
            meanwhile()
            wrong = self._receive(receives, requests)
            self._wait(requests, [to for _, to in sends])
        except BaseException:
            self._interrupted.append((requests, [*sends, *receives]))
            raise
        wrong += [_refusal(self._next(to, _REFUSED)) for _, to in sends if self._comm.Iprobe(to, _REFUSED)]
        if wrong:
            raise wrong[0]

    def leave(self) -> None:
        """Make no more calls until `rejoin`: what runs in a thread raises Interrupted, and so do ranks that wait for this one.

        Never blocks.
        """
        with self._starting:
            if not self._has_left:
                self._has_left = True
                for peer in range(self._comm.Get_size()):
                    self._comm.Isend([b"", MPI.BYTE], peer, _LEFT)

    def rejoin(self) -> None:
        """Receive what has been sent and not received yet, and drop it. Collective: every rank has left."""
        for peer in range(self._comm.Get_size()):
            while peer not in self._left:
                part = self._next(peer)
                _drop(part)
                if part.tag == _LEFT:
                    self._left.add(peer)
        for requests, _ in self._interrupted:
            MPI.Request.Waitall(requests)
        self._interrupted.clear()
        self._left.clear()
        self._has_left = False

    def _start_send(self, tensor: torch.Tensor, to: int) -> list[MPI.Request]:
        parts = list(messages(tensor)) or [(memory(tensor), MPI.BYTE)]
        tags = [_TAGS[tensor.dtype]] * (len(parts) - 1) + [_TAGS[tensor.dtype] + 1]
        return [self._comm.Isend(part, to, tag) for part, tag in zip(parts, tags, strict=True)]

    def _receive(self, receives: Sequence[Transfer], requests: list[MPI.Request]) -> list[MismatchError]:
        """Wait for the messages, and start to receive each as it comes. Returns: what was wrong with them, and refusals."""
        wrong: list[MismatchError | None] = []
        expected = {source: [tensor for tensor, other in receives if other == source] for _, source in receives}
        waits = looks()
        while expected:
            for source in list(expected):
                self._raise_if_left(source)
                part = self._next_if_there(source)
                if part is None:
                    continue
                if part.tag == _LEFT:
                    _drop(part)
                    self._left.add(source)
                elif part.tag == _REFUSED:  # an earlier send: what is received comes after it
                    wrong.append(_refusal(part))
                else:
                    tensor = expected[source].pop(0)
                    wrong.append(self._take(part, tensor, source, requests))
                    if not expected[source]:
                        del expected[source]
            next(waits)
        return list(filter(None, wrong))

    def _take(self, part: _MessagePart, tensor: torch.Tensor, source: int, requests: list[MPI.Request]) -> MismatchError | None:
        """Start to receive the message of which this is the first part, or refuse it."""
        buffers = [buffer for buffer, _ in messages(tensor)] or [memory(tensor)]
        begun: list[MPI.Request] = []
        taken = 0
        for at, buffer in enumerate(buffers, 1):
            part = part if at == 1 else self._next(source)  # a rank that has sent one part has sent them all
            if part.tag != _TAGS[tensor.dtype] + (at == len(buffers)) or part.nbytes != len(buffer):
                MPI.Request.Waitall(begun)
                return self._refuse(part, taken, tensor, source)
            begun.append(part.message.Irecv([buffer, MPI.BYTE]))
            taken += part.nbytes
        requests += begun
        return None

    def _next(self, source: int, tag: int = MPI.ANY_TAG) -> _MessagePart:
        """Wait for the next message, or part of one, from this rank."""
        status = MPI.Status()
        return _part(self._comm.Mprobe(source, tag, status), status)

    def _next_if_there(self, source: int) -> _MessagePart | None:
        status = MPI.Status()
        message = self._comm.Improbe(source, MPI.ANY_TAG, status)
        return None if message is None else _part(message, status)

    def _raise_if_left(self, *peers: int) -> None:
        left = [self._rank] if self._has_left else [peer for peer in peers if peer in self._left]
        if left:
            raise Interrupted(self._name, left)

    def _wait(self, requests: list[MPI.Request], receivers: Sequence[int]) -> None:
        """Wait for the requests. receivers: of sends, which they may never take. What is being received comes to its end."""
        waits = looks()
        while receivers and not MPI.Request.Testall(requests):
            self._raise_if_left(*receivers)
            for peer in receivers:
                if self._comm.Iprobe(peer, _LEFT):
                    raise Interrupted(self._name, [peer])
            next(waits)
        MPI.Request.Waitall(requests)

    def _refuse(self, part: _MessagePart, taken: int, tensor: torch.Tensor, source: int) -> MismatchError:
        """Refuse a message. taken: bytes of it that were received before this part."""
        nbytes = taken + part.nbytes
        while not part.is_last:
            _drop(part)
            part = self._next(source)
            nbytes += part.nbytes
        dtype = _DTYPES[(part.tag - _FIRST_TAG) // 2]
        sent = describe_call("send", dtype, nbytes // dtype.itemsize, (self._rank,)).text
        expected = describe_call("recv", tensor.dtype, tensor.numel(), (source,)).text
        text = (
            f"a send and its recv on '{self._name}' do not match: rank {source}: {sent}; rank {self._rank}: {expected}. Both "
            "need the same number of elements and dtype"
        )
        self._comm.Send([text.encode(), MPI.BYTE], source, _REFUSED)  # first: a sender that waits looks for it when it is done
        _drop(part)
        return MismatchError(text, None)


def _part(message: MPI.Message, status: MPI.Status) -> _MessagePart:
    return _MessagePart(message, status.Get_tag(), status.Get_count(MPI.BYTE))


def _refusal(part: _MessagePart) -> MismatchError:
    text = bytearray(part.nbytes)
    part.message.Recv([text, MPI.BYTE])
    return MismatchError(text.decode(), None)


def _drop(part: _MessagePart) -> None:
    part.message.Recv([bytearray(part.nbytes), MPI.BYTE])

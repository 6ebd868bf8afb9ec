"""Sends and receives of CPU tensors that do not wait for each other, nor for collectives: told apart by tags, as MPI's are.

They are started at once, on a communicator of MPI's own. MPI moves them on while this rank is in any call of MPI's; who waits
in shared memory calls it at each look.

They take no part in `Communicator.agree`: a rank that waits for one which has left the block waits until the watchdog ends the
job.

Hazard: a receive is started before its message can be looked at. One that is larger than its tensor raises, but Open MPI may
have written beyond the tensor by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import torch
from mpi4py import MPI

from ..core.fingerprint import describe_call
from ..core.members import free
from ..groups.communicator import Communicator
from .messages import flat, memory, messages
from .mpi import MpiBackend
from .waiting import looks

_Part = tuple[MPI.Request, int | None]  # with the bytes to receive; None for a send
_never_done: list[MessageRequest] = []  # of communicators that are closed: MPI still reads and writes their tensors


class MessageRequest:
    """A send, or a receive, that has been started. The tensor stays alive until it is done."""

    def __init__(self, owner: TaggedMessages, tensor: torch.Tensor, peers: tuple[int, ...], text: str) -> None:
        self._owner, self.tensor, self.peers, self.text = owner, tensor, peers, text
        self.parts: list[_Part] = []  # those that are not done
        self.source = -1  # of a receive that is done: the rank that has sent
        self.error: RuntimeError | None = None

    def is_done(self) -> bool:
        """True once the message is received; of a send, once the tensor may be changed. Never blocks. From any thread."""
        return self._owner.test(self)

    def wait(self) -> None:
        """Block the caller until it is done. Raises: RuntimeError for a message of another size than the tensor's."""
        if not self.is_done():
            self._owner.wait(self)
        if self.error is not None:
            raise self.error


class TaggedMessages:
    """This rank's messages to and from ranks of `comm`, a communicator of CPU tensors. Creating is collective over them.

    Messages between two ranks that have the same tag arrive in the order in which they were sent.
    """

    def __init__(self, comm: Communicator) -> None:
        assert isinstance(comm.backend, MpiBackend), "of CPU tensors"
        self._comm, self._messages = comm, comm.backend.messages()
        found = self._messages.Get_attr(MPI.TAG_UB)
        self._largest_tag = found if isinstance(found, int) else 32767
        self._lock = Lock()  # a thread may look whether a request is done while another waits for it
        self._under_way: list[MessageRequest] = []  # also those whose makers have dropped them

    def isend(self, tensor: torch.Tensor, to: int, tag: int = 0) -> MessageRequest:
        """Start to send a contiguous tensor, which must not change until this is done.

        Raises: ValueError for a bad rank or tag, and for other tensors.
        """
        self._check("isend", tensor, tag, to)
        request = MessageRequest(self, tensor, (to,), _text("send", tensor, to, tag))
        return self._start(request, ((self._messages.Isend(part, to, tag), None) for part in _parts(tensor)))

    def irecv(self, tensor: torch.Tensor, source: int | None, tag: int = 0) -> MessageRequest:
        """Start to receive into a contiguous tensor from a rank; None: from any. Raises as isend.

        NotImplementedError for more than 1 GiB from any rank.
        """
        self._check("irecv", tensor, tag, *(() if source is None else (source,)))
        others = tuple(rank for rank in range(self._comm.size) if rank != self._comm.rank)
        request = MessageRequest(self, tensor, others if source is None else (source,), _text("recv", tensor, source, tag))
        at = MPI.ANY_SOURCE if source is None else source
        parts = _parts(tensor)
        if source is None and len(parts) > 1:
            raise NotImplementedError(
                f"irecv on {self._comm}: {tensor.nbytes} bytes from any rank come in {len(parts)} parts, which those of other "
                "ranks might come between; name the rank"
            )
        return self._start(request, ((self._messages.Irecv(part, at, tag), len(part[0])) for part in parts))

    def test(self, request: MessageRequest) -> bool:
        """Whether it is done."""
        with self._lock:
            return self._test(request)

    def wait(self, request: MessageRequest) -> None:
        """Block the caller until it is done, or has failed."""
        with self._comm.watched("wait_for_message", request.peers, request.text):
            waits = looks()
            while not self.test(request):
                next(waits)

    def close(self) -> None:
        """Free what MPI holds. Collective. Messages that are under way still arrive where they are received already."""
        _never_done.extend(self._under_way)
        free(self._messages)

    def _check(self, name: str, tensor: torch.Tensor, tag: int, *peers: int) -> None:
        self._comm.check_open(name)
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} on {self._comm}: expected a contiguous tensor on the CPU, found one on {tensor.device}")
        for peer in peers:
            if not 0 <= peer < self._comm.size:
                raise ValueError(f"{name} on {self._comm}: expected a rank below {self._comm.size}, found {peer}")
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"{name} on {self._comm}: expected a tag from 0 to {self._largest_tag}, found {tag}")

    def _start(self, request: MessageRequest, parts: Iterable[_Part]) -> MessageRequest:
        with self._lock:
            self._under_way = [each for each in self._under_way if not self._test(each)]
            request.parts.extend(parts)
            if not self._test(request):
                self._under_way.append(request)
        return request

    def _test(self, request: MessageRequest) -> bool:
        """Look at the parts that are not done; the lock is held."""
        while request.parts:
            status = MPI.Status()
            part, nbytes = request.parts[0]
            try:
                if not part.Test(status):
                    return False
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                self._refuse(request, "more bytes")
                break
            request.parts.pop(0)
            if nbytes is None:
                continue
            request.source = status.Get_source()
            if status.Get_count(MPI.BYTE) != nbytes:
                self._refuse(request, "fewer")
        return True

    def _refuse(self, request: MessageRequest, found: str) -> None:
        """The message is of another size: none of its further parts is received."""
        for part, _ in request.parts:
            if part != MPI.REQUEST_NULL:
                part.Cancel()
                part.Wait()
        request.parts.clear()
        request.error = RuntimeError(
            f"{request.text} on '{self._comm.name}', rank {self._comm.rank}: expected {request.tensor.nbytes} bytes, found "
            f"{found}; send and receive tensors of one shape and dtype"
        )


def _text(name: str, tensor: torch.Tensor, peer: int | None, tag: int) -> str:
    """The call in words."""
    text = describe_call(name, tensor.dtype, tensor.numel(), () if peer is None else (peer,)).text
    return f"{text} from any rank, tag {tag}" if peer is None else f"{text} tag {tag}"


def _parts(tensor: torch.Tensor) -> list[tuple[MPI.buffer, MPI.Datatype]]:
    return list(messages(flat(tensor))) or [(memory(tensor), MPI.BYTE)]

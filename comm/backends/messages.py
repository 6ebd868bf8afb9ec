"""CPU tensors as MPI messages: bytes, in pieces that every MPI can count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from mpi4py import MPI

# Hazard: not every MPI counts beyond 2**31 in one message.
_MESSAGE_NBYTES = 1 << 30


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """The bytes of a contiguous tensor."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def message(tensor: torch.Tensor) -> tuple[MPI.buffer, MPI.Datatype]:
    """A contiguous tensor as one message."""
    return memory(tensor), MPI.BYTE


def messages(tensor: torch.Tensor) -> Iterator[tuple[MPI.buffer, MPI.Datatype]]:
    """A contiguous tensor as as many messages as it takes; none for no elements."""
    for start in range(0, tensor.nbytes, _MESSAGE_NBYTES):
        size = min(_MESSAGE_NBYTES, tensor.nbytes - start)
        yield MPI.buffer.fromaddress(tensor.data_ptr() + start, size), MPI.BYTE


def start_sending(comm: MPI.Comm, tensor: torch.Tensor, to: int) -> Iterator[MPI.Request]:
    """The requests that send a tensor; they start as they are iterated over."""
    return (comm.Isend(part, to) for part in messages(tensor))


def start_receiving(comm: MPI.Comm, tensor: torch.Tensor, source: int) -> Iterator[MPI.Request]:
    """The requests that receive a tensor; they start as they are iterated over."""
    return (comm.Irecv(part, source) for part in messages(tensor))


def swap(comm: MPI.Comm, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
    """Exchange tensors with every rank of `comm` at once: `sends[p]` goes to rank p, `receives[p]` comes from it."""
    rank = comm.Get_rank()
    others = [peer for peer in range(comm.Get_size()) if peer != rank]
    requests = [request for peer in others for request in start_receiving(comm, receives[peer], peer)]
    requests += [request for peer in others for request in start_sending(comm, sends[peer], peer)]
    copy(receives[rank], sends[rank])
    MPI.Request.Waitall(requests)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension."""
    # Cost: a view is 1 us, a third of what MPI takes for a small message.
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def copy(out: torch.Tensor, inp: torch.Tensor) -> None:
    """Copy `inp` into `out`, unless they are the same memory."""
    if out.data_ptr() != inp.data_ptr():
        out.copy_(inp)

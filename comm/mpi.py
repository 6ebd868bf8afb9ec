"""CPU tensors over MPI.

MPI moves bytes, torch does the arithmetic: MPI has no bfloat16, adds float16 in float16, and leaves the order of a
reduction to the library. Here every reduction runs over the ranks in rank order, low precision in float32 and rounded once,
so that a result depends on the values and on N alone: bitwise the same on every rank, in every run, under every MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from mpi4py import MPI

from .communicator import Communicator, ReduceOp
from .streams import Stream

T = TypeVar("T")

# Cost: a reduction goes block by block, so that what came in is still in cache when it is added. 64 MB on 2 ranks: 8.6 ms,
# against 18.8 ms for one all-to-all of everything.
_BLOCK_NBYTES = 4 << 20
# Up to this size all-gather and reduce-scatter are one MPI call; larger ones go from rank to rank (all-gather of 2 MB on 2
# ranks: 0.33 ms, MPICH's own 0.87). An all-reduce up to this size is one all-gather and a local sum, not two messages.
_SMALL_NBYTES = 1 << 15

_ACCUMULATE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


class MpiCommunicator(Communicator):
    """A communicator over an `mpi4py` one, which it owns."""

    def __init__(self, comm: MPI.Comm, name: str) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), torch.device("cpu"), name)
        self._comm = comm
        # Whom to send to and whom to receive from, round by round, until every rank has met every other.
        shifts = range(1, self.size)
        self._partners = [((self.rank + shift) % self.size, (self.rank - shift) % self.size) for shift in shifts]

    def exchange(self, value: T) -> list[T]:
        self._check_open("exchange")
        return self._comm.allgather(value)

    def split(self, color: int | None, key: int, name: str) -> MpiCommunicator | None:
        self._check_open("split")
        comm = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if comm == MPI.COMM_NULL else MpiCommunicator(comm, name)

    def _close(self) -> None:
        self._comm.Free()

    def _all_gather(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor) -> None:
        stream.submit(partial(self._gather_blocks, out, inp))

    def _reduce_scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        small = inp.numel() * inp.element_size() <= _SMALL_NBYTES
        stream.submit(partial(self._reduce_scatter_small if small else self._reduce_scatter_large, out, inp, op))

    def _all_reduce(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        small = inp.numel() * inp.element_size() <= _SMALL_NBYTES
        reduce = self._all_reduce_small if small else self._all_reduce_large
        stream.submit(partial(reduce, out.view(-1), inp.view(-1), op))

    def _broadcast(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, root: int) -> None:
        def broadcast() -> None:
            if self.rank == root and out.data_ptr() != inp.data_ptr():
                out.copy_(inp.view_as(out))
            self._comm.Bcast(_bytes(out), root)

        stream.submit(broadcast)

    def _barrier(self, stream: Stream) -> None:
        stream.submit(self._comm.Barrier)

    def _gather_blocks(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        numel = inp.numel()
        in_place = inp.data_ptr() == out.data_ptr() + self.rank * numel * inp.element_size()
        if numel * inp.element_size() <= _SMALL_NBYTES:
            self._comm.Allgather(MPI.IN_PLACE if in_place else _bytes(inp), _bytes(out))
            return
        if not in_place:
            out.view(-1)[self.rank * numel : (self.rank + 1) * numel].copy_(inp.view(-1))
        for to, source in self._partners:
            incoming = _bytes(out, source * numel, (source + 1) * numel)
            self._comm.Sendrecv(_bytes(inp), to, 0, incoming, source, 0)

    def _reduce_scatter_small(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        rows = inp.new_empty((self.size, out.numel()))
        self._comm.Alltoall(_bytes(inp), _bytes(rows))
        _accumulate(rows.unbind(), op, out.view(-1))

    def _reduce_scatter_large(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        bounds = [out.numel() * rank for rank in range(self.size + 1)]
        self._reduce_blocks(out.view(-1), inp.view(-1), bounds, op)

    def _all_reduce_small(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        rows = inp.new_empty((self.size, inp.numel()))
        self._gather_blocks(rows, inp)
        _accumulate(rows.unbind(), op, out)

    def _all_reduce_large(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        """Reduce-scatter ranges of nearly equal size, then all-gather them (Rabenseifner's algorithm)."""
        width = -(-inp.numel() // self.size)
        bounds = [min(width * rank, inp.numel()) for rank in range(self.size + 1)]
        own = out[bounds[self.rank] : bounds[self.rank + 1]]
        # Hazard: in place, `own` overwrites a range of `inp` that no rank reads any more: only this rank reduces it.
        self._reduce_blocks(own, inp, bounds, op)
        counts = [(bounds[r + 1] - bounds[r]) * out.element_size() for r in range(self.size)]
        self._comm.Allgatherv(MPI.IN_PLACE, [_bytes(out)[0], counts, None, MPI.BYTE])

    def _reduce_blocks(self, out: torch.Tensor, inp: torch.Tensor, bounds: list[int], op: ReduceOp) -> None:
        """Reduce range `bounds[r] : bounds[r + 1]` of every rank's `inp` into rank r's `out`, block by block."""
        width = max(stop - start for start, stop in pairwise(bounds))
        step = max(1, min(_BLOCK_NBYTES // inp.element_size(), width))
        incoming = inp.new_empty((self.size - 1, step))
        for first in range(0, width, step):
            spans = [(min(lo + first, hi), min(lo + first + step, hi)) for lo, hi in pairwise(bounds)]
            begin, end = spans[self.rank]
            rows = list(incoming[:, : end - begin].unbind())
            rows.insert(self.rank, inp[begin:end])
            for to, source in self._partners:
                self._comm.Sendrecv(_bytes(inp, *spans[to]), to, 0, _bytes(rows[source]), source, 0)
            _accumulate(rows, op, out[first : first + end - begin])


def _bytes(tensor: torch.Tensor, begin: int = 0, end: int | None = None) -> list[object]:
    """Elements begin:end of a contiguous tensor as an MPI message of bytes, whatever its dtype."""
    itemsize = tensor.element_size()
    numel = (tensor.numel() if end is None else end) - begin
    return [MPI.buffer.fromaddress(tensor.data_ptr() + begin * itemsize, numel * itemsize), MPI.BYTE]


def _accumulate(rows: Sequence[torch.Tensor], op: ReduceOp, out: torch.Tensor) -> None:
    """Reduce equally long rows, in order, into `out` (which may be one of them)."""
    combine = _ACCUMULATE[op]
    low_precision = out.dtype in (torch.bfloat16, torch.float16)
    total = rows[0].float() if low_precision else rows[0]
    for row in rows[1:-1]:
        total = combine(total, row)
    if len(rows) > 1:
        total = combine(total, rows[-1], out=None if low_precision else out)
    if op is ReduceOp.AVG and len(rows) > 1:
        total.div_(len(rows))
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)

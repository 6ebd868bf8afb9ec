"""The axis of ranks that one tensor-parallel mesh is: its communicators, and what its boundaries send.

Tensors here are plain local ones, without autograd: `relayout.py` has the differentiable functions. The collectives of
boundaries run on the caller's stream and the communicator "tp"; those beside a matmul on a stream of their own, and "tp_side".

A dim that is split has parts by the rule of `Shard`: ceil(total / N) rows on each rank, fewer or none on the last ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import Communicator, DeviceMesh, Event, ReduceOp, Stream, current_stream, world
from ..tensor.placement import Placement, Shard
from .random import RandomRegions


@functools.lru_cache(maxsize=4096)
def parts(total: int, size: int) -> tuple[int, ...]:
    """How many of `total` rows each of `size` ranks has, by the rule of `Shard`."""
    return tuple(Shard(0).resolve(torch.Size((total,)), size).rows)


@dataclass(slots=True)
class Pending:
    """A collective on the side stream. `result()` orders the caller's stream after it.

    Invariant: `kept` lives until then, so that memory which the side stream uses is not given to others.
    """

    out: torch.Tensor
    done: Event
    kept: tuple[torch.Tensor, ...]
    unpack: Any = None

    def result(self) -> torch.Tensor:
        current_stream(self.out.device).wait(self.done)
        self.kept = ()
        return self.out if self.unpack is None else self.unpack(self.out)


class Axis:
    """One tensor-parallel mesh. Made by `axis_of`, the same for all modules on the mesh. Copies are the object itself."""

    mesh: DeviceMesh
    size: int
    rank: int
    comm: Communicator  # of boundaries, on the caller's stream
    side: Communicator  # of what runs beside a matmul
    partial: Communicator  # of gradients that are partial
    side_stream: Stream
    regions: RandomRegions
    depth: int  # of calls of parallelized modules that run now
    first: bool  # until the outermost module has run once, or a module outside of one twice

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = int(mesh.size), mesh.rank
        self.comm, self.side, self.partial = (mesh.communicator(role) for role in ("tp", "tp_side", "tp_partial"))
        self.side_stream = world().stream_for("tp")
        self.regions = RandomRegions(mesh)
        self.depth, self.first = 0, True
        self.styles = 0  # how many were applied; written by AppliedStyle
        self._outside: set[object] = set()  # what has run outside, while `first`
        self.on_outside: list[Callable[[], None]] = []  # called once, when something runs outside and makes a graph
        self._totals: dict[int, int] = {}  # the newest total of which this rank's part has this size

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self

    def enter_region(self, placement: Placement) -> None:
        """Draw random numbers from here on as activations of this placement need them."""
        if isinstance(placement, Shard):
            self.regions.enter_sharded()
        else:
            self.regions.enter_replicated()

    def outside(self, boundary: object, *, training: bool) -> None:
        """Do for a boundary's module what the outermost module would do, which does not run: another method was called.

        Cost: a look at the probabilities in all parallelized models.
        """
        self.regions.outside(training=training)
        while self.on_outside and torch.is_grad_enabled():
            self.on_outside.pop()()
        if self.first and boundary in self._outside:
            self.first = False
            self._outside.clear()
        elif self.first:
            self._outside.add(boundary)

    # ------------------------------------------------------------------ sizes

    def total(self, part: int) -> int:
        """The size of a dim of which this rank has `part` rows. Collective.

        The parts of one rank do not tell: of 7 and of 8 rows, the first of two ranks has 4.
        Cost: a comparison on the host, 5 us within a node, for each plain sharded tensor. It waits for the other ranks' hosts,
        never for a GPU. A DTensor knows its size.
        Raises ValueError on every rank for parts that are not those of `Shard`.
        """
        if self.size == 1:
            return part
        guess = self._totals.get(part, part * self.size)
        sizes = self.comm.compare(guess, lambda: part)
        if sizes is None:
            return guess
        total = sum(sizes)
        if tuple(sizes) != parts(total, self.size):
            raise ValueError(
                f"a tensor that is sharded over {self.mesh}: expected parts of {parts(total, self.size)} rows, by the rule of "
                f"Shard; found {tuple(sizes)}; split it by Shard's rule, or pass a DTensor"
            )
        self.remember(total)
        return total

    def remember(self, total: int) -> None:
        """Note the size of a dim that is split; alike on every rank."""
        self._totals[parts(total, self.size)[self.rank]] = total

    # ------------------------------------------------------------------ collectives, on the caller's stream

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks: a new tensor."""
        if self.size == 1:
            return local
        inp, stream = local.contiguous(), current_stream(local.device)
        out = torch.empty_like(inp)
        self.comm.all_reduce(out, inp, ReduceOp.SUM, stream=stream).wait(stream)
        return out

    def all_reduce_(self, local: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place. local: contiguous."""
        if self.size > 1:
            stream = current_stream(local.device)
            self.comm.all_reduce(local, local, ReduceOp.SUM, stream=stream).wait(stream)
        return local

    def gather(self, local: torch.Tensor, dim: int, total: int) -> torch.Tensor:
        """All parts of `dim`, joined. Cost: the parts are padded to the largest; a copy, unless `dim` is outermost."""
        if self.size == 1:
            return local
        stream = current_stream(local.device)
        inp, out = self._gather_buffers(local, dim, total)
        self.comm.all_gather(out, inp, stream=stream).wait(stream)
        return self._joined(out, dim, total)

    def reduce_scatter(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of `dim` of the sum over the ranks: a new tensor."""
        if self.size == 1:
            return full
        stream = current_stream(full.device)
        inp, out = self._scatter_buffers(full, dim)
        self.comm.reduce_scatter(out, inp, ReduceOp.SUM, stream=stream).wait(stream)
        return out.narrow(dim, 0, parts(full.shape[dim], self.size)[self.rank])

    def cut(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of `dim`: a new tensor, contiguous."""
        if self.size == 1:
            return full
        rows = parts(full.shape[dim], self.size)
        own = full.narrow(dim, sum(rows[: self.rank]), rows[self.rank])
        return own.clone(memory_format=torch.contiguous_format)

    # ------------------------------------------------------------------ collectives beside a matmul

    def start_all_reduce(self, local: torch.Tensor) -> Pending:
        """As `all_reduce_`, on the side stream. The caller's stream may read the result after `result()`."""
        self.side_stream.wait(current_stream(local.device).record())
        work = self.side.all_reduce(local, local, ReduceOp.SUM, stream=self.side_stream)
        return Pending(local, work.event, (local,))

    def start_gather(self, local: torch.Tensor, dim: int, total: int) -> Pending:
        """As `gather`, on the side stream."""
        inp, out = self._gather_buffers(local, dim, total)
        self.side_stream.wait(current_stream(local.device).record())
        work = self.side.all_gather(out, inp, stream=self.side_stream)
        return Pending(out, work.event, (inp, out), lambda out: self._joined(out, dim, total))

    def start_reduce_scatter(self, full: torch.Tensor, dim: int) -> Pending:
        """As `reduce_scatter`, on the side stream."""
        inp, out = self._scatter_buffers(full, dim)
        self.side_stream.wait(current_stream(full.device).record())
        work = self.side.reduce_scatter(out, inp, ReduceOp.SUM, stream=self.side_stream)
        rows = parts(full.shape[dim], self.size)[self.rank]
        return Pending(out, work.event, (inp, out), lambda out: out.narrow(dim, 0, rows))

    # ------------------------------------------------------------------ buffers

    def _gather_buffers(self, local: torch.Tensor, dim: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        inp = _padded(local, dim, -(-total // self.size)).contiguous()
        return inp, inp.new_empty((self.size, *inp.shape))

    def _joined(self, out: torch.Tensor, dim: int, total: int) -> torch.Tensor:
        """Join what a gather has received.   out: (N, ..., rows, ...), each rank's part, padded."""
        shape = out.shape[1:]
        joined = out.movedim(0, dim).reshape(*shape[:dim], self.size * shape[dim], *shape[dim + 1 :])
        return joined if joined.shape[dim] == total else joined.narrow(dim, 0, total).contiguous()

    def _scatter_buffers(self, full: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        most = -(-full.shape[dim] // self.size)
        blocks = _padded(full, dim, most * self.size).unflatten(dim, (self.size, most))
        inp = blocks.movedim(dim, 0).contiguous()
        return inp, inp.new_empty(inp.shape[1:])


def _padded(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """The tensor with zeros behind its rows of `dim`, so that it has so many; itself if it has."""
    if tensor.shape[dim] == rows:
        return tensor
    padded = tensor.new_zeros((*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]))
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def owned(made: torch.Tensor) -> torch.Tensor:
    """What an autograd Function made in its forward, as a tensor that may be written to: autograd refuses that for views."""
    return made.detach() if made._is_view() else made


@functools.cache
def axis_of(mesh: DeviceMesh) -> Axis:
    """The axis of a mesh. The first call for a mesh is collective over all ranks of the mesh that it is a part of."""
    return Axis(mesh)

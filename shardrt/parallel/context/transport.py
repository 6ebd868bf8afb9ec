"""How keys and values, and their gradients, come to the ranks of a context parallel mesh.

Legend: N ranks. A block is one rank's keys and values in one flat buffer, padded to the longest part, so that all blocks have
one size. Transfers run on a stream of their own, beside the attention to the block before; the communicator is "context".

| transport | a rank holds | forward sends | backward sends |
|---|---|---|---|
| `Rotation` | 2 blocks, in backward 4 | N - 1 blocks, to the next rank | N - 1 blocks, N of gradients |
| `Gathering` | N blocks, in backward 2 N | an all-gather | an all-gather, a reduce-scatter |
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...comm import Communicator, DeviceMesh, ReduceOp, Stream, current_stream, world
from ..axis import Pending

Step = Callable[[int, torch.Tensor], torch.Tensor]  # from a rank and its block, to this rank's term of the block's gradient


class BlockLayout(NamedTuple):
    """What a block holds: keys (B, K, longest, D), then values (B, K, longest, E)."""

    rows: int
    heads: int
    longest: int
    keys: int
    values: int

    def views(self, block: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a rank that has `length` tokens."""
        shape = (self.rows, self.heads, self.longest)
        count = self.rows * self.heads * self.longest * self.keys
        keys, values = block[:count].view(*shape, self.keys), block[count:].view(*shape, self.values)
        return keys[:, :, :length], values[:, :, :length]

    @property
    def numel(self) -> int:
        return self.rows * self.heads * self.longest * (self.keys + self.values)


class Ring:
    """The ranks of a 1-D mesh. Made by `ring_of`."""

    mesh: DeviceMesh
    size: int
    rank: int
    comm: Communicator
    side_stream: Stream

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size, self.rank = mesh, int(mesh.size), mesh.rank
        self.comm = mesh.communicator("context")
        self.side_stream = world().stream_for("context")

    def __deepcopy__(self, memo: object) -> Ring:
        return self

    def start_pass(self, block: torch.Tensor) -> Pending:
        """Send the block to the next rank, and receive that of the previous one."""
        received = torch.empty_like(block)
        stream = self._after_caller(block)
        with self.comm.group() as work:
            self.comm.send(block, (self.rank + 1) % self.size, stream=stream)
            self.comm.recv(received, (self.rank - 1) % self.size, stream=stream)
        return Pending(received, work.event, (block, received))

    def start_gather(self, block: torch.Tensor) -> Pending:
        """All ranks' blocks (N, n)."""
        out = block.new_empty((self.size, block.numel()))
        stream = self._after_caller(block)
        work = self.comm.all_gather(out, block, stream=stream)
        return Pending(out, work.event, (block, out))

    def start_reduce_scatter(self, terms: torch.Tensor) -> Pending:
        """The sum over the ranks of this rank's row of `terms` (N, n)."""
        out = torch.empty_like(terms[0])
        stream = self._after_caller(terms)
        work = self.comm.reduce_scatter(out, terms, ReduceOp.SUM, stream=stream)
        return Pending(out, work.event, (terms, out))

    def _after_caller(self, tensor: torch.Tensor) -> Stream:
        self.side_stream.wait(current_stream(tensor.device).record())
        return self.side_stream


@functools.cache
def ring_of(mesh: DeviceMesh) -> Ring:
    """The ring of a mesh. The first call for a mesh is collective over all ranks of the mesh that it is a part of."""
    return Ring(mesh)


class Transport(ABC):
    """Brings every rank's block to this rank."""

    @staticmethod
    @abstractmethod
    def blocks(ring: Ring, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each rank and its block, this rank's first. A block may be read until the next one is asked for."""

    @staticmethod
    @abstractmethod
    def gradients(ring: Ring, own: torch.Tensor, step: Step) -> torch.Tensor:
        """The sum over the ranks of what `step` makes of this rank's block."""


class Rotation(Transport):
    """Blocks go round the ring: the next one travels while the caller computes with this one (arXiv 2310.01889)."""

    @staticmethod
    def blocks(ring: Ring, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        block = own
        for turn in range(ring.size):
            coming = ring.start_pass(block) if turn < ring.size - 1 else None
            yield (ring.rank - turn) % ring.size, block
            if coming is not None:
                block = coming.result()

    @staticmethod
    def gradients(ring: Ring, own: torch.Tensor, step: Step) -> torch.Tensor:
        """A block's gradient follows it, one rank behind, and goes home from the last one."""
        coming: Pending | None = None
        for owner, block in Rotation.blocks(ring, own):
            terms = step(owner, block)
            if coming is not None:
                terms += coming.result()
            if ring.size == 1:
                return terms
            coming = ring.start_pass(terms)
        assert coming is not None, "a ring has ranks"
        return coming.result()


class Gathering(Transport):
    """All blocks at once, gathered while the caller computes with its own."""

    @staticmethod
    def blocks(ring: Ring, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        coming = ring.start_gather(own) if ring.size > 1 else None
        yield ring.rank, own
        if coming is not None:
            gathered = coming.result()
            for owner in range(ring.size):
                if owner != ring.rank:
                    yield owner, gathered[owner]

    @staticmethod
    def gradients(ring: Ring, own: torch.Tensor, step: Step) -> torch.Tensor:
        terms: torch.Tensor | None = None
        for owner, block in Gathering.blocks(ring, own):
            made = step(owner, block)
            if ring.size == 1:
                return made
            terms = made.new_empty((ring.size, made.numel())) if terms is None else terms
            terms[owner] = made
        assert terms is not None, "a ring has ranks"
        return ring.start_reduce_scatter(terms).result()

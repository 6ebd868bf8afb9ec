"""How keys and values, and their gradients, come to the ranks of a context parallel mesh.

Legend: N ranks. A block is one rank's keys and values in one flat buffer, padded to the longest part, so that all blocks have
one size. Transfers run on a stream of their own, beside the attention to the block before; the communicator is "context".

| transport | a rank holds | in backward more | forward sends | backward sends |
|---|---|---|---|---|
| `Rotation` | 2 blocks | 3 of gradients | N - 1 blocks, to the next rank | N - 1 blocks, N of gradients |
| `Gathering` | N + 1 blocks | N + 1 of gradients | an all-gather | an all-gather, a reduce-scatter |

Gradients are in float32 at least: a block of them is twice as large in bfloat16 and float16.
Invariant: nobody but the transport refers to a block once `step` has returned, so that this is all that is held.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...comm import Communicator, DeviceMesh, ReduceOp, Stream, current_stream, world
from ..boundaries.axis import Pending

Pack = Callable[[], torch.Tensor]  # makes this rank's block
Step = Callable[[int, torch.Tensor], torch.Tensor]  # from a rank and its block, to this rank's term of the block's gradient


class BlockLayout(NamedTuple):
    """What a block holds: keys (B, K, longest, D), then values (B, K, longest, E)."""

    rows: int
    heads: int
    longest: int
    keys: int
    values: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, longest: int) -> BlockLayout:
        return cls(keys.shape[0], keys.shape[1], longest, keys.shape[3], values.shape[3])

    def packed(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The block of a rank's keys and values."""
        block, length = keys.new_empty(self.numel), keys.shape[2]
        if length < self.longest:
            block.zero_()  # what is sent beyond a rank's tokens is not read, but should not be memory of others
        for target, source in zip(self.views(block, length), (keys, values), strict=True):
            target.copy_(source)
        return block

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
    def visit(ring: Ring, pack: Pack, step: Callable[[int, torch.Tensor], None]) -> None:
        """Call `step` with each rank and its block, this rank's first. It may read the block until it returns."""

    @staticmethod
    @abstractmethod
    def gradients(ring: Ring, pack: Pack, step: Step) -> torch.Tensor:
        """The sum over the ranks of what `step` makes of this rank's block."""


class Rotation(Transport):
    """Blocks go round the ring: the next one travels while `step` computes with this one (arXiv 2310.01889)."""

    @staticmethod
    def visit(ring: Ring, pack: Pack, step: Callable[[int, torch.Tensor], None]) -> None:
        block = pack()
        for turn in range(ring.size):
            coming = ring.start_pass(block) if turn < ring.size - 1 else None
            step((ring.rank - turn) % ring.size, block)
            if coming is not None:
                block = coming.result()

    @staticmethod
    def gradients(ring: Ring, pack: Pack, step: Step) -> torch.Tensor:
        """A block's gradient follows it, one rank behind, and goes home from the last one."""
        if ring.size == 1:
            return step(ring.rank, pack())
        coming: Pending | None = None

        def add(owner: int, block: torch.Tensor) -> None:
            nonlocal coming
            terms = step(owner, block)
            if coming is not None:
                terms += coming.result()
            coming = ring.start_pass(terms)

        Rotation.visit(ring, pack, add)
        assert coming is not None, "a ring has ranks"
        return coming.result()


class Gathering(Transport):
    """All blocks at once, gathered while `step` computes with this rank's own."""

    @staticmethod
    def visit(ring: Ring, pack: Pack, step: Callable[[int, torch.Tensor], None]) -> None:
        block = pack()
        coming = ring.start_gather(block) if ring.size > 1 else None
        step(ring.rank, block)
        if coming is not None:
            gathered = coming.result()
            for owner in range(ring.size):
                if owner != ring.rank:
                    step(owner, gathered[owner])

    @staticmethod
    def gradients(ring: Ring, pack: Pack, step: Step) -> torch.Tensor:
        if ring.size == 1:
            return step(ring.rank, pack())
        terms: torch.Tensor | None = None

        def keep(owner: int, block: torch.Tensor) -> None:
            nonlocal terms
            made = step(owner, block)
            terms = made.new_empty((ring.size, made.numel())) if terms is None else terms
            terms[owner] = made

        Gathering.visit(ring, pack, keep)
        assert terms is not None, "a ring has ranks"
        return ring.start_reduce_scatter(terms).result()

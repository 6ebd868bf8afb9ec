"""Random numbers that depend neither on the number of ranks nor on the placements.

Each call draws a seed on rank 0 and broadcasts it. The elements of the full tensor, in the order of a contiguous one, form
blocks of BLOCK_NUMEL. A generator with the seed `seed + b` draws block b; each rank draws the blocks that overlap its shard
and keeps the overlap:

    block        0         1         2    3
    elements  |---------|---------|---------|---|
    rank 1                  |=======|              draws blocks 1 and 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...comm import DeviceMesh, current_stream
from ...torch_internals import tree_map_only
from .placement import RaggedShard, Shard, Sharded, Spec

BLOCK_NUMEL = 2**16
_BLOCKS_AT_ONCE = 16  # that a shard along another dim than 0 is cut out of
aten = torch.ops.aten

RANDOM = {
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    aten.random_.__getattr__("from"),
    aten.uniform_.default,
}


def broadcast_seed(mesh: DeviceMesh, generator: torch.Generator | None) -> int:
    """A 63-bit seed drawn from rank 0's generator (None: torch's default), and from the others' to keep them in step.

    Collective. Cost: a broadcast of 8 bytes, and a host sync.
    """
    device = torch.device("cpu") if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=device).to(mesh.device)
    stream = current_stream(mesh.device)
    mesh.communicator("tensor").broadcast(seed, seed, 0, stream=stream).synchronize()
    return int(seed.item())


# Where the indices of what `x[indices] = value` becomes are among its arguments; up to torch 2.14 it is always the first.
_INDICES = {aten.index_put_: 1, aten.index_fill_: 2, aten.masked_fill_: 1}


def with_indices_of_rank_0(func: Any, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    """The same arguments, with rank 0's values of plain indices, which may be random and differ. Collective, for `_INDICES`.

    Cost: a broadcast of each index.
    """
    position = _INDICES.get(func.overloadpacket)
    if position is None:
        return args
    stream = current_stream(mesh.device)

    def of_rank_0(index: torch.Tensor) -> torch.Tensor:
        if type(index) is not torch.Tensor:
            return index
        sent = index.to(mesh.device, memory_format=torch.contiguous_format, copy=True)
        mesh.communicator("tensor").broadcast(sent, sent, 0, stream=stream).wait(stream)
        return sent.to(index.device)

    return (*args[:position], tree_map_only(torch.Tensor, of_rank_0, args[position]), *args[position + 1 :])


def fill(local: torch.Tensor, spec: Spec, seed: int, draw: Callable[[torch.Tensor, torch.Generator], object]) -> None:
    """Fill this rank's shard with random numbers.

    draw: fills a 1-D tensor from a generator.
    Cost: memory for this rank's shard by the outermost sharded axis, draws for it and two blocks more; where that axis shards
    another dim than 0, draws for the whole tensor. No communication.
    """
    sharded = [(axis, placement) for axis, placement in enumerate(spec.placements) if isinstance(placement, Sharded)]
    axis, outermost = sharded[0] if sharded else (0, Shard(0))
    size, rank = (spec.mesh.shape[axis], spec.mesh.coordinates[axis]) if sharded else (1, 0)
    shard, blocks = outermost.resolve(spec.shape, size), _Blocks(spec.shape.numel(), local, seed, draw)
    if shard.dim == 0:
        numels = shard.shard_numels(spec.shape)
        values = blocks.elements(numels.before(rank), numels.before(rank + 1)).view(shard.shard_shape(spec.shape, rank))
    elif isinstance(shard, RaggedShard):
        values = _columns(blocks, shard, spec.shape, rank)
    else:
        values = shard.local_shard(blocks.elements(0, spec.shape.numel()).view(spec.shape), rank)
    local.copy_(spec.local_shard(values, axis + 1).view(local.shape))


class _Blocks(NamedTuple):
    """The random elements of a tensor of `numel` elements."""

    numel: int
    like: torch.Tensor  # for dtype and device
    seed: int
    draw: Callable[[torch.Tensor, torch.Generator], object]

    def elements(self, start: int, stop: int) -> torch.Tensor:
        """Draw the elements start:stop."""
        drawn = torch.empty(stop - start, dtype=self.like.dtype, device=self.like.device)  # `like` may be a subclass
        # Hazard: torch's CPU generator uses 32 bits of its seed. Consecutive seeds never repeat a block within a tensor; hashed
        # seeds would repeat one among the blocks of a large model.
        generator = torch.Generator(drawn.device)
        for first in range(start // BLOCK_NUMEL * BLOCK_NUMEL, stop, BLOCK_NUMEL):
            block = drawn.new_empty(min(BLOCK_NUMEL, self.numel - first))
            self.draw(block, generator.manual_seed(self.seed + first // BLOCK_NUMEL))
            begin, end = max(start, first), min(stop, first + block.numel())
            drawn[begin - start : end - start] = block[begin - first : end - first]
        return drawn


def _columns(blocks: _Blocks, shard: RaggedShard, shape: torch.Size, rank: int) -> torch.Tensor:
    """A rank's shard along another dim than 0: a part of every row, so some rows are drawn at a time."""
    values = torch.empty(shard.shard_shape(shape, rank), dtype=blocks.like.dtype, device=blocks.like.device)
    if not values.numel():
        return values
    trailing = shape[shard.dim + 1 :].numel()
    begin, size, row_numel = shard.counts.before(rank) * trailing, shard.rows[rank] * trailing, shape[shard.dim :].numel()
    rows, at_once = values.view(-1, size), max(1, _BLOCKS_AT_ONCE * BLOCK_NUMEL // row_numel)
    for first in range(0, len(rows), at_once):
        part = rows[first : first + at_once]
        drawn = blocks.elements(first * row_numel, (first + len(part)) * row_numel)
        part.copy_(drawn.view(-1, row_numel).narrow(1, begin, size))
    return values

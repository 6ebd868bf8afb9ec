"""Random numbers that depend neither on the number of ranks nor on the boundaries of the shards.

Each call draws a seed on rank 0 and broadcasts it. The elements of the full tensor, in the order that has the dim of the
outermost sharded axis outermost, form blocks of BLOCK_NUMEL. A generator with the seed `seed + b` draws block b; each rank
draws the blocks that overlap its shard and keeps the overlap:

    block        0         1         2    3
    elements  |---------|---------|---------|---|
    rank 1                  |=======|              draws blocks 1 and 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm import DeviceMesh, current_stream
from .placement import Shard, Sharded, Spec, unflattened

BLOCK_NUMEL = 2**16
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


def broadcast_indices(mesh: DeviceMesh, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Rank 0's values of the plain tensors, which may be random and differ. Collective. Cost: a broadcast of each."""
    stream, made = current_stream(mesh.device), []
    for index in indices:
        if index is not None and type(index) is torch.Tensor:
            index = index.to(mesh.device, memory_format=torch.contiguous_format, copy=True)
            mesh.communicator("tensor").broadcast(index, index, 0, stream=stream).wait(stream)
        made.append(index)
    return made


def fill(local: torch.Tensor, spec: Spec, seed: int, draw: Callable[[torch.Tensor, torch.Generator], object]) -> None:
    """Fill this rank's shard with random numbers.

    draw: fills a 1-D tensor from a generator.
    Cost: memory and draws for two blocks and this rank's shard by the outermost sharded axis; no communication.
    """
    sharded = [(axis, placement) for axis, placement in enumerate(spec.placements) if isinstance(placement, Sharded)]
    axis, outermost = sharded[0] if sharded else (0, Shard(0))
    size, rank = (spec.mesh.shape[axis], spec.mesh.coordinates[axis]) if sharded else (1, 0)
    shard = outermost.resolve(spec.shape, size)
    numels, numel = shard.shard_numels(spec.shape), spec.shape.numel()
    start, stop = sum(numels[:rank]), sum(numels[: rank + 1])
    drawn = torch.empty(stop - start, dtype=local.dtype, device=local.device)  # `local` may be a subclass
    # Hazard: torch's CPU generator uses 32 bits of its seed. Consecutive seeds never repeat a block within a tensor; hashed
    # seeds would repeat one among the blocks of a large model.
    generator = torch.Generator(local.device)
    for first in range(start // BLOCK_NUMEL * BLOCK_NUMEL, stop, BLOCK_NUMEL):
        block = drawn.new_empty(min(BLOCK_NUMEL, numel - first))
        draw(block, generator.manual_seed(seed + first // BLOCK_NUMEL))
        begin, end = max(start, first), min(stop, first + block.numel())
        drawn[begin - start : end - start] = block[begin - first : end - first]
    values = unflattened(drawn, shard.shard_shape(spec.shape, rank), shard.dim)
    local.copy_(spec.local_shard(values, axis + 1).view(local.shape))

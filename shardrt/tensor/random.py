"""Random numbers that depend neither on the number of ranks nor on where a tensor is cut.

A call draws one seed; rank 0's counts. The elements of the whole tensor, read with the dim of its outermost cut outermost, form
blocks of BLOCK_NUMEL. Block b is drawn whole, from a generator seeded with seed + b, and each rank keeps its overlap:

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


def agree_on_seed(mesh: DeviceMesh, generator: torch.Generator | None) -> int:
    """A seed of 63 bits from rank 0's generator (None: torch's default one); every rank's moves on. Collective: 8 bytes."""
    device = torch.device("cpu") if generator is None else generator.device
    seed = torch.randint(2**63 - 1, (1,), generator=generator, device=device).to(mesh.device)
    stream = current_stream(mesh.device)
    mesh.communicator("tensor").broadcast(seed, seed, 0, stream=stream).synchronize()
    return int(seed.item())


def agreed(mesh: DeviceMesh, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Rank 0's of these plain tensors on every rank, since they may have been drawn. Collective: a broadcast of each."""
    stream, made = current_stream(mesh.device), []
    for index in indices:
        if index is not None and type(index) is torch.Tensor:
            index = index.to(mesh.device, memory_format=torch.contiguous_format, copy=True)
            mesh.communicator("tensor").broadcast(index, index, 0, stream=stream).wait(stream)
        made.append(index)
    return made


def fill(local: torch.Tensor, spec: Spec, seed: int, draw: Callable[[torch.Tensor, torch.Generator], object]) -> None:
    """Fill this rank's part of a tensor; `draw` fills a 1-D tensor from a generator.

    Cost: this rank's part, or what its outermost sharded axis leaves of the tensor if others cut that too, and two blocks.
    """
    sharded = [(axis, placement) for axis, placement in enumerate(spec.placements) if isinstance(placement, Sharded)]
    axis, outermost = sharded[0] if sharded else (0, Shard(0))
    size, rank = (spec.mesh.shape[axis], spec.mesh.coordinates[axis]) if sharded else (1, 0)
    cut = outermost.resolve(spec.shape, size)
    numels, numel = cut.numels_of(spec.shape), spec.shape.numel()
    start, stop = sum(numels[:rank]), sum(numels[: rank + 1])
    drawn = torch.empty(stop - start, dtype=local.dtype, device=local.device)  # `local` may be of a subclass
    # Hazard: torch's CPU generator keeps 32 bits of its seed. Seeds that follow each other never give a tensor the same
    # block twice; hashed ones would, among the blocks of a large model.
    generator = torch.Generator(local.device)
    for first in range(start // BLOCK_NUMEL * BLOCK_NUMEL, stop, BLOCK_NUMEL):
        block = drawn.new_empty(min(BLOCK_NUMEL, numel - first))
        draw(block, generator.manual_seed(seed + first // BLOCK_NUMEL))
        begin, end = max(start, first), min(stop, first + block.numel())
        drawn[begin - start : end - start] = block[begin - first : end - first]
    local.copy_(spec.local_part(unflattened(drawn, cut.part_shape(spec.shape, rank), cut.dim), axis + 1).view(local.shape))

"""Redistribution: each change of a placement is one collective.

N is the number of ranks of the mesh axis, W the bytes of the tensor that this axis distributes:

| from        | to          | by                                                        | bytes received per rank |
|-------------|-------------|-----------------------------------------------------------|-------------------------|
| sharded     | replicated  | all-gather, shards padded to the largest                  | (N - 1) * largest shard |
| sharded     | sharded     | all-to-all; a `FlatShard` along another dim: through replicated | elements new to the rank |
| partial     | replicated  | all-reduce                                                | 2 * (N - 1) / N * W     |
| partial     | sharded     | reduce-scatter, shards padded to the largest              | (N - 1) * largest shard |
| replicated  | sharded     | copy of the local shard                                   | none                    |
| replicated  | partial     | copy: rank 0's for a sum or product, else every rank's    | none                    |
| sharded     | partial     | through replicated                                        |                         |
| partial     | other op    | through replicated                                        |                         |

On several axes: first, inner axes whose shards depend on an outer axis that changes become replicated, the innermost first.
Then each changing axis takes its new placement, the outermost first. Axes that do not change are not communicated along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from ..comm import Communicator, ReduceOp, current_stream
from .placement import (
    FlatShard,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    ResolvedShard,
    Sharded,
    Spec,
    flattened,
    local_shape,
    unflattened,
)

REPLICATE = Replicate()


def redistribute(local: torch.Tensor, source: Spec, target: Sequence[Placement]) -> torch.Tensor:
    """Change the placements of a tensor from `source.placements` to `target`, on the same mesh. Collective.

    local: this rank's shard by `source`.   Returns: its shard by `target`, a new contiguous tensor on the mesh's device, or
    `local` itself if nothing changes. Cost: the table above.
    Raises ValueError, on every rank, for a `Partial` whose reduction is not defined for the dtype.
    """
    mesh, placements = source.mesh, list(source.placements)
    if source.placements != tuple(target):
        local = plain(local)
    local = local.to(mesh.device)  # offloaded shards are on the host
    for axis, placement in changes_in_order(source.placements, target):
        if placements[axis] != placement:
            old, placements[axis] = placements[axis], REPLICATE
            comm = mesh[mesh.axis_names[axis]].communicator("tensor")
            local = change_axis(comm, local_shape(mesh, placements, source.shape), local, old, placement)
            placements[axis] = placement
    return local


def plain(values: torch.Tensor) -> torch.Tensor:
    """The values as a plain tensor, for communication: a subclass may keep its data in other memory or another format."""
    if type(values) is torch.Tensor:
        return values
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)


def check_replicas(local: torch.Tensor, spec: Spec) -> None:
    """Raise ValueError, on every rank, unless replicas hold the same bits. Collective."""
    mesh, differ = spec.mesh, torch.zeros(1, device=spec.mesh.device)
    stream = current_stream(mesh.device)
    for name, placement in zip(mesh.axis_names, spec.placements, strict=True):
        if placement == REPLICATE:
            first = local.clone(memory_format=torch.contiguous_format)
            mesh[name].communicator("tensor").broadcast(first, first, 0, stream=stream).wait(stream)
            if not torch.equal(first.reshape(-1).view(torch.uint8), local.reshape(-1).view(torch.uint8)):
                differ.fill_(1)
    mesh.communicator("tensor").all_reduce(differ, differ, ReduceOp.MAX, stream=stream).wait(stream)
    if differ:
        raise ValueError(f"from_local, run_check: replicas of {spec} hold different values; pass the same values on each")


def changes_in_order(source: Sequence[Placement], target: Sequence[Placement]) -> list[tuple[int, Placement]]:
    """The changes in order: (axis, its new placement)."""
    changing: list[int] = []
    gathered_first: list[tuple[int, Placement]] = []
    for axis, (old, new) in enumerate(zip(source, target, strict=True)):
        depends = any(_depends(old, source[outer]) or _depends(old, target[outer]) for outer in changing)
        if depends:
            gathered_first.insert(0, (axis, REPLICATE))
        if depends or old != new:
            changing.append(axis)
    return [*gathered_first, *((axis, target[axis]) for axis in changing)]


def _depends(inner: Placement, outer: Placement) -> bool:
    """Whether this rank's shard along an inner axis is another one once the outer axis changes.

    Hazard: counts that each column of an outer shard has for itself depend on it whatever their dim. The answer must not depend
    on the counts, nor on whether they are of rows: ranks of other columns have others, and run the same collectives.
    """
    if isinstance(inner, (RaggedShard, FlatShard)) and isinstance(outer, Sharded):
        return True
    return _order_matters(inner, outer)


def _order_matters(a: Placement, b: Placement) -> bool:
    """Whether the shards depend on the order in which two axes shard the tensor."""
    return isinstance(a, Sharded) and isinstance(b, Sharded) and (a.dim == b.dim or FlatShard in (type(a), type(b)))


def change_axis(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Placement, new: Placement) -> torch.Tensor:
    """`redistribute` along one axis, the ranks of `comm`. shape: of what the axis distributes."""
    change = next((change for a, b, change in _CHANGES if isinstance(old, a) and isinstance(new, b)), None)
    if isinstance(old, Sharded) and isinstance(new, Sharded) and old.dim != new.dim and _order_matters(old, new):
        change = None  # a flat shard's elements are not contiguous along another dim
    if change is None:
        return change_axis(comm, shape, change_axis(comm, shape, local, old, REPLICATE), REPLICATE, new)
    return change(comm, shape, local, old, new)


def _all_gather(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Sharded, new: Replicate) -> torch.Tensor:
    shard, stream = old.resolve(shape, comm.size), current_stream(comm.device)
    numels = shard.shard_numels(shape)
    padded = local.new_empty(numels.largest)
    padded[: local.numel()] = flattened(local, shard.dim)
    rows = local.new_empty((comm.size, numels.largest))
    comm.all_gather(rows, padded, stream=stream).wait(stream)
    return unflattened(torch.cat([row[:numel] for row, numel in zip(rows, numels, strict=True)]), shape, shard.dim)


def _all_to_all(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Sharded, new: Sharded) -> torch.Tensor:
    source, target, stream = old.resolve(shape, comm.size), new.resolve(shape, comm.size), current_stream(comm.device)
    mine = target.shard_shape(shape, comm.rank)
    if source.dim == target.dim:  # the same order of elements, other boundaries
        inp, sent, blocks = flattened(local, source.dim), _overlap_numels(source, target, shape, comm.rank), []
        received = _overlap_numels(target, source, shape, comm.rank)
    else:
        shards = [target.local_shard(local, peer) for peer in range(comm.size)]
        inp, sent = torch.cat([shard.reshape(-1) for shard in shards]), [shard.numel() for shard in shards]
        blocks = [source.shard_shape(mine, peer) for peer in range(comm.size)]
        received = [block.numel() for block in blocks]
    out = local.new_empty(mine.numel())
    comm.all_to_all(out, inp.contiguous(), received, sent, stream=stream).wait(stream)
    if not blocks:
        return unflattened(out, mine, target.dim)
    return torch.cat([each.view(block) for each, block in zip(out.split(received), blocks, strict=True)], dim=source.dim)


def _overlap_numels(mine: ResolvedShard, theirs: ResolvedShard, shape: torch.Size, rank: int) -> list[int]:
    """How many elements this rank's shard by `mine` shares with each rank's shard by `theirs`; both along the same dim."""
    bounds, edges = ([0, *accumulate(shard.shard_numels(shape))] for shard in (mine, theirs))
    start, stop = bounds[rank : rank + 2]
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in pairwise(edges)]


def _all_reduce(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Partial, new: Replicate) -> torch.Tensor:
    inp, stream = local.contiguous(), current_stream(comm.device)
    out = torch.empty_like(inp)
    comm.all_reduce(out, inp, old.reduce_op, stream=stream).wait(stream)
    return out


def _reduce_scatter(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Partial, new: Sharded) -> torch.Tensor:
    shard, rank, stream = new.resolve(shape, comm.size), comm.rank, current_stream(comm.device)
    numels = shard.shard_numels(shape)
    rows = local.new_zeros((comm.size, numels.largest))
    for row, piece in zip(rows, flattened(local, shard.dim).split(tuple(numels)), strict=True):
        row[: piece.numel()] = piece
    out = local.new_empty(numels.largest)
    comm.reduce_scatter(out, rows, old.reduce_op, stream=stream).wait(stream)
    return unflattened(out[: numels[rank]], shard.shard_shape(shape, rank), shard.dim)


def _copy_local_shard(
    comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Replicate, new: Placement
) -> torch.Tensor:
    return new.resolve(shape, comm.size).local_shard(local, comm.rank).clone(memory_format=torch.contiguous_format)


_CHANGES: list[tuple[type[Placement], type[Placement], Callable[..., torch.Tensor]]] = [
    (Sharded, Replicate, _all_gather),
    (Sharded, Sharded, _all_to_all),
    (Partial, Replicate, _all_reduce),
    (Partial, Sharded, _reduce_scatter),
    (Replicate, Sharded, _copy_local_shard),
    (Replicate, Partial, _copy_local_shard),
]

"""Communication is a change of placement. On one mesh axis of N ranks, W the bytes of the tensor that the axis spreads:

| from        | to          | by                                                        | bytes received per rank |
|-------------|-------------|-----------------------------------------------------------|-------------------------|
| sharded     | replicated  | all-gather, parts padded to the largest                   | (N - 1) * largest part  |
| sharded     | sharded     | all-to-all; a `FlatShard` along another dim: by way of replicated | what was not here |
| partial     | replicated  | all-reduce                                                | 2 * (N - 1) / N * W     |
| partial     | sharded     | reduce-scatter, parts padded to the largest               | (N - 1) * largest part  |
| replicated  | sharded     | a copy of the part                                        | none                    |
| replicated  | partial     | rank 0 keeps a sum or product, all the others             | none                    |
| sharded     | partial     | by way of replicated                                      |                         |
| partial     | other op    | by way of replicated                                      |                         |

On several axes, those that cut what an outer changing axis cuts are undone first, the innermost first; then every changing
axis takes its new placement, the outermost first. Other axes keep theirs throughout: each line of ranks changes its own part.
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
    """This rank's part by `target` of the tensor of which it holds `local` by `source`; on the same mesh, and its device.

    Returns: a new contiguous tensor, or `local` itself if nothing changes. Collective. Cost: the table above.
    Raises ValueError, on every rank alike, for a `Partial` whose op the dtype has not.
    """
    mesh, placements = source.mesh, list(source.placements)
    if source.placements != tuple(target):
        local = plain(local)
    local = local.to(mesh.device)  # offloaded parts are on the host
    for axis, placement in _plan(source.placements, target):
        if placements[axis] != placement:
            old, placements[axis] = placements[axis], REPLICATE
            comm = mesh[mesh.axis_names[axis]].communicator("tensor")
            local = _change(comm, local_shape(mesh, placements, source.shape), local, old, placement)
            placements[axis] = placement
    return local


def plain(values: torch.Tensor) -> torch.Tensor:
    """The values in memory that can be sent: a subclass of Tensor may hold them elsewhere, or in another form."""
    if type(values) is torch.Tensor:
        return values
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)


def check_replicas(local: torch.Tensor, spec: Spec) -> None:
    """Raise ValueError, on every rank alike, unless replicas hold the same bits. Collective."""
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
        raise ValueError(f"from_local, run_check: replicas of {spec} hold different values; give all of them the same")


def _plan(source: Sequence[Placement], target: Sequence[Placement]) -> list[tuple[int, Placement]]:
    """Which axis takes which placement, in order."""
    changing: list[int] = []
    undone: list[tuple[int, Placement]] = []
    for axis, (old, new) in enumerate(zip(source, target, strict=True)):
        disturbed = any(_overlap(old, source[outer]) or _overlap(old, target[outer]) for outer in changing)
        if disturbed:
            undone.insert(0, (axis, REPLICATE))
        if disturbed or old != new:
            changing.append(axis)
    return [*undone, *((axis, target[axis]) for axis in changing)]


def _overlap(a: Placement, b: Placement) -> bool:
    """Whether the order matters in which two axes cut."""
    return isinstance(a, Sharded) and isinstance(b, Sharded) and (a.dim == b.dim or FlatShard in (type(a), type(b)))


def _change(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Placement, new: Placement) -> torch.Tensor:
    change = next((change for a, b, change in _CHANGES if isinstance(old, a) and isinstance(new, b)), None)
    if isinstance(old, Sharded) and isinstance(new, Sharded) and old.dim != new.dim and _overlap(old, new):
        change = None  # elements of a flat part lie scattered over another dim
    if change is None:
        return _change(comm, shape, _change(comm, shape, local, old, REPLICATE), REPLICATE, new)
    return change(comm, shape, local, old, new)


def _gather(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Sharded, new: Replicate) -> torch.Tensor:
    cut, stream = old.resolve(shape, comm.size), current_stream(comm.device)
    numels = cut.numels_of(shape)
    padded = local.new_empty(max(numels))
    padded[: local.numel()] = flattened(local, cut.dim)
    rows = local.new_empty((comm.size, max(numels)))
    comm.all_gather(rows, padded, stream=stream).wait(stream)
    return unflattened(torch.cat([row[:numel] for row, numel in zip(rows, numels, strict=True)]), shape, cut.dim)


def _exchange(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Sharded, new: Sharded) -> torch.Tensor:
    source, target, stream = old.resolve(shape, comm.size), new.resolve(shape, comm.size), current_stream(comm.device)
    mine = target.part_shape(shape, comm.rank)
    if source.dim == target.dim:  # one run of elements, cut elsewhere
        inp, sent, blocks = flattened(local, source.dim), _overlaps(source, target, shape, comm.rank), []
        received = _overlaps(target, source, shape, comm.rank)
    else:
        parts = [target.local_shard(local, peer) for peer in range(comm.size)]
        inp, sent = torch.cat([part.reshape(-1) for part in parts]), [part.numel() for part in parts]
        blocks = [source.part_shape(mine, peer) for peer in range(comm.size)]
        received = [block.numel() for block in blocks]
    out = local.new_empty(mine.numel())
    comm.all_to_all(out, inp.contiguous(), received, sent, stream=stream).wait(stream)
    if not blocks:
        return unflattened(out, mine, target.dim)
    return torch.cat([run.view(block) for run, block in zip(out.split(received), blocks, strict=True)], dim=source.dim)


def _overlaps(mine: ResolvedShard, theirs: ResolvedShard, shape: torch.Size, rank: int) -> list[int]:
    """How many elements of this rank's part by `mine` are in each rank's part by `theirs`; both along one dim."""
    bounds, edges = ([0, *accumulate(cut.numels_of(shape))] for cut in (mine, theirs))
    start, stop = bounds[rank : rank + 2]
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in pairwise(edges)]


def _all_reduce(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Partial, new: Replicate) -> torch.Tensor:
    inp, stream = local.contiguous(), current_stream(comm.device)
    out = torch.empty_like(inp)
    comm.all_reduce(out, inp, old.reduce_op, stream=stream).wait(stream)
    return out


def _reduce_scatter(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Partial, new: Sharded) -> torch.Tensor:
    cut, rank, stream = new.resolve(shape, comm.size), comm.rank, current_stream(comm.device)
    numels = cut.numels_of(shape)
    rows = local.new_zeros((comm.size, max(numels)))
    for row, piece in zip(rows, flattened(local, cut.dim).split(numels), strict=True):
        row[: piece.numel()] = piece
    out = local.new_empty(max(numels))
    comm.reduce_scatter(out, rows, old.reduce_op, stream=stream).wait(stream)
    return unflattened(out[: numels[rank]], cut.part_shape(shape, rank), cut.dim)


def _keep(comm: Communicator, shape: torch.Size, local: torch.Tensor, old: Replicate, new: Placement) -> torch.Tensor:
    return new.resolve(shape, comm.size).local_shard(local, comm.rank).clone(memory_format=torch.contiguous_format)


_CHANGES: list[tuple[type[Placement], type[Placement], Callable[..., torch.Tensor]]] = [
    (Sharded, Replicate, _gather),
    (Sharded, Sharded, _exchange),
    (Partial, Replicate, _all_reduce),
    (Partial, Sharded, _reduce_scatter),
    (Replicate, Sharded, _keep),
    (Replicate, Partial, _keep),
]

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

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from ...comm import Communicator, ReduceOp, Work, current_stream
from ...torch_internals import is_zero_tensor
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

Run = Callable[..., Any]
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
            local = Change(comm, local_shape(mesh, placements, source.shape), old, placement)(local)
            placements[axis] = placement
    return local


def plain(values: torch.Tensor) -> torch.Tensor:
    """The values as a plain tensor, for communication: a subclass may keep its data elsewhere."""
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


class Change(NamedTuple):
    """A change of placement along one axis, the ranks of `comm`: called with a shard by `old`, it returns that by `new`.

    shape: of what the axis distributes.
    """

    comm: Communicator
    shape: torch.Size
    old: Any  # placements, of the kinds that the table says
    new: Any

    def __call__(self, local: torch.Tensor, run: Run | None = None) -> Any:
        """Collective. run: makes the call of a change that is one, in the place of `and_wait`, and its result is returned."""
        if self.old == self.new:
            return local
        if is_zero_tensor(local) or local.is_conj() or local.is_neg():  # its memory has other values, or there is none
            local = local.new_empty(local.shape).copy_(local)
        return _by(*map(type, self[2:]))(self, local, run or and_wait)


def and_wait(
    call: Callable[..., Work],
    out: torch.Tensor | None,
    inp: torch.Tensor,
    *args: object,
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None,
    in_place: bool = False,
) -> torch.Tensor:
    """Make a call on the caller's stream. out: None: as `inp`; the same tensor if `in_place`.   unpack: `out` to the result."""
    stream = current_stream(inp.device)
    if out is None:
        out = inp if in_place else torch.empty_like(inp)
    call(out, inp, *args, stream=stream).wait(stream)
    return out if unpack is None else unpack(out)


def _all_gather(change: Change, local: torch.Tensor, run: Run) -> torch.Tensor:
    comm, shape, old, _ = change
    shard = old.resolve(shape, comm.size)
    counts, dim, flat = shard.counts, shard.dim, _is_flat(shard, shape)
    at = 0 if flat else dim
    inp, most = local, counts.largest
    if inp.shape[at] != most:
        inp = local.new_empty((*local.shape[:at], most, *local.shape[at + 1 :]))
        inp.narrow(at, 0, local.shape[at]).copy_(local)

    def joined(out: torch.Tensor) -> torch.Tensor:
        if counts.total == most * comm.size:
            full = out.movedim(0, at).flatten(at, at + 1)
        else:
            full = torch.cat([part.narrow(at, 0, count) for part, count in zip(out, counts, strict=True)], at)
        return unflattened(full, shape, dim) if flat else full.contiguous()

    return run(comm.all_gather, inp.new_empty((comm.size, *inp.shape)), inp.contiguous(), unpack=joined)


def _reduce_scatter(change: Change, local: torch.Tensor, run: Run) -> torch.Tensor:
    comm, shape, old, new = change
    shard = new.resolve(shape, comm.size)
    counts, dim = shard.counts, shard.dim
    if _is_flat(shard, shape):
        local, dim = flattened(local, dim), 0
    most, own = counts.largest, counts[comm.rank]
    if counts.total == most * comm.size:
        inp = local.unflatten(dim, (comm.size, most)).movedim(dim, 0).contiguous()
    else:
        inp = local.new_zeros((comm.size, *local.shape[:dim], most, *local.shape[dim + 1 :]))
        for row, piece in zip(inp, local.split(tuple(counts), dim), strict=True):
            row.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    cut = None if own == most else lambda out: out.narrow(dim, 0, own).contiguous()
    return run(comm.reduce_scatter, inp.new_empty(inp.shape[1:]), inp, old.reduce_op, unpack=cut)


def _is_flat(shard: ResolvedShard, shape: torch.Size) -> bool:
    """Whether ranks have runs of elements, as 1-D tensors, not of rows."""
    return isinstance(shard, FlatShard) or not shape


def _all_reduce(change: Change, local: torch.Tensor, run: Run) -> torch.Tensor:
    return run(change.comm.all_reduce, None, local.contiguous(), change.old.reduce_op)


def _all_to_all(change: Change, local: torch.Tensor, run: Run) -> torch.Tensor:
    comm, shape, old, new = change
    if old.dim != new.dim and _order_matters(old, new):  # a flat shard's elements are not contiguous along another dim
        return _through_replicated(change, local, run)
    source, target = old.resolve(shape, comm.size), new.resolve(shape, comm.size)
    mine = target.shard_shape(shape, comm.rank)
    if source.dim == target.dim:  # the same order of elements, other boundaries
        inp, sent, blocks = flattened(local, source.dim), _overlap_numels(source, target, shape, comm.rank), []
        received = _overlap_numels(target, source, shape, comm.rank)
    else:
        shards = [target.local_shard(local, peer) for peer in range(comm.size)]
        inp, sent = torch.cat([shard.reshape(-1) for shard in shards]), [shard.numel() for shard in shards]
        blocks = [source.shard_shape(mine, peer) for peer in range(comm.size)]
        received = [block.numel() for block in blocks]

    def joined(out: torch.Tensor) -> torch.Tensor:
        if not blocks:
            return unflattened(out, mine, target.dim)
        return torch.cat([each.view(block) for each, block in zip(out.split(received), blocks, strict=True)], dim=source.dim)

    return run(comm.all_to_all, local.new_empty(mine.numel()), inp.contiguous(), received, sent, unpack=joined)


def _overlap_numels(mine: ResolvedShard, theirs: ResolvedShard, shape: torch.Size, rank: int) -> list[int]:
    """How many elements this rank's shard by `mine` shares with each rank's shard by `theirs`; both along the same dim."""
    bounds, edges = ([0, *accumulate(shard.shard_numels(shape))] for shard in (mine, theirs))
    start, stop = bounds[rank : rank + 2]
    return [max(0, min(stop, end) - max(start, begin)) for begin, end in pairwise(edges)]


def _copy_local_shard(change: Change, local: torch.Tensor, run: Run) -> torch.Tensor:
    comm, shape, _, new = change
    return new.resolve(shape, comm.size).local_shard(local, comm.rank).clone(memory_format=torch.contiguous_format)


def _through_replicated(change: Change, local: torch.Tensor, run: Run) -> torch.Tensor:
    return _copy_local_shard(change, change._replace(new=REPLICATE)(local), run)


@functools.cache
def _by(old: type[Placement], new: type[Placement]) -> Callable[[Change, torch.Tensor, Run], torch.Tensor]:
    return next(change for a, b, change in _CHANGES if issubclass(old, a) and issubclass(new, b))


_CHANGES: list[tuple[type[Placement], type[Placement], Callable[[Change, torch.Tensor, Run], torch.Tensor]]] = [
    (Sharded, Replicate, _all_gather),
    (Sharded, Sharded, _all_to_all),
    (Partial, Replicate, _all_reduce),
    (Partial, Sharded, _reduce_scatter),
    (Replicate, Placement, _copy_local_shard),
    (Placement, Partial, _through_replicated),
]

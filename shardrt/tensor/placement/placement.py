"""Placements: how a tensor is distributed over a mesh, one placement for each mesh axis. Outer axes shard first.

A tensor of 5 rows as (Shard(0), Shard(0)) on a mesh of 2 x 2:

    axis 0   rows 0 1 2          rows 3 4
    axis 1   rows 0 1 | row 2    row 3 | row 4

Users pass `Shard`; the layout planner resolves it to a `RaggedShard` or a `FlatShard`: contiguous runs of the tensor's elements
in rank order, of any length, possibly 0. The local shard of a 0-dim tensor is 1-D, with one element or none.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import NamedTuple, cast

import torch

from ...comm import DeviceMesh, ReduceOp
from .rank_counts import RankCounts


class Placement:
    """How a tensor is distributed along one mesh axis."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the axis splits the tensor, along `dim` if one is given: by rows, or in a `FlatShard` by elements."""
        return isinstance(self, Sharded) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether every rank of the axis has all of the tensor."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: ReduceOp | str | None = None) -> bool:
        """Whether the ranks of the axis have terms of a reduction; of this one, if one is given."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op, self.reduce_op.value)

    def resolve(self, shape: torch.Size, size: int) -> Placement:
        """The placement with explicit counts for a tensor of `shape` on `size` ranks. Raises ValueError if it does not fit."""
        return self

    def shard_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        """The shape of a rank's shard of a tensor of `shape`."""
        return shape

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's shard of the full tensor: a view if possible."""
        return full


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank holds the full tensor, with the same values."""


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """The tensor is the reduction of the ranks' local tensors, each of the global shape.

    reduce_op: a `ReduceOp` or its name: "sum", "avg", "min", "max" or "product". Raises ValueError for any other.
    A full tensor becomes a partial sum (product) as its values on rank 0 and zeros (ones) elsewhere, which is exact in every
    dtype; for "avg", "min" and "max" every rank keeps the values.
    """

    reduce_op: ReduceOp = ReduceOp.SUM

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduce_op", ReduceOp(self.reduce_op))

    @property
    def linear(self) -> bool:
        """Whether the reduction of a sum is the sum of the reductions."""
        return self.reduce_op in (ReduceOp.SUM, ReduceOp.AVG)

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        if rank == 0 or self.reduce_op not in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return full
        return torch.full_like(full, self.reduce_op is ReduceOp.PRODUCT)


@dataclass(frozen=True, slots=True)
class Sharded(Placement, ABC):
    """Split along `dim` in rank order: each element is on exactly one rank of the axis."""

    dim: int

    @abstractmethod
    def resolve(self, shape: torch.Size, size: int) -> ResolvedShard: ...


@dataclass(frozen=True, slots=True)
class Shard(Sharded):
    """Split along `dim` into chunks of ceil(rows / N) rows on N ranks, the last ones shorter or empty, as in torch.

    dim: may be negative where a shape is given too. A row is one slice along `dim`.
    In `shard_placement_fn` of `fully_shard`, the layout planner chooses the number of rows of each rank.
    """

    dim: int = 0

    def resolve(self, shape: torch.Size, size: int) -> RaggedShard:
        return _by_rule(self.dim, shape[self.dim] if shape else 1, size)


@dataclass(frozen=True, slots=True)
class RaggedShard(Shard):
    """Rank r holds `rows[r]` consecutive rows (slices along `dim`), possibly 0.

    rows: one count for each rank of the mesh axis, which add up to the size of `dim`. Kept as `RankCounts`: a sequence, equal
    to a tuple of the same counts; `tuple(placement.rows)` makes one.
    """

    dim: int  # without a default: `rows` count slices along one dim
    rows: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", RankCounts.of(self.rows))

    @property
    def counts(self) -> RankCounts:
        """The explicit counts: `rows`."""
        return cast(RankCounts, self.rows)

    def resolve(self, shape: torch.Size, size: int) -> RaggedShard:
        _check_counts(self, shape[self.dim] if shape else 1, shape, size)
        return self

    def shard_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.rows[rank], *shape[self.dim + 1 :]))

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        return (full if full.dim() else full.reshape(1)).narrow(self.dim, self.counts.before(rank), self.rows[rank])

    def shard_numels(self, shape: torch.Size) -> RankCounts:
        """How many elements of a tensor of `shape` each rank holds."""
        return self.counts.times(shape.numel() // max(1, shape[self.dim]) if shape else 1)


@dataclass(frozen=True, slots=True)
class FlatShard(Sharded):
    """Rank r holds `numels[r]` consecutive elements of the tensor, in the order that has `dim` outermost, as a 1-D tensor.

    numels: one count for each rank of the mesh axis, which add up to the number of elements. Kept as `rows` of `RaggedShard`.
    """

    numels: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numels", RankCounts.of(self.numels))

    @property
    def counts(self) -> RankCounts:
        """The explicit counts: `numels`."""
        return cast(RankCounts, self.numels)

    def resolve(self, shape: torch.Size, size: int) -> FlatShard:
        _check_counts(self, shape.numel(), shape, size)
        return self

    def shard_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        return torch.Size((self.numels[rank],))

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        return flattened(full, self.dim).narrow(0, self.counts.before(rank), self.numels[rank])

    def shard_numels(self, shape: torch.Size) -> RankCounts:
        """How many elements of a tensor of `shape` each rank holds."""
        return self.counts


@functools.lru_cache(maxsize=4096)
def _by_rule(dim: int, rows: int, size: int) -> RaggedShard:
    """What `Shard(dim)` says of so many rows on so many ranks."""
    most = -(-rows // size)
    full, rest = divmod(rows, most) if most else (0, 0)
    ranks = min(1, rest)  # one rank at most has fewer rows than the others, but some
    return RaggedShard(dim, RankCounts(((most, full), (rest, ranks), (0, size - full - ranks))))


ResolvedShard = RaggedShard | FlatShard  # with explicit counts for every rank


class Box(NamedTuple):
    """A rectangle of a tensor: one offset and one size for each of its dims."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """The mesh, placements and global shape of a tensor. The constructor does not check that they fit; `Spec.of` does.

    Explicit counts on an axis inside of a sharded one are those of this rank's column, the ranks with the same coordinates on
    the outer axes: other columns may be cut elsewhere.

    partial: whether a placement is `Partial`.
    shard_mesh: the submesh of the axes that shard the tensor; None if no axis does.
    gathers: whether operations that need other ranks' elements gather them; activations are never gathered unasked.
    stride: what `DTensor.stride()` says, that of a dense tensor of the global shape; None: that of a contiguous one. It says
        nothing of the local shard's memory.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # one for each mesh axis
    shape: torch.Size  # the global shape
    gathers: bool = field(default=True, repr=False, compare=False, kw_only=True)
    stride: tuple[int, ...] | None = field(default=None, repr=False, compare=False, kw_only=True)
    partial: bool = field(init=False, repr=False, compare=False)
    shard_mesh: DeviceMesh | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        mesh, axes = self.mesh, zip(self.mesh.axis_names, self.placements, strict=True)
        names = tuple(name for name, placement in axes if isinstance(placement, Sharded))
        shard_mesh = mesh if len(names) == len(self.placements) else mesh[names] if names else None
        object.__setattr__(self, "partial", any(isinstance(placement, Partial) for placement in self.placements))
        object.__setattr__(self, "shard_mesh", shard_mesh)

    @classmethod
    def of(cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Spec:
        """The spec of these placements; negative dims count from the end.

        Raises ValueError for placements that do not fit the mesh or the shape, and TypeError for what is not a `Placement`:
        on every rank, but for explicit counts inside of a sharded axis, which each rank checks for its own column.
        """
        global_shape, checked = torch.Size(shape), []
        local = global_shape
        if len(placements) != len(mesh.shape):
            raise ValueError(f"placements {placements} on {mesh}: expected one for each of its {len(mesh.shape)} axes")
        for placement, size, rank in zip(placements, mesh.shape, mesh.coordinates, strict=True):
            if not isinstance(placement, Placement):
                raise TypeError(f"placements {placements} on {mesh}: {placement!r} is not a Placement")
            if isinstance(placement, Sharded):
                placement = _with_nonnegative_dim(placement, len(local), global_shape)
            local = placement.resolve(local, size).shard_shape(local, rank)
            checked.append(placement)
        ops = [placement for placement in checked if isinstance(placement, Partial)]
        if len(set(ops)) > 1 and not all(op.linear for op in ops):
            raise ValueError(f"placements {placements}: the order of several kinds of reductions matters; expected one kind")
        return cls(mesh, tuple(checked), global_shape)

    def moved(self, placements: Sequence[Placement]) -> Spec:
        """The spec of the same tensor with other placements, which are checked as those of `of`."""
        spec = Spec.of(self.mesh, placements, self.shape)
        return replace(spec, gathers=self.gathers, stride=self.stride)

    def of_gradient(self) -> Spec:
        """The spec of the tensor's gradient: `Replicate` in the place of `Partial`."""
        if not self.partial:
            return self
        return replace(self, placements=tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements))

    def __deepcopy__(self, memo: object) -> Spec:
        """The spec itself: it does not change, and operations compare specs by identity first."""
        return self

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """`Replicate` on every mesh axis."""
        return (Replicate(),) * len(self.placements)

    def local_shard(self, full: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """This rank's shard of `full`: a view if possible.

        axis: the first mesh axis to shard; `full` is then the shard by the axes before it.
        """
        axes = zip(self.placements, self.mesh.shape, self.mesh.coordinates, strict=True)
        for placement, size, rank in islice(axes, axis, None):
            full = placement.resolve(full.shape, size).local_shard(full, rank)
        return full

    def boxes(self) -> tuple[Box, ...]:
        """Where this rank's shard lies in the global tensor: boxes in the order of its elements. None if it has no elements.

        One box, but for a `FlatShard`: 2 * dims - 1 boxes at most. A `Partial` or replicated tensor lies everywhere.
        """
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        shape, run = self.shape, None  # the elements start:stop of the box so far, in the order that has `dim` outermost
        for placement, size, rank in zip(self.placements, self.mesh.shape, self.mesh.coordinates, strict=True):
            if isinstance(placement, Sharded):
                shard = placement.resolve(shape, size)
                if isinstance(shard, RaggedShard) and sizes and run is None:
                    offsets[shard.dim] += shard.counts.before(rank)
                    sizes[shard.dim] = shard.rows[rank]
                else:
                    counts, (dim, start) = shard.shard_numels(shape), (run or (shard.dim, 0))[:2]
                    start += counts.before(rank)
                    run = (dim, start, start + counts[rank])
                shape = shard.shard_shape(shape, rank)
        if not shape.numel():
            return ()
        return (Box(tuple(offsets), tuple(sizes)),) if run is None else _boxes_of_run(offsets, sizes, *run)


def _boxes_of_run(offsets: Sequence[int], sizes: Sequence[int], dim: int, start: int, stop: int) -> tuple[Box, ...]:
    """Elements start:stop of a box, in the order that has `dim` outermost, as boxes of the tensor."""
    order = [dim, *(axis for axis in range(len(sizes)) if axis != dim)] if sizes else []
    places = [order.index(axis) for axis in range(len(sizes))]
    return tuple(
        Box(
            tuple(offset + found.offsets[place] for offset, place in zip(offsets, places, strict=True)),
            tuple(found.sizes[place] for place in places),
        )
        for found in _boxes(start, stop, [sizes[axis] for axis in order])
    )


def _boxes(start: int, stop: int, sizes: Sequence[int]) -> list[Box]:
    """Elements start:stop of a contiguous tensor as boxes: a part of a row, whole rows, a part of a row."""
    if start >= stop:
        return []
    if not sizes:
        return [Box((), ())]
    row_numel = prod(sizes[1:])
    first, last = -(-start // row_numel), stop // row_numel  # whole rows
    if first > last:  # inside of a row
        return _row(start, stop, sizes)
    whole = [Box((first, *[0] * len(sizes[1:])), (last - first, *sizes[1:]))] if first < last else []
    return [*_row(start, first * row_numel, sizes), *whole, *_row(last * row_numel, stop, sizes)]


def _row(start: int, stop: int, sizes: Sequence[int]) -> list[Box]:
    """`_boxes` of elements of one row."""
    row, column = divmod(start, prod(sizes[1:]))
    boxes = _boxes(column, column + stop - start, sizes[1:])
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def local_shape(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> torch.Size:
    """The shape of this rank's local shard of a tensor of `shape`."""
    for placement, size, rank in zip(placements, mesh.shape, mesh.coordinates, strict=True):
        shape = placement.resolve(shape, size).shard_shape(shape, rank)
    return shape


def flattened(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The elements as a 1-D tensor in the order that has `dim` outermost: a view if possible. A 1-D tensor is unchanged."""
    return (tensor.movedim(dim, 0) if tensor.dim() > 1 else tensor).reshape(-1)


def unflattened(elements: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """The inverse of `flattened`: a contiguous tensor of `shape`."""
    if len(shape) < 2:
        return elements.view(shape)
    return elements.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim).contiguous()


def _with_nonnegative_dim(placement: Sharded, dims: int, shape: torch.Size) -> Sharded:
    dims = max(1, dims)
    if not -dims <= placement.dim < dims:
        flat = ", which another axis flattens to one dim" if dims < len(shape) else ""
        raise ValueError(f"{placement} of a tensor of shape {tuple(shape)}{flat}: expected {-dims} <= dim < {dims}")
    return replace(placement, dim=placement.dim % dims)


def _check_counts(shard: ResolvedShard, total: int, shape: torch.Size, size: int) -> None:
    counts = shard.counts
    if len(counts) != size or counts.smallest < 0 or counts.total != total:
        raise ValueError(
            f"{shard} of a tensor, or of its shard along another axis, of shape {tuple(shape)} on {size} ranks: expected "
            f"{size} counts >= 0 that add up to {total}; found {len(counts)} that add up to {counts.total}"
        )

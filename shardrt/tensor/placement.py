"""How a tensor lies across the ranks of a mesh: one placement for each mesh axis, the outer axes cutting first.

A tensor of 5 rows as (Shard(0), Shard(0)) on a mesh of 2 x 2:

    axis 0   rows 0 1 2          rows 3 4
    axis 1   rows 0 1 | row 2    row 3 | row 4

`Shard` is what a user asks for; `RaggedShard` and `FlatShard` are what the planned layout makes of it: contiguous runs of
one tensor's elements in rank order, of any length, possibly none. A scalar's part is 1-D: one element, or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from ..comm import DeviceMesh, ReduceOp


class Placement:
    """How a tensor lies along one mesh axis."""

    __slots__ = ()

    def resolve(self, shape: torch.Size, size: int) -> Placement:
        """What this means for a tensor of `shape` over `size` ranks. Raises ValueError if it does not fit them."""
        return self

    def part_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        """The shape of a rank's part of a tensor of `shape`."""
        return shape

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's part of a whole tensor: a view where it can be one."""
        return full


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank holds all of it, the same values."""


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """The tensor is what `reduce_op` ("sum", "avg", "min", "max", "product") makes of the ranks' tensors of its shape.

    A whole tensor becomes a sum or product by rank 0 keeping it and the others holding zeros or ones: exact in every dtype.
    """

    reduce_op: ReduceOp = ReduceOp.SUM

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduce_op", ReduceOp(self.reduce_op))

    @property
    def linear(self) -> bool:
        """Whether sums of such tensors are sums of their parts."""
        return self.reduce_op in (ReduceOp.SUM, ReduceOp.AVG)

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        if rank == 0 or self.reduce_op not in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return full
        return torch.full_like(full, self.reduce_op is ReduceOp.PRODUCT)


@dataclass(frozen=True, slots=True)
class Sharded(Placement, ABC):
    """Cut along `dim`: ranks in order, nothing twice, nothing left out."""

    dim: int

    @abstractmethod
    def resolve(self, shape: torch.Size, size: int) -> ResolvedShard: ...


@dataclass(frozen=True, slots=True)
class Shard(Sharded):
    """Cut along `dim` into chunks of ceil(rows / N) rows, the last ones shorter or empty, as torch does.

    Asked of `fully_shard`: cut anywhere between two rows.
    """

    dim: int = 0

    def resolve(self, shape: torch.Size, size: int) -> RaggedShard:
        rows = shape[self.dim] if shape else 1
        chunk = -(-rows // size)
        return RaggedShard(self.dim, tuple(min(chunk, max(0, rows - rank * chunk)) for rank in range(size)))


@dataclass(frozen=True, slots=True)
class RaggedShard(Shard):
    """Rank r holds `rows[r]` consecutive rows (slices along `dim`), possibly none."""

    dim: int  # no default: rows are of one dim
    rows: tuple[int, ...]

    def resolve(self, shape: torch.Size, size: int) -> RaggedShard:
        _check_counts(self, self.rows, shape[self.dim] if shape else 1, shape, size)
        return self

    def part_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.rows[rank], *shape[self.dim + 1 :]))

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        return (full if full.dim() else full.reshape(1)).narrow(self.dim, sum(self.rows[:rank]), self.rows[rank])

    def numels_of(self, shape: torch.Size) -> tuple[int, ...]:
        """How many elements of a tensor of `shape` each rank holds."""
        row_numel = shape.numel() // max(1, shape[self.dim]) if shape else 1
        return tuple(rows * row_numel for rows in self.rows)


@dataclass(frozen=True, slots=True)
class FlatShard(Sharded):
    """Rank r holds `numels[r]` consecutive elements of the tensor, read with `dim` outermost, as a 1-D tensor."""

    numels: tuple[int, ...]

    def resolve(self, shape: torch.Size, size: int) -> FlatShard:
        _check_counts(self, self.numels, shape.numel(), shape, size)
        return self

    def part_shape(self, shape: torch.Size, rank: int) -> torch.Size:
        return torch.Size((self.numels[rank],))

    def local_shard(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        return flattened(full, self.dim).narrow(0, sum(self.numels[:rank]), self.numels[rank])

    def numels_of(self, shape: torch.Size) -> tuple[int, ...]:
        """How many elements of a tensor of `shape` each rank holds."""
        return self.numels


ResolvedShard = RaggedShard | FlatShard  # what the planned layout makes


@dataclass(frozen=True, slots=True)
class Spec:
    """Where the parts of a tensor are. Made as it is by who knows that it fits; `of` checks.

    partial: whether a reduction is still to be made.
    shard_mesh: the part of the mesh over which elements are spread, replicas left out; None if they are spread over no axis.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # one for each mesh axis
    shape: torch.Size  # of the whole tensor
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
        """The spec of these placements, negative dims counted from the end.

        Raises ValueError, on every rank alike, for placements that do not fit the mesh or the shape, on whatever rank.
        """
        whole, checked = torch.Size(shape), []
        if len(placements) != len(mesh.shape):
            raise ValueError(f"placements {placements} on {mesh}: expected one for each of its {len(mesh.shape)} axes")
        shapes = {whole}  # of the parts on all ranks
        for placement, size in zip(placements, mesh.shape, strict=True):
            if not isinstance(placement, Placement):
                raise TypeError(f"placements {placements} on {mesh}: {placement!r} is none")
            if isinstance(placement, Sharded):
                placement = _counted_from_front(placement, len(next(iter(shapes))), whole)
            cuts = {(placement.resolve(shape, size), shape) for shape in shapes}
            shapes = {cut.part_shape(shape, rank) for cut, shape in cuts for rank in range(size)}
            checked.append(placement)
        ops = [placement for placement in checked if isinstance(placement, Partial)]
        if len(set(ops)) > 1 and not all(op.linear for op in ops):
            raise ValueError(f"placements {placements}: reductions of several kinds depend on their order; expected one kind")
        return cls(mesh, tuple(checked), whole)

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """The placements of the whole tensor on every rank."""
        return (Replicate(),) * len(self.placements)

    def local_part(self, full: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """This rank's part of a whole tensor, or of its part by the axes before `axis`: a view where it can be one."""
        axes = zip(self.placements, self.mesh.shape, self.mesh.coordinates, strict=True)
        for placement, size, rank in islice(axes, axis, None):
            full = placement.resolve(full.shape, size).local_shard(full, rank)
        return full


def local_shape(mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> torch.Size:
    """The shape of this rank's part of a tensor of `shape`."""
    for placement, size, rank in zip(placements, mesh.shape, mesh.coordinates, strict=True):
        shape = placement.resolve(shape, size).part_shape(shape, rank)
    return shape


def flattened(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The elements with `dim` outermost, 1-D: a view if they lie so. A 1-D tensor is taken to be flat already."""
    return (tensor.movedim(dim, 0) if tensor.dim() > 1 else tensor).reshape(-1)


def unflattened(elements: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """The contiguous tensor of `shape` whose elements, `dim` outermost, these are."""
    if len(shape) < 2:
        return elements.view(shape)
    return elements.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim).contiguous()


def _counted_from_front(placement: Sharded, dims: int, shape: torch.Size) -> Sharded:
    dims = max(1, dims)
    if not -dims <= placement.dim < dims:
        flat = ", of which another axis leaves one dim" if dims < len(shape) else ""
        raise ValueError(f"{placement} of a tensor of shape {tuple(shape)}{flat}: expected {-dims} <= dim < {dims}")
    return replace(placement, dim=placement.dim % dims)


def _check_counts(cut: ResolvedShard, counts: tuple[int, ...], total: int, shape: torch.Size, size: int) -> None:
    if len(counts) != size or min(counts) < 0 or sum(counts) != total:
        raise ValueError(
            f"{cut} of a tensor, or another axis's part of one, of shape {tuple(shape)} over {size} ranks: expected {size} "
            f"counts, none below 0, that add up to {total}; these {len(counts)} add up to {sum(counts)}"
        )

"""Named axes of ranks, and the communicators along them.

Ranks fill a mesh row by row, the last axis fastest. A mesh of 2 x 3 over ranks 0 to 5, axes "dp" and "tp":

             tp 0   1   2
    dp 0        0   1   2       on rank 4: coordinates (1, 1); mesh["tp"] is ranks 3 4 5, mesh["dp"] is ranks 1 4
       1        3   4   5

torch's names are there as well: `size()` and `size("tp")`, `ndim`, `mesh_dim_names`, `get_rank()`, `get_local_rank("tp")`,
`get_coordinate()`, `mesh`, `device_type`.

Gather, reduce and all-reduce have a communicator each ("roles"), so that they can run at once and their messages never mix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from .communicator import Communicator

T = TypeVar("T")

_UNNAMED = "axis "  # the prefix of positional names: "axis 0"


def positional_names(ndim: int) -> tuple[str, ...]:
    """The names of the axes of a mesh without names, in messages and as communicators."""
    return tuple(f"{_UNNAMED}{axis}" for axis in range(ndim))


class MeshSize(int):
    """A mesh's number of ranks: the integer `mesh.size`, and torch's `mesh.size()`, `mesh.size(0)` and `mesh.size("dp")`."""

    _mesh: DeviceMesh

    def __new__(cls, mesh: DeviceMesh) -> MeshSize:
        size = super().__new__(cls, len(mesh.ranks))
        size._mesh = mesh
        return size

    def __call__(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks along an axis, given by its number or name; without one, of the whole mesh."""
        return int(self) if mesh_dim is None else self._mesh.shape[self._mesh.axis(mesh_dim)]

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


@dataclass(slots=True)
class _Family:
    """Shared by a mesh and its parts: each part is created once, and so are its communicators."""

    meshes: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], DeviceMesh] = field(default_factory=dict)
    products: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = field(default_factory=dict)
    opened: list[Communicator] = field(default_factory=list)


class DeviceMesh:
    """A mesh over every rank of `comm` (usually `world.comm`): 1-D and named "dp" by default.

    shape, axis_names: of the mesh; without names, several axes are called "axis 0", "axis 1", ...
    size: its number of ranks, see `MeshSize`.   coordinates: this rank's, one for each axis.
    rank: this rank's number in the mesh, row by row.   ranks: the mesh's ranks in `comm`, row by row.
    Creating a mesh or a part of one is not collective. Raises ValueError if shape, names and ranks do not match.
    """

    def __init__(
        self, comm: Communicator, shape: tuple[int, ...] | None = None, axis_names: tuple[str, ...] | None = None
    ) -> None:
        shape = (comm.size,) if shape is None else tuple(shape)
        if axis_names is None:
            axis_names = ("dp",) if len(shape) == 1 else positional_names(len(shape))
        axis_names = tuple(axis_names)
        _check_axes(shape, axis_names)
        if math.prod(shape) != comm.size:
            raise ValueError(
                f"mesh of shape {shape} has {math.prod(shape)} ranks and does not match the {comm.size} ranks of {comm}; "
                f"give a shape for {comm.size} ranks, or start {math.prod(shape)} ranks"
            )
        self._set_up(comm, shape, axis_names, list(range(comm.size)), _Family())

    def _set_up(
        self, base: Communicator, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: list[int], family: _Family
    ) -> None:
        self.shape = shape
        self.axis_names = axis_names
        self.ranks = ranks
        self.size = MeshSize(self)
        self.rank = ranks.index(base.rank)
        self.coordinates = self._coordinates_of(self.rank)
        self.device = base.device
        self._base = base
        self._family = family
        self._communicators: dict[str, Communicator] = {}

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along these axes that this rank is in; names in the mesh's order. Always the same object."""
        names = (names,) if isinstance(names, str) else tuple(names)
        kept = [axis for axis, name in enumerate(self.axis_names) if name in names]
        if not kept or tuple(self.axis_names[axis] for axis in kept) != names:
            raise ValueError(f"axes {names} of {self}: expected one or more of {self.axis_names}, in this order")
        others = [axis for axis in range(len(self.shape)) if axis not in kept]
        ranks = [rank for index, rank in enumerate(self.ranks) if self._shares(self._coordinates_of(index), others)]
        return self._related(tuple(self.shape[axis] for axis in kept), names, ranks)

    def unflatten(self, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> DeviceMesh:
        """The same ranks, row by row, as a mesh of other axes. Always the same object. Raises ValueError on a mismatch."""
        shape, axis_names = tuple(shape), tuple(axis_names)
        _check_axes(shape, axis_names)
        if math.prod(shape) != self.size:
            raise ValueError(f"{self} as a mesh of shape {shape} with axes {axis_names}: expected {self.size} ranks")
        return self._related(shape, axis_names, self.ranks)

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """The same ranks along one axis, named `name`, or after all axes ("dp_tp"). Always the same object."""
        return self._related((self.size,), (name or "_".join(self.axis_names),), self.ranks)

    def product(self, inner: DeviceMesh) -> DeviceMesh:
        """The mesh with the axes of this one, then those of `inner`, over all ranks that both reach. Always the same object.

        In a mesh of axes "dp" and "tp", mesh["tp"].product(mesh["dp"]) has the same ranks with "tp" as the first axis:

            mesh (dp, tp)   0 1      product (tp, dp)   0 2
                            2 3                         1 3

        Its part along the axes of `inner` is `inner` again; so are those along this mesh's axes.
        Collective over all ranks of the communicator that both meshes are parts of; the first call for a pair blocks.
        Raises ValueError, on all of these ranks alike, naming the ranks, if the meshes are not of one communicator, have an
        axis name in common, share more than one rank, or if the ranks do not form a grid with rows and columns of one shape.
        """
        found = self._family.products.get((self, inner))
        if found is None:
            related = inner._base is self._base
            mine = _Factors(related, self.axis_names, self.shape, self.ranks, inner.axis_names, inner.shape, inner.ranks)
            everyone = self._base.exchange(mine)
            wrong = {rank: why for rank in range(len(everyone)) if (why := _misfit(everyone, rank))}
            if wrong:
                rank, why = next(iter(wrong.items()))
                raise ValueError(f"{self} times {inner}: {why} (rank {rank}; found on ranks {', '.join(map(str, wrong))})")
            for part in (self, inner):
                self._family.meshes.setdefault((part.axis_names, part.shape, tuple(part.ranks)), part)
            names, shape = self.axis_names + inner.axis_names, self.shape + inner.shape
            found = self._related(shape, names, [rank for each in self.ranks for rank in everyone[each].inner_ranks])
            self._family.products[self, inner] = found
        return found

    def axis(self, mesh_dim: int | str) -> int:
        """The number of an axis, given by its name or number, which counts from the end if negative. Raises ValueError."""
        if isinstance(mesh_dim, int) and -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim % self.ndim
        if mesh_dim in self.axis_names:
            return self.axis_names.index(mesh_dim)
        raise ValueError(f"axis {mesh_dim!r} of {self}: expected one of {self.axis_names}, or a number below {self.ndim}")

    # ------------------------------------------------------------------ torch's names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes; None for a mesh that was created without names."""
        return None if self.axis_names[0].startswith(_UNNAMED) else self.axis_names

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.type

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks in the world, an int32 tensor on the CPU of the mesh's shape; a new one each time."""
        ranks = [self._base.ranks[rank] for rank in self.ranks]
        return torch.tensor(ranks, dtype=torch.int32, device="cpu").view(self.shape)

    def get_rank(self) -> int:
        """This rank's number in the world. `rank` is the one in the mesh."""
        return self._base.ranks[self._base.rank]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's coordinate along an axis, given by its number or name. A mesh of one axis needs none.

        Raises ValueError for an axis that the mesh does not have, and without one if it has several.
        """
        if mesh_dim is None and self.ndim > 1:
            raise ValueError(f"get_local_rank() of {self}, which has {self.ndim} axes: give one of {self.axis_names}")
        return self.coordinates[self.axis(0 if mesh_dim is None else mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...]:
        """This rank's coordinates, one for each axis: `coordinates`. Every rank that has the mesh is in it."""
        return self.coordinates

    # ------------------------------------------------------------------ communication

    def communicator(self, role: str) -> Communicator:
        """This mesh's own communicator for `role` ("gather", "reduce", ...), its ranks in the mesh's order.

        The first call for a role is collective over all ranks of the mesh that this one is a part of.
        """
        if role not in self._communicators:
            # The first rank of a part identifies it: no two parts along the same axes share a rank.
            made = self._base.split(self.ranks[0], self.rank, f"{'.'.join(self.axis_names)}.{role}")
            assert made is not None, "every rank gave a colour"
            self._communicators[role] = made
            self._family.opened.append(made)
        return self._communicators[role]

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks; for set-up, not for steps."""
        comm = self._base if self.size == self._base.size else self.communicator("control")
        return comm.exchange(value)

    def close(self) -> None:
        """Close the communicators of the mesh and of all its parts, newest first. Collective."""
        while self._family.opened:
            self._family.opened.pop().close()

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        """The mesh itself: copies of what refers to it are on the same ranks, with the same communicators."""
        return self

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={extent}" for name, extent in zip(self.axis_names, self.shape, strict=True))
        return f"DeviceMesh({axes}, rank {self.rank} at {self.coordinates}, {self.device})"

    def _related(self, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: list[int]) -> DeviceMesh:
        if (shape, axis_names, ranks) == (self.shape, self.axis_names, self.ranks):
            return self
        key = (axis_names, shape, tuple(ranks))
        if key not in self._family.meshes:
            mesh = self._family.meshes[key] = DeviceMesh.__new__(DeviceMesh)
            mesh._set_up(self._base, shape, axis_names, ranks, self._family)
        return self._family.meshes[key]

    def _coordinates_of(self, index: int) -> tuple[int, ...]:
        return tuple(index // math.prod(self.shape[axis + 1 :]) % extent for axis, extent in enumerate(self.shape))

    def _shares(self, coordinates: tuple[int, ...], axes: list[int]) -> bool:
        return all(coordinates[axis] == self.coordinates[axis] for axis in axes)


class _Factors(NamedTuple):
    """The two meshes of a product, as one rank sees them. Ranks are those of the communicator."""

    related: bool  # both are of one communicator
    outer_names: tuple[str, ...]
    outer_shape: tuple[int, ...]
    outer_ranks: list[int]
    inner_names: tuple[str, ...]
    inner_shape: tuple[int, ...]
    inner_ranks: list[int]


def _misfit(everyone: list[_Factors], rank: int) -> str | None:
    """Why the meshes of this rank have no product; None if they have one."""
    mine = everyone[rank]
    if not mine.related:
        return "expected meshes of one communicator, such as two parts of one mesh"
    if common := set(mine.outer_names) & set(mine.inner_names):
        return f"expected axes of different names, found '{common.pop()}' in both"
    if common_ranks := sorted(set(mine.outer_ranks) & set(mine.inner_ranks) - {rank}):
        return f"expected meshes that overlap in this rank alone, found ranks {common_ranks} in both"
    position = mine.inner_ranks.index(rank)
    for peer in mine.outer_ranks:  # the ranks in the place of this one in their rows: its column
        theirs = everyone[peer]
        if (theirs.inner_names, theirs.inner_shape) != (mine.inner_names, mine.inner_shape):
            return f"expected the second mesh of shape {mine.inner_shape} on rank {peer} too, found {theirs.inner_shape}"
        if theirs.inner_ranks[position] != peer or theirs.outer_ranks != mine.outer_ranks:
            return f"expected the ranks of both meshes to form a grid, but rank {peer} is in another column of it"
    for peer in mine.inner_ranks:
        theirs = everyone[peer]
        if (theirs.outer_names, theirs.outer_shape) != (mine.outer_names, mine.outer_shape):
            return f"expected the first mesh of shape {mine.outer_shape} on rank {peer} too, found {theirs.outer_shape}"
        if theirs.inner_ranks != mine.inner_ranks:
            return f"expected the ranks of both meshes to form a grid, but rank {peer} is in another row of it"
    return None


def _check_axes(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> None:
    if len(set(axis_names)) != len(shape) or len(axis_names) != len(shape) or min(shape, default=0) < 1:
        raise ValueError(f"mesh of shape {shape} with axes {axis_names}: expected ranks and one name for each axis")

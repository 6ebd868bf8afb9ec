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
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch

from ..core.ranks import Ranks, evenly_spaced, grid, pick, row_strides, step_of
from ..ending.words import name_ranks
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
class _MeshParts:
    """Shared by a mesh and its parts: each part is created once, and so are its communicators."""

    meshes: dict[tuple[tuple[str, ...], tuple[int, ...], Ranks], DeviceMesh] = field(default_factory=dict)
    products: dict[tuple[DeviceMesh, DeviceMesh], DeviceMesh] = field(default_factory=dict)
    opened: list[Communicator] = field(default_factory=list)


class DeviceMesh:
    """A mesh over every rank of `comm` (usually `world.comm`): 1-D and named "dp" by default.

    shape, axis_names: those of the mesh; without names, several axes are called "axis 0", "axis 1", ...
    size: its number of ranks, see `MeshSize`.   coordinates: this rank's, one for each axis.
    rank: this rank's number in the mesh, row by row.
    ranks: the mesh's ranks in `comm`, row by row: a sequence, either a range or a tuple; `list(mesh.ranks)` makes a list.
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
        self._set_up(comm, shape, axis_names, range(comm.size), row_strides(shape, 1), _MeshParts())

    def _set_up(
        self,
        base: Communicator,
        shape: tuple[int, ...],
        axis_names: tuple[str, ...],
        ranks: Ranks,
        strides: tuple[int, ...] | None,
        family: _MeshParts,
    ) -> None:
        self.shape = shape
        self.axis_names = axis_names
        self.ranks = ranks
        self.size = MeshSize(self)
        self.rank = ranks.index(base.rank)
        self.coordinates = tuple(self.rank // step % extent for step, extent in zip(row_strides(shape, 1), shape, strict=True))
        self.device = base.device
        self._base = base
        self._family = family
        # Of a rank's coordinates: number // stride % extent, on every rank of the base alike. None: only the ranks are known.
        self._strides = strides
        self._parts: dict[tuple[str, ...], DeviceMesh] = {}
        self._communicators: dict[str, Communicator] = {}

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along these axes that this rank is in; names in the mesh's order. Always the same object."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names not in self._parts:
            self._parts[names] = self._part(names)
        return self._parts[names]

    def _part(self, names: tuple[str, ...]) -> DeviceMesh:
        kept = [axis for axis, name in enumerate(self.axis_names) if name in names]
        if not kept or tuple(self.axis_names[axis] for axis in kept) != names:
            raise ValueError(f"axes {names} of {self}: expected one or more of {self.axis_names}, in this order")
        steps, shape = row_strides(self.shape, 1), tuple(self.shape[axis] for axis in kept)
        first = self.rank - sum(self.coordinates[axis] * steps[axis] for axis in kept)
        places = grid(first, shape, [steps[axis] for axis in kept])
        strides = None if self._strides is None else tuple(self._strides[axis] for axis in kept)
        return self._related(shape, names, pick(self.ranks, places), strides)

    def unflatten(self, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> DeviceMesh:
        """The same ranks, row by row, as a mesh of other axes. Always the same object. Raises ValueError on a mismatch."""
        shape, axis_names = tuple(shape), tuple(axis_names)
        _check_axes(shape, axis_names)
        if math.prod(shape) != self.size:
            raise ValueError(f"{self} as a mesh of shape {shape} with axes {axis_names}: expected {self.size} ranks")
        return self._related(shape, axis_names, self.ranks, self._strides_of_rows(shape))

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """The same ranks along one axis, named `name`, or after all axes ("dp_tp"). Always the same object."""
        shape = (int(self.size),)
        return self._related(shape, (name or "_".join(self.axis_names),), self.ranks, self._strides_of_rows(shape))

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
            strides = self._strides_with(inner)
            mine = inner._base is self._base, self.axis_names, self.shape, inner.axis_names, inner.shape, strides
            shape = self.shape + inner.shape
            if self._base.differing(mine) is None and strides is not None:
                at = zip(self.coordinates + inner.coordinates, strides, strict=True)
                ranks = grid(self._base.rank - sum(place * stride for place, stride in at), shape, strides)
            else:
                ranks, strides = self._ranks_with(inner), None
            for part in (self, inner):
                self._family.meshes.setdefault((part.axis_names, part.shape, part.ranks), part)
            found = self._related(shape, self.axis_names + inner.axis_names, ranks, strides)
            self._family.products[self, inner] = found
        return found

    def _strides_with(self, inner: DeviceMesh) -> tuple[int, ...] | None:
        """The strides of the product; None if they do not tell that there is one."""
        if inner._base is not self._base or set(self.axis_names) & set(inner.axis_names):
            return None
        if self._strides is None or inner._strides is None:
            return None
        strides, shape = self._strides + inner._strides, self.shape + inner.shape
        # Coordinates are digits of a rank's number. Two of them change independently if one counts whole turns of the other.
        digits = sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1)
        apart = all(wider % (stride * extent) == 0 for (stride, extent), (wider, _) in pairwise(digits))
        return strides if apart else None

    def _ranks_with(self, inner: DeviceMesh) -> Ranks:
        """The ranks of the product, as all ranks together find out. Collective. Raises ValueError, on every rank alike."""
        related = inner._base is self._base
        mine = _Factors(related, self.axis_names, self.shape, self.ranks, inner.axis_names, inner.shape, inner.ranks)
        everyone = self._base.exchange(mine)
        wrong = {rank: why for rank in range(len(everyone)) if (why := _misfit(everyone, rank))}
        if wrong:
            rank, why = next(iter(wrong.items()))
            raise ValueError(f"{self} times {inner}: {why} (rank {rank}; found on {name_ranks(list(wrong))})")
        return evenly_spaced([rank for each in self.ranks for rank in everyone[each].inner_ranks])

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

    @property
    def comm(self) -> Communicator:
        """The communicator that the mesh is over; of a part of a mesh, that of the whole."""
        return self._base

    def communicator(self, role: str) -> Communicator:
        """This mesh's own communicator for `role` ("gather", "reduce", ...), its ranks in the mesh's order.

        The first call for a role is collective over all ranks of the mesh that this one is a part of.
        """
        if role not in self._communicators:
            made = self._base.part(self.ranks, f"{'.'.join(self.axis_names)}.{role}")
            self._communicators[role] = made
            self._family.opened.append(made)
        return self._communicators[role]

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks; for set-up, not for steps."""
        return self._control().exchange(value)

    def differing(self, value: T) -> list[T] | None:
        """Every rank's `value`, as `exchange`, if any differ; None if all are equal. See `Communicator.differing`."""
        return self._control().differing(value)

    def _control(self) -> Communicator:
        return self._base if self.size == self._base.size else self.communicator("control")

    def close(self) -> None:
        """Close the communicators of the mesh and of all its parts, newest first. Collective."""
        while self._family.opened:
            self._family.opened.pop().close()

    def __enter__(self) -> DeviceMesh:
        """In the block, on this thread, the mesh is the default: `current_mesh()`."""
        _entered.meshes = [*getattr(_entered, "meshes", ()), self]
        return self

    def __exit__(self, *exception: object) -> None:
        _entered.meshes = _entered.meshes[:-1]

    def __deepcopy__(self, memo: object) -> DeviceMesh:
        """The mesh itself: copies of what refers to it are on the same ranks, with the same communicators."""
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"{self} cannot be pickled, nor a module that refers to it: its communicators are this process's; save "
            "tensors, such as those of a state dict, and make a mesh where they are loaded"
        )

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={extent}" for name, extent in zip(self.axis_names, self.shape, strict=True))
        return f"DeviceMesh({axes}, rank {self.rank} at {self.coordinates}, {self.device})"

    def _related(
        self, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: Ranks, strides: tuple[int, ...] | None
    ) -> DeviceMesh:
        if (shape, axis_names, ranks) == (self.shape, self.axis_names, self.ranks):
            return self
        key = (axis_names, shape, ranks)
        if key not in self._family.meshes:
            mesh = self._family.meshes[key] = DeviceMesh.__new__(DeviceMesh)
            mesh._set_up(self._base, shape, axis_names, ranks, strides, self._family)
        return self._family.meshes[key]

    def _strides_of_rows(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The strides of the same ranks, row by row, as a mesh of `shape`."""
        step = None if self._strides is None else step_of(self.shape, self._strides)
        return None if step is None else row_strides(shape, step)


_entered = threading.local()  # `meshes`: those whose blocks this thread is in, the innermost last


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost `with mesh:` that this thread is in. Raises RuntimeError outside of one."""
    meshes: list[DeviceMesh] = getattr(_entered, "meshes", [])
    if not meshes:
        raise RuntimeError("no mesh was given: pass one, or call this inside of `with mesh:`")
    return meshes[-1]


class _Factors(NamedTuple):
    """The two meshes of a product, as one rank sees them. Ranks are those of the communicator."""

    related: bool  # both are of one communicator
    outer_names: tuple[str, ...]
    outer_shape: tuple[int, ...]
    outer_ranks: Ranks
    inner_names: tuple[str, ...]
    inner_shape: tuple[int, ...]
    inner_ranks: Ranks


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

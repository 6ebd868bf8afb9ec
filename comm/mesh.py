"""Named axes of ranks, and the communicators along them.

Ranks fill a mesh row by row, the last axis fastest. A mesh of 2 x 3 over ranks 0 to 5, axes "dp" and "tp":

             tp 0   1   2
    dp 0        0   1   2       on rank 4: coordinates (1, 1); mesh["tp"] is ranks 3 4 5, mesh["dp"] is ranks 1 4
       1        3   4   5

Gather, reduce and all-reduce get a communicator each ("roles"), so that they can progress at once and can never cross-match.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

from .communicator import Communicator

T = TypeVar("T")


@dataclass(slots=True)
class _Family:
    """What a mesh and its parts share: each part is made once, and so are its communicators."""

    meshes: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]], DeviceMesh] = field(default_factory=dict)
    opened: list[Communicator] = field(default_factory=list)


class DeviceMesh:
    """A mesh over every rank of `comm` (usually `world.comm`): 1-D and named "dp", unless told otherwise.

    shape, axis_names: of the mesh.   size: its number of ranks.   coordinates: this rank's, one for each axis.
    rank: this rank's number in the mesh, row by row.   ranks: the mesh's ranks in `comm`, row by row.
    Creating a mesh or a part of one is not collective. Raises ValueError if shape, names and ranks do not match.
    """

    def __init__(self, comm: Communicator, shape: tuple[int, ...] | None = None, axis_names: tuple[str, ...] = ("dp",)) -> None:
        shape = (comm.size,) if shape is None else tuple(shape)
        axis_names = tuple(axis_names)
        if len(set(axis_names)) != len(shape) or len(axis_names) != len(shape) or min(shape, default=0) < 1:
            raise ValueError(f"mesh of shape {shape} with axes {axis_names}: expected ranks and one name for each axis")
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
        self.size = len(ranks)
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
        ranks = [rank for place, rank in enumerate(self.ranks) if self._shares(self._coordinates_of(place), others)]
        return self._related(tuple(self.shape[axis] for axis in kept), names, ranks)

    def unflatten(self, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> DeviceMesh:
        """The same ranks, row by row, as a mesh of other axes. Always the same object. Raises ValueError if they do not fit."""
        if math.prod(shape) != self.size or len(set(axis_names)) != len(shape):
            raise ValueError(
                f"{self} as a mesh of shape {shape} with axes {axis_names}: expected {self.size} ranks, a name each"
            )
        return self._related(tuple(shape), tuple(axis_names), self.ranks)

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """The same ranks along one axis, named `name`, or after all axes ("dp_tp"). Always the same object."""
        return self._related((self.size,), (name or "_".join(self.axis_names),), self.ranks)

    def communicator(self, role: str) -> Communicator:
        """This mesh's own communicator for `role` ("gather", "reduce", ...), its ranks in the mesh's order.

        The first call for a role is collective over all ranks of the mesh that this one is a part of.
        """
        if role not in self._communicators:
            # The first rank of a part names it: no two parts along the same axes share a rank.
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

    def _coordinates_of(self, place: int) -> tuple[int, ...]:
        return tuple(place // math.prod(self.shape[axis + 1 :]) % extent for axis, extent in enumerate(self.shape))

    def _shares(self, coordinates: tuple[int, ...], axes: list[int]) -> bool:
        return all(coordinates[axis] == self.coordinates[axis] for axis in axes)

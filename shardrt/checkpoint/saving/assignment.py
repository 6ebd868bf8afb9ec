"""Decides who writes each name of a checkpoint: the ranks of one copy of it.

A copy is a set of ranks that together have all elements once. All ranks choose alike, from the descriptions of all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from ...tensor.placement.placement import Sharded
from ..disk.errors import CheckpointError
from ..state.names import joined
from .chunks import Boxes, boxes_of
from .descriptions import Described, Description, Grid

SHARED = 1 << 16  # plain tensors of so many bytes or more are distributed over the ranks that have them


@dataclass(frozen=True, eq=False)
class Agreed:
    """What all ranks have to save: the different descriptions, and which of them each rank has.

    kinds: the descriptions, in the order of the first rank that has each.   of_rank: (ranks,) int64, each rank's index there.
    key: equal where the metadata are equal.   own: the entries that each rank has for itself, by rank; empty if there are none.
    """

    kinds: tuple[Description, ...]
    of_rank: torch.Tensor
    key: object = None
    own: tuple[Description, ...] = ()
    _coordinates: dict[Grid, torch.Tensor] = field(default_factory=dict)
    _places: dict[object, list[torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of_equal(cls, description: Description, ranks: int, key: object = None, own: tuple[Description, ...] = ()) -> Agreed:
        """All ranks have the same description, except for their own entries."""
        return cls((description,), torch.zeros(ranks, dtype=torch.int64), key, own)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.of_rank)

    def ranks_of(self, kind: int) -> torch.Tensor:
        """The ranks with this description, ascending."""
        return (self.of_rank == kind).nonzero().view(-1)

    def first_of(self, kind: int) -> int:
        """The first rank with this description."""
        return int(self.ranks_of(kind)[0])

    def coordinates(self, grid: Grid) -> torch.Tensor:
        """(ranks of the grid, 1 + axes) int64: in each row, a rank and its coordinates."""
        if grid not in self._coordinates:
            places = torch.cartesian_prod(*(torch.arange(extent) for extent in grid.shape)).view(-1, len(grid.shape))
            ranks = torch.frombuffer(bytearray(grid.ranks), dtype=torch.int64)
            self._coordinates[grid] = torch.cat([ranks[:, None], places], 1)
        return self._coordinates[grid]

    def places(self, grid: Grid, at: tuple[tuple[int, int], ...], kinds: tuple[int, ...]) -> list[torch.Tensor]:
        """The rows of `coordinates` with these (axis, coordinate) in `at`: a tensor for the ranks of each kind."""
        if (grid, at, kinds) not in self._places:
            found = self.coordinates(grid)
            for axis, coordinate in at:
                found = found[found[:, 1 + axis] == coordinate]
            own = self.of_rank[found[:, 0]]
            self._places[grid, at, kinds] = [found[own == kind] for kind in kinds]
        return self._places[grid, at, kinds]


class Holders(NamedTuple):
    """The ranks of a copy that have one description.   places: (ranks, 1 + axes), as `Agreed.coordinates`; no axes if plain."""

    entry: Described
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class Assigned:
    """A name, and the copy of it that is written.

    entry: as the first rank that has it describes it.   key: equal for tensors of which the same ranks have the same boxes.
    """

    entry: Described
    holders: tuple[Holders, ...]
    key: object = None

    @property
    def first(self) -> int:
        """The first rank of the copy."""
        return min(int(each.places[0, 0]) for each in self.holders)

    def includes(self, rank: int) -> bool:
        """Whether this rank writes a part of it."""
        return self.entry.tied is None and any(bool((each.places[:, 0] == rank).any()) for each in self.holders)

    def chunks(self) -> Boxes:
        """The chunks of the tensor. `owner` is the rank that has a chunk; the chunks of a rank follow each other.

        Raises CheckpointError if they do not have as many elements as the tensor.
        """
        found = []
        for entry, places in self.holders:
            shape = () if entry.grid is None else entry.grid.shape
            boxes = boxes_of(entry.shape, entry.placements, shape, places[:, 1:])
            found.append(Boxes(places[:, 0][boxes.owner], boxes.offsets, boxes.sizes))
        chunks = Boxes(*(torch.cat(columns) for columns in zip(*found, strict=True)))
        if (numel := int(chunks.sizes.prod(1).sum())) != prod(self.entry.shape):
            raise CheckpointError(
                f"tensor '{self.entry.name}' of shape {self.entry.shape}: its ranks have {numel} elements of "
                f"{prod(self.entry.shape)}; the placements of different ranks do not fit together"
            )
        return chunks


def order_names(agreed: Agreed) -> list[str]:
    """All names: those of the first rank in its order, then further ones of other ranks, then those of ranks' own entries."""
    return list(dict.fromkeys(entry.name for kind in (*agreed.kinds, *agreed.own) for entry in kind))


def assign(agreed: Agreed) -> Iterator[Assigned]:
    """The copy of each name that is written, in the order of `order_names`.

    Raises CheckpointError if two ranks have different things of one name, or if a rank of a tensor's mesh does not have it.
    """
    having = dict[str, list[tuple[int, Described]]]()
    for number, kind in enumerate(agreed.kinds):
        for entry in kind:
            having.setdefault(entry.name, []).append((number, entry))
    for name, found in having.items():
        _check_alike(agreed, name, found)
    loads, whole = dict[object, list[tuple[int, int]]](), set[str]()
    for name, found in having.items():
        entry = found[0][1]._replace(tied=_tied(found, whole))
        if entry.tied is None:
            whole.add(name)
        copies = _copies(agreed, found)
        chosen = 0
        if copies.number > 1 and entry.tied is None:
            nbytes = prod(entry.shape) * (entry.dtype.itemsize if entry.dtype else 0)
            heap = loads.setdefault(copies.key, [(0, copy) for copy in range(copies.number)])
            load, chosen = heap[0]
            heapq.heapreplace(heap, (load + nbytes, chosen))
        layouts = tuple((kind, each.grid, each.placements) for kind, each in found)
        yield Assigned(entry, copies.of(chosen), (entry.dtype, entry.shape, layouts, copies.number, chosen))
    yield from _own(agreed, having)


def _own(agreed: Agreed, having: Mapping[str, list[tuple[int, Described]]]) -> Iterator[Assigned]:
    """The entries that ranks have for themselves: each rank writes its own."""
    for rank, entries in enumerate(agreed.own):
        for entry in entries:
            if found := having.get(name := joined(entry.path[:-1])):
                kind, other = found[0]
                raise CheckpointError(
                    f"'{name}' is a PerRank on rank {rank}, and {other} on rank {agreed.first_of(kind)}: expected one of them "
                    "on all ranks"
                )
            yield Assigned(entry, (Holders(entry, torch.tensor([[rank]])),))


class _NameCopies(NamedTuple):
    """The copies of a name.   key: equal for names whose copies are the same ranks.   of: the ranks of copy `i`."""

    key: object
    number: int
    of: Callable[[int], tuple[Holders, ...]]


def _check_alike(agreed: Agreed, name: str, found: list[tuple[int, Described]]) -> None:
    kind, expected = found[0]
    for other, entry in found[1:]:
        if (entry.dtype, entry.shape) != (expected.dtype, expected.shape):
            raise CheckpointError(
                f"'{name}' is {expected} on rank {agreed.first_of(kind)}, and {entry} on rank {agreed.first_of(other)}: "
                "expected the same on all ranks that have it; give what differs different names"
            )


def _tied(found: list[tuple[int, Described]], earlier: Set[str]) -> str | None:
    """The name of the same tensor, if all ranks that have elements of it say so.   earlier: the names that it may be."""
    names = {each.tied for _, each in found} - {""}
    return names.pop() if len(names) == 1 and names <= earlier else None


def _copies(agreed: Agreed, found: list[tuple[int, Described]]) -> _NameCopies:
    groups = dict[Grid, list[tuple[int, Described]]]()
    for kind, entry in found:
        if entry.grid is not None:
            groups.setdefault(entry.grid, []).append((kind, entry))
    if groups:
        return _copies_on_grids(agreed, groups)
    entry, kinds = found[0][1], tuple(kind for kind, _ in found)
    if entry.dtype is None or prod(entry.shape) * entry.dtype.itemsize < SHARED:
        ranks = torch.tensor([agreed.first_of(kinds[0])])
    else:
        ranks = torch.cat([agreed.ranks_of(kind) for kind in kinds]).sort().values
    return _NameCopies(kinds, len(ranks), lambda copy: (Holders(entry, ranks[copy : copy + 1, None]),))


def _copies_on_grids(agreed: Agreed, groups: dict[Grid, list[tuple[int, Described]]]) -> _NameCopies:
    """Each grid has a copy for each set of coordinates on the axes that do not shard."""
    grids = sorted(groups, key=lambda grid: grid.ranks)
    axes, choices = dict[Grid, tuple[int, ...]](), list[tuple[Grid, tuple[int, ...]]]()
    for grid in grids:
        _check_members(agreed, grid, groups[grid])
        placements = groups[grid][0][1].placements
        axes[grid] = tuple(axis for axis, placement in enumerate(placements) if not isinstance(placement, Sharded))
        choices += [(grid, at) for at in product(*(range(grid.shape[axis]) for axis in axes[grid]))]

    def ranks_of(copy: int) -> tuple[Holders, ...]:
        grid, at = choices[copy]
        places = agreed.places(grid, tuple(zip(axes[grid], at, strict=True)), tuple(kind for kind, _ in groups[grid]))
        held = [Holders(entry, own) for (_, entry), own in zip(groups[grid], places, strict=True)]
        return tuple(each for each in held if len(each.places))

    return _NameCopies((tuple(grids), tuple(axes.values())), len(choices), ranks_of)


def _check_members(agreed: Agreed, grid: Grid, found: list[tuple[int, Described]]) -> None:
    """Raise CheckpointError unless all ranks of a mesh that get elements of the tensor have it, sharded along the same axes."""
    (kind, entry), places, kinds = found[0], agreed.coordinates(grid), tuple(each for each, _ in found)
    ranks, missing = places[:, 0], places[:0]
    if sum(map(len, agreed.places(grid, (), kinds))) < len(places):
        missing = places[~torch.isin(agreed.of_rank[ranks], torch.tensor(kinds))]
    if len(missing) and len(lost := boxes_of(entry.shape, entry.placements, grid.shape, missing[:, 1:]).owner):
        raise CheckpointError(
            f"rank {int(missing[lost[0], 0])} has no tensor '{entry.name}' on the mesh of ranks {ranks[:8].tolist()}, or has "
            f"it on another mesh; rank {agreed.first_of(kind)} has {entry}. Save the same state on all ranks of a mesh"
        )
    for other, each in found[1:]:
        if [isinstance(p, Sharded) for p in each.placements] != [isinstance(p, Sharded) for p in entry.placements]:
            raise CheckpointError(
                f"'{entry.name}' on the mesh of ranks {ranks[:8].tolist()} is sharded along other axes on rank "
                f"{agreed.first_of(kind)} than on rank {agreed.first_of(other)}: expected the same on all of them"
            )

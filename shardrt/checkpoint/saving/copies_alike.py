"""A tensor of one name on several meshes is saved once: its copies are compared, so that no stage of a pipeline is lost.

Meshes that share no rank have copies of one tensor where a model is replicated without a mesh that says so, or different
tensors where its parts, such as the stages of a pipeline, use the same names. All their bits are compared, by digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain

import torch

from ...comm import Communicator
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.digest import digest
from ...tensor.placement.placement import Box
from ..disk.errors import CheckpointError, agreed
from ..formats.geometry import parts, runs
from .descriptions import Description, Grid

_MODULUS = 1 << 64

_Boxes = Mapping[Box, int]  # the digest of the elements there


def check_copies(kinds: Sequence[Description], tensors: Mapping[str, torch.Tensor], comm: Communicator) -> None:
    """Raise CheckpointError on every rank if tensors of one name, on meshes of different ranks, have different elements.

    kinds: the descriptions of all ranks.   tensors: of this rank, by name.
    Collective if there is such a name. Cost: each byte of those tensors is read once.
    """
    names = _on_several_meshes(kinds) if len(kinds) > 1 else set[str]()
    if not names:
        return
    with agreed(comm):
        mine = {name: _digests(tensor) for name, tensor in tensors.items() if name in names and isinstance(tensor, DTensor)}
    everyone = comm.exchange(mine)
    wrong = [(name, ranks) for name in sorted(names) if (ranks := _differing(name, everyone)) is not None]
    if wrong:
        name, (one, other) = wrong[0]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"'{name}'{more}: ranks {one} and {other} have different tensors of this name, on different meshes, and one of "
            "them would be lost. Give the parts of a model, such as stages of a pipeline, different names; average replicas "
            "that have gone apart, or put their states under different names"
        )


def _on_several_meshes(kinds: Iterable[Description]) -> Set[str]:
    grids, several = dict[str, object](), set[str]()
    for entry in chain.from_iterable(kinds):
        if entry.grid is not None and grids.setdefault(entry.name, entry.grid) != entry.grid:
            several.add(entry.name)
    return several


def _digests(tensor: DTensor) -> tuple[Grid, _Boxes]:
    """The ranks of a tensor, and what this one has of it."""
    mesh, shape = tensor.spec.mesh, tensor.shape
    whole, strides = Box((0,) * len(shape), tuple(shape)), [shape[dim + 1 :].numel() for dim in range(len(shape))]
    found = {}
    for box, memory in parts(tensor):
        along = runs(box, whole, strides)
        rows = memory.reshape(-1, along.numel)
        found[box] = sum(int(digest(row, start)) for row, start in zip(rows, along.starts, strict=True)) % _MODULUS
    return Grid.of(mesh.shape, mesh.mesh.flatten().tolist()), found


def _differing(name: str, everyone: Sequence[Mapping[str, tuple[Grid, _Boxes]]]) -> tuple[int, int] | None:
    """Two ranks whose meshes have different tensors of a name; None if all have the same."""
    copies = dict[Grid, dict[Box, int]]()
    firsts = dict[Grid, int]()
    for rank, mine in enumerate(everyone):
        if name in mine:
            grid, boxes = mine[name]
            firsts.setdefault(grid, rank)
            copies.setdefault(grid, {}).update(boxes)  # replicas on one mesh have the same boxes
    totals = {grid: sum(boxes.values()) % _MODULUS for grid, boxes in copies.items()}
    first, *others = totals
    return next(((firsts[first], firsts[grid]) for grid in others if totals[grid] != totals[first]), None)

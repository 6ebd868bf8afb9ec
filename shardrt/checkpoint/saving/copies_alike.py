"""A tensor of one name on several meshes is saved once: its copies are compared, so that no stage of a pipeline is lost.

Meshes that share no rank have copies of one tensor where a model is replicated without a mesh that says so, or two different
tensors where its parts, such as the stages of a pipeline, use the same names. A few elements of each are compared, loosely, as
replicas may differ by rounding.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import torch

from ...comm import Communicator
from ...tensor.dtensor import DTensor
from ..errors import CheckpointError
from .descriptions import Described, Description

_ELEMENTS = 16  # of each local tensor
_TOLERANCE = 0.05  # of their norm


class _Sample(NamedTuple):
    """place: equal where copies have the same elements."""

    place: object
    elements: tuple[float, ...]


def names_on_several_meshes(kinds: Iterable[Description]) -> set[str]:
    """The names of tensors that are sharded over different meshes on different ranks."""
    grids = dict[str, object]()
    several = set[str]()
    for entry in (entry for kind in kinds for entry in kind if entry.grid is not None):
        if grids.setdefault(entry.name, entry.grid) != entry.grid:
            several.add(entry.name)
    return several


def check_copies(names: set[str], description: Description, tensors: Mapping[str, torch.Tensor], comm: Communicator) -> None:
    """Raise CheckpointError on every rank if ranks in the same place of different meshes have different elements. Collective.

    names: of `names_on_several_meshes`.   description, tensors: of this rank. Where meshes have other shapes or placements,
    nothing is compared. Cost: one transfer from the device.
    """
    found = [entry for entry in description if entry.name in names and entry.grid is not None]
    sampled = [_sampled(tensors[entry.name]) for entry in found]
    values = iter(torch.cat(sampled).tolist() if sampled else [])
    mine = {
        entry.name: _Sample(_place(entry, comm.rank), tuple(islice(values, len(some))))
        for entry, some in zip(found, sampled, strict=True)
    }
    firsts, wrong = dict[tuple[str, object], tuple[int, _Sample]](), dict[str, tuple[int, int]]()
    for rank, samples in enumerate(comm.exchange(mine)):
        for name, sample in samples.items():
            first, expected = firsts.setdefault((name, sample.place), (rank, sample))
            if not _alike(expected.elements, sample.elements):
                wrong.setdefault(name, (first, rank))
    if wrong:
        name, (one, other) = next(iter(wrong.items()))
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"'{name}'{more}: ranks {one} and {other} have different tensors of this name, on different meshes, and one of "
            "them would be lost: give the parts of a model, such as stages of a pipeline, different names"
        )


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of the local tensor, evenly spread, in float64 on its device."""
    local = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    step = max(1, len(local) // _ELEMENTS)
    some = local[::step][:_ELEMENTS]
    return (torch.view_as_real(some).sum(-1) if some.is_complex() else some).double()


def _place(entry: Described, rank: int) -> object:
    assert entry.grid is not None, "it is on a mesh"
    ranks = array("q", entry.grid.ranks).tolist()
    return ranks.index(rank), entry.grid.shape, tuple(map(repr, entry.placements))


def _alike(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    if len(one) != len(other):
        return False
    apart = sum((x - y) ** 2 for x, y in zip(one, other, strict=True))
    return not apart > _TOLERANCE**2 * sum(x * x for x in (*one, *other))

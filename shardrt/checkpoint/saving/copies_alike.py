"""A tensor of one name on several meshes is saved once: its copies are compared, so that no stage of a pipeline is lost.

Meshes that share no rank have copies of one tensor where a model is replicated without a mesh that says so, or different
tensors where its parts, such as the stages of a pipeline, use the same names. A few elements of each are compared, wherever
they lie, and loosely, as replicas may differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

import torch

from ...comm import Communicator
from ..errors import CheckpointError, agreed
from ..geometry import parts
from .descriptions import Description

_PLACES = 8  # that are compared of each tensor
_TOLERANCE = 0.05  # of the norm of their elements

_Elements = Mapping[int, float]  # by their place in the whole tensor, row by row


def check_copies(kinds: Sequence[Description], tensors: Mapping[str, torch.Tensor], comm: Communicator) -> None:
    """Raise CheckpointError on every rank if tensors of one name, on meshes of different ranks, have different elements.

    kinds: the descriptions of all ranks.   tensors: of this rank, by name. Collective if there is such a name. Cost: a transfer
    from the device of up to eight numbers for each.
    """
    names = _on_several_meshes(kinds) if len(kinds) > 1 else set[str]()
    if not names:
        return
    with agreed(comm):
        mine = {name: _sampled(tensor) for name, tensor in tensors.items() if name in names}
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


def _sampled(tensor: torch.Tensor) -> _Elements:
    """Those of some places of the whole tensor that this rank has; a complex one as the sum of its parts."""
    found = dict(_elements(tensor))
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def _elements(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    last = tensor.numel() - 1
    places = {number * last // (_PLACES - 1) for number in range(_PLACES)}
    for box, memory in parts(tensor):
        for place in places:
            index, rest = [], place
            for size in reversed(tensor.shape):
                rest, at = divmod(rest, size)
                index.append(at)
            local = [at - offset for at, offset in zip(reversed(index), box.offsets, strict=True)]
            if all(0 <= at < size for at, size in zip(local, box.sizes, strict=True)):
                value = memory[tuple(local)].resolve_conj()
                yield place, (torch.view_as_real(value).sum() if value.is_complex() else value).double()


def _differing(name: str, everyone: Sequence[Mapping[str, _Elements]]) -> tuple[int, int] | None:
    """Two ranks with different elements of a tensor; None if all have the same ones."""
    firsts, ranks, apart, total = dict[int, tuple[int, float]](), (0, 0), 0.0, 0.0
    for rank, elements in enumerate(everyone):
        for place, value in elements.get(name, {}).items():
            first, expected = firsts.setdefault(place, (rank, value))
            if math.isfinite(value) and math.isfinite(expected):
                difference = value - expected
                ranks = (first, rank) if difference and not apart else ranks
                apart += difference * difference
                total += value * value + expected * expected
    return ranks if apart > _TOLERANCE**2 * total else None

"""Comparison of what a checkpoint has under several names of one tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..formats.geometry import memory_of
from ..formats.stored import Stored, StoredTensor
from ..state.several_names import Twins, same_bits
from .reading import fetches, read_all


def unlike(stored: Stored, twins: Iterable[Twins]) -> list[str]:
    """Sentences about those of which this rank's parts are not the same to the bit, in the dtypes of the state.

    Cost: both are read, beside the load itself, unless they are stored once.
    """
    return [str(each) for each in twins if not _alike(stored, each)]


def _alike(stored: Stored, twins: Twins) -> bool:
    one, other = stored.tensors.get(twins.name), stored.tensors.get(twins.other)
    if one is None or other is None or one.shape != other.shape:
        return False
    if tuple(one.shape) != tuple(twins.target.shape) or _is_stored_once(one, other):
        return True  # another shape than the tensor's is an error of its own
    memory = memory_of(twins.name, twins.target.detach())
    made = [torch.empty_like(memory) for _ in range(2)]
    read_all(stored, [*fetches(twins.name, one, made[0]), *fetches(twins.other, other, made[1])])
    return same_bits(*made)


def _is_stored_once(one: StoredTensor, other: StoredTensor) -> bool:
    return one.files == other.files and all(map(torch.equal, one.columns, other.columns))

"""Several names of one tensor (tied weights) that are given with values of their own: all but one of them would be lost."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import torch

from ...comm import Communicator
from ...comm.fingerprint import printable
from ...tensor.dtensor import DTensor
from ..errors import CheckpointError
from ..formats.stored import Stored, StoredTensor
from ..geometry import memory_of
from .reading import fetches, read_all

_log = logging.getLogger("shardrt")


class Twins(NamedTuple):
    """Two names of what is loaded, and the one tensor that has both.   name: the one whose values it gets."""

    name: str
    other: str
    target: torch.Tensor

    def __str__(self) -> str:
        return (
            f"'{self.name}' and '{self.other}' have different values, and are one tensor here: those of '{self.other}' are lost"
        )


def unlike(stored: Stored, twins: Iterable[Twins]) -> list[str]:
    """Sentences about those of which this rank's parts are not the same to the bit, in the dtypes of the state.

    Cost: both are read, beside the load itself, unless they are stored once.
    """
    return [str(each) for each in twins if not _alike(stored, each)]


def told_by_all(unlike: list[str], rounded: str, comm: Communicator) -> tuple[list[str], str]:
    """The sentences of all ranks about values that are lost, and that of the first rank that rounds some. Collective."""
    told = comm.exchange((unlike, rounded))
    return list(dict.fromkeys(chain.from_iterable(each for each, _ in told))), next((text for _, text in told if text), "")


def settle(what: str, unlike: list[str], rounded: str, comm: Communicator, *, strict: bool) -> None:
    """Raise CheckpointError on every rank for values that are lost, if strict; else rank 0 logs them. Collective.

    rounded: a sentence that rank 0 logs.   what: is loaded.
    """
    lost, rounded = told_by_all(unlike, rounded, comm)
    if strict and lost:
        raise CheckpointError(f"{what} does not fit the model: {'; '.join(lost)}. strict=False loads the rest")
    for text in (*lost, *([rounded] if rounded else [])) if comm.rank == 0 else ():
        _log.warning("load of %s: %s", what, printable(text))


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


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same to the bit; of sharded ones, this rank's parts."""
    parts = (each._local_tensor if isinstance(each, DTensor) else each for each in (one, other))
    return torch.equal(*(part.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for part in parts))

"""Several names of one tensor (tied weights) that are given with values of their own: all but one of them would be lost."""

from __future__ import annotations

import logging
from itertools import chain
from typing import NamedTuple

import torch

from ...comm import Communicator
from ...comm.core.fingerprint import printable
from ...tensor.dtensor.dtensor import DTensor
from ..disk.errors import CheckpointError

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


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same to the bit; of sharded ones, this rank's parts."""
    parts = (each._local_tensor if isinstance(each, DTensor) else each for each in (one, other))
    return torch.equal(*(part.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for part in parts))

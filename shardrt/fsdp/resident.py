"""Parameters that one rank keeps whole: modules compute with the shards' own memory.

So it is where the parameters are sharded over a single rank (a world of one, `replicate`, HSDP with shards of one), gathered in
their own dtypes, to the device on which the shards are, and by no custom all-gather. Nothing is gathered, nothing is freed.

Hazard: what is written to the shards, by an optimizer for example, is seen at once by a backward that is under way. The views
have version counters of their own, so autograd notices writes to the gathered parameters only, as it does on several ranks. An
optimizer that steps inside the backward, of a module that is called at several places of it, changes what the later ones read.
"""

from __future__ import annotations

from functools import partial

import torch

from ..comm import Work
from ..comm.streams import PAST
from .buffers import BufferKind, FlatBuffer, MemoryCounter
from .ranges import Named

RESIDENT = Work(PAST)  # in the place of a gather


class ResidentBuffer(FlatBuffer):
    """The memory of shards that are whole parameters, as a buffer of what is gathered. It stays, and is not counted."""

    def __init__(self, shards: torch.Tensor, memory: MemoryCounter, group: Named) -> None:
        """shards: (bytes,) uint8, the beginning of its storage."""
        count = partial(memory.count, BufferKind.GATHERED, group)
        self._set_up(shards.numel(), shards.untyped_storage(), 0, count)

    def seal(self) -> None:
        """No-op: the memory is that of the shards."""

    def allocate(self) -> None:
        """No-op."""

    def release(self) -> None:
        """No-op."""

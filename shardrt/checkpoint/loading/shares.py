"""What is read in many short runs, such as columns, is verified by all ranks of a tensor's mesh together.

A rank that needs columns has a part of each block of 16 KiB only, and would read the whole file to verify them. So it reads its
columns unverified, and beside that each rank of the mesh verifies its share of the blocks of all of the tensor's chunks. A load
fails on all ranks if one of them finds damage.
Cost: one exchange of names for each load; a rank reads about as much once more as it needs of these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from ...comm import Communicator
from ..formats.stored import StoredTensor
from ..formats.torch_file.items import BLOCK
from .reading import Fetch


def on_any_rank(names: Sequence[str], comm: Communicator) -> list[str]:
    """The names that ranks have given, of all of them. Collective."""
    everyone = comm.differing(list(names))
    return list(names) if everyone is None else sorted({name for theirs in everyone for name in theirs})


def share_of(name: str, stored: StoredTensor, rank: int, ranks: int) -> Iterator[Fetch]:
    """The blocks that one of so many ranks verifies.

    Chunks of up to two blocks are left: who needs a part of one reads it whole.
    """
    chunks = [chunk for chunk in stored.chunks if chunk.length > 2 * BLOCK]
    counts = [-(-prod(chunk.box.sizes) * stored.dtype.itemsize // BLOCK) for chunk in chunks]
    begin, end = (sum(counts) * each // ranks for each in (rank, rank + 1))
    place = 0
    for chunk, count in zip(chunks, counts, strict=True):
        first, last = max(begin - place, 0), min(end - place, count)
        if first < last:
            yield Fetch(name, stored.dtype, chunk, chunk.box, torch.empty(0), (first, last))
        place += count

"""How a tensor lies across the ranks of a mesh axis.

`Shard` is what a user asks for; `RaggedShard` and `FlatShard` are what the planned layout makes of it: contiguous runs of
one tensor's elements in rank order, of any length, possibly none.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Shard:
    """Asked for: cut the tensor along `dim`, anywhere between two rows of it."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class RaggedShard:
    """Rank r holds `rows[r]` consecutive rows (slices along `dim`); ranks in order, nothing twice, nothing left out."""

    dim: int
    rows: tuple[int, ...]

    def start(self, rank: int) -> int:
        """The first row of `rank`."""
        return sum(self.rows[:rank])


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Rank r holds `numels[r]` consecutive elements of the tensor, read with `dim` outermost, as a 1-D tensor."""

    dim: int
    numels: tuple[int, ...]

    def bounds(self) -> tuple[int, ...]:
        """The first element of every rank, and the end."""
        return (0, *accumulate(self.numels))


Placement = RaggedShard | FlatShard

"""Counts of rows or elements, one for each rank, kept as runs of equal counts: a few, however many ranks there are.

(8, 8, 8, 8, 3, 0, 0)    runs ((8, 4), (3, 1), (0, 2))
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, repeat, starmap
from typing import overload

_WRITTEN_OUT = 32  # counts in a `repr`; of more, the runs


class RankCounts(Sequence[int]):
    """Immutable. Equal to a tuple of the same counts, with its hash.

    runs: pairs of a count and the number of neighbouring ranks that have it, as few as possible.
    total: the sum of all counts.
    Cost: what it says of one rank, or of all together, takes no time that grows with the ranks; iteration, slices and the first
    `hash` do.
    """

    __slots__ = ("_before", "_ends", "_hash", "runs", "total")

    runs: tuple[tuple[int, int], ...]
    total: int

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """runs: neighbouring ones may have equal counts, and some no ranks."""
        found: list[tuple[int, int]] = []
        for count, ranks in runs:
            if ranks and found and found[-1][0] == count:
                found[-1] = count, found[-1][1] + ranks
            elif ranks:
                found.append((count, ranks))
        self.runs = tuple(found)
        self._ends = list(accumulate(ranks for _, ranks in found))
        *self._before, self.total = accumulate((count * ranks for count, ranks in found), initial=0)
        self._hash: int | None = None

    @classmethod
    def of(cls, counts: Sequence[int]) -> RankCounts:
        """These counts, one for each rank."""
        return counts if isinstance(counts, cls) else cls((count, len(list(ranks))) for count, ranks in groupby(counts))

    @property
    def largest(self) -> int:
        """The largest count. ValueError without ranks."""
        return max(count for count, _ in self.runs)

    @property
    def smallest(self) -> int:
        """The smallest count. ValueError without ranks."""
        return min(count for count, _ in self.runs)

    def before(self, rank: int) -> int:
        """The sum of the counts of the ranks before this one, which may be one past the last."""
        run = bisect_right(self._ends, rank)
        if run == len(self.runs):
            return self.total
        count, ranks = self.runs[run]
        return self._before[run] + count * (rank - self._ends[run] + ranks)

    def times(self, factor: int) -> RankCounts:
        """Each count times `factor`."""
        return RankCounts((count * factor, ranks) for count, ranks in self.runs)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, rank: int) -> int: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[int, ...]: ...

    def __getitem__(self, rank: int | slice) -> int | tuple[int, ...]:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        size = len(self)
        if not -size <= rank < size:
            raise IndexError(f"rank {rank} of {size}")
        return self.runs[bisect_right(self._ends, rank % size)][0]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(starmap(repeat, self.runs))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RankCounts):
            return self.runs == other.runs
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self))
        return self._hash

    def __reduce__(self) -> tuple[type[RankCounts], tuple[tuple[tuple[int, int], ...]]]:
        return RankCounts, (self.runs,)

    def __repr__(self) -> str:
        return repr(tuple(self)) if len(self) <= _WRITTEN_OUT else f"RankCounts({self.runs})"

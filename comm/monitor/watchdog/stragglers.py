"""Find the rank that the others wait for: all ranks wait inside collectives, the last to arrive hardly at all.

Each watchdog writes into the status table how long its rank has been inside operations. These times are compared by length
alone, so that clocks need not agree, and a row of another node may be a second old.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

from ...ending.status_table import StatusTable, TimeInside
from ..timing import Timing

_SLICES = 6  # slices in a window; their median counts, so that a checkpoint or a pause does not
_OPERATIONS = 20  # that a window needs for a rank to be named


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that is late, over a window."""

    rank: int
    share: float  # of the time, for which all others waited for it
    late_s: float  # by which it was late at each operation, on average
    operations: int
    window_s: float

    def __str__(self) -> str:
        return (
            f"in the last {self.window_s:.0f} s all others waited for it {self.share:.0%} of the time, "
            f"{1000 * self.late_s:.1f} ms on average at each of {self.operations} operations"
        )


@dataclass(frozen=True, slots=True)
class _TimeSlice:
    rank: int  # the rank that waited least
    late_s: float  # by which it waited less than every other
    seconds: float
    operations: int  # that this rank began


class Stragglers:
    """The part of one rank: it records its own progress; rank 0 also compares that of all."""

    def __init__(self, table: StatusTable, rank: int, timing: Timing, inside: TimeInside) -> None:
        self._table = table
        self._rank = rank
        self._slice_s = timing.straggler_s
        self._inside = inside
        self._since = monotonic()  # when ranks were last compared
        self._comparison = Comparison(timing.straggler) if rank == 0 and table.size > 1 and timing.straggler else None

    def tick(self) -> Straggler | None:
        """Record this rank's progress. Returns: on rank 0, a rank to name."""
        self._table.set_waited(self._rank, self._inside.seconds(), self._inside.operations)
        seconds = monotonic() - self._since
        if self._comparison is None or seconds < self._slice_s:
            return None
        self._since += seconds
        rows = [self._table.header(rank) for rank in range(self._table.size)]
        return self._comparison.add(seconds, [row.waited for row in rows], [row.operations for row in rows])


class Comparison:
    """Compares the ranks' progress. share: of the time, from which a rank is named.

    The same rank is named again only after another, or after a window in which nobody was late by half of the share.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._before: tuple[Sequence[float], Sequence[int]] | None = None
        self._slices: deque[_TimeSlice] = deque()
        self._named: int | None = None

    def add(self, seconds: float, waited: Sequence[float], operations: Sequence[int]) -> Straggler | None:
        """Add what every rank did up to now, `seconds` after the last time. Returns: a rank to name, at most once a window.

        waited: seconds inside operations, of each rank.   operations: how many it has begun.
        """
        before, self._before = self._before, (waited, operations)
        if before is None or seconds <= 0.0:
            return None
        waited = [now - then for now, then in zip(waited, before[0], strict=True)]
        done = [now - then for now, then in zip(operations, before[1], strict=True)]
        # A rank without operations takes no part, or its node cannot be heard.
        rank, *others = sorted((r for r, count in enumerate(done) if count), key=waited.__getitem__) or [0]
        late = waited[others[0]] - waited[rank] if others and 2 * done[rank] >= max(done) else 0.0
        self._slices.append(_TimeSlice(rank, late, seconds, done[rank]))
        if len(self._slices) < _SLICES:
            return None
        window = list(self._slices)
        self._slices.clear()
        return self._judge(window)

    def _judge(self, window: Sequence[_TimeSlice]) -> Straggler | None:
        rank = Counter(part.rank for part in window).most_common(1)[0][0]
        own = [part for part in window if part.rank == rank]
        share = median(part.late_s / part.seconds if part.rank == rank else 0.0 for part in window)
        operations, seconds = sum(part.operations for part in own), sum(part.seconds for part in window)
        if share < self._share / 2:
            self._named = None
        if share < self._share or operations < _OPERATIONS or rank == self._named:
            return None
        self._named = rank
        return Straggler(rank, share, sum(part.late_s for part in own) / operations, operations, seconds)

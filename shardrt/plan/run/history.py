"""How the memory of a rank came and went in a step, for a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...timeline.events import BY_GROUP, Counter

KINDS = ("process", "parameters", "gradients", "optimizer", "activations")  # series that are no group's
_MOMENTS = 1500  # a picture shows so many at most


class History:
    """Changes of memory since `restart()`, in series: buffers that come and go by their group, all else by its kind."""

    _changes: list[tuple[float, str, int]]  # seconds, series, bytes

    def __init__(self) -> None:
        self._before: dict[str, int] = {}  # bytes of each series when the step began
        self._now: Callable[[], float] = lambda: 0.0
        self._start = 0.0
        self._changes = []

    def restart(self, now: Callable[[], float]) -> None:
        """A step begins. now: the clock in seconds."""
        for _, series, nbytes in self._changes:
            self._before[series] = self._before.get(series, 0) + nbytes
        self._now, self._start, self._changes = now, now(), []

    def add(self, kind: str, group: str, nbytes: int) -> None:
        """Count bytes, negative ones for memory that was freed. group: of the buffer, or empty."""
        self._changes.append((self._now() - self._start, kind if kind in KINDS or not group else group, nbytes))

    def counters(self) -> list[Counter]:
        """The memory of each series over the step: `BY_GROUP` counters, of no more moments than a picture can show.

        Of the moments that fall together the one with the most memory stays, so that the peak is there.
        """
        totals = dict(self._before)
        found = [Counter(BY_GROUP, 0.0, dict(totals))]
        changed: dict[str, float] = {}
        shown = set(self._moments())
        for number, (at, series, nbytes) in enumerate(self._changes):
            totals[series] = changed[series] = totals.get(series, 0) + nbytes
            if number in shown:
                found.append(Counter(BY_GROUP, at, changed))
                changed = {}
        return found

    def _moments(self) -> Iterator[int]:
        """The changes after which the memory is shown: the highest of each bin of time, and the last one."""
        width = self._changes[-1][0] / _MOMENTS if self._changes else 0.0
        total, best, highest, bin_of_best = 0, 0, float("-inf"), 0
        for number, (at, _, nbytes) in enumerate(self._changes):
            total += nbytes
            here = int(at / width) if width else number
            if here != bin_of_best:
                yield best
                highest, bin_of_best = float("-inf"), here
            if total > highest:
                best, highest = number, total
        if self._changes:
            yield best
            yield len(self._changes) - 1

"""The order in which groups are used, and which to gather ahead.

The forward order of one iteration predicts that of the next; the backward order is this iteration's forward order, reversed.
A prediction that turns out wrong is dropped for the rest of the pass: groups are then gathered when they are used, and the
order that is being recorded predicts the next iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import ParamGroup


# Groups up to this size together are gathered, and reduced, in one go.
# Cost: as many bytes of buffers at most. What a small collective costs is the ranks' wait for each other, and Python code
# that other code has pushed out of the caches: side by side, a hundred small ones cost little more than ten.
LOT_NBYTES = 1 << 20


def is_large(group: ParamGroup) -> bool:
    """A group that fills a lot by itself."""
    return group.nbytes > LOT_NBYTES


class PrefetchQueue:
    """Records the order of use and names the groups to gather next: one, or a lot of small ones."""

    def __init__(self) -> None:
        self._predicted: list[ParamGroup] = []
        self._started: list[ParamGroup] = []  # this iteration's forwards, in the order in which they began
        self._finished: list[ParamGroup] = []  # and ended: a parent after its children, so backward is this, reversed

    def begin(self) -> None:
        """A forward of the root starts: the order recorded last predicts it."""
        self._predicted, self._started, self._finished = self._started, [], []

    def forward_starts(self, group: ParamGroup) -> list[ParamGroup]:
        """`group` is used in forward now; which to gather behind it."""
        position = len(self._started)
        self._started.append(group)
        if position >= len(self._predicted) or self._predicted[position] is not group:
            self._predicted = []
        return self._lot(self._predicted, range(position + 1, len(self._predicted)))

    def forward_ends(self, group: ParamGroup) -> None:
        """`group`'s forward is over."""
        self._finished.append(group)

    def backward_starts(self, group: ParamGroup) -> list[ParamGroup]:
        """`group` is used in backward now; which to gather behind it."""
        if group not in self._finished:  # its node is also that of a child, which came first
            return []
        while self._finished.pop() is not group:
            continue
        return self._lot(self._finished, range(len(self._finished) - 1, -1, -1))

    def _lot(self, order: list[ParamGroup], positions: range) -> list[ParamGroup]:
        """The groups at these positions, from the first on, that are gathered in one go. None if the first is gathered."""
        lot: list[ParamGroup] = []
        nbytes = 0
        for position in positions:
            group = order[position]
            nbytes += group.nbytes
            if group.ready is not None or (lot and nbytes > LOT_NBYTES):
                break
            lot.append(group)
        return lot

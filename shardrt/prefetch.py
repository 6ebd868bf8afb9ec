"""The order in which groups are used, and which to gather ahead.

The forward order of one iteration predicts that of the next; the backward order is this iteration's forward order, reversed.
A prediction that turns out wrong is dropped for the rest of the pass: groups are then gathered when they are used, and the
order that is being recorded predicts the next iteration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import ParamGroup


class PrefetchQueue:
    """Records the order of use and names the groups to gather next, `depth` of them."""

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
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
        return self._predicted[position + 1 : position + 1 + self._depth]

    def forward_ends(self, group: ParamGroup) -> None:
        """`group`'s forward is over."""
        self._finished.append(group)

    def backward_starts(self, group: ParamGroup) -> list[ParamGroup]:
        """`group` is used in backward now; which to gather behind it."""
        if group not in self._finished:  # its node is also that of a child, which came first
            return []
        while self._finished.pop() is not group:
            continue
        return self._finished[: -self._depth - 1 : -1]

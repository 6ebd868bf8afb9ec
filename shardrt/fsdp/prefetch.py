"""The order in which groups are used, and which to gather ahead.

The forward order of one iteration predicts that of the next; the backward order is this iteration's forward order, reversed.
A prediction that turns out wrong is dropped for the rest of the pass: groups are then gathered when they are used, and the
order that is being recorded predicts the next iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from .policy import PrefetchPolicy

if TYPE_CHECKING:
    from .param_group import ParamGroup

_log = logging.getLogger("shardrt")

# Groups up to this size together, neighbours in the order of use, are gathered, and reduced, in one go.
# Cost: as many bytes of buffers at most. What a small collective costs is the ranks' wait for each other, and Python code
# that other code has pushed out of the caches: side by side, a hundred small ones cost little more than ten.
BUCKET_BYTES = 1 << 20


def is_large(group: ParamGroup) -> bool:
    """A group that fills a bucket by itself."""
    return group.nbytes > BUCKET_BYTES


FORWARD_GROUPS, BACKWARD_GROUPS = 2, 1  # ahead, unless the policy says otherwise


class Order:
    """An order of use, cut into buckets, and how far along it groups have been named to be gathered."""

    def __init__(self, groups: Sequence[ParamGroup], ahead: int, max_bytes: int | None) -> None:
        self.groups = groups
        self._named = 0  # positions before this one
        before = [0, *accumulate(group.nbytes for group in groups)]  # bytes, by position
        largest = BUCKET_BYTES if max_bytes is None else min(BUCKET_BYTES, max_bytes)
        buckets: list[int] = []  # by position
        ends: list[int] = []  # by bucket: the position after its last group
        first = 0
        for position in range(len(groups)):
            if not ends or before[position + 1] - before[first] > largest:
                first = position
                ends.append(position)
            ends[-1] = position + 1
            buckets.append(len(ends) - 1)
        # The position before which groups may be gathered while the one at a position is in use.
        self._reach = [
            max(
                (
                    end
                    for end in ends[bucket : bucket + 1 + ahead]
                    if max_bytes is None or before[end] - before[place + 1] <= max_bytes
                ),
                default=place + 1,
            )
            for place, bucket in enumerate(buckets)
        ]

    def restart(self) -> Order:
        """The same order, nothing named yet."""
        self._named = 0
        return self

    @property
    def first_reach(self) -> int:
        """How many groups may be gathered when the first is in use, itself included."""
        return self._reach[0] if self._reach else 0

    def next_is(self, position: int, group: ParamGroup) -> bool:
        """The group at `position` is `group`."""
        return position < len(self.groups) and self.groups[position] is group

    def after(self, position: int) -> list[ParamGroup]:
        """What to gather behind the group at `position`, which is used now: whole buckets, each named once."""
        first, reach = max(self._named, position + 1), self._reach[position]
        if reach <= first:
            return []
        self._named = reach
        return [group for group in self.groups[first:reach] if group.ready is None]


class PrefetchQueue:
    """Records the order of use and names the groups to gather next."""

    def __init__(self) -> None:
        self._policy = PrefetchPolicy()
        self._started: list[ParamGroup] = []  # this iteration's forwards, in the order in which they began
        self._finished: list[ParamGroup] = []  # and ended: a parent after its children, so backward is this, reversed
        self._forward = Order((), 0, None)
        self._backward: Order | None = None  # once this iteration's backward has begun
        self._backward_position = 0
        self._predicted_finish: list[ParamGroup] = []
        self._keep_from = 0  # in that list
        self._reported = False
        self._orders: dict[tuple[int, int, PrefetchPolicy], Order] = {}  # the newest of each pass

    def begin(self, policy: PrefetchPolicy) -> None:
        """A forward of the root starts: the order recorded last predicts it, and what its backward will begin with."""
        self._policy = policy
        self._forward = self._order(self._started, FORWARD_GROUPS)
        self._predicted_finish = self._finished
        self._keep_from = len(self._finished) - self._order(self._finished[::-1], BACKWARD_GROUPS).first_reach
        self._started, self._finished, self._backward = [], [], None

    def _order(self, groups: list[ParamGroup], ahead: int) -> Order:
        """Cost: some microseconds per group, so one that repeats is taken up again."""
        key = (ahead, BUCKET_BYTES, self._policy)
        if key not in self._orders or self._orders[key].groups != groups:
            self._orders[key] = Order(groups, self._policy.groups(ahead), self._policy.max_bytes)
        return self._orders[key].restart()

    def forward_starts(self, group: ParamGroup) -> list[ParamGroup]:
        """`group` is used in forward now; which to gather behind it."""
        position, predicted = len(self._started), self._forward.groups
        self._started.append(group)
        if not self._forward.next_is(position, group):
            self._report(predicted[position : position + 1], group)
            self._forward, self._predicted_finish = Order((), 0, None), []
            return group.settings.forward_prefetch or []
        ahead = self._forward.after(position)
        return ahead if group.settings.forward_prefetch is None else group.settings.forward_prefetch

    def _report(self, expected: Sequence[ParamGroup], found: ParamGroup) -> None:
        if expected and not self._reported and found.device_mesh.rank == 0:
            self._reported = True
            _log.warning(
                f"the order of use changed: expected '{expected[0].name}', found '{found.name}'; groups are gathered when "
                "they are used until the order repeats (said once)"
            )

    def forward_ends(self, group: ParamGroup) -> bool:
        """`group`'s forward is over. True if it is expected to be used next, so that freeing it would free nothing.

        Next is a further call of its module, or the backward, if that begins with it.
        """
        position = len(self._finished)
        self._finished.append(group)
        if self._forward.next_is(len(self._started), group):
            return True
        if position < self._keep_from or group.settings.reshard_after_forward is not None or not torch.is_grad_enabled():
            return False
        return position < len(self._predicted_finish) and self._predicted_finish[position] is group

    def backward_starts(self, group: ParamGroup) -> list[ParamGroup]:
        """`group` is used in backward now; which to gather behind it."""
        if self._backward is None:
            self._backward = self._order(self._finished[::-1], BACKWARD_GROUPS)
            self._backward_position = 0
        order = self._backward.groups
        try:
            position = order.index(group, self._backward_position)
        except ValueError:  # its node is also that of a child, which came first
            return []
        self._backward_position = position + 1
        ahead = self._backward.after(position)
        if group.settings.backward_prefetch is not None:
            ahead = group.settings.backward_prefetch
        return [group for group in ahead if group.settings.unshard_in_backward]

    def backward_repeats(self, group: ParamGroup) -> bool:
        """`group` is expected to be used again in this backward, and its gradients to wait for that.

        At once: its module was called several times in a row. Or later, where a reduction must come once only.
        """
        if self._backward is None:
            return False
        if group.settings.reduce_unused:
            return group in self._backward.groups[self._backward_position :]
        return self._backward.next_is(self._backward_position, group)

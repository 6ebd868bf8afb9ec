"""The order in which groups are used, and which to gather ahead.

The forward order of one iteration predicts that of the next; the backward order is this iteration's forward order, reversed.
A prediction that turns out wrong is dropped for the rest of the pass: groups are then gathered when they are used, and the
order that is being recorded predicts the next iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ...comm import Stream
from ..base.policy import PrefetchPolicy
from ..memory import context
from .param_group import ParamGroup

_log = logging.getLogger("shardrt")

# How many buckets to gather ahead, by pass. "between": how many stay gathered between the passes, beyond the first bucket with
# which the backward begins.
_AHEAD = {"forward": 2, "between": 1, "backward": 1}
_ON_DEMAND = {"forward": 0, "between": 1, "backward": 0}


class Order:
    """An order of use, divided into buckets, and the position up to which `after()` has returned groups to gather."""

    groups: Sequence[ParamGroup]
    _named: int  # after() has returned the groups before this position; written by restart() and after()
    _reach: list[int]  # by position: while the group there is in use, groups before the position given here may be gathered

    def __init__(self, groups: Sequence[ParamGroup], ahead: int, max_bytes: int | None) -> None:
        self.groups = groups
        self._named = 0
        before = [0, *accumulate(group.nbytes for group in groups)]  # bytes, by position
        largest = context.BUCKET_BYTES if max_bytes is None else min(context.BUCKET_BYTES, max_bytes)
        buckets: list[int] = []  # by position
        ends: list[int] = []  # by bucket: the position after its last group
        first = 0
        for position, group in enumerate(groups):
            fits = before[position + 1] - before[first] <= largest
            if not ends or not (fits or _small_beside(groups[position - 1], group, largest)):
                first = position
                ends.append(position)
            ends[-1] = position + 1
            buckets.append(len(ends) - 1)
        self._reach = [
            max(
                (
                    end
                    for end in ends[bucket : bucket + 1 + ahead]
                    if max_bytes is None or before[end] - before[position + 1] <= max_bytes
                ),
                default=position + 1,
            )
            for position, bucket in enumerate(buckets)
        ]

    def restart(self) -> Order:
        """Start again: after() has returned no group yet. Returns: this order."""
        self._named = 0
        return self

    @property
    def first_reach(self) -> int:
        """How many groups may be gathered when the first is in use, itself included."""
        return self._reach[0] if self._reach else 0

    def next_is(self, position: int, group: ParamGroup) -> bool:
        """Whether the group at `position` is `group`."""
        return position < len(self.groups) and self.groups[position] is group

    def after(self, position: int) -> list[ParamGroup]:
        """The groups to gather after the one at `position`, which is used now: whole buckets, each named once."""
        first, reach = max(self._named, position + 1), self._reach[position]
        if reach <= first:
            return []
        self._named = reach
        return [group for group in self.groups[first:reach] if not group.state.gathered and group.gather.needs_launch]


def _small_beside(one: ParamGroup, other: ParamGroup, largest: int) -> bool:
    """Whether both are of the same modules, one quantised and one small, such as the biases beside quantised matrices."""
    quantised = bool(one.quantization or other.quantization)
    return quantised and one.modules == other.modules and min(one.nbytes, other.nbytes) <= largest


class PrefetchQueue:
    """Records the order of use and names the groups to gather next.

    stream: the one for gathers. Where it does not run beside compute, gathering ahead would overlap nothing and take memory, so
    it is done only if a policy asks for it.
    """

    _ahead: Mapping[str, int]  # how many buckets to gather ahead by default, by pass

    # Written by begin().
    _policy: PrefetchPolicy
    _forward: Order  # predicted; emptied by forward_starts() when it turns out wrong
    _predicted_finish: list[ParamGroup]  # the order in which forwards are predicted to end; emptied likewise
    _keep_from: int  # the position in that list from which on groups are those with which the backward begins
    _orders: dict[tuple[str, int, PrefetchPolicy], Order]  # the newest of each pass

    # Recorded in this iteration.
    _started: list[ParamGroup]  # forwards, in the order in which they began
    _finished: list[ParamGroup]  # forwards, in the order in which they ended: backward is this order, reversed
    _backward: Order | None  # once the backward has begun
    _backward_position: int  # in that order
    _reported: bool  # a changed order was logged

    def __init__(self, stream: Stream) -> None:
        self._ahead = _AHEAD if stream.overlaps else _ON_DEMAND
        self._policy = PrefetchPolicy()
        self._forward, self._predicted_finish, self._keep_from = Order((), 0, None), [], 0
        self._orders = {}
        self._started, self._finished = [], []
        self._backward, self._backward_position = None, 0
        self._reported = False

    def begin(self, policy: PrefetchPolicy) -> None:
        """A forward of the root starts: the order recorded last predicts it, and what its backward will begin with."""
        self._policy = policy
        self._forward = self._order(self._started, "forward")
        self._predicted_finish = self._finished
        self._keep_from = len(self._finished) - self._order(self._finished[::-1], "between").first_reach
        self._started, self._finished, self._backward = [], [], None

    def _order(self, groups: list[ParamGroup], of_pass: str) -> Order:
        """The order of these groups. Cost: some microseconds per group to make, so one that repeats is used again."""
        key = (of_pass, context.BUCKET_BYTES, self._policy)
        if key not in self._orders or self._orders[key].groups != groups:
            self._orders[key] = Order(groups, self._policy.groups(self._ahead[of_pass]), self._policy.max_bytes)
        return self._orders[key].restart()

    def forward_starts(self, group: ParamGroup, *, follows_lists: bool) -> list[ParamGroup]:
        """`group` is used in forward now. Returns: the groups to gather after it. follows_lists: those of the user's list."""
        listed = group.settings.forward_prefetch if follows_lists else None
        position, predicted = len(self._started), self._forward.groups
        self._started.append(group)
        if position >= len(predicted) or predicted[position] is not group:
            self._report(predicted[position : position + 1], group)
            self._forward, self._predicted_finish = Order((), 0, None), []
            return listed or []
        ahead = self._forward.after(position)
        return ahead if listed is None else listed

    def _report(self, expected: Sequence[ParamGroup], found: ParamGroup) -> None:
        if expected and not self._reported and found.device_mesh.rank == 0:
            self._reported = True
            _log.warning(
                f"the order of use changed: expected '{expected[0].name}', found '{found.name}'; groups are gathered when "
                "they are used until the order repeats (logged once)"
            )

    def forward_ends(self, group: ParamGroup, has_graph: bool) -> bool:
        """The forward of `group` is over. has_graph: a backward may come back to it.

        Returns: whether it is expected to be used next, by another call of its module or because the backward begins with
        it. Freeing it would save no memory then.
        """
        position = len(self._finished)
        self._finished.append(group)
        if self._forward.next_is(len(self._started), group):
            return True
        if position < self._keep_from or group.settings.reshard_after_forward is not None or not has_graph:
            return False
        return position < len(self._predicted_finish) and self._predicted_finish[position] is group

    def backward_starts(self, group: ParamGroup, *, follows_lists: bool) -> list[ParamGroup]:
        """`group` is used in backward now. Returns: the groups to gather after it. follows_lists: as for a forward."""
        if self._backward is None:
            self._backward = self._order(self._finished[::-1], "backward")
            self._backward_position = 0
        order = self._backward.groups
        try:
            position = order.index(group, self._backward_position)
        except ValueError:  # its autograd node is also that of a child, which came first
            return []
        self._backward_position = position + 1
        ahead = self._backward.after(position)
        if follows_lists and group.settings.backward_prefetch is not None:
            ahead = group.settings.backward_prefetch
        return [group for group in ahead if group.settings.unshard_in_backward]

    def backward_repeats(self, group: ParamGroup) -> bool:
        """Whether `group` is expected to be used again in this backward, so that its gradients wait for that.

        Next, if its module was called several times in a row; or at any later time, if it must be reduced once only.
        """
        if self._backward is None:
            return False
        if group.settings.reduce_unused:
            return group in self._backward.groups[self._backward_position :]
        return self._backward.next_is(self._backward_position, group)

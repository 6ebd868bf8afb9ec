"""Counting a part of a run several times, where a step does the same again and again."""

from __future__ import annotations

from ...comm.startup.dry import DryWorld
from ..machine.cost import Costs
from .meter import CollectiveMeter
from .operations import Operations


class Lap:
    """From when it is made until `repeat`: a part of a run that ends as it has begun, but for the time.

    Cost: none of it runs again, so that a step of many micro-batches takes no longer to forecast than one of a few.
    """

    def __init__(self, world: DryWorld, costs: Costs, operations: Operations, collectives: CollectiveMeter) -> None:
        self._world, self._costs, self._operations = world, costs, operations
        self._sums: tuple[tuple[object, tuple[str, ...]], ...] = (
            (collectives, ("received_within", "received_across", "seconds")),
            (world.compute, ("busy", "waited")),
        )
        self._start = world.compute.now()
        self._times = {kind: kind.times for kind in operations.kinds}
        self._spent = dict(costs.spent)
        self._before = [getattr(owner, name) for owner, names in self._sums for name in names]

    def repeat(self, times: int) -> None:
        """Let what has been done since count so many times more, and as much time pass on all streams."""
        self._world.advance(times * (self._world.compute.now() - self._start))
        for kind in self._operations.kinds:
            kind.times += times * (kind.times - self._times.get(kind, 0))
        for bound, before in self._spent.items():
            self._costs.spent[bound] += times * (self._costs.spent[bound] - before)
        sums = ((owner, name) for owner, names in self._sums for name in names)
        for (owner, name), before in zip(sums, self._before, strict=True):
            now = getattr(owner, name)
            setattr(owner, name, now + times * (now - before))

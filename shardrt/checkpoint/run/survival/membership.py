"""Which ranks a run has, and is to have, where it survives the loss of some."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ....comm import Communicator, Replacement, world
from ....comm.core.members import NotRecovered, end_this_process
from ....comm.ending.report import log

_STARTED = "PMIX_NAMESPACE"  # names the ranks that Open MPI has started together


@dataclass(frozen=True, slots=True)
class Survival:
    """How a run goes on when ranks are lost.

    copies_every: the steps between two copies of the state in the node's memory, from which it goes on; None: none are made,
        and it goes on from the newest checkpoint.   min_ranks: with fewer, the job ends.
    group: how many consecutive ranks are of use only together, as those of a tensor-parallel group; it divides their number. If
        one of a group is lost, the others of the group leave as well.
    Memory: twice the state, in /dev/shm; four times on several nodes. On a GPU also one copy that is pinned.
    """

    copies_every: int | None = 10
    min_ranks: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        if (self.copies_every is not None and self.copies_every < 1) or self.min_ranks < 1 or self.group < 1:
            raise ValueError(f"{self}: expected numbers of at least 1")


class Membership:
    """The ranks of a run: as many as at its start, on the same nodes, in groups. Raises: ValueError for a part of a group."""

    def __init__(self, survival: Survival) -> None:
        here = world()
        if here.size % survival.group:
            raise ValueError(f"Run(survive={survival}): {here.size} ranks, expected a multiple of the group")
        self._survival = survival
        self._hosts: Sequence[str] = ()  # of all ranks that there are to be
        # This rank's group, by a name that no other has or gets: it stays, whatever numbers ranks have.
        self._group = os.environ.get(_STARTED, ""), here.rank // survival.group

    def meet(self, comm: Communicator) -> None:
        """Let new ranks know of all that there are to be. Collective."""
        known = comm.exchange(self._hosts)
        self._hosts = max(known, key=len) or comm.exchange(world().node)

    @property
    def count(self) -> int:
        """How many ranks there are to be."""
        return len(self._hosts)

    def check(self) -> None:
        """End this rank if its group has lost one. Collective. Raises: RankLost if others end so; NotRecovered."""
        here, size = world(), self._survival.group
        everyone = here.comm.exchange(self._group)
        broken = {group for group in everyone if everyone.count(group) < size}
        if len(broken) == len(set(everyone)):
            raise NotRecovered(f"each group of {size} ranks (Survival.group) has lost some")
        if self._group in broken:
            log(here.rank, f"leaves, since its group of {size} ranks (Survival.group) has lost some")
            end_this_process()
        if broken:
            here.comm.exchange(None)  # they do not come
        if here.size < self._survival.min_ranks:
            raise NotRecovered(f"{here.size} ranks are left, fewer than Survival(min_ranks={self._survival.min_ranks})")

    def replace_lost(self) -> Replacement | None:
        """Start processes in the place of lost ranks, where that is asked for. Collective. None: there is nothing to do."""
        here = world()
        if not here.settings.replace or here.size >= self.count:
            return None
        missing = Counter(self._hosts) - Counter(here.comm.exchange(here.node))
        return here.replace(list(missing.elements())[: self.count - here.size])

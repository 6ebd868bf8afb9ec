"""What continues a run when ranks are lost: copies of its state, its recovery on another world, and replacements."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ...comm import Coming, RankLost, Replacement, world
from ...comm.core.members import NotRecovered
from ...comm.ending.words import name_ranks
from ...fsdp.base.events import Step, during
from .resuming import Resuming
from .saves import Saves
from .stopping import Stopping
from .survival.copies import MemoryCopies
from .survival.membership import Membership, Survival
from .training import Build, Training

_log = logging.getLogger("shardrt")


@dataclass(slots=True)
class _Ranks:
    """Ranks that are lost, or join, for a timeline."""

    name: str


class Continuing:
    """The ranks of a run, and what they go on from. Without `survive`, it resumes at the start only."""

    def __init__(
        self,
        training: Training,
        saves: Saves,
        stopping: Stopping,
        resuming: Resuming,
        state: dict[str, Any] | Build,
        survive: Survival | None,
    ) -> None:
        self._build = state if callable(state) else None
        if survive is not None and self._build is None:
            raise ValueError("Run(survive=...): expected a function that makes the state, as Run(folder, build, survive=...)")
        if survive is not None and not world().settings.survive:
            raise RuntimeError("Run(survive=...): this job ends when it loses a rank; start it with shardrt.launch --survive")
        self.membership = None if survive is None else Membership(survive)
        self._copies_every = None if survive is None else survive.copies_every
        self._training, self._saves, self._stopping, self._resuming = training, saves, stopping, resuming
        self._copies: MemoryCopies | None = None

    def open(self) -> None:
        """Go on from the newest checkpoint. Collective."""
        if self._copies_every is not None:
            self._copies = MemoryCopies()
            if not self._copies.outlives_nodes and world().rank == 0:
                _log.warning("the copies of the run are on one node, and do not outlive it (Survival.copies_every)")
        self._begin()

    def close(self, *, delete: bool) -> None:
        """Make no more copies. delete: nobody needs them."""
        if self._copies is not None:
            self._copies.close(delete=delete)

    def begin_steps(self, total: int, *, may_grow: bool) -> Replacement | None:
        """What all ranks do before the first of some steps, and, in `grow`, beside a new rank. Collective.

        Returns: processes that are to take the place of lost ranks, if it may grow.
        """
        self._training.check_alike("steps", total=total)
        if self._copies is not None and not self._copies.adopt(self._training.name):
            self._copies.cover(self._training.name, self._training.contents())
        return self.membership.replace_lost() if may_grow and self.membership is not None else None

    def copy(self) -> None:
        """Copy the state after a step, if that is due. Collective."""
        if self._copies is not None and self._copies_every is not None:
            self._copies.poll()
            if self._training.done % self._copies_every == 0:
                self._copies.take(self._training.name, self._training.contents())

    def recover(self) -> None:
        """See `Run.recover`."""
        assert self.membership is not None, "a run that survives"
        with during(Step.RECOVER, _Ranks(f"without {name_ranks(world().lost)} of {world().size}")):
            while True:
                self._saves.forget()
                self._training.drop()
                with self._stopping.reopened():
                    world().recover()
                try:
                    self.membership.check()
                    self._go_on()
                    return
                except NotRecovered:
                    raise
                except RankLost:
                    continue

    def grow(self, coming: Replacement, total: int) -> Replacement | None:
        """If the processes in the place of lost ranks are there, go on with them. Collective. Returns: those still to come."""
        assert self.membership is not None, "it has asked for them"
        states = set(self._training.comm.exchange(coming.coming))
        if Coming.FAILED in states:
            coming.abandon()
            return self.membership.replace_lost()
        if states != {Coming.THERE}:
            return coming
        with during(Step.RECOVER, _Ranks(f"with {self.membership.count} ranks again")):
            if self._copies is not None:
                self._copies.cover(self._training.name, self._training.contents())
            else:
                self._saves.catch_up()
            self._saves.finish()
            self._training.drop()
            with self._stopping.reopened():
                here = world().grow(coming)
            if here.size < self.membership.count:  # more are lost
                self.membership.check()
            self._go_on()
            return self.begin_steps(total, may_grow=True)

    # What follows is what a new rank does in `Run.__init__` and `__enter__`: the others do it with it, in the same order.

    def _go_on(self) -> None:
        """Make the state anew, on another world than before, and load the newest there is. Collective. Raises: NotRecovered."""
        assert self._build is not None, "a run that survives has a function"
        self._training.done = -1
        self._training.settle(self._build, self._training.folder)
        if self._copies is not None:
            self._copies.join(str(self._copies.folder))
        self._begin()
        if self._training.done < 0:
            raise NotRecovered(f"no copy and no checkpoint in {str(self._training.folder)!r} to go on from")

    def _begin(self) -> None:
        if self.membership is not None:
            self.membership.meet(self._training.comm)
        self._resuming.resume(self._copies)

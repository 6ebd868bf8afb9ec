"""The steps of a run, and what is done after each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ...comm import RankLost, world
from .continuing import Continuing
from .saves import Saves
from .signals import DUE
from .stopping import Stopping
from .training import Training

_log = logging.getLogger("shardrt")


class Loop:
    """The loops of a run, one after another."""

    def __init__(self, training: Training, saves: Saves, stopping: Stopping, continuing: Continuing) -> None:
        self._training, self._saves, self._stopping, self._continuing = training, saves, stopping, continuing

    def train(self, total: int, step: Callable[[int], object]) -> None:
        """See `Run.train`."""
        while True:
            try:
                for index in self.steps(total, may_grow=True):
                    step(index)
                self.finish()
                return
            except RankLost:
                if self._continuing.membership is None:
                    raise
            # Here the exception is gone, whose frames hold the old state.
            self._continuing.recover()

    def steps(self, total: int, *, may_grow: bool) -> Iterator[int]:
        """See `Run.steps`. may_grow: lost ranks are replaced: `state` may be another after a step."""
        training = self._training
        training.end_step()
        coming = self._continuing.begin_steps(total, may_grow=may_grow)
        if training.done > total and world().rank == 0:
            _log.warning("'%s': the run has done %d steps, more than the %d asked for", training.folder, training.done, total)
        try:
            while training.done < total:
                training.begin_step()
                yield training.done
                training.end_step()
                self._after_step(is_last=training.done == total)
                if coming is not None and training.done < total:
                    coming = self._continuing.grow(coming, total)
        finally:
            if coming is not None:
                coming.abandon()

    def _after_step(self, *, is_last: bool) -> None:
        told = self._stopping.told()
        if told not in (0, DUE) and not is_last:
            self._stopping.stop(told)
        self._saves.poll()
        self._continuing.copy()
        if is_last or told == DUE or self._saves.is_due:
            self._saves.begin()

    def finish(self) -> None:
        """Save the last step, unless it is saved already, and wait for that. Collective."""
        self._training.end_step()
        self._saves.catch_up()
        self._saves.finish()

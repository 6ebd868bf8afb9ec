"""What ends a run before its last step: a signal that one of its ranks has got."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from ...comm import world
from .saves import Saves
from .signals import Noted, StopSignals
from .training import Training

STOPPED = os.EX_TEMPFAIL  # the exit code: "try again later"
_noted = Noted()


class Stopping:
    """The signals of a run, and the stop of all ranks after the same step."""

    def __init__(self, training: Training, saves: Saves) -> None:
        self._training, self._saves = training, saves
        self._signals = StopSignals(_noted)
        self._has_stopped = False

    def open(self) -> None:
        """Note signals from now on."""
        self._signals.__enter__()

    def close(self) -> None:
        """Let signals do what they did before."""
        if not self._has_stopped:  # else the process is about to end, and the signal that ended it is dealt with
            self._signals.__exit__(None, None, None)

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """In the block, the world changes: the handlers from before are of the world that has lost ranks."""
        self.close()
        yield
        self.open()

    def told(self) -> int:
        """The signal that ends the run, `DUE` if it is time to save, or 0: see `StopSignals.agreed`. Collective."""
        return self._signals.agreed(self._training.comm, is_due=self._saves.is_time())

    def stop(self, number: int) -> NoReturn:
        """Save, and end the process, since this signal has come. Collective."""
        saved = self._saves.save_and_stop()
        self._has_stopped = True
        _noted.clear()
        if world().rank == 0:
            os.write(2, f"{signal.Signals(number).name}: saved {saved}; stopping with exit code {STOPPED}\n".encode())
        sys.exit(STOPPED)

"""What a run saves, and when: after so many steps, or so much time, and at its end."""

from __future__ import annotations

import logging
import re
import time

from ...comm import world
from ..disk.errors import CheckpointError
from ..disk.remote_path import Location
from ..saving.save import AsyncSave, async_save, save
from .training import Training

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_log = logging.getLogger("shardrt")


class Saves:
    """The checkpoints of a run, one of which may be under way.

    every, keep, keep_every: see `Run`.   arguments: these, as the ranks compare them.
    """

    def __init__(self, training: Training, every: int | str, keep: int, keep_every: int | None) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"Run(keep={keep}, keep_every={keep_every}): expected both to be at least 1")
        self._training = training
        self._keep = {"keep": keep, "keep_every": keep_every}
        self._every, self._every_s = _steps_and_seconds(every)
        self.arguments = {"every": every, **self._keep}
        self._saving: AsyncSave | None = None  # the save under way
        self._began = 0.0  # when the newest save began, or the run, by this rank's clock
        # The number of steps of the newest save, which may be under way, or of what was loaded; None: that was a copy.
        self._saved: int | None = 0

    def start_clock(self) -> None:
        """The run begins."""
        self._began = time.monotonic()

    def is_time(self) -> bool:
        """Whether this is rank 0, and it is time to save."""
        # A new save waits for the one under way: after each step, if saves take longer than `every`.
        if self._every_s is None or self._saving is not None or self._training.comm.rank != 0:
            return False
        return time.monotonic() >= self._began + self._every_s

    @property
    def is_due(self) -> bool:
        """Whether the number of steps says so."""
        return any(n and self._training.done % n == 0 for n in (self._every, self._keep["keep_every"]))

    def begin(self) -> None:
        """Save the steps that are done, while training goes on. Collective."""
        self.finish()
        self._began = time.monotonic()
        self._saving = async_save(self._training.folder / self._training.name, self._training.contents(), **self._keep)
        self._saved = self._training.done

    def poll(self) -> None:
        """Look after the save under way. Collective."""
        if self._saving is not None and self._saving.poll():
            self._commit()

    def finish(self) -> None:
        """Wait for the save under way. Collective."""
        if self._saving is not None:
            self._saving.wait()
            self._commit()

    def catch_up(self) -> None:
        """Begin to save the steps that are done, unless they are saved already. Collective."""
        if self._saved != self._training.done:
            self.begin()

    def save_and_stop(self) -> Location:
        """Save the steps that are done, and tell the launcher that the run stops here. Collective. Returns: the checkpoint."""
        try:
            self.finish()
        except CheckpointError as error:  # this step can still be saved
            if world().rank == 0:
                _log.warning("the save of step %s was not finished: %s", self._saved, error)
            self._saving = None
        folder = self._training.folder / self._training.name
        save(folder, self._training.contents(), **self._keep)
        self._saved = self._training.done
        self.report_progress(" stopped")
        return folder

    def forget(self) -> None:
        """The save under way is of a world that has lost ranks."""
        self._saving = None

    def resume(self, found: Location) -> None:
        """This checkpoint, or copy of another folder, was loaded."""
        self._saved = self._training.done if found.parent == self._training.folder else None

    def _commit(self) -> None:
        self._saving = None
        self.report_progress()

    def report_progress(self, stopped: str = "") -> None:
        """Tell the launcher which step was saved last, and whether the run has stopped to be continued."""
        file = world().settings.progress
        if file is None or world().rank != 0 or self._saved is None:
            return
        try:
            file.write_text(f"{self._saved}{stopped}\n")
        except OSError as error:
            _log.warning("the launcher will not know of step %d: cannot write '%s': %s", self._saved, file, error)


def _steps_and_seconds(every: int | str) -> tuple[int | None, float | None]:
    """Which of the two `every` gives; the other one is None. Raises ValueError for anything else."""
    match = _TIME.fullmatch(every) if isinstance(every, str) else None
    steps = None if isinstance(every, str) or every < 1 else every
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if steps is None and not seconds:
        raise ValueError(
            f"Run(every={every!r}): expected a number of steps, at least 1, or a time, more than 0, such as '90s', '10min' or "
            "'1.5h'"
        )
    return steps, seconds or None

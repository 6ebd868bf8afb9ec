"""A training run that resumes: from its last checkpoint, on any number of ranks, after whatever ended it.

    with shardrt.Run("runs/a", {"model": model, "optimizer": optimizer}) as run:
        for step in run.steps(1000):
            train(step)

on entry           rank 0 finds the newest committed checkpoint, and all ranks load it; if it is damaged, the one before
after each step    1. the ranks agree whether one of them was told to stop: then they save, wait for it, and exit
                   2. they check the save that is under way; an error in it is raised on every rank
                   3. if it is time, they begin the next save: training goes on while it is written
at the end         the last step is saved, unless it is already, and the ranks wait for it; so also after a `break`
on an exception    nothing is saved; the save that is under way completes, or leaves the older checkpoint
on a lost rank     with `survive`: the others make the state anew on the world that is left, and load the newest copy in
                   memory (`copies.py`), or checkpoint

The folder has the checkpoints `step-00000100`, ..., by the number of steps done. Beside the user's state a checkpoint has the
entry `run`: the number of steps, and the random numbers of all ranks. Checkpoints of other names are ignored.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from ...comm import Coming, RankLost, Replacement, World, members, world
from ...comm.ending.words import name_ranks
from ...comm.members import NotRecovered
from ...fsdp.base.events import Step, during
from ..disk.files import METADATA
from ..disk.remote_path import Location
from ..disk.storage import located, storage_of
from ..errors import CheckpointError, DamagedCheckpointError, agreed
from ..formats.dcp.metadata import read_stored
from ..loading.load import load, load_copy
from ..saving.save import AsyncSave, async_save, end_previous, save
from .copies import MemoryCopies
from .membership import Membership, Survival
from .random_state import RandomState
from .stop import DUE, Noted, StopSignals

STOPPED = os.EX_TEMPFAIL  # the exit code: "try again later"
_KEY = "run"
_PREFIX = "step-"
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_noted = Noted()
_log = logging.getLogger("shardrt")


@dataclass(slots=True)
class _Ranks:
    """Ranks that are lost, or join, for a timeline."""

    name: str


class Run:
    """Resumes from the newest checkpoint in a folder, saves while it trains, and stops when Slurm wants it to.

    folder: of this run's checkpoints, on a file system that all ranks share, or the URL of one in a store.
    state: as `save` and `load` take it: a save takes its plain values as they are then, and a load at the start replaces them.
        The key "run" is reserved. Or a function that makes it on the world that it is given; `Run.state` is what it has made.
    every: the steps between two saves; or the time, as "90s", "10min" or "1.5h", from entry and from each save to the next, by
        rank 0's clock: the save begins at the end of the step in which it has passed, unless one is still under way.
    keep: how many of the newest checkpoints remain.   keep_every: steps that are multiples of this are saved too, and their
        checkpoints are never deleted.
    on_damage: "older": if the newest checkpoint is damaged, the newest one that is not is loaded, with a warning, and what is
        damaged is kept as `step-00000200.damaged`; if all are, that is an error. "raise": a damaged newest one is an error.
    survive: go on without ranks that are lost, in a job of `shardrt.launch --survive`: see `train` and `recover`.
    On SIGUSR1 or SIGTERM, to any rank, all ranks stop after the same step, save, and exit with code 75 (EX_TEMPFAIL);
    `scripts/slurm/train.sbatch` then requeues the job. A second signal, a second later or more, does what it would do without
    a `Run`.
    Collective: every rank makes the same `Run` and runs the same steps.
    Raises: ValueError for bad arguments; RuntimeError before `shardrt.init()`, or for `survive` in another job; from entry
    and from `steps` a CheckpointError on every rank, with the reason, if one of them cannot load or save.
    """

    state: dict[str, Any]  # what is saved and loaded

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: dict[str, Any] | Callable[[World], dict[str, Any]],
        every: int | str = 100,
        keep: int = 3,
        on_damage: Literal["older", "raise"] = "older",
        *,
        keep_every: int | None = None,
        survive: Survival | None = None,
    ) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"Run(keep={keep}, keep_every={keep_every}): expected both to be at least 1")
        if on_damage not in ("older", "raise"):
            raise ValueError(f"Run(on_damage={on_damage!r}): expected 'older' or 'raise'")
        self._every, self._every_s = _steps_and_seconds(every)
        self._build = state if callable(state) else None
        if survive is not None and self._build is None:
            raise ValueError("Run(survive=...): expected a function that makes the state, as Run(folder, build, survive=...)")
        if survive is not None and not world().settings.survive:
            raise RuntimeError("Run(survive=...): this job ends when it loses a rank; start it with shardrt.launch --survive")
        self._membership = None if survive is None else Membership(survive)
        self.done = 0  # the number of steps that are done
        self._survive = survive
        self._make(state, folder)
        self._copies: MemoryCopies | None = None
        self._keep = {"keep": keep, "keep_every": keep_every}
        self._arguments = {"every": every, **self._keep, "on_damage": on_damage}
        self._on_damage = on_damage
        self._signals = StopSignals(_noted)
        self._saving: AsyncSave | None = None  # the save under way
        self._saved_at = 0.0  # when the newest save began, or the run, by this rank's clock
        # The number of steps of the newest save, which may be under way, or of what was loaded; None: that was a copy.
        self._saved: int | None = 0
        self._is_in_step = False
        self._has_stopped = False

    def __enter__(self) -> Self:
        if self._survive is not None and self._survive.copies_every is not None:
            self._copies = MemoryCopies()
            if not self._copies.outlives_nodes and world().rank == 0:
                _log.warning("the copies of the run are on one node, and do not outlive it (Survival.copies_every)")
        self._begin()
        self._saved_at = time.monotonic()
        self._signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._copies is not None:
                self._copies.close(delete=kind is None)
            if not self._has_stopped:  # else the process is about to end, and the signal that ended it is dealt with
                self._signals.__exit__(None, None, None)

    def _finish(self) -> None:
        self._end_step()
        if self._saved != self.done:
            self._save()
        self._finish_saving()

    def train(self, total: int, step: Callable[[int], object]) -> None:
        """Call `step(index)` for the steps that remain of `total`, and save the last. When ranks are lost, `recover`.

        With `shardrt.launch --replace`, processes in the place of lost ranks join between steps: `state` is then another.
        Raises: as `steps`; RankLost if too few ranks are left.
        """
        while True:
            try:
                for index in self._steps(total, is_in_train=True):
                    step(index)
                self._finish()
                return
            except RankLost:
                if self._membership is None:
                    raise
            # Here the exception is gone, whose frames hold the old state.
            self.recover()

    def recover(self) -> None:
        """Go on without the ranks that are lost: make the state anew on those that are left, and load the newest there is.

        That is the newest copy, or checkpoint, that is whole; `done` is then its step. Collective over the ranks that are left.
        The program keeps nothing of the old state: its memory is needed for the new one.
        Raises: RankLost if fewer than `min_ranks` are left, or nothing is there to go on from.
        """
        assert self._membership is not None, "a run that survives"
        with during(Step.RECOVER, _Ranks(f"without {name_ranks(world().lost)} of {world().size}")):
            self._recover(self._membership)

    def _recover(self, membership: Membership) -> None:
        while True:
            self.state, self._saving, self._is_in_step = {}, None, False
            gc.collect()  # models form circles
            self._signals.__exit__(None, None, None)  # the handlers from before are of the world that has lost ranks
            world().recover()
            self._signals.__enter__()
            try:
                membership.check()
                self._go_on()
                return
            except NotRecovered:
                raise
            except RankLost:
                continue

    # What follows is what a new rank does in `__init__` and `__enter__`: the others do it with it, in the same order.

    def _go_on(self) -> None:
        """Make the state anew, on another world than before, and load the newest there is. Collective. Raises: NotRecovered."""
        assert self._build is not None, "a run that survives has a function"
        self.done = -1
        self._make(self._build, self.folder)
        if self._copies is not None:
            self._copies.join(str(self._copies.folder))
        self._begin()
        if self.done < 0:
            raise NotRecovered(f"no copy and no checkpoint in {str(self.folder)!r} to go on from")

    def _make(self, state: dict[str, Any] | Callable[[World], dict[str, Any]], folder: str | os.PathLike[str]) -> None:
        with agreed(world().comm):
            self.folder: Location = located(folder).resolve()  # the program may change its working directory
        self.state = state(world()) if callable(state) else state
        if _KEY in self.state:
            raise ValueError(f"Run: the key {_KEY!r} of the state is taken by the run itself; use another")
        self._comm = world().mesh.communicator("run")

    def _begin(self) -> None:
        if self._membership is not None:
            self._membership.meet(self._comm)
        self._resume()

    def _grow(self, membership: Membership, coming: Replacement, total: int) -> Replacement | None:
        """If the processes in the place of lost ranks are there, go on with them. Collective. Returns: those still to come."""
        states = set(self._comm.exchange(coming.coming))
        if Coming.FAILED in states:
            coming.abandon()
            return membership.replace_lost()
        if states != {Coming.THERE}:
            return coming
        with during(Step.RECOVER, _Ranks(f"with {membership.count} ranks again")):
            if self._copies is not None:
                self._copies.cover(self._folder_of(self.done).name, self._with_own_state())
            elif self._saved != self.done:
                self._save()
            self._finish_saving()
            self.state = {}
            gc.collect()
            self._signals.__exit__(None, None, None)
            here = world().grow(coming)
            self._signals.__enter__()
            if here.size < membership.count:  # more are lost
                membership.check()
            self._go_on()
            return self._begin_steps(total, is_in_train=True)

    def steps(self, total: int) -> Iterator[int]:
        """The indices of the steps that remain of `total`; each is done when the next one is asked for.

        After a `break`, which every rank makes in the same step, that step is done too: it comes after the optimizer's step.
        A further call of `steps` then goes on with the next one.
        Raises: SystemExit when the run stops; ValueError on every rank if they have other totals.
        """
        return self._steps(total, is_in_train=False)

    def _steps(self, total: int, *, is_in_train: bool) -> Iterator[int]:
        """is_in_train: lost ranks are replaced: `state` may be another after a step."""
        self._end_step()
        coming = self._begin_steps(total, is_in_train=is_in_train)
        if self.done > total and world().rank == 0:
            _log.warning("'%s': the run has done %d steps, more than the %d asked for", self.folder, self.done, total)
        try:
            while self.done < total:
                self._is_in_step = True
                yield self.done
                self._end_step()
                self._after_step(is_last=self.done == total)
                if coming is not None and self._membership is not None and self.done < total:
                    coming = self._grow(self._membership, coming, total)
        finally:
            if coming is not None:
                coming.abandon()

    def _begin_steps(self, total: int, *, is_in_train: bool) -> Replacement | None:
        """What all ranks do before the first of some steps, and, in `_grow`, beside a new rank. Collective."""
        self._check_alike("steps", total=total)
        self._cover_losses()
        return self._membership.replace_lost() if is_in_train and self._membership is not None else None

    # ------------------------------------------------------------------ loading

    def _resume(self) -> None:
        found, damaged = self._newest_first(), dict[Location, str]()  # with the reasons
        for folder in found:
            try:
                self._load(folder)
                break
            except DamagedCheckpointError as error:
                if self._on_damage == "raise":
                    raise
                damaged[folder] = str(error)
        if len(damaged) < len(found):
            self._report_progress()
            self._set_aside(damaged)
        elif found:
            raise DamagedCheckpointError(
                f"all checkpoints in {str(self.folder)!r} are damaged; to start anew, move them elsewhere. "
                + "; ".join(f"{folder.name}: {reason}" for folder, reason in damaged.items())
            )

    def _set_aside(self, damaged: Mapping[Location, str]) -> None:
        """Rename what could not be loaded, on rank 0, now that an older one is loaded."""
        for folder, reason in damaged.items() if world().rank == 0 else ():
            try:
                where = f"now '{storage_of(folder).set_aside_damaged(folder)}'"
            except CheckpointError as error:
                where = f"left where it is ({error})"
            _log.warning("'%s' is damaged, and %s; the run goes on from step %d: %s", folder, where, self.done, reason)

    def _load(self, found: Location) -> None:
        if self._copies is not None and found.parent == self._copies.folder:
            self._copies.bring(found.name, {METADATA})
        with agreed(world().comm):
            rows = read_stored(found).tensors.get(f"{_KEY}.random.rows")
            if rows is None:
                raise CheckpointError(f"{str(found)!r} was not saved by a run: rename it, or give the run another folder")
        random = RandomState(tuple(rows.shape))
        # A dict, since a load reads only the names in it: the rows of other ranks are not read.
        own: dict[str, Any] = {"step": 0, "random": random.state_dict()}
        loaded = {**self.state, _KEY: own}
        if self._copies is not None and found.parent == self._copies.folder:
            load_copy(found, loaded, partial(self._copies.bring, found.name))
        else:
            load(found, loaded)
        self.state.update({key: loaded[key] for key in self.state})
        random.load_state_dict(own["random"])
        self.done = own["step"]
        self._saved = self.done if found.parent == self.folder else None

    def _newest_first(self) -> list[Location]:
        """The committed checkpoints, as rank 0 sees them. Collective."""
        end_previous()  # the save of a run in this process that ended with an exception
        self._check_alike("Run", **self._arguments)
        copies = [] if self._copies is None else self._copies.newest_first()
        found = [*copies, *self._seen_by_rank_0(self.folder)]
        return sorted(found, key=lambda folder: int(folder.name.removeprefix(_PREFIX)), reverse=True)

    def _seen_by_rank_0(self, parent: Location) -> list[Location]:
        comm, found = world().comm, list[Location]()
        with agreed(comm):
            found = list(storage_of(parent).newest_first(parent, _PREFIX))
        first = comm.exchange([folder.name for folder in found])[0]
        with agreed(comm):
            if found and not first:
                where = f"is there on rank {comm.rank}, but not on rank 0"
                raise CheckpointError(f"{found[0]} {where}: use a folder that all ranks share")
        return [parent / name for name in first]

    def _check_alike(self, what: str, **arguments: object) -> None:
        """Raise ValueError on every rank if the ranks' arguments differ. Collective."""
        everyone = self._comm.exchange(arguments)
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
        if other is not None:
            raise ValueError(f"{what}: rank 0 has {everyone[0]}, rank {other} has {everyone[other]}; expected the same")

    def _folder_of(self, step: int) -> Location:
        return self.folder / f"{_PREFIX}{step:08d}"

    # ------------------------------------------------------------------ between steps

    def _end_step(self) -> None:
        """Count the step that was under way."""
        if self._is_in_step:
            members.is_newcomer = False
        self.done += self._is_in_step
        self._is_in_step = False

    def _after_step(self, *, is_last: bool) -> None:
        told = self._signals.agreed(self._comm, is_due=self._is_time())
        if told not in (0, DUE) and not is_last:
            self._stop(told)
        if self._saving is not None and self._saving.poll():
            self._committed()
        if self._copies is not None:
            self._copy(self._copies)
        if is_last or told == DUE or any(n and self.done % n == 0 for n in (self._every, self._keep["keep_every"])):
            self._save()

    def _copy(self, copies: MemoryCopies) -> None:
        """Copy the state if that is due."""
        assert self._survive is not None, "it has copies"
        copies.poll()
        if self.done % (self._survive.copies_every or 1) == 0:
            copies.take(self._folder_of(self.done).name, self._with_own_state())

    def _cover_losses(self) -> None:
        """Copy the state if no copy has it that covers losses: before the first step, and in a new world. Collective."""
        if self._copies is not None and not self._copies.adopt(self._folder_of(self.done).name):
            self._copies.cover(self._folder_of(self.done).name, self._with_own_state())

    def _is_time(self) -> bool:
        """Whether this is rank 0, and it is time to save."""
        # A new save waits for the one under way: after each step, if saves take longer than `every`.
        if self._every_s is None or self._saving is not None or self._comm.rank != 0:
            return False
        return time.monotonic() >= self._saved_at + self._every_s

    def _save(self) -> None:
        self._finish_saving()
        self._saved_at = time.monotonic()
        self._saving = async_save(self._folder_of(self.done), self._with_own_state(), **self._keep)
        self._saved = self.done

    def _stop(self, number: int) -> None:
        try:
            self._finish_saving()
        except CheckpointError as error:  # this step can still be saved
            if world().rank == 0:
                _log.warning("the save of step %s was not finished: %s", self._saved, error)
            self._saving = None
        save(self._folder_of(self.done), self._with_own_state(), **self._keep)
        self._saved = self.done
        self._has_stopped = True
        _noted.clear()
        self._report_progress()
        if world().rank == 0:
            name = signal.Signals(number).name
            os.write(2, f"{name}: saved {self._folder_of(self.done)}; stopping with exit code {STOPPED}\n".encode())
        sys.exit(STOPPED)

    def _with_own_state(self) -> dict[str, Any]:
        return {**self.state, _KEY: {"step": self.done, "random": RandomState()}}

    def _finish_saving(self) -> None:
        """Wait for the save under way. Collective."""
        if self._saving is not None:
            self._saving.wait()
            self._committed()

    def _committed(self) -> None:
        self._saving = None
        self._report_progress()

    def _report_progress(self) -> None:
        """Tell the launcher which step was saved last, and whether the run has stopped to be continued."""
        file = world().settings.progress
        if file is None or world().rank != 0 or self._saved is None:
            return
        try:
            file.write_text(f"{self._saved}{' stopped' * self._has_stopped}\n")
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

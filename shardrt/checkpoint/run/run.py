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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from ...comm import RankLost, World, members, world
from ...comm.ending.report import log
from ...comm.ending.words import name_ranks
from ...comm.members import NotRecovered, end_this_process
from ...comm.replacement import Coming, Replacement
from ...fsdp.base.events import Step, during
from ..disk.files import METADATA
from ..disk.remote_path import Location
from ..disk.storage import located, storage_of
from ..errors import CheckpointError, DamagedCheckpointError, agreed
from ..formats.dcp.metadata import read_stored
from ..loading.load import load, load_copy
from ..saving.save import AsyncSave, async_save, end_previous, save
from .copies import MemoryCopies
from .random_state import RandomState
from .stop import DUE, Noted, StopSignals

STOPPED = os.EX_TEMPFAIL  # the exit code: "try again later"
_KEY = "run"
_PREFIX = "step-"
_STARTED = "PMIX_NAMESPACE"  # names the ranks that Open MPI has started together
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
_noted = Noted()
_log = logging.getLogger("shardrt")


@dataclass(frozen=True, slots=True)
class Survival:
    """How a run goes on when ranks are lost.

    copies_every: the steps between two copies of the state in the node's memory, from which it goes on; None: none are made,
        and it goes on from the newest checkpoint.   min_ranks: with fewer, the job ends.
    group: how many consecutive ranks are of use only together, as those of a tensor-parallel group; it divides their number. If
        one of a group is lost, the others of the group leave as well.
    Memory: twice the state, in /dev/shm.
    """

    copies_every: int | None = 10
    min_ranks: int = 1
    group: int = 1

    def __post_init__(self) -> None:
        if (self.copies_every is not None and self.copies_every < 1) or self.min_ranks < 1 or self.group < 1:
            raise ValueError(f"{self}: expected numbers of at least 1")


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
        if survive is not None and world().size % survive.group:
            raise ValueError(f"Run(survive={survive}): {world().size} ranks, expected a multiple of the group")
        self.done = 0  # the number of steps that are done
        self._survive = survive
        self._make(state, folder)
        self._copies: MemoryCopies | None = None
        self._keep = {"keep": keep, "keep_every": keep_every}
        self._arguments = {"every": every, **self._keep, "on_damage": on_damage}
        self._on_damage = on_damage
        self._signals = StopSignals(_noted)
        self._hosts: Sequence[str] = ()  # of all ranks that there are to be
        self._is_in_train = False
        self._replacement: Replacement | None = None  # for those that are lost; only in `train`
        # This rank's group (Survival.group), by a name that no other has or gets: it stays, whatever numbers ranks have.
        started = os.environ.get(_STARTED, "")
        self._group = started, world().rank // (1 if survive is None else survive.group)
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
        self._is_in_train = True
        while True:
            try:
                for index in self.steps(total):
                    step(index)
                self._finish()
                return
            except RankLost:
                if self._survive is None:
                    raise
            # Here the exception is gone, whose frames hold the old state.
            self.recover()

    def recover(self) -> None:
        """Go on without the ranks that are lost: make the state anew on those that are left, and load the newest there is.

        That is the newest copy, or checkpoint, that is whole; `done` is then its step. Collective over the ranks that are left.
        The program keeps nothing of the old state: its memory is needed for the new one.
        Raises: RankLost if fewer than `min_ranks` are left, or nothing is there to go on from.
        """
        assert self._survive is not None, "a run that survives"
        with during(Step.RECOVER, _Ranks(f"without {name_ranks(world().lost)} of {world().size}")):
            self._recover(self._survive)

    def _recover(self, survive: Survival) -> None:
        while True:
            self.state, self._saving, self._is_in_step = {}, None, False
            self._replacement = None
            gc.collect()  # models form circles
            self._signals.__exit__(None, None, None)  # the handlers from before are of the world that has lost ranks
            world().recover()
            self._signals.__enter__()
            try:
                self._check_ranks(survive)
                self._go_on()
                self._replace()
                return
            except NotRecovered:
                raise
            except RankLost:
                continue

    def _check_ranks(self, survive: Survival) -> None:
        """End this rank if its group has lost one. Collective. Raises: RankLost if others end so; NotRecovered."""
        here, size = world(), survive.group
        everyone = here.comm.exchange(self._group)
        broken = {group for group in everyone if everyone.count(group) < size}
        if len(broken) == len(set(everyone)):
            raise NotRecovered(f"each group of {size} ranks (Survival.group) has lost some")
        if self._group in broken:
            log(here.rank, f"leaves, since its group of {size} ranks (Survival.group) has lost some")
            end_this_process()
        if broken:
            here.comm.exchange(None)  # they do not come
        if here.size < survive.min_ranks:
            raise NotRecovered(f"{here.size} ranks are left, fewer than Survival(min_ranks={survive.min_ranks})")

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
        if self._survive is not None:
            known = self._comm.exchange(self._hosts)
            self._hosts = max(known, key=len) or self._comm.exchange(world().node)
        self._resume()

    def _replace(self) -> None:
        """Start processes in the place of lost ranks, where that is asked for. Collective."""
        here = world()
        if here.settings.replace and self._is_in_train and here.size < len(self._hosts):
            missing = Counter(self._hosts) - Counter(self._comm.exchange(here.node))
            self._replacement = here.replace(list(missing.elements())[: len(self._hosts) - here.size])

    def _grow(self, total: int) -> None:
        """If the processes in the place of lost ranks are there, go on with them. Collective."""
        assert self._replacement is not None, "it is started"
        assert self._survive is not None, "of a run that survives"
        coming = set(self._comm.exchange(self._replacement.coming))
        if Coming.FAILED in coming:
            self._replacement.abandon()
            self._replace()
        if coming != {Coming.THERE}:
            return
        replacement, self._replacement = self._replacement, None
        with during(Step.RECOVER, _Ranks(f"with {len(self._hosts)} ranks again")):
            if self._copies is not None:
                self._copies.take(self._folder_of(self.done).name, self._with_own_state())
            elif self._saved != self.done:
                self._save()
            self._finish_saving()
            self.state = {}
            gc.collect()
            self._signals.__exit__(None, None, None)
            here = world().grow(replacement)
            self._signals.__enter__()
            if here.size < len(self._hosts):  # more are lost
                self._check_ranks(self._survive)
            self._go_on()
            self._replace()
            self._check_alike("steps", total=total)  # as a new rank does in `steps`, and the next
            self._cover_losses()

    def steps(self, total: int) -> Iterator[int]:
        """The indices of the steps that remain of `total`; each is done when the next one is asked for.

        After a `break`, which every rank makes in the same step, that step is done too: it comes after the optimizer's step.
        A further call of `steps` then goes on with the next one.
        Raises: SystemExit when the run stops; ValueError on every rank if they have other totals.
        """
        self._end_step()
        self._check_alike("steps", total=total)
        if self.done > total and world().rank == 0:
            _log.warning("'%s': the run has done %d steps, more than the %d asked for", self.folder, self.done, total)
        self._cover_losses()
        while self.done < total:
            self._is_in_step = True
            yield self.done
            self._end_step()
            self._after_step(is_last=self.done == total)
            if self._replacement is not None and self.done < total:
                self._grow(total)

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
        if self.done % (self._survive.copies_every or 1) == 0:
            copies.take(self._folder_of(self.done).name, self._with_own_state())

    def _cover_losses(self) -> None:
        """Copy the state if no copy has it that covers losses: before the first step, and in a new world. Collective."""
        if self._copies is not None and not self._copies.covers_losses(self._folder_of(self.done).name):
            self._copies.take(self._folder_of(self.done).name, self._with_own_state())

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

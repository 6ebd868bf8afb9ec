"""Runs that resume: in one job, and in jobs that are killed or told to stop, under mpirun and under the tests' own Slurm."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

import run_program
import shardrt
from ranks import job, on_ranks, rank_environment, refused, settings_of, wait_for
from shardrt import checkpoint, launch
from shardrt.checkpoint.run import saves
from shardrt.checkpoint.run import signals as stop_signals
from shardrt.checkpoint.run.random_state import RandomState
from shardrt.checkpoint.run.signals import Noted, StopSignals
from shardrt.checkpoint.saving.writing import Prepared
from shardrt.comm.monitor import exit_handlers
from shardrt.comm.monitor.timing import Timing
from slurm import Slurm, copy_batch_file, slurm_environment
from toys import logged

PROGRAM = Path(run_program.__file__)
LAUNCH = [sys.executable, "-P", launch.__file__]
DEADLINE_S = 120.0
STEPS = 40

# ---------------------------------------------------------------------- signals


@contextmanager
def handled() -> Iterator[list[int]]:
    """The signals that come to handlers of the program's own."""
    received: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        time.sleep(0.5)  # for the thread of the exit handlers, which sees the signal, and looks who handles it
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@on_ranks(1, 2, 3)
def test_ranks_agree_on_the_signal_of_one(world: shardrt.World) -> None:
    comm = world.mesh.communicator("run")
    with handled(), StopSignals(Noted()) as signals:
        assert [signals.agreed(comm) for _ in range(3)] == [0, 0, 0]
        if world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert [signals.agreed(comm) for _ in range(3)] == [signal.SIGUSR1] * 3
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # at once: the same, from another sender
        expected = signal.SIGUSR1 if world.size == 1 else signal.SIGTERM
        assert signals.agreed(comm) == expected


@on_ranks(2)
def test_a_second_signal_does_what_it_did_before(world: shardrt.World) -> None:
    with handled() as received:
        with StopSignals(Noted()):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert received == []
            time.sleep(1.05)
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]


@on_ranks(1)
def test_handlers_in_c_are_restored(world: shardrt.World, tmp_path: Path) -> None:
    """Of which the module `signal` knows nothing: without them the signals end the process."""

    def stacks() -> int:
        return (tmp_path / "stacks").read_text().count("test_handlers_in_c_are_restored")

    with open(tmp_path / "stacks", "w") as file:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            faulthandler.register(number, file, all_threads=False)
        try:
            for runs in (1, 2):
                with shardrt.Run(tmp_path / "run", {"value": 1}) as run:
                    assert len(list(run.steps(2 * runs))) == 2
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGTERM)
                assert stacks() == 2 * runs
            with StopSignals(Noted()):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(1.05)
                assert stacks() == 4
                os.kill(os.getpid(), signal.SIGUSR1)  # the second one
            assert stacks() == 5
        finally:
            for number in (signal.SIGUSR1, signal.SIGTERM):
                faulthandler.unregister(number)


@on_ranks(1)
def test_a_forked_child_ends_on_sigterm_alone(world: shardrt.World) -> None:
    with StopSignals(Noted()):
        if not (child := os.fork()):
            while True:
                time.sleep(1.0)
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@on_ranks(1)
def test_a_second_sigterm_ends_a_job_whose_main_thread_hangs(world: shardrt.World) -> None:
    if not (child := os.fork()):
        # Only what a rank's process has: the monitor's own handlers are not for forked children.
        aborter = mock.Mock(end_job=exit_handlers._exit)
        exit_handlers.ExitHandlers(0, aborter, lambda: "nothing", lambda reason: None, Timing())
        lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t
        code = f"sleep 0.1; kill -USR1 {os.getpid()}; sleep 0.2; kill -TERM {os.getpid()}"
        with mock.patch.object(stop_signals, "_REPEATS_S", 0.1), StopSignals(Noted()), subprocess.Popen(["sh", "-c", code]):
            while True:
                ctypes.CDLL(None).pthread_mutex_lock(lock)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143


# ---------------------------------------------------------------------- random numbers


def draw() -> tuple[float, float, float, float, float]:
    return random.random(), random.gauss(), torch.rand(()).item(), numpy.random.random(), numpy.random.standard_normal()


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.gauss()  # the second number of the pair is part of the state
    numpy.random.standard_normal()


@on_ranks(1, 3)
def test_random_numbers_continue_on_as_many_ranks(world: shardrt.World) -> None:
    seed(world.rank)
    state = RandomState()
    saved = state.state_dict()
    rows = {name: saved[name].full_tensor() for name in ("rows", "digests")}
    assert rows["rows"].shape == (world.size, saved["first"].numel())
    assert torch.equal(rows["rows"][0], saved["first"]) or world.rank > 0
    expected = draw()
    torch.manual_seed(7)
    numpy.random.seed(7)
    state.load_state_dict(saved)
    assert torch.initial_seed() == world.rank  # of which the random regions are made
    assert draw() == expected
    everyone = world.comm.exchange(expected)
    assert len(set(everyone)) == world.size


@on_ranks(2)
def test_random_numbers_on_another_number_of_ranks(world: shardrt.World) -> None:
    """What was the same on all ranks stays so, here Python's numbers; the rest is seeded by rank."""
    random.seed(5)
    torch.manual_seed(5)
    saved = RandomState().state_dict()
    first = world.comm.exchange(saved["first"])[0]
    own = torch.tensor(saved["digests"].to_local().tolist())
    other = own.clone()
    other[:, 1] += 1
    expected = draw()
    state = RandomState((3, first.numel()))
    shapes = {name: tuple(value.shape) for name, value in state.state_dict().items() if name != "numpy"}
    assert shapes == {"first": (first.numel(),), "digests": (3, 2)}
    state.load_state_dict({"first": first, "digests": torch.cat([own, own, own])})
    assert draw()[:3] == expected[:3]
    state.load_state_dict({"first": first, "digests": torch.cat([own, other, own])})
    found = draw()
    assert found[:2] == expected[:2]
    assert len({expected[2], *(each[2] for each in world.comm.exchange(found))}) == 3


@on_ranks(2)
def save_random_numbers(world: shardrt.World, folder: Path) -> None:
    """A run of a step, where all ranks have the same random numbers, and one where each has its own."""
    for name, number in (("alike", 5), ("apart", 5 + world.rank)):
        seed(number)
        with shardrt.Run(folder / name, {}) as run:
            list(run.steps(1))
        (folder / f"{name} {world.rank}").write_text(repr(draw()))


@pytest.fixture(scope="module")
def random_numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random numbers")
    job(2).run(__name__, "save_random_numbers", {"folder": folder})
    return folder


@on_ranks(2, more=(1, 3))
def test_a_run_goes_on_with_the_numbers_of_numpy(world: shardrt.World, random_numbers: Path) -> None:
    """On as many ranks, with the same. On others: what was alike stays so, the rest is seeded by rank, the same each time."""
    for name in ("alike", "apart"):
        found = []
        for number in (7, 8):
            seed(number)
            with shardrt.Run(random_numbers / name, {}) as run:
                assert run.done == 1
                found.append(draw())
        saved = [(random_numbers / f"{name} {rank}").read_text() for rank in range(2)]
        if name == "alike" or world.size == 2:
            assert repr(found[0]) == saved[world.rank if world.size == 2 else 0]
        else:
            everyone = world.comm.exchange(found[0])
            assert all(len({own[index] for own in everyone}) == world.size for index in range(5))
            assert found[0][3] not in [eval(text)[3] for text in saved]
        assert found[0] == found[1]


@on_ranks(1, 2)
def test_random_numbers_of_a_checkpoint_without_those_of_numpy(world: shardrt.World, tmp_path: Path) -> None:
    """As they were saved before: numpy's are left as they are."""
    folder = Path(world.comm.exchange(str(tmp_path))[0])
    seed(world.rank)
    old = {name: value for name, value in RandomState().state_dict().items() if name != "numpy"}
    mine = draw()[:3]
    checkpoint.save(folder / "step-00000003", {"random": old, "run": {"step": 3, "random": old}})
    seed(9)
    theirs = draw()[3:]
    for state in ({"random": RandomState()}, {}):
        seed(9)
        if state:
            checkpoint.load(folder / "step-00000003", state)
        else:
            with shardrt.Run(folder, {}) as run:
                assert run.done == 3
        assert draw() == (*mine, *theirs)


# ---------------------------------------------------------------------- in one job


class Counter:
    """Something that has a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def make() -> dict[str, Any]:
    model = nn.Linear(5, 3)
    shardrt.fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "counter": Counter(), "epoch": 0}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 5)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["counter"].count += 1
    state["epoch"] += 1


def shared_folder(world: shardrt.World, tmp_path: Path) -> Path:
    return Path(world.comm.exchange(str(tmp_path))[0]) / f"{world.size}-ranks"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@on_ranks(1, 2)
def test_a_run_goes_on_from_its_last_checkpoint(world: shardrt.World, tmp_path: Path) -> None:
    folder, first, second = shared_folder(world, tmp_path), make(), make()
    with shardrt.Run(folder, first, every=2, keep=2) as run:
        assert run.done == 0
        for index in run.steps(7):
            assert index == first["counter"].count
            step(first)
    world.barrier()
    assert names(folder) == ["step-00000006", "step-00000007"]
    with shardrt.Run(folder, second, every=2, keep=2) as run:
        assert (run.done, second["counter"].count, second["epoch"]) == (7, 7, 7)
        assert list(run.steps(7)) == []
        for name, parameter in first["model"].named_parameters():
            loaded = dict(second["model"].named_parameters())[name]
            assert torch.equal(loaded.to_local(), parameter.to_local())
        for _ in run.steps(9):
            step(second)
    world.barrier()
    assert names(folder) == ["step-00000008", "step-00000009"]


def steps_saved(run: shardrt.Run, total: int, clock: list[float], held: threading.Event | None = None) -> list[int]:
    """Steps of a minute each, in which the save under way goes on as far as it can."""
    found, submit = list[int](), checkpoint.async_save

    def note(folder: Path, *args: Any, **kwargs: Any) -> checkpoint.AsyncSave:
        found.append(int(folder.name.removeprefix("step-")))
        return submit(folder, *args, **kwargs)

    with mock.patch.object(saves, "async_save", note), run:
        for index in run.steps(total):
            clock[0] += 60.0
            if held is not None and index == 6:
                held.set()
            if run._saves._saving is not None and (held is None or held.is_set()):
                run._saves._saving._task.wait()
    return found


@on_ranks(1, 2, 3)
def test_saves_by_the_clock_of_rank_0(world: shardrt.World, tmp_path: Path) -> None:
    """Every three minutes, from entry and from the beginning of each save, but not while one is under way."""
    folder, clock, held = shared_folder(world, tmp_path), [0.0], threading.Event()
    # What the others' clocks say does not matter.
    time = mock.Mock(monotonic=lambda: clock[0] * (1 if world.rank == 0 else 7))
    write = Prepared.write
    with mock.patch.object(saves, "time", time):
        calls = []
        for name, every in (("a", "3min"), ("c", 3)):
            run = shardrt.Run(folder / name, make(), every=every)
            compared = mock.Mock(wraps=run._training.comm.compare)
            with mock.patch.object(run._training.comm, "compare", compared):
                assert steps_saved(run, 10, clock) == [3, 6, 9, 10]
            calls.append(compared.call_count)
        assert calls[0] == calls[1]
        clock[0] += 170.0
        assert steps_saved(shardrt.Run(folder / "a", make(), every="0.05 h"), 14, clock) == [13, 14]
        with mock.patch.object(Prepared, "write", lambda *args: (held.wait(60), write(*args))):
            assert steps_saved(shardrt.Run(folder / "b", make(), every="180s"), 12, clock, held) == [3, 9, 12]


@on_ranks(2)
def test_a_signal_and_a_save_that_is_due_in_one_step(world: shardrt.World, tmp_path: Path) -> None:
    comm = world.mesh.communicator("run")
    with handled(), StopSignals(Noted()) as signals:
        assert signals.agreed(comm, is_due=world.rank == 0) == stop_signals.DUE
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.agreed(comm, is_due=world.rank == 0) == signal.SIGUSR1


@on_ranks(2)
def test_steps_that_stay(world: shardrt.World, tmp_path: Path) -> None:
    """They are saved beside those that `every` says."""
    for name, every in (("a", 4), ("b", "1h")):
        folder = shared_folder(world, tmp_path) / name
        with shardrt.Run(folder, make(), every=every, keep=2, keep_every=5) as run:
            list(run.steps(17))
        world.barrier()
        last = [16, 17] if every == 4 else [17]
        assert names(folder) == [f"step-{done:08d}" for done in (5, 10, 15, *last)]


@on_ranks(2)
def test_an_exception_saves_nothing_new(world: shardrt.World, tmp_path: Path) -> None:
    folder, state = shared_folder(world, tmp_path), make()

    def fail() -> None:
        with shardrt.Run(folder, state, every=2) as run:
            for index in run.steps(9):
                if index == 3:
                    raise KeyError

    with pytest.raises(KeyError):
        fail()
    with shardrt.Run(folder, make(), every=2) as run:
        assert run.done == 2
    assert names(folder) == ["step-00000002"]


@on_ranks(2)
def test_a_step_that_a_break_ends_is_done_and_saved(world: shardrt.World, tmp_path: Path) -> None:
    folder, state, seen = shared_folder(world, tmp_path), make(), []
    with shardrt.Run(folder, state) as run:
        for total in (9, 4):
            for index in run.steps(total):
                seen.append(index)
                if index == 2:
                    break
    world.barrier()
    assert (seen, run.done, names(folder)) == ([0, 1, 2, 3], 4, ["step-00000004"])
    with shardrt.Run(folder, state) as run:
        for index in run.steps(9):
            if index == 5:
                break
    world.barrier()
    assert (run.done, names(folder)) == (6, ["step-00000004", "step-00000006"])


@on_ranks(2)
def test_a_run_looks_for_its_own_checkpoints_and_leaves_what_others_write(world: shardrt.World, tmp_path: Path) -> None:
    folder, state = shared_folder(world, tmp_path), make()
    being_written = folder / "step-00000009.tmp"
    being_written.mkdir(parents=True, exist_ok=True)
    checkpoint.save(folder / "best-00000450", {"a": torch.ones(3)})
    with mock.patch.object(os, "getcwd", return_value=str(folder.parent)):
        run = shardrt.Run(folder.name, state)
    with run:
        for _ in run.steps(1):
            assert being_written.exists()
            step(state)
    with shardrt.Run(folder, state) as run:
        assert run.done == 1
        with logged() as lines:
            assert list(run.steps(0)) == []
        assert len(lines) == (world.rank == 0)


@on_ranks(2)
def test_a_stopped_run_saves_though_the_save_before_fails(world: shardrt.World, tmp_path: Path) -> None:
    folder, state = shared_folder(world, tmp_path), make()

    def train() -> None:
        with shardrt.Run(folder, state, every=2) as run:
            for index in run.steps(9):
                step(state)
                if index == 1:
                    failing.start()
                if index == 2:
                    assert run._saves._saving is not None
                    run._saves._saving._task.wait()
                    failing.stop()
                    os.kill(os.getpid(), signal.SIGUSR1)

    failing = mock.patch.object(os, "pwritev", side_effect=OSError(errno.ENOSPC, "full"))
    with handled(), pytest.raises(SystemExit), logged() as lines:
        train()
    assert "full" in str(lines) or world.rank > 0
    world.barrier()
    assert names(folder) == ["step-00000003"]


@on_ranks(2)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(world: shardrt.World, tmp_path: Path) -> None:
    folder, state = shared_folder(world, tmp_path), make()
    progress = folder.with_name("progress")
    run = shardrt.Run(folder, state)

    def train() -> None:
        with run:
            for index in run.steps(9):
                step(state)
                if index == 4 and world.rank == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)

    with settings_of(world, progress=progress), handled() as received, pytest.raises(SystemExit) as stop:
        train()
    assert (stop.value.code, run.done, received) == (75, 5, [])
    world.barrier()
    assert names(folder) == ["step-00000005"]
    assert progress.read_text().split() == ["5", "stopped"]
    resumed = make()
    with shardrt.Run(folder, resumed) as run:
        assert run.done == resumed["counter"].count == 5


@on_ranks(2)
def test_a_signal_in_the_last_save_is_for_the_next_run(world: shardrt.World, tmp_path: Path) -> None:
    folder, state = shared_folder(world, tmp_path), make()
    wait = checkpoint.AsyncSave.wait

    def slow_wait(save: checkpoint.AsyncSave) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait(save)

    def train(steps: int) -> None:
        with shardrt.Run(folder, state) as run:
            for _ in run.steps(steps):
                step(state)

    with handled() as received:
        with mock.patch.object(checkpoint.AsyncSave, "wait", slow_wait):
            train(2)
        with pytest.raises(SystemExit):
            train(9)
        train(4)
    world.barrier()
    assert (names(folder), received) == ([f"step-0000000{done}" for done in (2, 3, 4)], [])


@on_ranks(2)
def test_what_a_run_refuses(world: shardrt.World, tmp_path: Path) -> None:
    folder = shared_folder(world, tmp_path)
    refused("every=0", lambda: shardrt.Run(folder, {}, every=0))
    for every in ("10", "10 minutes", "10m", "0s", "-1s", "min", "1e3s", "1h30min", -1):
        with pytest.raises(ValueError, match=rf"every={every!r}\): expected a number of steps.* '90s', '10min' or '1.5h'"):
            shardrt.Run(folder, {}, every=every)
    for keep_every in (0, -5):
        with pytest.raises(ValueError, match=rf"keep_every={keep_every}\): expected both to be at least 1"):
            shardrt.Run(folder, {}, keep_every=keep_every)
    with pytest.raises(ValueError, match=r"rank 0 has .'every': '2s', .* rank 1 has .'every': '3s'"):
        shardrt.Run(folder, {}, every=f"{2 + world.rank}s").__enter__()
    refused("key 'run'", lambda: shardrt.Run(folder, {"run": 1}))
    refused(r"rank 0 has .'every': 2, .* rank 1 has .'every': 3", shardrt.Run(folder, {}, every=2 + world.rank).__enter__)
    with (
        pytest.raises(ValueError, match=r"steps: rank 0 has .'total': 2.* rank 1 has .'total': 3"),
        shardrt.Run(folder, {}) as run,
    ):
        next(run.steps(2 + world.rank))
    checkpoint.save(folder / "step-00000005", {"a": torch.ones(3)})
    with pytest.raises(RuntimeError, match="step-00000005' was not saved by a run"), shardrt.Run(folder, {}):
        pass
    lost = folder / "empty" if world.rank == 0 else folder / "other"
    checkpoint.save(folder / "other" / "step-00000001", {"a": torch.ones(3)})
    with pytest.raises(RuntimeError, match="is there on rank 1, but not on rank 0"), shardrt.Run(lost, {}):
        pass


# ---------------------------------------------------------------------- jobs that end


def program(folder: Path, seconds: float) -> list[str]:
    return [str(PROGRAM), str(folder), str(STEPS), str(seconds)]


class Job:
    """A job of run_program.py in a process group of its own, whose launcher is this process's child."""

    started: ClassVar[list[Job]] = []

    def __init__(
        self,
        folder: Path,
        *options: str,
        seconds: float = 0.02,
        launcher: Sequence[str] = (*LAUNCH, "--launcher", "mpirun"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        for left in folder.glob("started-*"):
            left.unlink()
        self.folder = folder
        command = [*launcher, *options, *program(folder, seconds)]
        with open(folder / "output", "a") as output:
            self.process = subprocess.Popen(
                command,
                env=environment or rank_environment(),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.started.append(self)

    def step(self) -> int:
        """The newest checkpoint's number of steps; -1 without one."""
        newest = checkpoint.latest(self.folder / "checkpoints")
        return -1 if newest is None else int(newest.name.removeprefix("step-"))

    def wait_for_step(self, least: int) -> None:
        self.wait_for(lambda: self.step() >= least)

    def wait_for(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not true():
            assert time.monotonic() < deadline, self.output()
            assert self.process.poll() is None, self.output()
            time.sleep(0.01)

    def ranks(self) -> list[int]:
        """The processes of its ranks that run now, in no order."""
        pids = [int(path.name.removeprefix("started-")) for path in self.folder.glob("started-*")]
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def mpirun(self) -> list[int]:
        """The process of mpirun, once it is there."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if read(f"/proc/{child}/comm") in ("mpirun\n", "prterun\n")]

    def segments(self) -> set[Path]:
        """The MPI's shared memory."""
        maps = [line.split() for pid in self.ranks() for line in read(f"/proc/{pid}/maps").splitlines()]
        return {Path(words[5]) for words in maps if len(words) == 6 and words[5].startswith("/dev/shm/")}

    def end(self) -> int:
        """Wait for it to end; returns its exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(self.output(), pytrace=False)

    def result(self) -> dict[str, Any]:
        """What a run that has come to its end leaves."""
        result: dict[str, Any] = json.loads((self.folder / "end.json").read_text())
        assert result["done"] == STEPS
        return result

    def output(self) -> str:
        return (self.folder / "output").read_text()


def read(path: str) -> str:
    """Of a process; empty if it has ended."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """End the jobs of a test that has failed."""
    yield
    while Job.started:
        job = Job.started.pop().process
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of a run on two ranks that nothing disturbed."""
    job = Job(tmp_path_factory.mktemp("uninterrupted"), "-n", "2", seconds=0.0)
    assert job.end() == 0, job.output()
    return job.result()


@pytest.mark.rest
@pytest.mark.mpi
def test_a_killed_job_goes_on_to_the_same_end(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    job = Job(tmp_path, "-n", "2", "--restarts", "5")
    job.wait_for_step(6)
    segments = job.segments()
    assert segments
    kill(job.ranks()[0])
    job.wait_for_step(15)
    segments |= job.segments()
    kill(job.mpirun()[0])
    assert job.end() == 0, job.output()
    assert not any(path.exists() for path in segments)
    assert job.result() == uninterrupted, job.output()
    assert job.output().count("start 2 of 6") == job.output().count("start 3 of 6") == 1, job.output()


@pytest.mark.rest
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGUSR1, 3), pytest.param(signal.SIGTERM, 1, marks=pytest.mark.all)], ids=["USR1", "TERM"]
)
def test_a_stopped_job_goes_on_with_other_ranks(
    number: signal.Signals, ranks: int, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    first = Job(tmp_path, "-n", "2", "--restarts", "5")
    first.wait_for_step(6)
    first.process.send_signal(number)
    assert first.end() == 75, first.output()
    assert "stopping with exit code 75" in first.output()
    second = Job(tmp_path, "-n", str(ranks), seconds=0.0)
    assert second.end() == 0, second.output()
    loss, expected = (float.fromhex(result["loss"]) for result in (second.result(), uninterrupted))
    assert loss == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.mpi
@pytest.mark.all
def test_a_job_killed_at_twenty_random_moments(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """One rank, or mpirun: every other time as the job starts, and else in training, where saves take much of the time."""
    chance = random.Random(0)
    for number in range(20):
        job = Job(tmp_path, "-n", "2", "--restarts", "0", seconds=1.0)
        job.wait_for(lambda job=job: bool(job.mpirun()))
        if number % 2 == 0:
            job.wait_for(lambda job=job: len(job.ranks()) == 2)
        time.sleep(chance.uniform(0.0, 3.0))
        if job.process.poll() is None:
            kill(chance.choice([*job.ranks(), *job.mpirun()]))
        else:  # Open MPI's mpirun sometimes does not start on a busy machine
            assert "The PMIx server's listener thread failed to start" in job.output()
        assert job.end() != 0, job.output()
    last = Job(tmp_path, "-n", "2", "--restarts", "2", seconds=0.0)
    assert last.end() == 0, last.output()
    assert last.result() == uninterrupted


# ---------------------------------------------------------------------- Slurm


def in_allocation(slurm: Slurm, folder: Path, *options: str, seconds: float = 0.02) -> Job:
    launcher = ["salloc", "--quiet", f"--nodelist={slurm.node}", "--ntasks=2", "--cpus-per-task=1", *LAUNCH]
    return Job(folder, *options, seconds=seconds, launcher=launcher, environment=slurm_environment(slurm))


@pytest.mark.rest
@pytest.mark.mpi
@pytest.mark.slurm
def test_a_job_goes_on_within_its_allocation(slurm: Slurm, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    job = in_allocation(slurm, tmp_path, "--restarts", "2")
    job.wait_for_step(6)
    kill(job.ranks()[0])
    assert job.end() == 0, job.output() + slurm.logs()
    assert job.result() == uninterrupted
    assert "start 2 of 3" in job.output()


@pytest.mark.mpi
@pytest.mark.all
@pytest.mark.slurm
def test_a_slurm_job_killed_at_twenty_random_moments(slurm: Slurm, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(20):
        job = in_allocation(slurm, tmp_path, seconds=1.0)
        job.wait_for(lambda job=job: len(job.ranks()) == 2)
        time.sleep(chance.uniform(0.0, 3.0))
        kill(chance.choice(job.ranks()))
        assert job.end() != 0, job.output()
    last = in_allocation(slurm, tmp_path, seconds=0.0)
    assert last.end() == 0, last.output() + slurm.logs()
    assert last.result() == uninterrupted


@pytest.mark.mpi
@pytest.mark.all
@pytest.mark.slurm
def test_a_requeued_job_goes_on(slurm: Slurm, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """When its time is nearly up, the batch file stops the run and requeues the job, which comes to the same end."""
    variables = slurm_environment(slurm)
    batch_file = copy_batch_file(tmp_path, Path(sys.executable).parent)

    def ask(*command: str | Path) -> str:
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    def step() -> int:
        newest = checkpoint.latest(tmp_path / "checkpoints")
        return -1 if newest is None else int(newest.name.removeprefix("step-"))

    submit = ["sbatch", "--parsable", f"--nodelist={slurm.node}", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1"]
    job = ask(*submit, batch_file, "--restarts", "1", *program(tmp_path, 0.2))
    wait_for(lambda: step() >= 6)
    ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does for --signal=B:USR1@300
    wait_for(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job))
    log = (tmp_path / f"train-{job}.log").read_text()
    assert "Restarts=1" in ask("scontrol", "show", "job", job)
    assert log.count("SIGUSR1: saved") == 1, log
    result = json.loads((tmp_path / "end.json").read_text())
    assert result == uninterrupted, log

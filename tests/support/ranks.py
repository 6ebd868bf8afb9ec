"""Tests on real ranks: `@on_ranks(1, 2, 3, 4)` runs a test's body on every rank of a real `mpirun`, of MPICH or Open MPI.

The body gets the `World` and the test's parameters; its assertions apply to its own rank. One job for each number of ranks
serves many tests, since starting ranks takes seconds. Every body has a deadline: when it passes, or when one rank fails while
others wait for it, the test shows the stacks of all ranks, the job is killed, and the next test gets a new one.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

import ask_forks
import forks
from shardrt import World, launch
from shardrt.launcher import stale_files

DEADLINE_S = 240.0  # for a body or a script that hangs: where none does, a long one costs nothing
MOST_BODIES = 300  # of a job, over its ranks: bodies leave communicators open, and MPICH makes 2048
IMPORTS = {"PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH"}  # variables that change what a process imports
FRESH = True  # of `start`, where how ranks start or end is what is tested
may_fork = True  # False with `--all`, where all ranks are an mpirun's, and where no process may start; written by conftest.py
AFTER_FAILURE_S = 5.0  # time for the other ranks to finish after one has failed


def on_ranks(*sizes: int, more: tuple[int, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated body as `body(world, **parameters)` on worlds of these sizes, with torch's numbers from seed 0 on.

    Of several, one is usual: 3 if it is among them, else 2, else the first; the others are marked `rest`.
    more: sizes that run with `--all`.
    """
    usual = [size for size in (3, 2, *sizes) if size in sizes][:1]
    marks = dict.fromkeys(sizes, (pytest.mark.rest,)) | dict.fromkeys(usual, ()) | dict.fromkeys(more, (pytest.mark.all,))
    worlds = [pytest.param(size, marks=mark, id=f"{size}ranks") for size, mark in marks.items()]

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**parameters: Any) -> None:
            size = parameters.pop("size")
            job(size).run(body.__module__, body.__name__, parameters)

        own = [p for p in inspect.signature(body).parameters.values() if p.name != "world"]
        size = inspect.Parameter("size", inspect.Parameter.KEYWORD_ONLY)
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        test.__signature__ = inspect.Signature([*keyword_only, size])  # type: ignore[attr-defined]
        return pytest.mark.ranks(pytest.mark.parametrize("size", worlds)(test))

    return decorate


@contextmanager
def settings_of(world: World, **values: Any) -> Iterator[None]:
    """In the block, the world has these settings, which `init` would have read from the environment."""
    before = world.settings
    object.__setattr__(world, "settings", dataclasses.replace(before, **values))
    try:
        yield
    finally:
        object.__setattr__(world, "settings", before)


def with_settings(**values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """In the body, the world has these settings. Between `on_ranks` and the body."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(world: World, **parameters: Any) -> None:
            with settings_of(world, **values):
                body(world, **parameters)

        return run

    return decorate


with_copies = with_settings(node_memory=False)  # each rank gathers copies of its own, as ranks of several nodes do


def rank_environment() -> dict[str, str]:
    """The environment of a job's ranks: this process's imports, one thread each."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}


@functools.cache
def site() -> launch.LaunchSite:
    """The mpirun and the MPI of this environment."""
    return launch.find_site(launch.Launcher.MPIRUN, rank_environment())


class Forks:
    """A server of forks, which imports torch once for many jobs. It ends with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._address = os.path.join(self._folder.name, "socket")
        with open(os.path.join(self._folder.name, "errors"), "w") as errors:
            self._server = subprocess.Popen(
                [sys.executable, forks.__file__, self._address],
                env={**rank_environment(), **forks.PADDING},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", Path(errors.name).read_text()

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._folder.cleanup()

    def line(self, size: int, arguments: list[str]) -> list[str]:
        """The command line in the place of `mpirun -n size python arguments`; with size 0, of `python arguments`."""
        return [*launch.isolated(Path(ask_forks.__file__)), self._address, str(size), *arguments]


@functools.cache
def the_forks() -> Forks:
    """The server of this process; started by the first call."""
    made = Forks()
    atexit.register(made.close)
    return made


def start(size: int, arguments: list[str], fresh: bool = False, **options: Any) -> subprocess.Popen[str]:
    """Start `size` ranks of this Python with these arguments in a new process group, after removing what killed jobs left.

    size: 0 for one process without a launcher.   fresh: each rank starts its own interpreter, under mpirun. Otherwise, with
    MPICH, ranks are forks of a process that has imported torch, unless they are to import something else, or with `--all`.
    """
    given = options.pop("env", {})
    environment = rank_environment()
    if size:
        subprocess.run(launch.isolated(Path(stale_files.__file__)), check=True)
        command = launch.plan(launch.JobRequest([sys.executable, *arguments], size), site())
        environment, line = environment | command.variables, command.line
    else:
        environment = {k: v for k, v in environment.items() if not k.startswith(("PMI_", "OMPI_", "SLURM_"))}
        line = [sys.executable, *arguments]
    own_imports = not IMPORTS.isdisjoint(given) or "FAKE_GPUS" in environment
    if may_fork and not fresh and not own_imports and (size == 0 or site().mpi is launch.Mpi.MPICH):
        line = the_forks().line(size, arguments)
    return subprocess.Popen(line, env={**environment, **given}, text=True, start_new_session=True, **options)


def run_script(
    source: str, size: int, fresh: bool = False, /, *, code: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python script as a separate job, as `run_job` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.py"
        path.write_text(source)
        return run_job([str(path)], size, fresh, code=code, **environment)


def run_job(
    arguments: list[str], size: int, fresh: bool = False, /, *, code: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with these arguments as a separate job; at the deadline it is killed, and the test fails.

    code: the exit code that is expected.
    """
    process = start(size, arguments, fresh, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{size} ranks did not end within {DEADLINE_S} s\n{out}\n{err}", pytrace=False)
    assert code is None or process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Job:
    """An `mpirun` of workers that run one body after another."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        address = os.path.join(self._folder.name, "socket")
        self._output = open(os.path.join(self._folder.name, "output"), "w+")  # noqa: SIM115
        worker = ["-m", "worker", address, self._folder.name]
        output = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": subprocess.STDOUT}
        with Listener(address, backlog=size) as listener:
            self._process = start(size, worker, FRESH, **output)
            listener._listener._socket.settimeout(DEADLINE_S)  # type: ignore[attr-defined]
            connections = [listener.accept() for _ in range(size)]
        self._ranks: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        for connection in connections:
            rank, pid = connection.recv()
            self._ranks[rank], self._pids[rank] = connection, pid
        self.alive, self.bodies = True, 0

    def run(self, module: str, body: str, parameters: dict[str, Any]) -> None:
        """Run one body on all ranks; pytest.fail with the report of each failed rank."""
        self.bodies += 1
        for connection in self._ranks.values():
            connection.send((module, body, parameters))
        answers = self._collect(time.monotonic() + DEADLINE_S)
        failed = {rank: text for rank, text in answers.items() if text is not None}
        missing = sorted(set(self._ranks) - set(answers))
        if not failed and not missing:
            return
        report = [f"--- rank {rank} ---\n{text}" for rank, text in sorted(failed.items())]
        if missing or "the rank died" in failed.values():
            report += [f"--- rank {rank} did not finish; its stacks ---\n{self._stacks(rank)}" for rank in missing]
            report.append(f"--- output of the job ---\n{self._job_output()}")
            self.close()
        pytest.fail("\n".join(report), pytrace=False)

    def close(self) -> None:
        """End the workers."""
        if self.alive:
            self.alive = False
            for connection in self._ranks.values():
                connection.close()
            try:
                self._process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                for pid in self._pids.values():
                    _kill(pid, signal.SIGKILL)
                self._process.wait()
            self._output.close()
            self._folder.cleanup()

    def _collect(self, deadline: float) -> dict[int, str | None]:
        answers: dict[int, str | None] = {}
        rank_of = {connection: rank for rank, connection in self._ranks.items()}
        while len(answers) < len(self._ranks):
            left = [c for c, rank in rank_of.items() if rank not in answers]
            ready = wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answers[rank_of[connection]] = connection.recv()
                except EOFError:
                    answers[rank_of[connection]] = "the rank died"
                if answers[rank_of[connection]] is not None:
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
        return answers

    def _stacks(self, rank: int) -> str:
        _kill(self._pids[rank], signal.SIGUSR2)  # SIGUSR1 stops a run
        time.sleep(0.5)
        path = Path(self._folder.name) / f"stacks-{rank}"
        return path.read_text() if path.exists() else "(none)"

    def _job_output(self) -> str:
        self._output.seek(0)
        return self._output.read()[-4000:]


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


_jobs: dict[int, Job] = {}


def job(size: int) -> Job:
    """The running job of `size` ranks; started on the first call, after a failure, and after as many bodies as one may run."""
    running = _jobs.get(size)
    if running is not None and running.bodies >= MOST_BODIES // size:
        running.close()
    if running is None or not running.alive:
        running = _jobs[size] = Job(size)
    return running


@atexit.register
def _close_all() -> None:
    for running in _jobs.values():
        running.close()


def skip_at_home(why: str) -> NoReturn:
    """Skip the test because something is missing that CI installs; fail it in CI."""
    if "CI" in os.environ:
        pytest.fail(why)
    pytest.skip(why)


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def refused(match: str, call: Callable[[], object], kind: type[BaseException] = ValueError) -> None:
    """The call raises this error, with a message that matches."""
    with pytest.raises(kind, match=match):
        call()

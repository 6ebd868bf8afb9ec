"""Start jobs of several ranks on this machine and end them at a deadline."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0
STACKS_S = 2.0  # before a job's deadline, its processes write their stacks
ENDS_AT = "JOB_ENDS_AT"  # the deadline of the job that this process belongs to, in seconds since the epoch
OUTPUT_CHARACTERS = 8000  # of a failed job, the last ones
# By path: shardrt may not be installed.
LAUNCH = Path(__file__).resolve().parents[2] / "shardrt" / "launch.py"


def mpirun(ranks: int) -> list[str]:
    """The command that starts this Python on `ranks` ranks, with the MPI of its environment."""
    return [sys.executable, "-P", str(LAUNCH), "--launcher", "mpirun", "-n", str(ranks)]


def torchrun(ranks: int) -> list[str]:
    """The same with torch's launcher."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, "--nproc-per-node", str(ranks)]


def run_job(command: Sequence[str], timeout: float, **environment: str) -> None:
    """Run a job to its end. If it fails, or is not done in `timeout` seconds, exit with its output."""
    list(follow_job(command, timeout, **environment))


def follow_job(command: Sequence[str], timeout: float, **environment: str) -> Generator[str, None, None]:
    """Yield a job's output lines as they come; exits as `run_job` does.

    A job that this process's own job starts ends early enough for its output to be passed on.
    """
    ends_at = time.time() + timeout
    if ENDS_AT in os.environ:
        ends_at = min(ends_at, float(os.environ[ENDS_AT]) - STACKS_S - GRACE_S)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally`, as Ctrl-C does
    job = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", ENDS_AT: str(ends_at)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    begun, output = time.monotonic(), list[str]()
    deadline = begun + ends_at - time.time()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(job, lines), name="job output", daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            output.append(line)
            yield line
        job.wait()
    except queue.Empty:
        # The job may have started jobs in other process groups; on SIGTERM it ends those itself.
        _signal(job.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_S)
        sys.exit(f"not done in {time.monotonic() - begun:.0f} s: {' '.join(command)}\n{''.join(output)[-OUTPUT_CHARACTERS:]}")
    finally:
        _signal(job.pid, signal.SIGKILL)  # the launcher and every rank that still runs
        with suppress(subprocess.TimeoutExpired):  # a process inside a driver that hangs outlives the signal
            job.wait(GRACE_S)
        reader.join(GRACE_S)  # a process outside the group may still hold the pipe
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if job.returncode != 0:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{''.join(output)[-OUTPUT_CHARACTERS:]}")


def write_stacks_before_end() -> None:
    """Shortly before `follow_job` ends this process's job, write the stacks of all its threads to stderr, also from C code."""
    if ENDS_AT in os.environ:
        faulthandler.dump_traceback_later(max(0.1, float(os.environ[ENDS_AT]) - STACKS_S - time.time()))


def _read(job: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert job.stdout is not None, "it is a pipe"
    with job.stdout as pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)

"""Jobs of several ranks on this machine: how to start them, and none outlives its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0
# As a file, not as a module: the package would import torch first.
LAUNCH = Path(__file__).resolve().parent.parent / "shardrt" / "launch.py"


def mpirun(ranks: int) -> list[str]:
    """Starts `ranks` times this Python, with the MPI of its environment."""
    return [sys.executable, "-P", str(LAUNCH), "--launcher", "mpirun", "-n", str(ranks)]


def torchrun(ranks: int) -> list[str]:
    """The same with torch's own launcher."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, "--nproc-per-node", str(ranks)]


def run_job(command: Sequence[str], timeout: float) -> None:
    """Wait for a job; leave, with what it said, if it fails or is not done in `timeout` seconds."""
    for _ in follow_job(command, timeout):
        pass


def follow_job(command: Sequence[str], timeout: float, **environment: str) -> Iterator[str]:
    """The lines that a job says, as they come; leaves as `run_job` does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, as Ctrl-C does
    job = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert job.stdout is not None, "it is a pipe"
    late = threading.Event()
    alarm = threading.Timer(timeout, _end, (job, late))
    alarm.name = "job deadline"
    alarm.start()
    said = []
    try:
        for line in job.stdout:
            said.append(line)
            yield line
        job.wait()
    finally:
        alarm.cancel()
        _signal(job.pid, signal.SIGKILL)  # what is left of the job, with its launcher
        job.stdout.close()
        job.wait()
    if late.is_set():
        sys.exit(f"not done in {timeout:g} s: {' '.join(command)}\n{''.join(said)[-4000:]}")
    if job.returncode != 0:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{''.join(said)[-4000:]}")


def _end(job: subprocess.Popen[str], late: threading.Event) -> None:
    """It is late. It may end jobs of its own, which are beyond the reach of a signal to its group."""
    late.set()
    _signal(job.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        job.wait(GRACE_S)
    _signal(job.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)

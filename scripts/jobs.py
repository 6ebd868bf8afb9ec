"""Jobs of several ranks on this machine: how to start them, and none outlives its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, as Ctrl-C does
    job = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = job.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        sys.exit(f"not done in {timeout:g} s: {' '.join(command)}")
    finally:
        with suppress(ProcessLookupError):  # what is left of the job, with its launcher
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    if job.returncode != 0:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{said[-4000:]}")

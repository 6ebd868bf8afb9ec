"""Jobs of several ranks on this machine: how to start them, and none outlives its time."""

from __future__ import annotations

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
# As a file, not as a module: the package would import torch first.
LAUNCH = Path(__file__).resolve().parents[2] / "shardrt" / "launch.py"


def mpirun(ranks: int) -> list[str]:
    """Starts `ranks` times this Python, with the MPI of its environment."""
    return [sys.executable, "-P", str(LAUNCH), "--launcher", "mpirun", "-n", str(ranks)]


def torchrun(ranks: int) -> list[str]:
    """The same with torch's own launcher."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, "--nproc-per-node", str(ranks)]


def run_job(command: Sequence[str], timeout: float) -> None:
    """Wait for a job; leave, with what it said, if it fails or is not done in `timeout` seconds."""
    list(follow_job(command, timeout))


def follow_job(command: Sequence[str], timeout: float, **environment: str) -> Generator[str, None, None]:
    """The lines that a job says, as they come; leaves as `run_job` does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, as Ctrl-C does
    job = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline, said = time.monotonic() + timeout, list[str]()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(job, lines), name="job output", daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            said.append(line)
            yield line
        job.wait()
    except queue.Empty:
        # It may have started jobs of its own, which are beyond the reach of a signal to its group, and ends them.
        _signal(job.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_S)
        sys.exit(f"not done in {timeout:g} s: {' '.join(command)}\n{''.join(said)[-4000:]}")
    finally:
        _signal(job.pid, signal.SIGKILL)  # what is left of the job, with its launcher
        job.wait()
        reader.join(GRACE_S)  # unless somebody outside the group has the pipe yet
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    if job.returncode != 0:
        sys.exit(f"exit code {job.returncode}: {' '.join(command)}\n{''.join(said)[-4000:]}")


def _read(job: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert job.stdout is not None, "it is a pipe"
    with job.stdout as pipe:
        for line in pipe:
            lines.put(line)
    lines.put(None)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)

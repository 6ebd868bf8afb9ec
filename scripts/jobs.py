"""Jobs of several ranks on this machine: how to start them, and none outlives its time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# One thread per rank. Open MPI may run as root, and more ranks than there are cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def mpirun(ranks: int) -> list[str]:
    """Starts `ranks` times this Python, with the MPI of its environment."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        sys.exit(f"no mpirun beside {sys.executable} or on PATH: install shardrt[mpich]")
    return [found, "-n", str(ranks), sys.executable]


def torchrun(ranks: int) -> list[str]:
    """The same with torch's own launcher."""
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, "--nproc-per-node", str(ranks)]


def run_job(command: Sequence[str], timeout: float) -> None:
    """Wait for a job; leave, with what it said, if it fails or is not done in `timeout` seconds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, as Ctrl-C does
    job = subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
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

"""Hide the launcher's environment variables from packages that would start a process group because of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..ending.guard.node import OF_PROCESSES
from .bootstrap import world

# Set by mpirun (hydra, Open MPI, MVAPICH), srun, jsrun and LSF for their ranks.
_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "MV2_COMM_WORLD_", "SLURM_", "JSM_NAMESPACE_", "LSB_")
_NAMES = frozenset((*OF_PROCESSES, "MASTER_ADDR", "MASTER_PORT"))


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """In the block, the process looks as if it had no launcher: `PMI_*`, `OMPI_*`, `SLURM_*`, `RANK` and so on are not set.

    Accelerate, and so `transformers.TrainingArguments`, start a process group of torch.distributed when they see these
    variables: create their objects in this block. On leaving it, also through an exception, the variables are set again.
    Affects the whole process, other threads included. Not collective.
    Raises RuntimeError before `shardrt.init()`, which needs them to start MPI.
    """
    world()
    hidden = {name: value for name, value in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)

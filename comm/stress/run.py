"""Runs what the command line of shardrt-stress asks for: a sweep or a soak on the ranks of this job, or faults in others."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Callable

import torch

from .. import World, init
from ..program.version import __version__
from . import fault, inject, soak
from .options import StressOptions
from .sweeps import sweep


def run(options: StressOptions) -> int:
    """Returns the exit code, the same on every rank."""
    if options.faults:
        return (inject if options.inject else fault).run(options)
    is_sweep = options.soak is None and options.steps is None
    if not is_sweep:
        soak.prepare()
    world = init()

    def log(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    _log_header(world, options, log)
    return (sweep if is_sweep else soak).run(world, options, log)


def _log_header(world: World, options: StressOptions, log: Callable[[str], None]) -> None:
    from mpi4py import MPI  # Hazard: before shardrt.init() this would start MPI, with other settings

    where = f"{socket.gethostname()} pid {os.getpid()} {world.device}"
    if world.device.type == "cuda":
        where += f" {torch.cuda.get_device_name(world.device)}"
    library = " ".join(MPI.Get_library_version().split()[:3])
    log(f"# shardrt {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {library}")
    log(f"# {world.size} ranks on {world.nodes} nodes, {torch.get_num_threads()} threads each; {' '.join(sys.argv[1:])}")
    for rank, line in enumerate(world.comm.exchange(where)):
        log(f"#   rank {rank}: {line}")

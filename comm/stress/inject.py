"""The part of each rank in a job in which one rank, the victim, does what it must not."""

from __future__ import annotations

import itertools
import os
import sys
import time

import torch

from .. import ReduceOp, World, init
from ..ending.guard.node import launcher_variables
from .faults.acts import Scene
from .faults.faults import FAULTS, Fault, When
from .options import StressOptions
from .problem import Problem


def run(options: StressOptions) -> int:
    """Do this rank's part; returns the exit code."""
    faults = [FAULTS[name] for name in options.faults]
    found = launcher_variables(os.environ)
    assert found is not None, "a launcher"
    rank = int(os.environ[found[1]])
    is_victim = rank == options.fault_rank
    _write(f"rank {rank} pid {os.getpid()}")
    if is_victim and faults[0].when is When.BEFORE:
        _act(faults[0], rank)
    if is_victim and faults[0].when is When.INSIDE:
        _act_inside_init(faults[0], rank)
    world = init()
    if faults[0].when is When.CALL:
        for fault in faults:
            _call_on_all_ranks(world, fault, is_victim)
        return 0
    return _communicate(world, faults[0], options)


def _act(fault: Fault, rank: int, *arguments: object) -> None:
    _write(f"rank {rank} injects {fault.name} at {time.time()}")
    fault.act(*arguments)


def _act_inside_init(fault: Fault, rank: int) -> None:
    """Act when init() loads MPI."""
    is_done = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_done
        if event == "import" and arguments[0] == "mpi4py.MPI" and not is_done:
            is_done = True
            _act(fault, rank)

    sys.addaudithook(watch)


def _call_on_all_ranks(world: World, fault: Fault, is_victim: bool) -> None:
    """Each rank writes what it raised: the line that `fault.judge` reads."""
    comm = world.comm.split(0, world.rank, fault.name)
    assert comm is not None, "every rank has a colour"
    world.comm.exchange(None)  # the act begins on all ranks at once
    try:
        _act(fault, world.rank, Scene(world, comm, world.stream, is_victim))
        error = "nothing"
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    _write(f"rank {world.rank} raised in {fault.name} at {time.time()} {' '.join(error.split())}")
    world.comm.exchange(None)
    comm.close()


# ---------------------------------------------------------------------- traffic


def _communicate(world: World, fault: Fault, options: StressOptions) -> int:
    """Make calls, with the fault in the middle; returns the exit code."""
    acting = fault.when is When.EVERYWHERE or (fault.when is When.TRAFFIC and world.rank == options.fault_rank)
    calls = itertools.count() if fault.when is When.LAUNCHER else range(2 * options.fault_after)
    waits = []
    for number in calls:
        start = time.perf_counter()
        if number == options.fault_after and fault.when is When.LAUNCHER:
            _write(f"rank {world.rank} is ready")
        if number == options.fault_after and acting:
            _act(fault, world.rank)
            start = time.perf_counter()
        _call(world, number)
        waits.append(time.perf_counter() - start)
    _report_wait(world, waits)
    return 0


def _call(world: World, number: int) -> None:
    """Make one call and check its result."""
    name = ("all_reduce", "all_gather", "reduce_scatter")[number % 3]
    problem = Problem(name, world.size, 1000, torch.float32, None if name == "all_gather" else ReduceOp.SUM, seed=number)
    out, inp = problem.place(world.rank, False, lambda numel, dtype: torch.empty(numel, dtype=dtype, device=world.device))
    problem.launch(world.comm, out, inp, world.stream).synchronize()
    if wrong := problem.count_wrong(world.rank, False, out, inp):
        raise RuntimeError(f"{wrong} elements wrong on rank {world.rank}: {problem}")


def _report_wait(world: World, waits: list[float]) -> None:
    """Rank 0 names the rank that all others waited for longest."""
    ranks = world.comm.exchange(waits)
    longest = max(range(len(waits)), key=lambda number: max(rank[number] for rank in ranks))
    if world.rank == 0:
        wait, last = min((rank[longest], number) for number, rank in enumerate(ranks))
        most = max(rank[longest] for rank in ranks)
        _write(f"call {longest} took longest: {most:.3f} s, waiting for rank {last}, which took {wait:.3f} s itself")


def _write(line: str) -> None:
    os.write(1, f"{line}\n".encode(errors="backslashreplace"))

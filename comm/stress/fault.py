"""Faults in the middle of traffic: starts a job in which one rank fails, and checks how the job ends.

| fault     | the rank                           | the job must                                                 |
|-----------|------------------------------------|--------------------------------------------------------------|
| kill      | kills itself (SIGKILL)             | end, not with 0                                              |
| stop      | stops itself (SIGSTOP)             | end with 17, the watchdog naming the rank                    |
| exception | raises an uncaught exception       | end, not with 0, showing the exception                       |
| mismatch  | makes a call of another size       | end with a MismatchError on every rank                       |
| skip      | skips a call                       | end with a MismatchError on every rank, or as after a stop   |
| slow      | sleeps, for less than the deadline | go on and end with 0, naming the rank that the others waited for |
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .. import ReduceOp, World
from .options import Fault, Options
from .problem import Problem

TIMEOUT_S = 6  # the watchdog's
END_S = TIMEOUT_S + 5  # from the fault to the job's end
JOB_S = 120.0  # with its start
SLEEP_S = 1.0  # of a slow rank
LINGER_S = 5.0  # that a rank may outlive its launcher
WATCHDOG_EXIT = 17


# ---------------------------------------------------------------------- a rank of the job


def inject(world: World, options: Options) -> int:
    """Make calls, with the fault in the middle; returns the exit code."""
    _write(f"rank {world.rank} pid {os.getpid()}")
    waits = []
    for number in range(2 * options.fault_after):
        fault = options.fault if (number, world.rank) == (options.fault_after, options.fault_rank) else None
        if fault is not None:
            _write(f"rank {world.rank} injects {fault.value} at {time.time()}")
        try:
            waits.append(_call(world, number, fault))
        except Exception as error:
            _write(f"rank {world.rank} raised {type(error).__name__}")
            if type(error).__name__ == "MismatchError":
                return 1  # Hazard: an uncaught error ends the job, perhaps before another rank has printed its own
            raise
    ranks = world.comm.exchange(waits)
    longest = max(range(len(waits)), key=lambda number: max(rank[number] for rank in ranks))
    if world.rank == 0:
        wait, last = min((rank[longest], number) for number, rank in enumerate(ranks))
        most = max(rank[longest] for rank in ranks)
        _write(f"call {longest} took longest: {most:.3f} s, waiting for rank {last}, which took {wait:.3f} s itself")
    return 0


def _call(world: World, number: int, fault: Fault | None) -> float:
    """Make one call and check its result, or inject the fault; returns its duration in seconds."""
    name = ("all_reduce", "all_gather", "reduce_scatter")[number % 3]
    problem = Problem(name, world.size, 1000, torch.float32, None if name == "all_gather" else ReduceOp.SUM, seed=number)
    match fault:
        case Fault.KILL | Fault.STOP:
            os.kill(os.getpid(), signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)
        case Fault.EXCEPTION:
            raise RuntimeError(f"injected on rank {world.rank}")
        case Fault.MISMATCH:
            problem = replace(problem, n=problem.n + 1)
        case Fault.SKIP:
            return 0.0
        case Fault.SLOW:
            time.sleep(SLEEP_S)
    out, inp = problem.place(world.rank, False, lambda numel, dtype: torch.empty(numel, dtype=dtype, device=world.device))
    start = time.perf_counter()
    problem.launch(world.comm, out, inp, world.stream).synchronize()
    seconds = time.perf_counter() - start
    if wrong := problem.count_wrong(world.rank, False, out, inp):
        raise RuntimeError(f"{wrong} elements wrong on rank {world.rank}: {problem}")
    return seconds


def _write(line: str) -> None:
    os.write(1, f"{line}\n".encode())


# ---------------------------------------------------------------------- starting and judging the job


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended."""

    code: int | None  # None: it has not ended
    output: str
    seconds: float | None  # since the fault; None: there was none
    survivors: list[str]  # ranks that outlived the job


def run(options: Options) -> int:
    """Start the job, wait for its end, judge it; returns 0 if it ended as expected. No rank outlives this."""
    assert options.fault is not None, "a fault"
    ranks, victim = options.number, options.number - 1 if options.fault_rank is None else options.fault_rank
    if not 0 <= victim < ranks:
        sys.exit(f"--fault-rank {victim} is not one of {ranks} ranks")
    flags = ["--fault", options.fault.value, "--fault-rank", str(victim), "--fault-after", str(options.fault_after)]
    launch = [sys.executable, "-m", "shardrt.launch", "--launcher", "mpirun", "-n", str(ranks)]
    ending = _run_job([*launch, "-m", "shardrt.comm.stress", "--inject", *flags])
    complaints = judge(options.fault, victim, ranks, ending)
    when = "" if ending.seconds is None else f", {ending.seconds:.1f} s after the fault"
    print(f"{options.fault.value} on rank {victim} of {ranks}: exit code {ending.code}{when}")
    for line in re.findall("^call .*", ending.output, re.MULTILINE) + [f"FAILED: {text}" for text in complaints]:
        print(line)
    if complaints:
        print(f"Output of the job:\n{ending.output[-3000:]}")
    return 1 if complaints else 0


def judge(fault: Fault, victim: int, ranks: int, ending: Ending) -> list[str]:
    """What was expected and did not happen, in words."""
    output, failed = ending.output, ending.code not in (None, 0)
    mismatched = failed and all(f"rank {rank} raised MismatchError" in output for rank in range(ranks))
    # By other ranks: the victim itself has printed its pid and its fault.
    watched = ending.code == WATCHDOG_EXIT and re.search(rf"rank {victim}\b(?! pid| injects)", output) is not None
    held, expected = {
        Fault.KILL: (failed, "another exit code than 0"),
        Fault.STOP: (watched, f"exit code {WATCHDOG_EXIT} and a report that names rank {victim}"),
        Fault.EXCEPTION: (
            failed and f"injected on rank {victim}" in output,
            "another exit code than 0 and the exception shown",
        ),
        Fault.MISMATCH: (mismatched, "a MismatchError on every rank"),
        Fault.SKIP: (mismatched or watched, f"a MismatchError on every rank, or exit code {WATCHDOG_EXIT}"),
        Fault.SLOW: (ending.code == 0 and f"waiting for rank {victim}," in output, f"exit code 0 and rank {victim} named"),
    }[fault]
    checks = {
        "the fault was not injected": ending.seconds is None,
        f"the job had not ended {END_S:g} s after the fault": ending.code is None or (ending.seconds or 0) > END_S,
        f"ranks outlived the job: {', '.join(ending.survivors)}": ending.survivors,
        f"expected {expected}": not held,
    }
    return [text for text, is_so in checks.items() if is_so]


def _run_job(command: list[str]) -> Ending:
    settings = {"SHARDRT_TIMEOUT": str(TIMEOUT_S), "SHARDRT_CHECK": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as file:
        job = subprocess.Popen(
            command,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = job.wait(JOB_S)
            end = time.time()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            file.seek(0)
            output = file.read()
            survivors = _kill_ranks(output)
    injected = re.search(r"^rank \d+ injects \w+ at ([\d.]+)$", output, re.MULTILINE)
    return Ending(code, output, end - float(injected[1]) if injected else None, survivors)


def _kill_ranks(output: str) -> list[str]:
    """Kill the ranks that still run after some seconds: a stopped one outlives its launcher. Returns them."""
    pids = dict(re.findall(r"^rank (\d+) pid (\d+)$", output, re.MULTILINE))
    until = time.time() + LINGER_S
    while (left := [rank for rank, pid in pids.items() if _is_rank(pid)]) and time.time() < until:
        time.sleep(0.1)
    for rank in left:
        with suppress(ProcessLookupError):
            os.kill(int(pids[rank]), signal.SIGKILL)
    return left


def _is_rank(pid: str) -> bool:
    """True if the process runs and is a rank of such a job: pids are reused."""
    try:
        return b"shardrt.comm.stress" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

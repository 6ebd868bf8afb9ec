"""The guard beside each rank: it ends the job where the rank's interpreter cannot.

Most tests run it on ranks that only sleep, exit and tell the guard how far they are, under a launcher that understands the one
command of MPICH's process manager that the guard sends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import DEADLINE_S, FRESH, run_job, run_script, site
from shardrt.comm.ending.guard.node import Neighbour, RankPhase, RankPlace
from shardrt.comm.ending.guard.watch import Election
from shardrt.comm.ending.processes import Process
from shardrt.comm.monitor.guarding import RankGuard
from shardrt.launch import Mpi

GUARD = Path(__file__).parents[2] / "comm" / "ending" / "guard" / "__main__.py"

# Starts its arguments as ranks, each with a guard; ends when a rank aborts the job, with its code, or when all have ended.
LAUNCHER = """
import os, select, socket, subprocess, sys
guard, *bodies = sys.argv[1:]
ranks, ends = [], []
for rank, body in enumerate(bodies):
    own, of_rank = socket.socketpair()
    size = str(len(bodies))
    of_node, on_node = os.environ["LOCAL"].split()
    place = {"PMI_RANK": str(rank), "PMI_SIZE": size, of_node: size, on_node: str(rank)}
    command = [sys.executable, "-I", "-S", guard, "--start", sys.executable, "-I", "-S", "-c", body]
    environment = {**os.environ, **place, "PMI_FD": str(of_rank.fileno())}
    ranks.append(subprocess.Popen(command, env=environment, pass_fds=[of_rank.fileno()], stdout=subprocess.PIPE))
    of_rank.close()
    ends.append(own)
code, open_ends = None, [*ends]
while open_ends and code is None:
    for end in select.select(open_ends, [], [])[0]:
        words = end.recv(100)
        if not words:
            open_ends.remove(end)
        else:
            code = int(words.decode().removeprefix("cmd=abort exitcode="))
if code is not None:
    for rank in ranks:
        rank.kill()
for rank in ranks:
    rank.wait()
sys.exit(max(rank.returncode for rank in ranks) if code is None else code)
"""

START_S = 5.0  # for all ranks of all jobs to start
BODY = """
import os, signal, struct, sys, time
def tell(*messages):
    os.write(int(os.environ["SHARDRT_GUARD"].partition(":")[0]), "".join(f"{message}\\n" for message in messages).encode())
def table(deadline_s=60, is_under_way=True, ranks="0,1"):
    fd = os.memfd_create("table")
    # Rows of the parent, which lives, and of this rank, both in their first operation, or after it.
    for pid in (os.getppid(), os.getpid()):
        entry = struct.pack("<Q24sqqqd64s", 1, b"world", not is_under_way, 1, 7, time.monotonic(), b"all_reduce")
        os.write(fd, (struct.pack("<qdi", pid, 0.0, -1).ljust(256, b"\\0") + entry).ljust(2176, b"\\0"))
    return f"table {fd} {deadline_s} 60 {ranks} 1"
time.sleep(max(0.0, float(os.environ["AT"]) - time.time()))
"""
WAIT = "time.sleep(20)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
LATE = f"""
reader, writer = os.pipe()
process = os.pidfd_open(os.getpid())
os.set_inheritable(process, True)
command = f"sleep 1; exec {{sys.executable}} -I -S {GUARD} {{os.getpid()}} {{process}}"
os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
os.write(writer, b"init 60 60\\n")
os._exit(0)
"""


@dataclass(frozen=True)
class Job:
    """What the ranks do, the job's exit code, and patterns of the lines that it writes, in order."""

    ranks: tuple[str, ...]
    code: int
    lines: tuple[str, ...] = ()
    local: str = "MPI_LOCALNRANKS MPI_LOCALRANKID"  # the launcher's variables


PLACE = r"host \S+, pid \d+"
JOBS = {
    "fails before init": Job(
        (WAIT, "sys.exit(3)"),
        3,
        (rf"\[1\] rank 1: {PLACE}, ended with exit code 3 before shardrt.init\(\); ending the job with exit code 3",),
    ),
    "is killed before init": Job(
        (WAIT, KILLED),
        137,
        (rf"\[1\] rank 1: {PLACE}, was ended by signal 9 \(Killed\) before shardrt.init\(\); .* exit code 137",),
    ),
    "is killed before init, and the launcher has killed the other": Job(
        (f"time.sleep(0.5); {KILLED}", KILLED),
        137,
        (rf"\[1\] rank 1: {PLACE}, was ended by signal 9 \(Killed\) before shardrt.init\(\); .* exit code 137",),
    ),
    "all fail alike": Job(("sys.exit(3)", "sys.exit(3)"), 3),
    "gets the signal of all": Job(("os.kill(os.getpid(), signal.SIGTERM)",) * 3, -signal.SIGTERM & 255),
    "is killed alone in its node": Job(
        (WAIT, "tell(table(ranks='1'), 'run'); time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"),
        137,
        (rf"\[1\] rank 1: {PLACE}, was ended by signal 9 \(Killed\) before shardrt.finalize\(\); .* exit code 137",),
    ),
    "ends before init": Job(
        ("tell('init inf inf'); " + WAIT, "sys.exit(0)"),
        17,
        (
            r"\[0\] rank 0: waited [4-9] s in shardrt.init\(\) \(no limit, SHARDRT_START_TIMEOUT\); .* exit code 17",
            r"\[0\] host \S+: 1 of 2 ranks came to shardrt.init\(\): rank 0",
            r"\[0\] missing rank 1: host \S+, (pid \d+, )?ended",
        ),
    ),
    "ends where nobody waits": Job(("time.sleep(1)", "sys.exit(0)"), 0),
    "sleeps before init": Job(
        ("tell('init 2 60'); " + WAIT, WAIT, "tell('init 2 60'); " + WAIT),
        17,
        (
            r"\[0\] rank 0: waited [3-9] s in shardrt.init\(\) \(limit 2 s, SHARDRT_START_TIMEOUT\); .* exit code 17",
            r"\[0\] host \S+: 2 of 3 ranks came to shardrt.init\(\): ranks 0, 2",
            rf"\[0\] missing rank 1: {PLACE}, asleep.*",
        ),
    ),
    "is stopped in init": Job(
        ("tell('init 2 60'); os.kill(os.getpid(), signal.SIGSTOP)", "tell('init 2 60'); " + WAIT),
        17,
        (
            r"\[1\] rank 1: waited .*",
            r"\[1\] host \S+: 2 of 2 ranks came to shardrt.init\(\): ranks 0, 1",
            rf"\[1\] rank 0 in shardrt.init\(\): {PLACE}, stopped.*",
        ),
    ),
    "ends in init": Job(
        (WAIT, "tell('init 60 60'); os._exit(0)"),
        17,
        (rf"\[1\] rank 1: {PLACE}, ended with exit code 0 in shardrt.init\(\); .* exit code 17",),
    ),
    "ends in init before its guard starts": Job(
        (WAIT, LATE),
        17,
        (rf"\[1\] rank 1: {PLACE}, ended with exit code 0 in shardrt.init\(\); .* exit code 17",),
    ),
    "init raises": Job((WAIT.replace("20", "1"), "tell('init 2 60', 'start'); time.sleep(4)"), 0),
    "ends while it runs": Job(
        (WAIT, "tell('init 60 60', table(), 'run'); time.sleep(1); os._exit(0)"),
        17,
        (
            rf"\[1\] rank 1: {PLACE}, ended with exit code 0 before shardrt.finalize\(\); in #7 all_reduce on 'world', begun "
            r"\S+ s ago; ending the job with exit code 17",
        ),
    ),
    "crashes while it runs": Job(
        (WAIT, "tell(table(), 'run'); time.sleep(1); os.abort()"), 134, (rf"\[1\] rank 1: {PLACE}, was ended by signal 6 .*",)
    ),
    "is in the end": Job((WAIT, "tell('run', 'end 5'); os._exit(0)"), 5),
    "dies under Slurm": Job(  # whose launcher does not understand the command, and kills the others by itself
        ("tell('init 60 60'); os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(2)"),
        0,
        (rf"\[0\] rank 0: {PLACE}, was ended by signal 9 \(Killed\) in shardrt.init\(\); .* exit code 137",),
        local="SLURM_STEP_TASKS_PER_NODE SLURM_LOCALID",
    ),
    "is done": Job(("time.sleep(1)", "tell('run', 'done'); os._exit(0)"), 0),
    "runs another program": Job(
        (
            "time.sleep(2)",
            "tell('run'); os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1); exit(4)'])",
        ),
        4,
        (r"\[1\] rank 1: .* exit code 4 before shardrt.finalize\(\).*",),
    ),
    "all are suspended": Job(
        (
            "tell('init 2 60'); me = os.getpid(); os.fork() or (time.sleep(4), os.kill(me, signal.SIGCONT), os._exit(1)); "
            "os.kill(me, signal.SIGSTOP); tell('run', 'done')",
        )
        * 2,
        0,
    ),
    "computes for long": Job(("time.sleep(4)", "tell(table(1, False), 'run'); time.sleep(4); tell('done')"), 0),
    "no watchdog is awake": Job(
        (WAIT, "tell(table(1), 'run'); " + WAIT),
        17,
        (
            r"\[1\] rank 1: host \S+: no watchdog of ranks 0, 1 has been awake for [1-5] s .* exit code 17",
            r"\[1\] rank 0: pid \d+, .*; in #7 all_reduce on 'world', begun \S+ s ago",
            r"\[1\] rank 1: pid \d+, asleep.*; in #7 all_reduce on 'world', begun \S+ s ago",
            r"\[1\] stacks of rank 0:",
            r"\[1\]   \(none: .*\)",
            r"\[1\] stacks of rank 1:",
            r"\[1\]   \(none: .*\)",
        ),
    ),
}


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All jobs, at once: they mostly wait. Their ranks begin together, when all have started."""
    environment = os.environ | {"AT": str(time.time() + START_S)}
    started = {}
    for name, job in JOBS.items():
        command = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(GUARD), *(BODY + body for body in job.ranks)]
        started[name] = subprocess.Popen(
            command,
            env=environment | {"LOCAL": job.local},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    yield started
    for process in started.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("name", JOBS)
def test_a_rank_that(name: str, running: dict[str, subprocess.Popen[str]]) -> None:
    _, err = running[name].communicate(timeout=DEADLINE_S)
    job = JOBS[name]
    assert running[name].returncode == job.code, err
    # On a busy machine a rank may be waited for a little longer first.
    lines = [line for line in err.splitlines() if "waiting on, for up to" not in line]
    assert len(lines) == len(job.lines), err
    for line, pattern in zip(lines, job.lines, strict=True):
        assert re.fullmatch(pattern, line), err


def test_places() -> None:
    """The launcher's own variables come before those of the allocation."""
    allocation = {"SLURM_NTASKS": "6", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    slurm = allocation | {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    hydra = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for environment, expected in (
        (slurm, (6, 0, True, 2)),
        (slurm | hydra, (4, 3, False, 2)),
        (slurm | {"PMI_SIZE": "6", "PMI_RANK": "0"}, (6, 0, True, 2)),  # MPICH under Slurm
        (slurm | {"PMI_SIZE": ""}, (6, 0, True, 2)),
    ):
        place = RankPlace(environment)
        assert (place.size, place.rank, place.is_first, place.local_size) == expected
        assert place.is_hydras == ("MPI_LOCALNRANKS" in environment)
    for uneven in ("3,2,1", "2(x2),1", "3(x2),2(x2)"):
        assert RankPlace(slurm | {"SLURM_STEP_TASKS_PER_NODE": uneven}).local_size is None
    wrong: dict[str, str]
    for wrong in ({}, allocation, {"PMI_SIZE": "1", "PMI_RANK": "0"}, {"PMI_SIZE": "2"}, {"PMI_SIZE": "x", "PMI_RANK": "0"}):
        with pytest.raises((LookupError, ValueError)):
            RankPlace(wrong)


def _node(**phases: RankPhase) -> dict[int, Neighbour]:
    """Ranks r0, r1, ... in these phases; their processes are alive."""
    node = {int(name[1:]): Neighbour(int(name[1:]), Process(os.getpid())) for name in phases}
    for neighbour, phase in zip(node.values(), phases.values(), strict=True):
        neighbour.phase = phase
    return node


def test_who_ends_the_job_in_init() -> None:
    """A rank that waits for longer does not wait for a lower one; if the launcher lets the others live, the next follows."""
    first, second = Election(1), Election(2)
    assert first.is_mine(_node(r0=RankPhase.INIT, r1=RankPhase.OVERDUE, r2=RankPhase.OVERDUE), 1.0)
    assert not second.is_mine(_node(r0=RankPhase.INIT, r1=RankPhase.OVERDUE, r2=RankPhase.OVERDUE), 1.0)
    assert not second.is_mine(_node(r0=RankPhase.INIT, r1=RankPhase.ENDING, r2=RankPhase.OVERDUE), 1.0)
    alone = _node(r0=RankPhase.INIT, r2=RankPhase.OVERDUE)
    assert [second.is_mine(alone, 2.0) for _ in range(8)] == 7 * [False] + [True]


def test_a_rank_alone_has_no_guard() -> None:
    program = "import os; print(os.environ.get('SHARDRT_GUARD'))"
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "SLURM_"))}
    command = [sys.executable, "-I", "-S", str(GUARD), "--start", sys.executable, "-c", program]
    for environment in (alone, alone | {"PMI_SIZE": "1", "PMI_RANK": "0"}):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        assert done.stdout == "None\n"


def test_a_frozen_program_is_not_started_as_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(os, "posix_spawn", lambda *_, **__: pytest.fail("has started a process"))
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with RankGuard().starting(60.0, 60.0):
        pass


TIMING = "settle_nodes_s=0.5,report_s=1,held_s=1"


@pytest.mark.rest
@pytest.mark.mpi
def test_a_rank_that_sleeps_before_init() -> None:
    """The others wait inside MPI_Init, without Python's lock to be had."""
    source = """
import os, time
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    time.sleep(600)
import shardrt
shardrt.init("cpu")
"""
    done = run_script(source, 2, FRESH, SHARDRT_START_TIMEOUT="2")
    assert done.returncode == (17 if site().mpi is Mpi.MPICH else 137), done.stderr
    assert re.search(r"^\[0\] rank 0: waited \d s in shardrt.init\(\) \(limit 2 s, SHARDRT_START_TIMEOUT\)", done.stderr, re.M)
    assert re.search(rf"^\[0\] missing rank 1: {PLACE}, asleep", done.stderr, re.M), done.stderr


RUNNING = """
import ctypes, os, sys, torch
import shardrt
world = shardrt.init("cpu")
world.comm.exchange(1)
if {condition}:
    {fault}
world.comm.exchange(2)
"""


@pytest.mark.rest
@pytest.mark.mpi
def test_all_ranks_hold_the_lock() -> None:
    fault = "mutex = ctypes.create_string_buffer(64); [ctypes.PyDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"
    source = RUNNING.format(condition="True", fault=fault)
    done = run_script(source, 2, FRESH, SHARDRT_TIMEOUT="1", SHARDRT_MONITOR_TIMING=TIMING)
    assert done.returncode == (17 if site().mpi is Mpi.MPICH else 137), done.stderr
    (line,) = re.findall(r"^\[\d\] rank \d: host \S+: no watchdog of .*", done.stderr, re.M)
    assert "ranks 0, 1 has been awake for" in line
    assert len(re.findall(r"^\[\d\] rank \d: pid \d+, .*; last #\d+ exchange on 'world', begun", done.stderr, re.M)) == 2
    assert re.search(r"^\[\d\]     File .*script.py\", line 7 in <module>", done.stderr, re.M), done.stderr


@pytest.mark.mpi
def test_a_rank_that_leaves_through_c() -> None:
    done = run_script(RUNNING.format(condition="world.rank == 1", fault="ctypes.CDLL(None)._exit(0)"), 2, FRESH)
    if site().mpi is Mpi.MPICH:
        assert done.returncode == 17, done.stderr
        expected = (
            r"ended with exit code 0 before shardrt.finalize\(\); last #\d exchange on 'world', begun \S+ s ago; ending the job"
        )
        assert re.search(rf"^\[1\] rank 1: {PLACE}, {expected}", done.stderr, re.M), done.stderr
    else:
        assert done.returncode != 0
        assert done.stderr


UNDER_PYTEST = """
import os, shardrt

def test_it():
    world = shardrt.init("cpu")
    world.comm.exchange(1)
    if world.rank == 1:
        {fault}
    world.comm.exchange(2)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("fault", "says"),
    [("return", "[0] missing rank 1: "), ("os.kill(os.getpid(), 9)", "[1] rank 1: host ")],
    ids=["watchdog", "guard"],
)
def test_reports_of_tests(fault: str, says: str, tmp_path: Path) -> None:
    """pytest keeps what ranks write to their standard error in files that are lost with them."""
    (tmp_path / "test_ranks.py").write_text(UNDER_PYTEST.format(fault=fault))
    done = run_job(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)], 2, FRESH, SHARDRT_TIMEOUT="2")
    assert done.returncode != 0
    assert says in done.stderr, done.stderr

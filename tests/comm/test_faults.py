"""Faults on one rank while others wait for it: the job ends in time, with the exit code and the words that name the fault."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from marks import rest
from ranks import DEADLINE_S, FRESH, rank_environment, start
from shardrt.comm.recorder import merge_dumps

FAULT = """
import ctypes, os, signal, sys, threading, time
import torch
import shardrt
from shardrt.comm import ReduceOp

world = shardrt.init("cpu")
stream = world.stream_for("test")
ones = torch.ones(4)

def all_reduce():
    world.comm.all_reduce(ones, ones, ReduceOp.MAX, stream=stream).synchronize()

def fail():
    {fault}

all_reduce()
if world.rank == 1:
    fail()
all_reduce()
time.sleep(600)
"""

STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
# A second lock of a mutex waits for ever; sleep() would end on a signal.
HOLD_GIL = "mutex = ctypes.create_string_buffer(64); [ctypes.PyDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"
SLEEP = "time.sleep(600)"


# Of the monitor. What gives ranks time to answer stays long: they share cores with other tests.
TIMING = "poll_s=0.05,lost_s=1.5,silent_s=1.5,settle_nodes_s=2,interval_s=0.5"


def run_script(
    source: str, size: int, fresh: bool = False, /, *, code: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return ranks.run_script(source, size, fresh, code=code, **{"SHARDRT_MONITOR_TIMING": TIMING, **environment})


def reports(stderr: str, words: str) -> list[str]:
    """The lines with these words."""
    return [line for line in stderr.splitlines() if words in line]


@pytest.mark.parametrize(
    ("fault", "streams", "state", "stacks"),
    [
        *rest(
            (STOP, "inline", "stopped", "(none: the process does not answer)"),
            (HOLD_GIL, "inline", "its watchdog has been silent", "in fail"),
        ),
        (SLEEP, "threaded", "running", "in fail"),
    ],
    ids=["stopped", "holds the GIL", "sleeps"],
)
def test_a_rank_that_does_not_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, streams: str, state: str, stacks: str
) -> None:
    environment = {"SHARDRT_TIMEOUT": "3", "SHARDRT_DUMP": str(tmp_path), "SHARDRT_HOST_STREAMS": streams}
    done = run_script(FAULT.format(fault=fault), 3, fault == STOP, code=17, **environment)
    assert len(reports(done.stderr, "ending the job with exit code 17")) == 1, done.stderr
    assert re.search(r"\[0\] rank 0: waited [3-9] s in #1 all_reduce float32 4 max on 'world'", done.stderr), done.stderr
    assert reports(done.stderr, "[0] present: ranks 0, 2; missing: rank 1"), done.stderr
    (line,) = reports(done.stderr, "missing rank 1: host")
    assert state in line
    assert "last #0 all_reduce float32 4 max on 'world', begun" in line
    of_rank_1 = done.stderr.split("stacks of rank 1:")[1].split("stacks of rank 0:")[0]
    assert stacks in of_rank_1, done.stderr
    assert "script.py" in done.stderr.split("stacks of rank 0:")[1]
    assert reports(done.stderr, "[2] rank 2: waits in #1 all_reduce float32 4 max on 'world'; last call: #1"), done.stderr
    if fault == STOP:
        command = [sys.executable, "-W", "error", "-m", "shardrt.comm.recorder", "merge", str(tmp_path)]
        merged = subprocess.check_output(command, env=rank_environment(), text=True, timeout=DEADLINE_S)
    else:
        assert merge_dumps.main(["merge", str(tmp_path)]) == 0
        merged = capsys.readouterr().out
    assert "! 'world' of ranks 0, 1, 2: " in merged
    assert "at #1 all_reduce float32 4 max, under way" in merged


MICRO_BATCHES = """
import torch, shardrt
world = shardrt.init("cpu")
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
for layer in (*model, model):
    shardrt.fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for count in (2, 1 if world.rank == 1 else 3, 2):
    for index in range(count):
        {sync}
        model(torch.full((4, 64), 1.0 + world.rank)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("sync", "node_memory", "places"),
    [
        ("last", "1", "r.*: in forward 1 of step 2, whose gradients wait for more; rank 1: in forward 1 of step 2"),
        *rest(
            ("last", "0", "r.*: in forward 2 of step 2, whose gradients wait for more; rank 1: in forward 1 of step 2"),
            ("every", "0", "r.*: in forward 1 of step 3; rank 1: after step 3"),
        ),
    ],
)
def test_ranks_with_unequal_numbers_of_micro_batches(sync: str, node_memory: str, places: str) -> None:
    """They wait for each other in different communicators, or, where no calls are compared, at the end of the program."""
    source = MICRO_BATCHES.format(sync="model.set_requires_gradient_sync(index == count - 1)" if sync == "last" else "")
    compared = "1" if sync == "last" else "0"
    done = run_script(source, 3, code=17, SHARDRT_TIMEOUT="3", SHARDRT_NODE_MEMORY=node_memory, SHARDRT_CHECK=compared)
    assert re.search(rf"training is not at the same place: {places}\. In each step, every rank", done.stderr), done.stderr


def test_a_rank_that_leaves_early() -> None:
    done = run_script(FAULT.format(fault="sys.exit(3)"), 3, code=17)
    (line,) = reports(done.stderr, "missing rank 1: host")
    assert "has left its program, after #0 all_reduce float32 4 max on 'world', " in line
    assert "script.py:12 in all_reduce; in #1 finalize on 'world'" in line


@pytest.mark.rest
def test_a_rank_that_leaves_through_os_exit() -> None:
    done = run_script(FAULT.format(fault="os._exit(0)"), 3, FRESH, code=17)
    assert reports(done.stderr, "[1] rank 1: os._exit(0) before shardrt.finalize(), no communication under way")
    assert reports(done.stderr, 'script.py", line 15, in fail'), done.stderr


def test_a_rank_that_is_killed() -> None:
    done = run_script(FAULT.format(fault="os.kill(os.getpid(), signal.SIGKILL)"), 3, FRESH)
    assert done.returncode != 0
    (line,) = reports(done.stderr, "[1] rank 1: host")
    assert "signal 9" in line
    assert "last #0 all_reduce float32 4 max on 'world'" in line


SIGNALS = """
import os, signal, sys, threading, time
import torch
import shardrt

world = shardrt.init("cpu")
{prepare}
world.barrier()
os.write(1, f"rank {{world.rank}} pid {{os.getpid()}} ready\\n".encode())
if world.rank == 0:
    pids = world.comm.exchange(os.getpid())
    time.sleep(1)
    for pid in pids[{to}]:
        os.kill(pid, signal.{signal})
    {then}
else:
    world.comm.exchange(os.getpid())
    world.barrier()
time.sleep(600)
"""


ONE, ALL = ("1:2", "time.sleep(600)"), ("0:", "world.barrier()")


@pytest.mark.parametrize(
    ("name", "code", "message", "to", "then"),
    [
        ("SIGINT", 130, "interrupted", *ONE),
        *rest(("SIGINT", 130, "interrupted", *ALL), ("SIGTERM", 143, "terminated", *ONE)),
    ],
    ids=["SIGINT one", "SIGINT all", "SIGTERM one"],
)
def test_a_signal_to_a_rank_that_waits(name: str, code: int, message: str, to: str, then: str) -> None:
    done = run_script(SIGNALS.format(signal=name, to=to, then=then, prepare=""), 3, name == "SIGTERM", code=code)
    lines = reports(done.stderr, f": {message} ({name}), ")
    assert lines, done.stderr
    if to == "1:2":
        assert lines == [f"[1] rank 1: {message} ({name}), #2 barrier on 'world' under way; ending the job"]
        assert reports(done.stderr, 'script.py", line 18, in <module>'), done.stderr


def test_a_handler_of_the_programs_stays() -> None:
    prepare = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'handled\\n'), os._exit(5)))"
    done = run_script(SIGNALS.format(signal="SIGTERM", to=":1", then="world.barrier()", prepare=prepare), 2)
    assert "handled" in done.stdout
    assert done.returncode == 5


@pytest.mark.rest
def test_ranks_do_not_outlive_their_launcher() -> None:
    source = SIGNALS.format(signal="SIGUSR1", to=":0", then="world.barrier()", prepare="")
    with start(2, ["-c", source], FRESH, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[3]) for _ in range(2)]
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.1)


@pytest.mark.rest
def test_nodes_exchange_their_status() -> None:
    """Two nodes of two ranks each; the one that stops is on the other node than the one that reports."""
    source = FAULT.replace("world.rank == 1", "world.rank == 3")
    done = run_script(source.format(fault=STOP), 4, code=17, SHARDRT_TIMEOUT="4", SHARDRT_RANKS_PER_NODE="2")
    assert len(reports(done.stderr, "ending the job with exit code 17")) == 1
    (line,) = reports(done.stderr, "[0] missing rank 3: host")
    assert ", stopped; last #0 all_reduce float32 4 max on 'world'" in line
    assert reports(done.stderr, "stacks of rank 3:"), done.stderr


@pytest.mark.rest
def test_nodes_that_are_cut_off_write_one_report() -> None:
    """Rank 0, through which nodes exchange their status, stops: nobody knows who else waits."""
    source = FAULT.replace("world.rank == 1", "world.rank == 0")
    environment = {"SHARDRT_RANKS_PER_NODE": "2", "SHARDRT_MONITOR_TIMING": f"{TIMING},turn_s=5"}
    done = run_script(source.format(fault=STOP), 3, code=17, SHARDRT_TIMEOUT="2", **environment)
    (line,) = reports(done.stderr, "ending the job with exit code 17")
    assert line.startswith("[1] rank 1: waited")


@pytest.mark.rest
def test_a_rank_of_another_node_that_leaves_early() -> None:
    source = FAULT.replace("world.rank == 1", "world.rank == 3")
    done = run_script(source.format(fault="sys.exit(3)"), 4, code=17, SHARDRT_RANKS_PER_NODE="2")
    (line,) = reports(done.stderr, "[0] missing rank 3: host")
    assert "has left its program, after #0 all_reduce" in line


def test_ranks_in_different_operations() -> None:
    """Without the check of calls, they wait for each other."""
    source = FAULT.format(fault="world.comm.exchange(1)")
    done = run_script(source, 3, code=17, SHARDRT_TIMEOUT="5", SHARDRT_CHECK="0")
    (line,) = reports(done.stderr, "missing rank 1: host")
    assert "on 'world', begun" in line


@pytest.mark.mpi
@pytest.mark.parametrize("per_node", ["2", *rest("1")])
def test_a_collective_that_one_rank_leaves_out(per_node: str) -> None:
    """It begins with the split of the world that makes its communicator."""
    source = """
import torch, shardrt
world = shardrt.init("cpu")
model = shardrt.fully_shard(torch.nn.Linear(4, 4))
if world.rank == 0:
    model.weight.full_tensor()
world.barrier()
"""
    done = run_script(source, 2, code=1, SHARDRT_RANKS_PER_NODE=per_node)
    for rank in range(2):
        expected = f"rank 0: split; rank 1: barrier (reported on rank {rank}). None of them ran"
        assert reports(done.stderr, expected), done.stderr


def test_a_forked_child_leaves_mpi_alone() -> None:
    """It may leave in any way, be terminated, and work for a DataLoader; what it may not do is communicate."""
    source = """
import os, signal, sys, time
import torch
import shardrt

world = shardrt.init("cpu")
ones = torch.ones(2)

def in_child(body):
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    body()

def refused(call):
    try:
        call()
    except RuntimeError as error:
        assert "is a forked child of a rank" in str(error)
        return
    os._exit(1)

def communicate():
    refused(lambda: world.comm.all_gather(torch.ones(2 * world.size), ones, stream=world.stream))
    refused(lambda: world.comm.exchange(1))
    refused(world.barrier)
    refused(lambda: world.mesh.communicator("new"))
    shardrt.finalize()
    sys.exit(5)

assert os.waitstatus_to_exitcode(in_child(communicate)) == 5
assert os.waitstatus_to_exitcode(in_child(lambda: 1 / 0)) == 1
assert os.waitstatus_to_exitcode(in_child(lambda: os.kill(os.getpid(), signal.SIGTERM))) == -signal.SIGTERM
assert os.waitstatus_to_exitcode(in_child(lambda: os._exit(3))) == 3
loader = torch.utils.data.DataLoader(list(range(4)), num_workers=1, multiprocessing_context="fork")
assert sum(int(batch) for batch in loader) == 6
world.barrier()
print("parent goes on")
"""
    done = run_script(source, 2, code=0)
    assert done.stdout.count("parent goes on") == 2
    assert done.stderr.count("ZeroDivisionError") == 2
    assert not reports(done.stderr, "ending the job")


def test_nothing_is_left_behind() -> None:
    """Threads, handlers and descriptors as they were before init(), when a world has ended."""
    source = """
import os, signal, sys, threading
from mpi4py import MPI
import shardrt

def here():
    hooks = sys.excepthook, threading.excepthook, os._exit
    return hooks, [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], [t.name for t in threading.enumerate()]

before = here()
world = shardrt.init("cpu")
assert {"shardrt-watchdog", "shardrt-signals"} <= set(here()[2])
assert not [name for name in os.listdir("/dev/shm") if "shardrt" in name and "copies" not in name]  # those of another job
world.barrier()
shardrt.finalize()
assert here() == before, (here(), before)
assert not [fd for fd in os.listdir("/proc/self/fd") if "shardrt" in os.path.realpath(f"/proc/self/fd/{fd}")]
try:
    shardrt.init("cpu")
except RuntimeError as error:
    print(error)
"""
    done = run_script(source, 2, code=0)
    assert done.stdout.count("shardrt.init() after shardrt.finalize(): a process has one world, made once") == 2


# What stands for a GPU: an event that does not pass.
NEVER = """
import os, sys, time
import torch
import shardrt
from mpi4py import MPI
from shardrt.comm.core.calls import CallList, CollectiveCall, Work
from shardrt.comm.core.streams import Event
from shardrt.comm.monitor.guarding import RankGuard
from shardrt.comm.monitor.install import Monitor

class Never(Event):
    def query(self): return False
    def synchronize(self): raise AssertionError
"""


@pytest.mark.rest
def test_a_rank_alone_is_watched_on_a_gpu() -> None:
    """By a thread that is bound to the GPU; nothing else is done to a process that is no job."""
    source = """
world, gpu, hook = shardrt.init("cpu"), torch.device("cuda", 1), sys.excepthook
shardrt.comm.monitor.watchdog.watchdog.observe = lambda device: print("bound to", device, flush=True)
monitor = Monitor(MPI.COMM_WORLD, 0, gpu, world.settings, RankGuard())
watchdog = next(hook for hook in monitor.hooks if type(hook).__name__ == "Watchdog")
assert sys.excepthook is hook
world.comm.is_async = True
call = CollectiveCall(world.comm, 7, "all_gather", torch.ones(4), torch.ones(4), (), world.stream)
watchdog.called(CallList([call]).describe(), Work(Never()))
time.sleep(600)
"""
    done = run_script(NEVER + source, 1, SHARDRT_TIMEOUT="3", SHARDRT_CHECK="0")
    assert (done.returncode, done.stdout) == (17, "bound to cuda:1\n"), done.stderr
    assert re.search(r"\[0\] rank 0: waited [3-9] s in #7 all_gather float32 4 on 'world'", done.stderr), done.stderr


@pytest.mark.rest
def test_a_kernel_that_never_ends() -> None:
    """On a CUDA device a call has been enqueued, and its event does not pass; here, an event that stands for one."""
    source = """
world = shardrt.init("cpu")
comm = world.comm.split(0, world.rank, "gpu")
comm.is_async = True
watchdog = next(hook for hook in comm.hooks if type(hook).__name__ == "Watchdog")
ones = torch.ones(4)
for number in (7, 8):
    calls = CallList([CollectiveCall(comm, number, "all_gather", ones, ones, (), world.stream)]).describe()
    watchdog.called(calls, Work(Never()))
    watchdog.before(calls)
    watchdog.after(calls)
time.sleep(600)
"""
    done = run_script(NEVER + source, 2, code=17, SHARDRT_TIMEOUT="3")
    assert re.search(r"\[0\] rank 0: waited [3-9] s in #7 all_gather float32 4 on 'gpu'", done.stderr), done.stderr
    assert reports(done.stderr, "[0] present: ranks 0, 1; missing: none")


def test_an_asynchronous_error() -> None:
    """What a communicator reports of a call that was launched ends the job at once, and what runs on the GPU is aborted."""
    source = """
def abort(name):
    os.write(1, f"rank {world.rank} aborts {name}\\n".encode())
    time.sleep(600)

world = shardrt.init("cpu")
shardrt.comm.monitor.watchdog.watchdog.observe = lambda device: None
monitor = Monitor(MPI.COMM_WORLD, 0, torch.device("cuda", world.rank), world.settings, RankGuard())
watchdog = next(hook for hook in monitor.hooks if type(hook).__name__ == "Watchdog")
comm, busy = world.comm.split(0, world.rank, "gpu"), world.comm.split(0, world.rank, "busy")
comm.is_async = busy.is_async = True
busy._thread = 1  # is in a call
comm.backend.abort, busy.backend.abort = lambda: abort("gpu"), lambda: abort("busy")
if world.rank == 1:
    comm.backend.async_error = lambda: "remote process exited (socket closed)"
call = CollectiveCall(comm, 7, "all_gather", torch.ones(4), torch.ones(4), (), world.stream)
watchdog.called(CallList([call]).describe(), Work(Never()))
time.sleep(600)
"""
    done = run_script(NEVER + source, 2, code=17, SHARDRT_TIMEOUT="300")
    error = "NCCL failed in #7 all_gather float32 4 on 'gpu': remote process exited (socket closed)"
    assert reports(done.stderr, f"[1] rank 1: {error}; ending the job with exit code 17")
    assert "waited" not in done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 aborts gpu", "rank 1 aborts gpu"]


@pytest.mark.rest
@pytest.mark.mpi
def test_ranks_that_are_late() -> None:
    """Over many operations: it is named. After the deadline, moments before the report: the job goes on, and ends in order."""
    source = """
import os, signal, time
import shardrt
from shardrt.comm.ending.status_table import Alarm

world = shardrt.init("cpu")
watchdog = next(hook for hook in world.comm.hooks if type(hook).__name__ == "Watchdog")

def come_late():
    world.barrier()
    if world.rank == 0:
        end = time.monotonic() + 120
        while Alarm.RAISED not in watchdog._table.alarms():
            assert time.monotonic() < end
            time.sleep(0.02)

for _ in range(100):
    if world.rank == 1:
        time.sleep(0.05)  # longer than a rank that has yielded waits for its core
    world.barrier()
come_late()
world.barrier()
come_late()
shardrt.finalize()
os.kill(os.getpid(), signal.SIGRTMIN + 6)  # as a rank may do that has not seen this one finish
print("finished")
"""
    timing = "poll_s=0.02,settle_s=4,straggler_s=0.3"
    done = run_script(source, 2, code=0, SHARDRT_TIMEOUT="1", SHARDRT_PATIENCE="1", SHARDRT_MONITOR_TIMING=timing)
    assert done.stdout.count("finished") == 2
    late = r"\[0\] rank 0: rank 1 on \S+ is late: .* at each of \d+ operations \(SHARDRT_STRAGGLER=0.25\)"
    assert done.stderr
    assert all(re.fullmatch(late, line) for line in done.stderr.splitlines()), done.stderr

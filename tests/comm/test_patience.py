"""Ranks that wait for one that works go on waiting; for one that does not, the job ends in time."""

from __future__ import annotations

import re
import time

import pytest

from marks import rest
from ranks import FRESH, run_script

pytestmark = pytest.mark.mpi

WORK = """
import subprocess, sys, time
import shardrt

def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

"""

GOES_ON = (
    WORK
    + """
world = shardrt.init("cpu")
part = world.comm.split(0 if world.rank < 2 else None, world.rank, "part")
assert world.comm.exchange(world.rank) == [0, 1, 2]

if world.rank == 0:  # rank 2 waits for rank 1, which waits for this one
    work(5)
if part is not None:
    part.exchange(None)
world.comm.exchange(None)

if world.rank == 0:
    subprocess.run([sys.executable, "-c", "import time; end = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"])
world.comm.exchange(None)

with world.patience(60):
    if world.rank == 0:
        time.sleep(5)
world.comm.exchange(None)

print("meet", flush=True)
if world.rank == 0:
    work(5)
    print("written")
"""
)


@pytest.mark.rest
def test_a_rank_that_works() -> None:
    """By itself, in a child, or as it says; beside the others' calls, and behind their end."""
    done = run_script(GOES_ON, 3, code=0, SHARDRT_TIMEOUT="2", SHARDRT_MONITOR_TIMING="lost_s=1.5")
    assert done.stdout.count("meet") == 3
    assert done.stdout.count("written") == 1
    lines = [line for line in done.stderr.splitlines() if "(SHARDRT_PATIENCE)" in line]
    assert lines == done.stderr.splitlines()
    works = r"at work; waiting on, for up to 3600 s \(SHARDRT_PATIENCE\)"
    for waiting, call, ranks in (
        ("rank 2", "#2 exchange", "ranks 0, 1, which are"),
        ("ranks 1, 2", "#3 exchange", "rank 0, which is"),
        ("ranks 1, 2", "#4 exchange", "rank 0, which is"),
        ("ranks 1, 2", "#5 finalize", "rank 0, which is"),
    ):
        expected = rf"\[\d\] rank \d: {waiting} waited [2-9] s in {call} on 'world' for {ranks} {works}"
        assert any(re.fullmatch(expected, line) for line in lines), (expected, lines)


CLOCKS = (
    """
import time
real, ahead = time.time, 0.0
time.time = lambda: real() + ahead
"""
    + WORK
    + """
world = shardrt.init("cpu")
if world.rank == 0:
    work(3)
    ahead = -7200.0
    work(3)
else:
    import threading
    def jump():
        global ahead
        ahead = 7200.0
    threading.Timer(3.0, jump).start()
world.barrier()
"""
)


@pytest.mark.rest
def test_a_clock_that_is_set() -> None:
    """The time of day of one rank goes forward by two hours, that of another one back."""
    run_script(CLOCKS, 2, FRESH, code=0, SHARDRT_TIMEOUT="2", SHARDRT_MONITOR_TIMING="lost_s=1.5")


@pytest.mark.parametrize(
    ("last", "patience", "says"),
    [
        *rest(
            ("work(60) if world.rank == 0 else world.barrier()", "4", r"waited [4-9] s in .* \(limit 4 s, SHARDRT_PATIENCE\)")
        ),
        ("(one, two)[world.rank].exchange(None)", "3600", r"waited 1 s in .*, and no rank can go on: rank \d cannot come"),
    ],
    ids=["for too long", "in a circle"],
)
def test_the_end_of_patience(last: str, patience: str, says: str) -> None:
    source = f"""{WORK}
world = shardrt.init("cpu")
one, two = (world.comm.split(0, world.rank, name) for name in ("one", "two"))
work(1)
{last}
"""
    timing = "lost_s=1.5,settle_s=0.2,poll_s=0.05"
    done = run_script(source, 2, code=17, SHARDRT_TIMEOUT="2", SHARDRT_PATIENCE=patience, SHARDRT_MONITOR_TIMING=timing)
    assert re.search(says, done.stderr), done.stderr


IN_A_CIRCLE = {
    "of two": "(one if world.rank == 0 else two).exchange(None)",
    "with a barrier": "one.exchange(None) if world.rank == 0 else world.barrier()",
    "of three": """
pairs = [world.comm.subset(pair, f"pair {pair}") if world.rank in pair else None for pair in ((0, 1), (1, 2), (0, 2))]
pairs[(0, 1, 2)[world.rank]].exchange(None)
""",
    "behind a stream's thread": """
stream = world.stream_for("gather")
comm = one if world.rank == 0 else two
comm.all_gather(torch.zeros(3), torch.zeros(1), stream=stream)
stream.synchronize()
""",
    "with a message": """
if world.rank == 0:
    one.recv(torch.zeros(1), 1, stream=world.stream).synchronize()
else:
    two.exchange(None)
""",
}


@pytest.mark.parametrize("circle", ["of two", *rest(*list(IN_A_CIRCLE)[1:])])
def test_a_circle_is_told_within_seconds(circle: str) -> None:
    calls = IN_A_CIRCLE[circle]
    source = f"""
import time
import torch
import shardrt
world = shardrt.init("cpu")
one, two = (world.comm.split(0, world.rank, name) for name in ("one", "two"))
{calls}
"""
    streams = "threaded" if "thread" in calls or "stream.synchronize" in calls else "inline"
    started = time.monotonic()
    done = run_script(source, 3, code=17, SHARDRT_TIMEOUT="300", SHARDRT_HOST_STREAMS=streams)
    assert time.monotonic() - started < 60.0
    said = r"waited [4-9] s in #\d+ .*, and no rank can go on: ranks? [\d, ]+ cannot come, waiting elsewhere; ending the job"
    assert re.search(said, done.stderr), done.stderr
    assert "every rank has to make the same calls in the same order" in done.stderr


@pytest.mark.rest
def test_what_is_no_circle() -> None:
    """Ranks that wait for each other, while a thread, a sleeping rank, a late message or one that has patience will come."""
    source = """
import threading, time
import torch
import shardrt
world = shardrt.init("cpu")
rank = world.rank
one, two, three = (world.comm.split(0, rank, name) for name in ("one", "two", "three"))

def after_a_while(call):
    time.sleep(3)
    call()

thread = threading.Thread(target=after_a_while, args=(lambda: two.exchange(None),))
if rank == 0:  # the others come to this call when the thread has come to theirs
    thread.start()
    one.exchange(None)
    thread.join()
else:
    two.exchange(None)
    one.exchange(None)

pairs = [world.comm.subset((r, r + 1), f"pair {r}") if rank in (r, r + 1) else None for r in range(world.size - 1)]
if rank == 0:  # each rank waits for the one before it
    time.sleep(3)
for pair in pairs:
    if pair is not None:
        pair.exchange(None)

stream = world.stream_for("gather")
out = torch.zeros(world.size)
if rank == 0:  # a stream waits for the others, who wait for this rank's own thread
    work = three.all_gather(out, torch.ones(1), stream=stream)
    time.sleep(3)
    two.exchange(None)
else:
    two.exchange(None)
    work = three.all_gather(out, torch.ones(1), stream=stream)
work.synchronize()
assert out.tolist() == [1.0] * world.size

if rank == 0:
    one.recv(out, 1, stream=stream).synchronize()
    two.exchange(None)
elif rank == 1:
    time.sleep(3)
    one.send(out, 0, stream=stream).synchronize()
    two.exchange(None)
else:
    two.exchange(None)
print("through", flush=True)
"""
    done = run_script(source, 4, SHARDRT_TIMEOUT="300", SHARDRT_HOST_STREAMS="threaded", SHARDRT_MONITOR_TIMING="lost_s=1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("through") == 4
    assert not done.stderr


@pytest.mark.rest
@pytest.mark.parametrize(("patience", "code"), [("3600", 0), pytest.param("5", 17, marks=pytest.mark.all)])
def test_a_rank_that_works_before_init(patience: str, code: int) -> None:
    source = f"""{WORK}
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    work(9)
world = shardrt.init("cpu")
world.barrier()
"""
    done = run_script(source, 2, SHARDRT_START_TIMEOUT="3", SHARDRT_PATIENCE=patience)
    assert re.search(r"\[1\] rank 1: waited \d s in shardrt.init\(\) for rank 0, which is at work;", done.stderr), done.stderr
    assert (done.returncode == 0) == (code == 0), done.stderr
    if code:
        assert re.search(r"waited [5-9] s in shardrt.init\(\) \(limit 5 s, SHARDRT_PATIENCE\)", done.stderr), done.stderr

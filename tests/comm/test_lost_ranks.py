"""Jobs that survive the loss of ranks: real ranks under Open MPI's mpirun. Other MPIs refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from marks import rest
from ranks import DEADLINE_S, on_ranks, rank_environment, refused
from shardrt import launch
from shardrt.comm import RankLost, World
from shardrt.comm.backends.objects import gather_objects
from shardrt.comm.core import members

pytestmark = pytest.mark.mpi


def is_open_mpi() -> bool:
    return launch.loaded_mpi() is launch.Mpi.OPEN_MPI


def survive(tmp_path: Path, source: str, ranks: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with `shardrt.launch --survive`."""
    if not is_open_mpi():
        pytest.skip("only Open MPI's ranks outlive others")
    script = tmp_path / "script.py"
    script.write_text(source)
    line = [sys.executable, "-m", "shardrt.launch", "--survive", "-n", str(ranks), str(script)]
    settings = rank_environment() | {"SHARDRT_DUMP": str(tmp_path / "dumps")} | environment
    return subprocess.run(line, env=os.environ | settings, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


# Ranks are lost one after the other, the last first: in a collective of each kind, and in each way. The others raise RankLost
# in that call, or in one that comes later, and go on.
LOSSES = """
import ctypes, os, signal, sys, threading, time
import torch, shardrt
from shardrt.comm import RankLost, ReduceOp

world = shardrt.init("cpu")
first = world.rank
WAYS = [
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda: os._exit(0),
    lambda: ctypes.string_at(0),
    lambda: exec("raise ValueError('injected')"),
]

def small(world): total(world, 10)
def large(world): total(world, 1_000_003)
def control(world): world.comm.exchange(world.rank)
def block(world):
    with world.comm.agree():
        pass
def ring(world):
    out, inp = torch.empty(300_000), torch.full((300_000,), float(world.rank))
    with world.comm.group() as work:
        world.comm.send(inp, (world.rank + 1) % world.size, stream=world.stream)
        world.comm.recv(out, (world.rank - 1) % world.size, stream=world.stream)
    work.synchronize()
    assert out.unique().tolist() == [(world.rank - 1) % world.size]
def part(world):
    mesh = world.mesh
    small_part = mesh.communicator("part")
    total(world, 100, small_part)
def total(world, numel, comm=None):
    comm = comm or world.comm
    value = torch.full((numel,), world.rank + 1.0)
    comm.all_reduce(value, value, ReduceOp.SUM, stream=world.stream_for("gather")).synchronize()
    assert value.unique().tolist() == [world.size * (world.size + 1) / 2]

calls = [small, large, ring, control, block, part]
call = calls[int(sys.argv[1]) if len(sys.argv) > 1 else 0]
for way in WAYS:
    for each in calls:
        each(world)
    victim = world.size - 1
    call = calls.pop(0)
    calls.append(call)
    try:
        for turn in range(1000):
            if world.rank == victim and turn == 3:
                way()
            call(world)
        raise AssertionError("no loss")
    except RankLost as lost:
        assert lost.ranks == (victim,), lost
        assert len(lost.hosts) == 1
        assert f"lost rank {victim} (host {world.node})" in str(lost)
    old, old_mesh = world, world.mesh.unflatten((1, world.size), ("a", "b"))
    world = old.recover()
    assert (world.rank, world.size) == (first, victim)
    assert shardrt.comm.world() is world
    for use in (lambda: old.comm.exchange(0), lambda: old_mesh["b"].communicator("x"), old.barrier):
        try:
            use()
            raise AssertionError("the old world is used")
        except RuntimeError as error:
            assert f"is of a world that has lost rank {victim}: use that of world.recover()" in str(error), error
    try:
        old.recover()
        raise AssertionError("recovered twice")
    except RuntimeError as error:
        assert "was recovered before" in str(error)
names = sorted(thread.name for thread in threading.enumerate())
assert len(names) == len(set(names)), names
print(f"rank {world.rank} of {world.size} at the end")
"""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *rest(
            {"SHARDRT_HOST_STREAMS": "threaded"},
            {"SHARDRT_RANKS_PER_NODE": "2"},
            {"SHARDRT_RANKS_PER_NODE": "2", "SHARDRT_CHECK": "0"},
        ),
    ],
    ids=" ".join,
)
def test_the_others_go_on(tmp_path: Path, settings: dict[str, str]) -> None:
    done = survive(tmp_path, LOSSES, 6, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 at the end", "rank 1 of 2 at the end"]
    assert "the other ranks go on without it" in done.stderr


HANGS = """
import os, signal, time
import torch, shardrt
from shardrt.comm import RankLost

world = shardrt.init("cpu")
for hang in (lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: time.sleep(1000)):
    world.comm.exchange(0)
    victim = world.size - 1
    try:
        if world.rank == victim:
            hang()
        world.barrier()
    except RankLost as lost:
        assert lost.ranks == (victim,)
    world = world.recover()
world.barrier()
print(world.rank, world.size)
"""


def test_a_rank_that_hangs_is_killed(tmp_path: Path) -> None:
    """One that is stopped, within seconds; one that does not come to a call, after SHARDRT_TIMEOUT."""
    done = survive(tmp_path, HANGS, 4, SHARDRT_TIMEOUT="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert "was stopped for" in done.stderr or "stopped for 1 s, and killed" in done.stderr
    assert "without which the others go on" in done.stderr or "rank 2 killed" in done.stderr


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise ValueError(world.rank)", 1),  # on every rank: none is left
        *rest(
            ("os.kill(os.getpid(), 9) if world.rank == 1 else world.comm.exchange(time.sleep(1))", 17),  # nobody recovers
            ("os.kill(os.getpid(), 9)", 17),
            ("world.recover()", 1),
        ),
    ],
    ids=["all raise", "nobody recovers", "all are killed", "nothing is lost"],
)
def test_the_end_of_a_job_that_does_not_go_on(tmp_path: Path, ending: str, code: int) -> None:
    done = survive(tmp_path, f"import os, time, shardrt\nworld = shardrt.init('cpu')\n{ending}\n", 2)
    assert done.returncode == code, done.stdout + done.stderr


def test_where_it_cannot_be_had(tmp_path: Path) -> None:
    """MPICH's ranks end with each other."""
    if is_open_mpi():
        pytest.skip("it can")
    line = [sys.executable, "-m", "shardrt.launch", "--survive", "-n", "2", "-m", "this"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--survive: found MPICH and mpirun; expected Open MPI 5" in done.stderr


class Members:
    """Of a world that has lost its last rank."""

    def notice(self) -> None:
        pass

    def check(self) -> None:
        raise RankLost({MPI.COMM_WORLD.size - 1: "node"}, MPI.COMM_WORLD.rank, "exchange")


class Incomplete:
    """A communicator whose collectives succeed, though the last bytes of the result have not come."""

    def __init__(self, missing: dict[str, int]) -> None:
        self.missing = missing

    def Get_size(self) -> int:
        return MPI.COMM_WORLD.size

    def Allgather(self, own: Any, found: Any) -> None:
        MPI.COMM_WORLD.Allgather(own, found)
        self.lose(memoryview(found[0]).cast("B"), "sizes")

    def Allgatherv(self, own: Any, found: Any) -> None:
        MPI.COMM_WORLD.Allgatherv(own, found)
        self.lose(memoryview(found[0]), "values")

    def lose(self, received: memoryview, what: str) -> None:
        for index in range(len(received) - self.missing.get(what, 0), len(received)):
            received[index] = 0


@on_ranks(1, 2, 3)
def test_values_that_have_not_come(world: World) -> None:
    """MPI_Allgatherv of Open MPI succeeds where a rank is killed within it."""
    value = {"rank": world.rank, "text": "x" * 30 * world.rank}
    expected = [{"rank": rank, "text": "x" * 30 * rank} for rank in range(world.size)]
    assert gather_objects(MPI.COMM_WORLD, value) == expected
    members.current = Members()  # type: ignore[assignment]
    try:
        assert gather_objects(Incomplete({}), value) == expected  # type: ignore[arg-type]
        for missing in ({"sizes": 8}, {"values": 1}, {"values": 5}, {"values": 20}):
            lost = Incomplete(missing)
            refused("lost rank", lambda: gather_objects(lost, value), RankLost)  # type: ignore[arg-type]  # noqa: B023
    finally:
        members.current = None


@on_ranks(1, 2)
def test_a_job_that_does_not_survive(world: World) -> None:
    refused("start it with shardrt.launch --survive", world.recover, RuntimeError)

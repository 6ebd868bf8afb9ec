"""Two nodes on one machine.

By default the nodes share the host's name, address and shared memory, and the runtime treats them as two. With `--all` they are
network namespaces joined by a cable, each with a host name, an address and shared memory of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import machines, on_machine
from ranks import rank_environment, run_script, site
from shardrt import launch

JOB = """
import os, torch, shardrt
from shardrt.comm import ReduceOp
from codes import check_sums
from toys import OddMLP, batch, shard_blocks
world = shardrt.init("cpu")
comm = world.comm
for n in (10, 200_003):
    rows = [torch.randn(n * world.size, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
    expected = rows[0].clone()
    for row in rows[1:]:
        expected += row
    out, everything = torch.empty(n), torch.empty(n * world.size)
    comm.reduce_scatter(out, rows[world.rank], ReduceOp.SUM, stream=world.stream).synchronize()
    assert torch.equal(out, expected[world.rank * n : (world.rank + 1) * n])
    comm.all_gather(everything, out, stream=world.stream).synchronize()
    assert torch.equal(everything, expected)
    comm.all_reduce(everything, rows[world.rank], ReduceOp.SUM, stream=world.stream).synchronize()
    assert torch.equal(everything, expected)
torch.manual_seed(0)
model = OddMLP()
torch.manual_seed(0)
sharded = shard_blocks(OddMLP())
x = batch(0).float()
loss = sharded(x).square().mean()
loss.backward()
assert torch.equal(loss, model(x).square().mean())
for given, found in ((None, 2), (1, 1), (2, 2)):
    check_sums(world, given, found)
where = f"rank {world.rank} of {world.size}, {world.local_rank} of node {world.node}, {world.nodes} nodes"
os.write(1, (where + chr(10)).encode())
"""

# Called as `ssh` is: options, host, command.
LAUNCH = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec {prefix}${{host##*.}} unshare --uts --mount sh -c "hostname $host; mount -t tmpfs none /dev/shm; $*"
"""


@pytest.fixture
def names() -> Iterator[list[str]]:
    with machines(2) as names:
        yield names


def check_places(out: str) -> None:
    """Two nodes of two ranks each."""
    lines = sorted(out.splitlines())
    assert len(lines) == 4, out
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} of 4, {rank % 2} of node ")
        assert line.endswith("2 nodes")


def test_two_nodes_in_one_host() -> None:
    """The job of `test_two_nodes` on one host. Only `--all` covers different addresses, host names and shared memory."""
    done = run_script(JOB, 4, code=0, SHARDRT_RANKS_PER_NODE="2")
    check_places(done.stdout)


@pytest.mark.all
def test_two_nodes(names: list[str], tmp_path: Path) -> None:
    """Four ranks, two on each node: the same bits as in one node, and a training step."""
    job, launch = tmp_path / "job.py", tmp_path / "launch"
    job.write_text(JOB)
    launch.write_text(LAUNCH.format(prefix=names[0].removesuffix("1")))
    launch.chmod(0o755)
    hosts = ["-hosts", "10.77.0.1:2,10.77.0.2:2", "-iface", "cable", "-launcher", "ssh", "-launcher-exec", str(launch)]
    command = ["ip", "netns", "exec", names[0], site().executable, *hosts, "-n", "4", sys.executable, str(job)]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no connection to the nodes" not in done.stderr
    check_places(done.stdout)


@pytest.mark.mpi
@pytest.mark.all
def test_a_launcher_on_each_of_two_nodes(names: list[str], tmp_path: Path) -> None:
    """The same job, without ssh, where no node knows the other's name."""
    job = tmp_path / "job.py"
    job.write_text(JOB)
    launchers = []
    for node, name in enumerate(names):
        where = f"--nnodes 2 --node-rank {node} --rendezvous 10.77.0.1:29500 -n 4".split()
        line = [*on_machine(name), sys.executable, launch.__file__, *where, str(job)]
        pipe = subprocess.PIPE
        launchers.append(subprocess.Popen(line, env=rank_environment(), text=True, stdout=pipe, stderr=pipe))
    (out, err), (_, other) = (each.communicate(timeout=150) for each in launchers)
    assert [each.returncode for each in launchers] == [0, 0], err + other
    assert "has no connection to the nodes" not in err
    check_places(out)

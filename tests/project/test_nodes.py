"""A launcher on each node, without ssh: how they meet, and how a job of theirs ends.

All nodes are on one machine; under Open MPI, which tells them by their addresses, each is a network namespace.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from marks import rest
from namespaces import machines, on_machine
from ranks import rank_environment, refused, site, wait_for
from shardrt import launch
from shardrt.launch import Launcher, LaunchError, Mpi

LAUNCH = [sys.executable, str(Path(launch.__file__))]
DEADLINE_S = 90.0
PLACES = """
from mpi4py import MPI
import os
comm = MPI.COMM_WORLD
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
text = f"rank {comm.rank} of {comm.size}, {node.rank} of its node, sum {comm.allreduce(comm.rank)}"
os.write(1, (text + chr(10)).encode())
assert "WORLD_SIZE" not in os.environ and "RANK" not in os.environ
"""
WAITS = """
import os, pathlib, sys, time
from mpi4py import MPI
MPI.COMM_WORLD.barrier()
pathlib.Path(sys.argv[1], f"{MPI.COMM_WORLD.rank}-{os.getpid()}").touch()
time.sleep(600)
"""

Script = Callable[[str], Path]


@dataclass(frozen=True)
class Place:
    """Where the launchers meet. machines: names, if each node is one; else they are processes of this machine."""

    port: int
    machines: list[str]

    @property
    def address(self) -> str:
        return "10.77.0.1" if self.machines else "127.0.0.1"


@pytest.fixture
def place() -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    if site().mpi is Mpi.MPICH:
        yield Place(port, [])
    else:
        with machines(3) as names:
            yield Place(port, names)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(source: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(dedent(source))
        return path

    return write


@contextmanager
def launcher(line: list[str], *program: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher, which is killed at the end if it still runs."""
    line = [*line, *map(str, program)]
    environment = rank_environment() | variables
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def node(
    number: int, nodes: int, place: Place, ranks: int = 4, launch: str = launch.__file__, prepare: str = "true"
) -> list[str]:
    """The command line of a launcher, without the program."""
    where = on_machine(place.machines[number], prepare) if place.machines else []
    rendezvous = ["--nnodes", str(nodes), "--node-rank", str(number), "--rendezvous", f"{place.address}:{place.port}"]
    return [*where, sys.executable, launch, *rendezvous, "-n", str(ranks)]


def ended(*launchers: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """The exit codes, and what was written."""
    return [(it.returncode, out, err) for it in launchers for out, err in [it.communicate(timeout=DEADLINE_S)]]


@pytest.mark.mpi
def test_three_nodes(script: Script, place: Place) -> None:
    program = script(PLACES)
    with (
        launcher(node(2, 3, place, 5), program) as third,  # before there is a node 0
        launcher(node(0, 3, place, 5), program) as first,
        launcher(node(1, 3, place, 5), program) as second,
    ):
        (code, out, err), *others = ended(first, second, third)
    assert code == 0, err
    places = [f"rank {rank} of 5, {rank % 2} of its node, sum 10" for rank in range(5)]
    assert sorted(out.splitlines()) == places
    assert others == [(0, "", "")] * 2


@pytest.mark.parametrize(
    ("size", "rank"), [("WORLD_SIZE", "RANK"), *rest(("NNODES", "NODE_RANK"), ("PET_NNODES", "PET_NODE_RANK"))]
)
def test_variables_in_the_place_of_options(size: str, rank: str, script: Script, place: Place) -> None:
    program = script(PLACES)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port), size: "2"}
    with (
        launcher([*LAUNCH, "-n", "2"], program, **where, **{rank: "0"}) as first,
        launcher([*LAUNCH, "-n", "2"], program, **where, **{rank: "1"}) as second,
    ):
        (code, out, err), other = ended(first, second)
    assert code == 0, err
    assert len(out.splitlines()) == 2
    assert other == (0, "", "")


@pytest.mark.mpi
def test_the_exit_code_comes_to_all_nodes(script: Script, place: Place) -> None:
    program = script("import sys; from mpi4py import MPI; sys.exit(7 if MPI.COMM_WORLD.rank == 3 else 0)")
    with launcher(node(0, 2, place), program) as first, launcher(node(1, 2, place), program) as second:
        assert [code for code, _, _ in ended(first, second)] == [7, 7]


@contextmanager
def waiting(script: Script, place: Place, folder: Path) -> Iterator[tuple[list[subprocess.Popen[str]], list[int]]]:
    """Two launchers, and the processes of their four ranks, which wait."""
    program = script(WAITS)
    folder.mkdir()
    with launcher(node(0, 2, place), program, folder) as first, launcher(node(1, 2, place), program, folder) as second:
        wait_for(lambda: len(list(folder.iterdir())) == 4)
        yield [first, second], [int(path.name.partition("-")[2]) for path in folder.iterdir()]


def have_ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.mpi
@pytest.mark.parametrize("told", [0, *rest(1)])
def test_a_signal_to_one_launcher_ends_all(told: int, script: Script, place: Place, tmp_path: Path) -> None:
    with waiting(script, place, tmp_path / "ranks") as (launchers, ranks):
        launchers[told].send_signal(signal.SIGTERM)
        assert [code for code, _, _ in ended(*launchers)] == [143, 143]
        wait_for(lambda: have_ended(ranks))


@pytest.mark.mpi
@pytest.mark.parametrize("killed", [0, *rest(1)])
def test_a_launcher_that_is_killed_ends_the_job(killed: int, script: Script, place: Place, tmp_path: Path) -> None:
    with waiting(script, place, tmp_path / "ranks") as (launchers, ranks):
        launchers[killed].kill()
        ((code, _, err),) = ended(launchers[1 - killed])
        assert code != 0
        assert f"node {killed} has gone: its launcher was killed" in err
        wait_for(lambda: have_ended(ranks))


@pytest.mark.mpi
def test_a_failed_job_is_started_again_on_the_same_nodes(script: Script, place: Place, tmp_path: Path) -> None:
    program = script(f"""
        import os, pathlib, sys
        from mpi4py import MPI
        comm, state = MPI.COMM_WORLD, pathlib.Path({str(tmp_path)!r}, "state")
        fails = not state.exists()
        comm.barrier()
        if comm.rank == 0:
            state.touch()
            pathlib.Path(os.environ["SHARDRT_PROGRESS"]).write_text("3")
        comm.barrier()
        sys.exit(5 if fails and comm.rank == 3 else 0)
    """)
    again = ["--restarts", "2"]
    with launcher(node(0, 2, place) + again, program) as first, launcher(node(1, 2, place) + again, program) as second:
        (code, _, err), (other, _, _) = ended(first, second)
    assert (code, other) == (0, 0), err
    assert "start 2 of 3" in err


@pytest.mark.rest
@pytest.mark.mpi
def test_a_node_that_comes_back(script: Script, place: Place, tmp_path: Path) -> None:
    """Its launcher was killed, and is started again: the job goes on."""
    program = script(f"""
        import os, pathlib, time
        from mpi4py import MPI
        state = pathlib.Path({str(tmp_path)!r}, "state")
        is_first = not state.exists()
        MPI.COMM_WORLD.barrier()
        if is_first:
            if MPI.COMM_WORLD.rank == 0:
                pathlib.Path(os.environ["SHARDRT_PROGRESS"]).write_text("3")
                state.touch()
            time.sleep(600)
    """)
    again = ["--restarts", "1"]
    with launcher(node(0, 2, place) + again, program) as first:
        with launcher(node(1, 2, place) + again, program):
            wait_for((tmp_path / "state").exists)
        with launcher(node(1, 2, place) + again, program) as second:
            (code, _, err), other = ended(first, second)
    assert (code, other) == (0, (0, "", "")), err
    assert "node 1 has gone: its launcher was killed" in err
    assert "start 2 of 2" in err


@pytest.mark.rest
def test_a_node_that_never_comes(script: Script, place: Place) -> None:
    program, limit = script(PLACES), ["--join-timeout", "2"]
    with launcher(node(0, 3, place) + limit, program) as first, launcher(node(1, 3, place) + limit, program) as second:
        results = ended(first, second)
    for code, _, err in results:
        assert code == 2
        assert "node 2 of 3 did not come within 2 s (--join-timeout)" in err
    with launcher(node(1, 2, place) + limit, program) as alone:
        ((code, _, err),) = ended(alone)
    assert code == 2
    assert f"node 1: node 0 did not come to 127.0.0.1:{place.port} within 2 s (--join-timeout): " in err


@pytest.mark.rest
def test_strangers_and_other_jobs_are_dropped(script: Script, place: Place) -> None:
    """The job starts all the same, when its own node comes."""
    program = script(PLACES)
    with launcher(node(0, 2, place), program, SHARDRT_RENDEZVOUS_KEY="ours") as first:
        wait_for(lambda: _says_something(place.port, b"GET / HTTP/1.1\r\n\r\n"))
        with launcher([*node(1, 2, place), "--join-timeout", "1"], program, SHARDRT_RENDEZVOUS_KEY="theirs") as other_key:
            ((code, _, err),) = ended(other_key)
        assert code == 2
        assert "no launcher of this job, or has another SHARDRT_RENDEZVOUS_KEY" in err
        with launcher(node(1, 2, place), program, "--other", SHARDRT_RENDEZVOUS_KEY="ours") as other_job:
            ((code, _, err),) = ended(other_job)
        assert code == 2
        assert "the launcher there starts another job: -n 4 " in err
        with launcher(node(0, 2, place), program) as other_first:
            ((code, _, err),) = ended(other_first)
        assert code == 2
        assert f"cannot listen on port {place.port} for the other nodes" in err
        with launcher(node(1, 2, place), program, SHARDRT_RENDEZVOUS_KEY="ours") as second:
            (code, out, err), (other, _, _) = ended(first, second)
    assert (code, other) == (0, 0), err
    assert len(out.splitlines()) == 4
    assert f"dropped a connection from 127.0.0.1 to port {place.port}, which is none of a node of this job" in err


@pytest.mark.mpi
def test_a_login_shell_for_which_open_mpi_writes_otherwise(script: Script, place: Place, tmp_path: Path) -> None:
    """It reads the user's profile for sh, which is no single program."""
    if site().mpi is Mpi.MPICH:
        pytest.skip("MPICH's mpirun knows no login shells")
    (tmp_path / "passwd").write_text(re.sub(r"^(root:.*:).*$", r"\1/bin/sh", Path("/etc/passwd").read_text(), flags=re.M))
    program, has_sh = script(PLACES), f"mount --bind {tmp_path}/passwd /etc/passwd"
    with (
        launcher(node(0, 2, place, prepare=has_sh), program) as first,
        launcher(node(1, 2, place, prepare=has_sh), program) as second,
    ):
        assert [(code, len(out.splitlines())) for code, out, _ in ended(first, second)] == [(0, 4), (0, 0)]


@pytest.mark.mpi
def test_open_mpi_wants_an_address_for_each_node(script: Script, place: Place) -> None:
    if site().mpi is Mpi.MPICH:
        pytest.skip("MPICH takes any number of nodes at one address")
    program, here = script(PLACES), Place(place.port, [])
    with launcher(node(0, 2, here), program) as first, launcher(node(1, 2, here), program) as second:
        results = ended(first, second)
    for code, _, err in results:
        assert code == 2
        assert "Open MPI knows each node by an IPv4 address of its own, found 127.0.0.1, 127.0.0.1" in err


def _says_something(port: int, data: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(data)
            return True
    except OSError:
        time.sleep(0.1)
        return False


def test_nodes_with_other_versions_are_named_on_all(script: Script, place: Place, tmp_path: Path) -> None:
    program, other = script(PLACES), tmp_path / "shardrt"
    other.symlink_to(Path(launch.__file__).parent)
    line = [*node(1, 2, place, launch=str(other / "launch.py")), str(program)]
    with launcher(node(0, 2, place), program) as first:
        second = subprocess.run(line, env=rank_environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        ((code, _, err),) = ended(first)
    assert (code, second.returncode) == (2, 2)
    for text in (err, second.stderr):
        assert f"at {other}" in text, text
        assert "nodes differ: node 0 has shardrt " in text


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--nnodes", "2"], {}, "pass all of --nnodes N, --node-rank K and --rendezvous HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "2", "--rendezvous", "a:1"], {}, "expected a number from 0 to 1, found 2"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a"], {}, "expected HOST:PORT of node 0, found 'a'"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:70000"], {}, "expected HOST:PORT of node 0"),
        (["--nnodes", "2", "--hosts", "a,b"], {}, "leave out --hosts"),
        (
            [],
            {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_WORLD_SIZE=2: start shardrt.launch once on each node",
        ),
    ],
)
def test_bad_options(arguments: list[str], variables: dict[str, str], message: str) -> None:
    options = launch._parser().parse_args([*arguments, "-n", "4", "program"])
    refused(message, lambda: launch._rendezvous(options, variables), LaunchError)


@pytest.mark.parametrize(
    ("mpi", "launcher", "arguments", "message"),
    [
        (Mpi.MPICH, Launcher.SRUN, [], "found srun, which starts all nodes itself"),
        (Mpi.OPEN_MPI, Launcher.MPIRUN, ["--survive"], "a job with a launcher on each node ends with each of them"),
        (Mpi.OPEN_MPI, Launcher.MPIRUN, ["--replace"], "a job with a launcher on each node ends with each of them"),
        (Mpi.MPICH, Launcher.MPIRUN, ["-n", "1"], "expected at least as many ranks, found -n 1"),
    ],
)
def test_jobs_that_no_launchers_of_nodes_can_start(mpi: Mpi, launcher: Launcher, arguments: list[str], message: str) -> None:
    options = launch._parser().parse_args(["-n", "4", *arguments, __file__])
    where = launch.LaunchSite(mpi, launcher, "/bin/mpirun", 8, False, {})
    refused(message, lambda: launch._job(options, where, launch.Rendezvous(2, 0, "a:1", 1.0)), LaunchError)


def test_no_rendezvous() -> None:
    """In Slurm, for one node, and with hosts, the variables of other launchers mean nothing."""
    found = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
    parse = launch._parser().parse_args
    assert launch._rendezvous(parse(["program"]), found) is not None
    assert launch._rendezvous(parse(["--nnodes", "1", "program"]), found) is None
    assert launch._rendezvous(parse(["--hosts", "a,b", "program"]), found) is None
    assert launch._rendezvous(parse(["program"]), found | {"SLURM_JOB_ID": "1"}) is None
    assert launch._rendezvous(parse(["program"]), found | {"WORLD_SIZE": "1"}) is None
    torchrun = launch._rendezvous(parse(["program"]), found | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert torchrun is not None
    assert torchrun.address == "a:2", "torchrun itself listens on MASTER_PORT"

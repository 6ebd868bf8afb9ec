"""Jobs of their own: how they start, how they end, and that one rank's failure ends them all."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marks import rest
from ranks import FRESH, on_ranks, rank_environment, run_job, run_script, site
from shardrt.comm import World
from shardrt.comm.ending import processes
from shardrt.comm.ending.guard.node import Node, RankPlace
from shardrt.comm.ending.processes import Process, launcher_of, variable_of
from shardrt.comm.program.version import TESTED_TORCH
from shardrt.comm.startup.binding import SharedGpuError, bind_device, locate
from shardrt.launch import Mpi

pytestmark = pytest.mark.mpi

FIVE_LINES = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        for block in self.blocks: x = torch.relu(block(x))
        return x
torch.manual_seed(0)
model = Model()

import shardrt
world = shardrt.init()
for block in model.blocks: shardrt.fully_shard(block)
shardrt.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

for step in range(3):
    model(torch.randn(4, 8) + world.rank).sum().backward()
    shardrt.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
world.barrier()
print(f"rank {world.rank} of {world.size}, local {world.local_rank}, on {world.device}, mesh {world.mesh.size}")
"""


@pytest.mark.parametrize(
    ("size", "leave"),
    [*(pytest.param(size, "", marks=pytest.mark.all) for size in (1, 3)), (2, "shardrt.finalize(); shardrt.finalize()")],
)
def test_embedding_in_five_lines(size: int, leave: str) -> None:
    done = run_script(FIVE_LINES + leave, size, FRESH, code=0)
    assert done.stderr == ""
    for rank in range(size):
        assert f"rank {rank} of {size}, local {rank}, on cpu, mesh {size}" in done.stdout


@pytest.mark.rest
@pytest.mark.parametrize("per_node", [pytest.param("2", marks=pytest.mark.all), "1"])
def test_ranks_need_no_numpy(tmp_path: Path, per_node: str) -> None:
    """torch goes without it, and nothing that shardrt needs brings it."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('no NumPy here')")
    rest = """
state = {name: value.full_tensor() for name, value in model.state_dict().items()}
model.load_state_dict(state)
print(shardrt.memory_summary(model))
world.comm.empty(3, torch.float32)
from shardrt.parallel import ColwiseParallel, parallelize_module
mesh = shardrt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
parallelize_module(torch.nn.Linear(8, 4), mesh, ColwiseParallel())(torch.ones(2, 8))  # compares the batches
"""
    path = os.pathsep.join([str(tmp_path), rank_environment()["PYTHONPATH"]])
    done = run_script(FIVE_LINES + rest, 2, code=0, PYTHONPATH=path, SHARDRT_RANKS_PER_NODE=per_node)
    assert "no NumPy here" in done.stderr, "torch warns of it"
    assert done.stdout.count("mesh 2") == 2


def run_alone(
    source: str, fresh: bool = False, /, code: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Without a launcher."""
    return run_job(["-c", source], 0, fresh, code=code, **environment)


def test_without_a_launcher() -> None:
    done = run_alone(FIVE_LINES, FRESH, code=0)
    assert done.stdout == "rank 0 of 1, local 0, on cpu, mesh 1\n"


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"PMI_SIZE": "3"}, True),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, True),
        ({"SLURM_NTASKS": "2"}, False),  # a batch script or a shell inside an allocation, not a task
        ({"WORLD_SIZE": "2", "RANK": "0"}, True),  # torchrun, Ray Train
        *rest(
            ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, False),
            ({"PMI_SIZE": "1", "WORLD_SIZE": "2", "RANK": "0"}, True),
            ({"WORLD_SIZE": "2"}, False),
            ({"WORLD_SIZE": "1", "RANK": "0"}, False),
            ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, True),
            ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"}, True),
            ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, True),
            ({"PMIX_RANK": "1"}, True),
            ({"PALS_RANKID": "3"}, True),
            ({"PMIX_RANK": "0"}, False),  # it may be alone
        ),
    ],
)
def test_a_job_that_fell_apart_is_refused(variables: dict[str, str], refused: bool) -> None:
    # MPICH reads PMI_* itself, so the variables appear after it has started.
    source = f"import os; from mpi4py import MPI; os.environ.update({variables!r}); import shardrt; shardrt.init()"
    done = run_alone(source)
    assert (done.returncode != 0) == refused, done.stderr
    if refused:
        assert "launcher and MPI do not match" in done.stderr
        assert "python -m shardrt.launch -n" in done.stderr


def test_torchrun_in_the_place_of_mpirun_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import shardrt; shardrt.init('cpu'); print('trains')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    logs = ["--log-dir", str(tmp_path), "--redirects", "3"]
    done = subprocess.run([*torchrun, *logs, str(script)], capture_output=True, text=True, env=rank_environment(), timeout=120)
    assert done.returncode != 0
    assert not any(path.read_text() for path in tmp_path.rglob("stdout.log"))
    errors = [error for path in tmp_path.rglob("stderr.log") if (error := path.read_text())]
    assert errors, "torchrun may end one before it has failed"
    for error in errors:
        assert "WORLD_SIZE=2" in error
        assert f"python -m shardrt.launch -n 2 {script}" in error


EXCEPTION = """
import shardrt, threading, time
world = shardrt.init()
def fail(): raise ArithmeticError("wrong on purpose")
if world.rank == 1:
    {statement}
    time.sleep(600)
world.barrier()
time.sleep(600)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    "statement", ["fail()", "threading.Thread(target=fail, name='helper').start()"], ids=["main", "thread"]
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.all)])
def test_an_exception_on_one_rank_ends_the_job(size: int, statement: str) -> None:
    done = run_script(EXCEPTION.format(statement=statement), size, statement == "fail()")
    assert done.returncode != 0
    assert "[1] rank 1: uncaught exception" in done.stderr
    assert "[1] ArithmeticError: wrong on purpose" in done.stderr


def test_an_exception_in_a_threaded_stream_reaches_the_caller() -> None:
    source = """
import shardrt, torch
from shardrt.comm import new_stream
stream = new_stream(torch.device("cpu"), "test", threaded=True)
ran = []
def fail(): raise ArithmeticError("wrong on purpose")
stream.submit(lambda: ran.append(1))
event = stream.record()
event.synchronize()
assert event.query() and ran == [1]
stream.submit(fail)
stream.submit(lambda: ran.append(2))
try:
    stream.synchronize()
except RuntimeError as error:
    assert "stream 'test' failed" in str(error) and isinstance(error.__cause__, ArithmeticError)
    assert ran == [1]
    print("raised")
"""
    assert run_alone(source).stdout == "raised\n"


def test_streams_keep_order_across_each_other() -> None:
    source = """
import time, torch
from shardrt.comm import new_stream
cpu, seen = torch.device("cpu"), []
first, second = new_stream(cpu, "first", threaded=True), new_stream(cpu, "second", threaded=True)
first.submit(lambda: (time.sleep(0.2), seen.append("first")))
second.wait(first.record())
second.submit(lambda: seen.append("second"))
assert seen == []
second.synchronize()
assert seen == ["first", "second"]
first.close(); second.close()
try:
    second.submit(print)
except RuntimeError as error:
    print(error)
"""
    assert run_alone(source).stdout == "stream 'second' is closed: submit nothing after close()\n"


def test_init_is_idempotent_and_world_needs_it() -> None:
    source = """
import shardrt
try:
    shardrt.world()
except RuntimeError as error:
    print(error)
assert shardrt.init() is shardrt.init() is shardrt.world()
"""
    done = run_alone(source)
    assert done.stdout == "no world yet: call shardrt.init() first, on every rank\n"
    assert done.returncode == 0, done.stderr


def test_a_mesh_starts_the_world() -> None:
    source = """
import shardrt
mesh = shardrt.init_device_mesh("cpu", (1,))
assert mesh.size() == shardrt.world().size == 1
"""
    run_alone(source, code=0)


def test_import_starts_nothing() -> None:
    source = "import sys, shardrt, shardrt.comm, shardrt.kernels; print('mpi4py' in sys.modules, 'cupy' in sys.modules)"
    assert run_alone(source, FRESH).stdout == "False False\n"


@pytest.mark.rest
def test_a_torch_newer_than_those_of_the_tests_is_named_once() -> None:
    source = "import torch; torch.__version__ = '{}'; import shardrt; shardrt.init(); shardrt.init()"
    done = run_script(source.format("99.1.0a0+git"), 2, FRESH)
    assert done.stderr.count("torch 99.1.0a0+git is newer than those that shardrt") == 1
    assert "is newer" not in run_script(source.format(f"{TESTED_TORCH[-1]}.9+cpu"), 2).stderr


def test_other_processes_are_read_only_where_the_kernel_permits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not be dumped may not be read; a user's own setting stands."""
    script = """
import ctypes, os, sys
import shardrt
from shardrt.comm.startup.memory_access import may_read_other_processes
ctypes.CDLL(None).prctl(4, int(sys.argv[1]), 0, 0, 0)
print(may_read_other_processes())
shardrt.init("cpu")
print(os.environ.get("MPIR_CVAR_CH4_CMA_ENABLE"))
"""
    monkeypatch.delenv("MPIR_CVAR_CH4_CMA_ENABLE", raising=False)

    def settings(dumpable: int, **variables: str) -> list[str]:
        done = run_job(["-c", script, str(dumpable)], 0, code=0, **variables)
        return done.stdout.split()

    assert settings(0) == ["False", "None"]
    permitted, setting = settings(1)
    assert setting == {"True": "1", "False": "None"}[permitted]
    assert settings(1, MPIR_CVAR_CH4_CMA_ENABLE="0")[1] == "0"


def test_only_what_the_launcher_has_started_may_read_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell between them is no launcher, and neither is the rank of another number that has started a job itself.

    A process whose variables cannot be read may be either, unless it is Slurm's.
    """

    def variable_to_others(pid: int, name: str) -> str | None:
        if pid == os.getpid():
            raise PermissionError
        return variable_of(pid, name)

    class Slurmstepd(Process):
        def __init__(self, pid: int) -> None:
            super().__init__(pid)
            self.name = "slurmstepd"

    script = "exec 3<&0; sh -c 'echo $$; cat <&3 >&2'; :"
    environment = {"PATH": os.environ["PATH"], "PMI_RANK": "3"}
    with subprocess.Popen(
        ["sh", "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        rank = int(shell.stdout.readline())
        assert rank != shell.pid
        assert launcher_of(rank, "PMI_RANK", "3") == os.getpid()
        monkeypatch.setattr(processes, "variable_of", variable_to_others)
        assert launcher_of(rank, "PMI_RANK", "3") == 0
        unseen = Node(rank, RankPlace({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "4"}))
        assert not unseen.is_visible
        assert unseen.local_size is None  # not all four are to be seen
        monkeypatch.setattr(processes, "Process", Slurmstepd)
        assert launcher_of(rank, "PMI_RANK", "3") == os.getpid()
    monkeypatch.undo()
    assert launcher_of(os.getpid(), "PMI_RANK", "3") == os.getpid()


def test_bad_device() -> None:
    done = run_alone("import shardrt; shardrt.init('meta')")
    assert "expected 'cpu' or 'cuda'" in done.stderr


def test_another_device_is_refused_later() -> None:
    done = run_alone("import shardrt; shardrt.init('cpu'); shardrt.init(); shardrt.init('cuda')")
    assert "init(device='cuda'): this world's device is cpu, and a process has one world" in done.stderr


@pytest.mark.parametrize("level", ["multiple", *rest("funneled")])
def test_mpi_that_the_program_started(level: str) -> None:
    """It stays the program's to end. Threads need MPI_THREAD_MULTIPLE."""
    source = f"""
import mpi4py
mpi4py.rc.thread_level = {level!r}
from mpi4py import MPI
import shardrt
world = shardrt.init("cpu")
world.barrier()
try:
    world.comm.barrier(stream=world.stream_for("test")).synchronize()
    print("went")
except RuntimeError as error:
    print(error)
shardrt.finalize()
assert not MPI.Is_finalized()
"""
    done = run_script(source, 2, code=0, SHARDRT_HOST_STREAMS="threaded")
    expected = "went" if level == "multiple" else "need MPI_THREAD_MULTIPLE; MPI was initialised with level 1"
    assert done.stdout.count(expected) == 2


GPUS = """
import os
from types import SimpleNamespace
import torch
from mpi4py import MPI
import shardrt
from shardrt.comm.startup import bootstrap
from shardrt.comm.monitor.watchdog import watchdog

seen = {seen}[MPI.COMM_WORLD.Get_rank()]  # the UUIDs of the GPUs that this rank sees
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: len(seen)
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=seen[index])
torch.cuda.set_device = lambda index: None
bootstrap._backend_for = lambda device, host, policy: host
watchdog.observe = lambda device: None
world = shardrt.init({device!r})
os.write(1, f"rank {{world.rank}} takes {{seen[world.device.index]}} as {{world.device}}\\n".encode())
shardrt.finalize()
"""


def start_on_gpus(
    seen: list[str], device: str = "cuda", code: int | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Ranks that see these GPUs, each a letter, which torch says are there."""
    return run_script(GPUS.format(seen=seen, device=device), len(seen), code=code, **environment)


@contextmanager
def torch_sees(gpus: str) -> Iterator[list[int]]:
    """In the block torch says that these GPUs are there, each a letter; gives those that were made current."""
    current: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=gpus[index]))
        patch.setattr(torch.cuda, "set_device", current.append)
        yield current


@pytest.mark.parametrize(
    ("seen", "per_node", "taken"),
    [
        (["AB", "AB"], None, ["A as cuda:0", "B as cuda:1"]),
        (["ABC"] * 3, 1, ["A as cuda:0", "B as cuda:1", "C as cuda:2"]),  # nodes that are none share the GPUs
        (["A", "B"], None, ["A as cuda:0", "B as cuda:0"]),  # a launcher shows each rank its own
    ],
)
@on_ranks(2, 3)
def test_every_rank_takes_a_gpu_of_its_own(world: World, seen: list[str], per_node: int | None, taken: list[str]) -> None:
    if world.size > len(seen):
        return
    comm, mine = mpi_of(world), seen[world.rank]
    with torch_sees(mine) as current:
        device = bind_device(comm, torch.device("cuda"), locate(comm, per_node))
    assert (f"{mine[device.index]} as {device}", current) == (taken[world.rank], [device.index])


@pytest.mark.parametrize(
    ("seen", "device", "shared"),
    [
        (["AB"] * 3, "cuda", r"ranks 0, 2 of host \S+ share a GPU \(cuda:0, UUID A\)"),
        (["AB"] * 2, "cuda:1", r"ranks 0, 1 of host \S+ share a GPU \(cuda:1, UUID B\)"),
        (["A", "BA"], "cuda", r"ranks 0, 1 of host \S+ share a GPU \(cuda:0 and cuda:1, UUID A\)"),
    ],
)
@on_ranks(2, 3)
def test_ranks_that_share_a_gpu_are_refused(world: World, seen: list[str], device: str, shared: str) -> None:
    """Every rank names them, and makes none current, unless NCCL is told to permit it."""
    if world.size != len(seen):
        return
    comm = mpi_of(world)
    with torch_sees(seen[world.rank]) as current, pytest.MonkeyPatch.context() as patch:
        with pytest.raises(SharedGpuError, match=f"{shared}: expected one for each rank"):
            bind_device(comm, torch.device(device), locate(comm, None))
        assert current == []
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        bind_device(comm, torch.device(device), locate(comm, None))


def mpi_of(world: World) -> Any:
    """MPI's communicator of all ranks."""
    from mpi4py import MPI

    assert MPI.COMM_WORLD.Get_size() == world.size
    return MPI.COMM_WORLD


def test_init_binds_gpus() -> None:
    done = start_on_gpus(["AB", "AB"], code=0)
    assert sorted(done.stdout.splitlines()) == ["rank 0 takes A as cuda:0", "rank 1 takes B as cuda:1"]


@pytest.mark.parametrize(
    ("seen", "device", "error"),
    [
        (["A", "BA"], "cuda", "SharedGpuError: ranks 0, 1 of host .*: expected one for each rank"),
        *rest(
            (
                ["ABC", "AB"],
                "cuda:2",
                r"SettingsError: init\(device='cuda:2'\) on rank 1: expected 'cuda', or a number below 2, the GPUs that torch",
            )
        ),
    ],
)
def test_init_refuses_gpus_on_every_rank(seen: list[str], device: str, error: str) -> None:
    done = start_on_gpus(seen, device)
    assert done.returncode != 0, done.stdout
    assert len(re.findall(error, done.stderr)) == 2, done.stderr


IN_A_NAMESPACE = """
import os, sys
if "INSIDE" not in os.environ:
    os.environ["INSIDE"] = "1"
    os.execvp("unshare", ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, *sys.argv])

import tempfile
import shardrt
# Whatever number a descriptor has in the other rank, here it is this file's.
data = tempfile.TemporaryFile()
data.write(b"d" * 8192)
data.flush()
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    for fd in range(100):
        try:
            os.fstat(fd)
        except OSError:
            os.dup2(data.fileno(), fd)
try:
    shardrt.init("cpu")
finally:
    assert os.pread(data.fileno(), 10_000, 0) == b"d" * 8192
"""


@pytest.mark.rest
def test_ranks_in_pid_namespaces_of_their_own() -> None:
    """They refuse to start, and write into no file of the program. Open MPI ends in its own first message."""
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make a PID namespace")
    done = run_script(IN_A_NAMESPACE, 2, FRESH)
    assert done.returncode != 0
    if site().mpi is Mpi.MPICH:
        assert done.stderr.count("rank 1 is in a PID namespace of its own") == 2, done.stderr
    assert "AssertionError" not in done.stderr, done.stderr

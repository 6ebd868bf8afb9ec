"""From a bare checkout and Python 3.11 to a running command, in an environment of its own, .venv.

    python3 scripts/dev.py train [-n RANKS] [arguments of train.py]    2 ranks unless told otherwise
    python3 scripts/dev.py test [arguments of pytest]                  lint, format, types, tests
    python3 scripts/dev.py setup                                       the environment alone

The first run sets up .venv, MPI included; later runs find it ready. It is made anew when Python,
the checkout's place or the declared dependencies change, or when a set-up was cut short.
"""

import sys

# Ahead of all that an older Python does not know, such as some of the imports.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"dev.py: needs Python 3.11 or newer, this is {sys.version.split()[0]}: try python3.11")

import configparser
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
PYTHON = BIN / "python"
STAMP = VENV / "shardrt-ready"
TYPES = ROOT / "build" / "types" / "shardrt"
EXTRAS = "mpich,test,train"


def main(arguments: list[str]) -> int:
    """Run one command; the rest of the command line belongs to what it starts."""
    commands: dict[str, Callable[[list[str]], int]]
    commands = {"train": train, "test": test, "setup": lambda _: 0}
    if not arguments or arguments[0] not in commands:
        asked = arguments[:1] in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    set_up()
    return commands[arguments[0]](arguments[1:])


def train(arguments: list[str]) -> int:
    """Become mpirun, so that signals and the exit code are its own."""
    ranks = "2"
    if arguments[:1] == ["-n"]:
        if not arguments[1:] or not arguments[1].isdecimal() or int(arguments[1]) < 1:
            fail("train -n: expected a number of ranks, as in: train -n 4 --steps 100")
        ranks, arguments = arguments[1], arguments[2:]
    # Ranks that share cores and each start a thread per core get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script = str(ROOT / "scripts" / "train.py")
    command = [str(BIN / "mpirun"), "-n", ranks, str(PYTHON), script, *arguments]
    sys.stdout.flush()
    os.execve(command[0], command, environment())


def test(arguments: list[str]) -> int:
    """Run every step, also after a failure, and say at the end how each went."""
    steps: list[tuple[str, Callable[[], int]]] = [
        ("ruff check", lambda: run("ruff", "check", ".")),
        ("ruff format", lambda: run("ruff", "format", "--check", ".")),
        ("mypy", check_types),
        ("pytest", lambda: run("pytest", *arguments)),
    ]
    summary = []
    failed = False
    for name, step in steps:
        print(f"--- {name}", flush=True)
        start = time.perf_counter()
        code = step()
        failed = failed or code != 0
        outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
        summary.append(f"{name:<12} {time.perf_counter() - start:6.1f} s  {outcome}")
    print("--- summary", *summary, sep="\n", flush=True)
    return int(failed)


def run(module: str, *arguments: str) -> int:
    """Run a tool of the environment; its exit code."""
    command = [str(PYTHON), "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


# ---------------------------------------------------------------------- types


def check_types() -> int:
    """Run mypy on the link tree and name the files by their places in the checkout."""
    link_types()
    command = [str(PYTHON), "-m", "mypy"]
    mypy = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    print(real_paths(mypy.stdout), end="", flush=True)
    return mypy.returncode


def link_types() -> None:
    """Bring build/types/shardrt up to date: a link per file of shardrt/, and comm/ and kernels/.

    mypy reads folders and runs no import hook: in its tree, shardrt.comm must be shardrt/comm.
    """
    sources = [path for path in (ROOT / "shardrt").iterdir() if path.name != "__pycache__"]
    wanted = {path.name: path for path in (*sources, ROOT / "comm", ROOT / "kernels")}
    TYPES.mkdir(parents=True, exist_ok=True)
    for link in TYPES.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, path in wanted.items():
        # Relative, so that a checkout that was moved or copied does not check the other one.
        if not (TYPES / name).is_symlink():
            (TYPES / name).symlink_to(os.path.relpath(path, TYPES))


def real_paths(report: str) -> str:
    """Name files by where they are: comm/mpi.py, not build/types/shardrt/comm/mpi.py."""
    tree = f"{TYPES.relative_to(ROOT)}/"
    for name in ("comm/", "kernels/"):
        report = report.replace(tree + name, name)
    return report.replace(tree, "shardrt/")


# ---------------------------------------------------------------------- environment


def set_up() -> None:
    """Make .venv unless it is there, whole and up to date."""
    wanted = fingerprint()
    if is_ready(wanted):
        return
    with only_one():
        if not is_ready(wanted):  # another dev.py may have made it while this one waited
            make(wanted)


def is_ready(wanted: str) -> bool:
    """Whether a set-up for `wanted` went to its end, the stamp, and its Python is still there."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == wanted


def make(wanted: str) -> None:
    """Create .venv from nothing: half of one, or one for other versions, is no start."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            fail(f"{sys.executable} has no module {module!r}: install python3-venv")
    print(f"Setting up {VENV}: once, some minutes", flush=True)
    if VENV.exists():
        STAMP.unlink(missing_ok=True)  # first: what follows may be interrupted
        shutil.rmtree(VENV)
    install = [str(PYTHON), "-m", "pip", "install", "--no-input", "-c", "constraints.txt"]
    if not sys.stdout.isatty():
        install.append("--quiet")
    # sys.executable may be .venv's own, and that is gone by now.
    python = getattr(sys, "_base_executable", sys.executable)
    # setuptools goes first and the build is not isolated: so constraints.txt holds for it too.
    for command in (
        [python, "-m", "venv", str(VENV)],
        [*install, "setuptools"],
        [*install, "--no-build-isolation", "--editable", f".[{EXTRAS}]"],
    ):
        # The lock stays open in pip: should this process be killed, the next one waits for pip to
        # end before it clears .venv.
        code = subprocess.run(command, cwd=ROOT, env=environment(), close_fds=False, check=False).returncode
        if code:
            fail(f"set-up failed (exit code {code}), run it again: {' '.join(command)}")
    STAMP.write_text(wanted)


def fingerprint() -> str:
    """A hash of all that .venv depends on; the same files also have tools' settings: not those."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    declared = [(name, dict(config[name])) for name in config.sections() if name == "metadata" or name.startswith("options")]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    constraints = (ROOT / "constraints.txt").read_text()
    parts = (EXTRAS, sys.version, str(VENV), repr(declared), repr(build), constraints)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Let one set-up at a time work on .venv, children included: they inherit the lock."""
    with open(f"{VENV}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up of this checkout to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        yield


def environment() -> dict[str, str]:
    """The caller's variables, less those that bring other packages in or send pip's elsewhere.

    Of pip's own, those stay that say how to reach packages: an index, a certificate, a cache.
    """
    reach = ("INDEX", "LINKS", "CERT", "PROXY", "TRUSTED", "CACHE", "TIMEOUT", "RETRIES", "CONFIG")
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and (not name.startswith("PIP_") or any(word in name for word in reach))
    }
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def fail(message: str) -> NoReturn:
    """End with a message and exit code 2."""
    print(f"dev.py: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

"""From a bare checkout and Python 3.11 to a running command, with an environment of its own in .venv.

    python3 scripts/dev.py train [-n RANKS] [ARGUMENTS OF scripts/train.py]   2 ranks unless told otherwise
    python3 scripts/dev.py test [ARGUMENTS OF pytest]                         lint, format, types, tests
    python3 scripts/dev.py setup                                              the environment alone

The first run sets up .venv (MPI included; nothing outside the checkout is written but pip's cache), later runs find it
ready. It is made anew when Python, the checkout's place or the declared dependencies change, or when a set-up was cut short.
"""

import sys

# Before everything that an older Python does not know, the annotations below included.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("dev.py: Python 3.11 or newer is needed, this is %d.%d: try python3.11 or python3.12" % sys.version_info[:2])

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

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
PYTHON = BIN / "python"
STAMP = VENV / "shardrt-ready"
TYPES = ROOT / "build" / "types" / "shardrt"
EXTRAS = "mpich,test,train"


def main(arguments: list[str]) -> int:
    """Run one command; the rest of the command line belongs to what it starts."""
    commands: dict[str, Callable[[list[str]], int]] = {"train": train, "test": test, "setup": lambda _: 0}
    if not arguments or arguments[0] not in commands:
        asked = arguments[:1] in (["-h"], ["--help"])
        print(__doc__, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    os.chdir(ROOT)
    set_up()
    return commands[arguments[0]](arguments[1:])


def train(arguments: list[str]) -> int:
    """Become mpirun, so that signals and the exit code are its own."""
    ranks = "2"
    if arguments[:1] == ["-n"]:
        if not arguments[1:] or not arguments[1].isdecimal() or int(arguments[1]) < 1:
            fail("train -n: expected a number of ranks, as in: train -n 4 --steps 100")
        ranks, arguments = arguments[1], arguments[2:]
    # One thread per rank: ranks that share cores and each start a thread per core get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = [str(BIN / "mpirun"), "-n", ranks, str(PYTHON), "scripts/train.py", *arguments]
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
    return subprocess.run([PYTHON, "-m", module, *arguments], env=environment(), check=False).returncode


# ---------------------------------------------------------------------- types


def check_types() -> int:
    """Run mypy on the link tree and name the files by their places in the checkout."""
    link_types()
    command = [PYTHON, "-m", "mypy", *(["--pretty"] if sys.stdout.isatty() else [])]
    result = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=False)
    print(real_paths(result.stdout), end="", flush=True)
    return result.returncode


def link_types() -> None:
    """Bring build/types/shardrt up to date: what is in shardrt/, and comm/ and kernels/ where imports say they are.

    mypy reads folders and runs no import hook, so it needs a tree in which `shardrt.comm` is shardrt/comm.
    """
    wanted = {path.name: path for path in (ROOT / "shardrt").iterdir() if path.name != "__pycache__"}
    wanted |= {name: ROOT / name for name in ("comm", "kernels")}
    TYPES.mkdir(parents=True, exist_ok=True)
    for link in TYPES.iterdir():
        if link.name not in wanted or link.resolve() != wanted[link.name].resolve():
            link.unlink()
    for name, path in wanted.items():
        if not (TYPES / name).is_symlink():
            (TYPES / name).symlink_to(os.path.relpath(path, TYPES))


def real_paths(report: str) -> str:
    """Turn build/types/shardrt/comm/mpi.py into comm/mpi.py, and build/types/shardrt/group.py into shardrt/group.py."""
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
    """The stamp is the last thing that a set-up writes. A missing Python: its base was uninstalled."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == wanted


def make(wanted: str) -> None:
    """Create .venv from nothing: an environment that was half made, or made for other versions, is worth nothing."""
    for module, package in (("venv", "python3-venv"), ("ensurepip", "python3-venv")):
        if importlib.util.find_spec(module) is None:
            fail(f"this Python ({sys.executable}) has no module {module}: install {package}, or use another Python 3.11+")
    print(f"Setting up {VENV} (once; some minutes, depending on the network)", flush=True)
    if VENV.exists():
        STAMP.unlink(missing_ok=True)  # first: what follows may be interrupted
        shutil.rmtree(VENV)
    install = [str(PYTHON), "-m", "pip", "install", "--no-input", "-c", "constraints.txt"]
    if not sys.stdout.isatty():
        install.append("--quiet")
    # setuptools ahead of the rest and no isolated build, so that the build too uses the version in constraints.txt.
    for command in (
        [sys.executable, "-m", "venv", str(VENV)],
        [*install, "setuptools"],
        [*install, "--no-build-isolation", "--editable", f".[{EXTRAS}]"],
    ):
        code = subprocess.run(command, env=environment(), check=False).returncode
        if code:
            fail(f"set-up failed with exit code {code} at: {' '.join(command)}\nNothing of it is used; run dev.py again to start afresh.")
    STAMP.write_text(wanted)


def fingerprint() -> str:
    """A hash of everything that .venv depends on. The tools' settings, which setup.cfg has too, are no part of it."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    declared = {name: dict(config[name]) for name in config.sections() if name.split(".")[0] in ("metadata", "options")}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    constraints = (ROOT / "constraints.txt").read_text()
    parts = (EXTRAS, sys.version, str(VENV), repr(declared), repr(build), constraints)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Let one dev.py at a time work on .venv; the lock goes with the process that holds it."""
    with open(f"{VENV}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment() -> dict[str, str]:
    """The caller's variables, less those that would bring other packages in or send pip's elsewhere.

    Of pip's own only those that say where packages come from are kept: an index, its certificate, a proxy, a cache.
    """
    source = ("INDEX", "FIND_LINKS", "CERT", "PROXY", "TRUSTED", "CACHE", "TIMEOUT", "RETRIES", "CONFIG_FILE")
    dropped = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and (not name.startswith("PIP_") or any(word in name for word in source))
    }
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def fail(message: str) -> None:
    """End with a message and exit code 2."""
    sys.exit_code = 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

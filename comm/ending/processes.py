"""What /proc says of the processes of this machine: ranks, their launcher, and those between. It also kills them."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator, Mapping

LAUNCHED = "SHARDRT_LAUNCHED"  # the process that shardrt.launch has started as a rank, until its init()
GUARDS = "shardrt-"  # how the names of guards begin
_ENDED = "ZX"  # states
_PF_EXITING = 0x4
_TICKS = os.sysconf("SC_CLK_TCK")
# Names of processes, at most 15 characters.
_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orterun", "orted"}
_LAUNCHERS |= {"srun", "slurmstepd"}


def standard_error() -> int:
    """The descriptor of this process's standard error; of that of a process above it, where nobody else can read this one.

    It is then a file without a name: pytest keeps in one what a test writes. The caller closes what is not 2.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):
        while pid > 1 and _has_no_name(f"/proc/{pid}/fd/2"):
            pid = Process(pid).parent
        if pid not in (1, os.getpid()):
            return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC)
    return 2


def _has_no_name(path: str) -> bool:
    status = os.stat(path)
    return stat.S_ISREG(status.st_mode) and not status.st_nlink


class Process:
    """What /proc/PID/stat says of a process. Raises: OSError if there is none of this number any more."""

    def __init__(self, pid: int) -> None:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            self.name, _, rest = file.read().partition("(")[2].rpartition(")")
        fields = rest.split()
        self.pid, self.state, self.parent = pid, fields[0], int(fields[1])
        self.is_ending = has_ended(self.state) or bool(int(fields[6]) & _PF_EXITING)
        self.is_stopped = self.state in "Tt"
        self.is_guard = self.name.startswith(GUARDS)
        self._status = int(fields[49])
        self.cpu_s = sum(map(int, fields[11:15])) / _TICKS  # that it has used, with children that it has waited for

    def exit_code(self) -> int | None:
        """That of a process that has ended: negative for a signal. None if it has not ended."""
        return os.waitstatus_to_exitcode(self._status) if self.state == "Z" else None

    def will_run(self) -> bool:
        """False if the process has ended, or will without having run again: it has got a SIGKILL."""
        try:
            with open(f"/proc/{self.pid}/status") as file:
                pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd", "ShdPnd"))]
        except OSError:
            return False
        return not self.is_ending and not any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)


def processes() -> Iterator[Process]:
    """All processes of this machine that can be seen from here. Cost: 15 us each."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                yield Process(int(name))


def has_ended(state: str) -> bool:
    """Whether a process in this state has ended."""
    return state in _ENDED


def state_of(pid: int) -> str:
    """The state of a process, as a letter; X if there is none of this number any more."""
    try:
        return Process(pid).state
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def children(pid: int | str) -> list[int]:
    """The numbers of a process's children; none if it has ended, or this kernel does not tell. Cost: 10 us for each thread.

    "self": this process, which /proc may show by another number, or not at all, in a container.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def kill(process: Process) -> None:
    """Send SIGKILL to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


def processes_with(variable: str, start: str = "") -> Iterator[Process]:
    """The processes that have an environment variable whose value begins so. They are this user's."""
    for process in processes():
        with contextlib.suppress(OSError):  # it is another user's, or has ended
            value = variable_of(process.pid, variable)
            if value is not None and value.startswith(start):
                yield process


def variable_of(pid: int, name: str) -> str | None:
    """An environment variable of a process, as it was when its program started. Raises: OSError if it cannot be read."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read().split(b"\0")
    start = name.encode() + b"="
    return next((entry[len(start) :].decode(errors="replace") for entry in entries if entry.startswith(start)), None)


def launcher_of(pid: int, variable: str, number: str) -> int:
    """The process that has started the ranks of this node: the nearest of `pid` and its ancestors without the rank's number.

    pid: the rank or its parent: the launcher, or the shell of a script.   variable, number: the variable that has a rank's
    number, and that number.   Returns: 0 if it cannot be told, since it is outside of this PID namespace, or behind an ancestor
    whose variables may not be read: `sudo`, or a container's setuid program.
    """
    try:
        while pid > 1 and variable_of(pid, variable) == number:
            pid = Process(pid).parent
    except OSError:
        return pid if _is_slurms(pid) else 0
    return pid if pid > 1 else 0  # a container's first process is 1


def _is_slurms(pid: int) -> bool:
    """Whether a process is Slurm's own launcher, which is root's."""
    with contextlib.suppress(OSError):
        return Process(pid).name.startswith("slurmstepd")
    return False


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether this process is a rank that shardrt.launch has started, or in its place, as the program of a shell script.

    Not a rank of a job that such a process has started, which has a launcher in between, nor what a rank has started after its
    init(). Files that shardrt.launch reads, of which they have inherited the names, are not for them.
    """
    pid = os.getpid()
    try:
        while pid > 1 and str(pid) != environment.get(LAUNCHED):
            process = Process(pid)
            if process.name in _LAUNCHERS:
                return False
            pid = process.parent
    except OSError:
        return False
    return pid > 1

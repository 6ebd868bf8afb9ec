"""Start a failed job again, as long as it advances: python -P restarts.py RESTARTS SIGNAL FOLDER COMMAND...

`shardrt.launch --restarts` replaces itself by this program; SIGNAL is the number of what COMMAND gets for a SIGTERM. It imports
nothing but the standard library.

A job advances when `shardrt.Run` commits a checkpoint: rank 0 then writes its step into the file that SHARDRT_PROGRESS names.
FOLDER, where that file is made, has to be on the machine of rank 0 as well.

how the job ended                                                   then
exit code 0                                                         the end
exit code 2: a usage error, or the job cannot be started            the end, with this code
a signal came, or the ranks stopped to be requeued (code 75)        the end; with code 75 if the run can be continued
any other failure, for the first time, or after a new checkpoint    the next start, unless there were RESTARTS
any other failure, without a new checkpoint since the last failure  the end, with the job's code
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PROGRESS = "SHARDRT_PROGRESS"
USAGE_ERROR = 2
PASSED_ON = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
_WATCHED = PASSED_ON | {signal.SIGCHLD}
_ORPHANS_S = 5.0  # for the ranks of a launcher that was killed to end by themselves
_KILLED_S = 5.0  # for processes that got SIGKILL
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> int:
    """Run the job until it ends for good; returns its exit code."""
    restarts, terminate, command = int(arguments[0]), signal.Signals(int(arguments[1])), arguments[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="shardrt-launch-", dir=arguments[2]) as folder:
        progress = Path(folder) / "progress"
        progress.touch()  # Hazard: for a while, NFS answers from a cache that a file is not there
        os.environ[PROGRESS] = str(progress)
        last, done = None, 0
        while True:
            code, was_told = run(command, terminate)
            if code != 0:
                was_told |= end_orphans()
            found = progress.read_text().split()
            if "stopped" in found:
                return os.EX_TEMPFAIL
            if code in (0, USAGE_ERROR, os.EX_TEMPFAIL) or was_told:
                return code
            why = reason_to_give_up(done, restarts, has_advanced=found != last)
            step = f"the last checkpoint is of step {found[0]}" if found else "it has saved no checkpoint"
            report(f"the job failed with exit code {code}; {step}; {why or f'start {done + 2} of {restarts + 1}'}")
            if why is not None:
                return code
            last, done = found, done + 1


def reason_to_give_up(done: int, restarts: int, *, has_advanced: bool) -> str | None:
    """Why a failed job, started again `done` times before, is not started again; None if it is."""
    if done == restarts:
        return f"not started again, after {restarts} restarts"
    return None if has_advanced else "not started again, since it failed twice without a new checkpoint in between"


def run(command: list[str], terminate: signal.Signals) -> tuple[int, bool]:
    """Run the job once; returns its exit code, and whether a signal was passed on to it."""
    with subprocess.Popen(command, preexec_fn=_before_exec) as job:
        was_told = False
        while job.poll() is None:
            info = signal.sigwaitinfo(_WATCHED)
            number = signal.Signals(info.si_signo)
            if number is signal.SIGCHLD:
                continue
            # A Ctrl-C (by the kernel, not by a process) has reached the whole process group of the terminal.
            if number is not signal.SIGINT or info.si_pid:
                # Once: Open MPI's mpirun kills its ranks 0.25 s after a SIGTERM, which is too short for a save.
                job.send_signal(terminate if number is signal.SIGTERM and not was_told else number)
            was_told = True
    return (job.returncode if job.returncode >= 0 else 128 - job.returncode), was_told


def _before_exec() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # should this process be killed


def end_orphans() -> bool:
    """Wait until the processes of the last job on this machine have ended; kill those that take long.

    Hazard: if mpirun is killed, its ranks live a little longer, and could commit a checkpoint that the next job's ranks do not
    expect. A process that waits for a file system that is gone does not even end by SIGKILL.
    Returns whether a signal came meanwhile: this is then the end.
    """
    start = time.monotonic()
    was_told = signal.sigtimedwait(PASSED_ON, 0) is not None
    with suppress(ChildProcessError):  # there are none
        while (waited := time.monotonic() - start) < _ORPHANS_S + _KILLED_S:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                if waited > _ORPHANS_S:
                    _kill_children()
                was_told |= signal.sigtimedwait(PASSED_ON, 0.05) is not None
        report("processes of the last start do not end, not even by SIGKILL; they are left behind")
    return was_told


def _kill_children() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in children.read_text().split() if children.exists() else []:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def report(message: str) -> None:
    """Write a line to standard error."""
    os.write(2, f"shardrt.launch: {message}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

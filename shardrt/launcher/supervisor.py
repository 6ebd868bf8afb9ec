"""Run a job until nothing of it is left, and start a failed one again while it advances: supervisor.py [options] COMMAND...

`shardrt.launch` replaces itself by this program, the parent of mpirun or srun. It imports the standard library and
`comm/ending`, which needs no more.

SIGUSR1 goes to mpirun or srun, which pass it on to all ranks. SIGTERM and SIGINT take the way that --ends names; SIGHUP, of a
terminal that closes, is a SIGTERM, unless the caller ignores it (nohup).

--ends     for                                    the first                          one that comes again
forwarded  MPICH's mpirun, which passes them on   to mpirun                          to mpirun
direct     Open MPI's mpirun, all ranks are here  to the ranks                       SIGTERM to mpirun
stand-in   srun; Open MPI's, of several machines  SIGUSR1 to mpirun or srun          SIGTERM to mpirun or srun

The last two kill the ranks on a SIGTERM, at once or 0.25 s later, and Open MPI's mpirun then exits with code 1. Of a terminal's
Ctrl-C, the kernel tells mpirun and srun as well. Where ranks end by such a signal, the exit code is 128 + its number.

The guards of the ranks on this machine (comm/ending/guard) write what they have to say into the file that SHARDRT_REPORTS
names: lines of an exit code for the job, a space, and a line for the user; that is empty if the rank has reported by itself.
The first such code comes before that of mpirun or srun. Guards on other machines find no such file, and write to their standard
error.

With --restarts, a job advances when `shardrt.Run` commits a checkpoint: rank 0 then writes its step into the file that
SHARDRT_PROGRESS names, in --folder, which has to be on the machine of rank 0 as well.

how the job ended                                                   then
exit code 0                                                         the end
exit code 2: a usage error, or the job cannot be started            the end, with this code
a signal came, or the ranks stopped to be requeued (code 75)        the end; with code 75 if the run can be continued
any other failure, for the first time, or after a new checkpoint    the next start, unless there were RESTARTS
any other failure, without a new checkpoint since the last failure  the end, with the job's code
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path

if not __package__:  # run by path, without the folder of shardrt on the path
    __package__ = "shardrt.launcher"
    sys.path.append(str(Path(__file__).parents[2]))

from ..comm.ending.guard.node import JOINING, OF_PROCESSES
from ..comm.ending.processes import Process, kill, processes, processes_with, variable_of
from ..comm.ending.report import BEGUN, EXIT_CODE, FINISHED, JOINED, LOST, PROGRESS, REPORTS, write
from .nodes import Meeting, Refused

USAGE_ERROR = 2
_LOOK_S = 0.5  # between two looks for reports
_LOOK_AT_NODES_S = 0.05
_OF_LOST = {128 + number for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGALRM)}
_NO_RANKS_S = 5.0  # for mpirun to end when no rank is left
_END_S = 10.0  # for mpirun to end when a rank has said that it ends the job
_SHOW_S = 2.0  # for a message to be read
_GUARDS_S = 2.0  # for the guards of ranks that have ended to end
_ORPHANS_S = 5.0  # for the ranks of a launcher that was killed to end by themselves
_KILLED_S = 5.0  # for processes that got SIGKILL
_CLEAN_S = 30.0
_SI_KERNEL = 0x80
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
# Not what the caller ignores, such as SIGINT of a shell's background job: where it is blocked, it would come all the same.
PASSED_ON = {s for s in _ENDS | {signal.SIGUSR1} if signal.getsignal(s) is not signal.SIG_IGN}
WATCHED = PASSED_ON | {signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    """Run the job until it ends for good; returns its exit code."""
    options = _parser().parse_args(arguments)
    prepare()
    with ExitStack() as folders:
        try:
            reports = _fresh_folder(folders, tempfile.gettempdir())
            progress = None if options.restarts is None else _fresh_folder(folders, options.folder) / "progress"
        except OSError as error:
            report(f"cannot make a folder: {error}; TMPDIR names the place for temporary files")
            return USAGE_ERROR
        try:
            meeting = None if options.nodes is None else _meeting(options, reports)
        except Refused as error:
            report(str(error))
            return USAGE_ERROR
        folders.enter_context(cleaner(reports, [reports, *([] if progress is None else [progress.parent])]))
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if progress is None:
            code = run(options, reports, meeting)[0]
        else:
            progress.touch()  # Hazard: for a while, NFS answers from a cache that a file is not there
            os.environ[PROGRESS] = str(progress)
            code = run_again(options, reports, progress, meeting)
        if meeting is not None:
            meeting.end(code)
        return code


def prepare() -> None:
    """Take what this process was given by the one that has started it as a launcher has to."""
    for name in OF_PROCESSES:  # they number others than the ranks
        os.environ.pop(name, None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller that ignores it leaves no exit codes
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def _meeting(options: argparse.Namespace, folder: Path) -> Meeting:
    """The launchers of the other nodes, and the program that mpirun calls in the place of ssh, in the folder."""
    if _takes_addresses(options) and re.search(r"[\s:]", str(folder)):
        raise Refused(f"Open MPI starts no program in {folder}: let TMPDIR name a folder without blanks and colons")
    shell = [*options.remote_shell, str(Path(__file__).with_name("remote_shell.py"))]
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shlex.join(shell)} "$@"\n')
    (folder / "ssh").chmod(0o700)
    return Meeting(options.nodes, options.port, json.loads(options.about), folder, report)


def _fresh_folder(folders: ExitStack, where: str) -> Path:
    """A new folder that only this user can enter, until the end. This process locks it: `stale_files.py` removes others."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix="shardrt-launcher-", dir=where))
        with suppress(FileNotFoundError):  # it was removed before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            folders.callback(os.close, lock)
            with suppress(OSError):  # a file system without locks, where nobody removes it
                fcntl.flock(lock, fcntl.LOCK_SH)
            if folder.exists():
                folders.callback(shutil.rmtree, folder, ignore_errors=True)
                return folder


@contextmanager
def cleaner(reports: Path, folders: list[Path]) -> Iterator[None]:
    """Beside the block runs a process that, if this one is killed in it, ends the job on this machine and deletes the folders.

    reports: the job's folder for reports, by which its processes are known.
    It is no child of this process, which waits for all of its own. Most of a job ends with its launcher, which gets a SIGTERM;
    not so ranks that hold Python's lock in C code.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os.closerange(3, reader)  # connections to other nodes end with their owner
            os.closerange(reader + 1, os.sysconf("SC_OPEN_MAX"))
            os.setsid()  # a Ctrl-C at the terminal is for the ranks
            for fd in range(3):  # nobody waits for this process to close them
                os.dup2(os.open(os.devnull, os.O_RDWR), fd)
            if not os.read(reader, 1):
                clean_up(reports, folders)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(reader)
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody has killed it
            os.write(writer, b".")


def clean_up(reports: Path, folders: list[Path]) -> None:
    """End the processes of the job, and delete the folders."""
    _end(lambda: list(processes_with(REPORTS, f"{reports}/")))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(find: Callable[[], list[Process]], wait: Callable[[], object] = lambda: time.sleep(0.2)) -> bool:
    """Wait until the processes of the job that `find` finds have ended; kill those that take long. False if they live on.

    `wait` lets a moment pass. Hazard: a process that waits for a file system that does not answer does not even end by SIGKILL.
    """
    start = time.monotonic()
    while found := find():
        waited = time.monotonic() - start
        if waited > _ORPHANS_S + _KILLED_S:
            return False
        for process in found if waited > _ORPHANS_S else ():
            kill(process)
        wait()
    return True


def run_again(options: argparse.Namespace, reports: Path, progress: Path, meeting: Meeting | None) -> int:
    """Run the job, and again after each failure, while it advances; returns the exit code."""
    last, done = None, 0
    while True:
        code, was_told = run(options, reports, meeting)
        found = progress.read_text().split()
        if "stopped" in found:
            return os.EX_TEMPFAIL
        if code in (0, USAGE_ERROR, os.EX_TEMPFAIL) or was_told:
            return code
        why = reason_to_give_up(done, options.restarts, has_advanced=found != last)
        step = f"the last checkpoint is of step {found[0]}" if found else "it has saved no checkpoint"
        next_start = f"start {done + 2} of {options.restarts + 1}"
        report(f"the job failed with exit code {code}; {step}; {why or next_start}")
        if why is not None:
            return code
        last, done = found, done + 1


def reason_to_give_up(done: int, restarts: int, *, has_advanced: bool) -> str | None:
    """Why a failed job, started again `done` times before, is not started again; None if it is."""
    if done == restarts:
        return f"not started again, after {restarts} restarts"
    return None if has_advanced else "not started again, since it failed twice without a new checkpoint in between"


def run(options: argparse.Namespace, folder: Path, meeting: Meeting | None) -> tuple[int, bool]:
    """Run the job once, until nothing of it is left on this machine; returns its exit code, and whether a signal came."""
    clean = partial(run_clean, shlex.split(options.clean))
    clean()
    reports = Reports(folder)
    if meeting is not None and (code := gather(meeting, options)) is not None:
        return code, code != USAGE_ERROR
    job, was_ended = RunningJob(_line(options, meeting, folder), options.ends), False
    while job.is_running():
        if meeting is not None:
            look_at(meeting, job)
        info = signal.sigtimedwait(WATCHED, _LOOK_S if meeting is None else _LOOK_AT_NODES_S)
        if info is not None and info.si_signo in PASSED_ON and (meeting is None or info.si_signo not in job.told):
            job.tell(info.si_signo, is_terminals=info.si_code == _SI_KERNEL)
        reports.print_new()
        if reports.has_finished:
            job.end_joining(reports.joined)
        was_ended |= reports.has_finished and job.has_no_ranks(_NO_RANKS_S)
        if time.monotonic() > reports.since + _END_S or was_ended:
            job.kill()
    wait_for_guards()
    reports.print_new()
    if meeting is not None:
        meeting.over()
    code, was_told = job.code(reports.code), bool(job.told)
    if options.survive and reports.has_begun:
        code = code_of_survivors(code, reports, was_ended=was_ended)
    if code != 0:
        was_told |= end_orphans()
        clean()
    return code, was_told


def gather(meeting: Meeting, options: argparse.Namespace) -> int | None:
    """Wait until the launchers of all nodes are here; returns the exit code if they are not: there is no job."""
    try:
        info = meeting.gather(options.join_timeout, partial(signal.sigtimedwait, PASSED_ON))
        found = meeting.addresses
        own = {address for address in found if re.fullmatch(r"[\d.]+", address)}
        if _takes_addresses(options) and len(own) < len(found):
            wanted = "Open MPI knows each node by an IPv4 address of its own"
            raise Refused(f"{wanted}, found {', '.join(found)}; start one launcher on each machine, or use MPICH")
    except Refused as error:
        meeting.refuse(str(error))
        report(str(error))
        return USAGE_ERROR
    return None if info is None else 128 + info.si_signo


def _takes_addresses(options: argparse.Namespace) -> bool:
    """Whether mpirun is given the nodes' addresses, as Open MPI's is."""
    return any("{nodes[1]}" in word for word in options.meet)


def _line(options: argparse.Namespace, meeting: Meeting | None, folder: Path) -> list[str]:
    """The command line of the job, with the flags that take what is known when the nodes have met."""
    flags = [] if meeting is None else [word.format(ssh=folder / "ssh", nodes=meeting.addresses) for word in options.meet]
    return [options.command[0], *flags, *options.command[1:]]


def look_at(meeting: Meeting, job: RunningJob) -> None:
    """Do what the nodes' launchers ask for; a job ends with one of them."""
    try:
        for number in meeting.look():
            if number not in job.told:  # the launchers of all nodes may get it
                job.tell(number)
    except Refused as error:
        report(str(error))
    if meeting.missing:
        job.kill()


def code_of_survivors(code: int, reports: Reports, *, was_ended: bool) -> int:
    """The exit code of a job that survives the loss of ranks. code: that of Open MPI's mpirun, or of its end by this process.

    Hazard: mpirun gives 0 if every rank was killed, and the code of a signal if that has ended a process that was started in
    the place of another.
    """
    if reports.has_finished and reports.code is None:
        return 0 if was_ended or code in _OF_LOST else code
    if reports.has_finished:
        return code
    return code or reports.lost or EXIT_CODE


def run_clean(command: list[str]) -> None:
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, preexec_fn=unblock, timeout=_CLEAN_S, check=False)


class Ends(Enum):
    """The way of SIGTERM and SIGINT to the ranks."""

    FORWARDED = "forwarded"
    DIRECT = "direct"
    STAND_IN = "stand-in"


class RunningJob:
    """A running mpirun or srun, and its ranks."""

    def __init__(self, command: list[str], ends: Ends) -> None:
        self._ends, self._is_srun = ends, Path(command[0]).name == "srun"
        # A terminal's Ctrl-C is for the ranks: Open MPI's mpirun lets them have it unblocked.
        blocked = PASSED_ON & {signal.SIGINT} if ends is Ends.DIRECT else set()
        self._process = subprocess.Popen(command, preexec_fn=partial(_before_exec, blocked))
        self._no_ranks_since: float | None = None  # as far as `has_no_ranks` has seen
        self._was_ended = False  # mpirun or srun got the signal itself
        self.told: list[signal.Signals] = []  # the signals that came, in order

    def is_running(self) -> bool:
        """Collect the children that have ended: mpirun or srun, and the job's orphans, whose parent this process is."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self._process.returncode is None and (ended := os.waitid(os.P_ALL, 0, options)) is not None:
            if ended.si_pid == self._process.pid:
                self._process.poll()
            else:
                os.waitpid(ended.si_pid, 0)
        return self._process.returncode is None

    def tell(self, number: int, *, is_terminals: bool = False) -> None:
        """Pass a signal on. A terminal's Ctrl-C, which the kernel sends, has reached mpirun or srun by itself."""
        number = signal.Signals(number)
        if number is signal.SIGHUP:
            if signal.SIGTERM in self.told:  # the kernel sends one when a terminal closes, and the shell another one
                return
            number = signal.SIGTERM
        is_first = number not in self.told
        self.told.append(number)
        reached_it = number is signal.SIGINT and is_terminals and self._ends is not Ends.DIRECT
        if number in _ENDS and self._ends is not Ends.FORWARDED and not reached_it:
            if is_first and self._ends is Ends.DIRECT and self._tell_ranks(number):
                return
            number = signal.SIGUSR1 if is_first and self._ends is Ends.STAND_IN else signal.SIGTERM
        self._was_ended |= number in _ENDS
        if not reached_it:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End an mpirun that does not end by itself: it may write to an error output that nobody reads, or lack its network."""
        if not self._is_srun:  # Slurm has a time limit of its own, KillWait
            self._process.kill()

    def has_no_ranks(self, seconds: float) -> bool:
        """Whether mpirun has been without ranks for so long. Hazard: it may not end when ranks were lost and replaced."""
        if self._ranks():
            self._no_ranks_since = None
        elif self._no_ranks_since is None:
            self._no_ranks_since = time.monotonic()
        return self._no_ranks_since is not None and time.monotonic() > self._no_ranks_since + seconds

    def end_joining(self, joined: set[int]) -> None:
        """Kill the processes in the place of lost ranks that have not come to the others: these are at their end."""
        for pid in self._ranks():
            with suppress(OSError):  # it has ended
                if pid not in joined and variable_of(pid, JOINING) is not None:
                    os.kill(pid, signal.SIGKILL)

    def _ranks(self) -> list[int]:
        found = processes_with("OMPI_COMM_WORLD_RANK")
        return [process.pid for process in found if process.parent == self._process.pid and not process.is_ending]

    def _tell_ranks(self, number: signal.Signals) -> bool:
        """Send the signal to the ranks, whose process groups a terminal does not reach. Returns whether there are some."""
        ranks = self._ranks()
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(ranks)

    def code(self, reported: int | None) -> int:
        """The exit code, when it has ended. reported: by a guard, which knows more than mpirun or srun.

        Of a SIGTERM, Open MPI's mpirun knows more: it sends one to the others when a rank is killed.
        """
        code = self._process.returncode if self._process.returncode >= 0 else 128 - self._process.returncode
        if reported != 128 + signal.SIGTERM or code <= 1 or self._ends is not Ends.DIRECT:
            code = reported or code
        if not self.told:
            return code
        told = next((number for number in self.told if number in _ENDS), self.told[0])
        # MPICH's codes, the bits of all ranks' signals; the others add 128.
        killed = {int(told), told | signal.SIGKILL, signal.SIGKILL, signal.SIGUSR1}
        says_nothing = code == 1 and self._was_ended and self._ends is not Ends.FORWARDED
        return 128 + told if says_nothing or code in killed | {128 + number for number in killed} else code


def _before_exec(blocked: set[signal.Signals]) -> None:
    unblock()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # should this process be killed


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


class Reports:
    """What the guards of one start have to say. code: of the first that has come.   since: when it came."""

    def __init__(self, folder: Path) -> None:
        descriptor, path = tempfile.mkstemp(prefix="reports-", dir=folder)
        self._file = os.fdopen(descriptor, "rb")
        self._rest = b""  # the beginning of a line that somebody is writing
        self.code: int | None = None
        self.lost: int | None = None  # the code of the last rank that has ended, in a job that survives it
        # Ranks of such a job have come to init(), and those that were left to the end of their programs.
        self.has_begun = self.has_finished = False
        self.joined: set[int] = set()  # the processes that have taken the place of lost ranks
        self.since = float("inf")
        os.environ[REPORTS] = path

    def print_new(self) -> None:
        """Print the lines that have come since the last call."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        shown = b""
        for line in lines:
            code, _, text = line.partition(b" ")
            self.has_begun |= code == BEGUN.encode()
            self.has_finished |= code == FINISHED.encode()
            if code.startswith(LOST.encode()):
                self.lost = int(code.removeprefix(LOST.encode()))
            if code.startswith(JOINED.encode()):
                self.joined.add(int(code.removeprefix(JOINED.encode())))
            if self.code is None and code.isdigit():
                self.code = int(code)
                self.since = time.monotonic()
            shown += text + b"\n" if text else b""
        show(shown)


def wait_for_guards() -> None:
    """Wait until the guards of the job's ranks have ended, which they do with their ranks; they have then reported."""
    until = time.monotonic() + _GUARDS_S
    while any(process.is_guard for process in _children()) and time.monotonic() < until:
        time.sleep(0.02)


def end_orphans() -> bool:
    """End the processes of the last job on this machine.

    Hazard: if mpirun is killed, its ranks live a little longer, and could commit a checkpoint that the next job's ranks do not
    expect. Returns whether a signal came meanwhile: this is then the end.
    """
    told = [signal.sigtimedwait(PASSED_ON, 0)]
    if not _end(_children, lambda: told.append(signal.sigtimedwait(PASSED_ON, 0.05))):
        report("processes of the last start do not end, not even by SIGKILL; they are left behind")
    return any(told)


def _children() -> list[Process]:
    """The processes that this one is the parent of, orphans of the job included; those that have ended are collected."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [process for process in processes() if process.parent == os.getpid()]


def report(message: str) -> None:
    """Write a line to standard error."""
    show(f"shardrt.launch: {message}\n".encode())


def show(lines: bytes) -> None:
    """Write to standard error, but drop what nobody reads within some seconds.

    Hazard: what cannot be opened again may block although there was room: others write to the same pipe. The alarm ends it.
    """
    signal.signal(signal.SIGALRM, _late)
    with suppress(OSError):
        signal.setitimer(signal.ITIMER_REAL, _SHOW_S)
        try:
            write(2, lines)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _late(number: int, frame: object) -> None:
    raise TimeoutError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Started by shardrt.launch.")
    parser.add_argument("--restarts", type=int)
    parser.add_argument("--survive", action="store_true", help="a lost rank does not end the job")
    parser.add_argument("--folder", help="where the progress is told")
    parser.add_argument("--ends", type=Ends, required=True, help="the way of SIGTERM and SIGINT to the ranks")
    parser.add_argument("--nodes", type=int, help="how many nodes have a launcher, which come to this one")
    parser.add_argument("--port", type=int, help="for the launchers of the other nodes")
    parser.add_argument("--about", help="what has to be the same on all nodes")
    parser.add_argument("--join-timeout", type=float, help="seconds for them to come")
    parser.add_argument("--remote-shell", type=shlex.split, help="the interpreter of remote_shell.py")
    parser.add_argument("--meet", type=shlex.split, help="mpirun's flags, with the places of {ssh} and {nodes[0]}")
    parser.add_argument("--clean", required=True, metavar="COMMAND", help="what removes the files of killed jobs")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

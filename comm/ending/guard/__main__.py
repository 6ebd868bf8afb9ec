"""The guard: a small process beside a rank, its child, that sees from outside when the rank's interpreter cannot act any more.

    python -I -S guard/__main__.py --start PROGRAM...    start a guard, and replace this process by PROGRAM: by shardrt.launch
    python -I -S guard/__main__.py --join PROGRAM...     the same, of a process in the place of a lost rank
    python -I -S guard/__main__.py PID FD                guard PID, by its descriptor: by shardrt.init(), if need be

It imports the standard library only, and little of it (`-I -S`: a start takes 12 ms), and needs neither MPI nor Python's lock.
The rank tells it where it is by a pipe, the guard's standard input (`monitor/guarding.py`). Its process name shows the phase to
the guards of the node's other ranks.

phase     the rank sends       the guard ends the job if
START                          the rank fails (any code but 0) and others live on
INIT      init LIMIT PATIENCE  also: the rank ends with 0; a rank of the node has ended and never came; LIMIT seconds pass,
                               or PATIENCE while the node's ranks that did not come use a processor
OVERDUE   (still in init)      it is the first of the node's ranks in this phase
RUN       table ..., run       the rank ends; no watchdog of the node's ranks is awake any more
ENDING    end CODE             the rank, which has reported already and ends the job itself, does not manage to
DONE      done                 never: the guard ends, at once

To end a job, the guard reports (`ending/report.py`), and then aborts by PMI-1, the wire protocol of MPICH's process manager,
which takes an exit code. Under another launcher it kills its rank, and the launcher ends the others: the exit code is then 137,
unless shardrt.launch replaces it by that of the report.
"""

from __future__ import annotations

import os
import signal
import sys
from types import ModuleType

if __name__ == "__main__":  # run by path: a package with nothing in it stands in for shardrt.comm.ending
    sys.modules["ending_alone"] = ModuleType("ending_alone")
    sys.modules["ending_alone"].__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    __package__ = "ending_alone.guard"

from ..processes import LAUNCHED, standard_error
from .node import JOINING, VARIABLE, RankPlace
from .watch import Guard


def guard(pid: int, process: int) -> None:
    """The guard's process, from its start to its end. Its standard input is the pipe from the rank.

    process: descriptor of the rank `pid`, opened by the rank, which may have ended since.
    """
    os.setsid()  # a Ctrl-C at the terminal is for the ranks
    os.dup2(standard_error(), 2)  # now: when there is something to write, the rank above this process may have ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        made = Guard(pid, process, RankPlace(os.environ))
    except (LookupError, ValueError, OSError):
        return
    made.watch()


def start(program: list[str]) -> None:
    """Fork a guard of this process, and replace this process by `program`. A rank alone gets no guard."""
    pid = os.getpid()
    os.environ[LAUNCHED] = str(pid)
    try:
        RankPlace(os.environ)
        process = os.pidfd_open(pid)
    except (LookupError, ValueError, OSError, AttributeError):  # the last of these where Python was built for an older Linux
        os.execvp(program[0], program)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(reader, 0)
        guard(pid, process)
        os._exit(0)
    os.close(reader)
    os.set_inheritable(writer, True)
    os.environ[VARIABLE] = f"{writer}:{pid}"
    os.execvp(program[0], program)


if __name__ == "__main__":
    if sys.argv[1] in ("--start", "--join"):
        if sys.argv[1] == "--join":
            os.environ[JOINING] = "1"
        start(sys.argv[2:])
    else:
        guard(int(sys.argv[1]), int(sys.argv[2]))

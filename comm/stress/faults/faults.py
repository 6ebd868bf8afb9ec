"""The faults of one rank and what the job must do about each: the rows of the table in docs/failures.md, but for two.

Those two need a model: `shardrt/stress.py` has them.

What the job must do is written twice: for people in `must`, for `fault.judge` in `codes` and `says`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import methodcaller

from . import acts
from .acts import FAR_S, SLEEP_S, kill, libc

WATCHDOG = (17,)
# Hazard: without shardrt.launch, only MPICH's mpirun takes an exit code from a guard; for others the guard kills its rank.
GUARD = (17, 137)
ENDED = (143,)  # Open MPI's launcher may take the code of a rank before its guard can, and ends the others by SIGTERM
SRUN = (137, 143)  # srun's own code is the highest of its tasks, those included that it ends because of another one
NAMED = r"rank VICTIM\b(?! pid| injects)"  # named by other ranks: the rank itself prints its pid and its fault
STAND_IN = "was ended by signal 10 .*; in #"  # under srun, shardrt.launch passes SIGUSR1 on in the place of other signals
LAST = "(?:all_reduce|all_gather|reduce_scatter)"  # what the last operation can be
UNDER_WAY = r"{}\), .* under way"  # the report of a signal tells the operations, or that there are none


class When(Enum):
    """Who acts, and when."""

    BEFORE = auto()  # the rank, before init()
    INSIDE = auto()  # the rank, in init(), before MPI starts
    TRAFFIC = auto()  # the rank, between two collectives
    EVERYWHERE = auto()  # every rank, between two collectives
    LAUNCHER = auto()  # this command, to the launcher, during collectives; the act gets the launcher's process
    CALL = auto()  # every rank, with an `acts.Scene`: the act raises on all of them, and the job goes on


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table. VICTIM in `says` stands for the rank's number."""

    name: str  # on the command line
    what: str  # the rank does
    must: str  # the job do
    act: Callable[..., object]
    codes: tuple[int, ...] = ()  # with which the job may end; none: any but 0
    says: str = ""  # a regular expression: the job's output, or with CALL the error of every rank
    when: When = When.TRAFFIC
    bare: tuple[int, ...] | None = None  # the codes without shardrt.launch, where they differ
    guard_says: str = ""  # under MPICH, the rest of the line: other launchers may collect the rank before its guard can
    is_unread: bool = False  # nobody reads the job's stderr, its dumps are read instead. A bare launcher waits for a reader
    program: str = "shardrt.comm.stress"  # the module that knows this fault


_before = partial(Fault, when=When.BEFORE)
_to_launcher = partial(Fault, when=When.LAUNCHER)
_call = partial(Fault, when=When.CALL)

_ENDS = "ends at once"
_SHOWS = f"shows the exception, and {_ENDS}"
_LATE = "after `SHARDRT_START_TIMEOUT`: tells which ranks came to `init()`, and where those are that did not"
_MISSING = "after `SHARDRT_TIMEOUT`: reports the operation, the missing ranks, the last operation of each, and stacks"
_LEFT = "after 4 s: reports the operation and the missing ranks"
_DIED = "names the rank, under MPICH with its last operation, and ends at once"
_RUNNING = "reports the running operations, and ends "
_ON_EVERY_RANK = "raises `{}` on **every** rank, with "
_MISMATCH = _ON_EVERY_RANK.format("MismatchError") + "every rank's call"
_NAMING = "raises on **every** rank, naming "
_RAISED = "ValueError: injected"


def _variable(name: str, what: str, where: str, variable: str, value: str) -> Fault:
    """A rank with an environment variable that it must not have."""
    return _before(name, what, f"{_NAMING}variable and {where}", acts.set_variable(variable, value), (1,), variable)


def _signal_to_launcher(name: str, what: str, number: signal.Signals, code: int) -> Fault:
    says = UNDER_WAY.format(number.name)
    act = methodcaller("send_signal", number)
    return _to_launcher(name, what, f"{_RUNNING}within seconds", act, (code,), says, bare=(1, code))


_ROWS = (
    # ------------------------------------------------------------------ before and inside init()
    _before("raise-before", "raises before `init()`", _SHOWS, acts.fail, (1,), "injected", bare=(1, *GUARD)),
    _before(
        "exit-before",
        "calls `sys.exit(0)` before `init()`",
        _LATE + "; Open MPI's `mpirun` does so itself, once another is in `init()`",
        sys.exit,
        (1, *WATCHDOG),
        NAMED,
        bare=(1, *GUARD),
    ),
    _before("exit-3-before", "calls `sys.exit(3)` before `init()`", _ENDS, lambda: sys.exit(3), (3,), bare=(3, *GUARD)),
    _before("sleep-before", "sleeps before `init()`", _LATE, lambda: time.sleep(FAR_S), WATCHDOG, NAMED, bare=GUARD),
    _before("stop-before", "is stopped before `init()` (SIGSTOP)", _LATE, kill(signal.SIGSTOP), WATCHDOG, NAMED, bare=GUARD),
    _before("kill-before", "is killed before `init()` (SIGKILL)", _ENDS, kill(signal.SIGKILL)),
    Fault("stop-inside", "is stopped inside `init()`", _LATE, kill(signal.SIGSTOP), WATCHDOG, NAMED, When.INSIDE, bare=GUARD),
    _variable("bad-variable", "has a variable without a meaning: `SHARDRT_TIMEOUT=nan`", "rank", "SHARDRT_TIMEOUT", "nan"),
    _variable("other-variable", "has another `SHARDRT_CHECK` than the others", "ranks", "SHARDRT_CHECK", "0"),
    _before(
        "other-torch", "has another version of torch", f"{_NAMING}versions and ranks", acts.set_torch_version, (1,), r"0\.0\.1"
    ),
    # ------------------------------------------------------------------ the rank ends
    Fault("exception", "raises", _SHOWS, acts.fail, (1,), _RAISED),
    Fault("thread", "raises in a thread, with text that has no encoding", _SHOWS, acts.raise_in_thread, (1,), _RAISED),
    Fault(
        "unread",
        "raises, and nobody reads the job's stderr",
        "writes the dump, and ends some seconds later",
        acts.raise_unread,
        (1,),
        _RAISED,
        is_unread=True,
    ),
    Fault("exit", "calls `sys.exit(0)` while others wait", _LEFT, sys.exit, WATCHDOG, NAMED),
    Fault("os-exit", "calls `os._exit(0)`", f"shows where, and {_ENDS}", lambda: os._exit(0), WATCHDOG, r"os\._exit\(0\)"),
    Fault("c-exit", "calls C's `exit(0)`", _DIED, libc("exit", 0), WATCHDOG, NAMED, guard_says=LAST, bare=(1, *GUARD)),
    Fault("c-_exit", "calls C's `_exit(0)`", _DIED, libc("_exit", 0), WATCHDOG, NAMED, guard_says=LAST, bare=(1, *GUARD)),
    Fault("kill", "is killed (SIGKILL)", _DIED, kill(signal.SIGKILL), (), NAMED, guard_says=LAST),
    Fault("segfault", "crashes (SIGSEGV)", _DIED, kill(signal.SIGSEGV), (), NAMED, guard_says=LAST),
    Fault("abort", "calls `abort()`", _DIED, libc("abort"), (), NAMED, guard_says=LAST),
    # ------------------------------------------------------------------ the rank does not come
    Fault("stop", "is stopped (SIGSTOP)", _MISSING, kill(signal.SIGSTOP), WATCHDOG, NAMED),
    Fault("gil", "hangs in C code that holds the GIL", _MISSING, acts.hold_gil, WATCHDOG, NAMED),
    Fault(
        "all-gil",
        "all ranks hang in C code that holds the GIL",
        "after `SHARDRT_TIMEOUT`, but at least 10 minutes: reports the last operation of each rank, and stacks",
        acts.hold_gil,
        WATCHDOG,
        "rank 0",
        When.EVERYWHERE,
        bare=GUARD,
    ),
    Fault(
        "slow", "is slow, within `SHARDRT_TIMEOUT`", "goes on", lambda: time.sleep(SLEEP_S), (0,), "waiting for rank VICTIM,"
    ),
    # ------------------------------------------------------------------ signals
    Fault("term", "gets SIGTERM", f"{_RUNNING}at once", kill(signal.SIGTERM), (143,), UNDER_WAY.format("SIGTERM")),
    Fault("usr1", "gets SIGUSR1, without a handler", _DIED, kill(signal.SIGUSR1), (), NAMED, guard_says=LAST),
    _signal_to_launcher("ctrl-c", "Ctrl-C, or SIGINT to the launcher", signal.SIGINT, 130),
    _signal_to_launcher("term-launcher", "SIGTERM to the launcher", signal.SIGTERM, 143),
    _to_launcher("kill-launcher", "the launcher is killed (SIGKILL)", "its ranks end with it", lambda job: job.kill(), (137,)),
    # ------------------------------------------------------------------ calls
    _call("mismatch", "gives another size, dtype, op or root", _MISMATCH, acts.mismatch, says="MismatchError"),
    _call("skip", "leaves a call out", _MISMATCH, acts.skip, says="MismatchError"),
    _call(
        "send-size",
        "sends and receives other sizes than its peers",
        "raises `MismatchError` on **every** rank that receives, with both sides",
        acts.send_other_size,
        says="MismatchError",
    ),
    _call("counts", "sends more by `all_to_all` than others expect", _MISMATCH, acts.send_other_counts, says="MismatchError"),
    _call(
        "agree",
        "raises in `with comm.agree():`, while others wait in any communicator",
        _ON_EVERY_RANK.format("RemoteError") + "the traceback",
        acts.fail_in_agree,
        says="RemoteError.*rank VICTIM raised ValueError: injected",
    ),
)

FAULTS = {fault.name: fault for fault in _ROWS}

"""The launcher of a node but the first: visitor.py [options]

It comes to the launcher of node 0, starts what that asks for, mpirun's proxies, and ends with the job, with its exit code.
See nodes.py. A signal goes to the launcher of node 0, which passes it on to all ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

if not __package__:  # run by path, as supervisor.py
    __package__ = "shardrt.launcher"
    sys.path.append(str(Path(__file__).parents[2]))

from ..comm.ending.report import REPORTS
from .nodes import KEY, Link, Message, Refused
from .supervisor import PASSED_ON, USAGE_ERROR, WATCHED, cleaner, end_orphans, prepare, report, run_clean, unblock

_LOOK_S = 0.1
_CONNECT_S = 5.0
_GREETING_S = 15.0
_NAP_S = 0.02
_SAY_EACH_S = 60.0
_GONE = 1  # the exit code when node 0 has gone
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> int:
    """Serve the job until it ends; returns its exit code."""
    options = _parser().parse_args(arguments)
    prepare()
    try:
        found = join(options.rendezvous, options.node, json.loads(options.about), options.join_timeout)
    except Refused as error:
        report(f"node {options.node}: {error}")
        return USAGE_ERROR
    if found is None:
        return USAGE_ERROR
    link, reports = found
    os.environ[REPORTS] = f"{reports}/"  # by which `cleaner` knows this job's processes
    with cleaner(Path(reports), []):
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        clean = partial(run_clean, shlex.split(options.clean))
        clean()
        code = serve(link, options.node, clean)
        end_orphans()
    return code


def join(rendezvous: str, node: int, about: Message, limit_s: float) -> tuple[Link, str] | None:
    """Come to the launcher of node 0, which may start later. Returns the folder of reports as well; None if a signal came.

    Raises: Refused.
    """
    start = said = time.monotonic()
    host, _, port = rendezvous.rpartition(":")
    while True:
        try:
            link = Link(socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S), node)
            if (reports := _greeted(link, about, rendezvous)) is not None:
                return link, reports
            why = f"what is there is no launcher of this job, or has another {KEY}"
        except OSError as error:
            why = str(error)
        if (now := time.monotonic()) > start + limit_s:
            raise Refused(f"node 0 did not come to {rendezvous} within {limit_s:g} s (--join-timeout): {why}")
        if now > said + _SAY_EACH_S:
            said = now
            report(f"node {node}: node 0 did not come to {rendezvous} yet, after {now - start:.0f} s: {why}")
        if signal.sigtimedwait(PASSED_ON, 0.5) is not None:
            return None


def _greeted(link: Link, about: Message, rendezvous: str) -> str | None:
    """The folder of reports; None if the other side has gone, or does not know the key."""
    until = time.monotonic() + _GREETING_S
    while not link.is_open():
        if link.is_closed or time.monotonic() > until:
            link.close()
            return None
        time.sleep(_NAP_S)
    link.send(**about)
    while not link.is_closed:
        for message in link.received():
            if "refused" in message:
                raise Refused(f"refused by {rendezvous}: {message['refused']}")
            return str(message["welcome"])
        time.sleep(_NAP_S)
    return None


def serve(link: Link, node: int, clean: Callable[[], None]) -> int:
    """Start what node 0 asks for, until it ends the job; returns the job's exit code.

    clean: removes what killed jobs left on this node.
    """
    started = Started(link)
    while not link.is_closed:
        info = signal.sigtimedwait(WATCHED, _LOOK_S)
        if info is not None and info.si_signo in PASSED_ON:
            link.send(signal=info.si_signo)
        for message in link.received():
            if "end" in message:
                return int(message["end"])
            if "refused" in message:
                report(f"node {node}: {message['refused']}")
                return USAGE_ERROR
            if "run" in message:
                started.run(message["run"], message["command"])
            else:
                started.end()
                clean()
        started.tell_ends()
    report(f"node {node}: node 0 has gone: its launcher was killed, or its machine or network failed; the job ends")
    started.end()
    clean()
    return _GONE


class Started:
    """The processes that were started on this node. link: to the launcher of node 0."""

    def __init__(self, link: Link) -> None:
        self._link, self._processes = link, dict[int, subprocess.Popen[bytes]]()

    def run(self, number: int, command: str) -> None:
        """Let a shell run a command. A terminal's Ctrl-C is no signal for it."""
        self._processes[number] = subprocess.Popen(
            [_shell(), "-c", command], stdin=subprocess.DEVNULL, preexec_fn=_before_exec, start_new_session=True
        )

    def tell_ends(self) -> None:
        """Tell node 0 of those that have ended."""
        for number, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                self._link.send(ended=number, code=code if code >= 0 else 128 - code)
                del self._processes[number]

    def end(self) -> None:
        """End what is left of the job on this node, orphans included."""
        for process in self._processes.values():
            process.terminate()
        self._processes.clear()
        end_orphans()


def _shell() -> str:
    """The user's login shell if it is a C shell, for which Open MPI's mpirun then writes; else one that takes the rest."""
    with suppress(KeyError):  # in a container, a user may have no name
        login = pwd.getpwuid(os.getuid()).pw_shell
        if Path(login).name in ("csh", "tcsh"):
            return login
    return "/bin/sh"


def _before_exec() -> None:
    unblock()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # should this process be killed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Started by shardrt.launch.")
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--about", required=True)
    parser.add_argument("--join-timeout", type=float, required=True)
    parser.add_argument("--clean", required=True, metavar="COMMAND", help="what removes the files of killed jobs")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What mpirun calls in the place of ssh, where each node has a launcher: remote_shell.py [options] HOST COMMAND...

It asks the supervisor, on this node, to let the node's launcher run the command, and waits for its exit code. See nodes.py.
MPICH's mpirun calls it for `node0` and so on, with one program; Open MPI's for addresses, with a line for the user's shell.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys

SOCKET = "SHARDRT_NODES"  # as in nodes.py
FAILED = 255  # as ssh does
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def main(arguments: list[str]) -> int:
    """Run the command; returns its code, as ssh does. For MPICH, 0 when it has ended, and 255 if it cannot be run.

    Hazard: MPICH's mpirun knows the command's code, and exits with 255 in the place of the ranks' if this does not return 0.
    """
    # mpirun sends its own signals to the processes that it starts as well as to the ranks, through its proxies; these are to
    # live as long as the ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    while arguments[:1] and arguments[0].startswith("-"):
        arguments.pop(0)
    host, command = arguments[0], " ".join(arguments[1:])
    is_mpich = host.startswith("node")
    if is_mpich:
        command = f"exec {command}"
    if host == "node0":
        line = ["/bin/sh", "-c", command]
        subprocess.run(line, start_new_session=True, preexec_fn=_end_with_parent, check=False)
        return 0
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.connect(os.environ[SOCKET])
        supervisor.sendall(json.dumps({"host": host, "command": command}).encode() + b"\n")
        answer = supervisor.makefile().readline()
    code = int(json.loads(answer)["code"]) if answer else FAILED
    return 0 if is_mpich and code != FAILED else code


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A launcher on each node, in the place of ssh: how they meet, and how that of node 0 lets the others start processes.

    node 0   shardrt.launch -> supervisor.py -> mpirun -> remote_shell.py   asks the supervisor to start a process on a node
    others   shardrt.launch -> visitor.py -> a proxy of mpirun -> ranks     comes to the supervisor, starts what it is asked to

The launchers of the other nodes connect to node 0, which listens on a port. Both sides prove that they know the same key, and
every message carries a code of it (`comm/ending/guard/link.py`); strangers are dropped. A message is a JSON object.

to the supervisor                                  from it
job, versions: of the node that comes              welcome: the folder of reports
ended, code: a process has ended                   refused: why
signal: one that the launcher of a node got        run, command: a process, and what the shell is to run
                                                   over: mpirun has ended: end what is left of the job
                                                   end: the job's exit code
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ..comm.ending.guard.link import Connection

KEY = "SHARDRT_RENDEZVOUS_KEY"
SOCKET = "SHARDRT_NODES"  # where remote_shell.py finds the supervisor
_GREETING_S = 10.0  # for a node to say who it is
_ASKING_S = 5.0  # for remote_shell.py to say what it asks for
_LONGEST_MESSAGE = 1 << 20
_SAY_EACH_S = 60.0
Message = dict[str, Any]
Signal = TypeVar("Signal")


class Refused(Exception):
    """The launchers of this job cannot meet; the message says why."""


class Link:
    """A connection that carries messages, and never blocks. node: the number of this node, if it comes to node 0."""

    def __init__(self, connected: socket.socket, node: int | None = None) -> None:
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)  # a machine that is gone closes nothing
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
        self.here, self.there = _plain(connected.getsockname()[0]), "an address that is gone"
        with suppress(OSError):
            self.there = _plain(connected.getpeername()[0])
        token = hashlib.sha256(os.environ.get(KEY, "").encode()).digest()
        self._connection = Connection(connected, token, _LONGEST_MESSAGE, node)
        self.is_closed = False

    @property
    def node(self) -> int:
        """The number of the node that has come."""
        return self._connection.rank

    def is_open(self) -> bool:
        """Whether the other side has proved that it knows the key; takes the steps to it that are possible now."""
        with self._closing():
            self._connection.greet()
        return self._connection.is_open and not self.is_closed

    def send(self, **message: object) -> None:
        """Send a message; if the other side has gone, nothing."""
        with self._closing():
            self._connection.send(json.dumps(message).encode())

    def received(self) -> Iterator[Message]:
        """The messages that have come. Those that are not taken remain."""
        with self._closing():
            while (frame := self._connection.receive()) is not None:
                yield json.loads(frame)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the connection if it fails in the block."""
        try:
            yield
        except OSError:
            self.close()

    def close(self) -> None:
        self.is_closed = True
        self._connection.close()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")  # an IPv4 address, as a socket for both versions has it


class Meeting:
    """The launchers of the other nodes, as node 0 has them.

    nodes: how many there are, with this one.   about: what has to be the same on all nodes, "versions", and what tells this
    job from others, "job".   folder: for the socket of remote_shell.py.   say: writes a line for the user.
    Raises: Refused if the port is taken.
    """

    def __init__(self, nodes: int, port: int, about: Message, folder: Path, say: Callable[[str], None]) -> None:
        self._nodes, self._port, self._about, self._folder, self._say = nodes, port, about, folder, say
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self._door = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=nodes + 16)
        except OSError as error:
            raise Refused(f"cannot listen on port {port} for the other nodes ({error}): another job may have it") from error
        path = folder / "nodes"
        self._shells = socket.socket(socket.AF_UNIX)
        self._shells.bind(str(path))
        self._shells.listen(nodes)
        for listening in (self._door, self._shells):
            listening.setblocking(False)
        os.environ[SOCKET] = str(path)
        self._guests: dict[Link, float] = {}  # connections that have not said who they are, and until when they may
        self._links: dict[int, Link] = {}  # by node
        # By the number of the process: its node, and the connection of remote_shell.py, which waits for its end.
        self._asked: dict[int, tuple[int, socket.socket]] = {}
        self._processes = 0
        self._strangers = set[str]()
        self.addresses: list[str] = []  # of all nodes, since they were here; of this one, where the others reach it

    @property
    def missing(self) -> list[int]:
        """The nodes that have not come, or have gone."""
        return [node for node in range(1, self._nodes) if node not in self._links]

    def gather(self, limit_s: float, wait: Callable[[float], Signal | None]) -> Signal | None:
        """Wait until all nodes are here.   wait: for so many seconds; returns a signal that has come, which ends this as well.

        Raises: Refused if some do not come in time, or run other versions.
        """
        start, said = time.monotonic(), time.monotonic() - _SAY_EACH_S + _GREETING_S
        self.look()
        while self.missing:
            if (now := time.monotonic()) > start + limit_s:
                raise Refused(f"{self._missing()} within {limit_s:g} s (--join-timeout); each node starts shardrt.launch once")
            if now > said + _SAY_EACH_S:
                said = now
                self._say(f"{self._missing()} yet, after {now - start:.0f} s; listening on port {self._port}")
            if (signal := wait(0.1)) is not None:
                return signal
            self.look()
        self.addresses = [self._links[1].here, *(self._links[node].there for node in range(1, self._nodes))]
        return None

    def _missing(self) -> str:
        names = ", ".join(map(str, self.missing[:20])) + (", ..." if len(self.missing) > 20 else "")
        return f"node{'s' if len(self.missing) > 1 else ''} {names} of {self._nodes} did not come"

    def look(self) -> list[int]:
        """Do what has come from nodes and from remote_shell.py. Returns the signals that nodes have got. Never blocks."""
        for connected in _accepted(self._door):
            self._guests[Link(connected)] = time.monotonic() + _GREETING_S
        for link, until in list(self._guests.items()):
            if self._has_come(link, until):
                del self._guests[link]
        for shell in _accepted(self._shells):
            self._start(shell)
        signals = [number for node, link in list(self._links.items()) for number in self._hear(node, link)]
        for process, (node, _) in list(self._asked.items()):
            if node not in self._links:
                self._answer(process, code=255)  # as ssh does that has lost its connection
        return signals

    def _has_come(self, link: Link, until: float) -> bool:
        """Whether a guest has said who it is, or is none."""
        for message in link.received() if link.is_open() else ():
            self._greet(link, message)
            return True
        if not link.is_closed and time.monotonic() < until:
            return False
        link.close()
        self._drop(link, f"is none of a node of this job, or has another {KEY}")
        return True

    def _greet(self, link: Link, about: Message) -> None:
        node, job, versions = link.node, about.get("job"), about.get("versions")
        if job != self._about["job"]:
            link.send(refused=f"the launcher there starts another job: {self._about['job']}, not {job}")
            self._drop(link, f"is of another job: {job}")
        elif versions != self._about["versions"]:
            differ = f"nodes differ: node 0 has {self._about['versions']}; node {node} ({link.there}) has {versions}"
            link.send(refused=f"{differ}: install the same, at the same paths")
            raise Refused(f"{differ}: install the same, at the same paths")
        elif not 0 < node < self._nodes or node in self._links:
            link.send(refused=f"node {node} of {self._nodes} is here already: give each node its own number, from 0")
            self._drop(link, f"says that it is node {node} of {self._nodes}, which is here already")
        else:
            link.send(welcome=str(self._folder))
            self._links[node] = link

    def _drop(self, link: Link, why: str) -> None:
        if link.there not in self._strangers:
            self._strangers.add(link.there)
            self._say(f"dropped a connection from {link.there} to port {self._port}, which {why}")

    def _start(self, shell: socket.socket) -> None:
        """Start what remote_shell.py asks for, which it says as soon as it has connected."""
        shell.settimeout(_ASKING_S)
        with suppress(OSError, ValueError):  # it was killed, or asks for no node of this job
            asked = json.loads(shell.makefile().readline())
            host = asked["host"]
            node = int(host.removeprefix("node")) if host.startswith("node") else self.addresses.index(host)
            self._processes += 1
            self._asked[self._processes] = node, shell
            if node in self._links:
                self._links[node].send(run=self._processes, command=asked["command"])

    def _answer(self, process: int, code: int) -> None:
        _, shell = self._asked.pop(process)
        with shell, suppress(OSError):
            shell.sendall(json.dumps({"code": code}).encode() + b"\n")

    def _hear(self, node: int, link: Link) -> list[int]:
        signals = []
        for message in link.received():
            if "signal" in message:
                signals.append(int(message["signal"]))
            elif message["ended"] in self._asked:
                self._answer(message["ended"], int(message["code"]))
        if link.is_closed:
            del self._links[node]
            self._say(f"node {node} has gone: its launcher was killed, or its machine or network failed")
        return signals

    def over(self) -> None:
        """Let the nodes end what is left of the job, and say which have gone."""
        self.look()
        self._asked.clear()
        for link in self._links.values():
            link.send(over=True)

    def refuse(self, why: str) -> None:
        """Tell all nodes why there is no job."""
        for link in self._links.values():
            link.send(refused=why)

    def end(self, code: int) -> None:
        """Tell all nodes the job's exit code."""
        for link in self._links.values():
            link.send(end=code)
            link.close()
        self._door.close()
        self._shells.close()


def _accepted(listening: socket.socket) -> list[socket.socket]:
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(listening.accept()[0])
    return found

"""A launcher on each node, in the place of ssh: how they meet, and how that of node 0 lets the others start processes.

    node 0   shardrt.launch -> supervisor.py -> mpirun -> remote_shell.py   asks the supervisor to start a process on a node
    others   shardrt.launch -> visitor.py -> a proxy of mpirun -> ranks     comes to the supervisor, starts what it is asked to

The launchers of the other nodes connect to node 0, which listens on a port. Both sides prove, by an HMAC (RFC 2104) of a number
that the other one has drawn, that they know the same key; strangers are dropped. Then a message is a line of JSON.

to the supervisor                                  from it
node, number, proof, about: who comes, to what     number: for the proof
ended, code: a process has ended                   welcome: the folder of reports, and its proof
signal: one that the launcher of a node got        refused: why
                                                   run, command: a process, and what the shell is to run
                                                   over: mpirun has ended: end what is left of the job
                                                   end: the job's exit code
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

KEY = "SHARDRT_RENDEZVOUS_KEY"
SOCKET = "SHARDRT_NODES"  # where remote_shell.py finds the supervisor
_GREETING_S = 10.0  # for a node to say who it is
_SEND_S = 5.0
_LONGEST_LINE = 1 << 20
_SAY_EACH_S = 60.0
Message = dict[str, Any]
Signal = TypeVar("Signal")


class Refused(Exception):
    """The launchers of this job cannot meet; the message says why."""


def name_of(node: int) -> str:
    """The name of a node, as mpirun has it."""
    return f"node{node}"


def address_of(text: str) -> tuple[str, int]:
    """Host and port. Raises: ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"expected HOST:PORT, found {text!r}")
    return host.strip("[]"), int(port)


def proof(number: str, node: int, about: Message) -> str:
    """That this process knows the key, and sends what it sends as `node`, to whom has drawn `number`."""
    text = json.dumps([number, node, about], sort_keys=True)
    return hmac.new(os.environ.get(KEY, "").encode(), text.encode(), hashlib.sha256).hexdigest()


class Link:
    """A connection that carries messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""
        self.is_closed = False
        self.there = ""  # the address of the other side, if it is on a network
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:  # a machine that is gone closes nothing
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
            with suppress(OSError):  # it has gone
                self.there = _plain(connection.getpeername()[0])

    @property
    def here(self) -> str:
        """The address of this side."""
        return _plain(self._connection.getsockname()[0])

    def send(self, **message: object) -> None:
        """Send a message; if the other side has gone, nothing."""
        try:
            self._connection.settimeout(_SEND_S)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
            self._connection.setblocking(False)
        except OSError:
            self.close()

    def received(self) -> list[Message]:
        """The messages that have come. Never blocks. Raises: ValueError for what is none."""
        while not self.is_closed:
            try:
                data = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.close()
            self._rest += data
            if len(self._rest) > _LONGEST_LINE:
                raise ValueError("no message")
        *lines, self._rest = self._rest.split(b"\n")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("no message")
        return messages

    def close(self) -> None:
        self.is_closed = True
        self._connection.close()


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")  # an IPv4 address, as a socket for both versions has it


class _Guest:
    """A connection that has not said who it is."""

    def __init__(self, link: Link) -> None:
        self.link, self.number, self.until = link, secrets.token_hex(16), time.monotonic() + _GREETING_S
        link.send(number=self.number)


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
        self._guests: list[_Guest] = []
        self._links: dict[int, Link] = {}  # by node
        self._asking: list[Link] = []  # of remote_shell.py, that has said nothing yet
        self._asked: dict[int, tuple[int, Link]] = {}  # by the number of the process: its node, and who waits for its end
        self._processes = 0
        self._strangers = set[str]()

    @property
    def missing(self) -> list[int]:
        """The nodes that have not come, or have gone."""
        return [node for node in range(1, self._nodes) if node not in self._links]

    @property
    def address(self) -> str:
        """The address of this node, as the others see it."""
        return next(iter(self._links.values())).here

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
        return None

    def _missing(self) -> str:
        names = ", ".join(map(str, self.missing[:20])) + (", ..." if len(self.missing) > 20 else "")
        return f"node{'s' if len(self.missing) > 1 else ''} {names} of {self._nodes} did not come"

    def look(self) -> list[int]:
        """Do what has come from nodes and from remote_shell.py. Returns the signals that nodes have got. Never blocks."""
        self._guests += [_Guest(link) for link in _accepted(self._door)]
        self._asking += _accepted(self._shells)
        self._guests = [guest for guest in self._guests if not self._has_come(guest)]
        self._asking = [link for link in self._asking if not self._start(link)]
        signals = [number for node, link in list(self._links.items()) for number in self._hear(node, link)]
        for process, (node, shell) in list(self._asked.items()):
            if node not in self._links:
                shell.send(code=255)  # as ssh does that has lost its connection
                del self._asked[process]
        return signals

    def _has_come(self, guest: _Guest) -> bool:
        """Whether a guest has said who it is, or is none."""
        try:
            for message in guest.link.received():
                self._greet(guest, message)
                return True
        except (ValueError, KeyError, TypeError):
            guest.link.close()
        if not guest.link.is_closed and time.monotonic() < guest.until:
            return False
        guest.link.close()
        self._drop(guest.link.there, "is none of a node of this job")
        return True

    def _greet(self, guest: _Guest, message: Message) -> None:
        node, about, link = int(message["node"]), dict(message["about"]), guest.link
        where = link.there
        if not hmac.compare_digest(str(message["proof"]), proof(guest.number, node, about)):
            link.send(refused=f"the key of node 0 is another one: set {KEY} to the same on all nodes")
            self._drop(where, f"has another {KEY}")
        elif about["job"] != self._about["job"]:
            link.send(refused=f"the launcher there starts another job: {self._about['job']}, not {about['job']}")
            self._drop(where, f"is of another job: {about['job']}")
        elif about["versions"] != self._about["versions"]:
            ours, theirs = (" ".join(it["versions"]) for it in (self._about, about))
            text = f"nodes differ: node 0 has {ours}; node {node} ({where}) has {theirs}: install the same, at the same paths"
            link.send(refused=text)
            raise Refused(text)
        elif not 0 < node < self._nodes or node in self._links:
            link.send(refused=f"node {node} of {self._nodes} is here already: give each node its own number, from 0")
            self._drop(where, f"says that it is node {node} of {self._nodes}, which is here already")
        else:
            answer = {"reports": str(self._folder)}
            link.send(welcome=answer, proof=proof(str(message["number"]), 0, answer))
            self._links[node] = link

    def _drop(self, where: str, why: str) -> None:
        if where not in self._strangers:
            self._strangers.add(where)
            self._say(f"dropped a connection from {where} to port {self._port}, which {why}")

    def _start(self, shell: Link) -> bool:
        """Start what remote_shell.py asks for. Returns whether it has asked."""
        for message in shell.received():
            node = int(str(message["host"]).removeprefix(name_of(0)[:-1]))
            self._processes += 1
            self._asked[self._processes] = node, shell
            if node in self._links:
                self._links[node].send(run=self._processes, command=message["command"])
            return True
        return shell.is_closed

    def _hear(self, node: int, link: Link) -> list[int]:
        signals = []
        try:
            for message in link.received():
                if "signal" in message:
                    signals.append(int(message["signal"]))
                elif message["ended"] in self._asked:
                    self._asked.pop(message["ended"])[1].send(code=int(message["code"]))
        except (ValueError, KeyError, TypeError):
            link.close()
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


def _accepted(listening: socket.socket) -> list[Link]:
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(Link(listening.accept()[0]))
    return found

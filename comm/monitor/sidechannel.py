"""Exchange of the status table between nodes: each node's first rank sends its rows to rank 0 and receives those of all others.

It uses TCP, since MPI may be what hangs. Nothing here blocks: a node sends again only when rank 0 has replied.
"""

from __future__ import annotations

import secrets
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from .status_table import Table
from .timing import Timing

if TYPE_CHECKING:
    from mpi4py import MPI

_TOKEN_NBYTES = 16


@dataclass(frozen=True, slots=True)
class _Address:
    hosts: tuple[str, ...]
    port: int
    token: bytes  # to reject other processes


class SideChannel:
    """This rank's end of the connection. Collective over all ranks. nodes: the ranks of each node, that of rank 0 first."""

    def __init__(self, comm: MPI.Intracomm, table: Table, nodes: Sequence[Sequence[int]], timing: Timing) -> None:
        self._table = table
        self._interval_s = timing.interval_s
        self._node = next(node for node in nodes if comm.Get_rank() in node)
        self._clients: dict[Connection, Sequence[int]] = {}  # with the ranks of its node
        self._server: Connection | None = None
        self._awaiting = False
        self._next = 0.0
        listener = socket.create_server(("", 0), backlog=len(nodes)) if comm.Get_rank() == 0 else None
        address = comm.bcast(_announce(listener))
        if comm.Get_rank() in [node[0] for node in nodes[1:]]:
            self._server = _connect(address, comm.Get_rank(), timing.connect_s)
        connected = comm.allgather(self._server is not None)
        self.missing = [node[0] for node in nodes[1:] if not connected[node[0]]]
        if listener is not None:
            for rank, client in _accept(listener, address.token, sum(connected), timing.connect_s):
                self._clients[client] = next(node for node in nodes if rank in node)
            listener.close()

    def tick(self) -> None:
        """Send and receive what is pending. Called several times a second, by the first rank of each node."""
        try:
            if self._server is not None:
                self._exchange_rows(self._server)
        except (EOFError, OSError):
            self._server = None
        for client, node in list(self._clients.items()):
            try:
                if client.poll():
                    self._table.put_rows(node, zlib.decompress(client.recv_bytes()))
                    client.send_bytes(zlib.compress(self._table.rows(self._others(node)), 1))
            except (EOFError, OSError):
                del self._clients[client]

    def close(self) -> None:
        """Close the connections."""
        for connection in [*self._clients, *([self._server] if self._server else [])]:
            connection.close()

    def _exchange_rows(self, server: Connection) -> None:
        if self._awaiting and server.poll():
            self._table.put_rows(self._others(self._node), zlib.decompress(server.recv_bytes()))
            self._awaiting = False
        if not self._awaiting and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval_s
            server.send_bytes(zlib.compress(self._table.rows(self._node), 1))
            self._awaiting = True

    def _others(self, node: Sequence[int]) -> list[int]:
        return sorted(set(range(self._table.size)) - set(node))


def _announce(listener: socket.socket | None) -> _Address | None:
    """The addresses of rank 0: the one that it would use to reach other machines, then its host name."""
    if listener is None:
        return None
    hosts = [socket.gethostname()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address set aside for documentation; nothing is sent
            hosts.insert(0, probe.getsockname()[0])
        except OSError:
            hosts.append("127.0.0.1")
    return _Address(tuple(hosts), listener.getsockname()[1], secrets.token_bytes(_TOKEN_NBYTES))


def _connect(address: _Address, rank: int, timeout_s: float) -> Connection | None:
    for host in address.hosts:
        try:
            connected = socket.create_connection((host, address.port), timeout=timeout_s)
        except OSError:
            continue
        connected.settimeout(None)
        connection = Connection(connected.detach())
        connection.send_bytes(address.token + rank.to_bytes(8))
        return connection
    return None


def _accept(listener: socket.socket, token: bytes, count: int, timeout_s: float) -> Iterator[tuple[int, Connection]]:
    """The ranks that connected, and their connections."""
    while count:
        client = Connection(listener.accept()[0].detach())
        greeting = client.recv_bytes(len(token) + 8) if client.poll(timeout_s) else b""
        if secrets.compare_digest(greeting[: len(token)], token):
            yield int.from_bytes(greeting[len(token) :]), client
            count -= 1
        else:
            client.close()

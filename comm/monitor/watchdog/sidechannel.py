"""Exchange of the status table between nodes: each node's first rank sends its rows to rank 0 and receives those of all others.

It uses TCP, since MPI may be what hangs. Nothing here blocks but the start, which has a deadline: a node sends again only when
rank 0 has replied. Rank 0 listens during the start alone, on its addresses on the routes to the other nodes; the token that
lets a connection in (`link.py`) goes to the ranks through MPI. Strangers may connect, say anything or nothing, and are closed.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import selectors
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...ending.guard.link import TOKEN_NBYTES, Connection, LinkError
from ...ending.status_table import StatusTable
from ..timing import Timing

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_STRANGERS = 64  # connections that have not shown yet who they are, beside one for each node
_CONNECT_S = 2.0  # for an address that may not answer
_HANDSHAKE_S = 5.0
_RETRY_S = 0.1
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # set aside for documentation

Address = tuple[str, int]


class SideChannel:
    """This rank's end of the connections. Collective over all ranks. nodes: the ranks of each node, that of rank 0 first.

    missing: on rank 0, the first ranks of the nodes that could not be connected.
    """

    def __init__(self, comm: MPI.Intracomm, table: StatusTable, nodes: Sequence[Sequence[int]], timing: Timing) -> None:
        rank = comm.Get_rank()
        self._table = table
        self._interval_s = timing.interval_s
        self._node = next(node for node in nodes if rank in node)
        self._nodes = {node[0]: node for node in nodes}
        self._row_nbytes = len(table.rows([0]))
        self._clients: dict[int, Connection] = {}  # on rank 0, by the first rank of the node
        self._server: Connection | None = None  # on the first rank of any other node
        self._awaiting = False
        self._next = 0.0
        others = [node[0] for node in nodes[1:]]
        targets = _addresses(comm, rank in self._nodes)
        listeners = _listen(targets, len(nodes) + _MAX_STRANGERS) if rank == 0 else []
        addresses, token = comm.bcast(([at.getsockname()[:2] for at in listeners], secrets.token_bytes(TOKEN_NBYTES)))
        deadline = time.monotonic() + timing.connect_s
        # The largest frame has every row, should none of them compress.
        limit = 2 * self._row_nbytes * table.size + 1024
        if rank == 0:
            self._clients = accept(listeners, lambda sock: Connection(sock, token, limit), others, deadline)
        elif rank in others:
            self._server = connect(addresses, lambda sock: Connection(sock, token, limit, rank), deadline)
        self.missing = [first for first in others if first not in self._clients]

    def tick(self) -> None:
        """Send and receive what is pending. Called several times a second, by the first rank of each node. Raises nothing."""
        if self._server is not None:
            try:
                self._exchange_rows(self._server)
            except OSError:
                self._server.close()
                self._server = None
        for first, client in list(self._clients.items()):
            try:
                self._answer(client, self._nodes[first])
            except OSError:
                client.close()
                del self._clients[first]

    def close(self) -> None:
        """Close the connections."""
        for link in [*self._clients.values(), *([self._server] if self._server else [])]:
            link.close()

    def _exchange_rows(self, server: Connection) -> None:
        others = self._others(self._node)
        if (frame := server.receive()) is not None:
            self._table.put_rows(others, self._rows(frame, others))
            self._awaiting = False
        if not self._awaiting and (any(self._table.alarms()) or time.monotonic() >= self._next):
            self._next = time.monotonic() + self._interval_s
            server.send(zlib.compress(self._table.rows(self._node), 1))
            self._awaiting = True

    def _answer(self, client: Connection, node: Sequence[int]) -> None:
        if (frame := client.receive()) is not None:
            self._table.put_rows(node, self._rows(frame, node))
            client.send(zlib.compress(self._table.rows(self._others(node)), 1))

    def _rows(self, frame: bytes, ranks: Sequence[int]) -> bytes:
        """The rows of these ranks. Raises: LinkError for a frame that is anything else."""
        return inflate(frame, len(ranks) * self._row_nbytes)

    def _others(self, node: Sequence[int]) -> list[int]:
        return sorted(set(range(self._table.size)) - set(node))


def inflate(data: bytes, nbytes: int) -> bytes:
    """The `nbytes` that were compressed. Raises: LinkError for other data, without expanding more than that."""
    inflater = zlib.decompressobj()
    try:
        rows = inflater.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise LinkError(f"a frame that is not compressed: {error}") from None
    if len(rows) != nbytes or not inflater.eof or inflater.unused_data:
        raise LinkError(f"a frame that is not {nbytes} compressed bytes")
    return rows


# ---------------------------------------------------------------------- connecting


ConnectOn = Callable[[socket.socket], Connection]


def connect(addresses: Sequence[Address], link_on: ConnectOn, deadline: float) -> Connection | None:
    """A connection to the first of these addresses that proves to be rank 0's; None if none does before the deadline."""
    while addresses and time.monotonic() < deadline:
        for address in addresses:
            if (link := _try(address, link_on, deadline)) is not None:
                return link
        time.sleep(_RETRY_S)
    return None


def _try(address: Address, link_on: ConnectOn, deadline: float) -> Connection | None:
    with suppress(OSError):
        link = link_on(socket.create_connection(address, _CONNECT_S))
        deadline = min(deadline, time.monotonic() + _HANDSHAKE_S)
        with suppress(OSError), selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while not link.greet() and (left := deadline - time.monotonic()) > 0:
                selector.select(left)
        if link.is_open:
            return link
        link.close()
    return None


def accept(
    listeners: Sequence[socket.socket], link_on: ConnectOn, expected: Sequence[int], deadline: float
) -> dict[int, Connection]:
    """The connections of the expected ranks, those that came before the deadline. Closes the listeners, and all others."""
    found: dict[int, Connection] = {}
    with selectors.DefaultSelector() as selector:
        door = _Door(selector, link_on, len(expected) + _MAX_STRANGERS)
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        while listeners and len(found) < len(expected) and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link = door.let_in(key.fileobj) if isinstance(key.fileobj, socket.socket) else door.ask(key.data)
                if link is not None:
                    if link.rank in found:  # it has waited too long, and tries again
                        found.pop(link.rank).close()
                    found[link.rank] = link
        door.close()
    for listener in listeners:
        listener.close()
    return found


class _Door:
    """The connections that have not proved yet that they are of this job: any number may be silent, the rest goes on."""

    def __init__(self, selector: selectors.BaseSelector, link_on: ConnectOn, most: int) -> None:
        self._selector = selector
        self._link_on = link_on
        self._most = most
        self._strangers: list[Connection] = []  # the oldest first

    def let_in(self, listener: socket.socket) -> Connection | None:
        """Accept a connection, in the place of the oldest if there are too many. Returns: as `ask`."""
        if len(self._strangers) == self._most:
            self._close(self._strangers[0])
        try:
            link = self._link_on(listener.accept()[0])
        except OSError:  # it is closed already, or this process has no descriptors left
            return None
        self._strangers.append(link)
        self._selector.register(link, selectors.EVENT_READ, link)
        return self.ask(link)  # sends the challenge

    def ask(self, link: Connection) -> Connection | None:
        """Take the next steps of the handshake. Returns: the connection, once it is open."""
        if link not in self._strangers:  # it had to go in the meantime
            return None
        try:
            if not link.greet():
                return None
        except OSError:
            self._close(link)
            return None
        self._selector.unregister(link)
        self._strangers.remove(link)
        return link

    def close(self) -> None:
        """Close all that are left."""
        for link in list(self._strangers):
            self._close(link)

    def _close(self, link: Connection) -> None:
        self._selector.unregister(link)
        self._strangers.remove(link)
        link.close()


# ---------------------------------------------------------------------- addresses


def _addresses(comm: MPI.Intracomm, is_first: bool) -> list[str]:
    """The addresses by which the first ranks of the nodes may reach each other. Collective over all ranks.

    Nodes that share a loopback interface, as simulated ones do, use that.
    """
    places: list[tuple[str, str] | None] = comm.allgather((_network(), socket.gethostname()) if is_first else None)
    firsts = [place for place in places if place is not None]
    if len({network for network, _ in firsts}) == 1:
        return ["127.0.0.1"]
    _, host = firsts[0]
    found = comm.allgather(_own_addresses(host) if is_first and comm.Get_rank() != 0 else [])
    return list(dict.fromkeys(address for addresses in found for address in addresses))


def _network() -> str:
    """The same for processes that share a loopback interface."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.stat('/proc/self/ns/net').st_ino}"
    return secrets.token_hex()


def _own_addresses(host: str) -> list[str]:
    """The addresses of this machine: on its routes to `host` and to anywhere, and of its own name."""
    found = [source for target in [*_resolve(host), *_ANYWHERE] if (source := _source(target)) is not None]
    addresses = map(ipaddress.ip_address, [*found, *_resolve(socket.gethostname())])
    return [str(a) for a in addresses if not (a.is_loopback or a.is_link_local or a.is_unspecified)]


def _resolve(host: str) -> list[str]:
    with suppress(OSError, UnicodeError):
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []


def _source(target: str) -> str | None:
    """This machine's own address on the route to another one; None without a route. Nothing is sent."""
    with suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _listen(targets: Sequence[str], backlog: int) -> list[socket.socket]:
    """Sockets on this machine's addresses that lie on the routes to the targets."""
    listeners = []
    for address in dict.fromkeys(map(_source, targets)):
        with suppress(OSError):
            if address is not None:
                listeners.append(socket.create_server((address, 0), family=_family(address), backlog=backlog))
    for listener in listeners:
        listener.setblocking(False)
    return listeners


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

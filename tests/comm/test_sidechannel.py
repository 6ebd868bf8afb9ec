"""The connections between nodes, with strangers at the door: they may connect, say anything or nothing, and change nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import refused, run_script
from shardrt.comm.ending.guard.link import TOKEN_NBYTES, Connection, LinkError
from shardrt.comm.ending.status_table import StatusTable
from shardrt.comm.monitor.timing import Timing
from shardrt.comm.monitor.watchdog import sidechannel
from shardrt.comm.monitor.watchdog.sidechannel import SideChannel, accept, connect, inflate

TOKEN = bytes(range(TOKEN_NBYTES))
LIMIT = 10_000
NODES = ((0, 1), (2, 3), (4,))


def link_on(rank: int | None = None, token: bytes = TOKEN) -> Callable[[socket.socket], Connection]:
    return lambda connected: Connection(connected, token, LIMIT, rank)


def pair(token: bytes = TOKEN) -> tuple[Connection, Connection, socket.socket, socket.socket]:
    """An accepting and a connecting end, before the handshake, and their sockets."""
    one, other = socket.socketpair()
    return link_on()(one), link_on(3, token)(other), one, other


def shake_hands(accepting: Connection, connecting: Connection) -> None:
    assert not accepting.greet()
    assert not connecting.greet()
    assert accepting.greet()
    assert connecting.greet()


@pytest.fixture
def links() -> Iterator[tuple[Connection, Connection, socket.socket, socket.socket]]:
    """After the handshake."""
    accepting, connecting, one, other = pair()
    shake_hands(accepting, connecting)
    yield accepting, connecting, one, other
    accepting.close()
    connecting.close()


# ---------------------------------------------------------------------- one connection


def test_both_ends_prove_that_they_know_the_token(
    links: tuple[Connection, Connection, socket.socket, socket.socket],
) -> None:
    accepting, connecting, _, _ = links
    assert (accepting.is_open, connecting.is_open, accepting.rank) == (True, True, 3)
    for number in range(3):
        connecting.send(b"question %d" % number)
        assert accepting.receive() == b"question %d" % number
        accepting.send(b"")
        assert connecting.receive() == b""
    assert accepting.receive() is None
    accepting.close()
    refused("has closed", connecting.receive, LinkError)


def test_another_token_is_refused() -> None:
    accepting, connecting, _, other = pair(token=bytes(TOKEN_NBYTES))
    accepting.greet()
    connecting.greet()
    refused("not from a rank of this job", accepting.greet, LinkError)
    accepting.close()
    refused("closed", connecting.greet, OSError)
    assert not connecting.is_open
    other.close()


def test_the_token_is_never_sent() -> None:
    """Nor is anything that opens another connection: what one end has said is of no use with another challenge."""
    accepting, connecting, one, other = pair()
    accepting.greet()
    challenge = other.recv(1000)
    one.send(challenge)
    connecting.greet()
    answer = one.recv(1000)
    assert TOKEN[:8] not in challenge + answer
    replayed, _, _, stranger = pair()
    replayed.greet()
    stranger.send(answer)
    refused("not from a rank of this job", replayed.greet, LinkError)
    for end in (one, other, replayed, stranger):
        end.close()


def test_a_large_frame_arrives_in_pieces() -> None:
    one, other = socket.socketpair()
    accepting, connecting = Connection(one, TOKEN, 1 << 22), Connection(other, TOKEN, 1 << 22, 3)
    shake_hands(accepting, connecting)
    sent = os.urandom(1 << 22)
    connecting.send(sent)
    for _ in range(1000):
        if (frame := accepting.receive()) is not None:
            break
        connecting.receive()
    assert frame == sent
    one.close()
    other.close()


def test_frames_that_were_made_by_others_are_refused(
    links: tuple[Connection, Connection, socket.socket, socket.socket],
) -> None:
    accepting, connecting, one, other = links
    connecting.send(b"rows")
    frame = one.recv(1000)
    for forged in (frame[:-1] + bytes([frame[-1] ^ 1]), frame[:4] + b"ROWS" + frame[8:]):
        other.send(forged)
        with pytest.raises(LinkError):
            accepting.receive()
        accepting._protocol = accepting._receive_frames()
        accepting._needed = next(accepting._protocol)
    other.send(frame + frame)
    assert accepting.receive() == b"rows"
    with pytest.raises(LinkError, match="not from a rank"):
        accepting.receive()  # repeated
    one.send(frame)
    with pytest.raises(LinkError, match="not from a rank"):
        connecting.receive()  # returned


def test_lengths_are_bounded(links: tuple[Connection, Connection, socket.socket, socket.socket]) -> None:
    accepting, _, _, other = links
    other.send((LIMIT + 1).to_bytes(4))
    refused("a frame of 10001 bytes; expected at most 10000", accepting.receive, LinkError)
    bomb = zlib.compress(bytes(50_000_000), 9)
    begin = time.monotonic()
    for data in (bomb, b"", b"no zlib", zlib.compress(b"x" * 99), zlib.compress(b"x" * 101), zlib.compress(b"x" * 100)[:-1]):
        with pytest.raises(LinkError):
            inflate(data, 100)
    assert inflate(zlib.compress(b"x" * 100), 100) == b"x" * 100
    assert time.monotonic() - begin < 10.0


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_any_bytes_on_a_new_connection(pieces: list[bytes]) -> None:
    for accepts in (True, False):
        one, other = socket.socketpair()
        link = link_on(None if accepts else 3)(one)
        with suppress(OSError):
            for piece in pieces:
                other.send(piece)
                assert not link.greet()
        assert not link.is_open
        link.close()
        other.close()


@given(st.binary(max_size=300))
def test_any_bytes_on_an_open_connection(garbage: bytes) -> None:
    accepting, connecting, _, other = pair()
    shake_hands(accepting, connecting)
    other.send(garbage)
    with suppress(LinkError):
        assert accepting.receive() is None
    accepting.close()
    connecting.close()


# ---------------------------------------------------------------------- the door


def at_the_door(
    strangers: Callable[[sidechannel.Address], None], expected: Sequence[int] = (2, 4), seconds: float = 20.0
) -> dict[int, Connection]:
    """The connections that rank 0 accepts while strangers come first; those of the ranks are closed."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=10)
    listener.setblocking(False)
    address = listener.getsockname()[:2]
    deadline = time.monotonic() + seconds
    links: list[Connection | None] = []

    def come(rank: int) -> None:
        links.append(link := connect([address], link_on(rank), deadline))
        if link is not None:
            link.send(b"rows")  # at once: the accepting end may still be at the door

    threads = [threading.Thread(target=come, args=(rank,)) for rank in expected]
    strangers(address)
    for thread in threads:
        thread.start()
    found = accept([listener], link_on(), expected, deadline)
    for thread in threads:
        thread.join()
    assert all(link.receive() == b"rows" for link in found.values())
    for link in [*links, *found.values()]:
        if link is not None:
            link.close()
    return found


@settings(max_examples=40)  # Cost: a few ms each, with two threads
@given(st.lists(st.tuples(st.binary(max_size=120), st.sampled_from(["stay", "close", "reset"])), max_size=4))
def test_ranks_come_in_whatever_strangers_say(strangers: list[tuple[bytes, str]]) -> None:
    stay: list[socket.socket] = []

    def come(address: sidechannel.Address) -> None:
        for garbage, then in strangers:
            stranger = socket.create_connection(address)
            stranger.send(garbage)
            if then == "reset":
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if then == "stay":
                stay.append(stranger)
            else:
                stranger.close()

    assert set(at_the_door(come)) == {2, 4}
    for stranger in stay:
        stranger.close()


def test_silent_strangers_hold_nobody_up() -> None:
    silent: list[socket.socket] = []
    begin = time.monotonic()
    found = at_the_door(lambda address: silent.extend(socket.create_connection(address) for _ in range(8)))
    assert set(found) == {2, 4}
    assert time.monotonic() - begin < 10.0
    for stranger in silent:
        stranger.close()


def test_too_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest have to go."""
    monkeypatch.setattr(sidechannel, "_MAX_STRANGERS", 3)
    silent: list[socket.socket] = []
    assert set(at_the_door(lambda at: silent.extend(socket.create_connection(at) for _ in range(8)))) == {2, 4}
    for stranger in silent:
        stranger.close()


def test_the_start_has_a_deadline() -> None:
    begin = time.monotonic()
    assert connect([], link_on(2), begin + 60) is None
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a stranger in rank 0's place
        assert connect([silent.getsockname()[:2]], link_on(2), begin + 0.3) is None
    assert at_the_door(lambda address: None, expected=(), seconds=0.1) == {}
    listener = socket.create_server(("127.0.0.1", 0))
    assert accept([listener], link_on(), [2], time.monotonic() + 0.1) == {}
    assert listener.fileno() == -1
    assert time.monotonic() - begin < 50.0


# ---------------------------------------------------------------------- the channel


class Ranks:
    """The collectives that a channel's start needs, over threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def run(self, body: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = [None] * self._size

        def one(rank: int) -> None:
            results[rank] = body(Rank(self, rank))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        return results

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(20.0)
        found = list(self._values)
        self._barrier.wait(20.0)
        return found


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def Get_rank(self) -> int:
        return self._rank

    def allgather(self, value: Any) -> list[Any]:
        return self._ranks.gather(self._rank, value)

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]


ROW = 100


class Rows(StatusTable):
    """A table of small rows in this process alone; of other ranks' rows it knows nothing yet."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.seen = [b"?" * ROW] * size
        self.seen[rank] = bytes([rank]) * ROW

    def rows(self, ranks: Sequence[int]) -> bytes:
        return b"".join(self.seen[rank] for rank in ranks)

    def put_rows(self, ranks: Sequence[int], rows: bytes) -> None:
        for index, rank in enumerate(ranks):
            self.seen[rank] = rows[index * ROW :][:ROW]

    def alarms(self) -> bytes:
        return bytes(self.size)


@pytest.fixture
def channels() -> Iterator[tuple[list[SideChannel], list[Rows]]]:
    """Of every rank of three nodes."""
    size = sum(map(len, NODES))
    tables = [Rows(size, rank) for rank in range(size)]
    timing = Timing(interval_s=0.0, connect_s=10.0)
    channels = Ranks(size).run(lambda comm: SideChannel(comm, tables[comm.Get_rank()], NODES, timing))
    yield channels, tables
    for channel in channels:
        channel.close()


def tick(channels: list[SideChannel], times: int = 6) -> None:
    for _ in range(times):
        for rank in (2, 4, 0):
            channels[rank].tick()


def test_nodes_exchange_their_rows(channels: tuple[list[SideChannel], list[Rows]]) -> None:
    ends, tables = channels
    assert ends[0].missing == []
    tick(ends)
    for rank in (0, 2, 4):
        assert [tables[rank].seen[first][:1] for first in (0, 2, 4)] == [b"\0", b"\2", b"\4"]
    ends[4].close()
    tick(ends)  # the others go on
    tables[2].seen[2] = b"new" + bytes(ROW - 3)
    tick(ends)
    assert tables[0].seen[2][:3] == b"new"


@pytest.mark.parametrize("garbage", [b"garbage", b"\xff" * 500, b"\0" * 500])
def test_garbage_ends_a_connection_and_no_more(channels: tuple[list[SideChannel], list[Rows]], garbage: bytes) -> None:
    ends, tables = channels
    tick(ends)
    before = list(tables[0].seen)
    for sender in (ends[2]._server, ends[0]._clients[4]):
        assert sender is not None
        sender._socket.send(garbage)
    tick(ends)
    assert tables[0].seen == before
    assert ends[0]._clients == {}


def test_frames_of_a_wrong_size_end_a_connection(channels: tuple[list[SideChannel], list[Rows]]) -> None:
    """As of a node with another number of ranks."""
    ends, tables = channels
    server = ends[2]._server
    assert server is not None
    server.send(zlib.compress(b"x" * 100))
    tick(ends)
    assert set(ends[0]._clients) == {4}
    assert tables[0].seen[2] == b"?" * ROW


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine the loopback interface; else the addresses on the routes, none of which is of this machine alone."""
    assert Ranks(2).run(lambda comm: sidechannel._addresses(comm, True)) == [["127.0.0.1"]] * 2
    networks = iter(("one", "another"))
    monkeypatch.setattr(sidechannel, "_network", lambda: next(networks))
    monkeypatch.setattr(sidechannel, "_resolve", lambda host: ["127.0.1.1", "10.9.8.7", "fe80::1", "10.9.8.7"])
    monkeypatch.setattr(sidechannel, "_source", lambda target: {"10.9.8.7": "10.9.8.6", "127.0.1.1": "127.0.0.1"}.get(target))
    assert Ranks(2).run(lambda comm: sidechannel._addresses(comm, True)) == [["10.9.8.6", "10.9.8.7"]] * 2
    monkeypatch.undo()
    (listener,) = sidechannel._listen(["127.0.0.1", "127.0.0.1", "no address"], 1)
    assert listener.getsockname()[0] == "127.0.0.1"
    listener.close()


# ---------------------------------------------------------------------- a job


ATTACKED = """
import os, socket, threading
create = socket.create_server

def attack(address):
    for garbage in (b"", b"x" * 200, b"\\0" * 4, b"\\xff" * 68):
        stranger = socket.create_connection(address)
        stranger.send(garbage)
        kept.append(stranger)
        socket.create_connection(address).close()

def create_server(address, **options):
    server = create(address, **options)
    if threading.current_thread() is threading.main_thread():
        os.write(1, f"listens on {server.getsockname()[0]}\\n".encode())
        attack(server.getsockname())
    return server

kept = []
socket.create_server = create_server
import shardrt
world = shardrt.init("cpu")
world.barrier()
os.write(1, f"rank {world.rank} of {world.nodes} nodes\\n".encode())
"""


@pytest.mark.mpi
def test_strangers_during_init() -> None:
    """They neither end the job nor hold it up."""
    done = run_script(ATTACKED, 2, SHARDRT_RANKS_PER_NODE="1")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert sorted(done.stdout.splitlines()) == ["listens on 127.0.0.1", "rank 0 of 2 nodes", "rank 1 of 2 nodes"]

"""An authenticated connection: both ends prove that they know the job's token, then every frame carries a code of its own.

    accepting end                           connecting end
    challenge, 32 random bytes       ->
                                     <-     rank, nonce of 32 random bytes, HMAC(token, "connect" + all of these)
    HMAC(token, "accept" + the same) ->
    frames                          <->     frames

The token is never sent. A frame is its length, its bytes, and their HMAC with a key made of the token and both nonces, with the
frame's number and direction: a frame of another connection, a repeated, changed or returned one ends the connection. What an
end has to read next is known to the byte, and bounded, so that no more than that is ever kept. HMAC is that of RFC 2104, with
SHA-256. Frames are not secret.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections import deque
from collections.abc import Generator
from itertools import count

TOKEN_NBYTES = 32
_NONCE_NBYTES = 32
_MAC_NBYTES = 32
_RANK_NBYTES = 4
_LENGTH_NBYTES = 4
_CHUNK_NBYTES = 1 << 16

Protocol = Generator[int, bytes, None]  # yields how many bytes it has to read next, and is sent them


class LinkError(ConnectionError):
    """The other end has closed the connection, or is not what it should be."""


class Connection:
    """One end of a connection, which never blocks. The socket is the connection's own.

    rank: that of the connecting end; None on the accepting end, which learns it (-1 until then).   limit: bytes of the largest
    frame to accept.
    Every method but `close` raises OSError when the connection has failed; the owner closes it then.
    """

    def __init__(self, connected: socket.socket, token: bytes, limit: int, rank: int | None = None) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._token = token
        self._limit = limit
        self._key = b""  # set when the other end has proved that it knows the token
        self._sent = count()
        self._unsent = bytearray()
        self._unread = bytearray()
        self._frames: deque[bytes] = deque()
        self.rank = -1 if rank is None else rank
        self._is_accepting = rank is None
        self._protocol = self._accept() if rank is None else self._connect(rank)
        self._needed = next(self._protocol)

    @property
    def is_open(self) -> bool:
        """True once the other end has proved that it knows the token."""
        return bool(self._key)

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def greet(self) -> bool:
        """Take the steps of the handshake that are possible now. Returns: `is_open`."""
        self._flush()
        while not self.is_open and self._read():
            self._advance()
        return self.is_open

    def send(self, frame: bytes) -> None:
        """Send a frame, or what can be sent of it now; `receive` sends the rest."""
        body = len(frame).to_bytes(_LENGTH_NBYTES) + frame
        self._unsent += body + self._code(next(self._sent), self._is_accepting, body)
        self._flush()

    def receive(self) -> bytes | None:
        """The next frame, or None while it has not arrived."""
        self._flush()
        while not self._frames and self._read():
            self._advance()
        return self._frames.popleft() if self._frames else None

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # ------------------------------------------------------------------ the protocol

    def _accept(self) -> Protocol:
        challenge = secrets.token_bytes(_NONCE_NBYTES)
        self._unsent += challenge
        answer = yield _RANK_NBYTES + _NONCE_NBYTES + _MAC_NBYTES
        known = challenge + answer[:-_MAC_NBYTES]
        self._verify(answer[-_MAC_NBYTES:], _hmac(self._token, b"connect", known))
        self.rank = int.from_bytes(answer[:_RANK_NBYTES])
        self._unsent += _hmac(self._token, b"accept", known)
        self._key = _hmac(self._token, b"key", known)
        yield from self._receive_frames()

    def _connect(self, rank: int) -> Protocol:
        challenge = yield _NONCE_NBYTES
        own = rank.to_bytes(_RANK_NBYTES) + secrets.token_bytes(_NONCE_NBYTES)
        known = challenge + own
        self._unsent += own + _hmac(self._token, b"connect", known)
        self._verify((yield _MAC_NBYTES), _hmac(self._token, b"accept", known))
        self._key = _hmac(self._token, b"key", known)
        yield from self._receive_frames()

    def _receive_frames(self) -> Protocol:
        for number in count():
            head = yield _LENGTH_NBYTES
            length = int.from_bytes(head)
            if length > self._limit:
                raise LinkError(f"a frame of {length} bytes; expected at most {self._limit}")
            rest = yield length + _MAC_NBYTES
            frame = rest[:-_MAC_NBYTES]
            self._verify(rest[-_MAC_NBYTES:], self._code(number, not self._is_accepting, head + frame))
            self._frames.append(frame)

    def _code(self, number: int, from_accepting: bool, body: bytes) -> bytes:
        return _hmac(self._key, b"frame", from_accepting.to_bytes() + number.to_bytes(8), body)

    def _verify(self, found: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(found, expected):
            raise LinkError("what has come is not from a rank of this job")

    def _advance(self) -> None:
        """Give the protocol what it needs, and learn what it needs next."""
        message = bytes(self._unread)
        self._unread.clear()
        self._needed = self._protocol.send(message)
        self._flush()

    # ------------------------------------------------------------------ the socket

    def _read(self) -> bool:
        """Read what is there of the bytes that are needed next; True when they are complete."""
        try:
            while missing := self._needed - len(self._unread):
                chunk = self._socket.recv(min(missing, _CHUNK_NBYTES))
                if not chunk:
                    raise LinkError("the other end has closed the connection")
                self._unread += chunk
        except BlockingIOError:
            return False
        return True

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return


def _hmac(key: bytes, *parts: bytes) -> bytes:
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        code.update(part)
    return code.digest()

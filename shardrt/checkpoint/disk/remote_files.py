"""Files in a remote store: written from the beginning to the end, and read in ranges, several at a time for large reads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from .errors import CheckpointError
from .files import Bytes, Reader, Writer, explained, nobody
from .remote_path import RemotePath, request

_RANGE = 8 << 20  # bytes of each request, if a read makes several at once, and of each write
_AHEAD, _MOST_AHEAD = 1 << 20, 1 << 24  # bytes of a block that serves small reads: at first, and at most


class RemoteWriter(Writer):
    """A new file, which most stores show only when it is closed. `write` copies the bytes: fsspec sends them in large parts."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.nbytes = 0
        with explained("create", path), request("create", path):
            self._file = path.fs.open(path.path, "wb")

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        for buffer in (bytes(offset - self.nbytes), *buffers):
            for start in range(0, len(buffer), _RANGE):
                with explained("write", self.path), request("write", self.path):
                    self._file.write(memoryview(buffer)[start : start + _RANGE])
            self.nbytes += len(buffer)

    def flush(self) -> None:
        """Do nothing: `write` has copied all buffers."""

    def close(self) -> None:
        with explained("write", self.path), request("write the end of", self.path):
            self._file.close()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(Exception), request("close", self.path):  # an incomplete file, which no checkpoint will refer to
                self._file.close()


class RemoteReader(Reader):
    """A file that is read in ranges: large ones straight into place, small ones through a block that is kept.

    Cost: a request for the file's size, and one or more for each read that the block cannot serve. Blocks grow from 1 to 16
    MiB while reads go on where the last block ends; after any other read, the block has 1 MiB again.
    """

    window = 64 << 20  # bytes of a read, which is made in several ranges at once

    def __init__(self, path: RemotePath) -> None:
        self.path: RemotePath = path
        self.nbytes = 0
        self.told = nobody
        self._fs, self._file = path.fs, path.path
        with explained("open", path):
            self._size = path.size()
        self._start, self._block = 0, b""
        self._ahead = _AHEAD

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._check_end(offset, sum(map(len, buffers)), max(0, self._size - offset))
        for buffer in buffers:
            if len(buffer) < _AHEAD:
                buffer[:] = self._kept(offset, len(buffer))
            else:
                place = 0
                for found in self._ranges(offset, offset + len(buffer)):
                    buffer[place : place + len(found)] = found
                    place += len(found)
            offset += len(buffer)

    def size(self) -> int:
        return self._size

    def close(self) -> None:
        """Do nothing: no file is open, as each request names it."""

    def _kept(self, offset: int, nbytes: int) -> bytes:
        """These bytes from the block. If they do not all lie in it, another block is read first."""
        end = self._start + len(self._block)
        if offset < self._start or offset + nbytes > end:
            goes_on = self._start < offset <= end + self._ahead
            self._ahead = min(2 * self._ahead, _MOST_AHEAD) if goes_on else _AHEAD
            self._start = offset
            self._block = b"".join(self._ranges(offset, min(offset + self._ahead, self._size)))
        place = offset - self._start
        return self._block[place : place + nbytes]

    def _ranges(self, start: int, stop: int) -> list[bytes]:
        """These bytes, in pieces of at most 8 MiB. A store with asynchronous requests fetches all pieces at the same time."""
        starts = list(range(start, stop, _RANGE))
        stops = [min(each + _RANGE, stop) for each in starts]
        with explained("read", self.path), request("read", self.path):
            found: list[bytes] = self._fs.cat_ranges([self._file] * len(starts), starts, stops, on_error="raise")
        nbytes = sum(map(len, found))
        self._count(nbytes)
        if nbytes != stop - start:  # no damage: the file has them, and a run must not put the checkpoint aside
            raise CheckpointError(
                f"cannot read {self.path.url!r}: the store has answered with {nbytes} of {stop - start} bytes at {start}, of "
                f"{self._size} that it says the file has; try again"
            )
        return found

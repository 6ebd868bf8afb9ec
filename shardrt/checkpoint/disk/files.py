"""Files of checkpoints: written and read in few large calls, straight from memory and into it."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType

import torch

from .errors import CheckpointError, DamagedCheckpointError
from .remote_path import Location

Bytes = bytes | bytearray | memoryview

Told = Callable[[int], object]

METADATA = ".metadata"  # the file that makes a folder a checkpoint

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_CALL_BYTES = 4 << 20  # `Writer` makes a call at this many bytes, while the caches still hold them
_PADDING = bytes(64)  # fills the gaps between aligned items
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None)

_ADVICE = {
    errno.ENOSPC: "free space, or save elsewhere",
    errno.EDQUOT: "the quota is used up: free space, or save elsewhere",
    errno.EFBIG: "files may not be this large here: see `ulimit -f`",
    errno.EROFS: "the file system is read-only: save elsewhere",
    errno.EACCES: "this user may not write or read there",
    errno.EPERM: "this user may not write or read there",
    errno.ENOENT: "the folder has gone, or is not on a file system that all ranks share",
    errno.EEXIST: "another job writes there, or wrote there on a file system that is not the one of rank 0",
    errno.ENOTDIR: "a file is where a folder should be",
}


@contextmanager
def explained(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the `with` block into a CheckpointError that says what failed, why, and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "see the file system's log")
        raise CheckpointError(f"cannot {action} {os.fspath(path)!r}: {error.strerror or error}; {advice}") from error


def nobody(nbytes: int) -> None:
    """Take no notice."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a CPU tensor as bytes, which keep it alive. It has no gaps; its dims may lie in any order."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class Writer(AbstractContextManager["Writer"]):
    """One file, written in few large calls; `close` returns when its bytes have reached the disk.

    new: the file must not exist yet; False: it exists, and other ranks may write to other places of it.
    Buffers for adjacent or almost adjacent places go into one call. They are not copied, and have to stay as they are until
    `flush` or `close`. An exception in the `with` block closes the file as it is.
    Raises: CheckpointError with the system's reason, from every method.
    """

    def __init__(self, path: Path, *, new: bool = True) -> None:
        self.path: Location = path
        self._new = new
        self.nbytes = 0  # that were handed to the system
        self._waiting: list[Bytes] = []
        self._waiting_bytes = 0
        self._start = 0  # where the waiting buffers go in the file
        with explained("create" if new else "open", path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0), 0o666)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Write buffers one after the other from `offset` on. Offsets ascend from call to call."""
        gap = offset - self._start - self._waiting_bytes
        # Hazard: the gaps of a file that several ranks write are not this rank's to fill.
        if self._waiting and self._new and 0 < gap < len(_PADDING):
            self._waiting.append(_PADDING[:gap])
            self._waiting_bytes += gap
        elif self._waiting and gap:
            self.flush()
        if not self._waiting:
            self._start = offset
        for buffer in buffers:
            self._waiting.append(buffer)
            self._waiting_bytes += len(buffer)
            if self._waiting_bytes >= _CALL_BYTES or len(self._waiting) == _IOV_MAX:
                self.flush()

    def flush(self) -> None:
        """Hand the waiting buffers to the system; they may change afterwards."""
        with explained("write", self.path):
            _transfer(os.pwritev, self._fd, self._waiting, self._start)
        # Cost: this call halves the time of a save, as the disk works while the next bytes come. If it fails, fsync does all.
        # Short runs are left to fsync: in a shared file, the call would make a save take several times as long.
        if self._waiting_bytes >= _CALL_BYTES:
            start, nbytes = ctypes.c_int64(self._start), ctypes.c_int64(self._waiting_bytes)
            _libc.sync_file_range(self._fd, start, nbytes, _SYNC_FILE_RANGE_WRITE)
        self.nbytes += self._waiting_bytes
        self._start += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        """Write the waiting buffers, and wait until the file's bytes have reached the disk."""
        try:
            self.flush()
            with explained("sync", self.path):
                os.fsync(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        with explained("close", self.path):  # NFS reports errors of earlier writes here
            os.close(self._fd)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            os.close(self._fd)


class Reader(AbstractContextManager["Reader"]):
    """One file, read at any place straight into memory. `nbytes` counts what was read, and `told` is called with it.

    Raises: CheckpointError with the system's reason, or if the file ends before what is asked for.
    """

    window = 1 << 20  # bytes to read at a time: what the caches hold until they are verified

    def __init__(self, path: Path) -> None:
        self.path: Location = path
        self.nbytes = 0
        self.told: Told = nobody
        with explained("open", path):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for a writer
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{os.fspath(path)!r} is no regular file")

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill writable buffers, one after the other, from `offset` on."""
        with explained("read", self.path):
            done = _transfer(os.preadv, self._fd, buffers, offset)
        self._count(done)
        self._check_end(offset, sum(len(buffer) for buffer in buffers), done)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """The `nbytes` bytes at `offset`."""
        # This comes first, so that no memory is allocated for a size that a damaged file gives.
        self._check_end(offset, nbytes, max(0, self.size() - offset))
        found = bytearray(nbytes)
        self.read_into(offset, [memoryview(found)])
        return found

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.told(nbytes)

    def _check_end(self, offset: int, wanted: int, found: int) -> None:
        """Raise CheckpointError if fewer bytes were found than wanted."""
        if found < wanted:
            raise DamagedCheckpointError(
                f"{os.fspath(self.path)!r} is damaged: expected {wanted} bytes at {offset}, found {found} before its end. "
                "Load an older checkpoint"
            )

    def size(self) -> int:
        """Bytes of the file."""
        with explained("read", self.path):
            return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, buffers: Sequence[Bytes], offset: int) -> int:
    """Read or write all of the buffers, in as many calls as it takes; returns the bytes moved, fewer at a file's end.

    Hazard: one call moves at most IOV_MAX buffers and about 2 GiB, and may stop anywhere before, inside a buffer too.
    """
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first, done = 0, 0
    while first < len(left):
        moved = call(fd, left[first : first + _IOV_MAX], offset + done)
        if not moved:
            break
        done += moved
        while first < len(left) and moved >= len(left[first]):
            moved -= len(left[first])
            first += 1
        if moved:
            left[first] = left[first][moved:]
    return done

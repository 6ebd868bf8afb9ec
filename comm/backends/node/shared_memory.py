"""Windows, in which the ranks of one node access each other's memory: buffers, barrier and small messages."""

from __future__ import annotations

import logging
import pickle
import socket
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import NamedTuple, TypeVar

import torch
from mpi4py import MPI

from ...core.calls import Interrupted
from ..meeting import LEFT, QUIT
from ..objects import gather_objects
from ..waiting import looks
from .memory_files import fence, map_file, opened, tensor_in

T = TypeVar("T")

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_WORDS_NBYTES = 64
_SIZE_NBYTES = 8
_SPINS = 200  # 15 us


class WindowOffset(NamedTuple):
    """The position of a tensor in the node's windows: valid on every rank, though windows are mapped at different addresses."""

    window: int
    offset: int  # bytes from the start of its rank's part


def aligned_size(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a window."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def aligned_down(nbytes: int) -> int:
    """`nbytes` rounded down to the alignment of a window."""
    return nbytes // _ALIGNMENT * _ALIGNMENT


class NodeWindows:
    """The shared memory of one node: windows, each with a part for every rank."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._parts: list[list[torch.Tensor]] = []  # each rank's part of each window, as bytes
        self._starts: list[tuple[int, int, int]] = []  # address, bytes and window of this rank's parts, sorted
        self.fence = fence()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """This rank's part of a new window, as bytes; None, on every rank, if there is too little memory.

        Collective, with the same size. Cost: 0.6 to 0.8 ms a MB, for the pages.
        """
        parts, each = None, aligned_size(max(nbytes, 1))
        with opened(self._comm, self._comm.Get_size() * each) as path:
            if path is not None:
                with suppress(OSError, RuntimeError):  # where address space is limited
                    mapped = map_file(path, self._comm.Get_size() * each, shared=True)
                    parts = [tensor_in(mapped, rank * each, each) for rank in range(self._comm.Get_size())]
            mine = None if parts is None else parts[self._comm.Get_rank()]
            everywhere = min(gather_objects(self._comm, mine is not None and reserve(_bytes_of(mine))))
        if not everywhere or parts is None or mine is None:
            if self._comm.Get_rank() == 0:
                _warn_of_no_space()
            return None
        self._starts = sorted([*self._starts, (mine.data_ptr(), mine.numel(), len(self._parts))])
        self._parts.append(parts)
        return mine[:nbytes]

    def use(self, comm: MPI.Comm) -> None:
        """Allocate over `comm`, which has the same ranks, from now on."""
        self._comm = comm

    def find(self, tensor: torch.Tensor) -> WindowOffset | None:
        """The window offset of `tensor`; None if it is in no window."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address, key=lambda start: start[0]) - 1
        if at < 0:
            return None
        begin, nbytes, window = self._starts[at]
        return WindowOffset(window, address - begin) if address < begin + nbytes else None

    def view(self, rank: int, start: WindowOffset, dtype: torch.dtype, first: int, numel: int) -> torch.Tensor:
        """`numel` elements in the memory of `rank`, from `first` elements after `start`."""
        begin = start.offset + first * dtype.itemsize
        return self._parts[start.window][rank][begin : begin + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Let the windows go. Their memory is freed when no rank has tensors in it any more."""
        self._parts.clear()
        self._starts.clear()


def reserve(mapping: memoryview) -> bool:
    """Fill a shared mapping with zeros, so that all of its pages get memory now; False if there is none.

    Hazard: a process that touches a page for which there is no memory is killed, by SIGBUS. A system call that does so fails.
    """
    filled = 0
    try:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            while filled < len(mapping):
                filled += zeros.readinto(mapping[filled:])
    except OSError:
        return False
    return True


@cache
def _warn_of_no_space() -> None:
    """Warn, once in a process."""
    _log.warning(
        "host %s has too little memory for what its ranks share: collectives of communicators and buffers made from now on "
        "copy",
        socket.gethostname(),
    )


class SharedMemoryExchange:
    """Intra-node barrier and small-message exchange in shared memory.

    Each rank owns three words (the number of the last barrier that it has reached, and a fingerprint for each of two barriers
    in turn) and two message buffers. A rank that reaches a barrier has finished reading from the previous one, so two buffers
    are enough. Cost of a barrier: 1 us.
    """

    @classmethod
    def create(cls, comm: MPI.Comm, capacity: int, label: str) -> SharedMemoryExchange | None:
        """Create an exchange for messages of up to `capacity` bytes in all. Collective; None if there is no space for it.

        label: how messages name the communicator.
        """
        windows = NodeWindows(comm)
        return None if windows.allocate(_WORDS_NBYTES + 2 * capacity) is None else cls(comm, windows, capacity, label)

    def __init__(self, comm: MPI.Comm, windows: NodeWindows, capacity: int, label: str) -> None:
        self._comm, self._windows, self.capacity, self._label = comm, windows, capacity, label
        self.fence = self._windows.fence
        ranks = range(comm.Get_size())
        words = [_bytes_of(self._part(rank, 0, _WORDS_NBYTES)).cast("q") for rank in ranks]
        self._rank = comm.Get_rank()
        self._own = words.pop(self._rank)
        self._others = words
        starts = (_WORDS_NBYTES, _WORDS_NBYTES + capacity)
        self._buffers = [[_bytes_of(self._part(rank, start, capacity)) for rank in ranks] for start in starts]
        self._outgoing = [buffers[comm.Get_rank()] for buffers in self._buffers]
        self._addresses = [[self._part(rank, start, capacity).data_ptr() for rank in ranks] for start in starts]
        self._views = lru_cache(maxsize=1024)(self._make_views)
        self._view = lru_cache(maxsize=256)(self._make_view)
        self.reached = self._own[0] = 0
        self._left = 0
        comm.Barrier()

    def _part(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        return self._windows.view(rank, WindowOffset(0, start), torch.uint8, 0, nbytes)

    def barrier(self, fingerprint: int = 0) -> bool:
        """Wait until every rank has reached the barrier; True if all have the same fingerprint, which is not negative.

        Raises: Interrupted, on every rank that waits, if one has left.
        """
        if self._left:
            raise Interrupted(self._label, [self._rank], self._left == QUIT)
        self.reached = barrier = self.reached + 1
        turn = _turn(barrier)
        self._own[turn] = fingerprint
        self.fence()
        self._own[0] = barrier
        same = True
        for words in self._others:
            if words[0] < barrier:
                self._wait(words, barrier)
            self.fence()
            same = words[turn] == fingerprint and same
        if not same and (left := self._who_left(turn)):
            # Hazard: this rank may have found it out one barrier early (see `leave`), and others wait for it in the next one.
            self.leave(LEFT if any(words[turn] == LEFT for words in self._others) else QUIT)
            raise Interrupted(self._label, left, self._left == QUIT)
        return same

    def leave(self, word: int = LEFT) -> None:
        """Reach the next barrier without waiting in it; it is no barrier, and raises Interrupted on those that wait in it.

        With QUIT, an exception may have taken this rank out of the wait in the barrier that it has reached: the others raise
        Interrupted there as well. Those that have not read this rank's fingerprint of the barrier before, which is
        overwritten, raise it there.
        """
        if not self._left:
            barrier = self.reached
            self.reached = barrier + 1
            if word == QUIT:
                self._own[_turn(barrier)] = word
            self._own[_turn(barrier + 1)] = word
            self.fence()
            self._own[0] = barrier + 1
            self._left = word

    def rejoin(self, reached: int) -> None:
        """Wait in barriers again. Every rank has left; `reached` is the highest number of barriers that one has reached.

        They differ if a signal handler has raised an exception while its rank waited in a barrier, which others never reached.
        """
        self.reached = self._own[0] = reached
        self._left = 0

    def _who_left(self, turn: int) -> list[int]:
        return [at + (at >= self._rank) for at, words in enumerate(self._others) if words[turn] in (LEFT, QUIT)]

    def swap(self, messages: Sequence[MPI.buffer]) -> Sequence[int]:
        """Write messages for the other ranks, which write as many of the same sizes; returns the offset of each.

        Each message takes `aligned_size`, all together at most the capacity. They stay until the barrier after the next.
        """
        buffer, end, starts = self._outgoing[(self.reached + 1) & 1], 0, []
        for message in messages:
            starts.append(end)
            buffer[end : end + len(message)] = message  # type: ignore[call-overload]
            end += aligned_size(len(message))
        self.barrier()
        return starts

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order.

        No rank waits for one that has left after the last barrier: by then, what it had to write was there.
        Raises: as barrier.
        """
        own, found, first, most = pickle.dumps(value), [bytearray() for _ in self._buffers[0]], 0, 1
        step = self.capacity - _SIZE_NBYTES
        while first < most:
            outgoing, part = self._outgoing[(self.reached + 1) & 1], own[first : first + step]
            outgoing[: _SIZE_NBYTES + len(part)] = len(own).to_bytes(_SIZE_NBYTES, "little") + part
            self.barrier()
            for data, buffer in zip(found, self._buffers[self.reached & 1], strict=True):
                size = int.from_bytes(buffer[:_SIZE_NBYTES], "little")
                data += buffer[_SIZE_NBYTES:][: min(step, size - len(data))]
                most = max(most, size)
            first += step
        return [pickle.loads(data) for data in found]

    def gather(self, out: MPI.buffer, start: int, nbytes: int) -> None:
        """Copy every rank's message at offset `start` to `out`, in rank order."""
        into = memoryview(out)  # type: ignore[arg-type]
        for rank, buffer in enumerate(self._buffers[self.reached & 1]):
            into[rank * nbytes : (rank + 1) * nbytes] = buffer[start : start + nbytes]

    def rows(self, start: int, dtype: torch.dtype, first: int, numel: int) -> Sequence[torch.Tensor]:
        """`numel` elements of every rank's message at offset `start`, from `first` on."""
        return self._views(self.reached & 1, dtype, start // dtype.itemsize + first, numel)

    def row(self, rank: int, start: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements of the message of `rank` at offset `start`."""
        return self._view(rank, self.reached & 1, dtype, start // dtype.itemsize, numel)

    def outgoing_address(self) -> int:
        """The address of this rank's buffer until the next barrier. Others read it from then on until the one after."""
        return self._addresses[(self.reached + 1) & 1][self._rank]

    def incoming_address(self, rank: int) -> int:
        """The address of what `rank` wrote before the last barrier, until the next one."""
        return self._addresses[self.reached & 1][rank]

    def close(self) -> None:
        """Let the memory go, also if something still refers to a communicator that is closed."""
        for views in (self._others, self._outgoing, *self._buffers):
            views.clear()
        self._own = memoryview(b"")
        self._views.cache_clear()
        self._view.cache_clear()
        self._windows.close()

    def _make_views(self, turn: int, dtype: torch.dtype, first: int, numel: int) -> Sequence[torch.Tensor]:
        return [self._make_view(rank, turn, dtype, first, numel) for rank in range(len(self._buffers[0]))]

    def _make_view(self, rank: int, turn: int, dtype: torch.dtype, first: int, numel: int) -> torch.Tensor:
        return self._windows.view(rank, WindowOffset(0, _WORDS_NBYTES + turn * self.capacity), dtype, first, numel)

    def _wait(self, words: memoryview, barrier: int) -> None:
        for _ in range(_SPINS):
            if words[0] >= barrier:
                return
        for _ in looks():
            # Hazard: another rank may wait for the rest of a message that this rank must progress. It releases the GIL as well.
            self._comm.Iprobe()
            if words[0] >= barrier:
                return


def _turn(barrier: int) -> int:
    """The place of a barrier's fingerprint among a rank's words."""
    return 1 + (barrier & 1)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of the memory of a contiguous tensor, which must outlive it. `Tensor.numpy()` would do, but needs NumPy."""
    return memoryview(MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes))  # type: ignore[arg-type]

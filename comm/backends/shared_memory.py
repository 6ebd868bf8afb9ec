"""What the ranks of one node read straight from each other's memory, in MPI's shared windows: buffers, and small messages."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from mpi4py import MPI

_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")
_WORDS_NBYTES = 64
_SPINS, _PROBES = 200, 1000  # 15 us, 0.5 ms


class WindowOffset(NamedTuple):
    """Where a tensor lies in the node's windows; the same on every rank, though mapped at other addresses."""

    window: int
    offset: int  # bytes from the start of its rank's part


def aligned_size(nbytes: int) -> int:
    """What so many bytes take of a window: what comes after them is aligned."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class NodeWindows:
    """The windows of one node's ranks, each with a part for every rank; the newest is freed first."""

    fence: Callable[[], None]  # what this rank wrote is to be seen by the others, and what they wrote by this one

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._windows: list[MPI.Win] = []
        self._parts: list[list[torch.Tensor]] = []  # by window and rank, as bytes
        self._starts: list[tuple[int, int, int]] = []  # of this rank's parts: address, bytes, window; sorted

    def __bool__(self) -> bool:
        return bool(self._windows)

    def has_room(self, nbytes: int) -> bool:
        """Whether this node's shared memory has twice the room for `nbytes` on each of its ranks.

        Hazard: a page for which there is no room is found out when it is touched, and kills the process.
        """
        if not _SHARED_MEMORY.is_dir():
            return True
        free = os.statvfs(_SHARED_MEMORY)
        return 2 * nbytes * self._comm.Get_size() <= free.f_bavail * free.f_frsize

    def allocate(self, nbytes: int) -> torch.Tensor:
        """This rank's part of a new window, as bytes. Collective; alike on every rank. Untouched pages take no memory."""
        window = MPI.Win.Allocate_shared(aligned_size(max(nbytes, 1)), 1, comm=MPI.Intracomm(self._comm))
        memory = [window.Shared_query(rank)[0] for rank in range(self._comm.Get_size())]
        parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        window.Lock_all(MPI.MODE_NOCHECK)  # MPI's fences are for memory that is locked
        mine = parts[self._comm.Get_rank()]
        self._starts = sorted([*self._starts, (mine.data_ptr(), mine.numel(), len(self._windows))])
        self._windows.append(window)
        self.fence = window.Sync
        self._parts.append(parts)
        return mine[:nbytes]

    def find(self, tensor: torch.Tensor) -> WindowOffset | None:
        """Where `tensor` lies; None if it is in no window."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address, key=lambda start: start[0]) - 1
        if at < 0:
            return None
        begin, nbytes, window = self._starts[at]
        return WindowOffset(window, address - begin) if address < begin + nbytes else None

    def view(self, rank: int, place: WindowOffset, dtype: torch.dtype, first: int, numel: int) -> torch.Tensor:
        """The `numel` elements that `rank` has from so many elements after `place`."""
        begin = place.offset + first * dtype.itemsize
        return self._parts[place.window][rank][begin : begin + numel * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Free the windows. Collective. Tensors in them must not be touched any more."""
        self._parts.clear()
        self._starts.clear()
        while self._windows:
            window = self._windows.pop()
            window.Unlock_all()
            window.Free()


class SharedMemoryExchange:
    """Intra-node barrier and small-message exchange in shared memory.

    Each rank owns three words (the number of the last barrier that it has reached, and a fingerprint for each of two barriers
    in turn) and two message boxes. A rank that reaches a barrier has read what it wanted from the one before, so two boxes
    are enough. Cost of a barrier: 1 us.
    """

    @classmethod
    def create(cls, comm: MPI.Comm, capacity: int) -> SharedMemoryExchange | None:
        """For messages of up to so many bytes. Collective; None where there is no room."""
        windows = NodeWindows(comm)
        nbytes = _WORDS_NBYTES + 2 * capacity
        return cls(comm, windows, capacity) if min(comm.allgather(windows.has_room(nbytes))) else None

    def __init__(self, comm: MPI.Comm, windows: NodeWindows, capacity: int) -> None:
        self._comm, self._windows, self._capacity = comm, windows, capacity
        windows.allocate(_WORDS_NBYTES + 2 * capacity)
        self._fence = self._windows.fence
        ranks = range(comm.Get_size())
        words = [_bytes_of(self._part(rank, 0, _WORDS_NBYTES)).cast("q") for rank in ranks]
        self._own = words.pop(comm.Get_rank())
        self._others = words
        starts = (_WORDS_NBYTES, _WORDS_NBYTES + capacity)
        self._boxes = [[_bytes_of(self._part(rank, start, capacity)) for rank in ranks] for start in starts]
        self._outgoing = [boxes[comm.Get_rank()] for boxes in self._boxes]
        self._views = lru_cache(maxsize=1024)(self._make_views)
        self._barriers = self._own[0] = 0
        comm.Barrier()

    def _part(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        return self._windows.view(rank, WindowOffset(0, start), torch.uint8, 0, nbytes)

    def barrier(self, fingerprint: int = 0) -> bool:
        """Wait until every rank has come; True if all have brought the same fingerprint."""
        self._barriers = barrier = self._barriers + 1
        turn = 1 + (barrier & 1)
        self._own[turn] = fingerprint
        self._fence()
        self._own[0] = barrier
        same = True
        for words in self._others:
            if words[0] < barrier:
                self._wait(words, barrier)
            self._fence()
            same = words[turn] == fingerprint and same
        return same

    def swap(self, messages: Sequence[MPI.buffer]) -> Sequence[int]:
        """Leave messages for the others, which leave as many of the same sizes. Where each starts, to be got from there.

        They take `aligned_size` each and the capacity in all, and stay until the barrier after the next.
        """
        box, end, starts = self._outgoing[(self._barriers + 1) & 1], 0, []
        for message in messages:
            starts.append(end)
            box[end : end + len(message)] = message  # type: ignore[call-overload]
            end += aligned_size(len(message))
        self.barrier()
        return starts

    def gather(self, out: MPI.buffer, start: int, nbytes: int) -> None:
        """Every rank's message from there, one after the other."""
        into = memoryview(out)  # type: ignore[arg-type]
        for rank, box in enumerate(self._boxes[self._barriers & 1]):
            into[rank * nbytes : (rank + 1) * nbytes] = box[start : start + nbytes]

    def rows(self, start: int, dtype: torch.dtype, first: int, numel: int) -> Sequence[torch.Tensor]:
        """Of every rank's message from there, `numel` elements from the `first` on."""
        return self._views(self._barriers & 1, dtype, start // dtype.itemsize + first, numel)

    def close(self) -> None:
        """Give back the memory. Collective."""
        self._windows.close()

    def _make_views(self, turn: int, dtype: torch.dtype, first: int, numel: int) -> Sequence[torch.Tensor]:
        place = WindowOffset(0, _WORDS_NBYTES + turn * self._capacity)
        return [self._windows.view(rank, place, dtype, first, numel) for rank in range(len(self._boxes[0]))]

    def _wait(self, words: memoryview, barrier: int) -> None:
        for _ in range(_SPINS):
            if words[0] >= barrier:
                return
        for turn in count():
            # Hazard: a rank may wait for the end of a message of which this one holds the last part. It frees the GIL as well.
            self._comm.Iprobe()
            if words[0] >= barrier:
                return
            if turn > _PROBES:  # Cost: on a busy machine, milliseconds until this rank runs again
                os.sched_yield()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must outlive it. `Tensor.numpy()` would do, but needs NumPy."""
    return memoryview(MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes))  # type: ignore[arg-type]

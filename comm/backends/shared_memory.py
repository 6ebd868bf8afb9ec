"""MPI's shared windows, in which the ranks of one node access each other's memory: buffers, barrier and small messages."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import torch
from mpi4py import MPI

_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")
_WORDS_NBYTES = 64
_SPINS, _PROBES = 200, 1000  # 15 us, 0.5 ms
_AWAKE_S, _NAP_S = 0.05, 0.0002


class WindowOffset(NamedTuple):
    """The position of a tensor in the node's windows: valid on every rank, though windows are mapped at different addresses."""

    window: int
    offset: int  # bytes from the start of its rank's part


def aligned_size(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a window."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class NodeWindows:
    """The shared windows of one node, each with a part for every rank; the newest is freed first."""

    fence: Callable[[], None]  # a memory fence: makes writes of this rank visible to the others, and theirs to this one

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._windows: list[MPI.Win] = []
        self._parts: list[list[torch.Tensor]] = []  # by window and rank, as bytes
        self._starts: list[tuple[int, int, int]] = []  # of this rank's parts: address, bytes, window; sorted

    def __bool__(self) -> bool:
        return bool(self._windows)

    def has_space(self, nbytes: int) -> bool:
        """True if this node's shared memory has space for twice `nbytes` on each of its ranks.

        Hazard: if there is no space for a page, touching it kills the process.
        """
        if not _SHARED_MEMORY.is_dir():
            return True
        free = os.statvfs(_SHARED_MEMORY)
        return 2 * nbytes * self._comm.Get_size() <= free.f_bavail * free.f_frsize

    def allocate(self, nbytes: int) -> torch.Tensor:
        """This rank's part of a new window, as bytes. Collective, with the same size. Untouched pages take no memory."""
        window = MPI.Win.Allocate_shared(aligned_size(max(nbytes, 1)), 1, comm=MPI.Intracomm(self._comm))
        memory = [window.Shared_query(rank)[0] for rank in range(self._comm.Get_size())]
        parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        window.Lock_all(MPI.MODE_NOCHECK)  # MPI's fences require memory that is locked
        mine = parts[self._comm.Get_rank()]
        self._starts = sorted([*self._starts, (mine.data_ptr(), mine.numel(), len(self._windows))])
        self._windows.append(window)
        self.fence = window.Sync
        self._parts.append(parts)
        return mine[:nbytes]

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
    in turn) and two message buffers. A rank that reaches a barrier has finished reading from the previous one, so two buffers
    are enough. Cost of a barrier: 1 us.
    """

    @classmethod
    def create(cls, comm: MPI.Comm, capacity: int) -> SharedMemoryExchange | None:
        """Create one for messages of up to `capacity` bytes in all. Collective; None if there is no space for it."""
        windows = NodeWindows(comm)
        nbytes = _WORDS_NBYTES + 2 * capacity
        return cls(comm, windows, capacity) if min(comm.allgather(windows.has_space(nbytes))) else None

    def __init__(self, comm: MPI.Comm, windows: NodeWindows, capacity: int) -> None:
        self._comm, self._windows, self._capacity = comm, windows, capacity
        windows.allocate(_WORDS_NBYTES + 2 * capacity)
        self._fence = self._windows.fence
        ranks = range(comm.Get_size())
        words = [_bytes_of(self._part(rank, 0, _WORDS_NBYTES)).cast("q") for rank in ranks]
        self._own = words.pop(comm.Get_rank())
        self._others = words
        starts = (_WORDS_NBYTES, _WORDS_NBYTES + capacity)
        self._buffers = [[_bytes_of(self._part(rank, start, capacity)) for rank in ranks] for start in starts]
        self._outgoing = [buffers[comm.Get_rank()] for buffers in self._buffers]
        self._views = lru_cache(maxsize=1024)(self._make_views)
        self._barriers = self._own[0] = 0
        comm.Barrier()

    def _part(self, rank: int, start: int, nbytes: int) -> torch.Tensor:
        return self._windows.view(rank, WindowOffset(0, start), torch.uint8, 0, nbytes)

    def barrier(self, fingerprint: int = 0) -> bool:
        """Wait until every rank has reached the barrier; True if all have the same fingerprint."""
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
        """Write messages for the other ranks, which write as many of the same sizes; returns the offset of each.

        Each message takes `aligned_size`, all together at most the capacity. They stay until the barrier after the next.
        """
        buffer, end, starts = self._outgoing[(self._barriers + 1) & 1], 0, []
        for message in messages:
            starts.append(end)
            buffer[end : end + len(message)] = message  # type: ignore[call-overload]
            end += aligned_size(len(message))
        self.barrier()
        return starts

    def gather(self, out: MPI.buffer, start: int, nbytes: int) -> None:
        """Copy every rank's message at offset `start` to `out`, in rank order."""
        into = memoryview(out)  # type: ignore[arg-type]
        for rank, buffer in enumerate(self._buffers[self._barriers & 1]):
            into[rank * nbytes : (rank + 1) * nbytes] = buffer[start : start + nbytes]

    def rows(self, start: int, dtype: torch.dtype, first: int, numel: int) -> Sequence[torch.Tensor]:
        """Of every rank's message at offset `start`, `numel` elements from `first`."""
        return self._views(self._barriers & 1, dtype, start // dtype.itemsize + first, numel)

    def close(self) -> None:
        """Free the memory. Collective."""
        self._windows.close()

    def _make_views(self, turn: int, dtype: torch.dtype, first: int, numel: int) -> Sequence[torch.Tensor]:
        start = WindowOffset(0, _WORDS_NBYTES + turn * self._capacity)
        return [self._windows.view(rank, start, dtype, first, numel) for rank in range(len(self._buffers[0]))]

    def _wait(self, words: memoryview, barrier: int) -> None:
        for _ in range(_SPINS):
            if words[0] >= barrier:
                return
        asleep_from = monotonic() + _AWAKE_S
        for turn in count():
            # Hazard: another rank may wait for the rest of a message that this rank must progress. It releases the GIL as well.
            self._comm.Iprobe()
            if words[0] >= barrier:
                return
            if turn > _PROBES:  # Cost: on a busy machine, milliseconds until this rank runs again
                os.sched_yield()
                if monotonic() > asleep_from:  # Cost: a long wait ends so much later; meanwhile the core is free for others
                    sleep(_NAP_S)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A view of the memory of a contiguous tensor, which must outlive it. `Tensor.numpy()` would do, but needs NumPy."""
    return memoryview(MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes))  # type: ignore[arg-type]

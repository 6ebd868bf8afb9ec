"""Buffers that the ranks of one node read straight from each other's memory: MPI's shared windows."""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import torch
from mpi4py import MPI

_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")


class Place(NamedTuple):
    """Where a tensor lies in the node's windows; the same on every rank, though mapped at other addresses."""

    window: int
    offset: int  # bytes from the start of its rank's part


NOWHERE = Place(-1, 0)


class NodeWindows:
    """The windows of one node's ranks, each with a part for every rank; the newest is freed first."""

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
        window = MPI.Win.Allocate_shared(-(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT, 1, comm=MPI.Intracomm(self._comm))
        memory = [window.Shared_query(rank)[0] for rank in range(self._comm.Get_size())]
        parts = [torch.frombuffer(part, dtype=torch.uint8) for part in memory]
        window.Lock_all(MPI.MODE_NOCHECK)  # MPI's fences are for memory that is locked
        mine = parts[self._comm.Get_rank()]
        self._starts = sorted([*self._starts, (mine.data_ptr(), mine.numel(), len(self._windows))])
        self._windows.append(window)
        self._parts.append(parts)
        return mine[:nbytes]

    def find(self, tensor: torch.Tensor) -> Place:
        """Where `tensor` lies; NOWHERE if it is in no window."""
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address, key=lambda start: start[0]) - 1
        if at < 0:
            return NOWHERE
        begin, nbytes, window = self._starts[at]
        return Place(window, address - begin) if address < begin + nbytes else NOWHERE

    def view(self, rank: int, place: Place, dtype: torch.dtype, first: int, numel: int) -> torch.Tensor:
        """The `numel` elements that `rank` has from so many elements after `place`."""
        begin = place.offset + first * dtype.itemsize
        return self._parts[place.window][rank][begin : begin + numel * dtype.itemsize].view(dtype)

    def fence(self) -> None:
        """What this rank wrote is to be seen by the others, and what they wrote by this one."""
        self._windows[-1].Sync()

    def close(self) -> None:
        """Free the windows. Collective. Tensors in them must not be touched any more."""
        self._parts.clear()
        self._starts.clear()
        while self._windows:
            window = self._windows.pop()
            window.Unlock_all()
            window.Free()

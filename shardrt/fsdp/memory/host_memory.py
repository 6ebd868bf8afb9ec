"""Where large buffers on the host get their memory: pages outside of malloc's heap, which no other allocation can fragment.

`POOL` lends a block of memory to an empty storage, whose views then see it. Blocks of all sizes use each other's pages.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from bisect import bisect, insort
from collections import deque
from contextlib import suppress

import torch

from ...torch_internals import swap_memory

SMALL = 1 << 20  # Cost: blocks up to this size are faster from malloc
_REGION = 1 << 28  # bytes of address space; untouched pages take no memory
_PAGE = mmap.PAGESIZE


class _UsedBlock(weakref.ref[memoryview]):
    """A block in use: a weak reference to its memory. The block is free when nothing refers to that memory any more."""

    __slots__ = ("region", "start", "stop")
    region: _Region
    start: int
    stop: int


class _Region:
    """A mapping, and which ranges of it are free: disjoint, not adjacent, in order."""

    memory: mmap.mmap
    free: list[tuple[int, int]]  # start, stop; in bytes
    blocks: dict[int, _UsedBlock]  # in use, by start

    def __init__(self, nbytes: int) -> None:
        self.memory = _map(nbytes)
        self.free = [(0, nbytes)]
        self.blocks = {}

    def take(self, nbytes: int) -> int | None:
        """Take the beginning of the first free range that is large enough. Returns: its start in bytes; None if there is none.

        So the blocks in use lie together at the front, and the pages behind them are never touched.
        """
        for index, (start, stop) in enumerate(self.free):
            if stop - start >= nbytes:
                self.free[index : index + 1] = [(start + nbytes, stop)] if stop - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, stop: int) -> None:
        """Free a range, joined with the free ranges beside it."""
        index = bisect(self.free, (start, stop))
        if index < len(self.free) and self.free[index][0] == stop:
            stop = self.free.pop(index)[1]
        if index and self.free[index - 1][1] == start:
            start = self.free.pop(index - 1)[0]
        insort(self.free, (start, stop))

    def trim(self) -> None:
        """Return the pages of free ranges to the system."""
        for start, stop in self.free:
            self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class HostPool:
    """Blocks in few large mappings. Pages of a freed block stay, for the next blocks, until `trim()`.

    Several threads may take and free blocks.
    """

    _regions: list[_Region]
    _freed: deque[_UsedBlock]  # free blocks that are not given back to their regions yet
    _lock: threading.Lock  # of the regions

    def __init__(self) -> None:
        self._regions, self._freed = [], deque()
        self._lock = threading.Lock()

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Back an empty storage with uninitialised memory, aligned to pages. RuntimeError if there is none. Cost: 2 us."""
        swap_memory(storage, torch.frombuffer(self._take(nbytes), dtype=torch.uint8).untyped_storage())

    def free(self, storage: torch.UntypedStorage) -> None:
        """Take the memory back; the storage is empty again."""
        swap_memory(storage, torch.UntypedStorage(0))

    def _take(self, nbytes: int) -> memoryview:
        """Take a block, which is free again when nothing refers to the returned memory any more."""
        size = -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            self._give_back()
            region, start = self._find(size)
            memory = memoryview(region.memory)[start : start + nbytes]
            # Hazard: the callback runs in any thread, perhaps inside of this block: it must not wait for the lock.
            block = region.blocks[start] = _UsedBlock(memory, self._freed.append)
            block.region, block.start, block.stop = region, start, start + size
        return memory

    def _find(self, size: int) -> tuple[_Region, int]:
        for region in self._regions:
            if (start := region.take(size)) is not None:
                return region, start
        self._regions.append(self._new_region(size))
        return self._find(size)

    def _new_region(self, size: int) -> _Region:
        with suppress(OSError):  # where address space is limited
            return _Region(max(4 * size, _REGION))  # so that smaller blocks do not take the place of the next large one
        try:
            return _Region(size)
        except OSError as error:
            raise RuntimeError(
                f"out of memory on the host: a buffer of {size} bytes, expected to find room beside the "
                f"{sum(len(region.memory) for region in self._regions)} bytes of the other buffers' mappings, got: {error}; "
                "shard over more ranks, or raise the limit of memory (`ulimit -v`, the job's)"
            ) from error

    def _give_back(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            del block.region.blocks[block.start]
            block.region.give_back(block.start, block.stop)

    def trim(self) -> None:
        """Return the memory that no block uses to the system."""
        with self._lock:
            self._give_back()
            self._regions = [region for region in self._regions if region.blocks]
            for region in self._regions:
                region.trim()

    def mappings(self) -> list[tuple[int, int]]:
        """The address and the bytes of each of the pool's mappings."""
        with self._lock:
            memories = [region.memory for region in self._regions]
        return [(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)) for memory in memories]


POOL = HostPool()


def _map(nbytes: int) -> mmap.mmap:
    made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            made.madvise(mmap.MADV_HUGEPAGE)  # Cost: a first touch takes 0.04 ms per MiB then, not 0.35
    return made

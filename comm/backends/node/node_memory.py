"""Memory of one node in a memory file that several ranks map: what one of them writes, all see, and nothing is copied."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache

import torch
from mpi4py import MPI

from ...core.backend import NodeMemory
from ..objects import gather_objects
from ..waiting import looks
from .memory_files import bytes_in, fence, map_file, opened, tensor_in

_PAGE = mmap.PAGESIZE
_WORD_NBYTES = 64  # each rank's word has a cache line for itself
_SPINS = 200  # 20 us
_ENTRY_NBYTES = 8  # of a page in /proc/self/pagemap
_SCANNED_PAGES = 1 << 18  # at a time
_FEW_PAGES = 64  # Cost: these take as long as 10 single pages
# The highest byte of such an entry: bit 7, the page is present; 6, it is swapped out; 5, it is the file's. A page of a private
# mapping that was written to is present or swapped out, and not the file's any more.
_NOT_WRITTEN = bytes(byte for byte in range(256) if byte >> 5 == 0 or byte & 1 << 5)
_LIBC = ctypes.CDLL(None, use_errno=True)


class MemoryFile(NodeMemory):
    """A file without a name, which one rank makes and the others open by its descriptor."""

    _shared: torch.UntypedStorage  # the same bytes, and after them the words
    _comm: MPI.Comm
    _rank: int
    _fence: Callable[[], object]  # makes writes of this rank visible to the others, and theirs to this one
    _words: list[memoryview]  # one int64 of each rank: the number of what it reads now, or 0
    _newest: int  # of what this rank has read last

    @classmethod
    def create(cls, comm: MPI.Comm, nbytes: int) -> MemoryFile | None:
        """Memory of the ranks of `comm`, which are on one node. Collective; None, on every rank, where it cannot be had.

        Cost: 0.2 ms, and pages once they are written.
        """
        made = None
        with opened(comm, _words_at(nbytes) + comm.Get_size() * _WORD_NBYTES) as path:
            if path is not None and _shows_writes():
                with suppress(OSError, RuntimeError):  # where address space is limited
                    made = cls(comm, path, nbytes)
            everywhere = min(gather_objects(comm, made is not None))
        return made if everywhere else None

    def __init__(self, comm: MPI.Comm, path: str, nbytes: int) -> None:
        """path: that of the file, which is large enough."""
        self._comm, self._rank, self._fence, self._newest = comm, comm.Get_rank(), fence(), 0
        start, ranks = _words_at(nbytes), comm.Get_size()
        self._shared = map_file(path, start + ranks * _WORD_NBYTES, shared=True)
        self.private = tensor_in(map_file(path, start, shared=False), 0, nbytes)
        words = memoryview(bytes_in(self._shared, start, ranks * _WORD_NBYTES)).cast("B").cast("q")
        self._words = [words[at : at + 1] for at in range(0, len(words), _WORD_NBYTES // words.itemsize)]

    def part(self, start: int, nbytes: int) -> torch.Tensor:
        return tensor_in(self._shared, start, nbytes)

    # ------------------------------------------------------------------ who reads

    def begin_reading(self, number: int) -> None:
        self._newest = number
        self._words[self._rank][0] = number
        self._fence()

    def end_reading(self) -> None:
        self._fence()
        self._words[self._rank][0] = 0

    def readers(self) -> Iterator[int]:
        for rank, word in enumerate(self._words):
            spins = _SPINS
            while 0 < word[0] <= self._newest and rank != self._rank:
                spins -= 1
                if spins <= 0:
                    yield rank
        self._fence()

    def wait_for(self, rank: int) -> None:
        word = self._words[rank]
        for _ in looks():
            if not 0 < word[0] <= self._newest:
                return
            # Hazard: that rank may wait for the rest of a message that this one must progress. It releases the GIL as well.
            self._comm.Iprobe()

    def close(self) -> None:
        """Nobody waits for anybody any more: the communicator is about to be freed. Collective."""
        self.end_reading()
        self._newest = 0

    # ------------------------------------------------------------------ what this rank has written for itself

    def take_copy(self) -> None:
        self.private[::_PAGE].add_(0)  # a page that is written to is copied

    def discard_writes(self, at: Sequence[int] | None = None) -> bool:
        address, nbytes = self.private.data_ptr(), self.private.numel()
        if at is None or nbytes <= _FEW_PAGES * _PAGE:
            found = _has_writes(address, nbytes)
        else:
            found = any(_has_writes(address + place, 1) for place in at)
        if found:
            _discard_writes(address, nbytes)
        return found


def _words_at(nbytes: int) -> int:
    """Where the words begin, after `nbytes` bytes: on a page of their own."""
    return -(-nbytes // _PAGE) * _PAGE


# ---------------------------------------------------------------------- pages of private mappings


def _has_writes(address: int, nbytes: int) -> bool:
    """Whether pages of a private mapping were written to. Raises OSError where the kernel does not tell."""
    pages = -(-nbytes // _PAGE)
    for first in range(0, pages, _SCANNED_PAGES):
        count = min(_SCANNED_PAGES, pages - first) * _ENTRY_NBYTES
        entries = os.pread(_pagemap(), count, (address // _PAGE + first) * _ENTRY_NBYTES)
        if len(entries) < count or entries[_ENTRY_NBYTES - 1 :: _ENTRY_NBYTES].translate(None, _NOT_WRITTEN):
            return True
    return False


@cache
def _pagemap() -> int:
    """A descriptor of this process's page table. A forked child does not ask: it makes no collectives."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def _discard_writes(address: int, nbytes: int) -> None:
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED):
        error = ctypes.get_errno()
        raise OSError(error, f"madvise: {os.strerror(error)}")


@cache
def _shows_writes() -> bool:
    """Whether this kernel tells which pages of a private mapping were written to."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("shardrt", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _PAGE)
        os.pwrite(descriptor, b"\1", 0)
        page = map_file(f"/proc/self/fd/{descriptor}", _PAGE, shared=False)
        address, seen = page.data_ptr(), page[0]
        before = _has_writes(address, _PAGE)
        page[0] = 2
        written = _has_writes(address, _PAGE)
        _discard_writes(address, _PAGE)
        return (seen, before, written, page[0]) == (1, False, True, 1)
    except (OSError, RuntimeError, AttributeError):
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)

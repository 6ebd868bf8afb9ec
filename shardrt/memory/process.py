"""What the kernel and the C library say of this process's memory. Linux with glibc; without glibc, nothing of its heap.

A page is resident once it has been touched: memory that was allocated and never written takes none.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from bisect import bisect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_STATUS, _MAPS, _STATM = Path("/proc/self/status"), Path("/proc/self/maps"), Path("/proc/self/statm")
_CLEAR = Path("/proc/self/clear_refs")
_earlier_peak = 0  # before the kernel's mark was reset; written by reset_peak()


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, the fields that are read by name."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )
    arena: int  # bytes of all arenas
    uordblks: int  # of them in use
    hblkhd: int  # bytes of blocks with a mapping of their own


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes, as /proc/self/status has them. peak: their highest sum since the mark was reset."""

    anonymous: int
    files: int  # libraries, and other mapped files
    shared: int  # shared memory that this process has touched, whoever else has
    peak: int

    @property
    def total(self) -> int:
        return self.anonymous + self.files + self.shared


def resident() -> Resident:
    """Read the resident bytes of this process. Cost: 20 us. Raises OSError where there is no /proc."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE))
    anonymous, files, shared, peak = (1024 * int(found[name]) for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM"))
    return Resident(anonymous, files, shared, max(peak, anonymous + files + shared))


def open_size() -> int:
    """A file descriptor for `size_of`. Raises OSError where there is no /proc."""
    return os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)


def size_of(descriptor: int) -> int:
    """Resident bytes of this process. Cost: 2 us."""
    return int(os.pread(descriptor, 128, 0).split(None, 2)[1]) * _PAGE


def reset_peak() -> bool:
    """Let the kernel's mark of the highest resident size begin anew. False where it does not let us."""
    global _earlier_peak
    highest = lifetime_peak()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    _earlier_peak = highest
    return True


def lifetime_peak() -> int:
    """The highest resident size since the process began, also if the mark was reset by `reset_peak`."""
    return max(_earlier_peak, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@dataclass(frozen=True, slots=True)
class Mappings:
    """This process's address space, as far as it matters here: pairs of addresses, the end excluded."""

    heap: tuple[int, int] | None  # of the main arena of malloc
    shared: list[tuple[int, int]]  # with other processes, or of a file; ascending

    def is_shared(self, address: int) -> bool:
        index = bisect(self.shared, (address, sys.maxsize)) - 1
        return index >= 0 and address < self.shared[index][1]


def mappings() -> Mappings:
    """Read the address space of this process. Cost: 1 ms.

    The heap is several lines where pages of it have flags of their own. Private mappings of a file count as shared: which of
    their pages this process has read, the kernel tells for no range.
    """
    heap, shared = None, []
    for line in _MAPS.read_text().splitlines():
        addresses, access, *rest = line.split(None, 5)
        name = rest[-1]
        if access[3] == "s" or name.startswith("/") or name == "[heap]":
            start, end = (int(address, 16) for address in addresses.split("-"))
            if name == "[heap]":
                heap = (start if heap is None else heap[0], end)
            else:
                shared.append((start, end))
    return Mappings(heap, shared)


def resident_within(address: int, nbytes: int) -> int:
    """Resident bytes of a range of private memory. Cost: 10 ns a page."""
    if nbytes < 16 * _PAGE:  # Cost: small ranges take more calls than they are worth; they were written, most likely
        return nbytes
    first = address // _PAGE * _PAGE
    pages = -(-(address + nbytes - first) // _PAGE)
    found = (ctypes.c_ubyte * pages)()
    if _libc().mincore(ctypes.c_void_p(first), ctypes.c_size_t(address + nbytes - first), found):
        return nbytes
    return max(0, nbytes - _PAGE * bytes(found).count(0))


@dataclass(frozen=True, slots=True)
class Malloc:
    """Bytes that glibc's malloc manages.   mapped: blocks outside of the arenas, each with a mapping of its own."""

    arenas: int
    in_use: int  # of the arenas
    mapped: int


def malloc() -> Malloc | None:
    """Ask glibc what its malloc manages; None without glibc 2.33. Cost: 10 us, and more if there are many free blocks."""
    if not hasattr(_libc(), "mallinfo2"):
        return None
    found = _libc().mallinfo2()
    return Malloc(found.arena, found.uordblks, found.hblkhd)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _Mallinfo
    return libc

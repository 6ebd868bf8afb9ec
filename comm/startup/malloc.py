"""What glibc's malloc does with the memory of large blocks that are freed. No effect on other C libraries.

| function              | who calls it, when                            | large blocks                                      |
|-----------------------|-----------------------------------------------|---------------------------------------------------|
| `keep_freed_memory`   | `init`; a root, when an optimizer has stepped | lie in the heap, where freed ones are kept        |
| `return_freed_memory` | `fully_shard`                                 | have pages of their own, freed with them          |
| `trim`                | `fully_shard`, for each original              | that are free in the heap are returned, this once |

So what lasts as long as the training (shards, the optimizer's state) does not lie between blocks that come and go,
which would leave holes that no block fits in exactly.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # options of mallopt
LARGE = 1 << 20  # bytes

keeps = False  # written by keep_freed_memory() and return_freed_memory()
_found = ctypes.CDLL(None) if sys.platform == "linux" else None
_glibc = _found if hasattr(_found, "mallopt") and hasattr(_found, "malloc_trim") else None


def keep_freed_memory() -> None:
    """Keep the pages of freed blocks.

    Cost: activations and temporaries of a step come and go, and glibc would give blocks of their size back each time;
    touching fresh pages again (0.35 ms per MiB, against 0.02) was 30 to 50 % of a step.
    """
    global keeps
    keeps = True
    _set((1 << 30, 1 << 25), (1 << 31) - 1)  # before 2.35 glibc refuses more than 32 MiB


def return_freed_memory() -> None:
    """Give the pages of large blocks back when they are freed."""
    global keeps
    keeps = False
    _set((LARGE,), LARGE)


def trim() -> None:
    """Give free pages of the heap back. Cost: a walk through the free blocks, a fraction of a millisecond."""
    if _glibc is not None:
        _glibc.malloc_trim(0)


def _set(mmap_thresholds: tuple[int, ...], trim_threshold: int) -> None:
    """Set both, the first to the first of these that glibc takes."""
    if (glibc := _glibc) is not None:
        any(glibc.mallopt(_M_MMAP_THRESHOLD, threshold) for threshold in mmap_thresholds)
        glibc.mallopt(_M_TRIM_THRESHOLD, trim_threshold)

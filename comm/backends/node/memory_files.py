"""Files without a name that the ranks of a node map: their shared memory. No file system holds them, or limits their size."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch
from mpi4py import MPI

from ..objects import gather_objects


@contextmanager
def opened(comm: MPI.Comm, nbytes: int) -> Iterator[str | None]:
    """A path to a new file of zeros, the same file on every rank, in the block; None where this rank cannot open it."""
    own, file = -1, None
    try:
        if comm.Get_rank() == 0:
            with suppress(OSError, AttributeError):  # a kernel, or a Python, without memory files
                own = os.memfd_create("shardrt", os.MFD_CLOEXEC)
                os.ftruncate(own, nbytes)
                file = (os.getpid(), own, *_identity(own))
        file = gather_objects(comm, file)[0]
        if file is not None and own < 0:
            with suppress(OSError):  # processes that may not look at each other
                own = os.open(f"/proc/{file[0]}/fd/{file[1]}", os.O_RDWR | os.O_CLOEXEC)
        # Hazard: in another PID namespace, the number of the process is that of another one.
        yield f"/proc/self/fd/{own}" if own >= 0 and file is not None and _identity(own) == file[2:] else None
    finally:
        if own >= 0:
            os.close(own)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def map_file(path: str, nbytes: int, *, shared: bool) -> torch.UntypedStorage:
    """Map a file. shared: what is written goes to the file; else to a copy of the page, of this process alone."""
    mapped = torch.UntypedStorage.from_file(path, shared=shared, nbytes=nbytes)
    assert isinstance(mapped, torch.UntypedStorage), "of that class"
    return mapped


def bytes_in(storage: torch.UntypedStorage, start: int, nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    """Bytes of a storage, which lives as long as they do."""
    found = (ctypes.c_uint8 * nbytes).from_address(storage.data_ptr() + start)
    found.storage = storage  # type: ignore[attr-defined]
    return found


def tensor_in(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8, of these bytes, with a storage of its own."""
    return torch.frombuffer(bytes_in(storage, start, nbytes), dtype=torch.uint8)


@cache
def fence() -> Callable[[], object]:
    """A memory fence: what this process wrote before is visible to others before what it writes afterwards; so with reads.

    x86 keeps both orders by itself (Intel's manual, volume 3, "Memory ordering"). Elsewhere it is that of an MPI window.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        return _nothing
    window = MPI.Win.Allocate_shared(1, comm=MPI.COMM_SELF)
    window.Lock_all(MPI.MODE_NOCHECK)  # MPI's fences require memory that is locked
    return window.Sync


def _nothing() -> None:
    """The fence where none is needed."""

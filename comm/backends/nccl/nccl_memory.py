"""Device memory that NCCL knows: buffers in symmetric windows or registered, and a pool of registered memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from ...core.backend import Backend
from ...core.pool import Pool
from .libnccl import Allocator, Buffer, Library

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Attempt(Protocol):
    """Calls `fn`, and raises RuntimeError, with the name of the call, if NCCL fails."""

    def __call__(self, name: str, fn: Callable[..., T], *args: object) -> T: ...


class NcclMemory:
    """The memory of one NCCL communicator.

    host: the backend over the same ranks that carries what they agree on.   comm: the raw ncclComm_t.
    label: how messages name the communicator.
    """

    def __init__(self, library: Library, host: Backend, comm: int, device: torch.device, label: str, attempt: Attempt) -> None:
        self._library = library
        self._host = host
        self._comm = comm
        self._device = device
        self._label = label
        self._attempt = attempt
        self._buffers: list[Buffer] = []
        self._pool: _RegisteredPool | None = None

    def empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
        """See `Communicator.empty`."""
        nbytes = numel * dtype.itemsize
        buffer = self._take(nbytes, symmetric) if nbytes > 0 and self._library.has_registration else None
        if buffer is None:
            return torch.empty(numel, dtype=dtype, device=self._device)
        self._buffers.append(buffer)
        return torch.as_tensor(buffer, device=self._device).view(dtype)

    def pool(self) -> Pool | None:
        """See `Communicator.pool`."""
        allocator, everywhere = self._on_all_ranks(self._library.allocator)
        if allocator is not None and everywhere:
            register = partial(self._attempt, "pool", self._library.register, self._comm)
            self._pool = _RegisteredPool(self._device, allocator, register)
        return self._pool

    def close(self) -> None:
        """Free the buffers and end all registrations. No collective may be running."""
        if self._pool is not None:
            for handle in filter(None, self._pool.handles):
                self._attempt("close", self._library.deregister, self._comm, handle)
            self._pool = None  # its memory is freed with the last buffer in it
        while self._buffers:
            self._attempt("close", self._library.free, self._comm, self._buffers.pop())

    def _take(self, nbytes: int, symmetric: bool) -> Buffer | None:
        """Memory that NCCL knows on every rank; None on every rank if one has none."""
        with torch.cuda.device(self._device):
            buffer, everywhere = self._on_all_ranks(partial(self._attempt, "empty", self._allocate, nbytes))
            if buffer is not None and everywhere:
                register: Callable[[], Any] = partial(self._attempt, "empty", self._register, buffer, symmetric)
                _, everywhere = self._on_all_ranks(register)
            if buffer is not None and not everywhere:
                self._attempt("empty", self._library.free, self._comm, buffer)
        return buffer if everywhere else None

    def _allocate(self, nbytes: int) -> Buffer:
        try:
            return self._library.allocate(nbytes)
        except (RuntimeError, KeyError):  # an NcclError is a RuntimeError; KeyError: of a code that CuPy does not know
            torch.cuda.empty_cache()  # NCCL cannot use what torch has cached
            return self._library.allocate(nbytes)

    def _register(self, buffer: Buffer, symmetric: bool) -> None:
        if symmetric and self._library.has_windows:
            buffer.window = self._library.make_window(self._comm, buffer.address, buffer.nbytes)
        if buffer.window is None:
            buffer.handle = self._library.register(self._comm, buffer.address, buffer.nbytes)
            if symmetric and self._host.rank == 0:
                _log.warning("%s: NCCL makes no symmetric windows here; the buffer is registered on each rank", self._label)

    def _on_all_ranks(self, make: Callable[[], T]) -> tuple[T | None, bool]:
        """The result of `make`, None if it fails, and whether it has succeeded on every rank. Collective.

        NCCL must not know the memory of some ranks only (so its manual): if one rank fails, all use plain memory.
        """
        made, failure = None, None
        try:
            made = make()
        except (RuntimeError, OSError) as error:  # OSError: from a directory for temporary files without execute permission
            failure = f"rank {self._host.rank}: {error}"
        failures = [found for found in self._host.exchange(failure) if found is not None]
        if failures and self._host.rank == 0:
            _log.warning("%s allocates its buffers in plain memory: %s", self._label, "; ".join(failures))
        return made, not failures


class _RegisteredPool(Pool):
    """A pool of NCCL's memory; `register` is called for each block, when a buffer has allocated it."""

    def __init__(self, device: torch.device, allocator: Allocator, register: Callable[[int, int], int | None]) -> None:
        super().__init__(device, allocator.torchs)
        self._taken = allocator
        self._register = register
        self.handles: list[int | None] = []

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().allocate(storage, nbytes)
        for block in self._taken.fresh():
            self.handles.append(self._register(*block))

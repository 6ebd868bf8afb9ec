"""Memory for buffers on a GPU that come and go: a pool of their own, of memory that a communicator knows if it is asked to."""

from __future__ import annotations

import torch
from torch.cuda.memory import CUDAPluggableAllocator


class Pool:
    """A private pool of torch's caching allocator: what is freed here serves only what is taken here.

    Buffers of few sizes then find the blocks of those before them, whatever activations do meanwhile.
    """

    def __init__(self, device: torch.device, allocator: CUDAPluggableAllocator | None = None) -> None:
        self._device = device
        self._allocator = allocator  # it must outlive its pool
        with torch.cuda.device(device):  # which it belongs to
            self._pool = torch.cuda.MemPool(None if allocator is None else allocator.allocator())

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give an empty storage memory, uninitialised. The block belongs to the current stream: free it there.

        Cost: some microseconds. Hazard: one thread at a time, as in a training step.
        """
        try:
            self._resize(storage, nbytes)
        except torch.OutOfMemoryError:  # torch frees what it keeps for later only outside of a pool
            torch.cuda.empty_cache()
            self._resize(storage, nbytes)

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            storage.resize_(nbytes)


def new_pool(device: torch.device) -> Pool | None:
    """A pool on a GPU. None on the host, where malloc does as well."""
    return Pool(device) if device.type == "cuda" else None

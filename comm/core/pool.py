"""Pools for GPU buffers that are allocated and freed often; a communicator may make one of memory that NCCL knows."""

from __future__ import annotations

import torch
from torch.cuda.memory import CUDAPluggableAllocator


class Pool:
    """A private pool of torch's caching allocator: memory freed here is reused only here.

    Buffers of few sizes then reuse each other's blocks, whatever activations allocate meanwhile.
    """

    def __init__(self, device: torch.device, allocator: CUDAPluggableAllocator | None = None) -> None:
        self._device = device
        self._allocator = allocator  # it must outlive its pool
        with torch.cuda.device(device):  # the pool belongs to it
            self._pool = torch.cuda.MemPool(None if allocator is None else allocator.allocator())

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate uninitialised memory for an empty storage. The block belongs to the current stream: free it there.

        Cost: some microseconds. Hazard: one thread at a time, as in a training step.
        """
        try:
            self._allocate(storage, nbytes)
        except torch.OutOfMemoryError:  # torch frees its cached memory only outside of a pool
            torch.cuda.empty_cache()
            self._allocate(storage, nbytes)

    def _allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with torch.cuda.use_mem_pool(self._pool, self._device):
            storage.resize_(nbytes)

    def free(self, storage: torch.UntypedStorage) -> None:
        """Give the memory back to the pool; the storage is empty again."""
        storage.resize_(0)


def new_pool(device: torch.device) -> Pool | None:
    """A pool on a GPU; None elsewhere."""
    return Pool(device) if device.type == "cuda" else None

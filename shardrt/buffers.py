"""Flat storages: allocated, freed, and counted.

A buffer's tensors are made once and keep pointing into its storage; allocating and releasing only resizes that storage.
So a step makes no tensors, and what autograd saved of a parameter is valid again once the parameter is gathered again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch


class Account:
    """Bytes of buffer memory in use, and the most there ever were."""

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self._lock = threading.Lock()  # gather, reduce and compute may be three threads

    def take(self, nbytes: int) -> None:
        """Count `nbytes` as used."""
        with self._lock:
            self.in_use += nbytes
            self.peak = max(self.peak, self.in_use)

    def give_back(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        with self._lock:
            self.in_use -= nbytes


class FlatBuffer:
    """One storage of `nbytes` on `device` that comes and goes; its views stay.

    Invariant: allocate() and release() run on one and the same stream (on CUDA the allocator ties a block to its stream).
    Cost: on the host a released block goes back to malloc, which keeps it (see `comm.bootstrap`): no fresh page faults.
    """

    def __init__(self, nbytes: int, device: torch.device, account: Account) -> None:
        self.nbytes = nbytes
        self._account = account
        # Views can only be made of a storage that is large enough; on the host, untouched memory costs nothing meanwhile.
        self._storage = torch.UntypedStorage(nbytes, device=device)
        self._in_use = False

    def view(self, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of `shape` that starts `offset` bytes into the storage; to be made before the first allocate().

        Every view has a version counter of its own: a gather writes through one view, and autograd's checks on the
        parameters, which are other views, do not take that for a modification by the user.
        """
        made = torch.empty(0, dtype=dtype, device=self._storage.device)
        if stride is None:
            stride = torch.empty(shape, device="meta").stride()
        return made.set_(self._storage, offset // made.element_size(), shape, stride)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that lies in this storage."""
        return tensor.untyped_storage()._cdata == self._storage._cdata

    def seal(self) -> None:
        """All views are made: give the memory back until the first allocate()."""
        self._storage.resize_(0)

    def allocate(self) -> None:
        """Back the views with (uninitialised) memory. No-op if they are."""
        if not self._in_use:
            self._storage.resize_(self.nbytes)
            self._account.take(self.nbytes)
            self._in_use = True

    def release(self) -> None:
        """Free the memory; the views must not be touched until the next allocate(). No-op if it is free."""
        if self._in_use:
            self._storage.resize_(0)
            self._account.give_back(self.nbytes)
            self._in_use = False

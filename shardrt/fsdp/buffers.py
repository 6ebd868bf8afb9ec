"""Flat storages: how they are allocated, freed and counted.

A buffer's tensors are made once and keep pointing into its storage; allocating and releasing only resizes that storage.
So a step makes no tensors, and a parameter that autograd saved is valid again once the parameter is gathered again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from ..comm import Communicator, Event, Pool, Stream, current_stream
from ..torch_internals import same_storage, unwrap_transform


class MemoryCounter:
    """Bytes of buffer memory in use, and their peak."""

    in_use: int
    peak: int
    _lock: threading.Lock  # gather, reduce and compute may be three threads

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> None:
        """Count `nbytes` as used."""
        with self._lock:
            self.in_use += nbytes
            self.peak = max(self.peak, self.in_use)

    def free(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        with self._lock:
            self.in_use -= nbytes


class FlatBuffer:
    """One storage of `nbytes` on `device` that is allocated and released repeatedly; its views stay.

    Invariant: allocate() and release() run on one and the same stream (on CUDA the allocator ties a block to its stream).
    Cost: on the host a released block goes back to malloc, which keeps it (see `comm.bootstrap`): no fresh page faults.
    pool: where allocate() takes the memory; None: from torch's allocator.
    """

    nbytes: int
    _offset: int  # in the storage
    _memory: MemoryCounter
    _storage: torch.UntypedStorage
    _in_use: bool  # written by allocate() and release()
    _pool: Pool | None = None

    def __init__(self, nbytes: int, device: torch.device, memory: MemoryCounter, pool: Pool | None = None) -> None:
        self._pool = pool
        # Views can only be made of a storage that is large enough; on the host, untouched memory costs nothing meanwhile.
        self._set_up(nbytes, torch.UntypedStorage(nbytes, device=device), 0, memory)

    def _set_up(self, nbytes: int, storage: torch.UntypedStorage, offset: int, memory: MemoryCounter) -> None:
        self.nbytes = nbytes
        self._offset = offset
        self._memory = memory
        self._storage = storage
        self._in_use = False

    def view(self, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of `shape` that starts `offset` bytes into the storage. Make it before seal() and the first allocate().

        Every view has a version counter of its own: a gather writes through one view, and autograd's checks on the
        parameters, which are other views, do not count that as a modification by the user.
        """
        made = torch.empty(0, dtype=dtype, device=self._storage.device)
        if stride is None:
            stride = torch.empty(shape, device="meta").stride()
        return made.set_(self._storage, (self._offset + offset) // made.element_size(), shape, stride)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True for a tensor that lies in this storage, also if a transform of `torch.func` has wrapped it."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # of a wrapper
            inner = unwrap_transform(tensor)
            return inner is not tensor and self.holds(inner)
        return same_storage(storage, self._storage)

    @property
    def available(self) -> bool:
        """It is not allocated, and may be."""
        return not self._in_use

    def seal(self) -> None:
        """Free the memory until the first allocate(). Call it when all views are made."""
        self._storage.resize_(0)

    def allocate(self) -> None:
        """Back the views with (uninitialised) memory. No-op if it is allocated."""
        if not self._in_use:
            if self._pool is None:
                self._storage.resize_(self.nbytes)
            else:
                self._pool.resize(self._storage, self.nbytes)
            self._memory.allocate(self.nbytes)
            self._in_use = True

    def release(self) -> None:
        """Free the memory; the views must not be touched until the next allocate(). No-op if it is free."""
        if self._in_use:
            self._storage.resize_(0)
            self._memory.free(self.nbytes)
            self._in_use = False


class FlatBuffers(FlatBuffer):
    """Several flat buffers, each with its own storage, allocated and released together. Views are made of the parts."""

    parts: Sequence[FlatBuffer]

    def __init__(self, parts: Sequence[FlatBuffer]) -> None:
        self.parts = parts
        self.nbytes = sum(part.nbytes for part in parts)

    @property
    def available(self) -> bool:
        return all(part.available for part in self.parts)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(part.holds(tensor) for part in self.parts)

    def seal(self) -> None:
        for part in self.parts:
            part.seal()

    def allocate(self) -> None:
        for part in self.parts:
            part.allocate()

    def release(self) -> None:
        for part in self.parts:
            part.release()


class CommBuffer:
    """Memory that a communicator reaches without a copy (`Communicator.empty`), for one buffer at a time."""

    memory: torch.Tensor  # uint8
    symmetric: bool  # it is a symmetric window
    nbytes: int
    storage: torch.UntypedStorage
    offset: int  # of the memory in the storage, in bytes
    taken: bool  # written by occupy() and leave()
    _left: Event | None  # when the stream of its last buffer was done with it; written by leave()

    def __init__(self, memory: torch.Tensor, *, symmetric: bool = False) -> None:
        self.memory = memory
        self.symmetric = symmetric
        self.nbytes = memory.numel()
        self.storage = memory.untyped_storage()
        self.offset = int(memory.storage_offset()) * memory.element_size()
        self.taken, self._left = False, None

    @classmethod
    def given(cls, memory: torch.Tensor, nbytes: int, device: torch.device, group: str) -> CommBuffer:
        """A buffer of the memory that a custom collective of `group`, a name, returned.

        Raises ValueError unless it is (nbytes,) uint8, aligned.
        """
        fits = memory.dtype == torch.uint8 and memory.shape == (nbytes,) and memory.device == device
        if not fits or not memory.is_contiguous() or memory.data_ptr() % 16:
            raise ValueError(
                f"allocate() of a custom collective of '{group}': expected ({nbytes},) contiguous uint8 on {device}, aligned "
                f"to 16 bytes; found {tuple(memory.shape)} {memory.dtype} on {memory.device} at {memory.data_ptr():#x}"
            )
        return cls(memory)

    @classmethod
    def of(cls, comm: Communicator, nbytes: int, *, symmetric: bool = False) -> CommBuffer:
        """The buffer of `comm`; made, or made anew if it is too small or not `symmetric`. Collective.

        It lives as long as `comm`, so all roots share it.
        """
        comm_buffer = _comm_buffers.get(comm)
        if comm_buffer is None or comm_buffer.nbytes < nbytes or (symmetric and not comm_buffer.symmetric):
            comm_buffer = _comm_buffers[comm] = cls(comm.empty(nbytes, torch.uint8, symmetric=symmetric), symmetric=symmetric)
        return comm_buffer

    def occupy(self, stream: Stream) -> None:
        """Use the memory on `stream` from now on. It must be free."""
        assert not self.taken, "one buffer at a time"
        if self._left is not None:
            stream.wait(self._left)  # maybe of another root
        self.taken = True

    def leave(self, stream: Stream) -> None:
        """The memory is free, once `stream` has run what it has so far."""
        self._left, self.taken = stream.record(), False


_comm_buffers: WeakKeyDictionary[Communicator, CommBuffer] = WeakKeyDictionary()


class CommFlatBuffer(FlatBuffer):
    """A flat buffer in a `CommBuffer`, which it occupies while it is allocated."""

    _comm_buffer: CommBuffer

    def __init__(self, nbytes: int, comm_buffer: CommBuffer, memory: MemoryCounter) -> None:
        self._set_up(nbytes, comm_buffer.storage, comm_buffer.offset, memory)
        self._comm_buffer = comm_buffer

    @property
    def available(self) -> bool:
        """No flat buffer occupies the `CommBuffer`."""
        return not self._comm_buffer.taken

    def seal(self) -> None:
        """No-op: the memory of the `CommBuffer` stays."""

    def allocate(self) -> None:
        """Occupy the `CommBuffer`, which must be free. No-op if this buffer does."""
        if not self._in_use:
            self._comm_buffer.occupy(current_stream(self._storage.device))
            self._in_use = True
            self._memory.allocate(self.nbytes)

    def release(self) -> None:
        """Leave the `CommBuffer` to others. No-op if this buffer does not occupy it."""
        if self._in_use:
            self._comm_buffer.leave(current_stream(self._storage.device))
            self._in_use = False
            self._memory.free(self.nbytes)

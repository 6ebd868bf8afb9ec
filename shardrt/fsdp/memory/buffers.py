"""Flat storages: how they are allocated, freed and counted.

A buffer's tensors are made once and keep pointing into its storage; allocating and releasing only exchanges its memory.
So a gather makes no tensors, and packing makes only the gradients themselves; a parameter that autograd has saved for backward
is valid again once it is gathered again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import torch

from ...comm import Communicator, Event, Pool, Stream, current_stream
from ...torch_internals import no_swap_memory, same_storage, swap_memory, unwrap_transform
from ..base import events
from ..base.events import BufferKind, HasName
from .host_memory import POOL, SMALL, HostPool


class MemoryCounter:
    """Bytes of buffer memory in use, and their peak."""

    in_use: int
    peak: int
    _lock: threading.Lock  # gather, reduce and compute may be three threads

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self._lock = threading.Lock()

    def count(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        """Count `nbytes` of a group as used, or as free again if negative."""
        with self._lock:
            self.in_use += nbytes
            if self.in_use > self.peak:  # Cost: `max` would take as long as all the rest
                self.peak = self.in_use
            for observer in events.observers:
                observer.memory_changed(kind, group, nbytes)


class FlatBuffer:
    """One storage of `nbytes` on `device` that is allocated and released repeatedly; its views stay.

    Invariant: allocate() and release() run on one and the same stream (on CUDA the allocator ties a block to its stream).
    Cost: released memory is kept for reuse, so a step has no fresh page faults.
    kind, group: those for which `memory` counts it.   pool: where allocate() takes the memory from; None: torch's allocator, or
    `host_memory.POOL` for a large buffer on the host.
    """

    nbytes: int
    _offset: int  # where the buffer begins in the storage, in bytes
    _count: partial[None]  # of `MemoryCounter.count`; takes bytes, negative on release
    _storage: torch.UntypedStorage
    _in_use: bool  # written by allocate() and release()
    _pool: Pool | HostPool | None = None

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        memory: MemoryCounter,
        kind: BufferKind,
        group: HasName,
        *,
        pool: Pool | None = None,
    ) -> None:
        large = device.type == "cpu" and nbytes > SMALL
        self._pool = POOL if pool is None and large and swap_memory is not no_swap_memory else pool
        # Views can only be made of a storage that is large enough; on the host, untouched memory costs nothing meanwhile.
        storage = torch.UntypedStorage(0 if self._pool is POOL else nbytes, device=device)
        if self._pool is POOL:
            POOL.allocate(storage, nbytes)
        self._set_up(nbytes, storage, 0, partial(memory.count, kind, group))

    def _set_up(self, nbytes: int, storage: torch.UntypedStorage, offset: int, count: partial[None]) -> None:
        self.nbytes = nbytes
        self._offset = offset
        self._count = count
        self._storage = storage
        self._in_use = False
        _buffers[self] = None

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
        except NotImplementedError:  # a wrapper has none
            inner = unwrap_transform(tensor)
            return inner is not tensor and self.holds(inner)
        return same_storage(storage, self._storage)

    @property
    def kind(self) -> BufferKind:
        """The kind for which its memory is counted."""
        kind: BufferKind = self._count.args[0]
        return kind

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage that the views point into."""
        return self._storage

    @property
    def available(self) -> bool:
        """Whether it may be allocated now: nobody has allocated its memory."""
        return not self._in_use

    def seal(self) -> None:
        """Free the memory until the first allocate(). Call it when all views are made."""
        self._free()

    def _free(self) -> None:
        if self._pool is None:
            self._storage.resize_(0)
        else:
            self._pool.free(self._storage)

    def allocate(self) -> None:
        """Back the views with (uninitialised) memory. No-op if it is allocated."""
        if not self._in_use:
            if self._pool is None:
                self._storage.resize_(self.nbytes)
            else:
                self._pool.allocate(self._storage, self.nbytes)
            self._in_use = True
            self._count(self.nbytes)

    def release(self) -> None:
        """Free the memory; the views must not be touched until the next allocate(). No-op if it is free."""
        if self._in_use:
            self._free()
            self._in_use = False
            self._count(-self.nbytes)


_buffers: WeakKeyDictionary[FlatBuffer, None] = WeakKeyDictionary()  # in the order in which they were made


def allocated_buffers(device: torch.device) -> list[FlatBuffer]:
    """Each buffer of this process that is allocated on `device`, the oldest first."""
    alive = [buffer for reference in _buffers.keyrefs() if (buffer := reference()) is not None]  # threads may add to it
    return [buffer for buffer in alive if buffer._in_use and buffer._storage.device == device]


def buffers_in_use(device: torch.device) -> list[tuple[BufferKind, HasName, int]]:
    """The kind, the group and the bytes of each of `allocated_buffers`."""
    return [(*buffer._count.args, buffer.nbytes) for buffer in allocated_buffers(device)]


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


class CommMemory(Enum):
    """Who may write to the memory of a `CommBuffer`."""

    FREE = auto()  # nobody
    LENT = auto()  # who has the loan, until a buffer occupies it
    OCCUPIED = auto()  # a buffer


class CommBuffer:
    """Memory that a communicator reaches without a copy (`Communicator.empty`), for one buffer at a time."""

    memory: torch.Tensor  # uint8
    symmetric: bool  # it is a symmetric window
    nbytes: int
    storage: torch.UntypedStorage
    offset: int  # of the memory in the storage, in bytes
    state: CommMemory  # written by lend(), end_loan(), occupy() and leave()
    _left: Event | None  # passes when the stream of its last buffer is done with it; written by leave()
    _recall: Callable[[], None] | None  # ends the loan, if it is lent; written with `state`

    def __init__(self, memory: torch.Tensor, *, symmetric: bool = False) -> None:
        self.memory = memory
        self.symmetric = symmetric
        self.nbytes = memory.numel()
        self.storage = memory.untyped_storage()
        self.offset = int(memory.storage_offset()) * memory.element_size()
        self.state, self._left, self._recall = CommMemory.FREE, None, None

    @classmethod
    def given(cls, memory: torch.Tensor, nbytes: int, device: torch.device, group: str) -> CommBuffer:
        """A buffer of the memory that allocate() of a custom collective returned. group: a name, for the error.

        Raises ValueError unless it is (nbytes,) contiguous uint8 on `device`, aligned to 16 bytes.
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
        """The buffer of `comm`, which is made anew if it is too small, or if a symmetric one is asked for and it is not.

        It lives as long as `comm`, so all roots share it. Collective.
        """
        comm_buffer = _comm_buffers.get(comm)
        if comm_buffer is None or comm_buffer.nbytes < nbytes or (symmetric and not comm_buffer.symmetric):
            comm_buffer = _comm_buffers[comm] = cls(comm.empty(nbytes, torch.uint8, symmetric=symmetric), symmetric=symmetric)
        return comm_buffer

    def occupy(self, stream: Stream) -> None:
        """Use the memory on `stream` from now on, after the last buffer there, maybe of another root, and after a loan."""
        if self._recall is not None:
            self._recall()
        assert self.state is CommMemory.FREE, "one buffer at a time"
        if self._left is not None:
            stream.wait(self._left)
        self.state = CommMemory.OCCUPIED

    def lend(self, recall: Callable[[], None]) -> bool:
        """Let the caller write to the memory until a buffer occupies it; just before that, `recall` must end the loan.

        Only where all streams run on the caller's thread. Returns: False, and lends nothing, if it is occupied or lent already.
        """
        if self.state is not CommMemory.FREE:
            return False
        self.state, self._recall = CommMemory.LENT, recall
        return True

    def end_loan(self) -> None:
        """End a loan: its holder writes to the memory no more."""
        assert self.state is CommMemory.LENT, "lend() comes first"
        self.state, self._recall = CommMemory.FREE, None

    def leave(self, stream: Stream) -> None:
        """Give the memory up: it is free once `stream` has run what was submitted to it so far."""
        assert self.state is CommMemory.OCCUPIED, "occupy() comes first"
        self._left, self.state = stream.record(), CommMemory.FREE


_comm_buffers: WeakKeyDictionary[Communicator, CommBuffer] = WeakKeyDictionary()


class CommFlatBuffer(FlatBuffer):
    """A flat buffer in a `CommBuffer`, which it occupies while it is allocated."""

    comm_buffer: CommBuffer

    def __init__(self, nbytes: int, comm_buffer: CommBuffer, memory: MemoryCounter, kind: BufferKind, group: HasName) -> None:
        self._set_up(nbytes, comm_buffer.storage, comm_buffer.offset, partial(memory.count, kind, group))
        self.comm_buffer = comm_buffer

    @property
    def available(self) -> bool:
        """No flat buffer occupies the `CommBuffer`."""
        return self.comm_buffer.state is not CommMemory.OCCUPIED

    def seal(self) -> None:
        """No-op: the memory of the `CommBuffer` stays."""

    def allocate(self) -> None:
        """Occupy the `CommBuffer`, which must be free. No-op if this buffer does."""
        if not self._in_use:
            self.comm_buffer.occupy(current_stream(self._storage.device))
            self._in_use = True
            self._count(self.nbytes)

    def release(self) -> None:
        """Leave the `CommBuffer` to others. No-op if this buffer does not occupy it."""
        if self._in_use:
            self.comm_buffer.leave(current_stream(self._storage.device))
            self._in_use = False
            self._count(-self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class BufferMaker:
    """Makes the buffers of a group on a device, counted as its own."""

    device: torch.device
    memory: MemoryCounter
    group: HasName
    _made: WeakSet[FlatBuffer] = field(default_factory=WeakSet, init=False)

    def make(self, kind: BufferKind, nbytes: int, *, pool: Pool | None = None) -> FlatBuffer:
        """A flat buffer with a storage of its own."""
        self._made.add(made := FlatBuffer(nbytes, self.device, self.memory, kind, self.group, pool=pool))
        return made

    def make_in(self, comm_buffer: CommBuffer, kind: BufferKind, nbytes: int) -> CommFlatBuffer:
        """A flat buffer at the beginning of `comm_buffer`."""
        self._made.add(made := CommFlatBuffer(nbytes, comm_buffer, self.memory, kind, self.group))
        return made

    def release(self) -> None:
        """Free all buffers that it has made and that are still there, after a failure."""
        for buffer in list(self._made):
            buffer.release()


@dataclass(frozen=True, slots=True)
class Handoff:
    """Buffers that reductions still use: released on the stream that allocated them, once `ready` has passed."""

    buffers: Sequence[FlatBuffer]
    ready: Event
    release_stream: Stream

    def release(self) -> None:
        """Let the release stream wait, then free the buffers on it."""
        self.release_stream.wait(self.ready)
        for buffer in self.buffers:
            self.release_stream.submit(buffer.release)

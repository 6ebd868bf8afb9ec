"""Gathers that copy nothing: the modules compute with the shards' own memory, this rank's and the others'.

The ranks of a node keep their shards side by side, in memory that all of them map (`NodeMemory`). It has the layout of the
gathered buffer, so the unsharded parameters are views of it. A single rank has all of it anyway, on any device.

| step           | before -> after                                                        | cost                         |
|----------------|------------------------------------------------------------------------|------------------------------|
| attach         | this rank's shards move to their place in the memory of the node       | shards copied, once          |
| launch         | all ranks have come here: what each has written, all may read          | a barrier; nothing is copied |
| fill_unsharded | what is kept becomes a copy of this rank's own                         | its pages copied             |
| release        | this rank has read: others that write their shards wait for it no more | nothing                      |
| pause          | the same, but the modules see the parameters until they are used again | nothing                      |
| resume         | as launch                                                              | a barrier                    |

What is kept beyond a forward or backward of the root, and what the user asks for, is copied: ranks then use it at other times,
without meeting, as they may use what they have gathered.
Where parameters are gathered in another dtype, the memory of the node has a copy in that dtype. `launch` casts this rank's
shards to their place in it, at each forward and if they were written since, and the ranks meet afterwards.
Invariant: a rank writes its shards only while no other reads them. All have said that they read before one of them begins to.
Whoever writes asks (`tensor/placement/snapshots.py`), and at the end of a backward the ranks wait for each other's, so that
an optimizer may write by whatever means.

Where one writes to gathered parameters, it is on pages of its own (copy on write), which the gather of a later forward gives
up; on a single rank these are the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from functools import partial
from weakref import ref

import torch

from ... import comm
from ...comm import DeviceMesh, Stream, Work
from ...comm.core.backend import NodeMemory
from ...comm.core.streams import PAST
from ...tensor.placement import snapshots
from ...torch_internals import in_backward, no_swap_memory, swap_memory
from ..base.events import BufferKind, HasName
from ..base.policy import Policies, StepSettings
from ..memory.buffers import BufferMaker, FlatBuffer
from ..memory.context import Context
from ..params.param import ShardedParam, times_written
from .gather import AllGather, FlatGather, Pair

DONE = Work(PAST)  # the gather of a single rank
_LOOKS = 16  # forwards


class Reading(Enum):
    """What the modules of this rank read."""

    NOTHING = auto()
    SHARED = auto()  # the memory of the node: others must not write theirs
    LATE = auto()  # the same, by code around the modules: the next module that reads meets the others again
    COPY = auto()  # a copy of their own


class MappedGather(FlatGather):
    """Gathers nothing where all ranks are on one node, or where there is one. Elsewhere, as a `FlatGather`."""

    _memory: NodeMemory | None = None  # of the node; written by _become_resident()
    _reading: Reading = Reading.NOTHING  # written by _meet(), fill_unsharded(), pause() and release()
    _keeps: bool = False  # what was launched is kept; written by launch(), resume() and keep()
    _filled: Sequence[int] = ()  # times_written() of the shards that were cast last; written by _cast()
    # Written by _discard_writes().
    _forwards: int = 0
    _unsharded: Sequence[int] = ()  # versions of the gathered parameters
    _was_written: bool = False  # private pages were found, so there may be some after each forward
    # Written by attach().
    _address: int  # of the shards' storage
    _middles: Sequence[int]  # of the parameters, in bytes from the beginning of the gathered buffer

    @staticmethod
    def suits(params: Sequence[ShardedParam], mesh: DeviceMesh, policies: Policies) -> bool:
        """Whether the shards are what modules compute with, or a copy of these in another dtype that several ranks share."""
        if policies.offload.applies_to(mesh.device):
            return False
        if mesh.size > 1:
            asked = comm.world().settings.node_memory and swap_memory is not no_swap_memory
            return asked and mesh.communicator("gather").has_node_memory
        return all(policies.mixed_precision.compute_dtype(param.dtype) == param.dtype for param in params)

    @property
    def may_be_resident(self) -> bool:
        return True

    def _become_resident(self) -> bool:
        if self.mesh.size > 1 and self._memory is None and self.layout.nbytes:
            self._memory = self.comm.node_memory(self.layout.nbytes)
            if self._memory is not None and not self._casts:
                self._move_shards(self._own_part(self._memory))
        return self.mesh.size == 1 or self._memory is not None

    def attach(self, context: Context, settings: StepSettings, window: AllGather | None, group: HasName) -> None:
        super().attach(context, settings, window, group)
        if not self.resident:
            self._memory = None  # a custom all-gather came later; the shards stay where they are
        self._address = snapshots.address(self._flat_shard)
        self._middles = [placed.offset + placed.spec.nbytes // 2 for placed in self.layout.placed]
        self._unsharded = ()

    def _own_part(self, memory: NodeMemory) -> torch.Tensor:
        size = self.layout.segment_nbytes
        return memory.part(self.mesh.rank * size, size)

    def _move_shards(self, place: torch.Tensor) -> None:
        """Give the storage of the shards this memory: all tensors in it go along."""
        snapshots.wait_to_write([self._flat_shard])
        place.copy_(self._flat_shard)
        swap_memory(self._flat_shard.untyped_storage(), place.untyped_storage())

    def _make_full(self, settings: StepSettings) -> tuple[FlatBuffer, list[Pair]]:
        if not self.resident:
            return super()._make_full(settings)
        return LastingBuffer(self._flat_shard if self._memory is None else self._memory.private, self._buffers), []

    def _make_own_views(self) -> None:
        if not self.resident or self._memory is None or not self._casts:
            super()._make_own_views()
        else:
            self._own_views = self._views_of_own(LastingBuffer(self._own_part(self._memory), self._buffers), 0)

    def launch(self, stream: Stream, *, keeps: bool) -> Work:
        if not self.resident:
            return super().launch(stream, keeps=keeps)
        assert self._memory is not None, "a single rank needs no launch"
        in_forward = not in_backward()
        if in_forward:
            self._discard_writes(self._memory)
        if self._casts:
            self._cast(stream, anew=in_forward)
        self._keeps = keeps
        return self._meet(stream)

    def _meet(self, stream: Stream) -> Work:
        """Read, once all ranks have come here. A rank that comes later has not begun, but others know that it will."""
        assert self._memory is not None, "it is resident"
        self._memory.begin_reading(self.comm.number + 1)
        self._reading = Reading.SHARED
        if not self._casts:
            snapshots.read_elsewhere[self._address] = ref(self)
        return self.comm.barrier(stream=stream)

    def fill_unsharded(self, stream: Stream) -> None:
        """Take a copy of what is kept, which others do not write."""
        if self._memory is not None and self._keeps and self._reading is Reading.SHARED:
            self._memory.take_copy()
            self._memory.end_reading()
            self._reading = Reading.COPY

    def _cast(self, stream: Stream, *, anew: bool) -> None:
        """Cast the shards to where all ranks read them. anew: also if, as far as can be told, they have not changed."""
        written = times_written(self.params)
        if anew or written != self._filled:
            self.wait_for_readers()
            stream.submit(self._fill_own)
            self._filled = written

    def _discard_writes(self, memory: NodeMemory) -> None:
        """Give up what was written to gathered parameters. It is seen by their versions, or on their pages.

        Cost: to look at all pages takes a tenth of a forward in which every weight is used once. Code that writes to parameters
        so that no version shows it does so early, and to all of a parameter.
        """
        self._forwards += 1
        versions = [param.unsharded._version for param in self.params]
        all_pages = self._was_written or versions != self._unsharded or self._forwards <= _LOOKS or self._forwards % _LOOKS == 0
        self._unsharded = versions
        self._was_written |= memory.discard_writes(None if all_pages else self._middles)

    def release(self, stream: Stream, readers: Iterable[Stream]) -> None:
        if not self.resident:
            super().release(stream, readers)
            return
        assert self._memory is not None, "a single rank releases nothing"
        if self._reading is Reading.COPY:
            stream.submit(self._memory.discard_writes)
        self._memory.end_reading()
        self._reading = Reading.NOTHING

    @property
    def is_paused(self) -> bool:
        return self._memory is not None and self._reading in (Reading.NOTHING, Reading.LATE)

    def pause(self, *, reads_late: bool = False) -> None:
        if self._memory is not None and self._reading in (Reading.SHARED, Reading.LATE):
            if not reads_late:
                self._memory.end_reading()
            self._reading = Reading.LATE if reads_late else Reading.NOTHING

    def resume(self, stream: Stream, *, keeps: bool) -> Work:
        """The ranks meet again: one that has paused longer than others would not be known to read."""
        self._keeps = keeps
        return self._meet(stream)

    def keep(self, stream: Stream) -> None:
        self._keeps = True
        self.fill_unsharded(stream)

    def wait_for_readers(self) -> bool:
        """Wait until the other ranks have read what this one has read last. Returns: False if this one still does."""
        if self._reading in (Reading.SHARED, Reading.LATE):
            return False
        if self._memory is not None:
            if not self.comm.is_closed:  # else its world has lost ranks, and nobody reads
                self.comm.wait_for_readers(self._memory)
            snapshots.read_elsewhere.pop(self._address, None)
        return True


class LastingBuffer(FlatBuffer):
    """A buffer of gathered parameters that is memory of shards, or of the node. It stays, and is not counted.

    Hazard: a backward under way sees at once what this rank writes to its shards, an optimizer for example. The views have
    version counters of their own, so autograd notices writes to the gathered parameters only. If an optimizer steps a module's
    parameters inside a backward that uses the module several times, later uses read other values.
    """

    def __init__(self, memory: torch.Tensor, buffers: BufferMaker) -> None:
        """memory: (bytes,) uint8, the beginning of its storage."""
        count = partial(buffers.memory.count, BufferKind.GATHERED, buffers.group)
        self._set_up(memory.numel(), memory.untyped_storage(), 0, count)

    def seal(self) -> None:
        """No-op: the memory stays."""

    def allocate(self) -> None:
        """No-op."""

    def release(self) -> None:
        """No-op."""

"""Gathers that copy nothing: the modules compute with the shards' own memory, this rank's and the others'.

The ranks of a node keep their shards side by side, in memory that all of them map (`NodeMemory`). It has the layout of the
gathered buffer, so the unsharded parameters are views of it. A single rank has all of it anyway, on any device.

| step    | before -> after                                                          | cost                            |
|---------|--------------------------------------------------------------------------|---------------------------------|
| attach  | this rank's shards move to their place in the memory of the node         | shards copied, once             |
| launch  | all ranks have begun this forward: what each has written, all may read   | a barrier in each forward       |
| release | this rank has read: others that write their shards wait for it no more   | nothing                         |

In a backward the ranks do not meet: the shards are those of the forward. They do if a rank finds its own written since the
iteration began, which all find alike.
Where parameters are gathered in another dtype, the memory of the node has a copy in that dtype. `launch` casts this rank's
shards to their place in it, at each forward and if they were written since, and the ranks meet afterwards.
Invariant: a rank writes its shards only while no other reads them. Whoever writes asks (`tensor/snapshots.py`), and at the end
of a backward the ranks wait for each other's, so that an optimizer may write by whatever means.

Where one writes to gathered parameters, it is on pages of its own (copy on write), which the gather of a later forward gives
up; on a single rank these are the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from weakref import ref

import torch

from ... import comm
from ...comm import DeviceMesh, Stream, Work
from ...comm.backend import NodeMemory
from ...comm.streams import PAST
from ...tensor import snapshots
from ...torch_internals import in_backward, no_swap_memory, swap_memory
from ..base.events import BufferKind, HasName
from ..base.policy import Policies, StepSettings
from ..memory.buffers import BufferMaker, FlatBuffer
from ..memory.context import Context
from ..params.param import ShardedParam
from .gather import AllGather, FlatGather, Pair

DONE = Work(PAST)  # the gather of a single rank
_RESUMES = 24  # bits for the times that what is gathered is used again without a meeting
_LOOKS = 16  # forwards


class MappedGather(FlatGather):
    """Gathers nothing where all ranks are on one node, or where there is one. Elsewhere, as a `FlatGather`."""

    _memory: NodeMemory | None = None  # of the node; written by _become_resident()
    _number: int = 0  # that of the newest meeting's call, and how often this rank has begun to read since
    reads: bool = False  # this rank may read what it has launched; written by _read() and pause()
    _met: Work = DONE  # when the ranks have met before they read; written by launch()
    _filled: Sequence[int] = ()  # the versions of the shards that were cast last; written by _cast()
    # Written by _discard_writes().
    _forwards: int = 0
    _unsharded: Sequence[int] = ()  # versions of the gathered parameters
    _was_written: bool = False  # private pages were found, so there may be some after each forward
    # Written by attach().
    _context: Context
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
        self._context, self._middles = context, [placed.offset + placed.spec.nbytes // 2 for placed in self.layout.placed]

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
        if self._memory is None or not self._casts:
            super()._make_own_views()
        else:
            self._own_views = self._views_of_own(LastingBuffer(self._own_part(self._memory), self._buffers), 0)

    @property
    def needs_launch(self) -> bool:
        return not self.resident or self._memory is not None

    def launch(self, stream: Stream, *, written: bool) -> Work:
        if not self.resident:
            return super().launch(stream, written=written)
        assert self._memory is not None, "a single rank needs no launch"
        in_forward = not in_backward()
        if in_forward:
            self._discard_writes(self._memory)
        casts = self._casts and self._cast(stream, anew=in_forward)
        met = self._context.met
        if not casts and not written and (not in_forward or (met is not None and self.comm in met)):
            number, self._met = (0, self._met) if met is None else met.get(self.comm, (0, self._met))
            self._read(max(number, self._number + 1))
            return self._met
        number = self.comm.number + 1 << _RESUMES
        self._read(number)
        self._met = self.comm.barrier(stream=stream)
        if met is not None and not casts:
            met.setdefault(self.comm, (number, self._met))
        return self._met

    def _cast(self, stream: Stream, *, anew: bool) -> bool:
        """Cast the shards to where all ranks read them. anew: also if, as far as can be told, they have not changed.

        Returns: whether it does.
        """
        versions = [local._version for local in self._locals]
        if not anew and versions == self._filled:
            return False
        self.wait_for_readers()
        stream.submit(self._fill_own)
        self._filled = versions
        return True

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
        self.pause()

    def resume(self) -> None:
        """This rank reads again what it has launched last."""
        if self._memory is not None and not self.reads:
            self._read(self._number + 1)

    def _read(self, number: int) -> None:
        """From now on the modules read. They run on the caller's thread, as all that computes on the host."""
        assert self._memory is not None, "it is resident"
        self._memory.begin_reading(number)
        self._number, self.reads = number, True
        if not self._casts:
            snapshots.read_elsewhere[snapshots.address(self._flat_shard)] = ref(self)

    def pause(self) -> None:
        """This rank reads nothing until the next launch() or resume()."""
        if self._memory is not None and self.reads:
            self._memory.end_reading()
            self.reads = False

    def wait_for_readers(self) -> bool:
        """Wait until the other ranks have read what this one has read last. Returns: False if this one still does."""
        if self.reads:
            return False
        if self._memory is not None:
            self.comm.wait_for_readers(self._memory)
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

"""A group's gradients: packed into one flat buffer, reduced over the ranks, and left as sharded `.grad`s.

| step                 | stream      | before -> after                                     | cost |
|----------------------|-------------|-----------------------------------------------------|------------------------------------|
| pack                 | compute     | unsharded grads -> packed (N * s,), cast or added   | gradients read, packed written |
| launch               | reduce      | packed (N * s,) -> this rank's segment (s,)         | 1 reduce-scatter |
| launch_over_replicas | post_reduce | the segment, averaged over the replicas if any      | 1 all-reduce |
| publish              | post_reduce | segment -> `.grad`s, cast or added if it has to be  | nothing, or the segment read once |

Legend: N ranks; s elements in a segment; `post_reduce` is the reduce stream, or with replicas a stream of its own, so that
the next reduce-scatter runs beside the all-reduce. Without casts and gradients from before the segment *is* the `.grad`s.
A shard rank alone packs its gradients where they stay, if none is there yet.
The sharded gradients are the same views of one buffer for good, as DDP's `gradient_as_bucket_view`: a gradient kept beyond
`zero_grad()` is overwritten by the next backward; clone it to keep it. Those of a large group give their memory back when a
forward begins and nobody has one: activations need it then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from ..comm import Communicator, Event, Op, PreMulSum, ReduceOp, Stream, current_stream
from ..kernels import add_into, pack_into
from ..tensor.dtensor import DTensor
from ..tensor.placement import ResolvedShard
from .buffers import CommBuffer, CommFlatBuffer, FlatBuffer, MemoryCounter
from .layout import Layout
from .param import ShardedParam, local_geometry, outermost_stride, placement_of
from .policy import Settings

_ALIGN = 4  # elements between gradients of a repacked segment: 16 bytes in float32


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements start:stop of a gradient (shard dim outermost) and where they go in the packed buffer, in elements."""

    position: int  # of the parameter among the trainable ones
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """Where the gradients lie: the same rows on the same ranks as the parameters, in one dtype, trainable ones only."""

    segment_numel: int
    pieces: tuple[Piece, ...]  # for packing, over all ranks' segments
    own: tuple[Piece, ...]  # this rank's, one per trainable parameter, offsets from the start of its segment


def reduce_layout(layout: Layout, trainable: Sequence[int], rank: int) -> ReduceLayout:
    """The gradients' layout. If everything trains and has one item size it is the parameters' own, and nothing is cut."""
    itemsizes = {param.spec.itemsize for param in layout.placed}
    if len(trainable) == len(layout.placed) and len(itemsizes) == 1:
        (itemsize,) = itemsizes
        pieces = [Piece(i, 0, param.spec.numel, param.offset // itemsize) for i, param in enumerate(layout.placed)]
        runs = [layout.run(i, rank) for i in trainable]
        own = [Piece(i, run.start, run.stop, run.offset // itemsize) for i, run in enumerate(runs)]
        return ReduceLayout(layout.segment_nbytes // itemsize, tuple(pieces), tuple(own))
    return _repacked(layout, trainable, rank)


def _repacked(layout: Layout, trainable: Sequence[int], rank: int) -> ReduceLayout:
    """Frozen parameters take no part; each segment is packed anew, so a gradient is cut where its parameter is."""
    segments: list[list[Piece]] = []
    for owner in range(layout.world_size):
        cursor, segment = 0, []
        for position, index in enumerate(trainable):
            run = layout.run(index, owner)
            segment.append(Piece(position, run.start, run.stop, cursor))
            cursor += -(-(run.stop - run.start) // _ALIGN) * _ALIGN
        segments.append(segment)
    ends = [[piece.offset + piece.stop - piece.start for piece in segment] for segment in segments]
    segment_numel = -(-max(max(end) for end in ends) // _ALIGN) * _ALIGN
    pieces = [
        Piece(piece.position, piece.start, piece.stop, owner * segment_numel + piece.offset)
        for owner, segment in enumerate(segments)
        for piece in segment
        if piece.stop > piece.start
    ]
    return ReduceLayout(segment_numel, tuple(pieces), tuple(segments[rank]))


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


@dataclass(frozen=True, slots=True)
class Packed:
    """A buffer for packed gradients, and its views: all of it, and piece by piece."""

    buffer: FlatBuffer
    flat: torch.Tensor
    pieces: list[torch.Tensor]


class Scaling(NamedTuple):
    """How a sum of gradients becomes an average, as FSDP2 does it."""

    before: float  # gradients are multiplied by it when they are packed
    op: Op  # of the reduce-scatter
    all_reduce_op: Op
    after: float  # what was reduced is multiplied by it

    @classmethod
    @cache
    def of(cls, dtype: torch.dtype, ranks: int, shard_ranks: int, divide_factor: float | None, force_sum: bool) -> Scaling:
        """float16 is divided by about sqrt(ranks) before and after, which keeps it in range; others by the collective."""
        factor = float(ranks) if divide_factor is None else divide_factor
        if dtype is torch.float16:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(1 / before, ReduceOp.SUM, ReduceOp.SUM, before / factor)
        if force_sum:
            return cls(1.0, ReduceOp.SUM, ReduceOp.SUM, 1 / factor)
        if divide_factor is None:
            return cls(1.0, ReduceOp.AVG, ReduceOp.AVG, 1.0)
        average = factor == shard_ranks
        return cls(1.0, ReduceOp.AVG if average else PreMulSum(1 / factor), ReduceOp.SUM, 1.0)


class GradientReduction:
    """Packs, reduces and publishes the gradients of one group's trainable parameters.

    Gradients that are reduced at once are packed into the `comm_buffer`, if there is one and they fit.
    gives_back: the memory of sharded gradients, between `zero_grad()` and backward.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        layout: Layout,
        comm: Communicator,
        replicas: Communicator | None,
        settings: Settings,
        dtype: torch.dtype,
        memory: MemoryCounter,
        comm_buffer: CommBuffer | None,
        *,
        gives_back: bool,
    ) -> None:
        trainable = [index for index, param in enumerate(params) if param.sharded.requires_grad]
        self.params = [params[index] for index in trainable]
        self._sharded = [param.sharded for param in self.params]
        self._comm = comm
        self._replicas = replicas
        self._settings = settings
        self._dtype = dtype
        self._layout = reduce_layout(layout, trainable, comm.rank)
        self._ranks = comm.size * (1 if replicas is None else replicas.size)
        self._everything = frozenset(range(len(trainable)))
        self._packed_with: frozenset[int] = frozenset()  # positions with a gradient in `packed`; none: nothing is packed
        self._partial_with: frozenset[int] = frozenset()  # and in `partial`: reduced, but not over the replicas
        nbytes = comm.size * self._layout.segment_numel * dtype.itemsize
        ordinary = FlatBuffer(nbytes, comm.device, memory)
        if settings.reduce_scatter is not None:
            given = CommBuffer.given(
                settings.reduce_scatter.allocate(nbytes, comm.device), nbytes, comm.device, self.params[0].name
            )
            comm_buffer, ordinary = None, CommFlatBuffer(nbytes, given, memory)
        self._ordinary = self._packed = self._lay_out(ordinary)
        fits = comm_buffer is not None and nbytes <= comm_buffer.nbytes
        self._in_comm_buffer = (
            self._lay_out(CommFlatBuffer(nbytes, comm_buffer, memory)) if comm_buffer is not None and fits else None
        )
        # Then the pieces are the gradients, one by one: a step has nothing to match.
        self._whole = [piece.position for piece in self._layout.pieces] == list(range(len(trainable)))
        self._make_outputs([placement_of(index, layout) for index in trainable], memory)
        # Of one shard rank all that is packed is its segment: the sharded gradients are packed where they stay.
        alone = comm.size == 1 and not self._converts and settings.reduce_scatter is None
        self._in_place = self._lay_out(self._own) if alone else None
        self._own.allocate()
        self._gives_back = gives_back and self._own.nbytes > 0
        self._unheld = self._holders()

    def _lay_out(self, buffer: FlatBuffer) -> Packed:
        flat = buffer.view(self._dtype, 0, (buffer.nbytes // self._dtype.itemsize,))
        packed = Packed(buffer, flat, [self._piece_view(buffer, piece) for piece in self._layout.pieces])
        buffer.seal()
        return packed

    def _make_outputs(self, placements: Sequence[ResolvedShard], memory: MemoryCounter) -> None:
        """Scratch for what has to be cast, moved or added once it is reduced; else the segment is the gradients' own."""
        numel, device, rank = self._layout.segment_numel, self._comm.device, self._comm.rank
        self._scratch = FlatBuffer(numel * self._dtype.itemsize, device, memory)
        self._scratch_flat = self._scratch.view(self._dtype, 0, (numel,))
        self._partial = FlatBuffer(numel * self._dtype.itemsize, device, memory)
        self._partial_flat = self._partial.view(self._dtype, 0, (numel,))
        offloads = any(param.local.device != device for param in self.params)
        self._converts = offloads or any(param.dtype != self._dtype for param in self.params)
        places = [piece.offset * self._dtype.itemsize for piece in self._layout.own]
        nbytes = numel * self._dtype.itemsize
        if self._converts:
            *places, nbytes = accumulate((-(-param.local.nbytes // 16) * 16 for param in self.params), initial=0)
        # Nobody counts these bytes: they are no buffer, but the sharded gradients themselves.
        self._own, self._own_stream = FlatBuffer(0 if offloads else nbytes, device, MemoryCounter()), current_stream(device)
        self._segment = self._own.view(self._dtype, 0, (0 if self._converts else numel,))
        self._scratch_views: list[torch.Tensor] = []
        self._grads = []
        for place, piece, param, placement in zip(places, self._layout.own, self.params, placements, strict=True):
            shape, stride = local_geometry(param.shape, placement, rank)
            self._scratch_views.append(self._scratch.view(self._dtype, piece.offset * self._dtype.itemsize, shape, stride))
            if offloads:
                local = torch.empty_like(param.local, pin_memory=param.local.is_pinned())
            else:
                local = self._own.view(param.dtype, place, shape, stride)
            self._grads.append(param.sharded_like(local))
        self._scratch.seal()
        self._partial.seal()

    def _holders(self) -> int:
        """How many have the sharded gradients, or their memory: in Python, in C++, and through views."""
        self._out = self._segment  # as when the count to compare with was taken
        held: list[Any] = [self._segment, *(tensor for grad in self._grads for tensor in (grad, grad.to_local()))]
        counts = [getrefcount(tensor) + tensor._use_count() for tensor in held]  # torch does not declare it
        return sum(counts, torch._C._storage_Use_Count(self._segment.untyped_storage()._cdata))

    def begin(self, done: Sequence[Event]) -> None:
        """A forward begins: gradients that nobody has any more give their memory back, once `done` have passed."""
        if not self._gives_back or self.pending or any(param.grad is not None for param in self._sharded):
            return
        if not self._own.available and self._holders() == self._unheld:
            for event in done:
                self._own_stream.wait(event)
            self._own_stream.submit(self._own.release)

    def _allocate_own(self, stream: Stream) -> None:
        if self._own.available:
            self._own_stream = stream  # where it is to be released
            stream.submit(self._own.allocate)

    def _piece_view(self, buffer: FlatBuffer, piece: Piece) -> torch.Tensor:
        param, numel = self.params[piece.position], piece.stop - piece.start
        shape, stride = torch.Size((numel,)), None
        if numel == param.shape.numel():
            shape, stride = param.shape, outermost_stride(param.shape, param.dim)
        return buffer.view(self._dtype, piece.offset * self._dtype.itemsize, shape, stride)

    def pack(self, grads: Sequence[torch.Tensor | None], compute: Stream) -> None:
        """Copy the gradients into the packed buffer, or add them if some are there already. None: that one has none."""
        settings, first = self._settings, not self._packed_with
        given, sources = self._everything, [grad for grad in grads if grad is not None]
        if len(sources) < len(grads):
            given = frozenset(position for position, grad in enumerate(grads) if grad is not None)
        self._packed_with |= self._everything if settings.reduce_unused else given
        self._scaling = Scaling.of(self._dtype, self._ranks, self._comm.size, settings.divide_factor, settings.force_sum)
        if settings.sync_gradients:
            self._choose_output(compute)
        if first:
            self._choose_packed(compute)
        if self._whole and given is self._everything:
            compute.submit(partial(pack_into if first else add_into, self._packed.pieces, sources, self._scaling.before))
        else:
            compute.submit(partial(self._pack_pieces, grads, first))

    def _choose_packed(self, compute: Stream) -> None:
        settings, in_comm_buffer = self._settings, self._in_comm_buffer
        if settings.sync_gradients and self._in_place is not None and self._out is self._segment:
            self._packed = self._in_place  # which is allocated, as the output
        else:
            at_once = settings.sync_gradients and in_comm_buffer is not None and in_comm_buffer.buffer.available
            self._packed = in_comm_buffer if in_comm_buffer is not None and at_once else self._ordinary
            compute.submit(self._packed.buffer.allocate)
        if settings.reduce_hook is not None or settings.reduce_scatter is not None:
            compute.submit(self._packed.flat.zero_)  # the padding, which they see

    def _choose_output(self, compute: Stream) -> None:
        """Reduced at once: into the gradients themselves, if what is packed is all of them and they are what is reduced."""
        positions = self._packed_with | self._partial_with
        self._fresh = [position for position in positions if self._sharded[position].grad is None]
        direct = not self._converts and len(self._fresh) == len(self.params) and self._publishes
        self._out = self._segment if direct else self._scratch_flat
        if self._publishes:
            self._allocate_own(compute)
        if not direct:
            compute.submit(self._scratch.allocate)
        if not self._publishes:
            compute.submit(self._partial.allocate)

    def _pack_pieces(self, grads: Sequence[torch.Tensor | None], first: bool) -> None:
        """The same, piece by piece; what has no gradient contributes zeros."""
        views, sources = [], []
        for piece, view in zip(self._layout.pieces, self._packed.pieces, strict=True):
            grad = grads[piece.position]
            if grad is not None:
                views.append(view)
                sources.append(_elements(grad, piece, self.params[piece.position].dim))
            elif first:
                view.zero_()
        (pack_into if first else add_into)(views, sources, self._scaling.before)

    @property
    def pending(self) -> bool:
        """Gradients are packed, or reduced in part, and not published yet."""
        return bool(self._packed_with or self._partial_with)

    @property
    def needs_reduction(self) -> bool:
        """Of that, there is something that a reduction now would publish."""
        return bool(self._packed_with or (self._partial_with and self._publishes))

    @property
    def _publishes(self) -> bool:
        return self._replicas is None or self._settings.all_reduce

    def launch(self, stream: Stream) -> list[FlatBuffer]:
        """Average what is packed over the ranks. Returns the buffers in use, to be released on the compute stream."""
        op, custom = self._scaling.op, self._settings.reduce_scatter
        if custom is None:
            self._comm.reduce_scatter(self._out, self._packed.flat, op, stream=stream)
        else:
            custom(self._out, self._packed.flat, op, self._comm, stream)
        return [*self._temporary(), *([self._partial] if self._publishes else [])]

    def _temporary(self) -> list[FlatBuffer]:
        return [self._scratch] if self._packed is self._in_place else [self._packed.buffer, self._scratch]

    def launch_over_replicas(self, stream: Stream) -> None:
        """Average what was launched over the replicas, with what earlier backwards left, or leave it for a later one."""
        if self._replicas is None:
            return
        if not self._publishes:
            stream.submit(partial(self._partial_flat.add_ if self._partial_with else self._partial_flat.copy_, self._out))
            return
        if self._partial_with:
            stream.submit(partial(self._out.add_, self._partial_flat))
        self._replicas.all_reduce(self._out, self._out, self._scaling.all_reduce_op, stream=stream)

    def publish(self, stream: Stream) -> None:
        """Make what was launched last the sharded gradients, or add it to those there are; nothing if it is partial."""
        positions, self._packed_with = self._packed_with | self._partial_with, frozenset()
        self._partial_with = frozenset() if self._publishes else positions
        if not self._publishes:
            return
        if self._scaling.after != 1.0:
            stream.submit(partial(self._out.mul_, self._scaling.after))
        if self._settings.reduce_hook is not None:
            self._call_hook(self._settings.reduce_hook, stream)
        if self._out is not self._segment:
            older = {p: self._older(p) for p in positions if p not in self._fresh}
            stream.submit(partial(self._fold, self._fresh, older))
        for position in self._fresh:
            self._sharded[position].grad = self._grads[position]
        for position in positions:
            if hooks := self._sharded[position]._post_accumulate_grad_hooks:
                if self._grads[position].device != stream.device:
                    stream.synchronize()  # offloaded: the hook reads it on the host
                for hook in tuple(hooks.values()):
                    stream.submit(partial(hook, self._sharded[position]))

    def _older(self, position: int) -> torch.Tensor:
        """This rank's part of a gradient from before: a whole one, if autograd made it of a view of the gathered parameter."""
        param, sharded = self.params[position], self._sharded[position]
        if not isinstance(sharded.grad, DTensor):
            sharded.grad = param.sharded_like(sharded.spec.local_shard(sharded.grad).clone())  # type: ignore[attr-defined]
        return sharded.grad.to_local()

    def _call_hook(self, hook: Callable[[torch.Tensor], None], stream: Stream) -> None:
        where = self._settings.reduce_hook_stream or stream
        if where is not stream:
            where.wait(stream.record())
        where.submit(partial(hook, self._out))
        if where is not stream:
            stream.wait(where.record())

    def discard(self) -> None:
        """Forget what is packed, after a failed iteration."""
        self._packed_with = self._partial_with = frozenset()
        for buffer in (*self._temporary(), self._partial):
            buffer.release()

    def _fold(self, fresh: Sequence[int], older: dict[int, torch.Tensor]) -> None:
        pack_into([self._grads[p].to_local() for p in fresh], [self._scratch_views[p] for p in fresh])
        # Cost: gradients on the host are added there, once they have arrived.
        add_into(list(older.values()), [self._scratch_views[p].to(local.device) for p, local in older.items()])


def _elements(grad: torch.Tensor, piece: Piece, dim: int) -> torch.Tensor:
    """The elements of `grad` that the piece holds, in the shape of the piece's view."""
    if piece.stop - piece.start == grad.numel():
        return grad
    outermost = grad.movedim(dim, 0) if grad.dim() > 1 else grad
    return outermost.reshape(-1)[piece.start : piece.stop]

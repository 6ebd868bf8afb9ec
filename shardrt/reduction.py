"""A group's gradients: packed into one flat buffer, reduced over the ranks, and left as sharded `.grad`s.

| step   | stream  | before -> after                                        | cost                                          |
|--------|---------|--------------------------------------------------------|-----------------------------------------------|
| pack   | compute | unsharded grads -> packed (N * s,), cast or added      | gradients read once, packed written once      |
| launch | reduce  | packed (N * s,) -> this rank's segment (s,)            | 1 reduce-scatter                              |
| publish| reduce  | segment -> `.grad`s, cast or added only if it has to   | nothing, or the segment read once             |

Legend: N ranks; s elements in a segment. Without casts and without gradients from before, the segment *is* the `.grad`s.
The sharded gradients are views of one buffer that lives as long as the group, as DDP's `gradient_as_bucket_view`:
a gradient kept beyond `zero_grad()` is overwritten by the next backward; clone it to keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .buffers import Account, FlatBuffer, Slot, SlotBuffer
from .comm import Communicator, Event, ReduceOp, Stream
from .kernels import add_into, pack_into
from .layout import Layout
from .param import ShardedParam, local_geometry, outermost_stride, placement_of
from .placement import Cut

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
    itemsizes = {slot.spec.itemsize for slot in layout.slots}
    if len(trainable) == len(layout.slots) and len(itemsizes) == 1:
        (itemsize,) = itemsizes
        pieces = [Piece(i, 0, slot.spec.numel, slot.offset // itemsize) for i, slot in enumerate(layout.slots)]
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
    """Packed buffers that reductions still read: released on the stream that allocated them, once `ready` has passed."""

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


class GradientReduction:
    """Packs, reduces and publishes the gradients of one group's trainable parameters.

    Gradients that are reduced at once are packed into the `slot`, if there is one and they fit.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        layout: Layout,
        comm: Communicator,
        dtype: torch.dtype,
        account: Account,
        slot: Slot | None,
    ) -> None:
        trainable = [index for index, param in enumerate(params) if param.sharded.requires_grad]
        self.params = [params[index] for index in trainable]
        self._sharded = [param.sharded for param in self.params]
        self._comm = comm
        self._layout = reduce_layout(layout, trainable, comm.rank)
        self._everything = frozenset(range(len(trainable)))
        self._packed_with: frozenset[int] = frozenset()  # positions with a gradient in `packed`; none: nothing is packed
        self._fresh: list[int] = []  # of those launched, the ones without a gradient from before
        self._direct = False  # the newest launch leaves its result where the gradients lie
        nbytes = comm.size * self._layout.segment_numel * dtype.itemsize
        self._ordinary = self._packed = self._lay_out(FlatBuffer(nbytes, comm.device, account), dtype)
        self._slot = slot if slot is not None and nbytes <= slot.nbytes else None
        self._slotted = None if self._slot is None else self._lay_out(SlotBuffer(nbytes, self._slot, account), dtype)
        # Then the pieces are the gradients, one by one: a step has nothing to match.
        self._whole = [piece.position for piece in self._layout.pieces] == list(range(len(trainable)))
        self._make_outputs([placement_of(index, layout) for index in trainable], dtype, account)

    def _lay_out(self, buffer: FlatBuffer, dtype: torch.dtype) -> Packed:
        flat = buffer.view(dtype, 0, (buffer.nbytes // dtype.itemsize,))
        packed = Packed(buffer, flat, [self._piece_view(buffer, piece, dtype) for piece in self._layout.pieces])
        buffer.seal()
        return packed

    def _make_outputs(self, placements: Sequence[Cut], dtype: torch.dtype, account: Account) -> None:
        numel, device, rank = self._layout.segment_numel, self._comm.device, self._comm.rank
        self._scratch = FlatBuffer(numel * dtype.itemsize, device, account)
        self._scratch_flat = self._scratch.view(dtype, 0, (numel,))
        self._casts = any(param.dtype != dtype for param in self.params)
        self._segment = torch.empty(0 if self._casts else numel, dtype=dtype, device=device)
        self._scratch_views: list[torch.Tensor] = []
        self._grads = []
        for piece, param, placement in zip(self._layout.own, self.params, placements, strict=True):
            shape, stride = local_geometry(param.shape, placement, rank)
            self._scratch_views.append(self._scratch.view(dtype, piece.offset * dtype.itemsize, shape, stride))
            if self._casts:
                local = torch.empty_strided(shape, stride, dtype=param.dtype, device=device)
            else:
                local = self._segment.as_strided(shape, stride, piece.offset)
            self._grads.append(param.sharded_like(local))
        self._scratch.seal()

    def _piece_view(self, buffer: FlatBuffer, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        param, numel = self.params[piece.position], piece.stop - piece.start
        shape, stride = torch.Size((numel,)), None
        if numel == param.shape.numel():
            shape, stride = param.shape, outermost_stride(param.shape, param.dim)
        return buffer.view(dtype, piece.offset * dtype.itemsize, shape, stride)

    def pack(self, grads: Sequence[torch.Tensor | None], compute: Stream, *, reduced_next: bool) -> None:
        """Copy the gradients into the packed buffer, or add them if some are there already. None: that one has none."""
        first = not self._packed_with
        if first:
            self._packed = self._choose() if reduced_next else self._ordinary
            compute.submit(self._packed.buffer.allocate)
        sources = [grad for grad in grads if grad is not None]
        if self._whole and len(sources) == len(grads):
            compute.submit(partial(pack_into if first else add_into, self._packed.pieces, sources))
            self._packed_with = self._everything
        else:
            compute.submit(partial(self._pack_pieces, grads, first))
            self._packed_with |= {position for position, grad in enumerate(grads) if grad is not None}

    def _choose(self) -> Packed:
        free = self._slot is not None and not self._slot.taken
        return self._slotted if free and self._slotted is not None else self._ordinary

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
        (pack_into if first else add_into)(views, sources)

    @property
    def pending(self) -> bool:
        """Gradients are packed and not yet reduced."""
        return bool(self._packed_with)

    def launch(self, stream: Stream) -> FlatBuffer:
        """Average what is packed over the ranks. Returns the packed buffer, still read."""
        self._fresh = [position for position in self._packed_with if self._sharded[position].grad is None]
        self._direct = not self._casts and len(self._fresh) == len(self.params)
        if not self._direct:
            stream.submit(self._scratch.allocate)
        out = self._segment if self._direct else self._scratch_flat
        self._comm.reduce_scatter(out, self._packed.flat, ReduceOp.AVG, stream=stream)
        return self._packed.buffer

    def publish(self, stream: Stream) -> None:
        """Make what was launched last the sharded gradients, or add it to those there are."""
        positions, self._packed_with = self._packed_with, frozenset()
        if not self._direct:
            older = {p: self._sharded[p].grad.to_local() for p in positions if p not in self._fresh}  # type: ignore[union-attr]
            stream.submit(partial(self._fold, self._fresh, older))
        for position in self._fresh:
            self._sharded[position].grad = self._grads[position]

    def discard(self) -> None:
        """Forget what is packed, after a failed iteration."""
        self._packed_with = frozenset()
        self._packed.buffer.release()

    def _fold(self, fresh: Sequence[int], older: dict[int, torch.Tensor]) -> None:
        pack_into([self._grads[p].to_local() for p in fresh], [self._scratch_views[p] for p in fresh])
        add_into(list(older.values()), [self._scratch_views[p] for p in older])
        self._scratch.release()


def _elements(grad: torch.Tensor, piece: Piece, dim: int) -> torch.Tensor:
    """The elements of `grad` that the piece holds, in the shape of the piece's view."""
    if piece.stop - piece.start == grad.numel():
        return grad
    outermost = grad.movedim(dim, 0) if grad.dim() > 1 else grad
    return outermost.reshape(-1)[piece.start : piece.stop]

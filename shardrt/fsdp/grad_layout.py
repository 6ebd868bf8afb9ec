"""Where the gradients of a group lie in the packed buffer, and in the segment of it that one rank keeps. Pure geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .layout import Layout

_ALIGN = 4  # elements between gradients of a repacked segment: 16 bytes in float32


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements start:stop of a gradient (shard dim outermost) and where they go in the packed buffer, in elements."""

    position: int  # of the parameter among the trainable ones
    start: int
    stop: int
    offset: int

    def of(self, grad: torch.Tensor, dim: int) -> torch.Tensor:
        """The elements of `grad` that the piece holds: 1-D, or in the shape of `grad` if these are all of them."""
        if self.stop - self.start == grad.numel():
            return grad
        outermost = grad.movedim(dim, 0) if grad.dim() > 1 else grad
        return outermost.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """Where the gradients lie: the same rows on the same ranks as the parameters, in one dtype, trainable ones only."""

    segment_numel: int
    pieces: tuple[Piece, ...]  # for packing, over all ranks' segments
    own: tuple[Piece, ...]  # this rank's, one per trainable parameter, offsets from the start of its segment

    @property
    def uncut(self) -> bool:
        """Every gradient is one piece, in the parameters' order."""
        return [piece.position for piece in self.pieces] == list(range(len(self.own)))


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

"""Where the gradients of a group lie in the packed buffer, and in the segment of it that one rank keeps. Pure geometry."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .layout import Layout

ALIGN = 4  # elements: a repacked segment and each gradient in it are multiples of 16 bytes in float32


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

    def gaps(self, ranks: int) -> list[tuple[int, int]]:
        """The elements (start, stop) of the packed buffer that no gradient fills."""
        filled = sorted((piece.offset, piece.offset + piece.stop - piece.start) for piece in self.pieces)
        edges = [(0, 0), *filled, (ranks * self.segment_numel,) * 2]
        return [(stop, start) for (_, stop), (start, _) in pairwise(edges) if stop < start]


def reduce_layout(layout: Layout, trainable: Sequence[int], rank: int, align: int = ALIGN) -> ReduceLayout:
    """The gradients' layout. If everything trains and has one item size it is the parameters' own, and nothing is cut.

    align: elements of which segments, and starts of gradients in them, are multiples. The parameters' own are already.
    """
    itemsizes = {param.spec.itemsize for param in layout.placed}
    if len(trainable) == len(layout.placed) and len(itemsizes) == 1:
        (itemsize,) = itemsizes
        pieces = [Piece(i, 0, param.spec.numel, param.offset // itemsize) for i, param in enumerate(layout.placed)]
        runs = [layout.run(i, rank) for i in trainable]
        own = [Piece(i, run.start, run.stop, run.offset // itemsize) for i, run in enumerate(runs)]
        return ReduceLayout(layout.segment_nbytes // itemsize, tuple(pieces), tuple(own))
    return _repacked(layout, trainable, rank, align)


def _repacked(layout: Layout, trainable: Sequence[int], rank: int, align: int) -> ReduceLayout:
    """Frozen parameters take no part; each segment is packed anew, so a gradient is cut where its parameter is.

    Where it fills the segments of neighbouring ranks, it is one piece.
    """
    segments = [(owners, _segment(layout, trainable, owners[0], align)) for owners in _alike(layout)]
    most = max(piece.offset + piece.stop - piece.start for _, segment in segments for piece in segment)
    segment_numel = -(-most // align) * align
    pieces = [
        joined
        for owners, segment in segments
        for piece in segment
        if piece.stop > piece.start
        for joined in _over(owners, piece, segment_numel)
    ]
    return ReduceLayout(segment_numel, tuple(pieces), tuple(_segment(layout, trainable, rank, align)))


def _alike(layout: Layout) -> Iterator[range]:
    """All ranks, in ranges of those that own as much as each other of the same parameter alone, or nothing."""
    edges = {0, layout.world_size}
    for param in layout.placed:
        if param.spec.nbytes:
            for byte in (param.offset, param.offset + param.spec.nbytes - 1):
                owner = byte // layout.segment_nbytes
                edges |= {owner, owner + 1}
    return itertools.starmap(range, pairwise(sorted(edges)))


def _segment(layout: Layout, trainable: Sequence[int], owner: int, align: int) -> list[Piece]:
    """What a rank keeps of each gradient, with offsets from the start of its segment."""
    cursor, segment = 0, []
    for position, index in enumerate(trainable):
        run = layout.run(index, owner)
        segment.append(Piece(position, run.start, run.stop, cursor))
        cursor += -(-(run.stop - run.start) // align) * align
    return segment


def _over(owners: range, piece: Piece, segment_numel: int) -> Iterator[Piece]:
    """The pieces of ranks that are alike, by that of the first of them."""
    numel = piece.stop - piece.start
    if numel == segment_numel:
        yield Piece(piece.position, piece.start, piece.start + len(owners) * numel, owners[0] * segment_numel)
        return
    for place, owner in enumerate(owners):
        start = piece.start + place * numel
        yield Piece(piece.position, start, start + numel, owner * segment_numel + piece.offset)

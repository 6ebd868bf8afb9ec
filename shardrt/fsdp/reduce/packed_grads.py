"""Packed gradients: the buffers that they lie in, what one step of a reduction hands to the next, and what is held.

Legend: N ranks; s elements in a segment, that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple

import torch

from ...comm import Stream
from ...kernels import pack_into
from ..memory.buffers import FlatBuffer, FlatBuffers
from ..params.param import ShardedParam, outermost_stride
from .grad_layout import GradRange, Scaling
from .sharded_grads import NewGrads

Copy = Callable[[list[torch.Tensor], list[torch.Tensor], float], None]  # pack_into, or add_into
Grads = Sequence[torch.Tensor | None]  # one for each parameter of the reduction, in its shape; None: it has none


class HeldGrads(Enum):
    """What a reduction holds between backwards."""

    NOTHING = auto()
    ACCUMULATED = auto()  # packed gradients that are not reduced
    PARTIAL = auto()  # gradients that are reduced within a replica only


@dataclass(frozen=True, slots=True)
class PackBuffer:
    """Memory for packed gradients, and its views: all of it, and piece by piece."""

    buffer: FlatBuffer  # an empty one if the memory is that of `grads`, which is allocated
    flat: torch.Tensor  # (N * s,)
    pieces: list[torch.Tensor]  # (numel,), or the parameter's shape if it is all of the gradient
    whole: dict[int, torch.Tensor]  # the latter, by the position of the parameter
    gaps: list[torch.Tensor]  # (numel,) between the pieces, if they are read: a NaN there would make a block of codes NaN
    cuts: Sequence[tuple[GradRange, int]]  # what each piece is, and the shard dim of its parameter
    uncut: bool  # every gradient is one piece, in the parameters' order
    grads: NewGrads | None = None  # the sharded gradients whose memory this is, on a single shard rank
    own: torch.Tensor | None = None  # (s,) this rank's segment, if it is to be written there: in a symmetric window

    def in_grads(self, grads: NewGrads) -> PackBuffer:
        """The same layout in the memory of new gradients of a single shard rank: their parts are the pieces."""
        assert grads.segment is not None, "all gradients are packed, and none is converted"
        pieces, whole = [], {}
        for (piece, _), like in zip(self.cuts, self.pieces, strict=True):
            part = grads.parts[piece.position]
            if part.dim() != like.dim():  # the part of a scalar is (1,)
                part = part.view(like.shape)
            pieces.append(part)
            whole[piece.position] = part
        starts = [gap.storage_offset() - self.flat.storage_offset() for gap in self.gaps]
        gaps = [grads.segment[start : start + gap.numel()] for start, gap in zip(starts, self.gaps, strict=True)]
        return PackBuffer(FlatBuffers(()), grads.segment, pieces, whole, gaps, self.cuts, self.uncut, grads)

    def gradient(self, position: int, param: ShardedParam) -> torch.Tensor:
        """A copy of the gradient at this position, that of `param`, put together of its pieces."""
        pieces = sorted((piece for piece, _ in self.cuts if piece.position == position), key=attrgetter("start"))
        parts = [self.flat[piece.offset : piece.offset + piece.stop - piece.start] for piece in pieces]
        whole = torch.cat([self.flat[:0], *parts])
        return whole.as_strided(param.shape, outermost_stride(param.shape, param.dim))

    def zero_gaps(self) -> None:
        for gap in self.gaps:
            gap.zero_()

    def fill(self, grads: Grads, scale: float, copy: Copy, in_place: Set[int]) -> None:
        """Copy or add gradients piece by piece, as `copy` does. If it copies, zeros stand for a gradient that is missing.

        in_place: positions whose gradient is in its place already.
        """
        views, sources = self.pieces, [grad for grad in grads if grad is not None]
        if self.uncut and not in_place and len(sources) == len(grads):
            copy(views, sources, scale)
            return
        views, sources = [], []
        for (piece, dim), view in zip(self.cuts, self.pieces, strict=True):
            grad = grads[piece.position]
            if grad is not None and piece.position not in in_place:
                views.append(view)
                sources.append(piece.of(grad, dim))
            elif grad is None and copy is pack_into:
                view.zero_()
        copy(views, sources, scale)


def lay_out(
    buffer: FlatBuffer,
    pieces: Sequence[GradRange],
    params: Sequence[ShardedParam],
    dtype: torch.dtype,
    gaps: Sequence[tuple[int, int]],
    own: slice | None = None,
) -> PackBuffer:
    """The views of a buffer that holds these pieces of gradients. gaps: (start, stop) in elements.   own: likewise."""
    flat = buffer.view(dtype, 0, (buffer.nbytes // dtype.itemsize,))
    views, whole = [], {}
    for piece in pieces:
        shape, numel = params[piece.position].shape, piece.stop - piece.start
        is_whole = numel == shape.numel()
        stride = outermost_stride(shape, params[piece.position].dim) if is_whole else None
        views.append(buffer.view(dtype, piece.offset * dtype.itemsize, shape if is_whole else (numel,), stride))
        if is_whole:
            whole[piece.position] = views[-1]
    cuts = [(piece, params[piece.position].dim) for piece in pieces]
    uncut = [piece.position for piece in pieces] == list(range(len(params)))
    unfilled = [flat[start:stop] for start, stop in gaps]
    return PackBuffer(buffer, flat, views, whole, unfilled, cuts, uncut, own=None if own is None else flat[own])


class Accumulated(NamedTuple):
    """Packed gradients of backwards without synchronisation of gradients."""

    source: PackBuffer
    positions: frozenset[int]
    scaling: Scaling  # they are multiplied by its `before`
    stream: Stream  # the one that has packed, and has allocated `source`


class KeptGrads(NamedTuple):
    """Gradients of such backwards as autograd has made them: of an `UnpackedReduction`."""

    grads: Grads
    stream: Stream  # the one on which they were made

    @property
    def positions(self) -> frozenset[int]:
        return frozenset(position for position, grad in enumerate(self.grads) if grad is not None)


class PartialGrads(NamedTuple):
    """Gradients that are reduced within a replica only, as one piece, in the buffer that a reduction has for them."""

    positions: frozenset[int]
    stream: Stream  # the one that allocated that buffer


class Output(Enum):
    """What a reduction writes."""

    GRADS = auto()  # the sharded gradients themselves
    SCRATCH = auto()  # values that are converted, or added to earlier gradients
    PARTIAL = auto()  # values that a later backward reduces over the replicas


class PackedGrads(NamedTuple):
    """Gradients on their way through one reduction. (A tuple: a frozen dataclass takes three times as long to make.)"""

    source: PackBuffer  # what is sent
    new: NewGrads | None  # memory of the fresh gradients; None if there are none, or nothing is published
    older: dict[int, torch.Tensor]  # earlier gradients to which the result is added: this rank's parts of each, by position
    out: torch.Tensor  # (s,) what is received: the sharded gradients themselves, or scratch
    scaling: Scaling
    positions: frozenset[int]  # of the parameters that have a gradient in it
    fresh: Sequence[int]  # of these, the parameters without an earlier gradient
    result: Output
    adds_partial: bool  # the result is added up with what earlier backwards have reduced within the replica
    used: Sequence[FlatBuffer]  # to be released on `stream` after publish()
    stream: Stream  # the one that has packed, and has allocated all of this

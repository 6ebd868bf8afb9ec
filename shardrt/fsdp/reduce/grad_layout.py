"""The numbers of a group's packed gradients: where each lies, what it is multiplied by, and which are terms of a sum.

`ReduceLayout` is pure geometry: the packed buffer, and the segment of it that one rank keeps. `Scaling` makes averages of sums,
as FSDP2 does. `TermSum` is for gradients of which each tensor-parallel rank has only a term, such as those of a norm that runs
on its part of a sequence: they are part of the packed gradients, so one all-reduce adds up all of them, before the group's
reduce-scatter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ...comm import Communicator, DeviceMesh, Op, PreMulSum, ReduceOp, Stream
from ...kernels import pack_into
from ..base.events import BufferKind
from ..memory.buffers import BufferMaker, FlatBuffer
from ..params.layout import Layout
from ..params.param import ShardedParam
from ..params.tensor_parallel import TERMS

ALIGN = 4  # elements: a repacked segment and each gradient in it are multiples of 16 bytes in float32


@dataclass(frozen=True, slots=True)
class GradRange:
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
    pieces: tuple[GradRange, ...]  # for packing, over all ranks' segments
    own: tuple[GradRange, ...]  # this rank's, one per trainable parameter, offsets from the start of its segment

    def gaps(self, ranks: int) -> list[tuple[int, int]]:
        """The elements (start, stop) of the packed buffer that no gradient fills."""
        filled = sorted((piece.offset, piece.offset + piece.stop - piece.start) for piece in self.pieces)
        edges = [(0, 0), *filled, (ranks * self.segment_numel,) * 2]
        return [(stop, start) for (_, stop), (start, _) in pairwise(edges) if stop < start]


def reduce_layout(layout: Layout, trainable: Sequence[int], rank: int, align: int = ALIGN) -> ReduceLayout:
    """The gradients' layout. If everything trains and has one item size it is the parameters' own, and nothing is cut.

    align: segments, and starts of gradients in them, are multiples of so many elements. In the parameters' layout they are.
    """
    itemsizes = {param.spec.itemsize for param in layout.placed}
    if len(trainable) == len(layout.placed) and len(itemsizes) == 1:
        (itemsize,) = itemsizes
        pieces = [GradRange(i, 0, param.spec.numel, param.offset // itemsize) for i, param in enumerate(layout.placed)]
        ranges = [layout.owned(i, rank) for i in trainable]
        own = [GradRange(i, owned.start, owned.stop, owned.offset // itemsize) for i, owned in enumerate(ranges)]
        return ReduceLayout(layout.segment_nbytes // itemsize, tuple(pieces), tuple(own))
    return _repacked(layout, trainable, rank, align)


def _repacked(layout: Layout, trainable: Sequence[int], rank: int, align: int) -> ReduceLayout:
    """The layout of trainable parameters alone: each segment is packed anew, so a gradient is cut where its parameter is.

    Where a gradient fills the segments of neighbouring ranks, it is one piece.
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
    """All ranks in ranges: a single rank, or ranks that own nothing, or equal amounts of one parameter and nothing else."""
    edges = {0, layout.world_size}
    for param in layout.placed:
        if param.spec.nbytes:
            for byte in (param.offset, param.offset + param.spec.nbytes - 1):
                owner = byte // layout.segment_nbytes
                edges |= {owner, owner + 1}
    return itertools.starmap(range, pairwise(sorted(edges)))


def _segment(layout: Layout, trainable: Sequence[int], owner: int, align: int) -> list[GradRange]:
    """What a rank keeps of each gradient, with offsets from the start of its segment."""
    cursor, segment = 0, []
    for position, index in enumerate(trainable):
        owned = layout.owned(index, owner)
        segment.append(GradRange(position, owned.start, owned.stop, cursor))
        cursor += -(-(owned.stop - owned.start) // align) * align
    return segment


def _over(owners: range, piece: GradRange, segment_numel: int) -> Iterator[GradRange]:
    """The pieces of the ranks of one range of `_alike`. piece: that of the first rank, as `_segment` returns it."""
    numel = piece.stop - piece.start
    if numel == segment_numel:
        yield GradRange(piece.position, piece.start, piece.start + len(owners) * numel, owners[0] * segment_numel)
        return
    for place, owner in enumerate(owners):
        start = piece.start + place * numel
        yield GradRange(piece.position, start, start + numel, owner * segment_numel + piece.offset)


# ---------------------------------------------------------------------- from a sum to an average


class Scaling(NamedTuple):
    """Where gradients are multiplied on their way through a reduction, and by what."""

    before: float  # gradients are multiplied by it when they are packed
    op: Op  # of the reduce-scatter
    all_reduce_op: Op
    after: float  # what was reduced is multiplied by it

    @classmethod
    @lru_cache(maxsize=256)  # a divide factor may differ in every step
    def of(
        cls, dtype: torch.dtype, ranks: int, shard_ranks: int, divide_factor: float | None, sums: bool, at_pack: bool
    ) -> Scaling:
        """The scaling of gradients of `dtype`. float16 is divided by about sqrt(ranks) before and after, to stay in range.

        at_pack: other dtypes are divided when they are packed, which costs nothing, and collectives only sum. False: the
        collective divides.
        sums: collectives must only sum, so what was reduced is divided afterwards, unless gradients were divided before.
        """
        factor = float(ranks) if divide_factor is None else divide_factor
        if dtype is torch.float16:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            return cls(1 / before, ReduceOp.SUM, ReduceOp.SUM, before / factor)
        if at_pack:
            return cls(1 / factor, ReduceOp.SUM, ReduceOp.SUM, 1.0)
        if sums:
            return cls(1.0, ReduceOp.SUM, ReduceOp.SUM, 1 / factor)
        if divide_factor is None:
            return cls(1.0, ReduceOp.AVG, ReduceOp.AVG, 1.0)
        average = factor == shard_ranks
        return cls(1.0, ReduceOp.AVG if average else PreMulSum(1 / factor), ReduceOp.SUM, 1.0)


# ---------------------------------------------------------------------- terms of a sum


class TermSum:
    """Adds up the pieces of a packed buffer of which each rank of `comm` has a term, through one flat buffer.

    The pieces lie in it in the order of the parameters' elements, so ranks whose layouts differ agree on it.
    """

    _comm: Communicator
    _indices: list[int]  # of the pieces, in the order of the parameters
    _buffer: FlatBuffer  # allocated and released on the reduce stream
    _flat: torch.Tensor  # (numel,): all of the buffer
    _views: list[torch.Tensor]  # of it, with the shapes and strides of the pieces

    def __init__(
        self, comm: Communicator, indices: list[int], pieces: list[torch.Tensor], dtype: torch.dtype, buffers: BufferMaker
    ) -> None:
        self._comm, self._indices = comm, indices
        *starts, numel = accumulate((piece.numel() for piece in pieces), initial=0)
        self._buffer = buffers.make(BufferKind.SCRATCH, numel * dtype.itemsize)
        self._flat = self._buffer.view(dtype, 0, (numel,))
        self._views = [
            self._buffer.view(dtype, start * dtype.itemsize, piece.shape, piece.stride())
            for start, piece in zip(starts, pieces, strict=True)
        ]
        self._buffer.seal()

    def run(self, pieces: list[torch.Tensor], stream: Stream) -> None:
        """Replace terms by their sums. pieces: all those of the packed buffer."""
        mine = [pieces[index] for index in self._indices]
        stream.submit(self._buffer.allocate)
        stream.submit(partial(pack_into, self._views, mine))
        self._comm.all_reduce(self._flat, self._flat, ReduceOp.SUM, stream=stream)
        stream.submit(partial(pack_into, mine, self._views))
        stream.submit(self._buffer.release)


def term_sums(
    params: Sequence[ShardedParam],
    layout: ReduceLayout,
    pieces: list[torch.Tensor],
    dtype: torch.dtype,
    buffers: BufferMaker,
) -> list[TermSum]:
    """One sum for each mesh over which terms are added up. pieces: views of a packed buffer, as in `layout`."""
    indices: dict[DeviceMesh, list[int]] = {}
    # The order is by parameter, not by the rank that keeps a piece: ranks of other columns cut elsewhere.
    for index, piece in sorted(enumerate(layout.pieces), key=lambda item: (item[1].position, item[1].start)):
        outer = params[piece.position].outer
        if outer is not None and outer.partial_mesh is not None:
            indices.setdefault(outer.partial_mesh, []).append(index)
    return [
        TermSum(mesh.communicator(TERMS), chosen, [pieces[index] for index in chosen], dtype, buffers)
        for mesh, chosen in indices.items()
    ]

"""Reductions that send 8-bit codes: a reduce-scatter of packed gradients, and an all-reduce over the replicas.

| step              | before -> after                                                 | cost                            |
|-------------------|-----------------------------------------------------------------|---------------------------------|
| reduce within     | packed (N, s) -> sums of rows i, i + k, ... on rank i of k      | a reduce-scatter for some nodes |
| encode            | these N / k rows -> codes and scales                            | rows read once                  |
| exchange across   | row j goes to rank i of the j-th k neighbours                   | 2 all-to-alls: codes, scales    |
| decode and sum    | N / k rows of codes -> segment (s,), a left fold in rank order  | codes read once                 |

All steps run on the stream of the reduction. Legend: N ranks; s elements in a segment, a multiple of a block; k neighbouring
ranks, which reduce in full precision: those of a node as a rule, since their links are fast; i is a rank's place among them.
With k = 1 there is no first step.
So each rank's gradient (with k > 1: each node's) is rounded once, by half a scale of its block at most, and the sum is exact
up to float32; its bits depend on k alone, not on where the ranks run.

The all-reduce over R replicas does the same with R parts of the segment, then all-gathers the parts, which are encoded again
for it: a second rounding, by half a scale of the sum's block. All replicas decode the same codes, so they get the same bits.
An element that is not finite makes its block NaN, on every rank that gets it. The block format is that of `kernels.encode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from ...comm import Communicator, DeviceMesh, ReduceOp, Stream
from ...kernels import decode_sum, encode
from ...kernels.reference import BLOCK
from ..base.events import BufferKind
from ..base.two_levels import TwoLevels, neighbours
from ..memory.buffers import BufferMaker, FlatBuffer
from .grad_layout import ReduceLayout
from .packed_grads import PackedGrads
from .reduce import GradientReduction, ReductionSpec

_BEGIN = 16  # bytes: the parts of a buffer begin at multiples of it

# With at most this many nodes, the rows of each node are reduced where they are packed. With more, the rows of several nodes
# are reduced at a time, from a copy in which rows of one place lie side by side.
# Cost: this many launches at most, and memory for a copy of 1 / MOST_BATCHES of the gradients, whatever the number of ranks.
MOST_BATCHES = 16


@dataclass(frozen=True, slots=True, eq=False)
class CodedReduction:
    """How the gradients of a group are reduced with codes.

    codes: their dtype, int8.   shards: the levels of the ranks that share the parameters.   replicas: those of the replicas.
    None in place of levels: gradients are reduced in full precision over that axis.
    """

    codes: torch.dtype
    shards: TwoLevels | None
    replicas: TwoLevels | None

    @classmethod
    def open(cls, mesh: DeviceMesh, codes: torch.dtype | None, full_precision_ranks: int | None) -> CodedReduction | None:
        """Make the levels of a group's mesh, of one axis, or two, of which the first replicates. None without codes.

        Collective. Raises ValueError as `two_levels.neighbours` does.
        """
        if codes is None:
            return None
        shards, replicas = neighbours(mesh, full_precision_ranks)
        *outer, inner = mesh.axis_names
        return cls(
            codes,
            TwoLevels.open(mesh if not outer else mesh[inner], shards, "reduce"),
            TwoLevels.open(mesh[outer[0]], replicas, "all_reduce") if outer else None,
        )


class _Coded(NamedTuple):
    """Values as codes, and their scales."""

    codes: torch.Tensor  # (rows, n)
    scales: torch.Tensor  # (rows, n / BLOCK) float32

    def of(self, numel: int) -> _Coded:
        """The codes and scales of the first `numel` elements, counted row after row, as one row."""
        return _Coded(self.codes.view(1, -1)[:, :numel], self.scales.view(1, -1)[:, : -(-numel // BLOCK)])

    def after(self, numel: int) -> list[torch.Tensor]:
        """All codes and scales after those of the first `numel` elements, each 1-D."""
        return [self.codes.view(-1)[numel:], self.scales.view(-1)[-(-numel // BLOCK) :]]


class _CodedBuffer:
    """The buffer of one coded reduction: codes and scales to send and received, and further tensors.

    It is allocated and released on the stream of the reduction, for as long as that runs. Hazard: where the stream is a thread,
    the buffer may have no memory yet when the caller submits work, so all views must be made before.
    """

    sent: _Coded
    received: _Coded
    others: list[torch.Tensor]  # (size,) each
    buffer: FlatBuffer

    def __init__(
        self, rows: int, numel: int, codes: torch.dtype, others: Sequence[tuple[torch.dtype, int]], buffers: BufferMaker
    ) -> None:
        """others: dtypes and elements of the further tensors."""
        coded = [(codes, (rows, numel)), (torch.float32, (rows, numel // BLOCK))]
        wanted = [*coded, *coded, *((dtype, (size,)) for dtype, size in others)]
        sizes = (-(-prod(shape) * dtype.itemsize // _BEGIN) * _BEGIN for dtype, shape in wanted)
        *starts, nbytes = accumulate(sizes, initial=0)
        self.buffer = buffers.make(BufferKind.CODES, nbytes)
        made = [self.buffer.view(dtype, start, shape) for start, (dtype, shape) in zip(starts, wanted, strict=True)]
        self.sent, self.received, self.others = _Coded(*made[:2]), _Coded(*made[2:4]), made[4:]


class _NodeRows(NamedTuple):
    """The rows of some nodes: one call reduces them, and one encodes them."""

    packed: torch.Tensor  # (k, nodes, s) segments of the packed gradients, by place among the neighbours
    copy: torch.Tensor | None  # a contiguous copy of `packed`; None if `packed` is contiguous
    sent: torch.Tensor  # all of the copy, or without one of `packed`, 1-D
    mine: torch.Tensor  # (nodes * s,) the part of `sent` in this rank's place, in which the sum is left
    coded: _Coded  # the codes of `mine`, 1-D


class CodedReduceScatter:
    """Sums packed gradients over the shard ranks; each keeps its segment. See the top of the file."""

    _levels: TwoLevels
    _memory: _CodedBuffer
    _batches: list[_NodeRows]

    def __init__(
        self,
        levels: TwoLevels,
        packed: FlatBuffer,
        codes: torch.dtype,
        dtype: torch.dtype,
        segment_numel: int,
        buffers: BufferMaker,
    ) -> None:
        """packed: the buffer of the segments of gradients, in `dtype`, not sealed yet.   segment_numel: a multiple of BLOCK."""
        assert segment_numel % BLOCK == 0, "planned so"
        self._levels = levels
        nodes, ranks = levels.across.size, 1 if levels.within is None else levels.within.size
        most = nodes if levels.within is None else -(-nodes // MOST_BATCHES)
        copied = most * ranks * segment_numel if most > 1 and ranks > 1 else 0
        self._memory = _CodedBuffer(nodes, segment_numel, codes, [(dtype, copied)], buffers)
        rows = packed.view(dtype, 0, (nodes, ranks, segment_numel))
        self._batches = [self._batch(rows, first, min(most, nodes - first)) for first in range(0, nodes, most)]
        self._memory.buffer.seal()

    def _batch(self, rows: torch.Tensor, first: int, nodes: int) -> _NodeRows:
        packed = rows[first : first + nodes].transpose(0, 1)
        copy = None if packed.is_contiguous() else self._memory.others[0][: packed.numel()].view(packed.shape)
        contiguous = packed if copy is None else copy
        place = 0 if self._levels.within is None else self._levels.within.rank
        coded = _Coded(*(all_rows[first : first + nodes].view(-1) for all_rows in self._memory.sent))
        return _NodeRows(packed, copy, contiguous.view(-1), contiguous[place].view(-1), coded)

    def run(self, out: torch.Tensor, stream: Stream) -> None:
        """Write the sum of this rank's segment to `out`, (segment_numel,), of the dtype of the packed gradients.

        The packed gradients are overwritten.
        """
        memory, within = self._memory, self._levels.within
        stream.submit(memory.buffer.allocate)
        if within is not None:
            with within.group():
                for batch in self._batches:
                    if batch.copy is None:
                        within.reduce_scatter(batch.mine, batch.sent, ReduceOp.SUM, stream=stream)
        for packed, copy, sent, mine, coded in self._batches:
            if copy is not None and within is not None:  # one copy after the other, in the same memory
                stream.submit(partial(copy.copy_, packed))
                within.reduce_scatter(mine, sent, ReduceOp.SUM, stream=stream)
            stream.submit(partial(encode, *coded, mine))
        _exchange(self._levels.across, memory, stream)
        stream.submit(partial(decode_sum, out, *memory.received))
        stream.submit(memory.buffer.release)


class CodedAllReduce:
    """Sums this rank's segment over the replicas. See the top of the file."""

    _levels: TwoLevels
    _memory: _CodedBuffer
    _part: torch.Tensor | None  # (s / k,) of the segment, which neighbours reduce for this rank; None: all of it, in place
    _sent: _Coded  # the codes of the part, as one row
    _unused: list[torch.Tensor]  # (numel,) each: what is sent beyond the part, as the last rows may be longer than its rest
    _total: torch.Tensor  # (row,) float32, the sum of this rank's row of the part
    _own: _Coded  # its codes, 1-D
    _received: _Coded  # the codes of the sums of all rows of the part, as one row

    def __init__(
        self, levels: TwoLevels, codes: torch.dtype, dtype: torch.dtype, segment_numel: int, buffers: BufferMaker
    ) -> None:
        self._levels = levels
        across, within = levels.across, levels.within
        numel = segment_numel if within is None else segment_numel // within.size
        row = -(-numel // (across.size * BLOCK)) * BLOCK
        others = [(torch.float32, row), *([(dtype, numel)] if within is not None else [])]
        self._memory = _CodedBuffer(across.size, row, codes, others, buffers)
        self._total, *parts = self._memory.others
        self._part = parts[0] if parts else None
        sent, received = self._memory.sent, self._memory.received
        self._sent, self._unused, self._received = sent.of(numel), sent.after(numel), received.of(numel)
        self._own = _Coded(sent.codes[0], sent.scales[0])
        self._memory.buffer.seal()

    def run(self, x: torch.Tensor, stream: Stream) -> None:
        """Replace `x`, (segment_numel,), by its sum over the replicas."""
        memory, (within, across) = self._memory, (self._levels.within, self._levels.across)
        part = x if self._part is None else self._part
        stream.submit(memory.buffer.allocate)
        if within is not None:
            within.reduce_scatter(part, x, ReduceOp.SUM, stream=stream)
        stream.submit(partial(self._encode, part))
        _exchange(across, memory, stream)
        stream.submit(self._sum)
        with across.group():
            for everyone, own in zip(memory.received, self._own, strict=True):
                across.all_gather(everyone, own, stream=stream)
        stream.submit(partial(decode_sum, part, *self._received))
        if within is not None:
            within.all_gather(x, part, stream=stream)
        stream.submit(memory.buffer.release)

    def _encode(self, part: torch.Tensor) -> None:
        encode(self._sent.codes[0], self._sent.scales[0], part)
        for unused in self._unused:
            unused.zero_()

    def _sum(self) -> None:
        decode_sum(self._total, *self._memory.received)
        encode(*self._own, self._total)


def _exchange(across: Communicator, memory: _CodedBuffer, stream: Stream) -> None:
    """Send row p of the codes and scales to rank p, and receive as many from it."""
    with across.group():
        for received, sent in zip(memory.received, memory.sent, strict=True):
            across.all_to_all(received, sent, stream=stream)


# ---------------------------------------------------------------------- the strategy


class QuantizedReduction(GradientReduction):
    """Sends codes over the shard ranks, the replicas, or both. The parameters must be laid out in whole blocks."""

    in_blocks = reads_padding = True
    _coded: CodedReduction
    _over_shards: CodedReduceScatter | None  # reduces what is packed in `_ordinary`
    _over_replicas: CodedAllReduce | None

    def __init__(self, coded: CodedReduction, spec: ReductionSpec) -> None:
        self._coded = coded
        super().__init__(spec if coded.shards is None else replace(spec, comm_buffer=None))
        self._divides_at_pack = True
        self.launches_jointly = self.launches_jointly and self._over_shards is None
        self.launches_jointly_over_replicas = self._over_replicas is None

    def _make_collectives(self, layout: ReduceLayout) -> None:
        shards, replicas = self._coded.shards, self._coded.replicas
        about = self._coded.codes, self._spec.dtype, layout.segment_numel, self._spec.buffers
        self._over_shards = None if shards is None else CodedReduceScatter(shards, self._ordinary.buffer, *about)
        self._over_replicas = None if replicas is None else CodedAllReduce(replicas, *about)

    def launch(self, packed: PackedGrads, stream: Stream) -> None:
        if self._over_shards is None:
            super().launch(packed, stream)
        else:
            self._over_shards.run(packed.out, stream)

    def _all_reduce(self, packed: PackedGrads, stream: Stream) -> None:
        if self._over_replicas is None:
            super()._all_reduce(packed, stream)
        else:
            self._over_replicas.run(packed.out, stream)

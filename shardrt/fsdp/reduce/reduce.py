"""A group's gradients: packed into one flat buffer, reduced over the ranks, and left as sharded `.grad`s.

| step                 | stream      | before -> after                                     | cost                              |
|----------------------|-------------|-----------------------------------------------------|-----------------------------------|
| pack                 | compute     | unsharded grads -> packed (N * s,), cast or added   | gradients read, packed written    |
| sum_terms            | reduce      | pieces of packed -> sums over tensor-parallel ranks | 1 all-reduce; pieces copied twice |
| launch               | reduce      | packed (N * s,) -> this rank's segment (s,)         | 1 reduce-scatter                  |
| launch_over_replicas | post_reduce | the segment, averaged over the replicas if any      | 1 all-reduce                      |
| publish              | post_reduce | segment -> `.grad`s, cast or added if necessary     | nothing, or the segment read once |

`pack` copies what is not there yet: where all streams run on the caller's thread, weight gradients of large linear layers are
computed in the packed buffer (`early.py`). Where a communication library would multiply each term before it adds, `pack`
divides instead (`Scaling`).
`sum_terms` is for tensor-parallel parameters of whose gradients each rank has a term only (`TermSum`).
Where gradients are sent as codes, `launch` and `launch_over_replicas` have steps of their own (`coded.py`).
Legend: N ranks; s elements in a segment; `post_reduce` is the reduce stream, or with replicas a stream of its own, so that
the next reduce-scatter runs beside the all-reduce. Without casts and without earlier gradients the segment *is* the `.grad`s.
A single shard rank packs its gradients directly into the new sharded ones, if there are none yet. Without replicas, and where
nothing is done to gradients on their way, it packs none (`unpacked.py`).
`pack` returns everything that the later steps need. Between backwards a reduction holds only what `HeldGrads` names; what a
failed reduction has packed counts as accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from ...comm import Communicator, PreMulSum, Stream
from ...kernels import add_into, pack_into
from ...kernels.reference import BLOCK
from ..base.events import BufferKind
from ..base.policy import CustomReduceScatter, StepSettings
from ..memory.buffers import BufferMaker, CommBuffer, FlatBuffer
from ..params.layout import Layout
from ..params.param import ShardedParam, placement_of
from .early import EarlyGrads
from .grad_layout import ALIGN, GradRange, ReduceLayout, Scaling, TermSum, reduce_layout, term_sums
from .packed_grads import Accumulated, Grads, HeldGrads, KeptGrads, Output, PackBuffer, PackedGrads, PartialGrads, lay_out
from .sharded_grads import ShardedGrads

_NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class ReductionSpec:
    """What a reduction is made of."""

    params: Sequence[ShardedParam]  # all of the group's
    chosen: Sequence[ShardedParam]  # those that take part, in order
    layout: Layout
    comm: Communicator  # of the ranks that share the parameters
    replicas: Communicator | None
    settings: StepSettings
    dtype: torch.dtype  # in which gradients are reduced
    buffers: BufferMaker
    comm_buffer: CommBuffer | None = None


class GradientReduction:
    """Packs, reduces and publishes the gradients of one group's trainable parameters, without codes.

    Gradients that are reduced as soon as they are packed are packed into the `CommBuffer`, if there is one and they fit.
    Other strategies: `CustomReduction` here, `coded.QuantizedReduction`, which sends codes, and
    `unpacked.UnpackedReduction` for a single rank.
    """

    in_blocks: ClassVar[bool] = False  # each parameter begins a new block of codes
    reads_padding: ClassVar[bool] = False  # of what is packed: it must be zeroed before gradients are written
    launches_jointly: bool  # launch() may be one of a group of calls: it does not read at once what it receives
    launches_jointly_over_replicas: bool = True  # so may launch_over_replicas()
    params: list[ShardedParam]  # of which it reduces gradients
    grads: ShardedGrads
    partial_sums: list[TermSum]  # one for each mesh over which terms of gradients are added up
    early: EarlyGrads
    _spec: ReductionSpec
    _divides_at_pack: bool  # as `Scaling.of` has it
    _ranks: int  # the number of ranks that are averaged over
    _everything: frozenset[int]  # the positions of all parameters
    _own: Sequence[GradRange]  # of this rank's segment
    _accumulated: Accumulated | KeptGrads | PackedGrads | None  # not published; written by the verbs below
    _partial_grads: PartialGrads | None  # what is in `_partial`; written by the verbs below
    _partial: PackBuffer  # (s,)
    _ordinary: PackBuffer
    _in_comm_buffer: PackBuffer | None  # a buffer that the communicator sends without a copy

    def __init__(self, spec: ReductionSpec) -> None:
        self._spec = replace(spec, comm_buffer=None)  # one that is too small is not kept
        comm, dtype, buffers, comm_buffer = spec.comm, spec.dtype, spec.buffers, spec.comm_buffer
        trainable = [index for index, param in enumerate(spec.params) if param in spec.chosen]
        self.params = [spec.params[index] for index in trainable]
        self._divides_at_pack = comm.multiplies_terms
        self._ranks = comm.size * (1 if spec.replicas is None else spec.replicas.size)
        self._everything = frozenset(range(len(trainable)))
        self._accumulated, self._partial_grads, self.early = None, None, EarlyGrads(self.params)
        found = reduce_layout(spec.layout, trainable, comm.rank, BLOCK if self.in_blocks else ALIGN)
        self._own = found.own
        placements = [placement_of(index, spec.layout) for index in trainable]
        self.grads = ShardedGrads(self.params, placements, found, comm.rank, dtype, buffers)
        self._partial = lay_out(buffers.make(BufferKind.PARTIAL, found.segment_numel * dtype.itemsize), (), (), dtype, ())
        self._partial.buffer.seal()
        nbytes = comm.size * found.segment_numel * dtype.itemsize
        self._ordinary = self._lay_out(self._make_buffer(nbytes), found)
        self._make_collectives(found)
        self._ordinary.buffer.seal()
        self._in_comm_buffer, self.launches_jointly = None, True
        if comm_buffer is not None and nbytes <= comm_buffer.nbytes:
            packed = buffers.make_in(comm_buffer, BufferKind.PACKED, nbytes)
            self._in_comm_buffer = self._lay_out(packed, found, windowed=comm_buffer.symmetric)
            self.launches_jointly = not comm_buffer.symmetric
        self.partial_sums = term_sums(self.params, found, self._ordinary.pieces, dtype, buffers)

    def _make_buffer(self, nbytes: int) -> FlatBuffer:
        """The buffer that gradients are packed into, where no other is available."""
        return self._spec.buffers.make(BufferKind.PACKED, nbytes)

    def _make_collectives(self, layout: ReduceLayout) -> None:
        """Make what a reduction needs beside the communicators; the buffer of `_ordinary` is not sealed yet."""

    def _lay_out(self, buffer: FlatBuffer, layout: ReduceLayout, *, windowed: bool = False) -> PackBuffer:
        gaps = layout.gaps(self._spec.comm.size) if self.reads_padding else ()
        first = self._spec.comm.rank * layout.segment_numel
        own = slice(first, first + layout.segment_numel) if windowed else None
        return lay_out(buffer, layout.pieces, self.params, self._spec.dtype, gaps, own)

    # ------------------------------------------------------------------ what is held between backwards

    @property
    def held(self) -> HeldGrads:
        """What earlier backwards have left; ACCUMULATED also if there are partial gradients as well."""
        if self._accumulated is not None:
            return HeldGrads.ACCUMULATED
        return HeldGrads.NOTHING if self._partial_grads is None else HeldGrads.PARTIAL

    @property
    def held_params(self) -> set[ShardedParam]:
        """The parameters of whose gradients something is held."""
        held = (self._accumulated, self._partial_grads)
        return {self.params[position] for each in held if each is not None for position in each.positions}

    def take_over(self, older: GradientReduction, post_reduce: Stream) -> None:
        """Hold what `older` holds instead of it, since others of the group's parameters are trainable from now on.

        All parameters of which it holds gradients must be among these.   post_reduce: the stream on which it has published.
        Cost: these gradients are copied twice.
        """
        stream = older.packs_on(post_reduce)
        stream.wait(post_reduce.record())
        to = {position: self.params.index(param) for position, param in enumerate(older.params) if param in self.params}
        held, reduced = older._accumulated, older._partial_grads
        older._accumulated = older._partial_grads = None
        if isinstance(held, KeptGrads):
            self._keep({to[position]: grad for position, grad in enumerate(held.grads) if grad is not None}, stream)
        elif held is not None:
            self._hold({to[position] for position in held.positions}, held.scaling, stream)
            stream.submit(partial(self._fill_held, held.source, {to[position]: position for position in held.positions}))
            stream.submit(held.source.buffer.release)
        if reduced is not None:
            self._partial_grads = PartialGrads(frozenset(to[position] for position in reduced.positions), stream)
            stream.submit(self._partial.buffer.allocate)
            stream.submit(partial(self._copy_partial, older, {to[position]: position for position in reduced.positions}))
            stream.submit(older._partial.buffer.release)

    def _hold(self, positions: Set[int], scaling: Scaling, stream: Stream) -> None:
        self._accumulated = Accumulated(self._ordinary, frozenset(positions), scaling, stream)
        stream.submit(self._ordinary.buffer.allocate)
        self._zero_padding(self._ordinary, stream)

    def _fill_held(self, source: PackBuffer, sources: Mapping[int, int]) -> None:
        grads: list[torch.Tensor | None] = [None] * len(self.params)
        for position, other in sources.items():
            grads[position] = source.gradient(other, self.params[position])
        self._ordinary.fill(grads, 1.0, pack_into, _NONE)

    def _keep(self, grads: Mapping[int, torch.Tensor], stream: Stream) -> None:
        """Hold these gradients of earlier backwards, which autograd has made."""
        scaling = self._scaling()
        self._hold(grads.keys(), scaling, stream)
        every = [grads.get(position) for position in range(len(self.params))]
        stream.submit(partial(self._ordinary.fill, every, scaling.before, pack_into, _NONE))

    def _copy_partial(self, older: GradientReduction, sources: Mapping[int, int]) -> None:
        self._partial.flat.zero_()
        for position, source in sources.items():
            to, taken = self._own[position], older._own[source]
            numel = taken.stop - taken.start
            self._partial.flat[to.offset : to.offset + numel] = older._partial.flat[taken.offset : taken.offset + numel]

    def packs_on(self, stream: Stream) -> Stream:
        """The stream to pack on: `stream`, or, if a buffer with gradients is held, the stream that allocated it."""
        if self.early.source is not None:
            return self.early.stream
        held = self._partial_grads if self._accumulated is None else self._accumulated
        return stream if held is None else held.stream

    @property
    def needs_reduction(self) -> bool:
        """Whether a reduction now would publish something that is held."""
        held = self.held
        return held is HeldGrads.ACCUMULATED or (held is HeldGrads.PARTIAL and self._publishes)

    @property
    def _publishes(self) -> bool:
        return self._spec.replicas is None or self._spec.settings.all_reduce

    def discard(self) -> None:
        """Forget what is packed, after a failed iteration."""
        self.early.drop()
        self._accumulated = self._partial_grads = None
        self._spec.buffers.release()

    # ------------------------------------------------------------------ gradients that are computed where they are packed

    def has_place(self, position: int) -> bool:
        """Whether place() may make a tensor for this parameter: its gradient is packed as one piece, without a cast."""
        dtype = self._spec.dtype
        is_packed = self._ranks > 1 and self.params[position].unsharded.dtype == dtype and dtype.is_floating_point
        return is_packed and not self.reads_padding and position in self._ordinary.whole

    def place(self, position: int, compute: Stream) -> torch.Tensor | None:
        """A tensor in the place to which pack() would copy this gradient. Autograd computes and holds the gradient there.

        None: the place cannot be had now, or was given away since the last pack(). Only for parameters with `has_place`, and
        only where all streams run on the caller's thread.
        """
        settings, early = self._spec.settings, self.early
        if self._accumulated is not None:
            return None
        if self._scaling().before != 1.0 or settings.reduce_hook is not None:  # a hook has to see zeros in the padding
            return None
        if early.source is None:
            source = self._ordinary
            if settings.sync_gradients:
                source = self._source(compute, fills_grads=self._publishes and self.grads.are_missing)
                if source is self._ordinary and self._in_comm_buffer is not None:
                    return None  # pack() will use the `CommBuffer`, which another reduction has now
            if not early.begin(source, compute):
                return None
        return early.give(position)

    # ------------------------------------------------------------------ a reduction, in order

    def pack(self, grads: Grads, compute: Stream) -> PackedGrads | None:
        """Copy gradients into a buffer, or add them to accumulated ones. None in `grads`: that parameter has none.

        Returns: what to launch and publish. None without synchronisation of gradients: then they stay here, accumulated. None
        also if they were published at once, without a reduction.
        compute: what `packs_on` returns.
        """
        settings, held, positions = self._spec.settings, self._accumulated, self._everything
        assert not isinstance(held, KeptGrads), "an `UnpackedReduction` takes them first"
        if not settings.reduce_unused and (unused := [position for position, grad in enumerate(grads) if grad is None]):
            positions = positions.difference(unused)
        if held is not None:
            positions |= held.positions
        scaling, packed = self._scaling(), None
        if settings.sync_gradients:
            self._accumulated = packed = self._prepare(held, positions, scaling, compute)
            source = packed.source
        else:
            source = self._ordinary if held is None else held.source
            self._accumulated = Accumulated(source, positions, scaling, compute)
        in_place = self.early.take(source, grads, compute)
        if held is None:
            compute.submit(source.buffer.allocate)
            self._zero_padding(source, compute)
        elif held.scaling.before != scaling.before:  # a divide factor may be set at any time
            compute.submit(partial(source.flat.mul_, scaling.before / held.scaling.before))
        compute.submit(partial(source.fill, grads, scaling.before, pack_into if held is None else add_into, in_place))
        return packed

    def _scaling(self) -> Scaling:
        factor, sums = self._spec.settings.divide_factor, self._spec.settings.force_sum
        return Scaling.of(self._spec.dtype, self._ranks, self._spec.comm.size, factor, sums, self._divides_at_pack)

    def _prepare(
        self, held: Accumulated | PackedGrads | None, positions: frozenset[int], scaling: Scaling, compute: Stream
    ) -> PackedGrads:
        """Allocate what the reduction will write: all gradients, if they are new and not converted; else scratch."""
        publishes, reduced = self._publishes, self._partial_grads
        if reduced is not None:
            positions |= reduced.positions
        fresh = self.grads.missing(positions)
        fills_grads = publishes and not self.grads.converts and len(fresh) == len(self.params)
        source = self._source(compute, fills_grads=fills_grads) if held is None else held.source
        new = (source.grads or self.grads.new(fresh, compute)) if publishes and fresh else None
        older = {position: self.grads.older(position, compute) for position in positions.difference(fresh)} if publishes else {}
        out = new.segment if new is not None and fills_grads else None
        result, used = Output.GRADS, list[FlatBuffer]()
        if not publishes:
            compute.submit(self._partial.buffer.allocate)
        elif reduced is not None:
            used.append(self._partial.buffer)
        if out is None:
            out, result = self.grads.scratch_flat, Output.SCRATCH if publishes else Output.PARTIAL
            compute.submit(self.grads.scratch.allocate)
            used.append(self.grads.scratch)
        used.append(source.buffer)
        return PackedGrads(source, new, older, out, scaling, positions, fresh, result, reduced is not None, used, compute)

    def _source(self, compute: Stream, *, fills_grads: bool) -> PackBuffer:
        """Where to pack gradients that are then reduced, if none are packed yet. fills_grads: the result is all new gradients.

        Invariant: the order of reductions alone decides whether that is the `CommBuffer`: NCCL must know the memory of all
        ranks, or of none. What place() has made there, on this rank only, is copied away when another group packs.
        """
        if fills_grads and self._spec.comm.size == 1 and not self.grads.converts:
            if (begun := self.early.source) is not None and begun.grads is not None:
                return begun
            return self._ordinary.in_grads(self.grads.new(range(len(self.params)), compute))
        source = self._in_comm_buffer
        return self._ordinary if source is None or not source.buffer.available else source

    def _zero_padding(self, source: PackBuffer, compute: Stream) -> None:
        """Zero the padding if it is read, if only by a hook."""
        if self._spec.settings.reduce_hook is not None:
            compute.submit(source.flat.zero_)
        elif source.gaps:
            compute.submit(source.zero_gaps)

    def sum_terms(self, packed: PackedGrads, stream: Stream) -> None:
        """Add up the terms of gradients that tensor-parallel ranks have packed."""
        for each in self.partial_sums:
            each.run(packed.source.pieces, stream)

    def launch(self, packed: PackedGrads, stream: Stream) -> None:
        """Average what is packed over the ranks that share the parameters."""
        is_there = packed.source.grads is not None and packed.result is Output.GRADS
        if is_there and not isinstance(packed.scaling.op, PreMulSum):
            return  # a single rank's gradients are its average
        # NCCL before 2.29 needs its output in the window as well. Cost: one segment copied.
        own = packed.source.own
        out = packed.out if own is None else own
        self._spec.comm.reduce_scatter(out, packed.source.flat, packed.scaling.op, stream=stream)
        if own is not None:
            stream.submit(partial(packed.out.copy_, own))

    def launch_over_replicas(self, packed: PackedGrads, stream: Stream) -> None:
        """Average over the replicas what launch() reduced, with what earlier backwards left; or leave it for a later one.

        Only where there are replicas.
        """
        held = self._partial.flat
        if packed.result is Output.PARTIAL:
            stream.submit(partial(held.add_ if packed.adds_partial else held.copy_, packed.out))
            return
        if packed.adds_partial:
            stream.submit(partial(packed.out.add_, held))
        self._all_reduce(packed, stream)

    def _all_reduce(self, packed: PackedGrads, stream: Stream) -> None:
        assert self._spec.replicas is not None, "the group has replicas"
        self._spec.replicas.all_reduce(packed.out, packed.out, packed.scaling.all_reduce_op, stream=stream)

    def publish(self, packed: PackedGrads, stream: Stream) -> None:
        """Make what was reduced the sharded gradients, or add it to earlier ones. If it stays partial, publish nothing."""
        if packed.result is Output.PARTIAL:
            self._accumulated, self._partial_grads = None, PartialGrads(packed.positions, packed.stream)
            return
        if packed.scaling.after != 1.0:
            stream.submit(partial(packed.out.mul_, packed.scaling.after))
        if self._spec.settings.reduce_hook is not None:
            _call_hook(self._spec.settings.reduce_hook, packed.out, stream, self._spec.settings.reduce_hook_stream or stream)
        grads = self.grads
        if packed.result is Output.SCRATCH:
            stream.submit(partial(grads.fold, packed.new, packed.fresh, packed.older))
        if packed.new is not None:
            grads.assign(packed.new, packed.fresh, stream)
        grads.call_hooks(packed.positions, stream)
        self._accumulated = self._partial_grads = None  # Hazard: not before: if a hook raises, streams use the memory


def _call_hook(hook: Callable[[torch.Tensor], None], out: torch.Tensor, stream: Stream, hook_stream: Stream) -> None:
    if hook_stream is not stream:
        hook_stream.wait(stream.record())
    hook_stream.submit(partial(hook, out))
    if hook_stream is not stream:
        stream.wait(hook_stream.record())


class CustomReduction(GradientReduction):
    """Reduces with a reduce-scatter of the user's, from memory that it allocates.

    The user's reduce-scatter gets the operation that averages, as FSDP2's do, and sees the padding, which is zero.
    """

    reads_padding = True

    def __init__(self, spec: ReductionSpec) -> None:
        super().__init__(replace(spec, comm_buffer=None))
        self.launches_jointly = self._divides_at_pack = False

    @property
    def _custom(self) -> CustomReduceScatter:
        assert self._spec.settings.reduce_scatter is not None, "that is why it was chosen"
        return self._spec.settings.reduce_scatter

    def _make_buffer(self, nbytes: int) -> FlatBuffer:
        buffers = self._spec.buffers
        memory = self._custom.allocate(nbytes, buffers.device)
        given = CommBuffer.given(memory, nbytes, buffers.device, self.params[0].name)
        return buffers.make_in(given, BufferKind.PACKED, nbytes)

    def _source(self, compute: Stream, *, fills_grads: bool) -> PackBuffer:
        return self._ordinary

    def launch(self, packed: PackedGrads, stream: Stream) -> None:
        self._custom(packed.out, packed.source.flat, packed.scaling.op, self._spec.comm, stream)

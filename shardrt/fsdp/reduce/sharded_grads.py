"""The sharded gradients of a group: their memory, and how a reduced segment becomes them.

As in a model that is not sharded, each step makes gradients of its own, and `zero_grad()` frees them: then their memory is free
for activations. The gradients of a group are views of one storage, which lives as long as one of them is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import nn

from ...comm import Stream
from ...kernels import add_into, pack_into
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.replaced import hooked, user_hooks
from ...tensor.placement.placement import ResolvedShard
from ...torch_internals import post_accumulate_grad_hooks
from ..base import events
from ..base.events import BufferKind, HasName
from ..memory.buffers import BufferMaker, FlatBuffer
from ..params.layout import round_up
from ..params.param import ShardedParam, local_geometry
from .grad_layout import ReduceLayout


class NewGrads(NamedTuple):
    """Memory for gradients of a group, in one step."""

    segment: torch.Tensor | None  # (s,) in the reduce dtype, if these are all gradients and reduced values are not converted
    parts: dict[int, torch.Tensor]  # this rank's part of each gradient, in the shape of the shard, by position


class ShardedGrads:
    """Makes the gradients of a group's trainable parameters, which are named by their positions in `params`.

    converts: reduced values become gradients by a cast or on another device. Then, and where they are added to earlier ones,
    they pass through `scratch`.
    """

    converts: bool
    scratch_flat: torch.Tensor  # (s,) in the reduce dtype: all of `scratch`
    scratch: FlatBuffer
    _params: Sequence[ShardedParam]
    _sharded: list[nn.Parameter]
    _group: HasName
    _device: torch.device  # the one that reduces
    _offloads: bool  # gradients lie on another device
    _starts: list[int]  # where each gradient begins in the segment, in bytes
    _geometry: list[tuple[torch.Size, tuple[int, ...]]]  # shape and strides of each gradient
    _scratch_views: list[torch.Tensor]  # the gradients' shapes in `scratch`

    def __init__(
        self,
        params: Sequence[ShardedParam],
        placements: Sequence[ResolvedShard],
        layout: ReduceLayout,
        rank: int,
        dtype: torch.dtype,
        buffers: BufferMaker,
    ) -> None:
        self._params, self._group, self._device = params, buffers.group, buffers.device
        self._sharded = [param.sharded for param in params]
        self.scratch = buffers.make(BufferKind.SCRATCH, layout.segment_numel * dtype.itemsize)
        self.scratch_flat = self.scratch.view(dtype, 0, (layout.segment_numel,))
        self._starts = [piece.offset * dtype.itemsize for piece in layout.own]
        self._offloads = any(param.local.device != self._device for param in params)
        self.converts = self._offloads or any(param.dtype != dtype for param in params)
        shapes = [param.shape for param in params]
        self._geometry = [local_geometry(shape, placement, rank) for shape, placement in zip(shapes, placements, strict=True)]
        self._scratch_views = [
            self.scratch.view(dtype, start, *geometry) for start, geometry in zip(self._starts, self._geometry, strict=True)
        ]
        self.scratch.seal()

    def new(self, positions: Sequence[int], stream: Stream) -> NewGrads:
        """Make the gradients of one step at these positions, with memory that is allocated on `stream`, not initialised.

        Hazard: on CUDA it may be allocated again, on `stream`, as soon as nothing refers to it: keep it until the other streams
        that use it are done.
        """
        params = [self._params[position] for position in positions]
        if self._offloads:
            made = [torch.empty_like(param.local, pin_memory=param.local.is_pinned()) for param in params]
            for each in made:
                self.tell_observers(each.untyped_storage())
            return NewGrads(None, dict(zip(positions, made, strict=True)))
        fills_segment = not self.converts and len(positions) == len(self._params)
        if fills_segment:
            starts, nbytes = [self._starts[position] for position in positions], self.scratch.nbytes
        else:
            *starts, nbytes = accumulate((round_up(param.local.nbytes, 16) for param in params), initial=0)
        storage = torch.UntypedStorage(0, device=self._device)
        stream.submit(partial(storage.resize_, nbytes))
        self.tell_observers(storage)

        def view(dtype: torch.dtype, start: int, shape: Sequence[int], stride: tuple[int, ...]) -> torch.Tensor:
            # Each has a version counter of its own: who changes one gradient has not changed the others.
            return torch.empty(0, dtype=dtype, device=self._device).set_(storage, start // dtype.itemsize, shape, stride)

        parts = {
            position: view(param.dtype, start, *self._geometry[position])
            for position, param, start in zip(positions, params, starts, strict=True)
        }
        return NewGrads(view(params[0].dtype, 0, self.scratch_flat.shape, (1,)) if fills_segment else None, parts)

    def tell_observers(self, storage: torch.UntypedStorage) -> None:
        """Tell observers that this storage holds sharded gradients of the group until it dies."""
        for observer in events.observers:
            observer.gradients_made(self._group, storage)

    def missing(self, positions: Iterable[int]) -> list[int]:
        """Those of these positions whose parameters have no gradient from before."""
        sharded = self._sharded
        return [position for position in positions if sharded[position].grad is None]

    @property
    def are_missing(self) -> bool:
        """Whether no parameter has a gradient from before."""
        return all(param.grad is None for param in self._sharded)

    def fold(self, new: NewGrads | None, fresh: Sequence[int], older: dict[int, torch.Tensor]) -> None:
        """Copy the gradients at `fresh` out of scratch, and add others to `older`, this rank's parts of earlier gradients."""
        if new is not None:
            pack_into([new.parts[p] for p in fresh], [self._scratch_views[p] for p in fresh])
        # Cost: gradients on the host are added there, once they have arrived.
        add_into(list(older.values()), [self._added(p, local) for p, local in older.items()])

    def _added(self, position: int, older: torch.Tensor) -> torch.Tensor:
        """What is added to this rank's part of an earlier gradient."""
        reduced = self._scratch_views[position].to(older.device)
        return self.hooked(position, reduced.to(older.dtype)) if user_hooks(self._sharded[position]) else reduced

    def hooked(self, position: int, part: torch.Tensor) -> torch.Tensor:
        """This rank's part of a new gradient, as the parameter's hooks change it."""
        return hooked(self._sharded[position], self._params[position].sharded_like(part)).to_local()

    def _change(self, position: int, part: torch.Tensor) -> None:
        changed = self.hooked(position, part)
        if changed is not part:
            part.copy_(changed)

    def older(self, position: int, stream: Stream) -> torch.Tensor:
        """This rank's part of a gradient from before.

        That may be a plain tensor of the whole parameter, which autograd made through a view of the gathered parameter: then it
        is replaced by a sharded one, on `stream`.
        """
        sharded = self._sharded[position]
        if not isinstance(sharded.grad, DTensor):
            stream.submit(partial(self._shard_older, position))
        return cast(DTensor, sharded.grad).to_local()

    def _shard_older(self, position: int) -> None:
        param, sharded = self._params[position], self._sharded[position]
        whole = cast(torch.Tensor, sharded.grad)
        sharded.grad = param.sharded_like(param.part_of(whole, sharded.spec).clone())  # type: ignore[attr-defined]

    def assign(self, new: NewGrads, fresh: Sequence[int], stream: Stream) -> None:
        """Make these the parameters' gradients. Hooks of the user's may change them, on the stream that makes them."""
        for position in fresh:
            if user_hooks(self._sharded[position]):
                self._arrive(position, stream)
                stream.submit(partial(self._change, position, new.parts[position]))
            self._sharded[position].grad = self._params[position].sharded_like(new.parts[position])

    def call_hooks(self, positions: Iterable[int], stream: Stream) -> None:
        """Call the parameters' post-accumulate-grad hooks on the stream that makes the gradients."""
        for position in positions:
            if hooks := post_accumulate_grad_hooks(self._sharded[position]):
                self._arrive(position, stream)
                for hook in tuple(hooks.values()):
                    stream.submit(partial(hook, self._sharded[position]))

    def _arrive(self, position: int, stream: Stream) -> None:
        """Wait for the gradient if it is offloaded: a hook is about to read it, on the host."""
        if self._params[position].local.device != stream.device:
            stream.synchronize()

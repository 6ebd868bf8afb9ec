"""The sharded gradients of a group: their memory, and how a reduced segment becomes them.

Each gradient is a view of one buffer, the same view in every step, as with DDP's `gradient_as_bucket_view`. So the next
backward overwrites a gradient that the user has kept beyond `zero_grad()`: clone it to keep it. (Not where a single rank
publishes what autograd has made, `unpacked.py`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from ..comm import Event, Stream, current_stream
from ..kernels import add_into, pack_into
from ..tensor.dtensor import DTensor
from ..tensor.placement import ResolvedShard
from ..torch_internals import post_accumulate_grad_hooks
from .buffers import BufferKind, FlatBuffer, MemoryCounter
from .grad_layout import ReduceLayout
from .param import ShardedParam, local_geometry
from .ranges import Named


class ShardedGrads:
    """The gradients of a group's trainable parameters, which are named by their positions in `params`.

    segment: (s,) in the reduce dtype, all of the gradients, if they are that without a cast and on the reducing device; None
        if reduced values must be converted. Then, and where gradients are added to earlier ones, they pass through `scratch`.
    """

    segment: torch.Tensor | None
    scratch_flat: torch.Tensor  # (s,) in the reduce dtype: all of `scratch`
    buffer: FlatBuffer  # of the gradients; empty if they are on the host
    scratch: FlatBuffer
    _params: Sequence[ShardedParam]
    _sharded: list[nn.Parameter]
    _grads: list[DTensor]
    _scratch_views: list[torch.Tensor]  # the gradients' shapes in `scratch`
    _stream: Stream  # that allocated `buffer`, so releases it

    def __init__(
        self,
        params: Sequence[ShardedParam],
        placements: Sequence[ResolvedShard],
        layout: ReduceLayout,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: MemoryCounter,
        group: Named,
    ) -> None:
        self._params = params
        self._sharded = [param.sharded for param in params]
        self._stream = current_stream(device)
        nbytes = layout.segment_numel * dtype.itemsize
        offsets = [piece.offset * dtype.itemsize for piece in layout.own]
        self.scratch = FlatBuffer(nbytes, device, memory, BufferKind.SCRATCH, group)
        self.scratch_flat = self.scratch.view(dtype, 0, (layout.segment_numel,))
        offloads = any(param.local.device != device for param in params)
        converts = offloads or any(param.dtype != dtype for param in params)
        starts = offsets
        if converts:
            *starts, nbytes = accumulate((-(-param.local.nbytes // 16) * 16 for param in params), initial=0)
        self.buffer = FlatBuffer(0 if offloads else nbytes, device, memory, BufferKind.GRADIENTS, group)
        self.segment = None if converts else self.buffer.view(dtype, 0, (layout.segment_numel,))
        self._grads, self._scratch_views = [], []
        for param, placement, start, offset in zip(params, placements, starts, offsets, strict=True):
            shape, stride = local_geometry(param.shape, placement, rank)
            self._scratch_views.append(self.scratch.view(dtype, offset, shape, stride))
            if offloads:
                local = torch.empty_like(param.local, pin_memory=param.local.is_pinned())
            else:
                local = self.buffer.view(param.dtype, start, shape, stride)
            self._grads.append(param.sharded_like(local))
        self.scratch.seal()

    def missing(self, positions: Iterable[int]) -> list[int]:
        """Of these, the parameters without a gradient from before."""
        sharded = self._sharded
        return [position for position in positions if sharded[position].grad is None]

    @property
    def are_missing(self) -> bool:
        """No parameter has a gradient from before."""
        return all(param.grad is None for param in self._sharded)

    def allocate(self, stream: Stream) -> None:
        """Back the gradients with memory, on this stream. No-op if they are."""
        if self.buffer.available:
            self._stream = stream
            stream.submit(self.buffer.allocate)

    def free(self, done: Sequence[Event]) -> None:
        """Free the memory once `done` have passed, unless some parameter has a gradient. Views of it become invalid."""
        if self.buffer.available or not self.are_missing:
            return
        for event in done:
            self._stream.wait(event)
        self._stream.submit(self.buffer.release)

    def fold(self, fresh: Sequence[int], older: dict[int, torch.Tensor]) -> None:
        """Copy the gradients at `fresh` out of scratch, and add others to `older`, this rank's parts of earlier gradients."""
        pack_into([self._grads[p].to_local() for p in fresh], [self._scratch_views[p] for p in fresh])
        # Cost: gradients on the host are added there, once they have arrived.
        add_into(list(older.values()), [self._scratch_views[p].to(local.device) for p, local in older.items()])

    def older(self, position: int) -> torch.Tensor:
        """This rank's part of a gradient from before.

        That may be a plain tensor of the whole parameter, which autograd made through a view of the gathered parameter: then it
        is replaced by a sharded one.
        """
        param, sharded = self._params[position], self._sharded[position]
        if not isinstance(sharded.grad, DTensor):
            whole = cast(torch.Tensor, sharded.grad)
            sharded.grad = param.sharded_like(param.part_of(whole, sharded.spec).clone())  # type: ignore[attr-defined]
        return sharded.grad.to_local()

    def assign(self, fresh: Sequence[int]) -> None:
        """Make these the parameters' gradients."""
        for position in fresh:
            self._sharded[position].grad = self._grads[position]

    def call_hooks(self, positions: Iterable[int], stream: Stream) -> None:
        """Call the parameters' post-accumulate-grad hooks on the stream that makes the gradients."""
        for position in positions:
            if hooks := post_accumulate_grad_hooks(self._sharded[position]):
                if self._grads[position].device != stream.device:
                    stream.synchronize()  # offloaded: the hook reads it on the host
                for hook in tuple(hooks.values()):
                    stream.submit(partial(hook, self._sharded[position]))

"""One communication unit: parameters gathered together and reduced together.

| step           | stream          | before -> after                            | cost                                    |
|----------------|-----------------|--------------------------------------------|-----------------------------------------|
| unshard        | gather          | shard (S,) -> full (N * S,)                | 1 all-gather, (N - 1) * S bytes         |
| wait_unsharded | compute         | the module sees full parameters            | 1 event wait                            |
| reshard        | gather          | the module sees shards; full is freed      | no communication                        |
| pack_grads     | compute         | gradients -> packed                        | gradients read and written once         |
| reduce_grads   | reduce          | packed -> this rank's segment              | 1 reduce-scatter                        |
| publish_grads  | reduce          | segment -> sharded gradients               | nothing, or the segment read once       |

Legend: N ranks; S bytes in a segment of the layout. The unsharded parameters are views of `full`: nothing is copied out.
Invariant: full storage is allocated and released on the gather stream only; it is there exactly while `ready` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, auto
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .buffers import FlatBuffer
from .comm import DeviceMesh, Work
from .kernels import pack_into
from .layout import Layout
from .param import ShardedParam, local_geometry, placement_of
from .policy import MixedPrecisionPolicy
from .reduction import GradientReduction, reduce_layout

if TYPE_CHECKING:
    from .runtime import Runtime


class Phase(IntEnum):
    """What a group's module is doing. (IntEnum: a plain one's hash is Python code.)"""

    RESTING = auto()
    FORWARD = auto()
    BACKWARD = auto()


_MOVES = {
    Phase.RESTING: {Phase.FORWARD, Phase.BACKWARD, Phase.RESTING},
    Phase.FORWARD: {Phase.RESTING},
    Phase.BACKWARD: {Phase.BACKWARD, Phase.RESTING},
}


class Call:
    """One forward call of a group's module that a backward will come back to.

    `inputs` counts its inputs that want a gradient; the last of those gradients ends the call's backward.
    """

    __slots__ = ("inputs", "inputs_left")

    def __init__(self) -> None:
        self.inputs = 0
        self.inputs_left = 0


class ParamGroup:
    """The parameters of one `fully_shard` call. `name` is its module's full name, once the root is known."""

    def __init__(
        self,
        module: nn.Module,
        params: Sequence[ShardedParam],
        layout: Layout,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.module = module
        self.name = type(module).__name__
        self.params = params
        self.layout = layout
        self.nbytes = layout.nbytes
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.parent: ParamGroup | None = None
        self.children: list[ParamGroup] = []
        self.runtime: Runtime | None = None
        self.phase = Phase.RESTING
        self.ready: Work | None = None  # done when `full` is gathered; None while sharded
        self.installed = False  # the module sees the unsharded parameters
        self.sync_gradients = True
        self.open_calls: set[Call] = set()  # whose backward is under way
        self.call = Call()  # the one whose forward is running
        self.trainable: list[ShardedParam] = []
        self.reduction: GradientReduction | None = None
        self._watches: list[RemovableHandle] = []  # on the gradients of the trainable parameters, if they are watched
        self._kept_versions: list[int] = []  # of the shards when a pass left them gathered
        self._gather_dtypes = [mp_policy.compute_dtype(param.dtype) for param in params]
        self._casts = any(p.dtype != dtype for p, dtype in zip(params, self._gather_dtypes, strict=True))
        self._shard_params()
        self._owners = [(*owner, param) for param in params for owner in param.owners]

    def _shard_params(self) -> None:
        """Keep this rank's part of every parameter, in one flat storage.

        Without casts that storage has the layout of the segment, so it is what the all-gather sends.
        """
        rank, offset = self.mesh.rank, 0
        offsets = []
        for index, param in enumerate(self.params):
            run = self.layout.run(index, rank)
            offsets.append(offset if self._casts else run.offset)
            offset += -(-(run.stop - run.start) * param.dtype.itemsize // 16) * 16
        nbytes = offset if self._casts else self.layout.segment_nbytes
        self._shard = torch.zeros(nbytes, dtype=torch.uint8, device=self.mesh.device)
        storage = self._shard.untyped_storage()
        self._locals: list[torch.Tensor] = []
        for index, param in enumerate(self.params):
            shape, stride = local_geometry(param.shape, placement_of(index, self.layout), rank)
            local = torch.empty(0, dtype=param.dtype, device=self.mesh.device)
            local.set_(storage, offsets[index] // param.dtype.itemsize, shape, stride)
            param.shard(index, self.layout, self.mesh, local)
            self._locals.append(local)

    def attach(self, runtime: Runtime, name: str) -> None:
        """Join the runtime of a root: communicators, streams, buffers; everything a step only replays."""
        self.runtime = runtime
        self.name = name or self.name
        self._streams = runtime.streams
        self.gather_comm = self.mesh.communicator("gather")
        self.reduce_comm = self.mesh.communicator("reduce")
        self.full = FlatBuffer(self.layout.nbytes, self.mesh.device, runtime.account)
        self._full_bytes = self.full.view(torch.uint8, 0, (self.layout.nbytes,))
        first = self.mesh.rank * self.layout.segment_nbytes
        self._own_bytes = self.full.view(torch.uint8, first, (self.layout.segment_nbytes,)) if self._casts else self._shard
        self._own_views = []
        for index, (param, dtype) in enumerate(zip(self.params, self._gather_dtypes, strict=True)):
            run, local = self.layout.run(index, self.mesh.rank), self._locals[index]
            self._own_views.append(self.full.view(dtype, first + run.offset, local.shape, local.stride()))
            param.make_unsharded(self.full, self.layout.slots[index].offset, dtype)
        self.full.seal()

    @property
    def root(self) -> ParamGroup:
        """The group of the outermost sharded module around this one."""
        return self if self.parent is None else self.parent.root

    def with_descendants(self) -> Iterator[ParamGroup]:
        """This group and those of sharded modules inside its own, from the outside in."""
        yield self
        for child in self.children:
            yield from child.with_descendants()

    @property
    def reshards_after_forward(self) -> bool:
        """By default all but the root do: its parameters are needed again at once, if there is a backward."""
        if self.reshard_after_forward is None:
            return self.parent is not None or not torch.is_grad_enabled()
        return self.reshard_after_forward

    def refresh_trainable(self) -> None:
        """Follow the sharded parameters' `requires_grad`, which the user may change between iterations."""
        trainable = [param for param in self.params if param.sharded.requires_grad]
        if trainable == self.trainable:
            return
        if self.reduction is not None and self.reduction.pending:
            raise RuntimeError(
                f"requires_grad of parameters of '{self.name}' changed while it holds accumulated gradients (rank "
                f"{self.mesh.rank}): run a backward with set_requires_gradient_sync(True) first"
            )
        self.trainable = trainable
        for param in self.params:
            param.unsharded.requires_grad_(param.sharded.requires_grad)
        while self._watches:
            self._watches.pop().remove()
        self.reduction = self._make_reduction() if trainable else None

    def watch_gradients(self, on_gradient: Callable[[ParamGroup, torch.Tensor], None]) -> None:
        """From now on call `on_gradient` whenever a parameter's gradient is ready. No-op if that is so.

        Cost: some microseconds of Python per parameter and backward.
        """
        if not self._watches:
            watch = partial(on_gradient, self)
            self._watches = [param.unsharded.register_post_accumulate_grad_hook(watch) for param in self.trainable]

    def _reduce_dtype(self, params: Sequence[ShardedParam]) -> torch.dtype:
        return self.mp_policy.reduce_dtype or reduce(torch.promote_types, [param.unsharded.dtype for param in params])

    def packed_nbytes(self) -> int:
        """Bytes of the packed gradients when every parameter is trainable."""
        if not self.params:
            return 0
        segment = reduce_layout(self.layout, range(len(self.params)), self.mesh.rank).segment_numel
        return self.mesh.size * segment * self._reduce_dtype(self.params).itemsize

    def _make_reduction(self) -> GradientReduction:
        assert self.runtime is not None, "attach() comes first"
        dtype, account = self._reduce_dtype(self.trainable), self.runtime.account
        return GradientReduction(self.params, self.layout, self.reduce_comm, dtype, account, self.runtime.slot_for(self))

    # ------------------------------------------------------------------ a step, in order

    def move(self, phase: Phase) -> None:
        """Enter `phase`; RuntimeError if that cannot follow the current one."""
        if phase not in _MOVES[self.phase]:
            raise RuntimeError(
                f"'{self.name}' cannot go from {self.phase.name} to {phase.name} (rank {self.mesh.rank}): a forward was "
                "cut short by an exception, or the module calls itself; call reset_iter_state() on the root to go on"
            )
        self.phase = phase

    def unshard(self) -> None:
        """Gather the shards into `full`. No-op if that is done or under way (prefetch)."""
        if self.ready is not None or not self.params:
            return
        gather = self._streams.gather
        gather.submit(self.full.allocate)
        if self._casts:
            gather.submit(self._cast_own)
        self.ready = self.gather_comm.all_gather(self._full_bytes, self._own_bytes, stream=gather)

    def _cast_own(self) -> None:
        pack_into(self._own_views, self._locals)

    def wait_unsharded(self) -> None:
        """Let compute wait for the gather and the module see full parameters. No-op if it does."""
        if self.installed or self.ready is None:
            return
        self.ready.wait(self._streams.compute)
        for registry, attribute, param in self._owners:
            registry[attribute] = param.unsharded
        self.installed = True

    def reshard(self) -> None:
        """Let the module see the shards and free the full buffer. No-op while sharded."""
        if self.ready is None:
            return
        if self.installed:
            for registry, attribute, param in self._owners:
                registry[attribute] = param.sharded
            self.installed = False
        # Hazard: compute may still read `full`; its storage must outlive those reads.
        self._streams.gather.wait(self._streams.compute.record())
        self._streams.gather.submit(self.full.release)
        self.ready = None

    def keep(self) -> None:
        """A pass ends and leaves the parameters gathered: remember of which shards they were."""
        self._kept_versions = [param.sharded._version for param in self.params]

    def drop_stale(self) -> None:
        """Reshard what an earlier pass left gathered if the shards have changed since, by an optimizer say."""
        if self.ready is not None and self._kept_versions != [param.sharded._version for param in self.params]:
            self.reshard()

    def has_all_gradients(self) -> bool:
        """Every trainable parameter has its gradient of this backward."""
        return all(param.unsharded.grad is not None for param in self.trainable)

    def has_gradients(self) -> bool:
        """Some trainable parameter has a gradient that is not packed yet."""
        return any(param.unsharded.grad is not None for param in self.trainable)

    def pack_grads(self) -> None:
        """Move the gradients there are from the unsharded parameters to the packed buffer."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        grads = [param.unsharded.grad for param in self.trainable]
        self.reduction.pack(grads, self._streams.compute, reduced_next=self.sync_gradients)
        for param in self.trainable:
            param.unsharded.grad = None

    def owes_reduction(self) -> bool:
        """Gradients that earlier backwards packed are to be reduced now."""
        return self.sync_gradients and self.reduction is not None and self.reduction.pending

    def reduce_grads(self) -> FlatBuffer:
        """Reduce what is packed. Returns the packed buffer, which the reduction reads."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        return self.reduction.launch(self._streams.reduce)

    def publish_grads(self) -> None:
        """Make what was reduced the sharded gradients."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        self.reduction.publish(self._streams.reduce)

    def end_backward(self) -> None:
        """No call's backward is under way any more."""
        self.open_calls.clear()
        if self.phase is Phase.BACKWARD:
            self.move(Phase.RESTING)
        self.reshard()

    def reset(self) -> None:
        """Back to rest and sharded; the gradients of the failed iteration are dropped."""
        self.phase = Phase.RESTING
        self.open_calls.clear()
        for param in self.trainable:
            param.unsharded.grad = None
        if self.reduction is not None:
            self.reduction.discard()
        self.reshard()

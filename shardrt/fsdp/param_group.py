"""One communication unit: parameters gathered together and reduced together.

| step           | stream          | before -> after                            | cost                                    |
|----------------|-----------------|--------------------------------------------|-----------------------------------------|
| unshard        | gather          | shard (S,) -> full (N * S,)                | 1 all-gather, (N - 1) * S bytes         |
| wait_unsharded | compute         | the module sees full parameters            | 1 event wait                            |
| reshard        | gather          | the module sees shards; full is freed      | no communication                        |
| reshard_to_subgroup| gather          | the same, but 1 / k of full stays          | that part copied; k ranks gather again  |
| pack_grads     | compute         | gradients -> packed                        | gradients read and written once         |
| reduce_grads   | reduce          | packed -> this rank's segment              | 1 reduce-scatter                        |
| reduce_over_replicas | post_reduce | the segment, if there are replicas         | 1 all-reduce                            |
| publish_grads  | post_reduce     | segment -> sharded gradients               | nothing, or the segment read once       |

Legend: N ranks; S bytes in a segment of the layout. The unsharded parameters are views of `full`: nothing is copied out.
Invariant: full storage is allocated and released on the gather stream only; it is there exactly while `ready` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, auto
from functools import partial, reduce
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..comm import Communicator, DeviceMesh, Event, Pool, Stream, Work, world
from ..kernels import pack_into
from ..tensor.dtensor import set_group
from . import registered
from .buffers import CommBuffer, CommFlatBuffer, FlatBuffer, MemoryCounter
from .grad_layout import reduce_layout
from .layout import Layout, ParamSpec
from .param import GatheredParameter, ShardedParam, local_geometry, placement_of
from .planner import plan
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Settings
from .prefetch import is_large
from .ranges import ranged
from .reduce import GradientReduction, Held, PackedGrads

if TYPE_CHECKING:
    from .runtime import Runtime


class Phase(IntEnum):
    """What a group's module is doing. (IntEnum: a plain one's hash is Python code.)"""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


_MOVES = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD, Phase.IDLE},
    Phase.FORWARD: {Phase.IDLE},
    Phase.BACKWARD: {Phase.BACKWARD, Phase.IDLE},
}


class ForwardCall:
    """One forward call of a group's module that a backward will come back to.

    `inputs` counts its inputs that want a gradient; the last of those gradients ends the call's backward.
    """

    __slots__ = ("inputs", "inputs_left")

    def __init__(self) -> None:
        self.inputs = 0
        self.inputs_left = 0


def _neighbours(mesh: DeviceMesh, ranks: int) -> Communicator:
    """Of this rank and its neighbours on the mesh, so many in all."""
    return mesh.unflatten((mesh.size // ranks, ranks), ("across", "within"))["within"].communicator("gather")


class PostForwardShard:
    """A k-th of each gathered buffer that a rank keeps, such that k neighbouring ranks have all of them."""

    def __init__(self, ranks: int, mesh: DeviceMesh, gathered: Sequence[torch.Tensor], memory: MemoryCounter) -> None:
        self._comm = _neighbours(mesh, ranks)
        self._gathered = gathered
        place, sizes = mesh.rank % ranks, [full_bytes.numel() // ranks for full_bytes in gathered]
        self.buffer = FlatBuffer(sum(sizes), mesh.device, memory)
        self._kept = [
            self.buffer.view(torch.uint8, end - size, (size,)) for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        self.buffer.seal()
        self._sources = [full_bytes.narrow(0, place * size, size) for full_bytes, size in zip(gathered, sizes, strict=True)]

    def fill(self) -> None:
        """Copy the part out of the gathered buffers."""
        self.buffer.allocate()
        for kept, source in zip(self._kept, self._sources, strict=True):
            kept.copy_(source)

    def gather(self, stream: Stream) -> Work:
        """Make the gathered buffers whole again."""
        for full_bytes, kept in zip(self._gathered, self._kept, strict=True):
            work = self._comm.all_gather(full_bytes, kept, stream=stream)
        return work


class ParamGroup:
    """The parameters of one `fully_shard` call on one mesh. `name` is its first module's full name, once the root is known.

    device_mesh: as given, of one axis or two.   mesh: its last axis, the ranks that the parameters are cut over.
    replicas: its first of two axes, the ranks that hold the same part.
    """

    stages = True  # what it gathers can go through a window

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[ShardedParam],
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = modules
        self.device_mesh = mesh
        self.name = type(modules[0]).__name__
        self.mesh = mesh if len(mesh.shape) == 1 else mesh[mesh.axis_names[1]]
        self.replicas = None if len(mesh.shape) == 1 else mesh[mesh.axis_names[0]]
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.offloads = offload_policy.applies_to(mesh.device)
        self.settings = Settings(reshard_after_forward)
        self.parent: ParamGroup | None = None
        self.children: list[ParamGroup] = []
        self.runtime: Runtime | None = None
        self.phase = Phase.IDLE
        self.custom_gather: Callable[[torch.Tensor, torch.Tensor, Communicator, Stream], Work] | None = None
        self.ready: Work | None = None  # done when `full` is gathered; None while sharded
        self.installed = False  # the modules see the unsharded parameters
        self.open_calls: set[ForwardCall] = set()  # whose backward is under way
        self.call = ForwardCall()  # the one whose forward is running
        self.running = False  # one of the modules is in its forward
        self._not_run: set[object] = set(modules)  # since all had run
        self.trainable: list[ShardedParam] = []
        self._plain: list[ShardedParam] = []  # whose unsharded parameter is of no subclass
        self.reduction: GradientReduction | None = None
        self._post_forward_shards: dict[int, PostForwardShard] = {}  # by the number of ranks that share
        self._post_forward_shard: PostForwardShard | None = None  # the one that a forward has left
        self._watches: list[RemovableHandle] = []  # on the gradients of the trainable parameters, if they are watched
        self.guarded = False  # the user can reach the unsharded parameters
        self._guarded_versions: list[int] = []  # of the unsharded parameters, since when
        self.ignored: set[tuple[nn.Module, str]] = set()  # parameters, by where they are registered
        self._versions: list[int] = []  # of the shards; what is gathered was gathered since
        # Made here, where every rank is: later, those of another stage of a pipeline may wait for this one's output.
        self.gather_comm = self.mesh.communicator("gather")
        self.reduce_comm = self.mesh.communicator("reduce")
        self.all_reduce_comm = None if self.replicas is None else self.replicas.communicator("all_reduce")
        if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            _neighbours(self.mesh, reshard_after_forward)
        self._take(params)

    def _take(self, params: Sequence[ShardedParam]) -> None:
        """Plan the layout of these parameters and keep this rank's part of them."""
        self.params = params
        self._gather_dtypes = [self.mp_policy.compute_dtype(param.dtype) for param in params]
        self._casts = any(p.dtype != dtype for p, dtype in zip(params, self._gather_dtypes, strict=True))
        specs = [
            ParamSpec(param.name, tuple(param.shape), dtype.itemsize, param.dim, rows_only=param.rows_only)
            for param, dtype in zip(params, self._gather_dtypes, strict=True)
        ]
        self.layout = self._plan(specs)
        self.nbytes = self.layout.nbytes
        self._shard_params()
        self._owners = [(owner.registry, owner.attribute, param) for param in params for owner in param.owners]
        for param in params:
            set_group(param.sharded, self)

    def _plan(self, specs: Sequence[ParamSpec]) -> Layout:
        return plan(specs, self.mesh.size)

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
        self._shard = self._shard_memory(offset if self._casts else self.layout.segment_nbytes)
        storage = self._shard.untyped_storage()
        self._locals: list[torch.Tensor] = []
        for index, param in enumerate(self.params):
            shape, stride = local_geometry(param.shape, placement_of(index, self.layout), rank)
            local = torch.empty(0, dtype=param.dtype, device=self._shard.device)
            local.set_(storage, offsets[index] // param.dtype.itemsize, shape, stride)
            param.shard(param.spec(index, self.layout, self.device_mesh), local)
            self._locals.append(local)

    def _shard_memory(self, nbytes: int) -> torch.Tensor:
        if any(param.original.is_meta for param in self.params):  # then all of them are: on one device, it was checked
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
        if not self.offloads:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.mesh.device)
        assert isinstance(self.offload_policy, CPUOffloadPolicy)
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.offload_policy.pin_memory)

    def refuse_meta(self) -> None:
        """RuntimeError if the parameters have no values yet."""
        if self.on_meta:
            raise RuntimeError(
                f"'{self.name}' runs while its parameters are on the meta device (rank {self.mesh.rank}): call to_empty() and "
                "initialise them, or load a state dict"
            )

    def attach(self, runtime: Runtime) -> None:
        """Join the runtime of a root: streams, buffers; everything a step only replays."""
        self.runtime = runtime
        self.custom_gather = runtime.gathers.get(self) or self.settings.all_gather
        self._streams = runtime.streams
        self._note = world().recorder.note
        self._make_full(runtime)
        self._plain = [param for param in self.params if type(param.unsharded) is nn.Parameter]

    def _make_full(self, runtime: Runtime) -> None:
        nbytes, custom = self.layout.nbytes, self.settings.all_gather
        self.full = FlatBuffer(nbytes, self.mesh.device, runtime.memory, self._pool(runtime))
        if custom is not None:
            comm_buffer = CommBuffer.given(custom.allocate(nbytes, self.mesh.device), nbytes, self.mesh.device, self.name)
            self.full = CommFlatBuffer(nbytes, comm_buffer, runtime.memory)
        full_bytes = self.full.view(torch.uint8, 0, (nbytes,))
        first, size = self.mesh.rank * self.layout.segment_nbytes, self.layout.segment_nbytes
        own_bytes = self._shard if self._sends_shard else self.full.view(torch.uint8, first, (size,))
        self._gathers = [(full_bytes, own_bytes)]
        self._own_views = [own_bytes]
        for index, (param, dtype) in enumerate(zip(self.params, self._gather_dtypes, strict=True)):
            param.make_unsharded(self.full, self.layout.placed[index].offset, dtype)
        if self._casts:
            self._own_views = [
                self.full.view(dtype, first + self.layout.run(index, self.mesh.rank).offset, local.shape, local.stride())
                for index, (local, dtype) in enumerate(zip(self._locals, self._gather_dtypes, strict=True))
            ]
        self.full.seal()

    def _pool(self, runtime: Runtime) -> Pool | None:
        return (self.settings.comm_memory and self.gather_comm.pool()) or runtime.pool

    @property
    def on_meta(self) -> bool:
        """The shards have no values yet."""
        return self._shard.is_meta

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's part of the parameters, padding included."""
        return self._shard.numel()

    @property
    def _sends_shard(self) -> bool:
        return not self._casts and not self.offloads

    def detach(self) -> None:
        """Leave the runtime, and have all groups under its root leave it: the next forward makes another.

        Raises RuntimeError in the middle of an iteration, or while there are gradients that are not reduced.
        """
        for group in self.root.with_descendants():
            if group.phase is not Phase.IDLE:
                raise RuntimeError(
                    f"'{group.name}' is running (rank {self.mesh.rank}): another dtype or device, by to(), half(), to_empty() "
                    "and the like, comes between iterations; after an exception call reset_iter_state() on the root first"
                )
            if group.reduction is not None and group.reduction.held is not Held.NOTHING:
                raise RuntimeError(
                    f"'{group.name}' has accumulated gradients that are not reduced (rank {self.mesh.rank}): before another "
                    "dtype or device, by to(), half(), to_empty() and the like, run a backward with "
                    "set_requires_gradient_sync(True) (and set_requires_all_reduce(True)), or reset_iter_state() on the root"
                )
        for group in self.root.with_descendants():
            group._leave()

    def _leave(self) -> None:
        self._drop_post_forward_shard()
        self.reshard()
        self.runtime, self.reduction, self.trainable = None, None, []
        self._post_forward_shards.clear()
        while self._watches:
            self._watches.pop().remove()

    def take_registered(self, replaced: dict[ShardedParam, nn.Parameter]) -> None:
        """Take these sharded parameters, which are registered in place of the group's. Collective if they lie otherwise."""
        for param, found in replaced.items():
            param.sharded = found
        self._take([param.clone_spec() for param in self.params])

    def rebuild_after_apply(self) -> None:
        """Take the parameters again after `to()` and the like have registered others, unless some only left the meta device."""
        if len({param.registered.is_meta for param in self.params if param.registered is not None}) == 1:
            self._take([param.clone_spec() for param in self.params])

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
        """Its modules have full parameters for their forward only, so must not return any."""
        if self.settings.reshard_after_forward is None:
            return self.parent is not None or not torch.is_grad_enabled()
        return self.settings.reshard_after_forward is not False

    def refresh_trainable(self) -> None:
        """Follow the sharded parameters' `requires_grad`, which the user may change between iterations."""
        trainable = [param for param in self.params if param.sharded.requires_grad]
        if trainable == self.trainable:
            return
        if self.reduction is not None and self.reduction.held is not Held.NOTHING:
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

    def begin(self) -> None:
        """An iteration starts."""
        self.refresh_trainable()
        self.invalidate_stale()
        if len(self.modules) > 1:
            self._not_run.update(self.modules)

    def free_gradients(self, done: Sequence[Event]) -> None:
        """Free the memory of sharded gradients that `zero_grad()` has dropped, in a large group, once `done` have passed."""
        if self.reduction is not None and is_large(self):
            self.reduction.free_grads(done)

    def watch_gradients(self, on_gradient: Callable[[ParamGroup, torch.Tensor], None]) -> None:
        """From now on call `on_gradient` whenever a parameter's gradient is ready. No-op if that is so.

        Cost: some microseconds of Python per parameter and backward.
        """
        if not self._watches:
            watch = partial(on_gradient, self)
            self._watches = [param.unsharded.register_post_accumulate_grad_hook(watch) for param in self.trainable]

    def _reduce_dtype(self, params: Sequence[ShardedParam]) -> torch.dtype:
        return self.mp_policy.reduce_dtype or reduce(
            torch.promote_types, [self.mp_policy.compute_dtype(param.dtype) for param in params]
        )

    def packed_nbytes(self) -> int:
        """Bytes of the packed gradients when every parameter is trainable."""
        if not self.params:
            return 0
        segment = reduce_layout(self.layout, range(len(self.params)), self.mesh.rank).segment_numel
        return self.mesh.size * segment * self._reduce_dtype(self.params).itemsize

    def _make_reduction(self) -> GradientReduction:
        assert self.runtime is not None, "attach() comes first"
        dtype, memory, comm_buffer = (
            self._reduce_dtype(self.trainable),
            self.runtime.memory,
            self.runtime.comm_buffer_for(self),
        )
        comms = (self.reduce_comm, self.all_reduce_comm)
        return GradientReduction(self.params, self.layout, *comms, self.settings, dtype, memory, comm_buffer)

    # ------------------------------------------------------------------ what is registered on the modules

    @property
    def shard_device(self) -> torch.device:
        """Where the shards are, once they have values."""
        return torch.device("cpu") if self.offloads else self.mesh.device

    def check_registered(self) -> None:
        """RuntimeError if something else is registered on the modules than this group's parameters."""
        installed = self.installed
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is not (param.unsharded if installed else param.sharded):
                registered.put_back(self)
                break
        if self.guarded:
            self.guard(False)

    def guard(self, on: bool = True) -> None:
        """The user can reach the unsharded parameters from now on, or no more: what was written to them is kept."""
        if on == self.guarded:
            return
        for param, version in zip(self._plain, self._guarded_versions, strict=False):
            if param.unsharded._version != version:
                param.keep_writes()
        # Cost: operations on a subclass take 0.2 us longer, so inside forward and backward the parameters are none.
        self.guarded, kind = on, GatheredParameter if on else nn.Parameter
        for param in self._plain:
            param.unsharded.__class__ = kind
            if on:
                param.unsharded.sharded = param.sharded  # type: ignore[attr-defined]
            else:
                param.unsharded.__dict__.pop("sharded", None)
        self._guarded_versions = [param.unsharded._version for param in self._plain] if on else []

    def show_shards(self) -> None:
        """Reshard; the modules see the shards even where a temporary exchange of parameters has put the others back."""
        self.reshard()
        for registry, attribute, param in self._owners:
            if self.runtime is not None and registry.get(attribute) is param.unsharded:
                registry[attribute] = param.sharded

    # ------------------------------------------------------------------ a step, in order

    def move(self, phase: Phase) -> None:
        """Enter `phase`; RuntimeError if that cannot follow the current one."""
        if phase not in _MOVES[self.phase]:
            raise RuntimeError(
                f"'{self.name}' cannot go from {self.phase.name} to {phase.name} (rank {self.mesh.rank}): a forward was "
                "cut short by an exception; call reset_iter_state() on the root to go on"
            )
        self.phase = phase

    def unshard(self) -> None:
        """Gather the shards, or the parts that were kept, into `full`. No-op if that is done or under way (prefetch)."""
        if self.ready is None and self.params:
            with ranged("FSDP::all_gather", self):
                self._gather()

    def _gather(self) -> None:
        self._note("gather", self.name)
        gather = self._streams.gather
        gather.submit(self.full.allocate)
        if self._post_forward_shard is not None:
            self.ready = self._post_forward_shard.gather(gather)
            self._drop_post_forward_shard()
            return
        if not self._sends_shard:
            gather.submit(self._fill_own)
        for full_bytes, own_bytes in self._gathers:
            if self.custom_gather is None:
                self.ready = self.gather_comm.all_gather(full_bytes, own_bytes, stream=gather)
            else:
                self.ready = self.custom_gather(full_bytes, own_bytes, self.gather_comm, gather)

    def _fill_own(self) -> None:
        pack_into(self._own_views, self._locals if self._casts else [self._shard])

    def wait_unsharded(self) -> None:
        """Let compute wait for the gather and the module see full parameters. No-op if it does."""
        if self.installed or self.ready is None:
            return
        with ranged("FSDP::all_gather_copy_out", self):
            self.ready.wait(self._streams.compute)
            self._fill_unsharded()
            for registry, attribute, param in self._owners:
                if registry.get(attribute) is param.sharded:
                    registry[attribute] = param.unsharded
        self.installed = True

    def _fill_unsharded(self) -> None:
        """Make the unsharded parameters of what was gathered: nothing to do for views of it."""

    def reshard(self) -> None:
        """Let the module see the shards and free the full buffer. No-op while sharded."""
        if self.ready is None:
            return
        if self.guarded:
            self.guard(False)
        self._note("free", self.name)
        self._show_shards()
        # Hazard: compute may still read `full`; its storage must outlive those reads.
        self._streams.gather.wait(self._streams.compute.record())
        self._streams.gather.submit(self.full.release)
        self.ready = None

    def _show_shards(self) -> None:
        if self.installed:
            for registry, attribute, param in self._owners:
                if registry.get(attribute) is param.unsharded:  # another one stays, for the next forward to refuse
                    registry[attribute] = param.sharded
            self.installed = False

    def all_have_run(self, module: object) -> bool:
        """`module` has run; had the group's other modules before it?"""
        if len(self.modules) == 1:
            return True
        self._not_run.discard(module)
        if self._not_run:
            return False
        self._not_run.update(self.modules)
        return True

    def reshard_after_forward(self) -> None:
        """Reshard, as far as the settings of a group that reshards after forward want it."""
        after = self.settings.reshard_after_forward
        if isinstance(after, bool) or after is None or not torch.is_grad_enabled():
            self.reshard()
        else:
            self.reshard_to_subgroup(after)

    def reshard_to_subgroup(self, ranks: int) -> None:
        """Reshard, but keep as much that this rank and its neighbours, `ranks` in all, can gather the parameters again."""
        if self.ready is None:
            return
        assert self.runtime is not None, "gathered, so attached"
        if ranks not in self._post_forward_shards:
            gathered = [full_bytes for full_bytes, _ in self._gathers]
            self._post_forward_shards[ranks] = PostForwardShard(ranks, self.mesh, gathered, self.runtime.memory)
        self._post_forward_shard = self._post_forward_shards[ranks]
        self._note("keep a post-forward shard of", self.name)
        self._streams.gather.submit(self._post_forward_shard.fill)
        self.reshard()

    def _drop_post_forward_shard(self) -> None:
        if self._post_forward_shard is not None:
            self._streams.gather.submit(self._post_forward_shard.buffer.release)
            self._post_forward_shard = None

    def invalidate_stale(self) -> None:
        """Free what is gathered, all or a part, if the shards have changed since, by an optimizer say."""
        versions = [param.sharded._version for param in self.params]
        if (self.ready is not None or self._post_forward_shard is not None) and self._versions != versions:
            self._drop_post_forward_shard()
            self.reshard()
        self._versions = versions

    def has_all_gradients(self) -> bool:
        """Every trainable parameter has its gradient of this backward."""
        return all(param.unsharded.grad is not None for param in self.trainable)

    def has_gradients(self) -> bool:
        """Some trainable parameter has a gradient that is not packed yet."""
        return any(param.unsharded.grad is not None for param in self.trainable)

    def needs_reduction(self, reduced: bool) -> bool:
        """Even without new gradients a reduction is due: of what earlier backwards packed, or of zeros if so asked.

        reduced: this backward has done one already.
        """
        if not self.settings.sync_gradients or self.reduction is None:
            return False
        return self.reduction.needs_reduction or (self.settings.reduce_unused and not reduced)

    def pack_grads(self) -> PackedGrads | None:
        """Move the gradients of the unsharded parameters to a packed buffer. None if they are not reduced yet."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        packed = self.reduction.pack([param.unsharded.grad for param in self.trainable], self._streams.compute)
        for param in self.trainable:
            param.unsharded.grad = None
        return packed

    def reduce_grads(self, packed: PackedGrads) -> None:
        """Reduce what is packed over the shard ranks."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        self._note("reduce", self.name)
        self.reduction.launch(packed, self._streams.reduce)

    def reduce_over_replicas(self, packed: PackedGrads) -> None:
        """Reduce what was reduced over the replicas as well, if there are any."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        self.reduction.launch_over_replicas(packed, self._streams.post_reduce)

    def publish_grads(self, packed: PackedGrads) -> None:
        """Make what was reduced the sharded gradients."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        self.reduction.publish(packed, self._streams.post_reduce)

    def end_backward(self) -> None:
        """No call's backward is under way any more."""
        self.open_calls.clear()
        if self.phase is Phase.BACKWARD:
            self.move(Phase.IDLE)
        self.finish_backward()

    def finish_backward(self) -> None:
        """Used for the last time in a backward: reshard, or if told not to keep the full parameters out of sight."""
        if self.ready is None:
            return
        with ranged("FSDP::post_backward_reshard", self):
            if self.settings.reshard_after_backward:
                self.reshard()
            else:
                self._show_shards()

    def reset(self) -> None:
        """Back to rest and sharded; the gradients of the failed iteration are dropped."""
        self.phase = Phase.IDLE
        self.open_calls.clear()
        self._not_run = set(self.modules)
        for param in self.trainable:
            param.unsharded.grad = param.sharded.grad = None
        if self.reduction is not None:
            self.reduction.discard()
        self._drop_post_forward_shard()
        self.reshard()

"""One communication unit: parameters gathered together and reduced together.

| step                 | stream      | before -> after                            | cost                                    |
|----------------------|-------------|--------------------------------------------|-----------------------------------------|
| unshard              | gather      | shard (S,) -> full (N * S,)                | 1 all-gather, (N - 1) * S bytes         |
| wait_unsharded       | compute     | the modules see full parameters            | 1 event wait                            |
| reshard              | gather      | the modules see shards; full is freed      | no communication                        |
| reshard(ranks=k)     | gather      | the same, but 1 / k of full is kept        | that part copied; k ranks gather again  |
| pack_grads           | compute     | gradients -> packed                        | gradients read and written once         |
| reduce_grads         | reduce      | packed -> this rank's segment              | 1 reduce-scatter                        |

Legend: N ranks; S bytes in a segment of the layout; k neighbouring ranks. Compute is the stream that is current: the user may
call each module on another.
Invariant: between these steps, what is gathered exists exactly while `state.gathered` (`gather/gather_state.py`). Only a gather
that failed may leave memory allocated otherwise, or settings that keep it; the next gather uses that memory.
`hooks.py` calls these steps around a module's forward and backward; `runtime.py` calls the reduction for several groups at a
time, and its last steps on the group's `GradientReduction`. How parameters are gathered is in `gather/`, how gradients are
reduced in `reduce/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ...comm import Communicator, DeviceMesh, MismatchError, Stream, Work
from ...comm.core.calls import Subject, about
from ...tensor.dtensor.dtensor import DTensor, flag_writes
from ...tensor.dtensor.group_registry import set_group
from ...torch_internals import as_plain_tensors, in_backward, outside_transforms, requires_grad
from ..base.autograd import BackwardProgress, GroupPhase, ModuleCalls
from ..base.events import Step, during
from ..base.policy import MixedPrecisionPolicy, Policies, QuantizationPolicy, RootSettings, StepSettings
from ..gather.coded import QuantizedGather
from ..gather.gather import AllGather, FlatGather, Gather, subgroup
from ..gather.gather_state import GatherState, Verb
from ..gather.mapped import DONE, MappedGather
from ..memory.buffers import BufferMaker
from ..memory.context import Context, Streams
from ..params.by_hand import HandUse
from ..params.in_place import give_places
from ..params.layout import Layout
from ..params.param import ShardedParam, Slot, times_written
from ..params.visible import VisibleParams, warn_of_writes
from ..reduce.coded import CodedReduction, QuantizedReduction
from ..reduce.packed_grads import PackedGrads
from ..reduce.reduce import CustomReduction, GradientReduction, ReductionSpec
from ..reduce.unpacked import UnpackedReduction

_ADVICE = (
    "where ranks leave out modules or parameters on purpose, let the others have zeros for their gradients: see "
    "set_reduce_scatter_unused_params(True, skipped_modules=True); "
    "run the same number of micro-batches on every rank in each step"
)
_made: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()  # how many groups were made on a communicator


@dataclass(slots=True)
class GroupSettings(StepSettings):
    """The settings of a group.

    forward_prefetch, backward_prefetch: the groups to gather ahead when its forward or backward starts. None: those that the
    recorded order names.
    """

    forward_prefetch: list[ParamGroup] | None = None
    backward_prefetch: list[ParamGroup] | None = None
    user_has_unsharded: bool = False  # inside of `unsharded`, which writes it


class ParamGroup:
    """Parameters of one `fully_shard` call on one mesh that are gathered and reduced together.

    device_mesh: as given, of one axis or two.   ignored: parameters that belong to no group, by where they are registered.
    """

    # Written by the constructor.
    device_mesh: DeviceMesh
    mesh: DeviceMesh  # its last axis: the ranks that the parameters are sharded over
    replicas: DeviceMesh | None  # its first of two axes: the ranks that hold the same shards
    policies: Policies  # as given
    mp_policy: MixedPrecisionPolicy  # one of them
    offloads: bool  # the shards are on the host, the mesh on another device
    settings: GroupSettings  # its fields are written by the setters of FSDPModule, and by `unsharded`
    ignored: frozenset[Slot]
    gather_comm: Communicator
    reduce_comm: Communicator
    all_reduce_comm: Communicator | None
    calls: ModuleCalls
    gather_kind: type[Gather]  # how the parameters are gathered if they are not quantised
    _coded: CodedReduction | None  # how the policy, as it was given, reduces with codes
    _modules: Sequence[ref[nn.Module]]

    name: str  # the full names of its modules, once the root is known; written by rename()
    subject: Subject  # what its collectives are for, as ranks compare it; written by rename()

    # Written by adopt(), of the group or of its parent.
    parent: ParamGroup | None
    children: list[ParamGroup]
    root_settings: RootSettings | None  # None inside another group; FSDPModule's setters write its fields

    # Written by _take(), anew when parameters change their dtype or device.
    params: Sequence[ShardedParam]
    gather: Gather
    layout: Layout
    quantization: QuantizationPolicy  # the part of the policy that applies to these parameters
    coded: CodedReduction | None  # `_coded`, if gradients of these parameters are reduced with codes
    nbytes: int  # of the gathered parameters
    bucket_nbytes: int  # what the group adds to a bucket of reductions: the same on all ranks, those of other columns included
    visible: VisibleParams

    # Written by attach().
    runtime: Context | None  # that of the root, made by its first forward; written by detach() too
    _streams: Streams
    _sharded: list[nn.Parameter]  # of `params`
    _unsharded: list[nn.Parameter]

    # Written by a step.
    state: GatherState  # written by _move()
    ready: Work  # of the newest gather, done when that is; written by unshard()
    _readers: dict[Stream, None]  # streams that used what is gathered; written by wait_unsharded() and reshard()
    _grad_streams: dict[Stream, None]  # streams that made gradients since the last pack_grads(); written by note_gradients()
    trainable: list[ShardedParam]  # those that get gradients; written by follow_requires_grad() and detach()
    reduction: GradientReduction | None  # of the trainable parameters and those whose gradients it holds; written with them
    _followed: list[bool]  # which of `params` were trainable when all that depends on it was made; [] before, or if it must be
    _flag_writes: int  # how often such flags had been written then, of any `DTensor`; -1 as []
    _shown: list[bool]  # which of `_unsharded` required gradients then; written by pass_requires_grad_on() too
    # By positions among those of the reduction, and whether it adds to earlier gradients; written by about_grads().
    _subjects: dict[tuple[frozenset[int], bool], Subject]
    _sees_dtensors: bool  # an extension of the user's shows DTensors to the modules; written with `reduction`
    _written: list[int]  # the shards' times_written() when free_stale() was last called; others now mean that they have changed

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[ShardedParam],
        mesh: DeviceMesh,
        policies: Policies,
        settings: GroupSettings,
        gather_kind: type[Gather] = FlatGather,
        *,
        ignored: frozenset[Slot] = frozenset(),
        root_settings: RootSettings | None = None,
    ) -> None:
        self._modules = [ref(module) for module in modules]
        self.device_mesh = mesh
        self.mesh = mesh if len(mesh.shape) == 1 else mesh[mesh.axis_names[1]]
        self.replicas = None if len(mesh.shape) == 1 else mesh[mesh.axis_names[0]]
        self.policies, self.mp_policy = policies, policies.mixed_precision
        self.offloads = policies.offload.applies_to(mesh.device)
        self.settings = settings
        self.ignored = ignored
        self.parent, self.children = None, []
        self.root_settings = RootSettings() if root_settings is None else root_settings
        self.calls = ModuleCalls(self._modules)
        self.runtime, self.state, self.ready = None, GatherState.SHARDED, DONE
        self._readers, self._grad_streams = {}, {}
        self.trainable, self.reduction, self._written, self._subjects = [], None, [], {}
        self._followed, self._flag_writes = [], -1
        # Communicators are made here, where every rank is: in a pipeline, ranks of a later stage wait for this one's output.
        for param in params:
            if param.outer is not None:
                param.outer.open_communicators(mesh)
        self.gather_comm = self.mesh.communicator("gather")
        self.reduce_comm = self.mesh.communicator("reduce")
        self.all_reduce_comm = None if self.replicas is None else self.replicas.communicator("all_reduce")
        counted = self.all_reduce_comm or self.gather_comm  # another replica may have made groups of its own
        self._number = _made[counted] = _made.get(counted, 0) + 1
        self.rename(type(modules[0]).__name__)
        if type(settings.reshard_after_forward) is int:
            subgroup(self.mesh, settings.reshard_after_forward)
        self.gather_kind = gather_kind
        self._coded = CodedReduction.open(mesh, policies.quantization.reduce, policies.quantization.full_precision_ranks)
        self._take(params)

    # ------------------------------------------------------------------ set-up

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that were sharded together, except for those that no longer exist."""
        return [module for reference in self._modules if (module := reference()) is not None]

    def _take(self, params: Sequence[ShardedParam]) -> None:
        """Plan the layout of these parameters and keep this rank's shards of them."""
        self.params = params
        self.quantization = self.policies.quantization.of_group([p.dtype for p in params], self.mp_policy, self.device_mesh)
        self.coded = None if self.quantization.reduce is None else self._coded
        kind = self._kind_of_gather(params)
        self.gather = kind(params, self.device_mesh, self.mesh, self.policies._replace(quantization=self.quantization))
        self.layout = self.gather.layout
        self.nbytes = self.bucket_nbytes = self.layout.nbytes
        if any(param.outer is not None for param in params):
            self.bucket_nbytes = sum(param.most_nbytes for param in params)
        self.visible = VisibleParams(params)
        for param in params:
            set_group(param.sharded, self)

    def _kind_of_gather(self, params: Sequence[ShardedParam]) -> type[Gather]:
        if self.quantization.gather is not None:
            return QuantizedGather
        is_mapped = self.gather_kind is FlatGather and MappedGather.suits(params, self.mesh, self.policies)
        return MappedGather if is_mapped else self.gather_kind

    def rebuild(self, params: Sequence[ShardedParam]) -> None:
        """Plan anew for these of its parameters, with what is registered for them now. Collective if shards move."""
        self._take([param.clone_spec() for param in params])

    def rename(self, name: str) -> None:
        """Give the group the name that errors and profiles show.

        Its number tells groups of one name apart: those of two models, or of one module.
        """
        self.name, self.subject = name, Subject(f"'{name}' (group {self._number})", _ADVICE)

    def adopt(self, children: Sequence[ParamGroup]) -> None:
        """Make this the parent of groups of sharded modules inside its own, or of its own modules on other meshes."""
        for child in children:
            child.parent, child.root_settings = self, None
            self.children.append(child)

    @property
    def root(self) -> ParamGroup:
        """The group of the outermost sharded module around this one."""
        return self if self.parent is None else self.parent.root

    @property
    def stages(self) -> Communicator | None:
        """The ranks that have the other stages, if the root is a stage of a pipeline."""
        settings = self.root.root_settings
        return None if settings is None else settings.stages

    def with_descendants(self) -> Iterator[ParamGroup]:
        """This group and those of sharded modules inside its own, from the outside in."""
        yield self
        for child in self.children:
            yield from child.with_descendants()

    def attach(self, runtime: Context, window: AllGather | None, begin_hand_backward: Callable[[], None]) -> None:
        """Join the runtime of a root: make buffers, and everything that a step only replays.

        window: an all-gather through a symmetric window, if the group has one.
        begin_hand_backward: called when a backward comes to code outside of the modules that has used gathered parameters.
        """
        self.runtime, self._streams = runtime, runtime.streams
        self._sharded = [param.sharded for param in self.params]
        self.gather.attach(runtime, self.settings, window, self)
        self.visible.attach(self.params, HandUse(self.gather.full.holds, begin_hand_backward))
        self._unsharded, self._shown = [param.unsharded for param in self.params], []

    def detach(self) -> None:
        """Leave the runtime, between iterations. The next forward of the root makes another."""
        self.reshard()
        if self.runtime is not None:
            self.gather.detach(self._streams.gather)
        self.visible.set_linear(())  # they refer to the reduction, and it to them
        self.calls.unwatch_gradients()
        self.runtime, self.reduction, self.trainable, self._followed, self._flag_writes = None, None, [], [], -1
        self._sharded, self._unsharded = [], []

    # ------------------------------------------------------------------ an iteration begins

    @property
    def makes_graph(self) -> bool:
        """Whether the forward that ended last under the root has recorded what a backward may come back to."""
        return self.runtime is not None and self.runtime.recorded

    @property
    def reshards_after_forward(self) -> bool:
        """Whether the full parameters are freed after a forward. Then its modules must not return any of them."""
        if self.settings.reshard_after_forward is None:
            return self.parent is not None or not self.makes_graph
        return self.settings.reshard_after_forward is not False

    @property
    def runs_alone(self) -> bool:
        """Whether a forward that begins or ends now is this rank's own: inside of `unsharded`, without gradients.

        False for one inside a forward of the root that gathers, which all ranks run.
        """
        if not self.settings.user_has_unsharded or torch.is_grad_enabled():
            return False
        root = self.root
        return root.settings.user_has_unsharded or root.calls.phase is GroupPhase.IDLE

    def begin(self) -> None:
        """An iteration starts; `free_stale` follows."""
        self.follow_requires_grad(reduces=torch.is_grad_enabled())
        if len(self._modules) > 1:
            self.calls.begin_iteration()

    def follow_requires_grad(self, *, reduces: bool) -> None:
        """Let parameters require gradients where the shards do now: the user may change that at any time.

        As in one process, a forward makes its graph of the parameters that require gradients in it, and a backward, of
        whichever forward, gives gradients to those of them that require gradients when it begins.
        reduces: such gradients may follow. Otherwise only the graph is concerned, such as that of `enable_grad` in `no_grad`.
        Cost: 0.2 us while nobody writes `requires_grad` of any `DTensor`.
        """
        # What the user has written to a gathered parameter makes the graph as it is; the end of the forward passes it on.
        if self._flag_writes == flag_writes.times:
            self.visible.was_exposed = self.state is GatherState.EXPOSED
            return
        if self.state.shown or self.visible.known:  # between two calls inside of one forward of the root; by the user
            self.pass_requires_grad_on()
        self._flag_writes, flags = flag_writes.times, list(map(requires_grad, self._sharded))
        if flags == self._followed and not self.visible.was_exposed:
            return
        self.visible.was_exposed = self.state is GatherState.EXPOSED
        with as_plain_tensors(), outside_transforms():
            if flags == self._followed == list(map(requires_grad, self._unsharded)):
                return
            self._followed, self._shown = [], flags
            for param, flag in zip(self.params, flags, strict=True):
                param.unsharded.requires_grad_(flag)
        if reduces and self._follow_trainable([param for param, flag in zip(self.params, flags, strict=True) if flag]):
            self._followed = flags
        else:
            self._flag_writes = -1

    def pass_requires_grad_on(self) -> None:
        """Let the shards require gradients where code has let the gathered parameters, which it saw inside of a forward, or has
        kept since they were exposed. Those that are exposed do so themselves.
        """
        if self.visible.was_exposed or not self._shown:  # nothing was shown since attach()
            return
        with as_plain_tensors():  # Cost: 0.1 us; large weights have a class while modules run
            flags = list(map(requires_grad, self._unsharded))
        if flags != self._shown:
            with outside_transforms():
                for sharded, flag, before in zip(self._sharded, flags, self._shown, strict=True):
                    if flag != before:
                        sharded.requires_grad_(flag)
            self._followed, self._shown = [], flags

    def _follow_trainable(self, trainable: list[ShardedParam]) -> bool:
        """Returns: False if the reduction has to be made anew once it has published what it holds of others."""
        older = self.reduction
        held = set() if older is None else older.held_params
        chosen = [param for param in self.params if param in held or param in trainable]
        if chosen != ([] if older is None else older.params):
            self._replace_reduction(chosen, older)
        if trainable != self.trainable:
            self.trainable = trainable
            self.calls.watch_again(param.unsharded for param in trainable)
        return len(chosen) == len(trainable)

    def unsharded_of(self, sharded: torch.Tensor) -> nn.Parameter:
        """What modules see of one of its sharded parameters, which attach() has made."""
        return next(param.unsharded for param in self.params if param.sharded is sharded)

    def sum_terms_of(self, sharded: Sequence[torch.Tensor]) -> None:
        """From now on ranks have terms of the gradients of these parameters, which are replicated over another mesh.

        Between a forward and its backward; alike on all ranks of both meshes.
        """
        chosen = set(map(id, sharded))
        for param in self.params:
            if id(param.sharded) in chosen:
                param.sum_terms()
        if (older := self.reduction) is not None:
            self._replace_reduction(older.params, older)

    def _replace_reduction(self, chosen: Sequence[ShardedParam], older: GradientReduction | None) -> None:
        assert self.runtime is not None, "attach() comes first"
        made = self._make_reduction(self.runtime, chosen) if chosen else None
        if made is not None and older is not None and older.held_params:
            made.take_over(older, self._streams.post_reduce)
        self._use_reduction(made)

    def _use_reduction(self, reduction: GradientReduction | None) -> None:
        self.reduction = reduction
        self._subjects.clear()
        self.visible.set_linear(())
        if reduction is None or self.runtime is None:
            return
        self._sees_dtensors = any(isinstance(param.unsharded, DTensor) for param in reduction.params)
        # Cost: a group around others would hold the packed buffer for all of the backward. Where reductions overlap
        # compute, the last one holds the buffer while gradients are computed: 10 of 12 groups would not get it.
        if self.runtime.is_large(self.nbytes) and not self.children and not self._streams.reduce.overlaps:
            places = give_places(reduction.params, reduction.has_place, reduction.place, self.calls, self._streams)
            self.visible.set_linear(places)

    def _make_reduction(self, context: Context, chosen: Sequence[ShardedParam]) -> GradientReduction:
        spec = ReductionSpec(
            params=self.params,
            chosen=chosen,
            layout=self.layout,
            comm=self.reduce_comm,
            replicas=self.all_reduce_comm,
            settings=self.settings,
            dtype=self.mp_policy.reduction_dtype(param.dtype for param in chosen),
            buffers=BufferMaker(self.mesh.device, context.memory, self),
            comm_buffer=context.comm_buffer_for(self.nbytes, symmetric=self.settings.symmetric),
        )
        if self.coded is not None:
            return QuantizedReduction(self.coded, spec)
        if self.settings.reduce_scatter is not None:
            return CustomReduction(spec)
        return UnpackedReduction(spec) if UnpackedReduction.suits(spec) else GradientReduction(spec)

    @property
    def sums_terms(self) -> bool:
        """Whether each rank has only terms of some gradients, which are added up over the ranks of another mesh."""
        return self.reduction is not None and bool(self.reduction.partial_sums)

    @property
    def is_kept(self) -> bool:
        """Whether something is gathered, all or a part: the same on all ranks."""
        return self.state is not GatherState.SHARDED

    def note_writes(self) -> bool:
        """Whether the shards were written since the last call, as far as this rank can tell."""
        before, self._written = self._written, times_written(self.params)
        return self._written != before

    def differs(self) -> bool:
        """Whether shards that somebody has had are not what was gathered of them. On the host; a GPU would have to wait.

        Cost: such shards, and this rank's part of what was gathered, are read.
        """
        if not self.state.gathered or not self.gather.needs_launch or self.mesh.device.type != "cpu":
            return False
        self.ready.wait(self._streams.compute)
        return self.visible.differ()

    def free_kept(self) -> None:
        """Free what is gathered, all or a part."""
        self.reshard()
        if self.state is GatherState.PART:
            self._move(Verb.FREE, partial(self.gather.drop_part, self._streams.gather))

    # ------------------------------------------------------------------ full parameters, in the order of a step

    def unshard(self) -> None:
        """Gather the parameters. No-op if that is done or under way (prefetch), unless shards were written in forward since."""
        if not self.params:
            return
        if not self.gather.needs_launch:  # Cost: what follows takes 5 us
            if not self.state.gathered:
                self._move(Verb.GATHER)
            return
        if self.state is GatherState.GATHERED and not in_backward():
            if self._root_is_idle:
                free_stale([self])
            elif self._written[: len(self.params)] != [param.sharded._version for param in self.params]:
                # Written in this forward, by all ranks alike. Cost: of telling each other, a call for each group.
                self.note_writes()
                self.free_kept()
        if self.state.gathered and not self.gather.is_paused:
            return
        with during(Step.GATHER, self), about(self.subject), outside_transforms():
            if self.state.gathered:
                self.ready = self.gather.resume(self._streams.gather, keeps=self._keeps_gathered)
                self._readers.clear()  # also a stream that has read it before waits
            else:
                self._move(Verb.GATHER, self._launch)

    def _launch(self) -> None:
        if self.state is GatherState.PART:
            self.ready = self.gather.launch_part(self._streams.gather)
        else:
            self.ready = self.gather.launch(self._streams.gather, keeps=self._keeps_gathered)

    def _move(self, verb: Verb, do: Callable[[], None] | None = None) -> None:
        """Write `state`, once `do` has run. Raises RuntimeError, before that, if the table does not allow it."""
        if self.state not in verb.origins:
            raise verb.refused(self.state, self)
        if do is not None:
            do()
        self.state = verb.to

    @property
    def _keeps_gathered(self) -> bool:
        """Whether what is gathered now is kept beyond the root's forward or backward, or is for the user."""
        settings = self.settings
        if settings.reshard_after_forward is False or not settings.reshard_after_backward or settings.user_has_unsharded:
            return True
        return not in_backward() and self._root_is_idle

    @property
    def _root_is_idle(self) -> bool:
        return self.root.calls.phase is GroupPhase.IDLE

    def wait_unsharded(self) -> None:
        """Let compute wait for the gather, and let the modules see full parameters. No-op if both are done."""
        if not self.state.gathered:
            return
        compute = self._streams.compute
        if self.state.shown and compute in self._readers:
            return
        self._readers[compute] = None
        with during(Step.WAIT, self), outside_transforms():
            self.ready.wait(compute)
            self.gather.fill_unsharded(compute)
            if not self.state.shown:
                self._move(Verb.SHOW, self.visible.show_unsharded)

    def expose(self) -> None:
        """Notice what the user's code does with the full parameters, which it can reach from now on. No-op if it could."""
        if self.state is not GatherState.EXPOSED:
            self._move(Verb.EXPOSE)  # first: a signal handler's exception may end this anywhere
            self.visible.expose()

    def conceal(self) -> None:
        """Keep what the user's code has written to full parameters, which it cannot reach any more. No-op if it could not."""
        if self.state is GatherState.EXPOSED:
            self._move(Verb.CONCEAL, self.visible.conceal)

    def hide(self) -> None:
        """Let the modules see the shards."""
        self._move(Verb.HIDE, self.visible.show_sharded)

    def keep(self) -> None:
        """Let what is gathered be this rank's own until it is resharded: from now on ranks use it without meeting."""
        with outside_transforms():
            self.gather.keep(self._streams.compute)

    def reshard(self, *, ranks: int | None = None) -> None:
        """Let the modules see the shards and free what is gathered. No-op while sharded.

        ranks: keep a part: this rank and its neighbours, so many in all, gather the parameters from each other next time.
        """
        if not self.state.gathered:
            return
        if ranks is not None:
            with during(Step.KEEP, self), about(self.subject), outside_transforms():
                self.gather.keep_part(ranks, self._streams.gather)
        self.conceal()
        writes = self._take_writes() if self.visible.ran else ()
        self._move(Verb.FREE if ranks is None else Verb.KEEP_PART, self._release)
        if writes:
            self._keep_writes(writes)

    def _release(self) -> None:
        if self.state.shown:
            self.visible.show_sharded()
        if self.gather.needs_launch:
            # The current stream has waited for streams that were used inside of the modules.
            self._readers[self._streams.compute] = None
            with during(Step.FREE, self):
                self.gather.release(self._streams.gather, self._readers)
        self._readers.clear()

    def _take_writes(self) -> Sequence[tuple[ShardedParam, torch.Tensor]]:
        """What modules have written to gathered parameters while they ran: this rank's parts. The rest may be freed then."""
        written = self.visible.take_writes()
        if not written or not self.gather.needs_launch:  # of a single rank, these are the shards
            return ()
        return [(param, param.unsharded_part().clone()) for param in written]

    def _keep_writes(self, writes: Sequence[tuple[ShardedParam, torch.Tensor]]) -> None:
        """Write them to the shards. This rank reads what is gathered no more, or has a copy."""
        fresh = times_written(self.params) == self._written
        with outside_transforms():
            kept = [param for param, part in writes if param.keep_part(part)]
        if fresh:  # What stays gathered has them. Hazard: a rank that wrote alone must not gather alone.
            self._written = times_written(self.params)
        self._streams.gather.wait(self._streams.compute.record())
        warn_of_writes(kept, self.name, self.device_mesh)

    def reshard_and_repair(self) -> None:
        """Reshard. The modules see the shards even where the user's code has temporarily registered the gathered parameters."""
        self.reshard()
        if self.runtime is not None:
            self.visible.show_sharded()

    def finish_forward(self) -> None:
        """Reshard after the parameters' last use in a forward. If the settings say so, keep a part for the backward."""
        ranks = self.settings.reshard_after_forward
        keeps_none = isinstance(ranks, bool) or self.gather.resident or not self.makes_graph
        self.reshard(ranks=None if keeps_none else ranks)

    def leave_unsharded(self, *, until_backward: bool) -> None:
        """End a forward after which the parameters stay gathered.

        until_backward: a backward will come back to what the forward has returned. Then, and inside of `unsharded`, the user
        can reach the gathered parameters from now on. Otherwise the modules see shards, since nothing would show them again.
        """
        stays = until_backward or self.settings.user_has_unsharded
        if not stays:
            self.conceal()
        writes = self._take_writes() if self.visible.ran else ()
        if self.state.shown:
            self.expose() if stays else self.hide()
        self.gather.pause()
        if writes:
            self._keep_writes(writes)

    def finish_backward(self, *, is_needed: bool) -> None:
        """Reshard after the parameters' last use in a backward. If they are to stay gathered, only let the modules see shards.

        is_needed: they stay gathered, since a backward with create_graph=True has made a graph that refers to them.
        """
        if not self.state.gathered:
            return
        with during(Step.POST_BACKWARD, self):
            if self.settings.reshard_after_backward and not is_needed and not self.settings.user_has_unsharded:
                self.reshard()
            else:
                self.leave_unsharded(until_backward=False)

    # ------------------------------------------------------------------ gradients, in the order of a step

    def reduction_due(self, progress: BackwardProgress, *, reduced: bool = False) -> bool:
        """Whether to reduce the gradients now.

        When one more gradient is ready: if it is the last one. Not where parameters may be unused: ranks may then have all
        gradients at different points, and only the end of the module is the same point for all.
        When a call of the module is over: if there is any gradient, or if zeros stand for gradients that other ranks may have.
        When the backward is over: also for what earlier backwards have left packed. Inside of `unsharded` only then: ranks may
        have used different parameters by hand.

        reduced: this backward has reduced the group already.
        """
        if self.reduction is None or (self.settings.user_has_unsharded and progress is not BackwardProgress.BACKWARD_DONE):
            return False
        if progress is BackwardProgress.GRADIENT_READY:
            waits = self.settings.reduce_unused or not self.trainable
            return not waits and all(param.unsharded.grad is not None for param in self.trainable)
        if [param for param in self.trainable if param.unsharded.grad is not None]:  # Cost: any() would take twice as long
            return True
        if progress is BackwardProgress.MODULE_DONE:
            return self.settings.reduce_unused
        unused = self.settings.reduce_unused and not reduced
        return self.settings.sync_gradients and (self.reduction.needs_reduction or unused)

    def note_gradients(self) -> None:
        """Note that gradients are made on the current stream, or that it has waited for the one on which they were made."""
        self._grad_streams[self._streams.compute] = None

    def pack_grads(self) -> PackedGrads | None:
        """Move the gradients of the unsharded parameters to a packed buffer. None if nothing is to be reduced.

        This runs on the first stream on which gradients were made, unless memory of another stream is held. Only after
        `note_gradients`.
        """
        assert self.reduction is not None, "only trainable parameters get gradients"
        grads = [param.unsharded.grad for param in self.reduction.params]
        if self._sees_dtensors:
            grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        made_on, self._grad_streams = self._grad_streams, {}
        stream = self.reduction.packs_on(next(iter(made_on)))
        self._streams.packed_on[stream] = None
        others = [other for other in made_on if other != stream]
        for other in others:
            stream.wait(other.record())
        with during(Step.PACK, self, stream=stream):
            packed = self.reduction.pack(grads, stream)
        for other in others:  # Hazard: gradients that they have allocated are about to be freed
            other.wait(stream.record())
        for param in self.reduction.params:
            param.unsharded.grad = None
        return packed

    def about_grads(self, packed: PackedGrads) -> about:
        """What the reductions of `packed` are for: this group's gradients, of those parameters that have one.

        Ranks that run different numbers of micro-batches in a step would add up gradients of different steps: some add to
        earlier gradients where others begin anew.
        Cost: a look-up if some have none, such as frozen ones, or earlier ones; the words are made once.
        """
        positions, adds = packed.positions, bool(packed.older)
        assert self.reduction is not None, "it has packed"
        if len(positions) == len(self.params) and not adds:
            return about(self.subject)
        if (positions, adds) not in self._subjects:
            reduced = [self.reduction.params[position].name for position in sorted(positions)]
            missing = [param.name for param in self.params if param.name not in reduced]
            word, names = ("without", missing) if len(missing) <= len(reduced) else ("only", reduced)
            words = f"{self.subject}, {word} {', '.join(names)}" if missing else self.subject
            words += ", added to earlier ones" if adds else ""
            self._subjects[positions, adds] = Subject(words, _ADVICE)
        return about(self._subjects[positions, adds])

    def reduce_grads(self, packed: PackedGrads) -> None:
        """Reduce what is packed over the shard ranks."""
        assert self.reduction is not None, "only trainable parameters get gradients"
        with self.about_grads(packed):
            self.reduction.launch(packed, self._streams.reduce)

    # ------------------------------------------------------------------ after a failure

    def reset(self) -> None:
        """Make the group idle and sharded again, and drop all of its gradients."""
        self.calls.reset()
        for param in self.params:
            param.unsharded.grad = param.sharded.grad = None
        if self.reduction is not None:
            self.reduction.discard()
        self._grad_streams.clear()
        self.free_kept()
        self.gather.drop_part(self._streams.gather)  # where keep_part() has failed


def free_stale(groups: Sequence[ParamGroup]) -> None:
    """Free what is gathered of those of these groups whose shards were written since, on any rank, such as by an optimizer.

    The ranks tell each other, since one may have written its shard alone, or have passed over an empty one; also of groups that
    others keep, if they may be skipped. Inside of `unsharded` they run on their own, and only see their own writes.
    Cost: nothing unless something is kept; then a comparison of 63 bits for each mesh, 13 us between two ranks of a node, and
    that of `ParamGroup.differs`.
    Raises MismatchError, on every rank alike, if they keep different groups that may not be skipped.
    """
    written = {group: group.note_writes() for group in groups}
    told = [group for group in groups if group.is_kept or group.settings.may_be_skipped]
    for comm in dict.fromkeys(group.gather_comm for group in told):
        shared = [group for group in told if group.gather_comm is comm and not group.settings.user_has_unsharded]
        if shared:
            mine = [group.is_kept and (written[group] or group.differs()) for group in shared]
            everyone = comm.differing(mine) or [mine]
            if any(len(each) != len(mine) for each in everyone):
                kept = comm.exchange([group.name for group in shared])
                raise MismatchError(
                    f"the ranks have run different modules, and keep {_by_rank(kept)} gathered; {_ADVICE}", comm
                )
            written.update(zip(shared, map(any, zip(*everyone, strict=True)), strict=True))
    for group in told:
        if written[group] and group.runtime is not None:
            group.free_kept()
            group.runtime.replaced |= not group.settings.user_has_unsharded  # there, a rank is on its own


def _by_rank(names: Sequence[Sequence[str]]) -> str:
    return "; ".join(f"rank {rank}: {', '.join(map(repr, each))}" for rank, each in enumerate(names))

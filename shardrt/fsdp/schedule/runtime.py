"""One root's iteration: where it begins and ends, and the reductions of several groups at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum, auto
from functools import partial

import torch
from torch import nn

from ... import comm
from ...batch_norm import name_batch_norms
from ...comm.monitor.progress import progress
from ...comm.startup import malloc
from ...torch_internals import outside_transforms, queue_backward_callback
from ..base import events
from ..base.autograd import BackwardProgress, GroupPhase, TensorWatcher
from ..base.events import Step, during
from ..base.policy import RootSettings
from ..memory import context
from ..memory.buffers import FlatBuffer, Handoff
from ..params.param import times_written
from ..reduce.grad_layout import reduce_layout
from ..reduce.packed_grads import HeldGrads, PackedGrads
from ..reduce.reduce import GradientReduction
from . import registered, symmetric_windows
from .param_group import ParamGroup, free_stale
from .prefetch import PrefetchQueue
from .same import same_buffers, same_weights
from .same.same_batches import FirstBatch
from .turns import Turns

_ONLY_FORWARD = 4  # forwards without a backward after which none is expected


class End(Enum):
    """What became of the end of the last backward, which reduces what is left."""

    REACHED = auto()  # or there was no backward
    QUEUED = auto()  # autograd will call; or an exception has cut the backward short
    FAILED = auto()
    LEFT = auto()  # it is left to finalize_backward()


class Runtime(context.Context):
    """What the groups under one root share, and the steps of an iteration. Made by the root's first forward. Collective."""

    root: ParamGroup
    groups: list[ParamGroup]  # all under the root, from the outside in
    prefetch: PrefetchQueue
    watcher: TensorWatcher
    first_batch: FirstBatch
    turns: Turns | None  # if ranks may skip modules; written by begin_forward() and reset()
    _settings: RootSettings
    _tensor_parallel: bool  # some parameters are tensor-parallel
    _unknown: registered.UnknownParams
    _to_reduce: dict[ParamGroup, None]  # groups whose gradients are ready, in order; small ones wait for more
    _to_reduce_nbytes: int
    # The newest reductions: what each has packed and makes, and the buffers that it uses.
    _in_flight: deque[tuple[Mapping[ParamGroup, PackedGrads], Sequence[Handoff]]]
    _reductions_in_flight: int  # the most buckets in flight; written when an iteration begins
    _reduced: set[ParamGroup]  # groups that were reduced in this backward
    _forwards: int  # how many have begun so far
    _first_written: int | None  # `_writes()` when the first backward ended
    _end: End
    makes_graph: bool  # the newest backward was one with create_graph=True; written by begin_backward()
    # The graph of a backward with create_graph=True needs the gathered parameters, until the end of a backward that makes none;
    # written by begin_backward(), _finish_backward() and reset()
    keeps_gathered: bool

    def __init__(self, root: ParamGroup) -> None:
        groups = list(root.with_descendants())
        super().__init__(root.mesh.device, replicas=any(group.replicas is not None for group in groups))
        assert root.root_settings is not None, "it has no parent"
        self.root = root
        self._settings = root.root_settings
        self.prefetch = PrefetchQueue(self.streams.gather)
        self.watcher = TensorWatcher()
        self.first_batch = FirstBatch(root)
        self.turns = None
        self._to_reduce, self._to_reduce_nbytes = {}, 0
        self._in_flight, self._reductions_in_flight = deque(), 1
        self._reduced = set()
        self._forwards, self._first_written = 0, None
        self._end, self.makes_graph, self.keeps_gathered = End.REACHED, False, False
        names = {module: name for name, module in root.modules[0].named_modules()}
        _check_one_root(root, names)
        _rename(root, groups, names)
        name_batch_norms({name: module for module, name in names.items()})
        registered.follow(root, groups)
        self.groups = registered.split_hooked(root)
        for group in self.groups:
            group.gather.check_ready(group.name)
        same_buffers.compare(root, names)
        same_weights.compare(root, self.groups)
        self._tensor_parallel = any(param.outer is not None for group in self.groups for param in group.params)
        try:
            self._attach()
            self._unknown = registered.UnknownParams(root)
            for group in self.groups:
                group.follow_requires_grad(reduces=True)
        except BaseException:  # for example, out of memory: the next forward tries again
            for group in self.groups:
                group.detach()
            raise

    def _attach(self) -> None:
        symmetric_windows.check_same_windows(self.root, self.groups)
        windows = symmetric_windows.gathers(self.groups)
        for group in self.groups:
            group.attach(self, windows.get(group), partial(self._begin_hand_backward, group))
        whole = [group for group in self.groups if group.coded is None or group.coded.shards is None]
        sent = [
            group
            for group in whole
            if group.mesh.size > 1 and self.sends_from_comm_buffer(group.nbytes, symmetric=group.settings.symmetric)
        ]
        reducer = self.root.mesh.communicator("reduce")
        symmetric = symmetric_windows.useful(reducer) and any(group.settings.symmetric for group in sent)
        nbytes = max((packed_nbytes(group) for group in sent), default=0)
        self.make_comm_buffer(reducer, nbytes, symmetric=symmetric)

    # ------------------------------------------------------------------ forward

    def begin_forward(self) -> None:
        """The root's forward starts."""
        if self._end in (End.QUEUED, End.FAILED):
            raise self._did_not_end()
        for group in self.groups:
            registered.check_registered(group, runs=group is self.root)
            if group.state.shown and group is not self.root and not group.settings.user_has_unsharded:
                group.hide()  # what stays gathered is seen from its module's forward on, as in every forward
        self._unknown.warn()
        self.turns = Turns.of(self, self.groups)
        self.recorded = torch.is_grad_enabled()  # for modules that this rank skips before its first one
        with during(Step.ROOT_PRE_FORWARD):
            self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._forwards += 1
        progress.forwards += torch.is_grad_enabled()
        if not malloc.keeps and self._has_allocated():
            malloc.trim()
            malloc.keep_freed_memory()
        done = self._settings.take_post_optim_event()
        self.streams.begin(done)
        if done is not None and any(group.gather.resident for group in self.groups):
            self.streams.compute.wait(done)  # modules read the shards themselves
        with outside_transforms():
            for group in self.groups:
                group.begin()
            free_stale(self.groups)
        self._reductions_in_flight = max(group.settings.reductions_in_flight for group in self.groups)
        if not self.root.runs_alone:
            self.prefetch.begin(self._settings.prefetch)

    def _has_allocated(self) -> bool:
        """Whether all lasting memory is allocated, as far as can be told: an optimizer has stepped, or none will.

        An optimizer has stepped if it has written shards, or if gradients of the first backward are gone.
        """
        if self._first_written is None:
            return self._forwards > _ONLY_FORWARD
        reductions = [group.reduction for group in self.groups if group.reduction is not None]
        waits = any(not each.grads.are_missing or each.held is not HeldGrads.NOTHING for each in reductions)  # for an optimizer
        return self._writes() != self._first_written or not waits

    def _writes(self) -> int:
        """How often trainable shards were written: also by optimizers whose gradients stay, or are dropped after a forward."""
        return sum(times_written([param for group in self.groups for param in group.params if param.sharded.requires_grad]))

    def enter_forward(self, group: ParamGroup) -> None:
        """A module of `group` runs next: gather its parameters, and those that come next."""
        group.calls.move(GroupPhase.FORWARD, group)
        # What this rank alone runs must not be recorded: the ranks' orders are to agree, and nothing is gathered in it.
        ahead = [] if group.runs_alone else self.prefetch.forward_starts(group, follows_lists=self.turns is None)
        group.unshard()
        group.wait_unsharded()
        self.gather_ahead(ahead, Step.FORWARD_PREFETCH)

    def leave_forward(self, group: ParamGroup, *, is_last: bool) -> None:
        """A module of `group` has run. is_last: so have the others of the group."""
        group.calls.move(GroupPhase.IDLE, group)
        used_next = not group.runs_alone and self.prefetch.forward_ends(group, has_graph=self.recorded)
        if is_last and group.reshards_after_forward and not used_next and not self.keeps_gathered:
            group.pass_requires_grad_on()
            group.finish_forward()
        if is_last and group.state.gathered:
            # Hazard: without a graph, other ranks may write their shards as soon as their forward is over, whereas code around
            # the module may still compute here with what it sees. Where a backward follows, they cannot have left that yet.
            group.gather.pause(reads_late=group.state.shown and not torch.is_grad_enabled())

    def end_forward(self, *, until_backward: bool) -> None:
        """The root's forward is over: free what was gathered ahead and not used.

        until_backward: it has returned tensors to which a backward will come back.
        """
        for group in self.groups:
            if shown := group.state.shown:
                group.pass_requires_grad_on()
            if shown and (self.keeps_gathered or self.recorded or not group.reshards_after_forward):
                group.leave_unsharded(until_backward=until_backward)
            elif not self.keeps_gathered:
                group.reshard()
        if not until_backward and any(group.offloads for group in self.groups):
            self.streams.gather.synchronize()  # the caller may write to the shards, on the host

    def gather_ahead(self, groups: list[ParamGroup], step: Step) -> None:
        """Start to gather groups that the prefetch queue has named. step: FORWARD_PREFETCH or BACKWARD_PREFETCH.

        Those that a user has named may be of another root, which has made no buffers before its first forward.
        """
        groups = [group for group in groups if group.runtime is not None]
        if groups:
            with during(step, *groups), outside_transforms():
                joint = {group: group.gather_comm for group in groups if group.gather.joint}
                _launch(groups, joint, lambda group: group.unshard())

    # ------------------------------------------------------------------ backward

    def begin_backward(self, group: ParamGroup) -> None:
        """A gradient is ready, of `group` or at its outputs. The first of a backward: have autograd call back at its end.

        Raises RuntimeError if the group has left this runtime since the forward.
        """
        if group.runtime is not self:
            raise RuntimeError(
                f"backward of '{group.name}' (rank {group.mesh.rank}): its parameters have moved to another dtype or "
                "device since the forward; run the forward again"
            )
        if self._end is End.FAILED:
            raise self._did_not_end()
        if self._end is not End.QUEUED:
            self._end, self.makes_graph = End.QUEUED, torch.is_grad_enabled()
            self.keeps_gathered |= self.makes_graph
            progress.accumulates = not any(group.settings.sync_gradients for group in self.groups)
            if self.turns is not None:
                self.turns.backward.restart()
            for each in self.groups:
                each.conceal()
                each.follow_requires_grad(reduces=True)
            if self.replaced:
                free_stale(self.groups)
                self.replaced = False
            queue_backward_callback(self._end_backward)

    def _begin_hand_backward(self, group: ParamGroup) -> None:
        """The backward comes to a node of code outside of the modules that has used the gathered parameters."""
        self.begin_backward(group)
        group.note_gradients()
        with during(Step.PRE_BACKWARD, group):
            if not group.state.gathered:  # else no rank communicates: others may not use the group by hand
                group.unshard()
            group.wait_unsharded()

    def _did_not_end(self) -> RuntimeError:
        return RuntimeError(
            f"the last backward through '{self.root.name}' did not end (rank {self.root.mesh.rank}): an exception cut it "
            "short; call reset_iter_state() on the root to drop its gradients and go on"
        )

    def enter_backward(self, group: ParamGroup) -> None:
        """The backward of `group` runs next: gather its parameters, and those that come next."""
        if group.settings.unshard_in_backward:
            group.unshard()
            group.wait_unsharded()
        ahead = self.prefetch.backward_starts(group, follows_lists=self.turns is None)
        if self.turns is not None:  # ranks free those whose turn has come at different points
            ahead = [group for group in ahead if self.turns.backward.is_to_come(group)]
        self.gather_ahead(ahead, Step.BACKWARD_PREFETCH)

    def leave_backward(self, group: ParamGroup) -> None:
        """The backward of `group` is over."""
        group.calls.move(GroupPhase.IDLE, group)
        group.finish_backward(is_needed=self.keeps_gathered)

    def reduce(self, group: ParamGroup) -> None:
        """The gradients of `group` are due: pack and reduce them, small groups several at a time."""
        group.note_gradients()
        if group not in self._to_reduce:
            self._to_reduce[group] = None
            self._to_reduce_nbytes += group.bucket_nbytes
        if self._to_reduce_nbytes > context.BUCKET_BYTES:
            self._reduce_bucket()

    def _reduce_bucket(self) -> None:
        """Reduce the groups that wait. Few buckets are in flight at a time, which bounds the memory of packed gradients."""
        again = any(packed.keys() & self._to_reduce.keys() for packed, _ in self._in_flight)  # with the same buffers
        with during(Step.RETIRE, *self._to_reduce):
            self._retire(0 if again else self._reductions_in_flight - 1)
        with torch.no_grad(), outside_transforms():  # backward(create_graph=True) runs its hooks with gradients enabled
            packed = {group: group.pack_grads() for group in self._to_reduce}
            if sent := {group: grads for group, grads in packed.items() if grads is not None}:
                self._send(sent)
        self._to_reduce.clear()
        self._to_reduce_nbytes = 0

    def _send(self, packed: dict[ParamGroup, PackedGrads]) -> None:
        """Reduce what these groups have packed, over the shard ranks and over the replicas, and publish it."""
        streams = self.streams
        with during(Step.REDUCE, *packed):
            self._reduce(packed)
        with during(Step.PUBLISH, *packed):
            for group, grads in packed.items():
                _reduction(group).publish(grads, streams.post_reduce)
        used: dict[comm.Stream, list[FlatBuffer]] = {}
        for grads in packed.values():
            used.setdefault(grads.stream, []).extend(grads.used)
        ready = streams.post_reduce.record()
        self._in_flight.append((packed, [Handoff(buffers, ready, stream) for stream, buffers in used.items()]))
        if not streams.post_reduce.overlaps:
            self._retire(0)  # it has run
        self._reduced.update(packed)

    def _reduce(self, packed: dict[ParamGroup, PackedGrads]) -> None:
        streams = self.streams
        for stream in dict.fromkeys(grads.stream for grads in packed.values()):
            streams.reduce.wait(stream.record())
        for group in [group for group in packed if group.sums_terms] if self._tensor_parallel else ():
            with group.about_grads(packed[group]):
                _reduction(group).sum_terms(packed[group], streams.reduce)
        joint = {group: group.reduce_comm for group in packed if _reduction(group).launches_jointly}
        _launch(packed, joint, lambda group: group.reduce_grads(packed[group]))
        if streams.post_reduce is not streams.reduce:
            streams.post_reduce.wait(streams.reduce.record())
            self._reduce_over_replicas(packed)

    def _reduce_over_replicas(self, packed: dict[ParamGroup, PackedGrads]) -> None:
        replicated = {group: group.all_reduce_comm for group in packed if group.all_reduce_comm is not None}
        joint = {group: ranks for group, ranks in replicated.items() if _reduction(group).launches_jointly_over_replicas}
        _launch(replicated, joint, lambda group: self._launch_over_replicas(group, packed[group]))

    def _launch_over_replicas(self, group: ParamGroup, packed: PackedGrads) -> None:
        with group.about_grads(packed):
            _reduction(group).launch_over_replicas(packed, self.streams.post_reduce)

    def _retire(self, newest: int) -> None:
        """Free the buffers of all but the `newest` buckets of reductions, once those have run."""
        while len(self._in_flight) > newest:
            for handoff in self._in_flight[0][1]:
                handoff.release()
            self._in_flight.popleft()  # Hazard: not before: a hook may have dropped a gradient that a stream still uses

    def _end_backward(self) -> None:
        """Reduce what is left, such as groups that waited for a gradient in vain, and let compute see all gradients."""
        self._end = End.FAILED  # unless all of it returns
        events.end(Step.BACKWARD)
        with during(Step.ROOT_POST_BACKWARD):
            if self.turns is not None:
                self.turns.end_backward()
            if self._settings.finalizes_by_hand:  # these are not reduced: what is due of them stays on this rank
                settings = [(group, group.settings) for group in self.groups]
                self._finish_backward([group for group, its in settings if not (its.sync_gradients or its.user_has_unsharded)])
                self._end = End.LEFT
                return
            self._finish_backward(self.groups)
            self._reduced.clear()
            if self._settings.is_last_backward:
                self.settle()
        self._end = End.REACHED

    @property
    def is_left(self) -> bool:
        return self._end is End.LEFT

    def finalize_backward(self) -> None:
        """Do what the ends of the last backwards have left, but for `settle`. Collective."""
        if self._end in (End.QUEUED, End.FAILED):
            raise self._did_not_end()
        groups = self.groups if self.is_left else []
        self._end = End.FAILED  # unless all of it returns
        with during(Step.ROOT_POST_BACKWARD):
            self._finish_backward(groups)
            self._reduced.clear()
        self._end = End.REACHED

    def _finish_backward(self, groups: Sequence[ParamGroup]) -> None:
        """groups: those whose gradients are due."""
        self._agree_on_gradients([group for group in groups if group.settings.user_has_unsharded])
        for group in groups:
            if group.reduction_due(BackwardProgress.BACKWARD_DONE, reduced=group in self._reduced):
                self.reduce(group)
        if self._to_reduce:
            self._reduce_bucket()
        for group in self.groups:
            if group.reduction is not None:
                group.reduction.early.drop()
            if group.calls.phase is GroupPhase.BACKWARD:
                group.calls.end_backward(group)
            if group.state.gathered:
                group.finish_backward(is_needed=self.makes_graph)
        self.keeps_gathered = self.makes_graph
        if self._first_written is None:
            self._first_written = self._writes()

    def _agree_on_gradients(self, groups: Sequence[ParamGroup]) -> None:
        """Inside of `unsharded`, ranks may use different parameters: give this rank zeros where others have a gradient.

        No-op on a rank without a gradient in these groups; then no rank may have one. Collective on the others.
        """
        params = [param for group in groups for param in group.trainable]
        have = [param.unsharded.grad is not None for param in params]
        if not any(have) or (answers := self.root.device_mesh.differing(have)) is None:
            return
        for group in groups:
            group.note_gradients()
        for param, *others in zip(params, *answers, strict=True):
            if param.unsharded.grad is None and any(others):
                param.unsharded.grad = torch.zeros_like(param.unsharded)

    def settle(self) -> None:
        """Let the caller's stream, where the optimizer runs, see all gradients, and free the buffers of the reductions."""
        self._retire(0)
        caller = self.streams.compute
        caller.wait(self.streams.post_reduce.record())
        for stream in self.streams.packed_on:
            if stream != caller:
                caller.wait(stream.record())  # it publishes gradients that need no reduction
        self.streams.packed_on.clear()
        if any(group.offloads for group in self.groups):
            self.streams.synchronize()  # the optimizer reads the gradients on the host, which waits for no stream
        for group in self.groups:
            group.gather.wait_for_readers()  # an optimizer writes the shards

    def reset(self) -> None:
        """Forget a failed iteration: wait for everything under way, and shard all groups again."""
        self._end, self.keeps_gathered, self.replaced = End.REACHED, False, False
        events.end(Step.BACKWARD)
        self.turns = None
        self.prefetch = PrefetchQueue(self.streams.gather)  # what it has recorded may differ between ranks
        self.streams.recover()
        self._to_reduce.clear()
        self._to_reduce_nbytes = 0
        self._reduced.clear()
        self._retire(0)
        for group in self.groups:
            if group.settings.reduce_hook_stream is not None:
                group.settings.reduce_hook_stream.recover()
        for group in self.groups:
            group.reset()


def runtime_of(group: ParamGroup) -> Runtime | None:
    """The runtime that the group has joined. Of that, the group itself knows what a `Context` declares."""
    runtime = group.runtime
    assert runtime is None or isinstance(runtime, Runtime)
    return runtime


def _reduction(group: ParamGroup) -> GradientReduction:
    assert group.reduction is not None, "it has packed"
    return group.reduction


def packed_nbytes(group: ParamGroup) -> int:
    """Bytes of a group's packed gradients when every parameter is trainable."""
    if not group.params:
        return 0
    segment = reduce_layout(group.layout, range(len(group.params)), group.mesh.rank).segment_numel
    return group.mesh.size * segment * group.mp_policy.reduction_dtype(param.dtype for param in group.params).itemsize


def _check_one_root(root: ParamGroup, names: dict[nn.Module, str]) -> None:
    """Raise RuntimeError for a sharded module under the root that has another root already, which is not under this one."""
    for module, name in names.items():
        found = vars(module).get("param_groups")  # other modules may have a method or a list of that name
        for group in found if isinstance(found, tuple) else ():
            if isinstance(group, ParamGroup) and not names.keys() & group.root.modules:
                raise RuntimeError(
                    f"'{name}' in '{root.name}' is part of '{group.root.name}' already, which was sharded around it (rank "
                    f"{root.mesh.rank}): a sharded module has one root; call fully_shard on a module around both"
                )


def _rename(root: ParamGroup, groups: Iterable[ParamGroup], names: dict[nn.Module, str]) -> None:
    """Name the groups as their modules are named under the root. Raises RuntimeError for one that ran as a root of its own."""
    for group in groups:
        group.rename(", ".join(names.get(module, type(module).__name__) for module in group.modules) or group.name)
        if group.runtime is not None:
            raise RuntimeError(
                f"'{group.name}' ran as a root of its own before '{root.name}' around it was sharded (rank "
                f"{root.mesh.rank}): shard all modules, from the inside out, before the first forward"
            )


def _launch(
    groups: Iterable[ParamGroup], joint: Mapping[ParamGroup, comm.Communicator], call: Callable[[ParamGroup], None]
) -> None:
    """Make `call` for each group. The collectives of the groups in `joint` are launched in one go on each communicator.

    joint: the groups for which that is possible, and their communicators. A custom collective, or a decoder, uses at once what
    it has received, so it cannot be one of a group of calls.
    """
    with ExitStack() as stack:
        stack.enter_context(during(Step.LAUNCH, *joint))
        for communicator in dict.fromkeys(joint.values()):
            stack.enter_context(communicator.group())
        for group in joint:
            call(group)
    for group in groups:
        if group not in joint:
            with during(Step.LAUNCH, group):
                call(group)

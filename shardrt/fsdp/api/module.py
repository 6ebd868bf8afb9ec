"""`FSDPModule`: the class that `fully_shard` gives a module, with its methods and settings, and functions on such modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ...comm import Event, Stream, current_stream
from ...torch_internals import in_backward, nodes_made
from ..base.autograd import GroupPhase
from ..base.events import Step, during
from ..base.policy import CustomAllGather, CustomReduceScatter, PrefetchPolicy, RootSettings
from ..schedule import hooks, module_apply, registered
from ..schedule.param_group import GroupSettings, ParamGroup, free_stale
from ..schedule.runtime import Runtime, runtime_of
from ..schedule.state_dicts import check_state_dict_options


class UnshardHandle:
    """A gather under way: what `unshard(async_op=True)` returns."""

    _groups: Sequence[ParamGroup]

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        """Let compute wait for the gather, and register the full parameters. No-op the second time, and after a reshard."""
        for group in self._groups:
            if group.state.gathered:
                group.wait_unsharded()
                group.expose()


class GradientReductionHandle:
    """Reductions under way: what `finalize_backward(async_op=True)` returns."""

    _runtime: Runtime | None

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime

    def wait(self) -> None:
        """Let the current stream, where the optimizer runs, see all gradients. No-op the second time."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.settle()


class FSDPModule:
    """What `fully_shard` adds to a module's class. The module's parameters are `DTensor`s outside its forward and backward.

    Setters take effect at the next use; call them alike on every rank. recurse: also set it for sharded modules inside.
    `copy.deepcopy` of the outermost one makes sharded modules with memory of their own (`sharded_class.deepcopy`).
    """

    param_groups: tuple[ParamGroup, ...]  # the groups that its parameters form; modules sharded in one list share them
    _initializes_new: ClassVar[bool] = True  # written by disable_fsdp_module_new_init, in this file, alone

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module, as slicing a container does: the class alone shards nothing."""
        original = plain_class(cls)
        made = original.__new__(original)  # type: ignore[call-overload]
        if cls._initializes_new:
            made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Outside of the module's own forward hooks, so that all of them see full parameters.
        return run_forward(self, super().__call__, args, kwargs)  # type: ignore[misc]

    @property
    def param_group(self) -> ParamGroup:
        """The first of `param_groups`: that of ordinary parameters on the mesh `fully_shard` was given. It may be empty."""
        return self.param_groups[0]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters and register them in place of the shards. Collective.

        They may be used by hand, alike on all ranks: a backward gathers them if need be, and averages their gradients.
        async_op: return at once; the handle's `wait()`, or the module's next forward, does the rest.
        """
        runtime = runtime_of(self.param_group) or hooks.start(self.param_group.root)
        runtime.streams.begin()
        for group in self.param_groups:
            registered.check_registered(group)
            if runtime.root.calls.phase is GroupPhase.IDLE and not in_backward():
                group.follow_requires_grad(reduces=True)  # what is gathered may be used by hand, without a forward
        free_stale(self.param_groups)
        for group in self.param_groups:
            group.unshard()
        handle = UnshardHandle(self.param_groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters; no-op while sharded."""
        for group in self.param_groups:
            group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Without sync, backwards accumulate unsharded gradients, in the reduce dtype; the next one with sync reduces all.

        Cost: the gradients of every group stay unsharded in between.
        """
        for settings in self._settings(recurse):
            settings.sync_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """For hybrid sharding. False: backwards reduce within a replica only; the next one with True reduces their sum too."""
        for settings in self._settings(recurse):
            settings.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False, if more backwards follow: the end of one does not wait for its last reductions. Holds for the whole root.

        Without effect under `set_manual_backward_finalization`.
        """
        settings = self.param_group.root.root_settings
        assert settings is not None, "it has no parent"
        settings.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True: backwards are not over before `finalize_backward`, which see. Call it on the root.

        Raises RuntimeError during a backward, and after it until it is finalized.
        """
        settings, runtime = self._root_settings("set_manual_backward_finalization"), runtime_of(self.param_group)
        if enabled != settings.finalizes_by_hand and (in_backward() or (runtime is not None and runtime.is_left)):
            raise RuntimeError(
                f"set_manual_backward_finalization({enabled}) on '{self.param_group.name}' before its backward is finalized "
                f"(rank {self.param_group.mesh.rank}): call it before the first backward, or after finalize_backward()"
            )
        settings.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what the backwards since the last call have left, and reshard as the settings say. Collective; on the root.

        With `set_manual_backward_finalization(True)` a backward reduces groups whose gradients it has completed, as ever. What
        other backwards would do at their end is left to this call: to reduce groups that lack gradients, or zeros for unused
        parameters (but for modules that ranks may skip), and those that `unsharded` keeps gathered, where each rank has run at
        least one backward, and to wait. To reduce nothing before, run backwards with
        `set_requires_gradient_sync(False)` and set True before this call.
        async_op: do not wait; gradients may be used after the handle's `wait()`. No-op before the first forward.
        Raises RuntimeError without that setting, and inside of a backward.
        """
        settings, group = self._root_settings("finalize_backward"), self.param_group
        if (runtime := runtime_of(group)) is not None:
            if not settings.finalizes_by_hand or in_backward():
                raise RuntimeError(
                    f"finalize_backward on '{group.name}' (rank {group.mesh.rank}): expected a call after the backward, and "
                    "set_manual_backward_finalization(True) before it"
                )
            runtime.finalize_backward()
        handle = GradientReductionHandle(runtime)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of gathered parameters over a reshard (True), so that they have the same addresses ever after.

        Cost: all of that memory. False: the next reshard frees it.
        """
        for settings in self._settings(recurse):
            settings.keep_storage = keep

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Keep parameters gathered between forward and backward (False), or free and gather them again (True)."""
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"set_reshard_after_forward({reshard_after_forward!r}): expected a bool; give fully_shard a number")
        for settings in self._settings(recurse):
            settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Leave parameters gathered after a backward (False), for the next microbatch; an optimizer step frees them.

        So does any other write to shards, through `.data` or `to_local()` too, on one rank or on all: a forward that finds
        parameters gathered asks the other ranks. On a GPU, writes that torch does not see, by `to_local().data` or a kernel of
        your own outside of an optimizer's step, are not noticed: call `reshard()` after them; so on the host for those by
        `_local_tensor`.
        """
        for settings in self._settings(recurse):
            settings.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set False for a module whose backward reads none of its parameters, such as an embedding: they are not gathered."""
        for settings in self._settings(recurse=False):
            settings.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """When this module's forward starts, gather these ahead, instead of what the recorded order says.

        Those of another root from its first forward on.   Raises ValueError for a module that is not sharded.
        """
        ahead = groups_of(_sharded(modules, f"set_modules_to_forward_prefetch on '{self.param_group.name}'"))
        for settings in self._settings(recurse=False):
            settings.forward_prefetch = ahead

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """When this module's backward starts, gather these ahead, instead of what the recorded order says.

        Those of another root from its first forward on.   Raises ValueError for a module that is not sharded.
        """
        ahead = groups_of(_sharded(modules, f"set_modules_to_backward_prefetch on '{self.param_group.name}'"))
        for settings in self._settings(recurse=False):
            settings.backward_prefetch = ahead

    def set_prefetch_policy(self, policy: PrefetchPolicy) -> None:
        """Set how far to gather ahead where no modules are named. Call it on the root."""
        self._root_settings("set_prefetch_policy").prefetch = policy

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the ranks' gradients by `factor`, not by the number of ranks. ValueError if it is not positive."""
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor}) on '{self.param_group.name}': expected a positive number")
        for settings in self._settings(recurse=False):
            settings.divide_factor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor  # FSDP2's older name

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives sum only, and divide after: for networks that sum in hardware, such as NVLink SHARP.

        On GPUs it has an effect on custom reduce-scatters only: NCCL always only sums, since gradients are divided when packed.
        """
        for settings in self._settings(recurse=False):
            settings.force_sum = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, skipped_modules: bool = False, recurse: bool = True
    ) -> None:
        """Reduce zeros for parameters without a gradient, since other ranks may have one. All ranks run the same modules.

        Cost: a module without inputs that want gradients is reduced when the backward ends.

        skipped_modules: each rank may leave out other sharded modules, as layer drop does; their gradients are zeros there, and
            zeros everywhere if all ranks leave one out. Then each module runs once at most in a forward of the root, one after
            the other, in the order in which they are registered: else RuntimeError. From the next forward on.
            Cost: skipped modules are gathered and reduced as others are. See docs/tasks.md.
        Raises ValueError for skipped_modules alone.
        """
        if skipped_modules and not reduce_scatter_unused_params:
            raise ValueError("set_reduce_scatter_unused_params(False, skipped_modules=True): expected both, or neither")
        for settings in self._settings(recurse):
            settings.reduce_unused, settings.may_be_skipped = reduce_scatter_unused_params, skipped_modules

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many buckets of packed gradients may be in flight. Raises TypeError or ValueError unless it is an int >= 1.

        All groups under a root share them: the largest value set on any of them holds for all, from the next forward on.
        Cost: as many buffers. More than 1 helps when a reduce-scatter takes longer than the backward beside it.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers({max_input_buffers!r}): expected an int")
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers({max_input_buffers}): expected at least 1")
        for settings in self._settings(recurse):
            settings.reductions_in_flight = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """No-op: reductions always have a communicator of their own. Raises ValueError for False."""
        if not enable:
            raise ValueError("set_separate_reduce_scatter_group(False): gathers and reductions never share a communicator here")

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Stream | torch.cuda.Stream | None = None
    ) -> None:
        """Call `hook(reduced)` on this rank's reduced flat gradient segment, on the stream that reduced it, before it is used.

        reduced: 1-D, in the reduce dtype, padding included; averaged over the replicas if there are any. May be changed; its
        memory is used again: clone it to keep it.
        stream: where to call it instead, such as that of a collective of yours. What was reduced is there when it is called,
        and gradients are published once that stream has run it.
        Raises TypeError if `stream` is not a stream; ValueError for one of another device, or for one where there are replicas.
        """
        group = self._only_group("set_all_reduce_hook")
        if isinstance(stream, torch.cuda.Stream):
            with torch.cuda.stream(stream):
                stream = current_stream(stream.device)
        if not isinstance(stream, Stream | None):
            raise TypeError(f"set_all_reduce_hook(stream={stream!r}): expected a shardrt.comm.Stream or a torch.cuda.Stream")
        if stream is not None and stream.device != group.mesh.device:
            raise ValueError(
                f"set_all_reduce_hook on '{group.name}': a stream of {stream.device}, expected {group.mesh.device}"
            )
        if stream is not None and group.replicas is not None:
            raise ValueError(
                f"set_all_reduce_hook(stream=...) on '{group.name}': replicas are reduced on a stream of their own"
            )
        group.settings.reduce_hook, group.settings.reduce_hook_stream = hook, stream

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Gather into memory that the communicator knows, so that NCCL may copy less. FSDP2's name: here it is a communicator.

        RuntimeError after the first forward, which makes the buffers. No effect with a custom all-gather, which allocates for
        itself, on the host, and where NCCL cannot (a warning is logged). Reductions do not change: NCCL would gain nothing.
        """
        self._check_no_forward("set_allocate_memory_from_process_group_for_comm")
        for settings in self._settings(recurse=False):
            settings.comm_memory = enable

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather through, and reduce from, NCCL's symmetric windows, which GPUs of a node may read and write for each other.

        The ranks agree on it in the first forward; RuntimeError there, on every rank alike, if they differ or if a custom
        collective is set as well. RuntimeError after the first forward, ValueError for another backend.
        Windows stay: one for gathers and one for packed gradients, each as large as the largest group. A gather copies its
        bytes into the window and out of it; a reduction of a large group is packed there, and copies this rank's segment out.
        Both collectives run in place, so their inputs and outputs are in the window. Small groups, gathers from post-forward
        shards, all-gather extensions and reductions over replicas do not change. No effect on the host.
        NCCL before 2.27 makes no windows: a warning is logged, and the memory is registered on each rank. From 2.27 on, its
        kernels for windows run gathers, and sums of floats other than float64, between GPUs that are all connected by NVLink:
        up to 2.28 if input and output are in windows, from 2.29 on if the one that other GPUs read or write is.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm({backend!r}) on '{self.param_group.name}': expected 'NCCL'")
        self._check_no_forward("set_symm_mem_for_comm")
        for settings in self._settings(recurse=False):
            settings.symmetric = True

    def set_custom_all_gather(self, comm: CustomAllGather) -> None:
        """Gather with this, into memory that it allocates. RuntimeError after the first forward, which makes the buffers."""
        self._check_no_forward("set_custom_all_gather")
        self._only_group("set_custom_all_gather").settings.all_gather = comm

    def set_custom_reduce_scatter(self, comm: CustomReduceScatter) -> None:
        """Reduce with this, from memory that it allocates. RuntimeError after the first forward, which makes the buffers."""
        self._check_no_forward("set_custom_reduce_scatter")
        self._only_group("set_custom_reduce_scatter").settings.reduce_scatter = comm

    def set_post_optim_event(self, event: Event) -> None:
        """Let the next forward's gathers, and no later ones, wait for `event`, not for the current stream. Call it on the root.

        Hazard: zero_grad() frees the gradients at once: call it when `event` has passed, or `record_stream()` them before.
        """
        if not isinstance(event, Event):
            raise TypeError(f"set_post_optim_event({event!r}): expected a shardrt.comm.Event, as a Stream's record() returns")
        self._root_settings("set_post_optim_event").post_optim_event = event

    def reset_iter_state(self) -> None:
        """Drop an iteration that an exception has cut short, and all gradients. Call it on the root, on every rank."""
        self._root_settings("reset_iter_state")
        if (runtime := runtime_of(self.param_group)) is not None:
            runtime.reset()

    def _settings(self, recurse: bool) -> Iterator[GroupSettings]:
        for module in cast(nn.Module, self).modules() if recurse else (self,):
            if isinstance(module, FSDPModule):
                yield from (group.settings for group in module.param_groups)

    def _root_settings(self, method: str) -> RootSettings:
        group = self.param_group
        if group.root_settings is None:
            raise RuntimeError(f"{method} on '{group.name}': call it on the root, '{group.root.name}'")
        return group.root_settings

    def _check_no_forward(self, method: str) -> None:
        if self.param_group.runtime is not None:
            raise RuntimeError(f"{method} on '{self.param_group.name}': call it before the first forward")

    def _only_group(self, method: str) -> ParamGroup:
        group = self.param_group
        if len(self.param_groups) > 1:
            raise ValueError(
                f"{method} on '{group.name}': expected a module whose parameters are gathered in one go; its quantised ones, "
                "those on other meshes, and those with all-gather extensions have groups of their own"
            )
        return group

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> Any:
        """`to()`, `to_empty()`, `half()` and the like: on parameters, their reduced gradients, and buffers.

        A parameter whose dtype or device changes becomes another object: make optimizers and hooks afterwards. Others stay,
        and nothing happens to what `fn` leaves as it is. `memory_format` concerns buffers only.
        Collective if the dtype of gathered parameters changes.   Raises RuntimeError if a dtype or device changes in the middle
        of an iteration, or while there are gradients that are not reduced.
        """
        inside = list(cast(nn.Module, self).modules()) if recurse else [cast(nn.Module, self)]
        groups = list(
            dict.fromkeys(group for module in inside if isinstance(module, FSDPModule) for group in module.param_groups)
        )
        if (runtime := runtime_of(self.param_group)) is not None:
            runtime.settle()
        without_values = module_apply.on_meta(inside)
        for group in groups:
            module_apply.move(group, inside, fn)
        with module_apply.hidden(groups):
            super()._apply(fn, recurse)  # type: ignore[misc]
        module_apply.note_unwritten(without_values)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As any module's; it also clears the shards' gradients while modules have full parameters, as before a backward."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        groups = groups_of([child for child in cast(nn.Module, self).modules() if isinstance(child, FSDPModule)])
        for sharded in [param.sharded for group in groups if group.state.shown for param in group.params]:
            if set_to_none:
                sharded.grad = None
            elif sharded.grad is not None:
                sharded.grad.zero_()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As any module's. Raises RuntimeError if torch's checkpoint helpers ask for what cannot work (`state_dicts.py`).

        The helpers read parameters as well; but so do forwards, and in a compiled forward a check there would end the graph.
        """
        check_state_dict_options(self.param_group.root.name, self.param_group.mesh.rank, sys._getframe(1))
        return super().named_buffers(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Inside the block, calling a sharded module's class makes a module without initialising it: the caller does that."""
    before, FSDPModule._initializes_new = FSDPModule._initializes_new, False
    try:
        yield
    finally:
        FSDPModule._initializes_new = before


def plain_class(kind: type[FSDPModule]) -> type[Any]:
    """The class that modules of this class had before `fully_shard`."""
    return kind.__mro__[kind.__mro__.index(FSDPModule) + 1]


def run_forward(module: FSDPModule, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = module.param_groups[0]
    if first.calls.running:  # the module calls itself, or a registered method its forward: the outer call gathers
        return forward(*args, **kwargs)
    runtime = runtime_of(first) or hooks.start(first)  # which may give parameters groups of their own
    try:
        for group in module.param_groups:
            with during(Step.PRE_FORWARD, group):
                args, kwargs = hooks.pre_forward(runtime, group, args, kwargs)
        first.calls.running, nodes_before = True, nodes_made()
        with during(Step.FORWARD, *module.param_groups):
            output = forward(*args, **kwargs)
    except BaseException:
        for group in reversed(module.param_groups):
            hooks.forward_failed(group, ran=first.calls.running)
        raise
    finally:
        first.calls.running = False
    made_nodes = nodes_made() != nodes_before
    for group in reversed(module.param_groups):
        with during(Step.POST_FORWARD, group):
            output = hooks.post_forward(runtime, group, cast(nn.Module, module), output, made_nodes=made_nodes)
    return output


def groups_of(modules: Sequence[FSDPModule]) -> list[ParamGroup]:
    return [group for module in modules for group in module.param_groups]


# ---------------------------------------------------------------------- functions beside the class: FSDP2's, and `unsharded`


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.<method_name>` see full parameters as its forward does. No-op unless `module` is sharded.

    Raises ValueError if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: '{type(module).__name__}' has no method '{method_name}'")

    setattr(module, method_name, _ForwardMethod(module, method))


class _ForwardMethod:
    """A method that sees full parameters. (Not a closure: in a deepcopy of the module it is that copy's.)"""

    def __init__(self, module: FSDPModule, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._module, self._method = module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_forward(self._module, self._method, args, kwargs)


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Inside the block, all sharded modules in `module`, itself included, stay gathered: forwards communicate nothing.

    Ranks may then run different numbers of forwards without gradients, or different parts of the model, for example to generate
    texts of different lengths, also while a loss waits for its backward. Entering is collective, leaving is not.
    Parameters may be used by hand. Their gradients are averaged when a backward ends, here or later; one that begins later
    gathers what it needs. A parameter whose gradient some ranks lack counts as zero there; each rank must have one of some.
    Cost: the memory of all parameters in their compute dtypes; gradients are not reduced before a backward ends, and ranks
    compare which they have. If parameters are written to inside, the next forward gathers them again, which is collective:
    write on all ranks, through the parameters.   Raises ValueError if no module is sharded.
    """
    sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]
    if not sharded:
        raise ValueError(f"unsharded('{type(module).__name__}'): no module in it is sharded; call fully_shard first")
    kept = {group: replace(group.settings) for group in groups_of(sharded)}
    free_stale(list(kept))  # the last time that ranks tell each other what they have written
    for group in kept:
        group.settings.reshard_after_forward, group.settings.user_has_unsharded = False, True
    try:
        for handle in [child.unshard(async_op=True) for child in sharded]:
            cast(UnshardHandle, handle).wait()
        for group in groups_of(sharded):
            group.keep()
        yield
    finally:
        for group, before in kept.items():
            group.settings.reshard_after_forward = before.reshard_after_forward
            group.settings.user_has_unsharded = before.user_has_unsharded
        for group in groups_of(sharded):  # the first gather may have made some
            # Those of a block around this one stay; those whose modules run now end with that.
            if not group.settings.user_has_unsharded and group.calls.phase is GroupPhase.IDLE:
                group.reshard()


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline, share streams and communicators. No-op: here they always do.

    Raises ValueError for a module that is not sharded.
    """
    _sharded(modules, "share_comm_ctx")


def set_stage_backward(stage: FSDPModule, *, is_last: bool, keeps_parameters: bool) -> None:
    """Before each backward of a pipeline's stage: the last one of a step reduces, and frees parameters that others keep."""
    stage.set_requires_gradient_sync(is_last)
    stage.set_is_last_backward(is_last)
    stage.set_reshard_after_backward(is_last or not keeps_parameters)


def _sharded(modules: Sequence[FSDPModule], call: str) -> Sequence[FSDPModule]:
    """The same modules. Raises ValueError, which names the call, for one that is not sharded."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{call}: '{type(module).__name__}' is not sharded")
    return modules

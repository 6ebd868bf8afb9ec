"""What happens around a module's forward and backward, in firing order. What each step does is in `param_group.py` and
`runtime.py`.

| fires                              | function         | steps                                              |
|------------------------------------|------------------|----------------------------------------------------|
| before the module's forward        | `pre_forward`    | unshard, wait_unsharded, gather ahead              |
| after it                           | `post_forward`   | reshard (unless the settings keep the parameters)  |
| before its outputs' gradients flow | `_pre_backward`  | unshard, wait_unsharded, gather ahead              |
| a parameter's gradient is ready    | `_on_gradient`   | reduce, if it was the last one                     |
| its inputs' gradients are ready    | `_post_backward` | reduce (what is left), reshard                     |
| the backward ends                  | `Runtime._end_backward` | reduce and reshard what is left; or `finalize_backward` |

Gradients are watched one by one (`_on_gradient`) only in groups whose modules run on inputs that require no gradient: in the
others `_post_backward` fires at the same time, and only once. A forward inside a backward is a recomputation (activation
checkpointing): it gathers, but leaves resharding, the phase and the recorded order to the backward around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from ...torch_internals import in_backward, outside_modes, outside_transforms
from ..base import events
from ..base.autograd import BackwardProgress, ForwardCall, GroupPhase
from ..base.events import Step, during
from ..base.trees import StandIns, tensors_in
from ..gather.gather_state import GatherState
from .param_group import ParamGroup
from .registered import check_registered
from .runtime import Runtime

# ---------------------------------------------------------------------- forward


def pre_forward(
    runtime: Runtime, group: ParamGroup, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The module is about to run on these arguments. Returns: the arguments that it is to run on instead."""
    if not in_backward():
        if group is runtime.root:
            runtime.begin_forward()
            if runtime.first_batch.due:
                with outside_modes():
                    runtime.first_batch.compare(args, kwargs)
        else:
            check_registered(group)
            group.follow_requires_grad(reduces=torch.is_grad_enabled())  # code around this module may have frozen it
        if runtime.turns is not None and not group.runs_alone:
            runtime.turns.start_forward(group)
        runtime.enter_forward(group)
    else:
        if runtime.turns is not None and group.gather.needs_launch and (not group.state.gathered or group.gather.is_paused):
            runtime.begin_backward(group)
            runtime.turns.start_backward(group)
            runtime.enter_backward(group)
        group.unshard()
        group.wait_unsharded()
    if group.state is not GatherState.EXPOSED:
        group.visible.begin_forward()
    dtype = group.mp_policy.param_dtype if group.mp_policy.cast_forward_inputs else None
    if torch.is_grad_enabled():
        return _watch_inputs(runtime, group, dtype, args, kwargs)
    return (args, kwargs) if dtype is None else _replace_inputs(group, partial(_cast, dtype), args, kwargs)


def _watch_inputs(
    runtime: Runtime, group: ParamGroup, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    group.calls.forward_call = call = ForwardCall()
    watch = partial(runtime.watcher.watch_input, call, partial(_post_backward, runtime, group, call))
    args, kwargs = _replace_inputs(group, watch if dtype is None else lambda tensor: watch(_cast(dtype, tensor)), args, kwargs)
    if call.inputs == 0:
        # Hazard: Python's garbage collector cannot see these hooks: a reference in them keeps the model alive for ever.
        on_gradient = partial(_on_gradient, ref(runtime), ref(group))
        group.calls.watch_gradients((param.unsharded for param in group.trainable), on_gradient)
    return args, kwargs


def _replace_inputs(
    group: ParamGroup, fn: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    group.calls.stand_ins = made = StandIns(group.name, fn)
    args = tuple([made.replace(arg) for arg in args])
    return args, {name: made.replace(arg) for name, arg in kwargs.items()} if kwargs else kwargs


def post_forward(runtime: Runtime, group: ParamGroup, module: nn.Module, output: Any, *, made_nodes: bool) -> Any:
    """The module has run. Returns: its output, ready for backward.

    made_nodes: autograd has recorded something meanwhile. Modes that the module has set itself are over.
    """
    dtype = group.mp_policy.output_dtype
    if dtype is not None:
        output = StandIns(group.name, partial(_cast, dtype)).replace(output)
    tensors = tensors_in(output)
    if group is runtime.root and runtime.turns is not None and runtime.turns.needs_backward(tensors):
        output = StandIns(group.name, runtime.turns.with_backward).replace(output)
        tensors = tensors_in(output)
    if group.calls.stand_ins is not None:
        tensors = [*_take_back(group), *tensors]
    is_watched = (torch.is_grad_enabled() or made_nodes) and _watch_outputs(runtime, group, output, tensors)
    if not in_backward():
        if runtime.turns is None or not runtime.turns.are_taken:  # there, all ranks have what the root's forward began with
            runtime.recorded = made_nodes or is_watched
        _end_forward(runtime, group, module, tensors, is_watched=is_watched)
    return output


def _watch_outputs(runtime: Runtime, group: ParamGroup, output: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Returns: whether a backward may come back to one of these tensors in the output."""
    if not torch.is_grad_enabled():  # the module has enabled them itself; its inputs are not watched
        group.calls.forward_call = ForwardCall()
    call = group.calls.forward_call
    is_watched = runtime.watcher.watch_outputs(call, partial(_pre_backward, runtime, group, call), tensors)
    if call.inputs and not tensors:
        _check_output_type(group, output)
    return is_watched


def _take_back(group: ParamGroup) -> list[torch.Tensor]:
    stand_ins, group.calls.stand_ins = group.calls.stand_ins, None
    return [] if stand_ins is None else stand_ins.take_back()


def _end_forward(
    runtime: Runtime, group: ParamGroup, module: nn.Module, tensors: Sequence[torch.Tensor], *, is_watched: bool
) -> None:
    if runtime.turns is not None and not group.runs_alone:
        runtime.turns.end_forward(group)
    if group.reshards_after_forward:
        _check_no_parameters(group, tensors)  # also if it stays gathered for its backward, which frees it
    runtime.leave_forward(group, is_last=group.calls.all_have_run(module))
    if group is runtime.root:
        runtime.end_forward(until_backward=is_watched)
    elif group.state.shown and (group.settings.user_has_unsharded or runtime.root.calls.phase is GroupPhase.IDLE):
        group.pass_requires_grad_on()
        group.leave_unsharded(until_backward=is_watched)  # code outside of the module may compute with its parameters now


def forward_failed(group: ParamGroup, *, ran: bool) -> None:
    """An exception has left the module's forward, or (ran: False) what comes before it."""
    _take_back(group)
    if ran and group.state.shown:
        group.expose()


def _check_output_type(group: ParamGroup, output: object) -> None:
    """Raise RuntimeError if tensors cannot be found in the output: their backward would run without gathered parameters."""
    if not isinstance(output, (type(None), bool, int, float, str, tuple, list, deque, dict)):
        raise RuntimeError(
            f"'{group.name}' returns a {type(output).__name__}, in which tensors cannot be found (rank {group.mesh.rank}): "
            "return tensors, or tuples, lists, dicts or dataclasses of them"
        )


def _check_no_parameters(group: ParamGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError if a parameter, or a view of one, leaves the module: its memory is about to be freed."""
    for tensor in tensors:
        if group.params and group.gather.full.holds(tensor):
            raise RuntimeError(
                f"'{group.name}' returns a parameter or a view of one, of shape {tuple(tensor.shape)}, whose memory is freed "
                f"after its forward (rank {group.mesh.rank}): return a copy, such as .clone()"
            )


def start(group: ParamGroup) -> Runtime:
    """Make the runtime of the root of `group`'s tree. Collective.

    Raises RuntimeError if `group` is not that root: its first forward must come through the root.
    """
    if len(group.modules) > 1 and group.parent is None:
        raise RuntimeError(
            f"forward of '{group.name}' (rank {group.mesh.rank}): it was sharded in a list with other modules, and no sharded "
            "module around them says when an iteration begins; call fully_shard on the module that calls them"
        )
    if group.parent is not None:
        raise RuntimeError(
            f"forward of '{group.name}' before that of its root (rank {group.mesh.rank}): it is part of "
            f"'{group.root.name}', which was sharded after it; run the first forward through that module, or register the "
            "method that calls this one, by register_fsdp_forward_method"
        )
    # What is made now outlives the caller's mode: inference, torch.func's transforms, forward-mode AD.
    with torch.inference_mode(False), torch.no_grad(), outside_transforms():
        return Runtime(group)


# ---------------------------------------------------------------------- backward


def _pre_backward(runtime: Runtime, group: ParamGroup, call: ForwardCall) -> None:
    runtime.begin_backward(group)
    if not group.calls.begin_backward(call, group):
        if group.state.shown:
            group.wait_unsharded()  # this output may be on another stream
        return
    group.note_gradients()
    if runtime.turns is not None:
        runtime.turns.start_backward(group)
    with during(Step.PRE_BACKWARD, group):
        runtime.enter_backward(group)
    events.begin(Step.BACKWARD, group)


def _on_gradient(runtime_ref: ref[Runtime], group_ref: ref[ParamGroup], unsharded: torch.Tensor) -> None:
    runtime, group = runtime_ref(), group_ref()
    assert runtime is not None, "its groups refer to it"
    assert group is not None, "the graph refers to it, at the outputs of its modules"
    group.note_gradients()
    if group.reduction_due(BackwardProgress.GRADIENT_READY):
        if runtime.turns is not None:
            return  # its turn to be reduced comes later
        runtime.begin_backward(group)
        # Hazard: resharding here would be too early. A node that saved a frozen or detached parameter may still have to run.
        runtime.reduce(group)


def _post_backward(runtime: Runtime, group: ParamGroup, call: ForwardCall) -> None:
    over = group.calls.input_done(call)
    if runtime.turns is None:
        due = group.reduction_due(BackwardProgress.MODULE_DONE if over else BackwardProgress.GRADIENT_READY)
    else:
        due = over and runtime.turns.end_of(group)
    if not over and not due:
        return
    if over:
        events.end(Step.BACKWARD, group)
    # A group has one turn, whatever a forward without gradients has recorded since.
    repeats = runtime.turns is None and runtime.prefetch.backward_repeats(group)
    if due and not repeats:
        runtime.reduce(group)
    if over and not group.calls.open_calls and not repeats and group.calls.phase is GroupPhase.BACKWARD:
        runtime.leave_backward(group)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

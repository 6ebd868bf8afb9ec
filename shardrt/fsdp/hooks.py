"""What happens around a module's forward and backward, in firing order. These say when; what is done stands in `group.py`
and `runtime.py`.

| fires                              | function         | verbs                                             |
|------------------------------------|------------------|---------------------------------------------------|
| before the module's forward        | `pre_forward`    | unshard, wait_unsharded, gather ahead             |
| after it                           | `post_forward`   | reshard (unless told to keep)                     |
| before its outputs' gradients flow | `_pre_backward`  | unshard, wait_unsharded, gather ahead             |
| a parameter's gradient is ready    | `on_gradient`    | the last one: reduce                              |
| its inputs' gradients are ready    | `_post_backward` | reduce (what is left), reshard                    |
| the backward ends                  | `Runtime._end_backward` | whatever is left                           |

Gradients are watched one by one (`on_gradient`) only in groups that run on inputs that want no gradient: for the others
`_post_backward` comes at the same time, and once. A forward inside a backward is a recomputation (activation
checkpointing): it gathers, but leaves resharding, the phase and the recorded order to the backward around it.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..torch_internals import in_backward, outside_transforms, transforms_may_be_active
from .param_group import ForwardCall, ParamGroup, Phase
from .ranges import ranged
from .runtime import GradHook, Runtime

# ---------------------------------------------------------------------- forward


def pre_forward(group: ParamGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The module is about to run on these arguments; returns what it is to run on."""
    runtime = group.runtime or start(group)
    if not in_backward():
        if group is runtime.root:
            runtime.begin_forward()
        else:
            group.check_registered()
        group.move(Phase.FORWARD)
        ahead = runtime.prefetch.forward_starts(group)
    else:
        ahead = []
    group.unshard()
    group.wait_unsharded()
    runtime.gather_ahead(ahead, "FSDP::forward_prefetch for")
    dtype = group.mp_policy.param_dtype
    if dtype is not None and group.mp_policy.cast_forward_inputs:
        args, kwargs = _map_tensors(partial(_cast, dtype), args), _map_tensors(partial(_cast, dtype), kwargs)
    if torch.is_grad_enabled():
        group.call = call = ForwardCall()
        watch = partial(_watch_input, group, call)
        args, kwargs = _map_tensors(watch, args), _map_tensors(watch, kwargs) if kwargs else kwargs
        if call.inputs == 0:
            group.watch_gradients(on_gradient)
    return args, kwargs


def post_forward(group: ParamGroup, module: object, output: Any) -> Any:
    """The module has run; returns its output, ready for backward."""
    runtime = group.runtime
    assert runtime is not None, "pre_forward comes first"
    dtype = group.mp_policy.output_dtype
    if dtype is not None:
        output = _map_tensors(partial(_cast, dtype), output)
    tensors = _tensors(output)
    if torch.is_grad_enabled():
        transformed = transforms_may_be_active()
        _watch_outputs(group, runtime, _of_every_level(tensors) if transformed else tensors)
        if group.call.inputs and not tensors:
            _refuse_opaque(group, output)
    if not in_backward():
        group.move(Phase.IDLE)
        used_next, last = runtime.prefetch.forward_ends(group), group.all_have_run(module)
        if group.reshards_after_forward:
            _refuse_parameters(group, tensors)
            if last and not used_next:
                group.reshard_after_forward()
        if group is runtime.root:
            runtime.end_forward()
        elif group.installed and runtime.root.phase is Phase.IDLE:  # called beside the root
            group.guard()
    return output


def _watch_outputs(group: ParamGroup, runtime: Runtime, tensors: Iterable[torch.Tensor]) -> None:
    on_pre_backward = partial(_pre_backward, group, group.call)
    for tensor in tensors:
        if tensor.grad_fn is not None:
            grad_hook = GradHook.at(tensor.grad_fn)
            if grad_hook.ended_call is not group.call:  # an input that is passed on does not begin the module's backward
                runtime.newest_output = grad_hook
                grad_hook.on_pre_backward.append(on_pre_backward)


def _of_every_level(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, and what the transforms of `torch.func` have wrapped in them: each level has a graph of its own."""
    for tensor in tensors:
        yield tensor
        while (inner := torch.func.debug_unwrap(tensor, recurse=False)) is not tensor:
            yield (tensor := inner)


def _refuse_opaque(group: ParamGroup, output: object) -> None:
    """Tensors that cannot be seen in an output would run backward without anybody gathering parameters for it."""
    if not isinstance(output, (type(None), bool, int, float, str, tuple, list, dict)):
        raise RuntimeError(
            f"'{group.name}' returns a {type(output).__name__}, in which tensors cannot be found (rank {group.mesh.rank}): "
            "return tensors, or tuples, lists, dicts or dataclasses of them"
        )


def _refuse_parameters(group: ParamGroup, tensors: Sequence[torch.Tensor]) -> None:
    """A parameter, or a view of one, must not leave the module: its memory is about to be freed."""
    for tensor in tensors:
        if group.params and group.full.holds(tensor):
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
            f"'{group.root.name}', which was sharded after it; run the first forward through that module"
        )
    # What is made now outlives the caller's mode: inference, torch.func's transforms, forward-mode AD.
    with torch.inference_mode(False), torch.no_grad(), outside_transforms():
        return Runtime(group)


# ---------------------------------------------------------------------- backward


def _pre_backward(group: ParamGroup, call: ForwardCall) -> None:
    runtime = group.runtime
    if runtime is None:
        raise RuntimeError(
            f"backward of '{group.name}' (rank {group.mesh.rank}): its parameters have moved to another dtype or "
            "device since the forward; run the forward again"
        )
    runtime.begin_backward()
    if call in group.open_calls:
        return
    group.open_calls.add(call)
    call.inputs_left = call.inputs
    group.move(Phase.BACKWARD)
    with ranged("FSDP::pre_backward", group):
        if group.settings.unshard_in_backward:
            group.unshard()
            group.wait_unsharded()
        runtime.gather_ahead(runtime.prefetch.backward_starts(group), "FSDP::backward_prefetch for")


def on_gradient(group: ParamGroup, unsharded: torch.Tensor) -> None:
    """A parameter's gradient is ready; with the last one the group reduces."""
    if group.settings.reduce_unused or not group.has_all_gradients():
        return  # with unused parameters, ranks may differ in when they have all: only the end of the module is the same
    assert group.runtime is not None, "a forward comes first"
    group.runtime.begin_backward()
    # Hazard: resharding here would be too early. A node that saved a frozen or detached parameter may still have to run.
    group.runtime.reduce(group)


def _post_backward(group: ParamGroup, call: ForwardCall) -> None:
    call.inputs_left -= 1
    if call.inputs_left and (group.settings.reduce_unused or not group.has_all_gradients()):
        return
    runtime = group.runtime
    assert runtime is not None, "a forward comes first"
    repeats = runtime.prefetch.backward_repeats(group)
    if not repeats:
        runtime.reduce(group)
    if call.inputs_left:
        return
    group.open_calls.discard(call)
    if not group.open_calls and not repeats and group.phase is Phase.BACKWARD:
        group.move(Phase.IDLE)
        group.finish_backward()


def _watch_input(group: ParamGroup, call: ForwardCall, tensor: torch.Tensor) -> torch.Tensor:
    """The input, or an alias of it, whose gradient is complete when the module's own backward is over."""
    if not tensor.requires_grad:
        return tensor
    assert group.runtime is not None, "made before the first forward"
    call.inputs += 1
    grad_hook = GradHook.find(tensor.grad_fn) if tensor.grad_fn is not None else None
    if grad_hook is None or grad_hook is not group.runtime.newest_output or grad_hook.on_post_backward is not None:
        # Somebody else may use this input, and its gradient wait for theirs. That of an alias does not.
        tensor = tensor.view_as(tensor)
        assert tensor.grad_fn is not None
        grad_hook = GradHook.at(tensor.grad_fn)
    grad_hook.on_post_backward, grad_hook.ended_call = partial(_post_backward, group, call), call
    return tensor


# ---------------------------------------------------------------------- tensors in arguments and outputs


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in it (tuples, lists, dicts, dataclasses) replaced by `fn` of it; itself if none changed."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [fn(item) if isinstance(item, torch.Tensor) else _map_tensors(fn, item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _map_fields(fn, value)
    return value


def _map_fields(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    fields = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    mapped = {key: _map_tensors(fn, item) for key, item in fields.items()}
    changes = {key: item for key, item in mapped.items() if item is not fields[key]}
    if not changes:
        return value
    if not isinstance(value, dict):
        return dataclasses.replace(value, **changes)
    made = copy.copy(value)  # keeps the class, whatever its constructor takes
    for key, item in changes.items():
        made[key] = item
    return made


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return _tensors(list(value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _tensors([getattr(value, f.name) for f in dataclasses.fields(value)])
    return []

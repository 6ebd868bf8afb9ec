"""Operations on `DTensor`s that run on the local shards, without communication.

Operands of one call may lie differently where that needs no other rank's elements:

    (5, 6) by Shard(0)   with   (5, 6) by Replicate()   the latter is sliced: the result lies by Shard(0)
    (5, 6) by Shard(0)   with   (6,) by Replicate()     expanded, then sliced
    (5, 6) by Shard(0)   with   (5, 1) by Shard(0)      the same rows
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..dtensor.dtensor import DTensor
from ..dtensor.operands import broadcast_spec, check_no_parameters, local_shards, raise_undefined, shard_by, tensors_in
from ..placement.placement import Partial, Sharded, Spec
from .activations import run_gathered

aten = torch.ops.aten

# Elementwise, although torch does not tag them `pointwise`.
UNTAGGED = (
    "_prelu_kernel _prelu_kernel_backward elu_backward hardshrink_backward hardsigmoid_backward hardswish hardswish_ "
    "hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_backward log_sigmoid_forward mish_ mish_backward "
    "softplus_backward softshrink_backward"
)
# Operations on `Partial` tensors that commute with every reduction, and those that commute with linear ones.
_PARTIAL_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_empty_strided.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
_PARTIAL_SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.neg.default, aten.neg_.default, aten.sub.Tensor, aten.sub_.Tensor}


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fast path of `on_local_shards`: sharded tensors of one spec, numbers and 0-dim tensors."""
    spec: Spec | None = None
    local_args = []
    for arg in args:
        if type(arg) is DTensor:
            spec = arg.spec if spec is None else spec
            if arg.spec is not spec:
                return on_local_shards(func, args, kwargs)
            local_args.append(arg._local_tensor)
        elif isinstance(arg, torch.Tensor) and arg.dim() != 0:
            return on_local_shards(func, args, kwargs)
        else:
            local_args.append(arg)
    if spec is None or spec.partial or type(args[0]) is not DTensor or "out" in kwargs:
        return on_local_shards(func, args, kwargs)
    out = func(*local_args, **kwargs)
    if isinstance(out, torch.Tensor):
        return args[0] if out is local_args[0] else DTensor(out, spec)
    return [DTensor(shard, spec) for shard in out]  # frexp has two results


def on_local_shards(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the local shards; the result is sharded as the argument that most axes shard."""
    destination = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(destination, DTensor):
        return run_gathered(func, args, kwargs)  # the mutated tensor is plain and needs all values
    tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if any(tensor.spec.partial for tensor in sharded):
        check_partial(func, args, kwargs)
    spec = destination.spec if func._schema.is_mutable else _spec_of_result(tensors, sharded)
    try:
        local_args = [local_shards(arg, [spec], func) for arg in args]
        local_kwargs = {key: local_shards(value, [spec], func) for key, value in kwargs.items()}
    except ValueError:
        if len(sharded) < len(tensors) or torch.is_grad_enabled():
            check_no_parameters(func, sharded)  # which are rather used in the wrong place
        raise
    out = func(*local_args, **local_kwargs)
    if isinstance(out, torch.Tensor):
        mutated = local_kwargs.get("out", local_args[0])
        return destination if out is mutated else DTensor(out, spec)
    return [DTensor(shard, spec) for shard in out]


def _spec_of_result(tensors: list[torch.Tensor], sharded: list[DTensor]) -> Spec:
    """The spec of the argument that most axes shard, broadcast; an activation's where one takes part."""
    first = sharded[0].spec
    replicated = all(tensor.spec.placements == tensor.spec.replicated for tensor in sharded)
    if len(sharded) == len(tensors) or not replicated:
        if all(tensor.spec is first or tensor.spec == first for tensor in sharded):
            return first
        tensors = list[torch.Tensor](sharded)  # plain tensors are cut as these are, and do not expand them
    lead = max(sharded, key=lambda tensor: sum(isinstance(placement, Sharded) for placement in tensor.placements)).spec
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        return lead  # the arguments do not fit it, and the error says which
    spec = broadcast_spec(lead, shape) or lead
    return spec if all(tensor.spec.gathers for tensor in sharded) else replace(spec, gathers=False)


def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the local shards and keep their memory format: `channels_last` describes full tensors only."""
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    made = elementwise(func, args, kwargs)
    if made.spec.stride is not None and kwargs.get("memory_format") is torch.contiguous_format:
        return DTensor(made._local_tensor, replace(made.spec, stride=None))
    return made


def copy_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`copy_`. From a tensor that lies otherwise on the same mesh, it is collective: what `redistribute` costs."""
    target, source = args[:2]
    lies_otherwise = isinstance(target, DTensor) and isinstance(source, DTensor) and source.spec != target.spec
    if lies_otherwise and source.spec.mesh is target.spec.mesh and not target.spec.partial:
        args = (target, DTensor(shard_by(source, target.spec), target.spec), *args[2:])
    return elementwise(func, args, kwargs)


def copy_lists_into(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`_foreach_copy_` of lists in which some tensors lie otherwise."""
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source, *args[2:], **kwargs)


def new_empty_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Autograd's copy of a gradient that two leaves share: a tensor of the same shape and placements."""
    tensor, size = args[0], torch.Size(args[1])
    if size != tensor.shape or kwargs.get("device", tensor.device) != tensor.device:
        raise_undefined(func, args, kwargs)
    return torch.empty_like(tensor, dtype=kwargs.get("dtype"))


def check_partial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError unless the operation commutes with the pending reductions."""
    if func in _PARTIAL_COPIES:
        return
    summed = func in _PARTIAL_SUMS and all(isinstance(arg, DTensor) for arg in args)
    if not summed or not all(p.linear for arg in args for p in arg.placements if isinstance(p, Partial)):
        raise_undefined(func, args, kwargs)

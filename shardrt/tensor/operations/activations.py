"""Operations on activations that are `DTensor`s. What would need other ranks' elements is refused: nobody asked for it.

| operations                                        | on activations that are                | the result is             |
|---------------------------------------------------|----------------------------------------|---------------------------|
| elementwise, sums over all elements, losses       | sharded or replicated, see `dispatch.py` |                         |
| those along some dims: `_ALONG_DIMS`, such as softmax   | sharded along other dims               | sharded in the same way   |
| sums over a dim that is split: gradients of what was expanded | sharded along it           | partial                   |
| views that keep the split dims whole: `_VIEWS`    | sharded                                | sharded, maybe as another dim |
| other views                                       | partial                                | partial                   |
| any                                               | replicated                             | replicated                |
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from ...torch_internals import tree_leaves, tree_map_only
from ..dtensor.dtensor import DTensor
from ..dtensor.operands import local_shard, run_on_full_tensors
from ..placement.placement import FlatShard, Partial, Placement, Replicate, Sharded, Spec

aten = torch.ops.aten


def run_gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of operations that need whole tensors: `run_on_full_tensors`, or `run_on_activations` where one takes part."""
    found = activations_in(args, kwargs)
    return run_on_activations(func, args, kwargs, found) if found else run_on_full_tensors(func, args, kwargs)


def activations_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The arguments that are activations."""
    return [value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor) and not value.spec.gathers]


def run_on_activations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], activations: Sequence[DTensor]) -> Any:
    """Run an operation on the local tensors of activations. No communication.

    On replicated ones the results are replicated; plain tensors if a plain tensor takes part.
    Raises NotImplementedError where the result needs other ranks' elements.
    """
    placements = [placement for activation in activations for placement in activation.placements]
    if any(not isinstance(placement, Replicate) for placement in placements):
        if func in _ALONG_DIMS and all(placement.is_shard() or placement.is_replicate() for placement in placements):
            return _run_along_dims(func, args, kwargs, activations)
        if func in _VIEWS:
            return _view(func, args, kwargs)
        if not func.is_view or any(isinstance(placement, Sharded) for placement in placements):
            refuse(func, activations)
    local_args, local_kwargs = tree_map_only(DTensor, lambda value: value._local_tensor, (args, kwargs))
    out = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return args[0]
    if any(type(value) is torch.Tensor and value.dim() for value in tree_leaves((args, kwargs))):
        return out
    spec = activations[0].spec
    return tree_map_only(torch.Tensor, lambda values: _with_shape(values, spec, spec.placements, values.shape), out)


def refuse(func: Any, activations: Sequence[DTensor]) -> NoReturn:
    """Raise NotImplementedError for an operation that needs other ranks' elements of one of the activations."""
    found = next(value for value in activations if any(not isinstance(p, Replicate) for p in value.placements))
    raise NotImplementedError(
        f"{func}{_caller()} on an activation of shape {tuple(found.shape)}, {found.placements}: its result needs elements of "
        "other ranks, and activations are not gathered unasked. Give the module that reads it a style in the plan: "
        "SequenceParallel() if it treats rows alike, ColwiseParallel(input_layouts=...) for a linear layer, or "
        "PrepareModuleInput, which gathers. In code without parameters, use .to_local() (use_local_output=True of the style) "
        "for this rank's part, or .redistribute([Replicate()]) first"
    )


def _caller() -> str:
    """The module whose forward runs the operation, for messages."""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and frame.f_code.co_name in ("forward", "_call_impl"):
            modules.append(owner)
        frame = frame.f_back
    if not modules:
        return ""
    names = (name for name, module in modules[-1].named_modules() if module is modules[0])
    return f", in the forward of '{next(names, '')}' ({type(modules[0]).__name__}),"


def _with_shape(values: torch.Tensor, like: Spec, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    return DTensor(values, replace(like, placements=placements, shape=shape, stride=None, gathers=False))


# ---------------------------------------------------------------------- views

_SIZED_VIEWS = {aten.expand.default, aten.view.default, aten._unsafe_view.default}  # their second argument is a shape
# Invariant: the gradients of these are operations of this module too, so what runs forward runs backward.
_VIEWS = _SIZED_VIEWS | {
    aten.permute.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
}


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A view in which every dim that is split appears whole: that of a rank's part. Others are refused."""
    tensor = args[0]
    spec, local = tensor.spec, tensor._local_tensor
    split = {p.dim for p in spec.placements if isinstance(p, Sharded)}
    whole = torch.empty(spec.shape, device="meta")
    viewed = func(whole, *args[1:], **kwargs)
    # A dim of a contiguous tensor is known by its size and stride, unless its size is 1.
    found = list(zip(viewed.shape, viewed.stride(), strict=True))
    wanted = {dim: (spec.shape[dim], whole.stride(dim)) for dim in split}
    squeezed = func in (aten.squeeze.dim, aten.squeeze.dims) and split & _dims_of(func, args, kwargs, len(spec.shape))
    flat = any(isinstance(p, FlatShard) for p in spec.placements)
    if flat or squeezed or any(size < 2 or (size, stride) not in found for size, stride in wanted.values()):
        refuse(func, [tensor])
    places = {dim: found.index(known) for dim, known in wanted.items()}
    moved = tuple(replace(p, dim=places[p.dim]) if isinstance(p, Sharded) else p for p in spec.placements)
    if func in _SIZED_VIEWS:
        sizes = {places[dim]: local.shape[dim] for dim in split}
        args = (tensor, [sizes.get(dim, size) for dim, size in enumerate(viewed.shape)], *args[2:])
    return _with_shape(func(local, *args[1:], **kwargs), spec, moved, viewed.shape)


# ---------------------------------------------------------------------- operations along some dims

# Elements of the result depend on several elements of the arguments, along `dim` or the dims of `normalized_shape`.
_ALONG_DIMS = {
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.amax.default,
    aten.amin.default,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.std.correction,
    aten.var.correction,
}


def _run_along_dims(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], activations: Sequence[DTensor]) -> Any:
    """Run on the local tensors if no dim that the operation goes along is split. A sum along one that is becomes partial."""
    spec = next(value.spec for value in activations if any(isinstance(p, Sharded) for p in value.placements))
    dims = _dims_of(func, args, kwargs, len(spec.shape))
    split = {placement.dim for placement in spec.placements if isinstance(placement, Sharded)}
    if any(isinstance(p, FlatShard) for p in spec.placements) or (split & dims and func is not aten.sum.dim_IntList):
        refuse(func, activations)
    weights = [value for value in args if type(value) is torch.Tensor and value.shape != spec.shape]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        raise NotImplementedError(
            f"{func} on an activation of {spec} with plain weights that require gradients, of which ranks would have terms: "
            "use the SequenceParallel style for such modules, or weights that are DTensors by Replicate()"
        )
    local_args = [_local(value, spec, func) for value in args]
    results = func(*local_args, **kwargs)
    if isinstance(results, torch.Tensor):
        return _along(results, spec, dims)
    if func is aten.native_layer_norm_backward.default:  # the sums over this rank's rows are terms of the weights' gradients
        terms = tuple(Partial() if isinstance(p, Sharded) else p for p in spec.placements)
        sums = (value if value is None else _with_shape(value, spec, terms, value.shape) for value in results[1:])
        return (None if results[0] is None else _along(results[0], spec, dims), *sums)
    return tuple(_along(value, spec, dims) for value in results)


def _dims_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> set[int]:
    """The dims of the input that the operation goes along; all if none are given."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    if (shape := given.get("normalized_shape")) is not None:
        return set(range(ndim - len(shape), ndim))
    dim = given.get("dim")
    dims = (dim,) if isinstance(dim, int) else dim
    return {at % ndim for at in dims} if dims else set(range(ndim))


def _local(value: Any, spec: Spec, func: Any) -> Any:
    """What a rank's part of the operation reads: its shard of what has the input's shape, and of statistics; all of weights."""
    if isinstance(value, torch.Tensor) and value.shape == spec.shape:
        return local_shard(value, spec, func)
    if not isinstance(value, DTensor):
        return value
    if value.spec.mesh is spec.mesh and value.placements in (spec.placements, spec.replicated):
        return value._local_tensor
    raise ValueError(f"{func} on an activation of {spec} and a tensor of {value.spec}: expected one by Replicate()")


def _along(values: torch.Tensor, spec: Spec, dims: set[int]) -> DTensor:
    """The result of which each rank has these values; reduced dims may be gone from it."""
    gone = dims if values.dim() < len(spec.shape) else set()
    shape, placements = list(values.shape), list[Placement]()
    for placement in spec.placements:
        if isinstance(placement, Sharded) and placement.dim in dims:
            placement = Partial()
        elif isinstance(placement, Sharded):
            size, dim = spec.shape[placement.dim], placement.dim - sum(at < placement.dim for at in gone)
            placement, shape[dim] = replace(placement, dim=dim), size
        placements.append(placement)
    return _with_shape(values, spec, tuple(placements), torch.Size(shape))

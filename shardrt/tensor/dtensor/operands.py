"""Arguments of operations on `DTensor`s: replace them by local shards or full tensors, or raise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...torch_internals import tree_map
from ..placement import snapshots
from ..placement.placement import FlatShard, Replicate, Sharded, Spec, local_shape
from ..placement.redistribute import changes_in_order, redistribute
from .dtensor import DTensor
from .group_registry import group_of


def raise_undefined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of operations that are not defined on sharded tensors. Raises NotImplementedError."""
    check_no_parameters(func, tensors_in(args))
    shapes = [tuple(x.shape) for x in tensors_in(args)]
    raise NotImplementedError(
        f"{func} is not defined on sharded tensors (shapes {shapes}): its result would depend on other ranks' "
        "shards. Use .full_tensor() for the full tensor, or .to_local() for this rank's shard"
    )


def check_no_parameters(func: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Raise NotImplementedError if a tensor is a parameter of a sharded module, which is to be used inside its forward."""
    for tensor in tensors:
        group = group_of(tensor)
        if group is not None:
            name = getattr(tensor, "full_name", None) or "unnamed"
            if func is torch.ops.aten.set_.source_Tensor:
                raise NotImplementedError(
                    f"{func} on parameter '{name}' of the sharded module '{group.name}' (rank {group.mesh.rank}): torch's "
                    "parametrizations, which PEFT's target_parameters enter in each forward, replace what it is; let "
                    "fully_shard take the module around it, such as PEFT's wrapper, so that it is gathered by then; under "
                    "ExpertParallel, adapt other layers (target_modules)"
                )
            averaged = ", ".join(['Partial("avg")'] * (tensor.spec.mesh.ndim if isinstance(tensor, DTensor) else 1))
            raise NotImplementedError(
                f"{func} on parameter '{name}' of the sharded module '{group.name}' (rank {group.mesh.rank}), outside of the "
                "module's forward, where this rank holds only its shard: run what uses it inside the forward; or let another "
                "method, such as generate(), gather as forward does, with shardrt.register_fsdp_forward_method(module, "
                "method_name); or gather all parameters temporarily, with shardrt.unsharded(model); or use "
                f".full_tensor(grad_placements=[{averaged}]), which averages the ranks' gradients"
            )


def check_gradients(func: Any, args: object, tensors: Iterable[torch.Tensor]) -> None:
    """`check_no_parameters` for those of `tensors` that require gradients, if `func` has plain tensors as arguments too.

    Plain tensors may differ between ranks: so would the gradient, and nothing would reduce it.
    """
    if torch.is_grad_enabled() and any(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors_in(args)):
        check_no_parameters(func, [tensor for tensor in tensors if tensor.requires_grad])


def first_element(value: Any) -> Any:
    """The first element of a list; anything else unchanged."""
    return value[0] if isinstance(value, (list, tuple)) and value else value


def specs_of(args: tuple[Any, ...]) -> list[Spec]:
    """The specs of the first sharded argument: one of a tensor; of a list one for each element, None for plain tensors."""
    for arg in args:
        if isinstance(arg, DTensor):
            return [arg.spec]
        if isinstance(arg, (list, tuple)):
            specs = [getattr(element, "spec", None) for element in arg]
            if any(specs):
                return specs  # type: ignore[return-value]  # Cost: a check for None in each optimizer step
    raise AssertionError("dispatched without a sharded argument")


def local_shards(value: Any, specs: list[Spec], func: Any) -> Any:
    """`local_shard` of a tensor (by the first spec) or of each tensor in a list; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        return local_shard(value, specs[0], func)
    if isinstance(first_element(value), torch.Tensor):
        return [
            tensor._local_tensor if type(tensor) is DTensor and tensor.spec is spec else local_shard(tensor, spec, func)
            for tensor, spec in zip(value, specs, strict=True)
        ]
    return value


def local_shard(value: torch.Tensor, spec: Spec, func: Any) -> torch.Tensor:
    """This rank's shard, by `spec`, of a sharded tensor or of a plain one that expands to the global shape. No communication.

    A 0-dim plain tensor is returned unchanged. Raises ValueError for another mesh, placements from which other ranks' elements
    are needed, or a shape that does not expand.
    """
    if isinstance(value, DTensor):
        if value.spec is spec or value.spec == spec:
            return value._local_tensor
        if (cut := _cut_locally(value, spec)) is not None:
            return cut
        difference = "with different placements" if value.spec.mesh is spec.mesh else "on different meshes"
        name = "" if value.full_name is None else f" (that of parameter '{value.full_name}')"
        raise ValueError(f"{func} on tensors {difference}: {value.spec}{name} and {spec}; use redistribute() or full_tensor()")
    if value.dim() == 0:
        return value
    try:
        return spec.local_shard(value.expand(spec.shape))
    except RuntimeError as error:
        raise ValueError(
            f"{func}: a plain tensor of shape {tuple(value.shape)} and a sharded tensor of shape {tuple(spec.shape)}; "
            "expected a plain tensor that expands to the shape of the sharded one"
        ) from error


def shard_by(value: DTensor, spec: Spec) -> torch.Tensor:
    """This rank's shard, by `spec`, of a tensor that may lie otherwise, or expand. Collective if it lies otherwise."""
    if value.spec.mesh is spec.mesh and value.shape == spec.shape:
        return redistribute(value._local_tensor, value.spec, spec.placements)
    return spec.local_shard(gather_full(value).expand(spec.shape))


def _cut_locally(value: DTensor, spec: Spec) -> torch.Tensor | None:
    """This rank's shard by `spec` of a tensor that lies otherwise, or expands. None if it needs other ranks' elements."""
    mesh, source = spec.mesh, broadcast_spec(value.spec, spec.shape)
    if source is None or source.mesh is not mesh:
        return None
    local = value._local_tensor
    if source.placements == spec.placements:
        return local
    steps = changes_in_order(source.placements, spec.placements)
    if any(not isinstance(source.placements[axis], Replicate) or not isinstance(new, Sharded) for axis, new in steps):
        return None
    local = local.expand(local_shape(mesh, source.placements, spec.shape))
    for axis, new in steps:
        local = new.resolve(local.shape, mesh.shape[axis]).local_shard(local, mesh.coordinates[axis])
    return local


def broadcast_spec(spec: Spec, shape: torch.Size) -> Spec | None:
    """The spec of a tensor that is expanded to `shape`. None if it does not expand, or if a split dim changes its size."""
    shift = len(shape) - len(spec.shape)
    if spec.shape == shape:
        return spec
    if shift < 0 or any(size not in (1, shape[dim + shift]) for dim, size in enumerate(spec.shape)):
        return None
    placements = []
    for placement in spec.placements:
        if isinstance(placement, Sharded):
            dim = placement.dim + shift
            if isinstance(placement, FlatShard) or not spec.shape or shape[dim] != spec.shape[placement.dim]:
                return None
            placement = replace(placement, dim=dim)
        placements.append(placement)
    return replace(spec, placements=tuple(placements), shape=shape, stride=None)


def gather_full(value: Any) -> Any:
    """The full tensor of a sharded one, detached; anything else unchanged. Collective."""
    return redistribute(value._local_tensor, value.spec, value.spec.replicated) if isinstance(value, DTensor) else value


def run_on_full_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the full tensors, on every rank with the same arguments; each rank writes its shard of mutated tensors back.

    Cost: an all-gather of every sharded argument.
    """
    check_gradients(func, args, tensors_in(args))
    full_args, full_kwargs = tree_map(gather_full, (args, kwargs))
    if not func._schema.is_mutable:
        return func(*full_args, **full_kwargs)
    pairs = zip(mutated_tensors(func, args, kwargs), mutated_tensors(func, full_args, full_kwargs), strict=True)
    mutated = {id(full): (tensor, full) for tensor, full in pairs if isinstance(tensor, DTensor)}
    if any(tensor.spec.partial for tensor, _ in mutated.values()):
        raise_undefined(func, args, kwargs)
    out = func(*full_args, **full_kwargs)
    for tensor, full in mutated.values():
        write_back(tensor, full)
        increment_version(tensor)  # the dispatcher does not increment it for tensors in lists
    return tree_map(lambda value: mutated[id(value)][0] if id(value) in mutated else value, out)


def write_back(tensor: DTensor, full: torch.Tensor) -> None:
    """Copy this rank's shard of `full` into `tensor`."""
    shard = tensor.spec.local_shard(full)
    if shard is not tensor._local_tensor:  # a replicated tensor is its own shard
        tensor._local_tensor.copy_(shard)


def mutated_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation mutates, in the order of its arguments."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    mutated = (
        given.get(argument.name) for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    )
    return tensors_in(list(mutated))


def wait_to_write(tensors: Iterable[torch.Tensor]) -> None:
    """Wait, on the current stream, for the snapshot under way if it copies the local shard of one of these tensors."""
    snapshots.wait_to_write(tensor._local_tensor for tensor in tensors if isinstance(tensor, DTensor))


def tensors_in(args: object) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(args, torch.Tensor):
        return [args]
    return [t for arg in args for t in tensors_in(arg)] if isinstance(args, (list, tuple)) else []

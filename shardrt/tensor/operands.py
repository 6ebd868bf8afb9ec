"""What the operations on `DTensor`s do with their arguments: take this rank's part, gather the whole, or refuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..torch_internals import tree_map
from .dtensor import DTensor, group_of
from .placement import Spec
from .redistribute import redistribute


def refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_no_parameters(func, tensors_in(args))
    shapes = [tuple(x.shape) for x in tensors_in(args)]
    raise NotImplementedError(
        f"{func} is not defined on sharded tensors (shapes {shapes}): its result would depend on other ranks' parts. "
        "Use .full_tensor() for the whole tensor, or .to_local() for this rank's part"
    )


def check_no_parameters(func: Any, tensors: Iterable[torch.Tensor]) -> None:
    """NotImplementedError for a parameter of a sharded module: its forward was meant, most likely."""
    for tensor in tensors:
        group = group_of(tensor)
        if group is not None:
            name = getattr(tensor, "full_name", None) or "unnamed"
            raise NotImplementedError(
                f"{func} on parameter '{name}' of the sharded module '{group.name}' (rank {group.mesh.rank}), outside of the "
                "module's forward, where this rank has only a part of it: run what uses it inside the forward; or let another "
                "method gather as forward does, with shardrt.register_fsdp_forward_method(module, method_name), for generate() "
                "say; or gather everything for a while, with shardrt.unsharded(model); or use .full_tensor()"
            )


def check_gradients(func: Any, args: object, tensors: Iterable[torch.Tensor]) -> None:
    """As `check_no_parameters`, of those of `tensors` that want gradients, if `func` takes plain tensors too.

    Each rank may have other plain tensors: the gradient would be of this rank's alone, and nobody would reduce it.
    """
    if torch.is_grad_enabled() and any(type(tensor) is torch.Tensor and tensor.dim() for tensor in tensors_in(args)):
        check_no_parameters(func, [tensor for tensor in tensors if tensor.requires_grad])


def first_of(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def specs_of(args: tuple[Any, ...]) -> list[Spec]:
    """The specs of the first argument that has any: of one tensor, or of each in a list, where plain tensors have None."""
    for arg in args:
        if isinstance(arg, DTensor):
            return [arg.spec]
        if isinstance(arg, (list, tuple)):
            specs = [getattr(part, "spec", None) for part in arg]
            if any(specs):
                return specs  # type: ignore[return-value]  # Cost: of checking for None in every step of an optimizer
    raise AssertionError("dispatched without a sharded argument")


def localized(value: Any, specs: list[Spec], func: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return local_of(value, specs[0], func)
    if isinstance(first_of(value), torch.Tensor):
        return [
            part._local_tensor if type(part) is DTensor and part.spec is spec else local_of(part, spec, func)
            for part, spec in zip(value, specs, strict=True)
        ]
    return value


def local_of(value: torch.Tensor, spec: Spec, func: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        if value.spec is spec or value.spec == spec:
            return value._local_tensor
        how = "that lie differently" if value.spec.mesh is spec.mesh else "of different meshes"
        raise ValueError(f"{func} on tensors {how}: {value.spec} against {spec}; use redistribute() or full_tensor()")
    if value.dim() == 0:
        return value
    try:
        return spec.local_part(value.expand(spec.shape))
    except RuntimeError as error:
        raise ValueError(
            f"{func}: a plain tensor of shape {tuple(value.shape)} with a sharded one of shape {tuple(spec.shape)}; "
            "expected one that can be expanded to the same shape"
        ) from error


def whole_of(value: Any) -> Any:
    """A tensor's whole, detached; anything else as it is. Collective."""
    return redistribute(value._local_tensor, value.spec, value.spec.replicated) if isinstance(value, DTensor) else value


def gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the whole tensors, on every rank alike; of what it writes each rank keeps its part.

    Cost: an all-gather of every sharded argument.
    """
    check_gradients(func, args, tensors_in(args))
    full_args, full_kwargs = tree_map(whole_of, (args, kwargs))
    if not func._schema.is_mutable:
        return func(*full_args, **full_kwargs)
    pairs = zip(written(func, args, kwargs), written(func, full_args, full_kwargs), strict=True)
    wholes = {id(full): (tensor, full) for tensor, full in pairs if isinstance(tensor, DTensor)}
    if any(tensor.spec.partial for tensor, _ in wholes.values()):
        refuse(func, args, kwargs)
    out = func(*full_args, **full_kwargs)
    for tensor, full in wholes.values():
        keep_part(tensor, full)
        increment_version(tensor)  # of lists the dispatcher does not
    return tree_map(lambda value: wholes[id(value)][0] if id(value) in wholes else value, out)


def keep_part(tensor: DTensor, whole: torch.Tensor) -> None:
    """Write this rank's part of a whole tensor into `tensor`."""
    part = tensor.spec.local_part(whole)
    if part is not tensor._local_tensor:  # as it is of a replicated tensor
        tensor._local_tensor.copy_(part)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes, in the order of its arguments."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    to = (
        given.get(argument.name) for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    )
    return tensors_in(list(to))


def tensors_in(args: object) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [t for arg in args for t in tensors_in(arg)] if isinstance(args, (list, tuple)) else []

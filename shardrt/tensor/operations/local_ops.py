"""Custom operators that run on the local shards of sharded tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...torch_internals import OpOverload, OpOverloadPacket
from ..dtensor.dtensor import RULES, DTensor
from ..dtensor.operands import local_shards, raise_undefined, specs_of, tensors_in, wait_to_write
from ..placement.placement import Spec


def register_local_op(op: OpOverload | OpOverloadPacket, *, plain: Collection[str] = ()) -> None:
    """Run `op` on this rank's local shards when its arguments are sharded tensors. No communication.

    For operators that process each element, or each block of consecutive elements, independently, such as the fused step of an
    optimizer. Blocks start at the first element of the local shard and do not cross ranks. A mutable operator that returns
    nothing is not run on a rank without elements.

    op: `torch.ops.library.name`, which registers all its overloads, or one overload.
    plain: names of arguments in the schema whose tensors are passed unchanged, such as look-up tables. Of other plain tensors,
        0-dim ones are passed unchanged and those of the global shape are replaced by this rank's shard.
    All sharded arguments must have the same mesh, placements and shape. Outputs must have the shape of the local shard; they
    become sharded tensors with the same spec.
    Raises TypeError if `op` is not an operator, ValueError for a name in `plain` that is not in the schema. A call of the
    operator raises ValueError for tensors that do not fit, NotImplementedError for a `Partial` tensor.
    """
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        raise TypeError(f"register_local_op({op!r}): expected an operator, such as torch.ops.library.name")
    overloads = [op] if isinstance(op, OpOverload) else [getattr(op, name) for name in op.overloads()]
    for overload in overloads:
        names = {argument.name for argument in overload._schema.arguments}
        if unknown := sorted(set(plain) - names):
            raise ValueError(f"register_local_op(plain={unknown}): {overload} has no such arguments; it has {sorted(names)}")
        RULES[overload] = _LocalOp(overload, plain)


class _LocalOp:
    """The dispatch rule of one registered overload."""

    def __init__(self, func: OpOverload, plain: Collection[str]) -> None:
        arguments = func._schema.arguments
        self._plain = frozenset(plain)
        self._names = [argument.name for argument in arguments]
        self._mutated = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        sharded = [t for value in given.values() for t in tensors_in(value) if isinstance(t, DTensor)]
        mutated = [t for name in self._mutated for t in tensors_in(given.get(name)) if isinstance(t, DTensor)]
        wait_to_write(mutated)
        if any(tensor.spec.partial for tensor in sharded):
            raise_undefined(func, tuple(given.values()), {})
        specs = specs_of(tuple(value for name, value in given.items() if name not in self._plain))
        if not all(specs):
            raise ValueError(
                f"{func.name()}, registered with register_local_op, on a list of sharded and plain tensors: expected only "
                "one kind; call it once for each"
            )
        local = {
            name: value if name in self._plain else local_shards(value, specs, func.name()) for name, value in given.items()
        }
        increment_version(mutated)  # on a rank without elements too: ranks compare what was written
        if not func._schema.returns and not any(tensor._local_tensor.numel() for tensor in sharded):
            return None
        out = func(**local)
        owners = {id(tensor._local_tensor): tensor for tensor in sharded}
        if isinstance(out, (list, tuple)):
            shared = specs * len(out) if len(specs) == 1 else specs
            return type(out)(_sharded(local, spec, owners, func) for local, spec in zip(out, shared, strict=True))
        return _sharded(out, specs[0], owners, func)


def _sharded(out: Any, spec: Spec, owners: dict[int, DTensor], func: OpOverload) -> Any:
    """The `DTensor` of an output: the argument of which it is the local shard, or a new one."""
    if not isinstance(out, torch.Tensor) or id(out) in owners:
        return owners.get(id(out), out)
    expected = next(tensor._local_tensor.shape for tensor in owners.values() if tensor.spec == spec)
    if out.shape != expected:
        raise ValueError(
            f"{func.name()}, registered with register_local_op, returned a tensor of shape {tuple(out.shape)} for a local "
            f"shard of shape {tuple(expected)} (rank {spec.mesh.rank}): expected the same shape"
        )
    return DTensor(out, spec)

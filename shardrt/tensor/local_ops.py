"""Operators of users that run on the local parts of sharded tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..torch_internals import OpOverload, OpOverloadPacket
from .dtensor import RULES, DTensor
from .operands import localized, refuse, specs_of, tensors_in
from .placement import Spec


def register_local_op(op: OpOverload | OpOverloadPacket, *, plain: Collection[str] = ()) -> None:
    """Let `op` run on this rank's parts of sharded tensors. No communication.

    For operators that treat every element, or every block of consecutive elements, by itself, such as the fused step of an
    optimizer. Blocks are those of the part: none reaches over to another rank. With a mutable operator that returns nothing, a
    rank without elements has nothing to run.

    op: as `torch.ops.library.name`, for all of its overloads, or one of these.
    plain: names of arguments in the schema whose tensors go in as they are, such as look-up tables. Other plain tensors go in
        as they are if they have no dims, and by this rank's part if they have the shape of the whole.
    Sharded arguments lie alike. Outputs have the shape of the part and become sharded tensors that lie as the arguments do.
    Raises TypeError for what is no operator, ValueError for a name that the schema does not have; the operator's calls raise
    ValueError for tensors that do not fit, NotImplementedError for a `Partial` one.
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
    """The rule of one overload."""

    def __init__(self, func: OpOverload, plain: Collection[str]) -> None:
        arguments = func._schema.arguments
        self._plain = frozenset(plain)
        self._names = [argument.name for argument in arguments]
        self._written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        sharded = [t for value in given.values() for t in tensors_in(value) if isinstance(t, DTensor)]
        if any(tensor.spec.partial for tensor in sharded):
            refuse(func, tuple(given.values()), {})
        specs = specs_of(tuple(value for name, value in given.items() if name not in self._plain))
        if not all(specs):
            raise ValueError(
                f"{func.name()}, registered with register_local_op, on a list of sharded and plain tensors: expected "
                "either; call it for each kind"
            )
        local = {name: value if name in self._plain else localized(value, specs, func.name()) for name, value in given.items()}
        if not func._schema.returns and not any(tensor._local_tensor.numel() for tensor in sharded):
            return None
        out = func(**local)
        increment_version([t for name in self._written for t in tensors_in(given.get(name)) if isinstance(t, DTensor)])
        parts = {id(tensor._local_tensor): tensor for tensor in sharded}
        if isinstance(out, (list, tuple)):
            shared = specs * len(out) if len(specs) == 1 else specs
            return type(out)(_sharded(part, spec, parts, func) for part, spec in zip(out, shared, strict=True))
        return _sharded(out, specs[0], parts, func)


def _sharded(out: Any, spec: Spec, parts: dict[int, DTensor], func: OpOverload) -> Any:
    """An output: the argument that it is, or a tensor that lies as the arguments do."""
    if not isinstance(out, torch.Tensor) or id(out) in parts:
        return parts.get(id(out), out)
    expected = next(part._local_tensor.shape for part in parts.values() if part.spec == spec)
    if out.shape != expected:
        raise ValueError(
            f"{func.name()}, registered with register_local_op, made a tensor of shape {tuple(out.shape)} of a part of shape "
            f"{tuple(expected)} (rank {spec.mesh.rank}): expected one of the same shape"
        )
    return DTensor(out, spec)

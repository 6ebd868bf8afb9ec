"""The arguments of a process group's calls, in torch's several forms, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp as TorchOp

from ...comm import PreMulSum, ReduceOp
from ...comm.core.calls import INTEGERS, Op
from ...comm.groups.checks import plain
from .reductions import Bitwise

Tensors = list[torch.Tensor]
Options = TypeVar("Options")

_KINDS = type(TorchOp.SUM)
_OPS: dict[Any, ReduceOp] = {
    TorchOp.SUM: ReduceOp.SUM,
    TorchOp.AVG: ReduceOp.AVG,
    TorchOp.MIN: ReduceOp.MIN,
    TorchOp.MAX: ReduceOp.MAX,
    TorchOp.PRODUCT: ReduceOp.PRODUCT,
}
_OF_BITS = INTEGERS | {torch.bool}
_BITWISE: dict[Any, Bitwise] = {
    TorchOp.BAND: torch.bitwise_and,
    TorchOp.BOR: torch.bitwise_or,
    TorchOp.BXOR: torch.bitwise_xor,
}


def kind_of(op: Any) -> Any:
    """The kind of one of torch's operations."""
    return op if isinstance(op, _KINDS) else op.op


def reduce_op(name: str, op: Any, tensors: Tensors) -> Op | Bitwise:
    """An operation of torch's as one of a communicator, or for those of bits as a function of two tensors.

    Raises NotImplementedError for unknown ones, ValueError for bits of tensors of other dtypes than integers and bool.
    """
    kind = kind_of(op)
    if kind in _BITWISE:
        wrong = next((tensor for tensor in tensors if tensor.dtype not in _OF_BITS), None)
        if wrong is not None:
            raise ValueError(f"{name} of {wrong.dtype} by {kind}: expected integers or bool")
        return _BITWISE[kind]
    if kind == TorchOp.PREMUL_SUM:
        return PreMulSum(float(op.factor))
    if kind not in _OPS:
        raise NotImplementedError(f"{kind} over shardrt: expected one of {', '.join(map(str, [*_OPS, *_BITWISE]))}")
    return _OPS[kind]


def options(kind: type[Options], names: Sequence[str], args: Sequence[Any], given: dict[str, Any]) -> Options:
    """A call's options: those of torch's dispatcher, or made of its short form. names: of the short form's arguments, in order.

    Raises TypeError for arguments that neither form has. A timeout is not used: the watchdog has one for all calls.
    """
    if args and isinstance(args[0], kind):
        return args[0]
    if isinstance(given.get("opts"), kind):
        return given["opts"]
    made = kind()
    fields = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
    short = dict(zip(names, args, strict=False)) | given
    unknown = set(short) - {*names, "opts"}
    if unknown or len(args) > len(names):
        raise TypeError(
            f"a process group's call: expected {kind.__name__}, or {', '.join(names)}; found {sorted(unknown) or args}"
        )
    for name, value in short.items():
        if value is not None and name != "opts":
            setattr(made, fields[name], value)
    return made


def one(name: str, tensors: Any) -> torch.Tensor:
    """The tensor of a list of one, or a tensor itself. Raises ValueError otherwise."""
    if isinstance(tensors, torch.Tensor):
        found = tensors
    elif len(tensors) == 1:
        found = tensors[0]
    else:
        raise ValueError(
            f"{name}: requires a single-element tensor list, found {len(tensors)} tensors; one GPU has one process"
        )
    return dense(name, found)


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, without its gradient. Raises NotImplementedError for a sparse one."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(f"{name} of a tensor of layout {tensor.layout}: expected a dense one; call to_dense() first")
    return plain(tensor)


def some(name: str, tensors: Tensors) -> Tensors:
    """The tensors. Raises ValueError for none, and for tensors on several devices."""
    if len(tensors) == 0:
        raise ValueError(f"{name}: requires non-empty tensor list")
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"{name}: expected tensors on one device, found {sorted({str(tensor.device) for tensor in tensors})}")
    return [dense(name, tensor) for tensor in tensors]


def row(name: str, lists: Any, size: int, like: torch.Tensor) -> Tensors:
    """The list of a list of one, or a list of tensors itself: one for each rank, of one dtype with `like`.

    Raises ValueError otherwise.
    """
    if len(lists) == 1 and not isinstance(lists[0], torch.Tensor):
        lists = lists[0]
    if len(lists) != size or not all(isinstance(tensor, torch.Tensor) for tensor in lists):
        raise ValueError(f"{name}: expected a list of {size} tensors, one for each rank of the group, found {len(lists)}")
    wrong = next((tensor for tensor in lists if tensor.dtype != like.dtype), None)
    if wrong is not None:
        raise ValueError(f"{name}: tensors of one dtype are required, found {wrong.dtype} and {like.dtype}")
    return [dense(name, tensor) for tensor in lists]


def equal_sizes(name: str, tensors: Tensors, like: torch.Tensor) -> None:
    """Raise ValueError unless all tensors have as many elements as `like`."""
    for tensor in tensors:
        if tensor.numel() != like.numel():
            raise ValueError(f"{name}: expected tensors of {like.numel()} elements, found one of {tensor.numel()}")


def counts(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """The elements for each rank. splits: rows of dim 0 for each; empty for equal ones.

    Raises ValueError if they do not fit.
    """
    rows = tensor.size(0) if tensor.dim() else tensor.numel()
    if not splits:
        if rows % size:
            raise ValueError(f"{name}: dim 0 of {rows} rows is not divisible by the group's size {size}; give split sizes")
        return [tensor.numel() // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"{name}: Split sizes doesn't match total dim 0 size: {list(splits)} of {rows} rows on {size} ranks")
    per_row = tensor.numel() // rows if rows else 0
    return [split * per_row for split in splits]

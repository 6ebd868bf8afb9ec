"""Sums and means over ranks of a few scalars or small tensors, such as a training loop logs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.calls import FLOATS, REDUCIBLE, ReduceOp
from ..core.streams import Stream
from .communicator import Communicator

Value = torch.Tensor | float  # Python's int and bool as well


@torch.no_grad()
def reduce_values(comm: Communicator, values: Sequence[Value], stream: Stream, *, mean: bool) -> tuple[torch.Tensor, ...]:
    """The sum or the mean over the ranks of `comm`, of each of `values`. See `World.sum` and `World.mean`."""
    tensors = [_as_tensor(value, comm, mean) for value in values]
    sources: dict[torch.dtype, list[torch.Tensor]] = {}  # by the dtype in which they are added
    for tensor in tensors:
        sources.setdefault(_wide(tensor.dtype), []).append(tensor)
    packed = {
        dtype: torch.cat([tensor.reshape(-1).to(comm.device, dtype) for tensor in together])
        for dtype, together in sources.items()
    }
    with comm.group():
        for total in packed.values():
            comm.all_reduce(total, total, ReduceOp.SUM, stream=stream)
    parts = {
        dtype: iter((packed[dtype] / comm.size if mean else packed[dtype]).split([tensor.numel() for tensor in together]))
        for dtype, together in sources.items()
    }
    return tuple(_unpack(next(parts[_wide(tensor.dtype)]), tensor) for tensor in tensors)


def _as_tensor(value: Value, comm: Communicator, mean: bool) -> torch.Tensor:
    name = "mean" if mean else "sum"
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    elif isinstance(value, int | float):
        dtype = torch.float64 if mean or isinstance(value, float) else torch.int64
        tensor = torch.tensor(value, dtype=dtype, device=comm.device)
    else:
        raise TypeError(f"{name} on {comm}: expected tensors and numbers, found a {type(value).__name__}")
    if tensor.dtype not in (FLOATS if mean else REDUCIBLE):
        kind = "a floating-point dtype (of integers take the sum, or convert them)" if mean else "a dtype that can be added"
        raise ValueError(f"{name} on {comm}: expected {kind}, found {tensor.dtype}")
    return tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are added: for integers and bool that of `torch.sum`."""
    if dtype not in FLOATS:
        return torch.int64
    return torch.float32 if dtype.itemsize < 4 else dtype


def _unpack(total: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    dtype = like.dtype if like.dtype in FLOATS else torch.int64
    return total.view(like.shape).to(like.device, dtype)

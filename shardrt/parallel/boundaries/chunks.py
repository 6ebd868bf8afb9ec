"""Matmuls in chunks, each beside the communication of another one: `async_tp` of the styles.

A dim of N * n rows is split over N ranks; chunk j of K is the j-th n / K rows of every rank's part. The gather of chunk j + 1
runs beside the matmul of chunk j; the reduce-scatter of chunk j beside the matmul of chunk j + 1. (Jangda et al. 2022,
"Breaking the Computation and Communication Abstraction Barrier in Distributed Machine Learning Workloads".)

Cost: smaller matmuls and messages, and a copy of the output. It pays where the communication of the whole takes about as long
as the matmul, and a chunk of it still fills the device; never where ranks compute and communicate on the same cores.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ...tensor.placement.placement import Partial, Replicate, Shard
from .axis import Axis, Part, Pending

CHUNKS = 4
_PARTIAL, _REPLICATE, _ROWS = Partial(), Replicate(), Shard(0)


def chunks_of(total: int, size: int) -> int:
    """Into how many chunks a dim of `total` rows on `size` ranks is cut: at most CHUNKS, of equal length; 1: not at all."""
    if total == 0 or total % size:
        return 1
    return next(count for count in range(CHUNKS, 0, -1) if total // size % count == 0)


def gather_matmul(
    axis: Axis, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dim: int, shape: torch.Size
) -> torch.Tensor:
    """`F.linear` of a tensor of `shape`, of which `x` is this rank's part of `dim`."""
    count = chunks_of(shape[dim], axis.size)
    if count == 1:
        return F.linear(axis.changed(Part(x, Shard(dim), shape), _REPLICATE), weight, bias)
    rows = shape[dim] // axis.size // count
    parts = [part.contiguous() for part in x.movedim(dim, 0).split(rows)]
    chunk = torch.Size((axis.size * rows, *parts[0].shape[1:]))
    out = x.new_empty((*shape[:-1], weight.shape[0]))
    places = out.movedim(dim, 0).unflatten(0, (axis.size, count, rows))
    pending = axis.start(Part(parts[0], _ROWS, chunk), _REPLICATE)
    for index in range(count):
        gathered = pending.result()
        if index + 1 < count:
            pending = axis.start(Part(parts[index + 1], _ROWS, chunk), _REPLICATE)
        places[:, index].copy_(F.linear(gathered, weight, bias).unflatten(0, (axis.size, rows)))
    return out


def matmul_scatter(axis: Axis, x: torch.Tensor, weight: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's part of `dim` of the sum over the ranks of `F.linear(x, weight)`."""
    count = chunks_of(x.shape[dim], axis.size)
    if count == 1:
        return axis.changed(Part(F.linear(x, weight), _PARTIAL), Shard(dim))
    rows = x.shape[dim] // axis.size // count
    places = x.movedim(dim, 0).unflatten(0, (axis.size, count, rows))
    pending: list[Pending] = []
    for index in range(count):  # on the side stream, one after the other
        pending.append(axis.start(Part(F.linear(places[:, index], weight), _PARTIAL), _ROWS))
    return torch.cat([chunk.result()[0] for chunk in pending]).movedim(0, dim).contiguous()

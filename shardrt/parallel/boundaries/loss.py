"""`loss_parallel`: `F.cross_entropy` of logits whose classes are sharded, and the steps on the way to it, without a gather.

Inside of the context, torch's functions on `DTensor`s come here first:

| function                                      | of a `DTensor` with sharded classes                                     |
|-----------------------------------------------|-------------------------------------------------------------------------|
| `F.cross_entropy` (`nn.CrossEntropyLoss`)     | `shardrt.parallel.cross_entropy`: two all-reduces, a plain result       |
| view, reshape, flatten, indexing, split, chunk | on the local shard, if they keep the classes as the last dim           |
| transpose, permute                            | on the local shard                                                      |
| any other, and all of other tensors           | as outside of the context                                               |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ...tensor.dtensor.dtensor import DTensor, dtensor_of
from ...tensor.placement.placement import Shard, Sharded
from .vocabulary import cross_entropy, shards


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, `F.cross_entropy` of a `DTensor` whose classes are sharded over a 1-D mesh computes on the shards.

    The logits are those of a head with `ColwiseParallel(use_local_output=False)`: a `DTensor`, sharded in its dim 1, or in dim
    0 if it has no other. Reshaping them, slices of other dims, and elementwise operations keep them sharded.
    The loss is a plain tensor, the same on every rank. Its backward needs no communication and may run outside.
    Plain logits are left to torch. All options of `F.cross_entropy` work but targets that are probabilities and the deprecated
    `size_average` and `reduce`, which raise NotImplementedError.
    Contexts may be nested. Cost: none for functions on plain tensors; about a microsecond for each on `DTensor`s.
    """
    before = vars(DTensor)["__torch_function__"]
    DTensor.__torch_function__ = staticmethod(_torch_function)
    try:
        yield
    finally:
        DTensor.__torch_function__ = before


_outside: Callable[..., Any] = DTensor.__torch_function__


def _torch_function(func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    handler = _HANDLERS.get(func)
    first = args[0] if args else (kwargs or {}).get("input")
    if handler is not None and type(first) is DTensor and (func is F.cross_entropy or _is_sharded(first)):
        out = handler(func, *args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
    return _outside(func, types, args, kwargs or {})


def _is_sharded(tensor: DTensor) -> bool:
    placements = tensor.spec.placements
    return len(placements) == 1 and isinstance(placements[0], Shard)


def _cross_entropy(
    func: Any,
    input: DTensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    dims = len(input.spec.shape)
    dim = min(1, dims - 1)
    if not any(shards(placement, dim) for placement in input.spec.placements):
        return NotImplemented
    if size_average is not None or reduce is not None:
        raise NotImplementedError("cross_entropy of sharded classes with size_average or reduce: use reduction")
    return cross_entropy(
        _permuted(input, [*range(dim), *range(dim + 1, dims), dim]),
        target,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


# ---------------------------------------------------------------------- shapes: the classes stay whole, and sharded alike


def _wrapped(local: torch.Tensor, like: DTensor, dim: int) -> DTensor:
    """A `DTensor` of a local shard whose classes are in `dim`."""
    spec = like.spec
    placement = spec.placements[0]
    assert isinstance(placement, Shard), "checked by the caller"
    shape = (*local.shape[:dim], spec.shape[placement.dim], *local.shape[dim + 1 :])
    return dtensor_of(local, replace(spec, placements=(replace(placement, dim=dim),), shape=torch.Size(shape)))


def _classes_are_last(logits: DTensor) -> bool:
    return shards(logits.spec.placements[0], len(logits.spec.shape) - 1)


def _view(func: Any, logits: DTensor, *sizes: Any, **kwargs: Any) -> Any:
    wanted = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)
    if kwargs or not _classes_are_last(logits) or not all(isinstance(size, int) for size in wanted) or not wanted:
        return NotImplemented
    shape = logits.spec.shape
    if wanted.count(-1) == 1:
        known = -math.prod(wanted)
        if known <= 0:
            return NotImplemented
        wanted[wanted.index(-1)] = shape.numel() // known
    if wanted[-1] != shape[-1] or math.prod(wanted) != shape.numel():
        return NotImplemented
    local = logits.to_local()
    # A copy if the local shard is not contiguous: the wrapper is, so `contiguous()` may have left it as it was.
    return _wrapped(local.reshape(*wanted[:-1], local.shape[-1]), logits, len(wanted) - 1)


def _flatten(func: Any, logits: DTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(logits.spec.shape)
    start, end = start_dim % dims, end_dim % dims
    if not _classes_are_last(logits) or (start < end == dims - 1):
        return NotImplemented
    local = logits.to_local().flatten(start, end)
    return _wrapped(local, logits, local.dim() - 1)


def _index(func: Any, logits: DTensor, index: Any) -> Any:
    places = list(index) if isinstance(index, tuple) else [index]
    if not _classes_are_last(logits) or any(isinstance(place, DTensor) for place in places):
        return NotImplemented
    taken = sum(_dims_taken(place) for place in places)
    reaches_end = taken == len(logits.spec.shape) or any(place is Ellipsis for place in places[:-1])
    if reaches_end and not (isinstance(places[-1], slice) and places[-1] == slice(None)):
        return NotImplemented
    local = logits.to_local()[index]
    return _wrapped(local, logits, local.dim() - 1)


def _dims_taken(place: Any) -> int:
    if place is None or place is Ellipsis:
        return 0
    is_mask = isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8)
    return place.dim() if is_mask else 1


def _split(func: Any, logits: DTensor, size: Any, dim: int = 0) -> Any:
    axis = dim % len(logits.spec.shape)
    placement = logits.spec.placements[0]
    assert isinstance(placement, Shard), "checked by the caller"
    if axis == placement.dim:
        return NotImplemented
    return tuple(_wrapped(part, logits, placement.dim) for part in func(logits.to_local(), size, dim=axis))


def _transpose(func: Any, logits: DTensor, dim0: int, dim1: int) -> Any:
    dims = len(logits.spec.shape)
    order = list(range(dims))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(func, logits, order)


def _permute(func: Any, logits: DTensor, *dims: Any) -> Any:
    count = len(logits.spec.shape)
    order = [dim % count for dim in (dims[0] if isinstance(dims[0], Sequence) else dims)]
    return _permuted(logits, order)


def _permuted(tensor: DTensor, order: Sequence[int]) -> DTensor:
    spec = tensor.spec
    placements = tuple(replace(p, dim=order.index(p.dim)) if isinstance(p, Sharded) else p for p in spec.placements)
    shape = torch.Size(spec.shape[dim] for dim in order)
    return dtensor_of(tensor.to_local().permute(*order), replace(spec, placements=placements, shape=shape))


_FUNCTIONS: dict[Callable[..., Any], tuple[Any, ...]] = {
    _cross_entropy: (F.cross_entropy,),
    _view: (torch.Tensor.view, torch.Tensor.reshape, torch.reshape),
    _flatten: (torch.Tensor.flatten, torch.flatten),
    _index: (torch.Tensor.__getitem__,),
    _split: (torch.Tensor.split, torch.split, torch.Tensor.chunk, torch.chunk),
    _transpose: (torch.Tensor.transpose, torch.transpose),
    _permute: (torch.Tensor.permute, torch.permute),
}
_HANDLERS = {function: handler for handler, functions in _FUNCTIONS.items() for function in functions}

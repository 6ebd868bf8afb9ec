"""Copies of the values of a state dict, which share nothing with the model and the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...tensor.dtensor import DTensor


def copied(value: Any, *, full: bool, offload: bool) -> Any:
    """A copy of one value. Collective for a sharded tensor that is to be full.

    Cost: a full tensor that was just gathered, or moved to the host, is not copied again.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    found = value.full_tensor() if full and isinstance(value, DTensor) else value
    made = found.detach().cpu() if offload else found.detach()
    return _clone(made) if _addresses(made) & _addresses(value) else made


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a tensor subclass consists of, by their attributes; none for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return {} if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Where the tensor's memory begins."""
    if isinstance(tensor, DTensor):
        return _addresses(tensor._local_tensor)
    if parts := _parts(tensor):
        return set[int]().union(*map(_addresses, parts.values()))
    return {tensor.untyped_storage().data_ptr()}


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. That of a tensor subclass is made of its parts: not every subclass has an operation `clone`."""
    if isinstance(tensor, DTensor):
        return DTensor(_clone(tensor._local_tensor), tensor.spec)
    if not (parts := _parts(tensor)):
        return tensor.clone()
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        {name: _clone(part) for name, part in parts.items()}, context, tensor.shape, tensor.stride()
    )
    return made

"""Optimizer state that was loaded whole: each rank keeps its part."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from .dtensor import DTensor

_followed: WeakSet[Optimizer] = WeakSet()


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Let this rank keep its part of state that lies whole, as `load_state_dict` of a full state dict leaves it.

    Sharded parameters' plain state tensors of the parameter's global shape become tensors that lie as the parameter does.
    Other state stays as it is: "step", and what has another shape for some parameter. No communication.
    An optimizer's step does this by itself, and once it has stepped, so does every `load_state_dict`. Call it between the
    first load and the first step to have the memory of the whole back at once.
    """
    keys = _elementwise_keys(optimizer)
    for param, state in optimizer.state.items():
        if isinstance(param, DTensor):
            for key in keys & state.keys():
                whole = state[key]
                if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor):
                    with torch.no_grad():
                        state[key] = torch.empty_like(param, dtype=whole.dtype, requires_grad=False).copy_(whole)


def follow(optimizer: Optimizer) -> None:
    """Shard what was loaded before the first step, and what will be loaded from now on."""
    if optimizer not in _followed:
        _followed.add(optimizer)
        shard_optimizer_state(optimizer)
        optimizer.register_load_state_dict_post_hook(shard_optimizer_state)


def _elementwise_keys(optimizer: Optimizer) -> set[Hashable]:
    """Keys under which every parameter has a tensor of its own shape: a shape alone could be that of a 0-dim counter."""
    shaped: dict[Hashable, bool] = {"step": False}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(param, torch.Tensor) and isinstance(value, torch.Tensor):
                shaped[key] = shaped.get(key, True) and value.shape == param.shape
    return {key for key, alike in shaped.items() if alike}

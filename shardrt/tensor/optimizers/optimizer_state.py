"""Which optimizer state is sharded as its parameter is, and sharding of what was loaded from a full state dict."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from ..dtensor.dtensor import DTensor

_with_load_hook: WeakSet[Optimizer] = WeakSet()


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """Replace full state tensors, as `load_state_dict` of a full state dict leaves them, by sharded ones.

    optimizer: any `torch.optim.Optimizer`; its state is changed in place. A plain state tensor of a sharded parameter's global
        shape becomes a `DTensor` of the same dtype with the parameter's mesh and placements. Unchanged are "step", entries that
        have another shape for some parameter, and state of plain parameters.
    No communication, but for state that lies otherwise than its parameter, as that of a model with another layout: it is
    redistributed.
    The first step of an optimizer calls this, and from then on each `load_state_dict`. Call it between the first load and the
    first step to free the memory of the full tensors at once.
    """
    keys = elementwise_keys(_shapes(optimizer))
    for param, state in states_of_parameters(optimizer):
        if isinstance(param, DTensor):
            for key in [key for key in state if key in keys]:  # in one order on all ranks, which a set has not
                value = state[key]
                if isinstance(value, torch.Tensor) and getattr(value, "spec", None) != param.spec:
                    with torch.no_grad():
                        state[key] = torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


def states_of_parameters(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, dict[Any, Any]]]:
    """The state of each parameter. An optimizer may keep something of its own beside it, such as `state["total_step"]`."""
    for param, state in optimizer.state.items():
        if isinstance(param, torch.Tensor) and isinstance(state, dict):
            yield param, state


def has_sharded(optimizer: Optimizer) -> bool:
    """Whether it updates a sharded parameter."""
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def shard_loaded_state(optimizer: Optimizer) -> None:
    """Shard state that was loaded before the first step, and install a hook that shards state loaded later.

    No-op for optimizers without sharded parameters.
    """
    if optimizer not in _with_load_hook and has_sharded(optimizer):
        _with_load_hook.add(optimizer)
        shard_optimizer_state(optimizer)
        optimizer.register_load_state_dict_post_hook(shard_optimizer_state)


def elementwise_keys(shapes: Iterable[tuple[Hashable, Iterable[int], Iterable[int]]]) -> set[Hashable]:
    """Keys of state with one number for each element: their tensors have the parameter's shape for all parameters.

    For one parameter alone, such a tensor may be a 0-dim counter. "step" is always one.
    shapes: key, shape of the state's tensor, shape of the parameter; of all tensors in an optimizer's state.
    """
    shaped: dict[Hashable, bool] = {"step": False}
    for key, found, of_parameter in shapes:
        shaped[key] = shaped.get(key, True) and tuple(found) == tuple(of_parameter)
    return {key for key, alike in shaped.items() if alike}


def _shapes(optimizer: Optimizer) -> Iterator[tuple[Hashable, torch.Size, torch.Size]]:
    for param, state in states_of_parameters(optimizer):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield key, value.shape, param.shape

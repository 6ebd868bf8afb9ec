"""State of an optimizer that has none yet, for a dict into which a checkpoint is loaded: the optimizer itself stays without.

torch's `get_optimizer_state_dict` takes a step with zeros as gradients for this: it counts as a step, and with weight decay it
leaves moments. Here torch's classes fill the lists of a step, which makes the state of the first one, and no step follows.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ...tensor.optimizers.other_optimizers import steps_locally
from ...torch_internals import init_group

_MARK = "is_fresh_state"


def fresh_state(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The state with which the first step would begin, by parameter; changes nothing, and draws no random numbers.

    Empty if the optimizer has state, if its class is none of torch's or takes no lists, and for parameters that are frozen or
    on the meta device. A checkpoint may lack these tensors (`mark_fresh`).
    Memory: that of the state.
    """
    kind, fill = type(optimizer), init_group(type(optimizer))
    if optimizer.state or fill is None or not fill.__module__.startswith("torch.optim.") or steps_locally(kind):
        return {}
    made, found = object.__new__(kind), dict[torch.Tensor, dict[str, Any]]()
    made.__dict__.update(optimizer.__dict__, state=defaultdict(dict))
    lists = len(inspect.signature(fill).parameters) - 2
    for group in optimizer.param_groups:
        # Parameters of the same memory, which also serves as their gradients: these are not read.
        params = {param: nn.Parameter(param.detach()) for param in group["params"] if param.requires_grad and not param.is_meta}
        for param, stand_in in params.items():
            stand_in.grad = param.detach()
        fill(made, {**group, "params": list(params.values())}, *([] for _ in range(lists)))
        for param, stand_in in params.items():
            state = made.state.get(stand_in, {})
            if issubclass(kind, SGD) and group["momentum"]:  # which its update makes
                state["momentum_buffer"] = torch.zeros_like(param.detach())
            for value in state.values():
                mark_fresh(value)
            if state:
                found[param] = state
    return found


def mark_fresh(value: Any) -> None:
    """Note of a tensor of fresh state that a load may find nothing for it: its parameter may have had no gradient yet."""
    if isinstance(value, torch.Tensor):
        setattr(value, _MARK, True)


def is_fresh(value: torch.Tensor) -> bool:
    """Whether a tensor was marked."""
    return getattr(value, _MARK, False)

"""Memory for models on the meta device, before values are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..fsdp.schedule.moves import buffers_on_meta


def materialise(module: nn.Module, device: torch.device, optimizers: Iterable[Optimizer] = ()) -> None:
    """Give memory to what is on the meta device, and the new parameters to the optimizers; the rest stays as it is.

    Tied tensors stay tied. Models of transformers also get the values of buffers that no checkpoint has.
    Collective if the module is sharded; for a failure on one rank to reach all, call it in `agreed(comm)`.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return
    before = [
        (table, key, tensor)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers)
        for key, tensor in table.items()
        if tensor is not None
    ]
    without_values = dict.fromkeys(owner for owner, _ in buffers_on_meta(module.modules()))
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    made: dict[torch.Tensor, Any] = {}
    for table, key, tensor in before:
        table[key] = made.setdefault(tensor, table[key])  # `_apply` makes a tensor for each name of one
    initialise: Any = getattr(module, "_init_weights", None)
    for owner in without_values if initialise is not None else ():
        initialise(owner)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(param, param) for param in group["params"]]
        for param in [param for param in optimizer.state if param in made]:
            optimizer.state[made[param]] = optimizer.state.pop(param)

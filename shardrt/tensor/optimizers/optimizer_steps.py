"""What is installed around steps of optimizers when the first sharded parameter is made; an import changes nothing of torch.

| what                                                  | for optimizers without sharded parameters                          |
|-------------------------------------------------------|--------------------------------------------------------------------|
| a hook before each step, and one after it             | refuses those whose parameters were replaced; waits for a snapshot |
| `step` of torch's elementwise classes                 | looks for a sharded parameter, and runs torch's                    |
| `DTensor` among the classes that torch clips in lists | nothing                                                            |

It is not done for single optimizers: torch tells nobody that one is made, and a learning-rate scheduler takes the optimizer's
`step` before the first one. A hook can exchange the `self` of a step, but the user's hooks, and steps of subclasses, would see
the stand-in. It is not undone: the next model needs it again, and its cost is one look at the parameters in each step.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...comm.monitor.progress import progress
from ...torch_internals import clip_lists_of
from ..dtensor import dtensor
from ..dtensor.replaced import check_not_replaced
from ..placement.snapshots import wait_to_step
from . import other_optimizers
from .elementwise_optimizers import exchange_steps


@functools.cache
def install() -> None:
    """Called whenever a `DTensor` becomes a parameter: once, it installs what the table names."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    exchange_steps()
    clip_lists_of(dtensor.DTensor)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_not_replaced(optimizer)
    wait_to_step(optimizer)
    return other_optimizers.begin_step(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    other_optimizers.end_step(optimizer, args, kwargs)
    progress.end_step()
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    # Others may write by any means, such as a kernel that is given addresses: a new version marks the shards as changed.
    params = (param for group in optimizer.param_groups for param in group["params"])
    increment_version([param for param in params if type(param) is dtensor.DTensor and param.requires_grad])


dtensor.at_a_parameter.append(install)

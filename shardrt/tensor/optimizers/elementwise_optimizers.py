"""Steps of torch's elementwise optimizers on this rank's local shards.

Their update of an element reads that element alone, so it may run on plain local tensors. A step does it in three parts:

| part of the class's `step`             | runs on                                                              |
|----------------------------------------|----------------------------------------------------------------------|
| the closure, hooks                     | the sharded parameters                                               |
| `_init_group`, which makes the state   | the sharded parameters: state consists of `DTensor`s                 |
| the update of the lists that it fills  | local shards of parameters, gradients and state, which are not copied |

The classes' steps exchange `self` inside of their hooks, which see torch's arguments. Nothing is installed in the optimizer, so
an exception leaves nothing behind. All other optimizers step on `DTensor`s; so do these under `torch.compile`, which knows the
classes.
Cost: dispatching each operation on lists takes some microseconds per tensor; finding its local shard takes 0.1.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ...torch_internals import compiling, exchange_step, init_group
from ..dtensor.dtensor import DTensor
from ..dtensor.operands import local_shard
from ..placement.placement import Spec
from .optimizer_state import has_sharded

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


_class_is_elementwise: dict[type, bool] = {}  # a cache


def is_elementwise(kind: type) -> bool:
    """Whether this is one of torch's elementwise optimizers, or a subclass whose lists are filled as theirs."""
    if kind not in _class_is_elementwise:
        fills = init_group(kind)
        bases = [base for base in _ELEMENTWISE if issubclass(kind, base)]
        _class_is_elementwise[kind] = fills is not None and any(init_group(base) is fills for base in bases)
    return _class_is_elementwise[kind]


class _OnLocalShards:
    """Stands for one of these optimizers as the `self` of its class's `step`, once."""

    state: Any  # `step` writes it after the update; replaced by _init_group()

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.state = optimizer.state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; `_init_group` changes options in these copies."""
        return [group.copy() for group in self._optimizer.param_groups]

    def _init_group(self, group: dict[str, Any], params: list[torch.Tensor], *lists: list[Any]) -> Any:
        """Fill the lists as the optimizer's class does, then replace what is sharded by this rank's part of it."""
        found = self._optimizer._init_group(group, params, *lists)
        self.state = self._optimizer.state
        sharded = [param for param in params if type(param) is DTensor]
        if not sharded or group.get("differentiable") or not all(map(_steps_by_parts, sharded)):
            return found
        specs = [param.spec if type(param) is DTensor else None for param in params]
        filled = [values for values in (params, *lists) if values]
        what = f"a step of {type(self._optimizer).__name__}"
        parts = [local for values in filled if (local := _local_parts(values, specs, what)) is not None]
        if len(parts) < len(filled):
            return found
        if group["foreach"] is None:
            group["foreach"] = False  # as torch decides for tensors that are not of its own classes
        # Invariant: every update is in place, but SGD's first, which makes the momentum. Later ones store what is there.
        self.state = defaultdict(dict)
        increment_version(sharded)  # a new version marks the shards as changed
        for values, local in zip(filled, parts, strict=True):
            values[:] = local
        return found


def _steps_by_parts(param: DTensor) -> bool:
    return type(param._local_tensor) is torch.Tensor and not param.spec.partial


def _local_parts(values: Sequence[Any], specs: Sequence[Spec | None], what: str) -> list[torch.Tensor] | None:
    """This rank's part of each value, whose parameter has the spec; the parameter is plain where that is None.

    None if a value is missing, or sharded although its parameter is plain. Raises ValueError for other placements than the
    parameter's.
    """
    parts = []
    for value, spec in zip(values, specs, strict=True):
        if type(value) is DTensor and value.spec is spec:
            parts.append(value._local_tensor)
        elif value is None or (spec is None and isinstance(value, DTensor)):
            return None
        else:
            parts.append(value if spec is None else local_shard(value, spec, what))
    return parts


def _exchanging(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def exchange(self: Any, *args: Any, **kwargs: Any) -> Any:
        local = not compiling() and is_elementwise(type(self)) and has_sharded(self)
        return step(_OnLocalShards(self) if local else self, *args, **kwargs)

    return exchange


def exchange_steps() -> None:
    """Let the classes' steps run on local shards where there are some."""
    todo = list[type[Optimizer]](_ELEMENTWISE)
    while todo:  # a class of the user's that inherits its step has a wrapper of its own
        kind = todo.pop()
        exchange_step(kind, _exchanging)
        todo += [each for each in kind.__subclasses__() if each not in _ELEMENTWISE]

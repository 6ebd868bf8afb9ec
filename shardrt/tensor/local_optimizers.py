"""Optimizers that step on this rank's parts as if these were plain parameters.

torch's own optimizers step on `DTensor`s. Others make state by a parameter's shape, quantise it in blocks, compile their
step or pass pointers to kernels: what they see must be plain tensors, of the sizes that this rank has. So while such an
optimizer steps, plain stand-ins take the parameters' places in its groups and its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .dtensor import DTensor
from .operands import local_of
from .optimizer_state import follow

_PACKAGES = ("bitsandbytes.optim.", "torchao.optim.")
_registered: set[type] = set()
_kinds: dict[type, bool] = {}  # whether optimizers of a class step so
_under_way: WeakKeyDictionary[Optimizer, _LocalStep] = WeakKeyDictionary()
_stand_ins: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by parameter


def register_local_optimizer(kind: type[Optimizer]) -> None:
    """Let optimizers of this class, and of classes derived from it, step on this rank's parts as on plain parameters.

    For optimizers that treat every element, or every block of consecutive elements, by itself, and cannot step on `DTensor`s.
    Those of `bitsandbytes` and `torchao` are registered. An optimizer that takes norms of whole parameters would take those of
    the parts. Blocks are those of the part; a parameter of which a rank has nothing is left out there.
    The optimizer's state is this rank's, of plain tensors: save it on every rank, and load it on as many. State of whole
    parameters loads as well unless it is quantised. A step's closure is called once, before the step; hooks of the optimizer
    around its step see plain parameters.
    Replicas (hybrid sharding) stay alike if the step draws no random numbers, or the replicas' generators are seeded alike.
    Raises TypeError for what is no class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"register_local_optimizer({kind!r}): expected a subclass of torch.optim.Optimizer")
    _kinds.clear()
    _registered.add(kind)


def steps_locally(kind: type) -> bool:
    """Whether optimizers of this class step on this rank's parts as on plain parameters."""
    if kind not in _kinds:
        _kinds[kind] = any(base in _registered or base.__module__.startswith(_PACKAGES) for base in kind.__mro__)
    return _kinds[kind]


class _StandIn:
    """A plain, contiguous parameter with the values of this rank's part of a sharded one: the part's memory if that is so.

    Cost: a part cut along another dim than the first is copied, and copied back, in every step.
    """

    def __init__(self, param: DTensor) -> None:
        self.local = param._local_tensor
        self.param = nn.Parameter(self.local.detach().contiguous(), requires_grad=param.requires_grad)

    @classmethod
    def of(cls, param: DTensor) -> _StandIn:
        made = _stand_ins.get(param)
        if made is None or made.local is not param._local_tensor:
            made = _stand_ins[param] = cls(param)
        return made

    def write_back(self) -> bool:
        """Copy values that lie elsewhere, since the part is not contiguous or the optimizer gave the parameter other memory."""
        if elsewhere := self.param.data_ptr() != self.local.data_ptr():
            self.local.copy_(self.param.detach())
        return elsewhere


class _LocalStep:
    """A step of one optimizer on stand-ins."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [group["params"] for group in optimizer.param_groups]
        sharded = [param for params in self._params for param in params if isinstance(param, DTensor)]
        self._pairs = [(param, _StandIn.of(param)) for param in sharded]

    def begin(self, optimizer: Optimizer) -> None:
        """Let the optimizer see the stand-ins, with their gradients where this rank has elements."""
        for param, stand_in in self._pairs:
            if param in optimizer.state:
                _localize(optimizer.state[param], param, stand_in)
        for param, stand_in in self._pairs:
            if param in optimizer.state:
                optimizer.state[stand_in.param] = optimizer.state.pop(param)
            if param.grad is not None and stand_in.local.numel():  # without a gradient it is left out
                stand_in.param.grad = local_of(param.grad, param.spec, "a local optimizer's step").contiguous()
        seen = {id(param): stand_in.param for param, stand_in in self._pairs}
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = [seen.get(id(param), param) for param in params]

    def end(self, optimizer: Optimizer) -> None:
        """Put the sharded parameters back; their values have changed."""
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = params
        for param, stand_in in self._pairs:
            if stand_in.param in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(stand_in.param)
            stand_in.param.grad = None
            if stand_in.write_back():
                del _stand_ins[param]
        increment_version([param for param, _ in self._pairs])


def _localize(state: dict[str, Any], param: DTensor, stand_in: _StandIn) -> None:
    """State that was loaded for the whole parameter: keep this rank's part."""
    if stand_in.param.shape == param.shape:
        return
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step":
            if not value.is_floating_point() or type(value) is not torch.Tensor:
                raise ValueError(
                    f"the optimizer's state '{key}' of a parameter of shape {tuple(param.shape)} is that of the whole "
                    f"parameter, quantised in blocks that lie across ranks (rank {param.spec.mesh.rank}): expected this rank's "
                    "own state, of an optimizer that stepped on as many ranks"
                )
            state[key] = param.spec.local_part(value).clone(memory_format=torch.contiguous_format)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not steps_locally(type(optimizer)):
        return follow(optimizer)
    if interrupted := _under_way.pop(optimizer, None):
        interrupted.end(optimizer)
        raise RuntimeError(
            f"the last step of {type(optimizer).__name__} was cut short by an exception: parameters and state may be half "
            "updated, and gradients are still there; call zero_grad(), and load a state from before it, to go on"
        )
    if not any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        return None
    if hasattr(optimizer, "mng"):
        _settle_overrides(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    loss = _evaluated(closure) if closure is not None else None
    step = _LocalStep(optimizer)
    with torch.no_grad():
        step.begin(optimizer)
    _under_way[optimizer] = step
    return None if closure is None else ((optimizer, lambda: loss), {})


def _evaluated(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if step := _under_way.pop(optimizer, None):
        with torch.no_grad():
            step.end(optimizer)


def _settle_overrides(optimizer: Any) -> None:
    """bitsandbytes finds settings of single parameters by their identity, or by their place, which stand-ins have as well."""
    limit = optimizer.args.max_unorm
    if limit > 0:
        raise NotImplementedError(
            f"{type(optimizer).__name__}(max_unorm={limit}) on sharded parameters: it takes the norm of each whole parameter; "
            "expected max_unorm=0"
        )
    optimizer.check_overrides()
    optimizer.mng.register_parameters(optimizer.param_groups)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)

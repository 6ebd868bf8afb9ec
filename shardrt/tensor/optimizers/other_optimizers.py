"""Optimizers that step on this rank's local shards as plain parameters.

torch's own optimizers step on `DTensor`s, elementwise ones on their local shards (`elementwise_optimizers.py`). Others allocate
state of a parameter's shape, quantise it in blocks, compile their step or pass pointers to kernels, so they need plain tensors
of the local size. During a step of such an optimizer, plain local parameters replace the sharded ones in its param groups and
its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..dtensor.dtensor import DTensor
from ..dtensor.operands import local_shard
from .optimizer_state import has_sharded, shard_loaded_state

_PACKAGES = ("bitsandbytes.optim.", "torchao.optim.")
_registered: set[type] = set()
_class_steps_locally: dict[type, bool] = {}  # a cache
_steps_in_progress: WeakKeyDictionary[Optimizer, _LocalStep] = WeakKeyDictionary()
_local_params: WeakIdKeyDictionary = WeakIdKeyDictionary()  # DTensor -> _LocalParam


def register_local_optimizer(kind: type[Optimizer]) -> None:
    """Let optimizers of a class, and of its subclasses, step on this rank's local shards as plain parameters.

    For optimizers that cannot step on `DTensor`s and process each element, or each block of consecutive elements, separately.
    Those of `bitsandbytes` and `torchao` are registered already. Not for optimizers that use the norm of a full parameter: they
    would use that of the local shard. Blocks start at the first element of the local shard; on a rank without elements of a
    parameter, the step skips it.
    The optimizer's state is plain and local. Checkpoints and full state dicts have what has one number for each element of a
    parameter, for any number of ranks; other state is saved on every rank and loads on the same number of ranks. State of full
    parameters can be loaded unless it is quantised. The closure of a step is called once, before the step; the optimizer's step
    hooks see plain parameters.
    With hybrid sharding, replicas stay equal if the step draws no random numbers, or the replicas' generators have equal seeds.

    kind: a subclass of `torch.optim.Optimizer`; TypeError for anything else.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise TypeError(f"register_local_optimizer({kind!r}): expected a subclass of torch.optim.Optimizer")
    _class_steps_locally.clear()
    _registered.add(kind)


def steps_locally(kind: type) -> bool:
    """Whether optimizers of this class step on local shards as plain parameters."""
    if kind not in _class_steps_locally:
        _class_steps_locally[kind] = any(base in _registered or base.__module__.startswith(_PACKAGES) for base in kind.__mro__)
    return _class_steps_locally[kind]


class _LocalParam:
    """A plain, contiguous parameter with the values of a local shard; it shares the shard's memory if that is contiguous.

    Cost: a shard along another dim than the first is copied, and copied back, in each step.
    """

    def __init__(self, param: DTensor) -> None:
        self.local = param._local_tensor
        self.param = nn.Parameter(self.local.detach().contiguous(), requires_grad=param.requires_grad)

    @classmethod
    def of(cls, param: DTensor) -> _LocalParam:
        made = _local_params.get(param)
        if made is None or made.local is not param._local_tensor:
            made = _local_params[param] = cls(param)
        return made

    def write_back(self) -> bool:
        """Copy the values to the shard if the parameter has other memory. Returns whether it has."""
        if separate := self.param.data_ptr() != self.local.data_ptr():
            self.local.copy_(self.param.detach())
        return separate


class _LocalStep:
    """One step of an optimizer on local parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._params = [group["params"] for group in optimizer.param_groups]
        sharded = [param for params in self._params for param in params if isinstance(param, DTensor)]
        self._pairs = [(param, _LocalParam.of(param)) for param in sharded]

    def begin(self, optimizer: Optimizer) -> None:
        """Install the local parameters in the optimizer, with gradients where this rank has elements."""
        for param, local_param in self._pairs:
            if param in optimizer.state:
                _localize(optimizer.state[param], param, local_param)
        for param, local_param in self._pairs:
            if param in optimizer.state:
                optimizer.state[local_param.param] = optimizer.state.pop(param)
            if param.grad is not None and local_param.local.numel():  # optimizers skip a parameter without a gradient
                local_param.param.grad = local_shard(param.grad, param.spec, "a local optimizer's step").contiguous()
        installed = {id(param): local_param.param for param, local_param in self._pairs}
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = [installed.get(id(param), param) for param in params]

    def end(self, optimizer: Optimizer) -> None:
        """Restore the sharded parameters, with their new values."""
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = params
        for param, local_param in self._pairs:
            if local_param.param in optimizer.state:
                optimizer.state[param] = optimizer.state.pop(local_param.param)
            local_param.param.grad = None
            if local_param.write_back():
                del _local_params[param]
        increment_version([param for param, _ in self._pairs])


def _localize(state: dict[str, Any], param: DTensor, local_param: _LocalParam) -> None:
    """Replace state that was loaded for the full parameter by this rank's shard of it."""
    if local_param.param.shape == param.shape:
        return
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step":
            if not value.is_floating_point() or type(value) is not torch.Tensor:
                raise ValueError(
                    f"the optimizer's state '{key}' of a parameter of shape {tuple(param.shape)} is that of the full "
                    f"parameter, quantised in blocks that cross ranks (rank {param.spec.mesh.rank}): expected this rank's "
                    "local state, saved by an optimizer on the same number of ranks"
                )
            state[key] = param.spec.local_shard(value).clone(memory_format=torch.contiguous_format)


def begin_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before each step: an optimizer that steps locally gets local parameters. Returns changed arguments, or None."""
    if not steps_locally(type(optimizer)):
        shard_loaded_state(optimizer)
        return None
    if interrupted := _steps_in_progress.pop(optimizer, None):
        interrupted.end(optimizer)
        raise RuntimeError(
            f"the previous step of {type(optimizer).__name__} was interrupted by an exception: parameters and state may be "
            "partly updated, and gradients still exist; call zero_grad(), and load an earlier state, to continue"
        )
    if not has_sharded(optimizer):
        return None
    if hasattr(optimizer, "mng"):
        _apply_bitsandbytes_overrides(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    loss = _call_with_grad(closure) if closure is not None else None
    step = _LocalStep(optimizer)
    with torch.no_grad():
        step.begin(optimizer)
    _steps_in_progress[optimizer] = step
    return None if closure is None else ((optimizer, lambda: loss), {})


def _call_with_grad(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()


def end_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """A hook after each step: the sharded parameters come back."""
    if step := _steps_in_progress.pop(optimizer, None):
        with torch.no_grad():
            step.end(optimizer)


def _apply_bitsandbytes_overrides(optimizer: Any) -> None:
    """Apply bitsandbytes' settings of single parameters to the sharded ones, by identity.

    It looks them up by position too, which local parameters share. Raises NotImplementedError for max_unorm.
    """
    limit = optimizer.args.max_unorm
    if limit > 0:
        raise NotImplementedError(
            f"{type(optimizer).__name__}(max_unorm={limit}) on sharded parameters: it needs the norm of each full parameter; "
            "expected max_unorm=0"
        )
    optimizer.check_overrides()
    optimizer.mng.register_parameters(optimizer.param_groups)

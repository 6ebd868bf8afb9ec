"""Parameters in whose place modules have others, and optimizers that still hold the former: refused at their next step.

An optimizer keeps the parameters that it was given. `fully_shard` and `parallelize_module` replace them on the modules, and so
does `to()` of a sharded module if it changes a dtype or a device: such an optimizer would update tensors that no module reads.
One that was made while a module had gathered parameters holds those, and the gradients are those of the sharded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from ...comm import world
from ...torch_internals import grad_hooks, post_accumulate_grad_hooks
from .dtensor import DTensor

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class _Checked(NamedTuple):
    """What an optimizer was checked with. It is checked again when one of these numbers has changed."""

    replacements: int
    param_groups: int


_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()  # torch.Tensor -> TensorWeakRef of the DTensor in its place
_gathered: WeakIdKeyDictionary = WeakIdKeyDictionary()  # unsharded parameter -> TensorWeakRef of the sharded one
_replacements = 0  # how many there were in this process
_checked: WeakKeyDictionary[Optimizer, _Checked] = WeakKeyDictionary()


def note_replaced(param: torch.Tensor, made: torch.Tensor) -> None:
    """The modules have `made`, a `DTensor`, in the place of `param` from now on. Both are referenced weakly.

    What users have set on `param` is on `made` as well: attributes, such as marks for an optimizer's groups, and hooks of
    gradients, which their handles remove from both.
    """
    global _replacements
    if type(param) in (nn.Parameter, DTensor):  # a subclass has parts of itself among them
        _share_attributes(param, made)
    on_grads, after = grad_hooks(param) or {}, post_accumulate_grad_hooks(param) or {}
    wants_grad = made.requires_grad
    for key in user_hooks(param):
        made.requires_grad_().register_hook(_Carried(on_grads, key))
    for key in after:
        made.requires_grad_().register_post_accumulate_grad_hook(_Carried(after, key))
    made.requires_grad_(wants_grad)
    _replaced[param] = TensorWeakRef(made)
    _replacements += 1


def replacement(param: torch.Tensor) -> DTensor | None:
    """What the modules have in the place of `param`; None if nothing has replaced it."""
    return _referent(_replaced, param)


class _Carried:
    """A hook of a parameter that was replaced. Its handle removes it from there."""

    def __init__(self, hooks: Mapping[int, Hook], key: int) -> None:
        self._hooks, self._key = hooks, key

    def __call__(self, tensor: torch.Tensor) -> Any:
        hook = self._hooks.get(self._key)
        return None if hook is None else hook(tensor)


def user_hooks(param: torch.Tensor) -> Mapping[int, Hook]:
    """The hooks that users have registered on `param` by `register_hook`. Cost: called for each parameter in each step."""
    hooks = grad_hooks(param)
    own = getattr(param, "_grad_hook", None)  # a DTensor's
    if hooks is None or own is None or own.id not in hooks:
        return hooks or {}
    return {key: hook for key, hook in hooks.items() if key != own.id} if len(hooks) > 1 else {}


def hooked(param: torch.Tensor, grad: DTensor) -> DTensor:
    """What the hooks that users have registered on `param`, by `register_hook`, make of a new gradient of it.

    grad: with the placements of the parameter; so must be what a hook returns, TypeError otherwise.
    """
    for hook in tuple(user_hooks(param).values()):
        made = hook(grad)
        if made is None:
            continue
        if not isinstance(made, DTensor) or made.spec != grad.spec or made.dtype != grad.dtype:
            found = f"{made.dtype}, {made.spec.placements}" if isinstance(made, DTensor) else type(made).__name__
            raise TypeError(
                f"a hook of {_named(cast(DTensor, param))} returned for its gradient: {found} (rank {world().rank}); expected "
                f"None or a DTensor of {grad.dtype} with the gradient's placements, {grad.spec.placements}, as operations on "
                "the gradient return"
            )
        grad = made
    return grad


def note_gathered(unsharded: torch.Tensor, sharded: torch.Tensor) -> None:
    """The modules see `unsharded` while `sharded` is gathered, with its attributes. Both are referenced weakly."""
    _share_attributes(sharded, unsharded)
    _gathered[unsharded] = TensorWeakRef(sharded)


def sharded_of(unsharded: torch.Tensor) -> DTensor | None:
    """The sharded parameter whose gathered form this is; None for another tensor."""
    return _referent(_gathered, unsharded)


def _share_attributes(param: torch.Tensor, made: torch.Tensor) -> None:
    for name, value in vars(param).items():
        if not hasattr(DTensor, name) and name != "_is_param":  # what is ours, such as `full_name`, and torch's own mark
            setattr(made, name, value)


def _referent(registry: WeakIdKeyDictionary, param: torch.Tensor) -> DTensor | None:
    found: TensorWeakRef | None = registry.get(param)
    made = None if found is None else found()
    assert made is None or isinstance(made, DTensor)
    return made


def check_not_replaced(optimizer: Optimizer) -> None:
    """Called before each step. RuntimeError if the optimizer holds parameters in whose place the modules have others."""
    now: _Checked | None = _Checked(_replacements, len(optimizer.param_groups))
    if _checked.get(optimizer) == now:
        return
    for param in [param for group in optimizer.param_groups for param in group["params"]]:
        if (made := replacement(param)) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): it holds a {type(param).__name__} of shape {tuple(param.shape)} that is "
                f"not in the model any more: {_named(made)} is in its place (rank {world().rank}); make the "
                "optimizer from model.parameters() after fully_shard, parallelize_module, and to() with another dtype or device"
            )
        if (sharded := _referent(_gathered, param)) is None:
            continue
        now = None  # to be checked at each step: the gradient may come later
        if param.grad is None and sharded.grad is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): it holds the gathered form of {_named(sharded)}, which gets no gradients "
                f"(rank {world().rank}): make the optimizer from model.parameters() while the model is sharded, before its "
                "first forward or after model.reshard()"
            )
    if now is not None:
        _checked[optimizer] = now


def name_of_gathered(param: torch.Tensor) -> str:
    """What errors call the gathered form of a parameter."""
    sharded = _referent(_gathered, param)
    return f"'{sharded.full_name}'" if sharded is not None and sharded.full_name else "the parameter"


def _named(made: DTensor) -> str:
    kind = " x ".join(map(str, made.spec.placements))
    return f"'{made.full_name}' ({kind})" if made.full_name else f"a DTensor ({kind})"

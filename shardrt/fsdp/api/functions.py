"""Custom functions of autograd, `torch.autograd.Function`, that are given parameters of a sharded module that does not run.

Their forward runs without gradients, and their backward makes whatever it likes, so no rule of an operation on a `DTensor` can
see that each rank makes a gradient of its own. So such a call is a forward of the parameter's module: it gathers, the function
is given the gathered parameter, and its gradient is averaged. Operators of `torch.library.register_autograd`, and
`checkpoint(use_reentrant=True)` of `torch.utils.checkpoint`, are such functions as well. They are watched from the import on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch

from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import group_of
from ...torch_internals import surround_functions
from ..params.by_hand import GatheredAlias, note_by_hand
from ..params.param import GatheredParameter, ShardedParam
from ..schedule.param_group import ParamGroup
from .module import FSDPModule, run_forward

Function = type[torch.autograd.Function]


_WATCHED = frozenset({DTensor, GatheredParameter, GatheredAlias})


def _call(kind: Function, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kind.__module__.startswith("shardrt."):
        return apply(*args, **kwargs)
    given = {id(param.sharded): (param, group) for param, group in _sharded_among(args)}
    if given and (torch.is_grad_enabled() or any(_computes_with(args, group) for _, group in given.values())):
        return _run_as_forward(kind, partial(apply, **kwargs), args, given)
    out = apply(*args, **kwargs)
    if torch.is_grad_enabled():
        note_by_hand([arg for arg in args if type(arg) in (GatheredParameter, GatheredAlias)], out)
    return out


def _sharded_among(args: tuple[Any, ...]) -> Iterator[tuple[ShardedParam, ParamGroup]]:
    for arg in args:
        if type(arg) is DTensor and isinstance(group := group_of(arg), ParamGroup):
            yield from ((param, group) for param in group.params if cast(object, param.sharded) is arg)


def _computes_with(args: tuple[Any, ...], group: ParamGroup) -> bool:
    """Whether the other arguments are of another dtype than the shards: the one that the group's modules compute in.

    Without gradients, a function may run on the shards as they are, in their full precision: it may be about to write them.
    """
    dtype = group.mp_policy.param_dtype
    return dtype is not None and any(type(arg) is torch.Tensor and arg.dtype is dtype for arg in args)


def _run_as_forward(
    kind: Function,
    apply: Callable[..., Any],
    args: tuple[Any, ...],
    given: dict[int, tuple[ShardedParam, ParamGroup]],
) -> Any:
    """Run the function on gathered parameters, in a forward of each module that has one, on the other tensors in `args`."""
    for param, group in given.values():
        if param.outer is not None:
            raise NotImplementedError(
                f"{kind.__name__}.apply on parameter '{param.name}' of the sharded module '{group.name}' (rank "
                f"{group.mesh.rank}), which is tensor-parallel: its module computes with a part of it, and knows how; call the "
                "module, or the function inside of its forward"
            )
    are_inputs = [isinstance(arg, torch.Tensor) and id(arg) not in given for arg in args]

    def run(*inputs: torch.Tensor) -> Any:
        rest = iter(inputs)
        others = [next(rest) if is_input else arg for arg, is_input in zip(args, are_inputs, strict=True)]
        return apply(*(given[id(arg)][0].unsharded if id(arg) in given else arg for arg in others))

    for module in dict.fromkeys(group.modules[0] for _, group in given.values()):
        run = partial(_forward, cast(FSDPModule, module), run)
    return run(*(arg for arg, is_input in zip(args, are_inputs, strict=True) if is_input))


def _forward(module: FSDPModule, run: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    return run_forward(module, run, inputs, {})


# At import: with torch 2.14 and later, what the user takes from a class before, as in `mul = Mul.apply`, goes past it.
surround_functions(_WATCHED.__contains__, _call)

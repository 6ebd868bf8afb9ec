"""Loads state dicts into models and optimizers: full or sharded ones, from every rank or from rank 0 alone.

Full tensors are sent one at a time: a rank needs memory for the largest beside its shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ...comm import World, world
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import outside_inference_mode, overwrite
from ...tensor.dtensor.operands import shard_by
from ...tensor.optimizers.optimizer_state import elementwise_keys
from ...tensor.optimizers.other_optimizers import steps_locally
from ...tensor.placement.placement import Spec
from ...tensor.placement.snapshots import wait_to_write
from ..disk.errors import agreed
from ..state.dtypes import sentence
from ..state.models import match, materialise, named_tensors, take_back
from ..state.names import LoadedKeys, ParameterNames, cleaner
from ..state.optimizers import SavedState, common_hyperparameters, first_of, numbered, saved_state, skips
from ..state.several_names import Twins, same_bits, settle
from ..state.trees import key_of, mapped
from .get import Optimizers, StateDictOptions, as_list, copied

_BY_VALUE = 16  # rank 0 sends tensors of at most so many elements with the dict, such as hyperparameters


class _Sent(NamedTuple):
    """A tensor that rank 0 has and will send.   value: the tensor on rank 0, None on others."""

    shape: torch.Size
    dtype: torch.dtype
    value: torch.Tensor | None


@outside_inference_mode()
def set_model_state_dict(model: nn.Module, model_state_dict: Mapping[str, Any], *, options: Any = None) -> LoadedKeys:
    """Load a state dict of full or sharded tensors into the model. Collective.

    model: one that is on the meta device gets its memory first. Tensors keep their dtypes and placements.
    model_state_dict: as `get_model_state_dict` returns it, or `state_dict()` in a single process. With broadcast_from_rank0
        only that of rank 0 counts.
    options: `StateDictOptions`, or torch's.
    Returns missing_keys and unexpected_keys, as `load_state_dict` does. A tensor with several names needs one of them; with
    other values under several, it gets the first. A warning says if its dtype is narrower than what is given.
    Cost: of full tensors that every rank has, no communication; else a broadcast for each tensor.
    Raises, on every rank alike: CheckpointError, whose reason lists missing and unexpected names and different values of one
    tensor, unless strict=False, and wrong shapes.
    """
    return _set_model(model, model_state_dict, StateDictOptions.of(options), ())


@outside_inference_mode()
def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: Mapping[str, Any], *, options: Any = None
) -> None:
    """Load the optimizers' state by the names of their parameters in the model. Collective.

    optim_state_dict: as `get_optimizer_state_dict` returns it, in either form, of full or sharded tensors; with
        broadcast_from_rank0, only that of rank 0 counts. Order and grouping of the parameters may differ: hyperparameters are
        those of the saved group that a group's parameters were in; if they were in several with different ones, the group keeps
        its own, with a warning.   options: `StateDictOptions`, or torch's.
    Full tensors of a parameter's shape are sharded as it is. Missing state is made from the parameter, not by a step.
    Raises, on every rank alike: CheckpointError, whose reason lists parameters without state and group, and state that no
    parameter of the model has a place for, unless strict=False; or names a parameter that is not the model's, or one whose
    state has the shape of another.
    """
    chosen, here, listed = StateDictOptions.of(options), world(), as_list(optimizers)
    with agreed(here.comm):
        names = [ParameterNames(str(index), optimizer, {"": model}) for index, optimizer in enumerate(listed)]
    state = _announced(dict(optim_state_dict), chosen, here)
    with agreed(here.comm):
        own = {str(key) for optimizer in listed for key in optimizer.state if not isinstance(key, torch.Tensor)}
        saved = saved_state(state, own.union(*names))
        if chosen.strict:
            _check_complete(names, saved)
        elementwise = [_elementwise(each, saved) for each in names]
    for optimizer, each, keys in zip(listed, names, elementwise, strict=True):
        others = _others(optimizer, each, saved, here, only_present=len(listed) > 1)
        optimizer.load_state_dict(_packed(optimizer, each, saved, keys, here, others))


@outside_inference_mode()
def load_full_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a result of `full_optimizer_state`, or of `state_dict()` in a single process. Collective.

    state: every rank passes it, and copies its shards of it.
    Raises, on every rank alike: CheckpointError for parameter groups of other sizes than the optimizer's, and for state of
    other shapes.
    """
    here = world()
    with agreed(here.comm):
        names = ParameterNames("", optimizer, {"": numbered(optimizer)})
        sizes, found = ([len(group["params"]) for group in of] for of in (optimizer.param_groups, state["param_groups"]))
        if sizes != found:
            raise RuntimeError(f"the optimizer's state dict has groups of {found} parameters, expected {sizes}")
        saved = saved_state(
            {
                "state": {str(key) if isinstance(key, int) else key: values for key, values in state["state"].items()},
                "param_groups": [{**group, "params": [*map(str, group["params"])]} for group in state["param_groups"]],
            },
            set(names),
        )
        elementwise = _elementwise(names, saved)
    others = _others(optimizer, names, saved, here, only_present=False)
    optimizer.load_state_dict({**state, **_packed(optimizer, names, saved, elementwise, here, others)})


@outside_inference_mode()
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
) -> LoadedKeys:
    """Call `set_model_state_dict`, whose result this returns, and `set_optimizer_state_dict`. Collective."""
    listed = as_list(optimizers)
    keys = _set_model(model, model_state_dict, StateDictOptions.of(options), listed)
    set_optimizer_state_dict(model, listed, optim_state_dict, options=options)
    return keys


# ---------------------------------------------------------------------- models


def _set_model(
    model: nn.Module, given: Mapping[str, Any], options: StateDictOptions, optimizers: Iterable[Optimizer]
) -> LoadedKeys:
    here = world()
    state = _announced(given, options, here)
    with agreed(here.comm):
        clean = cleaner(model)
        others = {clean(raw): raw for raw, value in model.state_dict().items() if not isinstance(value, torch.Tensor)}
        found, keys, further, rounded = match(
            named_tensors(model), others, state, "the state dict", here.comm, strict=options.strict
        )
    with agreed(here.comm):
        materialise(model, here.device, optimizers)
    named = [each for each in named_tensors(model) if each.name in found]
    own = {name: tensor for name, tensor, _ in named}
    twins = (Twins(found[name], other, own[name]) for name, other in further)
    lost = [str(each) for each in twins if not _alike(state, each)]
    settle("the state dict", lost, sentence(rounded, here.rank), here.comm, strict=options.strict)
    for name, tensor, _ in named:
        _assign(tensor, _received(state[found[name]], here))
    take_back(model, named)
    if extra := {raw: state[name] for name, raw in others.items() if name in state}:
        model.load_state_dict(extra, strict=False)
    return keys


@torch.no_grad()
def _alike(state: Mapping[str, Any], twins: Twins) -> bool:
    """Whether this rank's parts of two tensors are the same; rank 0 compares what it will send. Collective if sharded."""
    given = [state[twins.name], state[twins.other]]
    values: list[Any] = [each.value if isinstance(each, _Sent) else each for each in given]
    if values[0] is values[1]:  # also where this rank has none
        return True
    sent = any(isinstance(each, _Sent) for each in given)
    made = [torch.empty_like(value if sent else twins.target, dtype=twins.target.dtype) for value in values]
    for each, value in zip(made, values, strict=True):
        _assign(each, value)
    return same_bits(*made)


@torch.no_grad()
def _assign(target: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        overwrite(target, value.full_tensor() if isinstance(value, DTensor) else value)
        return
    shard = _shard_of(value, target.spec)
    wait_to_write([target._local_tensor])
    overwrite(target._local_tensor, shard)
    increment_version(target)  # the next forward gathers again


def _shard_of(value: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's shard. Collective for a sharded tensor."""
    return shard_by(value, spec) if isinstance(value, DTensor) else spec.local_shard(value)


# ---------------------------------------------------------------------- from rank 0


def _announced(state: Mapping[str, Any], options: StateDictOptions, here: World) -> dict[str, Any]:
    """The state dict; if rank 0 broadcasts, that of rank 0, with a `_Sent` for each larger tensor. Collective."""
    if not options.broadcast_from_rank0:
        return dict(state)
    with agreed(here.comm):
        mine = mapped(state, _as_sent) if here.rank == 0 else {}
    (first, *_) = here.comm.exchange(mapped(mine, _without_value))
    return mine if here.rank == 0 else first


def _as_sent(value: Any) -> Any:
    if isinstance(value, DTensor):
        raise TypeError(f"broadcast_from_rank0 of a sharded tensor of shape {tuple(value.shape)}: expected full tensors")
    if not isinstance(value, torch.Tensor):
        return value
    return _Sent(value.shape, value.dtype, value) if value.numel() > _BY_VALUE else value.detach().cpu()


def _without_value(value: Any) -> Any:
    return value._replace(value=None) if isinstance(value, _Sent) else value


def _received(value: Any, here: World) -> Any:
    """The value, or the tensor that rank 0 sends for a `_Sent`. Collective for a `_Sent`."""
    if not isinstance(value, _Sent):
        return value
    if value.value is None:
        full = torch.empty(value.shape, dtype=value.dtype, device=here.device)
    else:
        full = value.value.detach().to(here.device).contiguous()
    if full.numel():
        data = full.view(-1).view(torch.uint8)
        here.comm.broadcast(data, data, 0, stream=here.stream).wait(here.stream)
    return full


# ---------------------------------------------------------------------- optimizers


def _check_complete(names: Iterable[ParameterNames], saved: SavedState) -> None:
    params = [(each, param) for each in names for param in each.params]
    lacking = [
        each[param]
        for each, param in params
        if not any(name in saved.state or name in saved.group_of for name in each.of(param))
    ]
    if lacking:
        raise RuntimeError(
            f"the optimizer's state dict lacks {', '.join(lacking)}: expected all parameters, by their names in the model; "
            "strict=False leaves the state of the others empty"
        )
    known = set[str]().union(*(each.of_modules for each in names), *names)
    lost = sorted(name for name in saved.state.keys() & saved.group_of.keys() if name not in known)
    for each, param in params:
        lost += [name for name in each.of(param) if name in saved.state][1:]
    if lost:
        raise RuntimeError(
            f"the optimizer's state dict has state of {', '.join(lost)}, which the model has no parameter for, or as another "
            "name of one that has state already; strict=False leaves it out"
        )


def _packed(
    optimizer: Optimizer,
    names: ParameterNames,
    saved: SavedState,
    elementwise: set[Hashable],
    here: World,
    others: Mapping[Any, Any],
) -> dict[str, Any]:
    """A state dict in which parameters are numbers, with state that is sharded as they are. Collective.

    others: state that is no parameter's.
    """
    state, groups, number = dict[Any, Any](others), list[dict[str, Any]](), 0
    local = steps_locally(type(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        numbers = range(number, number + len(group["params"]))
        found = [hyper for param in group["params"] if (hyper := first_of(saved.group_of, names.of(param))) is not None]
        groups.append({**group, **common_hyperparameters(f"param_groups.{index}", group, found), "params": [*numbers]})
        number = numbers.stop
        for param, place in zip(group["params"], numbers, strict=True):
            values = first_of(saved.state, names.of(param)) or {}
            made = {key: _placed_state(param, key in elementwise, value, here, local=local) for key, value in values.items()}
            if made and not skips(optimizer, param):
                state[place] = made
    return {"state": state, "param_groups": groups}


def _others(
    optimizer: Optimizer, names: ParameterNames, saved: SavedState, here: World, *, only_present: bool
) -> dict[Any, Any]:
    """Saved state that is no parameter's, such as a counter in `state["total_step"]`. Collective.

    only_present: what the optimizer has already, since the rest may be another optimizer's.
    """
    of_parameters = {*names, *names.of_modules, *saved.group_of}
    found = {key_of(optimizer.state, key): value for key, value in saved.state.items() if key not in of_parameters}
    return {
        key: mapped(value, lambda each: copied(_received(each, here), full=False, offload=False))
        for key, value in found.items()
        if key in optimizer.state or not only_present
    }


def _elementwise(names: ParameterNames, saved: SavedState) -> set[Hashable]:
    """Keys of tensors with one number for each element of the parameter.

    Raises RuntimeError for a tensor of another shape, if most of its key have the parameter's; sizes of 1 are reduced dims.
    """
    shapes = [
        (param, key, tuple(value.shape), tuple(param.shape))
        for param in names.params
        for key, value in (first_of(saved.state, names.of(param)) or {}).items()
        if isinstance(value, (torch.Tensor, _Sent))
    ]
    alike = Counter(key for _, key, found, own in shapes if found == own)
    other = Counter(key for _, key, found, own in shapes if found != own)
    wrong = {
        key: f"'{key}' of parameter '{names[param]}': expected shape {own}, found {found}"
        for param, key, found, own in shapes
        if alike[key] > other[key]
        and len(found) == len(own)
        and any(size not in (1, of) for size, of in zip(found, own, strict=True))
    }
    if wrong:
        raise RuntimeError(f"the optimizer's state dict does not fit the model: {'; '.join(wrong.values())}")
    return elementwise_keys((key, found, own) for _, key, found, own in shapes)


@torch.no_grad()
def _placed_state(param: torch.Tensor, elementwise: bool, given: Any, here: World, *, local: bool) -> Any:
    """One value of a parameter's state, as its optimizer keeps it. Collective if it is sent or sharded."""
    value = mapped(given, lambda each: _received(each, here))
    if not elementwise:
        return mapped(value, lambda each: each.detach().clone() if isinstance(each, torch.Tensor) else each)
    if not isinstance(param, DTensor):
        return torch.empty_like(param, dtype=value.dtype).copy_(value.full_tensor() if isinstance(value, DTensor) else value)
    shape, device = param._local_tensor.shape, param._local_tensor.device
    shard = torch.empty(shape, dtype=value.dtype, device=device).copy_(_shard_of(value, param.spec))
    return shard if local else DTensor(shard, param.spec)

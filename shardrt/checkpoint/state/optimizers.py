"""Optimizer state by the names of parameters: its sharded form, what a full form needs, and the forms of dicts that have it.

`shardrt/tensor/optimizers/optimizer_state.py`, which steps need too, says what of it has one number for each element of
a parameter.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm import Communicator, world
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.optimizers.optimizer_state import shard_optimizer_state
from ...tensor.optimizers.other_optimizers import steps_locally
from .names import ParameterNames, Path
from .stateful import key_of_rank
from .trees import mapped, placed

_log = logging.getLogger("shardrt")

OF_RANK = re.compile(r"(.*)(@rank\d+of(\d+))")  # a key, and its `rank_suffix`


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that is saved as one object, whatever it consists of."""

    value: Any


class NamesOfRank(Whole):
    """The names of a group's parameters: ranks may have different ones, as stages of a pipeline do."""


def optimizer_state(optimizer: Optimizer, names: ParameterNames) -> dict[str, Any]:
    """The optimizer's state dict by the names of its parameters, as torch's `get_optimizer_state_dict` gives it.

    State of an optimizer that steps on local shards (`shardrt.register_local_optimizer`) is sharded as its parameter is, if it
    has one floating-point number for each element of the shard. Its other tensors, except 0-dim ones, depend on where the
    shards begin: their keys end in `@rank<rank>of<ranks>`.
    """
    # Optimizers of other packages may give state dicts of a form that only their own load_state_dict understands.
    local = steps_locally(type(optimizer))
    packed = optimizer.state if local else optimizer.state_dict()["state"]
    own = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    for number in range(len(names.params)):
        if number in own:
            raise RuntimeError(
                f"{type(optimizer).__name__}.state has the key {number}, under which a state dict of torch has the state of "
                f"parameter {number}: name it otherwise, by a string"
            )
    state = {}
    for key, values in packed.items():
        param = names.params[key] if isinstance(key, int) and key not in own else key
        if not isinstance(param, torch.Tensor):
            state[param] = values
        elif values:
            state[names[param]] = dict(_saved_form(k, v, param, local=local) for k, v in values.items())
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def rank_suffix(param: DTensor) -> str:
    """The end of the keys of state that only this rank of the parameter's ranks can load."""
    mesh = param.spec.shard_mesh
    return key_of_rank(0, 1) if mesh is None else key_of_rank(mesh.rank, mesh.size())


def _saved_form(key: str, value: Any, param: torch.Tensor, *, local: bool) -> tuple[str, Any]:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return key, value
    plain = type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    kept = value if plain else Whole(value)
    if not (local and isinstance(param, DTensor)) or not value.dim():
        return key, kept
    if plain and value.is_floating_point() and value.shape == param._local_tensor.shape:
        return key, DTensor(value, param.spec)
    return key + rank_suffix(param), kept


def skips(optimizer: Optimizer, param: torch.Tensor) -> bool:
    """Whether an optimizer keeps no state of a parameter: it steps on local shards, and this rank has no elements."""
    return steps_locally(type(optimizer)) and isinstance(param, DTensor) and not param._local_tensor.numel()


def numbered(optimizer: Optimizer) -> nn.Module:
    """A module with the optimizer's parameters, whose names are their numbers in its own state dict."""
    holder = nn.Module()
    params = (param for group in optimizer.param_groups for param in group["params"])
    holder._parameters.update((str(number), param) for number, param in enumerate(params))
    return holder


# ---------------------------------------------------------------------- forms


def flat_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as one dict, in which each parameter has the hyperparameters of its group."""
    flat: dict[str, Any] = {}
    for name, values in state["state"].items():
        flat.update((f"state.{key}", value) for key, value in _flat_keys({name: values}))
    for group in state["param_groups"]:
        for name in group["params"]:
            flat.update((f"param_groups.{name}.{key}", value) for key, value in group.items() if key != "params")
    return flat


def _flat_keys(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat_keys(value))
        else:
            yield str(key), value


def split_flat(flat: str, known: set[str]) -> Path:
    """The path of an entry of the flat form; () if it is none.   known: names of parameters, which may have dots in them."""
    kind, _, rest = flat.partition(".")
    if rest in known:
        return (kind, rest)
    place = rest.rfind(".")
    while place >= 0 and rest[:place] not in known:
        place = rest.rfind(".", 0, place)
    if place >= 0:
        return (kind, rest[:place], *rest[place + 1 :].split("."))
    index, _, rest = rest.partition(".")
    return (kind, int(index), *rest.split(".")) if index.isdigit() else ()


def parameters_of(given: Mapping[Any, Any]) -> set[str]:
    """The names of the parameters in the groups of an optimizer's state dict, in either form; none in any other dict."""
    groups = given.get("param_groups")
    if isinstance(groups, list):
        return {name for group in groups if isinstance(group, Mapping) for name in group.get("params", ())}
    flat = (str(key).partition("param_groups.") for key in given)
    return {rest.rpartition(".")[0] for before, is_one, rest in flat if is_one and not before}


class SavedState(NamedTuple):
    """Optimizer state by names of parameters."""

    state: dict[str, dict[Any, Any]]
    group_of: dict[str, dict[str, Any]]  # parameter -> the hyperparameters of its group


def saved_state(given: Mapping[str, Any], names: set[str]) -> SavedState:
    """The state of a dict in either form, by groups or flat.   names: those of parameters, and of an optimizer's own state."""
    saved = SavedState({}, {})
    if "state" in given or "param_groups" in given:
        saved.state.update(given.get("state", {}))
        for group in given.get("param_groups", ()):
            hyper = {key: value for key, value in group.items() if key != "params"}
            saved.group_of.update(dict.fromkeys(group["params"], hyper))
        return saved
    for flat, value in given.items():
        if keys := split_flat(flat, names):
            kind, name, *rest = keys
            table: Any = saved.state if kind == "state" else saved.group_of
            table[name] = placed(table.get(name), tuple(rest), value, None)
    return saved


def first_of(table: Mapping[str, dict[Any, Any]], names: Iterable[str]) -> dict[Any, Any] | None:
    """What the table has under the first of a parameter's names that it knows."""
    return next((table[name] for name in names if name in table), None)


def common_hyperparameters(where: str, group: Mapping[str, Any], found: Sequence[Mapping[Any, Any]]) -> Mapping[Any, Any]:
    """The hyperparameters that a group gets: `found`, those of the saved groups of its parameters, if these are all alike.

    Otherwise an empty dict, with a warning.   where: the name of the group in the warning.
    """
    # Sorted, since ranks of stock DCP share the objects of a flat state, whose order in .metadata means nothing.
    spelled = [sorted(str((key, mapped(value, _exact))) for key, value in values.items()) for values in found]
    if any(other != spelled[0] for other in spelled[1:]):
        _log.warning(
            "%s: its parameters were in saved groups with different hyperparameters; it keeps its own (%s)",
            where,
            ", ".join(f"{key}={value}" for key, value in group.items() if key != "params"),
        )
        return {}
    return found[0] if found else {}


def _exact(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- the full form


def state_by_name(optimizer: Optimizer, names: ParameterNames, *, full: bool) -> dict[str, Any]:
    """The sharded state of one optimizer, by names of parameters.

    full: raise RuntimeError on every rank for state that has no full form, and add that of parameters of which this rank has no
    elements. Collective if it is full and the optimizer steps on local shards.
    """
    local = steps_locally(type(optimizer))
    if not local:
        shard_optimizer_state(optimizer)
    packed = optimizer_state(optimizer, names)
    if local and full:
        packed["state"] = _completed(packed["state"], names, world().comm)
    return packed


def _completed(state: Mapping[str, Any], names: ParameterNames, comm: Communicator) -> dict[str, Any]:
    """The state, with that of parameters of which this rank has no elements, which its optimizer skips. Collective."""
    params = {names[param]: param for param in names.params}
    mine = {
        name: {key: value.dtype if isinstance(value, DTensor) else value for key, value in values.items()}
        for name, values in state.items()
        if name in params
    }
    everyone: dict[str, dict[str, Any]] = {}
    for theirs in comm.exchange(mine):
        for name, values in theirs.items():
            everyone.setdefault(name, {}).update(values)
    for name, values in everyone.items():
        if bound := [key for key in values if OF_RANK.fullmatch(str(key))]:
            full_name = getattr(params[name], "full_name", name)
            raise RuntimeError(
                f"the state '{bound[0]}' of parameter '{full_name}' depends on where the shards begin, so it has no full form "
                f"(rank {comm.rank}): save it with shardrt.checkpoint.save"
            )
    completed = {name: {**_without_elements(params[name], each), **state.get(name, {})} for name, each in everyone.items()}
    return {**{name: values for name, values in state.items() if name not in params}, **completed}


def _without_elements(param: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter on a rank that has no elements of it.   values: those of other ranks, or their dtypes."""
    if not isinstance(param, DTensor):
        return dict(values)
    return {
        key: DTensor(torch.zeros_like(param._local_tensor, dtype=value), param.spec)
        if isinstance(value, torch.dtype)
        else value
        for key, value in values.items()
    }

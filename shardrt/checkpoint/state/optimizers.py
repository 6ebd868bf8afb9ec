"""Optimizer state by the names of parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ...tensor.dtensor import DTensor
from ...tensor.local_optimizers import steps_locally
from .names import ParameterNames, Path
from .stateful import key_of_rank

OF_RANK = re.compile(r"(.*)(@rank\d+of(\d+))")  # a key, and its `rank_suffix`


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that is saved as one object, whatever it consists of."""

    value: Any


def optimizer_state(optimizer: Optimizer, names: ParameterNames) -> dict[str, Any]:
    """The optimizer's state dict by the names of its parameters, as torch's `get_optimizer_state_dict` gives it.

    State of an optimizer that steps on local shards (`shardrt.register_local_optimizer`) is sharded as its parameter is, if it
    has one floating-point number for each element of the shard. All other tensors of it depend on where the shards begin: their
    keys end in `@rank<rank>of<ranks>`.
    """
    # Those of other packages may give state dicts of another form, which only their own load_state_dict understands.
    local = steps_locally(type(optimizer))
    packed = optimizer.state if local else optimizer.state_dict()["state"]
    state = {}
    for key, values in packed.items():
        param = names.params[key] if isinstance(key, int) else key
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


def split_flat(flat: str, known: set[str]) -> Path:
    """The keys of an entry of the flat form; names of parameters have dots in them."""
    kind, _, rest = flat.partition(".")
    place = rest.rfind(".")
    while place >= 0 and rest[:place] not in known:
        place = rest.rfind(".", 0, place)
    if place >= 0:
        return (kind, rest[:place], *rest[place + 1 :].split("."))
    index, _, rest = rest.partition(".")
    return (kind, int(index), *rest.split(".")) if index.isdigit() else ()

"""Tensors in the arguments and outputs of modules: in tuples, lists, dicts and dataclasses, however nested."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with every tensor in it replaced by `fn` of it; `value` itself if none changed."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [fn(item) if isinstance(item, torch.Tensor) else map_tensors(fn, item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _map_fields(fn, value)
    return value


def _map_fields(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    fields = value if isinstance(value, dict) else {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    mapped = {key: map_tensors(fn, item) for key, item in fields.items()}
    changes = {key: item for key, item in mapped.items() if item is not fields[key]}
    if not changes:
        return value
    if not isinstance(value, dict):
        return dataclasses.replace(value, **changes)
    made = copy.copy(value)  # keeps the class, whatever its constructor takes
    for key, item in changes.items():
        made[key] = item
    return made


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tensors_in([getattr(value, f.name) for f in dataclasses.fields(value)])
    return []

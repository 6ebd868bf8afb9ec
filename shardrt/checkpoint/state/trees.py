"""Nested dicts and lists: their leaves, each with its path of keys and indices, and trees made of leaves again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from .names import Path
from .stateful import PerRank, has_state


def has_inside(value: object) -> bool:
    """Whether a value is a dict, or a list with tensors, dicts and the like in it, whose items have names of their own.

    A dict with keys that are no strings is one object, which keeps them, unless there are tensors in it, or values with
    state or `PerRank`.
    """
    if isinstance(value, list):
        return any(_has_name(item) or has_inside(item) for item in value)
    return isinstance(value, Mapping) and (all(isinstance(key, str) for key in value) or _has_tensors(value))


def _has_tensors(value: object) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return any(map(_has_tensors, value.values() if isinstance(value, Mapping) else value))
    return _has_name(value)


def _has_name(value: object) -> bool:
    return isinstance(value, (torch.Tensor, PerRank)) or has_state(value)


def flattened(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested dicts and lists with their paths. An empty dict is a leaf."""
    if not has_inside(tree) or not tree:
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from flattened(value, (*path, key if isinstance(tree, list) else str(key)))


def placed(tree: Any, path: Path, value: Any, like: Any) -> Any:
    """The tree with a value at a path; dicts and lists on the way are made where there are none.

    like: a tree of the same form, or None: where it has a key that is not a string, such as a number, the tree gets that key.
    """
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        items = tree if isinstance(tree, list) else []
        items.extend([None] * (step + 1 - len(items)))
        below = like[step] if isinstance(like, list) and step < len(like) else None
        items[step] = placed(items[step], rest, value, below)
        return items
    named = tree if isinstance(tree, dict) else {}
    key = key_of(like, step)
    named[key] = placed(named.get(key), rest, value, like.get(key) if isinstance(like, Mapping) else None)
    return named


def fills(value: Any, loaded: Any) -> bool:
    """Whether a container can take what was loaded, so that whoever holds it sees that: another list, dict, set or array."""
    if value is loaded:
        return False
    if isinstance(value, (list, set)):
        return isinstance(loaded, type(value))
    if isinstance(value, MutableMapping):
        return isinstance(loaded, Mapping)
    alike = isinstance(loaded, type(value)) and hasattr(value, "__array_interface__")
    return alike and (value.shape, value.dtype) == (loaded.shape, loaded.dtype) and value.flags.writeable


def fill(value: Any, loaded: Any) -> None:
    """Put what was loaded into a container that it fills."""
    if isinstance(value, (set, MutableMapping)):
        value.clear()
        value.update(loaded)
    else:
        value[slice(None) if isinstance(value, list) else ...] = loaded


def key_of(tree: Any, step: str) -> Any:
    """The key of a dict that a path calls `step`: a number, if all keys of the dict are; `step` itself if it has none."""
    if not isinstance(tree, Mapping) or step in tree:
        return step
    if step.isdecimal() and tree and all(type(key) is int for key in tree):
        return int(step)
    return next((key for key in tree if str(key) == step), step)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The nested dicts, lists and tuples with their leaves changed."""
    if isinstance(tree, Mapping):
        return {key: mapped(value, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, change) for value in tree)
    return change(tree)

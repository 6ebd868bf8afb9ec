"""Tensors in the arguments and outputs of modules: in tuples, lists, deques, dicts and dataclasses, however nested.

Objects of other classes are passed as they are, with the tensors in them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn

_Slots = Sequence[tuple[Any, Any]]  # what a container has: index, key or name of a field, and the item there


class StandIns:
    """Tensors that a module is given, or returns, in the place of others, in the same places of the same containers.

    A tensor that is in several places is replaced once, and the other one has its attributes: these are the same dictionary.
    Lists, deques, dicts and dataclasses are changed where they are, and `take_back` puts the tensors back: what a module does
    to them meanwhile is done to the caller's. Where tensors get another dtype it is done to a copy, and then once more to the
    caller's: a later recomputation needs tensors of that dtype. Tuples and frozen dataclasses are copied.
    """

    __slots__ = ("_casts", "_fn", "_held", "_made", "_name", "_replaced")
    _made: dict[int, tuple[Any, Any]]  # by id: a tensor or container, which it keeps alive, and what is in its place
    _replaced: list[tuple[torch.Tensor, torch.Tensor]]  # tensors, and the other ones in their places
    _held: list[tuple[Any, Any, _Slots]]  # a container that can change, what is in its place, and what it had
    _casts: int  # places that have a tensor of another dtype

    def __init__(self, name: str, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """name: that of the module.   fn: what is in the place of a tensor."""
        self._name, self._fn = name, fn
        self._made, self._replaced, self._held, self._casts = {}, [], [], 0

    def replace(self, value: Any) -> Any:
        """What is in the place of `value`; `value` itself if nothing in it was replaced.

        Raises TypeError, which names the module and the class, for a container that cannot be copied or changed.
        """
        if isinstance(value, torch.Tensor):
            if (found := self._made.get(id(value))) is None:
                made = self._fn(value)
                self._made[id(value)] = found = value, made
                if made is value:
                    return value
                self._replaced.append(found)
                _share_attributes(value, made)
            made = found[1]
            if made.dtype is not value.dtype:
                self._casts += 1
            return made
        if not _is_container(value):
            return value
        if (found := self._made.get(id(value))) is None:
            slots, casts = _slots(value), self._casts
            items = [(key, self.replace(item)) for key, item in slots]
            try:
                used = self._with(value, slots, items, casts=self._casts != casts)
            except Exception as error:
                raise TypeError(
                    f"'{self._name}' is given, or returns, a {type(value).__qualname__}, in which a tensor cannot be replaced: "
                    f"{type(error).__name__}: {error}; use a tuple, named tuple, list, dict or dataclass"
                ) from error
            self._made[id(value)] = found = value, used
        return found[1]

    def _with(self, value: Any, slots: _Slots, made: _Slots, *, casts: bool) -> Any:
        """`value`, or a copy of it, with other items. casts: some of them are tensors of another dtype."""
        if isinstance(value, tuple):
            return _with_items(value, [item for _, item in made])
        frozen = _is_frozen(value)
        used = copy.copy(value) if casts or (frozen and not _same(made, slots)) else value
        if not frozen:
            self._held.append((value, used, slots))
        _write(used, slots, made)
        return used

    def take_back(self) -> list[torch.Tensor]:
        """The module has run: its caller's containers have the tensors again that they had. Returns: those it has added.

        Also keep what the module has written in place to an input that has another dtype now, but for one with a gradient; and
        the gradients of its inputs that it wants.
        """
        for value, made in self._replaced:
            if made.retains_grad:
                value.retain_grad()
            if self._casts and made.dtype is not value.dtype and not value.requires_grad:
                _keep_writes(value, made)
        if not self._held:
            return []
        before = {id(made): value for value, made in self._made.values()}
        held = [(value, used, slots, _slots(used)) for value, used, slots in reversed(self._held)]
        added = tensors_in([item for _, _, _, now in held for _, item in now if id(item) not in before])
        for value, used, slots, now in held:
            _write(value, now if used is value else slots, [(key, _put_back(before, item)) for key, item in now])
            if used is not value and hasattr(used, "__dict__"):
                fields = dict(now)
                vars(value).update((name, _put_back(before, it)) for name, it in vars(used).items() if name not in fields)
        return [tensor for tensor in added if id(tensor) not in before]


def _share_attributes(tensor: torch.Tensor, made: torch.Tensor) -> None:
    if type(made) is torch.Tensor and type(tensor) in (torch.Tensor, nn.Parameter):
        made.__dict__ = tensor.__dict__
    elif type(made) is type(tensor):  # a subclass has parts of itself among them
        for name, item in vars(tensor).items():
            made.__dict__.setdefault(name, item)


def _keep_writes(value: torch.Tensor, made: torch.Tensor) -> None:
    """Write to `value` what was written to the copy of it in another dtype. Other elements keep their precision."""
    if type(made) is torch.Tensor and not made.is_inference() and made._version:
        now, before = made.detach(), value.to(made.dtype)
        same = (now == before) | (now.isnan() & before.isnan())
        value.copy_(torch.where(same, value, made.to(value.dtype)))


def _is_container(value: object) -> bool:
    return isinstance(value, (tuple, list, dict, deque)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module))
    )


def _is_frozen(value: Any) -> bool:
    return not isinstance(value, (list, dict, deque)) and value.__dataclass_params__.frozen


def _slots(value: Any) -> _Slots:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (tuple, list, deque)):
        return list(enumerate(value))
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]


def _with_items(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if all(map(is_, items, value)):
        return value
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):  # of torch.return_types
        return kind(items)
    made: tuple[Any, ...] = tuple.__new__(kind, items)  # whatever its constructor takes
    if hasattr(value, "__dict__"):
        made.__dict__ = value.__dict__
    return made


def _put_back(before: dict[int, Any], item: Any) -> Any:
    """What was in the place of `item`. In a container that the module has made, what was in the places of its items."""
    if id(item) in before:
        return before[id(item)]
    if isinstance(item, tuple):
        return _with_items(item, [_put_back(before, each) for each in item])
    if _is_container(item):
        slots = _slots(item)
        _write(item, slots, [(key, _put_back(before, each)) for key, each in slots])
    return item


def _same(one: _Slots, other: _Slots) -> bool:
    return len(one) == len(other) and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(one, other, strict=True))


def _write(value: Any, now: _Slots, wanted: _Slots) -> None:
    """Let a container that has `now` have what is wanted. A dict has what stays in the order in which it was inserted."""
    if isinstance(value, (list, deque)):
        for _ in wanted[len(now) :]:
            value.append(None)
        for _ in now[len(wanted) :]:
            value.pop()
    elif [key for key, _ in now] != [key for key, _ in wanted[: len(now)]]:
        value.clear()
        now = ()
    before = dict(now)
    for key, item in wanted:
        if key in before and before[key] is item:
            continue
        if isinstance(value, (list, dict, deque)):
            value[key] = item
        elif _is_frozen(value):
            object.__setattr__(value, key, item)
        else:
            setattr(value, key, item)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value`, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list, deque)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if _is_container(value):
        return tensors_in([item for _, item in _slots(value)])
    return []

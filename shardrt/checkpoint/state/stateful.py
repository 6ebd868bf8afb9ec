"""Values with a state that they can give and take; and values of which each rank has its own, such as a data loader's position.

Rank 3 of 8 saves its own value at `data.position` as the object `data.position.@rank3of8`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard

import torch


class Stateful(Protocol):
    """An object that can give its state and take it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


def has_state(value: object) -> TypeGuard[Stateful]:
    """Whether a value has `state_dict` and `load_state_dict`; False for a class."""
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in ("state_dict", "load_state_dict"))


OF_RANK = re.compile(r"@rank(\d+)of(\d+)")  # the last key in the path of such a value


_MARK = "may_differ_by_rank"


def mark_differing(tensors: Iterable[object]) -> None:
    """Note of those that are tensors of integers that ranks may have different ones, of which a save takes one: no error."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not (tensor.is_floating_point() or tensor.is_complex()):
            setattr(tensor, _MARK, True)


def has_to_agree(value: torch.Tensor) -> bool:
    """Whether a plain tensor is compared over ranks: integers count or choose something, where others may be statistics."""
    return not (value.is_floating_point() or value.is_complex() or getattr(value, _MARK, False))


class SomeNames(dict[str, Any]):
    """A dict of the state that is meant to lack tensors which the checkpoint has at its place: a load does not warn of them."""


class PerRank:
    """A value that each rank saves and loads for itself: `state = {"position": PerRank(5)}`. Other values are saved once.

    value: a plain value, which may have tensors in it; or an object with `state_dict()` and `load_state_dict()`, such as a
        data loader. On as many ranks as saved it, `load` puts each rank's own into this attribute, or into the object; tensors
        come back on the host.
    convert: gets the saved values of all ranks, in their order, on any other number of ranks, and returns the one of this
        rank. It runs on every rank. None: a load on another number of ranks is a CheckpointError.
    """

    is_optional = False  # whether a checkpoint may lack it

    def __init__(self, value: Any, convert: Callable[[list[Any]], Any] | None = None) -> None:
        self.value = value
        self.convert = convert

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def state(self) -> Any:
        """What is saved."""
        return self.value.state_dict() if has_state(self.value) else self.value

    def take(self, state: Any) -> None:
        """Go on with what was saved."""
        if has_state(self.value):
            self.value.load_state_dict(state)
        else:
            self.value = state


def key_of_rank(rank: int, ranks: int) -> str:
    """The last key in the path of a rank's own value."""
    return f"@rank{rank}of{ranks}"

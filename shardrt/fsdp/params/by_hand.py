"""Gathered parameters that code outside of their modules computes with: in `unsharded`, after `unshard()`, or after a forward.

Autograd saves the memory of what is gathered, which may be free when the operation's node runs; and no module's backward, at
the end of which gradients are reduced, need begin. So the class of such a parameter sees each operation on it:

- before the node of a result runs, `HandUse.before_backward` is called;
- a result that is a view of the gathered memory gets a class, `GatheredAlias`, that does the same.

Cost: some microseconds for each operation on such a parameter, and nothing inside of modules, whose parameters are plain.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...torch_internals import as_plain_tensors
from ..base.autograd import before_backward_of
from ..base.trees import tensors_in


@dataclass(frozen=True, slots=True, eq=False)
class HandUse:
    """What a group does for code that computes with its gathered parameters.

    holds: tells whether a tensor lies in the gathered memory.
    before_backward: gathers, if need be, and has the gradients reduced when the backward ends.
    """

    holds: Callable[[torch.Tensor], bool]
    before_backward: Callable[[], None]

    def note(self, results: Iterable[torch.Tensor]) -> None:
        """Prepare for the backward of these results of an operation on the group's gathered parameters."""
        with as_plain_tensors():
            before_backward_of(results, self.before_backward)
            for result in results:
                if type(result) is torch.Tensor and self.holds(result):
                    result.__class__ = GatheredAlias
                    result.hand_use = self  # type: ignore[attr-defined]


def run_by_hand(func: Callable[..., Any], types: Iterable[type], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """The `__torch_function__` of gathered parameters that the user can reach, and of what shares their memory."""
    given = [each for each in tensors_in([args, kwargs]) if hasattr(type(each), "hand_use")]
    if all(hasattr(kind, "hand_use") for kind in types):
        with as_plain_tensors():
            out = func(*args, **(kwargs or {}))
    else:  # other classes decide the result, and know plain tensors
        with _as_plain(given):
            out = func(*args, **(kwargs or {}))
    note_by_hand(given, out)
    return out


def note_by_hand(given: Iterable[torch.Tensor], out: Any) -> None:
    """Code outside of the modules has computed `out` from these gathered parameters and tensors that share their memory."""
    uses = dict.fromkeys(use for each in given if (use := each.hand_use) is not None)  # type: ignore[attr-defined]
    if uses and (results := [result for result in tensors_in(out) if not hasattr(type(result), "hand_use")]):
        for use in uses:
            use.note(results)


@contextmanager
def _as_plain(given: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside the block, these tensors have torch's own classes."""
    kinds = [(each, type(each), nn.Parameter if isinstance(each, nn.Parameter) else torch.Tensor) for each in given]
    for each, _, plain in kinds:
        each.__class__ = plain
    try:
        yield
    finally:
        for each, kind, plain in kinds:
            if type(each) is plain and "hand_use" in each.__dict__:  # else nobody can reach it any more
                each.__class__ = kind


class GatheredAlias(torch.Tensor):
    """A view of a gathered parameter, made by code outside of its module."""

    hand_use: HandUse | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return run_by_hand(func, types, args, kwargs)

    def _plain(self) -> torch.Tensor:
        with as_plain_tensors():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), copy.deepcopy(self._plain()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

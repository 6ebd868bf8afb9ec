"""Operations on meta tensors: each kind is run once, and then only its results are made again.

torch works out the result of an operation on meta tensors in Python, which takes 100 us; a training step has ten thousands of
operations, of a hundred kinds. A kind is the operator with the shapes, strides and dtypes that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ...torch_internals import OpOverload, TorchDispatchMode, tree_leaves
from ..machine.cost import Bound
from ..machine.work import ALIASES
from ..program.job import PlanError

_META = torch.device("meta")
_SIZED_BY_FLOATS = frozenset({torch.ops.aten.arange, torch.ops.aten.range})
_Maker = Callable[[Sequence[Any], Mapping[str, Any]], Any]  # the results of one more operation of a kind


class Cost(NamedTuple):
    """What an operation takes.   spent: the seconds, by what they are bound by."""

    seconds: float
    flops: int
    dtype: torch.dtype  # of the arithmetic
    spent: tuple[tuple[Bound, float], ...]


class OperationObserver(Protocol):
    """Sees the operations of a run, in order."""

    def cost_of(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> Cost:
        """What an operation of a new kind takes."""

    def ran(self, cost: Cost, made: object) -> None:
        """An operation has run, and has made these tensors, with memory of their own; None if it wrote to given ones."""


@dataclass(slots=True, eq=False)
class Kind:
    """A kind of operation, and how often it ran since `Operations.restart`."""

    make: _Maker | None  # None: run it
    cost: Cost
    is_new: bool  # its results have memory of their own
    times: int = 1


class Operations(TorchDispatchMode):
    """Runs the operations on meta tensors in a `with` block, and shows them to the observer. Others run as they are.

    Operations that read values raise what torch raises on meta tensors.
    """

    sees_hooks = True  # `torch_internals.outside_modes`

    def __init__(self, observer: OperationObserver) -> None:
        super().__init__()
        self._observer = observer
        self._kinds: dict[object, Kind] = {}

    def restart(self) -> None:
        """Count from zero."""
        for kind in self._kinds.values():
            kind.times = 0

    @property
    def kinds(self) -> Iterable[Kind]:
        """All kinds that have run."""
        return self._kinds.values()

    @property
    def flops(self) -> int:
        """The flops of all operations since `restart`."""
        return sum(kind.times * kind.cost.flops for kind in self.kinds)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the flops since `restart`; float32 if there are none."""
        flops = {torch.float32: 0}
        for kind in self.kinds:
            flops[kind.cost.dtype] = flops.get(kind.cost.dtype, 0) + kind.times * kind.cost.flops
        return max(flops, key=flops.__getitem__)

    def _run(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if kind is not torch.Tensor:  # a subclass: it is seen again with what it consists of
                return NotImplemented
        if kwargs:
            key = (func, *map(_kind_of, args), *kwargs, *map(_kind_of, kwargs.values()))
        else:
            kwargs = {}
            key = (func, *map(_kind_of, args))
        known = self._kinds.get(key)
        if known is None:
            return self._first(key, func, args, kwargs)
        out = func(*args, **kwargs) if known.make is None else known.make(args, kwargs)
        known.times += 1
        self._observer.ran(known.cost, out if known.is_new else None)
        return out

    def _first(self, key: object, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.device != _META and tensor.numel() > 1:
                raise PlanError(f"{func} of a tensor on {tensor.device}, which holds data: expected the meta device")
        cost = self._observer.cost_of(func, args, kwargs, out)
        views = func.is_view or func.overloadpacket in ALIASES or torch.Tag.inplace_view in func.tags
        is_new = not views and not any(out is value for value in (*args, *kwargs.values()))
        runs_again = views or func.overloadpacket in _SIZED_BY_FLOATS
        self._kinds[key] = Kind(None if runs_again else _maker(out, args, kwargs), cost, is_new)
        self._observer.ran(cost, out if is_new else None)
        return out


# Cost: a `__torch_dispatch__` that the class is made with is wrapped, so that torch.compile leaves it alone: 3 us each time.
Operations.__torch_dispatch__ = Operations._run  # type: ignore[assignment,method-assign]


def _kind_of(value: Any) -> object:
    """A hashable that values have in common if results have the same shapes.

    Of storages only the type counts, and of floats, but in lists, which may be scales of sizes.
    """
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    kind = type(value)
    if kind is int or value is None:
        return value
    if kind is list or kind is tuple:
        return tuple(each if type(each) is float else _kind_of(each) for each in value)
    if kind is float or kind is torch.UntypedStorage:
        return kind
    return kind, value


def _maker(out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Maker | None:
    """What makes such results; None if the operation has to run each time."""
    if isinstance(out, (tuple, list)):
        makers = [_maker(each, args, kwargs) for each in out]
        kind = type(out)
        if None in makers or kind not in (tuple, list):
            return None
        return lambda args, kwargs: kind(make(args, kwargs) for make in makers if make is not None)
    if out is None:
        return lambda args, kwargs: None
    if not isinstance(out, torch.Tensor) or out.device != _META:
        return None
    for position, value in enumerate(args):
        if value is out:
            return lambda args, kwargs: args[position]
    for name, value in kwargs.items():
        if value is out:
            return lambda args, kwargs: kwargs[name]
    shape, stride, dtype = out.shape, out.stride(), out.dtype
    return lambda args, kwargs: torch.empty_strided(shape, stride, dtype=dtype, device=_META)

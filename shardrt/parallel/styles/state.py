"""The one object that is kept with a parallelized module, as its attribute `tp_state`: what styles have made of it.

Deep copies of a module have an object of their own; styles and layouts, which name a mesh, are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ...tensor.dtensor.replicated import ModuleMarks
from ...tensor.placement.placement import Placement, Shard
from ..boundaries.axis import Axis, Part
from ..boundaries.expert_exchange import ExpertExchange
from ..boundaries.relayout import REPLICATE, as_dtensor, local_of, relayout, shared_gather
from . import checks


@dataclass(slots=True, eq=False)
class AppliedStyle:
    """A style that was applied to a module.

    source: the placement of a plain input.   target: that of the output.   name: the module's, in the plan's root.
    """

    axis: Axis
    name: str
    source: Placement
    target: Placement
    local_output: bool
    async_tp: bool = False
    subject: str = field(init=False)  # what its collectives are for: numbers tell layers of one name in several plans apart

    def __post_init__(self) -> None:
        self.axis.styles += 1
        self.subject = f"'{self.name}' (style {self.axis.styles})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedStyle:
        return self

    def read(self, value: torch.Tensor) -> Part:
        """This rank's part of an input."""
        if self.axis.first and self.source is REPLICATE:
            checks.same_data(self.axis, value, self.name)
        return local_of(self.axis, value, self.source, self.name)

    def begin(self, module: nn.Module) -> None:
        """Draw random numbers from here on as the output lies."""
        if not self.axis.depth:
            self.axis.outside(self, training=module.training)
        self.enter_region(module)

    def enter_region(self, module: nn.Module) -> None:
        if self.axis.regions.enabled and module.training:
            self.axis.enter_region(self.target)

    def finish(self, out: Part, module: nn.Module) -> torch.Tensor:
        """The output as the caller sees it."""
        out = relayout(self.axis, out, self.target)
        self.begin(module)
        return self.seen(out)

    def seen(self, out: Part) -> torch.Tensor:
        return out.local if self.local_output else as_dtensor(self.axis, out)


@dataclass(slots=True, eq=False)
class Preparation:
    """The placements of arguments or results: given, and desired. None: as it is."""

    axis: Axis
    name: str
    given: tuple[Placement | None, ...] | None
    desired: tuple[Placement | None, ...] | None
    given_kwargs: dict[str, Placement | None]
    desired_kwargs: dict[str, Placement | None]
    local_output: bool
    of_results: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        return self

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.given is not None:
            args = self.changed(args, "inputs")
        for key, layout in self.given_kwargs.items():
            if layout is not None and key in kwargs:
                kwargs[key] = self.change(kwargs[key], layout, self.desired_kwargs.get(key))
        return args, kwargs

    def changed(self, values: tuple[Any, ...], what: str) -> tuple[Any, ...]:
        """Each value by its own layouts. Raises ValueError for another number of values."""
        assert self.given is not None
        assert self.desired is not None
        if len(values) != len(self.given):
            raise ValueError(
                f"the {what} of '{self.name}': expected {len(self.given)}, one for each layout (None: as it is); "
                f"found {len(values)}"
            )
        layouts = zip(values, self.given, self.desired, strict=True)
        return tuple(value if given is None else self.change(value, given, desired) for value, given, desired in layouts)

    def change(self, value: Any, given: Placement, desired: Placement | None) -> torch.Tensor:
        axis = self.axis
        if axis.first and given == REPLICATE and not self.of_results:
            checks.same_data(axis, value, self.name)
        part = local_of(axis, value, given, self.name)
        target = part.placement if desired is None else desired
        if type(part.placement) is Shard and target == REPLICATE and not self.of_results:
            made = Part(shared_gather(axis, part), REPLICATE)
        else:
            made = relayout(axis, part, target)
        return made.local if self.local_output else as_dtensor(axis, made)


class Slot(NamedTuple):
    """Where a parameter is registered."""

    owner: nn.Module
    name: str

    @property
    def registry(self) -> dict[str, nn.Parameter | None]:
        return self.owner._parameters

    @property
    def param(self) -> nn.Parameter | None:
        return self.owner._parameters.get(self.name)


@dataclass(slots=True, eq=False, repr=False)
class ParallelState(ModuleMarks):
    """What tensor parallelism keeps with a module.

    style: that has changed its parameters; unset without one.   axis: of the module that `parallelize_module` was given.
    first: until that module has run once as the outermost one.   known: whether it draws random numbers is known.
    undecided: plain parameters of whose gradients it is not known whether each rank has all or a term, see `replicated.py`.
    terms: those of whose gradients each rank has a term.   looks: forwards that were looked at.
    experts: of a module whose experts are divided.   load: its rows for each expert, (E,), since they were asked for.
    """

    style: AppliedStyle = field(init=False)
    inputs: tuple[Preparation, ...] = ()
    outputs: tuple[Preparation, ...] = ()
    axis: Axis | None = None
    outermost: bool = False
    first: bool = False
    known: bool = False
    undecided: list[Slot] = field(default_factory=list)
    terms: list[Slot] = field(default_factory=list)
    looks: int = 0
    first_gradients: checks.FirstGradients | None = None
    experts: ExpertExchange | None = None
    load: torch.Tensor | None = None

    @property
    def is_styled(self) -> bool:
        """Whether a style has changed the module's parameters."""
        return hasattr(self, "style") or self.experts is not None


def state_of(module: nn.Module) -> ParallelState:
    """The module's state, which is made at the first call."""
    if "tp_state" not in module.__dict__:
        module.__dict__["tp_state"] = ParallelState()
    return cast(ParallelState, module.__dict__["tp_state"])

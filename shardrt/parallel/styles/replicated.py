"""Gradients of parameters that no style names: whole on every rank, or a term on each.

A parameter that is used where activations are replicated gets all of its gradient on every rank. Where they are split, between
Colwise and Rowwise, such as in a norm of queries that runs head by head, it gets a term: that of this rank's heads. The graph
of the outermost module's first forward tells which, from its end to the parameters:

| node                             | gradient that it passes on                                       |
|----------------------------------|------------------------------------------------------------------|
| of a boundary, of a split layer  | terms if its input is split, whole if its input is replicated    |
| of torch                         | as what arrives                                                  |
| of another `autograd.Function`   | unknown: it may communicate                                      |

Where terms alone arrive, they are summed: in this graph on their way to the parameter, and in later forwards by one all-reduce
for all such parameters, which the modules then read through `_Summed`. Under `fully_shard` the group sums them (`TermSum`).
The first gradients of all others are compared over the ranks (`FirstGradients`), and those of replicated activations at which
terms arrive: these belong to no sum.

Cost: the first forward that makes a graph takes 2 us for each node of it; so do a few later ones while there are parameters
that none has used. After that a forward takes 7 us if there are terms, and 2 us for each such parameter; without, nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import ref

import torch
from torch import nn

from ...fsdp.base.trees import tensors_in
from ...fsdp.schedule.param_group import ParamGroup
from ...tensor.dtensor.dtensor import DTensor, gradient_spec_of
from ...tensor.dtensor.group_registry import group_of
from ...tensor.dtensor.replaced import sharded_of
from ...tensor.dtensor.replicated import marks_of
from ...tensor.placement.placement import Replicate
from ...torch_internals import Node, in_backward, is_torch_node, leaf_of
from ..boundaries.axis import Axis, Part
from ..boundaries.partial_grads import summed
from ..boundaries.relayout import PARTIAL, REPLICATE, TERMS, WHOLE, relayout
from .checks import FirstGradients
from .parameters import mark_terms
from .state import ParallelState, Slot, state_of

LOOKS = 20  # forwards in which parameters are looked for that have not been used yet


@dataclass(slots=True)
class _ParameterUse:
    """How a graph uses a parameter.

    arriving: `TERMS`, `WHOLE` or both.   edges: nodes, and which of their gradients arrives.
    """

    arriving: int = 0
    edges: dict[tuple[Node, int], None] = field(default_factory=dict)


@contextmanager
def summed_uses(axis: Axis, slots: Sequence[Slot]) -> Iterator[None]:
    """Let modules read plain parameters so that each rank's gradient is a term of a sum."""
    found = [(slot.registry, slot.name, param) for slot in slots if (param := _plain(slot)) is not None and param.requires_grad]
    params = {id(param): param for *_, param in found}
    read = dict(zip(params, _Summed.apply(axis, *params.values()), strict=True)) if params else {}
    for registry, name, param in found:
        registry[name] = read[id(param)]
    try:
        yield
    finally:
        for registry, name, param in found:
            registry[name] = param


class Look:
    """A forward of the outermost module that makes a graph, and the parameters of which the graph is to tell."""

    def __init__(self, state: ParallelState, slots: list[Slot], inputs: Any) -> None:
        self._state, self._slots = state, slots
        self._ends = {tensor.grad_fn for tensor in tensors_in(inputs)}

    @classmethod
    def begin(cls, state: ParallelState, inputs: Any) -> Look | None:
        """None if nothing is to be found out. inputs: of the forward. Cost: 0.1 us for each parameter that is frozen."""
        slots = _trainable(state.undecided)
        return cls(state, slots, inputs) if slots else None

    def end(self, module: nn.Module, outputs: Any) -> None:
        """Find out which parameters get terms, and see to their sums. module: the outermost one."""
        state, axis = self._state, _axis(self._state)
        uses, activations = _uses(axis, self._ends, outputs)
        state.looks += 1
        decided: set[Slot] = set()
        groups: dict[ParamGroup, list[torch.Tensor]] = {}
        first, named = _first_gradients(state), _named(module, self._slots)
        first.watch(_leaves(named))
        first.watch_outputs(activations)
        for name, slot in named.items():
            param, group = _owned(slot)
            use = uses.get(id(param))
            if use is not None or state.looks >= LOOKS:
                decided.add(slot)
            if use is None or use.arriving != TERMS or (group is not None and in_backward()):
                continue
            mark_terms(slot.owner, slot.name, axis.mesh)
            if group is None:
                state.terms.append(slot)
                _sum_edges(axis, use)
            else:
                groups.setdefault(group, []).append(param)
                first.forget(name)
        for group, params in groups.items():
            group.sum_terms_of(params)
        state.undecided = [slot for slot in state.undecided if slot not in decided]


def compare_outside(module: ref[nn.Module]) -> None:
    """A part of a parallelized module was called by itself, where nothing is summed: compare the first gradients of all."""
    if (found := module()) is not None:
        state = state_of(found)
        _first_gradients(state).watch(_leaves(_named(found, _trainable([*state.undecided, *state.terms]))))


def _axis(state: ParallelState) -> Axis:
    assert state.axis is not None, "the module was given to parallelize_module"
    return state.axis


def _first_gradients(state: ParallelState) -> FirstGradients:
    if state.first_gradients is None:
        state.first_gradients = FirstGradients(_axis(state))
    return state.first_gradients


def _trainable(slots: Sequence[Slot]) -> list[Slot]:
    """Those whose parameters are trainable, are not split by a later plan, and have been in a forward if they are sharded."""
    return [slot for slot in slots if (param := slot.param) is not None and param.requires_grad and _takes_part(slot)]


def _takes_part(slot: Slot) -> bool:
    _, group = _owned(slot)
    return slot.name not in marks_of(slot.owner).split and (group is None or group.runtime is not None)


def _owned(slot: Slot) -> tuple[torch.Tensor, ParamGroup | None]:
    """The parameter as it is registered while nothing is gathered, and the group that shards it."""
    assert slot.param is not None
    param = _registered(slot.param)
    return param, cast(ParamGroup | None, group_of(param))


def _named(module: nn.Module, slots: Sequence[Slot]) -> dict[str, Slot]:
    """By full names, without those that are not in the module any more."""
    names = {id(owner): prefix for prefix, owner in module.named_modules()}
    inside = [slot for slot in slots if id(slot.owner) in names]
    return {f"{names[id(slot.owner)]}.{slot.name}".removeprefix("."): slot for slot in inside}


def _leaves(named: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """What graphs have of these parameters."""
    owned = {name: _owned(slot) for name, slot in named.items()}
    return {name: param if group is None else group.unsharded_of(param) for name, (param, group) in owned.items()}


def _registered(param: torch.Tensor) -> torch.Tensor:
    """The parameter as modules have it while nothing is gathered."""
    sharded = sharded_of(param)
    return param if sharded is None else sharded


def _plain(slot: Slot) -> nn.Parameter | None:
    """The parameter, if it is not sharded."""
    param = slot.param
    return None if param is None or isinstance(param, DTensor) or sharded_of(param) is not None else param


# ---------------------------------------------------------------------- the graph


def _uses(axis: Axis, ends: set[Node | None], outputs: Any) -> tuple[dict[int, _ParameterUse], dict[Node, str]]:
    """How the graph of outputs uses its leaves, by ids of parameters as they are registered while nothing is gathered.

    ends: nodes that are not of this graph any more.   Returns as well: nodes at whose replicated outputs terms arrive, and
    what these are of.
    """
    uses: dict[int, _ParameterUse] = {}
    activations: dict[Node, str] = {}
    arrived: dict[Node, int] = {}
    # The gradient of a plain output may be whole or a part, as the caller goes on to use it: unknown.
    left = [(tensor.grad_fn, WHOLE) for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    while left:
        node, arriving = left.pop()
        before = arrived.get(node, 0)
        if before | arriving == before or node in ends:
            continue
        arrived[node] = before | arriving
        passed = _passed(axis, node, before | arriving)
        for index, (following, output) in enumerate(node.next_functions):
            if (variable := leaf_of(following)) is not None:
                use = uses.setdefault(id(_registered(variable)), _ParameterUse())
                use.arriving |= passed | (WHOLE if isinstance(variable, DTensor) else 0)
                use.edges[node, index] = None
            elif following is not None:
                left.append((following, passed))
                if passed & TERMS and output == 0 and (whole := getattr(following, "whole", None)) is not None:
                    activations[following] = whole
    return uses, activations


def _passed(axis: Axis, node: Node, arriving: int) -> int:
    """What a node passes on."""
    if is_torch_node(node):
        return arriving
    if (passes := getattr(node, "passes", None)) is not None:
        return passes or arriving
    spec = gradient_spec_of(node)
    if spec is not None and spec.mesh is axis.mesh:
        return WHOLE if isinstance(spec.placements[0], Replicate) else TERMS
    return WHOLE


# ---------------------------------------------------------------------- sums


def _sum_edges(axis: Axis, use: _ParameterUse) -> None:
    for node, index in use.edges:
        node.register_hook(functools.partial(_summed_edge, axis, index))
    use.edges.clear()  # a parameter that is registered twice comes again


def _summed_edge(axis: Axis, index: int, grads: Sequence[Any], _: Any) -> tuple[Any, ...] | None:
    if grads[index] is None:
        return None
    return (*grads[:index], relayout(axis, Part(grads[index], PARTIAL), REPLICATE).local, *grads[index + 1 :])


class _Summed(torch.autograd.Function):
    """Parameters -> tensors of the same memory, of whose gradients each rank has a term."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *params: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.axis, ctx.passes = axis, WHOLE
        return tuple(param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return None, *[None if grad is None else relayout(ctx.axis, Part(grad, PARTIAL), REPLICATE).local for grad in grads]
        together: dict[torch.dtype, list[int]] = {}
        for index, grad in enumerate(grads):
            if grad is not None:
                together.setdefault(grad.dtype, []).append(index)
        made: list[torch.Tensor | None] = [None] * len(grads)
        for indices in together.values():
            sums = summed(ctx.axis, [cast(torch.Tensor, grads[index]) for index in indices])
            for index, each in zip(indices, sums, strict=True):
                made[index] = each
        return None, *made

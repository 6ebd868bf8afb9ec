"""What parallelized modules do in their forward: the classes that styles give them.

A styled `nn.Linear` or `nn.Embedding` gets a class whose `forward` stands in the place of torch's, below a subclass's own,
which calls `super().forward` and sees what it would see on one process. Any other module gets a class in front of its own,
which changes arguments and results. `isinstance` stays true.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from ...comm.core.calls import about
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.placement import Shard
from ...torch_internals import in_backward
from ..boundaries.axis import Part, parts
from ..boundaries.linear import column, gathered_column, row
from ..boundaries.partial_grads import run_exposed, visible
from ..boundaries.relayout import PARTIAL, REPLICATE, nonnegative, relayout, twin_of
from ..boundaries.vocabulary import masked_embedding
from . import checks, replicated
from .parameters import check_ties
from .state import AppliedStyle, ParallelState, Preparation

LAST = Shard(-1)


# ---------------------------------------------------------------------- split weights


def _about_itself(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Let ranks compare which layer their calls are for. In forward: a backward makes the calls of the same layers.

    Cost: 0.8 us.
    """

    @functools.wraps(forward)
    def run(self: Any, input: torch.Tensor) -> torch.Tensor:
        with about(self.tp_state.style.subject):
            return forward(self, input)

    return run


class ColwiseLinear(nn.Linear):
    """A linear layer of which each rank has some rows of the weight (out_features, in_features)."""

    tp_state: ParallelState

    @_about_itself
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp, params = self.tp_state.style, self._parameters
        axis = tp.axis
        x = tp.read(input)
        weight, bias = visible(params["weight"]), visible(params["bias"])
        check_weight(tp, weight, 0, self.out_features)
        if type(x.placement) is Shard and axis.size > 1 and x.placement.dim < x.local.dim() - 1:
            check_features(tp, x.local.shape[-1], self.in_features)
            out = gathered_column(axis, x, weight, bias, tp.async_tp)
        else:
            full = relayout(axis, x, REPLICATE).local
            check_features(tp, full.shape[-1], self.in_features)
            out = column(full, weight, bias, twin_of(axis, full))
        return tp.finish(Part(out, LAST, torch.Size((*out.shape[:-1], self.out_features))), self)


class RowwiseLinear(nn.Linear):
    """A linear layer of which each rank has some columns of the weight (out_features, in_features)."""

    tp_state: ParallelState

    @_about_itself
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp, params = self.tp_state.style, self._parameters
        axis, target = tp.axis, tp.target
        given = tp.read(input)
        weight, bias = visible(params["weight"]), visible(params["bias"], terms=isinstance(target, Shard))
        check_weight(tp, weight, 1, self.in_features)
        x = relayout(axis, given, LAST).local
        check_features(tp, x.shape[-1], weight.shape[1])
        target = nonnegative(target, x.dim())
        if target == Shard(x.dim() - 1) and bias is not None and axis.size > 1:
            out = row(axis, x, weight, None, target, False) + axis.changed(Part(bias, REPLICATE), Shard(0))
        else:
            out = row(axis, x, weight, bias, target, tp.async_tp)
        return tp.finish(Part(out, tp.target, torch.Size((*x.shape[:-1], self.out_features))), self)


class ColwiseEmbedding(nn.Embedding):
    """An embedding of which each rank has some columns of the table (num_embeddings, embedding_dim)."""

    tp_state: ParallelState

    @_about_itself
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp = self.tp_state.style
        tokens = relayout(tp.axis, tp.read(input), REPLICATE).local
        weight = visible(self.weight)
        check_weight(tp, weight, 1, self.embedding_dim)
        out = F.embedding(tokens, weight, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return tp.finish(Part(out, LAST, torch.Size((*tokens.shape, self.embedding_dim))), self)


class RowwiseEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows of the table (num_embeddings, embedding_dim)."""

    tp_state: ParallelState

    @_about_itself
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp, axis = self.tp_state.style, self.tp_state.style.axis
        tokens = relayout(axis, tp.read(input), REPLICATE).local
        weight = visible(self.weight)
        check_weight(tp, weight, 0, self.num_embeddings)
        first_row = sum(parts(self.num_embeddings, axis.size)[: axis.rank])
        term = masked_embedding(tokens, weight, first_row, self.num_embeddings, padding_idx=self.padding_idx)
        return tp.finish(Part(term, PARTIAL), self)


def check_weight(tp: AppliedStyle, weight: torch.Tensor, dim: int, total: int) -> None:
    """Raise ValueError unless a weight is this rank's part of `dim`, of `total` rows."""
    if weight.shape[dim] != parts(total, tp.axis.size)[tp.axis.rank]:
        raise ValueError(
            f"the weight of '{tp.name}' on {tp.axis.mesh}: found shape {tuple(weight.shape)}, which is not this rank's part; a "
            "parameter in its place must be a DTensor, such as shardrt.distribute_tensor(tensor, mesh, placements)"
        )


def check_features(tp: AppliedStyle, found: int, expected: int) -> None:
    """Raise ValueError for an input with another last dim than the layer has on this rank."""
    if found != expected:
        raise ValueError(
            f"the input of '{tp.name}' on {tp.axis.mesh}: expected a last dim of {expected} on this rank, found {found}; give "
            f"input_layouts if a plain input is not {tp.source}, and let views of split heads use -1 for their number"
        )


# ---------------------------------------------------------------------- any module


class InFront:
    """The base of classes that stand before a module's own."""

    training: bool


class SequenceParallelModule(InFront):
    """A module that runs on this rank's part of the sequence, with whole parameters whose gradients are partial."""

    tp_state: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tp, given = self.tp_state.style, None
        name, input = input_of(args, kwargs)
        if type(input) is DTensor:
            given = relayout(tp.axis, tp.read(input), tp.target)
            args, kwargs = with_input(args, kwargs, name, given.local)
        tp.begin(self)  # type: ignore[arg-type]  # no boundary may have come before, of an input that the caller has cut
        out = run_exposed(self, super().forward, args, kwargs, terms=True)  # type: ignore[misc]
        tp.enter_region(self)  # type: ignore[arg-type]
        shape = None
        if given is not None and given.shape is not None:  # of the input: sequences are as long
            dim = cast(Shard, nonnegative(tp.target, out.dim())).dim
            shape = torch.Size((*out.shape[:dim], given.shape[dim], *out.shape[dim + 1 :]))
        return tp.seen(Part(out, tp.target, shape))


class OwnForwardModule(InFront):
    """A linear layer or an embedding whose subclass computes by itself with its weights: it sees its local ones."""

    tp_state: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tp = self.tp_state.style
        axis = tp.axis
        name, input = input_of(args, kwargs)
        x = relayout(axis, tp.read(input), REPLICATE).local
        twin = twin_of(axis, x)
        args, kwargs = with_input(args, kwargs, name, x if twin is None else twin)
        out = Part(run_exposed(self, super().forward, args, kwargs), LAST)  # type: ignore[misc]
        return tp.finish(out._replace(shape=axis.shape(out)), self)  # type: ignore[arg-type]


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """The first positional argument, without a name; if there is none, the first keyword argument that is a tensor."""
    if args:
        return None, args[0]
    return next(((name, value) for name, value in kwargs.items() if isinstance(value, torch.Tensor)), (None, None))


def with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None, value: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another input."""
    return ((value, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: value})


class PreparedModule(InFront):
    """A module whose arguments or results change their placement."""

    tp_state: ParallelState | None = None  # a container's slice has none

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.tp_state or _NO_STATE
        for preparation in state.inputs:
            args, kwargs = preparation.arguments(args, kwargs)
        if state.inputs and self.training:
            enter_region_of(state.inputs[-1])
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        for preparation in state.outputs:
            changed = preparation.changed(out if isinstance(out, tuple) else (out,), "outputs")
            out = changed if len(changed) > 1 else changed[0]
        if state.outputs and self.training:
            enter_region_of(state.outputs[-1])
        return out


_NO_STATE = ParallelState()


def enter_region_of(preparation: Preparation) -> None:
    """Draw random numbers as the first tensor lies that was prepared."""
    axis = preparation.axis
    if not axis.depth:
        axis.outside(preparation, training=True)
    if axis.regions.enabled:
        layouts = (*(preparation.desired or ()), *preparation.desired_kwargs.values())
        first = next((layout for layout in layouts if layout is not None), None)
        if first is not None:
            axis.enter_region(first)


class ParallelizedModule:
    """The module that `parallelize_module` was given. The outermost one that runs begins a forward."""

    tp_state: ParallelState | None = None  # a container's slice has none

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill a copy that `deepcopy` makes."""
        super().__setstate__(state)  # type: ignore[misc]
        if self.tp_state is not None and self.tp_state.axis is not None:
            self.tp_state.axis.regions.watch(self)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.tp_state
        if state is None or state.axis is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        axis = state.axis
        if axis.depth:
            state.outermost = False
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        first = axis.first = state.first
        recomputing = in_backward()
        if not recomputing:
            state.outermost = True
            if first:
                check_ties(self)  # type: ignore[arg-type]
                checks.same_tokens(axis, self, args, kwargs)  # type: ignore[arg-type]
        if state.outermost:
            known = axis.regions.begin(training=self.training, first=first, known=state.known)  # type: ignore[attr-defined]
        makes_graph = torch.is_grad_enabled() and axis.size > 1
        look = replicated.Look.begin(state, (args, kwargs)) if makes_graph and state.undecided else None
        axis.depth = 1
        try:
            with replicated.summed_uses(axis, state.terms) if makes_graph and state.terms else nullcontext():
                out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            axis.depth = 0
        if look is not None:
            look.end(self, out)  # type: ignore[arg-type]
        if first:
            state.first = axis.first = False
        if state.outermost:
            axis.regions.end(training=self.training)  # type: ignore[attr-defined]
            state.known |= known
        return out


# ---------------------------------------------------------------------- classes


def give_class(module: nn.Module, added: type, *, below: bool = False) -> None:
    """Change the class of `module` to one that has `added` too: before its own, or `below` a subclass's own forward."""
    if not isinstance(module, added):
        module.__class__ = _class_of(cast(type, type(module)), added, below)


@functools.cache
def _class_of(kind: type, added: type, below: bool) -> type:
    prefix = added.__name__.removesuffix("Module").removesuffix("Linear").removesuffix("Embedding")
    if below and kind in added.__mro__:
        return added
    return type(f"{prefix}{kind.__name__}", (kind, added) if below else (added, kind), {"__module__": kind.__module__})


def calls_super(kind: type) -> bool:
    """Whether the class's forward is torch's own, or calls `super().forward`. It may be wrapped."""
    forward = next(base.__dict__["forward"] for base in kind.__mro__ if "forward" in base.__dict__)
    if forward in (nn.Linear.forward, nn.Embedding.forward):
        return True
    code = getattr(inspect.unwrap(getattr(forward, "func", forward)), "__code__", None)
    return code is not None and {"super", "forward"} <= {*code.co_names}

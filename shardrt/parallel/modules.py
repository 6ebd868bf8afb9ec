"""What parallelized modules do in their forward: the classes that styles give them.

A styled `nn.Linear` or `nn.Embedding` gets a class whose `forward` stands in the place of torch's, below a subclass's own,
which calls `super().forward` and sees what it would see on one process. Any other module gets a class in front of its own,
which changes arguments and results. `isinstance` stays true.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from ..tensor.dtensor import DTensor
from ..tensor.placement import Placement, Shard
from ..torch_internals import in_backward
from . import checks
from .axis import Axis, parts
from .linear import column, gathered_column, row
from .parameters import check_ties
from .partial_grads import run_exposed, visible
from .relayout import PARTIAL, REPLICATE, as_dtensor, local_of, relayout, shared_gather, twin_of
from .vocabulary import masked_embedding

LAST = Shard(-1)


@dataclass(slots=True, eq=False)
class Bound:
    """A style that was applied to a module.

    source: the placement of a plain input.   target: that of the output.   name: the module's, in the plan's root.
    """

    axis: Axis
    name: str
    source: Placement
    target: Placement
    local_output: bool
    async_tp: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return self

    def read(self, value: torch.Tensor) -> tuple[torch.Tensor, Placement, int | None]:
        """The local tensor of an input, its placement, and the size of its split dim, if known."""
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

    def finish(self, out: torch.Tensor, module: nn.Module, total: int | None = None) -> torch.Tensor:
        """The output as the caller sees it. total: the size of the dim that `target` splits, if known."""
        self.begin(module)
        return self.seen(out, total)

    def seen(self, out: torch.Tensor, total: int | None) -> torch.Tensor:
        return out if self.local_output else as_dtensor(self.axis, out, self.target, total)


# ---------------------------------------------------------------------- split weights


class ColwiseLinear(nn.Linear):
    """A linear layer of which each rank has some rows of the weight (out_features, in_features)."""

    tp: Bound

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp, params = self.tp, self._parameters
        axis = tp.axis
        x, source, total = tp.read(input)
        weight, bias = visible(params["weight"]), visible(params["bias"])
        if weight.shape[0] != parts(self.out_features, axis.size)[axis.rank]:
            raise_weight(tp, weight)
        if type(source) is Shard and axis.size > 1 and source.dim < x.dim() - 1:
            self._check_features(x.shape[-1], self.in_features)
            size = axis.total(x.shape[source.dim]) if total is None else total
            out = gathered_column(axis, x, weight, bias, source.dim, size, tp.async_tp)
        else:
            x = relayout(axis, x, source, REPLICATE, total)
            self._check_features(x.shape[-1], self.in_features)
            out = column(x, weight, bias, twin_of(axis, x))
        if tp.target is not LAST:
            out = relayout(axis, out, LAST, tp.target, self.out_features)
        return tp.finish(out, self, self.out_features if tp.target is LAST else None)

    def _check_features(self, found: int, expected: int) -> None:
        if found != expected:
            raise_features(self.tp, found, expected)


class RowwiseLinear(nn.Linear):
    """A linear layer of which each rank has some columns of the weight (out_features, in_features)."""

    tp: Bound

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp, params = self.tp, self._parameters
        axis, target = tp.axis, tp.target
        x, source, total = tp.read(input)
        weight, bias = visible(params["weight"]), visible(params["bias"], terms=isinstance(target, Shard))
        if weight.shape[1] != parts(self.in_features, axis.size)[axis.rank]:
            raise_weight(tp, weight)
        x = relayout(axis, x, source, LAST, total)
        if x.shape[-1] != weight.shape[1]:
            raise_features(tp, x.shape[-1], weight.shape[1])
        dim = target.dim % x.dim() if isinstance(target, Shard) else None
        if dim == x.dim() - 1 and bias is not None and axis.size > 1:
            out = row(axis, x, weight, None, dim, False) + axis.cut(bias, 0)
        else:
            out = row(axis, x, weight, bias, dim, tp.async_tp)
        split = None if dim is None else self.out_features if dim == x.dim() - 1 else x.shape[dim]
        return tp.finish(out, self, split)


class ColwiseEmbedding(nn.Embedding):
    """An embedding of which each rank has some columns of the table (num_embeddings, embedding_dim)."""

    tp: Bound

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp = self.tp
        tokens, source, total = tp.read(input)
        tokens = relayout(tp.axis, tokens, source, REPLICATE, total)
        weight = visible(self.weight)
        if weight.shape[1] != parts(self.embedding_dim, tp.axis.size)[tp.axis.rank]:
            raise_weight(tp, weight)
        out = F.embedding(tokens, weight, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse)
        out = relayout(tp.axis, out, LAST, tp.target, self.embedding_dim)
        return tp.finish(out, self, self.embedding_dim if tp.target is LAST else None)


class RowwiseEmbedding(nn.Embedding):
    """An embedding of which each rank has some rows of the table (num_embeddings, embedding_dim)."""

    tp: Bound

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        tp, axis = self.tp, self.tp.axis
        tokens, source, total = tp.read(input)
        tokens = relayout(axis, tokens, source, REPLICATE, total)
        weight, rows = visible(self.weight), parts(self.num_embeddings, axis.size)
        if weight.shape[0] != rows[axis.rank]:
            raise_weight(tp, weight)
        term = masked_embedding(
            tokens,
            weight,
            sum(rows[: axis.rank]),
            self.num_embeddings,
            padding_idx=self.padding_idx,
        )
        split = term.shape[tp.target.dim] if isinstance(tp.target, Shard) else None
        return tp.finish(relayout(axis, term, PARTIAL, tp.target), self, split)


def raise_weight(tp: Bound, weight: torch.Tensor) -> None:
    raise ValueError(
        f"the weight of '{tp.name}' on {tp.axis.mesh}: found shape {tuple(weight.shape)}, which is not this rank's part; a "
        "parameter in its place must be a DTensor, such as shardrt.distribute_tensor(tensor, mesh, placements)"
    )


def raise_features(tp: Bound, found: int, expected: int) -> None:
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

    tp: Bound

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tp, total = self.tp, None
        name, input = input_of(args, kwargs)
        if type(input) is DTensor:
            local, source, total = tp.read(input)
            args, kwargs = with_input(args, kwargs, name, relayout(tp.axis, local, source, tp.target, total))
            total = total if source == tp.target else None
        tp.begin(self)  # type: ignore[arg-type]  # no boundary may have come before, of an input that the caller has cut
        out = run_exposed(self, super().forward, args, kwargs, terms=True)  # type: ignore[misc]
        tp.enter_region(self)  # type: ignore[arg-type]
        return tp.seen(out, total)


class OwnForwardModule(InFront):
    """A linear layer or an embedding whose subclass computes by itself with its weights: it sees its local ones."""

    tp: Bound

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tp = self.tp
        axis = tp.axis
        name, input = input_of(args, kwargs)
        x, source, total = tp.read(input)
        x = relayout(axis, x, source, REPLICATE, total)
        twin = twin_of(axis, x)
        args, kwargs = with_input(args, kwargs, name, x if twin is None else twin.tensor)
        out = run_exposed(self, super().forward, args, kwargs)  # type: ignore[misc]
        return tp.finish(relayout(axis, out, LAST, tp.target, tp.axis.total(out.shape[-1])), self)  # type: ignore[arg-type]


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


# ---------------------------------------------------------------------- arguments and results


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
        local, source, total = local_of(axis, value, given, self.name)
        target = source if desired is None else desired
        if type(source) is Shard and target == REPLICATE and not self.of_results:
            made = shared_gather(axis, local, source.dim, total)
        else:
            made = relayout(axis, local, source, target, total)
        if self.local_output:
            return made
        if isinstance(target, Shard) and not (type(source) is Shard and source.dim == target.dim % local.dim()):
            total = local.shape[target.dim]
        return as_dtensor(axis, made, target, total)


class PreparedModule(InFront):
    """A module whose arguments or results change their placement."""

    tp_inputs: tuple[Preparation, ...] = ()
    tp_outputs: tuple[Preparation, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for preparation in self.tp_inputs:
            args, kwargs = preparation.arguments(args, kwargs)
        if self.tp_inputs and self.training:
            enter_region_of(self.tp_inputs[-1])
        out = super().forward(*args, **kwargs)  # type: ignore[misc]
        for preparation in self.tp_outputs:
            changed = preparation.changed(out if isinstance(out, tuple) else (out,), "outputs")
            out = changed if len(changed) > 1 else changed[0]
        if self.tp_outputs and self.training:
            enter_region_of(self.tp_outputs[-1])
        return out


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

    tp_root: Axis | None = None  # a container's slice has none
    tp_outermost: bool = False
    tp_first: bool = False  # until it has run once as the outermost one
    tp_known: bool = False  # whether it draws random numbers is known

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Fill a copy that `deepcopy` makes."""
        super().__setstate__(state)  # type: ignore[misc]
        if self.tp_root is not None:
            self.tp_root.regions.watch(self)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        axis = self.tp_root
        if axis is None or axis.depth:
            self.tp_outermost = False
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        first = axis.first = self.tp_first
        recomputing = in_backward()
        if not recomputing:
            self.tp_outermost = True
            if first:
                check_ties(self)  # type: ignore[arg-type]
                checks.same_tokens(axis, self, args, kwargs)  # type: ignore[arg-type]
        if self.tp_outermost:
            known = axis.regions.begin(training=self.training, first=first, known=self.tp_known)  # type: ignore[attr-defined]
        axis.depth = 1
        try:
            out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            axis.depth = 0
        if first:
            self.tp_first = axis.first = False
        if self.tp_outermost:
            axis.regions.end(training=self.training)  # type: ignore[attr-defined]
            self.tp_known |= known
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

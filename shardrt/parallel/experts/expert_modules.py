"""What modules of grouped experts do in their forward: the classes that `ExpertParallel` gives them.

The module's own forward runs, over the rows that came for the experts which this rank has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...torch_internals import in_backward
from ..boundaries.expert_exchange import ExpertExchange, Request, SortedOrder, from_experts, to_experts
from ..boundaries.partial_grads import run_exposed
from ..styles.modules import InFront
from ..styles.state import ParallelState

Forward = Callable[..., torch.Tensor]


class RoutedExpertsModule(InFront):
    """Experts of transformers: `forward(hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K))`."""

    tp_state: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward: Forward = super().forward  # type: ignore[misc]
        exchange = exchange_of(self.tp_state)
        hidden, index, weights = _given(exchange, forward, args, kwargs, 3)
        request = _request_of_choices(exchange, hidden, index, weights)
        order = SortedOrder.of(index.reshape(-1), index.shape[1])
        rows = order.sorted(hidden)
        planned = exchange.plan(request)  # the host waits: a GPU has what stands above to do meanwhile
        note_load(self, request.counts)
        rows = to_experts(rows, planned.route)
        local = at_least_one(planned.local_experts().unsqueeze(1))
        made = _computed(self, forward, rows, local, rows.new_ones(local.shape))
        made = from_experts(made, planned.route)
        weighted = made * weights.reshape(-1, 1).index_select(0, order.order)
        return order.restored(weighted).to(hidden.dtype)


class SortedExpertsModule(InFront):
    """Experts of torchtitan: `forward(x (S, H) sorted by expert, num_tokens_per_expert (E,))`."""

    tp_state: ParallelState

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward: Forward = super().forward  # type: ignore[misc]
        exchange = exchange_of(self.tp_state)
        x, counts = _given(exchange, forward, args, kwargs, 2)
        request = _request_of_counts(exchange, x, counts)
        planned = exchange.plan(request)
        note_load(self, request.counts)
        order = SortedOrder.of(planned.local_experts())  # what came is sorted within each rank's part only
        rows = order.sorted(to_experts(x, planned.route))
        local = planned.counts.sum(0).to(counts.dtype)
        if len(rows) == 0:
            local[0] = 1
        made = _computed(self, forward, rows, local)
        return from_experts(order.restored(made), planned.route)


def exchange_of(state: ParallelState) -> ExpertExchange:
    assert state.experts is not None
    return state.experts


def note_load(module: Any, counts: torch.Tensor) -> None:
    """Count the rows of each expert, (E,): in training, and not once more where activations are computed again."""
    if module.training and not in_backward():
        state: ParallelState = module.tp_state
        state.load = counts.clone() if state.load is None else state.load + counts


# ---------------------------------------------------------------------- arguments


def _given(
    exchange: ExpertExchange, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> tuple[torch.Tensor, ...]:
    """The arguments in the order of the module's own forward."""
    given = args
    if kwargs:
        try:
            given = inspect.signature(forward).bind(*args, **kwargs).args
        except TypeError as error:
            exchange.refuse(f"arguments that its forward does not take: {error}")
    if len(given) != count or not all(isinstance(value, torch.Tensor) for value in given):
        types = ", ".join(type(value).__name__ for value in given)
        exchange.refuse(f"a call with ({types}): expected {count} tensors, as ExpertParallel's sorted_rows says")
    return given


def _request_of_choices(exchange: ExpertExchange, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Request:
    """The counts of the chosen experts. What is out of range is counted apart, without a host sync."""
    shaped = hidden.dim() == index.dim() == 2 and index.shape == weights.shape and len(index) == len(hidden)
    if not shaped or index.is_floating_point():
        found = f"hidden_states of {_text(hidden)}, top_k_index of {_text(index)}, top_k_weights of {_text(weights)}"
        exchange.refuse(f"{found}: expected (tokens, width), integers (tokens, k), and (tokens, k)")
    experts, flat = exchange.experts, index.reshape(-1)
    bins = torch.zeros(experts + 2, dtype=torch.int64, device=hidden.device)
    bins.scatter_add_(0, flat.long().clamp(-1, experts) + 1, torch.ones_like(flat, dtype=torch.int64))
    fits = (bins[0] + bins[-1]) == 0

    def problem() -> str:
        return f"a top_k_index from {int(flat.min())} to {int(flat.max())}: expected 0 to {experts - 1}"

    return Request(bins[1:-1], flat.numel(), fits, _kind(hidden), problem)


def _request_of_counts(exchange: ExpertExchange, x: torch.Tensor, counts: torch.Tensor) -> Request:
    if x.dim() != 2 or counts.shape != (exchange.experts,):
        found = f"x of {_text(x)}, num_tokens_per_expert of {_text(counts)}"
        exchange.refuse(f"{found}: expected (tokens, width), and ({exchange.experts},)")
    rows = counts.to(x.device, torch.int64)
    fits = (rows >= 0).all() & (rows.sum() == len(x))

    def problem() -> str:
        return f"num_tokens_per_expert of {rows.tolist()}: expected no negative ones, and a sum of {len(x)}, the rows of x"

    return Request(rows, len(x), fits, _kind(x), problem)


def _kind(rows: torch.Tensor) -> str:
    """Where this differs, ranks would wait for each other: in the exchange, or in its backward."""
    enabled = torch.is_grad_enabled()
    gradients = "no gradients" if not enabled else "gradients, also of the rows" if rows.requires_grad else "gradients"
    return f"rows of {rows.dtype}, {rows.shape[1]} wide, with {gradients}"


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


# ---------------------------------------------------------------------- the module's own forward


def _computed(module: Any, forward: Forward, rows: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
    """What the experts here make of the rows, (R, H), with the arguments that `at_least_one` gives.

    Invariant: autograd records the same on every rank, also where no row comes. A checkpoint computes again on every rank, or
    on none; backwards exchange on every rank, of any order; no parameter has a gradient on some ranks only.
    """
    came, rows = len(rows), at_least_one(rows)
    made: torch.Tensor = run_exposed(module, forward, (rows, *args), {})
    if made.shape != rows.shape:
        name = module.tp_state.experts.name
        raise ValueError(f"the experts '{name}' made {_text(made)} of {_text(rows)}: expected the same shape")
    return (made if came else made[:0]).to(rows.dtype)


def at_least_one(rows: torch.Tensor) -> torch.Tensor:
    """(R, ...), or (1, ...) of zeros where R is 0: a row for the first expert, whose result nobody sees."""
    return rows if len(rows) else torch.cat((rows, rows.new_zeros((1, *rows.shape[1:]))))

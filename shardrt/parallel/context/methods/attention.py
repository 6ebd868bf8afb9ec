"""Attention of this rank's queries to the keys of all ranks: the autograd function over a transport.

The backward recomputes the weights of each block from the log-sum-exp of all keys, which the forward keeps beside its output:
nothing of size tokens times tokens is stored, in either of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...boundaries.axis import owned
from ...boundaries.relayout import AS_ARRIVES
from ..cut import Documents, Piece, SequenceCut
from ..transport import BlockLayout, Ring, Transport
from .kernels import Attended, Block, BlockSum, at, kernel_for, wide


@dataclass(frozen=True, slots=True)
class Attention:
    """One call, alike on all ranks. scale: of the scores."""

    ring: Ring
    transport: type[Transport]
    cut: SequenceCut
    documents: Documents | None
    causal: bool
    scale: float

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Queries (B, H, T, D), keys (B, K, T, D) and values (B, K, T, E) of this rank's T tokens -> (B, H, T, E)."""
        out: torch.Tensor = _Function.apply(_with_rows(queries), keys, values, self)
        return out

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attended:
        kernel, found = kernel_for(queries, values), BlockSum(queries, values)
        layout = self._layout(keys, values)

        def step(owner: int, block: torch.Tensor) -> None:
            k, v = layout.views(block, self.cut.length(owner))
            for row, rows, columns, causal in self._pieces(owner):
                part = Block(at(queries, row, rows), at(k, row, columns), at(v, row, columns), causal, self.scale)
                found.add(row, rows, kernel.forward(part), first=owner == self.ring.rank)

        self.transport.visit(self.ring, lambda: layout.packed(keys, values), step)
        return found.result()

    def backward(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, total: Attended, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kernel, dtype = kernel_for(queries, values), wide(queries.dtype)
        layout = self._layout(keys, values)
        grad_queries = queries.new_zeros(queries.shape, dtype=dtype)

        def step(owner: int, block: torch.Tensor) -> torch.Tensor:
            terms = block.new_zeros(block.shape, dtype=dtype)
            length = self.cut.length(owner)
            (k, v), (grad_k, grad_v) = layout.views(block, length), layout.views(terms, length)
            for row, rows, columns, causal in self._pieces(owner):
                part = Block(at(queries, row, rows), at(k, row, columns), at(v, row, columns), causal, self.scale)
                seen = Attended(at(total.out, row, rows), at(total.lse, row, rows))
                made = kernel.backward(part, seen, at(grad, row, rows))
                at(grad_queries, row, rows).add_(made.queries)
                at(grad_k, row, columns).add_(made.keys)
                at(grad_v, row, columns).add_(made.values)
            return terms

        summed = self.transport.gradients(self.ring, lambda: layout.packed(keys, values), step)
        grad_keys, grad_values = layout.views(summed, self.cut.length(self.ring.rank))
        return grad_queries.to(queries.dtype), grad_keys.to(keys.dtype), grad_values.to(values.dtype)

    def _pieces(self, owner: int) -> tuple[Piece, ...]:
        return self.cut.pieces(self.ring.rank, owner, self.causal, self.documents)

    def _layout(self, keys: torch.Tensor, values: torch.Tensor) -> BlockLayout:
        return BlockLayout.of(keys, values, self.cut.longest)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        total = attention.forward(queries, keys, values)
        # Invariant: the shape of the log-sum-exp is not that of torch's own attention. A module that is checkpointed with
        # use_reentrant=False and computed again outside of the context, where attention would be to local tokens alone, saves
        # other tensors, which torch's default check of recomputation refuses.
        ctx.save_for_backward(queries, keys, values, total.out, total.lse.unsqueeze(-1))
        ctx.attention, ctx.passes = attention, AS_ARRIVES
        return owned(total.out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        queries, keys, values, out, lse = ctx.saved_tensors
        total = Attended(out, lse.squeeze(-1))
        return *ctx.attention.backward(queries, keys, values, total, _with_rows(grad)), None


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the channels of a token in a row, as fused kernels take it. That of a sum's gradient is expanded."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

"""Attention to the whole sequence by some of the heads: all-to-alls around torch's own (DeepSpeed-Ulysses, arXiv 2309.14509).

Legend: N ranks, B rows, H heads, T tokens of this rank, S of the sequence, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ....comm import current_stream
from ....comm.core.fingerprint import fingerprint_of
from ....torch_internals import torch_attention
from ...boundaries.axis import owned
from ...boundaries.random import default_generator
from ...boundaries.relayout import AS_ARRIVES
from ..cut import Documents, SequenceCut
from ..transport import Ring


@dataclass(frozen=True, slots=True)
class HeadwiseAttention:
    """One call, alike on all ranks. scale: of the scores.   dropout: the probability with which a weight is dropped."""

    ring: Ring
    cut: SequenceCut
    documents: Documents | None
    causal: bool
    scale: float
    dropout: float

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Queries (B, H, T, D), keys (B, K, T, D) and values (B, K, T, E) of this rank's T tokens -> (B, H, T, E)."""
        exchange = HeadExchange(self.ring, self.cut)
        out = self._attend(*(_HeadSwap.apply(tensor, exchange, True) for tensor in (queries, keys, values)))
        back: torch.Tensor = _HeadSwap.apply(out, exchange, False)
        return back

    def _attend(self, *whole: torch.Tensor) -> torch.Tensor:
        if self.dropout == 0.0:
            return self._by_documents(*whole)
        # The ranks have different heads, and may have the same seed.
        generator = default_generator(whole[0].device)
        seed = _drawn_seed(generator)
        before = generator.get_state()
        generator.manual_seed((seed + self.ring.rank) % 2**63)
        try:
            return self._by_documents(*whole)
        finally:
            generator.set_state(before)

    def _by_documents(self, *whole: torch.Tensor) -> torch.Tensor:
        if self.documents is None:
            return self._run(*whole)
        if len(self.documents.bounds) == 1:
            return self._row(self.documents.bounds[0], *whole)
        rows = zip(self.documents.bounds, *(tensor.split(1) for tensor in whole), strict=True)
        return torch.cat([self._row(bounds, *row) for bounds, *row in rows])

    def _row(self, bounds: tuple[int, ...], *row: torch.Tensor) -> torch.Tensor:
        sizes = [stop - start for start, stop in pairwise(bounds)]
        return torch.cat(
            [self._run(*document) for document in zip(*(tensor.split(sizes, 2) for tensor in row), strict=True)], 2
        )

    def _run(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch_attention(
            queries,
            keys,
            values,
            dropout_p=self.dropout,
            is_causal=self.causal,
            scale=self.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """From some tokens of all heads to all tokens of some heads, and back. Each is the other's backward."""

    ring: Ring
    cut: SequenceCut

    def to_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, H, T, C) -> (B, H / N, S, C), in the order of the sequence."""
        rows, heads, _, channels = tokens.shape
        heads //= self.ring.size
        sent = tokens.unflatten(1, (self.ring.size, heads)).movedim(1, 0).contiguous()
        received = tokens.new_empty(rows * heads * self.cut.total * channels)
        self._exchange(received, sent, self._counts(rows * heads * channels), [sent[0].numel()] * self.ring.size)
        out = tokens.new_empty((rows, heads, self.cut.total, channels))
        for place, part in self._parts(received, out):
            place.copy_(part)
        return out

    def to_tokens(self, some: torch.Tensor) -> torch.Tensor:
        """(B, H / N, S, C), in the order of the sequence -> (B, H, T, C)."""
        rows, heads, _, channels = some.shape
        sent = some.new_empty(some.numel())
        for place, part in self._parts(sent, some):
            part.copy_(place)
        received = some.new_empty((self.ring.size, rows, heads, self.cut.length(self.ring.rank), channels))
        self._exchange(received, sent, [received[0].numel()] * self.ring.size, self._counts(rows * heads * channels))
        return received.movedim(0, 1).flatten(1, 2)

    def _counts(self, per_token: int) -> list[int]:
        return [per_token * self.cut.length(rank) for rank in range(self.ring.size)]

    def _parts(self, flat: torch.Tensor, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each chunk of tokens, in `whole` (B, h, S, C) and in `flat`, where it lies rank by rank."""
        found = []
        rows, heads, _, channels = whole.shape
        counts = self._counts(rows * heads * channels)
        for rank, block in enumerate(flat.split(counts)):
            part = block.view(rows, heads, self.cut.length(rank), channels)
            sizes = [stop - start for start, stop in self.cut.chunks(rank)]
            for (start, stop), chunk in zip(self.cut.chunks(rank), part.split(sizes, 2), strict=True):
                found.append((whole[:, :, start:stop], chunk))
        return found

    def _exchange(self, out: torch.Tensor, inp: torch.Tensor, out_counts: list[int], in_counts: list[int]) -> None:
        if self.ring.size == 1:
            out.view(-1).copy_(inp.view(-1))
            return
        stream = current_stream(inp.device)
        self.ring.comm.all_to_all(out, inp, out_counts, in_counts, stream=stream).wait(stream)


def _drawn_seed(generator: torch.Generator) -> int:
    """A seed by the state of the device's generator, in which tensor parallel ranks differ. The state moves on."""
    if generator.device.type == "cuda":  # Cost: to draw would be a host sync; the state is two integers on the host
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # the least step
        return fingerprint_of(f"{generator.initial_seed()} {offset}")
    return int(torch.randint(2**62, (), generator=generator, device="cpu"))


class _HeadSwap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: HeadExchange, to_heads: bool) -> torch.Tensor:
        ctx.exchange, ctx.to_heads, ctx.passes = exchange, to_heads, AS_ARRIVES
        return owned(exchange.to_heads(tensor) if to_heads else exchange.to_tokens(tensor).contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _HeadSwap.apply(grad, ctx.exchange, not ctx.to_heads), None, None

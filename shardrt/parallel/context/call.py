"""A call of attention: what it must be given, and what must be the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...tensor.dtensor.dtensor import DTensor
from .cut import Documents, SequenceCut
from .transport import Ring


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `F.scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    gqa: bool

    def described(self, ring: Ring, cut: SequenceCut, documents: Documents | None, method: str) -> object:
        """What must be the same on every rank. Raises for what cannot be computed."""
        if self.mask is not None:
            raise NotImplementedError(
                "attn_mask: expected none; use is_causal and document_ids, or, with a model of transformers, pass an "
                "attention_mask of ones, cut as the tokens are; attention is to all tokens, or all earlier ones, and sliding "
                "or chunked windows cannot be computed"
            )
        if self.dropout > 0 and method != "ulysses":
            raise NotImplementedError(f"dropout_p={self.dropout} with method={method!r}: use 'ulysses', or no dropout")
        self._check_shapes(cut.length(ring.rank), documents)
        heads, groups = self.query.shape[1], self.key.shape[1]
        if method == "ulysses" and (heads % ring.size or groups % ring.size):
            raise ValueError(
                f"{heads} heads of queries and {groups} of keys on {ring.size} ranks: 'ulysses' expects multiples of "
                f"{ring.size}; use method='ring'"
            )
        shapes = [(tensor.shape[0], tensor.shape[1], tensor.shape[3]) for tensor in self._tensors()]
        return shapes, str(self.query.dtype), self.dropout, self.causal, self.scale, torch.is_grad_enabled()

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def _check_shapes(self, tokens: int, documents: Documents | None) -> None:
        q, k, v = (tuple(tensor.shape) for tensor in self._tensors())
        text = f"query {q}, key {k}, value {v}"
        if any(isinstance(tensor, DTensor) for tensor in self._tensors()):
            raise NotImplementedError(f"{text}: a DTensor; expected local tensors, of whole heads")
        if not (len(q) == len(k) == len(v) == 4):
            raise NotImplementedError(f"{text}: expected (batch, heads, tokens, channels) each")
        if not q[2] == k[2] == v[2] == tokens:
            raise ValueError(f"{text}: expected this rank's {tokens} tokens in each")
        if not (q[0] == k[0] == v[0] and k[1] == v[1] and q[3] == k[3] and len({t.dtype for t in self._tensors()}) == 1):
            raise ValueError(f"{text}: expected one batch size and dtype, and heads and channels that fit")
        if q[1] != k[1] and (not self.gqa or q[1] % k[1]):
            raise ValueError(f"{text}: expected equal numbers of heads, or with enable_gqa a multiple for queries")
        if documents is not None and len(documents.bounds) not in (1, q[0]):
            raise ValueError(f"{text}: document_ids has {len(documents.bounds)} rows; expected one for each row of the batch")

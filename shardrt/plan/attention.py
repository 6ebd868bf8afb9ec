"""Attention on the meta device as it runs on the machine: fused, without a matrix of scores.

torch decides by the device which attention `scaled_dot_product_attention` is. On the meta device it is the one of plain
operations, whose scores need memory for every pair of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..torch_internals import OpOverloadPacket, aten_operator

_HOST, _FLASH, _EFFICIENT, _PLAIN = (
    aten_operator(f"_scaled_dot_product_{name}")
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "attention_math")
)
_HALVES = (torch.bfloat16, torch.float16)


class FusedAttention:
    """In a `with` block, attention of meta tensors takes the memory and the operations of a device's fused kernels.

    device: "cuda" or "cpu". What these do not support (3-D tensors, on the host dropout) stays as it is.
    It is a kernel of the operator, not a mode of torch's functions: those do not reach what a backward runs again.
    """

    _library: torch.library.Library | None = None  # while it is entered; torch takes its kernels back when it is dropped

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("scaled_dot_product_attention", self._attend, "AutogradMeta")

    def __exit__(self, *_: object) -> None:
        self._library = None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        kernel, given, options = self._kernel(query, attn_mask, dropout_p, is_causal)
        if kernel is None:
            assert _PLAIN is not None
            plain = _PLAIN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return plain[0]
        if enable_gqa and kernel is not _FLASH:  # which takes fewer heads as they are
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return kernel(query, key, value, *given, scale=scale, **options)[0]

    def _kernel(
        self, query: torch.Tensor, mask: torch.Tensor | None, dropout: float, is_causal: bool
    ) -> tuple[OpOverloadPacket | None, tuple[object, ...], dict[str, object]]:
        """The operator, None if no fused one supports the arguments; its arguments beside query, key and value."""
        if query.dim() != 4 or (self._device == "cpu" and dropout):
            return None, (), {}
        if self._device == "cpu":
            return _HOST, (dropout, is_causal), {"attn_mask": mask}
        if mask is None and query.dtype in _HALVES:
            return _FLASH, (dropout, is_causal), {}
        return _EFFICIENT, (mask, query.requires_grad, dropout, is_causal), {}

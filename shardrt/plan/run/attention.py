"""Attention on the meta device as it runs on the machine: fused where torch has a kernel for it, without a matrix of scores.

torch decides by the device which attention `scaled_dot_product_attention` is. On the meta device it is the one of plain
operations, whose scores need memory for every pair of tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from ...torch_internals import OpOverloadPacket, aten_operator, host_fuses_attention

_HOST, _FLASH, _EFFICIENT, _PLAIN = (
    aten_operator(f"_scaled_dot_product_{name}")
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "attention_math")
)
_HALVES = (torch.bfloat16, torch.float16)
_WIDEST = 256  # channels of a head of FlashAttention
_PADDED = 8  # to a multiple of it, before FlashAttention


class FusedAttention:
    """In a `with` block, attention of meta tensors takes the memory and the operations of a device's fused kernels.

    device: "cuda" or "cpu". What no kernel of it supports stays as it is: on the host torch is asked, for a GPU the rules are
    those of torch's `sdp_utils.cpp`. Where these choose cuDNN (Hopper and later), it is counted as the other fused kernels.
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
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
        fused = (query, key, value, mask, dropout_p, is_causal)
        if self._device == "cpu":
            kernel = _HOST if host_fuses_attention(*fused, enable_gqa) else None
        else:
            kernel = _of_gpu(query, key, value, mask, is_causal, enable_gqa)
        if kernel is None:
            assert _PLAIN is not None
            return _PLAIN(*fused, scale=scale, enable_gqa=enable_gqa)[0]
        if kernel is _FLASH:
            scale, width = scale or query.shape[-1] ** -0.5, value.shape[-1]
            padded = (F.pad(each, (0, -width % _PADDED)) if width % _PADDED else each for each in (query, key, value))
            return kernel(*padded, dropout_p, is_causal, scale=scale)[0][..., :width]
        shape = *query.shape[:-1], value.shape[-1]
        if kernel is _HOST:
            query, key, value = map(_batched, (query, key, value))
            mask = None if mask is None else _batched(mask)
        if enable_gqa:  # of the fused kernels, FlashAttention alone takes fewer heads as they are
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        if kernel is _HOST:
            return kernel(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0].view(shape)
        needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
        return kernel(query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale)[0]


def _batched(tensor: torch.Tensor) -> torch.Tensor:
    """A view of four dims. From 2.14 on, torch fuses attention of tensors without a batch, as if it were of one row."""
    return tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor


def _of_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, enable_gqa: bool
) -> OpOverloadPacket | None:
    """The operator, None if no fused one supports the arguments."""
    tensors, is_half = (query, key, value), query.dtype in _HALVES
    if {each.dim() for each in tensors} != {4} or len({each.shape[0] for each in tensors}) > 1:
        return None
    if len({each.shape[1] for each in tensors}) > 1 and not enable_gqa:
        return None
    is_one_width = query.shape[-1] == key.shape[-1] == value.shape[-1] <= _WIDEST
    is_aligned = not is_causal or query.shape[-2] == key.shape[-2]
    if is_half and mask is None and is_one_width and is_aligned:
        return _FLASH
    unit = 8 if is_half else 4  # 16 bytes
    in_units = query.shape[-1] == key.shape[-1] and not (query.shape[-1] % unit or value.shape[-1] % unit)
    return _EFFICIENT if in_units and (is_half or query.dtype == torch.float32) else None

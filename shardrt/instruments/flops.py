"""Floating-point operations of matrices: the formulas of torch's flop counter, and those that it lacks."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from ..torch_internals import aten_operator


def _of_grouped(a: Any, b: Any, *_: object, **__: object) -> int:
    """The flops of experts: rows (S, K) by matrices (E, K, N), a part of the rows by each; or columns (K, S) by rows (S, N)."""
    return 2 * a.numel() * b.shape[-1]


def _of_attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """The flops of fused attention, by all heads of the query: torch 2.11 has no formula for fewer heads of the keys."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _of_attention_backward(_: object, query: Any, key: Any, value: Any, *__: object, **___: object) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")

# By operator: functions of its arguments, and of its result as `out_val`.
FORMULAS = (
    flop_registry
    | {aten_operator(f"_scaled_dot_product_{name}"): _of_attention for name in _FUSED}
    | {aten_operator(f"_scaled_dot_product_{name}_backward"): _of_attention_backward for name in _FUSED}
    | {aten_operator("_grouped_mm"): _of_grouped}
)

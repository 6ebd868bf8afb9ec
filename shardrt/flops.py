"""Floating-point operations of matrices: the formulas of torch's flop counter, and those that it lacks."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from .torch_internals import aten_operator


def _of_grouped(a: Any, b: Any, *_: object, **__: object) -> int:
    """The flops of experts: rows (S, K) by matrices (E, K, N), a part of the rows by each; or columns (K, S) by rows (S, N)."""
    return 2 * a.numel() * b.shape[-1]


# The host's attention counts as the one that has a formula.
_FLASH = "_scaled_dot_product_flash_attention"
_ON_HOST = {aten_operator(f"{_FLASH}_for_cpu{suffix}"): aten_operator(f"{_FLASH}{suffix}") for suffix in ("", "_backward")}

# By operator: functions of its arguments, and of its result as `out_val`.
FORMULAS = (
    flop_registry
    | {ours: flop_registry[theirs] for ours, theirs in _ON_HOST.items() if theirs in flop_registry}
    | {aten_operator("_grouped_mm"): _of_grouped}
)

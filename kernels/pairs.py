"""Complex tensors as pairs of real numbers, on which what is linear in them works part by part."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_pairs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, complex ones as views of another dim of size 2. Those that are conjugated lazily are copied."""
    return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]

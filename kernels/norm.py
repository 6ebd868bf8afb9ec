"""The norm and the scaling of many tensors as one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import cuda, host
from .pairs import as_pairs


def total_norm(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The `order`-norm of all elements of `tensors`: a 0-dim float64 tensor on `device`. No host sync.

    The norm of each tensor is computed in its own dtype, at least float32; norms are combined in float64.
    Cost: each byte is read once; on the host, dtypes below float32 are first copied to float32.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if any(tensor.is_complex() for tensor in filled):
        # Their pairs have the same 2-norm; any other is that of the magnitudes.
        filled = as_pairs(filled) if order == 2.0 else [tensor.abs() if tensor.is_complex() else tensor for tensor in filled]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    if order == 2.0 and filled[0].is_cuda:
        return cuda.squared_norm(filled)[0].sqrt().to(device)
    return torch.linalg.vector_norm(host.norms(filled, order), order).to(device)


def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """(2,) float64 on `device`: the sum of all squares, and 1 if an element is infinite or NaN, else 0. No host sync.

    Deterministic: on CUDA, chunks of 32 KiB are summed in float32 and these sums in float64, both in a fixed order.
    Cost: on CUDA each byte is read once, with one launch per dtype; on the host, narrower dtypes are copied to float32 first.
    """
    return (cuda if tensors and tensors[0].is_cuda else host).squared_norm(tensors).to(device)


def rescale(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """`tensors[i] *= scale`, in place. No host sync.

    scale: a 0-dim tensor on the device of the tensors.
    Cost: each byte is read and written once; on CUDA none if the scale is 1.
    """
    if tensors and tensors[0].is_cuda:
        cuda.rescale(as_pairs(tensors), scale)
    elif tensors:
        torch._foreach_mul_(list(tensors), scale)

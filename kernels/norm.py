"""Many tensors as if they were one vector: its norm, and scaling it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import cuda, host


def total_norm(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The `order`-norm of all elements of `tensors` together: a float64 scalar on `device`, without a host sync.

    Each tensor's norm is taken in its own dtype (low precision: in float32), their combination in float64.
    Cost: every byte read once, but on the host low precision is first copied to float32.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    if order == 2.0 and filled[0].is_cuda:
        return cuda.squared_norm(filled)[0].sqrt().to(device)
    return torch.linalg.vector_norm(host.norms(filled, order), order).to(device)


def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """(2,) float64 on `device`: the sum of all squares, and 1 if an element is infinite or NaN, else 0. No host sync.

    Deterministic: on CUDA blocks of 32 KiB are summed in float32, their sums in float64, both in a fixed order.
    Cost on CUDA: every byte read once, one launch for each dtype. On the host low precision is first copied to float32.
    """
    return (cuda if tensors and tensors[0].is_cuda else host).squared_norm(tensors).to(device)


def rescale(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """`tensors[i] *= scale`, a scalar tensor on their device, without a host sync.

    Cost: every byte read and written once; on CUDA nothing if the scale is 1.
    """
    if tensors and tensors[0].is_cuda:
        cuda.rescale(tensors, scale)
    elif tensors:
        torch._foreach_mul_(list(tensors), scale)

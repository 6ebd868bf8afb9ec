"""The norm of many tensors as if they were one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def total_norm(tensors: Sequence[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The `order`-norm of all elements of `tensors` together: a float64 scalar on `device`, without a host sync.

    Each tensor's norm is taken in its own dtype (low precision: in float32), their combination in float64.
    """
    filled = [t.float() if t.element_size() < 4 else t for t in tensors if t.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(filled, order)])
    return torch.linalg.vector_norm(norms, order).to(device)

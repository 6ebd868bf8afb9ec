"""The operations in torch's own: all there is on the host; on CUDA, for what the kernels do not take (strided, say)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float, accumulate: bool) -> None:
    """See `reference.pack`."""
    if accumulate:
        torch._foreach_add_(views, tensors, alpha=scale)
    elif scale == 1.0:
        torch._foreach_copy_(views, tensors, non_blocking=True)
    else:
        for view, tensor in zip(views, tensors, strict=True):
            if view.element_size() < tensor.element_size() and view.device == tensor.device:
                torch.mul(tensor, scale, out=view)  # Hazard: cast first, what the scale brings into range would overflow
            else:
                view.copy_(tensor).mul_(scale)  # blocking: a copy from the device must have arrived


def norms(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """(n,) float64: each tensor's norm, taken in its own dtype (low precision: in float32). n is at least 1."""
    widened = [tensor.float() if tensor.element_size() < 4 else tensor for tensor in tensors]
    return torch.stack([norm.double() for norm in torch._foreach_norm(widened, order)])


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `reference.squared_norm`."""
    if not tensors:
        return torch.zeros(2, dtype=torch.float64)
    # Elements beyond 1e19 have infinite squares in float32; the flag is about elements.
    bad = torch.stack([~tensor.isfinite().all() for tensor in tensors]).any()
    return torch.stack([norms(tensors, 2.0).square().sum(), bad.double()])

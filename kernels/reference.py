"""What every operation means, in plain torch. The host versions and the CUDA kernels are held to it; nothing else calls it.

Arithmetic on elements is done in float32, or in float64 if one of the operands is, and rounded once to what is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], scale: float = 1.0, accumulate: bool = False) -> None:
    """`views[i] = scale * tensors[i]`, or `+=`. Views of a flat buffer pack it; tensors that are views of one unpack it.

    Whether product and sum are rounded apart or once is left open: for powers of two it is the same.
    """
    for view, tensor in zip(views, tensors, strict=True):
        if scale == 1.0 and not accumulate:
            view.copy_(tensor)
            continue
        wide = torch.float64 if torch.float64 in (view.dtype, tensor.dtype) else torch.float32
        value = tensor.to(wide) * scale
        view.copy_(view.to(wide) + value if accumulate else value)


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(2,) float64: the sum of the squares of all elements, and 1 if one of them is not finite, else 0."""
    elements = torch.cat([torch.zeros(1, dtype=torch.float64), *(tensor.double().flatten() for tensor in tensors)])
    return torch.stack([elements.square().sum(), (~elements.isfinite()).any().double()])


def rescale(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """`tensors[i] *= scale`, a scalar tensor."""
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        tensor.copy_(tensor.to(wide) * scale.to(wide))

"""The definition of each operation in plain torch. Tests compare the host versions and the CUDA kernels with it.

Elements are computed in float32, or in float64 if an operand is float64, and rounded once to the dtype of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

BLOCK = 256  # elements that share a scale
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest magnitude of a code
SMALLEST = 2.0**-100  # the smallest magnitude for a block's scale, whose inverse is finite


def pack(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], scale: float = 1.0, accumulate: bool = False) -> None:
    """`views[i] = scale * tensors[i]`, or `+=` if `accumulate`.

    With views of a flat buffer as `views` this packs it; with views of one as `tensors` it unpacks it.
    Product and sum may be rounded once or separately, which is the same for a scale that is a power of two.
    """
    for view, tensor in zip(views, tensors, strict=True):
        if scale == 1.0 and not accumulate:
            view.copy_(tensor)
            continue
        wide = torch.float64 if torch.float64 in (view.dtype, tensor.dtype) else torch.float32
        value = tensor.to(wide) * scale
        view.copy_(view.to(wide) + value if accumulate else value)


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(2,) float64: the sum of the squares of all elements, and 1 if an element is not finite, else 0."""
    elements = torch.cat([torch.zeros(1, dtype=torch.float64), *(tensor.double().flatten() for tensor in tensors)])
    return torch.stack([elements.square().sum(), (~elements.isfinite()).any().double()])


def rescale(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """`tensors[i] *= scale`, a 0-dim tensor."""
    for tensor in tensors:
        wide = torch.promote_types(tensor.dtype, torch.float32)
        tensor.copy_(tensor.to(wide) * scale.to(wide))


def encode(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Scale each block such that its largest magnitude is the largest code, and round to the nearest code (ties to even).

    codes: (n,) int8 or float8_e4m3fn. scales: (ceil(n / BLOCK),) float32. A block with an element that is not finite
    gets the scale NaN and codes 0, so that all its elements decode to NaN.
    """
    blocks = F.pad(x.float(), (0, -len(x) % BLOCK)).view(-1, BLOCK)
    peaks = blocks.abs().amax(1)
    scales.copy_(peaks.clamp(min=SMALLEST) / LARGEST[codes.dtype])
    scaled = torch.where(peaks.isfinite()[:, None], blocks * (1 / scales)[:, None], 0.0).flatten()[: len(x)]
    codes.copy_(scaled.round() if codes.dtype is torch.int8 else scaled)
    scales[~peaks.isfinite()] = torch.nan


def decode_sum(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """`out` = the sum over rows of `codes` times their scales, in float32, row by row. scales: (rows, ceil(n / BLOCK)).

    Codes and scales must come from `encode`: no code is NaN, and 256 times a scale is finite, or the scale is NaN.
    """
    total = torch.zeros(len(out), dtype=torch.float32, device=out.device)
    for row, factors in zip(codes, scales, strict=True):
        total += row.float() * factors.repeat_interleave(BLOCK)[: len(out)]
    out.copy_(total)

"""The operations in terms of torch: for all tensors on the host, and for strided or other unsupported ones on CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .reference import BLOCK, LARGEST, SMALLEST

PIECE = 256 * BLOCK  # elements encoded or decoded at a time, so that temporary tensors fit the cache


def pack(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float, accumulate: bool) -> None:
    """See `reference.pack`."""
    if accumulate:
        torch._foreach_add_(views, tensors, alpha=scale)
    elif scale == 1.0:
        torch._foreach_copy_(views, tensors, non_blocking=True)
    else:
        for view, tensor in zip(views, tensors, strict=True):
            if view.element_size() < tensor.element_size() and view.device == tensor.device:
                torch.mul(tensor, scale, out=view)  # Hazard: a cast before the scaling could overflow
            else:
                view.copy_(tensor).mul_(scale)  # blocking: a copy from the device must be complete before mul_


def norms(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """(n,) float64: the norm of each tensor, computed in its own dtype, at least float32. n is at least 1."""
    widened = [tensor.float() if tensor.element_size() < 4 else tensor for tensor in tensors]
    return torch.stack([norm.double() for norm in torch._foreach_norm(widened, order)])


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `reference.squared_norm`. Elements are checked only if a norm is not finite: finite ones may overflow too."""
    if not tensors:
        return torch.zeros(2, dtype=torch.float64, device="cpu")
    each = norms(tensors, 2.0)
    bad = not each.isfinite().all() and not all(tensor.isfinite().all() for tensor in tensors)
    return torch.stack([each.square().sum(), each.new_tensor(bad)])


def encode(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """See `reference.encode`."""
    for elements, blocks, size in _pieces(len(x)):
        values, scale = x[elements].view(-1, size).float(), scales[blocks]
        peaks = values.abs().amax(1)
        torch.div(peaks.clamp(min=SMALLEST), LARGEST[codes.dtype], out=scale)
        scaled = values * (1 / scale)[:, None]
        bad = ~peaks.isfinite()
        if bad.any():
            scaled.masked_fill_(bad[:, None], 0.0)
            scale.masked_fill_(bad, torch.nan)
        codes[elements].view(-1, size).copy_(scaled.round_() if codes.dtype is torch.int8 else scaled)


def decode_sum(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """See `reference.decode_sum`."""
    for elements, blocks, size in _pieces(len(out)):
        total = torch.zeros(out[elements].view(-1, size).shape, dtype=torch.float32, device="cpu")
        for row, scale in zip(codes[:, elements], scales[:, blocks], strict=True):
            values, unit = _floats(row.view(-1, size))
            total += values.mul_((scale * unit)[:, None])
        out[elements].view(-1, size).copy_(total)


def _floats(codes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The codes as float32 divided by a power of two, and that power.

    Cost: torch converts an e4m3 in 7 ns. Its bits as a float16, whose exponent is too small by 8, are converted in 1 ns.
    """
    if codes.dtype is torch.int8:
        return codes.float(), 1.0
    fields = codes.view(torch.int8).short().bitwise_left_shift_(7)
    fields &= ~0x4000  # clear the sign bit that was extended into the exponent
    return fields.view(torch.float16).float(), 256.0


def _pieces(numel: int) -> Iterator[tuple[slice, slice, int]]:
    """(elements, blocks, elements per block) of each piece. A last, incomplete block is a piece of its own."""
    whole = numel // BLOCK * BLOCK
    for first in range(0, whole, PIECE):
        last = min(first + PIECE, whole)
        yield slice(first, last), slice(first // BLOCK, last // BLOCK), BLOCK
    if whole < numel:
        yield slice(whole, numel), slice(whole // BLOCK, None), numel - whole

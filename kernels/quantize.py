"""Blockwise quantisation for collectives: BLOCK consecutive elements share one float32 scale.

On the meta device each call is one operation of torch that reads and writes as many bytes, so that a simulation sees its cost.
"""

from __future__ import annotations

import torch

from . import cuda, host
from .reference import BLOCK, LARGEST


def encode(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """Quantise `x` into codes and scales; see `reference.encode`. No host sync.

    x: (n,) float32, float16 or bfloat16. codes: (n,) int8 or float8_e4m3fn. scales: (ceil(n / BLOCK),) float32. All contiguous.
    Cost on CUDA: x read once, codes and scales written once. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("encode", x, codes[None], scales[None])
    if x.is_meta:
        codes.copy_(x)
    else:
        (cuda if x.is_cuda else host).encode(codes, scales, x)


def decode_sum(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Dequantise each row of `codes` and write the sum of the rows, added in float32 from the first to the last.

    out: (n,), codes: (rows, n), scales: (rows, ceil(n / BLOCK)); dtypes as for `encode`. All contiguous. No host sync.
    Cost on CUDA: codes and scales read once, out written once. Raises ValueError for other shapes, dtypes or strides.
    """
    _check("decode_sum", out, codes, scales)
    if out.is_meta:
        torch.sum(codes.view(torch.int8), 0, dtype=out.dtype, out=out)
    else:
        (cuda if out.is_cuda else host).decode_sum(out, codes, scales)


def round_trip(x: torch.Tensor, codes: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """What `encode` into these codes and `decode_sum` make of `x`, as a (n,) tensor of `dtype`. Arguments as for these."""
    row = torch.empty(1, x.numel(), dtype=codes, device=x.device)
    scales = torch.empty(1, -(-x.numel() // BLOCK), dtype=torch.float32, device=x.device)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    encode(row[0], scales[0], x)
    decode_sum(out, row, scales)
    return out


def _check(call: str, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    expected = (x.numel(),), (len(codes), x.numel()), (len(codes), -(-x.numel() // BLOCK))
    dtypes = x.dtype in cuda.FLOATS and x.dtype != torch.float64 and codes.dtype in LARGEST and scales.dtype == torch.float32
    if not dtypes or any(t.shape != s or not t.is_contiguous() for t, s in zip((x, codes, scales), expected, strict=True)):
        listed = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (x, codes, scales))
        raise ValueError(f"{call}: expected contiguous values, codes and scales of shapes {expected}; found {listed}")

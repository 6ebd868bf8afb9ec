"""Attention of one block of queries to one block of keys, and the sum of several such blocks by their log-sum-exp.

Legend: B rows, H heads of queries, K heads of keys (each for H / K heads of queries in a row), T queries, S keys, D channels
of queries and keys, E of values. Queries (B, H, T, D), keys (B, K, S, D), values (B, K, S, E), out (B, H, T, E), log-sum-exp of
the scores (B, H, T). A block is dense, or causal with T = S. None of the sizes is 0.

`kernel_for` chooses: torch's fused attention, where it returns the log-sum-exp and takes these tensors, and else two matrix
products and a softmax over some of the queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....comm import world
from ....torch_internals import aten_operator

_SCORES = 2**24  # elements of the scores that the formula has at a time
_FUSED_DTYPES = {"cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}


class Block(NamedTuple):
    """What a block is of."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool
    scale: float


class Attended(NamedTuple):
    """out: in the dtype of the queries.   lse: in float32, or float64 of float64 queries."""

    out: torch.Tensor
    lse: torch.Tensor


class Gradients(NamedTuple):
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Kernel:
    """forward(block), and backward(block, what all keys together made of the queries, gradient of its out)."""

    forward: Callable[[Block], Attended]
    backward: Callable[[Block, Attended, torch.Tensor], Gradients]


def kernel_for(queries: torch.Tensor, values: torch.Tensor) -> Kernel:
    """The kernel for blocks of these tensors: the one place that chooses."""
    kind = world().machine if queries.is_meta else queries.device.type
    channels = values.shape[-1]
    if queries.shape[-1] != channels or queries.dtype not in _FUSED_DTYPES[kind]:
        return FORMULA
    if kind == "cpu":
        return FUSED_CPU
    return FUSED_CUDA if channels <= 256 and channels % 8 == 0 else FORMULA


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which blocks are added up."""
    return torch.promote_types(dtype, torch.float32)


class BlockSum:
    """The attention of T queries to all keys, from blocks of keys.

    [Note: merging] With out_1, lse_1 of some keys and out_2, lse_2 of others, lse = log(e^lse_1 + e^lse_2), and
    out = e^(lse_1 - lse) out_1 + e^(lse_2 - lse) out_2 (Ring Attention, arXiv 2310.01889; FlashAttention, arXiv 2205.14135).
    """

    def __init__(self, queries: torch.Tensor, values: torch.Tensor) -> None:
        shape, dtype = queries.shape[:3], wide(queries.dtype)
        # In memory (B, T, H, E), as models read it, and as the fused kernels make it.
        self._out = queries.new_empty((shape[0], shape[2], shape[1], values.shape[-1]), dtype=dtype).transpose(1, 2)
        self._lse = queries.new_full(shape, -torch.inf, dtype=dtype)
        self._dtype = queries.dtype

    def add(self, row: int | None, rows: tuple[int, int], block: Attended, *, first: bool) -> None:
        """Add a block of the queries `rows`. first: they have none yet."""
        out, lse = at(self._out, row, rows), at(self._lse, row, rows)
        if first:
            out.copy_(block.out)
            lse.copy_(block.lse)
            return
        both = torch.logaddexp(lse, block.lse)
        out.mul_((lse - both).exp_().unsqueeze(-1))
        out.addcmul_(block.out.to(out.dtype), (block.lse - both).exp_().unsqueeze(-1))
        lse.copy_(both)

    def result(self) -> Attended:
        return Attended(self._out.to(self._dtype), self._lse)


def at(tensor: torch.Tensor, row: int | None, tokens: tuple[int, int]) -> torch.Tensor:
    """A run of tokens of (B, H, T, ...), in one row of the batch, or in all."""
    tensor = tensor if row is None else tensor[row : row + 1]
    whole = tokens == (0, tensor.shape[2])
    return tensor if whole else tensor[:, :, tokens[0] : tokens[1]]


# ---------------------------------------------------------------------- torch's fused attention


def _fused_cpu_forward(block: Block) -> Attended:
    run = aten_operator("_scaled_dot_product_flash_attention_for_cpu")
    return Attended(*run(block.queries, block.keys, block.values, 0.0, block.causal, scale=block.scale))  # type: ignore[misc]


def _fused_cpu_backward(block: Block, total: Attended, grad: torch.Tensor) -> Gradients:
    run = aten_operator("_scaled_dot_product_flash_attention_for_cpu_backward")
    q, k, v, causal, scale = block
    return Gradients(*run(grad, q, k, v, total.out, total.lse, 0.0, causal, scale=scale))  # type: ignore[misc]


def _fused_cuda_forward(block: Block) -> Attended:
    run = aten_operator("_scaled_dot_product_flash_attention")
    q, k, v, causal, scale = block
    out, lse, *_ = run(q, k, v, 0.0, causal, False, scale=scale)  # type: ignore[misc]
    return Attended(out, lse)


def _fused_cuda_backward(block: Block, total: Attended, grad: torch.Tensor) -> Gradients:
    run = aten_operator("_scaled_dot_product_flash_attention_backward")
    q, k, v, causal, scale = block
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of dropout, which there is none of
    sizes = (None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)
    lse = total.lse.contiguous()
    return Gradients(*run(grad, q, k, v, total.out, lse, *sizes, scale=scale))  # type: ignore[misc]


# ---------------------------------------------------------------------- the formula


def _formula_forward(block: Block) -> Attended:
    q, _, v, _, _ = block
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3], dtype=wide(q.dtype))
    values = v.to(lse.dtype).unsqueeze(2)
    for start, stop, scores in _scores(block):
        part = scores.logsumexp(-1)
        lse[:, :, start:stop] = part.flatten(1, 2)
        weights = scores.sub_(part.unsqueeze(-1)).exp_()
        out[:, :, start:stop] = (weights @ values).flatten(1, 2)
    return Attended(out, lse)


def _formula_backward(block: Block, total: Attended, grad: torch.Tensor) -> Gradients:
    q, k, v, _, scale = block
    heads, dtype = k.shape[1], wide(q.dtype)
    keys, values = k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    grad_q = q.new_empty(q.shape, dtype=dtype)
    grad_k, grad_v = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    for start, stop, scores in _scores(block):
        rows = (start, stop)
        part, out = _grouped(at(grad, None, rows).to(dtype), heads), _grouped(at(total.out, None, rows).to(dtype), heads)
        weights = scores.sub_(_grouped(at(total.lse, None, rows).unsqueeze(-1), heads)).exp_()
        grad_v += (weights.transpose(-1, -2) @ part).sum(2)
        terms = (part @ values.transpose(-1, -2)).sub_((part * out).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_q[:, :, start:stop] = (terms @ keys).flatten(1, 2)
        grad_k += (terms.transpose(-1, -2) @ _grouped(at(q, None, rows).to(dtype), heads)).sum(2)
    return Gradients(grad_q, grad_k, grad_v)


def _scores(block: Block) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The scores of some queries at a time, with their first and last: (B, K, H / K, t, S)."""
    q, k, _, causal, scale = block
    dtype, queries, keys = wide(q.dtype), q.shape[2], k.shape[2]
    columns = k.to(dtype).transpose(-1, -2).unsqueeze(2)
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        scores = (_grouped(q[:, :, start:stop].to(dtype), k.shape[1]) @ columns).mul_(scale)
        if causal:
            later = torch.ones(stop - start, keys, dtype=torch.bool, device=q.device).triu_(start + 1)
            scores.masked_fill_(later, -torch.inf)
        yield start, stop, scores


def _grouped(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, H, ...) as (B, K, H / K, ...)."""
    return tensor.unflatten(1, (heads, tensor.shape[1] // heads))


FUSED_CPU = Kernel(_fused_cpu_forward, _fused_cpu_backward)
FUSED_CUDA = Kernel(_fused_cuda_forward, _fused_cuda_backward)
FORMULA = Kernel(_formula_forward, _formula_backward)

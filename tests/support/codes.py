"""What gradients that travel as 8-bit codes have to be: a model, and sums worked out by the definition of the codes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shardrt import QuantizationPolicy
from shardrt.comm import World
from shardrt.fsdp.memory.buffers import FlatBuffer
from shardrt.kernels.reference import BLOCK, encode
from toys import OddMLP, batch, loss_of, shard_blocks

INT8 = QuantizationPolicy(reduce=torch.int8, min_numel=1)


def model_of() -> Any:
    torch.manual_seed(0)
    return OddMLP()


def rows_of(rank: int, step: int = 0) -> torch.Tensor:
    return batch(10 * step + rank).float()


def backward(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> None:
    (loss_of(model, x) * scale).backward()


Grads = dict[str, torch.Tensor]


def sharded_of(model: nn.Module, **options: Any) -> Any:
    return shard_blocks(copy.deepcopy(model), **{"quantization_policy": INT8, **options})


def single(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> Grads:
    """The gradients of one rank."""
    model.zero_grad()
    backward(model, x, scale)
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def coded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes make of `x`, in blocks from its first element on, and the scale of each element."""
    flat = x.flatten()
    codes, scales = torch.empty(len(flat), dtype=torch.int8), torch.empty(-(-len(flat) // BLOCK))
    encode(codes, scales, flat)
    each = scales.repeat_interleave(BLOCK)[: len(flat)]
    return (codes.float() * each).view(x.shape), each.view(x.shape)


def reduced(terms: Sequence[torch.Tensor], neighbours: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the terms, of which so many neighbours are added up before they are encoded; and half the sum of scales."""
    total, half = torch.zeros(terms[0].shape), torch.zeros(terms[0].shape)
    for first in range(0, len(terms), neighbours):
        inner = terms[first].clone()
        for term in terms[first + 1 : first + neighbours]:
            inner += term
        value, scale = coded(inner)
        total, half = total + value, half + scale / 2
    return total, half


def full_grads(model: Any) -> Grads:
    return {name: param.grad.full_tensor() for name, param in model.named_parameters() if param.grad is not None}


def compare(found: Grads, everyone: Sequence[Grads], neighbours: int = 1, factor: float | None = None) -> None:
    """Compare with every rank's gradients: bits where codes are sent, and the distance from the exact sum."""
    factor = factor or len(everyone)
    for name, grad in found.items():
        terms = [grads[name] * (1 / factor) for grads in everyone]
        exact = torch.stack(terms).double().sum(0)
        if grad.dim() < 2:
            torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-6)
            continue
        expected, half = reduced(terms, neighbours)
        assert torch.equal(grad, expected), name
        assert ((grad - exact).abs() <= half * 1.001 + 1e-7).all(), name


@contextmanager
def poisoned(value: float = math.nan) -> Iterator[None]:
    """Fresh memory of buffers has this value, as it may have any."""
    allocate = FlatBuffer.allocate

    def poison(buffer: FlatBuffer) -> None:
        fresh = buffer.available
        allocate(buffer)
        if fresh and len(buffer._storage) % 4 == 0:
            torch.empty(0, device=buffer._storage.device).set_(buffer._storage).fill_(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatBuffer, "allocate", poison)
        yield


def check_sums(world: World, given: int | None, found: int) -> None:
    """Compare gradients with what so many neighbours in full precision make of them. given: to the policy."""
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    policy = QuantizationPolicy(reduce=torch.int8, min_numel=1, full_precision_ranks=given)
    with poisoned():
        sharded = sharded_of(whole, quantization_policy=policy)
        backward(sharded, rows_of(world.rank))
    compare(full_grads(sharded), everyone, found)

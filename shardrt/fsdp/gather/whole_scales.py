"""Scales of whole parameters for torchao's weights, which ask `torch.distributed` for them; shardrt has no process group.

torchao's float8 and BitNet weights are gathered as codes that share one scale, that of the whole parameter. They take a scale
that was computed ahead (`_precomputed_scale`). Without it a float8 weight would take the scale of its own rows, and a BitNet
weight would fail. So a gather without it first reduces a number over the ranks, and calls the methods of a copy of the weight
that has the scale.
Invariant: `_precomputed_scale` of the weight itself is only ever one computed ahead: ranks agree by it on whether to reduce.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...comm import Communicator, ReduceOp, Stream


class ScaleKind(NamedTuple):
    """How the scale of a class of weights is computed."""

    measure: Callable[[Any], torch.Tensor]  # from a rank's rows to a float32 scalar
    op: ReduceOp  # reduces that scalar over the ranks
    scale: Callable[[torch.Tensor, Any, int], torch.Tensor]  # from the result, the rank's rows, and the whole's elements


def _largest(local: Any) -> torch.Tensor:
    values: torch.Tensor = local._tensor
    return values.abs().amax().float() if values.numel() else values.new_zeros((), dtype=torch.float32)


def _float8_scale(largest: torch.Tensor, local: Any, numel: int) -> torch.Tensor:
    scale: torch.Tensor = sys.modules["torchao.float8.float8_utils"].amax_to_scale(largest, local._dtype)
    return scale


def _magnitude(local: Any) -> torch.Tensor:
    values: torch.Tensor = local._data
    return values.float().abs().sum()


def _bitnet_scale(magnitude: torch.Tensor, local: Any, numel: int) -> torch.Tensor:
    return magnitude / numel


_KINDS = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": ScaleKind(_largest, ReduceOp.MAX, _float8_scale),
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": ScaleKind(
        _magnitude, ReduceOp.SUM, _bitnet_scale
    ),
}


def scale_kind(local: torch.Tensor) -> ScaleKind | None:
    """How the scale of this weight is computed; None for a tensor that has none."""
    return _KINDS.get(f"{type(local).__module__}.{type(local).__qualname__}")


class WholeScale:
    """The scale of one whole weight. Each gather computes it anew, unless one was computed ahead."""

    _kind: ScaleKind
    _numel: int
    _comm: Communicator
    _value: torch.Tensor  # (1,) float32: what is reduced

    def __init__(self, kind: ScaleKind, numel: int, comm: Communicator) -> None:
        self._kind, self._numel, self._comm = kind, numel, comm
        self._value = torch.zeros(1, dtype=torch.float32, device=comm.device)

    @staticmethod
    def lacking(shard: Any) -> bool:
        """Whether no scale was computed ahead for this shard."""
        return shard._precomputed_scale is None

    def launch(self, local: Any, stream: Stream) -> None:
        """Reduce what the scale is made of over the ranks. Cost: an all-reduce of one number."""
        stream.submit(partial(self._measure, local))
        self._comm.all_reduce(self._value, self._value, self._kind.op, stream=stream)

    def _measure(self, local: Any) -> None:
        self._value.copy_(self._kind.measure(local))

    def given_to(self, local: Any, shard: Any) -> Any:
        """Another tensor in the memory of `local`, which is `shard` or its copy, with the scale computed ahead or reduced."""
        scaled, ahead = local.detach(), shard._precomputed_scale
        scaled._precomputed_scale = self._kind.scale(self._value[0], local, self._numel) if ahead is None else ahead
        return scaled

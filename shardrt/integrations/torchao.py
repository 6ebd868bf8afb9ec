"""torchao's float8 and BitNet weights: their scales, computed ahead of the gathers.

Such weights (`torchao.float8.convert_to_float8_training` with `enable_fsdp_float8_all_gather`, torchao's `bitnet_training`)
are gathered as 8 or 2 bits by their own methods, and work as they are: each gather first reduces the scale of its weight. The
functions here reduce the scales of all weights at once instead, and have the names of torchao's, which know torch's
`DTensor` only and do nothing to a model that shardrt has sharded.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..comm import Communicator, ReduceOp, current_stream, world
from ..fsdp.gather.whole_scales import ScaleKind, scale_kind
from ..fsdp.schedule.param_group import ParamGroup
from ..tensor.dtensor.dtensor import DTensor
from ..tensor.dtensor.group_registry import group_of


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all float8 and BitNet weights of a sharded model. Collective.

    A scale is that of the whole weight, or of a tensor-parallel rank's part. Weights that `fully_shard` has not taken stay.
    Call it after each optimizer step: from the first call on, weights keep their scales until the next one.
    Cost: one all-reduce of a number for each weight; without it each gather has one.
    """
    calls: dict[tuple[Communicator, ReduceOp], list[_Weight]] = {}
    for param in module.parameters():
        kind = scale_kind(param._local_tensor) if isinstance(param, DTensor) else None
        group = cast(ParamGroup | None, group_of(param))  # the weight's own
        if kind is not None and group is not None:
            weight = _Weight(cast(DTensor, param)._local_tensor, kind, group.params[0].shape.numel())
            calls.setdefault((group.gather_comm, kind.op), []).append(weight)
    for (comm, op), weights in calls.items():
        _compute(comm, op, weights)


precompute_bitnet_scale_for_fsdp = precompute_float8_dynamic_scale_for_fsdp


class _Weight(NamedTuple):
    local: Any
    kind: ScaleKind
    numel: int  # that the scale is about


def _compute(comm: Communicator, op: ReduceOp, weights: list[_Weight]) -> None:
    values = torch.stack([weight.kind.measure(weight.local) for weight in weights]).to(comm.device)
    caller, stream = current_stream(comm.device), world().stream_for("gather")
    stream.wait(caller.record())
    comm.all_reduce(values, values, op, stream=stream).wait(caller)
    for value, weight in zip(values, weights, strict=True):
        weight.local._precomputed_scale = weight.kind.scale(value, weight.local, weight.numel)

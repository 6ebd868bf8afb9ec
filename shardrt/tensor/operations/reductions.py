"""Reductions over all elements of sharded tensors: first over the local shard, then over the ranks of the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...comm import Communicator, DeviceMesh, ReduceOp, current_stream
from ..dtensor.dtensor import DTensor
from ..dtensor.operands import local_shards, raise_undefined, specs_of
from ..placement.redistribute import plain
from .activations import run_gathered

aten = torch.ops.aten

TO_SCALAR = {
    aten.sum.default: ReduceOp.SUM,
    aten.mean.default: ReduceOp.SUM,
    aten.max.default: ReduceOp.MAX,
    aten.min.default: ReduceOp.MIN,
    aten.any.default: ReduceOp.MAX,
    aten.all.default: ReduceOp.MIN,
    aten.equal.default: ReduceOp.MIN,
}


def to_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of `TO_SCALAR`. Cost: an all-reduce of one element over the axes that shard the tensor."""
    spec, op = specs_of(args)[0], TO_SCALAR[func]
    if spec.partial:
        raise_undefined(func, args, kwargs)
    if func is aten.equal.default and args[0].shape != args[1].shape:
        return False
    locals_ = [local_shards(arg, [spec], func) for arg in args]
    local = locals_[0]
    if func is aten.equal.default:
        return bool(combine(torch.tensor(func(*locals_), device=spec.mesh.device), op, spec.shard_mesh))
    if func is aten.mean.default:
        dtype = kwargs.get("dtype") or local.dtype
        wide = torch.promote_types(dtype, torch.float32)  # a float16 sum may overflow
        return (combine(local.sum(dtype=wide), op, spec.shard_mesh) / spec.shape.numel()).to(dtype)
    if local.numel() == 0 and op is not ReduceOp.SUM and spec.shape.numel():
        return combine(_neutral(func, op, local), op, spec.shard_mesh)
    return combine(func(local, **kwargs), op, spec.shard_mesh)


def _neutral(func: Any, op: ReduceOp, local: torch.Tensor) -> torch.Tensor:
    """The neutral element of a maximum or minimum: the term of a rank without elements."""
    if local.dtype == torch.bool or func in (aten.any.default, aten.all.default):
        return torch.full((), op is ReduceOp.MIN, dtype=torch.bool, device=local.device)
    limits = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
    lowest = float("-inf") if local.dtype.is_floating_point else limits.min
    highest = float("inf") if local.dtype.is_floating_point else limits.max
    return torch.full((), lowest if op is ReduceOp.MAX else highest, dtype=local.dtype, device=local.device)


def vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`linalg.vector_norm` over all elements; over some dims, or with other options, on the full tensor."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    other = len(args) > 3 or kwargs.get("keepdim") or kwargs.get("dtype") is not None
    if other or (dim is not None and len(dim) != args[0].dim()):
        return run_gathered(func, args, kwargs)
    return _norms(func, [args[0]], order)[0]


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_foreach_norm` of a list that may mix meshes, sharded and plain tensors."""
    return _norms(func, args[0], args[1] if len(args) > 1 else 2, args[2] if len(args) > 2 else None)


def _norms(func: Any, tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norm of each full tensor, combined in float64. Cost: one all-reduce for all tensors that are sharded on one mesh."""
    if order <= 0:
        raise NotImplementedError(
            f"the {order}-norm of sharded tensors is not defined: expected an order > 0; use full_tensor()"
        )
    indices_by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor.spec.partial:
            raise_undefined(func, (tensor,), {})
        indices_by_mesh.setdefault(tensor.spec.shard_mesh if isinstance(tensor, DTensor) else None, []).append(index)
    shards = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    norms = [
        torch.linalg.vector_norm(shard.to(torch.promote_types(shard.dtype, torch.float64)), order)
        if shard.numel()
        else shard.new_zeros((), dtype=torch.float64)
        for shard in shards
    ]
    for mesh, indices in indices_by_mesh.items():
        local = torch.stack([norms[index] for index in indices])
        if order == float("inf"):
            combined = combine(local, ReduceOp.MAX, mesh)
        else:
            combined = combine(local**order, ReduceOp.SUM, mesh) ** (1.0 / order)
        for index, norm in zip(indices, combined, strict=True):
            norms[index] = norm.to((dtype or tensors[index].dtype).to_real())
    return norms


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`GradScaler`'s unscaling: scale gradients in place, and set `found_inf` to 1 if one is not finite on any rank.

    Cost: for M meshes of the gradients, M * M all-reduces of one element, whether or not this rank has elements.
    """
    tensors, found_inf, inv_scale = args
    if any(isinstance(tensor, DTensor) and tensor.spec.partial for tensor in tensors):
        raise_undefined(func, args, kwargs)
    func([tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors], found_inf, inv_scale)
    increment_version(tensors)
    for mesh in rounds_over(tensors):  # replicas must agree too
        found_inf.copy_(combine(found_inf, ReduceOp.MAX, mesh))


def rounds_over(tensors: Iterable[torch.Tensor]) -> list[DeviceMesh]:
    """The M meshes of the tensors, replicating axes included, M times.

    What is combined over one after the other reaches, from any mesh, all that share ranks with it, directly or through others.
    """
    meshes = sorted({tensor.spec.mesh: None for tensor in tensors if isinstance(tensor, DTensor)}, key=lambda mesh: mesh.size)
    return meshes * len(meshes)


def combine(value: torch.Tensor, op: ReduceOp, mesh: DeviceMesh | None) -> torch.Tensor:
    """All-reduce a small tensor over the mesh; the result is on the mesh's device. mesh: None returns `value` unchanged."""
    return value if mesh is None else combine_on(value, op, mesh.communicator("tensor"))


def combine_on(value: torch.Tensor, op: ReduceOp, comm: Communicator) -> torch.Tensor:
    """All-reduce a small tensor over a communicator; the result is on its device."""
    sent = plain(value).to(comm.device, torch.uint8 if value.dtype == torch.bool else value.dtype).contiguous()
    out = torch.empty_like(sent)
    stream = current_stream(comm.device)
    comm.all_reduce(out, sent, op, stream=stream).wait(stream)
    return out.to(value.dtype)

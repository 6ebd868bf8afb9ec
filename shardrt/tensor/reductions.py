"""Reductions of whole sharded tensors: of this rank's part, then over the ranks that hold the others."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm import DeviceMesh, ReduceOp, current_stream
from .dtensor import DTensor
from .operands import gathered, localized, refuse, specs_of
from .redistribute import plain

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
    spec, op = specs_of(args)[0], TO_SCALAR[func]
    if spec.partial:
        refuse(func, args, kwargs)
    if func is aten.equal.default and args[0].shape != args[1].shape:
        return False
    locals_ = [localized(arg, [spec], func) for arg in args]
    local = locals_[0]
    if func is aten.equal.default:
        return bool(combine(torch.tensor(func(*locals_), device=spec.mesh.device), op, spec.shard_mesh))
    if func is aten.mean.default:
        dtype = kwargs.get("dtype") or local.dtype
        wide = torch.promote_types(dtype, torch.float32)  # a sum may be out of the range of float16
        return (combine(local.sum(dtype=wide), op, spec.shard_mesh) / spec.shape.numel()).to(dtype)
    if local.numel() == 0 and op is not ReduceOp.SUM and spec.shape.numel():
        return combine(_neutral(func, op, local), op, spec.shard_mesh)
    return combine(func(local, **kwargs), op, spec.shard_mesh)


def _neutral(func: Any, op: ReduceOp, local: torch.Tensor) -> torch.Tensor:
    """What a rank without elements contributes to a maximum or minimum."""
    if local.dtype == torch.bool or func in (aten.any.default, aten.all.default):
        return torch.full((), op is ReduceOp.MIN, dtype=torch.bool, device=local.device)
    limits = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
    lowest = float("-inf") if local.dtype.is_floating_point else limits.min
    highest = float("inf") if local.dtype.is_floating_point else limits.max
    return torch.full((), lowest if op is ReduceOp.MAX else highest, dtype=local.dtype, device=local.device)


def vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    other = len(args) > 3 or kwargs.get("keepdim") or kwargs.get("dtype") is not None
    if other or (dim is not None and len(dim) != args[0].dim()):
        return gathered(func, args, kwargs)
    return _norms(func, [args[0]], order)[0]


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _norms(func, args[0], args[1] if len(args) > 1 else 2, args[2] if len(args) > 2 else None)


def _norms(func: Any, tensors: list[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norm of each whole tensor, combined in float64. Cost: one all-reduce for all that are spread over the same ranks."""
    if order <= 0:
        raise NotImplementedError(f"the {order}-norm of sharded tensors is not defined here: use full_tensor()")
    spread: dict[DeviceMesh | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor.spec.partial:
            refuse(func, (tensor,), {})
        spread.setdefault(tensor.spec.shard_mesh if isinstance(tensor, DTensor) else None, []).append(index)
    parts = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    norms = [torch.linalg.vector_norm(part.double(), order) if part.numel() else part.new_zeros(()).double() for part in parts]
    for mesh, indices in spread.items():
        local = torch.stack([norms[index] for index in indices])
        if order == float("inf"):
            whole = combine(local, ReduceOp.MAX, mesh)
        else:
            whole = combine(local**order, ReduceOp.SUM, mesh) ** (1.0 / order)
        for index, norm in zip(indices, whole, strict=True):
            norms[index] = norm.to(dtype or tensors[index].dtype)
    return norms


def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What `GradScaler` does to gradients: scale them, and note in `found_inf` whether one is infinite on any rank.

    Cost: one all-reduce of a number for each mesh that the gradients lie on, whatever this rank holds of them.
    """
    tensors, found_inf, inv_scale = args
    if any(isinstance(tensor, DTensor) and tensor.spec.partial for tensor in tensors):
        refuse(func, args, kwargs)
    func([tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors], found_inf, inv_scale)
    increment_version(tensors)
    # Replicas agree as well. Smaller meshes first, and as often as there are meshes: so it comes from any mesh to all that
    # share ranks with it.
    meshes = sorted({tensor.spec.mesh: None for tensor in tensors if isinstance(tensor, DTensor)}, key=lambda mesh: mesh.size)
    for mesh in meshes * len(meshes):
        found_inf.copy_(combine(found_inf, ReduceOp.MAX, mesh))


def combine(value: torch.Tensor, op: ReduceOp, mesh: DeviceMesh | None) -> torch.Tensor:
    """All-reduce a small local result over the mesh, on whose device it comes out; as it is without one."""
    if mesh is None:
        return value
    sent = plain(value).to(mesh.device, torch.uint8 if value.dtype == torch.bool else value.dtype).contiguous()
    out = torch.empty_like(sent)
    stream = current_stream(mesh.device)
    mesh.communicator("tensor").all_reduce(out, sent, op, stream=stream).wait(stream)
    return out.to(value.dtype)

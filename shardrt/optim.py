"""Gradient clipping by the norm of all gradients of the model, and optimizer state on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from .comm import DeviceMesh, ReduceOp
from .kernels import rescale, total_norm
from .tensor.dtensor import DTensor
from .tensor.reductions import combine


def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    parameters: sharded and plain parameters, of any shapes and floating dtypes. A plain or replicated one must be the same on
        every rank, and counts once. Parameters without a gradient are skipped.
    max_norm: the largest norm allowed.   norm_type: p of the p-norm; `inf` for the largest magnitude.
    Returns: the norm before clipping, a 0-dim float32 tensor (float64 if a gradient is), the same on all ranks, on the mesh's
        device.
    Collective. Cost: an all-reduce of one float64 for each mesh (one more with tensor parallelism), and one pass to scale; no
    host sync.
    Raises ValueError for a norm_type <= 0, and for a `Partial` gradient.
    """
    if norm_type <= 0:
        raise ValueError(f"clip_grad_norm_(norm_type={norm_type}): expected a positive number or inf")
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    listed = [getattr(param, "sharded", param) for param in given]  # a gathered parameter refers to its sharded one
    grads = [param.grad for param in listed if param.grad is not None]
    # A rank without gradients takes part too.
    meshes: dict[DeviceMesh, list[torch.Tensor]] = {
        p.spec.shard_mesh: [] for p in listed if isinstance(p, DTensor) and p.spec.shard_mesh
    }
    plain: list[torch.Tensor] = []
    for grad in grads:
        if isinstance(grad, DTensor) and grad.spec.partial:
            raise ValueError(f"clip_grad_norm_: a gradient of {grad.spec} is not reduced yet; redistribute() it first")
        if isinstance(grad, DTensor) and grad.spec.shard_mesh:
            meshes[grad.spec.shard_mesh].append(grad.to_local())
        else:
            plain.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    norms = [_norm_over_mesh(mesh, local, norm_type) for mesh, local in meshes.items()]
    if plain or not norms:
        norms.append(total_norm(plain, norm_type, plain[0].device if plain else torch.device("cpu")))
    norm = _same_bits(torch.linalg.vector_norm(torch.stack(norms), norm_type), listed)
    # As in torch: no branch on the value, which would be a host sync; 1e-6 prevents a division by zero.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in (*meshes.values(), plain):
        if local:
            rescale(local, scale.to(local[0].device))
    return norm if any(grad.dtype == torch.float64 for grad in grads) else norm.float()


def _same_bits(norm: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
    """The norm, equal on tensor-parallel ranks: where their layouts differ, so does the order in which they add up.

    Hazard: without it, what is replicated over them would drift apart by a rounding error in each step.
    """
    for mesh in dict.fromkeys(p.spec.mesh for p in params if isinstance(p, DTensor) and p.gathered_spec is not None):
        norm = combine(norm, ReduceOp.MAX, mesh)
    return norm


def _norm_over_mesh(mesh: DeviceMesh, local: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all shards on the mesh."""
    mine = total_norm(local, norm_type, mesh.device)
    if norm_type == float("inf"):
        return combine(mine, ReduceOp.MAX, mesh)
    return combine(mine**norm_type, ReduceOp.SUM, mesh) ** (1.0 / norm_type)


def offload_state_to_disk(optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> RemovableHandle:
    """Keep the optimizer's state that is on the host in memory-mapped files, which the operating system can write to disk.

    optimizer: its state is moved after the step that creates it: tensors on the CPU of at least 4096 bytes, local shards of
        `DTensor`s included.
    folder: an existing directory on a disk. The files have no names: their space is freed with the state, and none remain when
        the process ends, even by a signal.
    Returns: a handle; after its `remove()`, new state stays in memory.
    Cost: none while memory suffices; beyond that, each step reads the state from disk and writes it back.
    Raises OSError, from the step, when the disk is full.
    """

    def move(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    value._local_tensor = _memory_mapped(value._local_tensor, folder)
                elif isinstance(value, torch.Tensor):
                    state[key] = _memory_mapped(value, folder)

    return optimizer.register_step_post_hook(move)


def _memory_mapped(tensor: torch.Tensor, folder: str | os.PathLike[str]) -> torch.Tensor:
    """A copy of the tensor in a file; `tensor` itself if it is in one, on a device, or smaller than a page."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().filename is not None or tensor.nbytes < 4096:
        return tensor
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # Hazard: without it a full disk ends the process by SIGBUS
        flat = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride()).copy_(tensor)

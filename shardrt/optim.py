"""What optimizers need beyond the shards: clipping by the norm of the whole model's gradient, and state on disk."""

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
    """Scale the gradients of `parameters` in place so that their common norm is at most `max_norm`, as torch's own does.

    parameters: sharded and plain ones; a plain or replicated one is taken to be the same on every rank and counts once.
    norm_type: p of the p-norm; `inf` for the largest magnitude.
    Returns: the norm before clipping, a float32 scalar (float64 if a gradient is), the same on all ranks, on the mesh's device.
    Collective. Cost: one all-reduce of one float64 for each mesh, and one pass to scale.
    Raises ValueError for a norm_type <= 0, and for a `Partial` gradient.
    """
    if norm_type <= 0:
        raise ValueError(f"clip_grad_norm_(norm_type={norm_type}): expected a positive number or inf")
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    listed = [getattr(param, "sharded", param) for param in given]  # of those that are gathered at the moment
    grads = [param.grad for param in listed if param.grad is not None]
    # A rank without gradients takes part all the same.
    meshes: dict[DeviceMesh, list[torch.Tensor]] = {
        p.spec.shard_mesh: [] for p in listed if isinstance(p, DTensor) and p.spec.shard_mesh
    }
    plain: list[torch.Tensor] = []
    for grad in grads:
        if isinstance(grad, DTensor) and grad.spec.partial:
            raise ValueError(f"clip_grad_norm_: a gradient lies as {grad.spec}, not reduced yet; redistribute() it first")
        if isinstance(grad, DTensor) and grad.spec.shard_mesh:
            meshes[grad.spec.shard_mesh].append(grad.to_local())
        else:
            plain.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    norms = [_mesh_norm(mesh, local, norm_type) for mesh, local in meshes.items()]
    if plain or not norms:
        norms.append(total_norm(plain, norm_type, plain[0].device if plain else torch.device("cpu")))
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    # As torch: no branch on the value, which would be a host sync; 1e-6 keeps a norm of zero from dividing.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in (*meshes.values(), plain):
        if local:
            rescale(local, scale.to(local[0].device))
    return norm if any(grad.dtype == torch.float64 for grad in grads) else norm.float()


def _mesh_norm(mesh: DeviceMesh, local: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all parts on the mesh."""
    mine = total_norm(local, norm_type, mesh.device)
    if norm_type == float("inf"):
        return combine(mine, ReduceOp.MAX, mesh)
    return combine(mine**norm_type, ReduceOp.SUM, mesh) ** (1.0 / norm_type)


def offload_state_to_disk(optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> RemovableHandle:
    """Keep the optimizer's state on the host in memory-mapped files of `folder`, so that the kernel may write it out.

    State moves there after the step that makes it. The files have no names: they take room in the file system until the
    state is dropped, and nothing is left when the process ends, however it does.
    Cost: nothing while memory suffices; then every step reads and writes the state from and to disk.
    Returns a handle whose `remove()` leaves state that is still to be made in memory. Raises OSError when the disk is full.
    """

    def move(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    value._local_tensor = _mapped(value._local_tensor, folder)
                elif isinstance(value, torch.Tensor):
                    state[key] = _mapped(value, folder)

    return optimizer.register_step_post_hook(move)


def _mapped(tensor: torch.Tensor, folder: str | os.PathLike[str]) -> torch.Tensor:
    """The same values in a file, unless they are in one, on a device, or not worth a page."""
    if tensor.device.type != "cpu" or tensor.untyped_storage().filename is not None or tensor.nbytes < 4096:
        return tensor
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # Hazard: a page that the disk has no room for kills the process
        flat = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride()).copy_(tensor)

"""Gradient clipping by the norm of all gradients of the model, and optimizer state on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from .comm import Communicator, DeviceMesh, ReduceOp, current_stream
from .kernels import rescale, total_norm
from .tensor.dtensor.dtensor import DTensor
from .tensor.dtensor.group_registry import stages_of
from .tensor.operations.reductions import combine, combine_on, rounds_over
from .tensor.optimizers.optimizer_state import states_of_parameters

_NAMED = 4  # an error names so many parameters of a rank, and so many ranks


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    parameters: sharded and plain parameters, of any shapes and floating dtypes. A plain or replicated one must be the same on
        every rank, and counts once. Parameters without a gradient are skipped.
    max_norm: the largest norm allowed.   norm_type: p of the p-norm; `inf` for the largest magnitude.
    error_if_nonfinite: raise RuntimeError if the norm is infinite or NaN, and leave the gradients as they are: on all ranks of
        the parameters' meshes, also if those of one replica alone are not finite. It names the first such parameters and the
        ranks that hold those parts of the gradients, which are averages over the ranks already. Plain parameters have no mesh:
        without any sharded one, a rank may raise alone.
    foreach: makes no difference: gradients are scaled in lists.
    pp_mesh: the ranks that have the parameters of other pipeline stages, such as `mesh["pp"]`. The norm is then of the
        gradients of all stages, and error_if_nonfinite raises on the ranks of all, whichever stage it is. A parameter that is
        on several stages counts on each. None: the stages of `integrations.pipelining.PipelineStage`, if a parameter is in one:
        then all stages call this.
    Returns: the norm before clipping, a 0-dim float32 tensor (float64 if a gradient is, or complex128), the same on all ranks,
        on the mesh's device. Complex numbers count by their magnitudes.
    Collective. Cost: an all-reduce of one float64 for each mesh (one more with tensor parallelism), an all-gather of one over
    the stages, and one pass to scale; no host sync. error_if_nonfinite: for M meshes, M * M all-reduces of one byte, one more
    over the stages, and a host sync.
    Raises ValueError for a norm_type <= 0, and for a `Partial` gradient.
    """
    norm_type = float(norm_type)  # also "inf"
    if norm_type <= 0:
        raise ValueError(f"clip_grad_norm_(norm_type={norm_type}): expected a positive number or inf")
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    listed = [getattr(param, "sharded", param) for param in given]  # a gathered parameter refers to its sharded one
    plain, meshes = _local_grads(listed)
    norms = [total_norm(plain, norm_type, plain[0].device if plain else torch.device("cpu"))] if plain or not meshes else []
    local_norms = [total_norm(local, norm_type, mesh.device) for mesh, local in meshes.items()]
    norms += [_norm_over_mesh(mesh, mine, norm_type) for mesh, mine in zip(meshes, local_norms, strict=True)]
    norm = _same_bits(torch.linalg.vector_norm(torch.stack(norms), norm_type), listed)
    stages = stages_of(listed) if pp_mesh is None else pp_mesh.communicator("tensor")
    if stages is not None:
        norm = _norm_over_stages(stages, norm, norm_type)
    if error_if_nonfinite:
        _raise_if_nonfinite([*norms, *local_norms, norm], listed, stages)  # a maximum may leave NaNs out
    # As in torch: no branch on the value, which would be a host sync; 1e-6 prevents a division by zero.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for local in (*meshes.values(), plain):
        if local:
            rescale(local, scale.to(local[0].device))
    is_double = any(p.grad is not None and p.grad.dtype in (torch.float64, torch.complex128) for p in listed)
    return norm if is_double else norm.float()


def _local_grads(params: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[DeviceMesh, list[torch.Tensor]]]:
    """Gradients that each rank has whole, and this rank's shards of others by their meshes, of which the largest comes last."""
    # A rank without gradients takes part too.
    sharding = {p.spec.shard_mesh: None for p in params if isinstance(p, DTensor) and p.spec.shard_mesh}
    meshes: dict[DeviceMesh, list[torch.Tensor]] = {mesh: [] for mesh in sorted(sharding, key=lambda mesh: mesh.size)}
    plain: list[torch.Tensor] = []
    for grad in (param.grad for param in params if param.grad is not None):
        if isinstance(grad, DTensor) and grad.spec.partial:
            raise ValueError(f"clip_grad_norm_: a gradient of {grad.spec} is not reduced yet; redistribute() it first")
        if isinstance(grad, DTensor) and grad.spec.shard_mesh:
            meshes[grad.spec.shard_mesh].append(grad.to_local())
        else:
            plain.append(grad.to_local() if isinstance(grad, DTensor) else grad)
    return plain, meshes


def _same_bits(norm: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
    """The norm, equal on tensor-parallel ranks: where their layouts differ, so does the order in which they add up.

    Hazard: without it, what is replicated over them would drift apart by a rounding error in each step.
    """
    for mesh in dict.fromkeys(p.spec.mesh for p in params if isinstance(p, DTensor) and p.gathered_spec is not None):
        norm = combine(norm, ReduceOp.MAX, mesh)
    return norm


def _norm_over_mesh(mesh: DeviceMesh, mine: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of all shards on the mesh.   mine: the norm of this rank's."""
    if norm_type == float("inf"):
        return combine(mine, ReduceOp.MAX, mesh)
    return combine(mine**norm_type, ReduceOp.SUM, mesh) ** (1.0 / norm_type)


def _norm_over_stages(stages: Communicator, mine: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of all pipeline stages' gradients.   mine: the norm of this one's, the same on all ranks of the stage.

    They are gathered, so that every rank adds up in one order, and all get the same bits: each is in an all-reduce of its own.
    """
    sent = mine.to(stages.device).reshape(1)
    everyone = sent.new_empty(stages.size)
    stream = current_stream(stages.device)
    stages.all_gather(everyone, sent, stream=stream).wait(stream)
    return torch.linalg.vector_norm(everyone, norm_type)


def _raise_if_nonfinite(norms: list[torch.Tensor], params: list[torch.Tensor], stages: Communicator | None) -> None:
    """Raise RuntimeError on all ranks of the parameters' meshes if one of the norms is not finite on any of them. Collective.

    With `stages`, on all ranks of all stages. Hazard: a rank that raises alone leaves others waiting.
    """
    comms = [mesh.communicator("tensor") for mesh in rounds_over(params)]
    comms += [] if stages is None else [stages]  # last, when the ranks of a stage have agreed
    is_wrong = ~torch.stack([norm.to(norms[-1].device) for norm in norms]).isfinite().all()
    for comm in comms:
        is_wrong = combine_on(is_wrong, ReduceOp.MAX, comm)
    if is_wrong:
        raise RuntimeError(_describe_nonfinite(params, comms))


def _describe_nonfinite(params: list[torch.Tensor], comms: list[Communicator]) -> str:
    """The error's text. Collective over the communicators."""
    rank = comms[0].ranks[comms[0].rank] if comms else -1
    found = {rank: names} if (names := _nonfinite_names(params)) else {}
    for comm in comms:
        for others in comm.exchange(found):
            found |= others
        # Cost: of the ranks that the text does not name, a few bytes each are sent on.
        found = {key: found[key] if place < _NAMED else [] for place, key in enumerate(sorted(found))}
    if not found:
        return "clip_grad_norm_: the norm of the gradients overflows"
    each = [f"{', '.join(names)} on {f'rank {rank}' if comms else 'this rank'}" for rank, names in found.items()]
    more = f", and others on {len(each) - _NAMED} more ranks" if len(each) > _NAMED else ""
    return f"clip_grad_norm_: gradients that are infinite or NaN: {'; '.join(each[:_NAMED])}{more}; none has been scaled"


def _nonfinite_names(params: list[torch.Tensor]) -> list[str]:
    """The first parameters of which this rank has elements of the gradient that are not finite."""
    found = []
    for index, param in enumerate(params):
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        if grad is not None and not grad.isfinite().all():
            name = getattr(param, "full_name", None)
            found.append(f"parameter {index} of shape {tuple(param.shape)}" if name is None else f"'{name}'")
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return found[:_NAMED] + more


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
        for _, state in states_of_parameters(optimizer):
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

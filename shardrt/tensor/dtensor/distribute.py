"""`distribute_tensor`: one rank's values of a whole tensor, as a `DTensor` on all ranks of a mesh.

Along each axis in turn, the outermost first, the rank with the coordinate `src_data_rank` sends what it has:

    mesh of 2 x 2, (Shard(0), Shard(1)), from rank 0      0 -> 2            halves of rows
                                                          0 -> 1, 2 -> 3    halves of their columns

What others have had until then is overwritten: in the end all values are those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ...comm import Communicator, DeviceMesh, current_mesh, current_stream
from ..placement.digest import digest
from ..placement.placement import Partial, Placement, Replicate, ResolvedShard, Sharded, Spec, flattened, unflattened
from ..placement.redistribute import plain
from ..placement.strides import with_stride_of
from .dtensor import DTensor
from .inference_mode import outside_inference_mode


@outside_inference_mode()
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """A new leaf tensor on the mesh with one rank's values of `tensor`. Collective; not differentiable.

    tensor: the full tensor, a leaf: of the same shape and dtype on every rank; any shape, dtype and device. A `DTensor` that
        has these placements already is returned as it is.
    device_mesh: None: that of the `with mesh:` around the call.
    placements: one for each mesh axis; None: `Replicate` on each. Through a `Partial`, each rank holds the term that
        `Partial.local_shard` gives it.
    src_data_rank: the coordinate, on every axis of the mesh, of the rank whose values are taken. None: each rank cuts its own
        tensor, which must hold the same bits on every rank, and does; no values are sent.
    Cost: a comparison of 63 bits; from a source, a scatter or a broadcast along each axis; with None, a digest of the whole
    tensor (`placement/digest.py`). A copy of the local shard, on the mesh's device; on the source, one of the whole tensor.
    Without communication: on the meta device, which gives a meta tensor, and on a mesh of one rank. A subclass that keeps its
    values in its own way is always cut by each rank, as with None.
    Raises, on every rank alike: ValueError for placements that do not fit the mesh or the shape, tensors or arguments that
    differ between ranks, naming them, a source outside of the mesh, and a `DTensor` with other placements; TypeError for what
    is not a `Placement`; RuntimeError for a tensor that is not a leaf, since the way to it would get no gradient, and without
    a mesh.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    given = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    if isinstance(tensor, DTensor):
        return _unchanged(tensor, Spec.of(mesh, given, tensor.shape))
    own = src_data_rank is None or type(tensor) not in (torch.Tensor, nn.Parameter)
    spec = _agreed(tensor, mesh, given, src_data_rank, own)
    full = tensor.detach()
    if own or full.is_meta or mesh.size == 1:
        device = full.device if full.is_meta else mesh.device
        local = spec.local_shard(full).to(device, copy=True, memory_format=torch.contiguous_format)
    else:
        assert src_data_rank is not None
        local = received(full, spec, src_data_rank)
    made = DTensor(local, with_stride_of(spec, full))
    made.requires_grad = tensor.requires_grad
    return made


def _unchanged(tensor: DTensor, spec: Spec) -> DTensor:
    if tensor.spec != spec:
        raise ValueError(
            f"distribute_tensor of a DTensor of {tensor.spec} to {spec}: expected the placements that it has; use "
            ".redistribute(placements) for others on its mesh, and .full_tensor() for another mesh"
        )
    return tensor


class _GivenTensor(NamedTuple):
    """What the ranks pass, as far as it must be alike."""

    error: str | None  # the message of what this rank raises
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[str, ...]
    src_data_rank: int | None
    requires_grad: bool
    digest: int | None  # that of the values, if each rank takes its own


def _agreed(tensor: torch.Tensor, mesh: DeviceMesh, given: tuple[Placement, ...], source: int | None, own: bool) -> Spec:
    """The spec, once all ranks have passed the same. Collective, but for a meta tensor or one rank."""
    error: Exception | None = None
    bits = None
    try:
        spec = _spec_of(tensor, mesh, given, source)
        if own and not tensor.is_meta and mesh.size > 1:
            bits = int(digest(plain(tensor.detach()).reshape(-1)))
    except (ValueError, TypeError, RuntimeError) as caught:
        error = caught
    if not tensor.is_meta and mesh.size > 1:
        kinds = tuple(_kind(placement) for placement in given)
        text = None if error is None else f"{type(error).__name__}: {error}"
        shape, wants = tuple(tensor.shape), tensor.requires_grad
        everyone = mesh.differing(_GivenTensor(text, shape, tensor.dtype, kinds, source, wants, bits))
        if everyone is not None and error is None:
            raise ValueError(_difference(mesh, everyone))
    if error is not None:
        raise error
    return spec


def _kind(placement: Placement) -> str:
    """What ranks must have alike of a placement: explicit counts, of rows or elements, may differ between columns."""
    if hasattr(placement, "counts"):
        return f"explicit counts along dim {getattr(placement, 'dim', None)}"
    return repr(placement)


def _spec_of(tensor: torch.Tensor, mesh: DeviceMesh, given: tuple[Placement, ...], source: int | None) -> Spec:
    if not tensor.is_leaf:
        raise RuntimeError(
            f"distribute_tensor of a tensor of shape {tuple(tensor.shape)} that is not a leaf, on rank {mesh.rank}: expected "
            "one, such as tensor.detach(); DTensor.from_local is differentiable"
        )
    spec = Spec.of(mesh, given, tensor.shape)
    if source is not None and not 0 <= source < min(mesh.shape):
        raise ValueError(
            f"distribute_tensor(src_data_rank={source}) on {mesh}: expected a coordinate that each of its axes has, 0 to "
            f"{min(mesh.shape) - 1}; or None, and the same tensor on every rank"
        )
    return spec


def _difference(mesh: DeviceMesh, everyone: Sequence[_GivenTensor]) -> str:
    """What the ranks have passed differently, field by field, in words."""
    first = everyone[0]
    for name in _GivenTensor._fields:
        values = [getattr(given, name) for given in everyone]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if not others:
            continue
        if name == "error":
            rank = next(rank for rank, value in enumerate(values) if value is not None)
            return f"distribute_tensor on {mesh}: rank {rank} raised {values[rank]}"
        if name == "digest":
            return (
                f"distribute_tensor of a tensor of shape {first.shape} on {mesh}: expected the same values on every rank; on "
                f"ranks {others} they differ from rank 0's. For parts there is DTensor.from_local; src_data_rank=0 takes "
                "rank 0's values of a plain tensor"
            )
        return (
            f"distribute_tensor on {mesh}: expected the same {name} on every rank; found {values[0]} on rank 0, and "
            f"{values[others[0]]} on rank {others[0]} (ranks that differ from rank 0: {others})"
        )
    raise AssertionError("the ranks agree")


def received(full: torch.Tensor, spec: Spec, source: int, role: str = "tensor") -> torch.Tensor:
    """This rank's shard of the source's tensor, a new contiguous tensor on the mesh's device. Collective.

    role: of the communicators that it goes through.
    """
    mesh, local, shape = spec.mesh, full, spec.shape
    for axis, placement in enumerate(spec.placements):
        resolved = placement.resolve(shape, mesh.shape[axis])
        mine = resolved.shard_shape(shape, mesh.coordinates[axis])
        if mesh.shape[axis] == 1 or not shape.numel():
            local = resolved.local_shard(local, mesh.coordinates[axis])
        else:
            comm = mesh[mesh.axis_names[axis]].communicator(role)
            local = _sent_along(comm, local, shape, resolved, source)
        shape = mine
    return local.to(mesh.device, copy=local.data_ptr() == full.data_ptr(), memory_format=torch.contiguous_format).contiguous()


def _sent_along(comm: Communicator, local: torch.Tensor, shape: torch.Size, placement: Placement, source: int) -> torch.Tensor:
    """This rank's part of what the source has, along one axis. local: read on the source only, of `shape`."""
    is_source, stream = comm.rank == source, current_stream(comm.device)
    if not isinstance(placement, Sharded):
        out = torch.empty(shape, dtype=local.dtype, device=comm.device)
        if is_source:
            out.copy_(local)
        comm.broadcast(out, out, source, stream=stream).wait(stream)
        return placement.local_shard(out, comm.rank) if isinstance(placement, Partial) else out
    return _scattered(comm, local if is_source else None, shape, placement, source, local.dtype)  # type: ignore[arg-type]


def _scattered(
    comm: Communicator, whole: torch.Tensor | None, shape: torch.Size, shard: ResolvedShard, source: int, dtype: torch.dtype
) -> torch.Tensor:
    numels, stream = shard.shard_numels(shape), current_stream(comm.device)
    rows: Any = None
    if whole is not None:
        rows = torch.zeros((comm.size, numels.largest), dtype=dtype, device=comm.device)
        for row, piece in zip(rows, flattened(whole, shard.dim).split(tuple(numels)), strict=True):
            row[: piece.numel()] = piece
    out = torch.empty(numels.largest, dtype=dtype, device=comm.device)
    comm.scatter(out, rows, source, stream=stream).wait(stream)
    mine = numels[comm.rank]
    out = out if mine == len(out) else out[:mine].clone()  # a parameter shall not keep the padding alive
    return unflattened(out, shard.shard_shape(shape, comm.rank), shard.dim)

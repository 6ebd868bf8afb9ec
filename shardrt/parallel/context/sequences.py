"""Cutting tensors along their sequence, gathering them again, and the number of tokens that a loss is a mean over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...comm import DeviceMesh, ReduceOp, current_stream
from .agreement import agreed, check_mesh, ring_for
from .cut import SequenceCut
from .transport import Ring


def context_parallel_shard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], *, balanced: bool = True
) -> list[torch.Tensor]:
    """This rank's tokens of each tensor: new tensors. Collective: what is given is compared.

    mesh: 1-D, such as `mesh["cp"]`.   buffers: alike on every rank: tokens, labels, position ids, tables of RoPE.
    seq_dims: the dim of each along which the sequence runs; all have one size there, which need not be a multiple of anything.
    balanced: each rank has a chunk of the head and one of the tail, so that causal attention is the same work on every rank;
    otherwise one run of tokens. The same for all functions of a step.
    Labels of a language model are shifted before: the last token of a chunk has its label in another one.
    The first call for a mesh is collective over all ranks of the mesh that it is a part of.
    Raises, on every rank: ValueError for a mesh with several axes, a dim out of range, sizes that differ between tensors or
    ranks, what is no list of tensors, and `balanced` that differs between ranks; TypeError for what is no mesh; RuntimeError
    where another rank failed otherwise.
    """
    what = "context_parallel_shard"
    total, _ = agreed(ring_for(mesh, what), what, lambda: (length_of(buffers, seq_dims), balanced))
    cut = SequenceCut(total, int(mesh.size), balanced)
    return [taken(buffer, dim, cut, mesh.rank) for buffer, dim in zip(buffers, seq_dims, strict=True)]


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], *, balanced: bool = True
) -> list[torch.Tensor]:
    """The whole tensors, on every rank, of which each rank has its tokens, such as logits. Without gradients. Collective.

    Arguments as of `context_parallel_shard`.
    Raises ValueError, on every rank, as it does, where the sizes are not those of a sequence's parts, and where the number of
    tensors, their dtypes, or their sizes in other dims differ between ranks.
    """
    what = "context_parallel_unshard"
    ring = ring_for(mesh, what)
    agreed(ring, what, lambda: (balanced, _described(buffers, seq_dims)))
    lengths = ring.comm.exchange(length_of(buffers, seq_dims))
    cut = SequenceCut(sum(lengths), int(mesh.size), balanced)
    if lengths != (expected := [cut.length(rank) for rank in range(cut.size)]):
        raise ValueError(
            f"{what} on {mesh}: expected parts of {expected} tokens, found {lengths}; pass `balanced` as where they were cut"
        )
    return [_joined(ring, buffer, dim, cut) for buffer, dim in zip(buffers, seq_dims, strict=True)]


def tokens_per_rank(
    mesh: DeviceMesh, labels: torch.Tensor, *, ignore_index: int = -100, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The number of labels on all ranks that are not `ignore_index`, divided by the number of ranks: (), of `dtype`.

    mesh: all ranks that gradients are averaged over, such as `mesh["dp", "cp"]`.   labels: of this rank, of any shape.
    dtype: a loss divided by it is of this dtype, or of its own if that is wider. The number is rounded to it, in float32 by
    6e-8 of it: for losses in float64 pass torch.float64.
    The sum of this rank's losses divided by it is a loss whose mean over the ranks, and whose averaged gradients, are those of
    the mean over all tokens, also where ranks have different numbers of them:

        loss = F.cross_entropy(logits, labels, reduction="sum") / tokens_per_rank(mesh, labels)

    Collective; the first call for a mesh is so over all ranks of the mesh that it is a part of. Models of transformers take it
    as `num_items_in_batch`. Cost: an all-reduce of one number, without a host sync.
    """
    check_mesh(mesh, "tokens_per_rank")
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"tokens_per_rank: expected labels in a tensor, found a {type(labels).__name__}")
    count = (labels != ignore_index).sum(dtype=torch.float64).view(1)
    stream = current_stream(count.device)
    mesh.communicator("tokens").all_reduce(count, count, ReduceOp.SUM, stream=stream).wait(stream)
    return (count / int(mesh.size)).squeeze(0).to(dtype)


def _described(buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]) -> list[object]:
    """What parts of one tensor have alike: the dtype, the dim, and the other sizes. Raises as `length_of`."""
    length_of(buffers, seq_dims)
    found: list[object] = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        sizes, dim = list(buffer.shape), dim % buffer.dim()
        found.append((str(buffer.dtype), dim, sizes[:dim] + sizes[dim + 1 :]))
    return found


def length_of(buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]) -> int:
    """The size that all buffers have along their sequence."""
    check_list("buffers", buffers, torch.Tensor)
    check_list("seq_dims", seq_dims, int)
    if len(buffers) != len(seq_dims) or not buffers:
        raise ValueError(f"expected one seq dim for each buffer, and a buffer; found {len(buffers)} and {len(seq_dims)}")
    for number, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(f"buffer {number} of shape {tuple(buffer.shape)}: its seq dim {dim} is out of range")
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, seq_dims, strict=True)]
    if len(set(lengths)) > 1:
        raise ValueError(f"the buffers have {lengths} tokens: expected one number; check seq dims")
    return lengths[0]


def check_list(name: str, found: object, kind: type) -> None:
    """Raises ValueError unless it is a list or tuple of such."""
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"{name}: expected a list of {kind.__name__}, found a {type(found).__name__}")
    for number, each in enumerate(found):
        if not isinstance(each, kind):
            raise ValueError(f"{name}[{number}]: expected a {kind.__name__}, found a {type(each).__name__}")


def taken(buffer: torch.Tensor, dim: int, cut: SequenceCut, rank: int) -> torch.Tensor:
    """A rank's tokens of a whole tensor: a new tensor, contiguous."""
    return torch.cat([buffer.narrow(dim, start, stop - start) for start, stop in cut.chunks(rank)], dim).contiguous()


def _joined(ring: Ring, own: torch.Tensor, dim: int, cut: SequenceCut) -> torch.Tensor:
    part = own.movedim(dim, 0)
    padded = part.new_zeros((cut.longest, *part.shape[1:]))
    padded[: part.shape[0]] = part
    gathered = ring.start_gather(padded.view(-1)).result().view(cut.size, *padded.shape)
    whole = part.new_empty((cut.total, *part.shape[1:]))
    for rank in range(cut.size):
        sizes = [stop - start for start, stop in cut.chunks(rank)]
        parts = gathered[rank, : cut.length(rank)].split(sizes)
        for (start, stop), chunk in zip(cut.chunks(rank), parts, strict=True):
            whole[start:stop] = chunk
    return whole.movedim(0, dim).contiguous()

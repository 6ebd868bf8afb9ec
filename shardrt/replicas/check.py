"""`check_replicas`: compares what several ranks must have alike, for faults that nothing else notices.

1. Each rank makes a digest of every item that has several copies (`items.py`), and adds up those whose copies are on the same
   ranks.
2. The ranks exchange these few sums. The digests of a copy's shards add up to that of the copy, wherever they are cut.
3. Only if copies differ, the ranks exchange the digests of the items, and all find the same differences (`differences.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from .. import comm
from ..comm import DeviceMesh
from .differences import Detail, differing, report
from .items import Items, digests_of, ranks_of, sums_of


class Compared(NamedTuple):
    """What was compared on this rank.

    tensors, values: those that other ranks have too.   unique: tensors of which no other rank has the same part.
    """

    tensors: int
    values: int
    unique: int

    def __str__(self) -> str:
        alone = f"; {self.unique} tensors have no copies: each rank has another part" if self.unique else ""
        return f"{self.tensors} tensors and {self.values} values compared{alone}"


def check_replicas(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    mesh: DeviceMesh | None = None,
    buffers: bool = True,
    **values: object,
) -> Compared:
    """Raise RuntimeError on every rank unless what several ranks must have alike is alike, to the bit. Collective.

    model: sharded, tensor-parallel, or plain: before `fully_shard`, each rank's initial parameters are compared whole.
    optimizer: one or several; their state and their hyperparameters are compared.
    mesh: the ranks that have the model and call this (default: all).
    buffers: False leaves them out: the statistics of a BatchNorm are each rank's own.
    values: others to compare, such as `step=step, seed=seed`: numbers, strings, tensors, and lists, tuples and
        dicts of them.
    Compared are the copies of replicated tensors: over the replicas of hybrid sharding and of `replicate`, over tensor-parallel
    ranks what they do not cut, over all ranks what is not sharded at all; the optimizers' steps and learning rates, number by
    number; and the random numbers that tensor-parallel ranks draw alike. Of what `fully_shard` only shards there is one copy,
    which nothing can be compared with. Parameters that `fully_shard` was told to ignore are left out.
    Returns: how much was compared.
    The error names each item in full, with what it is on which ranks, those first that differ from most.
    Cost: copies are read once, see `tensor/placement/digest.py`; an exchange of some hundred bytes, and a host sync.
    Raises TypeError for what is no module or optimizer and for other values, and ValueError for a mesh that lacks ranks of a
    tensor, also on every rank: as a RuntimeError on the others.
    """
    mesh = comm.world().mesh if mesh is None else mesh
    found, digests, error = Items(mesh), list[int](), None
    try:
        found.add_values(values)
        found.add(model, optimizer, buffers)
        digests = digests_of(found.items)
    except Exception as caught:  # of one rank alone: the others are about to wait for it
        error = caught
    message = None if error is None else f"{type(error).__name__}: {error}"
    ranks, answers = ranks_of(mesh), mesh.exchange((message, {} if error else sums_of(found.items, digests)))
    if error is not None:
        raise error
    for rank, (text, _) in zip(ranks, answers, strict=True):
        if text is not None:
            raise RuntimeError(f"check_replicas: rank {rank} raised {text}")
    if wrong := differing(sums for _, sums in answers):
        details = [Detail.of(item, bits) for item, bits in zip(found.items, digests, strict=True) if item.held.key in wrong]
        tables = {key: table for key, table in found.tables.items() if key in wrong}
        raise RuntimeError(report(dict(zip(ranks, mesh.exchange((tables, details)), strict=True))))
    return Compared(found.tensors, len(found.items) - found.tensors, found.unique)

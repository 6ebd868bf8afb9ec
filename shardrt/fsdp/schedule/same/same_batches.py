"""A warning where every data-parallel rank trains on the same batch, as when all of them go through one loader."""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ....comm import world
from ....tensor.placement.digest import digest
from ...base.trees import tensors_in
from ..param_group import ParamGroup

_log = logging.getLogger("shardrt")
_compared: WeakSet[nn.Module] = WeakSet()  # roots, of which each has one comparison, also if it gets another runtime


class FirstBatch:
    """Compares what the ranks give a root in its first training forward.

    Cost: one pass over the tensors, a host sync and an exchange of a number, once; then a look at an attribute.
    """

    due: bool  # written by compare() alone
    _root: ParamGroup

    def __init__(self, root: ParamGroup) -> None:
        self._root = root
        self.due = root.device_mesh.size > 1 and root.modules[0] not in _compared and world().settings.check_batches

    def compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the root starts. Collective if it is the first one in training; logs a warning, and never raises."""
        module, mesh = self._root.modules[0], self._root.device_mesh
        if not (module.training and torch.is_grad_enabled()):
            return
        self.due = False
        _compared.add(module)
        own = _digest(tensors_in((args, kwargs)))
        # Invariant: every rank takes part, also one that has nothing to compare, which is then like no other.
        differ = mesh.differing(f"nothing on rank {mesh.rank}" if own is None else own) is not None
        if own is not None and not differ and mesh.rank == 0:
            _log.warning(
                f"all {mesh.size} data-parallel ranks of '{self._root.name}' got the same batch in its first training step, so "
                "together they do the work of one: give each rank its own rows, as in batch.chunk(world.size)[world.rank], or "
                "DistributedSampler(dataset, num_replicas=world.size, rank=world.rank) (logged once; where it is "
                "meant, as in training on one whole graph, SHARDRT_CHECK_BATCHES=0 turns the comparison off)"
            )


def _digest(tensors: list[torch.Tensor]) -> str | None:
    """A digest of dtypes, shapes and values; None if there is no value, or if one cannot be read here."""
    found, elements = blake2b(digest_size=8), 0
    try:
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
                return None
            found.update(f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor.reshape(-1)).item()}".encode())
            elements += tensor.numel()
    except (RuntimeError, TypeError):  # of a function transform, or of another kind of tensor without elements to read
        return None
    return found.hexdigest() if elements else None

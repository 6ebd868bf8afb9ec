"""Tensors that share a `DTensor`'s memory: what was detached from it, as its `.data` is.

In one process an assignment to `.data` gives a parameter other memory, and whatever shared the old one keeps the old values, as
in `p.data, average = average, p.data`. Shards have fixed places in the memory of their group, so here the others go elsewhere.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn


class Shared(Protocol):
    """A `DTensor`, as far as its memory is concerned."""

    _aliases: list[ref[Any]]  # what was detached from it, or from these, if anything was: one list for all of them
    _local_tensor: torch.Tensor


def note(origin: Shared, made: Shared) -> None:
    """`made` was detached from `origin`."""
    known = getattr(origin, "_aliases", None)
    if known is None:
        known = origin._aliases = []
    known[:] = [*(each for each in known if each() is not None), ref(made)]
    made._aliases = known


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two shards of one shape are one memory; of empty ones, or on the meta device, there is none."""
    return one.data_ptr() == other.data_ptr() != 0 and one.stride() == other.stride()


def leave(tensor: Shared) -> tuple[bool, list[Any]]:
    """Forget what shares the memory. Returns: whether the tensor was detached from another one, and the others."""
    known = getattr(tensor, "_aliases", [])
    found = [alias for each in known if (alias := each()) is not None]
    others = [alias for alias in found if alias is not tensor]
    known[:] = map(ref, others)
    tensor._aliases = []
    return len(others) < len(found), others


def keep_values(tensor: Shared) -> bool:
    """Before values are assigned: others that share the memory keep what is there, in memory of their own.

    A parameter stays where it is: a module, or a group of parameters, reads there. Returns False if the tensor is to take other
    memory itself. Cost: a copy of the shard, if any other one is alive.
    """
    is_alias, others = leave(tensor)
    if is_alias and not isinstance(tensor, nn.Parameter):
        return False
    local = tensor._local_tensor
    moved = [each for each in others if not isinstance(each, nn.Parameter) and same_memory(local, each._local_tensor)]
    if moved:
        kept = copied(local)
        for alias in moved:
            if type(alias._local_tensor) is torch.Tensor:
                alias._local_tensor.data = kept  # who has asked for it keeps the values as well
            alias._local_tensor = kept.detach()
    return True


def copied(local: torch.Tensor) -> torch.Tensor:
    """A copy that counts as written when it is, in inference mode too."""
    with torch.inference_mode(False), torch.no_grad():
        return local.clone()

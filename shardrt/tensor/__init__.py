"""Sharded tensors under the names of `torch.distributed.tensor`: `DTensor`, its placements, and functions that make one."""

from . import dispatch as dispatch  # the import installs DTensor's operation table
from . import optimizer_steps as optimizer_steps  # the import has DTensor call it
from .distribute import distribute_tensor
from .dtensor import DTensor
from .factories import empty, full, ones, rand, randn, zeros
from .placement import FlatShard, Partial, Placement, RaggedShard, Replicate, Shard

__all__ = [
    "DTensor",
    "FlatShard",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "zeros",
]

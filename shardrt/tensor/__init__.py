"""Sharded tensors under the names of `torch.distributed.tensor`: `DTensor`, its placements, and functions that make one."""

from .dtensor.distribute import distribute_tensor
from .dtensor.dtensor import DTensor
from .operations import dispatch as dispatch  # the import installs DTensor's operation table
from .operations.factories import empty, full, ones, rand, randn, zeros
from .optimizers import optimizer_steps as optimizer_steps  # the import has DTensor call it
from .placement.placement import FlatShard, Partial, Placement, RaggedShard, Replicate, Shard

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

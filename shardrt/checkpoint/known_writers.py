"""Which tensors an asynchronous save may copy beside what runs: those of which every writer waits (`tensor/snapshots.py`).

| tensors                                                                          | copied on                |
|----------------------------------------------------------------------------------|--------------------------|
| parameters that `fully_shard` has cut over several ranks                         | a stream of their own    |
| optimizers' sharded state                                                        | a stream of their own    |
| parameters with whose shards modules compute: one rank, tensor parallelism alone | the current stream       |
| buffers, plain tensors, and all else                                             | the current stream       |

A forward may write what is in the last two rows: statistics of batch normalization, for example.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..tensor import snapshots
from ..tensor.dtensor import DTensor
from ..tensor.group_registry import owned


def storages_with_known_writers() -> frozenset[int]:
    """The addresses of the storages of such tensors, of all models and optimizers of the process; none on the host."""
    # Hazard: a CUDA graph with an optimizer's step writes when it is replayed, and nobody is told.
    if snapshots.captured_a_step:
        return frozenset()
    shards = [tensor._local_tensor for tensor in (*_parameters(), *_state())]
    return frozenset(snapshots.address(shard) for shard in shards if type(shard) is torch.Tensor and shard.is_cuda)


def _parameters() -> Iterator[DTensor]:
    for param, group in owned():
        if isinstance(param, DTensor) and group.mesh.size > 1:
            yield param


def _state() -> Iterator[DTensor]:
    for optimizer in snapshots.optimizers:
        for values in optimizer.state.values():
            if isinstance(values, dict):
                yield from (value for value in values.values() if isinstance(value, DTensor))

"""What packages tell sharded tensors apart by: their addresses and storages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused, with_copies
from shardrt.comm import World
from toys import OddMLP, shard_blocks


def params_of(model: nn.Module) -> list[shardrt.DTensor]:
    return [param for param in model.parameters() if isinstance(param, shardrt.DTensor)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(1, 3)
@with_copies
def test_each_parameter_has_an_address_of_its_own(world: World, dtype: torch.dtype, dim: int) -> None:
    model = OddMLP().to(dtype)
    shard_blocks(model, shard_placement_fn=lambda param: shardrt.Shard(min(dim, param.dim() - 1)) if param.dim() else None)
    params = params_of(model)
    for param in params:
        storage = param.untyped_storage()
        if local := param.to_local().numel():
            assert param.data_ptr() == param.to_local().data_ptr() == param.detach().data_ptr()
            assert storage.nbytes() == local * dtype.itemsize
        assert param.data_ptr() == storage.data_ptr()
    for every in (params, params_of(copy.deepcopy(model))):
        assert (
            len({param.data_ptr() for param in every})
            == len({param.untyped_storage().data_ptr() for param in every})
            == len(every)
        )
    assert params[0][0].data_ptr()


@on_ranks(2)
def test_a_storage_keeps_the_memory_and_cannot_be_resized(world: World) -> None:
    tensor = shardrt.distribute_tensor(torch.arange(8.0), world.mesh, [shardrt.Shard(0)])
    storage = tensor.untyped_storage()
    del tensor
    values = torch.empty(0).set_(storage)
    assert values.tolist() == [0.0 + 4 * world.rank, 1.0 + 4 * world.rank, 2.0 + 4 * world.rank, 3.0 + 4 * world.rank]
    refused("not resizable", lambda: storage.resize_(0), RuntimeError)


@on_ranks(1)
def test_sharing_between_processes_is_refused(world: World) -> None:
    refused(r"share_memory_\(\) of 'inp.weight' \(rank 0\)", shard_blocks(OddMLP()).share_memory, RuntimeError)

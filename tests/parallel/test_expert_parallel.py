"""Expert parallelism: a model whose experts are divided trains as one process does on all ranks' batches."""

import pytest
import torch

from ranks import on_ranks
from shardrt.comm import World
from toys_ep import MoEModel, divide, mesh_of, train_beside_one_process


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sorted_rows", [False, True])
def test_training_on_any_mesh(world: World, sorted_rows: bool) -> None:
    """dp x ep of 1 x N, of N x 1, and of 2 x 2."""
    for ep in [size for size in range(1, world.size + 1) if world.size % size == 0]:
        torch.manual_seed(0)
        mesh, whole = mesh_of(world, ep), MoEModel(12, sorted_rows=sorted_rows).double()
        train_beside_one_process(world, mesh, whole, lambda model, m=mesh: divide(model, m, sorted_rows=sorted_rows), clip=0.05)

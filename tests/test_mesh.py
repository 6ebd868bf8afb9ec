"""Meshes of several axes: who is where, and that communicators along them join the right ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ranks import on_ranks
from shardrt.comm import Communicator, DeviceMesh, ReduceOp, World


def seen_by(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh as `rank` has it; its geometry needs no job."""
    size = int(torch.tensor(shape).prod())
    return DeviceMesh(cast(Communicator, SimpleNamespace(rank=rank, size=size, device=torch.device("cpu"))), shape, names)


def test_geometry_of_the_drawn_example() -> None:
    mesh = seen_by(4, (2, 3), ("dp", "tp"))
    assert (mesh.coordinates, mesh.rank, mesh.ranks) == ((1, 1), 4, [0, 1, 2, 3, 4, 5])
    assert (mesh["tp"].ranks, mesh["tp"].rank) == ([3, 4, 5], 1)
    assert (mesh["dp"].ranks, mesh["dp"].rank) == ([1, 4], 1)
    assert mesh["dp", "tp"] is mesh
    assert mesh["dp"] is mesh["dp"]
    flat = mesh.flatten()
    assert (flat.axis_names, flat.shape, flat.ranks, flat.coordinates) == (("dp_tp",), (6,), mesh.ranks, (4,))


def test_three_axes_against_numbers_of_a_tensor() -> None:
    shape, names = (2, 3, 2), ("pp", "dp", "tp")
    table = torch.arange(12).reshape(shape)
    for rank in range(12):
        mesh = seen_by(rank, shape, names)
        pp, dp, tp = mesh.coordinates
        assert table[pp, dp, tp] == rank
        assert mesh["dp"].ranks == table[pp, :, tp].tolist()
        assert mesh["pp", "tp"].ranks == table[:, dp, :].flatten().tolist()
        assert (mesh["pp", "tp"].shape, mesh["pp", "tp"].coordinates) == ((2, 2), (pp, tp))
        assert mesh["pp", "tp"]["tp"] is mesh["tp"]
        outer = mesh["pp", "tp"].flatten("world")
        assert (outer.shape, outer.axis_names, outer.rank) == ((4,), ("world",), 2 * pp + tp)


def test_bad_meshes_and_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected ranks and one name for each axis"):
        seen_by(0, (2, 3), ("dp",))
    with pytest.raises(ValueError, match=r"expected ranks and one name for each axis"):
        seen_by(0, (2, 3), ("dp", "dp"))
    comm = cast(Communicator, SimpleNamespace(rank=0, size=5, device=torch.device("cpu")))
    with pytest.raises(ValueError, match=r"mesh of shape \(2, 3\) has 6 ranks and does not match the 5 ranks of"):
        DeviceMesh(comm, (2, 3), ("dp", "tp"))
    mesh = seen_by(0, (2, 3), ("dp", "tp"))
    for wrong in ("pp", ("tp", "dp"), ()):
        with pytest.raises(ValueError, match=r"expected one or more of \('dp', 'tp'\), in this order"):
            mesh[wrong]


@on_ranks(4)
def test_communicators_join_the_ranks_of_a_part(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    for part in (mesh["shard"], mesh["replicate"], mesh, mesh.flatten("all")):
        gather, reduce = part.communicator("gather"), part.communicator("reduce")
        assert gather is part.communicator("gather") is not reduce
        out = torch.empty(part.size, dtype=torch.int64)
        gather.all_gather(out, torch.tensor([world.rank]), stream=world.stream).synchronize()
        assert out.tolist() == part.ranks
        total = torch.tensor([world.rank])
        reduce.all_reduce(total, total, ReduceOp.SUM, stream=world.stream).synchronize()
        assert total.item() == sum(part.ranks)
        assert part.exchange(world.rank) == part.ranks
    mesh.close()
    with pytest.raises(RuntimeError, match=r"'replicate.gather'.*is closed"):
        mesh["replicate"].communicator("gather").barrier(stream=world.stream)

"""Meshes of several axes: who is where, and that communicators along them join the right ranks."""

from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from ranks import on_ranks, refused
from shardrt import DTensor, fully_shard
from shardrt.comm import Communicator, DeviceMesh, ReduceOp, World, init_device_mesh


def seen_by(rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    """The mesh as `rank` has it; its geometry needs no job."""
    size = int(torch.tensor(shape).prod())
    comm = SimpleNamespace(rank=rank, size=size, ranks=tuple(range(size)), device=torch.device("cpu"))
    return DeviceMesh(cast(Communicator, comm), shape, names)


def test_geometry_of_the_drawn_example() -> None:
    mesh = seen_by(4, (2, 3), ("dp", "tp"))
    assert (mesh.coordinates, mesh.rank, mesh.ranks) == ((1, 1), 4, range(6))
    assert (mesh["tp"].ranks, mesh["tp"].rank) == (range(3, 6), 1)
    assert (mesh["dp"].ranks, mesh["dp"].rank) == (range(1, 5, 3), 1)
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
        assert list(mesh["dp"].ranks) == table[pp, :, tp].tolist()
        assert list(mesh["pp", "tp"].ranks) == table[:, dp, :].flatten().tolist()
        assert (mesh["pp", "tp"].shape, mesh["pp", "tp"].coordinates) == ((2, 2), (pp, tp))
        assert mesh["pp", "tp"]["tp"] is mesh["tp"]
        outer = mesh["pp", "tp"].flatten("world")
        assert (outer.shape, outer.axis_names, outer.rank) == ((4,), ("world",), 2 * pp + tp)


def test_torchs_names() -> None:
    mesh = seen_by(4, (2, 3), ("dp", "tp"))
    torchs = TorchMesh("cpu", torch.arange(6).view(2, 3), mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=4)
    for name in ("shape", "ndim", "mesh_dim_names", "device_type"):
        assert getattr(mesh, name) == getattr(torchs, name), name
    assert [mesh.size(axis) for axis in (None, 0, 1, -1)] == [torchs.size(axis) for axis in (None, 0, 1, -1)]
    assert mesh.get_coordinate() == torchs.get_coordinate()
    assert (mesh.mesh.dtype, mesh.mesh.tolist()) == (torchs.mesh.dtype, torchs.mesh.tolist())
    assert (mesh.size, mesh.size(), mesh.size(0), mesh.size("tp"), mesh.size(-1)) == (6, 6, 2, 3, 3)
    assert type(mesh.size + 1) is type(mesh.size("dp")) is int
    assert copy.deepcopy(mesh.size) == pickle.loads(pickle.dumps(mesh.size)) == int(json.dumps(mesh.size)) == 6
    assert (mesh.get_rank(), mesh.get_local_rank("tp"), mesh.get_local_rank(0)) == (4, 1, 1)
    part = mesh["tp"]
    assert (part.size(), part.ndim, part.mesh_dim_names, part.mesh.tolist()) == (3, 1, ("tp",), [3, 4, 5])
    assert (part.get_rank(), part.get_local_rank()) == (4, 1)
    for ask in (mesh.size, mesh.get_local_rank):
        for axis in (2, -3, "pp"):
            with pytest.raises(ValueError, match=rf"axis {axis!r} of DeviceMesh.*expected one of \('dp', 'tp'\)"):
                ask(axis)
    refused(r"which has 2 axes: give one of \('dp', 'tp'\)", mesh.get_local_rank)


def test_axes_without_names() -> None:
    mesh = seen_by(4, (2, 3), None)
    assert (mesh.mesh_dim_names, mesh.axis_names) == (None, ("axis 0", "axis 1"))
    assert (mesh.size(1), mesh.get_local_rank(1), mesh["axis 1"].ranks) == (3, 1, range(3, 6))
    assert mesh["axis 1"].mesh_dim_names is mesh.flatten().mesh_dim_names is None
    assert mesh.flatten("dp").mesh_dim_names == ("dp",)
    assert seen_by(0, (4,), None).mesh_dim_names == ("dp",)
    refused("expected ranks and one name for each axis", lambda: mesh.unflatten((2, 3), ("dp", "dp", "tp")))


@on_ranks(4)
def test_init_device_mesh(world: World) -> None:
    kind = world.device.type
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
    assert mesh is init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
    assert mesh["replicate", "shard"] is mesh
    assert (mesh.shape, mesh.mesh_dim_names, mesh.get_rank()) == ((2, 2), ("replicate", "shard"), world.rank)
    assert mesh["shard"].exchange(world.rank) == mesh["shard"].mesh.tolist()
    assert init_device_mesh(kind, (4,)).mesh_dim_names is None
    unnamed = init_device_mesh(kind, (2, 2))
    assert (unnamed.mesh_dim_names, unnamed.get_coordinate()) == (None, (world.rank // 2, world.rank % 2))
    model = fully_shard(torch.nn.Linear(3, 5), mesh=unnamed)  # on two replicas of two ranks
    model(torch.ones(2, 3)).sum().backward()
    grad = model.weight.grad
    assert isinstance(grad, DTensor)
    assert grad.full_tensor().tolist() == [[2.0] * 3] * 5
    with pytest.raises(ValueError, match=rf"init_device_mesh\('.*', \(4,\)\) on rank {world.rank}: expected '{kind}'"):
        init_device_mesh("cuda" if kind == "cpu" else "cpu", (4,))
    refused("expected 'cpu' or 'cuda', without the number of a device", lambda: init_device_mesh("cuda:0", (4,)))
    with pytest.raises(ValueError, match=r"as a mesh of shape \(3,\) with axes \('dp',\): expected 4 ranks"):
        init_device_mesh(kind, (3,), mesh_dim_names=("dp",))


def test_bad_meshes_and_axes_are_refused() -> None:
    refused(r"expected ranks and one name for each axis", lambda: seen_by(0, (2, 3), ("dp",)))
    refused(r"expected ranks and one name for each axis", lambda: seen_by(0, (2, 3), ("dp", "dp")))
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
        assert out.tolist() == list(part.ranks)
        total = torch.tensor([world.rank])
        reduce.all_reduce(total, total, ReduceOp.SUM, stream=world.stream).synchronize()
        assert total.item() == sum(part.ranks)
        assert part.exchange(world.rank) == list(part.ranks)
    mesh.close()
    with pytest.raises(RuntimeError, match=r"'replicate.gather'.*is closed"):
        mesh["replicate"].communicator("gather").barrier(stream=world.stream)


@on_ranks(4)
def test_products_of_meshes(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "tp"))
    product = mesh["tp"].product(mesh["dp"])
    assert product is mesh["tp"].product(mesh["dp"])
    assert (product.axis_names, product.mesh.tolist()) == (("tp", "dp"), [[0, 2], [1, 3]])
    assert (product["tp"], product["dp"]) == (mesh["tp"], mesh["dp"])
    assert product.coordinates == mesh.coordinates[::-1]
    hybrid = DeviceMesh(world.comm, (2, 1, 2), ("replicate", "shard", "tp"))
    three = hybrid["tp"].product(hybrid["replicate", "shard"])
    assert (three.axis_names, three.shape) == (("tp", "replicate", "shard"), (2, 2, 1))
    assert three["replicate", "shard"] is hybrid["replicate", "shard"]
    everyone = DeviceMesh(world.comm, (4,), ("all",))
    alone = DeviceMesh(world.comm, (4, 1), ("all", "tp"))["tp"]
    assert alone.product(everyone).mesh.tolist() == [[0, 1, 2, 3]]
    assert alone.product(everyone)["all"] is everyone
    crossed = DeviceMesh(world.comm, (2, 2), ("row", "column"))
    part = world.comm.split(world.rank // 2, world.rank, "half")
    assert part is not None
    for outer, inner, why in (
        (mesh["tp"], DeviceMesh(world.comm, (4,), ("all",)), "overlap in this rank alone"),
        (mesh["tp"], crossed["column"], "overlap in this rank alone"),
        (mesh["tp"], DeviceMesh(world.comm, (2, 2), ("other", "tp"))["other"], None),
        (mesh["tp"], DeviceMesh(world.comm, (4, 1), ("other", "tp"))["tp"], "axes of different names"),
        (mesh["tp"], DeviceMesh(part, (2,), ("half",)), "one communicator"),
    ):
        answers = world.comm.exchange(refusal(outer, inner))
        assert all(answer == answers[0] for answer in answers) if why is None else all(why in str(a) for a in answers), answers


@on_ranks(4)
def test_products_that_only_some_ranks_could_make(world: World) -> None:
    """Every rank hears of it: here ranks 2 and 3 have the mesh of all ranks for an inner one."""
    mesh, everyone = DeviceMesh(world.comm, (2, 2), ("dp", "tp")), DeviceMesh(world.comm, (4,), ("dp",))
    inner = mesh["dp"] if world.rank < 2 else everyone
    answers = world.comm.exchange(refusal(mesh["tp"], inner))
    assert all(answer is not None and "(rank 0; found on ranks 0, 1, 2, 3)" in answer for answer in answers), answers


def refusal(outer: DeviceMesh, inner: DeviceMesh) -> str | None:
    try:
        outer.product(inner)
    except ValueError as error:
        return str(error)
    return None

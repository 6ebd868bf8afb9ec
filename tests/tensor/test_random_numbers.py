"""Random numbers on sharded tensors do not depend on the number of ranks or the placements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import shardrt
from placements import uneven
from ranks import on_ranks, refused
from shardrt import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from shardrt.tensor.placement.placement import Placement
from shardrt.tensor.placement.random import BLOCK_NUMEL

SHAPE = (301, 499)  # two blocks and a part of a third


def empty(mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...] = SHAPE) -> DTensor:
    return distribute_tensor(torch.zeros(shape), mesh, placements)


def whole_normal(seed: int) -> torch.Tensor:
    """The expected values of `normal_`, computed independently, block by block."""
    first = int(torch.randint(2**63 - 1, (1,), generator=torch.Generator().manual_seed(seed)).item())
    numel = torch.Size(SHAPE).numel()
    blocks = [
        torch.empty(min(BLOCK_NUMEL, numel - start)).normal_(generator=torch.Generator().manual_seed(first + index))
        for index, start in enumerate(range(0, numel, BLOCK_NUMEL))
    ]
    return torch.cat(blocks).view(SHAPE)


@on_ranks(1, 2, 3, 4)
def test_the_same_on_any_number_of_ranks(world: World) -> None:
    numel = torch.Size(SHAPE).numel()
    for dim in (0, 1):
        for placement in (
            Shard(dim),
            RaggedShard(dim, uneven(SHAPE[dim], world.size)),
            FlatShard(dim, uneven(numel, world.size)),
            Replicate(),
        ):
            torch.manual_seed(5 + world.rank)  # rank 0's seed counts
            tensor = empty(world.mesh, [placement])
            assert tensor.normal_() is tensor
            expected = whole_normal(5)
            assert torch.equal(tensor.full_tensor(), expected), placement
            assert not torch.equal(tensor.normal_().full_tensor(), expected)
            generator = torch.Generator().manual_seed(5)
            assert torch.equal(tensor.normal_(generator=generator).full_tensor(), expected)
            assert generator.get_state().ne(torch.Generator().manual_seed(5).get_state()).any()


@on_ranks(4)
def test_two_axes(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    for placements in (
        (Replicate(), RaggedShard(0, (1, 300))),
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(1), FlatShard(0, (1, 250 * 301 - 1) if mesh.coordinates[0] == 0 else (70000, 249 * 301 - 70000))),
        (Replicate(), Shard(0)),
    ):
        torch.manual_seed(9 + world.rank)
        assert torch.equal(empty(mesh, placements).normal_().full_tensor(), whole_normal(9)), placements
    mesh.close()


DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "cauchy_": lambda t: t.cauchy_(),
    "exponential_": lambda t: t.exponential_(2.0),
    "geometric_": lambda t: t.geometric_(0.4),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(),
    "random_ from": lambda t: t.random_(-3, 9),
    "random_ to": lambda t: t.random_(7),
    "uniform_": lambda t: t.uniform_(-1, 3),
    "init.normal_": nn.init.normal_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.trunc_normal_ tail": lambda t: nn.init.trunc_normal_(t, 0.0, 1.0, 1.5, 2.0),
    "init.uniform_": nn.init.uniform_,
    "init.xavier_normal_": nn.init.xavier_normal_,
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "init.zeros_": nn.init.zeros_,
    "init.ones_": nn.init.ones_,
    "init.constant_": lambda t: nn.init.constant_(t, 0.25),
}


@on_ranks(2, 3)
def test_every_distribution_and_initialisation(world: World) -> None:
    """Equal to those on a mesh of one rank, whose statistics are compared with torch's."""
    alone = world.comm.split(world.rank, 0, "alone")
    assert alone is not None
    for name, draw in DRAWS.items():
        found = []
        for mesh, placement in ((DeviceMesh(alone), Shard(0)), (world.mesh, FlatShard(0, uneven(301 * 499, world.size)))):
            torch.manual_seed(3)
            tensor = empty(mesh, [placement])
            draw(tensor)
            found.append(tensor.full_tensor())
        assert torch.equal(found[0], found[1]), name
        plain = torch.zeros(SHAPE)
        draw(plain)
        scale = plain.abs().median() + 1e-7
        drawn, expected = (found[0] / scale).atan(), (plain / scale).atan()  # bounded: some of these have no mean
        spread = 0.02 * expected.std() + 1e-7
        assert abs(drawn.mean() - expected.mean()) < spread, name
        assert abs(drawn.std() - expected.std()) < spread, name
    alone.close()


@on_ranks(1, 2, 3)
def test_modules_initialise_themselves(world: World) -> None:
    """`reset_parameters` under no_grad, on rows and on flat shards; scalars, no elements, and bfloat16."""
    alone = world.comm.split(world.rank, 0, "alone")
    assert alone is not None
    found = []
    for mesh in (DeviceMesh(alone), world.mesh):
        torch.manual_seed(2)
        linear = shardrt.fully_shard(nn.Linear(129, 257), mesh=mesh)
        linear.reset_parameters()
        others = [empty(mesh, [Shard(0)], shape) for shape in ((), (0, 3), (1,))]
        others.append(distribute_tensor(torch.zeros(9, 5, dtype=torch.bfloat16), mesh, [Shard(0)]))
        for tensor in others:
            tensor.uniform_()
        found.append([tensor.full_tensor() for tensor in (*linear.parameters(), *others)])
    for one, many in zip(*found, strict=True):
        assert torch.equal(one, many)
    assert abs(found[0][0].std() - (1 / 129 / 3) ** 0.5) < 1e-3
    alone.close()


@on_ranks(2)
def test_undefined_random_operations_raise(world: World) -> None:
    tensor = empty(world.mesh, [FlatShard(0, (0, 301 * 499))])
    refused("normal expects std >= 0", lambda: tensor.normal_(0, -1), RuntimeError)
    with pytest.raises(
        NotImplementedError, match=r"aten.normal_.default on a tensor of Spec.*expected a sharded or replicated tensor"
    ):
        empty(world.mesh, [Partial()]).normal_()
    meta = DTensor(torch.empty(1, device="meta"), empty(world.mesh, [Shard(0)], (2,)).spec)
    refused(r"on meta: expected a sharded or replicated tensor with memory", meta.uniform_, NotImplementedError)

"""Groups over meshes: hybrid sharding, plain replication, post-forward shards, experts on a separate mesh."""

import copy

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, with_copies
from shardrt.comm import DeviceMesh, World
from toys import OddBlock, OddMLP, batch, buckets_of, compare, loss_of, paired, shard_blocks, step_all, train_side_by_side


def plane(world: World, replicas: int) -> DeviceMesh:
    return DeviceMesh(world.comm, (replicas, world.size // replicas), ("replicate", "shard"))


@pytest.mark.parametrize("replicas", [1, 2, 4])
@on_ranks(4)
def test_hybrid_sharding(world: World, replicas: int) -> None:
    mesh = plane(world, replicas)
    model = train_side_by_side(
        world, OddMLP().double(), map(batch, range(4)), shard=lambda m: shard_blocks(m, mesh=mesh), microbatches=3
    )
    group = model.blocks[0].param_group
    assert group.layout.world_size == 4 // replicas
    assert (group.mesh.size, group.replicas.size) == (4 // replicas, replicas)
    assert model.param_group.runtime.memory.in_use == 0


@pytest.mark.parametrize("factor", [None, 3.0])
@on_ranks(4)
def test_hybrid_sharding_accumulates_by_reduce_scatter_only(world: World, factor: float | None) -> None:
    """A backward without the all-reduce publishes no gradients; the next one with it reduces the accumulated sum."""
    whole, model = paired(OddMLP().double(), mesh=plane(world, 2))
    if factor is not None:
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(factor)
    for step in range(2):
        with buckets_of(0 if step else 1 << 20):
            for micro in range(3):
                x = batch(3 * step + micro)
                (loss_of(whole, x) * (1.0 if factor is None else 4 / factor)).backward()
                model.set_requires_all_reduce(micro == 2)
                loss_of(model, x.chunk(4)[world.rank]).backward()
                assert all((param.grad is None) == (micro < 2 and step == 0) for param in model.parameters())
    compare(whole, model, 1e-12, "")
    assert model.param_group.runtime.memory.in_use == 0


@on_ranks(1, 2, 3)
def test_replicas_only(world: World) -> None:
    def shard(model: nn.Module) -> None:
        for block in model.get_submodule("blocks").children():
            shardrt.replicate(block)
        shardrt.replicate(model)

    model = train_side_by_side(world, OddMLP().double(), map(batch, range(4)), shard=shard)
    assert all(param.to_local().numel() == param.numel() for param in model.parameters())


@pytest.mark.parametrize("kept", [1, 2, 4])
@on_ranks(4)
@with_copies
def test_a_post_forward_shard_is_kept(world: World, kept: int) -> None:
    """Between forward and backward a subgroup of `kept` ranks holds all parameters; the backward gathers within it."""

    def shard(model: nn.Module) -> None:
        shard_blocks(model, reshard_after_forward=kept)

    model = train_side_by_side(world, OddMLP().double(), map(batch, range(4)), shard=shard)
    memory = model.param_group.runtime.memory
    assert memory.in_use == 0
    loss = loss_of(model, batch(0))
    groups = list(model.param_group.with_descendants())
    assert memory.in_use == sum(group.nbytes // kept for group in groups)
    assert all(isinstance(param, shardrt.DTensor) for param in model.parameters())
    loss.backward()
    loss_of(model, batch(0))
    with torch.no_grad():
        loss_of(model, batch(0))  # a forward without gradients frees the post-forward shards and keeps none
    assert memory.in_use == 0


class Experts(nn.Module):
    """Each pair of ranks has its own expert in every block; the other parameters are the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.expert = nn.Linear(7, 7)
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.expert(self.inp(x))))


@on_ranks(4)
def test_experts_on_a_mesh_of_their_own(world: World) -> None:
    """One call makes a group for each mesh: experts are sharded and averaged over two ranks, the rest over four."""
    mesh = DeviceMesh(world.comm, (2, 2), ("expert", "within"))
    pair = world.rank // 2
    torch.manual_seed(0)
    whole = [Experts().double() for _ in range(2)]  # the models of the two pairs
    whole[1].load_state_dict({**whole[0].state_dict(), **{f"expert.{k}": v for k, v in Experts().expert.state_dict().items()}})
    model = copy.deepcopy(whole[pair])
    experts = set(model.expert.parameters())

    def place(param: nn.Parameter) -> shardrt.ShardPlacementResult | None:
        return shardrt.ShardPlacementResult(shardrt.Shard(0), mesh["within"]) if param in experts else None

    shardrt.fully_shard(model, mesh=mesh.flatten(), shard_placement_fn=place)
    assert [group.mesh.size for group in model.param_groups] == [4, 2]
    assert model.expert.weight.spec.mesh is mesh["within"]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, *whole)]
    for step in range(3):
        parts = batch(step).chunk(4)
        loss_of(model, parts[world.rank]).backward()
        for index, expected in enumerate(whole):
            mine = [loss_of(expected, part) for part in parts[2 * index : 2 * index + 2]]
            torch.stack(mine).mean().backward()
        for name, param in whole[0].named_parameters():
            if not name.startswith("expert"):  # shared by both pairs: the mean of their means
                other = whole[1].get_parameter(name)
                param.grad = other.grad = (param.grad + other.grad) / 2
        compare(whole[pair], model, 1e-12, f"step {step}")
        step_all(*optimizers)


@on_ranks(2, 3)
def test_divide_factors(world: World) -> None:
    """A factor divides the sum: for float16 partly before the reduction, with force-sum after it."""
    for dtype, force_sum, tolerance in (
        (torch.float64, False, 1e-12),
        (torch.float64, True, 1e-12),
        (torch.float16, False, 5e-3),
    ):
        for factor in (None, 6.0, float(world.size)):
            torch.manual_seed(0)
            block = OddBlock(7).double()
            whole = copy.deepcopy(block)
            shardrt.fully_shard(block, mp_policy=shardrt.MixedPrecisionPolicy(reduce_dtype=dtype))
            block.set_force_sum_reduction_for_comms(force_sum)
            if factor is not None:
                block.set_gradient_divide_factor(factor)
            inputs = torch.randn(world.size, 4, 7, dtype=torch.float64)
            block(inputs[world.rank]).square().sum().backward()
            (whole(inputs).square().sum() / (factor or world.size)).backward()
            compare(whole, block, tolerance, f"{dtype} {factor}")
    with pytest.raises(ValueError, match="expected a positive number"):
        block.set_gradient_divide_factor(0)


@on_ranks(2, 4)
def test_stages_of_a_pipeline_on_ranks_of_their_own(world: World) -> None:
    """The first stage runs while the second waits for its output; each is sharded over its own ranks."""
    mesh = DeviceMesh(world.comm, (2, world.size // 2), ("stage", "dp"))
    stage, peer = mesh["stage"].rank, 1 - mesh["stage"].rank
    comm, stream = mesh["stage"].communicator("pipeline"), world.stream
    model = shard_blocks(OddMLP().double(), mesh=mesh["dp"], reshard_after_forward=world.size // 2)
    for step in range(2):
        middle = torch.zeros(12, 3, dtype=torch.float64)
        if stage == 0:
            middle = model(batch(step))
            comm.send(middle.detach().contiguous(), peer, stream=stream).synchronize()
            comm.recv(grad := torch.zeros_like(middle), peer, stream=stream).synchronize()
            middle.backward(grad)
        else:
            comm.recv(middle, peer, stream=stream).synchronize()
            middle.requires_grad_()
            model(torch.cat([middle, middle[:, :2]], dim=1)).square().mean().backward()
            comm.send(middle.grad, peer, stream=stream).synchronize()
        assert all(param.grad is not None for param in model.parameters())


@on_ranks(2, 4)
def test_a_hook_on_what_was_reduced(world: World) -> None:
    replicas = world.size // 2
    for mesh in (world.mesh, plane(world, replicas)):
        torch.manual_seed(0)
        block = OddBlock(7).double()
        whole = copy.deepcopy(block)
        shardrt.fully_shard(block, mesh=mesh)
        seen: list[int] = []

        def double(reduced: torch.Tensor, seen: list[int] = seen) -> None:
            seen.append(reduced.numel())
            assert reduced.isfinite().all()  # padding included
            reduced.mul_(2)

        block.set_all_reduce_hook(double)
        x = torch.randn(world.size, 4, 7, dtype=torch.float64)
        block(x[world.rank]).square().mean().backward()
        (2 * whole(x).square().mean()).backward()
        compare(whole, block, 1e-12, "hooked")
        assert seen == [block.param_group.layout.segment_nbytes // 8]

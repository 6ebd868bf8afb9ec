"""Operations on sharded tensors whose arguments come by keyword, and copies from tensors that lie otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused
from shardrt import Replicate, Shard
from shardrt.comm import World
from toys import OddMLP, batch, loss_of, shard_blocks

Tensors = list[torch.Tensor]

BY_KEYWORD: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, c: a.add(other=b, alpha=2),
    "add_": lambda a, b, c: a.add_(other=b),
    "add_ of a plain tensor": lambda a, b, c: a.add_(other=values(1)),
    "add out": lambda a, b, c: torch.add(a, b, out=c),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, tensor2=c, value=0.5),
    "addcmul": lambda a, b, c: torch.addcmul(input=a, tensor1=b, tensor2=c),
    "addcmul_": lambda a, b, c: a.addcmul_(tensor1=b, tensor2=c),
    "div_": lambda a, b, c: a.div_(other=b, rounding_mode="floor"),
    "foreach add": lambda a, b, c: torch._foreach_add([a], other=[b], alpha=2)[0],
    "foreach addcdiv_": lambda a, b, c: torch._foreach_addcdiv_([a], tensor1=[b], tensor2=[c], value=2.0),
    "foreach lerp_": lambda a, b, c: torch._foreach_lerp_([a], tensors1=[b], weight=0.5),
    "foreach mul_": lambda a, b, c: torch._foreach_mul_(self=[a], other=[b]),
    "lerp_": lambda a, b, c: a.lerp_(end=b, weight=0.5),
    "lerp_ by a tensor": lambda a, b, c: a.lerp_(b, weight=c),
    "mul_": lambda a, b, c: a.mul_(other=b),
    "sub_": lambda a, b, c: a.sub_(other=b),
    "where": lambda a, b, c: torch.where(condition=a > b, input=b, other=c),
}


def values(seed: int) -> torch.Tensor:
    return torch.rand(7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, shardrt.DTensor) else tensor


@pytest.mark.parametrize("name", BY_KEYWORD)
@on_ranks(2)
def test_by_keyword(world: World, name: str) -> None:
    for grad in (False, True):
        plain = [values(seed) for seed in range(3)]
        sharded = [shardrt.distribute_tensor(tensor, world.mesh, [Shard(0)]) for tensor in plain]
        with torch.set_grad_enabled(grad):
            expected, found = BY_KEYWORD[name](*plain), full(BY_KEYWORD[name](*sharded))
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0)
        for mine, tensor in zip(sharded, plain, strict=True):
            torch.testing.assert_close(mine.full_tensor(), tensor, rtol=1e-15, atol=0.0)


@on_ranks(2)
def test_steps_by_keyword(world: World) -> None:
    """The step of an optimizer that averages by keyword."""
    model = shard_blocks(OddMLP().double())
    before = [param.full_tensor().detach() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.lerp_(end=torch.zeros_like(param), weight=0.25).addcmul_(tensor1=param, tensor2=torch.ones_like(param))
    for param, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.full_tensor().detach(), 1.5 * value, rtol=1e-15, atol=0.0)


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(param.dim() - 1) if param.dim() else None


@on_ranks(1, 3)
def test_state_of_another_layout(world: World) -> None:
    """Of the model and of the optimizer: training goes on as the model with the first layout does."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(shard_blocks(OddMLP().double(), shard_placement_fn=columns if seed else None))
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
        for model, foreach in zip(models, (True, False), strict=True)
    ]

    def step(which: int, number: int) -> None:
        optimizers[which].zero_grad()
        loss_of(models[which], batch(number).chunk(world.size)[world.rank]).backward()
        optimizers[which].step()

    for again in range(2):  # before the first step, and after one
        step(0, again)
        models[1].load_state_dict(models[0].state_dict())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        step(0, 2 + again)
        step(1, 2 + again)
        for first, second in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(full(second), full(first), rtol=1e-12, atol=1e-12)
            assert optimizers[1].state[second]["exp_avg"].spec == second.spec


@on_ranks(4)
def test_copies_between_placements(world: World) -> None:
    mesh, plain = world.mesh.unflatten((2, 2), ("a", "b")), values(0)
    made = [
        shardrt.distribute_tensor(plain, mesh, placements)
        for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Shard(0)], [Replicate(), Replicate()])
    ]
    for source in made:
        for target in made:
            written = torch.zeros_like(target).copy_(source)
            assert written.spec == target.spec
            assert torch.equal(full(written), plain)
    assert torch.equal(full(torch.zeros_like(made[0]).copy_(made[1][:1])), plain[:1].expand(7, 5))
    row = shardrt.distribute_tensor(plain[0], mesh, [Shard(0), Replicate()])
    assert torch.equal(full(torch.zeros_like(made[0]).copy_(row)), plain[0].expand(7, 5))
    narrow = torch.zeros_like(made[0], dtype=torch.float32).copy_(made[1])
    assert torch.equal(full(narrow), plain.float())
    lists = [torch.zeros_like(tensor) for tensor in made]
    torch._foreach_copy_(lists, made[::-1])
    assert all(torch.equal(full(tensor), plain) for tensor in lists)


@on_ranks(2)
def test_gradients_through_a_copy(world: World) -> None:
    source = shardrt.distribute_tensor(values(0), world.mesh, [Shard(1)]).requires_grad_()
    target = shardrt.distribute_tensor(values(1), world.mesh, [Shard(0)])
    (target * 1.0).copy_(source).mul(target).sum().backward()
    assert isinstance(source.grad, shardrt.DTensor)
    assert source.grad.placements == source.placements
    assert torch.equal(full(source.grad), values(1))


@on_ranks(2)
def test_other_operations_name_the_parameter_and_the_layouts(world: World) -> None:
    """The message says that the layouts differ, not that a parameter is used outside of a forward."""
    one, other = nn.Linear(5, 6), nn.Linear(5, 6)
    shardrt.fully_shard(one)
    shardrt.fully_shard(other, shard_placement_fn=columns)
    with torch.no_grad():
        refused("different placements.*parameter 'weight'.*redistribute", lambda: one.weight.add_(other.weight))
        refused("different placements", lambda: torch._foreach_add_([one.weight], [other.weight]))

"""Weights that are written while gathered copies of them are kept, by whatever means; and weights that are exchanged."""

import copy
import ctypes
import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, with_copies
from shardrt import DTensor
from shardrt.comm import World
from toys import shard_blocks, step_all


def with_and_without_copies(body: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(body)
    def run(world: World, **parameters: Any) -> None:
        body(world, **parameters)
        with_copies(body)(world, **parameters)

    return run


Write = Callable[[Any, Any, World], object]


def by_address(p: Any, two: Any, world: World) -> None:
    local = p.to_local()
    ctypes.memmove(local.data_ptr(), two.to_local().data_ptr(), local.nbytes)


# Each doubles a parameter of ones. `two` has its placements.
WRITES: dict[str, Write] = {
    "copy_": lambda p, two, world: p.copy_(two),
    "data.copy_": lambda p, two, world: p.data.copy_(two),
    "data.mul_": lambda p, two, world: p.data.mul_(2),
    "data of data": lambda p, two, world: p.data.data.copy_(two),
    "rows of data": lambda p, two, world: p.data[0:].mul_(2),
    "list of data": lambda p, two, world: torch._foreach_copy_([p.data], [two]),
    "data =": lambda p, two, world: setattr(p, "data", two),
    "local": lambda p, two, world: p.to_local().mul_(2),
    "local of data": lambda p, two, world: p.data.to_local().mul_(2),
    "local, if it is not empty": lambda p, two, world: p.to_local().numel() and p.to_local().mul_(2),
    "attribute": lambda p, two, world: p._local_tensor.mul_(2),
    "data of local": lambda p, two, world: p.to_local().data.mul_(2),
    "numpy": lambda p, two, world: p.detach().to_local().numpy().__imul__(2),
    "address": by_address,
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(1, 2, 3)
@with_and_without_copies
def test_weights_written_after_an_evaluation(world: World, dtype: torch.dtype | None) -> None:
    """The next forward uses them, with and without gradients; with one row, some ranks have an empty shard."""
    x = torch.ones(2, 6)
    for rows, training in ((1, False), (5, True)):
        for name, write in WRITES.items():
            model = nn.Linear(6, rows, bias=False)
            nn.init.ones_(model.weight)
            shardrt.fully_shard(model, reshard_after_forward=False, mp_policy=shardrt.MixedPrecisionPolicy(dtype))
            with torch.no_grad():
                model(x)
                write(model.weight, model.weight.detach().clone().fill_(2), world)
            with torch.set_grad_enabled(training):
                assert torch.equal(model(x).detach().float(), torch.full((2, rows), 12.0)), f"{name} {rows}"


@on_ranks(2, 3)
@with_and_without_copies
def test_weights_written_by_one_rank(world: World) -> None:
    """All ranks gather again: in a forward, of the root or of a module inside, in `unshard`, and for `unsharded`."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    shard_blocks(model, "", reshard_after_forward=False)
    x = torch.ones(1, 6)
    last = model[1].weight
    for gather in (
        lambda: model(x),
        lambda: model[1](torch.full((1, 6), 6.0)),
        lambda: (model[1].unshard(), model(x))[1],
        lambda: in_unsharded(model, x),
    ):
        with torch.no_grad():
            last.data.fill_(1)
            assert model(x)[0, 0] == 36
            if world.rank == world.size - 1:
                last.to_local().mul_(2)
            expected = 6 * last.full_tensor().sum(1)
            assert torch.equal(gather()[0], expected)
            assert expected.max() == 72


def in_unsharded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with shardrt.unsharded(model):
        return model(x)


@on_ranks(2)
def test_ranks_run_on_their_own_inside_of_unsharded(world: World) -> None:
    """Numbers of forwards differ: ranks do not meet there."""
    model = shardrt.fully_shard(nn.Linear(6, 6), reshard_after_forward=False)
    with torch.no_grad(), shardrt.unsharded(model):
        number = world.comm.number
        for _ in range(1 + world.rank):
            model(torch.ones(1, 6))
        assert world.mesh.communicator("gather").number >= 0
        assert world.comm.number == number


class Sign(torch.optim.Optimizer):
    """A step by the sign of the gradient, which writes in one of several ways."""

    def __init__(self, params: Any, way: str) -> None:
        super().__init__(params, {})
        self._way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            step = param.grad.sign().mul(-0.01)
            if self._way == "data =":
                param.data = param.data + step
            elif self._way == "data" or not isinstance(param, DTensor):
                param.data.add_(step)
            elif self._way == "attribute":
                param._local_tensor.data.add_(step.to_local())


@pytest.mark.parametrize("way", ["data", "data =", "attribute"])
@on_ranks(1, 2, 3)
@with_and_without_copies
def test_optimizers_that_write_data(world: World, way: str) -> None:
    """Parameters stay gathered over micro-batches, and are those of one process after each step."""
    for keeps in (False, True):
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        model: Any = copy.deepcopy(whole)
        for layer in (model[0], model[2], model):
            shardrt.fully_shard(layer, reshard_after_forward=not keeps)
        model.set_reshard_after_backward(not keeps)
        optimizers = [Sign(each.parameters(), way) for each in (whole, model)]
        for _ in range(3):
            x = torch.randn(4 * world.size, 5, dtype=torch.float64)
            for micro in x.chunk(2):
                whole(micro).square().mean().backward()
                model(micro.chunk(world.size)[world.rank]).square().mean().backward()
            step_all(*optimizers)
            torch.testing.assert_close(model(x), whole(x), rtol=0, atol=1e-12)
            model.reset_iter_state()


# ---------------------------------------------------------------------- exchanged


def mean(tensor: torch.Tensor) -> float:
    tensor = tensor.detach()
    return float((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).mean())


def exchange_with_average(p: Any, q: Any) -> tuple[float, ...]:
    average = p.detach().clone().fill_(5)
    p.data, average = average, p.data
    between = mean(p), mean(average)
    p.data, average = average, p.data
    return *between, mean(p), mean(average)


def exchange_two(p: Any, q: Any) -> tuple[float, ...]:
    p.data, q.data = q.data, p.data
    between = mean(p), mean(q)
    q.data, p.data = p.data, q.data
    return *between, mean(p), mean(q)


def back_up(p: Any, q: Any) -> tuple[float, ...]:
    """As averages of weights in many training scripts do."""
    backup, shadow = [each.data for each in (p, q)], [each.data.clone().fill_(3) for each in (p, q)]
    for each, value in zip((p, q), shadow, strict=True):
        each.data = value
    between = mean(p), mean(q), mean(backup[0])
    p.data.add_(1)
    for each, value in zip((p, q), backup, strict=True):
        each.data = value
    return *between, mean(p), mean(q)


def aliases_of_aliases(p: Any, q: Any) -> tuple[float, ...]:
    first, second = p.data, p.detach()
    third = second.data
    p.data = q.data.clone()
    first.mul_(3)
    between = mean(p), mean(first), mean(second), mean(third)
    second.data = q.detach().clone().fill_(9)
    p.data.mul_(2)
    return *between, mean(p), mean(q), mean(first), mean(second), mean(third)


def vector(p: Any, q: Any) -> tuple[float, ...]:
    old = [p.data, q.data]
    values = torch.nn.utils.parameters_to_vector([p, q]).detach().clone()
    torch.nn.utils.vector_to_parameters(values * 2, [p, q])
    return mean(p), mean(q), mean(old[0]), mean(old[1])


def to_itself(p: Any, q: Any) -> tuple[float, ...]:
    old = p.data
    p.data = old
    old.mul_(2)
    return mean(p), mean(old)


EXCHANGES: list[Callable[[Any, Any], tuple[float, ...]]] = [
    exchange_with_average,
    exchange_two,
    back_up,
    aliases_of_aliases,
    vector,
    to_itself,
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["sharded", "distributed", "gathered"])
@on_ranks(1, 2, 3)
@with_and_without_copies
def test_what_was_detached_keeps_its_values(world: World, kind: str, mode: Any) -> None:
    """As in one process, after a parameter's data was assigned; and the next forward uses what was assigned."""
    for exchange in EXCHANGES:
        if exchange is aliases_of_aliases and kind == "gathered":
            continue  # what was made of something detached stays the memory of the gathered parameter
        if exchange is vector and mode is torch.inference_mode:
            continue  # torch makes no views of DTensors in this mode
        expected = None
        for sharded in (False, True):
            model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False))
            nn.init.ones_(model[0].weight)
            nn.init.constant_(model[1].weight, 2)
            if sharded and kind == "distributed":
                for layer in model:
                    placed = shardrt.distribute_tensor(layer.weight.detach(), world.mesh, [shardrt.Shard(0)])
                    layer.weight = nn.Parameter(placed)
            elif sharded:
                shardrt.fully_shard(model, reshard_after_forward=False)
            gathered = sharded and kind == "gathered"
            with shardrt.unsharded(model) if gathered else nullcontext(), mode():
                assert isinstance(model[0].weight, DTensor) == (sharded and not gathered)
                found = exchange(model[0].weight, model[1].weight)
            if not sharded:
                expected = found
                values = [mean(layer.weight) for layer in model]
        assert found == expected, exchange.__name__
        assert [mean(layer.weight) for layer in model] == values, exchange.__name__


@on_ranks(2)
def test_exchange_with_a_copy_of_the_model(world: World) -> None:
    model = shardrt.fully_shard(nn.Linear(4, 4, bias=False))
    nn.init.ones_(model.weight)
    average: Any = copy.deepcopy(model)
    x = torch.ones(1, 4)
    with torch.no_grad():
        average.weight.fill_(5)
        for expected in ((20, 4), (4, 20)):
            model.weight.data, average.weight.data = average.weight.data, model.weight.data
            assert (float(model(x)[0, 0]), float(average(x)[0, 0])) == expected


@on_ranks(2)
def test_tensors_that_are_passed_by_keyword(world: World) -> None:
    weight, end = torch.zeros(5, 3), torch.ones(5, 3)
    sharded, other = (shardrt.distribute_tensor(each, world.mesh, [shardrt.Shard(0)]) for each in (weight, end))
    with torch.no_grad():
        assert torch.equal(sharded.lerp_(end=other, weight=0.5).full_tensor(), torch.full((5, 3), 0.5))


@on_ranks(2)
def test_local_tensors_of_what_was_detached(world: World) -> None:
    """They follow: they are the memory of what keeps the values. That of the parameter stays."""
    model = shardrt.fully_shard(nn.Linear(4, 4, bias=False))
    nn.init.ones_(model.weight)
    place = model.weight.to_local().data_ptr()
    old = model.weight.data
    local = old.to_local()
    model.weight.data = torch.full((4, 4), 2.0)
    assert model.weight.to_local().data_ptr() == place
    local.mul_(3)
    assert mean(old) == 3
    assert mean(model.weight) == 2


@on_ranks(2)
def test_storages_cannot_be_exchanged(world: World) -> None:
    for trainable in (True, False):
        model = nn.Linear(4, 4, bias=False).requires_grad_(trainable)
        shardrt.fully_shard(model)
        with pytest.raises(RuntimeError, match="Cannot swap"):
            torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach().clone()))
        with pytest.raises(NotImplementedError, match=r"set_.*parameter 'weight'"), torch.no_grad():
            model.weight.set_(torch.ones(4, 4))
        with pytest.raises(NotImplementedError, match=r"torch's parametrizations, .* take the module around it"):
            nn.utils.parametrize.register_parametrization(model, "weight", nn.Tanh())


@pytest.mark.parametrize("after", [True, None, False])
@on_ranks(2, more=(1,))
@with_and_without_copies
def test_a_teacher_between_forward_and_backward(world: World, after: bool | None) -> None:
    """Its weights are written in and out again: the backward uses those of its own forward."""
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    sharded = copy.deepcopy(whole)
    shardrt.fully_shard(sharded, reshard_after_forward=after)
    for model in (whole, sharded):
        x, params = torch.ones(2, 4, dtype=torch.float64), list(model.parameters())
        loss = model(x).square().sum()
        own = [param.data for param in params]
        for param in params:
            param.data = torch.zeros_like(param)
        with torch.no_grad():
            assert not model(x).any()
        for param, data in zip(params, own, strict=True):
            param.data = data
        loss.backward()
    for param, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)


@on_ranks(2, more=(1,))
def test_gradients_are_seen_after_a_forward_whose_graph_is_dropped(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardrt.fully_shard(model[0])
    shardrt.fully_shard(model)
    x = torch.full((2, 4), float(world.rank + 1))
    model(x).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    model(x).detach()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == expected > 1e-3
    clipped = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    torch.testing.assert_close(float(clipped), 1e-3)
    for param in model.parameters():
        param.grad = None
    for module in (model, model[0]):
        module.reshard()
    assert all(isinstance(param, DTensor) and param.grad is None for param in model.parameters())


class UsesLate(nn.Module):
    """Computes with the weight of a module inside, after that has run, in the place of its second call."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.inner, self.wait_s = nn.Linear(4, 4, bias=False), wait_s

    def forward(self, x: torch.Tensor, *, calls: bool) -> torch.Tensor:
        made = self.inner(x)
        if calls:
            return self.inner(made)
        time.sleep(self.wait_s)
        return nn.functional.linear(made, self.inner.weight)


@on_ranks(2)
def test_other_ranks_wait_to_write_what_a_forward_without_a_graph_still_reads(world: World) -> None:
    model = UsesLate(0.3 if world.rank == 1 else 0.0)
    nn.init.eye_(model.inner.weight)
    shardrt.fully_shard(model.inner)
    shardrt.fully_shard(model)
    x = torch.ones(2, 4)
    with torch.no_grad():
        for _ in range(3):
            model(x, calls=True)
        for step in range(3):
            assert mean(model(x, calls=False)) == 4.0**step
            model.inner.weight.mul_(2)
            model(x, calls=True)

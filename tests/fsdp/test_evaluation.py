"""Evaluation, inference and generation before, between and after training steps; several backwards through one forward."""

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks
from shardrt import DTensor
from shardrt.comm import World
from toys import OddMLP, TiedGPT, batch, buckets_of, compare, loss_of, overlapping, shard_blocks, tokens, train_side_by_side

TOLERANCE = 1e-12


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(1, 2, 3)
def test_forwards_without_gradients_around_training_steps(world: World, mode: type[AbstractContextManager[None]]) -> None:
    """Also as the very first forward. Each rank evaluates its own rows."""

    def evaluate(step: int, model: nn.Module) -> None:
        model.eval()
        with mode():
            outputs[step, model] = model(batch(100 + world.rank))
        model.train()

    outputs: dict[tuple[int, nn.Module], torch.Tensor] = {}
    whole = OddMLP().double()
    sharded = train_side_by_side(world, whole, map(batch, range(3)), before_step=evaluate)
    evaluate(3, whole)
    evaluate(3, sharded)
    for step in range(4):
        torch.testing.assert_close(outputs[step, sharded], outputs[step, whole], rtol=TOLERANCE, atol=TOLERANCE)
    assert not any(group.state.shown for group in sharded.param_group.with_descendants() if group.reshards_after_forward)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_evaluation_between_forward_and_backward(world: World, reshard_after_forward: bool) -> None:
    """The evaluation reshards groups that the backward needs, or uses them gathered; the backward gathers them again."""
    whole = OddMLP().double()
    sharded = shard_blocks(copy.deepcopy(whole), reshard_after_forward=reshard_after_forward)
    loss = loss_of(sharded, batch(0).chunk(world.size)[world.rank])
    with torch.no_grad():
        torch.testing.assert_close(sharded(batch(1)), whole(batch(1)), rtol=TOLERANCE, atol=TOLERANCE)
    loss.backward()
    loss_of(whole, batch(0)).backward()
    compare(whole, sharded, TOLERANCE, "after the backward")


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@on_ranks(1, 2)
def test_evaluation_between_backward_and_clipping(world: World, options: dict[str, bool]) -> None:
    """`model.parameters()` are the sharded ones again, with gradients; in `unsharded` they stay the gathered ones."""
    for bucket in (0, 1 << 20):
        model = shard_blocks(OddMLP().double(), **options)
        with buckets_of(bucket):
            loss_of(model, batch(0)).backward()
            with torch.no_grad():
                model(batch(1))
                model.blocks[0](torch.zeros(1, 13, dtype=torch.float64))
            assert all(isinstance(param, DTensor) and param.grad is not None for param in model.parameters())
            before = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            torch.testing.assert_close(norm, before)
            after = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
            torch.testing.assert_close(after, torch.full_like(after, 1e-3), rtol=1e-2, atol=0)
            with shardrt.unsharded(model), torch.no_grad():
                model(batch(1))
                assert not any(isinstance(param, DTensor) for param in model.parameters())


@on_ranks(2, 3)
def test_three_backwards_through_one_forward(world: World) -> None:
    """Through the whole graph, a part of it, and, after a usual step, the whole graph again, with a graph of gradients."""
    whole = OddMLP().double()
    sharded = shard_blocks(copy.deepcopy(whole))
    for model, x in ((whole, batch(0)), (sharded, batch(0).chunk(world.size)[world.rank])):
        out = model(x)
        (out**2).mean().backward(retain_graph=True)
        out[:, 0].mean().backward(retain_graph=True)
        loss_of(model, x).backward()
        (3 * out.mean()).backward(create_graph=True)
    compare(whole, sharded, TOLERANCE, "after the backwards")


def generate(model: nn.Module, prompt: torch.Tensor, length: int) -> torch.Tensor:
    with torch.inference_mode():
        for _ in range(length):
            prompt = torch.cat([prompt, model(prompt)[:, -1:].argmax(-1)], dim=1)
    return prompt


@on_ranks(1, 2, 3)
def test_token_by_token(world: World) -> None:
    """Each rank continues its own prompt of the same length; the model trains between two texts."""
    whole = TiedGPT().double()
    sharded = shard_blocks(copy.deepcopy(whole))
    prompt = tokens(world.rank, rows=2)[:, :3]
    for step in range(2):
        assert torch.equal(generate(sharded, prompt, 5), generate(whole, prompt, 5))
        for model, x in ((whole, tokens(step)), (sharded, tokens(step).chunk(world.size)[world.rank])):
            loss_of(model, x).backward()
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
    root = sharded.param_group
    assert root.runtime.memory.in_use == root.layout.nbytes * root.state.shown


class Energy(OddMLP):
    """Recomputes its blocks, if it is told to; remembers the input of the first."""

    recomputes = False
    hidden: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.out(torch.tanh(x)).sum()


def forces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of an energy and of its gradient."""
    energy = model(x)
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + (force - 1).square().sum()


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the gradient at an activation between sharded modules."""
    (grad,) = torch.autograd.grad(model(x), model.hidden, create_graph=True)
    return grad.square().sum()


def curvature(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient, which the loss differentiates a third time."""
    (first,) = torch.autograd.grad(model(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().sum()


def between(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A penalty between other forwards, as of a critic, and an evaluation."""
    first = model(2 * x)
    total = first + forces(model, x) + model(x - 1)
    with torch.no_grad():
        model(x)
    return total + forces(model, x / 2)


@pytest.mark.parametrize("loss", [forces, penalty, curvature, between])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}])
@on_ranks(2, more=(1,))
def test_gradients_of_gradients(
    world: World, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], options: dict[str, bool]
) -> None:
    """The graph of a backward needs the parameters, which stay gathered until it has been differentiated itself."""
    for bucket, recomputes in ((0, False), (1 << 20, False), (0, True)):
        whole = Energy().double()
        whole.recomputes = recomputes
        sharded = shard_blocks(copy.deepcopy(whole), **options)
        for step in range(2):
            x = batch(step).requires_grad_()
            with buckets_of(bucket):
                expected, found = loss(whole, x), loss(sharded, x)
                torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
                expected.backward()
                found.backward()
            compare(whole, sharded, 1e-11, f"step {step}, buckets of {bucket}, recomputes {recomputes}")
            groups = list(sharded.param_group.with_descendants())
            assert all(not group.state.gathered or group.gather.resident for group in groups), "freed again"
            for model in (whole, sharded):
                torch.optim.SGD(model.parameters(), 1e-2).step()
                model.zero_grad()


Alone = Callable[[Any, int], None]  # runs forwards of this rank alone, as many


def rounds(model: nn.Module, number: int) -> None:
    """Forwards of this rank alone."""
    for _ in range(number):
        model(batch(7))


def parts(model: Any, number: int) -> None:
    """Forwards of this rank alone, of some blocks."""
    for index in range(number):
        model.blocks[index % 2](torch.zeros(2, 13, dtype=torch.float64))


def once(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    loss = loss_of(model, x)
    with shardrt.unsharded(model), torch.no_grad():
        alone(model, number)
    loss.backward()


def around_several_losses(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    with shardrt.unsharded(model), torch.no_grad():
        alone(model, number)
    first = loss_of(model, x)
    with torch.inference_mode(), shardrt.unsharded(model):
        alone(model, 2 * number)
    second = loss_of(model, 2 * x)
    with shardrt.unsharded(model.blocks), torch.no_grad():
        parts(model, number)
    first.backward()
    with shardrt.unsharded(model), torch.no_grad():
        alone(model, number)
    second.backward()
    with shardrt.unsharded(model), torch.no_grad():
        alone(model, number)


def nested(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    loss = loss_of(model, x)
    with torch.no_grad(), shardrt.unsharded(model):
        alone(model, number)
        with shardrt.unsharded(model.blocks):
            alone(model, number)
        with shardrt.unsharded(model):
            alone(model, number)
        alone(model, number)
    loss.backward()


def with_a_step_inside(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    with shardrt.unsharded(model):
        with torch.no_grad():
            alone(model, number)
        loss = loss_of(model, x)
        with torch.no_grad():
            alone(model, number)
        loss.backward()
        with torch.no_grad():
            alone(model, number)


def after_unshard(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    loss = loss_of(model, x)
    for module in (model, model.blocks[1]):
        module.unshard()
    with torch.no_grad():
        model(x)
        model.unshard()
        with shardrt.unsharded(model):
            alone(model, number)
    loss.backward()


def between_microbatches(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    for index in range(3):
        model.set_requires_gradient_sync(index == 2)
        loss = loss_of(model, x)
        with shardrt.unsharded(model), torch.no_grad():
            alone(model, number)
        loss.backward()
        with shardrt.unsharded(model), torch.no_grad():
            alone(model, number)


class Looking(OddMLP):
    """In its forward, it first runs some of its blocks; how often is up to the rank."""

    number = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), shardrt.unsharded(self):
            parts(self, 2 * self.number)
        return super().forward(x)


def inside_of_a_forward(model: Any, alone: Alone, number: int, x: torch.Tensor) -> None:
    model.number = number
    loss_of(model, x).backward()


# What each loss multiplies the batch by.
USES: dict[Callable[[Any, Alone, int, torch.Tensor], None], tuple[int, ...]] = {
    once: (1,),
    around_several_losses: (1, 2),
    nested: (1,),
    with_a_step_inside: (1,),
    after_unshard: (1,),
    between_microbatches: (1, 1, 1),
    inside_of_a_forward: (1,),
}


@pytest.mark.rest
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@on_ranks(2, more=(3,))
def test_ranks_run_different_numbers_of_forwards_in_unsharded(world: World, reshard_after_forward: bool | None) -> None:
    """One rank runs none. Gradients are those of the losses alone, also in the next step, which follows the recorded order."""
    for (use, factors), (alone, overlaps) in itertools.product(USES.items(), ((rounds, nullcontext), (parts, overlapping))):
        whole, plain = OddMLP().double(), (Looking if use is inside_of_a_forward else OddMLP)().double()
        plain.load_state_dict(whole.state_dict())
        sharded = shard_blocks(plain, reshard_after_forward=reshard_after_forward)
        for step in range(2):
            x = batch(step)
            with overlaps(), buckets_of(1 << 20 if step else 0):
                use(sharded, alone, 3 * world.rank, x.chunk(world.size)[world.rank])
            for factor in factors:
                loss_of(whole, factor * x).backward()
            compare(whole, sharded, TOLERANCE, f"{use.__name__}, {alone.__name__}, {overlaps.__name__}, step {step}")
            for model in (whole, sharded):
                torch.optim.SGD(model.parameters(), 0.1).step()
                model.zero_grad()

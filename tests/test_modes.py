"""Evaluation, inference and generation before, between and after training steps; several backwards through one forward."""

import copy
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardrt.comm import World
from toys import OddMLP, TiedGPT, batch, loss_of, shard_blocks, tokens, train_side_by_side

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
    assert not any(group.visible.unsharded for group in sharded.param_group.with_descendants() if group.reshards_after_forward)


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
    for param, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=TOLERANCE, atol=TOLERANCE)


@on_ranks(2, 3)
def test_three_backwards_through_one_forward(world: World) -> None:
    """Through the whole graph, a part of it, and the whole graph again; then a usual step."""
    whole = OddMLP().double()
    sharded = shard_blocks(copy.deepcopy(whole))
    for model, x in ((whole, batch(0)), (sharded, batch(0).chunk(world.size)[world.rank])):
        out = model(x)
        (out**2).mean().backward(retain_graph=True)
        out[:, 0].mean().backward(retain_graph=True)
        (3 * out.mean()).backward()
        loss_of(model, x).backward()
    for param, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=TOLERANCE, atol=TOLERANCE)


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
    assert root.runtime.memory.in_use == root.layout.nbytes * root.visible.unsharded

"""Selective activation checkpoints, which compare the operations of a module's two runs, around sharded modules and in them."""

import copy
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shardrt
from ranks import on_ranks
from shardrt.comm import World
from toys import buckets_of, overlapping, shard_blocks, uncompiled

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten.addmm.default]
VIEWS = [*PRODUCTS, aten.view.default, aten.alias.default, aten.t.default, aten._to_copy.default, aten.tanh.default]
Policy = list[Any] | Callable[..., CheckpointPolicy]


def keep_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def prefer(context: object, operator: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """Two linear layers, one without a bias, of (rows, 3, width); it may be told to double, by an argument with a name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return y if factor is None else y * factor


class Net(nn.Module):
    """Blocks, of which some are recomputed: where and by what policy is up to `way`."""

    way: ClassVar[Any]  # a function of the net, of what recomputes, and of tokens

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inp = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, tokens: torch.Tensor, again: Callable[..., torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.way(again, tokens)
        return out.square().mean()


def each(net: Net, again: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = net.inp(tokens)
    for block in net.blocks:
        x = again(block, x)
    return x


def several(net: Net, again: Any, tokens: torch.Tensor) -> torch.Tensor:
    """In one region; and the whole once more, with the layer that takes integers."""

    def blocks(x: torch.Tensor) -> torch.Tensor:
        for block in net.blocks:
            x = block(x)
        return x

    return again(blocks, net.inp(tokens)) + again(lambda tokens: blocks(net.inp(tokens)), tokens)


def shared(net: Net, again: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Blocks that take one input, by name one of them another as well; and one that runs again, outside."""
    x, factor = net.inp(tokens), net.inp(tokens + 1)
    first, second, third = net.blocks
    y = again(first, x) + again(second, x, factor=factor)
    return third(y) + again(third, x) + x


WAYS = [each, several, shared]


def run(net: nn.Module, policy: Policy | None, tokens: torch.Tensor) -> torch.Tensor:
    if policy is None:
        return net(tokens, lambda function, *args, **kwargs: function(*args, **kwargs))
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return net(tokens, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def gradients(net: nn.Module) -> list[torch.Tensor]:
    found = [param.grad.full_tensor() if isinstance(param.grad, shardrt.DTensor) else param.grad for param in net.parameters()]
    net.zero_grad()
    return found  # type: ignore[return-value]


POLICIES: dict[str, Policy] = {"products": PRODUCTS, "views": VIEWS, "all": keep_all, "prefer": prefer}


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2, more=(1, 3))
def test_selective_checkpoints(world: World, policy: str) -> None:
    """Outside of sharded modules; in the first steps, and where groups are gathered ahead, or are gathered by hand."""
    options = [{}, {"reshard_after_forward": False}, {"reshard_after_forward": 1}]
    for way, kwargs, (bucket, context) in itertools.product(WAYS, options, ((1 << 20, nullcontext), (0, overlapping))):
        Net.way = way
        torch.manual_seed(0)
        whole = Net(12).double()
        model: Any = shard_blocks(copy.deepcopy(whole), **kwargs)
        for step in range(3):
            tokens = torch.arange(6 * world.size).reshape(-1, 3) % 5 + step % 2
            with buckets_of(bucket), context():
                if step == 2:
                    model.unshard()
                    model.blocks[1].unshard()
                run(model, POLICIES[policy], tokens.chunk(world.size)[world.rank]).backward()
            run(whole, None, tokens).backward()
            found, expected = gradients(model), gradients(whole)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def nested(net: Net, again: Any, tokens: torch.Tensor) -> torch.Tensor:
    return again(each, net, functools.partial(checkpoint, use_reentrant=False), tokens)


def call(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(*args, **kwargs)


@pytest.mark.parametrize("low_precision", [False, True])
@on_ranks(2, more=(1,))
@uncompiled()
def test_large_layers_in_selective_checkpoints(world: World, low_precision: bool) -> None:
    """Whose gradients are computed in place: the bits of a run without checkpoints. Casts of parameters are not compared."""
    mixed = shardrt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if low_precision else None
    cases = (each, False, "all"), (several, False, "views"), (nested, False, "products"), (each, True, "all")
    for way, all_of_it, policy in cases:
        Net.way = way
        torch.manual_seed(0)
        whole = Net(520)
        models = [shard_blocks(copy.deepcopy(whole), **({} if mixed is None else {"mp_policy": mixed})) for _ in range(2)]
        for step in range(3):
            tokens = (torch.arange(6 * world.size).reshape(-1, 3) % 5 + step % 2).chunk(world.size)[world.rank]
            for model, chosen in zip(models, (None, POLICIES[policy]), strict=True):
                if step == 1:
                    for module in (model, *model.blocks):
                        module.unshard()
                if all_of_it and chosen is not None:
                    loss = run(lambda tokens, again, model=model: again(model, tokens, call), chosen, tokens)
                else:
                    loss = run(model, chosen, tokens)
                if step == 2:
                    with torch.no_grad():
                        run(model, None, tokens)
                loss.backward()
            torch.testing.assert_close(*map(gradients, models), rtol=0, atol=0)

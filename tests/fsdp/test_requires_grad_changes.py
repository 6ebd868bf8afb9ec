"""`requires_grad` and grad modes that change between forwards and backwards, against one process in float64."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, settings_of
from shardrt import DTensor
from shardrt.comm import Communicator, Op, Stream, Work, World
from toys import Elsewhere, OddMLP, UsedTwice, batch, buckets_of, check_backward, compare, paired, shard_blocks, step_all

DRAWS = int(os.environ.get("SHARDRT_TEST_DRAWS", "6"))


class Sampler(UsedTwice):
    """Has methods that take no part in training."""

    recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.out(x)

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def evaluate(self, x: torch.Tensor) -> float:
        """In the caller's mode; returns no tensor."""
        return self(x).sum().item()

    @torch.no_grad()
    def refine(self, x: torch.Tensor) -> torch.Tensor:
        """Enables gradients inside of no_grad."""
        with torch.enable_grad():
            return self(x)


METHODS = ("generate", "evaluate", "refine")


class Pair:
    """A model, whole and sharded, and what is drawn to be done to both."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world, self.draw = world, draw
        torch.manual_seed(draw.randrange(1000))
        whole: Any = Sampler(layers=2).double()
        whole.recomputes = draw.random() < 0.25
        sharded = copy.deepcopy(whole)
        options: dict[str, Any] = {"reshard_after_forward": draw.choice([None, None, True, False])}
        if world.size == 4:
            if draw.random() < 0.4:
                options["mesh"] = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            elif draw.random() < 0.5:
                options["reshard_after_forward"] = 2
        if draw.random() < 0.7:
            shard_blocks(sharded, **options)
        else:
            shardrt.fully_shard(sharded, **options)
        for method in METHODS:
            shardrt.register_fsdp_forward_method(sharded, method)
        self.replicates = "mesh" in options
        self.models: tuple[Any, Any] = whole, sharded
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self.shards = dict(sharded.named_parameters())
        self.live: list[tuple[torch.Tensor, torch.Tensor]] = []  # losses to which no backward has come back yet
        self.syncs, self.held, self.log = True, False, [repr(options), f"recomputes {whole.recomputes}"]

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(self.world.size)[self.world.rank]

    def freeze(self, names: list[str], wants: bool) -> None:
        by_module = self.draw.random() < 0.5  # through the module, or as an optimizer does that refers to the shards
        for name in names:
            self.models[0].get_parameter(name).requires_grad_(wants)
            (self.models[1].get_parameter(name) if by_module else self.shards[name]).requires_grad_(wants)

    def some(self) -> list[str]:
        prefix = self.draw.choice(["", "blocks", "blocks.0", "blocks.1.up", "inp", "out"])
        return [name for name in self.shards if name.startswith(prefix)]

    def forward(self) -> None:
        x = batch(self.draw.randrange(100))
        given = self.draw.random() < 0.5
        method = self.draw.choice(["__call__", "__call__", "__call__", "refine"])
        mode = torch.no_grad if method == "refine" and self.draw.random() < 0.5 else nullcontext
        losses = []
        for model, rows in zip(self.models, (x, self.mine(x)), strict=True):
            with mode():
                out = getattr(model, method)(rows.clone().requires_grad_(given and method != "refine"))
            losses.append(((out - rows[:, :3]) ** 2).mean())
        assert losses[0].requires_grad == losses[1].requires_grad
        if losses[0].requires_grad:
            self.live.append((losses[0], losses[1]))

    def without_graph(self) -> None:
        x = batch(self.draw.randrange(100))
        mode: Callable[[], AbstractContextManager[None]]
        methods = ["__call__", "__call__", "generate", "evaluate", "evaluate"]
        modes = [torch.no_grad, torch.inference_mode, nullcontext, nullcontext, torch.no_grad]
        method, mode = self.draw.choice(list(zip(methods, modes, strict=True)))
        for model in self.models:
            with mode():
                getattr(model, method)(self.mine(x))
        if not self.live:
            assert all(isinstance(param, DTensor) for param in self.models[1].parameters())

    def adapters_off(self) -> None:
        names = [name for name in self.some() if self.shards[name].requires_grad]
        self.freeze(names, False)
        if self.draw.random() < 0.5 or self.models[0].recomputes:
            self.without_graph()
        else:
            self.forward()
        self.freeze(names, True)

    def toggle(self) -> None:
        if self.models[0].recomputes and self.live:  # torch refuses to recompute another graph
            self.adapters_off()
        else:
            self.freeze(self.some(), self.draw.random() < 0.6)

    def backward(self) -> None:
        if not self.live:
            return
        chosen = self.draw.sample(self.live, self.draw.randint(1, len(self.live)))
        self.live = [pair for pair in self.live if all(pair is not each for each in chosen)]
        syncs, reduces = self.draw.random() < 0.6, self.draw.random() < 0.7
        self.models[1].set_requires_gradient_sync(syncs)
        self.models[1].set_requires_all_reduce(reduces)
        self.syncs = syncs and (reduces or not self.replicates)
        torch.stack([pair[0] for pair in chosen]).sum().backward()
        torch.stack([pair[1] for pair in chosen]).sum().backward()
        if self.syncs and not self.live:
            self.models[1].reshard()
            compare(*self.models, 1e-10, "after a backward")

    def step(self) -> None:
        if self.live or not self.syncs:
            return
        self.models[1].reshard()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step_all(optimizer)
        compare(*self.models, 1e-10, "after a step")

    def run(self, events: int) -> None:
        kinds = [self.forward, self.forward, self.backward, self.backward, self.without_graph]
        for _ in range(events):
            event = self.draw.choice([*kinds, self.adapters_off, self.toggle, self.step])
            self.log.append(event.__name__)
            event()
        while self.live:
            self.backward()
        self.freeze(list(self.shards), True)
        self.models[1].set_requires_gradient_sync(True)
        self.models[1].set_requires_all_reduce(True)
        for model, x in zip(self.models, (batch(0), self.mine(batch(0))), strict=True):
            model(x).square().mean().backward()
        self.models[1].reshard()
        compare(*self.models, 1e-10, "at the end")


@contextmanager
def drawn(world: World, draw: random.Random) -> Iterator[None]:
    with buckets_of(draw.choice([0, 1 << 20])), settings_of(world, node_memory=draw.random() < 0.5):
        yield


@pytest.mark.parametrize("first", range(0, DRAWS * 4, DRAWS))
@on_ranks(1, 2, 4)
def test_drawn_changes(world: World, first: int) -> None:
    for seed in range(first, first + DRAWS):
        draw = random.Random(seed)
        with drawn(world, draw):
            pair = Pair(world, draw)
            try:
                pair.run(14)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {', '.join(pair.log)}") from error


class Adversaries(nn.Module):
    """Two networks of which one forward trains both, as a training step that is a method does."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judge = OddMLP(), nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 1)])

    def judged(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.judge:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor, order: str) -> torch.Tensor:
        losses = []
        for turn in order:
            made = self.made(x)
            self.judge.requires_grad_(turn == "j")
            if turn == "j":
                losses.append(self.judged(made.detach()).mean() - self.judged(x[:, :3]).mean())
            else:
                losses.append(-self.judged(made).mean())
        self.judge.requires_grad_(True)
        return torch.stack(losses).sum()


@pytest.mark.parametrize("order", ["jm", "mj", "m"])
@pytest.mark.parametrize("together", [False, True])
@on_ranks(2)
def test_a_module_freezes_another_in_a_forward_around_both(world: World, order: str, together: bool) -> None:
    """One backward of two forwards of a module, of which it was frozen in one."""
    whole = Adversaries().double()
    sharded: Any = copy.deepcopy(whole)
    if not together:
        for layer in sharded.judge:
            shardrt.fully_shard(layer)
        shardrt.fully_shard(sharded.made)
    shardrt.fully_shard(sharded)
    for step in range(2):
        whole(batch(step), order).backward()
        sharded(batch(step).chunk(world.size)[world.rank], order).backward()
        compare(whole, sharded, 1e-12, f"step {step}")


class FrozenAgain(nn.Module):
    """A layer that trains behind another one, then is frozen, and runs on what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(self.first(x[:, :3]))
        self.layer.requires_grad_(False)
        fixed = self.layer(x[:, :5])
        self.layer.requires_grad_(True)
        return (made - fixed).square().mean()


@on_ranks(2, more=(1, 3))
def test_a_gathered_layer_is_frozen_between_two_calls(world: World) -> None:
    whole = FrozenAgain().double()
    sharded: Any = copy.deepcopy(whole)
    shardrt.fully_shard(sharded.layer, reshard_after_forward=False)
    shardrt.fully_shard(sharded)
    for step in range(3):
        check_backward(world, whole, sharded, batch(step)[: 6 * world.size], loss=lambda model, x: model(x))


class Thawing(OddMLP):
    """Its forward says what trains."""

    trains = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.out.requires_grad_(self.trains)
        return super().forward(x)


@on_ranks(2)
def test_what_a_forward_freezes_stays_frozen(world: World) -> None:
    whole, sharded = paired(Thawing().double())
    for step, trains in enumerate((True, False, False, True)):
        for model, x in ((whole, batch(step)), (sharded, batch(step).chunk(world.size)[world.rank])):
            model.trains = trains
            model(x).square().mean().backward()
        compare(whole, sharded, 1e-12, f"step {step}")
        for model in (whole, sharded):
            assert all(param.requires_grad == trains for param in model.out.parameters())
            model.zero_grad()
            if step == 2:
                model.requires_grad_(True)


@on_ranks(2)
def test_the_gathered_parameters_pass_requires_grad_on(world: World) -> None:
    model = shardrt.fully_shard(OddMLP())
    shards = list(model.parameters())
    loss = model(batch(world.rank).float()).sum()
    seen = list(model.parameters())
    assert not any(isinstance(param, DTensor) for param in seen)
    model.requires_grad_(False)
    assert not any(param.requires_grad for param in shards)
    shards[0].requires_grad_(True)
    seen[1].requires_grad = True
    assert [param.requires_grad for param in seen] == [param.requires_grad for param in shards] == [True, True, *[False] * 26]
    loss.backward()
    assert [param.grad is not None for param in model.parameters()] == [True, True, *[False] * 26]
    with torch.no_grad():
        model(batch(world.rank).float())
    for param in seen:  # kept by the user, while the modules see shards again
        param.requires_grad_(True)
    model(batch(world.rank).float()).sum().backward()
    assert all(param.requires_grad and param.grad is not None for param in model.parameters())


class PlainReduceScatter:
    """A user's."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, op: Op, comm: Communicator, stream: Stream) -> Work:
        return comm.reduce_scatter(out, inp, op, stream=stream)


@pytest.mark.parametrize("kind", ["packed", "offloaded", "codes", "custom", "replicas"])
@on_ranks(1, 2, 4)
def test_accumulated_gradients_of_changing_parameters(world: World, kind: str) -> None:
    """Whatever is trainable at each time: what was accumulated goes on into the next reduction, of more or fewer parameters."""
    options: dict[str, Any] = {}
    if kind == "offloaded":
        options["offload_policy"] = Elsewhere(pin_memory=False)
    if kind == "codes":
        options["quantization_policy"] = shardrt.QuantizationPolicy(reduce=torch.int8, min_numel=1, full_precision_ranks=1)
    if kind == "replicas":
        replicas = max(world.size // 2, 1)
        options["mesh"] = shardrt.init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=("r", "s"))
    whole = OddMLP(layers=1)
    if kind != "codes":
        whole.double()
    sharded: Any = shardrt.fully_shard(copy.deepcopy(whole), **options)
    if kind == "custom":
        sharded.set_custom_reduce_scatter(PlainReduceScatter())
    sets = ["inp", "", "blocks", "out", "inp"]
    for sync in range(2):
        for index, prefix in enumerate(sets):
            for model in (whole, sharded):
                for name, param in model.named_parameters():
                    param.requires_grad_(name.startswith(prefix))
            sharded.set_requires_gradient_sync(index == 4 or kind == "replicas")
            sharded.set_requires_all_reduce(index == 4)
            x = batch(index + 10 * sync).to(whole.inp.weight.dtype)
            whole(x).square().mean().backward()
            sharded(x.chunk(world.size)[world.rank]).square().mean().backward()
        compare(whole, sharded, 0.05 if kind == "codes" else 1e-12, f"round {sync}")
    sharded.reset_iter_state()
    assert sharded.param_group.runtime.memory.in_use == 0


class Remembering(OddMLP):
    """Returns nothing in which tensors can be found."""

    loss: torch.Tensor

    def forward(self, x: torch.Tensor) -> None:  # type: ignore[override]
        self.loss = super().forward(x).square().mean()

    @torch.no_grad()
    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return self.inp(x)


@pytest.mark.parametrize("blocks", [True, False])
@on_ranks(1, 2)
def test_a_root_that_returns_nothing(world: World, blocks: bool) -> None:
    """It stays gathered for its backward; the user sees shards meanwhile, as after an evaluation."""
    whole = Remembering().double()
    sharded: Any = copy.deepcopy(whole)
    (shard_blocks if blocks else shardrt.fully_shard)(sharded)
    shardrt.register_fsdp_forward_method(sharded, "sample")
    for step in range(2):
        for model, x in ((whole, batch(step)), (sharded, batch(step).chunk(world.size)[world.rank])):
            model(x)
            if model is sharded:
                assert all(isinstance(param, DTensor) for param in model.parameters())
            model.loss.backward()
            model.sample(x)
        compare(whole, sharded, 1e-12, f"step {step}")
        assert all(not group.state.gathered or group.gather.resident for group in sharded.param_group.with_descendants())


@on_ranks(1, 2)
def test_methods_without_a_graph_inside_of_unsharded(world: World) -> None:
    model: Any = shard_blocks(Sampler())
    for method in METHODS:
        shardrt.register_fsdp_forward_method(model, method)
    x = batch(world.rank).float()
    for method in METHODS:
        with shardrt.unsharded(model):
            getattr(model, method)(x)
            assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert all(isinstance(param, DTensor) for param in model.parameters())

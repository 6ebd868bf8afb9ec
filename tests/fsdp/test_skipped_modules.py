"""Ranks that run different modules, as layer drop and stochastic depth have them do: a gradient for all, or an error on all."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused, settings_of, with_copies
from shardrt.comm import DeviceMesh, MismatchError, World
from toys import OddBlock, OddMLP, batch, buckets_of, compare, loss_of, paired, shard_blocks, step_all
from uses import Net

STEPS, CHANCES = 4, 0.5


class Around(nn.Module):
    """A block with two sharded blocks inside, which may be skipped as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = OddBlock(width), OddBlock(width)
        self.last = nn.Linear(width, width)
        self.skipped = frozenset[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("first", "second"):
            if name not in self.skipped:
                x = self.get_submodule(name)(x)
        return torch.tanh(self.last(x))


class Dropping(OddMLP):
    """Leaves out the blocks of which `skipped` has the names, and in the one with blocks inside those."""

    recomputes: str | None = None

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[2] = Around(13)
        self.skipped = frozenset[str]()

    def skip(self, names: frozenset[str]) -> None:
        self.skipped = self.blocks[2].skipped = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if str(index) in self.skipped:
                continue
            if self.recomputes is None or index == 2:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recomputes == "reentrant")
        return self.out(x)


def chosen(step: int, rank: int) -> frozenset[str]:
    """The blocks that a rank skips in a step: all ranks some in the same step, and rank 1 all in one."""
    names = ("0", "1", "2", "3", "first", "second")
    if step == 1:
        return frozenset(names) if rank == 1 else frozenset(("0", "2"))
    draws = torch.rand(len(names), generator=torch.Generator().manual_seed(1000 * step + rank))
    return frozenset(name for name, draw in zip(names, draws.tolist(), strict=True) if draw < CHANCES)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for module in (model.blocks[2].first, model.blocks[2].second):
        shardrt.fully_shard(module, **options)
    shard_blocks(model, **options)
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    return model


def train(
    world: World,
    whole: Dropping,
    model: nn.Module,
    *,
    micro: int = 1,
    tolerance: float = 1e-12,
    before: Callable[[int], None] = lambda index: None,
) -> None:
    """Train both, `whole` on the work of all ranks, and compare gradients and parameters in each step."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in (whole, model)]
    for step in range(STEPS):
        parts = [[part.clone() for part in rows.chunk(micro)] for rows in batch(step).chunk(world.size)]
        with buckets_of(0 if step % 2 else 1 << 20):
            for index in range(micro):
                before(index)
                model.skip(chosen(step * micro + index, world.rank))
                loss_of(model, parts[world.rank][index]).backward()
                for rank in range(world.size):
                    whole.skip(chosen(step * micro + index, rank))
                    loss = loss_of(whole, parts[rank][index]) / world.size
                    if loss.requires_grad:  # else this rank has run nothing that is trainable
                        loss.backward()
            for param in whole.parameters():  # zeros also for a block that all ranks have skipped
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)
            compare(whole, model, tolerance, f"step {step}")
        step_all(*optimizers)
    compare(whole, model, tolerance, "at the end")
    model.reshard()
    assert model.param_group.runtime.memory.in_use == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "resharded": {"reshard_after_forward": True},
    "stays": {"reshard_after_forward": False},
}


@pytest.mark.parametrize("kind", OPTIONS)
@on_ranks(1, 2, 3, 4)
def test_each_rank_skips_other_modules(world: World, kind: str) -> None:
    whole = Dropping().double()
    train(world, whole, shard(copy.deepcopy(whole), **OPTIONS[kind]))


@pytest.mark.parametrize("kind", [*OPTIONS, "subgroup"])
@pytest.mark.parametrize("streams", ["inline", "threaded"])
@on_ranks(2, 4)
@with_copies
def test_gathered_in_copies(world: World, kind: str, streams: str) -> None:
    whole = Dropping().double()
    with settings_of(world, host_streams=streams):
        train(world, whole, shard(copy.deepcopy(whole), **OPTIONS.get(kind, {"reshard_after_forward": 2})))


@pytest.mark.parametrize("copies", [False, True])
@on_ranks(4)
def test_replicas(world: World, copies: bool) -> None:
    """Each backward but the last of a step leaves the sum over the replicas out, or all of the reduction."""
    whole = Dropping().double()
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    for method in ("set_requires_all_reduce", "set_requires_gradient_sync"):
        with settings_of(world, node_memory=False) if copies else nullcontext():
            model = shard(copy.deepcopy(whole), mesh=mesh)
            setter = getattr(model, method)
            train(world, copy.deepcopy(whole), model, micro=3, before=lambda index, setter=setter: setter(index == 2))


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@on_ranks(2, 3)
def test_mixed_precision(world: World, reduce_dtype: torch.dtype | None) -> None:
    whole = Dropping().double()
    policy = shardrt.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=reduce_dtype)
    train(world, whole, shard(copy.deepcopy(whole), mp_policy=policy), tolerance=2e-5)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("copies", [False, True])
@on_ranks(2, 3)
def test_recomputed_modules(world: World, how: str, copies: bool) -> None:
    whole = Dropping().double()
    whole.recomputes = how
    with settings_of(world, node_memory=False) if copies else nullcontext():
        train(world, whole, shard(copy.deepcopy(whole), reshard_after_forward=True))


@on_ranks(2, 3)
def test_the_first_module_that_runs_gets_no_gradient_to_pass_on(world: World) -> None:
    """On each rank it is another one, whose gradients are complete only when the backward ends."""
    whole = Dropping().double()
    whole.inp.requires_grad_(False)
    train(world, whole, shard(copy.deepcopy(whole)))


@on_ranks(2, 3)
def test_without_gradients(world: World) -> None:
    whole = Dropping().double()
    model = shard(copy.deepcopy(whole))
    for step in range(STEPS):
        for m in (whole, model):
            m.skip(chosen(step, world.rank))
        with torch.no_grad(), settings_of(world, node_memory=bool(step % 2)):
            assert torch.allclose(model(batch(step)), whole(batch(step)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("copies", [False, True])
@on_ranks(2, 3)
def test_a_rank_that_runs_nothing_trainable(world: World, copies: bool, kind: str) -> None:
    """Its output has a graph all the same, whose backward reduces zeros."""
    whole = Dropping().double()
    whole.requires_grad_(False).blocks.requires_grad_(True)
    with settings_of(world, node_memory=False) if copies else nullcontext():
        train(world, whole, shard(copy.deepcopy(whole), **OPTIONS[kind]))


@pytest.mark.parametrize("how", ["first only", "nothing", "all"])
@on_ranks(2)
def test_where_outputs_have_a_graph(world: World, how: str) -> None:
    """Only where a backward of another rank may wait for this one."""
    model = shard(Dropping().double().requires_grad_(how == "all"))
    model.blocks[0].requires_grad_(how != "nothing")
    model.skip(frozenset(("0", "1")) if world.rank else frozenset())
    assert model(batch(0)).requires_grad == (how != "nothing")
    with torch.no_grad():
        assert not model(batch(0)).requires_grad
    model.eval().skip(frozenset(("0",)))  # all ranks skip the same
    assert model(batch(0)).requires_grad == (how == "all")


@pytest.mark.parametrize("kind", OPTIONS)
@on_ranks(2, 3)
def test_generation_before_the_backward(world: World, kind: str) -> None:
    """It runs all modules twice, and so predicts an order of the backward in which each comes twice."""
    kinds, skipped = ["residual", "used twice", "odd", "used twice"], [frozenset((1, 3)), frozenset((0, 2)), frozenset((0,))]
    whole = Net(7, kinds, ["not"] * 4, container=list, fused=False).double()
    model = copy.deepcopy(whole)
    for block in (*model.blocks, model.out):
        shardrt.fully_shard(block, **OPTIONS[kind])
    shardrt.fully_shard(model)
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    shardrt.register_fsdp_forward_method(model, "generate")
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with buckets_of(3000):
        for _ in range(3):
            model.skipped = skipped[world.rank]
            loss = (model(x) ** 2).mean()
            model.skipped = frozenset()
            model.eval().generate(x, 2)
            model.train()
            loss.backward()
    for skips in skipped[: world.size]:
        whole.skipped = skips
        (3 * (whole(x) ** 2).mean() / world.size).backward()
    compare(whole, model, 1e-12, "after three backwards")


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize("bucket", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["node memory", "copies", "replicas"])
@on_ranks(2, 3)
def test_unequal_numbers_of_micro_batches(world: World, kind: str, bucket: int) -> None:
    """Each is reduced: gradients of one rank's second micro-batch would be added to those of the others' next step."""
    mesh = DeviceMesh(world.comm, (world.size, 1), ("replicas", "shards")) if kind == "replicas" else None
    with settings_of(world, node_memory=kind == "node memory"), buckets_of(bucket):
        model = shard_blocks(OddMLP().double(), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):  # as many on all
            for _ in range(2):
                loss_of(model, batch(0)).backward()
            step_all(optimizer)
        loss_of(model, batch(0)).backward()
        if world.rank == 0:
            step_all(optimizer)
        with pytest.raises(MismatchError, match="added to earlier ones") as caught:
            loss_of(model, batch(1)).backward()
    assert "run the same number of micro-batches on every rank in each step" in str(caught.value)


@pytest.mark.parametrize("bucket", [0, 1 << 20])
@pytest.mark.parametrize("copies", [False, True])
@on_ranks(2, 3)
def test_skipped_without_the_option(world: World, copies: bool, bucket: int) -> None:
    """Blocks of one size: every rank names the block of each, and the option."""
    model = OddMLP().double()
    with settings_of(world, node_memory=False) if copies else nullcontext(), buckets_of(bucket):
        shard_blocks(model)
        loss_of(model, batch(0)).backward()
        del model.blocks[world.rank % 2]
        with pytest.raises(MismatchError) as caught:
            loss_of(model, batch(0)).backward()
    message = str(caught.value)
    assert len(set(re.findall(r"'blocks\.\d'", message))) >= 2, message
    assert "set_reduce_scatter_unused_params(True, skipped_modules=True)" in message


@on_ranks(2, 3)
def test_gradients_of_other_parameters(world: World) -> None:
    """Within one group, the ranks have gradients of other parameters of one size."""
    model = shardrt.fully_shard(Dropping().double())
    model.skip(frozenset((str(world.rank % 2),)))
    with pytest.raises(MismatchError, match=r"without blocks\.0\..*without blocks\.1\.") as caught:
        loss_of(model, batch(0)).backward()
    assert "set_reduce_scatter_unused_params" in str(caught.value)


@on_ranks(4)
def test_gradients_of_other_parameters_in_replicas(world: World) -> None:
    """Within a replica the ranks have the same ones: the sum over the replicas compares them."""
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    model = shardrt.fully_shard(Dropping().double(), mesh=mesh)
    model.skip(frozenset((str(world.rank // 2),)))
    refused(r"all_reduce.*without blocks\.0\..*without blocks\.1\.", loss_of(model, batch(0)).backward, MismatchError)


@on_ranks(2)
def test_other_frozen_parameters(world: World) -> None:
    model = shardrt.fully_shard(OddMLP().double())
    model.blocks[world.rank].requires_grad_(False)
    refused(r"without blocks\.0\..*without blocks\.1\.", loss_of(model, batch(0)).backward, MismatchError)


@on_ranks(2)
def test_two_models_of_one_size(world: World) -> None:
    """Names are the same in a copy; the groups' numbers are not."""
    teacher = shard_blocks(OddMLP().double())
    student = copy.deepcopy(teacher)
    with torch.no_grad(), pytest.raises(MismatchError, match=r"'\w+' \(group \d+\).*'\w+' \(group \d+\)"):
        (student if world.rank else teacher)(batch(0))


class Twice(OddMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.out.weight.new_zeros(()) + x) + self.out(self.blocks[0](self.inp(x)))


class Backwards(OddMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.out(x)


class Beside(OddMLP):
    """The blocks run on inputs that require no gradient, and one has a parameter that gets none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x).detach()
        return self.out(sum(block(x) for block in self.blocks))


class Together(OddMLP):
    """Two blocks are recomputed at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), self.inp(x), use_reentrant=True))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, r"the forward of 'blocks\.0' runs a second time"),
        (Backwards, r"the forward of 'blocks\.1' runs after 'blocks\.2'"),
    ],
)
@on_ranks(1, 2)
def test_orders_that_cannot_be_followed(world: World, kind: type[OddMLP], message: str) -> None:
    model = shard_blocks(kind().double(), reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    with settings_of(world, node_memory=False):
        refused(message, lambda: loss_of(model, batch(0)).backward(), RuntimeError)
        model.reset_iter_state()
        model.set_reduce_scatter_unused_params(True)  # all ranks run all modules, in whatever order
        loss_of(model, batch(0)).backward()


@on_ranks(2)
@with_copies
def test_modules_that_are_recomputed_at_once(world: World) -> None:
    """They are gathered in the order of the forward, unless all of them are gathered already."""
    model = shard_blocks(Together().double(), reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    loss_of(model, batch(0)).backward()
    message = r"the backward of 'blocks\.1' runs after 'blocks\.0'.* recomputed by itself"
    with buckets_of(0):
        refused(message, lambda: loss_of(model, batch(0)).backward(), RuntimeError)


@on_ranks(1, 2)
def test_modules_beside_each_other(world: World) -> None:
    """Whether the backward of one is over is known if all of its parameters have a gradient."""
    whole, model = paired(Beside().double())
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    loss_of(model, batch(0)).backward()
    loss_of(whole, batch(0)).backward()
    for param in whole.inp.parameters():
        param.grad = torch.zeros_like(param)
    compare(whole, model, 1e-12, "")


@on_ranks(1, 2)
def test_settings_that_cannot_be(world: World) -> None:
    model = OddMLP()
    shardrt.fully_shard([model.blocks[0], model.blocks[1]])
    shardrt.fully_shard(model)
    refused("expected both, or neither", lambda: model.set_reduce_scatter_unused_params(False, skipped_modules=True))
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    refused("'blocks.0, blocks.1' were sharded together", lambda: loss_of(model, batch(0).float()))
    model.blocks[0].set_reduce_scatter_unused_params(True)
    loss_of(model, batch(0).float()).backward()

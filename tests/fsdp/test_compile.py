"""torch.compile on, around and inside sharded modules: the same numbers, few graphs, no recompilation.

`aot_eager` traces, plans backwards and guards as inductor does, but writes no C++: it is what most tests take.
"""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks
from shardrt.comm import World
from toys import OddBlock, OddMLP, Sharder, batch, buckets_of, gathers_of, loss_of, paired, shard_blocks, train_side_by_side

STEPS = 4
TOLERANCE = 2e-6  # float32: the sum over all rows rounds differently from the sum over the ranks' sums


class Counts:
    """The compiler's counters."""

    @property
    def graphs(self) -> int:
        """The graphs that the backend compiled."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    @property
    def breaks(self) -> int:
        """Graph breaks, counted once per trace."""
        return torch._dynamo.utils.counters["graph_break"].total()


@contextmanager
def compiler() -> Iterator[Counts]:
    """Reset the compiler before and after the block, and let it compile again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield Counts()
    finally:
        torch.compiler.set_stance("default")
        torch._dynamo.reset()


def check_no_recompilation(step: int, model: nn.Module) -> None:
    """From the third step on, a compilation is an error."""
    if step == 2:
        torch.compiler.set_stance("fail_on_recompile")


def train(world: World, model: nn.Module, shard: Sharder) -> None:
    batches = (batch(step).float() for step in range(STEPS))
    train_side_by_side(world, model, batches, shard=shard, before_step=check_no_recompilation, tolerance=TOLERANCE)


def blocks_first(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    shard_blocks(model)


def blocks_last(model: nn.Module) -> None:
    shard_blocks(model)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


@on_ranks(2, more=(1, 3))
def test_compiled_blocks_share_one_graph(world: World) -> None:
    """Ten blocks, since the compiler stops at a function's ninth variant, such as one per class of `self`."""
    with compiler() as counts:
        train(world, OddMLP(layers=10), blocks_last)
        assert (counts.graphs, counts.breaks) == (1, 0)


@on_ranks(2)
def test_blocks_can_be_compiled_before_they_are_sharded(world: World) -> None:
    with compiler() as counts:
        train(world, OddMLP(), blocks_first)
        assert (counts.graphs, counts.breaks) == (1, 0)


class Wrapped(OddMLP):
    """Runs its compiled blocks, which it keeps outside the module tree, so that parameters keep their names."""

    wrapped: tuple[nn.Module, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.wrapped or self.blocks:
            x = block(x)
        return self.out(x)


def wrap_blocks(model: nn.Module) -> None:
    shard_blocks(model)
    model.wrapped = tuple(torch.compile(block, backend="aot_eager") for block in model.blocks)


@on_ranks(2)
def test_sharded_blocks_in_optimized_modules(world: World) -> None:
    with compiler() as counts:
        train(world, Wrapped(), wrap_blocks)
        assert counts.graphs == 1
        assert counts.breaks <= 1


@on_ranks(2)
def test_an_optimized_module_can_be_sharded(world: World) -> None:
    whole = OddMLP()
    model = copy.deepcopy(whole)
    with compiler() as counts:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="aot_eager")
        shard_blocks(model)
        loss_of(model, batch(0).float().chunk(world.size)[world.rank]).backward()
        loss_of(whole, batch(0).float()).backward()
        assert (counts.graphs, counts.breaks) == (1, 0)
    for sharded, param in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), param.grad, rtol=TOLERANCE, atol=TOLERANCE)


def model_first(model: nn.Module) -> None:
    model.compile(backend="aot_eager")
    shard_blocks(model)


def model_last(model: nn.Module) -> None:
    shard_blocks(model)
    model.compile(backend="aot_eager")


class Unrolled(OddMLP):
    """Calls its blocks one by one; the compiler skips functions with a graph break in a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        x = self.blocks[1](torch.sin(x))
        x = self.blocks[2](torch.sin(x))
        return self.out(x)


@pytest.mark.parametrize("shard", [model_first, model_last])
@pytest.mark.parametrize("model", [OddMLP, Unrolled])
@on_ranks(2)
def test_a_compiled_model(world: World, model: type[nn.Module], shard: Sharder) -> None:
    """A graph break before each sharded block splits the model into the blocks and the code between them."""
    with compiler() as counts:
        train(world, model(), shard)
        assert counts.breaks <= 3
        # One graph serves all blocks. The code before, between and after them has three graphs, or runs uncompiled as a loop.
        assert counts.graphs == (1 if model is OddMLP else 5)


@on_ranks(2)
def test_a_compiled_training_step(world: World) -> None:
    """The compiler also sees the hooks of the backward, and skips them."""
    whole, model = paired(Unrolled())

    def step(x: torch.Tensor) -> None:
        loss_of(model, x).backward()

    with compiler() as counts:
        torch.compile(step, backend="aot_eager")(batch(0).float().chunk(world.size)[world.rank])
        assert counts.breaks <= 2 * 5  # at each module and at backward(), in this function and in the model's forward
    loss_of(whole, batch(0).float()).backward()
    for sharded, param in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), param.grad, rtol=TOLERANCE, atol=TOLERANCE)


class Inner(nn.Module):
    """A block with a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = OddBlock(13)
        self.scale = nn.Parameter(torch.ones(13))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * self.scale


class OfInner(OddMLP):
    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks.extend([Inner(), Inner()])


def parts(model: nn.Module) -> None:
    shard_blocks(model)
    for block in model.blocks:
        block.part.compile(backend="aot_eager", fullgraph=True)


@on_ranks(2)
def test_a_compiled_part_of_a_block(world: World) -> None:
    with compiler() as counts:
        train(world, OfInner(), parts)
        assert (counts.graphs, counts.breaks) == (1, 0)


class Checkpointed(OddMLP):
    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@on_ranks(2)
def test_checkpoints_around_compiled_blocks(world: World, use_reentrant: bool) -> None:
    model = Checkpointed()
    model.use_reentrant = use_reentrant
    with compiler() as counts:
        train(world, model, blocks_last)
        # A reentrant checkpoint first runs the forward without gradients, which has another graph.
        assert (counts.graphs, counts.breaks) == (2 if use_reentrant else 1, 0)


class Normed(nn.Module):
    """Changes buffers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(13)
        self.linear = nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(self.norm(x)))


class OfNormed(OddMLP):
    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks.extend([Normed(), Normed()])


@on_ranks(2)
def test_the_same_bits_buffers_and_schedule_as_without(world: World) -> None:
    """Gathers and frees have the same order: the compiled backward uses no parameter earlier or later."""
    eager = OfNormed()
    compiled = copy.deepcopy(eager)
    with compiler() as counts, buckets_of(0):
        shard_blocks(eager)
        blocks_last(compiled)
        events = [gathers_of(model) for model in (eager, compiled)]
        for step in range(3):
            for model in (eager, compiled):
                loss_of(model, batch(step).float().chunk(world.size)[world.rank]).backward()
        assert counts.graphs == 1
    assert events[0] == events[1]
    assert eager.param_group.runtime.memory.peak == compiled.param_group.runtime.memory.peak
    for (name, param), other in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), other.grad.full_tensor()), name
    for (name, buffer), other in zip(eager.named_buffers(), compiled.buffers(), strict=True):
        assert torch.equal(buffer, other), name


@on_ranks(2)
def test_eval_and_inference_between_steps(world: World) -> None:
    """Each mode has its own graph; returning to an earlier mode compiles nothing."""
    whole, model = OddMLP(), OddMLP()
    model.load_state_dict(whole.state_dict())
    blocks_last(model)
    x = batch(0).float()
    with compiler() as counts:
        for round_ in range(2):
            if round_ == 1:
                torch.compiler.set_stance("fail_on_recompile")
            with torch.inference_mode():
                torch.testing.assert_close(model(x), whole(x), rtol=TOLERANCE, atol=TOLERANCE)
            loss_of(model, x).backward()
            model.eval()
            with torch.no_grad():
                torch.testing.assert_close(model(x), whole(x), rtol=TOLERANCE, atol=TOLERANCE)
            model.train()
        assert counts.graphs == 3


class Product(nn.Module):
    """Inductor calls the library of matrix products for it: no kernel is made, so no C++ compiler runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class OfProducts(OddMLP):
    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks.extend([Product(), Product()])


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("kind", [OfProducts, pytest.param(OddMLP, marks=pytest.mark.all)])
@on_ranks(2)
def test_inductor(world: World, tmp_path: Path, kind: type[OddMLP]) -> None:
    """Compiled code reads the parameters at their addresses of the moment. The bits are those of the same blocks, not sharded.

    Every rank has the same rows, so that the mean over two ranks is exact. `OfProducts` leaves out kernels that inductor makes
    itself; `OddMLP` has them.
    """
    from torch._inductor import config

    plain, model = paired(kind())
    with pytest.MonkeyPatch.context() as patch, config.patch(compile_threads=1), compiler() as counts:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # shared: one rank compiles, the others wait for its locks
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, model)]
        for block in (*plain.blocks, *model.blocks):
            block.compile(fullgraph=True)
        for step in range(STEPS):
            check_no_recompilation(step, model)
            losses = [loss_of(m, batch(step).float()) for m in (plain, model)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses)
        assert counts.graphs == 2  # one for the plain blocks, one for the sharded blocks: their classes differ
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(param, shardrt.DTensor)
        assert torch.equal(param.full_tensor(), expected), name


class AsksForItsDtype(nn.Module):
    """Reads its parameters in forward, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(next(self.parameters()).dtype))


@on_ranks(1)
def test_a_forward_may_look_at_its_parameters(world: World) -> None:
    model = nn.Sequential(AsksForItsDtype(), AsksForItsDtype())
    for block in model:
        shardrt.fully_shard(block)
        block.compile(fullgraph=True, backend="aot_eager")
    shardrt.fully_shard(model)
    for _ in range(2):
        model(torch.randn(2, 5, dtype=torch.float64)).sum().backward()
    assert model[0].linear.weight.grad is not None

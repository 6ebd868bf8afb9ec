"""Forecasts: what the real runtime does in a dry world is what it does."""

from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Any, cast

import pytest
import torch
from torch import nn

import shardrt
import toys_tp
from ranks import on_ranks
from shardrt import MixedPrecisionPolicy, PrefetchPolicy, QuantizationPolicy
from shardrt.comm import DeviceMesh, Work, World
from shardrt.comm.core.calls import CallList, Hook
from shardrt.comm.groups.control import hooked
from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.base.events import BufferKind, HasName, Observer, observing
from shardrt.parallel import parallelize_module
from shardrt.plan.machine.cost import Costs
from shardrt.plan.machine.hardware import load_sheet
from shardrt.plan.program.job import Job, Program
from shardrt.plan.program.recomputation import checkpoint_block
from shardrt.plan.run.forecast import forecast
from shardrt.plan.run.operations import Cost, Operations
from toys import OddMLP, buckets_of, shard_blocks

Setup = Callable[[World], nn.Module]

WIDTH, ROWS, LAYERS = 64, 32, 4


def stack(job: Job) -> Program:
    """Linear layers with ReLUs, each a group of its own."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)))
    for block in model:
        shardrt.fully_shard(block, **job.shard_options())
    shardrt.fully_shard(model, **job.shard_options())

    def step() -> torch.Tensor:
        x = torch.empty(job.batch * ROWS, WIDTH, device="meta")
        return model(x).sum()

    return Program(model, step)


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_bytes_of_a_stack(ranks: int) -> None:
    """By hand: W bytes in a weight, A in an activation, of which each layer keeps its ReLU's, and the first one its input."""
    made = forecast(stack, Job(ranks), Costs(load_sheet("h100")))
    weight, activation = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    shard = weight // ranks
    assert made.memory["parameters"] == LAYERS * shard + 16  # the root has none, and the smallest segment
    assert made.memory["gradients"] == LAYERS * shard
    assert made.memory["optimizer"] == 2 * LAYERS * shard
    assert made.flops == LAYERS * 3 * 2 * ROWS * WIDTH * WIDTH - 2 * ROWS * WIDTH * WIDTH  # the input needs no gradient
    assert made.memory["activations"] >= (LAYERS + 1) * activation
    assert made.peak_nbytes <= sum(made.memory.values())


# ---------------------------------------------------------------------- beside a real run


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def hybrid(world: World) -> DeviceMesh:
    """Two replicas, if the ranks can be halved."""
    replicas = 2 if world.size % 2 == 0 else 1
    return world.mesh.unflatten((replicas, world.size // replicas), ("replica", "shard"))


def odd(**options: Any) -> Setup:
    def make(world: World) -> nn.Module:
        return shard_blocks(OddMLP().to(torch.float64), **options)

    return make


def with_setters(*calls: tuple[Any, ...], **options: Any) -> Setup:
    """Names of setters of the root, and their arguments."""

    def make(world: World) -> nn.Module:
        model = odd(**options)(world)
        for name, *arguments in calls:
            getattr(model, name)(*arguments)
        return model

    return make


def several_dtypes(world: World) -> nn.Module:
    model = OddMLP().to(torch.float64)
    for block in blocks_of(model):
        block.norm.float()
    return shard_blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64))


def frozen(world: World) -> nn.Module:
    model = OddMLP().to(torch.float64)
    blocks_of(model)[0].requires_grad_(False)
    blocks_of(model)[1].up.requires_grad_(False)
    return shard_blocks(model)


def checkpointed(world: World) -> nn.Module:
    model = OddMLP().to(torch.float64)
    for block in blocks_of(model):
        checkpoint_block(block)
    return shard_blocks(model)


def quantised(**options: Any) -> Setup:
    """Matrices as 8-bit codes, whatever their size."""
    policy = QuantizationPolicy(gather=torch.int8, reduce=torch.int8, min_numel=1)
    mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return lambda world: shard_blocks(OddMLP(), mp_policy=mp_policy, quantization_policy=policy, **options)


def one_group_of_all_blocks(world: World) -> nn.Module:
    model = OddMLP().to(torch.float64)
    shardrt.fully_shard(blocks_of(model))
    return shardrt.fully_shard(model)


def replicated(world: World) -> nn.Module:
    model = OddMLP().to(torch.float64)
    for block in blocks_of(model):
        shardrt.replicate(block)
    return shardrt.replicate(model)


def in_two_dims(world: World) -> nn.Module:
    """Tensor parallelism on two ranks, if the ranks can be halved, with sequence parallelism."""
    tp = 2 if world.size % 2 == 0 else 1
    mesh = world.mesh.unflatten((world.size // tp, tp), ("dp", "tp"))
    model = toys_tp.Transformer(tied=False).to(torch.float64)
    parallelize_module(model, mesh["tp"], toys_tp.sequence_plan())
    for layer in model.layers:
        shardrt.fully_shard(layer, mesh=mesh["dp"])
    return shardrt.fully_shard(model, mesh=mesh["dp"])


CASES: dict[str, Setup] = {
    "default": odd(),
    "reshard": odd(reshard_after_forward=True),
    "keep": odd(reshard_after_forward=False),
    "keep a part": lambda world: odd(reshard_after_forward=world.size)(world),
    "mixed precision": odd(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "hybrid": lambda world: odd(mesh=hybrid(world))(world),
    "hybrid, in two steps": lambda world: with_setters(("set_requires_all_reduce", False), mesh=hybrid(world))(world),
    "replicated": replicated,
    "several dtypes": several_dtypes,
    "frozen": frozen,
    "checkpointed": checkpointed,
    "several modules in a group": one_group_of_all_blocks,
    "gather nothing ahead": with_setters(("set_prefetch_policy", PrefetchPolicy(max_groups=0))),
    "gather few bytes ahead": with_setters(("set_prefetch_policy", PrefetchPolicy(max_bytes=9000, max_groups=3))),
    "several reductions": with_setters(("set_reduce_scatter_max_input_buffers", 3)),
    "gathered after a backward": with_setters(("set_reshard_after_backward", False)),
    "two dims": in_two_dims,
    "quantised": quantised(),
    "quantised, keep a part": lambda world: quantised(reshard_after_forward=world.size)(world),
}


def test_a_forecast_in_an_open_timeline_is_refused() -> None:
    with dry_world(1), shardrt.Timeline(), pytest.raises(RuntimeError, match="close it before you make a forecast"):
        forecast(stack, Job(1), Costs(load_sheet("h100")))


class Record(Hook, Observer):
    """What a run does to its buffers, which gradients it makes, and what it sends, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def called(self, calls: CallList, work: Work) -> None:
        self.events.append((calls[0].comm.name, calls.description.text))

    def memory_changed(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        self.events.append((kind, group.name, nbytes))

    def gradients_made(self, group: HasName, storage: torch.UntypedStorage) -> None:
        self.events.append(("gradients", group.name, storage.nbytes()))


def trained(setup: Setup, world: World) -> list[tuple[object, ...]]:
    """Train, also with accumulated gradients, and with groups in buckets and one by one. Returns: what it did."""
    with torch.device(world.device):
        model = setup(world)
        inputs = torch.ones(4, 5, dtype=torch.float64) if isinstance(model, OddMLP) else torch.ones(2, 8, dtype=torch.int64)
    optimizer, record = torch.optim.AdamW(model.parameters()), Record()
    with observing(record), hooked(record):
        for micro_batches, bucket in ((1, 0), (2, 0), (2, 1 << 20), (1, 1 << 20)):
            with buckets_of(bucket):
                for micro_batch in range(micro_batches):
                    cast(Any, model).set_requires_gradient_sync(micro_batch == micro_batches - 1)
                    model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return record.events


class Silent:
    """Wants to know nothing of operations."""

    def cost_of(self, func: object, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> Cost:
        return Cost(0.0, 0, torch.float32, ())

    def ran(self, cost: Cost, made: object) -> None: ...


OPERATIONS = Operations(Silent())  # of all cases: what one has run, the others need not


@on_ranks(2, more=(1, 3, 4))
@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_does_what_a_run_does(world: World, case: str) -> None:
    """Every buffer's allocation and release, all gradients, and every collective, in one order, to the byte, and all notes."""
    began = time()
    real = trained(CASES[case], world)
    real_notes = world.recorder.notes(since=began)
    with dry_world(world.size, rank=world.rank, inline=True) as dry, OPERATIONS:
        forecast, notes = trained(CASES[case], dry), dry.recorder.notes(since=-1.0)
    assert len(real) > 30 or world.size == 1  # which gathers and packs next to nothing
    assert forecast == real
    assert notes == real_notes

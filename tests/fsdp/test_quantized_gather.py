"""Gathers of 8-bit codes: values and bytes, training beside one process that computes with the same codes, and errors."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from bench import quantized_gather
from observers import observing_memory
from ranks import on_ranks, refused, with_copies
from shardrt import MixedPrecisionPolicy, PrefetchPolicy, QuantizationPolicy, Shard, ShardPlacementResult
from shardrt.comm import DeviceMesh, World
from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.params.layout import ParamSpec, padding_limit
from shardrt.fsdp.params.planner import plan
from shardrt.fsdp.schedule.param_group import ParamGroup
from shardrt.fsdp.schedule.prefetch import Order
from shardrt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import Elsewhere, OddMLP, TiedGPT, batch, buckets_of, compare, loss_of, mean_over_ranks, shard_blocks, tokens

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FLOAT8: 448.0}
EVERYTHING = QuantizationPolicy(gather=INT8, min_numel=1)  # of two and more dims


def blocks_of(weight: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The elements with `dim` outermost, in rows of 256, the last filled up with zeros."""
    flat = weight.detach().movedim(dim, 0).reshape(-1).float()
    return nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)


def rounded(weight: torch.Tensor, codes: torch.dtype = INT8, dim: int = 0) -> torch.Tensor:
    """What is gathered: each block times a scale, rounded to a code, and back."""
    blocks = blocks_of(weight, dim)
    scales = blocks.abs().amax(1, keepdim=True) / LARGEST[codes]
    scaled = blocks * (1 / scales)
    found = (scaled.round() if codes is INT8 else scaled).to(codes).float() * scales
    outermost = weight.movedim(dim, 0)
    return found.flatten()[: weight.numel()].view(outermost.shape).movedim(0, dim)


class Straight(torch.autograd.Function):
    """`rounded`, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dim: int) -> torch.Tensor:
        return rounded(weight, INT8, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@contextmanager
def computing_with_codes(model: nn.Module, dim: int) -> Iterator[None]:
    places = [(module, name, param) for module in model.modules() for name, param in module._parameters.items()]
    taken = [(module, name, param) for module, name, param in places if param is not None and param.dim() > 1]
    for module, name, param in taken:
        module._parameters[name] = Straight.apply(param, dim)
    yield
    for module, name, param in taken:
        module._parameters[name] = param


def train(
    world: World,
    model: Any,
    shard: Callable[[Any], object],
    batches: Callable[[int], torch.Tensor] = lambda step: batch(step).float(),
    dim: int = 0,
) -> Any:
    """Compare every step with that of one process: it takes the shards as they are, and computes with their codes."""
    whole, model = model, copy.deepcopy(model)
    shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for step in range(3):
        for param, sharded in zip(whole.parameters(), model.parameters(), strict=True):
            param.data.copy_(sharded.full_tensor())
        x = batches(step)
        with computing_with_codes(whole, dim):
            expected = loss_of(whole, x)
        loss = loss_of(model, x.chunk(world.size)[world.rank])
        torch.testing.assert_close(mean_over_ranks(world, loss), expected.detach(), rtol=1e-5, atol=1e-6)
        for each in (expected, loss):
            each.backward()
        compare(whole, model, 1e-5, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(whole, model, 1e-5, f"after step {step}")
    assert model.param_group.runtime.memory.in_use == 0
    return model


def quantised(model: Any) -> list[ParamGroup]:
    return [group for group in model.param_group.with_descendants() if group.quantization]


def two_layers() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(300, 70), nn.Linear(70, 90))


def whole_blocks() -> Any:
    """Layers whose rows along either dim are whole blocks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 256))


def innermost(param: nn.Parameter, at_most: int = 1) -> Shard:
    return Shard(max(0, min(at_most, param.dim() - 1)))


def gathered(model: nn.Module) -> list[torch.Tensor]:
    with shardrt.unsharded(model):
        return [param.detach().clone() for param in model.parameters()]


# ---------------------------------------------------------------------- values, bytes, memory


def sent(world: World) -> int:
    """Bytes that this rank has sent in the newest quantised gather, by the recorder."""
    what = [call["what"] for call in world.recorder.calls() if "all_gather float32" in call["what"]][-1]
    sizes = {"int8": 1, "float8_e4m3fn": 1, "float32": 4}
    return sum(sizes[dtype] * int(numel) for dtype, numel in re.findall(r"all_gather (\w+) (\d+)", what))


@pytest.mark.parametrize("codes", [INT8, FLOAT8])
@on_ranks(2, 3, more=(4,))
def test_values_and_bytes(world: World, codes: torch.dtype) -> None:
    """On any number of ranks the same values as by hand, to the bit; shards and state dicts stay in full precision."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = two_layers()
        model = copy.deepcopy(whole)
        policy = QuantizationPolicy(gather=codes, min_numel=1000)
        shardrt.fully_shard(model, quantization_policy=policy, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        values = dict(zip([name for name, _ in whole.named_parameters()], gathered(model), strict=True))
        for name in ("0.weight", "1.weight"):
            weight = whole.get_parameter(name)
            assert torch.equal(values[name], rounded(weight, codes).to(dtype))
            scales = blocks_of(weight).abs().amax(1, keepdim=True) / LARGEST[codes]
            error = blocks_of(values[name].double() - weight).abs()
            half = scales * (0.5 if codes is INT8 else 16.0)  # of the largest codes of float8
            assert (error <= half * 1.0001 + blocks_of(values[name]).abs() * (0.0 if dtype is torch.float32 else 2.0**-8)).all()
        assert torch.equal(values["0.bias"], whole[0].bias.to(dtype))
        assert len(list(quantised(model))) == 1
        plain = plan(
            [ParamSpec(name, tuple(whole.get_parameter(name).shape), 4) for name in ("0.weight", "1.weight")], world.size
        )
        assert sent(world) <= 0.27 * plain.segment_nbytes
        assert sent(world) <= 0.52 * plain.segment_nbytes / 2  # of bfloat16
        for name, param in model.state_dict().items():
            assert torch.equal(param.full_tensor(), whole.get_parameter(name))


def test_blocks_begin_with_parameters() -> None:
    """Segments and starts are whole blocks for any sizes and ranks, with little padding."""
    specs = [ParamSpec(f"{rows}", (rows, width), 2) for rows, width in ((1000, 999), (513, 1024), (77, 1000), (3, 300_001))]
    for ranks in (1, 2, 3, 8, 64, 1000):
        layout = plan(specs, ranks, 512)
        assert layout.segment_nbytes % 512 == 0
        assert all(param.offset % 512 == 0 for param in layout.placed)
        assert all(sum(layout.numels(index)) == spec.numel for index, spec in enumerate(specs))
        assert layout.padding_nbytes <= padding_limit(specs, ranks, 512)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@on_ranks(3)
def test_what_is_not_finite_travels(world: World, value: float) -> None:
    """It reaches every rank as NaN, in its block, and no other."""
    whole = two_layers()
    with torch.no_grad():
        whole[0].weight[50, 7] = value
    model = copy.deepcopy(whole)
    shardrt.fully_shard(model, quantization_policy=EVERYTHING)
    bad = gathered(model)[0].isnan().flatten()
    first = (50 * 300 + 7) // 256 * 256
    assert bad[first : first + 256].all()
    assert bad.sum() == 256


@on_ranks(2, more=(3,))
@with_copies
def test_codes_are_counted_and_freed(world: World) -> None:
    """A byte and 4 / 256 per element, beside the gathered parameters while a gather runs; the same in a dry world."""
    counted: list[tuple[str, int]] = []
    peaks = []
    for dry in (False, True):
        there: Any = dry_world(world.size, rank=world.rank) if dry else nullcontext()
        with there, torch.no_grad(), torch.device("meta" if dry else "cpu"):
            model = two_layers()
            shardrt.fully_shard(model, quantization_policy=EVERYTHING)
            x = torch.ones(2, 300)
            model(x)
            (group,) = quantised(model)
            assert group.runtime is not None
            memory, streams = group.runtime.memory, group.runtime.streams
            streams.synchronize()  # threads may free later
            peaks.append(memory.peak)
            with observing_memory(lambda kind, group, nbytes: counted.append((kind.value, nbytes))):
                model(x)
                streams.synchronize()
    assert peaks[0] == peaks[1]
    numel = group.layout.nbytes // 4
    codes = numel + numel // 256 * 4
    assert [change for change in counted if change[0] == "codes"] == [("codes", codes), ("codes", -codes)] * 2
    assert counted[: len(counted) // 2] == counted[len(counted) // 2 :]
    assert memory.peak == codes + sum(each.layout.nbytes for each in group.root.with_descendants())


@on_ranks(2)
@with_copies
def test_the_benchmark_counts_bytes(world: World) -> None:
    for codes, expected in ((None, 2 * 65_536), (INT8, 65_536 + 4 * 256)):
        nbytes, times = quantized_gather.measure(world, 128, torch.bfloat16, codes, rounds=1)
        assert nbytes == expected
        assert len(times) == 1


@pytest.mark.parametrize("option", ["--rounds=0", "--mib=-1"])
def test_options_of_the_benchmark_that_are_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["quantized_gather.py", option])
    refused("2", quantized_gather.main, SystemExit)
    assert "expected a number of at least 1" in capsys.readouterr().err


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize("case", ["default", "kept", "halves", "offloaded"])
@on_ranks(2, more=(3, 4))
def test_training(world: World, case: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "default": {},
        "kept": {"reshard_after_forward": False},
        "halves": {"reshard_after_forward": 2 if world.size % 2 == 0 else world.size},
        "offloaded": {"offload_policy": Elsewhere(pin_memory=False)},
    }
    train(world, OddMLP(), lambda m: shard_blocks(m, quantization_policy=EVERYTHING, **cases[case]))


@on_ranks(2, more=(3, 4))
def test_training_with_columns(world: World) -> None:
    def shard(model: Any) -> None:
        shardrt.fully_shard(model, quantization_policy=EVERYTHING, shard_placement_fn=innermost)
        assert [len(group.params) for group in quantised(model)] == [2]

    model = nn.Sequential(*whole_blocks(), nn.AdaptiveAvgPool1d(3))
    train(world, model, shard, lambda step: torch.randn(12, 512, generator=torch.Generator().manual_seed(step)), dim=1)


@on_ranks(2, more=(3,))
def test_tied_and_frozen(world: World) -> None:
    model: Any = TiedGPT()
    model.blocks[1].linear1.weight.requires_grad_(False)
    trained = train(world, model, lambda m: shard_blocks(m, quantization_policy=EVERYTHING), tokens)
    assert trained.head.weight is trained.tokens.weight
    assert len(quantised(trained)) == 3


@on_ranks(4)
def test_replicas(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    model = train(world, OddMLP(), lambda m: shard_blocks(m, mesh=mesh, quantization_policy=EVERYTHING))
    assert {group.gather_comm.size for group in quantised(model)} == {2}


@on_ranks(1, 2)
def test_one_rank_sends_nothing(world: World) -> None:
    whole = two_layers()
    model = shardrt.replicate(copy.deepcopy(whole), quantization_policy=EVERYTHING)
    for value, param in zip(gathered(model), whole.parameters(), strict=True):
        assert torch.equal(value, param)


@on_ranks(2, more=(4,))
def test_the_same_bits_under_all_settings(world: World) -> None:
    """Forward, backward and recomputation compute with the same values, whenever they are gathered."""

    def step(
        keep: bool | int | None = None, groups: int | None = None, bucket: int = 1 << 20, recompute: bool = False
    ) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model: Any = OddMLP()
        if recompute:
            for block in model.blocks:
                block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)
        shard_blocks(model, quantization_policy=EVERYTHING, reshard_after_forward=keep)
        model.set_prefetch_policy(PrefetchPolicy(max_groups=groups))
        with buckets_of(bucket):
            for number in range(2):
                model.zero_grad()
                loss = loss_of(model, batch(number).float())
                loss.backward()
        return [loss.detach(), *(param.grad.to_local() for param in model.parameters())]

    expected = step()
    for found in (step(), step(False), step(2), step(True, 0), step(True, 5, 0), step(True, recompute=True)):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_small_groups_are_gathered_with_the_codes_of_their_module() -> None:
    """Two layers ahead in forward, one in backward, as without codes; the two with which the backward begins stay."""
    with dry_world(2) as world, torch.device("meta"), buckets_of(1000):
        model: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        shard_blocks(model, "", quantization_policy=EVERYTHING)
        for _ in range(2):
            seen = len(world.recorder.notes(since=-1.0))
            model(torch.empty(2, 40, requires_grad=True)).sum().backward()
        notes = [note for note in world.recorder.notes(since=-1.0)[seen:] if "gather" in note]
    assert notes == [f"gather {layer}" for layer in (0, 1, 2, 0, 1, 2, 3, 3, 1, 1, 0, 0)]


def test_groups_without_codes_do_not_deepen_what_is_gathered_ahead() -> None:
    """A module's groups on two meshes count as two."""
    with dry_world(4) as world, torch.device("meta"), buckets_of(1000):
        mesh = DeviceMesh(world.comm, (2, 2), ("a", "b"))
        model: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(2)))

        def place(param: nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(None, mesh["b"]) if param.dim() > 1 else None

        for layer in model:
            shardrt.fully_shard(layer, shard_placement_fn=place)
        groups = [group for layer in model for group in layer.param_groups]
        assert Order(groups, 1, None).after(0) == groups[1:2]


def test_modules_to_gather_ahead_are_named_for_all_groups() -> None:
    """Those of a module with quantised parameters and others."""
    with dry_world(2) as world, torch.device("meta"), buckets_of(1000):
        model: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
        for module in (*model, model):
            shardrt.fully_shard(module, quantization_policy=EVERYTHING, reshard_after_forward=True)
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])
        for _ in range(2):
            seen = len(world.recorder.notes(since=-1.0))
            model(torch.empty(2, 40, requires_grad=True)).sum().backward()
        notes = [note.split() for note in world.recorder.notes(since=-1.0)[seen:]]
    forward, backward = "+0 +0 -0 -0 +1 +1 -1 -1 +2 +2 -2 -2", "+2 +2 -2 -2 +1 +1 -1 -1 +0 +0 -0 -0"
    signs = {"gather": "+", "free": "-"}
    assert " ".join(signs[verb] + name for verb, name in notes if verb in signs) == f"{forward} {backward}"


@on_ranks(2)
def test_compiled_blocks(world: World) -> None:
    def shard(model: Any) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        shard_blocks(model, quantization_policy=EVERYTHING)

    torch._dynamo.reset()
    train(world, OddMLP(layers=1), shard)
    torch._dynamo.reset()


@on_ranks(4)
def test_tensor_parallel(world: World) -> None:
    """Each rank's part of a parameter has blocks of its own; whether it is taken depends on the whole of it."""
    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "tp"))
    whole = two_layers()
    model = parallelize_module(copy.deepcopy(whole), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shardrt.fully_shard(model, mesh=mesh["dp"], quantization_policy=QuantizationPolicy(gather=INT8, min_numel=6300))
    values = gathered(model)
    rank = mesh["tp"].rank
    assert torch.equal(values[0], rounded(whole[0].weight.chunk(2)[rank]))
    assert torch.equal(values[2], rounded(whole[1].weight.chunk(2, 1)[rank].contiguous()))
    assert torch.equal(model.get_parameter("1.weight").full_tensor(), whole[1].weight)


# ---------------------------------------------------------------------- what else happens to models


@on_ranks(2, more=(3,))
def test_copies_and_moves(world: World) -> None:
    """Deep copies and models on another dtype are quantised as before; of one that has no codes, none is."""
    whole = two_layers()
    model = copy.deepcopy(whole)
    shardrt.fully_shard(model, quantization_policy=EVERYTHING)
    copied = copy.deepcopy(model)
    assert torch.equal(gathered(copied)[0], rounded(whole[0].weight))
    copied.double()
    assert quantised(copied) == []
    assert torch.equal(gathered(copied)[0], whole[0].weight.double())
    copied.to(torch.bfloat16)
    weight = whole[0].weight.bfloat16()
    assert torch.equal(gathered(copied)[0], rounded(weight).bfloat16())


@on_ranks(2)
def test_from_the_meta_device(world: World) -> None:
    whole = two_layers()
    with torch.device("meta"):
        model = two_layers()
    shardrt.fully_shard(model, quantization_policy=EVERYTHING)
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    assert torch.equal(gathered(model)[2], rounded(whole[1].weight))


@on_ranks(2, more=(3,))
def test_writes_to_gathered_parameters(world: World) -> None:
    """What is written goes to the shards; what is not keeps its full precision."""
    for dim in (0, 1):
        whole = whole_blocks()
        with torch.no_grad():
            whole[0].weight[7, 7] = math.inf
        model = copy.deepcopy(whole)
        placement = functools.partial(innermost, at_most=dim)
        shardrt.fully_shard(model, quantization_policy=EVERYTHING, shard_placement_fn=placement)
        with shardrt.unsharded(model), torch.no_grad():
            model[0].weight[3:5] = 0.25
        with torch.no_grad():
            whole[0].weight[3:5] = 0.25
        assert torch.equal(model[0].weight.full_tensor(), whole[0].weight)


@on_ranks(1, 2)
def test_what_is_taken(world: World) -> None:
    model: Any = nn.Sequential(nn.Linear(40, 30), nn.Linear(8, 6), nn.Linear(40, 30).double(), nn.Linear(40, 30).half())
    shardrt.fully_shard(model, quantization_policy=QuantizationPolicy(gather=FLOAT8, min_numel=1200))
    names = [[param.name for param in group.params] for group in model.param_groups]
    assert names[1:] == [["0.weight"], ["3.weight"]]
    assert len(names[0]) == 6
    assert ("KiB of float8_e4m3fn  " in shardrt.memory_summary(model)) == (world.size > 1)


def test_rows_that_are_no_whole_blocks_stay_whole() -> None:
    with dry_world(8), torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(999, 1000, bias=False), nn.Linear(512, 1000, bias=False))
        shardrt.fully_shard(model, quantization_policy=EVERYTHING, shard_placement_fn=lambda param: Shard(0))
    assert [[param.name for param in group.params] for group in model.param_groups] == [["0.weight"], ["1.weight"]]
    assert all(group.layout.padding_nbytes < 0.03 * group.layout.payload_nbytes for group in model.param_groups)


def test_policies_that_are_refused() -> None:
    for given, message in [
        ({"gather": torch.uint8}, r"gather=torch.uint8\): expected one of torch.int8, torch.float8_e4m3fn, None"),
        ({"reduce": FLOAT8}, r"reduce=torch.float8_e4m3fn\): expected one of torch.int8, None"),
        ({"min_numel": 0}, r"min_numel=0\): expected a whole number from 1 on"),
        ({"reduce": INT8, "full_precision_ranks": 0}, r"full_precision_ranks=0\): expected a whole number"),
        ({"gather": INT8, "full_precision_ranks": 2}, r"give reduce=torch.int8 too"),
    ]:
        with pytest.raises(ValueError, match=message):
            QuantizationPolicy(**given)


@on_ranks(2)
def test_settings_that_are_refused(world: World) -> None:
    def shard(policy: QuantizationPolicy = EVERYTHING, **options: Any) -> Any:
        return shardrt.fully_shard(two_layers(), quantization_policy=policy, **options)

    refused(r"quantization_policy='int8'\): expected a shardrt.QuantizationPolicy or None", lambda: shard("int8"), TypeError)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.float64\): codes are made of 16 or 32 bits"):
        shard(QuantizationPolicy(reduce=INT8), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    refused(r"set_custom_all_gather on 'Sequential': .* its quantised ones", lambda: shard().set_custom_all_gather(None))
    model = shard()
    model.set_allocate_memory_from_process_group_for_comm(True)
    assert all(group.settings.comm_memory for group in model.param_groups)
    model.set_symm_mem_for_comm()
    with pytest.raises(RuntimeError, match=r"both set_symm_mem_for_comm and a quantization_policy: choose one"):
        model(torch.ones(2, 300))
    with pytest.raises(ValueError, match=r"differs|not the same|ranks"):
        shard(QuantizationPolicy(gather=INT8 if world.rank else FLOAT8, min_numel=1))

"""Reductions of 8-bit codes, against what the definition of the codes makes of every rank's gradients."""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import nn

import shardrt
from codes import (
    INT8,
    backward,
    check_sums,
    coded,
    compare,
    full_grads,
    model_of,
    poisoned,
    reduced,
    rows_of,
    sharded_of,
    single,
)
from observers import observing_memory
from ranks import on_ranks, settings_of, with_copies
from shardrt import DTensor, QuantizationPolicy, Replicate, ShardPlacementResult
from shardrt.comm import Communicator, DeviceMesh, ReduceOp, Stream, World, current_stream
from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.base.events import BufferKind
from shardrt.fsdp.base.two_levels import TwoLevels, neighbours
from shardrt.fsdp.memory.buffers import BufferMaker, FlatBuffer, MemoryCounter
from shardrt.fsdp.params.layout import ParamSpec
from shardrt.fsdp.params.planner import plan
from shardrt.fsdp.reduce import coded as quantized_reduce
from shardrt.fsdp.reduce.coded import CodedReduceScatter
from shardrt.fsdp.reduce.grad_layout import reduce_layout
from shardrt.kernels.reference import BLOCK
from toys import buckets_of, loss_of, shard_blocks
from toys_2d import distribute, meshes

NAN, INF = math.nan, math.inf


def one_layer(**options: Any) -> Any:
    return shardrt.fully_shard(nn.Linear(256, 64, bias=False), **{"quantization_policy": INT8, **options})


@contextmanager
def nodes_of(world: World, ranks: int | None) -> Iterator[None]:
    """In the block, so many ranks are on a node."""
    before = world.ranks_per_node
    object.__setattr__(world, "ranks_per_node", ranks)
    try:
        yield
    finally:
        object.__setattr__(world, "ranks_per_node", before)


# ---------------------------------------------------------------------- the sums


@on_ranks(1, 2, 4, more=(3,))
def test_every_gradient_is_the_sum_of_codes_in_rank_order(world: World) -> None:
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    sharded = sharded_of(whole)
    for bucket in (0, 1 << 20):  # the second time gradients are there already
        with poisoned(), buckets_of(bucket):
            backward(sharded, rows_of(world.rank))
        found = full_grads(sharded)
        if bucket:
            found = {name: grad / 2 for name, grad in found.items()}
        if world.size > 1:
            compare(found, everyone)
        else:  # no codes
            assert all(torch.equal(grad, everyone[0][name]) for name, grad in found.items())


@on_ranks(4)
def test_neighbours_reduce_in_full_precision(world: World) -> None:
    """Those of a node, or as many as are given, wherever they run; `test_two_nodes.py` has two nodes."""
    for given, on_node, found in [(None, 1, 1), (None, 4, 1), (None, 2, 2), (1, 2, 1), (2, 1, 2)]:
        with nodes_of(world, on_node):
            check_sums(world, given, found)
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    sharded = sharded_of(whole, quantization_policy=QuantizationPolicy(None, torch.int8, 1, full_precision_ranks=4))
    backward(sharded, rows_of(world.rank))
    for name, grad in full_grads(sharded).items():  # no codes
        exact = torch.stack([grads[name] for grads in everyone]).sum(0) / 4
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-6)


@on_ranks(2, 4)
@pytest.mark.parametrize("on_node", [1, 2])
def test_replicas_send_codes_of_their_sums(world: World, on_node: int) -> None:
    """With a replica of two ranks on a node, only these. The sum over the replicas is rounded again, alike on all.

    Large gradients that are reduced whole over the shard ranks are packed where those read them.
    """
    whole, ranks = model_of(), world.size
    everyone = [single(whole, rows_of(rank)) for rank in range(ranks)]
    mesh = DeviceMesh(world.comm, (2, ranks // 2), ("replicate", "shard"))
    with nodes_of(world, on_node):
        sharded = sharded_of(whole, mesh=mesh)
    within = on_node if ranks > 2 else 1
    parts = (0.25, 0.5)  # of the gradients; each is reduced within the replica, and their sum over the replicas
    with poisoned(), buckets_of(0):
        for part in parts:
            sharded.set_requires_all_reduce(part == parts[-1])
            backward(sharded, rows_of(world.rank), part)
    group = next(group for group in sharded.param_group.with_descendants() if group.quantization)
    assert (group.reduction._in_comm_buffer is not None) == (1 < group.mesh.size == within)
    for name, grad in full_grads(sharded).items():
        sums = []
        for first in range(0, ranks, ranks // 2):
            terms = [grads[name] / ranks for grads in everyone[first : first + ranks // 2]]
            sums.append(sum((added(terms, within) * part for part in parts), torch.zeros(grad.shape)))
        if grad.dim() > 1:
            assert torch.equal(grad, coded(reduced(sums)[0])[0]), name
        else:
            torch.testing.assert_close(grad, sums[0] + sums[1], rtol=1e-1, atol=1e-2)


def added(terms: list[torch.Tensor], neighbours: int) -> torch.Tensor:
    """The sum over a replica: with codes, unless all are neighbours."""
    return sum(terms[1:], terms[0]) if neighbours == len(terms) else reduced(terms, neighbours)[0]


@on_ranks(4)
def test_replicated_on_two_nodes(world: World) -> None:
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    model: Any = copy.deepcopy(whole)
    with nodes_of(world, 2), poisoned():
        for module in (*model.blocks, model):
            shardrt.replicate(module, quantization_policy=INT8)
        backward(model, rows_of(world.rank))
    for name, grad in full_grads(model).items():
        nodes = [torch.stack([grads[name] / 4 for grads in everyone[first : first + 2]]).sum(0) for first in (0, 2)]
        exact = nodes[0] + nodes[1]
        rounded = grad.dim() > 1  # by half a scale of each node's sum, and of the total
        bound = sum(float(x.abs().max()) for x in (*nodes, exact)) / 127 / 2 * 1.05 if rounded else 0.0
        assert ((grad - exact).abs() <= bound + 1e-6).all(), name
        assert rounded == (not torch.equal(grad, exact)) or grad.dim() < 2
    found = []
    for value in (NAN, 1.0):  # in what is left of the last block
        torch.manual_seed(0)
        layer: Any = nn.Linear(20, 30, bias=False)
        with nodes_of(world, 2), poisoned(value):
            shardrt.replicate(layer, quantization_policy=INT8)
            layer(torch.randn(7, 20)).square().sum().backward()
        found.append(layer.weight.grad.full_tensor())
    assert torch.equal(*found)


@on_ranks(2)
def test_accumulated_and_partial_gradients(world: World) -> None:
    """Backwards without synchronisation, frozen parameters, gradients of some ranks only."""
    whole = model_of()
    for frozen in (whole.blocks[0].up.weight, whole.out.weight):
        frozen.requires_grad_(False)
    sharded = sharded_of(whole)
    terms = [[single(whole, rows_of(rank, step)) for rank in range(world.size)] for step in range(2)]
    everyone = [{name: grads[name] + terms[1][rank][name] for name in grads} for rank, grads in enumerate(terms[0])]
    with poisoned():
        for step in range(2):
            sharded.set_requires_gradient_sync(step == 1)
            backward(sharded, rows_of(world.rank, step))
    found = full_grads(sharded)
    assert found.keys() == everyone[0].keys()
    for name, grad in found.items():
        if grad.dim() > 1:
            assert torch.equal(grad, reduced([terms[0][r][name] * 0.5 + terms[1][r][name] * 0.5 for r in (0, 1)])[0])
    compare({name: grad for name, grad in found.items() if grad.dim() < 2}, everyone)


@on_ranks(2)
def test_ranks_without_a_gradient_send_zeros(world: World) -> None:
    whole: Any = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    sharded: Any = shardrt.fully_shard(copy.deepcopy(whole), quantization_policy=INT8)
    sharded.set_reduce_scatter_unused_params(True)
    x = rows_of(0)
    with poisoned():
        hidden = sharded(x) if world.rank == 0 else None
        (hidden.sum() if hidden is not None else sharded(x.detach()).sum() * 0.0).backward()
    whole(x).sum().backward()
    for param, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert param.grad is not None
        if param.dim() > 1:
            assert torch.equal(param.grad.full_tensor(), coded(expected.grad / 2)[0])


class Elsewhere(shardrt.CPUOffloadPolicy):
    """Keeps shards apart from gathered parameters, as if the mesh were on another device."""

    def applies_to(self, device: torch.device) -> bool:
        return True


@on_ranks(2)
def test_gradients_that_go_to_the_host(world: World) -> None:
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    with poisoned():
        sharded = sharded_of(whole, offload_policy=Elsewhere(pin_memory=False))
        backward(sharded, rows_of(world.rank))
    compare(full_grads(sharded), everyone)


@on_ranks(more=(2,))
def test_compiled_blocks(world: World) -> None:
    torch._dynamo.reset()
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    sharded = copy.deepcopy(whole)
    sharded.blocks[0].compile(backend="aot_eager")
    shard_blocks(sharded, quantization_policy=INT8)
    backward(sharded, rows_of(world.rank))
    for name, grad in full_grads(sharded).items():
        expected, half = reduced([grads[name] / 2 for grads in everyone])
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=2 * float(half.max()) + 1e-6)
    torch._dynamo.reset()


@on_ranks(1, 2)
def test_parameters_without_codes(world: World) -> None:
    """Small ones, and float64 after a `to()`, are reduced whole; then with codes again."""
    whole = model_of()
    sharded = sharded_of(whole)
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    for dtype in (torch.float64, torch.float32):
        sharded.to(dtype)
        (sharded(rows_of(world.rank).to(dtype)) ** 2).mean().backward()
        coded_groups = [group for group in sharded.param_group.with_descendants() if group.reduction.launches_jointly is False]
        assert bool(coded_groups) == (dtype is torch.float32 and world.size > 1)
        for param in sharded.parameters():
            param.grad = None
    backward(sharded, rows_of(world.rank))
    if world.size > 1:
        compare(full_grads(sharded), everyone)


@on_ranks(2, 3)
@pytest.mark.parametrize("case", ["given", "sums", "both", "bfloat16", "float16"])
def test_gradients_are_divided_before_they_are_encoded(world: World, case: str) -> None:
    whole = model_of()
    everyone = [single(whole, rows_of(rank)) for rank in range(world.size)]
    factor = 3.0 if case in ("given", "both") else None
    dtype = getattr(torch, case, torch.float32)
    policy = shardrt.MixedPrecisionPolicy(reduce_dtype=dtype)
    sharded = sharded_of(whole, mp_policy=policy)
    for module in sharded.modules():
        if isinstance(module, shardrt.FSDPModule):
            module.set_force_sum_reduction_for_comms(case in ("sums", "both"))
            if factor is not None:
                module.set_gradient_divide_factor(factor)
    backward(sharded, rows_of(world.rank))
    if dtype is torch.float32:
        return compare(full_grads(sharded), everyone, factor=factor)
    for name, grad in full_grads(sharded).items():
        before = 2.0 if dtype is torch.float16 else world.size  # about the root of the ranks, then the rest
        terms = [(grads[name] * (1 / before)).to(dtype) for grads in everyone]
        if grad.dim() > 1:
            expected = reduced(terms)[0].to(dtype) * (before / world.size)
            torch.testing.assert_close(grad, expected.float(), rtol=4 * torch.finfo(dtype).eps, atol=0.0)


@on_ranks(2)
def test_what_is_not_finite_is_found(world: World) -> None:
    """Its block is NaN on the rank that keeps it: clipping and a GradScaler see it."""
    for value in (NAN, INF):
        model: Any = shardrt.fully_shard(nn.Linear(BLOCK, 8, bias=False), quantization_policy=INT8)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        before = model.weight.full_tensor()
        out = model(torch.ones(1, BLOCK))
        scaler.scale(out[0, 5] * (value if world.rank == 1 else 1.0)).backward()  # the gradients of other rows are 0
        grad = model.weight.grad.full_tensor()
        assert torch.equal(grad.isnan().any(1), torch.arange(8) == 5)
        assert grad[5].isnan().all()
        assert math.isnan(shardrt.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert torch.equal(model.weight.full_tensor(), before)


@on_ranks(4)
def test_terms_of_tensor_parallel_ranks_are_added_before(world: World) -> None:
    dp, tp = meshes(world, 2)
    torch.manual_seed(0)
    model: Any = nn.Linear(20, 30, bias=False)
    whole = copy.deepcopy(model)
    distribute(model, "weight", tp, Replicate(), partial=True)
    shardrt.fully_shard(model, mesh=dp, quantization_policy=INT8)
    x = [torch.randn(4, 20) for _ in range(4)]
    model(x[world.rank]).square().sum().backward()
    grads = [torch.autograd.grad(whole(each).square().sum(), whole.weight)[0] / 2 for each in x]
    assert torch.equal(model.weight.grad.full_tensor(), reduced([grads[0] + grads[1], grads[2] + grads[3]])[0])


# ---------------------------------------------------------------------- bytes, memory, streams


def reductions(world: World, since: float) -> list[dict[str, Any]]:
    """The recorded calls since a time that reduce."""
    calls = [call for call in world.recorder.calls() if call["called"] >= since]
    return [call for call in calls if re.search("reduce_scatter|all_to_all|all_reduce", call["what"])]


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_on_the_wire(world: World, dtype: torch.dtype) -> None:
    limit, nbytes = (0.27 if dtype is torch.float32 else 0.52), {}
    policy = shardrt.MixedPrecisionPolicy(reduce_dtype=dtype)
    for quantization in (None, INT8):
        model = one_layer(quantization_policy=quantization, mp_policy=policy)
        since = time.time()
        model(torch.randn(2, 256)).sum().backward()
        (call,) = reductions(world, since)
        sent = re.findall(r"(?:all_to_all|reduce_scatter) (\w+) (\d+)", call["what"])
        nbytes[quantization] = sum(int(numel) * getattr(torch, each).itemsize for each, numel in sent)
    assert nbytes[None] == 256 * 64 * dtype.itemsize
    assert nbytes[INT8] <= limit * nbytes[None]


@on_ranks(4)
def test_bytes_between_nodes(world: World) -> None:
    """What crosses is codes of sums over a node: a quarter of the bytes, of half of the elements."""
    with nodes_of(world, 2):
        model = one_layer()
    since, segment = time.time(), 256 * 64 // 4
    model(torch.randn(2, 256)).sum().backward()
    within, across = reductions(world, since)
    node, place = divmod(world.rank, 2)
    assert tuple(within["ranks"]) == (2 * node, 2 * node + 1)
    assert tuple(across["ranks"]) == (place, place + 2)
    assert [re.findall(r"(\w+ float32|\w+ int8) (\d+)", call["what"]) for call in (within, across)] == [
        [("reduce_scatter float32", f"{2 * segment}")] * 2,  # at once
        [("all_to_all int8", f"{2 * segment}"), ("all_to_all float32", f"{2 * segment // 256}")],
    ]


class Alone:
    """A communicator whose other ranks have zeros, and send back what they get."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.device = size, rank, torch.device("cpu")
        self.calls: list[int] = []

    def group(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp, *, stream: Stream) -> None:
        assert out.data_ptr() == inp[self.rank * out.numel() :].data_ptr(), "in place"
        assert op is ReduceOp.SUM
        self.calls.append(inp.numel())

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream) -> None:
        out.copy_(inp)


@pytest.mark.parametrize(("most", "calls"), [(16, [3, 3, 3, 3, 3]), (2, [9, 6]), (1, [15]), (4, [3, 6, 6])])
def test_launches_and_memory_do_not_grow_with_the_nodes(monkeypatch: pytest.MonkeyPatch, most: int, calls: list[int]) -> None:
    """Five nodes of three ranks; calls: how many rows each reduces, those without a copy first."""
    monkeypatch.setattr(quantized_reduce, "MOST_BATCHES", most)
    within, across, memory, cpu = Alone(3, 1), Alone(5, 2), MemoryCounter(), torch.device("cpu")
    levels, group = TwoLevels(cast(Communicator, within), cast(Communicator, across)), cast(Any, None)
    packed = FlatBuffer(15 * 512 * 4, cpu, MemoryCounter(), BufferKind.PACKED, group)
    rows = packed.view(torch.float32, 0, (15, 512))
    reduction = CodedReduceScatter(levels, packed, torch.int8, torch.float32, 512, BufferMaker(cpu, memory, group))
    packed.seal()
    packed.allocate()
    mine = rows.copy_(torch.randn(15, 512))[1::3].clone()
    out, stream = torch.empty(512), current_stream(cpu)
    reduction.run(out, stream)
    assert torch.equal(out, reduced(list(mine))[0])
    assert within.calls == [512 * each for each in calls]
    copied = 512 * 4 * max(calls) if len(calls) < 5 else 0
    assert memory.peak == 2 * (5 * 512 + 5 * 2 * 4 + 8) + copied


@on_ranks(2)
def test_codes_are_counted_and_freed(world: World) -> None:
    model, seen = one_layer(), []
    with observing_memory(lambda kind, group, nbytes: seen.append((kind, group, nbytes))):
        model(torch.randn(2, 256)).sum().backward()
    (group,) = [group for group in model.param_groups if group.quantization]
    nbytes = 2 * 256 * 64 + 2 * 4 * 64
    assert [(kind, named, n) for kind, named, n in seen if kind is BufferKind.CODES] == [
        (BufferKind.CODES, group, nbytes),
        (BufferKind.CODES, group, -nbytes),
    ]


@on_ranks(2)
def test_threads_give_the_same_bits(world: World) -> None:
    for shape in ((2,), (2, 1)):
        found = {}
        for streams in ("inline", "threaded"):
            with settings_of(world, host_streams=streams):
                model = sharded_of(model_of(), mesh=DeviceMesh(world.comm, shape))
                for step in range(3):
                    backward(model, rows_of(world.rank, step))
                found[streams] = full_grads(model)
        assert all(torch.equal(grad, found["inline"][name]) for name, grad in found["threaded"].items())


# ---------------------------------------------------------------------- which ranks are neighbours; what is refused


def test_neighbours_by_default() -> None:
    """Those of a node; ranks per node, shape of the mesh, its neighbours along both axes."""
    cases = [
        (8, (16,), (8, 1)),
        (16, (16,), (1, 1)),  # one node
        (3, (16,), (1, 1)),  # not equally many on each
        (8, (4, 4), (4, 2)),
        (8, (2, 8), (8, 1)),
        (4, (2, 8), (4, 1)),
        (8, (16, 1), (1, 8)),
        (2, (4, 4), (2, 1)),
    ]
    for per_node, shape, expected in cases:
        with dry_world(16, ranks_per_node=per_node) as world:
            mesh = DeviceMesh(world.comm, shape, ("replicate", "shard")[-len(shape) :])
            assert neighbours(mesh, None) == expected, (per_node, shape)
    with dry_world(16, rank=5, ranks_per_node=8) as world:  # every second rank
        assert neighbours(DeviceMesh(world.comm, (8, 2), ("dp", "tp"))["dp"], None) == (4, 1)


@pytest.mark.parametrize(
    ("ranks", "shape", "expected"),
    [
        (range(0, 16, 2), (8,), (4, 1)),
        (range(1, 16, 2), (8,), (4, 1)),
        (range(4, 12), (8,), (4, 1)),
        (range(2, 10), (8,), (2, 1)),  # 2 3 | 4 5 | 6 7 on a node, 8 9 on the next
        (range(1, 9), (8,), (1, 1)),
        (range(8, 16), (8,), (1, 1)),  # one node
        (range(4, 12), (2, 4), (4, 1)),
        (range(1, 5), (2, 2), (1, 1)),
        ((0, 1, 2, 5), (4,), (1, 1)),
    ],
)
def test_neighbours_in_a_part_of_the_world(ranks: Sequence[int], shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    """Of a communicator of these ranks, eight of which are on a node."""
    with dry_world(16, rank=ranks[0], ranks_per_node=8) as world:
        mesh = DeviceMesh(world.comm.part(ranks, "part"), shape, ("replicate", "shard")[-len(shape) :])
        assert neighbours(mesh, None) == expected


def test_neighbours_that_are_given() -> None:
    with dry_world(16, ranks_per_node=2) as world:
        flat = world.mesh
        hybrid = DeviceMesh(world.comm, (4, 4), ("replicate", "shard"))
        assert [neighbours(flat, given) for given in (1, 4, 16)] == [(1, 1), (4, 1), (16, 1)]
        assert [neighbours(hybrid, given) for given in (2, 4, 8, 16)] == [(2, 1), (4, 1), (4, 2), (4, 4)]
        assert [neighbours(mesh, 17) for mesh in (flat, hybrid)] == [(16, 1), (4, 4)]
        for mesh, given in ((flat, 3), (hybrid, 6), (hybrid, 12)):
            with pytest.raises(ValueError, match=rf"full_precision_ranks={given}\) on .*: expected a divisor of the"):
                neighbours(mesh, given)


@on_ranks(2)
def test_policies_that_are_refused(world: World) -> None:
    model: Any = shardrt.fully_shard(nn.Linear(4, 4, bias=False), quantization_policy=INT8)
    with pytest.raises(ValueError, match="its quantised ones"):
        model.set_custom_reduce_scatter(None)
    with pytest.raises(ValueError, match="its quantised ones"):
        model.set_all_reduce_hook(print)


def test_a_refused_number_of_neighbours_changes_nothing() -> None:
    """The mesh of some parameters alone may refuse it. Where the policy takes none, no mesh does."""
    with dry_world(12) as world, torch.device("meta"):
        experts = DeviceMesh(world.comm, (3, 4), ("ep", "edp"))["edp"]
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def shard(ranks: int, smallest: int = 1) -> None:
            policy = QuantizationPolicy(reduce=torch.int8, full_precision_ranks=ranks, min_numel=smallest)
            shardrt.fully_shard(model, quantization_policy=policy, shard_placement_fn=placement)

        def placement(param: nn.Parameter) -> ShardPlacementResult | None:
            return ShardPlacementResult(None, experts) if param is model[1].weight else None

        with pytest.raises(ValueError, match=r"full_precision_ranks=3\) on .*: expected a divisor of the 4 ranks"):
            shard(3)
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        shard(3, smallest=1000)
        assert all(isinstance(param, DTensor) for param in model.parameters())


def test_gaps_between_gradients() -> None:
    layout = plan([ParamSpec("a", (3, 5), 4), ParamSpec("b", (2, 7), 4)], 2)
    packed = torch.zeros(layout.nbytes // 4)
    gradients = reduce_layout(layout, [0, 1], 0)
    for piece in gradients.pieces:
        packed[piece.offset : piece.offset + piece.stop - piece.start] += 1
    for start, stop in gradients.gaps(2):
        assert start < stop
        packed[start:stop] += 1
    assert packed.eq(1).all()


def observed_step(
    world: World, shape: tuple[int, ...]
) -> tuple[list[tuple[BufferKind, int]], list[tuple[str, str, tuple[int, ...]]]]:
    """What two steps allocate and free, and all recorded reductions."""
    mesh = DeviceMesh(world.comm, shape, ("replicate", "shard")[-len(shape) :])
    model, buffers = sharded_of(model_of().to(world.device), mesh=mesh), []
    with observing_memory(lambda kind, group, nbytes: buffers.append((kind, nbytes))):
        for _ in range(2):
            loss_of(model, rows_of(0).to(world.device)).backward()
    calls = [(call["comm"], call["what"], tuple(call["ranks"])) for call in reductions(world, 0.0)]
    return buffers, calls


@on_ranks(4)
@with_copies
def test_a_dry_world_makes_the_same_calls_and_buffers(world: World) -> None:
    for shape in ((4,), (2, 2)):
        with dry_world(4, rank=world.rank, ranks_per_node=2, inline=True) as dry, settings_of(dry, node_memory=False):
            buffers, calls = observed_step(dry, shape)
        with nodes_of(world, 2):
            real_buffers, real_calls = observed_step(world, shape)
        assert buffers == real_buffers
        codes = [nbytes for kind, nbytes in buffers if kind is BufferKind.CODES]
        assert codes
        assert sum(codes) == 0
        assert calls == real_calls[-len(calls) :]

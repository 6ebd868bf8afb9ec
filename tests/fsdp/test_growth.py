"""What nothing may cost: time or memory that grows with the ranks. Counts, meshes and layouts of 100,000 ranks."""

from __future__ import annotations

import itertools
import pickle
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranks import on_ranks
from shardrt import MixedPrecisionPolicy, QuantizationPolicy
from shardrt.comm import Communicator, DeviceMesh, World
from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.params.layout import ParamSpec
from shardrt.fsdp.params.param import placement_of
from shardrt.fsdp.params.planner import plan
from shardrt.fsdp.reduce.grad_layout import reduce_layout
from shardrt.tensor.placement.placement import FlatShard, RaggedShard, Replicate, Shard, Spec
from shardrt.tensor.placement.rank_counts import RankCounts
from shardrt.timeline.clocks import measure
from toys import shard_blocks

MANY = 100_000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8), st.integers(0, 3))
def test_counts_against_tuples(runs: list[tuple[int, int]], factor: int) -> None:
    counts: Any = RankCounts(runs)
    expected: Any = tuple(count for count, ranks in runs for _ in range(ranks))
    assert (counts, tuple(counts), len(counts), counts.total) == (expected, expected, len(expected), sum(expected))
    assert (hash(counts), repr(counts)) == (hash(expected), repr(expected))
    again: Any = (RankCounts.of(expected), pickle.loads(pickle.dumps(counts)))
    assert all((other, other.runs) == (counts, counts.runs) for other in again)
    assert [counts.before(rank) for rank in range(len(expected) + 1)] == [
        sum(expected[:rank]) for rank in range(len(expected) + 1)
    ]
    assert [counts[rank] for rank in range(-len(expected), len(expected))] == [*expected, *expected]
    assert (counts[1:5:2], counts.times(factor)) == (expected[1:5:2], tuple(count * factor for count in expected))
    assert not expected or (counts.largest, counts.smallest) == (max(expected), min(expected))
    for wrong in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            counts[wrong]


def test_equal_placements_are_one_key() -> None:
    given = RaggedShard(0, (2, 2, 1))
    assert {given: "here"}[Shard(0).resolve(torch.Size((5,)), 3)] == "here"
    assert given.rows == (2, 2, 1)
    assert given == RaggedShard(0, [2, 2, 1])
    assert FlatShard(0, (1, 1, 2)) != FlatShard(0, (1, 2, 1))
    assert repr(given) == "RaggedShard(dim=0, rows=(2, 2, 1))"
    assert repr(Shard(1).resolve(torch.Size((1, MANY - 1)), MANY)).endswith("rows=RankCounts(((1, 99999), (0, 1))))")


def nbytes_of(make: Callable[[], object]) -> int:
    """The most bytes that Python objects take while `make` runs a second time."""
    make()
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class ManyRanks(SimpleNamespace):
    """A communicator of many ranks that do what this one does. It can compare, but a list of all ranks' values is too long."""

    device = torch.device("cpu")

    def differing(self, value: object) -> None:
        return None

    def exchange(self, value: object) -> NoReturn:
        raise AssertionError("asks every rank")


def mesh_of(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    size = torch.Size(shape).numel()
    return DeviceMesh(cast(Communicator, ManyRanks(rank=rank, size=size, ranks=range(size))), shape, names)


def test_meshes_of_many_ranks() -> None:
    def make() -> DeviceMesh:
        mesh = mesh_of(77_777, (10, 1250, 8), ("replicate", "shard", "tp"))
        shard = mesh["shard"].unflatten((125, 10), ("across", "within"))["within"]
        assert (list(shard.ranks), shard.rank) == ([77_761 + 8 * rank for rank in range(10)], 2)
        assert mesh["replicate", "shard"].flatten().ranks == range(1, 100_000, 8)
        return mesh

    assert nbytes_of(make) < 20_000
    mesh = make()
    product = mesh["tp"].product(mesh["replicate", "shard"])
    assert product.mesh.tolist() == torch.arange(MANY).view(10, 1250, 8).permute(2, 0, 1).tolist()
    assert product["replicate", "shard"] is mesh["replicate", "shard"]
    assert product["tp"] is mesh["tp"]
    assert nbytes_of(lambda: (mesh["tp"].product(mesh["replicate", "shard"]), product["replicate"])) < 2_000


@pytest.mark.parametrize("rank", range(24))
def test_products_by_strides_against_a_tensor(rank: int) -> None:
    table = torch.arange(24).view(2, 3, 2, 2)
    names = ("a", "b", "c", "d")
    mesh = mesh_of(rank, tuple(table.shape), names)
    for outer, inner in (("c",), ("a", "b")), (("d",), ("b", "c")), (("b", "d"), ("a",)), (("c", "d"), ("a", "b")):
        axes = [names.index(name) for name in outer + inner]
        at: list[Any] = [slice(None) if axis in axes else mesh.coordinates[axis] for axis in range(4)]
        kept = sorted(axes)
        expected = table[tuple(at)].permute([kept.index(axis) for axis in axes])
        assert torch.equal(mesh[outer].product(mesh[inner]).mesh, expected.int())


def test_unflattened_axes_of_one_mesh_have_a_product_only_apart() -> None:
    mesh = mesh_of(5, (8,), ("all",))
    half, pairs = mesh.unflatten((2, 4), ("half", "inside")), mesh.unflatten((4, 2), ("pairs", "pair"))
    assert half["half"].product(pairs["pair"]).mesh.tolist() == [[0, 1], [4, 5]]
    with pytest.raises(AssertionError, match="asks every rank"):  # who finds that they overlap
        half["half"].product(pairs["pairs"])


def test_specs_of_many_ranks() -> None:
    shapes = {"q": (16384, 16384), "norm": (16384,), "up": (53248, 16384), "odd": (999, 1001)}
    layout = plan([ParamSpec(name, shape, 2) for name, shape in shapes.items()], MANY)
    mesh = mesh_of(99_998, (1, MANY), ("replicate", "shard"))

    def make() -> None:
        for index, shape in enumerate(shapes.values()):
            placement = placement_of(index, layout)
            spec = Spec.of(mesh, (Replicate(), placement), shape)
            owned = layout.owned(index, 99_998)
            assert (
                sum(box.sizes[0] * (box.sizes[1] if len(shape) > 1 else 1) for box in spec.boxes()) == owned.stop - owned.start
            )
            assert placement.shard_numels(spec.shape).before(99_998) == owned.start

    assert nbytes_of(make) < 50_000


def test_clocks_are_compared_with_one_rank() -> None:
    """Each reading of this clock is a second after the one before."""
    done = SimpleNamespace(synchronize=lambda: None)
    comm = ManyRanks(broadcast=lambda out, inp, root, *, stream: done)
    stream = SimpleNamespace(now=map(float, itertools.count()).__next__)
    world = SimpleNamespace(comm=comm, device=comm.device, stream=stream, barrier=lambda: None)
    offset, opened = measure(cast(World, world))
    assert (offset.seconds, opened) == (0.0, 15.0)


@on_ranks(2, more=(1, 3))
def test_differing(world: World) -> None:
    for comm in (world.comm, world.mesh, DeviceMesh(world.comm, (1, world.size), ("one", "rest"))["rest"]):
        assert comm.differing(["a", (1, None)]) is None
        expected = [f"rank {rank}" for rank in range(world.size)]
        assert comm.differing(f"rank {world.rank}") == (None if world.size == 1 else expected)
        assert comm.differing("\udc80 no UTF-8") is None
        for size in (1 << 18, 600_000):  # in one part, and in several
            large = [(size + rank) * chr(ord("a") + rank) for rank in range(world.size)]
            assert comm.differing(large[world.rank]) == (None if world.size == 1 else large)


@given(
    st.lists(
        st.tuples(st.sampled_from([(7, 5), (64, 3), (40,), (0, 4), (1,), (30, 16)]), st.booleans()), min_size=1, max_size=5
    ),
    st.sampled_from([(4,), (2, 4)]),
    st.sampled_from([1, 2, 5, 16, 40]),
    st.sampled_from([4, 16]),
)
def test_gradients_of_some_parameters_against_each_rank_by_itself(
    params: list[tuple[tuple[int, ...], bool]], itemsizes: tuple[int, ...], ranks: int, align: int
) -> None:
    specs = [ParamSpec(str(at), shape, itemsizes[at % len(itemsizes)]) for at, (shape, _) in enumerate(params)]
    trainable = [at for at, (_, trains) in enumerate(params) if trains] or [0]
    layout = plan(specs, ranks)
    found = [reduce_layout(layout, trainable, rank, align) for rank in range(ranks)]
    places: dict[tuple[int, int], int] = {}  # of elements of gradients in the packed buffer
    for piece in found[0].pieces:
        for at in range(piece.stop - piece.start):
            assert places.setdefault((piece.position, piece.start + at), piece.offset + at) == piece.offset + at
    assert len(set(places.values())) == len(places) == sum(specs[index].numel for index in trainable)
    for rank, each in enumerate(found):
        assert (each.pieces, each.segment_numel) == (found[0].pieces, found[0].segment_numel)
        for own, index in zip(each.own, trainable, strict=True):
            owned = layout.owned(index, rank)
            assert (own.start, own.stop) == (owned.start, owned.stop)
            for at in range(own.stop - own.start):
                assert places[own.position, own.start + at] == rank * each.segment_numel + own.offset + at


def train_once(ranks: int, options: dict[str, Any], *, frozen: bool = False, replicas: int = 1, width: int = 48) -> None:
    """A step of three blocks, in a dry world. frozen: a matrix of each block."""
    with dry_world(ranks) as world, torch.device("meta"):
        mesh = DeviceMesh(world.comm, (replicas, ranks // replicas), ("replicate", "shard"))
        model = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 52), nn.Linear(52, width)) for _ in range(3))
        )
        for name, param in model.named_parameters():
            param.requires_grad_(not frozen or not name.endswith("1.weight"))
        shard_blocks(model, "", mesh=mesh if replicas > 1 else mesh["shard"], **options)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({}, {}),
        ({"mp_policy": BF16, "reshard_after_forward": 8}, {"replicas": 2, "frozen": True, "width": 1024}),
        ({"quantization_policy": QuantizationPolicy(torch.int8, torch.int8, min_numel=1000)}, {}),
    ],
    ids=["plain", "hybrid and frozen", "quantised"],
)
def test_a_step_takes_as_much_memory_of_the_host_on_any_ranks(options: dict[str, Any], setting: dict[str, Any]) -> None:
    few, many = (nbytes_of(partial(train_once, ranks, options, **setting)) for ranks in (32, MANY))
    assert many < 1.1 * few + 100_000

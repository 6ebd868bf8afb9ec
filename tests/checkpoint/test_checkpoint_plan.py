"""Who writes what: chunks tile every tensor, files have no overlaps, replicas share, and torch reads what was planned."""

import io
import itertools
import pickle
import random
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import toys_2d
from checkpoints import shared_folder, small_state, stock_load, tensors_of, whole
from ranks import on_ranks
from shardrt import DTensor
from shardrt.checkpoint import CheckpointError
from shardrt.checkpoint.disk.files import METADATA, bytes_of
from shardrt.checkpoint.formats.dcp.metadata_writer import ending
from shardrt.checkpoint.formats.torch_file.items import BlockCrcs, item_footer, item_header, without_gaps
from shardrt.checkpoint.saving import assignment
from shardrt.checkpoint.saving.assignment import Agreed
from shardrt.checkpoint.saving.chunks import boxes_of
from shardrt.checkpoint.saving.descriptions import Described, Grid
from shardrt.checkpoint.saving.plan import PlannedItem, SavePlan, make_plan, write_metadata
from shardrt.checkpoint.state.entries import Entry, entries
from shardrt.comm import DeviceMesh, World
from shardrt.tensor.placement.placement import FlatShard, Partial, Placement, RaggedShard, Replicate, Shard, Spec

SAVE_ID = 32 * "0"


def counts(total: int, parts: int, draw: random.Random) -> tuple[int, ...]:
    """Uneven, with zeros."""
    ends = sorted(draw.randint(0, total) for _ in range(parts - 1))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *ends, total]))


def random_placement(kind: int, shape: torch.Size, size: int, draw: random.Random) -> Placement:
    dim = draw.randrange(max(1, len(shape)))
    if kind == 0:
        return Replicate()
    if kind == 1:
        return Shard(dim)
    if kind == 2:
        return RaggedShard(dim, counts(shape[dim] if shape else 1, size, draw))
    return FlatShard(dim, counts(shape.numel(), size, draw))


def random_sharded(mesh: DeviceMesh, kinds: Sequence[int], shape: Sequence[int], seed: int) -> tuple[torch.Tensor, DTensor]:
    """A tensor, and this rank's part of it; inner counts are drawn for each column."""
    full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    local, placements = full.shape, []
    for axis, kind in enumerate(kinds):
        draw = random.Random(repr((seed, mesh.coordinates[:axis] if 0 not in kinds[:axis] else 0)))
        placements.append(random_placement(kind, local, mesh.shape[axis], draw).resolve(local, mesh.shape[axis]))
        local = placements[-1].shard_shape(local, mesh.coordinates[axis])
    spec = Spec(mesh, tuple(placements), full.shape)
    return full, DTensor(spec.local_shard(full).contiguous(), spec)


def data_of(item: PlannedItem) -> bytes:
    if isinstance(item.value, bytes):
        return item.value
    memory, crcs = without_gaps(item.value.memory), BlockCrcs()
    raw = bytes_of(memory.as_strided((memory.numel(),), (1,)))
    crcs.update(raw)
    geometry = memory.dtype, memory.shape, memory.stride()
    return item_header(*geometry) + raw + item_footer(*geometry, crcs.values)


def write(world: World, plan: SavePlan, folder: Path) -> None:
    """Write what the plan says, and check that its items fit."""
    end = 64
    for item in plan.items:
        assert item.offset % 64 == 0
        assert item.offset >= end
        end = item.offset + item.length
    assert plan.nbytes == (-(-end // 64) * 64 + 64 if plan.items else 0)
    if plan.items:
        with open(folder / plan.file, "wb") as file:
            for item in plan.items:
                file.seek(item.offset)
                data = data_of(item)
                assert len(data) == item.length
                file.write(data)
    if world.rank == 0:
        (folder / METADATA).write_bytes(plan.metadata + ending(SAVE_ID))
    world.barrier()


class Planned(NamedTuple):
    """A plan without its values."""

    file: str
    items: list[tuple[str, int, int]]  # name, offset, length
    nbytes: int


def validate(folder: Path, plans: Sequence[Planned]) -> None:
    """By torch's own check of bounds, overlaps and volume; and all items of the ranks, and no others, are in the metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint.default_planner import _validate_global_plan
        from torch.distributed.checkpoint.filesystem import FileSystemReader
    metadata = FileSystemReader(folder).read_metadata()
    assert _validate_global_plan([None, None], metadata) == []
    places = {(info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()}
    assert places == {(plan.file, *place) for plan in plans for _, *place in plan.items}


def check(world: World, found: list[Entry], expected: dict[str, torch.Tensor], **objects: Any) -> list[Planned]:
    """Write what is planned, and have torch read it. The plans of all ranks, on rank 0."""
    plan = make_plan(found, world.comm)
    items = [(item.name, item.offset, item.length) for item in plan.items]
    plans = world.comm.exchange(Planned(plan.file, items, plan.nbytes))
    with shared_folder(world) as folder:
        write(world, plan, folder)
        if world.rank == 0:
            validate(folder, plans)
            loaded = stock_load(folder)
            assert loaded.keys() == expected.keys() | objects.keys()
            for name, tensor in expected.items():
                assert torch.equal(loaded[name], tensor), name
            assert {name: loaded[name] for name in objects} == objects
    return plans


def entry(name: str, value: torch.Tensor | object) -> Entry:
    if not isinstance(value, torch.Tensor):
        file = io.BytesIO()
        torch.save(value, file)
        value = file.getvalue()
    return Entry(name, value, tuple(name.split(".")))


SHAPES = [(), (0, 3), (1,), (7,), (5, 3), (3, 2, 5), (2, 3, 1, 4), (190, 91)]


@on_ranks(1, 2, 3, 4)
def test_all_placements_of_one_axis(world: World) -> None:
    mesh, found, expected = DeviceMesh(world.comm), [], {}
    for number, (shape, kind) in enumerate(itertools.product(SHAPES, range(4))):
        expected[f"t.{number}"], part = random_sharded(mesh, [kind], shape, number)
        found.append(entry(f"t.{number}", part))
    expected["plain"] = torch.arange(5)
    found += [entry("plain", torch.arange(5)), entry("object", {"step": 3})]
    with pytest.MonkeyPatch.context() as patch:
        exchange = world.comm.exchange
        patch.setattr(
            world.comm,
            "exchange",
            lambda value: exchange(value) if isinstance(value, Planned | str) else pytest.fail("exchange"),
        )
        check(world, found, expected, object={"step": 3})


@on_ranks(4)
def test_all_placements_of_two_axes(world: World) -> None:
    """With inner counts that differ from column to column."""
    mesh, found, expected = DeviceMesh(world.comm, (2, 2), ("a", "b")), [], {}
    for number, (shape, *kinds) in enumerate(itertools.product(SHAPES, range(4), range(4))):
        expected[f"t.{number}"], part = random_sharded(mesh, kinds, shape, number)
        found.append(entry(f"t.{number}", part))
    check(world, found, expected)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@on_ranks(4)
def test_replicas_share_the_bytes(world: World, shape: tuple[int, int]) -> None:
    """Weights and biases alternate, as in models, and all have the same copies."""
    mesh, found, expected = DeviceMesh(world.comm, shape, ("replicate", "shard")), [], {}
    for layer in range(8):
        for name, size in (("weight", (160, 170)), ("bias", (160,))):
            key = f"{layer}.{name}"
            full = torch.randn(size, generator=torch.Generator().manual_seed(layer))
            expected[key] = full
            spec = Spec.of(mesh, [Replicate(), Shard(0)], full.shape)
            found.append(entry(key, DTensor(spec.local_shard(full), spec)))
    plans = check(world, found, expected)
    nbytes = [plan.nbytes for plan in plans]
    assert max(nbytes) <= 1.1 * sum(nbytes) / 4


@on_ranks(4)
def test_every_row_of_a_mesh_has_a_copy(world: World) -> None:
    """Tensors on a part of the mesh: the ranks of other parts have them too, cut elsewhere."""
    mesh, found, expected = DeviceMesh(world.comm, (2, 2), ("dp", "tp")), [], {}
    for number, (shape, kind) in enumerate(itertools.product([(7,), (5, 3), (130, 140)], range(4))):
        full = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        placement = random_placement(kind, full.shape, 2, random.Random(repr((number, mesh.coordinates[0]))))
        spec = Spec.of(mesh["tp"], [placement], full.shape)
        expected[f"t.{number}"] = full
        found.append(entry(f"t.{number}", DTensor(spec.local_shard(full).contiguous(), spec)))
    check(world, found, expected)


@on_ranks(1, 2, 3, 4)
def test_a_sharded_model_and_its_optimizer(world: World) -> None:
    state = small_state()
    found = entries(state)
    values = {each.name: each.value for each in found}
    expected = {name: whole(value.detach()) for name, value in values.items() if isinstance(value, torch.Tensor)}
    objects = {name: torch.load(io.BytesIO(value)) for name, value in values.items() if isinstance(value, bytes)}
    check(world, found, expected, **objects)
    assert tensors_of(state).keys() <= expected.keys()


@on_ranks(2, 4)
def test_a_tensor_parallel_model(world: World) -> None:
    """Sharded over columns that are cut elsewhere, with tied weights, which are written once."""
    dp, tp = toys_2d.meshes(world, 2)
    model = toys_2d.shard(toys_2d.parallelize(toys_2d.Toy(), tp), dp)
    found = entries({"model": model})
    expected = {each.name: whole(each.value.detach()) for each in found if isinstance(each.value, torch.Tensor)}
    plans = check(world, found, expected)
    names = {name for plan in plans for name, *_ in plan.items}
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names


@on_ranks(2, 3)
def test_ranks_with_their_own_names(world: World) -> None:
    """Each name is written by the first rank that has it; the others share large plain tensors."""
    tensors = {f"rank{rank}": torch.full((rank + 2,), float(rank)) for rank in range(world.size)}
    large = {f"large.{number}": torch.full((100, 200), float(number)) for number in range(2 * world.size)}
    found = [entry(f"rank{world.rank}", tensors[f"rank{world.rank}"]), entry("all", "x" * (100 * world.rank))]
    found += [entry(name, value) for name, value in large.items()]
    if world.rank:
        found.append(entry("late", [world.rank]))
    plans = check(world, found, tensors | large, all="", late=[1])
    for rank, plan in enumerate(plans):
        names = [name for name, *_ in plan.items]
        assert [name.startswith("large") for name in names[:2]] == [True, True]
        assert f"rank{rank}" in names
        assert ("all" in names) == (rank == 0)
        assert ("late" in names) == (rank == 1)


@on_ranks(2, 3)
def test_equal_memory_is_written_once(world: World) -> None:
    tensor, other = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    found = {"a": tensor, "b": tensor.detach(), "c": other, "d": tensor.t(), "e": tensor[:2], "f": tensor.view(torch.int32)}
    plans = check(world, [entry(name, value) for name, value in found.items()], found)
    assert [name for name, *_ in plans[0].items] == ["a", "c", "d", "e", "f"]


@pytest.mark.parametrize("is_reordered", [False, True])
@on_ranks(3)
def test_equal_memory_is_written_once_where_a_rank_has_none_of_it(world: World, is_reordered: bool) -> None:
    """Ranks without elements cannot tell. If one of them has the names in another order, each is written."""
    mesh, full = DeviceMesh(world.comm), torch.arange(8.0).view(2, 4)
    for counts in ((0, 1, 1), (1, 1, 0)):
        spec = Spec.of(mesh, [RaggedShard(0, counts)], full.shape)
        shards = [spec.local_shard(full).clone() for _ in range(2)]
        found = [entry(name, DTensor(shards[name > "b"].detach(), spec)) for name in "abcd"]
        if is_reordered and not counts[world.rank]:
            found.reverse()
        plans = check(world, found, dict.fromkeys("abcd", full))
        names = {name for plan in plans for name, *_ in plan.items}
        assert names == (set("abcd") if is_reordered and not counts[0] else set("ac"))


@on_ranks(3)
def test_memory_that_is_equal_on_some_ranks_only(world: World) -> None:
    """A rank without elements, which cannot tell, does not speak for one whose tensors are two."""
    mesh, full = DeviceMesh(world.comm), torch.arange(8.0).view(2, 4)
    for counts, one in (((0, 1, 1), 1), ((1, 0, 1), 2), ((1, 1, 0), 0)):
        spec = Spec.of(mesh, [RaggedShard(0, counts)], full.shape)
        shard = spec.local_shard(full).clone()
        other = shard if world.rank == one else shard.clone()
        plans = check(world, [entry("a", DTensor(shard, spec)), entry("b", DTensor(other, spec))], {"a": full, "b": full})
        assert {name for plan in plans for name, *_ in plan.items} == {"a", "b"}


@on_ranks(2)
def test_metadata_is_made_once_for_equal_states(world: World) -> None:
    tensor, longer = torch.ones(3), [entry("a", torch.ones(3)), entry("b", "y" * 1000 * (1 + world.rank))]
    first, second = (make_plan([entry("a", tensor * n), entry("b", "x" * n)], world.comm) for n in (1, 2))
    assert second.metadata is first.metadata
    assert make_plan(longer, world.comm).metadata != first.metadata
    check(world, longer, {"a": tensor}, b="y" * 1000)


@on_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_copies_on_meshes_apart_are_compared(world: World, dtype: torch.dtype) -> None:
    """Parts of a model with the names of others would be lost, also if they are close. Halves of the ranks.

    The halves cut by other rows, the last rank's local tensor is conjugated where it is complex, some have no elements.
    """
    half = world.size // 2
    mesh, upper, last = world.mesh.unflatten((2, half), ("pp", "dp"))["dp"], world.rank >= half, world.rank == world.size - 1
    full = torch.arange(1.0, 41.0).view(8, 5) * 3
    counts = (8, *[0] * (half - 1)) if upper else (*[1] * (half - 1), 9 - half)

    def save(own: torch.Tensor) -> None:
        spec = Spec.of(mesh, [RaggedShard(0, counts)], own.shape)
        local = spec.local_shard(own).to(dtype)
        local = local.conj().resolve_conj().conj() if last and local.is_complex() else local
        found = [entry("same", DTensor(torch.zeros(local.shape), spec)), entry("plain", torch.ones(3))]
        found.append(entry("number", DTensor(full.mean().to(dtype), Spec.of(mesh, [Replicate()], torch.Size()))))
        make_plan([*found, entry("stage.weight", DTensor(local, spec))], world.comm)

    save(full)
    save(torch.where(torch.arange(5) == 0, torch.nan if dtype.is_floating_point else 0, full))
    message = rf"'stage.weight': ranks . and [{half}-{world.size - 1}] have different tensors of this name, on different meshes"
    last_bit = full + upper * (full == full[7, 4]) * (1 if dtype.itemsize > 1 else 8)
    for other in (full.flip(0) if upper else full, full * upper + full.mean() * (full == 3) * ~upper, last_bit):
        with pytest.raises(CheckpointError, match=message):
            save(other)


@on_ranks(2, 3)
def test_what_differs_is_refused_on_every_rank(world: World) -> None:
    last = world.rank == world.size - 1
    mesh = DeviceMesh(world.comm)
    spec = Spec.of(mesh, [Shard(0)], torch.Size([6]))
    sharded = DTensor(spec.local_shard(torch.arange(6)), spec)
    for value, message in (
        (torch.ones(2 + last), r"'x' is a plain tensor of shape \(2,\).* on rank 0, and .*shape \(3,\).* on rank"),
        (torch.ones(2, dtype=torch.float16 if last else torch.float32), "float32 on rank 0, and .*float16 on rank"),
        ({"a": 1} if last else torch.ones(2), "on rank 0, and an object on rank"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make_plan([entry("x", value)], world.comm)
    with pytest.raises(CheckpointError, match=f"rank {world.size - 1} has no tensor 'x' on the mesh"):
        make_plan([] if last else [entry("x", sharded)], world.comm)
    partial = DTensor(torch.ones(6), Spec.of(mesh, [Partial()], torch.Size([6])))
    for value, message in (
        (partial, rf"'x' \(rank {world.size - 1}\) is Partial.*redistribute"),
        (torch.ones(2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make_plan([entry("x", value if last else torch.ones(2))], world.comm)


# ---------------------------------------------------------------------- without ranks


class OneRank:
    """The part of a mesh that `Spec.boxes` asks for."""

    def __init__(self, shape: tuple[int, ...], coordinates: tuple[int, ...]) -> None:
        self.shape, self.coordinates, self.axis_names = shape, coordinates, tuple("abc"[: len(shape)])

    def __getitem__(self, names: object) -> "OneRank":
        return self


@pytest.mark.parametrize("seed", range(8))
def test_boxes_of_many_ranks_are_those_of_each(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        shape = torch.Size(draw.randint(draw.random() < 0.9, 5) for _ in range(draw.randint(0, 4)))
        extents = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 2)))
        outer = random_placement(draw.randrange(4), shape, extents[0], draw)
        for column in range(extents[0]):
            placements = [outer]
            if len(extents) > 1:
                local = outer.resolve(shape, extents[0]).shard_shape(shape, column)
                placements.append(random_placement(draw.randrange(4), local, extents[1], draw))
            places = [(column, *rest) for rest in itertools.product(*map(range, extents[1:]))]
            found = boxes_of(shape, placements, extents, torch.tensor(places))
            assert found.owner.tolist() == sorted(found.owner)
            for rank, place in enumerate(places):
                rows = (found.owner == rank).nonzero().view(-1)
                boxes = list(zip(found.offsets[rows].tolist(), found.sizes[rows].tolist(), strict=True))
                mesh: Any = OneRank(extents, place)
                expected = Spec(mesh, tuple(placements), shape).boxes()
                assert boxes == [(list(box.offsets), list(box.sizes)) for box in expected]


def test_metadata_of_ranks_that_do_not_exist(tmp_path: Path) -> None:
    """Of 500 ranks, as torch reads it."""
    ranks, draw = 500, random.Random(0)
    grid, kind = Grid.of((ranks,), range(ranks)), []
    for number, shape in enumerate([(4096, 33), (7, 5, 3), (700,), ()]):
        shard = FlatShard(0, counts(torch.Size(shape).numel(), ranks, draw))
        kind.append(Described(f"w.{number}", ("w", number), torch.float32, shape, 0, grid, (shard,)))
    kind.append(Described("step", ("step",), None, nbytes=100))
    with open(tmp_path / METADATA, "wb") as out:
        write_metadata(out, Agreed.of_equal(tuple(kind), ranks))
        out.write(ending(SAVE_ID))
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    places = [(info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()]
    validate(tmp_path, [Planned(file, [("", *place)], 0) for file, *place in places])
    taken: dict[str, list[tuple[int, int]]] = {}
    for file, start, length in places:
        taken.setdefault(file, []).append((start, length))
    for items in taken.values():
        items.sort()
        assert items[0][0] == 64
        for (start, length), (following, _) in itertools.pairwise(items):
            assert following == -(-(start + length) // 64) * 64
    shutil.rmtree(tmp_path)


def test_tensors_of_one_layout_are_laid_out_once() -> None:
    """Each of the copies that share the work once: 400 tensors of two sizes, beside and above 64 KiB, by two rows of a mesh."""
    grid, both = Grid.of((2, 2), range(4)), (Replicate(), Shard(0))
    shapes = ((9, 7), (400, 128), (9, 7))
    kind = [
        Described(f"{n}.{i}", (str(n), i), torch.float32, shape, 0, grid, placements)
        for n in range(100)
        for i, (shape, placements) in enumerate(zip((*shapes, (3,)), (both, both, (Shard(1), Shard(0)), both), strict=True))
    ]
    agreed, found = Agreed.of_equal(tuple(kind), 4), list[bytes]()
    for kept, calls in ((1 << 21, 7), (0, 800)):  # two copies of three layouts, and one of the layout without replicas
        of_names = mock.patch.object(assignment, "boxes_of", wraps=boxes_of)
        with mock.patch("shardrt.checkpoint.saving.plan._KEPT", kept), of_names as boxes:
            write_metadata(out := io.BytesIO(), agreed)
        found.append(out.getvalue())
        assert boxes.call_count == calls
    assert found[0] == found[1]


def test_placements_that_do_not_fit_are_refused() -> None:
    """Columns that know the counts of another cut."""
    grid = Grid.of((2,), range(2))
    kinds = [(Described("w", ("w",), torch.float32, (5,), 0, grid, (RaggedShard(0, rows),)),) for rows in ((2, 3), (3, 2))]
    with pytest.raises(CheckpointError, match=r"'w' of shape \(5,\).*have 4 elements of 5"):
        write_metadata(io.BytesIO(), Agreed(tuple(kinds), torch.tensor([0, 1])))

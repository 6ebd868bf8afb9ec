"""The planner: segments tile the buffer, shards end at rows, padding and planning time are bounded."""

from collections.abc import Callable
from itertools import pairwise, permutations
from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import refused
from shardrt.fsdp.params import planner
from shardrt.fsdp.params.layout import ALIGNMENT, Layout, OwnedRange, ParamSpec, RowBox, boxes, fsdp2_padding, padding_limit
from shardrt.fsdp.params.planner import plan

EXAMPLE = (
    ParamSpec("embed", (7, 8), 4),
    ParamSpec("weight", (12, 4), 4),
    ParamSpec("bias", (6,), 4),
)

property_test = settings()  # the profile of conftest.py


def transformer_block(
    hidden: int, ffn: int, kv: int, *, itemsize: int = 2, prefix: str = "", down_dim: int = 0
) -> list[ParamSpec]:
    matrices = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    matrices |= {"gate": (ffn, hidden), "up": (ffn, hidden)}
    specs = [ParamSpec(prefix + name, shape, itemsize) for name, shape in matrices.items()]
    specs.append(ParamSpec(prefix + "down", (hidden, ffn), itemsize, dim=down_dim))
    return [*specs, *(ParamSpec(prefix + name, (hidden,), itemsize) for name in ("norm1", "norm2"))]


@st.composite
def groups(draw: st.DrawFn, rows_only: bool = False) -> tuple[list[ParamSpec], int]:
    """Parameters of any rank, size (also zero), item size and shard dim, and a world size."""
    sizes = st.one_of(st.integers(0, 12), st.sampled_from((16, 64, 100, 257, 999, 1000)))
    specs = []
    for index in range(draw(st.integers(0, 12))):
        shape = tuple(draw(st.lists(sizes, max_size=3)))
        dim = draw(st.integers(0, max(len(shape) - 1, 0)))
        itemsize = draw(st.sampled_from((1, 2, 4, 8, 16)))
        only = rows_only and draw(st.booleans())
        specs.append(ParamSpec(f"p{index}", shape, itemsize, dim, only))
    return specs, draw(st.one_of(st.integers(1, 9), st.sampled_from((16, 64, 1000))))


def inner_cuts(layout: Layout, index: int) -> list[int]:
    """Bytes from the parameter's start to every segment boundary strictly inside it."""
    param, segment = layout.placed[index], layout.segment_nbytes
    end = param.offset + param.spec.nbytes
    first = param.offset // segment + 1
    return [k * segment - param.offset for k in range(first, -(-end // segment))]


def check_layout(layout: Layout, specs: list[ParamSpec], world_size: int) -> None:
    assert [param.spec for param in layout.placed] == specs
    assert layout.nbytes == world_size * layout.segment_nbytes
    assert layout.segment_nbytes > 0
    assert layout.segment_nbytes % ALIGNMENT == 0
    spans = sorted((s.offset, s.offset + s.spec.nbytes) for s in layout.placed if s.spec.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    for index, param in enumerate(layout.placed):
        assert param.offset % ALIGNMENT == 0
        assert 0 <= param.offset <= param.offset + param.spec.nbytes <= layout.nbytes
        cuts = inner_cuts(layout, index)
        on_rows = all(cut % param.spec.row_nbytes == 0 for cut in cuts)
        assert on_rows != param.flat, "flat is declared exactly where a row is cut"
        assert all(cut % param.spec.itemsize == 0 for cut in cuts)


@property_test
@given(groups())
def test_segments_tile_and_every_cut_is_on_a_row_or_declared(
    group: tuple[list[ParamSpec], int],
) -> None:
    specs, world_size = group
    layout = plan(specs, world_size)
    check_layout(layout, specs, world_size)
    assert layout.padding_nbytes == layout.nbytes - sum(spec.nbytes for spec in specs) >= 0


@property_test
@given(groups())
def test_padding_is_bounded_by_that_of_fsdp2(group: tuple[list[ParamSpec], int]) -> None:
    specs, world_size = group
    payload = sum(spec.nbytes for spec in specs)
    alignment = 16 * len(specs) + 16 * world_size
    bound = max(min(fsdp2_padding(specs, world_size), payload // 4), payload // 100) + alignment
    assert padding_limit(specs, world_size) == bound
    assert plan(specs, world_size).padding_nbytes <= bound


@property_test
@given(groups(rows_only=True))
def test_rows_only_is_never_cut_in_a_row(group: tuple[list[ParamSpec], int]) -> None:
    specs, world_size = group
    layout = plan(specs, world_size)
    check_layout(layout, specs, world_size)
    assert not any(param.flat and param.spec.rows_only for param in layout.placed)


@property_test
@given(groups(rows_only=True))
def test_ranges_partition_every_parameter(group: tuple[list[ParamSpec], int]) -> None:
    specs, world_size = group
    layout = plan(specs, world_size)
    for index, param in enumerate(layout.placed):
        ranges = [layout.owned(index, rank) for rank in range(world_size)]
        edges = [0, *(owned.stop for owned in ranges)]
        assert [owned.start for owned in ranges] == edges[:-1]
        assert edges[-1] == param.spec.numel
        assert layout.numels(index) == tuple(owned.stop - owned.start for owned in ranges)
        for rank, owned in enumerate(ranges):
            if owned.start == owned.stop:
                assert owned.offset == 0
                continue
            byte = rank * layout.segment_nbytes + owned.offset
            assert byte == param.offset + owned.start * param.spec.itemsize
            assert owned.offset + (owned.stop - owned.start) * param.spec.itemsize <= layout.segment_nbytes


@property_test
@given(groups(rows_only=True))
def test_plan_is_deterministic(group: tuple[list[ParamSpec], int]) -> None:
    specs, world_size = group
    copies = [ParamSpec(s.name, s.shape, s.itemsize, s.dim, s.rows_only) for s in specs]
    first = plan(specs, world_size)
    planner._best.cache_clear()
    assert first == plan(copies, world_size)


def test_equal_blocks_are_planned_once() -> None:
    first, second = (transformer_block(96, 257, 32, prefix=f"layers.{index}.") for index in range(2))
    one, misses = plan(first, 24), planner._best.cache_info().misses
    other = plan(second, 24)
    assert planner._best.cache_info().misses == misses
    assert [param.spec for param in other.placed] == second
    assert [(param.offset, param.flat) for param in other.placed] == [(param.offset, param.flat) for param in one.placed]
    assert other.segment_nbytes == one.segment_nbytes
    assert plan(second[:-1], 24) != other


def smallest_row_segment(specs: list[ParamSpec], world_size: int, largest: int) -> int | None:
    """The smallest segment without a flat cut, by trying every size, order and start."""

    def fits(order: tuple[ParamSpec, ...], segment: int) -> bool:
        cursor = 0
        for spec in order:
            while True:
                end = cursor + spec.nbytes
                if end > world_size * segment:
                    return False
                inner = range((cursor // segment + 1) * segment, end, segment)
                if all((boundary - cursor) % spec.row_nbytes == 0 for boundary in inner):
                    break
                cursor += 16
            cursor = -(-end // 16) * 16
        return True

    payload = sum(spec.nbytes for spec in specs)
    for segment in range(max(payload // world_size // 16 * 16, 16), largest + 1, 16):
        if any(fits(order, segment) for order in permutations(specs)):
            return segment
    return None


def test_tiny_groups_against_exhaustive_search() -> None:
    """The search is a heuristic: on tiny groups at most one in fifty may miss the optimum."""
    random = Random(0)
    missed = 0
    for _ in range(200):
        specs = [
            ParamSpec(str(i), (random.randint(1, 12), random.choice((1, 2, 3, 4, 5, 8, 12, 20))), 4)
            for i in range(random.randint(1, 4))
        ]
        world_size = random.randint(1, 4)
        layout = plan(specs, world_size)
        largest = (layout.payload_nbytes + padding_limit(specs, world_size)) // world_size
        optimum = smallest_row_segment(specs, world_size, largest)
        flat = any(param.flat for param in layout.placed)
        if optimum is None:
            assert flat
        else:
            assert flat or layout.segment_nbytes >= optimum, "the oracle must not be beaten"
            missed += flat or layout.segment_nbytes > optimum
    assert missed <= 4


def test_drawn_example() -> None:
    layout = plan(EXAMPLE, 4)
    assert layout.segment_nbytes == 128
    assert [param.offset for param in layout.placed] == [0, 224, 416]
    assert not any(param.flat for param in layout.placed)
    assert (layout.payload_nbytes, layout.padding_nbytes) == (440, 72)
    rows = [[count // spec.row_numel for count in layout.numels(index)] for index, spec in enumerate(EXAMPLE)]
    assert rows == [[4, 3, 0, 0], [0, 2, 8, 2], [0, 0, 0, 6]]
    assert layout.owned(1, 1) == OwnedRange(0, 8, offset=96)
    assert layout.owned(1, 2) == OwnedRange(8, 40, offset=0)
    assert layout.owned(1, 0) == OwnedRange(0, 0, offset=0)
    assert layout.owned(2, 3) == OwnedRange(0, 6, offset=32)


def test_row_sizes_that_do_not_go_together_are_cut_flat_unless_asked_not_to() -> None:
    shapes = {"a": (1000, 1000), "b": (999, 999)}
    layout = plan([ParamSpec(name, shape, 4) for name, shape in shapes.items()], 8)
    assert [param.flat for param in layout.placed] == [False, True]
    assert layout.padding_nbytes < layout.payload_nbytes // 100

    specs = [ParamSpec(name, shape, 4, rows_only=True) for name, shape in shapes.items()]
    rows = plan(specs, 8)
    check_layout(rows, specs, 8)
    assert not any(param.flat for param in rows.placed)
    assert rows.padding_nbytes > padding_limit(specs, 8)


def test_only_the_parameter_that_does_not_fit_is_cut_flat() -> None:
    specs = [ParamSpec(f"w{i}", (4096, 1024), 4) for i in range(3)] + [ParamSpec("odd", (640, 999), 4)]
    layout = plan(specs, 64)
    assert [param.spec.name for param in layout.placed if param.flat] == ["odd"]


@pytest.mark.parametrize("world_size", [8, 16, 32, 64, 128, 256])
def test_uniform_transformer_block_pads_next_to_nothing(world_size: int) -> None:
    specs = transformer_block(4096, 14336, 1024, down_dim=1)
    layout = plan(specs, world_size)
    assert not any(param.flat for param in layout.placed)
    # Segments hold a whole number of rows, so the padding is less than one row per rank.
    assert layout.padding_nbytes <= world_size * 4096 * 2


def test_shard_dim_decides_the_row() -> None:
    spec = ParamSpec("w", (3, 5, 7), 2, dim=1)
    assert (spec.rows, spec.row_numel, spec.row_nbytes) == (5, 21, 42)
    assert (spec.numel, spec.nbytes) == (105, 210)
    assert plan([spec], 1).numels(0) == (105,)


def test_scalars_and_empty_parameters() -> None:
    specs = [ParamSpec("s", (), 8), ParamSpec("none", (0, 4), 4), ParamSpec("thin", (4, 0), 4)]
    layout = plan(specs, 3)
    check_layout(layout, specs, 3)
    assert layout.numels(0) in ((1, 0, 0), (0, 1, 0), (0, 0, 1))
    assert layout.numels(1) == layout.numels(2) == (0, 0, 0)
    assert fsdp2_padding(specs, 3) == 16
    assert plan([], 2).padding_nbytes == 32


def test_one_rank_owns_everything() -> None:
    layout = plan(EXAMPLE, 1)
    assert layout.segment_nbytes == 448
    assert [layout.owned(i, 0).stop for i in range(3)] == [56, 48, 6]


def test_fsdp2_padding() -> None:
    assert fsdp2_padding(EXAMPLE, 4) == (8 - 7) * 32 + 0 + (8 - 6) * 4
    assert fsdp2_padding([ParamSpec("w", (3, 5), 2, dim=1)], 4) == (8 - 5) * 6


@property_test
@given(st.lists(st.integers(1, 6), max_size=3), st.data())
def test_boxes_cover_the_run_in_order(shape: list[int], data: st.DataObject) -> None:
    spec = ParamSpec("p", tuple(shape), 4)
    start = data.draw(st.integers(0, spec.numel))
    stop = data.draw(st.integers(start, spec.numel))
    found = boxes(start, stop, spec.shape)
    elements = [
        row * spec.row_numel + column
        for box in found
        for row in range(box.offsets[0], box.offsets[0] + box.sizes[0])
        for column in range(box.offsets[1], box.offsets[1] + box.sizes[1])
    ]
    assert elements == list(range(start, stop))
    assert len(found) <= 3
    assert all(min(box.sizes) > 0 for box in found)


def test_boxes_of_a_flat_run() -> None:
    head, middle, tail = boxes(3, 22, (4, 3, 2))
    assert head == RowBox((0, 3), (1, 3))
    assert middle == RowBox((1, 0), (2, 6))
    assert tail == RowBox((3, 0), (1, 4))
    assert boxes(7, 9, (4, 6)) == (RowBox((1, 1), (1, 2)),)
    assert boxes(6, 18, (4, 6)) == (RowBox((1, 0), (2, 6)),)
    assert boxes(0, 0, (0, 6)) == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("block.w", (4, 4), 3), r"block\.w: itemsize .*\(1, 2, 4, 8, 16\), got 3"),
        (("block.w", (4, 4), 4, 2), r"block\.w: shard dim of shape \(4, 4\) .*0\.\.1, got 2"),
        (("block.w", (4, 4), 4, -1), r"block\.w: shard dim .*got -1"),
        (("block.w", (), 4, 1), r"block\.w: shard dim of shape \(\) .*0\.\.0, got 1"),
        (("block.w", (4, -4), 4), r"block\.w: sizes .*got shape \(4, -4\)"),
    ],
)
def test_bad_spec(arguments: tuple[object, ...], words: str) -> None:
    refused(words, lambda: ParamSpec(*arguments))


def test_bad_plan() -> None:
    twice = [ParamSpec("w", (4,), 4), ParamSpec("b", (4,), 4), ParamSpec("w", (8,), 4)]
    refused("w: expected every name once, got it at 0 and 2", lambda: plan(twice, 2))
    refused("world_size must be at least 1, got 0", lambda: plan(EXAMPLE, 0))


def many_transformer_parameters() -> list[ParamSpec]:
    blocks = (transformer_block(4096, 14336, 1024, prefix=f"{i}.") for i in range(56))
    return [spec for block in blocks for spec in block][:500]


def many_unrelated_rows() -> list[ParamSpec]:
    """No two row sizes alike: the slowest input, about two thirds of its bytes are cut flat."""
    return [ParamSpec(str(i), (1 + i * 7919 % 5000, 1 + i * 104729 % 1999), (2, 4)[i % 2]) for i in range(500)]


@pytest.mark.parametrize("make", [many_transformer_parameters, many_unrelated_rows])
@pytest.mark.parametrize("world_size", [1024, 100_000])
def test_plan_time(make: Callable[[], list[ParamSpec]], world_size: int) -> None:
    """Prints the time (target: 50 ms at 1024 ranks); the bound detects a change of complexity."""
    specs = make()
    seconds = []
    for _ in range(3):
        planner._best.cache_clear()
        begin = process_time()
        layout = plan(specs, world_size)
        seconds.append(process_time() - begin)
    print(f"{make.__name__}, {world_size} ranks: {min(seconds) * 1e3:.1f} ms")
    assert min(seconds) < 2.0
    assert layout.padding_nbytes <= padding_limit(specs, world_size)

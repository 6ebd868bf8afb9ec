"""Where every parameter of a group lies in one flat buffer that N ranks share in equal segments.

The unsharded buffer is N segments of S bytes; rank r owns bytes [r * S, (r + 1) * S). Gathering the
segments *is* unsharding, because every parameter is one contiguous run of bytes in the buffer: its
rows (slices along its shard dim, that dim outermost) one after the other. The planner chooses where
each run starts, and S, such that the boundaries between segments fall between rows:

    plan([embed (7, 8), weight (12, 4), bias (6,); 4-byte elements], world_size=4)   S = 128

    byte   0               128         224 256             384 416         512
    param  | embed                     | weight                | bias      |
    rows   |       4       |     3     | 2 |       8       | 2 | 6| padding|
    rank   |       0       |       1       |       2       |       3       |

Payload 440 bytes, padding 72. S = 112 would pad 8, but wherever embed starts, it is cut in a row.

The rules:
- S and every start are multiples of 16 bytes, so that kernels may use vector loads on any segment
  and any parameter, whatever dtypes meet in the group.
- A boundary k * S strictly inside a parameter is a whole number of its rows after its start. So a
  parameter cut twice or more needs a row size that divides S; one that is cut once only needs the
  right start; one inside a segment needs nothing.
- Row sizes that do not go together (1000 and 999 elements) would make S a multiple of both.
  Padding stays within `padding_limit`: max(what FSDP2 pads for the same shapes, 1 % of the payload)
  + 16 per parameter + 16 per segment. Where rows cost more, the parameters that force it are cut
  between elements (`PlacedParam.flat`), as few bytes of them as the search finds. Only `rows_only`
  parameters are never cut so; where they force more padding, S is the smallest found for them.

Placing runs around fixed boundaries is bin packing, so this is a search: many segment sizes, a few
orders, one greedy pass for each. The idea of planned ragged shards in one buffer that needs no
copies is that of veScale-FSDP (arXiv:2602.22437); the search and the flat fallback are our own.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import lcm, prod

ALIGNMENT = 16  # bytes, one vector load. Invariant: a multiple of every item size
ITEM_SIZES = (1, 2, 4, 8, 16)
MOST_GAPS = 4  # kept open for later parameters. Cost: every parameter looks at each


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """The shape of one parameter; `dim` is its shard dim. A scalar is one row of one element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int  # bytes per element in the unsharded buffer
    dim: int = 0
    rows_only: bool = False  # never cut between elements, whatever that pads

    def __post_init__(self) -> None:
        last_dim = max(len(self.shape) - 1, 0)
        if self.itemsize not in ITEM_SIZES:
            raise ValueError(f"{self.name}: itemsize must be in {ITEM_SIZES}, got {self.itemsize}")
        if not 0 <= self.dim <= last_dim:
            raise ValueError(f"{self.name}: shard dim of shape {self.shape} must be in 0..{last_dim}, got {self.dim}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: sizes must not be negative, got shape {self.shape}")

    @property
    def rows(self) -> int:
        return self.shape[self.dim] if self.shape else 1

    @property
    def row_numel(self) -> int:
        return prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    @property
    def row_nbytes(self) -> int:
        return self.row_numel * self.itemsize

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """Where one parameter lies."""

    spec: ParamSpec
    offset: int  # bytes from the start of the unsharded buffer
    flat: bool  # True: cut between elements (FlatShard), False: on rows only (RaggedShard)


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank owns of one parameter."""

    start: int  # first element, in the parameter's elements with the shard dim outermost
    stop: int  # one past the last; start == stop: nothing
    offset: int  # bytes from the start of the rank's segment; 0 when empty


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the (rows, row_numel) view of a parameter."""

    offsets: tuple[int, int]
    sizes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """A planned buffer. Invariant: segment_nbytes is positive, and a multiple of 16 if `plan` made it."""

    world_size: int
    segment_nbytes: int
    placed: tuple[PlacedParam, ...]  # in the order of the specs given to plan()

    @property
    def nbytes(self) -> int:
        return self.world_size * self.segment_nbytes

    @property
    def payload_nbytes(self) -> int:
        return sum(param.spec.nbytes for param in self.placed)

    @property
    def padding_nbytes(self) -> int:
        return self.nbytes - self.payload_nbytes

    def run(self, index: int, rank: int) -> Run:
        """The elements of parameter `index` that `rank` owns. Over all ranks the runs tile it."""
        param, base = self.placed[index], rank * self.segment_nbytes
        end = param.offset + param.spec.nbytes
        start = min(max(base, param.offset), end)
        stop = max(min(base + self.segment_nbytes, end), start)
        first, last = ((byte - param.offset) // param.spec.itemsize for byte in (start, stop))
        return Run(first, last, start - base if stop > start else 0)

    def numels(self, index: int) -> tuple[int, ...]:
        """Elements of parameter `index` on every rank. Cost: O(world_size)."""
        param, counts = self.placed[index], [0] * self.world_size
        first = param.offset // self.segment_nbytes
        for rank in range(first, -(-(param.offset + param.spec.nbytes) // self.segment_nbytes)):
            run = self.run(index, rank)
            counts[rank] = run.stop - run.start
        return tuple(counts)


def plan(specs: Sequence[ParamSpec], world_size: int) -> Layout:
    """Place `specs` in `world_size` equal segments; the same input gives the same layout anywhere.

    Of the segment sizes within `padding_limit`: fewest bytes cut between elements, then smallest.
    Cost: some dozens of O(len(specs)) passes, whatever the world size; milliseconds.
    Raises: ValueError for a world size below 1 or two specs of one name.
    """
    _check(specs, world_size)
    items = [_Item.of(index, spec) for index, spec in enumerate(specs)]
    payload = sum(item.nbytes for item in items)
    # Invariant: no layout has a smaller S, and with every parameter flat this one is reached.
    smallest = max(_ceil(-(-sum(i.padded for i in items) // world_size), ALIGNMENT), ALIGNMENT)
    limit = payload + padding_limit(specs, world_size)
    best = _fit(items, world_size, smallest, limit // world_size)
    placed = (PlacedParam(spec, best.offsets[index], index in best.flat) for index, spec in enumerate(specs))
    return Layout(world_size, best.segment, tuple(placed))


def equal_runs(spec: ParamSpec, world_size: int) -> Layout:
    """One parameter in runs of ceil(rows / world_size) rows, the last ones shorter or empty, as torch's `Shard(0)` cuts it.

    Segments are not aligned: they are those rows and no more.
    """
    rows = -(-spec.rows // world_size)
    return Layout(world_size, rows * spec.row_nbytes or ALIGNMENT, (PlacedParam(spec, 0, flat=False),))


def fsdp2_padding(specs: Sequence[ParamSpec], world_size: int) -> int:
    """Bytes FSDP2 pads: it rounds every parameter's rows up to a multiple of the world size."""
    return sum(_ceil(spec.rows, world_size) * spec.row_nbytes - spec.nbytes for spec in specs if spec.nbytes)


def padding_limit(specs: Sequence[ParamSpec], world_size: int) -> int:
    """Most bytes that `plan` pads, unless a `rows_only` parameter forces more."""
    one_percent = sum(spec.nbytes for spec in specs) // 100
    alignment = ALIGNMENT * (len(specs) + world_size)
    return max(fsdp2_padding(specs, world_size), one_percent) + alignment


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Elements [start, stop) as at most three boxes: a partial row, whole rows, a partial row.

    shape: the parameter's, shard dim first; boxes are in its (rows, row_numel) view.
    """
    if start >= stop:
        return ()
    width = prod(shape[1:])
    row, column = divmod(start, width)
    last_row, last_column = divmod(stop, width)
    if column and row == last_row:
        return (Box((row, column), (1, last_column - column)),)
    found = []
    if column:
        found.append(Box((row, column), (1, width - column)))
        row += 1
    if row < last_row:
        found.append(Box((row, 0), (last_row - row, width)))
    if last_column:
        found.append(Box((last_row, 0), (1, last_column)))
    return tuple(found)


def _check(specs: Sequence[ParamSpec], world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    seen: dict[str, int] = {}
    for index, spec in enumerate(specs):
        if seen.setdefault(spec.name, index) != index:
            raise ValueError(f"{spec.name}: expected every name once, got it at {seen[spec.name]} and {index}")


def _ceil(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class _Item:
    """What the search needs of a spec, as plain integers."""

    index: int
    nbytes: int
    padded: int  # nbytes up to the next aligned byte
    step: int  # distance between bytes that are both aligned and between two rows
    rows_only: bool
    flat_cost: int  # what the search pays to cut it between elements

    @classmethod
    def of(cls, index: int, spec: ParamSpec) -> _Item:
        step = lcm(spec.row_nbytes, ALIGNMENT) if spec.nbytes else ALIGNMENT
        padded = _ceil(spec.nbytes, ALIGNMENT)
        return cls(index, spec.nbytes, padded, step, spec.rows_only, flat_cost=spec.nbytes)


@dataclass(frozen=True, slots=True)
class _Placed:
    segment: int
    offsets: list[int]
    flat: set[int]
    flat_nbytes: int


def _fit(items: Sequence[_Item], world_size: int, smallest: int, largest: int) -> _Placed:
    """The best placing in segments up to `largest`, or the smallest that rows_only items need."""
    best = _Search(items, world_size, smallest, largest).run()
    while best is None:  # ends: a segment that holds everything cuts nothing
        largest *= 2
        forced = [replace(item, flat_cost=0) for item in items]
        best = _Search(forced, world_size, smallest, largest).run()
        if best:
            best = _Search(items, world_size, smallest, best.segment).run() or best
    return best


def _row_start(item: _Item, cursor: int, segment: int) -> int | None:
    """First byte >= cursor at which `item` is cut on rows only; None if there is none."""
    room = segment - cursor % segment
    if item.nbytes <= room:
        return cursor
    if segment % item.step == 0:
        return _ceil(cursor, item.step)
    # At most one boundary may be inside: whole rows up to it, and the rest within the next segment.
    head = room - room % item.step
    if item.nbytes - head <= segment:
        return cursor + room - head
    head = segment - segment % item.step
    return cursor + room + segment - head if item.nbytes - head <= segment else None


def _place(items: Sequence[_Item], segment: int, slack: int, most_flat: int | None) -> _Placed | None:
    """Place `items` in their order, each on rows if the slack left pays for the gap before it.

    A gap is offered to later items. None if a rows_only item finds no place, or if more than
    `most_flat` bytes would be cut between elements.
    """
    # Invariant: cursor + bytes still to place + slack <= bytes of all segments, so flat cuts fit.
    offsets, flat, flat_nbytes = [0] * len(items), set(), 0
    cursor = 0
    gaps: list[tuple[int, int]] = []  # (nbytes, first byte), the smallest first
    for item in items:
        start = _take_gap(gaps, item, segment) if gaps else None
        if start is not None:
            offsets[item.index] = start
            slack += item.padded
            continue
        start = _row_start(item, cursor, segment)
        if start is None or start - cursor > slack:
            flat_nbytes += item.flat_cost
            if item.rows_only or (most_flat is not None and flat_nbytes > most_flat):
                return None
            flat.add(item.index)
            start = cursor
        elif start > cursor:
            slack -= start - cursor
            insort(gaps, (start - cursor, cursor))
            del gaps[:-MOST_GAPS]
        offsets[item.index] = start
        cursor = start + item.padded
    return _Placed(segment, offsets, flat, flat_nbytes)


def _take_gap(gaps: list[tuple[int, int]], item: _Item, segment: int) -> int | None:
    """The smallest gap that holds `item` on rows gives it a start and keeps the bytes after it."""
    for position, (nbytes, begin) in enumerate(gaps):
        if item.padded <= nbytes:
            start = _row_start(item, begin, segment)
            if start is not None and (after := start + item.padded) <= begin + nbytes:
                del gaps[position]
                insort(gaps, (begin + nbytes - after, after))
                return start
    return None


def _orders(items: Sequence[_Item]) -> list[tuple[_Item, ...]]:
    """Orders worth trying: all of a few items, else some sorted ones, rows_only items first.

    Wide rows first packs without gaps when each row size divides the one before it, and leaves the
    items that fit anywhere for the gaps. Cost: each order is a pass, so many items get two only.
    """
    if len(items) <= 4:
        return list(permutations(items))
    keys: tuple[Callable[[_Item], tuple[int, ...]], ...] = (
        lambda item: (-item.step, -item.nbytes),
        lambda item: (-item.nbytes, -item.step),
        lambda item: (item.step, item.nbytes),
        lambda item: (item.index,),
    )
    chosen = keys if len(items) <= 64 else keys[:2]
    return [tuple(sorted(items, key=lambda i: (not i.rows_only, *key(i)))) for key in chosen]


def _strides(items: Sequence[_Item], smallest: int, largest: int) -> list[int]:
    """Numbers that a good segment size is a multiple of: common multiples of some row sizes.

    Row sizes are taken in while a multiple of all still lies in smallest..largest, once with the
    row sizes of most bytes first, once with those of the largest single parameter first.
    """
    forced = {item.step for item in items if item.rows_only}
    total: dict[int, int] = defaultdict(int)
    single: dict[int, int] = defaultdict(int)
    for item in items:
        total[item.step] += item.nbytes
        single[item.step] = max(single[item.step], item.nbytes)
    found = {ALIGNMENT}
    for weight in (total, single):
        stride = ALIGNMENT
        for step in sorted(weight, key=lambda step: (step not in forced, -weight[step], step)):
            wider = lcm(stride, step)
            if _ceil(smallest, wider) <= largest:
                stride = wider
                found.add(stride)
    return sorted(found, reverse=True)


class _Search:
    """Finds the segment size in smallest..largest with the fewest flat bytes, then the smallest."""

    def __init__(self, items: Sequence[_Item], world_size: int, smallest: int, largest: int) -> None:
        self.orders = _orders(items)
        self.world_size, self.padded = world_size, sum(item.padded for item in items)
        self.smallest, self.largest = smallest, largest
        self.best: _Placed | None = None

    def run(self) -> _Placed | None:
        strides = _strides(self.orders[0], self.smallest, self.largest)
        for stride in strides:
            self._climb(stride)
        for stride in strides:
            self._descend(stride)
        return self.best

    def _climb(self, stride: int) -> None:
        """Multiples of `stride` upwards, in steps that double after the first few."""
        multiple, step = -(-self.smallest // stride), 1
        while multiple * stride <= self.largest:
            self._improve(multiple * stride)
            multiple, step = multiple + step, step * 2

    def _descend(self, stride: int) -> None:
        """Bisect below the best size: a larger segment nearly always cuts no more."""
        low = -(-self.smallest // stride)
        high = -(-self.best.segment // stride) if self.best else low
        while low < high:
            middle = (low + high) // 2
            if self._improve(middle * stride):
                high = middle
            else:
                low = middle + 1

    def _improve(self, segment: int) -> bool:
        """Whether some order makes `segment` better than the best so far, which it then becomes."""
        improved = False
        slack = self.world_size * segment - self.padded
        for order in self.orders:
            best = self.best
            most = best.flat_nbytes - (segment >= best.segment) if best else None
            placed = _place(order, segment, slack, most)
            if placed is None:
                continue
            self.best, improved = placed, True
            if not placed.flat_nbytes:  # only smaller segments can be better
                self.largest = segment - ALIGNMENT
                break
        return improved

"""Where every parameter of a group lies in one flat buffer that N ranks share in equal segments.

The unsharded buffer is N segments of S bytes; rank r owns bytes [r * S, (r + 1) * S). Gathering the
segments *is* unsharding, because every parameter is one contiguous run of bytes in the buffer: its
rows (slices along its shard dim, that dim outermost) one after the other. `planner.py` chooses where
each run starts, and S, such that the boundaries between segments fall between rows:

    plan([embed (7, 8), weight (12, 4), bias (6,); 4-byte elements], world_size=4)   S = 128

    byte   0               128         224 256             384 416         512
    param  | embed                     | weight                | bias      |
    rows   |       4       |     3     | 2 |       8       | 2 | 6| padding|
    rank   |       0       |       1       |       2       |       3       |

Payload 440 bytes, padding 72. S = 112 would pad 8, but would cut embed within a row, wherever it starts.

The rules:
- S and every start are multiples of 16 bytes, so that kernels may use vector loads on any segment
  and any parameter, whatever dtypes meet in the group. In quantised groups they are multiples of a
  block, so that no block has elements of two parameters or of two ranks.
- A boundary k * S strictly inside a parameter lies a whole number of rows after its start. So a
  parameter cut twice or more needs a row size that divides S; one that is cut once only needs the
  right start; one inside a segment needs nothing.
- Row sizes that do not go together (1000 and 999 elements) would make S a multiple of both.
  Padding stays within `padding_limit`: what FSDP2 pads for the same shapes, but at least 1 % and at
  most 25 % of the payload, + 16 per parameter + 16 per segment. (FSDP2 pads many times the payload
  where ranks outnumber rows.) Where cuts between rows would pad more, some parameters are cut between
  elements (`PlacedParam.flat`), as few bytes of them as the search finds. Only `rows_only`
  parameters are never cut so; where they force more padding, S is the smallest found for them.

The idea of planned ragged shards in one buffer that needs no copies is that of veScale-FSDP
(arXiv:2602.22437); the search and the flat fallback are our own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...tensor.placement.rank_counts import RankCounts

ALIGNMENT = 16  # bytes, one vector load. Invariant: a multiple of every item size
ITEM_SIZES = (1, 2, 4, 8, 16)


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
class OwnedRange:
    """What one rank owns of one parameter."""

    start: int  # first element, in the parameter's elements with the shard dim outermost
    stop: int  # one past the last; start == stop: nothing
    offset: int  # bytes from the start of the rank's segment; 0 when empty


@dataclass(frozen=True, slots=True)
class RowBox:
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

    def owned(self, index: int, rank: int) -> OwnedRange:
        """The elements of parameter `index` that `rank` owns. Over all ranks these ranges tile it."""
        param, base = self.placed[index], rank * self.segment_nbytes
        end = param.offset + param.spec.nbytes
        start = min(max(base, param.offset), end)
        stop = max(min(base + self.segment_nbytes, end), start)
        first, last = ((byte - param.offset) // param.spec.itemsize for byte in (start, stop))
        return OwnedRange(first, last, start - base if stop > start else 0)

    def numels(self, index: int) -> RankCounts:
        """Elements of parameter `index` on every rank."""
        return self._counts(index, self.placed[index].spec.itemsize)

    def rows(self, index: int) -> RankCounts:
        """Rows of parameter `index` on every rank, if it is cut between rows. Rows without elements are the first rank's."""
        spec = self.placed[index].spec
        if not spec.row_nbytes:
            return RankCounts(((spec.rows, 1), (0, self.world_size - 1)))
        return self._counts(index, spec.row_nbytes)

    def _counts(self, index: int, unit_nbytes: int) -> RankCounts:
        param = self.placed[index]
        return _counts(param.offset, param.spec.nbytes, self.segment_nbytes, self.world_size, unit_nbytes)


@functools.lru_cache(maxsize=1024)
def _counts(offset: int, nbytes: int, segment: int, world_size: int, unit_nbytes: int) -> RankCounts:
    """How many units of bytes offset:offset + nbytes each rank owns. The first and the last that own some may have fewer."""
    before = offset // segment
    head = min((before + 1) * segment - offset, nbytes)
    whole, tail = divmod(nbytes - head, segment)
    runs = [(head, min(1, head)), (segment, whole), (tail, min(1, tail))]
    after = world_size - before - sum(ranks for _, ranks in runs)
    return RankCounts(((0, before), *((number // unit_nbytes, ranks) for number, ranks in runs), (0, after)))


def equal_rows(spec: ParamSpec, world_size: int) -> Layout:
    """One parameter, ceil(rows / world_size) rows on each rank, the last ones shorter or empty, as torch's `Shard(0)` cuts it.

    Segments are not aligned: they are those rows and no more.
    """
    rows = -(-spec.rows // world_size)
    return Layout(world_size, rows * spec.row_nbytes or ALIGNMENT, (PlacedParam(spec, 0, flat=False),))


def fsdp2_padding(specs: Sequence[ParamSpec], world_size: int) -> int:
    """Bytes FSDP2 pads: it rounds every parameter's rows up to a multiple of the world size."""
    return sum(round_up(spec.rows, world_size) * spec.row_nbytes - spec.nbytes for spec in specs if spec.nbytes)


def padding_limit(specs: Sequence[ParamSpec], world_size: int, alignment: int = ALIGNMENT) -> int:
    """The most padding that `plan` makes, in bytes, unless a `rows_only` parameter forces more."""
    payload = sum(spec.nbytes for spec in specs)
    to_keep_rows = max(min(fsdp2_padding(specs, world_size), payload // 4), payload // 100)
    return to_keep_rows + alignment * (len(specs) + world_size)


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> tuple[RowBox, ...]:
    """Elements [start, stop) as at most three boxes: a partial row, whole rows, a partial row.

    shape: the parameter's, shard dim first; boxes are in its (rows, row_numel) view.
    """
    if start >= stop:
        return ()
    width = prod(shape[1:])
    row, column = divmod(start, width)
    last_row, last_column = divmod(stop, width)
    if column and row == last_row:
        return (RowBox((row, column), (1, last_column - column)),)
    found = []
    if column:
        found.append(RowBox((row, column), (1, width - column)))
        row += 1
    if row < last_row:
        found.append(RowBox((row, 0), (last_row - row, width)))
    if last_column:
        found.append(RowBox((last_row, 0), (1, last_column)))
    return tuple(found)


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step

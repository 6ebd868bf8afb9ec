"""The search for a layout: `plan` chooses the segment size, and where each parameter starts. `layout.py` has the rules.

Placing runs around fixed boundaries is bin packing, so this is a search: many segment sizes, a few
orders, one greedy pass for each.
"""

from __future__ import annotations

import functools
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import lcm

from .layout import ALIGNMENT, Layout, ParamSpec, PlacedParam, padding_limit, round_up

_KEPT = 256  # plans that the process remembers
MOST_GAPS = 4  # gaps that are kept open for later parameters. Cost: every parameter looks at each


def plan(specs: Sequence[ParamSpec], world_size: int, alignment: int = ALIGNMENT) -> Layout:
    """Place `specs` in `world_size` equal segments; the same input gives the same layout anywhere.

    alignment: bytes of which segments and starts are multiples; a multiple of `ALIGNMENT`.
    Of the segment sizes within `padding_limit` it takes the one that cuts the fewest bytes between
    elements, and of equal ones the smallest.
    Cost: some dozens of O(len(specs)) passes, whatever the world size; milliseconds, once for equal shapes.
    Raises: ValueError for a world size below 1 or two specs of one name.
    """
    _check(specs, world_size)
    best = _best(tuple(replace(spec, name="") for spec in specs), world_size, alignment)
    placed = (PlacedParam(spec, best.offsets[index], index in best.flat) for index, spec in enumerate(specs))
    return Layout(world_size, best.segment, tuple(placed))


@functools.lru_cache(maxsize=_KEPT)
def _best(specs: tuple[ParamSpec, ...], world_size: int, alignment: int) -> _PlacedItems:
    """What `plan` finds. specs: without names, so that equal blocks of a model are planned once."""
    items = [_Item.of(index, spec, alignment) for index, spec in enumerate(specs)]
    payload = sum(item.nbytes for item in items)
    # Invariant: no layout has a smaller S, and with every parameter flat this one is reached.
    smallest = max(round_up(-(-sum(i.padded for i in items) // world_size), alignment), alignment)
    limit = payload + padding_limit(specs, world_size, alignment)
    return _fit(items, world_size, smallest, limit // world_size, alignment)


def _check(specs: Sequence[ParamSpec], world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    seen: dict[str, int] = {}
    for index, spec in enumerate(specs):
        if seen.setdefault(spec.name, index) != index:
            raise ValueError(f"{spec.name}: expected every name once, got it at {seen[spec.name]} and {index}")


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
    def of(cls, index: int, spec: ParamSpec, alignment: int) -> _Item:
        step = lcm(spec.row_nbytes, alignment) if spec.nbytes else alignment
        padded = round_up(spec.nbytes, alignment)
        return cls(index, spec.nbytes, padded, step, spec.rows_only, flat_cost=spec.nbytes)


@dataclass(frozen=True, slots=True)
class _PlacedItems:
    segment: int
    offsets: list[int]
    flat: set[int]
    flat_nbytes: int


def _fit(items: Sequence[_Item], world_size: int, smallest: int, largest: int, alignment: int) -> _PlacedItems:
    """The best placing in segments up to `largest`, or the smallest that rows_only items need."""
    best = _Search(items, world_size, smallest, largest, alignment).run()
    while best is None:  # ends: a segment that holds everything cuts nothing
        largest *= 2
        forced = [replace(item, flat_cost=0) for item in items]
        best = _Search(forced, world_size, smallest, largest, alignment).run()
        if best:
            best = _Search(items, world_size, smallest, best.segment, alignment).run() or best
    return best


def _row_start(item: _Item, cursor: int, segment: int) -> int | None:
    """First byte >= cursor at which `item` is cut on rows only; None if there is none."""
    room = segment - cursor % segment
    if item.nbytes <= room:
        return cursor
    if segment % item.step == 0:
        return round_up(cursor, item.step)
    # At most one boundary may be inside: whole rows up to it, and the rest within the next segment.
    head = room - room % item.step
    if item.nbytes - head <= segment:
        return cursor + room - head
    head = segment - segment % item.step
    return cursor + room + segment - head if item.nbytes - head <= segment else None


def _place(items: Sequence[_Item], segment: int, slack: int, most_flat: int | None) -> _PlacedItems | None:
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
    return _PlacedItems(segment, offsets, flat, flat_nbytes)


def _take_gap(gaps: list[tuple[int, int]], item: _Item, segment: int) -> int | None:
    """Put `item`, cut on rows only, into the smallest gap that holds it; the bytes after it stay a gap.

    Returns: its start; None if no gap holds it.
    """
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


def _strides(items: Sequence[_Item], smallest: int, largest: int, alignment: int) -> list[int]:
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
    found = {alignment}
    for weight in (total, single):
        stride = alignment
        for step in sorted(weight, key=lambda step: (step not in forced, -weight[step], step)):
            wider = lcm(stride, step)
            if round_up(smallest, wider) <= largest:
                stride = wider
                found.add(stride)
    return sorted(found, reverse=True)


class _Search:
    """Finds the segment size in smallest..largest with the fewest flat bytes, then the smallest."""

    def __init__(self, items: Sequence[_Item], world_size: int, smallest: int, largest: int, alignment: int) -> None:
        self.orders = _orders(items)
        self.world_size, self.padded = world_size, sum(item.padded for item in items)
        self.smallest, self.largest, self.alignment = smallest, largest, alignment
        self.best: _PlacedItems | None = None

    def run(self) -> _PlacedItems | None:
        strides = _strides(self.orders[0], self.smallest, self.largest, self.alignment)
        for stride in strides:
            self._climb(stride)
        for stride in strides:
            self._descend(stride)
        return self.best

    def _climb(self, stride: int) -> None:
        """Try multiples of `stride` upwards, in steps that double each time."""
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
                self.largest = segment - self.alignment
                break
        return improved

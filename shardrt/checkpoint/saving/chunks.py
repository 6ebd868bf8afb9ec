"""The boxes that many ranks have of a tensor, all at once: what `Spec.boxes` says for one rank, as columns of integers.

Cost: some operations on vectors with a number for each rank, then for each rank that has elements of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...tensor.placement.placement import FlatShard, Placement, RaggedShard, Sharded


class Boxes(NamedTuple):
    """Boxes of several ranks, those of each in the order of its elements; int64.

    owner: (n,), which of the ranks, ascending.   offsets, sizes: (n, d).
    """

    owner: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor


class _ElementRuns(NamedTuple):
    """Runs of elements, one for each row."""

    owner: torch.Tensor  # (n,)
    base: torch.Tensor  # (n,), what is added to `start` to order the boxes
    start: torch.Tensor  # (n,)
    stop: torch.Tensor  # (n,)
    sizes: torch.Tensor  # (n, d), of the array whose elements the run counts


class _OrderedBoxes(NamedTuple):
    """Boxes that have the elements of runs."""

    owner: torch.Tensor
    at: torch.Tensor  # (n,), the place of the first element, to order the boxes
    offsets: torch.Tensor  # (n, d)
    sizes: torch.Tensor  # (n, d)


def boxes_of(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinates: torch.Tensor
) -> Boxes:
    """The boxes of the ranks with these coordinates; none for ranks without elements.

    coordinates: (ranks, axes) int64.   placements: one for each axis; counts on an axis inside of a sharded one are those of
    these ranks' column, as in `Spec`.
    """
    count, dims = len(coordinates), len(shape)
    owner, offsets = torch.arange(count), torch.zeros(1, dims, dtype=torch.int64).expand(count, dims)
    sizes = torch.tensor(tuple(shape)).long().expand(count, dims)
    run: tuple[int, torch.Tensor, torch.Tensor] | None = None  # dim, start, stop
    for axis, (placement, extent) in enumerate(zip(placements, mesh_shape, strict=True)):
        if not isinstance(placement, Sharded):
            continue
        is_flat = not dims or run is not None or isinstance(placement, FlatShard)
        dim, begin, end = run or (placement.dim, torch.zeros_like(owner), sizes.prod(1))
        total = end - begin if is_flat else sizes[:, placement.dim]
        start, numel = _rows_of(placement, total, extent, coordinates[owner, axis])
        # Cost: in a large world, most ranks have nothing of most tensors; they are left out from here on.
        some = numel.nonzero().view(-1)
        owner, offsets, sizes, start, numel = owner[some], offsets[some], sizes[some], start[some], numel[some]
        if is_flat:
            run = (dim, begin[some] + start, begin[some] + start + numel)
        else:
            offsets[:, dim] += start
            sizes[:, dim] = numel
    if run is not None:
        return _boxes_of_runs(owner, offsets, sizes, *run)
    some = sizes.prod(1).nonzero().view(-1)
    return Boxes(owner[some], offsets[some], sizes[some])


def _rows_of(placement: Sharded, total: torch.Tensor, extent: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows (elements) of these ranks begin among `total`, and how many they are."""
    if isinstance(placement, FlatShard | RaggedShard):
        given, ranks = torch.tensor(placement.counts.runs).view(-1, 2).unbind(1)
        counts = given.repeat_interleave(ranks)
        return (counts.cumsum(0) - counts)[at], counts[at]
    most = (total + extent - 1).div(extent, rounding_mode="floor")
    start = torch.minimum(at * most, total)
    return start, torch.minimum(most, total - start)


def _boxes_of_runs(
    owner: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, dim: int, start: torch.Tensor, stop: torch.Tensor
) -> Boxes:
    """Elements start:stop of boxes, in the order that has `dim` outermost, as boxes of the tensor."""
    dims = sizes.shape[1]
    order = [dim, *(axis for axis in range(dims) if axis != dim)] if dims else []
    places = [order.index(axis) for axis in range(dims)]
    found = _boxes_in(_ElementRuns(torch.arange(len(sizes)), torch.zeros_like(start), start, stop, sizes[:, order]))
    by_place = found.at.argsort(stable=True)
    rows = by_place[found.owner[by_place].argsort(stable=True)]
    run = found.owner[rows]
    return Boxes(owner[run], offsets[run] + found.offsets[rows][:, places], found.sizes[rows][:, places])


def _boxes_in(runs: _ElementRuns) -> _OrderedBoxes:
    """Runs of a contiguous array as boxes: a part of a row, whole rows, a part of a row."""
    if not runs.sizes.shape[1]:
        return _OrderedBoxes(runs.owner, runs.base + runs.start, runs.sizes, runs.sizes)
    row_numel = runs.sizes[:, 1:].prod(1)
    first = (runs.start + row_numel - 1).div(row_numel, rounding_mode="floor")
    last = runs.stop.div(row_numel, rounding_mode="floor")  # rows first:last are whole
    found = [_whole_rows(runs, row_numel, first, last)]
    if runs.sizes.shape[1] > 1:
        inside = first > last
        head, tail = ~inside & (runs.start < first * row_numel), ~inside & (last * row_numel < runs.stop)
        for rows, row in ((inside, last), (head, first - 1), (tail, last)):
            found.append(_inside_of_rows(runs, row_numel, row, rows.nonzero().view(-1)))
    return _OrderedBoxes(*(torch.cat(columns) for columns in zip(*found, strict=True)))


def _whole_rows(runs: _ElementRuns, row_numel: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> _OrderedBoxes:
    rows = (first < last).nonzero().view(-1)
    offsets, sizes = torch.zeros_like(runs.sizes[rows]), runs.sizes[rows]
    offsets[:, 0] = first[rows]
    sizes[:, 0] = (last - first)[rows]
    return _OrderedBoxes(runs.owner[rows], (runs.base + first * row_numel)[rows], offsets, sizes)


def _inside_of_rows(runs: _ElementRuns, row_numel: torch.Tensor, row: torch.Tensor, rows: torch.Tensor) -> _OrderedBoxes:
    """The boxes in one row: those of the part of each run that is in row `row`."""
    begin = (row * row_numel)[rows]
    chosen = _ElementRuns(*(column[rows] for column in runs))
    start, stop = (chosen.start - begin).clamp(min=0), torch.minimum(chosen.stop - begin, row_numel[rows])
    inner = _boxes_in(_ElementRuns(torch.arange(len(rows)), chosen.base + begin, start, stop, chosen.sizes[:, 1:]))
    outer = row[rows][inner.owner, None]
    ones = torch.ones_like(outer)
    return _OrderedBoxes(
        chosen.owner[inner.owner], inner.at, torch.cat([outer, inner.offsets], 1), torch.cat([ones, inner.sizes], 1)
    )

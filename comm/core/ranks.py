"""Ranks of meshes and communicators: a range wherever they are evenly spaced, so that many cost no more than few."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import pairwise

Ranks = range | tuple[int, ...]


def row_strides(shape: Sequence[int], step: int) -> tuple[int, ...]:
    """How far apart neighbours along each axis of a grid are, if those along the last one are `step` apart."""
    return tuple(step * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def step_of(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """How far apart neighbours in the order of rows are; None if that varies."""
    wide = [(extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent > 1]
    even = all(stride == extent * narrower for (_, stride), (extent, narrower) in pairwise(wide))
    return (wide[-1][1] if wide else 1) if even else None


def grid(first: int, shape: Sequence[int], strides: Sequence[int]) -> Ranks:
    """The numbers of a grid, row by row."""
    if (step := step_of(shape, strides)) is not None:
        return range(first, first + math.prod(shape) * step, step)
    axes = [range(0, extent * stride, stride) for extent, stride in zip(shape, strides, strict=True)]
    return tuple(first + sum(place) for place in itertools.product(*axes))


def evenly_spaced(ranks: Sequence[int]) -> Ranks:
    """The same numbers, as a range if they are one."""
    if isinstance(ranks, range):
        return ranks
    spaced = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]) if len(ranks) > 1 else 1)
    return spaced if tuple(spaced) == tuple(ranks) else tuple(ranks)


def pick(ranks: Ranks, places: Sequence[int]) -> Ranks:
    """The ranks at these places."""
    if isinstance(places, range):
        return evenly_spaced(ranks[places.start : places.stop : places.step])
    return evenly_spaced([ranks[place] for place in places])

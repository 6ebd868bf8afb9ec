"""Searches over forecasts: the largest batch that fits, and the link speed from which a setting pays."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 1 << 16  # rows of a batch that are looked at


def largest_batch(peak_nbytes: Callable[[int], int], capacity: int, most: int = MOST) -> int:
    """The largest batch of at most `most` whose peak memory is at most `capacity` bytes; 0 if none.

    peak_nbytes: of a batch, rising. Cost: memory is nearly linear in the batch, so that a line through two batches finds the
    answer in four or five forecasts. Where the line leads to a batch that is known, or nowhere, steps double.
    """
    low, high = 0, most + 1  # fits, and does not, once both are known
    known: dict[int, int] = {}
    batch, step = 1, 1
    while True:
        known[batch] = peak_nbytes(batch)
        low, high = (batch, high) if known[batch] <= capacity else (low, batch)
        if low + 1 >= high:
            return low
        batch = _by_line(known, capacity, low)
        if low < batch < high:
            step = 1
        else:
            batch, step = (low + step if batch <= low else high - step), 2 * step
        batch = max(low + 1, min(high - 1, batch))


def _by_line(known: dict[int, int], capacity: int, low: int) -> int:
    """The batch that fills the capacity by the line through the two known ones beside it, or below it."""
    if len(known) == 1:
        return low + 1
    above = sorted(batch for batch in known if batch > low)
    one, other = sorted(known)[-2:] if not above or above[0] == min(known) else (low, above[0])
    if known[one] == known[other]:
        return low
    return math.floor(one + (capacity - known[one]) * (other - one) / (known[other] - known[one]))


def break_even(gain: Callable[[float], float], slowest: float, fastest: float, precision: float = 0.02) -> float:
    """The link bandwidth (bytes/s) up to which something pays; 0 if it does not at `slowest`, infinity if at `fastest`.

    gain: seconds per step that it saves at a bandwidth, which fall while the bandwidth rises.
    """
    if gain(slowest) <= 0:
        return 0.0
    if gain(fastest) > 0:
        return math.inf
    low, high = math.log(slowest), math.log(fastest)
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if gain(math.exp(middle)) > 0 else (low, middle)
    return math.exp(low)

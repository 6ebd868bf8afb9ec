"""A picture of memory over time, of a timeline's counters: stacked, with the peak marked."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from .events import BY_GROUP, COMPUTE, Counter, Events, Span

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_NAMED = 12  # series in the legend
_PHASES = {"forward": "#9ecae1", "backward": "#fdae6b", "optimizer": "#a1d99b"}  # the colours of the strip below
_MUTED = ("#d9d9d9", "#c9c3b8", "#b5bdc7", "#a3a3a3", "#ded3c0")  # the colours of series that are no groups
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Stack:
    """Values of several series over time, as steps.

    times: seconds, when a value changes.   values: of each series from each of these times on.   peak: the index in `times` at
    which the sum of all is highest.
    """

    times: list[float]
    values: dict[str, list[float]]
    peak: int

    @classmethod
    def of(cls, counters: Sequence[Counter], name: str) -> Stack:
        """The stack of the counter `name`. ValueError if there is none, or none with values."""
        mine = [counter for counter in counters if counter.name == name]
        if not any(counter.values for counter in mine):
            raise ValueError(f"the timeline has no counter '{name}' with values: there is nothing to draw")
        times = sorted({counter.at for counter in mine})
        index = {at: number for number, at in enumerate(times)}
        values = {series: [float("nan")] * len(times) for counter in mine for series in counter.values}
        for counter in mine:
            for series, value in counter.values.items():
                values[series][index[counter.at]] = value
        values = {series: _filled(steps) for series, steps in values.items()}
        totals = [sum(column) for column in zip(*values.values(), strict=True)]
        return cls(times, values, max(range(len(times)), key=totals.__getitem__))

    @property
    def peak_value(self) -> float:
        """The highest sum of all series."""
        return sum(steps[self.peak] for steps in self.values.values())


def _filled(steps: list[float]) -> list[float]:
    """Values where there were none are those before; 0 at the beginning."""
    return list(accumulate(steps, lambda last, value: last if math.isnan(value) else value, initial=0.0))[1:]


def draw_memory(
    events: Events, path: str | os.PathLike[str], *, by: str = BY_GROUP, muted: Sequence[str] = (), title: str = ""
) -> None:
    """Draw the memory of a rank over time as a file: PNG, or what the end of `path` says.

    by: `BY_GROUP` or `BY_KIND` of `events.py`, the counter to stack. Its series have the colours of a rainbow, in the order in
    which they first have memory; the legend names those that have the most at the peak.
    muted: series at the bottom in greys, such as kinds of memory that no group has.
    Needs matplotlib, whose backend stays as it is. Raises: ImportError without it; ValueError for events without values of
    that counter; OSError.
    """
    from matplotlib.figure import Figure

    stack = Stack.of(events.counters, by)
    figure = Figure(figsize=(10, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(14, 1), gridspec_kw={"hspace": 0.0})
    draw_stack(above, stack, [series for series in muted if series in stack.values])
    _draw_phases(below, events.spans)
    above.set_title(title or f"Memory, {by.removeprefix('bytes ')}", loc="left")
    figure.savefig(path, dpi=120)


def draw_stack(axes: Axes, stack: Stack, muted: Sequence[str] = ()) -> None:
    """The stack, its peak and its legend, against milliseconds. muted: as for `draw_memory`, series of the stack only."""
    factor, unit = _scale(stack.peak_value)
    milliseconds = [at * 1e3 for at in stack.times]
    most = sorted(stack.values, key=lambda series: -stack.values[series][stack.peak])[:_NAMED]
    below = [0.0] * len(milliseconds)
    named: dict[str, Artist] = {}  # given to legend() as they are: by itself it leaves out names that begin with "_"
    for series, colour in _colours(stack, muted).items():
        steps = stack.values[series]
        above = [low + value / factor for low, value in zip(below, steps, strict=True)]
        at_peak, at_peak_unit = _scale(steps[stack.peak])
        area = axes.fill_between(milliseconds, below, above, step="post", color=colour, linewidth=0.0)
        if series in most and steps[stack.peak] > 0:
            named[f"{series}: {steps[stack.peak] / at_peak:.3g} {at_peak_unit}".replace("$", r"\$")] = area
        below = above
    axes.step(milliseconds, below, where="post", color="#333333", linewidth=0.6)
    at, value = milliseconds[stack.peak], stack.peak_value / factor
    axes.plot([at], [value], "v", color="black", markersize=6)
    axes.annotate(f"peak {value:.4g} {unit}", (at, value), xytext=(0, 7), textcoords="offset points", ha="center")
    axes.set(ylabel=unit, ylim=(0.0, 1.12 * value or 1.0), xlim=(milliseconds[0], milliseconds[-1] or 1.0))
    more = sum(steps[stack.peak] > 0 for steps in stack.values.values()) - len(named)
    heading = "at the peak" + (f" (and {more} more)" if more else "")
    handles, labels = list(named.values())[::-1], list(named)[::-1]
    axes.legend(handles, labels, title=heading, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _colours(stack: Stack, muted: Sequence[str]) -> dict[str, object]:
    """The colour of each series, from the bottom up."""
    from matplotlib import colormaps

    groups = [series for series in stack.values if series not in muted]
    greys = {series: _MUTED[number % len(_MUTED)] for number, series in enumerate(muted)}
    width = max(1, len(groups) - 1)
    return greys | {series: colormaps["turbo"](0.08 + 0.84 * number / width) for number, series in enumerate(groups)}


def _draw_phases(axes: Axes, spans: Sequence[Span]) -> None:
    """A strip of what compute does: outermost spans only."""
    end, whole = float("-inf"), max((span.end for span in spans), default=0.0)
    for span in spans:
        if span.track == COMPUTE and span.name in _PHASES and span.start >= end:
            end = span.end
            axes.axvspan(span.start * 1e3, end * 1e3, color=_PHASES[span.name], linewidth=0.0)
            if end - span.start > 0.06 * whole:
                axes.text((span.start + end) * 500, 0.5, span.name, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set(xlabel="milliseconds", yticks=[], ylim=(0, 1))


def _scale(nbytes: float) -> tuple[float, str]:
    """The bytes of a unit in which a number of bytes is easy to read, and the unit."""
    power = 0
    while nbytes >= 1024 and power + 1 < len(_UNITS):
        nbytes, power = nbytes / 1024, power + 1
    return float(1024**power), _UNITS[power]

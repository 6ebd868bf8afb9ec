"""How the pictures of docs/pictures.py look."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

plt.rcParams.update({"svg.hashsalt": "shardrt", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"})
COLOURS = ("#88c0e0", "#f2b880", "#a8d08d", "#c9a8d8")
GREY = "#e4e4e4"


def box(axes: Axes, left: float, bottom: float, width: float, colour: str, *, height: float = 1.0, line: float = 0.8) -> None:
    """A rectangle with an outline."""
    axes.broken_barh([(left, width)], (bottom, height), facecolor=colour, edgecolor="black", linewidth=line)


def label(axes: Axes, x: float, y: float, text: str, size: float) -> None:
    """Words around a point."""
    axes.text(x, y, text, ha="center", va="center", fontsize=size)


def patches(colours: Iterable[str]) -> list[Patch]:
    """What stands for colours in a legend."""
    return [Patch(facecolor=colour, edgecolor="black", linewidth=0.5) for colour in colours]

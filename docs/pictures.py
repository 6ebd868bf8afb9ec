"""Draw the pictures of the pages that are plots or diagrams: python docs/pictures.py [FOLDER]

layout.svg shows a plan of the real planner, context.svg chunks and pieces of the real cut, experts.svg and pipeline.svg what
each rank holds in a dry world. streams.svg and schedule.svg show a small simulation of the rules in docs/concepts.md, and the
schedule in pipeline.svg one of 1F1B, all with made-up durations. soak.svg shows what was measured. timeline.svg shows a step of
the real runtime in a dry world, with made-up durations. The same matplotlib writes the same bytes each time.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from pictures_style import COLOURS, GREY, box, patches
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pictures_parallel import draw_context, draw_experts, draw_schedule_of_stages, draw_stages

import shardrt
from shardrt.comm.core.calls import CollectiveCall
from shardrt.comm.startup.dry import DryWorld, dry_world
from shardrt.fsdp.params.layout import Layout, ParamSpec
from shardrt.fsdp.params.planner import plan
from shardrt.timeline.events import BY_GROUP, Events
from shardrt.timeline.picture import Stack, draw_stack

# ---------------------------------------------------------------------- layout

SPECS = (ParamSpec("embed", (7, 8), 4), ParamSpec("weight", (12, 4), 4), ParamSpec("bias", (6,), 4))
RANKS = 4


def draw_layout(axes: Axes) -> None:
    """The flat buffer of three parameters on four ranks, row by row, and whose segment is which."""
    layout = plan(SPECS, RANKS)
    for colour, (index, placed) in zip(COLOURS, enumerate(layout.placed), strict=False):
        spec = placed.spec
        for row in range(spec.rows):
            box(axes, placed.offset + row * spec.row_nbytes, 1.0, spec.row_nbytes, colour, line=0.4)
        middle = placed.offset + spec.nbytes / 2
        axes.text(middle, 2.08, f"{spec.name} {spec.shape}", ha="center", va="bottom", fontweight="bold")
        for rank in range(RANKS):
            _label_rows(axes, layout, index, rank)
    for gap in _gaps(layout):
        axes.text(sum(gap) / 2, 1.5, "padding", ha="center", va="center", rotation=90, fontsize=7, color="#777777")
    for rank in range(RANKS):
        begin = rank * layout.segment_nbytes
        box(axes, begin, 0.0, layout.segment_nbytes, GREY)
        axes.text(begin + layout.segment_nbytes / 2, 0.5, f"segment of rank {rank}", ha="center", va="center")
        axes.axvline(begin, color="black", linewidth=1.2, ymax=0.82)
    axes.axvline(layout.nbytes, color="black", linewidth=1.2, ymax=0.82)
    axes.set_xticks([*(rank * layout.segment_nbytes for rank in range(RANKS)), layout.nbytes])
    axes.set_xlabel(f"bytes; {layout.payload_nbytes} of parameters, {layout.padding_nbytes} of padding")
    axes.set(xlim=(-4, layout.nbytes + 4), ylim=(0, 2.5), yticks=[])


def _label_rows(axes: Axes, layout: Layout, index: int, rank: int) -> None:
    """How many rows of a parameter a rank has."""
    owned, spec = layout.owned(index, rank), layout.placed[index].spec
    if owned.stop > owned.start:
        middle = rank * layout.segment_nbytes + owned.offset + (owned.stop - owned.start) * spec.itemsize / 2
        rows = (owned.stop - owned.start) // spec.row_numel
        axes.text(middle, 1.5, f"{rows} rows", ha="center", va="center", fontsize=8)


def _gaps(layout: Layout) -> list[tuple[int, int]]:
    """Bytes that belong to no parameter."""
    edges = sorted((placed.offset, placed.offset + placed.spec.nbytes) for placed in layout.placed)
    return [(end, begin) for (_, end), (begin, _) in pairwise([*edges, (layout.nbytes, layout.nbytes)]) if begin > end]


# ---------------------------------------------------------------------- streams and schedule

GATHER, FORWARD, BACKWARD, REDUCE = 0.8, 1.0, 2.0, 1.2  # durations of one group, in no unit
LANES = ("reduce", "compute", "gather")  # from below


@dataclass
class Bar:
    """One thing that a stream runs."""

    lane: str
    start: float
    end: float
    group: int
    label: str


@dataclass
class Timeline:
    """Bars, and when each stream has run all of its own; `held` is when each full buffer is there."""

    bars: list[Bar] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    held: list[tuple[float, float]] = field(default_factory=list)

    def run(self, lane: str, duration: float, group: int, label: str, after: float = 0.0) -> Bar:
        """Launch on a stream: it starts when the stream is free and what it waits for is done."""
        start = max(self.free[lane], after)
        bar = Bar(lane, start, start + duration, group, label)
        self.free[lane] = bar.end
        self.bars.append(bar)
        return bar


def simulate(groups: int) -> Timeline:
    """One step of a model of blocks, each a group: two gathered ahead in forward, one in backward; the last is kept."""
    timeline, gathered = Timeline(), dict[int, Bar]()

    def gather(group: int, after: float) -> None:
        if 0 <= group < groups and group not in gathered:
            gathered[group] = timeline.run("gather", GATHER, group, f"gather {group}", after)

    for group in range(groups):
        now = timeline.free["compute"]
        for ahead in range(group, group + 3):
            gather(ahead, now)
        compute = timeline.run("compute", FORWARD, group, f"forward {group}", gathered[group].end)
        if group < groups - 1:
            timeline.held.append((gathered.pop(group).start, compute.end))
    for group in reversed(range(groups)):
        now = timeline.free["compute"]
        gather(group, now)
        gather(group - 1, now)
        compute = timeline.run("compute", BACKWARD, group, f"backward {group}", gathered[group].end)
        timeline.held.append((gathered[group].start, compute.end))
        timeline.run("reduce", REDUCE, group, f"reduce {group}", compute.end)
    return timeline


def draw_bars(axes: Axes, timeline: Timeline) -> None:
    """A lane for each stream."""
    for bar in timeline.bars:
        box(axes, bar.start, LANES.index(bar.lane) * 1.3, bar.end - bar.start, COLOURS[bar.group])
        middle = (bar.start + bar.end) / 2, LANES.index(bar.lane) * 1.3 + 0.5
        axes.text(*middle, bar.label.replace(" ", "\n"), ha="center", va="center", fontsize=7)
    axes.set_yticks([index * 1.3 + 0.5 for index in range(len(LANES))], [f"{lane} stream" for lane in LANES])
    axes.set_xticks([])
    axes.set(ylim=(-0.2, 3.8), xlim=(-0.2, max(timeline.free.values()) + 0.2))


def draw_streams(axes: Axes) -> None:
    """The events between streams: what a bar waits for."""
    timeline = simulate(2)
    draw_bars(axes, timeline)
    found = {bar.label: bar for bar in timeline.bars}
    waits = [("gather 0", "forward 0"), ("gather 1", "forward 1"), ("backward 1", "reduce 1"), ("backward 0", "reduce 0")]
    waits.append(("gather 0 again", "backward 0"))
    again = [bar for bar in timeline.bars if bar.label == "gather 0"][-1]
    found |= {"gather 0": timeline.bars[0], "gather 0 again": again}
    for first, then in waits:
        _arrow(axes, found[first], found[then])
    end = max(timeline.free.values())
    axes.annotate("optimizer\nwaits here", (end, 0.5), (end + 0.4, 2.4), ha="center", arrowprops={"arrowstyle": "<-"})
    axes.set_xlim(-0.2, end + 1.0)


def _arrow(axes: Axes, first: Bar, then: Bar) -> None:
    down = LANES.index(first.lane) > LANES.index(then.lane)
    from_y = LANES.index(first.lane) * 1.3 + (0.0 if down else 1.0)
    to_y = LANES.index(then.lane) * 1.3 + (1.0 if down else 0.0)
    axes.annotate(
        "", (then.start + 0.08, to_y), (first.end - 0.08, from_y), arrowprops={"arrowstyle": "->", "color": "#c03030"}
    )


def draw_schedule(bars: Axes, memory: Axes) -> None:
    """A step of four blocks, and how many full buffers there are at each moment."""
    timeline = simulate(4)
    draw_bars(bars, timeline)
    changes = sorted([(begin, 1) for begin, _ in timeline.held] + [(end, -1) for _, end in timeline.held])
    times, counts = [0.0], [0]
    for time, change in changes:
        times.append(time)
        counts.append(counts[-1] + change)
    memory.fill_between(times, counts, step="post", color="#b0b0b0", linewidth=0)
    memory.set(yticks=range(max(counts) + 1), xlim=bars.get_xlim(), xticks=[], ylabel="full buffers", xlabel="time")


# ---------------------------------------------------------------------- soak

# Anonymous memory of rank 0 of 4 under MPICH, in MiB, by step; see docs/stress.md.
SOAKS: dict[str, dict[int, float]] = {
    "arenas of threads (seed 11)": {
        **{100: 183.0, 200: 189.1, 400: 208.3, 600: 215.5, 800: 222.5, 1000: 222.8, 1200: 223.1, 1400: 224.5, 1600: 233.3}
    },
    "one arena (seed 11)": {
        **{100: 161.5, 600: 165.6, 1200: 168.0, 1800: 170.7, 2400: 173.3, 3000: 176.2, 3600: 179.2, 4200: 182.3},
        **{4800: 184.0, 5400: 186.7, 6000: 190.2, 6600: 192.8},
    },
    "one arena, no UCX cache (seed 5)": {
        **{100: 159.1, 300: 162.9, 600: 165.6, 900: 165.5, 1200: 165.9, 1500: 166.4, 1800: 167.1, 2100: 166.6},
        **{2400: 166.8, 2700: 167.2, 3000: 166.9},
    },
    "one arena, no UCX cache (seed 11)": {
        **{100: 159.3, 300: 162.7, 600: 164.1, 900: 165.1, 1200: 164.6, 1500: 165.3, 1800: 165.5, 2100: 166.0},
    },
}


def draw_soaks(axes: Axes) -> None:
    """The memory of a rank over the steps of some soaks."""
    for (label, curve), colour in zip(SOAKS.items(), COLOURS, strict=True):
        axes.plot(list(curve), list(curve.values()), color=colour, label=label)
    axes.set(xlabel="steps", ylabel="MiB", xlim=(0, None), ylim=(140, None))
    axes.legend(frameon=False, fontsize=8, loc="upper right")


# ---------------------------------------------------------------------- a timeline

TRACKS = ("compute", "gather", "reduce")
LAYERS, WIDTH = 4, 1024
SECONDS_PER_BYTE = 1.5e-10
TRACK_COLOURS = {"forward": COLOURS[0], "backward": COLOURS[1], "all_gather": COLOURS[2], "reduce_scatter": COLOURS[3]}


class Spend(torch.autograd.Function):
    """Takes 1 ms of simulated time in forward, and 2 ms in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        world_of_picture().compute.run(1e-3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        world_of_picture().compute.run(2e-3)
        return gradients[0]


class Layer(nn.Linear):
    """A layer that takes time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Spend.apply(super().forward(x))
        return result


def seconds_of(calls: Sequence[CollectiveCall]) -> float:
    """What collectives cost."""
    return SECONDS_PER_BYTE * sum(max(t.nbytes for t in (call.out, call.inp) if t is not None) for call in calls)


def world_of_picture() -> DryWorld:
    here = shardrt.world()
    assert isinstance(here, DryWorld)
    return here


def record_step() -> Events:
    """The third step of a model of some layers, on rank 0 of 4."""
    with dry_world(4, costs=seconds_of), torch.device("meta"):
        model = nn.Sequential(OrderedDict((f"block{number}", Layer(WIDTH, WIDTH)) for number in range(LAYERS)))
        for layer in model:
            shardrt.fully_shard(layer)
        shardrt.fully_shard(model)
        x = torch.empty(8, WIDTH, requires_grad=True)
        for _ in range(2):
            model(x).sum().backward()
        with shardrt.Timeline() as timeline:
            model(x).sum().backward()
        return timeline.events


def draw_timeline(tracks: Axes, memory: Axes) -> None:
    """Streams as tracks, an arrow from each gather to its use, and below the bytes of each group."""
    events = record_step()
    shown = [span for span in events.spans if span.name in TRACK_COLOURS and span.subject != "Sequential"]
    for span in shown:
        left, width, row = span.start * 1e3, (span.end - span.start) * 1e3, -TRACKS.index(span.track)
        colour = TRACK_COLOURS[span.name]
        tracks.broken_barh([(left, width)], (row - 0.35, 0.7), facecolor=colour, edgecolor="black", linewidth=0.5)
        tracks.text(left + width / 2, row, span.subject.replace("block", ""), ha="center", va="center", fontsize=8)
    for arrow in events.arrows:
        ends = {"xy": (arrow.target.start * 1e3, -0.35), "xytext": (arrow.source.end * 1e3, -0.65)}
        tracks.annotate("", **ends, arrowprops={"arrowstyle": "->", "color": "#555555", "linewidth": 0.8})
    tracks.set(yticks=[-row for row in range(len(TRACKS))], ylim=(0.5 - len(TRACKS), 0.5))
    tracks.set_yticklabels(TRACKS)
    tracks.legend(
        patches(TRACK_COLOURS.values()), list(TRACK_COLOURS), loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8
    )
    draw_stack(memory, Stack.of(events.counters, BY_GROUP))
    memory.set(xlabel="milliseconds", xlim=(0.0, max(span.end for span in events.spans) * 1e3))


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent / "pictures"
    _, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
    draw_layout(axes)
    _save(folder / "layout.svg")
    _, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
    draw_streams(axes)
    _save(folder / "streams.svg")
    _, (bars, memory) = plt.subplots(2, figsize=(8, 3.4), height_ratios=(3, 1), layout="constrained")
    draw_schedule(bars, memory)
    _save(folder / "schedule.svg")
    _, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    draw_soaks(axes)
    _save(folder / "soak.svg")
    _, (tracks, memory) = plt.subplots(2, figsize=(9, 4), sharex=True, height_ratios=(3, 4), layout="constrained")
    draw_timeline(tracks, memory)
    _save(folder / "timeline.svg")
    _, axes = plt.subplots(figsize=(5.6, 3.4), layout="constrained")
    draw_context(axes)
    _save(folder / "context.svg")
    _, (ranks, buffers) = plt.subplots(1, 2, figsize=(9, 2.8), width_ratios=(4, 5), layout="constrained")
    draw_experts(ranks, buffers)
    _save(folder / "experts.svg")
    _, (stages, schedule) = plt.subplots(2, figsize=(9, 4.8), height_ratios=(3, 2), layout="constrained")
    draw_stages(stages)
    draw_schedule_of_stages(schedule)
    _save(folder / "pipeline.svg")


def _save(path: Path) -> None:
    plt.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close()


if __name__ == "__main__":
    main()

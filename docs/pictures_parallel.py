"""The pictures of docs/context_parallel.md, expert_parallel.md and pipelines.md, which docs/pictures.py draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from pictures_style import COLOURS, GREY, box, label, patches
from torch import nn

import shardrt
from shardrt.comm.startup.dry import dry_world
from shardrt.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel, parallelize_module
from shardrt.parallel.context.cut import SequenceCut
from shardrt.tensor.placement.placement import Box

# ---------------------------------------------------------------------- context parallelism

CONTEXT_RANKS = 4


def draw_context(axes: Axes) -> None:
    """Causal attention of a sequence in chunks: whose rank computes what, and in which turn of the ring."""
    ranks, chunks = CONTEXT_RANKS, 2 * CONTEXT_RANKS
    cut = SequenceCut(chunks, ranks, True)
    tokens = [[token for chunk in cut.chunks(rank) for token in range(*chunk)] for rank in range(ranks)]
    for rank, owner in product(range(ranks), repeat=2):
        for _, queries, keys, causal in cut.pieces(rank, owner, True, None):
            for query, key in product(tokens[rank][slice(*queries)], tokens[owner][slice(*keys)]):
                if not causal or key <= query:
                    box(axes, key, query, 1.0, COLOURS[rank], line=0.4)
                    label(axes, key + 0.5, query + 0.5, str((rank - owner) % ranks), 8)
    names = [f"rank {min(chunk, chunks - 1 - chunk)}" for chunk in range(chunks)]
    places = [chunk + 0.5 for chunk in range(chunks)]
    axes.set_xticks(places, names, fontsize=7)
    axes.set_yticks(places, names, fontsize=7)
    axes.set(xlim=(0, chunks), ylim=(chunks, 0), xlabel="chunks of keys, and who has them", ylabel="chunks of queries")


# ---------------------------------------------------------------------- experts


@dataclass(frozen=True)
class Held:
    """A part of a parameter that a rank holds."""

    rank: int
    name: str
    shape: torch.Size  # of the whole parameter
    box: Box

    @property
    def elements(self) -> tuple[int, int]:
        """The first element, and how many from there on: parts of rows and whole rows are in a row in memory."""
        first = sum(offset * prod(self.shape[dim + 1 :]) for dim, offset in enumerate(self.box.offsets))
        return first, prod(self.box.sizes)


def held(rank: int, module: nn.Module) -> Iterator[Held]:
    """What a rank holds of a sharded module."""
    for name, param in module.named_parameters():
        assert isinstance(param, shardrt.DTensor)
        yield from (Held(rank, name, param.shape, part) for part in param.spec.boxes())


class Experts(nn.Module):
    """The parameters of 4 experts, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(4, 16, 4))
        self.down = nn.Parameter(torch.empty(4, 4, 8))


class RoutedLayer(nn.Module):
    """Attention, a router, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.router = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.experts = Experts()


def experts_held() -> list[Held]:
    """What each rank of 2 x 2 holds of a layer."""
    found: list[Held] = []
    for rank in range(4):
        with dry_world(4, rank=rank) as world, torch.device("meta"):
            mesh, layer = shardrt.DeviceMesh(world.comm, (2, 2), ("dp", "ep")), RoutedLayer()
            parallelize_module(layer, mesh["ep"], {"experts": ExpertParallel()})
            shardrt.fully_shard(layer.experts, mesh=mesh["dp"])
            shardrt.fully_shard(layer, mesh=mesh.flatten())
            found += held(rank, layer)
    return found


def draw_experts(ranks: Axes, buffers: Axes) -> None:
    """Which ranks exchange what, and whose is which part of the parameters."""
    parts = experts_held()
    draw_exchanges(ranks, parts)
    for row, (name, of_row) in enumerate(rows_of_buffers(parts).items()):
        buffers.text(0, 1.1 - 2.1 * row, name, ha="left", va="bottom", fontweight="bold", fontsize=8)
        draw_buffer(buffers, -2.1 * row, of_row)
    buffers.set(xlim=(-0.01, 1.01), ylim=(-5.7, 1.7))
    buffers.set_axis_off()
    names = [f"rank {rank} holds it" for rank in range(4)]
    look = {"fontsize": 7, "frameon": False, "handlelength": 1.2, "columnspacing": 1.2}
    buffers.legend(patches(COLOURS), names, loc="lower center", ncols=4, **look)


def draw_exchanges(axes: Axes, parts: list[Held]) -> None:
    """The ranks of a mesh of 2 x 2, which experts each computes, and what goes between them."""
    for rank in range(4):
        dp, ep = divmod(rank, 2)
        box(axes, 3 * ep, -2 * dp, 2.0, COLOURS[rank])
        pair, *others = {part.box.offsets[0] // 2 for part in parts if part.rank == rank and part.name.startswith("experts")}
        assert not others, "a rank holds of the experts that it computes alone"
        label(axes, 3 * ep + 1, 0.5 - 2 * dp, f"rank {rank}\ncomputes\nexperts {2 * pair}, {2 * pair + 1}", 8)
    for dp in range(2):
        axes.annotate("", (3, 0.5 - 2 * dp), (2, 0.5 - 2 * dp), arrowprops={"arrowstyle": "<->", "color": "#c03030"})
        label(axes, 2.5, 0.7 - 2 * dp, "tokens", 7)
    for ep in range(2):
        axes.annotate("", (3 * ep + 1, -1), (3 * ep + 1, 0), arrowprops={"arrowstyle": "<->", "color": "#555555"})
        label(axes, 3 * ep + 1.6, -0.5, "gathers,\nreductions", 7)
    axes.set(xlim=(-0.1, 5.1), ylim=(-2.1, 1.1), xlabel="ep", ylabel="dp")
    axes.set_xticks([1, 4], ["0", "1"])
    axes.set_yticks([0.5, -1.5], ["0", "1"])


def rows_of_buffers(parts: list[Held]) -> dict[str, list[Held]]:
    """The parts by the group of parameters that is gathered together."""
    experts = [part for part in parts if part.name.startswith("experts")]
    return {
        "experts 0 and 1": [part for part in experts if part.box.offsets[0] < 2],
        "experts 2 and 3": [part for part in experts if part.box.offsets[0] >= 2],
        "all other parameters": [part for part in parts if part not in experts],
    }


def draw_buffer(axes: Axes, bottom: float, parts: list[Held]) -> None:
    """The parameters of a group, one after the other, by who holds which part; numbers are those of experts."""
    names = sorted({part.name for part in parts}, key=lambda name: min(part.rank for part in parts if part.name == name))
    numel, left = sum(part.elements[1] for part in parts), 0.0
    for name in names:
        mine, begin = sorted((part for part in parts if part.name == name), key=lambda part: part.elements), left
        for part in mine:
            width, (first, count) = part.elements[1] / numel, (part.box.offsets[0], part.box.sizes[0])
            box(axes, left, bottom, width, COLOURS[part.rank])
            if name.startswith("experts"):
                label(axes, left + width / 2, bottom + 0.5, ", ".join(map(str, range(first, first + count))), 8)
            left += width
        label(axes, (begin + left) / 2, bottom - 0.3, name.removeprefix("experts.").removesuffix(".weight"), 7)


# ---------------------------------------------------------------------- pipelines

BLOCKS, WIDTH, HIDDEN = 4, 4, 8
AXES = {"pp": 2, "dp": 2, "tp": 2}
PLAN = {"*.gate": ColwiseParallel(), "*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
CORNERS = {"gate": 0, "up": WIDTH + 1, "down": 2 * WIDTH + 2}  # where matrices are in the picture of a block


class Block(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)


def stages_held() -> list[Held]:
    """What each of 8 ranks holds of the blocks of its stage; names are those of the whole model."""
    found: list[Held] = []
    for rank in range(prod(AXES.values())):
        with dry_world(prod(AXES.values()), rank=rank) as world, torch.device("meta"):
            mesh = shardrt.DeviceMesh(world.comm, tuple(AXES.values()), tuple(AXES))
            first = mesh["pp"].rank * BLOCKS // AXES["pp"]
            stage = nn.ModuleDict({str(first + number): Block() for number in range(BLOCKS // AXES["pp"])})
            parallelize_module(stage, mesh["tp"], PLAN)
            for block in stage.values():
                shardrt.fully_shard(block, mesh=mesh["dp"])
            found += held(rank, stage)
    return found


def draw_stages(axes: Axes) -> None:
    """The matrices of four blocks in two stages, by who holds which part."""
    of_each, far = BLOCKS // AXES["pp"], 2 * WIDTH + HIDDEN + 10
    for part in stages_held():
        block, matrix, _ = part.name.split(".")
        stage, row = divmod(int(block), of_each)
        left, bottom = stage * far + CORNERS[matrix] + part.box.offsets[1], row * (HIDDEN + 3) + part.box.offsets[0]
        height, width = part.box.sizes
        box(axes, left, bottom, width, COLOURS[part.rank % len(COLOURS)], height=height, line=0.5)
        label(axes, left + width / 2, bottom + height / 2, str(part.rank), 7)
    for stage, row in product(range(AXES["pp"]), range(of_each)):
        top = row * (HIDDEN + 3) - 0.9
        for matrix, corner in CORNERS.items():
            axes.text(stage * far + corner, top, matrix, ha="left", va="center", fontsize=7)
        middle = row * (HIDDEN + 3) + HIDDEN / 2
        axes.text(stage * far - 0.7, middle, f"block {stage * of_each + row}", ha="right", va="center", fontsize=8)
    for turn, text in enumerate(("activations", "gradients")):
        ends = (far - 9.6, far - 5.2)
        axes.annotate("", (ends[1 - turn], 6.2 + 2.6 * turn), (ends[turn], 6.2 + 2.6 * turn), arrowprops={"arrowstyle": "->"})
        label(axes, sum(ends) / 2, 5.4 + 2.6 * turn, text, 7)
    for stage in range(AXES["pp"]):
        axes.text(stage * far, -3.0, f"stage {stage}", ha="left", va="center", fontweight="bold")
    names = [f"dp {dp}, tp {tp}" for dp, tp in product(range(AXES["dp"]), range(AXES["tp"]))]
    axes.legend(patches(COLOURS), names, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes.set(xlim=(-4.5, 2 * far - 7.5), ylim=(of_each * (HIDDEN + 3) - 2, -4))
    axes.set_axis_off()


@dataclass(frozen=True)
class Turn:
    """A stage's forward or backward of a microbatch, and when it ends."""

    stage: int
    kind: str
    microbatch: int
    end: int


STAGES, MICROBATCHES = 4, 4
DURATIONS = {"forward": 1, "backward": 2}


def order_of(stage: int) -> list[tuple[str, int]]:
    """1F1B: as many forwards as there are stages from this one on, then one backward and one forward in turn."""
    warm_up = min(MICROBATCHES, STAGES - stage)
    order = [("forward", number) for number in range(warm_up)]
    for number in range(MICROBATCHES):
        order.append(("backward", number))
        if warm_up + number < MICROBATCHES:
            order.append(("forward", warm_up + number))
    return order


def run_schedule() -> list[Turn]:
    """Each stage in its order: it starts when it has ended the last thing, and the neighbour has sent what this one needs."""
    orders = [order_of(stage) for stage in range(STAGES)]
    free, runs = [0] * STAGES, dict[tuple[int, str, int], Turn]()
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, number = order[0]
            sender = stage - 1 if kind == "forward" else stage + 1
            needed = runs.get((sender, kind, number))
            if needed is None and 0 <= sender < STAGES:
                continue
            free[stage] = max(free[stage], needed.end if needed else 0) + DURATIONS[kind]
            runs[stage, kind, number] = Turn(stage, *order.pop(0), free[stage])
    return list(runs.values())


def draw_schedule_of_stages(axes: Axes) -> None:
    """1F1B over time, with its bubble."""
    runs = run_schedule()
    end, busy = max(run.end for run in runs), MICROBATCHES * sum(DURATIONS.values())
    for stage in range(STAGES):
        axes.broken_barh([(0, end)], (stage, 0.8), facecolor=GREY, hatch="////", edgecolor="#b0b0b0", linewidth=0)
    for run in runs:
        width = DURATIONS[run.kind]
        box(axes, run.end - width, run.stage, width, COLOURS[list(DURATIONS).index(run.kind)], height=0.8)
        label(axes, run.end - width / 2, run.stage + 0.4, str(run.microbatch), 8)
    waits = Patch(facecolor=GREY, hatch="////", edgecolor="#b0b0b0", linewidth=0)
    names = [*DURATIONS, f"bubble: {end - busy} of {end}"]
    kinds = [*patches(COLOURS[: len(DURATIONS)]), waits]
    axes.legend(kinds, names, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    axes.set(xlim=(0, end), ylim=(STAGES, -0.2), xlabel="time; a backward takes as long as two forwards")
    axes.set_xticks(range(0, end + 1, 3))
    axes.set_yticks([stage + 0.4 for stage in range(STAGES)], [f"stage {stage}" for stage in range(STAGES)])

"""Forecast a training step on GPUs, before and after changes of the runtime, and print the tables of docs/performance.md.

    python scripts/bench/gpu_forecast.py

The planner forecasts Llama-3 8B on eight H100s by their sheet: batch 1 of 8,192 tokens, parameters gathered in bfloat16,
gradients reduced in float32, selective recomputation. What it does not know is added as bounds, each by an assumption that its
row names: [least, most]. Then the steps that scripts/gpu_check.py times beside FSDP2 (gpt-1b), which copies more.
Nothing here has been measured on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from bench.forecast import forecast_step
from common.models import CASES
from common.options import Parser
from shardrt.fsdp.base.policy import MixedPrecisionPolicy
from shardrt.plan.machine.hardware import Curve, NetworkLink, Sheet, load_sheet
from shardrt.plan.program.forecast_result import Forecast
from shardrt.plan.program.job import Job
from shardrt.plan.program.presets import preset_factory
from shardrt.plan.question.planning import Planner

MODEL, RANKS, SEQUENCE, WIDTH = "llama3-8b", 8, 8192, 4096
REDUCED = torch.float32
UPLOADING = (7 / 21, 9 / 21)  # of the launches, those that uploaded a table of addresses
UPLOAD_S = 117e-6 - 22e-6  # of host time, for such a launch beyond another; measured on two slow cores
COPIES = (0.75, 0.9)  # of the memory's bandwidth, what kernels that copy reach
PCIE = 64e9  # bytes/s of 16 lanes of generation 5, in one direction
PCIE_PARTS = (0.75, 1.0)  # of it, what copies to pinned memory reach
HOPS_IN_SWITCH = 2  # to the NVSwitch and back, in place of a ring's N - 1 steps


class Bounds(NamedTuple):
    """What is known of a figure: at least, and at most."""

    least: float
    most: float

    @classmethod
    def exactly(cls, value: float) -> Bounds:
        return cls(value, value)

    @classmethod
    def total(cls, bounds: Iterable[Bounds]) -> Bounds:
        """Of the sum."""
        least, most = zip(*bounds, strict=True)
        return cls(sum(least), sum(most))

    def text(self, digits: int) -> str:
        """For a table: one number, or a range, rounded."""
        least, most = (f"{value:,.{digits}f}" for value in self)  # two that are rounded alike are shown as one
        return least if least == most else f"{least} to {most}"


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a step in milliseconds, or another figure in the unit that its name has.   digits: after the point."""

    name: str
    before: Bounds
    after: Bounds
    by: str  # the assumption
    digits: int = 0

    def line(self) -> str:
        """Of a Markdown table."""
        return f"| {self.name} | {self.before.text(self.digits)} | {self.after.text(self.digits)} | {self.by} |"


# ---------------------------------------------------------------------- Llama-3 8B


def planned(sheet: Sheet) -> Forecast:
    """The planner's forecast of the model on this machine."""
    job = Job(
        RANKS,
        sequence=SEQUENCE,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, REDUCED),
        checkpoint_activations="op",
    )
    return Planner(preset_factory(MODEL), MODEL, sheet, sheet.ranks_per_node).forecast(job)


def in_switch(sheet: Sheet) -> Sheet:
    """The same machine, if its switches add what is reduced at the full rate of a GPU's links."""
    rate = sheet.within.bandwidth.rates[-1] * RANKS / (RANKS - 1)  # bytes of all blocks, as a measured collective counts them
    latency = sheet.within.start + HOPS_IN_SWITCH * sheet.within.latency
    return replace(sheet, collectives={"reduce_scatter": NetworkLink(Curve((1.0,), (rate,)), latency)})


def longest_kernel(sheet: Sheet) -> float:
    """Seconds of the longest kernel of a block: the backward of causal attention, five products of half the scores."""
    assert sheet.compute.attention is not None, "it is in the sheet"
    flops = 5 * SEQUENCE**2 * WIDTH
    return flops / max(sheet.compute.flops["bfloat16"].rates) / sheet.compute.attention


def copying(sheet: Sheet, nbytes: float) -> Bounds:
    """Milliseconds of a kernel that reads and writes so many bytes."""
    slow, fast = (nbytes / max(sheet.memory.bandwidth.rates) / part * 1e3 for part in COPIES)
    return Bounds(fast, slow)


def step_rows(sheet: Sheet, found: Forecast) -> list[Row]:
    """The parts of a step. found: the forecast by that sheet."""
    ring, switch = (each.exposed_seconds * 1e3 for each in (found, planned(in_switch(sheet))))
    late = replace(sheet, within=replace(sheet.within, start=sheet.within.start + longest_kernel(sheet)))
    gaps = (planned(late).step_seconds - found.step_seconds) * 1e3
    computed = Bounds.exactly((found.step_seconds - found.exposed_seconds - found.optimizer_seconds) * 1e3)
    optimizer = Bounds.exactly(found.optimizer_seconds * 1e3)
    numel = sum(group.numel for group in found.groups)
    packing = copying(sheet, numel * (torch.bfloat16.itemsize + REDUCED.itemsize))
    uploads = len(found.groups) * UPLOADING[1] * UPLOAD_S * 1e3
    nothing = Bounds.exactly(0.0)
    return [
        Row("forward, backward", computed, computed, "the planner, whose sheet is fitted to published runs"),
        Row("optimizer", optimizer, optimizer, "the planner"),
        Row(
            "exposed communication: sums in place of averages",
            Bounds.exactly(ring),
            Bounds(min(ring, switch), ring),
            "at most as by a ring; at least if switches add at the full rate of the links",
        ),
        Row(
            "late starts: streams with priority",
            Bounds(0.0, max(0.0, gaps)),
            nothing,
            f"without priority, each collective starts up to {longest_kernel(sheet) * 1e3:.1f} ms late, the longest kernel",
        ),
        Row(
            "packing: gradients computed where they are packed",
            packing,
            packing,
            f"one pass over all gradients at {COPIES[0]:g} to {COPIES[1]:g} of the memory's bandwidth; unchanged, since "
            "bfloat16 gradients are cast to float32",
        ),
        Row(
            "uploads: addresses as arguments of kernels",
            Bounds(0.0, uploads),
            nothing,
            f"host time of up to {UPLOADING[1]:.0%} of {len(found.groups)} launches; none if the host is ahead",
        ),
    ]


def other_rows(found: Forecast) -> list[Row]:
    """What is not a part of a step."""
    gib, packed = found.peak_nbytes / 2**30, found.memory["packed"] / 2**30
    state = found.memory["parameters"] + found.memory["optimizer"]
    stall = Bounds(*sorted(state / PCIE / part for part in PCIE_PARTS))
    return [
        Row(
            "peak memory, GiB: packed gradients in memory that is freed",
            Bounds(gib, gib + packed),
            Bounds.exactly(gib),
            f"the packed gradients of the largest group, {packed:.1f} GiB, stayed; at most if none are in use at the peak",
            digits=1,
        ),
        Row(
            "stall of an asynchronous checkpoint, s: copies on a stream of their own",
            stall,
            Bounds.exactly(0.0),
            f"{state / 1e9:.1f} GB of a rank over PCIe 5, {PCIE_PARTS[0]:g} to {PCIE_PARTS[1]:g} of 64 GB/s; the next "
            "optimizer step comes later than that",
            digits=2,
        ),
        Row(
            "full NCCL initialisations at the start",
            Bounds.exactly(5.0),
            Bounds.exactly(1.0),
            "one communicator, and splits of it; what one takes is not known here, gpu_check.py times it",
        ),
    ]


def total(rows: Sequence[Row]) -> Row:
    """The row of a whole step."""
    return Row("**step**", Bounds.total(row.before for row in rows), Bounds.total(row.after for row in rows), "the sum")


# ---------------------------------------------------------------------- beside FSDP2


class BesideFsdp2(NamedTuple):
    """The step of gpt-1b on so many GPUs: milliseconds, and the ratio to the same step with FSDP2's copies."""

    ranks: int
    ms: float
    ratio: Bounds


def beside_fsdp2(sheet: Sheet, ranks: int) -> BesideFsdp2:
    """FSDP2 copies what it has gathered, once for each gather, on the stream that computes: one read and one write of it."""
    found = forecast_step(CASES["gpt-1b"], ranks, sheet)
    gathered = sum(group.gathered_nbytes for group in found.groups)
    again = gathered - found.groups[0].gathered_nbytes  # the root stays gathered
    ms = found.step_seconds * 1e3
    fast, slow = copying(sheet, 2 * (gathered + again))
    return BesideFsdp2(ranks, ms, Bounds(ms / (ms + slow), ms / (ms + fast)))


def lines(sheet: Sheet) -> Iterator[str]:
    """Both tables of Llama-3 8B, and that of gpt-1b."""
    found = planned(sheet)
    rows = step_rows(sheet, found)
    whole = total(rows)
    before, after = (Bounds(SEQUENCE / side.most * 1e3, SEQUENCE / side.least * 1e3) for side in (whole.before, whole.after))
    yield "| of a step of Llama-3 8B, ms | before | after | by |"
    yield "|---|--:|--:|---|"
    for row in (*rows, whole, Row("tokens/s and GPU", before, after, f"{SEQUENCE:,} tokens by the step")):
        yield row.line()
    yield ""
    yield "| beside the step | before | after | by |"
    yield "|---|--:|--:|---|"
    for row in other_rows(found):
        yield row.line()
    yield ""
    yield "| GPUs | step of gpt-1b, ms | by FSDP2's |"
    yield "|--:|--:|--:|"
    for each in (beside_fsdp2(sheet, ranks) for ranks in (1, 2, 4, 8)):
        yield f"| {each.ranks} | {each.ms:.0f} | {each.ratio.text(2)} |"


def main() -> None:
    Parser(description=__doc__).parse_args()
    for line in lines(load_sheet("h100")):
        print(line, flush=True)


if __name__ == "__main__":
    main()

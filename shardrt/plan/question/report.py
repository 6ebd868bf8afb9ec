"""A forecast as text to read, and as JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..machine.hardware import Sheet
from ..program.forecast_result import Forecast
from ..program.job import Job
from ..program.names import AXES, GRADIENT_SYNCS
from ..program.pipeline import forwards_ahead
from .search import MOST
from .splits import Splits

_GIB = 1 << 30
_LABEL, _NUMBER = 22, 12  # widths of columns


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What was forecast.

    name: of the model.   numel: its parameters.   unread: sizes of the job that the step does not look at.
    largest_batch: that fits, 0 if none does; None if not looked for.
    pays_below: bytes/s and rank of the slowest links up to which 8-bit codes make a step shorter, infinity for any links,
        0 if they do not at a hundredth of the sheet's; None if not looked for.
    splits: the ways to divide the job that were looked at, of which the first is this job's; None if not looked for.
    other_sync: the forecast with gradients reduced in the other micro-batches; None with one micro-batch, or if not looked for.
    """

    name: str
    numel: int
    job: Job
    sheet: Sheet
    ranks_per_node: int
    forecast: Forecast
    largest_batch: int | None = None
    pays_below: float | None = None
    unread: tuple[str, ...] = ()
    other_sync: Forecast | None = None
    splits: Splits | None = None

    @property
    def fits(self) -> bool:
        """Whether a rank has enough memory."""
        return self.has_room(self.forecast)

    def has_room(self, forecast: Forecast) -> bool:
        """Whether a rank has enough memory for that."""
        return forecast.peak_nbytes <= self.sheet.memory.nbytes

    @property
    def tokens(self) -> int:
        """Of all ranks in a step; rows, if the job has no sequence length."""
        return self.job.rows * (self.job.sequence or 1)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.forecast.step_seconds if self.forecast.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """The share of this rank's peak arithmetic, at the dtype of compute, that a step without recomputation needs."""
        rates = self.sheet.compute.flops
        peak = max(rates.get(self.forecast.dtype, rates["float32"]).rates)
        return self.forecast.model_flops / (self.forecast.step_seconds * peak) if self.forecast.step_seconds else 0.0


def lines(plan: PlannedJob) -> Iterator[str]:
    """The report, line by line."""
    found = plan.forecast
    for part in (_splits(plan), _heading(plan), _memory(plan), _traffic(found), _time(found), _stages(plan)):
        if shown := list(part):
            yield from (*shown, "")
    yield from _results(plan)


_SHOWN = 10  # splits


def _splits(plan: PlannedJob) -> Iterator[str]:
    """The table of the best ways to divide the job, if some were looked for."""
    if (splits := plan.splits) is None:
        return
    fitting = sum(split.fits for split in splits.found)
    yield f"{len(splits.found)} ways to divide {plan.job.ranks:,} ranks, {fitting} of them fit; the best ones:"
    yield "".join(f"{name:>8}" for name in (*AXES, "shards")) + "".join(
        f"{name:>15}" for name in ("micro-batches", "peak GiB", "step s", "tokens/s")
    )
    for split in splits.found[:_SHOWN]:
        job, made = split.job, split.forecast
        rate = _short(job.rows * (job.sequence or 1) / made.step_seconds) if made.step_seconds else "-"
        degrees = "".join(f"{getattr(job, name):>8,}" for name in (*AXES, "shards"))
        cells = f"{job.micro_batches:,}", _gib(made.peak_nbytes), _seconds(made.step_seconds), rate
        yield degrees + "".join(f"{cell:>15}" for cell in cells) + ("" if split.fits else "   does NOT fit")
    if splits.refused:
        job, error = splits.refused[0]
        given = ", ".join(f"{axis}={getattr(job, axis)}" for axis in AXES if getattr(job, axis) > 1)
        yield f"left out are {len(splits.refused)} that the model refuses, the first with {given or 'none of them'}: {error}"


def _heading(plan: PlannedJob) -> Iterator[str]:
    job = plan.job
    parts = {"pipeline stages": job.pp, "replicated": job.replicas, "sharded": job.shards, "tensor-parallel": job.tp}
    shape = " x ".join(f"{size:,} {name}" for name, size in parts.items() if size > 1 or name == "sharded")
    shape += f"; sequences in {job.cp} parts" if job.cp > 1 else ""
    shape += f"; experts on {job.ep} ranks" if job.ep > 1 else ""
    yield f"{plan.name}: {_short(plan.numel)} parameters on {job.ranks:,} ranks ({shape})"
    yield f"on {plan.sheet.name}; {plan.ranks_per_node} ranks per node"
    micro = f" x {job.micro_batches} micro-batches" if job.micro_batches > 1 else ""
    tokens = f" of {job.sequence:,} tokens; {plan.tokens:,} tokens" if job.sequence else f"; {plan.tokens:,} rows"
    yield f"a step: batch {job.batch}{micro}{tokens} on all ranks"


def _memory(plan: PlannedJob) -> Iterator[str]:
    forecast, peak = plan.forecast, plan.forecast.peak_at
    yield _row("memory of a rank", "GiB", f"of stage {forecast.fullest_stage}, which needs most" if forecast.stages else "")
    for kind in sorted(forecast.memory, key=lambda kind: (kind not in _ALWAYS, -forecast.memory[kind])):
        if forecast.memory[kind]:
            yield _row(f"  {kind}", _gib(forecast.memory[kind]), "" if kind in _ALWAYS else "at its own peak")
    verdict = "fits in" if plan.fits else "does NOT fit in"
    step = f"the {'work of the stage' if forecast.stages else 'step'}"
    when = f"{_significant(peak.seconds, 3)} s into {step}{f', at {peak.group}' if peak.group else ''}"
    yield _row("  peak of the sum", _gib(forecast.peak_nbytes), f"{verdict} {_gib(plan.sheet.memory.nbytes)}; {when}")
    gathered = _gib(sum(group.gathered_nbytes for group in forecast.groups))
    fsdp2 = _gib(forecast.fsdp2_padding_nbytes)
    yield _row("padding", _gib(forecast.padding_nbytes), f"of {gathered} that a pass gathers; FSDP2: {fsdp2}")


_ALWAYS = ("parameters", "optimizer", "process")  # while a model trains


def _traffic(forecast: Forecast) -> Iterator[str]:
    yield _row("received in a step", "GiB")
    yield _row("  inside the node", _gib(forecast.received_within_nbytes))
    yield _row("  across nodes", _gib(forecast.received_across_nbytes))


def _time(forecast: Forecast) -> Iterator[str]:
    yield _row("time of a step", "s")
    yield _row("  compute", _seconds(forecast.compute_seconds))
    yield _row("  optimizer", _seconds(forecast.optimizer_seconds))
    exposed = forecast.exposed_seconds
    share = f" ({exposed / forecast.step_seconds:.0%} of the step)" if forecast.step_seconds else ""
    yield _row("  communication", _seconds(forecast.communication_seconds), f"exposed: {_seconds(exposed)}{share}")
    if forecast.stages:
        bubble = forecast.bubble_seconds
        yield _row("  bubble", _seconds(bubble), f"{bubble / forecast.step_seconds:.1%} of the step, waiting for other stages")
    yield _row("  step", _seconds(forecast.step_seconds))


def _stages(plan: PlannedJob) -> Iterator[str]:
    """The table of the stages of a pipeline, if it is one."""
    if not plan.forecast.stages:
        return
    job, columns = plan.job, ("parameters", "in flight", "peak GiB", "busy s", "bubble s")
    yield f"{f'stages, {job.schedule}':<{_LABEL}}" + "".join(f"{column:>{_NUMBER}}" for column in columns)
    for stage, each in enumerate(plan.forecast.stages):
        flying = min(forwards_ahead(job.schedule, stage, job.pp, job.micro_batches) + 1, job.micro_batches)
        cells = (
            _short(each.numel),
            str(flying),
            _gib(each.peak_nbytes),
            _seconds(each.busy_seconds),
            _seconds(each.bubble_seconds),
        )
        yield f"{f'  {stage}':<{_LABEL}}" + "".join(f"{cell:>{_NUMBER}}" for cell in cells)


def _results(plan: PlannedJob) -> Iterator[str]:
    unit = "tokens/s" if plan.job.sequence else "rows/s"
    rate = plan.tokens_per_second
    each = _significant(rate / plan.job.ranks, 4)
    yield _text("throughput", f"{_short(rate)} {unit}, {each} on each rank; MFU {plan.mfu:.1%}")
    yield _text("bound by", plan.forecast.bound)
    if plan.job.micro_batches > 1 and plan.job.pp == 1:
        yield from _reductions(plan)
    for size in plan.unread:
        yield _text("note", f"the step does not read job.{size}: --{size} changes nothing but the rows and tokens counted here")
    if plan.largest_batch is not None:
        more = " or more" if plan.largest_batch == MOST else ""
        yield _text("largest batch", f"{plan.largest_batch:,}{more}" if plan.largest_batch else "none fits")
    yield from _advice(plan)


_SYNCS = {"every": "every micro-batch", "last": "the last micro-batch only"}


def _reductions(plan: PlannedJob) -> Iterator[str]:
    """Which micro-batches reduce, and what it costs if others do."""
    used = plan.job.gradient_sync
    yield _text("gradients", f"reduced in {_SYNCS[used]}")
    if plan.other_sync is not None:
        other = GRADIENT_SYNCS[used]
        verdict = "fits" if plan.has_room(plan.other_sync) else "does NOT fit"
        costs = f"peak {_gib(plan.other_sync.peak_nbytes)} GiB, {verdict}; step {_seconds(plan.other_sync.step_seconds)} s"
        yield _text("", f"--gradient-sync {other}, in {_SYNCS[other]}: {costs}")


def _advice(plan: PlannedJob) -> Iterator[str]:
    """On 8-bit collectives."""
    several_nodes = plan.job.ranks > plan.ranks_per_node
    if plan.pays_below == 0.0:
        yield _text("8-bit codes", "do not pay, nor would they on links a hundredth as fast")
    elif plan.pays_below is not None:
        where = "across nodes" if several_nodes else "in the node"
        speed = f"links of up to {_significant(plan.pays_below * 8 / 1e9, 3)} Gb/s a rank"
        links = "any links" if math.isinf(plan.pays_below) else speed
        yield _text("8-bit codes", f"pay on {links} {where}")
    elif not plan.job.quantization_policy and plan.forecast.exposed_seconds > 0.1 * plan.forecast.step_seconds:
        codes = ", --quantize-gather int8, --quantize-reduce int8" if several_nodes else ""
        yield _text("advice", f"communication is exposed: try a larger batch{codes}")


def _row(label: str, number: str, note: str = "") -> str:
    return f"{label:<{_LABEL}}{number:>{_NUMBER}}{f'   {note}' if note else ''}"


def _text(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:,.2f}" if nbytes == 0 or nbytes >= _GIB / 100 else f"{nbytes / _GIB:.1e}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f}" if seconds == 0 or seconds >= 0.01 else f"{seconds:.2e}"


def _short(number: float) -> str:
    """As 405.9 G."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{_significant(number / factor, 4)}{unit}"
    return _significant(number, 4)


def _significant(number: float, digits: int) -> str:
    """So many digits, and zeros: 48,570, not 4.857e+04."""
    rounded = float(f"{number:.{digits}g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:,.{digits}g}"


# ---------------------------------------------------------------------- JSON


def as_json(plan: PlannedJob) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    figures = asdict(plan.forecast)
    groups = figures.pop("groups")
    return {
        "model": plan.name,
        "parameters": plan.numel,
        "sheet": plan.sheet.name,
        "job": _plain(plan.job),
        **figures,
        "peak_at": plan.forecast.peak_at._asdict(),
        "padding_nbytes": plan.forecast.padding_nbytes,
        "fsdp2_padding_nbytes": plan.forecast.fsdp2_padding_nbytes,
        "groups": groups,
        "capacity_nbytes": plan.sheet.memory.nbytes,
        "fits": plan.fits,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "largest_batch": plan.largest_batch,
        "splits": [
            {
                **{name: getattr(split.job, name) for name in (*AXES, "shards", "micro_batches")},
                "peak_nbytes": split.forecast.peak_nbytes,
                "step_seconds": split.forecast.step_seconds,
                "fits": split.fits,
            }
            for split in (plan.splits.found if plan.splits is not None else ())
        ],
        "unread": plan.unread,
        "other_gradient_sync": plan.other_sync
        and {
            "peak_nbytes": plan.other_sync.peak_nbytes,
            "fits": plan.has_room(plan.other_sync),
            "step_seconds": plan.other_sync.step_seconds,
        },
        # JSON has no infinity.
        "quantization_pays_below_bytes_per_second": plan.pays_below and min(plan.pays_below, sys.float_info.max),
    }


def _plain(job: Job) -> dict[str, Any]:
    """A job's fields; policies as text."""
    shown = {each.name: getattr(job, each.name) for each in fields(job) if each.repr}
    return {name: value if isinstance(value, int | str | None) else repr(value) for name, value in shown.items()}

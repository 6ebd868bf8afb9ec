"""The forecasts that answer one question: of the job, of other batches, and with other links."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...fsdp.base.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, PrefetchPolicy, QuantizationPolicy
from ...instruments.progress import progress
from ...timeline.events import BY_GROUP, Events
from ...timeline.picture import draw_memory
from ...timeline.timeline import Timeline
from ..machine.cost import Costs
from ..machine.hardware import Curve, Sheet, load_sheet
from ..program.configurations import configured_factory
from ..program.factory import as_plan_error, load_factory, make_program, with_named_step
from ..program.forecast_result import Forecast
from ..program.job import Job, PlanError, Program
from ..program.known_models import PRESETS
from ..program.names import GRADIENT_SYNCS
from ..program.presets import preset_factory
from ..run.forecast import forecast
from ..run.history import KINDS, History
from .report import PlannedJob
from .search import break_even, largest_batch
from .splits import Splits, best_splits, splits

PICTURES = (".png", ".svg", ".pdf")
# Options that are fields of a job as they are.
_OF_JOB = (
    *("ranks", "tp", "cp", "ep", "pp", "schedule", "replicas", "batch", "micro_batches", "optimizer", "gradient_sync"),
    "reshard_after_forward",
)


class Planner:
    """Forecasts jobs of one model on one machine.

    numel: parameters of the whole model; 0 before the first forecast.   reads: what the factory and step of the last forecast
    have read of the job, in any stage.
    """

    def __init__(self, factory: Callable[..., Any], name: str, sheet: Sheet, ranks_per_node: int) -> None:
        self.factory = factory
        self.name = name
        self.sheet = sheet
        self.ranks_per_node = ranks_per_node
        self.numel = 0
        self._reads: list[Set[str]] = []

    @property
    def reads(self) -> Set[str]:
        return frozenset().union(*self._reads)

    def forecast(
        self, job: Job, sheet: Sheet | None = None, timeline: Timeline | None = None, history: History | None = None
    ) -> Forecast:
        """Cost: two steps of the model on the meta device.

        sheet: another machine.   timeline, history: record the step.   Raises PlanError and SheetError.
        """
        costs = Costs(sheet or self.sheet, self.ranks_per_node)
        self.numel, self._reads = 0, []
        with as_plan_error(f"{self.name}: the step on the meta device failed:"):
            return forecast(self._make, job, costs, timeline=timeline, history=history)

    def largest_batch(self, job: Job, found: Forecast, capacity: int) -> int:
        """The largest batch that fits in `capacity` bytes. found: the forecast of `job`. Cost: some four more."""

        def peak_nbytes(batch: int) -> int:
            return (found if batch == job.batch else self.forecast(replace(job, batch=batch))).peak_nbytes

        return largest_batch(peak_nbytes, capacity)

    def pays_below(self, job: Job) -> float:
        """Up to which bandwidth of the slowest links (bytes/s and rank) the job's 8-bit codes make a step shorter.

        0 if they do not on links a hundredth as fast as the sheet's, infinity if they do on links ten times as fast.
        Cost: some twenty forecasts.
        """
        across = self.sheet.across if job.ranks > self.ranks_per_node else None
        link = across or self.sheet.within
        whole = replace(job, quantization_policy=QuantizationPolicy())

        def gain(bandwidth: float) -> float:
            other = replace(link, bandwidth=Curve((1.0,), (bandwidth,)))
            sheet = replace(self.sheet, **({"within": other, "collectives": {}} if across is None else {"across": other}))
            return self.forecast(whole, sheet).step_seconds - self.forecast(job, sheet).step_seconds

        now = link.bandwidth.rates[-1]
        return break_even(gain, now / 100, now * 10, precision=0.1)

    def _make(self, job: Job) -> Program:
        program = make_program(self.factory, job, self.name)
        self.numel += sum(param.numel() for param in program.model.parameters())
        self._reads.append(program.reads)
        return program


def plan_of(options: argparse.Namespace) -> PlannedJob:
    """The plan that the command line asks for; writes the files that it names.

    Raises ValueError: a PlanError, a SheetError or one of a policy; OSError for a file that cannot be written.
    """
    job, sheet = _job_of(options), load_sheet(options.sheet)
    name = options.factory if options.preset is None else options.preset
    planner = Planner(_factory(options), name, sheet, options.ranks_per_node or sheet.ranks_per_node)
    divided = None if options.best is None else _splits(planner, job, options.best)
    job = job if divided is None else divided.found[0].job
    found = _recorded(planner, job, options.plot, options.timeline)
    stated, reads = ("batch",) if job.sequence is None else ("batch", "sequence"), planner.reads
    unread = tuple(size for size in stated if size not in reads)
    plan = PlannedJob(name, planner.numel, job, sheet, planner.ranks_per_node, found, unread=unread, splits=divided)
    return plan if options.no_search else _searched(plan, planner)


def _factory(options: argparse.Namespace) -> Callable[..., Any]:
    if options.preset is not None:
        return preset_factory(options.preset)
    name: str = options.factory
    factory = load_factory(name) if ":" in name else configured_factory(name)
    return factory if options.step is None else with_named_step(factory, name, options.step)


def _splits(planner: Planner, job: Job, axes: Sequence[str]) -> Splits:
    """The ways to divide the job by these degrees. Shows how far it is, where a person looks."""
    jobs = splits(job, axes, planner.ranks_per_node)
    with progress(len(jobs), "split") as done:
        found = best_splits(jobs, planner.forecast, planner.sheet.memory.nbytes, done)
    if not found.found:
        first = f", the first because: {found.refused[0][1]}" if found.refused else ""
        raise PlanError(
            f"--best {','.join(axes)}: the model can be divided over {job.ranks} ranks in none of {len(jobs)} ways{first}"
        )
    return found


def _searched(plan: PlannedJob, planner: Planner) -> PlannedJob:
    """The plan with what more forecasts say."""
    job = plan.job
    largest = planner.largest_batch(job, plan.forecast, plan.sheet.memory.nbytes) if "batch" not in plan.unread else None
    pays = planner.pays_below(job) if job.quantization_policy else None
    other = None
    if job.micro_batches > 1 and job.pp == 1:
        other = planner.forecast(replace(job, gradient_sync=GRADIENT_SYNCS[job.gradient_sync]))
    return replace(plan, largest_batch=largest, pays_below=pays, other_sync=other)


def _recorded(planner: Planner, job: Job, plot: Path | None, timeline: Path | None) -> Forecast:
    """The forecast of the job. plot, timeline: where to draw its memory, and write its timeline."""
    if plot is None and timeline is None:
        return planner.forecast(job)
    if plot is not None:
        check_plot(plot)
    if timeline is not None:
        if timeline.exists() and not timeline.is_dir():
            raise PlanError(f"--timeline {timeline}: expected a folder")
        timeline.mkdir(parents=True, exist_ok=True)  # an OSError in the step would be one of the step
    recorded, history = Timeline(timeline), History()
    found = planner.forecast(job, timeline=recorded, history=history)
    if plot is not None:
        events = Events(recorded.events.spans, history.counters())
        title = f"{planner.name}: memory of one of {job.ranks:,} ranks{', of stage 0, alone' if job.pp > 1 else ''}"
        draw_memory(events, plot, by=BY_GROUP, muted=KINDS, title=title)
    return found


def check_plot(path: Path) -> None:
    """Raise PlanError, before anything is forecast, for a file that cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix not in PICTURES:
        raise PlanError(f"--plot {path}: expected a file that ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise PlanError(f"--plot {path}: there is no folder {path.parent}")


def _job_of(options: argparse.Namespace) -> Job:
    """The job that the options describe. Raises PlanError for options that contradict each other."""
    if (options.factory is None) == (options.preset is None):
        raise PlanError("expected either a factory, package.module:function, a config.json, or --preset")
    if options.preset is not None and options.step is not None:
        raise PlanError("--step with --preset: a preset has a step of its own")
    preset = PRESETS.get(options.preset)
    return Job(
        **{name: getattr(options, name) for name in _OF_JOB},
        sequence=options.sequence or (preset.sequence if preset is not None else None),
        checkpoint_activations=options.selective_ac or options.checkpoint_activations,
        mp_policy=MixedPrecisionPolicy(_dtype(options.param_dtype), _dtype(options.reduce_dtype)),
        offload_policy=CPUOffloadPolicy() if options.offload else OffloadPolicy(),
        quantization_policy=_quantization(options),
        prefetch_policy=PrefetchPolicy(options.prefetch_bytes, options.prefetch_groups),
    )


def _quantization(options: argparse.Namespace) -> QuantizationPolicy:
    gather, reduce = _dtype(options.quantize_gather), _dtype(options.quantize_reduce)
    if gather is None and reduce is None and options.quantize_min_numel is not None:
        raise PlanError("--quantize-min-numel without --quantize-gather or --quantize-reduce: nothing is quantised")
    if reduce is None and options.full_precision_ranks is not None:
        raise PlanError("--full-precision-ranks without --quantize-reduce: it is about quantised reductions")
    size = {} if options.quantize_min_numel is None else {"min_numel": options.quantize_min_numel}
    return QuantizationPolicy(gather, reduce, **size, full_precision_ranks=options.full_precision_ranks)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)

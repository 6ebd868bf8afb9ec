"""The ways to divide one step of one model over the same ranks, and what each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from ..program.forecast_result import Forecast
from ..program.job import Job, PlanError
from ..program.names import AXES


@dataclass(frozen=True, slots=True)
class JobForecast:
    """A job, its forecast, and whether a rank has enough memory for it."""

    job: Job
    forecast: Forecast
    fits: bool


def splits(job: Job, axes: Iterable[str], ranks_per_node: int) -> list[Job]:
    """The jobs of as many ranks, and rows of a step, as `job` has, that differ in the degrees named `axes`: few degrees first.

    Degrees are divisors of the ranks. Left out are tensor parallelism across nodes, and pipelines of more stages than
    micro-batches, which stand still for half of the step.
    """
    divisors = [size for size in range(1, job.ranks + 1) if job.ranks % size == 0]
    varied, found = [axis for axis in AXES if axis in axes], []
    for sizes in product(divisors, repeat=len(varied)):
        degrees = dict(zip(varied, sizes, strict=True))
        try:
            other = replace(job, micro_batches=1, **degrees)  # type: ignore[arg-type]
        except PlanError:
            continue
        count, rest = divmod(job.rows, other.rows)
        on_one_node = job.ranks <= ranks_per_node or ranks_per_node % other.tp == 0
        if not rest and other.pp <= count and (on_one_node or other.tp == job.tp):
            found.append(replace(other, micro_batches=count))
    return sorted(found, key=lambda job: sum(getattr(job, axis) > 1 for axis in AXES))


class Splits(NamedTuple):
    """found: the fastest first of those that fit, then by memory.   refused: what the model said to others, in order."""

    found: tuple[JobForecast, ...]
    refused: tuple[tuple[Job, PlanError], ...]


def best_splits(
    jobs: Iterable[Job], forecast: Callable[[Job], Forecast], capacity: int, done: Callable[[int], object]
) -> Splits:
    """The jobs, as far as the model can be divided by them. capacity: bytes of a rank.   done: is told of each job that is.

    A degree that the model refuses while all others are 1 is not tried again.
    """
    found, refused = list[JobForecast](), list[tuple[Job, PlanError]]()
    known = dict[tuple[str, int], PlanError]()
    for job in jobs:
        degrees = [(axis, getattr(job, axis)) for axis in AXES if getattr(job, axis) > 1]
        error = next((known[each] for each in degrees if each in known), None)
        try:
            if error is None:
                made = forecast(job)
                found.append(JobForecast(job, made, made.peak_nbytes <= capacity))
        except PlanError as problem:
            error = problem
            known.update(dict.fromkeys(degrees, problem) if len(degrees) == 1 else {})
        if error is not None:
            refused.append((job, error))
        done(1)
    return Splits(tuple(sorted(found, key=_rank)), tuple(refused))


def _rank(split: JobForecast) -> tuple[bool, float]:
    return not split.fits, split.forecast.step_seconds if split.fits else split.forecast.peak_nbytes

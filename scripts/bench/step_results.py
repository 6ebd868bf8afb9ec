"""What the step benchmark makes of the timings of its workers: medians, ratios, the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from bench.host_time import HostTime
from bench.timing import Call, Timing
from common.models import CASES

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # relative, of losses: the order of sums differs
NO_PEER = ("shardrt", "lone")  # workers; with the losses of the others, shardrt's are compared
ONLY_TIMES = ("fsdp2-comm",)  # have no column for memory
Round = dict[str, list[Timing]]  # by worker, then by rank


@dataclass(frozen=True, slots=True)
class Parts:
    """Milliseconds of a step, each a median: they need not add up to the step's. On a GPU of the host."""

    forward: float
    backward: float
    optimizer: float
    collectives: float | None  # of these, inside shardrt's collectives on the host; None for other workers and on a GPU
    waiting: float | None  # of these, until the last rank had come


@dataclass(frozen=True, slots=True)
class Ratios:
    """shardrt / another worker."""

    ms: float
    peak_mb: float
    ms_by_round: list[float]


@dataclass(frozen=True, slots=True)
class Result:
    """One model on one number of ranks, over all rounds; the dicts have a value for each worker."""

    model: str
    ranks: int
    tp: int  # of them, ranks with parts of the same matrices
    peer: str  # the one that is launched and communicates without shardrt
    ms: dict[str, float]  # per step, median
    best_ms: dict[str, float]  # the fastest step, which other load disturbs least
    parts_ms: dict[str, Parts]
    host_ms: dict[str, float]  # per step, median, host time of forward and backward
    peak_mb: dict[str, float]  # MiB, maximum over the rounds; of a rank: on the CPU the mean, on GPUs the maximum
    grown_mb: dict[str, float]  # peak_mb less the memory in use before the model was built
    reserved_mb: dict[str, float]  # as peak_mb; on a GPU with the memory that torch's allocator cached
    loss: dict[str, float]  # of the last step, mean over the ranks
    agreement: dict[str, str]  # by peer: of its losses and shardrt's, over all steps
    ratios: dict[str, Ratios]  # to each other worker


def summarize(model: str, ranks: int, tp: int, device: str, rounds: list[Round]) -> Result:
    """rounds: of each, timings of `shardrt`, its peer, and the other workers that have run, in this order."""
    workers = tuple(rounds[0])
    every = {worker: [timing for one in rounds for timing in one[worker]] for worker in workers}
    tolerance = TOLERANCES[CASES[model].param_dtype]

    def most_mb(measured: Callable[[Timing], float]) -> dict[str, float]:
        of_ranks = fmean if device == "cpu" else max  # ranks on the CPU share one memory, and have parts of it
        return {worker: max(of_ranks(list(map(measured, one[worker]))) for one in rounds) for worker in workers}

    peak = most_mb(lambda timing: timing.peak_mb)
    return Result(
        model=model,
        ranks=ranks,
        tp=tp,
        peer=workers[1],
        ms={worker: median_ms(rounds, worker) for worker in workers},
        best_ms={worker: min(per_step_ms(rounds, worker, seconds)) for worker in workers},
        parts_ms={worker: parts(rounds, worker) for worker in workers},
        host_ms={worker: host_ms(every[worker]) for worker in workers},
        peak_mb=peak,
        grown_mb=most_mb(lambda timing: timing.peak_mb - timing.start_mb),
        reserved_mb=most_mb(lambda timing: timing.reserved_mb),
        loss={w: fmean(timing.losses[-1] for timing in rounds[0][w]) for w in workers},
        agreement={w: compare(every["shardrt"], every[w], tolerance) for w in workers if w not in NO_PEER},
        ratios={worker: ratios(rounds, worker, peak["shardrt"] / peak[worker]) for worker in workers[1:]},
    )


def ratios(rounds: list[Round], worker: str, peak: float) -> Ratios:
    """peak: that ratio."""
    ms = median_ms(rounds, "shardrt") / median_ms(rounds, worker)
    return Ratios(ms, peak, [median_ms([one], "shardrt") / median_ms([one], worker) for one in rounds])


def seconds(timing: Timing) -> list[float]:
    return timing.seconds


def median_ms(rounds: list[Round], worker: str, part: Callable[[Timing], list[float]] = seconds) -> float:
    return median(per_step_ms(rounds, worker, part))


def per_step_ms(rounds: list[Round], worker: str, part: Callable[[Timing], list[float]]) -> Iterator[float]:
    """The mean over the ranks of every timed step, in ms."""
    for one in rounds:
        for of_ranks in zip(*(part(timing) for timing in one[worker]), strict=True):
            yield fmean(of_ranks) * 1e3


def host_ms(timings: list[Timing]) -> float:
    return median(sum(both) for timing in timings for both in zip(timing.forward, timing.backward, strict=True)) * 1e3


def parts(rounds: list[Round], worker: str) -> Parts:
    forward, backward, optimizer = (
        median_ms(rounds, worker, part)
        for part in (lambda timing: timing.forward, lambda timing: timing.backward, lambda timing: timing.optimizer)
    )
    steps = [step for one in rounds for step in zip(*(timing.calls for timing in one[worker]), strict=True)]
    if not any(calls for step in steps for calls in step):
        return Parts(forward, backward, optimizer, None, None)
    inside, waiting = zip(*map(inside_and_waiting, steps), strict=True)
    return Parts(forward, backward, optimizer, median(inside) * 1e3, median(waiting) * 1e3)


def inside_and_waiting(step: Sequence[list[Call]]) -> tuple[float, float]:
    """Seconds of a step inside collectives, and of them until a call's last rank had come; both a mean over the ranks."""
    last: dict[str, float] = {}
    for calls in step:
        for name, came, _ in calls:
            last[name] = max(came, last.get(name, came))
    inside = [sum(left - came for _, came, left in calls) for calls in step]
    waiting = [sum(min(last[name], left) - came for name, came, left in calls) for calls in step]
    return fmean(inside), fmean(waiting)


def compare(ours: list[Timing], theirs: list[Timing], tolerance: float) -> str:
    """Describe how well the losses agree over all ranks and steps."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    if all(our == their for our, their in pairs):
        return "bitwise"
    worst = max(abs(our - their) / max(abs(their), 1e-9) for our, their in pairs)
    return f"{'within' if worst <= tolerance else 'DIFFER by'} {worst:.0e}"


# ---------------------------------------------------------------------- the table


def header(others: Sequence[str]) -> str:
    """Two lines. others: the workers beside shardrt that have columns, whether or not they run for every row."""
    ms, peak = (_names(some) for some in (others, with_memory(others)))
    titles = f"{'':16}{' ms per step ':-^{len(ms)}}  {' peak MiB ':-^{len(peak)}}"
    return f"{titles}\n{'model':10}{'ranks':>6}{ms}  {peak}  losses"


def row(result: Result, others: Sequence[str]) -> str:
    """A line of the table below `header(others)`."""
    ms = _columns(result.ms, {worker: each.ms for worker, each in result.ratios.items()}, others, 1)
    ratios_of_peaks = {worker: each.peak_mb for worker, each in result.ratios.items()}
    peak = _columns(result.peak_mb, ratios_of_peaks, with_memory(others), 0)
    agreement = ", ".join(f"{peer} {found}" for peer, found in result.agreement.items())
    losses = f"{result.loss['shardrt']:.6f}, {result.loss[result.peer]:.6f}"
    return f"{result.model:10}{result.ranks:6}{ms}  {peak}  {agreement} ({losses})"


def with_memory(workers: Sequence[str]) -> list[str]:
    return [worker for worker in workers if worker not in ONLY_TIMES]


def _names(others: Sequence[str]) -> str:
    return "".join(f"{name:>{_width(name)}}" for name in ["shardrt", *others, *(f"by {name}" for name in others)])


def _columns(values: dict[str, float], ratios: dict[str, float], others: Sequence[str], digits: int) -> str:
    cells = [(worker, worker, values, digits) for worker in ("shardrt", *others)]
    cells += [(f"by {worker}", worker, ratios, 2) for worker in others]
    return "".join(
        f"{f'{found[worker]:.{places}f}' if worker in found else '-':>{_width(name)}}" for name, worker, found, places in cells
    )


def _width(name: str) -> int:
    """Of a column with this name."""
    return max(8, len(name) + 1)


def part_rows(result: Result) -> str:
    """Lines below a row: what a step of each worker consists of."""
    lines = []
    for worker, found in result.parts_ms.items():
        line = f"{worker:>16}: forward {found.forward:.1f}, backward {found.backward:.1f}, optimizer {found.optimizer:.1f}"
        if found.collectives is not None:
            line += f"; in collectives {found.collectives:.1f}, waiting for other ranks {found.waiting:.1f} of them"
        lines.append(line)
    return "\n".join(lines)


def host_line(host: dict[str, HostTime]) -> str:
    """host: of shardrt and of FSDP2."""
    ours, theirs = host["shardrt"], host["fsdp2"]
    return (
        f"host time per group at one rank, forward + backward: {ours.median_us:.0f} us (at best {ours.best_us:.0f}), "
        f"FSDP2 {theirs.median_us:.0f} ({theirs.best_us:.0f}), ratio {ours.median_us / theirs.median_us:.2f} "
        f"({ours.best_us / theirs.best_us:.2f})"
    )

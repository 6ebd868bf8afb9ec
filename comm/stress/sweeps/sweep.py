"""Time every collective over sizes, dtypes and ops, out of place and in place, and check every element of the results.

A row has the columns of nccl-tests: its size counts all blocks, its count is that of one rank's call; algbw is the size by the
time, and busbw makes that comparable across collectives and numbers of ranks. An iteration is as long as it was on its slowest
rank; the time is the mean over the iterations, p50 and p99 are over them as well.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, geometric_mean, median
from typing import TYPE_CHECKING

import torch

from ... import ReduceOp, Stream, Work, World, current_stream, new_stream
from ...program.version import __version__
from ..options import StressOptions
from ..problem import BLOCKED, DTYPES, OPS, ROOTED, Problem, bus_factor, ops_for
from .compute import measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .peers import Peer


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The timings of a problem, out of place or in place."""

    time_us: float
    algbw: float  # GB/s, 10**9 bytes
    busbw: float
    wrong: int  # wrong elements, over all ranks
    min_us: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    collective: str
    size: int  # bytes
    count: int  # elements
    type: str
    redop: str
    root: int
    out_of_place: SweepResult
    in_place: SweepResult | None  # a sendrecv has none
    peer_us: float | None  # the peer's median, out of place
    ratio: float | None  # shardrt's median divided by the peer's


_LINES = ("-", "--", ":", "-.")  # styles of curves with the same colour
_COLOURS, _IN_A_COLUMN = 10, 45  # colours in matplotlib's cycle; entries in a column of the legend

_SIDE = f"{'time':>8} {'algbw':>7} {'busbw':>7} {'#wrong':>7}"
HEADER = f"""\
#{"out of place":>82}{"in place":>34}{"out of place":>19}{"in place":>18}
#{"size":>11} {"count":>12} {"type":>13} {"redop":>7} {"root":>5}  {_SIDE}  {_SIDE}  {"p50":>8} {"p99":>8} {"p50":>8} {"p99":>8}
#{"(B)":>11} {"(elements)":>12} {"(us)":>37} {"(GB/s)":>7} {"(GB/s)":>7}{"(us)":>18} {"(GB/s)":>7} {"(GB/s)":>7}{"(us)":>18}"""


class Sweep:
    """One run over all problems of the command line. Every rank creates it and calls its methods alike."""

    def __init__(self, world: World, options: StressOptions, peer: Peer | None) -> None:
        comm = world.comm.split(0, world.rank, "stress")
        assert comm is not None, "every rank gave the same colour"
        self._comm, self._options, self._peer = comm, options, peer
        self._stream = new_stream(world.device, "stress", threaded=options.streams == "threaded")
        comm.barrier(stream=self._stream)  # on GPUs sends and receives alone do not connect the ranks
        nbytes, symmetric = max(options.sizes), options.buffers == "symmetric"
        self._storages = [
            torch.empty(nbytes, dtype=torch.uint8, device=world.device)
            if options.buffers == "ordinary"
            else comm.empty(nbytes, torch.uint8, symmetric=symmetric)
            for _ in range(2)
        ]

    def close(self) -> None:
        self._stream.close()
        self._comm.close()

    def problems(self, name: str) -> Iterator[Problem]:
        size, root = self._comm.size, self._options.root if name in ROOTED else -1
        for dtype in (DTYPES[each] for each in self._options.dtypes):
            for op in ops_for(name, dtype, [OPS[each] for each in self._options.ops]):
                for nbytes in self._options.sizes:
                    yield Problem(name, size, nbytes // dtype.itemsize // (size if name in BLOCKED else 1), dtype, op, root)

    def measure(self, problem: Problem) -> Row:
        """Measure out of place, in place, and the peer if it supports the problem."""
        peer = self._peer if self._peer is not None and self._peer.can(problem) else None
        out_of_place, peer_us = self._measure(problem, False, peer)
        return Row(
            collective=problem.name,
            size=problem.nbytes,
            count=problem.n,
            type=str(problem.dtype).removeprefix("torch."),
            redop="none" if problem.op is None else problem.op.value if isinstance(problem.op, ReduceOp) else "mulsum",
            root=problem.root,
            out_of_place=out_of_place,
            in_place=self._measure(problem, True, None)[0] if problem.can_be_in_place else None,
            peer_us=peer_us,
            ratio=out_of_place.p50_us / peer_us if peer_us else None,
        )

    def _measure(self, problem: Problem, in_place: bool, peer: Peer | None) -> tuple[SweepResult, float | None]:
        rank, sides = self._comm.rank, []
        if peer is not None:
            out, inp = self._place(problem, in_place)
            sides.append(partial(_submit, self._stream, partial(peer.run, problem, out, inp)))
            sides[0]().synchronize()
            if problem.count_wrong(rank, in_place, out, inp):
                raise RuntimeError(f"wrong on rank {rank}: {self._options.peer}'s result of {problem}")
        out, inp = self._place(problem, in_place)
        sides.append(partial(problem.launch, self._comm, out, inp, self._stream))
        given = None
        if in_place:
            given = torch.empty_like(inp)
            self._stream.submit(partial(given.copy_, inp))
        sides[-1]().synchronize()
        wrong = problem.count_wrong(rank, in_place, out, inp)
        seconds = self._time(sides, inp, given)  # shardrt is last, so that its result stays
        wrong = sum(self._comm.exchange(max(wrong, problem.count_wrong(rank, in_place, out, inp))))
        return _result(problem, wrong, seconds[-1]), median(seconds[0]) * 1e6 if peer else None

    def _place(self, problem: Problem, in_place: bool) -> tuple[torch.Tensor, torch.Tensor]:
        storages = iter(self._storages)

        def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return next(storages)[: numel * dtype.itemsize].view(dtype)

        placed = problem.place(self._comm.rank, in_place, allocate)
        self._stream.wait(current_stream(self._comm.device).record())
        return placed

    def _time(self, sides: Sequence[Callable[[], Work]], inp: torch.Tensor, given: torch.Tensor | None) -> list[list[float]]:
        """Seconds by side and iteration, of the slowest rank. The sides take turns; `given` is copied to `inp` before each."""
        timings: list[list[Callable[[], float]]] = [[] for _ in sides]
        for _ in range(self._options.warmup + self._options.number):
            for side, timing in zip(sides, timings, strict=True):
                if given is not None:
                    self._stream.submit(partial(inp.copy_, given))
                timing.append(_timed(self._stream, side))
        self._stream.synchronize()
        measured = [[seconds() for seconds in timing[self._options.warmup :]] for timing in timings]
        ranks = self._comm.exchange(measured)
        return [[max(moment) for moment in zip(*side, strict=True)] for side in zip(*ranks, strict=True)]


def _submit(stream: Stream, fn: Callable[[], object]) -> Work:
    stream.submit(fn)
    return Work(stream.record())


def _timed(stream: Stream, side: Callable[[], Work]) -> Callable[[], float]:
    """Run a call; returns a function that gives its seconds, to be called when the stream has been synchronized."""
    if stream.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.submit(begin.record)
        side()
        stream.submit(end.record)
        return lambda: begin.elapsed_time(end) / 1e3
    start = time.perf_counter()
    side().synchronize()
    seconds = time.perf_counter() - start
    return lambda: seconds


def _result(problem: Problem, wrong: int, seconds: Sequence[float]) -> SweepResult:
    algbw, ordered = problem.nbytes / fmean(seconds) / 1e9, sorted(seconds)
    return SweepResult(
        time_us=fmean(seconds) * 1e6,
        algbw=algbw,
        busbw=algbw * bus_factor(problem.name, problem.size),
        wrong=wrong,
        min_us=ordered[0] * 1e6,
        p50_us=median(seconds) * 1e6,
        p99_us=ordered[math.ceil(0.99 * len(ordered)) - 1] * 1e6,
    )


# ---------------------------------------------------------------------- output


def run(world: World, options: StressOptions, log: Callable[[str], None]) -> int:
    """Run the sweep, with a line for each problem; returns the exit code. Collective."""
    from .peers import make_peer  # Hazard: before shardrt.init() this would start MPI, with other settings

    peer = None if options.peer is None else make_peer(options.peer, world)
    sweep, rows = Sweep(world, options, peer), []
    for name in options.collectives:
        log(f"#\n# {name}\n{HEADER}{f'  ours / {options.peer}' if peer else ''}")
        for problem in sweep.problems(name):
            rows.append(sweep.measure(problem))
            log(line(rows[-1]))
    sweep.close()
    measurement = measure(world, [DTYPES[name] for name in options.dtypes], options.number, log) if options.compute else None
    ratios = [row.ratio for row in rows if row.ratio]
    ratio = geometric_mean(ratios) if ratios else None
    if peer is not None:
        peer.close()
        mean = f"{ratio:.3f}, the geometric mean" if ratio else "none"
        log(f"# Ours / {options.peer}: {mean} of {len(ratios)} ratios of medians")
    results = [result for row in rows for result in (row.out_of_place, row.in_place) if result is not None]
    busbw, wrong = fmean(result.busbw for result in results) if results else 0.0, sum(result.wrong for result in results)
    if world.rank == 0:
        summary: dict[str, object] = {"ranks": world.size, "nodes": world.nodes, "peer": options.peer}
        summary |= {"compute": None if measurement is None else asdict(measurement)}
        _write(options, summary | {"busbw": busbw, "wrong": wrong, "ratio": ratio}, rows)
    log(f"# Avg bus bandwidth: {busbw:.3f} GB/s   #wrong: {wrong}")
    return 1 if wrong else 0


def line(row: Row) -> str:
    """A row of the table under HEADER."""
    sides = (row.out_of_place, row.in_place)
    parts = [f"{row.size:12} {row.count:12} {row.type:>13} {row.redop:>7} {row.root:5}"]
    parts += [f"{s.time_us:8.1f} {s.algbw:7.2f} {s.busbw:7.2f} {s.wrong:7}" if s else "N/A".rjust(32) for s in sides]
    parts.append(" ".join(f"{s.p50_us:8.1f} {s.p99_us:8.1f}" if s else "N/A".rjust(17) for s in sides))
    return "  ".join([*parts, *([f"{row.ratio:8.3f}"] if row.ratio else [])])


def _write(options: StressOptions, summary: Mapping[str, object], rows: Sequence[Row]) -> None:
    if options.json is not None:
        versions = {"version": __version__, "torch": torch.__version__}
        options.json.write_text(json.dumps({**versions, **summary, "rows": [asdict(row) for row in rows]}, indent=1))
    if options.plot is not None:
        draw(rows).savefig(options.plot)


def draw(rows: Sequence[Row]) -> Figure:
    """Bus bandwidth by size, a curve for each collective, dtype and operation, on logarithmic axes. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[Row]] = {}
    for row in rows:
        curves.setdefault(f"{row.collective} {row.type} {row.redop}".removesuffix(" none"), []).append(row)
    for index, (label, points) in enumerate(curves.items()):
        style = _LINES[index // _COLOURS % len(_LINES)]
        sizes, speeds = [row.size for row in points], [row.out_of_place.busbw for row in points]
        axes.plot(sizes, speeds, linestyle=style, linewidth=1, marker=".", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    if any(row.out_of_place.busbw > 0 for row in rows):  # of a single rank all are 0
        axes.set_yscale("log")
    axes.grid(which="major", linewidth=0.3)
    axes.set(xlabel="size (bytes)", ylabel="bus bandwidth out of place (GB/s)")
    columns = -(-len(curves) // _IN_A_COLUMN)
    figure.legend(loc="outside right upper", fontsize="xx-small", ncols=columns, handlelength=1.5, frameon=False)
    return figure

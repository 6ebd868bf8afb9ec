"""Time checkpoints of shardrt beside torch's DCP on gloo: saves, asynchronous saves, loads, and the metadata of many ranks.

    python scripts/bench/checkpoint.py                                   # 2 ranks, 500 MB and 4 GB of state
    python scripts/bench/checkpoint.py --megabytes 100 --folder /scratch

The state is a model and its AdamW state, in float32, sharded by shardrt and by FSDP2. Each measurement is a job, in turns
and in rounds: `mpirun` for shardrt, torch's launcher for DCP. A time is that of the slowest rank; results are medians over the
repetitions of all rounds. Every save goes into a new folder and ends with fsync. Loads read files that are in the page cache,
and what was loaded is compared. Of the stock side DCP alone is timed, without get_state_dict() and set_state_dict().
Peak memory is the resident memory during a save, relative to that before it. A stall is the time until async_save() returns;
memcpy is a copy of as many bytes. The plain write (with fsync) and read move as many bytes between one buffer and a file.

The metadata is that of very many ranks, made without them: 100 blocks of ten tensors, as in Llama-3 405B, on 100,000 ranks.
Files go into a temporary folder, or into --folder: it has to be on a disk. Progress goes to stderr; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from bench.checkpoint_metadata import Simulated, simulate
from bench.checkpoint_workers import WORKERS, Timing
from common.jobs import mpirun, run_job, torchrun
from common.options import Parser, at_least

SIDES = ("shardrt", "stock")
TARGETS = {"load": 0.4, "save": 1.0, "peak": 1.05, "stall": 1.3, "metadata_s": 60.0}  # at most; ratios are as in Result


@dataclass(frozen=True, slots=True)
class Result:
    """One size of state; the dicts have a value for each side. Times in seconds, memory in MiB."""

    megabytes: int
    ranks: int
    save_s: dict[str, float]
    save_peak: dict[str, float]  # peak memory of a save / memory before it, the largest of any rank
    stall_s: dict[str, float]
    stall_mb: dict[str, float]  # memory that the first asynchronous save takes, the largest of any rank
    again_mb: dict[str, float]  # that later ones take
    finish_s: dict[str, float]  # until an asynchronous save is committed
    load_s: dict[str, float]
    memcpy_s: float  # beside shardrt
    write_s: float
    read_s: float
    ratio_save: float  # shardrt / stock
    ratio_load: float  # shardrt / stock
    ratio_stall: float  # shardrt / memcpy


# ---------------------------------------------------------------------- results


def measure(megabytes: int, options: Options) -> Result:
    found: dict[str, list[list[Timing]]] = {side: [] for side in SIDES}  # by side, by round, by rank
    for number in range(options.rounds):
        for side in SIDES:
            print(f"{megabytes} MB, {options.ranks} ranks, round {number + 1} of {options.rounds}: {side}", file=sys.stderr)
            found[side].append(run_worker(side, megabytes, options))
    return summarize(megabytes, options.ranks, found)


def run_worker(side: str, megabytes: int, options: Options) -> list[Timing]:
    """Run this file as a worker on every rank; the timings in rank order. Exits if what was loaded is not what was saved."""
    launcher = mpirun(options.ranks) if side == "shardrt" else torchrun(options.ranks)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
        args = ["--worker", side, "--megabytes", str(megabytes), "--repeats", str(options.repeats), "--folder", folder]
        run_job([*launcher, __file__, *args], options.timeout)
        timings = [Timing(**json.loads((Path(folder) / f"rank{rank}").read_text())) for rank in range(options.ranks)]
    if not all(timing.loaded for timing in timings):
        sys.exit(f"{side}, {megabytes} MB: what was loaded is not what was saved")
    return timings


def summarize(megabytes: int, ranks: int, found: dict[str, list[list[Timing]]]) -> Result:
    def slowest(side: str, seconds: Callable[[Timing], list[float]]) -> float:
        """The median over all repetitions of the slowest rank's time."""
        return median(max(each) for timings in found[side] for each in zip(*map(seconds, timings), strict=True))

    def each_side(value: Callable[[str], float]) -> dict[str, float]:
        return {side: value(side) for side in SIDES}

    def largest(side: str, value: Callable[[Timing], float]) -> float:
        return max(value(timing) for timings in found[side] for timing in timings)

    save_s = each_side(lambda side: slowest(side, lambda timing: timing.save_s))
    load_s = each_side(lambda side: slowest(side, lambda timing: timing.load_s))
    stall_s = each_side(lambda side: slowest(side, lambda timing: timing.stall_s))
    memcpy_s = slowest("shardrt", lambda timing: timing.memcpy_s)
    return Result(
        megabytes=megabytes,
        ranks=ranks,
        save_s=save_s,
        save_peak=each_side(lambda side: largest(side, lambda timing: max(timing.save_peak))),
        stall_s=stall_s,
        stall_mb=each_side(lambda side: largest(side, lambda timing: timing.stall_mb[0])),
        again_mb=each_side(lambda side: largest(side, lambda timing: max(timing.stall_mb[1:]))),
        finish_s=each_side(lambda side: slowest(side, lambda timing: timing.finish_s)),
        load_s=load_s,
        memcpy_s=memcpy_s,
        write_s=slowest("shardrt", lambda timing: timing.write_s),
        read_s=slowest("shardrt", lambda timing: timing.read_s),
        ratio_save=save_s["shardrt"] / save_s["stock"],
        ratio_load=load_s["shardrt"] / load_s["stock"],
        ratio_stall=stall_s["shardrt"] / memcpy_s,
    )


def table(result: Result) -> str:
    """What a person wants to read of one size: a line for each operation, the target beside it."""

    def line(name: str, values: dict[str, float], ratio: float, to: str, target: str) -> str:
        ours, stock = values["shardrt"], values["stock"]
        return f"  {name:24}{ours:10.3f}{stock:10.3f}  {ratio:6.2f} of {to:8} target {TARGETS[target]:g}"

    memory = {side: f"{result.stall_mb[side]:.0f}, then {result.again_mb[side]:.0f}" for side in SIDES}
    return "\n".join(
        [
            f"{result.megabytes} MB on {result.ranks} ranks{'shardrt':>18}{'stock':>10}",
            line("save with fsync, s", result.save_s, result.ratio_save, "stock", "save"),
            line("peak memory of a save", result.save_peak, result.save_peak["shardrt"], "before", "peak"),
            line("asynchronous: stall, s", result.stall_s, result.ratio_stall, "memcpy", "stall"),
            line("load, warm, s", result.load_s, result.ratio_load, "stock", "load"),
            f"  until committed, s{result.finish_s['shardrt']:16.3f}{result.finish_s['stock']:10.3f}",
            f"  memory of an asynchronous save, MiB: shardrt {memory['shardrt']}; stock {memory['stock']}",
            f"  memcpy {result.memcpy_s:.3f} s, plain write with fsync {result.write_s:.3f} s, read {result.read_s:.3f} s",
        ]
    )


def line_of(made: Simulated) -> str:
    return (
        f"metadata of {made.tensors:,} tensors on {made.ranks:,} ranks: {made.chunks:,} chunks, {made.nbytes / 1e6:,.0f} MB in "
        f"{made.write_s:.1f} s (target {TARGETS['metadata_s']:g}), {made.grown_mb:,.0f} MiB of memory"
    )


# ---------------------------------------------------------------------- command line


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, one field per flag."""

    megabytes: list[int]
    ranks: int
    rounds: int
    repeats: int
    metadata_ranks: int
    metadata_blocks: int
    folder: Path | None
    timeout: float
    worker: str | None


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--megabytes", type=at_least(1), nargs="+", default=[500, 4000], help="of state over all ranks, in 10^6 bytes")
    add("--ranks", type=at_least(1), default=2)
    add("--rounds", type=at_least(1), default=3, help="jobs of each side")
    add("--repeats", type=at_least(1), default=3, help="timed repetitions in each job")
    add("--metadata-ranks", type=at_least(0), default=100_000, metavar="N", help="0: no metadata")
    add("--metadata-blocks", type=at_least(1), default=100, metavar="N", help="of ten tensors each")
    add("--folder", type=Path, help="where the files go")
    add("--timeout", type=at_least(1, float), default=600.0, help="time limit of a job in seconds")
    add("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)  # set for the jobs of this script
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse_options()
    if options.worker is None:
        bench(options)
        return
    assert options.folder is not None, "set for the jobs of this script"
    rank, timing = WORKERS[options.worker](options.megabytes[0], options.folder / "checkpoint", options.repeats)
    (options.folder / f"rank{rank}").write_text(json.dumps(asdict(timing)))


def bench(options: Options) -> None:
    results = []
    for megabytes in options.megabytes:
        results.append(measure(megabytes, options))
        print(table(results[-1]), flush=True)
    summary: dict[str, object] = {"cores": os.cpu_count(), "targets": TARGETS, "results": [asdict(each) for each in results]}
    if options.metadata_ranks:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.folder) as folder:
            simulated = simulate(options.metadata_ranks, options.metadata_blocks, Path(folder))
        print(line_of(simulated), flush=True)
        summary["metadata"] = asdict(simulated)
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

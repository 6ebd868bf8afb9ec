"""Time a training step: shardrt, PyTorch FSDP2, and the floor, which does not communicate.

    python scripts/bench/step.py --models gpt mlp tiny --ranks 2 4
    python scripts/bench/step.py --device cuda --models gpt-1b tiny --ranks 1 --fused
    python scripts/bench/step.py --tp 2 --ranks 2 4

Each measurement is a separate job: `mpirun` for shardrt and the floor, torch's launcher for FSDP2.
The floor trains an unsharded model on as many ranks, so that the cores are as busy. The jobs
alternate in rounds, so that other load of the machine affects all of them. shardrt and FSDP2 shard
the same modules of the same model, get the same batches and use the same AdamW; their losses are
compared for every step.

A step is forward, backward and optimizer; batches are made before. The time of a step is the mean
over the ranks; the result is the median over the steps of all rounds. Peak memory is the maximum
resident memory of any rank; on a GPU, the maximum that torch's allocator held for tensors plus the
memory in use outside it (no other process may use the GPU). FSDP2 runs on gloo, on GPUs on NCCL.

With --tp both sides run a GPT of 512 channels on that many tensor-parallel ranks, with sequence parallelism and the loss on
parts of the vocabulary, by one plan; the peer is torch's tensor parallelism. On more ranks, both shard the parts as well, over
the others (2-D). There is no floor then: no unsharded model does the same arithmetic.
Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from bench.workers import WORKERS, HostTime, Run, Timing, host_worker
from common.jobs import mpirun, run_job, torchrun
from common.models import CASES
from common.options import Parser, at_least, exit_with_usage_error

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # relative, of losses: the order of sums differs

# ---------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Result:
    """One model on one number of ranks, over all rounds; the dicts have a value for each worker."""

    model: str
    ranks: int
    tp: int  # of them, ranks with parts of the same matrices
    ms: dict[str, float]  # per step, median
    best_ms: dict[str, float]  # the fastest step, which other load disturbs least
    host_ms: dict[str, float]  # per step, median, host time of forward and backward
    peak_mb: dict[str, float]  # MiB, maximum over the ranks
    grown_mb: dict[str, float]  # peak_mb less the memory in use before the model was built
    reserved_mb: dict[str, float]  # as peak_mb; on a GPU with the memory that torch's allocator cached
    loss: dict[str, float]  # of the last step, mean over the ranks
    agreement: str  # of the losses of shardrt and FSDP2 over all steps
    ratio_fsdp2: float  # step time of shardrt / FSDP2
    ratio_floor: float | None  # without a floor, None
    ratio_peak: float  # peak memory of shardrt / FSDP2
    ratio_fsdp2_by_round: list[float]


Round = dict[str, list[Timing]]  # by worker, then by rank


def measure(model: str, ranks: int, options: Options, bar: Bar) -> Result:
    rounds: list[Round] = []
    for _ in range(options.rounds):
        rounds.append({})
        for worker in options.workers:
            bar.set_description(f"{model}, {ranks} ranks, {worker}")
            written = run_worker(worker, ranks, model, options)
            rounds[-1][worker] = [Timing(**json.loads(text)) for text in written]
            bar.update()
    return summarize(model, ranks, options.tp, rounds)


def run_worker(worker: str, ranks: int, model: str, options: Options) -> list[str]:
    """Run this file as `worker` on `ranks` ranks; returns each rank's JSON in rank order."""
    launcher = torchrun(ranks) if worker == "fsdp2" else mpirun(ranks) if ranks > 1 else [sys.executable]
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        args = ["--worker", worker, "--model", model, "--steps", str(options.steps), "--device", options.device]
        args += ["--tp", str(options.tp)]
        args += ["--fused"] if options.fused else []
        run_job([*launcher, __file__, *args, "--results", folder], options.timeout)
        return [(Path(folder) / str(rank)).read_text() for rank in range(ranks)]


def summarize(model: str, ranks: int, tp: int, rounds: list[Round]) -> Result:
    workers = tuple(rounds[0])
    every = {worker: [timing for one in rounds for timing in one[worker]] for worker in workers}
    ms = {worker: median(step_ms(rounds, worker)) for worker in workers}
    peak = {worker: max(timing.peak_mb for timing in every[worker]) for worker in workers}
    return Result(
        model=model,
        ranks=ranks,
        tp=tp,
        ms=ms,
        best_ms={worker: min(step_ms(rounds, worker)) for worker in workers},
        host_ms={w: median(seconds for timing in every[w] for seconds in timing.host_seconds) * 1e3 for w in workers},
        peak_mb=peak,
        grown_mb={w: max(timing.peak_mb - timing.start_mb for timing in every[w]) for w in workers},
        reserved_mb={w: max(timing.reserved_mb for timing in every[w]) for w in workers},
        loss={w: fmean(timing.losses[-1] for timing in rounds[0][w]) for w in workers},
        agreement=compare(every["shardrt"], every["fsdp2"], TOLERANCES[CASES[model].param_dtype]),
        ratio_fsdp2=ms["shardrt"] / ms["fsdp2"],
        ratio_floor=ms["shardrt"] / ms["floor"] if "floor" in ms else None,
        ratio_peak=peak["shardrt"] / peak["fsdp2"],
        ratio_fsdp2_by_round=[median(step_ms([one], "shardrt")) / median(step_ms([one], "fsdp2")) for one in rounds],
    )


def step_ms(rounds: list[Round], worker: str) -> Iterator[float]:
    """The mean over the ranks of every timed step, in ms."""
    for one in rounds:
        for seconds in zip(*(timing.seconds for timing in one[worker]), strict=True):
            yield fmean(seconds) * 1e3


def compare(ours: list[Timing], theirs: list[Timing], tolerance: float) -> str:
    """Describe how well the losses agree over all ranks and steps."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    if all(our == their for our, their in pairs):
        return "bitwise"
    worst = max(abs(our - their) / max(abs(their), 1e-9) for our, their in pairs)
    return f"{'within' if worst <= tolerance else 'DIFFER by'} {worst:.0e}"


HEADER = """\
             ------- ms per step -------  - shardrt by -  ----- peak MiB -----
model  ranks   shardrt    fsdp2    floor    fsdp2  floor   shardrt   fsdp2   by  losses"""


def row(result: Result) -> str:
    """A line of the table below HEADER."""
    ms, peak, loss = result.ms, result.peak_mb, result.loss
    floor, by_floor = ("-", "-") if result.ratio_floor is None else (f"{ms['floor']:.1f}", f"{result.ratio_floor:.2f}")
    return (
        f"{result.model:7}{result.ranks:5} {ms['shardrt']:9.1f}{ms['fsdp2']:9.1f}{floor:>9} "
        f"{result.ratio_fsdp2:8.3f}{by_floor:>7}  {peak['shardrt']:8.0f}{peak['fsdp2']:8.0f}"
        f"{result.ratio_peak:6.2f}  {result.agreement} ({loss['shardrt']:.6f}, {loss['fsdp2']:.6f})"
    )


# ---------------------------------------------------------------------- command line


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, one field per flag."""

    models: list[str]
    ranks: list[int]
    device: str
    tp: int
    steps: int
    fused: bool
    rounds: int
    host_time: bool
    timeout: float
    worker: str | None
    model: str
    results: Path

    @property
    def workers(self) -> list[str]:
        return [worker for worker in WORKERS if self.tp == 1 or worker != "floor"]


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add, hidden = parser.add_argument, argparse.SUPPRESS
    add("--models", nargs="+", choices=tuple(CASES), help="default: gpt mlp tiny; with --tp: gpt-512, and only GPTs")
    add("--ranks", type=at_least(1), nargs="+", default=[2, 4])
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--tp", type=at_least(1), default=1, metavar="N", help="of the ranks, N have parts of the same matrices")
    add("--steps", type=at_least(1), default=20, help="timed steps of each job")
    add("--fused", action="store_true", help="use AdamW's fused loop instead of torch's default")
    add("--rounds", type=at_least(1), default=3, help="jobs of each worker")
    add("--host-time", action=argparse.BooleanOptionalAction, default=True)
    add("--timeout", type=at_least(1, float), default=600.0, help="time limit of a job in seconds")
    add("--worker", choices=(*WORKERS, "host"), help=hidden)  # set for the jobs of this script
    add("--model", choices=tuple(CASES), default="tiny", help=hidden)
    add("--results", type=Path, default=Path(), help=hidden)
    options = Options(**vars(parser.parse_args()))
    return options if options.models else replace(options, models=["gpt-512"] if options.tp > 1 else ["gpt", "mlp", "tiny"])


def check_options(options: Options) -> None:
    """Exit with a usage error for options that do not fit this machine or each other."""
    if options.device == "cuda" and not torch.cuda.is_available():
        exit_with_usage_error(f"--device cuda: torch {torch.__version__} sees no CUDA device on this machine")
    if odd := [ranks for ranks in options.ranks if ranks % options.tp]:
        exit_with_usage_error(f"--ranks {odd[0]} does not divide by --tp {options.tp}")
    if options.tp > 1 and (others := [model for model in options.models if not model.startswith("gpt")]):
        exit_with_usage_error(f"--tp {options.tp}: model {others[0]} has no plan, use a GPT")


def main() -> None:
    options = parse_options()
    if options.worker is None:
        check_options(options)
    if options.worker == "host":
        (options.results / "0").write_text(json.dumps(asdict(host_worker(options.steps))))
    elif options.worker is not None:
        run = Run(options.device, options.steps, options.fused, options.tp)
        rank, timing = WORKERS[options.worker](CASES[options.model], run)
        (options.results / str(rank)).write_text(json.dumps(asdict(timing)))
    else:
        bench(options)


class Bar(AbstractContextManager["Bar"]):
    """The methods of tqdm's bar that this script uses, without a bar: for an environment without tqdm."""

    def write(self, line: str) -> None:
        print(line, flush=True)

    def set_description(self, text: str) -> None: ...

    def update(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def make_bar(total: int) -> Bar:
    try:
        from tqdm import tqdm
    except ImportError:
        return Bar()
    return cast(Bar, tqdm(total=total, unit="job"))


def bench(options: Options) -> None:
    cells = [(model, ranks) for model in options.models for ranks in options.ranks]
    results = []
    with make_bar(len(cells) * options.rounds * len(options.workers)) as bar:
        if options.tp > 1:
            bar.write(f"{options.tp} tensor-parallel ranks; fsdp2 stands for torch's tensor parallelism, and FSDP2 over it")
        bar.write(HEADER)
        for model, ranks in cells:
            results.append(measure(model, ranks, options, bar))
            bar.write(row(results[-1]))
    summary: dict[str, object] = {
        "cores": os.cpu_count(),
        "device": options.device,
        "fused": options.fused,
        "tp": options.tp,
        "results": [asdict(result) for result in results],
    }
    if options.host_time and options.tp == 1:
        host = HostTime(**json.loads(run_worker("host", 1, "tiny", options)[0]))
        summary["host"] = asdict(host)
        times = f"{host.median_us:.0f} us, at best {host.best_us:.0f}"
        print(f"host time per group, forward + backward, without collectives: {times}")
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

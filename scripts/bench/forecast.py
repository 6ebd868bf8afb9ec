"""Compare forecasts of a training step with the step itself, on the cores of this machine.

    python scripts/bench/forecast.py --models gpt mlp tiny --ranks 1 2

For each number of ranks, the stress tester measures the machine, with all ranks at once; that is all that the forecasts know.
Measurements and training jobs alternate in rounds, so that other load of the machine affects both; of steps, collectives,
operations and forecasts the fastest counts, which other load disturbs least. The models, batches and optimizer are those of
scripts/bench/step.py. Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.jobs import mpirun, run_job
from common.models import CASES, Case, shard
from common.options import Parser, at_least
from shardrt.plan.machine.cost import Costs
from shardrt.plan.machine.hardware import Sheet, parse_sheet
from shardrt.plan.program.forecast_result import Forecast
from shardrt.plan.program.job import Job, Program
from shardrt.plan.run.forecast import forecast
from shardrt.plan.run.measured import sheet_of_stress

STEP = Path(__file__).with_name("step.py")
SWEEP = ["-b", "1K", "-e", "64M", "-f", "4", "-n", "30", "--collectives", "all_gather,reduce_scatter,all_reduce,sendrecv"]


@dataclass(frozen=True, slots=True)
class Result:
    """A model on a number of ranks. ms: per step."""

    model: str
    ranks: int
    measured_ms: float
    forecast_ms: float
    ratio: float  # forecast / measured
    bound: str


def launched(ranks: int) -> list[str]:
    """The command that starts this Python on `ranks` ranks."""
    return mpirun(ranks) if ranks > 1 else [sys.executable]


def measured_sheet(ranks: int, timeout: float) -> Sheet:
    """What the stress tester measures now."""
    with tempfile.TemporaryDirectory(prefix="bench-forecast-") as folder:
        path = Path(folder) / "stress.json"
        run_job([*launched(ranks), "-m", "shardrt.comm.stress", *SWEEP, "--compute", "--json", str(path)], timeout)
        return parse_sheet(sheet_of_stress(path), str(path))


def measured_ms(model: str, ranks: int, steps: int, timeout: float) -> float:
    """The fastest step of a training job; of each step the mean over the ranks."""
    with tempfile.TemporaryDirectory(prefix="bench-forecast-") as folder:
        options = ["--worker", "shardrt", "--model", model, "--steps", str(steps), "--results", folder]
        run_job([*launched(ranks), str(STEP), *options], timeout)
        seconds = [json.loads((Path(folder) / str(rank)).read_text())["seconds"] for rank in range(ranks)]
    return min(map(fmean, zip(*seconds, strict=True))) * 1e3


def forecast_step(case: Case, ranks: int, sheet: Sheet, how: Callable[..., object] = shardrt.fully_shard) -> Forecast:
    """A step of the same model with the same batch.   how: `fully_shard` or `replicate`."""
    policy = shardrt.MixedPrecisionPolicy(case.param_dtype, torch.float32)

    def make(job: Job) -> Program:
        with torch.device("meta"):
            model = case.build()
        shard(model, partial(how, mp_policy=policy))
        inputs, targets = (tensor.to("meta") for tensor in case.batch(torch.Generator()))
        return Program(model, lambda: case.loss(model(inputs), targets))

    return forecast(make, Job(ranks), Costs(sheet))


def compare(models: list[str], ranks: int, rounds: int, steps: int, timeout: float) -> list[Result]:
    """Measure the machine and the models in turns."""
    measured: dict[str, list[float]] = {model: [] for model in models}
    forecasts: dict[str, list[Forecast]] = {model: [] for model in models}
    for turn in range(rounds):
        print(f"{ranks} ranks, round {turn + 1} of {rounds}", file=sys.stderr)
        sheet = measured_sheet(ranks, timeout)
        for model in models:
            forecasts[model].append(forecast_step(CASES[model], ranks, sheet))
            measured[model].append(measured_ms(model, ranks, steps, timeout))
    results = []
    for model in models:
        found, fastest = min(forecasts[model], key=lambda forecast: forecast.step_seconds), min(measured[model])
        forecast_ms = found.step_seconds * 1e3
        results.append(Result(model, ranks, fastest, forecast_ms, forecast_ms / fastest, found.bound))
    return results


def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(CASES), default=["gpt", "mlp", "tiny"])
    add("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    add("--steps", type=at_least(1), default=20, help="timed steps of each job")
    add("--rounds", type=at_least(1), default=3)
    add("--timeout", type=at_least(1, float), default=600.0, help="time limit of a job in seconds")
    options = parser.parse_args()
    print("model  ranks  measured ms  forecast ms  ratio  bound by")
    results = []
    for ranks in options.ranks:
        for result in compare(options.models, ranks, options.rounds, options.steps, options.timeout):
            results.append(result)
            print(
                f"{result.model:7}{ranks:5} {result.measured_ms:12.1f} {result.forecast_ms:12.1f} "
                f"{result.ratio:6.2f}  {result.bound}",
                flush=True,
            )
    print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()

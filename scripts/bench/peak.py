"""Take the peak memory of a training process apart, on the cores of this machine, and compare it with the forecast.

    python scripts/bench/peak.py --models gpt-256 mlp-wide --ranks 1 2
    python scripts/bench/peak.py --replicate --ranks 2

Each job trains a model from its making on, under `shardrt.MemoryAccount`, and of its ranks the one with the highest peak
counts. Each part is measured on its own; the kernel's mark (VmHWM) says what they have to add up to, and the exit code is 1 if
they miss it by more than 3 %. Beside it stands the forecast: each kind of memory at its own peak, and, at the bottom, the
peak of their sum with the interpreter that was measured. Not in the forecast is what the allocator holds, scratch memory of
libraries, windows beyond packed gradients, and the whole model before its blocks are sharded.
The models, batches and optimizer are those of scripts/bench/step.py. The last line on stdout is JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from bench.forecast import forecast_step, launched
from common.jobs import run_job
from common.models import CASES, Case, shard
from common.options import Parser, at_least
from shardrt.plan.machine.hardware import parse_sheet
from shardrt.plan.program.forecast_result import Forecast

MODELS = ["gpt-256", "gpt-768", "mlp-wide", "tiny"]
MOST = 0.03  # of the peak, what may be unexplained
PROCESS = "interpreter and libraries"
FORECAST_NAMES = {"shards": "parameters", "optimizer state": "optimizer"}  # others have the same
HOST = """
name = "a host, whatever its speed"
device = "cpu"
ranks_per_node = 1024
memory = {nbytes = 1_000_000_000_000, bandwidth = 1e10}
compute = {flops = {float32 = 1e11}}
overhead = {operation = 1e-6}
within = {bandwidth = 1e10, latency = 1e-6}
"""


@dataclass(frozen=True, slots=True)
class Peak:
    """Of a rank, in bytes."""

    nbytes: int
    parts: dict[str, int]
    at: str  # what ran

    @property
    def unexplained(self) -> int:
        return self.nbytes - sum(self.parts.values())

    @property
    def adds_up(self) -> bool:
        return abs(self.unexplained) <= MOST * self.nbytes


def train(case: Case, steps: int, *, replicate: bool) -> shardrt.MemoryAccount:
    with shardrt.MemoryAccount() as account:
        account.model = model = case.build()
        policy = shardrt.MixedPrecisionPolicy(case.param_dtype, torch.float32)
        shard(model, partial(shardrt.replicate if replicate else shardrt.fully_shard, mp_policy=policy))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        inputs, targets = case.batch(torch.Generator())
        for _ in range(steps):
            case.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return account


def work(name: str, folder: Path, steps: int, *, replicate: bool) -> None:
    """One rank: write its peak."""
    world = shardrt.init("cpu")
    account = train(CASES[name], steps, replicate=replicate)
    found = Peak(account.peak_nbytes, dict(account.parts), account.at)
    (folder / str(world.rank)).write_text(json.dumps(asdict(found)))


def measured(model: str, ranks: int, timeout: float, *options: str) -> Peak:
    """Of the rank with the highest peak."""
    with tempfile.TemporaryDirectory(prefix="bench-peak-") as folder:
        run_job([*launched(ranks), __file__, "--worker", model, "--results", folder, *options], timeout)
        found = [Peak(**json.loads((Path(folder) / str(rank)).read_text())) for rank in range(ranks)]
    return max(found, key=lambda peak: peak.nbytes)


def table(peak: Peak, forecast: Forecast) -> str:
    """A row for each part, in MiB: measured, and forecast."""
    lines = []
    for name, nbytes in peak.parts.items():
        expected = forecast.memory.get(FORECAST_NAMES.get(name, name), 0)
        if nbytes or expected:
            lines.append(f"{name:28}{nbytes / 2**20:10.1f}" + (f"{expected / 2**20:10.1f}" if expected else ""))
    expected = peak.parts[PROCESS] + forecast.peak_nbytes
    lines.append(f"{'not explained':28}{peak.unexplained / 2**20:10.1f}{peak.unexplained / peak.nbytes:10.1%}")
    lines.append(f"{'peak of the process':28}{peak.nbytes / 2**20:10.1f}{expected / 2**20:10.1f}  {peak.at}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=tuple(CASES), default=MODELS)
    add("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    add("--replicate", action="store_true", help="every rank has the whole model")
    add("--steps", type=at_least(1), default=10, help="of each job; the heap's holes grow over the first ones")
    add("--timeout", type=at_least(1, float), default=600.0, help="time limit of a job in seconds")
    add("--worker", help="a model: run as a rank of a measurement")
    add("--results", type=Path, help="with --worker: the folder to write to")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.results, options.steps, replicate=options.replicate)
        return
    flags = ["--steps", str(options.steps), *(["--replicate"] if options.replicate else [])]
    how = shardrt.replicate if options.replicate else shardrt.fully_shard
    results, missed = [], list[str]()
    for ranks in options.ranks:
        for model in options.models:
            peak = measured(model, ranks, options.timeout, *flags)
            forecast = forecast_step(CASES[model], ranks, parse_sheet(HOST, __file__), how)
            heading = f"{model}, {'replicate, ' if options.replicate else ''}{ranks} rank{'s' if ranks > 1 else ''}"
            print(f"{heading:28}{'MiB':>10}{'forecast':>10}\n{table(peak, forecast)}\n", flush=True)
            results.append({"model": model, "ranks": ranks, **asdict(peak), "forecast": forecast.memory})
            if not peak.adds_up:
                missed.append(heading)
    print(json.dumps({"replicate": options.replicate, "results": results}))
    if missed:
        sys.exit(f"parts miss the peak by more than {MOST:.0%}: {'; '.join(missed)}")


if __name__ == "__main__":
    main()

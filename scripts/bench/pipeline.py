"""Time steps of a pipeline: over stages that shardrt has sharded, over torch's on gloo, and as the planner forecasts them.

    python scripts/bench/pipeline.py --stages 2 --micro-batches 2 4 8 16

A GPT in stages, one rank each, under torch's 1F1B schedule. In one job, steps of both sides alternate: `shardrt` are its
`PipelineStage`s, each over a mesh of one rank, on its own communicators; `gloo` are torch's over the plain modules, on a group
of gloo. Their losses are compared. The forecast knows of the machine what the stress tester has measured just before, with all
ranks at once. Of steps, measurements and forecasts the fastest counts. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from bench.forecast import launched, measured_sheet
from common.jobs import run_job
from common.models import GPT, GPTConfig, next_byte_loss, shard
from common.options import Parser, at_least
from common.stages import GPTStage
from shardrt.plan.machine.cost import Costs
from shardrt.plan.machine.hardware import Sheet
from shardrt.plan.program.factory import make_program
from shardrt.plan.program.job import Job
from shardrt.plan.run.forecast import forecast

WARMUP = 3  # steps that allocate, record and learn shapes; not timed


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. worker: of a rank, the folder for what it has measured."""

    stages: int
    micro_batches: list[int]
    layers: int
    channels: int
    context: int
    rows: int
    steps: int
    rounds: int
    timeout: float
    worker: Path | None

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(self.layers, self.channels // 32, self.channels, self.context, tied=False)


@dataclass(frozen=True, slots=True)
class Result:
    """Steps of so many micro-batches, in ms."""

    micro_batches: int
    shardrt_ms: float
    gloo_ms: float
    forecast_ms: float
    bubble_ms: float  # of the forecast, on the fullest stage


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add, count = parser.add_argument, at_least(1)
    add("--stages", type=at_least(2), default=2)
    add("--micro-batches", type=count, nargs="+", default=[2, 4, 8, 16])
    add("--layers", type=count, default=8)
    add("--channels", type=count, default=256)
    add("--context", type=count, default=128)
    add("--rows", type=count, default=2, help="of a micro-batch")
    add("--steps", type=count, default=10, help="timed steps of each side in a job")
    add("--rounds", type=count, default=2)
    add("--timeout", type=at_least(1, float), default=300.0, help="time limit of a job in seconds")
    add("--worker", type=Path, metavar="FOLDER", help="be one rank of such a job")
    options = Options(**vars(parser.parse_args()))
    if min(options.micro_batches) < options.stages:
        parser.error(f"--micro-batches {min(options.micro_batches)}: 1F1B needs as many as the {options.stages} stages")
    return options


# ---------------------------------------------------------------------- one rank of a job


class Side:
    """A stage in a schedule, with its optimizer."""

    def __init__(self, stage: nn.Module, of: Callable[..., Any], group: object, options: Options, count: int) -> None:
        from torch.distributed.pipelining import Schedule1F1B

        rank, device = torch.distributed.get_rank(), torch.device("cpu")
        made = of(stage, rank, options.stages, device, group=group)
        self.schedule = Schedule1F1B(made, count, loss_fn=next_byte_loss)
        self.optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4, fused=True)
        self.is_first, self.is_last = rank == 0, rank == options.stages - 1
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, tokens: Tensor, barrier: Callable[[], object]) -> None:
        """A step of the schedule and of the optimizer."""
        barrier()
        start, losses = time.perf_counter(), list[Tensor]()
        given = (tokens, torch.arange(tokens.shape[1]).expand_as(tokens)) if self.is_first else ()
        wanted: dict[str, Any] = {"target": tokens.roll(-1, 1), "losses": losses} if self.is_last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        barrier()
        self.seconds.append(time.perf_counter() - start)
        self.losses += [loss.item() for loss in losses]


def work(options: Options, folder: Path) -> None:
    """Measure both sides; writes the fastest seconds of each, by the number of micro-batches."""
    from torch import distributed
    from torch.distributed import pipelining

    from shardrt.integrations import torch_distributed
    from shardrt.integrations.pipelining import PipelineStage

    torch.set_num_threads(1)
    world = torch_distributed.init_process_group("cpu")
    gloo, found = distributed.new_group(backend="gloo"), dict[int, tuple[float, float]]()
    mesh = shardrt.DeviceMesh(world.comm, (options.stages, 1), ("pp", "dp"))
    for count in options.micro_batches:
        sharded, plain = (GPTStage(GPT(options.model), world.rank, options.stages) for _ in range(2))
        shard(sharded, lambda module: shardrt.fully_shard(module, mesh=mesh["dp"]))
        ours = Side(sharded, PipelineStage, torch_distributed.process_group(mesh["pp"]), options, count)
        theirs = Side(plain, pipelining.PipelineStage, gloo, options, count)
        tokens = torch.randint(256, (options.rows * count, options.context), generator=torch.Generator().manual_seed(0))
        for _ in range(WARMUP + options.steps):
            for side in (ours, theirs):
                side.step(tokens, world.barrier)
        torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=1e-5)
        found[count] = min(ours.seconds[WARMUP:]), min(theirs.seconds[WARMUP:])
    if world.rank == 0:
        (folder / "seconds.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    shardrt.finalize()


# ---------------------------------------------------------------------- beside the forecast


def forecast_ms(options: Options, count: int, sheet: Sheet) -> tuple[float, float]:
    """A step with so many micro-batches, and the bubble in it."""

    def factory(job: Job) -> tuple[nn.Module, Callable[[nn.Module, Job], Tensor]]:
        return GPTStage(GPT(options.model), job.stage, job.pp), step

    def step(model: nn.Module, job: Job) -> Tensor:
        tokens = torch.zeros(options.rows, options.context, dtype=torch.int64)
        positions = torch.zeros_like(tokens)
        x = tokens if job.stage == 0 else job.receive(options.rows, options.context, options.channels)
        made: Tensor = model(x, positions)
        return next_byte_loss(made, tokens) if job.stage == job.pp - 1 else made

    job = Job(options.stages, pp=options.stages, micro_batches=count)
    found = forecast(lambda job: make_program(factory, job, "GPT"), job, Costs(sheet))
    return found.step_seconds * 1e3, found.bubble_seconds * 1e3


def measured(options: Options) -> dict[int, tuple[float, float]]:
    """The seconds of both sides, in one job."""
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as folder:
        run_job([*launched(options.stages), __file__, *sys.argv[1:], "--worker", folder], options.timeout)
        return {int(count): tuple(each) for count, each in json.loads((Path(folder) / "seconds.json").read_text()).items()}


def main() -> None:
    options = parse_options()
    if options.worker is not None:
        work(options, options.worker)
        return
    sheets, jobs = list[Sheet](), list[dict[int, tuple[float, float]]]()
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
        sheets.append(measured_sheet(options.stages, options.timeout))
        jobs.append(measured(options))
    print("micro-batches  shardrt ms  gloo ms  ratio  forecast ms  ratio  bubble in it")
    results = []
    for count in options.micro_batches:
        ours, theirs = (min(job[count][side] for job in jobs) * 1e3 for side in range(2))
        found, bubble = min(forecast_ms(options, count, sheet) for sheet in sheets)
        results.append(Result(count, ours, theirs, found, bubble))
        print(f"{count:13}{ours:12.1f}{theirs:9.1f}{ours / theirs:7.2f}{found:13.1f}{found / ours:7.2f}{bubble / found:14.1%}")
    print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()

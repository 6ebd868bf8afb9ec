"""Time a training step: shardrt, its peer in PyTorch, and lone processes, which do not communicate.

    python scripts/bench/step.py --parts
    python scripts/bench/step.py --replicate --ranks 2
    python scripts/bench/step.py --device cuda --models gpt-1b tiny --ranks 1 --fused
    python scripts/bench/step.py --tp 2 --ranks 2 4

Each measurement is a separate job: `mpirun` for shardrt and the lone processes, torch's launcher for the peer, FSDP2 or, with
--replicate, DistributedDataParallel beside `shardrt.replicate`. The jobs alternate in rounds, so that other load of the machine
affects all of them. All sides shard the same modules of the same model and get the same batches; their losses are compared for
every step. All sides use torch's AdamW, foreach unless --fused is given.

On several ranks on the CPU, without --tp and --replicate, FSDP2 runs a second time, as `fsdp2-comm`: its own code, launched as
shardrt is, on shardrt's communicators. What it gains on FSDP2 comes from the transport, and from what else `shardrt.init` sets,
above all malloc; what shardrt gains on it comes from the runtime.

There are as many lone processes as ranks, so that the cores are as busy. Each trains a whole model on its own, and its
optimizer steps on as many elements as a rank's: a part of each parameter, or all of it with --replicate and on one rank. So
they do the arithmetic of a step and nothing else; `by lone` is what a step of shardrt takes beside it, in time and in memory.
Their malloc keeps freed memory, as shardrt's does. A lone process holds the whole model and all gradients of a step, which a
rank of several does not.

A step is forward, backward and optimizer; batches are made before. The time of a step is the mean over the ranks; the result is
the median over the steps of all rounds. The peer runs on gloo, on GPUs on NCCL.

Peak memory on the CPU is that of the node, divided by the ranks: a page of shared memory counts once, also if several ranks map
it, or one rank maps it twice. It is the mean over the ranks of VmHWM - (RssShmem - Pss_Shmem), the latter two at the end of the
steps; where the kernel has no Pss_Shmem, it is VmHWM. Pages of libraries count in every rank. On a GPU, peak memory is the
maximum over the ranks of what torch's allocator held for tensors in the steps, plus the memory in use outside it (no other
process may use the GPU).

--parts says what bounds a step: its forward, backward and optimizer on each side, and of shardrt's the time inside collectives,
where ranks wait until the last one has come, and then move and add (on a GPU, parts are of the host, and collectives are not
measured). What forward and backward take beyond those of lone processes is collectives, copies around them, and host time. Host
time is also measured alone, at one rank, beside FSDP2's: `host_time.py`. Of fsdp2-comm, collectives are measured as well.

With --tp both sides run a GPT of 512 channels on that many tensor-parallel ranks, with sequence parallelism and the loss on
parts of the vocabulary, by one plan; the peer is torch's tensor parallelism. On more ranks, both shard the parts as well, over
the others (2-D). There are no lone processes then: no whole model does the same arithmetic.
Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from bench.host_time import HOST_WORKERS, HostTime
from bench.step_results import Result, Round, header, host_line, part_rows, row, summarize
from bench.timing import Run, Timing
from bench.workers import TORCHRUN, WORKERS
from common.jobs import mpirun, run_job, torchrun, write_stacks_before_end
from common.models import CASES
from common.options import Parser, at_least, exit_with_usage_error
from shardrt.instruments.progress import logged_bar

MODELS = ["gpt-256", "gpt-768", "mlp-wide", "tiny"]


def measure(model: str, ranks: int, options: Options, bar: Bar) -> Result:
    rounds: list[Round] = []
    for _ in range(options.rounds):
        rounds.append({})
        for worker in options.workers(ranks):
            bar.set_description(f"{model}, {ranks} ranks, {worker}")
            written = run_worker(worker, ranks, model, options)
            rounds[-1][worker] = [Timing(**json.loads(text)) for text in written]
            bar.update()
    return summarize(model, ranks, options.tp, options.device, rounds)


def run_worker(worker: str, ranks: int, model: str, options: Options) -> list[str]:
    """Run this file as `worker` on `ranks` ranks; returns each rank's JSON in rank order."""
    launcher = torchrun(ranks) if worker in TORCHRUN else mpirun(ranks) if ranks > 1 else [sys.executable]
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        args = ["--worker", worker, "--model", model, "--steps", str(options.steps), "--device", options.device]
        args += ["--tp", str(options.tp)]
        args += [flag for flag, given in (("--fused", options.fused), ("--replicate", options.replicate)) if given]
        run_job([*launcher, __file__, *args, "--results", folder], options.timeout)
        return [(Path(folder) / str(rank)).read_text() for rank in range(ranks)]


def measure_host(options: Options) -> dict[str, HostTime]:
    """The host time of a group, of shardrt and of FSDP2."""
    written = {side: run_worker(f"host-{side}", 1, "tiny", options) for side in ("shardrt", "fsdp2")}
    return {side: HostTime(**json.loads(text)) for side, (text,) in written.items()}


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
    replicate: bool
    parts: bool
    rounds: int
    host_time: bool
    timeout: float
    worker: str | None
    model: str
    results: Path

    def workers(self, ranks: int) -> list[str]:
        """Those that run on so many ranks."""
        on_comm = ranks > 1 and self.device == "cpu" and self.peer == "fsdp2" and self.tp == 1
        return ["shardrt", self.peer, *(["fsdp2-comm"] if on_comm else []), *(["lone"] if self.tp == 1 else [])]

    @property
    def peer(self) -> str:
        return "ddp" if self.replicate else "fsdp2"


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add, hidden = parser.add_argument, argparse.SUPPRESS
    add("--models", nargs="+", choices=tuple(CASES), help=f"default: {' '.join(MODELS)}; with --tp: gpt-512, and only GPTs")
    add("--ranks", type=at_least(1), nargs="+", help="default: 1 2; with --replicate: 2; with --tp N: N")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--tp", type=at_least(1), default=1, metavar="N", help="of the ranks, N have parts of the same matrices")
    add("--steps", type=at_least(1), default=20, help="timed steps of each job")
    add("--fused", action="store_true", help="AdamW's fused loop instead of foreach")
    add("--replicate", action="store_true", help="every rank has the whole model, beside DistributedDataParallel")
    add("--parts", action="store_true", help="print what a step consists of; the JSON has it anyway")
    add("--rounds", type=at_least(1), default=3, help="jobs of each worker")
    add("--host-time", action=argparse.BooleanOptionalAction, default=True, help="measure the host time of a group as well")
    add("--timeout", type=at_least(1, float), default=600.0, help="time limit of a job in seconds")
    add("--worker", choices=(*WORKERS, *HOST_WORKERS), help=hidden)  # set for the jobs of this script
    add("--model", choices=tuple(CASES), default="tiny", help=hidden)
    add("--results", type=Path, default=Path(), help=hidden)
    options = Options(**vars(parser.parse_args()))
    models = options.models or (["gpt-512"] if options.tp > 1 else MODELS)
    ranks = options.ranks or ([options.tp] if options.tp > 1 else [2] if options.replicate else [1, 2])
    return replace(options, models=models, ranks=ranks)


def check_options(options: Options) -> None:
    """Exit with a usage error for options that do not fit this machine or each other."""
    if options.device == "cuda" and not torch.cuda.is_available():
        exit_with_usage_error(f"--device cuda: torch {torch.__version__} sees no CUDA device on this machine")
    if odd := [ranks for ranks in options.ranks if ranks % options.tp]:
        exit_with_usage_error(f"--ranks {odd[0]} does not divide by --tp {options.tp}")
    if options.tp > 1 and (others := [model for model in options.models if not model.startswith("gpt")]):
        exit_with_usage_error(f"--tp {options.tp}: model {others[0]} has no plan, use a GPT")
    if options.replicate and options.tp > 1:
        exit_with_usage_error("--replicate and --tp: give one of them")
    if options.replicate and (casting := [model for model in options.models if CASES[model].param_dtype != torch.float32]):
        exit_with_usage_error(
            f"--replicate: model {casting[0]} computes in {CASES[casting[0]].param_dtype}, which DDP does not: choose others"
        )


def main() -> None:
    options = parse_options()
    if options.worker is None:
        check_options(options)
    else:
        write_stacks_before_end()
    if options.worker in HOST_WORKERS:
        (options.results / "0").write_text(json.dumps(asdict(HOST_WORKERS[options.worker](options.steps))))
    elif options.worker is not None:
        run = Run(options.device, options.steps, options.fused, options.tp, options.replicate)
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
        return cast(Bar, logged_bar(total=total, unit="job"))
    except ImportError:
        return Bar()


def bench(options: Options) -> None:
    cells = [(model, ranks) for model in options.models for ranks in options.ranks]
    results = []
    others = options.workers(max(options.ranks))[1:]
    with make_bar(options.rounds * sum(len(options.workers(ranks)) for _, ranks in cells)) as bar:
        if options.tp > 1:
            bar.write(f"{options.tp} tensor-parallel ranks; fsdp2 stands for torch's tensor parallelism, and FSDP2 over it")
        bar.write(header(others))
        for model, ranks in cells:
            results.append(measure(model, ranks, options, bar))
            bar.write(row(results[-1], others) + (f"\n{part_rows(results[-1])}" if options.parts else ""))
    summary: dict[str, object] = {
        "cores": os.cpu_count(),
        "device": options.device,
        "fused": options.fused,
        "replicate": options.replicate,
        "tp": options.tp,
        "results": [asdict(result) for result in results],
    }
    if options.host_time and options.tp == 1:
        host = measure_host(options)
        summary["host"] = {side: asdict(found) for side, found in host.items()}
        print(host_line(host))
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

"""Check on this machine's GPUs all code that runs on a GPU. Needs torch, CuPy, mpi4py with its MPI, and pytest.

    python scripts/gpu_check.py [--results FOLDER] [--gpus N]

Benchmarks come first, then what proves that results are right, then compiled models and the tests marked `gpu`:

1. Time and memory of a step beside PyTorch FSDP2 in a world of one rank, without a launcher; kernels and their bandwidth.
2. With several GPUs and an `mpirun`, on a rank for each: bandwidth of every collective beside NCCL's own call, how collectives
   hide behind compute, a step with and without stream priority and symmetric windows, and step time and memory beside FSDP2 on
   2, 4 and 8 ranks.
3. Collectives, streams, training, and a watchdog that ends a job; on one rank, then on 2, 4 or 8 (with a single GPU, two ranks
   that share it, if its NCCL supports that).

Each part is a process of its own with a time limit: one that hangs is ended, with the stacks of its threads, and the next one
begins. On one GPU all of them take at most 10 minutes; on more, the sum of their limits is printed first. Results are in
FOLDER/<gpu>.json as soon as they are there, and the last line is all of them as JSON. From these files, scripts/gpu/table.py
makes the tables in docs/performance.md. docs/gpu_first_hour.md says what to expect.

--suite NAME runs the checks of one suite in a job that has been started, with a line of JSON for each: on several nodes, as
srun python scripts/gpu_check.py --suite exchange. --device cpu rehearses all parts on the host, with small sizes; its figures
mean nothing.

Exit code: 0 if nothing failed (a missed goal of speed is no failure), 1 if something failed, 2 without a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.jobs import write_stacks_before_end
from common.options import Parser, at_least, exit_with_usage_error
from gpu import collectives, exchange, kernels, parallel, steady, training
from gpu.checker import LARGE, ROOT, Checker, Part
from gpu.checks import Check, Found, Outcome, run_checks
from shardrt.comm import World

MOST_RANKS = 8
REHEARSED = "gpt"  # the host's large model
SLOWER = 10  # times, that the host may take longer


def versions(world: World) -> Found:
    """The versions; torch and CuPy must be built for the same CUDA."""
    if world.device.type == "cpu":
        return Found(f"a rehearsal on the host, torch {torch.__version__}")
    import cupy
    from cupy.cuda import nccl, runtime

    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libnccl.so" in line})
    ours, cupys = str(torch.version.cuda).split(".")[0], str(runtime.runtimeGetVersion() // 1000)
    assert ours == cupys, f"torch is built for CUDA {torch.version.cuda}, CuPy for {cupys}: install cupy-cuda{ours}x"
    code = nccl.get_version()
    return Found(
        f"{torch.cuda.get_device_name(world.device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, CuPy "
        f"{cupy.__version__}, NCCL {code // 10000}.{code // 100 % 100}.{code % 100} from {' and '.join(paths)}"
    )


RIGHT: tuple[Check, ...] = (versions, collectives.moves, collectives.reductions, collectives.groups, *training.PARITY)
SUITES: dict[str, tuple[Check, ...]] = {
    "kernels": (versions, kernels.bandwidths, kernels.launches, kernels.sizes),
    "exchange": (versions, *exchange.CHECKS),
    "alone": (*RIGHT, *steady.REPLAY, *parallel.CHECKS),
    "together": (*RIGHT, *parallel.CHECKS),
    "steady": (versions, *steady.REPLAY),
    "compiled": training.COMPILED,
    "stuck": (steady.stuck,),
}


def parts(checker: Checker) -> Iterator[Part]:
    """What is run, in this order, with its limit in seconds."""
    on_gpu = checker.device == "cuda"
    large, slower = (LARGE, 1) if on_gpu else (REHEARSED, SLOWER)
    several = [ranks for ranks in (2, 4, 8) if ranks <= checker.gpus]
    most = max(several, default=2)  # a power of two, so that averages are exact

    def suite(name: str, ranks: int, limit: float) -> Part:
        run = partial(checker.suite, name, ranks) if ranks == 1 else partial(checker.together, name, ranks)
        return Part(name, ranks, limit * slower, run)

    def bench(model: str, ranks: int, limit: float) -> Part:
        return Part(f"bench {model}", ranks, limit * slower, partial(checker.bench, model, ranks))

    yield bench(large, 1, 110)
    yield bench("tiny", 1, 75)
    yield suite("kernels", 1, 35)
    if several:
        yield suite("exchange", most, 300)
        yield from (bench(large, ranks, 150) for ranks in several)
        yield bench("tiny", most, 80)
    yield suite("alone", 1, 80)
    yield Part("stuck", 1, 25, checker.stuck)
    yield suite("together", most, 60)
    if several:
        yield suite("steady", most, 60)
    yield suite("compiled", 1, 65)
    yield suite("compiled", most, 60)
    yield Part("pytest -m gpu", 1, 70 * slower, checker.tests)


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--results", type=Path, metavar="FOLDER", help="default: scripts/results; with --device cpu: build/rehearsal")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--gpus", type=at_least(1), metavar="N", help="how many to use; default: all, at most 8; with --device cpu: ranks, 2")
    add("--suite", choices=tuple(SUITES), help="run these checks only, in a job that has been started")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        exit_with_usage_error(f"no GPU to check: torch {torch.__version__} sees no CUDA device on this machine")
    if options.suite is not None:
        write_stacks_before_end()
        run_checks(shardrt.init(options.device), SUITES[options.suite])
        return 0
    there = torch.cuda.device_count() if on_gpu else MOST_RANKS
    gpus = options.gpus or (min(there, MOST_RANKS) if on_gpu else 2)
    if gpus > there:
        exit_with_usage_error(f"--gpus {gpus}: expected at most {there}")
    folder = options.results or ROOT / ("scripts/results" if on_gpu else "build/rehearsal")
    return check(options.device, gpus, folder)


def check(device: str, gpus: int, folder: Path) -> int:
    """Run every part; returns the exit code."""
    checker = Checker(device, gpus, folder)
    chosen = list(parts(checker))
    if device == "cpu" or gpus > 1:
        checker.total_s = sum(part.limit_s for part in chosen)
        print(f"at most {checker.total_s / 60:.0f} minutes on {gpus} ranks; results go to {checker.path}", flush=True)
    for part in chosen:
        checker.run(part)
    summary = checker.summary()
    print(json.dumps(summary))
    return int(summary[Outcome.FAILED.value] != 0)


if __name__ == "__main__":
    sys.exit(main())

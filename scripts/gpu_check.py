"""Check on this machine's GPUs all code that runs on a GPU. Needs torch, CuPy, mpi4py with its MPI, and pytest.

    python scripts/gpu_check.py [--results FOLDER]

1. In a world of one rank, without a launcher: kernels, collectives, streams, training, a watchdog that ends a job, speed and
   memory compared with PyTorch FSDP2.
2. The tests marked `gpu`.
3. With an `mpirun`: 2, 4 or 8 ranks with a GPU each; with a single GPU, two ranks that share it, if its NCCL supports that.

It takes at most 8 minutes. The last line is the summary in JSON, which is also written to FOLDER/<gpu>.json; from that,
scripts/gpu/table.py makes the table in docs/performance.md. --device cpu runs the checks that need no GPU on the host, with
small sizes; its figures mean nothing.

Exit code: 0 if nothing failed (a missed goal of speed is no failure), 1 if something failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.jobs import follow_job, mpirun
from common.models import GPU_GPT
from common.options import Parser, exit_with_usage_error
from gpu import collectives, kernels, parallel, training
from gpu.checks import PREFIX, Check, Found, Outcome, Result, run_checks
from shardrt.comm import World
from shardrt.launch import Launcher, LaunchError, find_site

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 460.0  # for all parts, without the time to end an overdue job
LEAST_S = 20.0  # no part starts with less time left
OPERATION_S = 60.0  # SHARDRT_TIMEOUT of the jobs
STUCK_S = 4.0  # the same for the job that the watchdog must end
EXIT_STUCK = 17  # of a job that the watchdog ended
LARGE = "gpt-1b"  # a model of scripts/bench/step.py
BLOCK_MB = 12 * GPU_GPT.channels**2 * torch.bfloat16.itemsize / 2**20  # the gathered parameters of one of its blocks
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}  # for two ranks on one GPU
SHARES_GPUS = 23000  # the first NCCL version that supports it


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


SUITES: dict[str, tuple[Check, ...]] = {
    "alone": (
        versions,
        kernels.sizes,
        kernels.bandwidths,
        kernels.launches,
        *(collectives.moves, collectives.reductions, collectives.groups),
        *training.PARITY,
        *training.REPLAY,
        *parallel.CHECKS,
        *training.COMPILED,
    ),
    "together": (
        versions,
        *(collectives.moves, collectives.reductions, collectives.groups),
        *training.PARITY,
        *parallel.CHECKS,
        *training.COMPILED,
    ),
    "stuck": (training.stuck,),
}

# ---------------------------------------------------------------------- around the ranks


class Checker:
    """Runs the parts in turn within the time limit and keeps the results."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.results: list[Result] = []
        self._start = time.monotonic()

    def part(self, name: str, ranks: int, run: Callable[[float], Iterator[Result]]) -> None:
        """Keep and print the results of `run(seconds left)` as they come, and one more if it raises."""
        left, start = LIMIT_S - (time.monotonic() - self._start), time.monotonic()
        try:
            if left < LEAST_S:
                self._add(Result(name, ranks, Outcome.FAILED, 0.0, "no time was left"))
            else:
                for result in run(left):
                    self._add(result)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not isinstance(error.code, str):
                raise  # a signal: a failed job exits with a text, not a number
            self._add(Result(name, ranks, Outcome.FAILED, round(time.monotonic() - start, 1), str(error) or repr(error)))

    def _add(self, result: Result) -> None:
        self.results.append(result)
        print(f"[{time.monotonic() - self._start:4.0f} s] {result}", flush=True)

    def suite(self, suite: str, ranks: int, left: float, **environment: str) -> Iterator[Result]:
        """Run a suite's checks on `ranks` ranks."""
        command = [*self._launcher(ranks), __file__, "--device", self.device, "--suite", suite]
        for line in follow_job(command, left, SHARDRT_TIMEOUT=f"{OPERATION_S:g}", **environment):
            if line.startswith(PREFIX):
                yield Result.parse(line)

    def stuck(self, left: float) -> Iterator[Result]:
        """The watchdog must end a job whose kernel does not end, and name the collective."""
        command = [sys.executable, __file__, "--device", self.device, "--suite", "stuck"]
        start = time.monotonic()
        done = subprocess.run(
            command,
            env=os.environ | {"SHARDRT_TIMEOUT": f"{STUCK_S:g}"},
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
        )
        outcome, note = Outcome.OK, ""
        if done.returncode != EXIT_STUCK or not re.search(r"waited .* in #\d+ all_gather", done.stderr):
            outcome = Outcome.FAILED
            note = f"expected exit code {EXIT_STUCK} and the all_gather's name; found {done.returncode}: {done.stderr}"
        yield Result("stuck", 1, outcome, round(time.monotonic() - start, 1), note)

    def tests(self, left: float) -> Iterator[Result]:
        """The tests marked `gpu`. Other files are left out: some import packages that this environment may lack."""
        start, last = time.monotonic(), ""
        files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
        for line in follow_job(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-c", str(ROOT / "setup.cfg"), *files], left
        ):
            last = line.strip() or last
        yield Result("pytest -m gpu", 1, Outcome.OK, round(time.monotonic() - start, 1), last)

    def bench(self, model: str, left: float) -> Iterator[Result]:
        """Time a step of shardrt, of FSDP2, and of a lone process."""
        options = ["--device", self.device, "--models", model, "--ranks", "1", "--rounds", "1", "--fused", "--no-host-time"]
        start, last = time.monotonic(), ""
        for line in follow_job([sys.executable, str(ROOT / "scripts" / "bench" / "step.py"), *options], left):
            last = line.strip() or last
        (measured,) = json.loads(last)["results"]
        yield Result.of(f"bench {model}", 1, time.monotonic() - start, self.compare_with_fsdp2(measured))

    def compare_with_fsdp2(self, measured: dict[str, Any]) -> Found:
        """The figures of one result of bench/step.py, with their goals."""
        ms, host, peak = measured["ms"], measured["host_ms"], measured["peak_mb"]
        assert not measured["agreement"].startswith("DIFFER"), f"losses {measured['agreement']} from FSDP2's"
        found = Found(f"losses {measured['agreement']}")
        by_host = (host["shardrt"] - host["lone"]) / (host["fsdp2"] - host["lone"])
        large, goals = measured["model"] == LARGE, self.device == "cuda"
        found.figure("ms", ms["shardrt"])
        found.figure("ms by FSDP2", ms["shardrt"] / ms["fsdp2"], most=0.9 if goals else None)
        found.figure("host by FSDP2", by_host, most=0.5 if goals and not large else None)
        found.figure("peak MiB", peak["shardrt"])
        found.figure("MiB below FSDP2", peak["fsdp2"] - peak["shardrt"], least=BLOCK_MB if goals and large else None)
        found.figure("reserved MiB below FSDP2", measured["reserved_mb"]["fsdp2"] - measured["reserved_mb"]["shardrt"])
        return found

    @staticmethod
    def _launcher(ranks: int) -> list[str]:
        return mpirun(ranks) if ranks > 1 else [sys.executable]

    def together(self, left: float) -> Iterator[Result]:
        """One rank per GPU, 2, 4 or 8 in all; a single GPU is shared by two ranks."""
        environment: dict[str, str] = {}
        gpus = torch.cuda.device_count() if self.device == "cuda" else 2
        ranks = max(2, 2 ** min(gpus.bit_length() - 1, 3))  # a power of two, so that averages are exact
        try:
            find_site(Launcher.MPIRUN, os.environ)
        except LaunchError as error:
            yield Result("together", 2, Outcome.SKIPPED, 0.0, str(error))
            return
        if gpus == 1:
            found = _nccl_version()
            if found < SHARES_GPUS:
                note = f"two ranks on one GPU need NCCL {SHARES_GPUS} (2.30), found {found}: install a newer nvidia-nccl"
                yield Result("together", 2, Outcome.SKIPPED, 0.0, note)
                return
            environment = SHARED_GPU
        yield from self.suite("together", ranks, left, **environment)

    def summary(self) -> dict[str, object]:
        """All results, for a file."""
        name = torch.cuda.get_device_name() if self.device == "cuda" else "host"
        counts = Counter(result.outcome.value for result in self.results)
        return {
            "gpu": name,
            "date": datetime.date.today().isoformat(),
            "versions": _versions(self.device),
            "seconds": round(time.monotonic() - self._start),
            **{outcome.value: counts[outcome.value] for outcome in Outcome},
            "results": [asdict(result) for result in self.results],
        }


def _versions(device: str) -> dict[str, object]:
    found: dict[str, object] = {"shardrt": shardrt.__version__, "torch": torch.__version__}
    if device == "cuda":
        import cupy

        found |= {"cuda": torch.version.cuda, "cupy": cupy.__version__, "nccl": _nccl_version()}
    return found


def _nccl_version() -> int:
    try:
        from cupy.cuda.nccl import get_version
    except ImportError:
        return 0
    return cast(int, get_version())


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results", metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--suite", choices=tuple(SUITES), help=argparse.SUPPRESS)  # set for the jobs of this script
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        exit_with_usage_error(f"no GPU to check: torch {torch.__version__} sees no CUDA device on this machine")
    if options.suite is not None:
        run_checks(shardrt.init(options.device), SUITES[options.suite])
        return 0
    return check(Checker(options.device), options.results)


def check(checker: Checker, folder: Path) -> int:
    """Run every part and write the summary; returns the exit code."""
    on_gpu = checker.device == "cuda"
    checker.part("alone", 1, lambda left: checker.suite("alone", 1, left))
    if on_gpu:
        checker.part("stuck", 1, checker.stuck)
        checker.part("pytest -m gpu", 1, checker.tests)
        checker.part(f"bench {LARGE}", 1, lambda left: checker.bench(LARGE, left))
    checker.part("bench tiny", 1, lambda left: checker.bench("tiny", left))
    checker.part("together", 2, checker.together)
    summary = checker.summary()
    text = json.dumps(summary)
    if on_gpu:
        folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"\W+", "-", str(summary["gpu"]).lower()).strip("-")
        (folder / f"{slug}.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(text)
    return int(summary[Outcome.FAILED.value] != 0)


if __name__ == "__main__":
    sys.exit(main())

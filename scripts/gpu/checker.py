"""The parts of a check, each a process of its own that ends within its limit. Each result is written to the disk at once."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

import shardrt
from common.jobs import GRACE_S, follow_job, mpirun, run_job
from common.models import GPU_GPT
from gpu.checks import PREFIX, Found, Outcome, Result
from shardrt.launch import Launcher, LaunchError, find_site

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
TOTAL_S = 580.0  # for all parts on one GPU, without the time to end the last one
LEAST_S = 10.0  # no part starts with less time left
OPERATION_S = 60.0  # SHARDRT_TIMEOUT of the jobs
STUCK_S = 4.0  # the same for the job that the watchdog must end
EXIT_STUCK = 17  # of a job that the watchdog ended
LARGE = "gpt-1b"  # a model of scripts/bench/step.py
BLOCK_MB = 12 * GPU_GPT.channels**2 * torch.bfloat16.itemsize / 2**20  # the gathered parameters of one of its blocks
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}  # for two ranks on one GPU
SHARES_GPUS = 23000  # the first NCCL version that supports it


@dataclass(frozen=True, slots=True)
class Part:
    """Checks in one or more processes. run: yields their results; its argument is the time limit in seconds."""

    name: str
    ranks: int
    limit_s: float
    run: Callable[[float], Iterator[Result]]


class Checker:
    """Runs parts one after the other and keeps their results in a file of `folder`.

    gpus: how many to use; on the host, ranks.   total_s: for all parts.
    """

    def __init__(self, device: str, gpus: int, folder: Path) -> None:
        self.device = device
        self.gpus = gpus
        self.results: list[Result] = []
        self.path = folder / f"{slug(_gpu_name(device), gpus)}.json"
        self.total_s = TOTAL_S
        self._versions = _versions(device)
        self._start = time.monotonic()

    def run(self, part: Part) -> None:
        """Keep and print the results of the part as they come, and one more if it raises."""
        start = time.monotonic()
        limit = min(part.limit_s, self.total_s - (start - self._start))
        try:
            if limit < min(LEAST_S, part.limit_s):
                self._add(Result(part.name, part.ranks, Outcome.FAILED, 0.0, "no time was left"))
            else:
                for result in part.run(limit):
                    self._add(result)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not isinstance(error.code, str):
                raise  # a signal: a failed job exits with a text, not a number
            seconds = round(time.monotonic() - start, 1)
            self._add(Result(part.name, part.ranks, Outcome.FAILED, seconds, str(error) or repr(error)))

    def _add(self, result: Result) -> None:
        self.results.append(result)
        self._keep()
        print(f"[{time.monotonic() - self._start:4.0f} s] {result}", flush=True)

    def _keep(self) -> None:
        """Write all results to the file, which is whole at any time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        with draft.open("w") as file:
            file.write(json.dumps(self.summary(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)

    def summary(self) -> dict[str, object]:
        """All results so far."""
        counts = Counter(result.outcome.value for result in self.results)
        return {
            "gpu": _gpu_name(self.device),
            "gpus": self.gpus,
            "date": datetime.date.today().isoformat(),
            "versions": self._versions,
            "seconds": round(time.monotonic() - self._start),
            **{outcome.value: counts[outcome.value] for outcome in Outcome},
            "results": [asdict(result) for result in self.results],
        }

    # ------------------------------------------------------------------ what parts run

    def suite(self, suite: str, ranks: int, limit: float, **environment: str) -> Iterator[Result]:
        """Run a suite's checks on `ranks` ranks."""
        launcher = mpirun(ranks) if ranks > 1 else [sys.executable]
        command = [*launcher, str(SCRIPT), "--device", self.device, "--suite", suite]
        for line in follow_job(command, limit, SHARDRT_TIMEOUT=f"{min(OPERATION_S, limit / 2):g}", **environment):
            if line.startswith(PREFIX):
                yield Result.parse(line)

    def together(self, suite: str, ranks: int, limit: float) -> Iterator[Result]:
        """Run a suite's checks on ranks with a GPU each; a single GPU is shared by two ranks, if its NCCL supports that."""
        environment: dict[str, str] = {}
        try:
            find_site(Launcher.MPIRUN, os.environ)
        except LaunchError as error:
            yield Result(suite, ranks, Outcome.SKIPPED, 0.0, str(error))
            return
        if self.device == "cuda" and self.gpus < ranks:
            found = nccl_version()
            if found < SHARES_GPUS:
                note = f"two ranks on one GPU need NCCL {SHARES_GPUS} (2.30), found {found}: install a newer nvidia-nccl"
                yield Result(suite, ranks, Outcome.SKIPPED, 0.0, note)
                return
            environment = SHARED_GPU
        yield from self.suite(suite, ranks, limit, **environment)

    def stuck(self, limit: float) -> Iterator[Result]:
        """The watchdog must end a job whose kernel does not end, and name the collective."""
        if self.device == "cpu":
            yield Result("stuck", 1, Outcome.SKIPPED, 0.0, "a host has no kernel that does not end")
            return
        command = [sys.executable, str(SCRIPT), "--device", self.device, "--suite", "stuck"]
        start, end = time.monotonic(), "exit code 0"
        try:
            run_job(command, limit, SHARDRT_TIMEOUT=f"{STUCK_S:g}")
        except SystemExit as error:
            if not isinstance(error.code, str):
                raise  # a signal to this process
            end = error.code
        outcome, note = Outcome.OK, ""
        if not end.startswith(f"exit code {EXIT_STUCK}:") or not re.search(r"waited .* in #\d+ all_gather", end):
            outcome, note = Outcome.FAILED, f"expected exit code {EXIT_STUCK} and the all_gather's name; found {end}"
        yield Result("stuck", 1, outcome, round(time.monotonic() - start, 1), note)

    def tests(self, limit: float) -> Iterator[Result]:
        """The tests marked `gpu`. Other files are left out: some import packages that this environment may lack."""
        start, last = time.monotonic(), ""
        files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-c", str(ROOT / "setup.cfg")]
        command += ["-o", f"faulthandler_timeout={max(1.0, limit - 2 * GRACE_S):g}"]
        for line in follow_job([*command, *files], limit):
            last = line.strip() or last
        yield Result("pytest -m gpu", 1, Outcome.OK, round(time.monotonic() - start, 1), last)

    def bench(self, model: str, ranks: int, limit: float) -> Iterator[Result]:
        """Time a step of shardrt, of FSDP2, and of lone processes."""
        options = ["--device", self.device, "--models", model, "--ranks", str(ranks), "--rounds", "1", "--fused"]
        options += ["--no-host-time", "--steps", "20" if self.device == "cuda" else "3"]
        command = [sys.executable, str(ROOT / "scripts" / "bench" / "step.py"), *options]
        start, last = time.monotonic(), ""
        for line in follow_job(command, limit):
            last = line.strip() or last
        (measured,) = json.loads(last)["results"]
        yield Result.of(f"bench {model}", ranks, time.monotonic() - start, self.compare_with_fsdp2(measured))

    def compare_with_fsdp2(self, measured: dict[str, Any]) -> Found:
        """The figures of one result of bench/step.py, with their goals."""
        ms, host, peak = measured["ms"], measured["host_ms"], measured["peak_mb"]
        agreement = measured["agreement"]["fsdp2"]
        assert not agreement.startswith("DIFFER"), f"losses {agreement} from FSDP2's"
        found = Found(f"losses {agreement}")
        large, goals = measured["model"] == LARGE, self.device == "cuda"
        found.figure("ms", ms["shardrt"])
        found.figure("ms by FSDP2", ms["shardrt"] / ms["fsdp2"], most=0.9 if goals else None)
        if measured["ranks"] == 1:  # among several, a rank's host also waits for others, and a lone process does not
            by_host = (host["shardrt"] - host["lone"]) / (host["fsdp2"] - host["lone"])
            found.figure("host by FSDP2", by_host, most=0.5 if goals and not large else None)
        found.figure("peak MiB", peak["shardrt"])
        gathers = measured["ranks"] > 1  # FSDP2 alone gathers nothing, and so has no second copy of a block
        least = BLOCK_MB if goals and large and gathers else None
        found.figure("MiB below FSDP2", peak["fsdp2"] - peak["shardrt"], least=least)
        found.figure("reserved MiB below FSDP2", measured["reserved_mb"]["fsdp2"] - measured["reserved_mb"]["shardrt"])
        return found


def slug(name: str, gpus: int) -> str:
    """The name of a file for results of so many GPUs of this name."""
    text = re.sub(r"\W+", "-", name.lower()).strip("-")
    return text if gpus == 1 else f"{gpus}-{text}"


def _gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "host"


def _versions(device: str) -> dict[str, object]:
    found: dict[str, object] = {"shardrt": shardrt.__version__, "torch": torch.__version__}
    if device == "cuda":
        import cupy

        found |= {"cuda": torch.version.cuda, "cupy": cupy.__version__, "nccl": nccl_version()}
    return found


def nccl_version() -> int:
    """As NCCL writes it, 23004 for 2.30.4; 0 without CuPy."""
    try:
        from cupy.cuda.nccl import get_version
    except ImportError:
        return 0
    return cast(int, get_version())

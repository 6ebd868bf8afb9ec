"""Time a training step: shardrt, PyTorch FSDP2 on gloo, and the floor, where no rank talks to another.

    python scripts/bench_step.py --models gpt mlp tiny --ranks 2 4

Each measurement is a job of its own: `mpirun` for shardrt, torch's own launcher for FSDP2, and for the
floor as many lone processes, so that the cores are as busy. The jobs take turns, round after round, so
that what else the machine does hits all alike. Both sides shard the same modules of the same model, see
the same batches, and step the same AdamW; their losses are compared step by step.

A step is forward, backward and optimizer; batches are made before. Its time is the mean over the
ranks, and what is reported is the median over the steps of all rounds. Peak memory is the most that
any rank's process ever had resident. Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from models import BYTES, GPT, MLP, GPTConfig, TinyStack, next_byte_loss, shard
from options import Parser, at_least, refuse

# ---------------------------------------------------------------------- what is trained

Batch = tuple[torch.Tensor, torch.Tensor]
GPT_SHAPE = GPTConfig(layers=6, heads=6, channels=384, context=256)


def gpt_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(BYTES, (4, GPT_SHAPE.context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rows_batch(rows: int, width: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        inputs = torch.randn(rows, width, generator=generator)
        return inputs, torch.randn(rows, 1, generator=generator)

    return make


@dataclass(frozen=True, slots=True)
class Case:
    """A model, one rank's batch for it, and the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


CASES = {
    "gpt": Case(lambda: GPT(GPT_SHAPE), gpt_batch, next_byte_loss),
    "mlp": Case(lambda: MLP(layers=6, width=2048), rows_batch(8, 2048), F.mse_loss),
    "tiny": Case(lambda: TinyStack(layers=100, width=32), rows_batch(8, 32), F.mse_loss),
}

# ---------------------------------------------------------------------- one rank of one job

WARMUP = 3  # steps that allocate and record; not timed


@dataclass(frozen=True, slots=True)
class Timing:
    """What one rank measured."""

    seconds: list[float]  # per timed step
    losses: list[float]  # per step, warm-up included
    start_mb: float  # resident before the model was built
    peak_mb: float


def time_steps(case: Case, model: nn.Module, rank: int, steps: int, start_mb: float) -> Timing:
    generator = torch.Generator().manual_seed(1 + rank)
    batches = [case.batch(generator) for _ in range(WARMUP + steps)]
    optimizer = torch.optim.AdamW(model.parameters())
    seconds, losses = [], []
    for inputs, targets in batches:
        start = time.perf_counter()
        loss = case.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Timing(seconds[WARMUP:], losses, start_mb, resident_mb("VmHWM"))


def resident_mb(field: str) -> float:
    """Memory of this process: VmRSS is what it holds now, VmHWM the most it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def shardrt_worker(case: Case, steps: int) -> tuple[int, Timing]:
    import shardrt

    world = shardrt.init("cpu")
    start_mb = resident_mb("VmRSS")
    model = case.build()
    shard(model, shardrt.fully_shard)
    world.barrier()
    timing = time_steps(case, model, world.rank, steps, start_mb)
    shardrt.finalize()
    return world.rank, timing


def fsdp2_worker(case: Case, steps: int) -> tuple[int, Timing]:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    start_mb = resident_mb("VmRSS")
    model = case.build()
    shard(model, lambda module: fully_shard(module, mesh=mesh))
    distributed.barrier()
    rank = distributed.get_rank()
    timing = time_steps(case, model, rank, steps, start_mb)
    distributed.destroy_process_group()
    return rank, timing


def floor_worker(case: Case, steps: int) -> tuple[int, Timing]:
    """The whole model on every rank; MPI only lets them start together."""
    from mpi4py import MPI

    start_mb = resident_mb("VmRSS")
    model, rank = case.build(), MPI.COMM_WORLD.Get_rank()
    MPI.COMM_WORLD.Barrier()
    return rank, time_steps(case, model, rank, steps, start_mb)


WORKERS = {"shardrt": shardrt_worker, "fsdp2": fsdp2_worker, "floor": floor_worker}

# ---------------------------------------------------------------------- host time


def host_worker(steps: int) -> float:
    """Microseconds of host time per group for forward plus backward, collectives excluded.

    Measured on the tiny blocks in a world of one rank, where a collective is at most a copy of a few
    kilobytes: what the sharded model takes longer than the same model as it is, by its groups.
    """
    import shardrt

    shardrt.init("cpu")
    case = CASES["tiny"]
    plain, sharded = case.build(), case.build()
    shard(sharded, shardrt.fully_shard)
    inputs, targets = case.batch(torch.Generator().manual_seed(0))

    def forward_backward(model: nn.Module) -> float:
        start = time.perf_counter()
        case.loss(model(inputs), targets).backward()
        seconds = time.perf_counter() - start
        model.zero_grad()
        return seconds

    pairs = [(forward_backward(sharded), forward_backward(plain)) for _ in range(WARMUP + steps)]
    groups = sum(isinstance(module, shardrt.FSDPModule) for module in sharded.modules())
    shardrt.finalize()
    return median(with_us - without for with_us, without in pairs[WARMUP:]) / groups * 1e6


# ---------------------------------------------------------------------- jobs


class JobFailed(RuntimeError):
    """A job that ended badly or not in time; carries what it said."""


def run_job(worker: str, ranks: int, arguments: Sequence[str], timeout: float) -> list[str]:
    """Start `ranks` ranks of this file as `worker`; returns what each wrote, in rank order."""
    with tempfile.TemporaryDirectory(prefix="bench_step-") as folder:
        command = [*launcher(worker, ranks), __file__, "--worker", worker, "--results", folder]
        job = subprocess.Popen(
            [*command, *arguments],
            env=os.environ | environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            said = job.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired as error:
            raise JobFailed(f"{worker} on {ranks} ranks: not done after {timeout:.0f} s") from error
        finally:
            with suppress(ProcessLookupError):  # all of the job, also what the launcher left behind
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        if job.returncode != 0:
            raise JobFailed(f"{worker} on {ranks} ranks: exit code {job.returncode}\n{said[-4000:]}")
        return [(Path(folder) / str(rank)).read_text() for rank in range(ranks)]


def launcher(worker: str, ranks: int) -> list[str]:
    if worker == "fsdp2":
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*module, "--nproc-per-node", str(ranks)]
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        refuse(f"no mpirun beside {sys.executable} or on PATH: install shardrt[mpich]")
    return [mpirun, "-n", str(ranks), sys.executable]


def environment() -> dict[str, str]:
    """One thread per rank on both sides; Open MPI may run more ranks than cores, and as root."""
    return {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }


# ---------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class Result:
    """One model at one number of ranks. Times are milliseconds, memory is MiB, both as medians or peaks over all rounds."""

    model: str
    ranks: int
    shardrt_ms: float
    fsdp2_ms: float
    floor_ms: float
    ratio_fsdp2: float  # shardrt_ms / fsdp2_ms
    ratio_floor: float
    ratio_fsdp2_rounds: list[float]
    shardrt_peak_mb: float
    fsdp2_peak_mb: float
    floor_peak_mb: float
    peak_ratio: float
    growth_ratio: float  # the same without what was resident before the model was built
    shardrt_loss: float  # at the last step, mean over ranks
    fsdp2_loss: float
    agreement: str

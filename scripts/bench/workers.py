"""The workers of scripts/bench/step.py: each trains a model on one rank of a job and measures it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from bench.memory import held_mb, peaks_mb
from bench.timing import Call, Run, Timing
from common.models import Case, next_byte_loss, shard
from common.parallel import gpt_plan

LEARNING_RATE = 1e-5  # with more, the losses of the wide MLP grow
MALLOC = Path(__file__).parents[2] / "comm" / "startup" / "malloc.py"
WARMUP = 3  # steps that allocate and record; not timed


class Optimizer(Protocol):
    """What a training loop calls."""

    def step(self) -> object: ...

    def zero_grad(self) -> object: ...


def adamw(parameters: Iterable[torch.Tensor], run: Run) -> torch.optim.AdamW:
    """The same loop on all sides. Left to itself, torch takes one parameter after another on the host."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=not run.fused, fused=run.fused)


class AdamWOfShare:
    """AdamW on this rank's share of the elements of each parameter: the work of a sharded optimizer, on a whole model."""

    def __init__(self, parameters: Iterable[nn.Parameter], rank: int, ranks: int, run: Run) -> None:
        self._whole = list(parameters)
        self._rank, self._ranks = rank, ranks
        self._shares = [nn.Parameter(self._share_of(parameter.detach())) for parameter in self._whole]
        self._optimizer = adamw(self._shares, run)

    def _share_of(self, tensor: torch.Tensor) -> torch.Tensor:
        per_rank = -(-tensor.numel() // self._ranks)
        return tensor.view(-1)[self._rank * per_rank : (self._rank + 1) * per_rank]

    def step(self) -> None:
        for whole, share in zip(self._whole, self._shares, strict=True):
            share.grad = None if whole.grad is None else self._share_of(whole.grad)
        self._optimizer.step()

    def zero_grad(self) -> None:
        for parameter in (*self._whole, *self._shares):
            parameter.grad = None


@dataclass(frozen=True, slots=True)
class Job:
    """What one rank trains. rank: decides the batches; ranks with parts of the same matrices have the same."""

    case: Case
    model: nn.Module
    optimizer: Optimizer
    rank: int
    start_mb: float

    def train(self, run: Run, take_calls: Callable[[], list[Call]] = list) -> Timing:
        """Time the steps. take_calls: returns the collectives since it was called last."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        batches = [self.case.batch(generator) for _ in range(WARMUP + run.steps)]
        on_device = [(inputs.to(run.device), targets.to(run.device)) for inputs, targets in batches]
        marks, losses, calls = [], [], []
        if run.device == "cuda":  # a whole model was built, which several ranks together never hold again
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for inputs, targets in on_device:
            start = time.perf_counter()
            loss = self.case.loss(self.model(inputs), targets)
            scored = time.perf_counter()
            loss.backward()
            reduced = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())  # host sync: the step has ended
            end = time.perf_counter()
            marks.append((end - start, scored - start, reduced - scored, end - reduced))
            calls.append(take_calls())
        seconds, forward, backward, optimizer = (list(column) for column in zip(*marks[WARMUP:], strict=True))
        peaks = peaks_mb(run.device)
        return Timing(seconds, forward, backward, optimizer, calls[WARMUP:], losses, self.start_mb, *peaks)


def build(case: Case, device: str) -> nn.Module:
    with torch.device(device):
        return case.build()


def shardrt_worker(case: Case, run: Run) -> tuple[int, Timing]:
    import shardrt

    world = shardrt.init(run.device)
    start_mb = held_mb(run.device)
    model = build(case, run.device)
    policy = shardrt.MixedPrecisionPolicy(case.param_dtype, torch.float32)
    mesh = shardrt.DeviceMesh(world.comm, (world.size // run.tp, run.tp), ("dp", "tp"))
    if run.tp > 1:
        shardrt.parallel.parallelize_module(model, mesh["tp"], gpt_plan(shardrt.parallel, shardrt))
        case = replace(case, loss=shardrt.parallel.cross_entropy)
    if run.tp == 1 or run.tp < world.size:
        make = shardrt.replicate if run.replicate else shardrt.fully_shard
        shard(model, partial(make, mesh=mesh["dp"], mp_policy=policy))
    job = Job(case, model, adamw(model.parameters(), run), mesh["dp"].rank, start_mb)
    world.barrier()
    timing = train_with_calls(job, run) if run.device == "cpu" else job.train(run)
    world.barrier()  # finalize() unmaps shared memory, which every rank has counted now
    shardrt.finalize()
    return world.rank, timing


def train_with_calls(job: Job, run: Run) -> Timing:
    """Train, and note when shardrt's collectives on the host begin and end."""
    from bench.calls import CallTimes
    from shardrt.comm.groups.control import hooked

    calls = CallTimes()
    with hooked(calls):
        return job.train(run, calls.take)


@contextmanager
def process_group(device: str) -> Iterator[int]:
    """torch.distributed, on gloo or NCCL. Yields the rank."""
    from torch import distributed

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    yield distributed.get_rank()
    distributed.destroy_process_group()


def fsdp2_worker(case: Case, run: Run) -> tuple[int, Timing]:
    from torch import distributed
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import parallel

    with process_group(run.device) as rank, parallel.loss_parallel() if run.tp > 1 else nullcontext():
        dp = distributed.get_world_size() // run.tp
        mesh = init_device_mesh(run.device, (dp, run.tp), mesh_dim_names=("dp", "tp"))
        start_mb = held_mb(run.device)
        model = build(case, run.device)
        policy = MixedPrecisionPolicy(case.param_dtype, torch.float32)
        if run.tp > 1:
            parallel.parallelize_module(model, mesh["tp"], gpt_plan(parallel, tensor))
            case = replace(case, loss=lambda *args: cast(tensor.DTensor, next_byte_loss(*args)).to_local())
        if run.tp == 1 or dp > 1:
            shard(model, partial(fully_shard, mesh=mesh["dp"], mp_policy=policy))
        job = Job(case, model, adamw(model.parameters(), run), mesh.get_local_rank("dp"), start_mb)
        distributed.barrier()
        return rank, job.train(run)


def fsdp2_comm_worker(case: Case, run: Run) -> tuple[int, Timing]:
    """FSDP2 on shardrt's communicators; CPU only."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import shardrt
    from shardrt.integrations import torch_distributed

    world = torch_distributed.init_process_group(run.device)
    mesh = init_device_mesh(run.device, (world.size,))
    start_mb = held_mb(run.device)
    model = build(case, run.device)
    shard(model, partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(case.param_dtype, torch.float32)))
    job = Job(case, model, adamw(model.parameters(), run), world.rank, start_mb)
    world.barrier()
    timing = train_with_calls(job, run)
    world.barrier()
    distributed.destroy_process_group()
    shardrt.finalize()
    return world.rank, timing


def ddp_worker(case: Case, run: Run) -> tuple[int, Timing]:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    with process_group(run.device) as rank:
        start_mb = held_mb(run.device)
        model = DistributedDataParallel(build(case, run.device))
        job = Job(case, model, adamw(model.parameters(), run), rank, start_mb)
        distributed.barrier()
        return rank, job.train(run)


def keep_freed_memory() -> None:
    """Set malloc as shardrt does, without importing shardrt, which takes 7 MiB.

    Cost: otherwise all gradients of a step lie in fresh pages: of 256 MiB of parameters, 98 000 faults and 0.27 s a step.
    """
    spec = spec_from_file_location("malloc", MALLOC)
    assert spec is not None, MALLOC
    assert spec.loader is not None, MALLOC
    malloc = module_from_spec(spec)
    spec.loader.exec_module(malloc)
    malloc.keep_freed_memory()


def lone_worker(case: Case, run: Run) -> tuple[int, Timing]:
    """A whole model on every rank, without communication but for a barrier at the start. Parameters have `param_dtype`."""
    from mpi4py import MPI

    keep_freed_memory()
    rank, ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if run.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    start_mb = held_mb(run.device)
    model = build(case, run.device).to(case.param_dtype)
    whole = run.replicate or ranks == 1
    optimizer = adamw(model.parameters(), run) if whole else AdamWOfShare(model.parameters(), rank, ranks, run)
    job = Job(case, model, optimizer, rank, start_mb)
    MPI.COMM_WORLD.Barrier()
    return rank, job.train(run)


WORKERS = {
    "shardrt": shardrt_worker,
    "fsdp2": fsdp2_worker,
    "fsdp2-comm": fsdp2_comm_worker,
    "ddp": ddp_worker,
    "lone": lone_worker,
}
TORCHRUN = ("fsdp2", "ddp", "host-fsdp2")  # started by torch's launcher

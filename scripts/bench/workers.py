"""The workers of scripts/bench/step.py: each trains a model on one rank of a job and measures it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import cast

import torch
from torch import nn

from common.models import CASES, Case, next_byte_loss, shard
from common.parallel import gpt_plan

WARMUP = 3  # steps that allocate and record; not timed


@dataclass(frozen=True, slots=True)
class Run:
    """The options of one job."""

    device: str
    steps: int  # timed, after WARMUP
    fused: bool  # AdamW's fused loop
    tp: int = 1  # tensor-parallel ranks


@dataclass(frozen=True, slots=True)
class Timing:
    """The measurements of one rank."""

    seconds: list[float]  # per timed step
    host_seconds: list[float]  # per timed step, until backward() returned: on a GPU, without waiting for the device
    losses: list[float]  # per step, warm-up included
    start_mb: float  # in use before the model was built
    peak_mb: float
    reserved_mb: float  # on a GPU with the memory that torch's allocator cached; otherwise peak_mb


def time_steps(case: Case, model: nn.Module, rank: int, run: Run, start_mb: float) -> Timing:
    """rank: decides the batches. Ranks with parts of the same matrices must pass the same."""
    generator = torch.Generator().manual_seed(1 + rank)
    batches = [case.batch(generator) for _ in range(WARMUP + run.steps)]
    on_device = [(inputs.to(run.device), targets.to(run.device)) for inputs, targets in batches]
    optimizer = torch.optim.AdamW(model.parameters(), fused=run.fused)
    seconds, host_seconds, losses = [], [], []
    for inputs, targets in on_device:
        start = time.perf_counter()
        loss = case.loss(model(inputs), targets)
        loss.backward()
        host_seconds.append(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # host sync: the step has ended
        seconds.append(time.perf_counter() - start)
    return Timing(seconds[WARMUP:], host_seconds[WARMUP:], losses, start_mb, *peaks_mb(run.device))


def build(case: Case, device: str) -> nn.Module:
    with torch.device(device):
        return case.build()


def held_mb(device: str) -> float:
    """This process's resident memory in MiB; with CUDA, the memory in use on the GPU."""
    if device == "cpu":
        return _status_mb("VmRSS")
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def peaks_mb(device: str) -> tuple[float, float]:
    """Peak memory in MiB; the second figure includes the memory that torch's allocator cached, since a pool keeps its blocks.

    With CUDA, the memory outside torch's allocator is measured now, not at the peak.
    """
    if device == "cpu":
        return (_status_mb("VmHWM"),) * 2
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (most[0] + outside) / 2**20, (most[1] + outside) / 2**20


def _status_mb(field: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1024


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
        shard(model, partial(shardrt.fully_shard, mesh=mesh["dp"], mp_policy=policy))
    world.barrier()
    timing = time_steps(case, model, mesh["dp"].rank, run, start_mb)
    shardrt.finalize()
    return world.rank, timing


def fsdp2_worker(case: Case, run: Run) -> tuple[int, Timing]:
    from torch import distributed
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import parallel

    if run.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("gloo" if run.device == "cpu" else "nccl")
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
    distributed.barrier()
    rank = distributed.get_rank()
    with parallel.loss_parallel() if run.tp > 1 else nullcontext():
        timing = time_steps(case, model, mesh.get_local_rank("dp"), run, start_mb)
    distributed.destroy_process_group()
    return rank, timing


def floor_worker(case: Case, run: Run) -> tuple[int, Timing]:
    """An unsharded model on every rank, without communication but for a barrier at the start. Parameters have `param_dtype`."""
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    if run.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    start_mb = held_mb(run.device)
    model = build(case, run.device)
    model.to(case.param_dtype)
    MPI.COMM_WORLD.Barrier()
    return rank, time_steps(case, model, rank, run, start_mb)


WORKERS = {"shardrt": shardrt_worker, "fsdp2": fsdp2_worker, "floor": floor_worker}

# ---------------------------------------------------------------------- host time


@dataclass(frozen=True, slots=True)
class HostTime:
    """Microseconds of host time per group for forward plus backward, collectives excluded."""

    median_us: float
    best_us: float  # from the fastest steps, which other load disturbs least


def host_worker(steps: int) -> HostTime:
    """Measure the tiny model in a world of one rank, alternating with an unsharded copy.

    The result is the extra time of the sharded model, without the time inside collective calls,
    divided by the number of groups.
    """
    import shardrt
    from shardrt.comm import Communicator

    inside = [0.0]

    def timed(collective: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            start, before = time.perf_counter(), inside[0]
            work = collective(*args, **kwargs)
            inside[0] = before + time.perf_counter() - start  # a collective may call another
            return work

        return call

    for name in ("all_gather", "reduce_scatter", "_run"):  # _run runs a group of calls at its end
        setattr(Communicator, name, timed(getattr(Communicator, name)))

    shardrt.init("cpu")
    case = CASES["tiny"]
    plain, sharded = case.build(), case.build()
    shard(sharded, shardrt.fully_shard)
    inputs, targets = case.batch(torch.Generator().manual_seed(0))

    def forward_backward(model: nn.Module) -> float:
        inside[0] = 0.0
        start = time.perf_counter()
        case.loss(model(inputs), targets).backward()
        seconds = time.perf_counter() - start - inside[0]
        model.zero_grad()
        return seconds

    pairs = [(forward_backward(sharded), forward_backward(plain)) for _ in range(WARMUP + steps)]
    groups = sum(isinstance(module, shardrt.FSDPModule) for module in sharded.modules())
    shardrt.finalize()
    sharded_s, plain_s = zip(*pairs[WARMUP:], strict=True)
    extra = median(ours - theirs for ours, theirs in zip(sharded_s, plain_s, strict=True))
    return HostTime(extra / groups * 1e6, (min(sharded_s) - min(plain_s)) / groups * 1e6)

"""A few steps of sharded training compared with unsharded training; allocations, host syncs and overlap of a step."""

from __future__ import annotations

import copy
import json
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import nn

import shardrt
from common.models import BYTES, GPT, GPTConfig, next_byte_loss, shard
from gpu.checks import Found
from shardrt.comm import Stream, World, current_stream
from shardrt.fsdp.param_group import ParamGroup
from shardrt.fsdp.runtime import Runtime

STEPS = 3
FLOAT32 = shardrt.MixedPrecisionPolicy()
BFLOAT16 = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)

# ---------------------------------------------------------------------- odd sizes, every way to shard


def training(world: World) -> None:
    train(world)


def training_replicas(world: World) -> None:
    train(world, mesh=shardrt.DeviceMesh(world.comm, (world.size, 1), ("replicate", "shard")))


def training_offloaded(world: World) -> None:
    train(world, offload_policy=shardrt.CPUOffloadPolicy())


def training_post_forward_shard(world: World) -> None:
    train(world, reshard_after_forward=1)


def training_comm_memory(world: World) -> Found:
    train(world, comm_memory=True)
    return Found("NCCL's own memory" if world.mesh.communicator("gather").pool() else "plain memory")


def train(world: World, *, comm_memory: bool = False, **options: Any) -> None:
    """Compare norms and parameters of layers of odd sizes, with clipped gradients."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 33)) for _ in range(3))
    plain = nn.Sequential(nn.Linear(5, 33), *blocks, nn.Linear(33, 3)).to(world.device)
    sharded = copy.deepcopy(plain)
    for block in (*list(sharded)[1:-1], sharded):
        made = cast(shardrt.FSDPModule, shardrt.fully_shard(block, **options))
        made.set_allocate_memory_from_process_group_for_comm(comm_memory)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    norms = []
    for batch in torch.randn(STEPS, world.size, 8, 5).to(world.device):
        plain(batch).square().mean().backward()
        sharded(batch[world.rank]).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        norms.append(shardrt.clip_grad_norm_(sharded.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(norms[1::2], norms[::2])
    torch.testing.assert_close(full(sharded), [param.detach() for param in plain.parameters()])


def full(model: nn.Module) -> list[torch.Tensor]:
    """The full parameters of a sharded model. Collective."""
    return [cast(shardrt.DTensor, param).full_tensor() for param in model.parameters()]


def random_numbers(world: World) -> None:
    """A model built on the meta device and initialized shard by shard is the same on a mesh of all ranks and of one."""
    alone = world.comm.split(world.rank, 0, "alone")
    assert alone is not None, "every rank passed a colour"
    made = []
    for mesh in (world.mesh, shardrt.DeviceMesh(alone)):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Linear(33, 129)
        shardrt.fully_shard(model, mesh=mesh).to_empty(device=world.device)
        model.reset_parameters()
        made.append(full(model))
        model(torch.ones(2, 33, device=world.device)).sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True)), "they differ"


def training_quantized(world: World) -> Found:
    """Weights and gradients that travel as codes are near those of one process; those of the biases travel whole."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(512, 96), nn.GELU(), nn.Linear(96, 512)).to(world.device)
    sharded, start = copy.deepcopy(plain), copy.deepcopy(plain)
    policy = shardrt.QuantizationPolicy(gather=torch.int8, reduce=torch.int8, min_numel=1024)
    shardrt.fully_shard(sharded, quantization_policy=policy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    for batch in torch.randn(STEPS, world.size, 8, 512).to(world.device):
        plain(batch).square().mean().backward()
        sharded(batch[world.rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return compare_moved(0.05, plain, sharded, start)


# ---------------------------------------------------------------------- a GPT


def gpt_float32(world: World) -> Found:
    return compare_gpt(world, 1e-4, FLOAT32)


def gpt_bfloat16(world: World) -> Found:
    return compare_gpt(world, 2e-2, BFLOAT16)


def gpt_compiled_float32(world: World) -> Found:
    return _without_compiler() or compare_gpt(world, 1e-3, FLOAT32, compiled=True)


def gpt_compiled_bfloat16(world: World) -> Found:
    return _without_compiler() or compare_gpt(world, 5e-2, BFLOAT16, compiled=True)


def _without_compiler() -> Found | None:
    """A skip with the reason, if torch.compile cannot work here."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return Found(skipped="no C compiler on the PATH")
    return None if header.exists() else Found(skipped=f"no {header}")


def compare_gpt(world: World, tolerance: float, policy: shardrt.MixedPrecisionPolicy, *, compiled: bool = False) -> Found:
    """Train a GPT; tolerance: see `compare_moved`."""
    config = GPTConfig(layers=3, heads=4, channels=128, context=64)
    plain, sharded, start = (GPT(config).to(world.device) for _ in range(3))
    for block in sharded.blocks if compiled else ():
        block.compile()
    shard(sharded, lambda module: shardrt.fully_shard(module, mp_policy=policy))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        batches = torch.randint(BYTES, (world.size, 4, config.context + 1), generator=generator).to(world.device)
        loss = torch.stack([cast_loss(plain, batch, policy.param_dtype) for batch in batches]).mean()
        loss.backward()
        next_byte_loss(sharded(batches[world.rank, :, :-1]), batches[world.rank, :, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return compare_moved(tolerance, plain, sharded, start)


def compare_moved(tolerance: float, plain: nn.Module, sharded: nn.Module, start: nn.Module) -> Found:
    """tolerance: the allowed distance of the parameters, relative to the distance that training moved them from `start`."""
    apart, moved = distance(full(sharded), list(plain.parameters())), distance(plain.parameters(), start.parameters())
    found = Found()
    found.figure("apart", apart / moved)
    assert apart <= tolerance * moved, f"{apart:.2e} from the unsharded parameters, which moved {moved:.2e}"
    return found


def cast_loss(model: nn.Module, batch: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    params = {name: param.to(dtype or param.dtype) for name, param in model.named_parameters()}
    return next_byte_loss(torch.func.functional_call(model, params, batch[:, :-1]), batch[:, 1:])


@torch.no_grad()
def distance(some: Any, others: Any) -> float:
    return float(torch.stack([(a - b).double().norm() for a, b in zip(some, others, strict=True)]).norm())


# ---------------------------------------------------------------------- the steady state


class Job:
    """A GPT in the steady state, on the caller's stream: buffers are allocated, the execution order is recorded."""

    def __init__(self, world: World) -> None:
        on_gpu = world.device.type == "cuda"
        self.world = world
        self.config = GPTConfig(layers=8, channels=1024, heads=16, context=512) if on_gpu else GPTConfig()
        self.model = GPT(self.config).to(world.device)
        shard(self.model, lambda module: shardrt.fully_shard(module, mp_policy=BFLOAT16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randint(BYTES, (8, self.config.context + 1), device=world.device)
        for _ in range(4):
            self.step()

    def loss(self) -> torch.Tensor:
        """The loss of a forward."""
        return next_byte_loss(self.model(self.batch[:, :-1]), self.batch[:, 1:])

    def step(self) -> None:
        """Forward, backward, clip, optimizer, without a host sync."""
        self.loss().backward()
        shardrt.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def allocations(world: World) -> Found:
    """In the steady state a step allocates no device memory, and buffers in use do not grow."""
    job, seen, held = Job(world), [], []
    runtime = cast(shardrt.FSDPModule, job.model).param_group.runtime
    assert runtime is not None, "it has run"
    for _ in range(4):
        job.step()
        memory = torch.cuda.memory_stats() if world.device.type == "cuda" else {}
        allocs = [memory.get(f"num_device_{verb}", 0) for verb in ("alloc", "free")]
        seen.append((runtime.memory.in_use, runtime.memory.peak, *allocs))
        held.append(memory.get("allocated_bytes.all.current", 0))
    assert len(set(seen)) == 1, f"buffer bytes in use, their peak, device allocations or frees change between steps: {seen}"
    found = Found()
    found.figure("bytes grown", held[-1] - held[0])  # of all tensors, including small tables of addresses
    return found


def no_host_sync(world: World) -> Found:
    """A step never makes the host wait for the device."""
    if world.device.type == "cpu":
        return Found(skipped="a host has no device to wait for")
    job = Job(world)
    torch.cuda.set_sync_debug_mode("error")
    try:
        job.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Found()


def streams(world: World) -> Found:
    """A step on a side stream does not use the default stream, and its gathers and reductions overlap with compute."""
    if world.device.type == "cpu":
        return Found(skipped="there are no CUDA streams")
    found, compute = Found(), torch.cuda.Stream(world.device)
    with torch.cuda.stream(compute):
        job = Job(world)
        with traced() as on_default, torch.cuda.stream(torch.cuda.default_stream(world.device)):
            torch.zeros(1, device=world.device)
        with traced() as on_compute:
            torch.zeros(1, device=world.device)
        with traced() as step:
            torch.cuda._sleep(50_000_000)  # cycles: the host gets ahead, so that the device never waits for it
            job.step()
    (default,), (own,) = ({stream for stream, _, _ in spans} for spans in (on_default, on_compute))
    stray = sum(stream == default for stream, _, _ in step)
    assert not stray, f"{stray} of {len(step)} kernels and copies ran on the legacy default stream"
    beside = [(start, end) for stream, start, end in step if stream != own]
    hidden = _hidden(beside, [(start, end) for stream, start, end in step if stream == own])
    assert beside, "no kernel ran on another stream than compute"
    found.figure("under compute", hidden / sum(end - start for start, end in beside), least=0.5)
    assert hidden > 0, f"none of {len(beside)} gathers and reductions ran while compute did"
    return found


def timeline(world: World) -> Found:
    """The spans of a step, and what recording them costs."""
    job = Job(world)
    start = time.perf_counter()
    job.step()
    world.barrier()
    alone = time.perf_counter() - start
    with shardrt.Timeline() as recorded:
        start = time.perf_counter()
        job.step()
        world.barrier()
        beside = time.perf_counter() - start
    forwards = [span for span in recorded.events.spans if span.name == "forward"]
    assert len(forwards) == job.config.layers + 1, f"{len(forwards)} forwards of {job.config.layers} blocks and the root"
    assert all(arrow.source.start <= arrow.target.end for arrow in recorded.events.arrows), "a gather after its use"
    assert recorded.events.arrows, "no gather leads to its use"
    busy = sum(span.end - span.start for span in forwards[1:])
    assert 0 < busy < beside, f"forwards of {busy:.3f} s in a step of {beside:.3f} s"
    found = Found()
    found.figure("ms", beside * 1e3)
    found.figure("ms without", alone * 1e3)
    return found


class Mark:
    """The time at which a stream reaches a point: a CUDA event, or the clock on the host."""

    def __init__(self, stream: Stream) -> None:
        self._at = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if stream.device.type == "cuda" else None
        if self._event is not None:
            stream.submit(self._event.record)

    def since(self, first: Mark) -> float:
        """Milliseconds from `first` to this mark. Both must have passed."""
        if self._event is None or first._event is None:
            return (self._at - first._at) * 1e3
        return first._event.elapsed_time(self._event)


def overlap(world: World) -> Found:
    """Time each gather and each block of a forward: gathers run while blocks compute."""
    on_gpu, gather_ahead = world.device.type == "cuda", Runtime.gather_ahead
    with torch.cuda.stream(torch.cuda.Stream(world.device)) if on_gpu else nullcontext():
        job, gathers, blocks = Job(world), list[tuple[Mark, Mark]](), list[tuple[Mark, Mark]]()
        compute, begun = current_stream(world.device), list[Mark]()

        def marked(runtime: Runtime, groups: list[ParamGroup], label: str) -> None:
            begin = Mark(runtime.streams.gather)
            gather_ahead(runtime, groups, label)
            if groups:
                gathers.append((begin, Mark(runtime.streams.gather)))

        for block in job.model.blocks:
            block.register_forward_pre_hook(lambda *_: begun.append(Mark(compute)))
            block.register_forward_hook(lambda *_: blocks.append((begun.pop(), Mark(compute))))
        with mock.patch.object(Runtime, "gather_ahead", marked):
            if on_gpu:
                torch.cuda._sleep(50_000_000)  # cycles: the host gets ahead, as above
            first = Mark(compute)
            job.loss()
    if on_gpu:
        torch.cuda.synchronize(world.device)
    assert gathers, "nothing was gathered ahead"
    spans = [[(begin.since(first), end.since(first)) for begin, end in pairs] for pairs in (gathers, blocks)]
    hidden, total = _hidden(*spans), sum(end - begin for begin, end in spans[0])
    found = Found()
    found.figure("ms of gathers", total)
    found.figure("under compute", hidden / total, least=0.5 if on_gpu else None)
    assert hidden > 0 or not on_gpu, f"none of {len(gathers)} gathers ran while one of {len(blocks)} blocks computed"
    return found


def _hidden(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The time in `some` that lies in `others`, which do not overlap each other."""
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in some for b, e in others)


Span = tuple[int, float, float]  # stream, start and end in microseconds


@contextmanager
def traced() -> Iterator[list[Span]]:
    """The kernels and copies of the device in the `with` block; the list is filled at its end."""
    spans: list[Span] = []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield spans
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans += [(event["args"]["stream"], event["ts"], event["ts"] + event["dur"]) for event in on_device]


def stuck(world: World) -> None:
    """A collective behind a kernel that does not end in time; the watchdog ends the job, so it needs a separate one."""
    stream, values = world.stream_for("check"), torch.ones(4 * world.size, device=world.device)
    own = values[:4].clone()
    stream.wait(world.stream.record())
    stream.submit(lambda: torch.cuda._sleep(2 * 10**11))  # cycles: more than a minute
    world.comm.all_gather(values, own, stream=stream).synchronize()


PARITY: tuple[Callable[[World], Found | None], ...] = (
    training,
    training_replicas,
    training_offloaded,
    training_post_forward_shard,
    training_comm_memory,
    training_quantized,
    random_numbers,
    gpt_float32,
    gpt_bfloat16,
)
COMPILED = (gpt_compiled_float32, gpt_compiled_bfloat16)
REPLAY = (allocations, no_host_sync, streams, overlap, timeline)

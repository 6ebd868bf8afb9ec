"""The steady state of a training step: allocations, host syncs, streams and overlap; a collective that is stuck."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast
from unittest import mock

import torch

import shardrt
from common.models import BYTES, GPT, GPTConfig, next_byte_loss, shard
from gpu.checks import Check, Found
from gpu.training import BFLOAT16
from shardrt.comm import Stream, World, current_stream
from shardrt.fsdp.base.events import Step
from shardrt.fsdp.schedule.param_group import ParamGroup
from shardrt.fsdp.schedule.runtime import Runtime

CONFIGS = {"cuda": GPTConfig(layers=8, channels=1024, heads=16, context=512), "cpu": GPTConfig(context=16)}


class Job:
    """A GPT in the steady state, on the caller's stream: buffers are allocated, the execution order is recorded."""

    def __init__(self, world: World, *, symmetric: bool = False) -> None:
        """symmetric: all groups use NCCL's symmetric windows."""
        self.world = world
        self.config = CONFIGS[world.device.type]
        self.model = GPT(self.config).to(world.device)
        shard(self.model, lambda module: shardrt.fully_shard(module, mp_policy=BFLOAT16))
        self.sharded = cast(shardrt.FSDPModule, self.model)
        for module in self.model.modules():
            if symmetric and isinstance(module, shardrt.FSDPModule):
                module.set_symm_mem_for_comm()
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

    def step_ms(self) -> float:
        """Milliseconds of a step, from one synchronisation of this rank's device to the next."""
        self.world.barrier()
        start = time.perf_counter()
        self.step()
        self.world.stream.synchronize()
        return (time.perf_counter() - start) * 1e3


def allocations(world: World) -> Found:
    """In the steady state a step allocates no device memory, and buffers in use do not grow."""
    job, seen, held = Job(world), [], []
    runtime = job.sharded.param_group.runtime
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
    assert recorded.events.arrows or world.size == 1, "no gather leads to its use"  # alone, nothing is gathered
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

        def marked(runtime: Runtime, groups: list[ParamGroup], step: Step) -> None:
            begin = Mark(runtime.streams.gather)
            gather_ahead(runtime, groups, step)
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


def exposed_ms(step: list[Span], compute: set[int]) -> float:
    """Milliseconds in which other streams run something and those of `compute` run nothing."""
    covered = _union((start, end) for stream, start, end in step if stream in compute)
    return (_union((start, end) for _, start, end in step) - covered) / 1e3


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """The time in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def stuck(world: World) -> None:
    """A collective behind a kernel that does not end in time; the watchdog ends the job, so it needs a separate one."""
    stream, values = world.stream_for("check"), torch.ones(4 * world.size, device=world.device)
    own = values[:4].clone()
    stream.wait(world.stream.record())
    stream.submit(lambda: torch.cuda._sleep(2 * 10**11))  # cycles: more than a minute
    world.comm.all_gather(values, own, stream=stream).synchronize()


REPLAY: tuple[Check, ...] = (allocations, no_host_sync, streams, overlap, timeline)

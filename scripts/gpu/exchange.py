"""Ranks with a GPU each: the bandwidth of every collective beside the library's own calls, and how collectives hide.

Bandwidths are bus bandwidths as nccl-tests defines them; the sizes lie on both sides of the thresholds of NCCL's protocols and
of shardrt's buckets (1 MiB). On the host MPI takes the place of NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from unittest import mock

import torch

from gpu.checks import Check, Found
from gpu.steady import Job, Mark, exposed_ms, traced
from shardrt.comm import ReduceOp, Stream, World, new_stream
from shardrt.comm.startup import bootstrap
from shardrt.comm.stress.names import COLLECTIVES
from shardrt.comm.stress.options import parse
from shardrt.comm.stress.sweeps.peers import make_peer
from shardrt.comm.stress.sweeps.sweep import Row, Sweep

GOAL = 1.05  # of the largest size: the time by that of the library's own call
SIZES = {"cuda": ("64K", "256M"), "cpu": ("4K", "2M")}  # the smallest and the largest
# The width of matrix products, and elements of a rank's block, that run beside each other.
BESIDE = {"cuda": (8192, 1 << 26), "cpu": (256, 1 << 18)}
OF_TRAINING = ("all_gather", "reduce_scatter", "all_reduce")
ROUNDS = 5

# ---------------------------------------------------------------------- communicators, bandwidth


def connecting(world: World) -> Found:
    """How long one more communicator takes, with its first call."""
    world.barrier()
    start = time.perf_counter()
    made = world.comm.split(0, world.rank, "check")
    assert made is not None, "every rank gave the same colour"
    token = torch.ones(1, device=world.device)
    made.all_reduce(token, token, ReduceOp.SUM, stream=world.stream).synchronize()
    seconds = time.perf_counter() - start
    made.close()
    assert token.item() == world.size, f"{token.item()} for {world.size}"
    found = Found()
    found.figure("s", max(world.comm.exchange(seconds)))
    return found


def sweep(world: World, names: Sequence[str], buffers: str, peer: str | None) -> Iterator[Row]:
    """A row for each size and operator; all elements must be right.   peer: times its calls on the same buffers, in turns."""
    first, last = SIZES[world.device.type]
    sizes = ["-b", first, "-e", last, "-f", "8"]
    options = parse([*sizes, "-n", "10", "-w", "3", "--buffers", buffers, "--ops", "sum,avg", "--collectives", ",".join(names)])
    other = None if peer is None else make_peer(peer, world)
    runs = Sweep(world, options, other)
    wrong = 0
    for name in names:
        for problem in runs.problems(name):
            row = runs.measure(problem)
            wrong += row.out_of_place.wrong + (row.in_place.wrong if row.in_place else 0)
            yield row
    runs.close()
    if other is not None:
        other.close()
    assert not wrong, f"{wrong} wrong elements"


def label(row: Row) -> str:
    """The operator, if there is one, and the size."""
    unit = next((n, letter) for n, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")) if row.size >= n)
    return f"{'' if row.redop == 'none' else row.redop + ' '}{row.size // unit[0]}{unit[1]}"


def beside_library(name: str) -> Check:
    """The check of one collective in ordinary buffers: GB/s, and the time by that of the library's own call."""

    def check(world: World) -> Found:
        on_gpu, found = world.device.type == "cuda", Found()
        rows = list(sweep(world, [name], "ordinary", "nccl" if on_gpu else "mpi4py"))
        largest = max(row.size for row in rows)
        for row in rows:
            found.figure(f"{label(row)} GB/s", row.out_of_place.busbw)
            if row.ratio is not None:
                has_goal = on_gpu and row.size == largest
                found.figure(f"{label(row)} by library", row.ratio, most=GOAL if has_goal else None)
        return found

    check.__name__ = name
    return check


def registered(world: World) -> Found:
    """The collectives of training, in buffers that NCCL knows."""
    return _in_buffers(world, "window")


def windows(world: World) -> Found:
    """The same in symmetric windows, for which NCCL has other kernels: for sums, not for averages."""
    return _in_buffers(world, "symmetric")


def _in_buffers(world: World, buffers: str) -> Found:
    found = Found("GB/s")
    for row in sweep(world, OF_TRAINING, buffers, None):
        found.figure(f"{row.collective} {label(row)}", row.out_of_place.busbw)
    return found


# ---------------------------------------------------------------------- collectives beside compute, and beside each other

Launch = tuple[Stream, Callable[[Stream], object]]


def hiding(world: World) -> Found:
    """Launch a gather and a reduction when compute is queued already, on streams with priority and without.

    hidden: of the shorter one's time. last: when the collective has ended, by the time that it takes alone.
    """
    found, compute = Found(), world.stream
    on_gpu = world.device.type == "cuda"
    width, numel = BESIDE[world.device.type]
    x = torch.randn(width, width, device=world.device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    whole, part = (torch.ones(numel * n, device=world.device, dtype=x.dtype) for n in (world.size, 1))
    gather, reduce = (world.mesh.communicator(role) for role in ("gather", "reduce"))
    source, kept = whole.clone(), part.clone()
    work = (compute, lambda stream: [x @ x for _ in range(16)])
    for priority in (-1, 0):
        streams = [new_stream(world.device, role, priority=priority) for role in ("gather", "reduce")]
        calls: list[Launch] = [
            (streams[0], lambda stream: gather.all_gather(whole, part, stream=stream)),
            (streams[1], lambda stream: reduce.reduce_scatter(kept, source, ReduceOp.SUM, stream=stream)),
        ]
        alone = [_timed(world, [call]) for call in (work, *calls)]
        pairs = {"gather": (0, 1), "reduce": (0, 2), "both": (1, 2)}
        for name, (first, second) in pairs.items():
            launches = [(work, *calls)[index] for index in (first, second)]
            total, ends = _timed(world, launches)
            shorter = min(alone[first][0], alone[second][0])
            hidden = (alone[first][0] + alone[second][0] - total) / shorter
            found.figure(f"{name} hidden at {priority}", hidden)
            if name != "both":
                found.figure(f"{name} last at {priority}", ends[-1] / alone[second][0])
        found.figure(f"gather ms at {priority}", alone[1][0])
    found.note = "priority -1 and 0"
    return found


def _timed(world: World, launches: Sequence[Launch]) -> tuple[float, list[float]]:
    """Milliseconds until all have run, and until each has; medians over the rounds, of the slowest rank."""
    rounds = []
    for _ in range(ROUNDS + 1):
        world.barrier()
        if world.device.type == "cuda":
            torch.cuda._sleep(2_000_000)  # cycles, about a millisecond: the host gets ahead
        first, begun, ends = Mark(world.stream), world.stream.record(), list[Mark]()
        for stream, launch in launches:
            if stream is not world.stream:
                stream.wait(begun)
            launch(stream)
            ends.append(Mark(stream))
        for stream, _ in launches:
            stream.synchronize()
        rounds.append([end.since(first) for end in ends])
    medians = [median(each) for each in zip(*rounds[1:], strict=True)]  # the first round warms up
    spent = [max(each) for each in zip(*world.comm.exchange(medians), strict=True)]
    return max(spent), spent


# ---------------------------------------------------------------------- a training step with and without


@contextmanager
def without_priority() -> Iterator[None]:
    """Streams that are made in the block have no priority."""
    with mock.patch.dict(bootstrap._PRIORITIES, clear=True), mock.patch.dict(bootstrap._process.streams, clear=True):
        yield


def variants(world: World) -> Found:
    """A step as it is, with streams without priority, and in symmetric windows, in turns."""
    if world.size == 1:
        return Found(skipped="one rank communicates nothing")
    Job(world)  # connects what all of them use
    jobs = {"as is": _held(world, Job)}
    with without_priority():
        jobs["priority 0"] = _held(world, Job)
    jobs["windows"] = _held(world, lambda world: Job(world, symmetric=True))
    found, times = Found(), {name: list[float]() for name in jobs}
    for _ in range(ROUNDS):
        for name, (job, _) in jobs.items():
            times[name].append(job.step_ms())
    for name, (job, outside) in jobs.items():
        found.figure(f"{name}, ms", max(world.comm.exchange(median(times[name]))))
        if world.device.type == "cuda":
            found.figure(f"{name}, MiB outside torch", outside)
            with traced() as own:
                torch.zeros(1, device=world.device)
            with traced() as spans:
                torch.cuda._sleep(50_000_000)  # cycles: the host gets ahead
                job.step()
            if spans:  # a stand-in for a GPU shows none
                found.figure(f"{name}, exposed ms", exposed_ms(spans, {stream for stream, _, _ in own}))
        runtime = job.sharded.param_group.runtime
        assert runtime is not None, "it has run"
        found.figure(f"{name}, MiB of buffers", runtime.memory.peak / 2**20)
    return found


def _held(world: World, make: Callable[[World], Job]) -> tuple[Job, float]:
    """What `make` makes, and by how many MiB the memory in use outside torch's allocator grows."""
    before = _outside_mb(world)
    job = make(world)
    return job, _outside_mb(world) - before


def _outside_mb(world: World) -> float:
    if world.device.type == "cpu":
        return 0.0
    torch.cuda.synchronize(world.device)
    free, total = torch.cuda.mem_get_info(world.device)
    return (total - free - torch.cuda.memory_reserved(world.device)) / 2**20


CHECKS: tuple[Check, ...] = (connecting, hiding, variants, *map(beside_library, COLLECTIVES), registered, windows)

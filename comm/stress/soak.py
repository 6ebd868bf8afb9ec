"""Random valid calls over random communicators, several running at once, every result checked, leaks counted.

All ranks draw the same calls from the seed, without communication. Only where a tensor lies in memory is each rank's own
choice, and no result depends on it; on GPUs all ranks choose alike, since in a call of NCCL's either all of them or none may
use registered memory (its manual, "User Buffer Registration"). After an epoch of a few steps all communicators are closed;
what the process then holds must not grow.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from .. import Communicator, PreMulSum, ReduceOp, Stream, Work, World, new_stream
from ..core.calls import FLOATS
from .names import COLLECTIVES
from .options import StressOptions
from .problem import DTYPES, ROOTED, Problem, ops_for

EPOCH = 10  # steps between two closings of all communicators
MOST_ALIVE = 4  # communicators that a rank has at once
MOST_UNDER_WAY = 6  # calls and groups that a rank has under way at once
ARENA_NBYTES = 16 << 20  # Cost: none, until pages are touched
# That a process may grow: fragments between buffers of random sizes, and the flight recorder, until it is full.
TOLERATED_MIB = 16
OPS = (*ReduceOp, PreMulSum(2.0), PreMulSum(0.5))


def prepare() -> None:
    """Keep out of the process what grows without a leak of ours. Call it before `init()`, which starts threads and MPI."""
    m_arena_max = -8
    # glibc gives each thread an arena, of which malloc_trim leaves the top: each stays as large as it ever was.
    ctypes.CDLL(None).mallopt(m_arena_max, 1)
    # UCX notes each munmap for its cache of registered memory, some 300 bytes for each window of MPI that is made and freed,
    # and forgets them only when it registers memory, which ranks of one node never do.
    os.environ.setdefault("UCX_RCACHE_ENABLE", "n")


@dataclass(slots=True)
class Lane:
    """A communicator for each colour, with its own stream; None on a rank without a colour."""

    comm: Communicator | None
    stream: Stream
    arena: torch.Tensor | None  # bytes, from comm.empty
    used: int = 0

    def close(self) -> None:
        self.stream.close()
        if self.comm is not None:
            self.comm.close()


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call and its tensors on this rank."""

    comm: Communicator
    problem: Problem
    in_place: bool
    out: torch.Tensor
    inp: torch.Tensor


class Soak:
    """One run, this rank's part of it. Every rank creates it and calls its methods alike."""

    def __init__(self, world: World, options: StressOptions) -> None:
        self._world, self._options = world, options
        self._lanes: list[Lane] = []
        self._start = time.monotonic()
        self._digest = hashlib.sha256()
        self.steps = self.wrong = self.made = 0
        self.calls: Counter[str] = Counter()
        self.held: list[dict[str, float]] = []  # at the end of each epoch

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def is_over(self) -> bool:
        """True after the given steps, or after the given time at the end of an epoch, the second at least: leaks need two."""
        if self._options.steps is not None:
            return self.steps >= self._options.steps
        assert self._options.soak is not None, "steps or a time"
        return (
            self.steps % EPOCH == 0 and len(self.held) > 1 and self._world.comm.exchange(self.seconds)[0] > self._options.soak
        )

    def step(self) -> None:
        """Create or close a communicator; then make some calls, all before waiting for the first."""
        self._make_calls()  # whose tensors, which may keep memory of a communicator, are gone when an epoch ends
        self.steps += 1
        if self.steps % EPOCH == 0:
            self.end_epoch()

    def _make_calls(self) -> None:
        random = self._random("lanes")
        if len(self._lanes) == MOST_ALIVE or (self._lanes and random.random() < 0.3):
            self._lanes.pop().close()
        if not self._lanes or random.random() < 0.5:
            self._lanes.append(self._make_lane(random))
        lanes = random.choices(self._lanes, k=random.randint(1, MOST_UNDER_WAY))
        posted = [both for number, lane in enumerate(lanes) if lane.comm for both in self._post(lane, lane.comm, number)]
        for work, call in posted:
            work.synchronize()
            self._check(call)
        for lane in self._lanes:
            lane.used = 0

    def end_epoch(self) -> None:
        """Close all communicators, newest first, and count what is left."""
        while self._lanes:
            self._lanes.pop().close()
        self.held.append(holdings())

    def digest(self) -> str:
        """A hash of all results of all ranks. Collective."""
        return hashlib.sha256(b"".join(self._world.comm.exchange(self._digest.digest()))).hexdigest()[:32]

    def growth(self) -> dict[str, float]:
        """The largest growth of any rank's holdings since the first quarter of the epochs. Collective."""
        first, last = self.held[len(self.held) // 4], self.held[-1]
        grown = self._world.comm.exchange({name: last[name] - first[name] for name in first})
        return {name: max(rank[name] for rank in grown) for name in first}

    # ------------------------------------------------------------------ one step

    def _random(self, *what: object) -> Random:
        return Random(repr((self._options.seed, self.steps, *what)))

    def _make_lane(self, random: Random) -> Lane:
        world, name = self._world, f"soak{self.made}"
        self.made += 1
        parent = random.choice([world.comm, *(lane.comm for lane in self._lanes)])
        # Half of the time all ranks, half of the time in their order: the node algorithms need both.
        colors = random.choices((0, 1, None), weights=(6, 3, 1), k=world.size) if random.random() < 0.5 else [0] * world.size
        keys = random.choices(range(world.size), k=world.size) if random.random() < 0.5 else [0] * world.size
        comm = None if parent is None else parent.split(colors[world.rank], keys[world.rank], name)
        arena = None if comm is None else comm.empty(ARENA_NBYTES, torch.uint8)
        return Lane(comm, new_stream(world.device, name, threaded=self._options.streams != "inline"), arena)

    def _post(self, lane: Lane, comm: Communicator, number: int) -> list[tuple[Work, PlacedCall]]:
        """Sometimes a barrier; then a call, or a group of calls."""
        shared, own = self._random(number), self._random(number, self._world.rank)
        if shared.random() < 0.1:
            self.calls["barrier"] += 1
            comm.barrier(stream=lane.stream)
        placed = [self._place(lane, comm, shared, own) for _ in range(shared.choice((1, 1, 1, 2, 4)))]
        self.calls.update(call.problem.name for call in placed)
        lane.stream.wait(self._world.stream.record())  # on CUDA the tensors are filled on another stream
        if len(placed) == 1:
            work = placed[0].problem.launch(comm, placed[0].out, placed[0].inp, lane.stream)
        else:
            self.calls["group"] += 1
            with comm.group() as work:
                for call in placed:
                    call.problem.post(comm, call.out, call.inp, lane.stream)
        return [(work, call) for call in placed]

    def _place(self, lane: Lane, comm: Communicator, shared: Random, own: Random) -> PlacedCall:
        problem = draw(shared, comm)
        in_place = problem.can_be_in_place and shared.random() < 0.5

        on_host, alike = comm.device.type == "cpu", Random(problem.seed)
        chosen = alike.randrange(8), alike.random() < 0.5
        # Room for the largest tensors of any rank, shifted and aligned, so that all ranks have used as much.
        margin = 64 + (8 + comm.size) * problem.dtype.itemsize  # uneven blocks have at least one element, though n may be 0
        end = lane.used + (1 if in_place else 2) * (problem.nbytes + margin)
        fits = lane.arena is not None and end <= ARENA_NBYTES

        def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
            """Memory in the arena or not, aligned or not."""
            shift, in_arena = (own.randrange(8), own.random() < 0.5) if on_host else chosen
            if lane.arena is None or not fits or not in_arena:
                return torch.empty(shift + numel, dtype=dtype, device=comm.device)[shift:]
            begin = -(-lane.used // 64) * 64 + shift * dtype.itemsize
            lane.used = begin + numel * dtype.itemsize
            return lane.arena[begin : lane.used].view(dtype)

        placed = PlacedCall(comm, problem, in_place, *problem.place(comm.rank, in_place, allocate))
        lane.used = end if fits else lane.used
        return placed

    def _check(self, call: PlacedCall) -> None:
        wrong = call.problem.count_wrong(call.comm.rank, call.in_place, call.out, call.inp)
        if wrong:
            what = f"{call.problem}, {'in' if call.in_place else 'out of'} place, on {call.comm}"
            os.write(1, f"[{self._world.rank}] step {self.steps}: {wrong} elements wrong: {what}\n".encode())
        self.wrong += wrong
        host = call.out.cpu()
        self._digest.update(ctypes.string_at(host.data_ptr(), host.nbytes))


def draw(random: Random, comm: Communicator) -> Problem:
    """A random valid call on `comm`, the same on all its ranks."""
    size, name, on_host = comm.size, random.choice(COLLECTIVES), comm.device.type == "cpu"
    # NCCL does not reduce int16.
    dtypes = [dtype for dtype in DTYPES.values() if ops_for(name, dtype, OPS)]
    dtypes = [dtype for dtype in dtypes if on_host or dtype not in (torch.int16, torch.uint16)]
    dtype = random.choice(dtypes)
    n = random.choice((0, 1, 3, random.randrange(1, 2000, 2), random.randrange(200_000)))
    if random.random() < 0.02:
        n = random.randrange(2_000_000 // size)  # a reduction then takes several blocks
    uneven = name == "all_to_all" and random.random() < 0.5
    return Problem(
        name=name,
        size=size,
        n=n,
        dtype=dtype,
        op=random.choice(ops_for(name, dtype, OPS)),
        root=random.randrange(size) if name in ROOTED else -1,
        counts=tuple(tuple(random.choices((0, 1, n), k=size)) for _ in range(size)) if uneven else None,
        seed=random.getrandbits(31),
        rounding=on_host and dtype in FLOATS and random.random() < 0.5,
    )


def holdings() -> dict[str, float]:
    """What this process holds, as far as a leak would show in it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that glibc keeps for reuse is not a leak
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "anonymous MiB": int(status["RssAnon"].split()[0]) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "shared memory segments": len({line.split()[4] for line in maps if "/memfd:" in line or "/dev/shm/" in line}),
    }


def run(world: World, options: StressOptions, log: Callable[[str], None]) -> int:
    """Run the soak, with a line of progress every two seconds; returns the exit code. Collective."""
    soak, shown = Soak(world, options), 0.0
    while not soak.is_over():
        soak.step()
        if soak.seconds - shown > 2.0:
            shown = soak.seconds
            progress = f"step {soak.steps}  {soak.calls.total()} calls  {soak.made} communicators  {soak.wrong} wrong"
            log(f"# {shown:6.0f} s  {progress}")
    if soak.steps % EPOCH:
        soak.end_epoch()
    growth, wrong, calls = soak.growth(), sum(world.comm.exchange(soak.wrong)), Counter[str]()
    for others in world.comm.exchange(soak.calls):
        calls += others
    leaks = [name for name, by in growth.items() if by > (TOLERATED_MIB if name == "anonymous MiB" else 0)]
    no_leak = "none" if len(soak.held) > 1 else f"unknown before step {2 * EPOCH}"
    log(f"# {soak.seconds:.1f} s, {soak.steps} steps, {soak.made} communicators, on {world.size} ranks, seed {options.seed}")
    log("# Calls, over all ranks: " + ", ".join(f"{count} {name}" for name, count in calls.most_common()))
    log(f"# Growth over {len(soak.held)} epochs: " + ", ".join(f"{by:.0f} {name}" for name, by in growth.items()))
    log(f"# Digest: {soak.digest()}   #wrong: {wrong}   leaks: {', '.join(leaks) or no_leak}")
    return 1 if wrong or leaks else 0

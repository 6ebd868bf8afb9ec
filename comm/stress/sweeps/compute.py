"""What ranks compute, all at once, since those of a node share its memory: matrices, memory traffic, small operations.

Matrices of a few rows to many are multiplied by square ones, as in a training step: the output, the gradient of the input, and
that of the weight, which is written to memory. So each has an operational intensity, in floating-point operations per byte, and
a rate. Weights take turns, so that none is in a cache. Memory traffic is that of additions, products and copies of several
sizes, each among eight times as many bytes as it touches. Collectives are of messages that take turns as well, since a training
step sends memory that is in no cache, and their time is the median, which includes waiting for each other. A small
model shows what an operation takes that does nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import fmean, median

import torch
from torch import nn
from torch.nn import functional

from ... import Communicator, ReduceOp, Work, World, new_stream

_MATRICES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIDES = {"cpu": 1024, "cuda": 8192}  # rows and columns of the square matrices
MOST_ROWS = {"cpu": 256, "cuda": 8192}  # rows of the other matrices: enough for the full rate of arithmetic
NBYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # that an operation touches
_CACHED_NBYTES = 1 << 26  # more than the part of a cache that a rank has
_COPIES = 8
_MESSAGE_NBYTES = 8 << 20
_LEAST_NUMEL = 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the ranks compute at once.

    device: its type.   nbytes: of one rank's memory.   matmul: pairs of intensity and flops/s, by dtype.
    memory: pairs of bytes and bytes/s.   collectives: bytes/s of all blocks together, by name.
    functions: elements/s of square roots and the like.   small_step_us: the time of a step of a `SmallModel`.
    """

    device: str
    nbytes: int
    matmul: dict[str, list[tuple[float, float]]]
    memory: list[tuple[int, float]]
    collectives: dict[str, float]
    functions: float
    small_step_us: float


class SmallModel:
    """A few blocks whose operations do next to nothing, and their optimizer. device: of the tensors."""

    def __init__(self, device: torch.device) -> None:
        self._model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU())))
        self._model.to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), foreach=False)
        self._rows = torch.ones(8, 32, device=device)

    def step(self) -> None:
        """Run forward, backward and optimizer."""
        self._model(self._rows).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure(world: World, dtypes: Sequence[torch.dtype], number: int, log: Callable[[str], None]) -> Measurement:
    """Measure `number` times, on every rank: the mean over the ranks of each one's fastest, which
    other load disturbs least. Collective.

    dtypes: those of matrices; what has no product is left out, and float32 is always there.
    """
    clock, kinds = _Clock(world.comm, number), [dtype for dtype in _MATRICES if dtype in (*dtypes, torch.float32)]
    found = Measurement(
        device=world.device.type,
        nbytes=_memory_nbytes(world),
        matmul={str(dtype).removeprefix("torch."): _matmul(clock, dtype) for dtype in kinds},
        memory=_memory(clock),
        collectives=_collectives(clock, world),
        functions=_functions(clock),
        small_step_us=clock.seconds(SmallModel(world.device).step) * 1e6,
    )
    log(f"#\n# compute: {found.small_step_us:.1f} us for a step of a small model, {found.functions / 1e9:.2f} G functions/s")
    for name, rates in found.matmul.items():
        log(f"# {name} matrices: {', '.join(f'{rate / 1e9:.1f} GF/s at {flops:.1f}/B' for flops, rate in rates)}")
    log(f"# memory: {', '.join(f'{rate / 1e9:.1f} GB/s at {nbytes >> 10} KiB' for nbytes, rate in found.memory)}")
    log(f"# collectives: {', '.join(f'{rate / 1e9:.1f} GB/s {name}' for name, rate in found.collectives.items())}")
    return found


def _memory_nbytes(world: World) -> int:
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * world.nodes // world.size


class _Clock:
    """Times a function on every rank at once."""

    def __init__(self, comm: Communicator, number: int) -> None:
        self.device = comm.device
        self._comm, self._number = comm, number

    def seconds(self, fn: Callable[[], object], pick: Callable[[Sequence[float]], float] = min) -> float:
        """Seconds of a call. Collective: the ranks begin together. pick: of the times of a rank."""
        fn()
        self._comm.exchange(None)
        return fmean(self._comm.exchange(pick([self._once(fn) for _ in range(self._number)])))

    def _once(self, fn: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        fn()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _matmul(clock: _Clock, dtype: torch.dtype) -> list[tuple[float, float]]:
    side = SIDES[clock.device.type]
    copies = _CACHED_NBYTES // (side * side * dtype.itemsize) + 1
    weights = [torch.zeros(side, side, dtype=dtype, device=clock.device) for _ in range(copies)]
    taken = cycle(weights)
    measured = []
    for rows in (1 << power for power in range(MOST_ROWS[clock.device.type].bit_length())):
        seconds = sum(clock.seconds(fn) for fn in _products(torch.zeros(rows, side, dtype=dtype, device=clock.device), taken))
        flops, nbytes = 2 * rows * side * side, (2 * rows + side) * side * dtype.itemsize
        measured.append((flops / nbytes, 3 * flops / seconds))
    return measured


def _products(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> Iterator[Callable[[], object]]:
    """The output, the gradient of the input, and that of the weight."""
    y = torch.zeros_like(x)
    yield lambda: torch.mm(x, next(weights).t(), out=y)
    yield lambda: torch.mm(y, next(weights), out=x)
    yield lambda: torch.mm(y.t(), x, out=next(weights))


def _memory(clock: _Clock) -> list[tuple[int, float]]:
    overhead = sum(clock.seconds(fn) for fn in _traffic(_LEAST_NUMEL, clock.device))
    measured = []
    for nbytes in NBYTES:
        numel = nbytes // 12
        seconds = sum(clock.seconds(fn) for fn in _traffic(numel, clock.device))
        measured.append((nbytes, (12 + 16 + 8) * numel / max(seconds - overhead, seconds / 8)))
    return measured


def _traffic(numel: int, device: torch.device) -> Iterator[Callable[[], object]]:
    """The rates of an addition to a new tensor, a product in place and a copy: 12, 16 and 8 bytes for each element."""
    tensors = cycle([torch.ones(numel, device=device) for _ in range(3 * _COPIES)])
    yield lambda: next(tensors) + next(tensors)
    yield lambda: next(tensors).addcmul_(next(tensors), next(tensors), value=0.0)
    yield lambda: next(tensors).copy_(next(tensors))


def _collectives(clock: _Clock, world: World) -> dict[str, float]:
    """The rates of collectives of 8 MiB, from windows to memory of torch's."""
    comm = world.comm.split(0, world.rank, "stress-compute")
    assert comm is not None, "every rank gave the same colour"
    stream, numel = new_stream(world.device, "stress-compute"), _MESSAGE_NBYTES // 4
    windows, others = comm.empty(_COPIES * numel, torch.float32), torch.ones(_COPIES * numel, device=world.device)
    pairs = cycle(zip(windows.fill_(1.0).view(_COPIES, numel), others.view(_COPIES, numel), strict=True))
    block = numel // comm.size
    whole = block * comm.size

    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Work]] = {
        "all_gather": lambda out, inp: comm.all_gather(out[:whole], inp[:block], stream=stream),
        "reduce_scatter": lambda out, inp: comm.reduce_scatter(out[:block], inp[:whole], ReduceOp.SUM, stream=stream),
        "all_reduce": lambda out, inp: comm.all_reduce(out[:whole], inp[:whole], ReduceOp.SUM, stream=stream),
    }

    def run(call: Callable[[torch.Tensor, torch.Tensor], Work]) -> None:
        window, other = next(pairs)
        call(other, window).synchronize()

    rates = {name: 4 * whole / clock.seconds(partial(run, call), median) for name, call in calls.items()}
    stream.close()
    comm.close()
    return rates


def _functions(clock: _Clock) -> float:
    values = torch.rand(1 << 20, device=clock.device) + 0.1
    functions = (torch.sqrt, torch.exp, functional.gelu)
    return len(functions) * values.numel() / sum(clock.seconds(partial(function, values)) for function in functions)

"""Launches of the kernels in kernels.cu on torch's current stream. CuPy compiles each kernel at its first use.

A multi-tensor kernel gets its tensors by value, as one argument of 3.5 KiB (`Lists` in kernels.cu), which the driver copies in
the call: sizes as a `LaunchPlan` has them, which is made once per list of fixed dtypes, shapes and strides, and current
addresses. So nothing is uploaded, no memory has to outlive a launch, and a CUDA graph records all of it. A longer list takes a
launch for each TENSORS tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

import torch

from . import host
from .reference import BLOCK

if TYPE_CHECKING:
    from numpy import void
    from numpy.typing import NDArray
    from torch._C._dynamo.guards import TensorGuards

CHUNK_NBYTES = 32768  # as in kernels.cu
THREADS = 256
TENSORS = 128
SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17",)
FLOATS = {torch.float32: "float", torch.float64: "double", torch.float16: "f16", torch.bfloat16: "bf16"}
CODES = {torch.int8: "i8", torch.float8_e4m3fn: "e4m3"}
WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
Arguments = tuple["int | float | NDArray[void]", ...]
Kernel = Callable[[tuple[int, ...], tuple[int, ...], Arguments], None]  # grid, block, arguments
Name = Callable[..., str | None]
_PLANS = 1024  # the cache's capacity in keys; when full it is cleared
_ALIKE = 8  # plans of a key, the newest first
_COUNTERS = 4096
_LISTS = Struct(f"{2 * TENSORS}q{TENSORS}q{TENSORS}I")  # as in kernels.cu
_NO_CHUNK = 2**32 - 1


@cache
def _kernel(name: str) -> Kernel:
    """The compiled kernel. Cost: half a second to compile; CuPy caches the result on disk."""
    import cupy

    module = cupy.RawModule(code=SOURCE.read_text(), backend="nvrtc", options=OPTIONS, name_expressions=(name,))
    kernel: Kernel = module.get_function(name)
    return kernel


def launch(name: str, blocks: int, threads: int, args: Arguments, device: torch.device) -> None:
    """Launch a kernel on the current stream of `device`.

    args: an int is passed as i64 or pointer, a float as double, an array of one element as a struct of its bytes.
    """
    with torch.cuda.device(device.index), _cupys(_stream(device), device.index):
        _kernel(name)((blocks,), (threads,), args)


class _Handle(int):
    """A raw stream handle with the protocol that other libraries accept."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self)


def _stream(device: torch.device) -> _Handle:
    return _Handle(torch._C._cuda_getCurrentRawStream(device.index))  # torch.cuda.current_stream() costs 4 us more


@cache  # Cost: 2 us to create. Hazard: some versions of CuPy destroy the stream with this object, so it is kept
def _cupys(stream: _Handle, device: int) -> AbstractContextManager[object]:
    import cupy

    made: AbstractContextManager[object] = cupy.cuda.Stream.from_external(stream)
    return made


def lists_of(numels: Sequence[int], chunk: int) -> tuple[NDArray[void], int]:
    """`Lists` for at most TENSORS tensors, in chunks of at most `chunk` elements, without addresses; the number of chunks."""
    import numpy

    first, chunks = list[int](), 0
    for numel in numels:
        first.append(chunks)
        chunks += -(-numel // chunk)
    missing = TENSORS - len(numels)
    packed = _LISTS.pack(*[0] * 2 * TENSORS, *numels, *[0] * missing, *first, *[_NO_CHUNK] * missing)
    return numpy.frombuffer(packed, f"V{_LISTS.size}"), chunks


@dataclass(frozen=True, slots=True)
class Batch:
    """One launch: the tensors at `positions`. addresses: writes those of all lists into a copy of `lists`."""

    kernel: str
    positions: list[int]
    addresses: Struct
    lists: NDArray[void]
    chunks: int


def _guards(tensors: Sequence[torch.Tensor]) -> TensorGuards:
    """The classes, dtypes, shapes, strides and devices of a list of tensors, as torch's compiler compares them, in C++."""
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    # torch's type declares one list, its code reads one list for each tensor.
    guards = torch._C._dynamo.guards.TensorGuards
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How lists of tensors are processed: `batches` by kernels, `rest` by torch. `guards` checks whether it applies."""

    guards: TensorGuards
    batches: list[Batch]
    rest: list[int]


_plans: dict[tuple[object, ...], list[LaunchPlan]] = {}


def _plan(naming: Name, lists: Sequence[Sequence[torch.Tensor]], options: tuple[object, ...] = ()) -> LaunchPlan:
    """The cached plan for `lists`, whose i-th tensors are processed together.

    naming: returns the kernel for the i-th tensors, or None if no kernel supports them.
    Cost: some microseconds for ten tensors after the first call. The key is coarse; guards compare the tensors, in C++.
    """
    together, first = [tensor for tensors in lists for tensor in tensors], lists[0]
    key = (naming, options, len(first), first[0].shape, first[-1].shape, *[tensors[0].dtype for tensors in lists])
    alike = _plans.get(key, ())
    for plan in alike:
        if plan.guards.check(*together):
            return plan
    if len(_plans) >= _PLANS:
        _plans.clear()
    plan = _make_plan(naming, lists, options, together)
    _plans[key] = [plan, *alike[: _ALIKE - 1]]
    return plan


def _make_plan(
    naming: Name, lists: Sequence[Sequence[torch.Tensor]], options: tuple[object, ...], flat: list[torch.Tensor]
) -> LaunchPlan:
    device = lists[0][0].device
    names: dict[int, str | None] = {}
    for position, tensors in enumerate(zip(*lists, strict=True)):
        alike = all(tensor.device == device for tensor in tensors) and _same_layout(tensors)
        names[position] = naming(*tensors, *options) if alike else None
    batches, rest = list[Batch](), [position for position in names if names[position] is None]
    for name in dict.fromkeys(name for name in names.values() if name is not None):
        positions = [position for position in names if names[position] == name]
        batches += (_make_batch(name, positions[start : start + TENSORS], lists) for start in range(0, len(positions), TENSORS))
    return LaunchPlan(_guards(flat), [batch for batch in batches if batch.chunks], rest)


def _make_batch(kernel: str, positions: list[int], lists: Sequence[Sequence[torch.Tensor]]) -> Batch:
    itemsize = max(tensors[positions[0]].element_size() for tensors in lists)
    given, chunks = lists_of([lists[0][position].numel() for position in positions], CHUNK_NBYTES // itemsize)
    gap = f"{8 * (TENSORS - len(positions))}x"
    return Batch(kernel, positions, Struct(gap.join([f"{len(positions)}q"] * len(lists))), given, chunks)


def _same_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have the same shape and order of elements in memory, without gaps."""
    if not all(map(_has_memory, tensors)):
        return False
    first = tensors[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    return all(tensor.shape == first.shape and tensor.permute(order).is_contiguous() for tensor in tensors)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own. Subclasses that hold other tensors do not: their address is 0."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _run(batch: Batch, lists: Sequence[Sequence[torch.Tensor]], args: tuple[int | float, ...]) -> None:
    if len(batch.positions) < len(lists[0]):
        lists = [[tensors[position] for position in batch.positions] for tensors in lists]
    given = batch.lists.copy()
    batch.addresses.pack_into(given.data, 0, *map(torch.Tensor.data_ptr, [tensor for tensors in lists for tensor in tensors]))
    launch(batch.kernel, batch.chunks, THREADS, (given, *args), lists[0][0].device)


def _pack_name(view: torch.Tensor, tensor: torch.Tensor, plain: bool, accumulate: bool) -> str | None:
    if plain and view.dtype == tensor.dtype and view.element_size() in WORDS:
        return f"copy<{WORDS[view.element_size()]}>"
    if view.dtype in FLOATS and tensor.dtype in FLOATS:
        return f"pack<{FLOATS[view.dtype]}, {FLOATS[tensor.dtype]}, {str(accumulate).lower()}>"
    return None


def pack(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float, accumulate: bool) -> None:
    """See `reference.pack`. One launch for each pair of dtypes, and each TENSORS tensors."""
    plan = _plan(_pack_name, (views, tensors), (scale == 1.0 and not accumulate, accumulate))
    for batch in plan.batches:
        _run(batch, (views, tensors), () if batch.kernel.startswith("copy") else (float(scale),))
    if plan.rest:
        host.pack([views[i] for i in plan.rest], [tensors[i] for i in plan.rest], scale, accumulate)


def _single_name(tensor: torch.Tensor, kernel: str) -> str | None:
    return f"{kernel}<{FLOATS[tensor.dtype]}>" if tensor.dtype in FLOATS else None


def _arrived(device: torch.device) -> torch.Tensor:
    """(1,) int64: the counter of a launch's finished blocks; 0 between the launches of a stream.

    A CUDA graph gets one of its own: it may be replayed on another stream than the one that it was captured on.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int64, device=device)
    return _counter(device, _stream(device))


@lru_cache(_COUNTERS)
def _counter(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `reference.squared_norm`. One launch for each dtype; each adds to the result of the previous one."""
    plan, device = _plan(_single_name, (tensors,), ("squares",)), tensors[0].device
    out = (torch.empty if plan.batches else torch.zeros)(2, dtype=torch.float64, device=device)
    sums = torch.empty(2 * max((batch.chunks for batch in plan.batches), default=0), dtype=torch.float64, device=device)
    arrived = _arrived(device)
    scratch = (sums.data_ptr(), arrived.data_ptr(), out.data_ptr())
    for index, batch in enumerate(plan.batches):
        _run(batch, (tensors,), (*scratch, index))
    if plan.rest:
        rest = [tensors[i] for i in plan.rest]
        total = host.norms(rest, 2.0).square().sum().to(device)
        bad = torch.stack([~tensor.isfinite().all() for tensor in rest]).any().to(device)
        out = torch.stack([out[0] + total, torch.maximum(out[1], bad.double())])
    return out


def rescale(tensors: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """See `reference.rescale`. One launch for each dtype."""
    plan, factor = _plan(_single_name, (tensors,), ("rescale",)), scale.double()
    for batch in plan.batches:
        _run(batch, (tensors,), (factor.data_ptr(),))
    if plan.rest:
        torch._foreach_mul_([tensors[i] for i in plan.rest], scale)


def encode(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    """See `reference.encode`. One launch, one warp for each block of elements."""
    _launch_warps(f"encode<{CODES[codes.dtype]}, {FLOATS[x.dtype]}>", (codes, scales, x), (), x)


def decode_sum(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """See `reference.decode_sum`. One launch, one warp for each block of elements."""
    _launch_warps(f"decode_sum<{FLOATS[out.dtype]}, {CODES[codes.dtype]}>", (out, codes, scales), (len(codes),), out)


def _launch_warps(name: str, tensors: Sequence[torch.Tensor], rows: tuple[int, ...], x: torch.Tensor) -> None:
    if x.numel():
        args = (*(tensor.data_ptr() for tensor in tensors), *rows, x.numel())
        launch(name, -(-x.numel() // (BLOCK * THREADS // 32)), THREADS, args, x.device)

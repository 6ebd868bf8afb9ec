"""Launches of the kernels in kernels.cu on torch's current stream. CuPy compiles each kernel at its first use.

A launch reads two tables on the device:

| table     | content                                     | created                                                          |
|-----------|---------------------------------------------|------------------------------------------------------------------|
| geometry  | sizes, and the chunk of each block          | once per list: a `Plan` is valid for fixed dtypes, shapes, strides |
| addresses | the current addresses of the tensors        | once per set of addresses: one small copy from pinned memory     |

Tables are cached by their content, so they cannot become stale: new gradients and resized storages at other addresses select or
create another table. A table belongs to the stream that copied it: only this stream reads it, and its memory is freed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Protocol

import torch

from . import host
from .reference import BLOCK

CHUNK_NBYTES = 32768  # as in kernels.cu
THREADS = 256
SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("--std=c++17",)
FLOATS = {torch.float32: "float", torch.float64: "double", torch.float16: "f16", torch.bfloat16: "bf16"}
CODES = {torch.int8: "i8", torch.float8_e4m3fn: "e4m3"}
WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
Kernel = Callable[[tuple[int, ...], tuple[int, ...], tuple[int | float, ...]], None]  # grid, block, arguments
Name = Callable[..., str | None]
_PLANS = 1024  # the cache's capacity; when full it is cleared
_TABLES = 4096


@cache
def _kernel(name: str) -> Kernel:
    """The compiled kernel. Cost: half a second to compile; CuPy caches the result on disk."""
    import cupy

    module = cupy.RawModule(code=SOURCE.read_text(), backend="nvrtc", options=OPTIONS, name_expressions=(name,))
    kernel: Kernel = module.get_function(name)
    return kernel


def launch(name: str, blocks: int, threads: int, args: tuple[int | float, ...], device: torch.device) -> None:
    """Launch a kernel on the current stream of `device`. args: an int is passed as i64 or pointer, a float as double."""
    with torch.cuda.device(device), _cupys(_stream(device), device.index):
        _kernel(name)((blocks,), (threads,), args)


class _Handle(int):
    """A raw stream handle with the protocol that other libraries accept."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, int(self)


def _stream(device: torch.device) -> _Handle:
    return _Handle(torch.cuda.current_stream(device).cuda_stream)


@cache  # Cost: 2 us to create. Hazard: some versions of CuPy destroy the stream with this object, so it is kept
def _cupys(stream: _Handle, device: int) -> AbstractContextManager[object]:
    import cupy

    made: AbstractContextManager[object] = cupy.cuda.Stream.from_external(stream)
    return made


def _upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Hazard: a CUDA graph's capture only records the copy; the captured code must have run on this stream before.
    # torch reuses the pinned memory only after the copy.
    return table.pin_memory().to(device, non_blocking=True)


@lru_cache(_TABLES)
def _addresses(device: torch.device, stream: int, addresses: tuple[int, ...]) -> torch.Tensor:
    return _upload(torch.tensor(addresses, dtype=torch.int64, device="cpu"), device)


def geometry(numels: Sequence[int], chunk: int) -> torch.Tensor:
    """(2 * n + chunks,) int64 for n tensors, in chunks of at most `chunk` elements: see kernels.cu."""
    elements = torch.tensor(numels, dtype=torch.int64, device="cpu")
    chunks = (elements + chunk - 1) // chunk
    return torch.cat([elements, chunks.cumsum(0) - chunks, torch.repeat_interleave(chunks)])


@dataclass(frozen=True, slots=True)
class Batch:
    """One launch: the tensors at `positions`."""

    kernel: str
    positions: list[int]
    geometry: torch.Tensor
    chunks: int


class Guards(Protocol):
    """The classes, dtypes, shapes, strides and devices of a list of tensors."""

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether `tensors` have the same ones."""


class PythonGuards:
    """`Guards` without private names of torch. Cost: 1 us for each tensor, ten times that of torch's `TensorGuards`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._expected = list(map(self._properties, tensors))

    def check(self, *tensors: torch.Tensor) -> bool:
        return list(map(self._properties, tensors)) == self._expected

    @staticmethod
    def _properties(tensor: torch.Tensor) -> tuple[object, ...]:
        return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _guards(tensors: Sequence[torch.Tensor]) -> Guards:
    """torch's private guards, written in C++; `PythonGuards` if this torch does not have them or they behave otherwise."""
    sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
    try:
        from torch._C._dynamo.guards import TensorGuards

        # torch's type declares one list, its code reads one list for each tensor.
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
        if guards.check(*tensors):
            return guards
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return PythonGuards(tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """How lists of tensors are processed: `batches` by kernels, `rest` by torch. `guards` checks whether it applies."""

    guards: Guards
    batches: list[Batch]
    rest: list[int]


_plans: dict[tuple[object, ...], Plan] = {}
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def _plan(naming: Name, lists: Sequence[Sequence[torch.Tensor]], options: tuple[object, ...] = ()) -> Plan:
    """The cached plan for `lists`, whose i-th tensors are processed together.

    naming: returns the kernel for the i-th tensors, or None if no kernel supports them.
    Cost: some microseconds for ten tensors after the first call. Shapes and dtypes are the key; `guards` decide, in C++.
    """
    together = [tensor for tensors in lists for tensor in tensors]
    key = (naming, options, _stream(lists[0][0].device), *map(_SHAPE, lists[0]), *map(_DTYPE, together))
    plan = _plans.get(key)
    if plan is None or not plan.guards.check(*together):
        if len(_plans) >= _PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(naming, lists, options, together)
    return plan


def _make_plan(
    naming: Name, lists: Sequence[Sequence[torch.Tensor]], options: tuple[object, ...], flat: list[torch.Tensor]
) -> Plan:
    device = lists[0][0].device
    names: dict[int, str | None] = {}
    for position, tensors in enumerate(zip(*lists, strict=True)):
        alike = all(tensor.device == device for tensor in tensors) and _same_layout(tensors)
        names[position] = naming(*tensors, *options) if alike else None
    batches = []
    for name in dict.fromkeys(name for name in names.values() if name is not None):
        positions = [position for position in names if names[position] == name]
        itemsize = max(tensors[positions[0]].element_size() for tensors in lists)
        table = geometry([lists[0][position].numel() for position in positions], CHUNK_NBYTES // itemsize)
        chunks = len(table) - 2 * len(positions)
        if chunks:
            batches.append(Batch(name, positions, _upload(table, device), chunks))
    return Plan(_guards(flat), batches, [position for position in names if names[position] is None])


def _same_layout(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all have the same shape and order of elements in memory, without gaps."""
    if not all(map(_has_memory, tensors)):
        return False
    first = tensors[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    return all(tensor.shape == first.shape and tensor.permute(order).is_contiguous() for tensor in tensors)


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for subclasses that hold other tensors: their address is 0."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _run(batch: Batch, lists: Sequence[Sequence[torch.Tensor]], args: tuple[int | float, ...]) -> None:
    if len(batch.positions) < len(lists[0]):
        lists = [[tensors[position] for position in batch.positions] for tensors in lists]
    device = lists[0][0].device
    addresses = tuple(map(torch.Tensor.data_ptr, [tensor for tensors in lists for tensor in tensors]))
    table = _addresses(device, _stream(device), addresses)
    tables = (table.data_ptr(), batch.geometry.data_ptr(), len(batch.positions))
    launch(batch.kernel, batch.chunks, THREADS, (*tables, *args), device)


def _pack_name(view: torch.Tensor, tensor: torch.Tensor, plain: bool, accumulate: bool) -> str | None:
    if plain and view.dtype == tensor.dtype and view.element_size() in WORDS:
        return f"copy<{WORDS[view.element_size()]}>"
    if view.dtype in FLOATS and tensor.dtype in FLOATS:
        return f"pack<{FLOATS[view.dtype]}, {FLOATS[tensor.dtype]}, {str(accumulate).lower()}>"
    return None


def pack(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float, accumulate: bool) -> None:
    """See `reference.pack`. One launch for each pair of dtypes."""
    plan = _plan(_pack_name, (views, tensors), (scale == 1.0 and not accumulate, accumulate))
    for batch in plan.batches:
        _run(batch, (views, tensors), () if batch.kernel.startswith("copy") else (float(scale),))
    if plan.rest:
        host.pack([views[i] for i in plan.rest], [tensors[i] for i in plan.rest], scale, accumulate)


def _single_name(tensor: torch.Tensor, kernel: str) -> str | None:
    return f"{kernel}<{FLOATS[tensor.dtype]}>" if tensor.dtype in FLOATS else None


@lru_cache(_TABLES)
def _arrived(device: torch.device, stream: int) -> torch.Tensor:
    """The counter of a launch's finished blocks; 0 between the launches of a stream."""
    return _upload(torch.zeros(1, dtype=torch.int64, device="cpu"), device)


def squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `reference.squared_norm`. One launch for each dtype; each adds to the result of the previous one."""
    plan, device = _plan(_single_name, (tensors,), ("squares",)), tensors[0].device
    out = (torch.empty if plan.batches else torch.zeros)(2, dtype=torch.float64, device=device)
    sums = torch.empty(2 * max((batch.chunks for batch in plan.batches), default=0), dtype=torch.float64, device=device)
    scratch = (sums.data_ptr(), _arrived(device, _stream(device)).data_ptr(), out.data_ptr())
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

"""The bandwidth of every kernel relative to a copy on the same device, and the host time of a launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from unittest import mock

import torch

from gpu.checks import Found
from shardrt import kernels
from shardrt.comm import World
from shardrt.kernels import cuda
from shardrt.kernels.reference import BLOCK

# The shapes of a transformer block, and one with prime sizes.
SHAPES = ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (1024,), (1009, 1013))
REPEATS = 9
GOAL, GOAL_BRIEF = 0.9, 0.85  # relative to the copy's bandwidth; brief: a launch of 0.15 ms, of which its start is a part
GOAL_HOST_US = 60.0  # of 100 tensors: 200 addresses are read, and 200 shapes compared
ROWS = 4  # ranks whose codes are summed


def seconds(fn: Callable[[], object], device: torch.device) -> float:
    """Median device time of `fn` in seconds, after a warm-up call."""
    fn()
    return median(_once(fn, device) for _ in range(REPEATS))


def _once(fn: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond in cycles, in which the host launches `fn`
    before.record()
    fn()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def tensors(numel: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Random tensors with shapes from SHAPES in turn and at least `numel` elements in all, each in its own storage."""
    made: list[torch.Tensor] = []
    while sum(map(torch.numel, made)) < numel:
        made.append(torch.randn(SHAPES[len(made) % len(SHAPES)], device=device).to(dtype))
    return made


def views(like: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Zeros with the shapes of `like`, in one buffer, each aligned to 16 bytes."""
    step = 16 // dtype.itemsize
    flat = torch.zeros(sum(-(-tensor.numel() // step) * step for tensor in like), dtype=dtype, device=like[0].device)
    made, first = [], 0
    for tensor in like:
        made.append(flat[first:][: tensor.numel()].view(tensor.shape))
        first += -(-tensor.numel() // step) * step
    return made


def sizes(world: World) -> Found:
    """Compare the kernels with torch, on as many elements as `bandwidths` uses and on one tensor of more than 2**31."""
    device = world.device
    full = tensors(2**28 if device.type == "cuda" else 2**21, torch.float32, device)
    half, flat, low = [t.bfloat16() for t in full], views(full, torch.float32), views(full, torch.bfloat16)
    kernels.pack_into(low, full)
    _expect("pack f32 to bf16", low, half)
    kernels.pack_into(flat, half, 0.5)
    kernels.add_into(flat, half)
    _expect("pack scaled, then add", flat, (t.float() * 1.5 for t in half))
    found, expected = kernels.squared_norm(half, device)[0], torch.stack([t.double().square().sum() for t in half]).sum()
    rtol = 1e-5 if device.type == "cuda" else 1e-3  # on the host, each tensor is summed in float32
    assert torch.isclose(found, expected, rtol=rtol), f"squared_norm: {found} for {expected}"
    kernels.rescale(flat, torch.tensor(0.25, device=device))
    kernels.pack_into(full, flat)
    _expect("rescale, then unpack", full, (t.float() * 0.375 for t in half))
    if device.type == "cpu" or torch.cuda.mem_get_info(device)[0] < 2**34:
        return Found(f"{len(full)} tensors; not enough memory for one of more than 2**31 elements")
    del full, flat, low, half
    large = [torch.randn(2**31 + 1009, device=device, dtype=torch.bfloat16)]
    copy = views(large, torch.bfloat16)
    kernels.pack_into(copy, large)
    _expect("pack of more than 2**31 elements", copy, large)
    return Found()


def _expect(what: str, found: list[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    wrong = [index for index, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
    assert not wrong, f"{what}: tensors {wrong} of {len(found)}"


def bandwidths(world: World) -> Found:
    """Measure every kernel on many tensors, which it reads and writes in one pass."""
    device, found = world.device, Found()
    numel = 2**28 if device.type == "cuda" else 2**21
    full, half = tensors(numel, torch.float32, device), tensors(numel, torch.bfloat16, device)
    numel = sum(map(torch.numel, full))
    flat, low = views(full, torch.float32), views(full, torch.bfloat16)
    scale = torch.tensor(1.0 - 2**-20, device=device)
    x = torch.randn(numel // BLOCK * BLOCK, device=device, dtype=torch.bfloat16)
    codes = torch.zeros(ROWS, len(x), dtype=torch.int8, device=device)
    scales = torch.zeros(ROWS, len(x) // BLOCK, device=device)
    source, target = torch.ones(2, numel, device=device)
    rate = 8 * numel / seconds(lambda: target.copy_(source), device)
    found.figure("copy TB/s", rate / 1e12)
    cases: dict[str, tuple[int, Callable[[], object], float | None]] = {  # bytes moved, the call, the goal
        "pack f32": (8 * numel, lambda: kernels.pack_into(flat, full), GOAL),
        "pack f32 scaled": (8 * numel, lambda: kernels.pack_into(flat, full, 0.5), GOAL),
        "pack bf16 to f32": (6 * numel, lambda: kernels.pack_into(flat, half, 0.5), GOAL),
        "pack f32 to bf16": (6 * numel, lambda: kernels.pack_into(low, full), GOAL),
        "unpack bf16 to f32": (6 * numel, lambda: kernels.pack_into(full, low), GOAL),
        "add bf16 to f32": (10 * numel, lambda: kernels.add_into(flat, half), None),
        "norm f32": (4 * numel, lambda: kernels.squared_norm(full, device), GOAL),
        "norm bf16": (2 * numel, lambda: kernels.squared_norm(half, device), GOAL_BRIEF),
        "rescale f32": (8 * numel, lambda: kernels.rescale(full, scale), None),
        "encode bf16 to i8": (3 * len(x), lambda: kernels.encode(codes[0], scales[0], x), None),
        "decode 4 x i8 to bf16": ((ROWS + 2) * len(x), lambda: kernels.decode_sum(x, codes, scales), None),
    }
    for name, (nbytes, fn, goal) in cases.items():
        goal = goal if device.type == "cuda" else None
        found.figure(name, nbytes / seconds(fn, device) / rate, least=goal)
    found.note = f"shares of the copy's bandwidth, {len(full)} tensors, {numel / 1e6:.0f} million elements"
    return found


def launches(world: World) -> Found:
    """Packing, unpacking and the norm of 100 small tensors take one launch each; measure its host time."""
    if world.device.type == "cpu":
        return Found(skipped="nothing is launched on the host")
    found, names, launch = Found(), list[str](), cuda.launch
    small = [torch.randn(1000, device=world.device) for _ in range(100)]
    flat = views(small, torch.bfloat16)
    cases: dict[str, tuple[str, Callable[[], object]]] = {  # the kernel, the call that launches it
        "pack": ("pack<bf16, float, false>", lambda: kernels.pack_into(flat, small)),
        "unpack": ("pack<float, bf16, false>", lambda: kernels.pack_into(small, flat)),
        "norm": ("squares<float>", lambda: kernels.squared_norm(small, world.device)),
    }

    def counted(name: str, blocks: int, threads: int, args: cuda.Arguments, device: torch.device) -> None:
        names.append(name)
        launch(name, blocks, threads, args, device)

    for case, (kernel, fn) in cases.items():
        fn()
        names.clear()
        with mock.patch.object(cuda, "launch", counted):
            fn()
        assert names == [kernel], f"{case}: {names}"
        times = []
        for _ in range(200):
            start = time.perf_counter()
            fn()
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        found.figure(f"{case}, host us", median(times) * 1e6, most=GOAL_HOST_US)
    return found

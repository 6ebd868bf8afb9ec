"""Time a block under tensor parallelism: its host time on one rank, and on several what `async_tp` gains.

    python scripts/bench/parallel.py                        # host time per block: plain, shardrt's styles, torch's
    mpirun -n 2 python scripts/bench/parallel.py            # the time of a block's matrices, with and without async_tp
    mpirun -n 2 python scripts/bench/parallel.py --device cuda --tokens 4096 --widths 4096 8192

A block is a LayerNorm and two Linear layers with a residual connection; what is timed is forward and backward. The variants
run in turns, and the result is the median over the rounds. On one rank the tensors are small: the time is Python's and
torch's, without any communication. "beyond" is the time beyond the plain block.

On several ranks the sequence is cut over the ranks, as under sequence parallelism: a gather before the first matrix, a
reduce-scatter after the second. async_tp does both in chunks beside the matmuls. SHARDRT_HOST_STREAMS=threaded gives the host
threads for it; they need cores of their own. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.options import Parser, at_least
from shardrt.comm import World, current_stream

WARMUP = 5
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, one field per flag."""

    device: str
    tokens: int
    widths: list[int]
    rounds: int


class Block(nn.Module):
    """LayerNorm, two Linear layers, a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--tokens", type=at_least(1), default=512, help="of the sequence, over all ranks")
    add("--widths", type=at_least(1), nargs="+", default=[256, 512, 1024], help="channels of a block on several ranks")
    add("--rounds", type=at_least(1), default=30)
    return Options(**vars(parser.parse_args()))


def time_in_turns(world: World, steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The median of each step in microseconds, the largest over the ranks."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARMUP + rounds):
        for name, step in steps.items():
            world.barrier()
            start = time.perf_counter()
            step()
            current_stream(world.device).synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: max(world.comm.exchange(median(each[WARMUP:]))) * 1e6 for name, each in seconds.items()}


def forward_backward(block: nn.Module, x: torch.Tensor) -> None:
    block(x).sum().backward()


# ---------------------------------------------------------------------- host time on one rank

CALLS = 20  # in a row: the first of them runs after other code, with cold caches


def host_time(world: World, options: Options) -> dict[str, float]:
    """Microseconds per block, forward and backward, of tensors so small that arithmetic takes no time."""
    torch.manual_seed(0)
    x = torch.randn(1, 16, 64, device=world.device, requires_grad=True)

    def many(block: nn.Module) -> None:
        for _ in range(CALLS):
            forward_backward(block, x)

    blocks = {"plain": Block(64).to(world.device)} | shardrt_blocks(world) | torch_blocks(world.device.type)
    steps: dict[str, Step] = {name: partial(many, block) for name, block in blocks.items()}
    return {name: us / CALLS for name, us in time_in_turns(world, steps, options.rounds).items()}


def plans(styles: ModuleType, placements: ModuleType) -> dict[str, dict[str, Any]]:
    """A plan without sequence parallelism, and one with it."""
    tokens = placements.Shard(1)
    return {
        "": {"up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()},
        ", sequence parallel": {
            "norm": styles.SequenceParallel(),
            "up": styles.ColwiseParallel(input_layouts=tokens),
            "down": styles.RowwiseParallel(output_layouts=tokens),
        },
    }


def shardrt_blocks(world: World) -> dict[str, nn.Module]:
    parallel, mesh = shardrt.parallel, shardrt.DeviceMesh(world.comm, (world.size,), ("tp",))
    made = {
        f"shardrt{name}": parallel.parallelize_module(Block(64).to(world.device), mesh, plan)
        for name, plan in plans(parallel, shardrt).items()
    }
    plan = plans(parallel, shardrt)[", sequence parallel"] | {"norm": parallel.SequenceParallel(use_local_output=True)}
    made["shardrt, sequence parallel, local"] = parallel.parallelize_module(Block(64).to(world.device), mesh, plan)
    return made


def torch_blocks(device: str) -> dict[str, nn.Module]:
    from torch import distributed
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    backend = "gloo" if device == "cpu" else "nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    return {
        f"torch{name}": parallel.parallelize_module(Block(64).to(device), mesh, plan)
        for name, plan in plans(parallel, tensor).items()
    }


def report_host_time(world: World, options: Options) -> dict[str, object]:
    found = host_time(world, options)
    print(f"{'host time per block, us':36} {'total':>8} {'beyond':>8}")
    for name, us in found.items():
        print(f"{name:36} {us:8.0f} {us - found['plain']:8.0f}", flush=True)
    return {"host_us": found}


# ---------------------------------------------------------------------- async_tp on several ranks


def async_gain(world: World, width: int, options: Options) -> dict[str, float]:
    """Microseconds of the two matrices of a block, forward and backward, with and without async_tp."""
    parallel, mesh = shardrt.parallel, shardrt.DeviceMesh(world.comm, (world.size,), ("tp",))
    rows = options.tokens // world.size + (world.rank < options.tokens % world.size)
    x = torch.randn(1, rows, width, device=world.device, requires_grad=True)
    steps: dict[str, Step] = {}
    for name, chunked in (("plain", False), ("async_tp", True)):
        tokens = shardrt.Shard(1)
        plan = {
            "0": parallel.ColwiseParallel(input_layouts=tokens, async_tp=chunked),
            "2": parallel.RowwiseParallel(output_layouts=tokens, async_tp=chunked),
        }
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)).to(world.device)
        steps[name] = partial(forward_backward, parallel.parallelize_module(made, mesh, plan), x)
    return time_in_turns(world, steps, options.rounds)


def report_async_gain(world: World, options: Options) -> dict[str, object]:
    found = {}
    if world.rank == 0:
        print(f"{'width':>6} {'tokens':>7} {'plain, us':>10} {'async_tp':>10} {'ratio':>6}")
    for width in options.widths:
        found[width] = us = async_gain(world, width, options)
        if world.rank == 0:
            ratio = us["async_tp"] / us["plain"]
            print(f"{width:6} {options.tokens:7} {us['plain']:10.0f} {us['async_tp']:10.0f} {ratio:6.2f}", flush=True)
    return {"async_us": found}


def main() -> None:
    options = parse_options()
    world = shardrt.init(options.device)
    torch.set_num_threads(1)
    report = report_host_time if world.size == 1 else report_async_gain
    found = report(world, options)
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, "device": options.device, **found}), flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

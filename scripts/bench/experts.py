"""Time training steps of a mixture of experts: expert parallelism beside `fully_shard` alone, in one job.

    mpirun -n 2 python scripts/bench/experts.py
    SHARDRT_NODE_MEMORY=0 mpirun -n 2 python scripts/bench/experts.py       # gathered, as on several nodes
    mpirun -n 2 python scripts/bench/experts.py --tokens 64 --experts 32    # few tokens for each expert

Layers of a router, of experts in a loop and a residual connection; a step is forward, backward and AdamW. Both models start
with the same parameters and get the same tokens, others on each rank; their losses must agree. They run in turns; the time is
the median over the rounds, of the slowest rank. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.options import Parser, at_least
from shardrt.comm import World, current_stream
from shardrt.parallel import ExpertParallel, parallelize_module

WARMUP = 3


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, one field per flag."""

    device: str
    layers: int
    experts: int
    top_k: int
    width: int
    tokens: int
    rounds: int


class LoopedExperts(nn.Module):
    """Gated experts, (E, 4W, W) and (E, W, 2W)."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 4 * width, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.up)).tolist()
        rows = x.index_select(0, order // chosen.shape[1]).split(counts)
        gated = [F.linear(part, up).chunk(2, -1) for part, up in zip(rows, self.up, strict=True)]
        made = torch.cat([F.linear(F.silu(a) * b, down) for (a, b), down in zip(gated, self.down, strict=True)])
        return torch.zeros_like(x).index_add(0, order // chosen.shape[1], made * weights.reshape(-1)[order, None])


class RoutedLayer(nn.Module):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.top_k = options.top_k
        self.norm, self.router = nn.LayerNorm(options.width), nn.Linear(options.width, options.experts, bias=False)
        self.experts = LoopedExperts(options.experts, options.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        weights, chosen = self.router(rows).softmax(-1).topk(self.top_k)
        return x + self.experts(rows, chosen, weights)


class Step:
    """A model with its optimizer, and the times of its steps."""

    def __init__(self, world: World, options: Options, *, divide: bool) -> None:
        mesh = shardrt.DeviceMesh(world.comm, (1, world.size), ("dp", "ep"))
        torch.manual_seed(0)
        layers = [RoutedLayer(options) for _ in range(options.layers)]
        self.model = nn.Sequential(*layers)
        if divide:
            parallelize_module(self.model, mesh["ep"], {"*.experts": ExpertParallel()})
        for layer in layers:
            shardrt.fully_shard(layer.experts, mesh=mesh["dp"] if divide else mesh.flatten())
            shardrt.fully_shard(layer, mesh=mesh.flatten())
        shardrt.fully_shard(self.model, mesh=mesh.flatten())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def run(self, world: World, x: torch.Tensor) -> None:
        world.barrier()
        start = time.perf_counter()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        current_stream(world.device).synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--layers", type=at_least(1), default=4)
    add("--experts", type=at_least(1), default=16, help="of a layer")
    add("--top-k", type=at_least(1), default=2)
    add("--width", type=at_least(1), default=256)
    add("--tokens", type=at_least(1), default=512, help="of each rank")
    add("--rounds", type=at_least(1), default=15)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    options = parse_options()
    world = shardrt.init(options.device)
    torch.set_num_threads(1)
    steps = {name: Step(world, options, divide=name == "experts divided") for name in ("fully_shard", "experts divided")}
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(options.tokens, options.width, generator=generator).to(world.device)
    for _ in range(WARMUP + options.rounds):
        for step in steps.values():
            step.run(world, x)
    ms = {name: max(world.comm.exchange(median(step.seconds[WARMUP:]))) * 1e3 for name, step in steps.items()}
    alone, divided = (torch.tensor(step.losses) for step in steps.values())
    torch.testing.assert_close(divided, alone, rtol=1e-3, atol=1e-5)
    if world.rank == 0:
        for name, value in ms.items():
            print(f"{name:16} {value:8.1f} ms", flush=True)
        ratio = ms["experts divided"] / ms["fully_shard"]
        print(json.dumps({"ranks": world.size, "device": options.device, "ms": ms, "ratio": ratio}), flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

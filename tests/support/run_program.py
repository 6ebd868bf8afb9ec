"""The jobs of test_runs.py: a tiny model, with few imports, that resumes: run_program.py FOLDER STEPS SECONDS_PER_STEP.

It leaves FOLDER/started-PID while it runs, and at the end FOLDER/end.json: the loss in all its bits, and the next random
numbers of every rank. The loss does not depend on the number of ranks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

import shardrt

EVERY, KEEP, BATCH = 3, 2, 12


def main(folder: Path, steps: int, seconds: float) -> None:
    world = shardrt.init("cpu")
    started = folder / f"started-{os.getpid()}"
    started.touch()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1)).double()
    shardrt.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    with shardrt.Run(folder / "checkpoints", {"model": model, "optimizer": optimizer}, every=EVERY, keep=KEEP) as run:
        for step in run.steps(steps):
            train(model, optimizer, step, world)
            random.random()
            time.sleep(seconds * float(torch.rand(())))
    loss = evaluate(model).hex()
    draws = world.comm.exchange((random.random(), random.gauss(), torch.rand(()).item()))
    if world.rank == 0:
        (folder / "end.json").write_text(json.dumps({"done": run.done, "loss": loss, "draws": draws}))
    started.unlink()
    shardrt.finalize()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, world: shardrt.World) -> None:
    """A step on this rank's rows of the global batch."""
    inputs = torch.randn(BATCH, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    mine = inputs[world.rank :: world.size]
    loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> float:
    """The loss on data of its own, the same on every rank."""
    inputs = torch.randn(BATCH, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(10**6))
    return float((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

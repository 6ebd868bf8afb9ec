"""Save on some ranks, load on others: python -m shardrt.launch -n 2 checkpoint.py runs/b, then the same with -n 3.

The second job builds its model without memory, and cuts it otherwise; its values are those of the first.
"""

import sys
from typing import Any

import torch
from torch import nn

import shardrt
from shardrt import checkpoint

WIDTH = 32


def build(world: shardrt.World) -> nn.Module:
    """A model on the meta device, sharded: no rank has all of it."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 1))
    for block in list(model)[:: world.size]:  # other groups on other numbers of ranks
        shardrt.fully_shard(block)
    return shardrt.fully_shard(model)


def main(parent: str) -> None:
    world = shardrt.init()
    model = build(world)
    found = checkpoint.latest(parent)
    if found is None:
        model.to_empty(device=world.device)
        shardrt.manual_seed(0)
        model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if found is not None:
        checkpoint.load(found, state)  # gives the model memory

    saving = None
    for step in range(state["step"], state["step"] + 10):
        inputs = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(step))[world.rank :: world.size]
        loss = nn.functional.mse_loss(model(inputs.to(world.device)), inputs.sum(1, keepdim=True).to(world.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        mean = world.mean(loss)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
        if saving is not None:
            saving.poll()  # an error of the save is raised here, on every rank
        if state["step"] % 5 == 0:  # copied now, written while training goes on
            saving = checkpoint.async_save(f"{parent}/step-{state['step']}", state, keep=2)
    shardrt.finalize()  # commits the last save


if __name__ == "__main__":
    main(sys.argv[1])

"""Train, stop at any time, and go on: python -m shardrt.launch --restarts 3 -n 2 resume.py runs/a 20

Started again it continues from its newest checkpoint in FOLDER, on any number of ranks that divides the batch, as if it had not
been stopped: try Ctrl-C, SIGTERM, or kill -9 of a rank.
"""

import sys

import torch
from torch import nn

import shardrt

BATCH, WIDTH = 16, 32


def main(folder: str, steps: int) -> None:
    world = shardrt.init()
    torch.manual_seed(0)  # every rank builds the same model
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    for block in blocks:
        shardrt.fully_shard(block)
    shardrt.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # Model, optimizer, schedulers, anything with state_dict(); steps and random numbers are saved by the run itself.
    state = {"model": model, "optimizer": optimizer}
    with shardrt.Run(folder, state, every=5, keep=3) as run:  # loads the newest checkpoint, if there is one
        for step in run.steps(steps):  # those that remain
            inputs, targets = batch(step, slice(world.rank, None, world.size))
            loss = nn.functional.mse_loss(model(inputs.to(world.device)), targets.to(world.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = world.mean(loss)
            if world.rank == 0:
                print(f"step {step} loss {mean.item():.4f}", flush=True)
    shardrt.finalize()


def batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a global batch that depends on the step alone, not on the number of ranks."""
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs[rows], inputs.sum(1, keepdim=True)[rows]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

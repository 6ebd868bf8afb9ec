"""Shard a model over all ranks and train it: python -m shardrt.launch -n 2 minimal.py

The losses do not depend on the number of ranks, as long as it divides the batch.
"""

import torch
from torch import nn

import shardrt

BATCH, WIDTH = 16, 32


def main() -> None:
    world = shardrt.init()
    torch.manual_seed(0)  # every rank builds the same model
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    for block in blocks:  # one group for each block: gathered before it runs, freed after it
        shardrt.fully_shard(block)
    shardrt.fully_shard(model)  # the root has what is left, here the last layer
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    inputs = torch.randn(BATCH, WIDTH)  # the seed is the same, so every rank draws the whole batch
    targets = inputs.sum(1, keepdim=True)
    mine = slice(world.rank, None, world.size)  # and takes its rows
    inputs, targets = inputs[mine].to(world.device), targets[mine].to(world.device)

    for step in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # gradients come out averaged over the ranks
        optimizer.step()  # each rank updates its shards
        optimizer.zero_grad()
        mean = world.mean(loss)  # collective: call it on every rank
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

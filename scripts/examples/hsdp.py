"""Hybrid sharding (HSDP), shard within a group of ranks and replicate across groups: python -m shardrt.launch -n 4 hsdp.py

On a cluster the groups are nodes: parameters are gathered within a node, and only reduced gradients cross the network.
"""

import torch
from torch import nn

import shardrt

WIDTH = 32


def main() -> None:
    world = shardrt.init()
    replicas = 2  # on a cluster: the number of nodes
    mesh = shardrt.init_device_mesh(
        world.device.type, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard")
    )

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    for block in (*blocks, model):
        shardrt.fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    weight = next(model.parameters())
    assert isinstance(weight, shardrt.DTensor)
    shards = world.comm.exchange(weight.to_local().numel())  # every rank's, on every rank
    if world.rank == 0:
        print(f"a weight of {tuple(weight.shape)} lies in shards of {shards} elements")

    inputs = torch.randn(16, WIDTH)[world.rank :: world.size].to(world.device)
    targets = inputs.sum(1, keepdim=True)
    for step in range(20):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # a reduce-scatter within the group, then an all-reduce over the replicas
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

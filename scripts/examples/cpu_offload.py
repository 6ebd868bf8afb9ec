"""Keep shards, gradients and optimizer state on the host: python -m shardrt.launch -n 2 cpu_offload.py

On GPUs every gather copies this rank's shards to the device and every reduction copies gradients back. On a CPU mesh
everything is on the host already: the policy does nothing, and a warning says so.
"""

import torch
from torch import nn

import shardrt

WIDTH = 32


def main() -> None:
    world = shardrt.init()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    policy = shardrt.CPUOffloadPolicy(pin_memory=True)  # page-locked memory lets copies overlap compute
    for block in (*blocks, model):
        shardrt.fully_shard(block, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # steps on the host

    inputs = torch.randn(16, WIDTH)[world.rank :: world.size].to(world.device)
    for step in range(20):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)

    devices = {param.device.type for param in model.parameters()}
    devices |= {value.device.type for state in optimizer.state.values() for value in state.values()}
    if world.rank == 0:
        print(f"shards and optimizer state are on {devices}")
    shardrt.finalize()


if __name__ == "__main__":
    main()

"""Build a model that fits nowhere whole: python -m shardrt.launch -n 2 meta_device.py

The model is built on the meta device, without memory; then it is sharded; then every rank allocates and fills its shards.
"""

import torch
from torch import nn

import shardrt

WIDTH = 32


def main() -> None:
    world = shardrt.init()
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    for block in (*blocks, model):
        shardrt.fully_shard(block)

    model.to_empty(device=world.device)  # allocates this rank's shards
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()  # random numbers do not depend on the number of ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    whole = sum(param.numel() for param in model.parameters())
    local = sum(param.to_local().numel() for param in model.parameters() if isinstance(param, shardrt.DTensor))
    sizes = world.comm.exchange(local)
    if world.rank == 0:
        print(f"{whole} parameters in shards of {sizes}")

    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))[world.rank :: world.size].to(world.device)
    for step in range(20):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

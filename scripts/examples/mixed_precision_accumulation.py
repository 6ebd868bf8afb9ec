"""bfloat16 compute, float32 reduction, 4 micro-batches: python -m shardrt.launch -n 2 mixed_precision_accumulation.py

Shards and optimizer state stay in float32. Gradients are reduced once per step, in the backward of the last micro-batch.
"""

import torch
from torch import nn

import shardrt

WIDTH, MICRO_BATCHES = 32, 4


def main() -> None:
    world = shardrt.init()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))

    policy = shardrt.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,  # of gathered parameters and compute
        reduce_dtype=torch.float32,  # of accumulated and reduced gradients
    )
    for block in blocks:
        shardrt.fully_shard(block, mp_policy=policy)
    shardrt.fully_shard(model, mp_policy=policy)
    assert isinstance(model, shardrt.FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    inputs = torch.randn(32, WIDTH)[world.rank :: world.size].to(world.device)
    for step in range(20):
        total = torch.zeros((), device=world.device)
        for number, rows in enumerate(inputs.chunk(MICRO_BATCHES)):
            model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)  # communicate in the last backward only
            loss = nn.functional.mse_loss(model(rows).float(), rows.sum(1, keepdim=True)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        shardrt.clip_grad_norm_(model.parameters(), 1.0)  # by the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(total)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    dtypes = {param.dtype for param in model.parameters()}
    if world.rank == 0:
        print(f"shards are in {dtypes}")
    shardrt.finalize()


if __name__ == "__main__":
    main()

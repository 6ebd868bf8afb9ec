"""Tensor and sequence parallelism, and sharding over it (2-D): python -m shardrt.launch -n 4 tensor_parallel.py

A plan for torch, but for the imports: there, all names are in torch.distributed.tensor and its module `parallel`.
"""

import torch
import torch.nn.functional as F
from torch import nn

import shardrt
from shardrt import Replicate, Shard
from shardrt.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, CLASSES = 32, 16
PARTS = Shard(1)  # of (batch, tokens, channels): each rank has a part of the tokens
PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=PARTS),  # the embedding
    "*.norm": SequenceParallel(),
    "*.up": ColwiseParallel(input_layouts=PARTS),
    "*.down": RowwiseParallel(output_layouts=PARTS),
    "3": ColwiseParallel(input_layouts=PARTS, output_layouts=Replicate()),  # the head
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))  # plain local tensors, but for the norm's output


def main() -> None:
    world = shardrt.init()
    mesh = shardrt.init_device_mesh(world.device.type, (world.size // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES))
    parallelize_module(model, mesh["tp"], PLAN)
    for part in (model[1], model[2], model):
        shardrt.fully_shard(part, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for name, param in model[1].named_parameters() if world.rank == 0 else ():
        print(name, tuple(param.shape), param.placements)  # type: ignore[attr-defined]  # a DTensor

    inputs = torch.randint(CLASSES, (8, 10))[mesh["dp"].rank :: mesh["dp"].size].to(world.device)  # equal over tp
    for step in range(20):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), (inputs.flatten() * 3 + 1) % CLASSES)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

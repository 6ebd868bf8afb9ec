"""Train a small transformer, sharded: python -m shardrt.launch -n 2 from_fsdp2.py"""

import argparse
from pathlib import Path

import torch
from torch import nn

import shardrt
from shardrt import DTensor, FSDPModule, MixedPrecisionPolicy, distribute_tensor, fully_shard, init_device_mesh


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        mixed: torch.Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class Model(nn.Module):
    def __init__(self, tokens: int = 64, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits.float()


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    """Whole tensors, in one file that rank 0 writes; every rank calls this."""
    params, states = {}, {}
    for name, param in model.named_parameters():
        params[name] = whole(param.detach())
        states[name] = {key: whole(value) for key, value in optimizer.state[param].items()}
    if rank == 0:
        torch.save((step, params, states), path)


@torch.no_grad()
def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    step, params, states = torch.load(path)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        mesh, placements = param.device_mesh, param.placements
        param.copy_(distribute_tensor(params[name], mesh, placements))
        optimizer.state[param] = {
            key: distribute_tensor(value, mesh, placements) if value.shape == param.shape else value
            for key, value in states[name].items()
        }
    return int(step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    options = parser.parse_args()

    world = shardrt.init()
    rank, size = world.rank, world.size
    device = world.device
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("dp",))

    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(options.load, model, optimizer) if options.load else 0

    for step in range(first, options.steps):
        batch = torch.randint(64, (options.accumulate, 4 * size, 17), generator=torch.Generator().manual_seed(step))
        total = torch.zeros((), device=device)
        for number, part in enumerate(batch.to(device)):
            model.set_requires_gradient_sync(number == options.accumulate - 1)
            tokens = part[rank::size]
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / options.accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = world.sum(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / size:.6f}", flush=True)
    if options.save:
        save(options.save, model, optimizer, options.steps, rank)
    shardrt.finalize()


if __name__ == "__main__":
    main()

"""Expert parallelism, and sharding of experts and the rest: python -m shardrt.launch -n 4 expert_parallel.py"""

import torch
from torch import nn

import shardrt
from shardrt.parallel import ExpertParallel, expert_load, parallelize_module

WIDTH, CLASSES, EXPERTS = 32, 16, 4


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):  # those of this rank
            rows, place = torch.where(chosen == expert)
            made = (x[rows] @ self.up[expert].T).relu() @ self.down[expert].T
            out = out.index_add(0, rows, made * weights[rows, place, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights)


def main() -> None:
    world = shardrt.init()
    mesh = shardrt.init_device_mesh(world.device.type, (world.size // 2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, CLASSES))
    parallelize_module(model, mesh["ep"], {"*.experts": ExpertParallel()})
    for name in ("1.experts", "2.experts"):
        shardrt.fully_shard(model.get_submodule(name), mesh=mesh["dp"])
    shardrt.fully_shard(model, mesh=mesh.flatten())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randint(CLASSES, (80,)).chunk(world.size)[world.rank].to(world.device)  # each rank has its own
    for step in range(20):
        loss = nn.functional.cross_entropy(model(inputs), (inputs * 3 + 1) % CLASSES)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean, load = world.mean(loss), expert_load(model)["1.experts"].tolist()
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f} rows of the first experts {load}", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()

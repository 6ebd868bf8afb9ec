"""A pipeline whose stages are sharded and tensor parallel: python -m shardrt.launch -n 8 pipeline.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

import shardrt
from shardrt.integrations import torch_distributed
from shardrt.integrations.pipelining import PipelineStage
from shardrt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, MICROBATCHES = 64, 4
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def main() -> None:
    world = torch_distributed.init_process_group()
    shape = (2, world.size // 4 or 1, 2 if world.size >= 4 else 1)
    mesh = shardrt.init_device_mesh(world.device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    pp, device = mesh["pp"], world.device
    torch.manual_seed(pp.rank)  # each stage has its own blocks
    stage = nn.Sequential(*[Block() for _ in range(3)])
    parallelize_module(stage, mesh["tp"], PLAN)
    shardrt.fully_shard(stage, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    group = torch_distributed.process_group(pp)
    pipeline = Schedule1F1B(
        PipelineStage(stage, pp.rank, 2, device, group=group, keep_parameters=True),
        MICROBATCHES,
        loss_fn=nn.functional.mse_loss,
    )
    generator = torch.Generator().manual_seed(mesh["dp"].rank)  # replicas have batches of their own, ranks of a stage the same
    batch = torch.randn(16, WIDTH, generator=generator).to(device)
    for step in range(20):
        losses: list[torch.Tensor] = []
        if pp.rank == 0:
            pipeline.step(batch)
        else:
            pipeline.step(target=batch.roll(1, 1), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == world.size - 1:
            print(f"step {step} loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()
    shardrt.finalize()


if __name__ == "__main__":
    main()

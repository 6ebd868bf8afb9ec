"""Train, save and resume with shardrt: python -m shardrt.launch -n 2 from_dcp.py runs/a"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardrt
from shardrt import checkpoint as dcp
from shardrt import fully_shard
from shardrt.checkpoint import get_state_dict, set_state_dict


class App:
    """The model and its optimizer, as one value of a checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=2)
    options = parser.parse_args()

    world = shardrt.init()
    rank, size = world.rank, world.size
    device = world.device
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))).to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    app = App(model, optimizer)

    saved = sorted(options.folder.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    if saved:
        dcp.load({"app": app}, checkpoint_id=saved[-1])
    world.barrier()
    while app.step < options.steps:
        batch = batch_of(app.step)[rank::size].to(device)
        loss = nn.functional.mse_loss(model(batch), batch.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        total = world.sum(total)
        if rank == 0:
            print(f"step {app.step} loss {total.item() / size:.6f}", flush=True)
        app.step += 1
        if app.step % options.every == 0:
            dcp.save({"app": app}, checkpoint_id=options.folder / f"step-{app.step}")
    shardrt.finalize()


if __name__ == "__main__":
    main()

"""Gather parameters by a function of your own: python -m shardrt.launch -n 2 custom_collective.py

This one counts what it gathers, then calls the communicator. Another could compress, or use another library.
"""

import torch
from torch import nn

import shardrt
from shardrt.comm import Communicator, Stream, Work

WIDTH, STEPS = 32, 20


class CountingAllGather:
    """What `set_custom_all_gather` takes: it allocates the memory to gather into, and gathers."""

    def __init__(self) -> None:
        self.calls = self.nbytes = 0

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        self.calls, self.nbytes = self.calls + 1, self.nbytes + out.nbytes
        return comm.all_gather(out, inp, stream=stream)


def main() -> None:
    world = shardrt.init()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1))
    gather = CountingAllGather()
    for module in (*blocks, model):
        shardrt.fully_shard(module)
        assert isinstance(module, shardrt.FSDPModule)
        module.set_custom_all_gather(gather)  # before the first forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    inputs = torch.randn(16, WIDTH)[world.rank :: world.size].to(world.device)
    for step in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = world.mean(loss)
        if world.rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
    if world.rank == 0:
        print(f"{gather.calls / STEPS:g} gathers and {gather.nbytes / STEPS:g} bytes per step")
    shardrt.finalize()


if __name__ == "__main__":
    main()

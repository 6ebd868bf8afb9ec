"""Train a small GPT in one process: python one_process.py model.pt"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn

CONTEXT, WIDTH, ROWS = 32, 48, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=2))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mixed: torch.Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class GPT(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.tensor(list(Path(argparse.__file__).read_bytes()))

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(data) - CONTEXT, (ROWS,), generator=torch.Generator().manual_seed(seed))
        rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).to(device)
        return rows[:, :-1], rows[:, 1:]

    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (1 + math.cos(math.pi * step / options.steps))
        loss = model(*batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if (step + 1) % 10 == 0:
            with torch.no_grad():
                held_out = model(*batch(1000 + step))
            print(f"held-out loss {held_out.item():.4f}", flush=True)
    torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()

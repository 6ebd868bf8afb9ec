"""A transformer and plans for it, and a hook that counts collectives, for tests of tensor parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from shardrt import DTensor, Replicate, Shard
from shardrt.comm import DeviceMesh, Work, World
from shardrt.comm.core.calls import CallList
from shardrt.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel
from shardrt.parallel.boundaries.axis import parts

WIDTH, HEADS = 12, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        q, k, v = (split(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for split in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), scale=0.3)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Head and embedding may share their weight; nothing divides evenly."""

    def __init__(self, vocab: int = 11, hidden: int = 17, *, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sequence_plan(*, async_tp: bool = False) -> dict[str, ParallelStyle]:
    """Sequence parallel everywhere, as torchtitan's plan for Llama."""
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm?": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(output_layouts=Shard(1), async_tp=async_tp),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1), async_tp=async_tp),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1), async_tp=async_tp),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def plain_plan() -> dict[str, ParallelStyle]:
    """Megatron-LM's first plan: activations are replicated between the modules."""
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def tokens_of(step: int, rows: int = 2, vocab: int = 11) -> torch.Tensor:
    """A batch whose length differs from step to step."""
    return torch.randint(0, vocab, (rows, 7 + step % 2), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def compare(whole: nn.Module, parallel: nn.Module, tolerance: float = 1e-11) -> None:
    """Compare every parameter and gradient. Collective."""
    for (name, expected), (found_name, found) in zip(whole.named_parameters(), parallel.named_parameters(), strict=True):
        assert name == found_name
        check_close(found, expected, tolerance, name)
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None and found.grad is not None:
            check_close(found.grad, expected.grad, tolerance, f"the gradient of {name}")


def check_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    def describe(text: str) -> str:
        return f"{name}: {text}"

    torch.testing.assert_close(full(found), expected.detach(), rtol=tolerance, atol=tolerance, msg=describe)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, without autograd. Collective."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@contextmanager
def counted(mesh: DeviceMesh, roles: tuple[str, ...] = ("tp", "tp_side", "tp_partial")) -> Iterator[Counter[str]]:
    """Count the collectives of the block on these communicators of a mesh: those of tensor parallelism."""
    counts: Counter[str] = Counter()

    def called(calls: CallList, work: Work) -> None:
        counts.update(call.name for call in calls)

    comms = [mesh.communicator(role) for role in roles]
    for comm in comms:
        comm._called.append(called)
    try:
        yield counts
    finally:
        for comm in comms:
            comm._called.remove(called)


def part(full: torch.Tensor, dim: int, world: World) -> torch.Tensor:
    """This rank's part of `full` by Shard's rule: a leaf."""
    return full.detach().split(parts(full.shape[dim], world.size), dim)[world.rank].clone().requires_grad_(full.requires_grad)


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_()


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs * 100 + outputs)
    return nn.Linear(inputs, outputs, bias=bias).double()


def local_of(tensor: torch.Tensor, layout: Replicate | Shard, world: World) -> torch.Tensor:
    if isinstance(layout, Replicate):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return part(tensor, layout.dim % tensor.dim(), world)

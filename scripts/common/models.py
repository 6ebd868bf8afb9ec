"""The models that the scripts train: a byte-level GPT, two MLPs, a stack of tiny blocks.

Each has `blocks`, an nn.ModuleList whose members are sharded one by one, then the model itself. The
weights depend on the seed only, so every rank builds the same model.

Legend: B sequences, T tokens each, C channels, H heads, D = C / H channels per head, V = 256 bytes; E experts of a layer, of
which each token goes through K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

BYTES = 256  # V: a byte-level model needs no tokenizer


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a GPT."""

    layers: int = 4
    heads: int = 4
    channels: int = 128
    context: int = 128  # the maximum sequence length
    tied: bool = True  # the head and the embedding share their weight
    experts: int = 0  # of each block, in the place of its MLP; 0: an MLP
    top_k: int = 2  # of them that a token goes through

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "channels", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.channels % self.heads != 0:
            raise ValueError(
                f"channels={self.channels} does not divide into heads={self.heads}: "
                f"use a multiple, such as {self.heads * max(1, round(self.channels / self.heads))}"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k}: expected 1 to {self.experts}, the experts of a layer")


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv.weight` are in the order (H, 3, D): any run of whole heads is an attention of its own, so that tensor
    parallelism may cut the rows. H in `forward` is the number of heads of this rank.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_channels = config.channels // config.heads
        self.qkv = nn.Linear(config.channels, 3 * config.channels, bias=False)
        self.out = nn.Linear(config.channels, config.channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_channels))  # (B, T, H, 3, D)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (B, H, T, D) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # (B, T, C)


class MLPExperts(nn.Module):
    """E MLPs without biases, of which rows go through those that they chose: what `shardrt.parallel.ExpertParallel` takes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(config.experts, 4 * config.channels, config.channels))
        self.down = nn.Parameter(torch.empty(config.experts, config.channels, 4 * config.channels))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden: (rows, C).   chosen, weights: (rows, K). Sums have a fixed order, for the same bits each time."""
        rows, top_k = chosen.shape
        order = chosen.flatten().argsort(stable=True)  # by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self.up)).tolist()
        copies = hidden[:, None].expand(rows, top_k, -1).flatten(0, 1)[order].split(counts)
        made = [F.linear(F.gelu(F.linear(x, up)), down) for x, up, down in zip(copies, self.up, self.down, strict=True)]
        restored = torch.cat(made)[order.argsort()].unflatten(0, (rows, top_k))
        return (restored * weights[..., None]).sum(1).to(hidden.dtype)


class Mixture(nn.Module):
    """A mixture of experts: a router, and the experts among which it chooses for each token.

    `bias` is added to the scores that choose, not to the weights: it keeps loads even without a loss of its own, see
    `shardrt.parallel.update_expert_bias`.
    """

    bias: torch.Tensor  # (E,), the same on all ranks

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.channels, config.experts, bias=False)
        self.experts = MLPExperts(config)
        self.register_buffer("bias", torch.zeros(config.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)  # (B * T, C)
        logits = self.router(rows)
        scores = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32))  # (B * T, E)
        chosen = (scores + self.bias).topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        return self.experts(rows, chosen, weights / weights.sum(-1, keepdim=True)).view_as(x)


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP or a mixture of experts, each with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.channels, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.channels, bias=False)
        self.mixture = Mixture(config) if config.experts else None
        if self.mixture is None:
            self.up = nn.Linear(config.channels, 4 * config.channels, bias=False)
            self.down = nn.Linear(4 * config.channels, config.channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + (self.down(F.gelu(self.up(y))) if self.mixture is None else self.mixture(y))


class GPT(nn.Module):
    """Maps bytes (B, T), at positions (T,), to logits of the next byte (B, T, V). Positions are 0 to T - 1 unless given."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.context = config.context
        self.tokens = nn.Embedding(BYTES, config.channels)
        self.positions = nn.Embedding(config.context, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.channels, bias=False)
        self.head = nn.Linear(config.channels, BYTES, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        initialize(self, seed)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MLP(nn.Module):
    """Wide layers on few rows: little compute per weight, so communication dominates."""

    def __init__(self, layers: int = 12, width: int = 1024, seed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        initialize(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(x)


class WideBlock(nn.Module):
    """A hidden layer four times as wide as the block, with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks of one width, one after the other."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 1)
        initialize(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WideMLP(Stack):
    """32 MiB of float32 parameters a block at the default width."""

    def __init__(self, layers: int = 8, width: int = 1024, seed: int = 0) -> None:
        super().__init__((WideBlock(width) for _ in range(layers)), width, seed)


class TinyBlock(nn.Module):
    """Four parameters and almost no arithmetic."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.linear(self.norm(x)))


class TinyStack(Stack):
    """A hundred tiny blocks: the host's work per block dominates the step."""

    def __init__(self, layers: int = 100, width: int = 32, seed: int = 0) -> None:
        super().__init__((TinyBlock(width) for _ in range(layers)), width, seed)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Matrices preserve the variance of their input; embeddings and residual branches start small. Nothing on meta."""
    if next(model.parameters()).is_meta:
        return
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    branches = 2 * len(list(model.get_submodule("blocks").children()))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if "norm" in name else 0.0)
            continue
        std = parameter.shape[-1] ** -0.5
        if name in ("tokens.weight", "positions.weight"):
            std = 0.1
        elif name.endswith(("attention.out.weight", "down.weight", "experts.down", "linear.weight")):
            std /= branches**0.5
        parameter.normal_(0.0, std, generator=generator)


def shard(model: nn.Module, fully_shard: Callable[[nn.Module], object]) -> None:
    """One group per block, and one for the remaining parameters: the root."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(model)


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, at least in float32. (B, T, V), (B, T) -> ()."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------- benchmarks

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a function that makes one rank's batch for it, and the loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    param_dtype: torch.dtype = torch.float32  # of gathered parameters and compute; gradients are reduced in float32


def bytes_batch(rows: int, context: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        tokens = torch.randint(BYTES, (rows, context + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def rows_batch(rows: int, width: int) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        inputs = torch.randn(rows, width, generator=generator)
        return inputs, torch.randn(rows, 1, generator=generator)

    return make


BENCH_GPT = GPTConfig(layers=6, heads=6, channels=384, context=64)
DEEP_GPT = GPTConfig(layers=8, heads=8, channels=256, context=64)
LARGE_GPT = GPTConfig(layers=4, heads=12, channels=768, context=96)
WIDE_GPT = GPTConfig(layers=6, heads=8, channels=512, context=64, tied=False)  # untied: torch's styles untie weights
GPU_GPT = GPTConfig(layers=24, heads=16, channels=2048, context=1024)  # 1.2 billion parameters
CASES = {
    "gpt": Case(lambda: GPT(BENCH_GPT), bytes_batch(1, BENCH_GPT.context), next_byte_loss),
    "gpt-256": Case(lambda: GPT(DEEP_GPT), bytes_batch(5, DEEP_GPT.context), next_byte_loss),
    "gpt-768": Case(lambda: GPT(LARGE_GPT), bytes_batch(1, LARGE_GPT.context), next_byte_loss),
    "gpt-512": Case(lambda: GPT(WIDE_GPT), bytes_batch(1, WIDE_GPT.context), next_byte_loss),
    "mlp": Case(lambda: MLP(), rows_batch(8, 1024), F.mse_loss),
    "mlp-wide": Case(lambda: WideMLP(), rows_batch(32, 1024), F.mse_loss),
    "tiny": Case(lambda: TinyStack(), rows_batch(8, 32), F.mse_loss),
    "gpt-1b": Case(lambda: GPT(GPU_GPT), bytes_batch(4, GPU_GPT.context), next_byte_loss, torch.bfloat16),
}

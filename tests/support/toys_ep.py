"""Models with grouped experts, of both signatures, and a run beside one process on all ranks' batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardrt
from shardrt import DTensor
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import ExpertParallel, parallelize_module
from toys import step_all

WIDTH, HIDDEN, VOCAB = 6, 5, 11


class RoutedExperts(nn.Module):
    """The signature of transformers' experts; gated, in a loop."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * HIDDEN, WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.4)
        self.bias = nn.Parameter(torch.randn(experts, WIDTH) * 0.1)

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert self.num_experts == len(self.up)
        out = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            gate, up = F.linear(hidden[rows], self.up[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[expert], self.bias[expert])
            out = out.index_add(0, rows, (made * weights[rows, place, None]).to(out.dtype))
        return out


class SortedExperts(nn.Module):
    """The signature of torchtitan's `GroupedExperts`."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) * 0.4) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.4)

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        parts = x.split(num_tokens_per_expert.tolist())
        weights = zip(parts, self.w1, self.w2, self.w3, strict=True)
        return torch.cat([(F.silu(part @ w1.T) * (part @ w3.T)) @ w2.T for part, w1, w2, w3 in weights])


class MoE(nn.Module):
    """A router with a bias that only chooses, experts, and one that all rows share."""

    def __init__(self, experts: int, top_k: int, *, sorted_rows: bool) -> None:
        super().__init__()
        self.top_k, self.sorted_rows = top_k, sorted_rows
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = SortedExperts(experts) if sorted_rows else RoutedExperts(experts)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = self.gate(rows).sigmoid()
        chosen = (scores + self.bias).topk(self.top_k, -1).indices
        weights = scores.gather(1, chosen)
        made = self._sorted(rows, chosen, weights) if self.sorted_rows else self.experts(rows, chosen, weights)
        return x + (made + self.shared(rows)).view_as(x)

    def _sorted(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = chosen.reshape(-1).argsort(stable=True)
        counts = torch.bincount(chosen.reshape(-1), minlength=self.gate.out_features)
        made = self.experts(rows[order // self.top_k], counts) * weights.reshape(-1)[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.top_k, made)


class MoEModel(nn.Module):
    def __init__(self, experts: int = 6, top_k: int = 2, *, sorted_rows: bool = False, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(MoE(experts, top_k, sorted_rows=sorted_rows) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Another number of rows on each rank, and each in another range of tokens, so that loads are uneven."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(rank % 3, VOCAB - step % 4, (1 + rank % 2, 5 + rank), generator=generator)


def mesh_of(world: World, ep: int) -> DeviceMesh:
    return DeviceMesh(world.comm, (world.size // ep, ep), ("dp", "ep"))


def divide(
    model: nn.Module, mesh: DeviceMesh, pattern: str = "layers.*.experts", *, sorted_rows: bool = False, **options: Any
) -> nn.Module:
    """Experts over "ep", and then each module over the ranks that have its parameters."""
    parallelize_module(model, mesh["ep"], {pattern: ExpertParallel(sorted_rows=sorted_rows)})
    for module in model.modules():
        if getattr(vars(module).get("tp_state"), "experts", None) is not None:
            shardrt.fully_shard(module, mesh=mesh["dp"], **options)
    return shardrt.fully_shard(model, mesh=mesh.flatten(), **options)


def train_beside_one_process(
    world: World,
    mesh: DeviceMesh,
    whole: nn.Module,
    divided: Callable[[nn.Module], nn.Module],
    *,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    batch: Callable[[int, int], torch.Tensor] = batch_of,
    clip: float | None = None,
    steps: int = 3,
    tolerance: float = 1e-12,
) -> nn.Module:
    """Compare losses, norms, gradients and parameters of every step with those of one process. Returns the divided model."""
    model = divided(copy.deepcopy(whole))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (whole, model)]
    for step in range(steps):
        terms = [loss(whole, batch(step, rank)) for rank in range(world.size)]
        torch.stack(terms).mean().backward()
        found = loss(model, batch(step, world.rank))
        found.backward()
        torch.testing.assert_close(found, terms[world.rank], rtol=tolerance, atol=tolerance)
        if clip is not None:
            norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), clip) for each in (whole, model)]
            full = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
            torch.testing.assert_close(full, norms[0], rtol=tolerance, atol=tolerance)
        compare(model, whole, tolerance)
        step_all(*optimizers)
    compare(model, whole, 10 * tolerance)
    return model


def full_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(model: nn.Module, whole: nn.Module, tolerance: float) -> None:
    """Parameters and gradients, whole. A gradient that one process lacks is of zeros here, or missing."""
    for (name, param), (_, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        torch.testing.assert_close(full_of(param.detach()), expected.detach(), rtol=tolerance, atol=tolerance, msg=name)
        if param.grad is not None:
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            torch.testing.assert_close(full_of(param.grad), wanted, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert expected.grad is None, name

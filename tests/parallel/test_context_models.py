"""Training of models under context parallelism, with sharding and tensor parallelism, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    context_parallel,
    context_parallel_shard,
    parallelize_module,
    tokens_per_rank,
)
from toys import compare, shard_blocks

VOCABULARY, TOKENS, ROWS = 13, 22, 4
every_method = pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])


class Block(nn.Module):
    """Six heads of queries and two of keys and values, or as many as are given."""

    def __init__(self, heads: tuple[int, int] = (6, 2), width: int = 24, head: int = 4) -> None:
        super().__init__()
        self.head = head
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, count * head) for count in (heads[0], heads[1], heads[1]))
        self.out = nn.Linear(heads[0] * head, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, recompute: bool = False, heads: tuple[int, int] = (6, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 24), nn.Embedding(TOKENS, 24)
        self.blocks = nn.ModuleList(Block(heads) for _ in range(2))
        self.head = nn.Linear(24, VOCABULARY)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and labels; those of the last rows are ignored unevenly."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[1, 3:9] = labels[3, :20] = -100
    return tokens[:, :-1].to(device), torch.arange(TOKENS, device=device).expand(ROWS, TOKENS), labels.to(device)


def sum_of_losses(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")


def train(
    world: World,
    mesh: DeviceMesh,
    shard: Callable[[nn.Module], object],
    model: Model,
    method: Any = "ring",
    documents: bool = False,
) -> None:
    """Two backwards by all ranks and by one process: losses and gradients. mesh: of axes "dp" and "cp"."""
    model = model.double().to(world.device)
    whole = copy.deepcopy(model)
    shard(model)
    ids = torch.arange(TOKENS, device=world.device) // 9 if documents else None
    for _ in range(2):
        inputs = batch(world.device)
        expected = sum_of_losses(Masked(whole, ids), *inputs) / (inputs[2] != -100).sum()
        expected.backward()

        buffers = [tensor.chunk(mesh.shape[0])[mesh.coordinates[0]].clone() for tensor in inputs]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1] * 3, document_ids=ids, method=method):
            loss = sum_of_losses(model, *buffers) / tokens_per_rank(mesh, buffers[2], dtype=torch.float64)
            loss.backward()
        mean = sum(mesh.exchange(loss.item())) / mesh.size
        assert abs(mean - expected.item()) < 1e-12
        compare(whole, model, 1e-12, "")


class Masked(nn.Module):
    """A model on one process whose attention stays within documents, by a mask."""

    def __init__(self, model: nn.Module, ids: torch.Tensor | None) -> None:
        super().__init__()
        self.model, self.ids = model, ids

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if self.ids is None:
            return self.model(*inputs)
        original, mask = F.scaled_dot_product_attention, (self.ids[:, None] == self.ids).tril()
        masked = lambda *args, is_causal, **options: original(*args, attn_mask=mask, **options)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", masked)
            return self.model(*inputs)


@pytest.mark.parametrize(("method", "documents"), [("ring", False), ("ring", True), ("all_gather", True), ("ulysses", True)])
@on_ranks(1, 2, 4)
def test_sharded_over_both_axes(world: World, method: str, documents: bool) -> None:
    cp = min(world.size, 2)
    mesh = DeviceMesh(world.comm, (world.size // cp, cp), ("dp", "cp"))
    train(world, mesh, partial(shard_blocks, mesh=mesh.flatten()), Model(), method, documents)


@on_ranks(3, 4)
def test_more_ranks_of_the_ring(world: World) -> None:
    mesh = DeviceMesh(world.comm, (1, world.size), ("dp", "cp"))
    train(world, mesh, partial(shard_blocks, mesh=mesh.flatten()), Model())


@on_ranks(2, 4)
def test_recomputed_blocks(world: World) -> None:
    mesh = DeviceMesh(world.comm, (world.size // 2, 2), ("dp", "cp"))
    train(world, mesh, partial(shard_blocks, mesh=mesh.flatten()), Model(recompute=True))


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@on_ranks(3, 4)
def test_a_rank_without_tokens(world: World, method: str) -> None:
    """Two tokens: the losses of other ranks are sums of nothing."""
    mesh = DeviceMesh(world.comm, (world.size,), ("cp",))
    model = Model().double().to(world.device)
    whole = copy.deepcopy(model)
    shard_blocks(model, mesh=mesh)
    buffers = [tensor[:, :2].clone() for tensor in batch(world.device)]
    expected = sum_of_losses(whole, *buffers) / (buffers[2] != -100).sum()
    expected.backward()
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, method=method):
        lengths = mesh.exchange(buffers[0].shape[1])
        loss = sum_of_losses(model, *buffers) / tokens_per_rank(mesh, buffers[2], dtype=torch.float64)
        loss.backward()
    assert min(lengths) == 0
    assert abs(sum(mesh.exchange(loss.item())) / mesh.size - expected.item()) < 1e-12
    compare(whole, model, 1e-12, "")


@every_method
@on_ranks(2)
def test_mixed_precision(world: World, method: str) -> None:
    """Compute in bfloat16: as close to float32 as it is on one process."""
    mesh = DeviceMesh(world.comm, (world.size,), ("cp",))
    model = Model(heads=(4, 2)).to(world.device)
    whole = copy.deepcopy(model)
    policy = shardrt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_blocks(model, mesh=mesh, mp_policy=policy)
    inputs = batch(world.device)
    expected = sum_of_losses(whole, *inputs) / (inputs[2] != -100).sum()
    expected.backward()
    buffers = [tensor.clone() for tensor in inputs]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, method=method):
        logits = model(*buffers[:2])
        total = F.cross_entropy(logits.float().flatten(0, 1), buffers[2].flatten(), reduction="sum")
        loss = total / tokens_per_rank(mesh, buffers[2])
        loss.backward()
    assert logits.dtype is torch.bfloat16
    assert abs(sum(mesh.exchange(loss.item())) / mesh.size - expected.item()) < 2e-2
    compare(whole, model, 2e-2, "")


@on_ranks(4)
def test_hybrid_sharding(world: World) -> None:
    """Replicas along dp, shards along cp."""
    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "cp"))
    train(world, mesh, partial(shard_blocks, mesh=mesh), Model())


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@on_ranks(2, 4)
def test_tensor_parallel(world: World, method: str) -> None:
    """Each rank of "tp" has half of the heads; on four ranks each has half of the tokens as well."""
    mesh = DeviceMesh(world.comm, (1, world.size // 2, 2), ("dp", "cp", "tp"))
    rows = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan = rows | {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}

    def shard(model: nn.Module) -> None:
        parallelize_module(model, mesh["tp"], plan)
        shard_blocks(model, mesh=mesh["dp", "cp"].flatten())

    train(world, mesh["dp", "cp"], shard, Model(heads=(8, 4)), method)


def of_transformers(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="sdpa",
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@on_ranks(2, 3)
def test_models_of_transformers(world: World, kind: str, recompute: bool) -> None:
    """As they are, with few heads of keys: tokens, labels, positions and a mask of ones are cut."""
    model = of_transformers(kind).double().to(world.device)
    whole = copy.deepcopy(model)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = DeviceMesh(world.comm, (world.size,), ("cp",))
    shard_blocks(model, "model.layers", mesh=mesh)

    tokens, positions, labels = batch(world.device)
    ones = torch.ones_like(tokens)
    expected = whole(input_ids=tokens, shift_labels=labels, labels=labels, num_items_in_batch=(labels != -100).sum()).loss
    expected.backward()
    buffers = [tokens, positions.contiguous(), labels, ones]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4):
        loss = model(
            input_ids=tokens,
            position_ids=buffers[1],
            attention_mask=ones,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=tokens_per_rank(mesh, labels),
        ).loss
        loss.backward()
    assert abs(sum(mesh.exchange(loss.item())) / mesh.size - expected.item()) < 1e-6  # the loss is in float32
    compare(whole, model, 1e-6, "")


@on_ranks(2)
def test_a_mask_of_transformers_is_refused(world: World) -> None:
    """It takes positions that jump for two sequences."""
    model, mesh = of_transformers("Llama"), DeviceMesh(world.comm, (2,), ("cp",))
    tokens, positions = context_parallel_shard(mesh, batch(torch.device("cpu"))[:2], [1, 1])
    with context_parallel(mesh, seq_len=TOKENS), pytest.raises(NotImplementedError, match="pass an attention_mask of ones"):
        model(input_ids=tokens, position_ids=positions, use_cache=False)

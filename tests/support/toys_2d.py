"""A tensor-parallel transformer block by hand: boundary functions, `DTensor` parameters, and a run beside the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shardrt
from shardrt import DTensor, Partial, Replicate, Shard
from shardrt.comm import DeviceMesh, ReduceOp, World, current_stream
from shardrt.fsdp.memory import context
from shardrt.tensor.dtensor.replicated import mark_replicated
from shardrt.tensor.placement.placement import Spec
from toys import buckets_of, compare, step_all

SEQUENCE = 6  # positions; divisible by 2 and 3


class Sum(torch.autograd.Function):
    """All-reduce in forward, in backward, or neither; what is not reduced is passed on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, forward: bool) -> torch.Tensor:
        ctx.mesh, ctx.forward_sums = mesh, forward
        return added_up(x, mesh) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad if ctx.forward_sums else added_up(grad, ctx.mesh), None, None


class Gather(torch.autograd.Function):
    """Gather along the sequence; backward: this rank's part of the gradient, or of its sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, partial: bool) -> torch.Tensor:
        ctx.mesh, ctx.partial = mesh, partial
        return gathered(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = added_up(grad, ctx.mesh) if ctx.partial else grad
        return whole.chunk(ctx.mesh.size, 1)[ctx.mesh.rank].contiguous(), None, None


class Scatter(torch.autograd.Function):
    """This rank's part along the sequence, of a tensor or of the sum over the ranks; backward: gather."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, partial: bool) -> torch.Tensor:
        ctx.mesh = mesh
        whole = added_up(x, mesh) if partial else x
        return whole.chunk(mesh.size, 1)[mesh.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gathered(grad, ctx.mesh), None, None


def added_up(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    out, stream = torch.empty_like(x, memory_format=torch.contiguous_format), current_stream(mesh.device)
    mesh.communicator("test").all_reduce(out, x.contiguous(), ReduceOp.SUM, stream=stream).wait(stream)
    return out


def gathered(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    out, stream = x.new_empty(mesh.size, *x.shape), current_stream(mesh.device)
    mesh.communicator("test").all_gather(out, x.contiguous(), stream=stream).wait(stream)
    return torch.cat(list(out), 1)


class Block(nn.Module):
    """A norm and an MLP with a residual. With a mesh: `up` by columns, `down` by rows, the norm on a part of the sequence."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.tp: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale
        whole = Gather.apply(self.norm(x), self.tp, True)
        terms = nn.functional.linear(torch.tanh(self.up(whole)), self.down.weight)
        return x + (Scatter.apply(terms, self.tp, True) + self.down.bias) * self.scale


class Toy(nn.Module):
    """Tied embedding and head, cut over the vocabulary, with blocks in between."""

    def __init__(self, hidden: int = 17, width: int = 7, vocab: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.tp: DeviceMesh | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(self.embedded(x))
        x = x if self.tp is None else Scatter.apply(x, self.tp, False)
        for block in self.blocks:
            x = block(x)
        if self.tp is None:
            return self.head(x)
        logits = self.head(Gather.apply(x, self.tp, True))
        numels = [rows for rows in Shard(0).resolve(torch.Size([self.vocab]), self.tp.size).rows]
        padded = nn.functional.pad(logits, (0, max(numels) - logits.shape[-1]))
        parts = PadGather.apply(padded, self.tp)
        return torch.cat([part[..., :rows] for part, rows in zip(parts, numels, strict=True)], -1)

    @property
    def vocab(self) -> int:
        return self.head.out_features

    def embedded(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return self.embed(x)
        rows = Shard(0).resolve(torch.Size([self.vocab]), self.tp.size).rows
        first, mine = sum(rows[: self.tp.rank]), self.embed.weight
        outside = (x < first) | (x >= first + mine.shape[0])
        table = mine if mine.shape[0] else torch.cat([mine, mine.new_zeros(1, mine.shape[1])])
        found = nn.functional.embedding((x - first).masked_fill(outside, 0), table)
        return Sum.apply(found.masked_fill(outside[..., None], 0.0), self.tp, True)


class PadGather(torch.autograd.Function):
    """The ranks' tensors of one shape, as one more dim in front; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        out, stream = x.new_empty(mesh.size, *x.shape), current_stream(mesh.device)
        mesh.communicator("test").all_gather(out, x.contiguous(), stream=stream).wait(stream)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[ctx.mesh.rank], None


def parallelize(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Make the parameters of a `Toy` tensor-parallel, and mark those that stay plain."""
    for module in model.modules():
        if isinstance(module, (Toy, Block)):
            module.tp = tp
        if isinstance(module, Block):
            distribute(module.up, "weight", tp, Shard(0))
            distribute(module.up, "bias", tp, Shard(0))
            distribute(module.down, "weight", tp, Shard(1))
            for owner in (module.norm, module.down):
                distribute(owner, "bias", tp, Replicate(), partial=True)
            distribute(module.norm, "weight", tp, Replicate(), partial=True)
            distribute(module, "scale", tp, Replicate(), partial=True)
    if isinstance(model, Toy):
        distribute(model.embed, "weight", tp, Shard(0))
        model.head.weight = model.embed.weight
    for param in model.parameters():
        if not isinstance(param, DTensor):
            mark_replicated(param, tp)
    return model


def distribute(module: nn.Module, name: str, tp: DeviceMesh, placement: Shard | Replicate, *, partial: bool = False) -> None:
    whole = getattr(module, name)
    spec = Spec.of(tp, [placement], whole.shape)
    local = spec.local_shard(whole.detach()).clone(memory_format=torch.contiguous_format)  # also on the meta device
    made = nn.Parameter(DTensor(local, spec), requires_grad=whole.requires_grad)
    if partial:
        made.grad_placements = (Partial(),)
    setattr(module, name, made)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads_width = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.heads_width)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.tanh(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """With tied embedding and head. Plain: styles parallelize it."""

    def __init__(self, hidden: int = 17, width: int = 12, heads: int = 6, vocab: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def meshes(world: World, tp: int, replicas: int = 0) -> tuple[DeviceMesh, DeviceMesh]:
    """The data parallel mesh, of two axes with `replicas`, and the tensor parallel one."""
    dp = world.size // tp
    if not replicas:
        mesh = DeviceMesh(world.comm, (dp, tp), ("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    mesh = DeviceMesh(world.comm, (replicas, dp // replicas, tp), ("replicate", "shard", "tp"))
    return mesh["replicate", "shard"], mesh["tp"]


def words(step: int, rows: int = 12) -> torch.Tensor:
    return torch.randint(0, 11, (rows, SEQUENCE), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


def shard(model: nn.Module, dp: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        shardrt.fully_shard(block, mesh=dp, **options)
    return shardrt.fully_shard(model, mesh=dp, **options)


def train(
    dp: DeviceMesh,
    tp: DeviceMesh,
    whole: nn.Module,
    *,
    steps: Iterable[int] = range(3),
    microbatches: int = 1,
    tolerance: float = 1e-12,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    max_norm: float | None = None,
    cut: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None,
    **options: Any,
) -> nn.Module:
    """Train `whole` on full batches and a tensor-parallel, sharded copy on this rank's rows; compare after every step."""
    model = shard((cut or parallelize)(copy.deepcopy(whole), tp), dp, **options)
    for each in (whole, model):
        prepare(each)
    make = optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3))
    optimizers = [make(each.parameters()) for each in (whole, model)]
    for step in steps:
        x = words(step)
        loss_of(whole, x).backward()
        with buckets_of(context.BUCKET_BYTES if step % 2 else 0):
            for index, micro in enumerate(x.chunk(dp.size)[dp.rank].chunk(microbatches)):
                model.set_requires_gradient_sync(index == microbatches - 1)
                (loss_of(model, micro) / microbatches).backward()
        compare(whole, model, tolerance, f"step {step}")
        if max_norm is not None:
            expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
            found = shardrt.clip_grad_norm_(model.parameters(), max_norm)
            torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
            compare(whole, model, tolerance, f"clipped in step {step}")
        step_all(*optimizers)
        compare(whole, model, tolerance, f"after step {step}")
    return model

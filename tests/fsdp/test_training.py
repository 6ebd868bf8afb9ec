"""Sharded training on real ranks against the same model trained in one process on the whole batch, in float64."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, settings_of
from shardrt.comm import World
from shardrt.fsdp.reduce.packed_grads import PackedGrads
from shardrt.fsdp.schedule.param_group import ParamGroup
from toys import (
    Branching,
    OddMLP,
    Skipping,
    TiedGPT,
    UsedTwice,
    batch,
    buckets_of,
    loss_of,
    paired,
    shard_blocks,
    step_all,
    tokens,
    train_side_by_side,
)

STEPS = 6


@on_ranks(1, 2, 3, 4)
def test_gpt_with_tied_embeddings(world: World) -> None:
    sharded = train_side_by_side(world, TiedGPT().double(), map(tokens, range(STEPS)))
    assert sharded.head.weight is sharded.tokens.weight
    assert len(sharded.param_group.params) == 1


@on_ranks(1, 2, 3, 4)
def test_odd_sizes(world: World) -> None:
    train_side_by_side(world, OddMLP().double(), map(batch, range(STEPS)))


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2, 3)
def test_reshard_after_forward(world: World, reshard: bool | None) -> None:
    shard = functools.partial(shard_blocks, reshard_after_forward=reshard)
    model = train_side_by_side(world, OddMLP().double(), map(batch, range(3)), shard=shard)
    with buckets_of(0):
        loss_of(model, batch(0))
    kept = [group.state.gathered for group in model.param_group.with_descendants()]
    # By default the root and the block that the backward begins with stay gathered.
    assert kept == {True: [False] * 4, False: [True] * 4, None: [True, False, False, True]}[reshard]


@on_ranks(2, 3, more=(1, 4))
def test_frozen_parameters(world: World) -> None:
    model = OddMLP().double()
    for name, param in model.named_parameters():
        param.requires_grad_("up" not in name and "norm" not in name and "blocks.2" not in name)
    train_side_by_side(world, model, map(batch, range(STEPS)))


@on_ranks(2, 3)
def test_freezing_between_steps(world: World) -> None:
    def freeze(step: int, model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(not (step in (1, 2) and ("up" in name or "inp" in name)))

    train_side_by_side(world, OddMLP().double(), map(batch, range(5)), before_step=freeze)


@on_ranks(2, 3, more=(1, 4))
def test_module_used_twice(world: World) -> None:
    train_side_by_side(world, UsedTwice().double(), map(batch, range(STEPS)))


@on_ranks(1, 2, 3)
def test_branches(world: World) -> None:
    train_side_by_side(world, Branching().double(), map(batch, range(STEPS)))


@on_ranks(2, 3, more=(1, 4))
def test_module_skipped_in_one_step(world: World) -> None:
    def skip(step: int, model: nn.Module) -> None:
        assert isinstance(model, Skipping)
        model.skip = step in (3, 4)

    train_side_by_side(world, Skipping().double(), map(batch, range(STEPS)), before_step=skip)


@on_ranks(2, 3, more=(1, 4))
def test_accumulation_over_three_microbatches(world: World) -> None:
    train_side_by_side(world, OddMLP().double(), (batch(s, 36) for s in range(STEPS)), microbatches=3)


class Conv(nn.Module):
    """Parameters of three and four dims, one of them non-contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv1d(1, 5, 3, padding=1), nn.Conv1d(5, 3, 3)])
        self.strided = nn.Parameter(torch.randn(4, 3, 7).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.blocks[0](x[:, None, :]))
        return self.blocks[1](y).mean(2) + torch.einsum("abc->c", self.strided)


@pytest.mark.parametrize(("kind", "dim"), [*((OddMLP, dim) for dim in (0, 1, -1)), *((Conv, dim) for dim in (0, 1, 2))])
@on_ranks(2, 3, 4, more=(1,))
def test_shard_dims(world: World, kind: type[nn.Module], dim: int) -> None:
    def placement(param: nn.Parameter) -> shardrt.Shard:
        return shardrt.Shard(dim if param.dim() > 1 else 0)

    shard = functools.partial(shard_blocks, shard_placement_fn=placement)
    train_side_by_side(world, kind().double(), map(batch, range(5)), shard=shard)


@on_ranks(2, 3, 4)
def test_all_dims_in_one_group(world: World) -> None:
    """Three parameters sharded along dims 0, 1 and 2: uneven, with fewer rows than ranks, one of them frozen."""

    def shard(model: Conv) -> None:
        dims = {model.blocks[0].weight: 0, model.blocks[1].weight: 1, model.strided: 2}
        shardrt.fully_shard(model, shard_placement_fn=lambda param: shardrt.Shard(dims.get(param, 0)))

    model = Conv().double()
    model.blocks[0].bias.requires_grad_(False)
    train_side_by_side(world, model, map(batch, range(4)), shard=shard)


class Checkpointed(OddMLP):
    """Checkpoints each block from outside."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


def _recompute_inside(model: nn.Module, use_reentrant: bool) -> None:
    """Checkpoints inside the sharded module, whose hooks are outside the checkpoint."""
    for block in model.get_submodule("blocks").children():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["around", "inside"])
@on_ranks(2, 3, more=(1, 4))
def test_activation_checkpointing(world: World, where: str, use_reentrant: bool) -> None:
    def shard(model: nn.Module) -> None:
        if where == "inside":
            _recompute_inside(model, use_reentrant)
        shard_blocks(model)

    model = (Checkpointed if where == "around" else OddMLP)().double()
    if isinstance(model, Checkpointed):
        model.use_reentrant = use_reentrant
    train_side_by_side(world, model, map(batch, range(4)), shard=shard)


@on_ranks(1, 2, 3)
def test_threaded_streams_give_the_same_bits(world: World) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = shard_blocks(OddMLP())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(5):
            loss_of(model, batch(step).float().chunk(world.size)[world.rank]).backward()
            step_all(optimizer)
        return [param.full_tensor() for param in model.parameters()]

    inline = train()
    with settings_of(world, host_streams="threaded"):
        threaded = train()
    for one, other in zip(inline, threaded, strict=True):
        assert torch.equal(one, other)


class Towers(nn.Module):
    """Blocks whose inputs require no gradient: each looks up its own indices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.EmbeddingBag(11, 4) for _ in range(4))
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = sum(block(x) for block in self.blocks)
        return self.out(total)


@on_ranks(2)
@buckets_of(0)
def test_blocks_without_input_gradients_reduce_during_backward(world: World) -> None:
    model = Towers().double()
    shard_blocks(model)
    groups = list(model.param_group.with_descendants())
    order: list[str] = []

    def spy(group: ParamGroup, reduce_grads: Callable[[PackedGrads], None], packed: PackedGrads) -> None:
        order.append(group.name)
        reduce_grads(packed)

    for group in groups:
        group.reduce_grads = functools.partial(spy, group, group.reduce_grads)

    def end_backward(group: ParamGroup, original: Callable[[ParamGroup], None] = groups[0].calls.end_backward) -> None:
        order.append("end")
        original(group)

    groups[0].calls.end_backward = end_backward
    model(tokens(0)).sum().backward()
    assert order == ["Towers", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "end"]
    assert all(param.grad is not None for param in model.parameters())


def _bf16_step(master: nn.Module, parts: tuple[torch.Tensor, ...]) -> None:
    """The reference: each rank's gradient in bfloat16, their mean in float32 in rank order, on float32 parameters."""
    low = type(master)().bfloat16()
    sums: dict[str, torch.Tensor] = {}
    for part in parts:
        low.load_state_dict(master.state_dict())
        low.zero_grad()
        loss_of(low, part.bfloat16()).backward()
        for name, param in low.named_parameters():
            sums[name] = sums[name] + param.grad.float() if name in sums else param.grad.float()
    for name, param in master.named_parameters():
        param.grad = sums[name] / len(parts)


@on_ranks(1, 2, 3, 4)
def test_bf16_parameters_with_float32_reduction(world: World) -> None:
    policy = shardrt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole, sharded = paired(OddMLP(), mp_policy=policy)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (whole, sharded)]
    for step in range(STEPS):
        parts = batch(step).float().chunk(world.size)
        _bf16_step(whole, parts)
        mine = parts[world.rank]
        out = sharded(mine)
        assert out.dtype == torch.bfloat16
        ((out - mine.bfloat16()[:, :3]) ** 2).mean().backward()
        for (name, expected), param in zip(whole.named_parameters(), sharded.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), expected.grad), f"gradient of {name} in step {step}"
        for optimizer in optimizers:
            optimizer.step()
        sharded.zero_grad()
    for (name, expected), param in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert param.dtype == torch.float32
        assert torch.equal(param.full_tensor(), expected), name


@on_ranks(2, 3)
def test_output_dtype(world: World) -> None:
    policy = shardrt.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = shardrt.fully_shard(OddMLP(), mp_policy=policy)
    out = model(batch(0).float())
    assert out.dtype == torch.float32
    out.sum().backward()
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


@on_ranks(2, 4)
def test_mixed_original_dtypes(world: World) -> None:
    """float32 and bfloat16 parameters in one group, some frozen."""
    torch.manual_seed(3)
    model = OddMLP()
    for block in model.blocks:
        block.gate.data = block.gate.data.bfloat16()
        block.scale.requires_grad_(False)
    train_side_by_side(world, model, (batch(s).float() for s in range(3)), tolerance=2e-3)


class Detached(nn.Module):
    """Its backward reads a parameter after that parameter's gradient is complete, since the saved one is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * self.weight.detach() * 2 * self.weight


@on_ranks(1, 2, 3)
def test_a_detached_use_of_a_parameter(world: World) -> None:
    class First3(Detached):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:, :3]

    train_side_by_side(world, First3().double(), map(batch, range(4)))


@on_ranks(2)
def test_a_first_forward_in_inference_mode(world: World) -> None:
    model = OddMLP().double()
    sharded = shard_blocks(OddMLP().double())
    sharded.load_state_dict(model.state_dict())
    with torch.inference_mode():
        out = sharded(batch(0))
    torch.testing.assert_close(out, model(batch(0)).detach(), rtol=1e-12, atol=1e-12)
    loss_of(sharded, batch(0).chunk(world.size)[world.rank]).backward()
    assert all(param.grad is not None for param in sharded.parameters())

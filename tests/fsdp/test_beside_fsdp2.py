"""On 2 ranks the result is bitwise equal to that of PyTorch's FSDP2 on gloo."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardrt
from ranks import on_ranks
from shardrt.comm import World
from toys import OddMLP, Skipping, TiedGPT, UsedTwice, batch, loss_of, shard_blocks, tokens, without_scalars

STEPS = 10


def shard_with_fsdp2(model: nn.Module, **options: object) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    world: World, model: nn.Module, batches: list[torch.Tensor], microbatches: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The losses, and all parameters after the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, x in enumerate(batches):
        if isinstance(model, Skipping):
            model.skip = step == 3
        for index, micro in enumerate(x.chunk(world.size)[world.rank].chunk(microbatches)):
            model.set_requires_gradient_sync(index == microbatches - 1)
            loss = loss_of(model, micro)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [param.full_tensor().detach() for param in model.parameters()]


def float_batches(rows: int = 12) -> list[torch.Tensor]:
    return [batch(step, rows).float() for step in range(STEPS)]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[torch.Tensor]], int]] = {
    "gpt": (TiedGPT, lambda: [tokens(step) for step in range(STEPS)], 1),
    "odd": (OddMLP, float_batches, 1),
    "twice": (UsedTwice, float_batches, 1),
    "skipping": (Skipping, float_batches, 1),
    "accumulating": (OddMLP, lambda: float_batches(36), 3),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_the_same_bits_as_fsdp2(world: World, case: str, tmp_path: Path) -> None:
    _compare(world, case, tmp_path, shard_blocks, shard_with_fsdp2)


@on_ranks(2)
def test_the_same_bits_as_fsdp2_in_bf16(world: World, tmp_path: Path) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours = functools.partial(shard_blocks, mp_policy=shardrt.MixedPrecisionPolicy(**dtypes))
    theirs = functools.partial(shard_with_fsdp2, mp_policy=MixedPrecisionPolicy(**dtypes))
    _compare(world, "odd", tmp_path, ours, theirs)


def _compare(
    world: World,
    case: str,
    folder: Path,
    ours: Callable[[nn.Module], nn.Module],
    theirs: Callable[[nn.Module], nn.Module],
) -> None:
    make, batches, microbatches = CASES[case]
    model = without_scalars(make())  # FSDP2 does not shard scalars
    peer = copy.deepcopy(model)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=world.rank, world_size=world.size)
    try:
        expected_losses, expected = train(world, theirs(peer), batches(), microbatches)
    finally:
        dist.destroy_process_group()
    losses, found = train(world, ours(model), batches(), microbatches)
    for step, (loss, expected_loss) in enumerate(zip(losses, expected_losses, strict=True)):
        assert torch.equal(loss, expected_loss), f"loss {step}: {loss} and FSDP2's {expected_loss}"
    for (name, _), one, other in zip(model.named_parameters(), found, expected, strict=True):
        assert torch.equal(one, other), f"{name} differs by {(one - other).abs().max()}"

"""Pipelines of torch over stages that shardrt has sharded, beside one process."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks
from shardrt import checkpoint
from shardrt.comm import DeviceMesh, World
from shardrt.comm.calls import CallList, Hook
from shardrt.comm.control import hooked
from shardrt.integrations import torch_distributed
from shardrt.integrations.pipelining import PipelineStage

KINDS: dict[str, tuple[Any, int]] = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "looped": (pipelining.ScheduleLoopedBFS, 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
}
MICROBATCHES, ROWS, WIDTH = 4, 3, 13


class Reductions(Hook):
    """Counts collectives by communicator."""

    def __init__(self) -> None:
        self.found = Counter[str]()

    def before(self, calls: CallList) -> None:
        self.found.update(f"{call.comm.name} {call.name}" for call in calls)


@contextlib.contextmanager
def default_group() -> Iterator[None]:
    torch_distributed.init_process_group("cpu")
    try:
        yield
    finally:
        dist.destroy_process_group()


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, 29), nn.GELU(), nn.Linear(29, WIDTH)).double() for _ in range(count)]


def batch(step: int, replica: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(MICROBATCHES * ROWS, WIDTH, dtype=torch.float64, generator=generator)


def train_whole(stages: int, replicas: int) -> tuple[nn.Module, list[float]]:
    model = nn.Sequential(*blocks(stages))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    losses = []
    for step in range(3):
        inp = torch.cat([batch(step, replica) for replica in range(replicas)])
        loss = (model(inp) - inp).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def make_stages(mesh: DeviceMesh, of_each: int, keep: bool) -> list[PipelineStage]:
    pp, group = mesh["pp"], torch_distributed.process_group(mesh["pp"])
    count = int(pp.size) * of_each
    every = blocks(count)
    mine = range(pp.rank, count, int(pp.size))
    for index in mine:
        shardrt.fully_shard(every[index][0], mesh=mesh["dp"])  # a group inside, and the rest
        shardrt.fully_shard(every[index], mesh=mesh["dp"])
    return [PipelineStage(every[i], i, count, torch.device("cpu"), group=group, keep_parameters=keep) for i in mine]


def train(world: World, kind: str, mesh: DeviceMesh, keep: bool, seen: Reductions) -> tuple[list[PipelineStage], list[float]]:
    schedule_class, of_each = KINDS[kind]
    stages = make_stages(mesh, of_each, keep)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(params, 1e-2, foreach=False)
    schedule = schedule_class(stages[0] if of_each == 1 else stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    first, last = mesh["pp"].rank == 0, mesh["pp"].rank == mesh["pp"].size - 1
    losses = []
    for step in range(3):
        if step == 2:  # torch learns shapes in the first one
            seen.found.clear()
        inp, found = batch(step, mesh["dp"].rank), list[torch.Tensor]()
        given = {"target": inp, "losses": found} if last else {}
        schedule.step(*([inp] if first else []), **given)
        optimizer.step()
        optimizer.zero_grad()
        losses += [torch.stack(found).mean().item()] if last else []
    return stages, losses


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_sharded_stages_train_as_one_process(world: World, kind: str, keep: bool) -> None:
    replicas, seen = world.size // 2, Reductions()
    mesh = shardrt.init_device_mesh("cpu", (2, replicas), mesh_dim_names=("pp", "dp"))
    with default_group(), hooked(seen):
        stages, losses = train(world, kind, mesh, keep, seen)
    count = 2 * KINDS[kind][1]
    model, expected = train_whole(count, replicas)
    assert isinstance(model, nn.Sequential)
    for stage in stages:
        for found, whole in zip(stage.submod.parameters(), model[stage.stage_index].parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), whole.data, rtol=0, atol=1e-12)
    everyone = mesh["dp"].exchange(losses)
    if losses:
        means = [sum(each) / replicas for each in zip(*everyone, strict=True)]
        assert means == pytest.approx(expected, abs=1e-12)
    reduced = sum(number for name, number in seen.found.items() if name.endswith("reduce_scatter"))
    assert reduced <= 2 * len(stages), "once in a step"
    assert replicas == 1 or reduced > 0


@on_ranks(4)
def test_checkpoints_have_all_stages(world: World) -> None:
    mesh = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with default_group(), shared_folder(world) as folder:
        stages, _ = train(world, "interleaved", mesh, False, Reductions())
        states = {f"stage{stage.stage_index}": stage.submod.state_dict() for stage in stages}
        checkpoint.save(states, folder)
        saved = copy.deepcopy({name: {k: v.full_tensor() for k, v in state.items()} for name, state in states.items()})
        for stage in stages:
            for param in stage.submod.parameters():
                param.data.zero_()
        others = {f"stage{stage.stage_index}": stage.submod.state_dict() for stage in stages}
        checkpoint.load(others, folder)
        for name, state in others.items():
            for key, value in state.items():
                assert torch.equal(value.full_tensor(), saved[name][key])


@on_ranks(2, 4)
def test_checkpoints_of_stages_with_the_same_names(world: World) -> None:
    """One of them would be lost."""
    mesh = shardrt.init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(mesh["pp"].rank)
    stage = shardrt.fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)), mesh=mesh["dp"])
    with shared_folder(world) as folder:
        with pytest.raises(checkpoint.CheckpointError, match=r"'model.0.bias', and 3 more: .* different names"):
            checkpoint.save({"model": stage}, folder)
        with pytest.raises(checkpoint.CheckpointError, match=r"'0.bias', and 3 more: .* different names"):
            checkpoint.save_safetensors(stage, folder)
        assert not list(folder.iterdir())
        checkpoint.save({f"stage{mesh['pp'].rank}": stage}, folder)


def stage_with_gradients(world: World, factor: float) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """A model with gradients, this rank's sharded stage of it with the same ones, and the mesh of stages."""
    mesh = DeviceMesh(world.comm, (2, 2) if world.size == 4 else (world.size, 1), ("pp", "dp"))
    pp, draw = mesh["pp"], torch.Generator().manual_seed(1)
    whole, every = nn.Sequential(*blocks(int(pp.size))), blocks(int(pp.size))
    for param in whole.parameters():
        param.grad = factor * torch.randn(param.shape, dtype=param.dtype, generator=draw)
    stage, same = every[pp.rank], whole[pp.rank]
    shardrt.fully_shard(stage[0], mesh=mesh["dp"])
    shardrt.fully_shard(stage, mesh=mesh["dp"], ignored_params={stage[2].bias})
    for param, other in zip(stage.parameters(), same.parameters(), strict=True):
        grad = other.grad.clone()
        sharded = isinstance(param, shardrt.DTensor)
        param.grad = shardrt.distribute_tensor(grad, param.device_mesh, param.placements) if sharded else grad
    return whole, stage, pp


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, shardrt.DTensor) else tensor


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@on_ranks(2, 3, 4)
def test_gradients_are_clipped_by_the_norm_of_all_stages(world: World, norm_type: float) -> None:
    """Sharded ones and a plain one of each stage; the norm has the same bits on every rank."""
    for max_norm in (0.01, 1e6):
        whole, stage, pp = stage_with_gradients(world, 1.0)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
        found = shardrt.clip_grad_norm_(stage.parameters(), max_norm, norm_type, pp_mesh=pp)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        assert len(set(world.comm.exchange(found.item()))) == 1
        for param, other in zip(stage.parameters(), whole[pp.rank].parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), other.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_ranks(2, 3, 4)
def test_a_gradient_of_one_stage_that_is_not_finite_raises_on_all(world: World, norm_type: float) -> None:
    _, stage, pp = stage_with_gradients(world, 1.0)
    grad = stage[0].weight.grad
    if world.rank == world.size - 1:
        grad.to_local()[-1] = float("nan")
    before = [full(param.grad).clone() for param in stage.parameters()]
    with pytest.raises(RuntimeError, match=rf"infinite or NaN: 'weight' on rank {world.size - 1}; none has been scaled"):
        shardrt.clip_grad_norm_(stage.parameters(), 0.1, norm_type, error_if_nonfinite=True, pp_mesh=pp)
    for param, kept in zip(stage.parameters(), before, strict=True):
        torch.testing.assert_close(full(param.grad), kept, rtol=0, atol=0, equal_nan=True)
    _, stage, pp = stage_with_gradients(world, 1e200)
    if norm_type == 2.0:
        with pytest.raises(RuntimeError, match="the norm of the gradients overflows"):
            shardrt.clip_grad_norm_(stage.parameters(), 0.1, norm_type, error_if_nonfinite=True, pp_mesh=pp)


@on_ranks(2)
def test_bad_stages(world: World) -> None:
    mesh = shardrt.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    with pytest.raises(RuntimeError, match="init_process_group"):
        torch_distributed.process_group(mesh["pp"])
    with default_group():
        group = torch_distributed.process_group(mesh["pp"])
        with pytest.raises(ValueError, match="expected a module sharded by"):
            PipelineStage(nn.Linear(3, 3), world.rank, 2, torch.device("cpu"), group=group)

"""Pipelines of torch over stages that shardrt has sharded, beside one process."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator, Sequence
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
from shardrt.comm.core.calls import CallList, Hook
from shardrt.comm.groups.control import hooked
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
    stage = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    for param in stage.parameters():
        param.data *= 1 + 1e-6 * mesh["pp"].rank  # of one beginning, and hardly trained
    shardrt.fully_shard(stage, mesh=mesh["dp"])
    with shared_folder(world) as folder:
        with pytest.raises(checkpoint.CheckpointError, match=r"'model.0.bias', and 3 more: .* different names"):
            checkpoint.save({"model": stage}, folder)
        with pytest.raises(checkpoint.CheckpointError, match=r"'0.bias', and 3 more: .* different names"):
            checkpoint.save_safetensors(stage, folder)
        assert not list(folder.iterdir())
        checkpoint.save({f"stage{mesh['pp'].rank}": stage}, folder)


class Numbered(nn.Module):
    """Layers with the names that they have in the whole model."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): nn.Linear(5, 5) for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def grouped(kind: str, module: nn.Module, decays: tuple[float, float], *, swapped: bool) -> torch.optim.Optimizer:
    """An optimizer with a group for weights and one for biases."""
    matrices, vectors = ([p for p in module.parameters() if p.dim() == dims and p.requires_grad] for dims in (2, 1))
    groups = [{"params": some, "weight_decay": decay} for some, decay in zip((matrices, vectors), decays, strict=True)]
    made: torch.optim.Optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](
        groups[::-1] if swapped else groups
    )
    return made


def decays_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    found = {param: group["weight_decay"] for group in optimizer.param_groups for param in group["params"]}
    return {name: found[param] for name, param in module.named_parameters() if param in found}


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamw before a step", "adamw with a frozen stage"])
@on_ranks(2, 3, 4)
def test_groups_of_optimizers_of_stages(world: World, kind: str) -> None:
    """A checkpoint knows the groups of all stages' parameters: for stages with other groups, and without a pipeline."""
    count = world.size if world.size % 2 else 2
    mesh = shardrt.init_device_mesh("cpu", (count, world.size // count), mesh_dim_names=("pp", "dp"))
    name = kind.split()[0]

    def stage(numbers: Sequence[int], mesh: DeviceMesh) -> nn.Module:
        module = shardrt.fully_shard(Numbered(numbers), mesh=mesh)
        if "frozen" in kind and 1 in numbers:
            module.blocks["1"].weight.requires_grad_(False)
        return module

    saved = stage([mesh["pp"].rank], mesh["dp"])
    optimizer = grouped(name, saved, (0.3, 0.1), swapped=False)
    if "before" not in kind:
        saved(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    expected = {f"blocks.{number}.{part}": decay for number in range(count) for part, decay in (("weight", 0.3), ("bias", 0.1))}
    with shared_folder(world) as folder:
        checkpoint.save({"model": saved, "optimizer": optimizer}, folder)
        for numbers, on in (([mesh["pp"].rank], mesh["dp"]), (range(count), world.mesh)):
            for swapped in (False, True):
                module = stage(numbers, on)
                other = grouped(name, module, (0.0, 0.0), swapped=swapped)
                checkpoint.load({"model": module, "optimizer": other}, folder)
                found = decays_of(module, other)
                assert found == {each: expected[each] for each in found}
        weights = {name: full(param).detach().clone() for name, param in saved.named_parameters()}
        checkpoint.save_safetensors(saved, folder / "weights")
        saved.load_state_dict({name: torch.zeros_like(param) for name, param in saved.named_parameters()})
        assert not checkpoint.load_safetensors(saved, folder / "weights").unexpected_keys
        assert all(torch.equal(full(param), weights[name]) for name, param in saved.named_parameters())


def pipeline_of_two(world: World) -> tuple[DeviceMesh, nn.Module, nn.Module, PipelineStage]:
    """The mesh, the whole model, and this rank's stage of it, also as torch's."""
    mesh = shardrt.init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("pp", "dp"))
    pp, whole, every = mesh["pp"], nn.Sequential(*blocks(2)), blocks(2)
    module = shardrt.fully_shard(every[pp.rank], mesh=mesh["dp"])
    group = torch_distributed.process_group(pp)
    return mesh, whole, module, PipelineStage(module, pp.rank, 2, torch.device("cpu"), group=group)


def given(pp: DeviceMesh, x: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The arguments of a schedule's call on this stage, which is to return what it is given."""
    return [x] if pp.rank == 0 else [], {"target": x} if pp.rank == 1 else {}


@pytest.mark.parametrize("calls", ["step eval", "step eval step", "step other step", "eval step eval eval", "step step"])
@on_ranks(2, 4)
def test_gradients_that_no_optimizer_has_used(world: World, calls: str) -> None:
    """They stay, whatever runs meanwhile, and further ones are added."""
    with default_group():
        mesh, whole, module, stage = pipeline_of_two(world)

        def make() -> Any:
            return pipelining.ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)

        schedule = make()
        for step, call in enumerate(calls.split()):
            args, kwargs = given(mesh["pp"], batch(step, mesh["dp"].rank))
            if call == "other":
                schedule = make()
            else:
                (schedule.step if call == "step" else schedule.eval)(*args, **kwargs)
            for replica in range(int(mesh["dp"].size)) if call == "step" else ():
                x = batch(step, replica)
                (nn.functional.mse_loss(whole(x), x) / mesh["dp"].size).backward()
        for found, expected in zip(module.parameters(), whole[mesh["pp"].rank].parameters(), strict=True):
            torch.testing.assert_close(full(found.grad), expected.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule_class", [pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV])
@on_ranks(2)
def test_evaluation_between_steps_of_v_schedules(world: World, schedule_class: Any) -> None:
    """Rank 0 has the first and the last stage, rank 1 those between."""
    mesh = shardrt.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    pp, whole, every = mesh["pp"], nn.Sequential(*blocks(4)), blocks(4)
    mine = (pp.rank, 3 - pp.rank)
    with default_group():
        group = torch_distributed.process_group(pp)
        for index in mine:
            shardrt.fully_shard(every[index], mesh=mesh["dp"])
        stages = [PipelineStage(every[index], index, 4, torch.device("cpu"), group=group) for index in mine]
        schedule = schedule_class(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        for step, call in enumerate(("step", "eval", "step")):
            x, losses = batch(step, 0), list[torch.Tensor]()
            args, kwargs = ([x], {"target": x, "losses": losses}) if pp.rank == 0 else ([], {})
            getattr(schedule, call)(*args, **kwargs)
            loss = nn.functional.mse_loss(whole(x), x)
            if losses:
                torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=1e-10, atol=0)
            if call == "step":
                loss.backward()
    for index in mine:
        for found, expected in zip(every[index].parameters(), whole[index].parameters(), strict=True):
            torch.testing.assert_close(full(found.grad), expected.grad, rtol=1e-10, atol=1e-12)


@on_ranks(2, 4)
def test_stages_know_of_each_other(world: World) -> None:
    """The norm is that of all, and GradScaler skips a step on all if a gradient of one rank is not finite, by one scale."""
    with default_group():
        mesh, whole, module, stage = pipeline_of_two(world)
        pp, replicas = mesh["pp"], int(mesh["dp"].size)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, whole)]
        scalers = [torch.amp.GradScaler("cpu", growth_interval=3) for _ in optimizers]
        scalers[0].scale(torch.zeros(()))  # makes the scale where there is no loss
        schedule = pipelining.ScheduleGPipe(
            stage, 1, loss_fn=lambda out, x: scalers[0].scale(nn.functional.mse_loss(out, x)), scale_grads=False
        )
        for step in range(8):
            args, kwargs = given(pp, batch(step, mesh["dp"].rank))
            schedule.step(*args, **kwargs)
            for x in (batch(step, replica) for replica in range(replicas)):
                scalers[1].scale(nn.functional.mse_loss(whole(x), x) / replicas).backward()
            if step in (1, 2, 4):
                broken = step % 2
                whole[broken][0].bias.grad[-1] = float("inf")
                if pp.rank == broken and mesh["dp"].rank == replicas - 1:
                    module[0].bias.grad.to_local()[-1] = float("inf")
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
            norm = shardrt.clip_grad_norm_(module.parameters(), 0.1)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1), rtol=1e-10, atol=0)
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        for found, expected in zip(module.parameters(), whole[pp.rank].parameters(), strict=True):
            torch.testing.assert_close(full(found).detach(), expected.detach(), rtol=1e-10, atol=1e-12)


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

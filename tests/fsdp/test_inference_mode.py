"""What reads, copies, writes and makes sharded tensors inside of `torch.inference_mode()`: as under `torch.no_grad()`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks, with_copies
from shardrt import checkpoint
from shardrt.comm import World
from toys import OddMLP, batch, buckets_of, loss_of, shard_blocks

FULL = checkpoint.StateDictOptions(full_state_dict=True)
State = dict[str, Any]


def trained(world: World) -> State:
    """A sharded model after a step, with gradients, its optimizer, and a mesh for other tensors."""
    torch.manual_seed(0)
    model = shard_blocks(OddMLP().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    state = {"model": model, "optimizer": optimizer, "mesh": world.mesh, "rank": world.rank, "ranks": world.size}
    train(state, 0)
    return state


def train(state: State, step: int) -> None:
    state["optimizer"].zero_grad()
    loss_of(state["model"], batch(step).chunk(state["ranks"])[state["rank"]]).backward()
    state["optimizer"].step()


def weight_of(state: State) -> Any:
    return state["model"].blocks[0].up.weight


def write_rows(state: State) -> torch.Tensor:
    weight = weight_of(state)
    weight[1].mul_(2.0)
    weight[2:4] = 0.5
    weight.view(-1)[3].zero_()
    return weight


def write(state: State) -> torch.Tensor:
    weight = weight_of(state)
    other = weight.detach().clone()
    weight.mul_(0.5).add_(other, alpha=0.1).lerp_(end=other, weight=0.1)
    torch._foreach_add_([weight], [other])
    weight.data = other * 2
    weight.copy_(weight.redistribute([shardrt.Replicate()]))
    return weight


def into_plain(state: State) -> torch.Tensor:
    """An ordinary tensor of the caller's, made in the mode, is written."""
    weight = weight_of(state)
    return torch.ones(weight.shape, dtype=weight.dtype).add_(weight)


def average(state: State) -> Any:
    made = AveragedModel(state["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
    made.update_parameters(state["model"])
    made.update_parameters(state["model"])
    return list(made.parameters())


def averages_by_hand(state: State) -> Any:
    made = [param.detach().clone() for param in state["model"].parameters()]
    for mine, param in zip(made, state["model"].parameters(), strict=True):
        mine.lerp_(param, 0.5).mul_(2)
    return made


def load_full(state: State) -> torch.Tensor:
    full = checkpoint.get_model_state_dict(state["model"], options=FULL)
    optimizers = checkpoint.get_optimizer_state_dict(state["model"], state["optimizer"], options=FULL)
    checkpoint.set_model_state_dict(state["model"], {name: 2 * value for name, value in full.items()}, options=FULL)
    checkpoint.set_optimizer_state_dict(state["model"], state["optimizer"], optimizers, options=FULL)
    return weight_of(state)


def load_own(state: State) -> torch.Tensor:
    state["model"].load_state_dict({name: 2 * value for name, value in state["model"].state_dict().items()})
    state["optimizer"].load_state_dict(state["optimizer"].state_dict())
    return weight_of(state)


def load_files(state: State) -> torch.Tensor:
    with shared_folder(shardrt.world()) as folder:
        checkpoint.save_safetensors(state["model"], folder / "exported")
        weight_of(state).zero_()
        checkpoint.load_safetensors(state["model"], folder / "exported")
        checkpoint.async_save_safetensors(state["model"], folder / "again").wait()
    return weight_of(state)


def run(state: State) -> torch.Tensor:
    with shared_folder(shardrt.world()) as folder:
        for stop in (1, 2):
            with shardrt.Run(folder / "run", {"model": state["model"], "optimizer": state["optimizer"]}, every=1) as made:
                for step in made.steps(stop):
                    weight_of(state).add_(step + 1)
    return weight_of(state)


def by_hand(state: State) -> torch.Tensor:
    with shardrt.unsharded(state["model"]):
        weight_of(state).mul_(3.0)
    return weight_of(state)


def another_dtype(state: State) -> torch.Tensor:
    state["model"].float().double()
    return weight_of(state)


def another_model(state: State) -> Any:
    torch.manual_seed(1)
    made = shard_blocks(OddMLP().double())
    return [*made.parameters(), made(batch(0))]


def factories(state: State) -> Any:
    mesh, rows = state["mesh"], [shardrt.Shard(0)]
    made = [
        shardrt.distribute_tensor(torch.arange(7.0), mesh, rows),
        shardrt.tensor.zeros(7, device_mesh=mesh, placements=rows),
    ]
    made += [torch.zeros_like(made[0]), torch.empty_like(made[1]).fill_(2.0), made[0].new_ones(3)]
    return [
        *made,
        shardrt.DTensor.from_local(torch.ones(2, 3), mesh, rows).clone(),
        shardrt.DTensor.from_local(torch.ones(2), mesh).add(1),
    ]


def views(state: State) -> Any:
    weight = weight_of(state)
    return [weight.view(-1), weight[0] + 1, weight.t()[1:], weight[0].sum()]


def arithmetics(state: State) -> Any:
    weight = weight_of(state)
    return [weight * 2 + 1, weight.norm(), weight.mean(), weight @ weight.t()]


def moved(state: State) -> Any:
    weight = weight_of(state)
    return [weight.detach(), weight.redistribute([shardrt.Shard(1)]), weight.full_tensor(), weight.to_local() + 0.0]


def copies(state: State) -> Any:
    return [*copy.deepcopy(state["model"]).parameters(), copy.deepcopy(weight_of(state))]


def state_dicts(state: State) -> Any:
    found = checkpoint.get_state_dict(state["model"], state["optimizer"])
    return [state["model"].state_dict(), state["optimizer"].state_dict()["state"], *found]


def clip(state: State) -> Any:
    params = list(state["model"].parameters())
    return [shardrt.clip_grad_norm_(params, 0.1), torch.nn.utils.clip_grad_norm_(params, 0.05), *(p.grad for p in params)]


def forward(state: State) -> Any:
    return state["model"](batch(0))


def step(state: State) -> Any:
    state["optimizer"].step()
    state["optimizer"].zero_grad(set_to_none=False)
    return weight_of(state)


ACTIONS: list[Callable[[State], Any]] = [
    another_dtype,
    another_model,
    arithmetics,
    average,
    averages_by_hand,
    by_hand,
    clip,
    copies,
    factories,
    forward,
    into_plain,
    load_files,
    load_full,
    load_own,
    moved,
    run,
    state_dicts,
    step,
    views,
    write,
    write_rows,
]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, shardrt.DTensor) else tensor).detach().clone()


@pytest.mark.parametrize("action", [action.__name__ for action in ACTIONS])
@on_ranks(1, 2)
def test_as_without_gradients(world: World, action: str) -> None:
    """The values are the same; what is sharded can be trained with, and written, outside of the mode."""
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        state = trained(world)
        with mode():
            made = list(tensors_in(globals()[action](state)))
            values = [full(tensor) for tensor in made]
        for tensor in made:
            if isinstance(tensor, shardrt.DTensor):
                assert not tensor.is_inference()
                assert not tensor.to_local().is_inference()
                with torch.no_grad():
                    tensor.add_(0.0)
                (torch.ones_like(tensor, requires_grad=True) * tensor.detach()).sum().backward()
        if action != "another_model":
            train(state, 1)
        values += [full(param) for param in state["model"].parameters()]
        found.append(values)
    assert len(found[0]) == len(found[1])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("bucket", [1, 1 << 20])
@on_ranks(2)
@with_copies
def test_a_model_that_is_made_there_trains(world: World, bucket: int) -> None:
    """Built, sharded, run and averaged in the mode; the same without it."""
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode(), buckets_of(bucket):
            model = shard_blocks(OddMLP().double())
            model(batch(0))
            mean = copy.deepcopy(model)
        with torch.enable_grad():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(2):
                optimizer.zero_grad()
                loss_of(model, batch(step).chunk(world.size)[world.rank]).backward()
                optimizer.step()
                with torch.no_grad():
                    torch._foreach_lerp_([*mean.parameters()], [*model.parameters()], 0.1)
        found.append([full(param) for each in (model, mean) for param in each.parameters()])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=0.0, atol=0.0)


@on_ranks(2)
def test_a_plan_that_is_applied_there(world: World) -> None:
    from shardrt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode():
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
            parallelize_module(model, world.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            model(torch.ones(3, 6))
        model(torch.ones(3, 6)).sum().backward()
        found.append([full(param.grad) for param in model.parameters() if isinstance(param, shardrt.DTensor)])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=0.0, atol=0.0)

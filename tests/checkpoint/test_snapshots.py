"""Asynchronous saves copy beside what runs: whatever writes next waits for the copies, and nothing else does.

On the stand-in for CUDA a race fails a test (`worker.py`), unless it is expected. On the host there are no such copies.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import assert_holds, shared_folder, small_state, tensors_of, train
from ranks import on_ranks
from shardrt import checkpoint
from shardrt.checkpoint import async_save, set_model_state_dict
from shardrt.checkpoint.saving import save as saving
from shardrt.comm import World
from shardrt.comm.core.streams import observe
from shardrt.tensor.placement import snapshots
from toys import batch
from worker import take_races

State = dict[str, Any]


@contextmanager
def held() -> Iterator[None]:
    """In the block, the thread of a save does not look whether the copies are there: on a GPU they may be under way."""
    go_on = threading.Event()

    def late(device: torch.device) -> None:
        go_on.wait()
        observe(device)

    with mock.patch.object(saving, "observe", late):
        try:
            yield
        finally:
            go_on.set()


def params_of(state: State) -> list[Any]:
    return list(state["model"].parameters())


def moments_of(state: State) -> list[Any]:
    return [values["exp_avg"] for values in state["optimizer"].state.values()]


def step(state: State) -> None:
    state["optimizer"].step()


def in_place(state: State) -> None:
    for param in params_of(state):
        param.mul_(0.5)


def on_lists(state: State) -> None:
    torch._foreach_mul_(params_of(state), 0.5)


def on_moments(state: State) -> None:
    for moment in moments_of(state):
        moment.zero_()


def on_local(state: State) -> None:
    for param in params_of(state):
        param.to_local().zero_()


def on_rows(state: State) -> None:
    for param in params_of(state):
        if param.dim():
            param[0] = 3.0


def by_data(state: State) -> None:
    for param in params_of(state):
        param.data = param.full_tensor() * 2


def by_state_dict(state: State) -> None:
    model = state["model"]
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def by_full_state_dict(state: State) -> None:
    model = state["model"]
    set_model_state_dict(model, {name: value.full_tensor() * 2 for name, value in model.state_dict().items()})


def by_random_numbers(state: State) -> None:
    for param in params_of(state):
        param.normal_()


def while_gathered(state: State) -> None:
    with shardrt.unsharded(state["model"]):
        for param in params_of(state):
            param.mul_(2)


WRITERS = [
    step,
    in_place,
    on_lists,
    on_moments,
    on_local,
    on_rows,
    by_data,
    by_state_dict,
    by_full_state_dict,
    by_random_numbers,
    while_gathered,
]


@pytest.mark.parametrize("write", WRITERS)
@on_ranks(1, 2, more=(3,))
def test_what_writes_next_waits(world: World, write: Callable[[State], None]) -> None:
    """The values that are saved are those at the call."""
    state = small_state(2)
    expected = tensors_of(state)
    with shared_folder(world) as folder, torch.no_grad():
        with held():
            running = async_save(folder / "step-1", state)
            assert (snapshots.current is not None) == (world.device.type == "cuda")
            write(state)
        running.wait()
        assert snapshots.current is None
        if world.rank == 0:
            assert_holds(folder / "step-1", expected)


@pytest.mark.skipif("FAKE_GPUS" not in os.environ, reason="runs under tests/fake_cuda/run.py")
@pytest.mark.parametrize("write", WRITERS)
@on_ranks(2)
def test_a_writer_that_does_not_wait_is_found(world: World, write: Callable[[State], None]) -> None:
    """By the stand-in for CUDA."""
    state = small_state(2)
    with torch.no_grad():
        write(state)  # its first collective connects a communicator, for which the host waits for the device
    with shared_folder(world) as folder, torch.no_grad(), mock.patch.object(snapshots.Snapshot, "wait"):
        with held():
            running = async_save(folder / "step-1", state)
            write(state)
        running.wait()
    assert "write after read" in take_races()


@on_ranks(1, 2)
def test_forward_and_backward_do_not_wait(world: World) -> None:
    """Nor does what is done to gradients."""
    state, events, wait = small_state(2), list[str](), snapshots.Snapshot.wait
    model, optimizer = state["model"], state["optimizer"]

    def noted(snapshot: snapshots.Snapshot) -> None:
        events.append("wait")
        wait(snapshot)

    with shared_folder(world) as folder, mock.patch.object(snapshots.Snapshot, "wait", noted):
        with held():
            running = async_save(folder / "step-1", state)
            for _ in range(2):
                loss = model(batch(2).float()).square().mean()
                events.append("forward")
                loss.backward()
                events.append("backward")
            shardrt.clip_grad_norm_(model.parameters(), 1.0)
            torch._foreach_mul_([param.grad for param in model.parameters()], 0.5)
            events.append("gradients")
            optimizer.step()
            events.append("step")
        running.wait()
    waits = ["wait"] * (world.device.type == "cuda")
    assert events == [*["forward", "backward"] * 2, "gradients", *waits, "step"]


@on_ranks(1, 2)
def test_memory_that_is_given_back_is_copied_first(world: World) -> None:
    state = small_state(2)
    expected = tensors_of(state)
    with shared_folder(world) as folder:
        with held():
            running = async_save(folder / "step-1", state)
            sizes = [param._local_tensor.numel() for param in params_of(state)]
            state.clear()
            others = [torch.full((size,), 7.0) for size in sizes * 4]
        running.wait()
        assert all(bool((other == 7.0).all()) for other in others)
        if world.rank == 0:
            assert_holds(folder / "step-1", expected)


@on_ranks(1, 2)
def test_a_forward_may_write_buffers(world: World) -> None:
    """And plain parameters, and on one rank those with whose memory modules compute: they are not copied beside it."""
    model = shardrt.fully_shard(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 6)))
    plain = nn.Linear(3, 3)
    expected = {f"model.{name}": value for name, value in whole_values(model).items()}
    expected |= {f"plain.{name}": value for name, value in whole_values(plain).items()}
    with shared_folder(world) as folder:
        with held(), torch.no_grad():
            running = async_save(folder / "step-1", {"model": model, "plain": plain})
            model(torch.randn(5, 6))
            plain.weight.zero_()
            if world.size == 1:
                model[0].register_forward_pre_hook(clear)
                model(torch.randn(5, 6))
        running.wait()
        if world.rank == 0:
            assert_holds(folder / "step-1", expected)


def clear(module: nn.Module, _: object) -> None:
    cast(nn.Linear, module).weight.zero_()


def whole_values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor().clone() if isinstance(value, shardrt.DTensor) else value.clone()
        for name, value in module.state_dict().items()
    }


@on_ranks(2)
def test_other_writers_wait_by_hand(world: World) -> None:
    state = small_state(2)
    expected = tensors_of(state)
    parts = [param.to_local() for param in params_of(state)]
    with shared_folder(world) as folder:
        with held():
            running = async_save(folder / "step-1", state)
            running.staged()
            for part in parts:
                part.detach().zero_()
        running.wait()
        running.staged()
        if world.rank == 0:
            assert_holds(folder / "step-1", expected)


@on_ranks(1, 2)
def test_after_a_captured_step_nothing_is_copied_beside_it(world: World) -> None:
    """A graph's replays run no hook."""
    with mock.patch.object(snapshots, "captured_a_step", False):
        with mock.patch.object(snapshots, "is_capturing", return_value=True):
            state = small_state(2)
        with shared_folder(world) as folder:
            with held():
                running = async_save(folder / "step-1", state)
                assert snapshots.current is None
            running.wait()


@pytest.mark.rest
@on_ranks(2)
def test_a_load_waits(world: World) -> None:
    state = small_state(2)
    with shared_folder(world) as folder:
        checkpoint.save(folder / "step-1", state)
        train(state)
        expected = tensors_of(state)
        with held():
            running = async_save(folder / "step-2", state)
            checkpoint.load(folder / "step-1", state)
        running.wait()
        if world.rank == 0:
            assert_holds(folder / "step-2", expected)

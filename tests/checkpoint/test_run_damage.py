"""Runs whose newest checkpoint is damaged: they go on from an older one, and keep what was damaged."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks, settings_of
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, DamagedCheckpointError
from shardrt.comm import World
from toys import logged

STEPS = (2, 4, 6)


def make() -> dict[str, Any]:
    """Small tensors, and some of more than 64 KiB on each of three ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3))
    shardrt.fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "epoch": 0, "seen": {}}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 300)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["epoch"] += 1
    state["seen"][f"step {state['epoch']}"] = 1


def values_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [param.to_local().clone() for param in state["model"].parameters()]


@contextmanager
def saved(world: World) -> Iterator[tuple[Path, dict[int, list[torch.Tensor]]]]:
    """A folder with the checkpoints of STEPS, and the parameters at each."""
    with shared_folder(world) as folder:
        state, values = make(), {}
        with shardrt.Run(folder / "run", state, every=2) as run:
            for index in run.steps(STEPS[-1]):
                step(state)
                values[index + 1] = values_of(state)
        world.barrier()
        yield folder, values


def name_of(number: int) -> str:
    return f"step-{number:08d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def change(file: Path, edit: Callable[[bytes], bytes]) -> None:
    file.write_bytes(edit(file.read_bytes()))


KINDS: dict[str, Callable[[Path, str], object]] = {
    "flipped": lambda folder, file: change(folder / file, lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
    "cut": lambda folder, file: change(folder / file, lambda data: data[:-1]),
    "missing": lambda folder, file: (folder / file).unlink(),
    "empty": lambda folder, file: change(folder / file, lambda data: b""),
    "of another save": lambda folder, file: shutil.copy(folder.with_name(name_of(4)) / file, folder / file),
    "empty metadata": lambda folder, file: change(folder / ".metadata", lambda data: b""),
    "cut metadata": lambda folder, file: change(folder / ".metadata", lambda data: data[: len(data) // 2]),
    "zeroed metadata": lambda folder, file: change(folder / ".metadata", lambda data: bytes(len(data))),
    "metadata of another save": lambda folder, file: shutil.copy(folder.with_name(name_of(4)) / ".metadata", folder),
}


def copied(world: World, folder: Path, name: str, *damaged: int, kind: str = "flipped") -> Path:
    """A copy of the run in which these steps are damaged, in the file of the last rank."""
    if world.rank == 0:
        shutil.copytree(folder / "run", folder / name)
        for number in damaged:
            KINDS[kind](folder / name / name_of(number), f"__{world.size - 1}_0.distcp")
    world.barrier()
    return folder / name


@pytest.mark.rest
@on_ranks(1, 2)
def test_a_flipped_bit_anywhere_in_a_checkpoint(world: World) -> None:
    """What is loaded are the values that were saved, or all ranks raise that the checkpoint is damaged."""

    def small() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        shardrt.fully_shard(model)
        own = {"batch": 7 + world.rank, "order": torch.arange(4)}
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9),
            "loader": checkpoint.PerRank(own),
        }

    def loaded(folder: Path) -> str:
        state = small()
        for param in state["model"].parameters():
            nn.init.zeros_(param)
        state["loader"] = checkpoint.PerRank({})
        run = shardrt.Run(folder, state)
        run._resuming._load(folder / name_of(1), None)
        return repr((values_of(state), state["optimizer"].state_dict(), state["loader"].value, run.done))

    with shared_folder(world) as folder:
        state, kinds = small(), Counter[str]()
        with shardrt.Run(folder, state) as run:
            for _ in run.steps(1):
                state["model"](torch.ones(2, 3)).sum().backward()
                state["optimizer"].step()
        expected = loaded(folder)
        for file in sorted((folder / name_of(1)).iterdir()):
            data = file.read_bytes()
            for place in range(0, 8 * len(data), 8 * len(data) // 60 | 1):
                flipped = data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]
                world.barrier()
                if world.rank == 0:
                    file.write_bytes(flipped)
                world.barrier()
                try:
                    assert loaded(folder) == expected, (file.name, place)
                    kinds["sound"] += 1
                except DamagedCheckpointError:
                    kinds["damaged"] += 1
            world.barrier()
            if world.rank == 0:
                file.write_bytes(data)
        assert kinds["damaged"] > kinds["sound"] > 0


@on_ranks(1, 3)
def test_a_run_goes_on_from_the_newest_that_is_whole(world: World) -> None:
    with saved(world) as (folder, values):
        for kind in KINDS:
            here, state = copied(world, folder, kind, 6, kind=kind), make()
            with logged() as texts, shardrt.Run(here, state, every=2, keep=1) as run:
                assert (run.done, state["epoch"], len(state["seen"])) == (4, 4, 4), kind
                assert all(map(torch.equal, values_of(state), values[4])), kind
                world.barrier()
                assert names(here) == [name_of(2), name_of(4), f"{name_of(6)}.damaged"]
                assert len(texts) == (world.rank == 0), texts
                for text in texts:
                    assert f"'{here / name_of(6)}' is damaged, and now '{here / name_of(6)}.damaged'" in text
                    assert "goes on from step 4: rank" in text
                for _ in run.steps(7):
                    step(state)
            assert all(map(torch.equal, values_of(state), values[6])) is False
            world.barrier()
            assert names(here) == [f"{name_of(6)}.damaged", name_of(7)]
            assert checkpoint.latest(here) == here / name_of(7)


@on_ranks(2)
def test_several_are_damaged_one_after_the_other(world: World) -> None:
    with saved(world) as (folder, values):
        here = copied(world, folder, "two", 4, 6)
        if world.rank == 0:
            (here / f"{name_of(6)}.damaged").mkdir()
        world.barrier()
        state = make()
        with shardrt.Run(here, state) as run:
            assert run.done == 2
            assert all(map(torch.equal, values_of(state), values[2]))
        world.barrier()
        assert names(here) == [name_of(2), f"{name_of(4)}.damaged", f"{name_of(6)}.1.damaged", f"{name_of(6)}.damaged"]
        assert checkpoint.latest(here) == here / name_of(2)


@on_ranks(1, 2)
def test_a_run_never_starts_anew_where_all_are_damaged(world: World) -> None:
    with saved(world) as (folder, _):
        here = copied(world, folder, "all", *STEPS, kind="cut")
        for _ in range(2):  # the second time as well
            with (
                pytest.raises(DamagedCheckpointError, match=r"all checkpoints in .* are damaged") as caught,
                shardrt.Run(here, make()),
            ):
                pass
            for number in STEPS:
                assert f"{name_of(number)}: rank {world.size - 1} raised DamagedCheckpointError" in str(caught.value)
            world.barrier()
            assert names(here) == [name_of(number) for number in STEPS]


@on_ranks(2)
def test_what_is_no_damage_is_raised_and_renames_nothing(world: World) -> None:
    """A state that does not fit, errors of the file system on one rank, and damage where that is asked for."""
    with saved(world) as (folder, _):
        here, other = copied(world, folder, "other"), make()
        other["model"] = shardrt.fully_shard(nn.Linear(301, 200))
        other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
        cases: list[tuple[dict[str, Any], str, Any]] = [(other, "cannot load .*lacks 'model.weight'", mock.MagicMock())]
        last = world.rank == world.size - 1
        for code, name in ((errno.EIO, "preadv"), (errno.ESTALE, "preadv"), (errno.EACCES, "open")):
            failing = failing_in(name, code) if last else mock.MagicMock()
            cases.append((make(), rf"rank 1 raised CheckpointError: cannot .*{os.strerror(code)}", failing))
        for state, message, failing in cases:
            with failing, pytest.raises(CheckpointError, match=message) as caught, shardrt.Run(here, state):
                pass
            assert not isinstance(caught.value, DamagedCheckpointError)
            world.barrier()
            assert names(here) == [name_of(number) for number in STEPS]
        here = copied(world, folder, "damaged", 6)
        with pytest.raises(DamagedCheckpointError, match="the checksum"), shardrt.Run(here, make(), on_damage="raise"):
            pass
        world.barrier()
        assert names(here) == [name_of(number) for number in STEPS]
        with pytest.raises(ValueError, match=r"on_damage='newer'.*expected 'older' or 'raise'"):
            shardrt.Run(here, make(), on_damage="newer")


def failing_in(name: str, code: int) -> Any:
    """A call of `os` that fails for the files of the ranks."""
    function = getattr(os, name)

    def fails(where: Any, *args: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        if path.endswith(".distcp"):
            raise OSError(code, os.strerror(code))
        return function(where, *args)

    return mock.patch.object(os, name, fails)


@on_ranks(2)
def test_a_damaged_one_that_cannot_be_renamed_stays(world: World) -> None:
    with saved(world) as (folder, _):
        here, state = copied(world, folder, "read-only", 6), make()
        failing = mock.patch.object(os, "rename", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
        with failing, logged() as lines, shardrt.Run(here, state) as run:
            assert run.done == 4
        assert ["left where it is" in line for line in lines] == [True] * (world.rank == 0)
        world.barrier()
        assert names(here) == [name_of(number) for number in STEPS]


@on_ranks(2)
def test_the_launcher_knows_at_once_where_a_run_goes_on(world: World, tmp_path: Path) -> None:
    with saved(world) as (folder, _), settings_of(world, progress=tmp_path / "progress"):
        for name, damaged, expected in (("whole", (), "6"), ("damaged", (6,), "4")):
            here = copied(world, folder, name, *damaged)
            with shardrt.Run(here, make()):
                world.barrier()
                assert (tmp_path / "progress").read_text() == f"{expected}\n"
                world.barrier()

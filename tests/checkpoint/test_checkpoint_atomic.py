"""Saves that are killed, or that fail on one rank: the checkpoint before is whole, the reason is known on every rank.

Deaths at every call to the system are tried without ranks in test_checkpoint_store.py; here whole jobs die.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoints import assert_holds, freeze, shared_folder, small_state, tensors_of, train
from ranks import on_ranks, refused, run_script
from shardrt.checkpoint import CheckpointError, latest, save
from shardrt.comm import World

DEADLY = """
import os, signal, sys
import torch, shardrt
from shardrt import checkpoint
world = shardrt.init()
folder, name, number, victims, save = {folder!r}, {name!r}, {number}, {victims!r}, checkpoint.{save}
state = {{"weight": torch.arange(100003.0), "rows": shardrt.distribute_tensor(
    torch.arange(600011.0), world.mesh, [shardrt.Shard(0)])}}
checkpoint.save(folder + "/step-1", state)
state["weight"] += 10
state["rows"].mul_(2)
function, left = getattr(os, name), number
def deadly(*args, **options):
    global left
    if folder in str(os.readlink(f"/proc/self/fd/{{args[0]}}") if isinstance(args[0], int) else args[0]):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    return function(*args, **options)
if world.rank in victims:
    setattr(os, name, deadly)
running = save(folder + "/step-2", state, keep=1)
if running is not None:
    running.wait()
"""


def dies(folder: Path, name: str, number: int, victims: tuple[int, ...], save: str, size: int) -> None:
    """A job that dies in its second save leaves a whole checkpoint, and a later save clears up."""
    done = run_script(DEADLY.format(folder=str(folder), name=name, number=number, victims=victims, save=save), size)
    assert done.returncode != 0
    found = latest(folder)
    assert found is not None, done.stderr
    step = int(found.name.removeprefix("step-"))
    expected = {"weight": torch.arange(100003.0) + 10 * (step - 1), "rows": torch.arange(600011.0) * step}
    assert_holds(found, expected)
    if step == 2:
        assert name in ("fsync", "rename", "rmdir")
    else:
        assert [name for name in os.listdir(folder) if not name.endswith(".tmp")] == ["step-1"]


@pytest.mark.parametrize(
    ("name", "number", "victims", "save"),
    [
        ("pwritev", 1, (1,), "save"),
        ("rename", 1, (0,), "async_save"),
        *(
            pytest.param(name, number, victims, "save", marks=pytest.mark.all)
            for name, number in (("open", 1), ("pwritev", 1), ("fsync", 1), ("fsync", 2))
            for victims in ((0,), (1,), (0, 1))
        ),
        *(
            pytest.param(name, number, (0,), save, marks=pytest.mark.all)
            for save in ("save", "async_save")
            for name, numbers in (("pwritev", (2,)), ("fsync", (3, 4, 5)), ("rename", (1, 2)), ("rmdir", (1,)))
            for number in numbers
        ),
    ],
)
def test_killed_in_a_save_the_last_committed_one_loads(
    tmp_path: Path, name: str, number: int, victims: tuple[int, ...], save: str
) -> None:
    dies(tmp_path, name, number, victims, save, 2)


@contextmanager
def trouble(world: World, rank: int, kind: str, folder: Path) -> Iterator[None]:
    """What goes wrong on one rank."""
    if world.rank != rank:
        yield
    elif kind == "full":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    else:
        elsewhere = {"unmounted": folder.parent / "nothing", "a file": folder.parent / "step-1" / ".metadata"}
        open_file = os.open

        def opens(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if path.suffix == ".distcp" and flags & os.O_CREAT:  # at the moment that this rank makes its file
                if kind == "vanished":
                    # At once: others make theirs there meanwhile.
                    shutil.rmtree(path.parent.rename(folder.parent / "gone"))
                else:
                    path = elsewhere[kind] / path.name
            return open_file(path, flags, *args, **options)

        with mock.patch.object(os, "open", opens):
            yield


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("full", "rank 1 raised CheckpointError: cannot write .*step-2.*tmp/__1_0.distcp.*File too large"),
        ("vanished", r"rank \d raised CheckpointError: cannot .*step-2.*tmp.*No such file or directory; the folder has gone"),
        ("unmounted", "rank 1 raised CheckpointError: cannot create .*__1_0.distcp.*No such file or directory"),
        ("a file", "rank 1 raised CheckpointError: cannot create .*__1_0.distcp.*Not a directory; a file is where"),
    ],
    ids=["full", "vanished", "unmounted", "a file"],
)
@on_ranks(2, 3)
def test_trouble_on_one_rank_is_an_error_with_its_reason_on_all(world: World, kind: str, reason: str) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        expected = tensors_of(state)
        save(folder / "step-1", state)
        with (
            trouble(world, 1, kind, folder / "step-2"),
            pytest.raises(CheckpointError, match=reason),
        ):
            save(folder / "step-2", state)
        world.barrier()
        assert latest(folder) == folder / "step-1"
        train(state)
        save(folder / "elsewhere" / "step-2", state)
        if world.rank == 0:
            assert_holds(folder / "step-1", expected, step=1)
            assert latest(folder / "elsewhere") == folder / "elsewhere" / "step-2"


@on_ranks(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_all(world: World) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        if world.rank == 0:
            (folder / "file").touch()
        world.barrier()
        for target in (folder / "file" / "step-1", Path("/proc/step-1")):
            with pytest.raises(CheckpointError, match=r"rank 0 raised CheckpointError: cannot create .*step-1.*tmp"):
                save(target, state)
        refused(r"rank 0 raised CheckpointError: .*is a file", lambda: save(folder / "file", state), CheckpointError)
        refused("rank 0 raised ValueError: keep=3 needs", lambda: save(folder / "final", state, keep=3), CheckpointError)
        assert os.listdir(folder) == ["file"]


@on_ranks(1, 2)
def test_an_existing_checkpoint_is_replaced(world: World) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        save(folder / "newest", state)
        freeze(state["model"])
        expected = tensors_of(state)
        save(folder / "newest", state)
        assert os.listdir(folder) == ["newest"]
        if world.rank == 0:
            assert_holds(folder / "newest", expected)
            (folder / "newest" / "mine").touch()
        world.barrier()
        refused("neither replaced nor deleted: it has mine", lambda: save(folder / "newest", state), CheckpointError)

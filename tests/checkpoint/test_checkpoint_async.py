"""Saves in the background: what they hold, what they cost, how they fail, and how they end."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoints import assert_holds, freeze, shared_folder, small_state, stock_load, tensors_of, train
from ranks import on_ranks, refused, run_script
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, async_save, latest, save
from shardrt.checkpoint.saving import save as saving
from shardrt.checkpoint.saving import sources
from shardrt.comm import Communicator, World


@contextmanager
def failing_writes(world: World, rank: int) -> Iterator[None]:
    """On one rank, every write finds the disk full."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(os, "pwritev", full) if world.rank == rank else mock.patch("builtins.id", id):
        yield


@pytest.mark.rest
@on_ranks(1, 2, 3)
def test_what_is_saved_are_the_values_at_the_call(world: World) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        expected = tensors_of(state)
        running = async_save(folder / "step-1", state)
        epoch = state["scheduler"].last_epoch
        train(state)
        freeze(state["model"])
        running.wait()
        if world.rank == 0:
            assert_holds(folder / "step-1", expected, step=1, **{"scheduler.last_epoch": epoch})
            assert os.listdir(folder) == ["step-1"]


@on_ranks(2)
def test_saves_follow_each_other_in_the_background_and_not(world: World) -> None:
    with shared_folder(world) as folder:
        state, expected = small_state(), {}
        for step in (1, 2, 3):
            train(state)
            expected[step] = tensors_of(state)
            async_save(folder / f"step-{step}", state, keep=2)
        train(state)
        expected[4] = tensors_of(state)
        save(folder / "step-4", state)
        world.barrier()
        assert latest(folder) == folder / "step-4"
        assert sorted(os.listdir(folder)) == ["step-2", "step-3", "step-4"]
        if world.rank == 0:
            for step in (2, 3, 4):
                assert_holds(folder / f"step-{step}", expected[step])


@on_ranks(2)
def test_training_goes_on_while_a_rank_writes_and_nothing_old_goes_before(world: World) -> None:
    slow, pwritev = threading.Event(), os.pwritev

    def waiting(*args: Any) -> int:
        slow.wait()
        return pwritev(*args)

    with shared_folder(world) as folder:
        state = small_state()
        save(folder / "step-1", state)
        with mock.patch.object(os, "pwritev", waiting if world.rank == 1 else pwritev):
            running = async_save(folder / "step-2", state, keep=1)
            for _ in range(3):
                train(state)
                assert not running.poll()
            world.barrier()
            first, writing = sorted(os.listdir(folder))
            assert first == "step-1"
            assert re.fullmatch(r"step-2\.[0-9a-f]{8}-[0-9a-f]{32}\.tmp", writing)
            assert latest(folder) == folder / "step-1"
            slow.set()
            while not running.poll():
                train(state)
        assert os.listdir(folder) == ["step-2"]
        assert running.poll()


@on_ranks(2)
def test_the_second_save_allocates_nothing(world: World) -> None:
    with shared_folder(world) as folder:
        state = {"weights": [torch.full((3_000_001,), float(i + world.rank)) for i in range(3)], "bias": torch.ones(3)}
        nbytes = 36 << 20
        async_save(folder / "step-1", state).wait()
        before = buffers()
        reset_peak()
        resident = memory("VmRSS")
        async_save(folder / "step-2", state).wait()
        assert buffers() == before
        assert memory("VmHWM") - resident < 0.05 * nbytes
        reset_peak()
        resident = memory("VmRSS")
        save(folder / "step-3", state)
        assert memory("VmHWM") - resident < 0.05 * nbytes


@pytest.mark.parametrize("nbytes", [4096, sources._BUFFER])
@on_ranks(1)
def test_tensors_of_any_memory_are_copied_into_one_buffer_or_several(world: World, nbytes: int) -> None:
    many = torch.randn(40, 50)
    state = {
        "complex": torch.randn(777, dtype=torch.complex64),
        "conjugate": torch.randn(9, dtype=torch.complex128).conj(),
        "bfloat16": torch.randn(3000).to(torch.bfloat16),
        "float8": torch.randn(300).to(torch.float8_e4m3fn),
        "bool": many[0] > 0,
        "scalar": torch.tensor(3, dtype=torch.int16),
        "transposed": many.t(),
        "columns": many[:, ::3],
        "expanded": many[:1].expand(7, 50),
        "empty": torch.ones(0, 3),
    }
    expected = {name: tensor.resolve_conj().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    fresh = mock.patch.multiple(sources, _BUFFER=nbytes), mock.patch.multiple(saving, _background=None)
    with shared_folder(world) as folder, fresh[0], fresh[1]:
        save(folder / "step-1", state)
        running = async_save(folder / "step-2", state)
        for name in state.keys() - {"conjugate", "columns", "expanded"}:
            state[name].zero_()
        running.wait()
        assert len(buffers()) > 5 or nbytes > 4096
        close_thread()
        for found in (stock_load(folder / "step-1"), stock_load(folder / "step-2")):
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@on_ranks(1, 2, 3)
def test_an_error_in_the_background_is_raised_on_every_rank_and_the_next_save_works(world: World) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        expected = tensors_of(state)
        save(folder / "step-1", state)
        with failing_writes(world, world.size - 1):
            running = async_save(folder / "step-2", state)
            refused(rf"rank {world.size - 1} raised .*No space left.*free space", running.wait, CheckpointError)
        refused("No space left", running.poll, CheckpointError)
        world.barrier()
        assert os.listdir(folder) == ["step-1"]
        async_save(folder / "step-3", state).wait()
        if world.rank == 0:
            assert_holds(folder / "step-1", expected)
            assert_holds(folder / "step-3", expected)


@on_ranks(2)
def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(world: World) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        for following in (save, async_save):
            with failing_writes(world, 0):
                async_save(folder / "step-1", state)
                with pytest.raises(CheckpointError, match=r"rank 0 raised CheckpointError.*No space left"):
                    following(folder / "step-2", state)
        save(folder / "step-3", state)
        assert os.listdir(folder) == ["step-3"]


@on_ranks(2)
def test_a_commit_that_fails_in_the_background_is_raised_on_every_rank(world: World) -> None:
    with shared_folder(world) as folder:
        state = small_state()
        running = async_save(folder / "step-1", state)
        with mock.patch.object(os, "rename", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
            refused(r"rank 0 raised CheckpointError: cannot rename .*Read-only", running.wait, CheckpointError)
            world.barrier()
        assert latest(folder) is None


@on_ranks(1, 2)
def test_a_wait_that_is_interrupted_leaves_the_save_as_it_is(world: World) -> None:
    interrupted = mock.patch.object(saving._Task, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt)
    with shared_folder(world) as folder:
        first = async_save(folder / "step-1", {"x": torch.ones(1000)})
        with interrupted[0], interrupted[1]:
            async_save(folder / "step-2", {"x": torch.zeros(1000)})
        async_save(folder / "step-2", {"x": torch.zeros(1000)}).wait()
        assert first.poll()
        if world.rank == 0:
            assert_holds(folder / "step-1", {"x": torch.ones(1000)})


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])  # as a handler of SIGINT and of SIGALRM raise
@on_ranks(1, 2)
def test_a_save_that_is_interrupted_is_never_committed(world: World, error: type[BaseException]) -> None:
    interrupted = mock.patch.object(saving._Task, "wait", side_effect=error), pytest.raises(error)
    with shared_folder(world) as folder:
        with interrupted[0], interrupted[1]:
            save(folder / "step-1", {"x": torch.ones(1000)})
        with pytest.raises(CheckpointError, match=r"the save of .*step-1' was interrupted"):
            save(folder / "step-2", {"x": torch.ones(1000)})
        save(folder / "step-3", {"x": torch.ones(1000)})
        assert os.listdir(folder) == ["step-3"]


@pytest.mark.parametrize("is_full", [False, True])
@on_ranks(2)
def test_no_rank_waits_long_for_one_that_writes_long(world: World, is_full: bool) -> None:
    pwritev, exchange, calls = os.pwritev, Communicator.exchange, list[Any]()

    def write(*args: Any) -> int:
        if world.rank == 1:
            end = time.monotonic() + 60
            while len(calls) <= 10 and time.monotonic() < end:
                time.sleep(0.01)
        elif is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(*args)

    def counted(comm: Communicator, value: Any) -> list[Any]:
        calls.append(value)
        return exchange(comm, value)

    short = mock.patch.object(saving, "_WAIT_S", 0.02), mock.patch.object(Communicator, "exchange", counted)
    failing = pytest.raises(CheckpointError, match=r"rank 0 raised CheckpointError.*No space") if is_full else nullcontext()
    state = small_state()
    with shared_folder(world) as folder:
        with mock.patch.object(os, "pwritev", write), short[0], short[1], failing:
            save(folder / "step-1", state)
        assert len(calls) > 10


ENDS = """
import os, sys, threading, time
import torch, shardrt
from shardrt import checkpoint
world = shardrt.init()
state = {{"weight": torch.full((1000,), float(world.rank)), "step": 1}}
checkpoint.save({folder!r} + "/step-1", state)
pwritev = os.pwritev
def slow(*args):
    time.sleep({seconds})
    return pwritev(*args)
os.pwritev = slow
checkpoint.async_save({folder!r} + "/step-2", state)
{end}
threads = sorted(thread.name for thread in threading.enumerate() if "checkpoint" in thread.name)
os.write(1, f"threads {{threads}}\\n".encode())
"""


@pytest.mark.parametrize("end", ["shardrt.finalize()", pytest.param("", marks=pytest.mark.all)])
def test_at_the_end_the_save_under_way_is_committed(tmp_path: Path, end: str) -> None:
    done = run_script(ENDS.format(folder=str(tmp_path), seconds=0.5, end=end), 2, code=0)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
    assert done.stdout.count("threads []" if end else "threads ['shardrt-checkpoint']") == 2


def test_the_job_fails_if_the_last_save_does(tmp_path: Path) -> None:
    done = run_script(ENDS.format(folder=str(tmp_path), seconds=0.5, end="os.fsync = None"), 1, code=1)
    assert "CheckpointError: rank 0 raised TypeError" in done.stderr
    assert latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.all)], ids=["", "after finalize"])
def test_after_an_exception_the_older_one_stays(tmp_path: Path, at_once: bool) -> None:
    end = "if world.rank == 1: raise ValueError('of the training')\nworld.comm.exchange(1)"
    if not at_once:
        end = f"try:\n    {end.replace(chr(10), chr(10) + '    ')}\nfinally: shardrt.finalize()"
    ends = ENDS.format(folder=str(tmp_path), seconds=30, end=end)
    done = run_script(ends, 2, SHARDRT_MONITOR_TIMING="lost_s=1,poll_s=0.05")
    assert done.returncode != 0
    assert re.search("of the training" if at_once else r"rank 1: .* has left its program", done.stderr)
    assert latest(tmp_path) == tmp_path / "step-1"
    assert_holds(tmp_path / "step-1", {"weight": torch.zeros(1000)}, step=1)


@on_ranks(2)
def test_ranks_that_save_in_different_folders_are_refused(world: World) -> None:
    with shared_folder(world) as folder:
        for name, keep in ((f"step-{world.rank}", None), ("step-1", world.rank + 1)):
            with pytest.raises(CheckpointError, match=r"the ranks save in different folders: rank 0 in .*rank 1 in"):
                async_save(folder / name, small_state(), keep=keep)
        assert os.listdir(folder) == []


def buffers() -> list[int]:
    """The addresses of the copies' buffers."""
    assert saving._background is not None
    return [buffer.data_ptr() for buffer in saving._background._copies._buffers[False]._buffers]


def close_thread() -> None:
    assert saving._background is not None
    saving._background._thread.close()


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(kind: str) -> int:
    """Bytes of this process, by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))


def test_without_ranks_save_says_what_is_missing(tmp_path: Path) -> None:
    refused(r"call shardrt.init\(\) first", lambda: checkpoint.save(tmp_path / "step-1", {"x": torch.ones(3)}), RuntimeError)

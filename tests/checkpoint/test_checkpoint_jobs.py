"""Two jobs that save in one folder, in turns: each checkpoint that appears is whole, and nothing that lives is deleted."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from saves import FILE, STEPS, begin, content_of, counted_down, grow_old, names, save, without_exchange
from shardrt.checkpoint import CheckpointError, latest
from shardrt.checkpoint.disk import drafts
from shardrt.checkpoint.disk.files import Writer
from shardrt.checkpoint.disk.folders import Keep, abandon, check_files, commit

CALLS = 32  # more than a save makes
EVERY = [47, pytest.param(3, marks=pytest.mark.all)]


class Job:
    """A child that saves, and stops before its `stop`-th call to the system, until `go_on`."""

    def __init__(self, body: Callable[[], None], stop: int) -> None:
        self.code: int | None = None
        self._pid = os.fork()
        if not self._pid:
            logging.disable()
            left = [stop]
            for module, name in (*((os, name) for name in STEPS), (fcntl, "flock")):
                setattr(module, name, counted_down(getattr(module, name), left, signal.SIGSTOP))
            try:
                body()
                os._exit(0)
            finally:
                os._exit(1)
        self._wait()

    def _wait(self, options: int = 0) -> bool:
        """Whether it has stopped or ended."""
        pid, status = os.waitpid(self._pid, os.WUNTRACED | options)
        self.code = None if not pid or os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        return bool(pid)

    def go_on(self) -> None:
        """Let it go on to its end, or until it has waited long for the other one."""
        if self.code is None:
            os.kill(self._pid, signal.SIGCONT)
            until = time.monotonic() + 0.1
            while not self._wait(os.WNOHANG) and time.monotonic() < until:
                time.sleep(0.0005)

    def end(self) -> int:
        """Its exit code, when it has ended."""
        if self.code is None:
            self._wait()
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()


Bodies = Callable[[Path], tuple[Callable[[], None], Callable[[], None]]]


def turns(bodies: Bodies, memory: Path, every: int) -> Iterator[tuple[Path, Job, Job]]:
    """Folders in which the first job goes to a call, then the second one to a call; and the two jobs, both stopped there.

    every: of all pairs of calls, one in so many. When the caller is done with both jobs, what they left is looked through.
    """
    for stops in product(range(1, CALLS + 1), repeat=2):
        if (7 * stops[0] + stops[1]) % every:
            continue
        parent = memory / "-".join(map(str, stops))
        save(parent / "step-1", b"old")
        first, second = (Job(body, stop) for body, stop in zip(bodies(parent), stops, strict=True))
        yield parent, first, second
        for folder in parent.glob("step-*[0-9]"):
            content_of(folder)
        shutil.rmtree(parent)


def check_end(parent: Path, *, at_least: int) -> None:
    """What is there is whole, and a later save leaves only checkpoints."""
    found = latest(parent)
    assert found is not None
    content_of(found)
    assert int(found.name.partition("-")[2].partition(".")[0]) >= at_least
    save(parent / "step-9", b"later", keep=2)
    assert [name for name in names(parent) if not name.startswith("step-") or not name[5:].isdecimal()] == []


def same_step(parent: Path, keep: int | None) -> tuple[Callable[[], None], Callable[[], None]]:
    """A restart, and the job before it, which is still there."""
    return partial(save, parent / "step-2", b"of one", keep), partial(save, parent / "step-2", b"of the other", keep)


def other_steps(parent: Path, keep: int | None) -> tuple[Callable[[], None], Callable[[], None]]:
    return partial(save, parent / "step-2", b"of one", keep), partial(save, parent / "step-3", b"of the other", keep)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("bodies", [same_step, other_steps])
@pytest.mark.parametrize("keep", [None, 1])
def test_both_saves_are_whole(memory: Path, bodies: Any, keep: int | None, every: int) -> None:
    for number, (parent, first, second) in enumerate(turns(partial(bodies, keep=keep), memory, every)):
        for job in (first, second) if number % 2 else (second, first):
            job.go_on()
        assert [first.end(), second.end()] == [0, 0], parent
        newest = latest(parent)
        assert newest is not None
        assert newest.name == ("step-2" if bodies is same_step else "step-3")
        assert content_of(newest) in ((b"of one", b"of the other") if bodies is same_step else (b"of the other",))
        if bodies is other_steps and keep is None:
            assert content_of(parent / "step-2") == b"of one"
        check_end(parent, at_least=2)


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("bodies", [same_step, other_steps])
def test_one_is_killed_and_the_other_one_is_whole(memory: Path, bodies: Any, every: int) -> None:
    for number, (parent, first, second) in enumerate(turns(partial(bodies, keep=1), memory, every)):
        dead, alive = (first, second) if number % 2 else (second, first)
        dead.kill()
        alive.go_on()
        assert alive.end() == 0, parent
        check_end(parent, at_least=2)


@pytest.mark.parametrize("every", EVERY)
def test_both_save_again_where_folders_cannot_be_exchanged(memory: Path, monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    without_exchange(monkeypatch)

    def again(parent: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        return partial(save, parent / "step-1", b"of one", 1), partial(save, parent / "step-1", b"of the other", 1)

    for number, (parent, first, second) in enumerate(turns(again, memory, every)):
        if number % 3 == 0:
            first.kill()
        for job in (first, second) if number % 2 else (second, first):
            job.go_on()
        assert first.end() in (0, -signal.SIGKILL), parent
        assert second.end() == 0, parent
        check_end(parent, at_least=1)


def test_what_another_job_writes_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = begin(tmp_path / "step-7")
    with Writer(draft.folder / FILE) as writer:
        writer.write(0, [b"one"])
    grow_old(draft.folder)  # it writes for hours
    save(tmp_path / "step-8", b"two", keep=1)
    assert f"{draft.folder} stays: another job writes there" in caplog.text
    commit(draft, {FILE: 3}, [b"eno"], Keep())
    assert content_of(tmp_path / "step-7") == b"one"


@pytest.mark.parametrize("has_locks", [True, False])
def test_on_another_machine_what_is_quiet_for_an_hour_is_deleted(
    tmp_path: Path, has_locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the file system did not pass locks on, or had none."""
    draft = begin(tmp_path / "step-7", machine="0" * 8 if has_locks else drafts.this_machine())
    with Writer(draft.folder / FILE) as writer:
        writer.write(0, [b"one"])
    if has_locks:
        draft.release()
    else:
        monkeypatch.setattr(fcntl, "flock", unsupported)
    save(tmp_path / "step-8", b"two", keep=1)
    check_files(draft.folder, {FILE: 3})
    grow_old(draft.folder)
    save(tmp_path / "step-9", b"two", keep=1)
    assert names(tmp_path) == ["step-9"]
    with pytest.raises(CheckpointError, match="the folder has gone"):
        commit(draft, {FILE: 3}, [b"eno"], Keep())
    abandon(draft)
    assert names(tmp_path) == ["step-9"]


def test_saves_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", unsupported)
    for step in (1, 2, 2):
        save(tmp_path / f"step-{step}", b"new", keep=1)
    assert names(tmp_path) == ["step-2"]


def unsupported(fd: int, operation: int) -> None:
    raise OSError(38, "Function not implemented")


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    draft = begin(tmp_path / "step-7")
    child = os.fork()
    if not child:
        signal.pause()
    try:
        draft.release()
        save(tmp_path / "step-8", b"two", keep=1)
        assert names(tmp_path) == ["step-8"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

"""Files and folders of checkpoints, without ranks: large calls, named errors, commits, and what is deleted when."""

import errno
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import refused
from saves import FILE, STEPS, begin, content_of, counted_down, grow_old, names, save, without_exchange
from shardrt.checkpoint import CheckpointError, latest
from shardrt.checkpoint.disk import folders
from shardrt.checkpoint.disk.drafts import folder_of, this_machine
from shardrt.checkpoint.disk.files import Reader, Writer, bytes_of
from shardrt.checkpoint.disk.folders import abandon, check_files


class TestWriter:
    def test_writes_near_buffers_in_one_call_and_others_at_their_place(self, tmp_path: Path, monkeypatch: Any) -> None:
        calls = []
        pwritev = os.pwritev

        def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(len(buffers))
            return pwritev(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", counted)
        tensor = torch.arange(7, dtype=torch.int16)
        with Writer(tmp_path / "file") as writer:
            writer.write(0, [b"ab", bytes_of(tensor)])
            writer.write(16, [b"", b"c"])
            writer.write(17, [memoryview(b"de")])
            writer.write(30, [b"f"])
            writer.write(99, [b"g"])
        assert calls == [6, 1]
        assert writer.nbytes == 32
        expected = b"ab" + bytes(tensor.view(torch.uint8).tolist()) + b"cde" + b"\0" * 11 + b"f" + b"\0" * 68 + b"g"
        assert (tmp_path / "file").read_bytes() == expected

    def test_goes_on_after_short_writes_and_with_more_buffers_than_one_call_takes(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        pwritev = os.pwritev

        def short(fd: int, buffers: list[memoryview], offset: int) -> int:
            assert len(buffers) <= os.sysconf("SC_IOV_MAX")
            return pwritev(fd, [buffers[0][: max(1, len(buffers[0]) // 2)]], offset)

        monkeypatch.setattr(os, "pwritev", short)
        pieces = [bytes([i % 251]) * (i % 5) for i in range(3000)]
        with Writer(tmp_path / "file") as writer:
            writer.write(0, pieces)
        assert (tmp_path / "file").read_bytes() == b"".join(pieces)

    def test_memory_of_a_transposed_tensor_is_written_as_it_lies(self) -> None:
        tensor = torch.arange(6, dtype=torch.uint8).view(2, 3)
        assert bytes(bytes_of(tensor.t())) == bytes(range(6))
        assert len(bytes_of(tensor[:0])) == 0

    def test_an_error_names_file_reason_and_advice(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"cannot create .*/gone/file.*No such file.*all ranks share"):
            Writer(tmp_path / "gone" / "file")
        (tmp_path / "plain").touch()
        refused("a file is where a folder should be", lambda: Writer(tmp_path / "plain" / "file"), CheckpointError)

    def test_a_full_disk_is_named(self, tmp_path: Path) -> None:
        writer = Writer(tmp_path / "file")
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer._fd)
        writer.write(0, [b"abc"])
        refused("No space left on device; free space", writer.close, CheckpointError)

    def test_a_limit_of_file_sizes_is_named(self, tmp_path: Path) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"File too large; .*ulimit -f"), Writer(tmp_path / "file") as writer:
                writer.write(0, [bytes(5000)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    def test_an_error_of_fsync_and_one_of_close_are_reported(self, tmp_path: Path, monkeypatch: Any) -> None:
        def fails(fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        for name, action in (("fsync", "sync"), ("close", "close")):
            with monkeypatch.context() as patched:
                writer = Writer(tmp_path / name)
                patched.setattr(os, name, fails)
                refused(f"cannot {action} .*Input/output error", writer.close, CheckpointError)


class TestReader:
    def test_reads_into_memory_and_counts(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(range(100)))
        into = torch.zeros(4, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
        with Reader(tmp_path / "file") as reader:
            reader.read_into(10, [bytes_of(tensor) for tensor in into])
            assert reader.read(98, 2) == bytes([98, 99])
            assert reader.nbytes == 9
            assert reader.size() == 100
        assert torch.cat(into).tolist() == list(range(10, 17))

    def test_a_file_that_ends_too_soon_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(bytes(10))
        with (
            Reader(tmp_path / "file") as reader,
            pytest.raises(CheckpointError, match=r"file' is damaged: expected 5 bytes at 8, found 2"),
        ):
            reader.read(8, 5)
        refused(r"cannot open .*other", lambda: Reader(tmp_path / "other"), CheckpointError)


class TestCommit:
    def test_a_target_appears_whole_and_nothing_else_remains(self, tmp_path: Path) -> None:
        parent = tmp_path / "a" / "b"
        save(parent / "step-1", b"one")
        assert names(parent) == ["step-1"]
        assert content_of(parent / "step-1") == b"one"
        assert latest(parent) == parent / "step-1"

    def test_an_existing_target_is_exchanged_and_an_empty_one_filled(self, tmp_path: Path, monkeypatch: Any) -> None:
        (tmp_path / "step-1").mkdir()
        for content in (b"one", b"two"):
            save(tmp_path / "step-1", content)
            assert content_of(tmp_path / "step-1") == content
            assert names(tmp_path) == ["step-1"]

    def test_an_existing_target_is_replaced_where_folders_cannot_be_exchanged(self, tmp_path: Path, monkeypatch: Any) -> None:
        save(tmp_path / "step-1", b"one")
        without_exchange(monkeypatch)
        save(tmp_path / "step-1", b"two")
        assert content_of(tmp_path / "step-1") == b"two"
        assert names(tmp_path) == ["step-1"]

    def test_a_folder_with_other_files_is_neither_replaced_nor_deleted(self, tmp_path: Path, caplog: Any) -> None:
        save(tmp_path / "step-1", b"one")
        (tmp_path / "step-1" / "notes.txt").write_text("mine")
        refused(r"neither replaced nor deleted: it has notes\.txt", lambda: save(tmp_path / "step-1", b"two"), CheckpointError)
        save(tmp_path / "step-2", b"two", keep=1)
        assert "notes.txt" in caplog.text
        assert names(tmp_path) == ["step-1", "step-2"]
        assert (tmp_path / "step-1" / "notes.txt").read_text() == "mine"

    def test_what_a_save_cannot_be_named_or_put_at_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for name, error, message in (
            ("x.tmp", ValueError, r"neither \*.tmp"),
            ("file", CheckpointError, "is a file"),
            ("/proc", CheckpointError, "neither|mount"),
        ):
            with pytest.raises(error, match=message):
                save(tmp_path / name, b"")
        with pytest.raises(CheckpointError, match=r"cannot create .*a file is where a folder should be"):
            save(tmp_path / "file" / "step-1", b"")
        for keep, name, message in ((0, "step-1", "at least 1"), (2, "final", "ends in a number")):
            with pytest.raises(ValueError, match=message):
                save(tmp_path / name, b"", keep)

    def test_a_failed_save_leaves_nothing(self, tmp_path: Path) -> None:
        save(tmp_path / "step-1", b"one")
        draft = begin(tmp_path / "step-2")
        (draft.folder / "__1_0.distcp").write_bytes(b"half")
        abandon(draft)
        assert names(tmp_path) == ["step-1"]

    def test_a_file_that_rank_0_does_not_see_whole_is_named(self, tmp_path: Path) -> None:
        folder = begin(tmp_path / "step-1").folder
        (folder / "__1_0.distcp").write_bytes(b"half")
        check_files(folder, {"__1_0.distcp": 4})
        with pytest.raises(CheckpointError, match=r"__1_0.distcp' has 4 bytes, as rank 0 sees it; its rank has written 8"):
            check_files(folder, {"__1_0.distcp": 8})
        with pytest.raises(CheckpointError, match=r"cannot find .*__2_0.distcp.*all ranks share"):
            check_files(folder, {"__1_0.distcp": 4, "__2_0.distcp": 4})
        refused("File exists; another job writes there", lambda: Writer(folder / "__1_0.distcp"), CheckpointError)

    def test_a_link_to_a_folder_stays_a_link(self, tmp_path: Path) -> None:
        save(tmp_path / "step-1", b"one")
        (tmp_path / "newest").symlink_to("step-1")
        save(tmp_path / "newest", b"two")
        assert (tmp_path / "newest").is_symlink()
        (tmp_path / "best").symlink_to("final")
        for name, message in (("best", r"best', a link to '.*final'"), ("final", r"final'")):
            with pytest.raises(ValueError, match="ends in a number, such as 'step-100'; found '.*" + message):
                save(tmp_path / name, b"", 2)
        assert content_of(tmp_path / "step-1") == b"two"

    def test_what_fails_after_the_rename_is_not_the_save(self, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
        save(tmp_path / "step-1", b"one")
        sync_folder = folders.sync_folder
        monkeypatch.setattr(folders, "sync_folder", lambda folder: failing() if folder == tmp_path else sync_folder(folder))
        save(tmp_path / "step-1", b"two")
        assert content_of(tmp_path / "step-1") == b"two"
        assert "step-1 is saved, but: Input/output error" in caplog.text

    def test_who_may_read_what_was_there_may_read_the_new_one(self, tmp_path: Path) -> None:
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1").chmod(0o2750)
        save(tmp_path / "step-1", b"one")
        assert (tmp_path / "step-1").stat().st_mode & 0o7777 == 0o2750

    def test_the_current_directory_is_not_replaced(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        refused("is the current directory", lambda: save(Path(), b"one"))


class TestRetention:
    def test_links_and_what_they_lead_to_stay(self, tmp_path: Path) -> None:
        save(tmp_path / "archive" / "step-1", b"one")
        (tmp_path / "step-1").symlink_to("archive/step-1")
        (tmp_path / "step-5.tmp").symlink_to("archive/step-1")
        (tmp_path / "step-4.old.tmp").symlink_to("archive/step-1")
        for step in (2, 3):
            save(tmp_path / f"step-{step}", b"new", keep=1)
        assert content_of(tmp_path / "step-1") == b"one"
        assert names(tmp_path) == ["archive", "step-1", "step-3", "step-4.old.tmp", "step-5.tmp"]

    def test_a_newer_one_of_another_training_is_named(self, tmp_path: Path, caplog: Any) -> None:
        save(tmp_path / "step-900", b"old")
        save(tmp_path / "step-10", b"new", keep=1)
        assert "step-900 stays the latest checkpoint, not step-10" in caplog.text

    def test_the_newest_remain_and_what_is_not_alike_stays(self, tmp_path: Path) -> None:
        for name in ("step-0004", "other-2", "best", "step-90"):
            save(tmp_path / name, name.encode())
        (tmp_path / "step-3").mkdir()  # no .metadata: not a checkpoint
        (tmp_path / "step-5").touch()
        for step in (9, 10, 11):
            save(tmp_path / f"step-{step}", b"new", keep=2)
        assert names(tmp_path) == ["best", "other-2", "step-10", "step-11", "step-3", "step-5", "step-90"]

    def test_multiples_remain_beside_the_newest(self, tmp_path: Path) -> None:
        for step in (100, 150, 200, 250, 299):
            save(tmp_path / f"step-{step:05}", b"x", keep=2, keep_every=100)
        assert names(tmp_path) == ["step-00100", "step-00200", "step-00250", "step-00299"]
        save(tmp_path / "step-00300", b"x", keep=1, keep_every=200)
        assert names(tmp_path) == ["step-00200", "step-00300"]
        for keep, every in ((1, 0), (None, 2)):
            with pytest.raises(ValueError, match=rf"keep={keep}, keep_every={every}: expected keep_every to be at least 1"):
                save(tmp_path / "step-00400", b"x", keep, every)

    def test_unfinished_folders_of_the_same_kind_are_deleted(self, tmp_path: Path, caplog: Any) -> None:
        here = folder_of(tmp_path / "step-5", this_machine(), 32 * "a").name
        for name in ("step-1.tmp", "step-2.old.tmp", f"step-6.{32 * 'a'}.old.tmp", here, "other-1.tmp", "my.tmp"):
            (tmp_path / name).mkdir()
            (tmp_path / name / FILE).write_bytes(b"half")
        (tmp_path / "step-3.tmp").mkdir()
        (tmp_path / "step-3.tmp" / "mine").touch()
        grow_old(*tmp_path.iterdir())
        save(tmp_path / "step-4", b"new", keep=2)
        assert "step-3.tmp' is neither replaced nor deleted" in caplog.text
        assert names(tmp_path) == ["my.tmp", "other-1.tmp", "step-3.tmp", "step-4"]


class TestLatest:
    def test_the_highest_number_of_a_committed_folder(self, tmp_path: Path) -> None:
        assert latest(tmp_path) is None
        assert latest(tmp_path / "nothing") is None
        for name in ("step-9", "step-0010", "final"):
            save(tmp_path / name, b"x")
        (tmp_path / "step-11").mkdir()
        begin(tmp_path / "step-12")
        assert latest(str(tmp_path)) == tmp_path / "step-0010"


def failing() -> None:
    raise CheckpointError("Input/output error")


def killed_before(number: int, body: Callable[[], None]) -> bool:
    """Run `body` in a child that SIGKILLs itself before its `number`-th call to the system; False if it made fewer."""
    pid = os.fork()
    if not pid:
        left = [number]
        for name in STEPS:
            setattr(os, name, counted_down(getattr(os, name), left, signal.SIGKILL))
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (-signal.SIGKILL, 0)
    return code == -signal.SIGKILL


def histories() -> Iterator[tuple[str, list[int], int]]:
    """What is saved, when the folder already has the steps of the list."""
    yield "first", [], 1
    yield "next, with retention", [1, 2, 3], 4
    yield "over an existing one", [1, 2], 2


def test_killed_where_folders_cannot_be_exchanged_the_last_committed_one_is_whole(memory: Path, monkeypatch: Any) -> None:
    without_exchange(monkeypatch)
    number, was_killed, found = 0, True, set()
    while was_killed:
        number += 1
        parent = memory / str(number)
        save(parent / "step-2", b"old")
        was_killed = killed_before(number, partial(save, parent / "step-2", b"new", 2))
        newest = latest(parent)
        assert newest is not None
        assert content_of(newest) in (b"old", b"new")
        found.add(newest.name)
        save(parent / "step-3", b"later", keep=2)
        assert latest(parent) == parent / "step-3"
        assert names(parent) == sorted([newest.name, "step-3"])
    assert {re.sub("[0-9a-f]{32}", "random", name) for name in found} == {"step-2", "step-2.random.aside"}


@pytest.mark.parametrize(("before", "step"), [pytest.param(*rest, id=name) for name, *rest in histories()])
def test_killed_at_any_point_the_last_committed_one_is_whole(memory: Path, before: list[int], step: int) -> None:
    number, was_killed = 0, True
    while was_killed:
        number += 1
        parent = memory / str(number)
        for old in before:
            save(parent / f"step-{old}", b"old %d" % old)
        was_killed = killed_before(number, partial(save, parent / f"step-{step}", b"new", 2))
        found = latest(parent)
        committed = found == parent / f"step-{step}" and content_of(found) == b"new"
        if not committed:
            assert found == (parent / f"step-{before[-1]}" if before else None)
            assert found is None or content_of(found) == b"old %d" % before[-1]
        for folder in parent.glob("step-*[0-9]"):
            content_of(folder)
        save(parent / "step-5", b"later", keep=2)  # whatever the death left behind
        assert latest(parent) == parent / "step-5"
        assert content_of(parent / "step-5") == b"later"
        assert [name for name in names(parent) if name.endswith(".tmp")] == []
        assert len(names(parent)) <= 2
    assert committed
    assert number > 15

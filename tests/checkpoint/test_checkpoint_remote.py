"""Checkpoints in stores that fsspec knows: what comes back, what a failure leaves, and how much is read."""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import shardrt
from checkpoints import shared_folder, small_state, tensors_of, train
from marks import rest
from ranks import on_ranks, refused, run_script
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, DamagedCheckpointError
from shardrt.checkpoint.__main__ import main
from shardrt.checkpoint.disk.remote_files import RemoteReader
from shardrt.checkpoint.disk.remote_path import remote_path
from shardrt.checkpoint.disk.storage import storage_of
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.comm import World
from shardrt.comm.monitor.requests import requests

# Up to torch 2.14 its name is private.
_PLACES = (f"torch.distributed.checkpoint.{name}" for name in ("fsspec_filesystem", "_fsspec_filesystem"))
FsspecReader: Any = import_module(next(filter(find_spec, _PLACES))).FsspecReader

# Elements of 4 bytes: items on both sides of 16 KiB, 64 KiB and 1 MiB, and more than one range of 8 MiB.
LENGTHS = (1, 4095, 4096, 4097, (1 << 14) + 1, (1 << 18) - 40, 1 << 18, (1 << 18) + 1, (9 << 18) + 3)


class Trouble(LocalFileSystem):
    """Files of this machine, as trouble://, in which the calls of a kind fail once `left` of them were made."""

    protocol = "trouble"
    left: ClassVar[dict[str, int]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("trouble://")))

    @classmethod
    def count(cls, kind: str) -> None:
        cls.left[kind] = cls.left.get(kind, 1 << 30) - 1
        if cls.left[kind] < 0:
            raise cls.error

    error: ClassVar[Exception] = OSError(28, "No space left on device")

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        if "w" in mode:
            write = file.f.write

            def counted(data: Any) -> int:
                self.count("write")
                return int(write(data))

            file.write = counted
        return file

    def mv(self, *paths: Any, **options: Any) -> None:
        self.count("mv")
        super().mv(*paths, **options)

    def info(self, path: Any, **options: Any) -> Any:
        self.count("info")
        return super().info(path, **options)

    def rm(self, path: Any, **options: Any) -> None:
        self.count("rm")
        super().rm(path, **options)


class Counted(MemoryFileSystem):
    """A store that notes what is asked for: (start, end) of each range, those of one call together."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    calls: ClassVar[list[list[tuple[int, int]]]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("counted://"))

    def cat_ranges(self, paths: list[str], starts: Any, ends: Any, **options: Any) -> Any:
        self.calls.append(list(zip(starts, ends, strict=True)))
        return super().cat_ranges(paths, starts, ends, **options)


class Slow(Trouble):
    """Files of this machine, as slow://, that take `naps[kind]` seconds for each call of a kind."""

    protocol = "slow"
    naps: ClassVar[dict[str, float]] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("slow://")))

    @classmethod
    def count(cls, kind: str) -> None:
        time.sleep(cls.naps.get(kind, 0.0))

    def cat_ranges(self, *given: Any, **options: Any) -> Any:
        self.count("read")
        return super().cat_ranges(*given, **options)

    def ls(self, path: Any, detail: bool = True, **options: Any) -> Any:
        self.count("ls")
        return super().ls(path, detail, **options)


for kind in (Trouble, Counted, Slow):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@contextmanager
def store(world: World, protocol: str = "file") -> Iterator[str]:
    """The URL of a new folder that all ranks see: in a folder of the machine, or, on one rank, in memory too."""
    if protocol in ("memory", "counted"):
        yield f"{protocol}://{secrets.token_hex(8)}/runs"
        return
    with shared_folder(world) as folder:
        yield f"{protocol}://{folder}"


def kinds(world: World) -> tuple[str, ...]:
    return ("memory", "file") if world.size == 1 else ("file",)


def wholes(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {f"rows{length}": torch.randint(-(1 << 31), 1 << 31, (length,)).int().view(torch.float32) for length in LENGTHS}
    return found | {"odd": torch.randn(257, 1031), "half": torch.randn(33, 1001).bfloat16(), "plain": torch.randn(13)}


def sharded(world: World, values: dict[str, torch.Tensor], dim: int = 0) -> dict[str, Any]:
    return {
        name: value.clone()
        if name == "plain"
        else shardrt.distribute_tensor(value, world.mesh, [shardrt.Shard(min(dim, value.dim() - 1))])
        for name, value in values.items()
    }


def empty(world: World, values: dict[str, torch.Tensor], dim: int = 0) -> dict[str, Any]:
    return sharded(world, {name: torch.zeros_like(value) for name, value in values.items()}, dim)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    """To the bit; values may be NaN."""
    return all(
        torch.equal(whole(found[name]).contiguous().view(torch.uint8), value.view(torch.uint8))
        for name, value in expected.items()
    )


@on_ranks(1, 2, 3)
def test_what_is_saved_comes_back_to_the_bit(world: World) -> None:
    for protocol in kinds(world):
        with store(world, protocol) as url:
            for step, dim in ((1, 0), (2, 1), (10, 0)):
                values, name = wholes(step), f"{url}/step-{step}"
                state = {"tensors": sharded(world, values, dim), "epoch": step, "list": [step, "a"]}
                if step == 2:
                    saving = checkpoint.async_save(name, state)
                    assert str(saving.folder) == name
                    saving.result()
                else:
                    checkpoint.save(name, state)
                for other in (0, 1):
                    target: dict[str, Any] = {"tensors": empty(world, values, other), "epoch": 0, "list": []}
                    checkpoint.load(name, target)
                    assert same(target["tensors"], values)
                    assert (target["epoch"], target["list"]) == (step, [step, "a"])
                assert str(checkpoint.latest(url)) == name
            assert checkpoint.latest(url, "best-") is None
            assert checkpoint.latest(f"{url}/none") is None


@on_ranks(1, 2)
def test_stock_dcp_and_copies_on_a_disk_have_the_same(world: World) -> None:
    values = wholes(3)
    with store(world) as url, shared_folder(world) as folder:
        checkpoint.save(f"{url}/step-1", {"tensors": sharded(world, values), "epoch": 3})
        checkpoint.save(folder / "step-2", {"tensors": sharded(world, values), "epoch": 3})
        if world.rank == 0:
            shutil.copytree(Path(url.removeprefix("file://")) / "step-1", folder / "step-3")
            for file in os.listdir(folder / "step-2"):
                fsspec.filesystem("memory").put_file(folder / "step-2" / file, f"/{folder.name}/step-4/{file}")
            found = {f"tensors.{name}": torch.zeros_like(value) for name, value in values.items()}
            torch.distributed.checkpoint.load(found, storage_reader=FsspecReader(f"{url}/step-1"), no_dist=True)
            assert same(found, {f"tensors.{name}": value for name, value in values.items()})
            assert main(["verify", f"memory://{folder.name}/step-4"]) == 0
        world.barrier()
        target: dict[str, Any] = {"tensors": empty(world, values), "epoch": 0}
        checkpoint.load(folder / "step-3", target)
        assert same(target["tensors"], values)
        assert target["epoch"] == 3


@on_ranks(1, 3)
def test_a_flipped_bit_is_found_by_load_and_verify(world: World) -> None:
    with store(world) as url:
        values = wholes(4)
        checkpoint.save(f"{url}/step-1", {"tensors": sharded(world, values)})
        file = Path(url.removeprefix("file://")) / "step-1" / "__0_0.distcp"
        if world.rank == 0:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 4
            file.write_bytes(data)
        world.barrier()
        with pytest.raises(DamagedCheckpointError, match=r"file://.*__0_0.distcp', tensor 'tensors\..* is damaged"):
            checkpoint.load(f"{url}/step-1", {"tensors": empty(world, values)})
        if world.rank == 0:
            with redirect_stdout(io.StringIO()) as out:
                assert main(["verify", f"{url}/step-1"]) == 1
            assert "1 of " in out.getvalue()
            file.write_bytes(data[:-1])
        world.barrier()
        with pytest.raises(DamagedCheckpointError, match=r"ends .*by \.metadata, expected"):
            checkpoint.load(f"{url}/step-1", {"tensors": empty(world, values)})
        if world.rank == 0:
            file.unlink()
        world.barrier()
        with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp' is missing"):
            checkpoint.load(f"{url}/step-1", {"tensors": empty(world, values)})


@pytest.mark.rest
@on_ranks(2, more=(1,))
def test_a_run_resumes_and_keeps_so_many(world: World) -> None:
    for protocol in kinds(world):
        with store(world, protocol) as url:
            expected = small_state(0)
            for _ in range(9):
                train(expected)
            for total in (4, 9):
                state = small_state(0)
                with shardrt.Run(url, state, every=2, keep=2, keep_every=4) as run:
                    assert run.done == (0 if total == 4 else 4)
                    for _ in run.steps(total):
                        train(state)
            assert all(torch.equal(value, tensors_of(expected)[name]) for name, value in tensors_of(state).items())
            world.barrier()
            assert sorted(remote_path(url).sizes()) == ["step-00000004", "step-00000008", "step-00000009"]


@on_ranks(1, 2)
def test_a_run_keeps_what_is_damaged_and_saves_that_step_again(world: World) -> None:
    for protocol in kinds(world):
        with store(world, protocol) as url:
            state = small_state(0)
            with shardrt.Run(url, state, every=1) as run:
                for _ in run.steps(2):
                    train(state)
            damaged = remote_path(f"{url}/step-00000002")
            data = damaged.fs.cat_file(f"{damaged.path}/__0_0.distcp")
            world.barrier()
            if world.rank == 0:
                damaged.fs.pipe_file(f"{damaged.path}/__0_0.distcp", data[:-70])
            world.barrier()
            with shardrt.Run(url, state, every=1) as run:
                assert run.done == 1
                for _ in run.steps(2):
                    train(state)
            world.barrier()
            aside = damaged.with_name("step-00000002.damaged")
            assert aside.sizes()["__0_0.distcp"] == len(data) - 70
            assert aside.sizes().keys() == damaged.sizes().keys()
            assert str(checkpoint.latest(url)) == damaged.url
            with shardrt.Run(url, state) as run:
                assert run.done == 2


# ---------------------------------------------------------------------- failures


@on_ranks(1, 2, 3)
def test_a_store_that_fails_is_an_error_on_every_rank_and_leaves_no_checkpoint(world: World) -> None:
    last = world.rank == world.size - 1
    state = {"large": torch.ones(3_000_001), "mine": _rows(world), "step": 1}
    failures = [("write", 0, last), ("write", 2, last), ("mv", 0, True), ("info", 0, world.rank == 0)]
    with store(world, "trouble") as url:
        checkpoint.save(f"{url}/step-1", state)
        saves = (lambda url: checkpoint.save(url, state), lambda url: checkpoint.async_save(url, state).wait())
        for save in saves:
            for kind, calls, fails in failures:
                Trouble.left = {kind: calls} if fails else {}
                with pytest.raises(CheckpointError, match=r"cannot .*trouble://.*step-2.*No space left on device"):
                    save(f"{url}/step-2")
                Trouble.left = {}
                assert str(checkpoint.latest(url)) == f"{url}/step-1"
                world.barrier()
                assert remote_path(f"{url}/step-2").sizes() == {}
        checkpoint.save(f"{url}/step-2", state)
        assert str(checkpoint.latest(url)) == f"{url}/step-2"


def _rows(world: World) -> Any:
    return shardrt.distribute_tensor(torch.ones(world.size, 300_000), world.mesh, [shardrt.Shard(0)])


@on_ranks(2)
def test_errors_of_the_stores_own_classes_have_a_reason_too(world: World) -> None:
    class ClientError(Exception):
        pass

    with store(world, "trouble") as url:
        checkpoint.save(f"{url}/step-1", {"a": torch.ones(3)})
        for error, reason in (
            (ClientError("Slow Down"), "ClientError: Slow Down"),
            (PermissionError("denied"), "PermissionError: denied"),
        ):
            Trouble.left = {"info": 0} if world.rank == 1 else {}
            with mock.patch.object(Trouble, "error", error), pytest.raises(CheckpointError, match=f"trouble://.*{reason}"):
                checkpoint.load(f"{url}/step-1", {"a": torch.ones(3)})
            Trouble.left = {"info": 0} if world.rank == 1 else {}
            # Not "there is no checkpoint": the run would start anew.
            with mock.patch.object(Trouble, "error", error), pytest.raises(CheckpointError, match=f"trouble://.*{reason}"):
                shardrt.Run(url, {}).__enter__()
        Trouble.left = {}


@on_ranks(1, 2)
def test_what_cannot_be_deleted_stays_with_a_warning(world: World) -> None:
    with store(world, "trouble") as url:
        for step in (1, 2):
            checkpoint.save(f"{url}/step-{step}", {"a": torch.ones(3)}, keep=2)
        Trouble.left = {"rm": 0}
        with mock.patch("shardrt.checkpoint.disk.removal._log") as log:
            checkpoint.save(f"{url}/step-3", {"a": torch.ones(3)}, keep=1)
        assert log.warning.call_count == (2 if world.rank == 0 else 0)
        Trouble.left = {}
        checkpoint.save(f"{url}/step-4", {"a": torch.ones(3)}, keep=1)
        world.barrier()
        assert sorted(remote_path(url).sizes()) == ["step-4"]


KILLED = """
import os, signal
import torch, shardrt
import test_checkpoint_remote as stores
from shardrt import checkpoint

world = shardrt.init()
checkpoint.save(os.environ["URL"] + "/step-1", {"a": torch.ones(3_000_000)})
if world.rank == 0:
    stores.Trouble.mv = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save(os.environ["URL"] + "/step-2", {"a": torch.zeros(3_000_000)})
"""


def test_a_job_that_is_killed_before_metadata_has_its_name_leaves_no_checkpoint(tmp_path: Path) -> None:
    url = f"trouble://{tmp_path}"
    assert run_script(KILLED, 2, URL=url).returncode != 0
    assert sorted(os.listdir(tmp_path / "step-2")) == [".metadata.tmp", "__0_0.distcp"]
    assert str(checkpoint.latest(url)) == f"{url}/step-1"
    assert main(["verify", f"{url}/step-1"]) == 0
    assert main(["inspect", f"{url}/step-2"]) == 1


SLOW = """
import os
import torch, shardrt
from test_checkpoint_remote import Slow
from shardrt import checkpoint

world = shardrt.init()
url, how, naps = os.environ["URL"], os.environ["HOW"], eval(os.environ["NAPS"])
def state():
    return {f"{n}": shardrt.distribute_tensor(torch.ones(2, 99999), world.mesh, [shardrt.Shard(0)]) for n in range(6)}
if how == "load":
    checkpoint.save(url, state())
if world.rank == 1 or how == "latest":
    Slow.naps = naps
if how == "save":
    checkpoint.save(url, state())
elif how == "async_save":
    saving = checkpoint.async_save(url, state())
    while not saving.poll():
        world.barrier()
elif how == "load":
    checkpoint.load(url, state())
else:
    checkpoint.latest(url)
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "naps", "request_", "rank"),
    [
        ("save", {"write": 900}, "write 'slow://{}/__1_0.distcp'", "1"),
        *rest(
            ("async_save", {"write": 900}, "write 'slow://{}/__1_0.distcp'", "1"),
            ("load", {"read": 900}, "read 'slow://{}/.metadata'", "1"),
            ("latest", {"ls": 900}, "list 'slow://{}'", "[01]"),  # no rank is in a call
        ),
    ],
)
def test_a_store_that_never_answers_ends_the_job(
    how: str, naps: dict[str, float], request_: str, rank: str, tmp_path: Path
) -> None:
    folder = tmp_path / "step-1"
    done = run_script(SLOW, 2, code=17, URL=f"slow://{folder}", HOW=how, NAPS=repr(naps), SHARDRT_TIMEOUT="3")
    asked = re.escape(f"in a request to a store, to {request_.format(folder)} (limit 3 s, SHARDRT_TIMEOUT); ending the job")
    assert re.search(rf"rank {rank}: waited \d+ s {asked}", done.stderr), done.stderr


@pytest.mark.rest
@pytest.mark.parametrize(("how", "naps"), [("save", {"write": 0.7}), ("load", {"read": 0.7})])
def test_a_slow_store_ends_no_job(how: str, naps: dict[str, float], tmp_path: Path) -> None:
    """It takes longer than SHARDRT_TIMEOUT for all of them, but not for a request."""
    done = run_script(SLOW, 2, URL=f"slow://{tmp_path}/step-1", HOW=how, NAPS=repr(naps), SHARDRT_TIMEOUT="2")
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
    assert how == "save" or "for rank 1, which is at work" in done.stderr


@pytest.mark.rest
@on_ranks(1, 2)
def test_training_waits_for_two_requests_of_an_asynchronous_save(world: World) -> None:
    """Which also deletes older checkpoints. The rest is asked for by the thread that writes."""
    under_way, waited = requests.under_way, list[str]()

    def counted(what: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            waited.append(what.split()[0])
        return under_way(what)

    with store(world, "slow") as url, mock.patch.object(requests, "under_way", counted):
        for step in range(4):
            waited.clear()
            Slow.naps = {"write": 0.1, "rm": 0.1, "mv": 0.1}
            saving = checkpoint.async_save(f"{url}/step-{step}", {"a": torch.ones(3)}, keep=2)
            while not saving.poll():
                pass
            Slow.naps = {}
            assert waited == (["list", "create"] if world.rank == 0 else [])
        assert sorted(remote_path(url).sizes()) == ["step-2", "step-3"]


@on_ranks(1, 2)
def test_a_load_that_takes_long_says_how_far_it_is(world: World) -> None:
    with store(world) as url:
        values = wholes(4)
        checkpoint.save(f"{url}/step-1", sharded(world, values))
        with mock.patch("shardrt.instruments.progress._SECONDS", 0.0), mock.patch("shardrt.checkpoint.loading.load.log") as log:
            checkpoint.load(f"{url}/step-1", empty(world, values))
        lines = [call.args[1] for call in log.call_args_list]
        assert bool(lines) == (world.rank == 0)
        assert all(re.match(rf"load of '{url}/step-1': read 0\.\d\d of about 0\.\d\d GB in 0 s$", line) for line in lines)


def test_many_files_are_deleted_and_copied_by_several_requests(tmp_path: Path) -> None:
    names = [f"__{rank}_0.distcp" for rank in range(70)]
    folder, copies = (remote_path(f"trouble://{tmp_path}/{name}") for name in ("a", "b"))
    for path in (folder, copies):
        path.mkdir()
    for name in names:
        (tmp_path / "a" / name).touch()
    with (
        mock.patch.object(Trouble, "rm", autospec=True, side_effect=Trouble.rm) as rm,
        mock.patch.object(Trouble, "copy", autospec=True, side_effect=Trouble.copy) as copy,
    ):
        folder.copy(names, copies)
        folder.unlink(names)
    assert [len(call.args[1]) for call in rm.call_args_list] == [32, 32, 6]
    assert [len(call.args[1]) for call in copy.call_args_list] == [32, 32, 6]
    assert (folder.sizes(), sorted(copies.sizes())) == ({}, sorted(names))


@on_ranks(1, 2)
def test_the_next_save_deletes_what_a_killed_one_has_left(world: World) -> None:
    with store(world) as url:
        folder = Path(url.removeprefix("file://")) / "step-2"
        if world.rank == 0:
            folder.mkdir()
            for name in (".metadata.tmp", "__0_0.distcp", "__7_0.distcp"):
                (folder / name).write_bytes(b"half")
        world.barrier()
        checkpoint.save(f"{url}/step-2", {"a": torch.arange(5)})
        assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"]
        target = {"a": torch.zeros(5, dtype=torch.int64)}
        checkpoint.load(f"{url}/step-2", target)
        assert target["a"].tolist() == [0, 1, 2, 3, 4]


@on_ranks(1, 2)
def test_a_checkpoint_is_deleted_from_its_metadata_on(world: World) -> None:
    with store(world) as url:
        checkpoint.save(f"{url}/step-1", {"a": torch.ones(3)}, keep=1)
        deleted = list[str]()

        def rm(fs: LocalFileSystem, paths: list[str]) -> None:
            for path in paths:
                fs.rm_file(path)
                deleted.append(path)

        with mock.patch.object(LocalFileSystem, "rm", rm):
            checkpoint.save(f"{url}/step-2", {"a": torch.ones(3)}, keep=1)
        expected = [".metadata", "__0_0.distcp"] if world.rank == 0 else []
        assert [path.rpartition("/step-1/")[2] for path in deleted] == expected


@on_ranks(1, 2)
def test_a_save_does_not_replace_what_another_job_has_saved_meanwhile(world: World) -> None:
    with store(world) as url:
        checkpoint.save(f"{url}/other", {"a": torch.ones(3), "mine": _rows(world)})
        saving = checkpoint.async_save(f"{url}/step-1", {"a": torch.zeros(3), "mine": _rows(world)})
        saving._task.wait()
        world.barrier()
        if world.rank == 0:
            folder = Path(url.removeprefix("file://"))
            shutil.copytree(folder / "other", folder / "step-1", dirs_exist_ok=True)
        world.barrier()
        refused("has a checkpoint that another job has saved there", saving.wait, CheckpointError)
        target = {"a": torch.zeros(3)}
        checkpoint.load(f"{url}/step-1", target)
        assert target["a"].tolist() == [1, 1, 1]


# ---------------------------------------------------------------------- what is refused


@on_ranks(1, 2)
def test_a_save_over_a_checkpoint_or_beside_other_files_is_refused(world: World) -> None:
    with store(world) as url:
        checkpoint.save(f"{url}/step-1", {"a": torch.ones(3)})
        for folder, reason in ((f"{url}/step-1", "has a checkpoint.*delete it first"), (url, "it has step-1, which no")):
            with pytest.raises(CheckpointError, match=reason):
                checkpoint.save(folder, {"a": torch.zeros(3)})
        target = {"a": torch.zeros(3)}
        checkpoint.load(f"{url}/step-1", target)
        assert target["a"].tolist() == [1, 1, 1]


@on_ranks(2)
def test_ranks_that_do_not_share_the_store_are_told(world: World) -> None:
    url = world.comm.exchange(f"memory://{secrets.token_hex(8)}")[0]
    with pytest.raises(CheckpointError, match=r"__1_0.distcp' has no bytes, as rank 0 sees it.*that all ranks share"):
        checkpoint.save(f"{url}/step-1", {"mine": _rows(world)})
    assert checkpoint.latest(url) is None


@on_ranks(1, 2)
def test_bad_urls_are_refused_on_every_rank(world: World) -> None:
    bad: tuple[tuple[Any, str], ...] = (
        ("nosuch://bucket/step-1", "Protocol not known: nosuch"),
        ("s3://bucket/step-1", "Install s3fs"),
        ("memory://runs*/step-1", "not take for a name"),
        (Path("s3://bucket/step-1"), "give URLs as strings"),
    )
    for url, reason in bad:
        if world.rank == 0:
            with pytest.raises(CheckpointError, match=reason):
                checkpoint.latest(url)
        for call in (checkpoint.save, checkpoint.load, shardrt.Run):
            with pytest.raises(CheckpointError, match=reason):
                call(url, {"a": 1})
    last = "s3://bucket/step-1" if world.rank == world.size - 1 else "memory://runs/step-1"
    refused(f"rank {world.size - 1} raised", lambda: shardrt.Run(last, {}), CheckpointError)
    refused("memory://", lambda: checkpoint.save("memory://", {"a": 1}), CheckpointError)
    for convert in (checkpoint.load_safetensors, checkpoint.save_safetensors):
        with pytest.raises(CheckpointError, match="DCP's format only"):
            convert(torch.nn.Linear(2, 2), "memory://runs/model")


@on_ranks(2)
def test_without_fsspec_the_error_says_what_to_install_on_every_rank(world: World) -> None:
    hidden = {name: None for name in ("fsspec", "fsspec.core")} if world.rank == 1 else {}
    with mock.patch.dict(sys.modules, hidden):
        for call in (checkpoint.save, shardrt.Run):
            with pytest.raises(CheckpointError, match=r"rank 1 raised .*'memory://step-1'.*pip install fsspec"):
                call("memory://step-1", {"a": 1})
    hidden = dict.fromkeys(("fsspec", "fsspec.core"))
    with mock.patch.dict(sys.modules, hidden), pytest.raises(CheckpointError, match="pip install fsspec"):
        checkpoint.load("memory://step-1", {"a": 1})


def test_paths_do_not_import_fsspec(tmp_path: Path) -> None:
    code = "import sys; from shardrt import checkpoint; checkpoint.latest(sys.argv[1]); assert 'fsspec' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


# ---------------------------------------------------------------------- how it is read


@on_ranks(1)
def test_few_rows_take_few_bytes_and_much_takes_many_ranges_at_once(world: World) -> None:
    values = {"large": torch.arange(10 << 20).float().view(-1, 1024)}  # 40 MiB
    with store(world, "counted") as url:
        checkpoint.save(f"{url}/step-1", values)
        stored = read_stored(f"{url}/step-1")
        item = stored.tensors["large"].chunks[0]
        assert item.length > 40 << 20
        Counted.calls.clear()
        target = {"large": torch.zeros_like(values["large"])}
        checkpoint.load(f"{url}/step-1", target)
        assert torch.equal(target["large"], values["large"])
        assert max(map(len, Counted.calls)) == 5
        assert len(Counted.calls) < 8
        Counted.calls.clear()
        with stored.open(item.file) as reader:
            for row in (17, 5000):
                assert len(reader.read(row * 4096, 4096)) == 4096
        assert sum(end - start for ranges in Counted.calls for start, end in ranges) < 8 << 20


def test_an_answer_that_is_too_short_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that took it for damage would put a checkpoint aside because of a store that is overloaded."""
    fsspec.filesystem("memory").pipe_file("/reads/short", bytes(5000))
    with RemoteReader(remote_path("memory://reads/short")) as reader:
        monkeypatch.setattr(MemoryFileSystem, "cat_ranges", lambda *_, **__: [bytes(1000)])
        with pytest.raises(CheckpointError, match=r"has answered with 1000 of 5000 bytes at 0, of 5000 that") as caught:
            reader.read(0, 4096)
        assert type(caught.value) is CheckpointError


def test_reads_anywhere_give_the_bytes_of_the_file() -> None:
    data = os.urandom((20 << 20) + 7)
    fsspec.filesystem("memory").pipe_file("/reads/file", data)
    generator = torch.Generator().manual_seed(0)
    with RemoteReader(remote_path("memory://reads/file")) as reader:
        assert reader.size() == len(data)
        place = 0
        for nbytes in (0, 1, 64, 5000, (1 << 20) - 1, 1 << 20, (8 << 20) + 1, 3):
            for start in (0, place, int(torch.randint(len(data) - nbytes, (1,), generator=generator)), len(data) - nbytes):
                assert reader.read(start, nbytes) == data[start : start + nbytes]
                place = min(start + nbytes, len(data) - (9 << 20))
        with pytest.raises(DamagedCheckpointError, match=r"expected 8 bytes at .*, found 7 before its end"):
            reader.read(len(data) - 7, 8)
        buffers = [bytearray(3), bytearray(2 << 20), bytearray(5)]
        reader.read_into(11, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data[11 : 11 + 8 + (2 << 20)]
    assert storage_of(remote_path("memory://reads/file")).reader is RemoteReader

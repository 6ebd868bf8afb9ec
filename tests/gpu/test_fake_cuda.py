"""The stand-in for CUDA reports what would go wrong on a GPU, and nothing else. Runs only under fake_cuda/run.py."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks, run_script
from shardrt import checkpoint
from shardrt.checkpoint.run.survival.copies import MemoryCopies
from shardrt.comm import World
from shardrt.comm.core.streams import CudaStream, _CudaEvent
from shardrt.fsdp.memory.context import Streams
from shardrt.fsdp.reduce.sharded_grads import ShardedGrads
from shardrt.integrations import torch_distributed
from shardrt.kernels import cuda as kernels
from shardrt.tensor.placement import snapshots
from toys import OddMLP, batch, loss_of, shard_blocks
from worker import take_races

pytestmark = pytest.mark.skipif("FAKE_GPUS" not in os.environ, reason="runs under tests/fake_cuda/run.py")
FOLDER = Path(__file__).parents[1] / "fake_cuda"
RUN_PY = Path("tests") / "fake_cuda" / "run.py"


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    torch.cuda.synchronize()
    take_races()
    yield
    torch.cuda.set_device(0)


def test_streams_that_race_and_streams_that_do_not() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def both(*, ordered: bool) -> str:
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            shared = torch.zeros(100, device="cuda")
        if ordered:
            second.wait_event(first.record_event())
        with torch.cuda.stream(second):
            shared.add_(1)
        torch.cuda.synchronize()
        assert shared.cpu().tolist() == [1.0] * 100
        return take_races()

    assert "write after write: aten.zero_.default on stream" in both(ordered=False)
    assert both(ordered=True) == ""


# ---------------------------------------------------------------------- the host, and pinned memory


def crc_of(pinned: torch.Tensor) -> int:
    return zlib.crc32(memoryview((ctypes.c_char * pinned.nbytes).from_address(pinned.data_ptr())))


WAITS: dict[str, Callable[[torch.cuda.Stream, torch.cuda.Event], object]] = {
    "nothing": lambda stream, event: None,
    "another event": lambda stream, event: torch.cuda.Stream().record_event().synchronize(),
    "event": lambda stream, event: event.synchronize(),
    "stream": lambda stream, event: stream.synchronize(),
    "device": lambda stream, event: torch.cuda.synchronize(),
}
ON_HOST: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "read": ("read after write: memcpy on stream .*aten.sum.default on the host", torch.Tensor.sum),
    "write": ("write after write: memcpy on stream .*aten.add_.Tensor on the host", lambda pinned: pinned.add_(1)),
    "a list": ("aten._foreach_mul_.Scalar on the host", lambda pinned: torch._foreach_mul_([pinned[:3], pinned[3:]], 2.0)),
    "checksum": ("read after write: memcpy on stream .*crc32 on the host", crc_of),
}


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("access", ON_HOST)
def test_the_host_waits_for_a_copy_to_pinned_memory(access: str, waits: str) -> None:
    stream, given, pinned = torch.cuda.Stream(), torch.ones(10, device="cuda"), torch.zeros(10, pin_memory=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pinned.copy_(given, non_blocking=True)
        event = stream.record_event()
    expected, touch = ON_HOST[access]
    pinned.view(2, 5)[0].detach()  # reads no element
    torch.empty_like(pinned)
    assert take_races() == ""
    WAITS[waits](stream, event)
    touch(pinned)
    races = take_races()
    assert re.search(expected, races) if waits in ("nothing", "another event") else races == "", races


def test_the_host_writes_pinned_memory_that_a_copy_reads() -> None:
    stream, pinned = torch.cuda.Stream(), torch.zeros(10, pin_memory=True)
    with torch.cuda.stream(stream):
        first = pinned.to("cuda", non_blocking=True)
    pinned.sum()
    assert take_races() == "", "two reads"
    pinned.fill_(1)
    assert "write after read: memcpy on stream" in take_races()
    with torch.cuda.stream(stream):  # what the host has done comes before what it launches
        second = pinned.to("cuda", non_blocking=True)
        pinned.to("cuda")  # waits
    pinned.fill_(2)
    assert take_races() == ""
    assert (first.tolist(), second.tolist()) == ([0.0] * 10, [1.0] * 10)


def test_pinned_memory_that_is_freed_is_used_again_after_the_copy() -> None:
    """torch's allocator waits; the next owner of the memory races with nothing."""
    with torch.cuda.stream(torch.cuda.Stream()):
        sums = [torch.full((1000,), i).pin_memory().to("cuda", non_blocking=True).sum() for i in range(20)]
    torch.cuda.synchronize()
    assert [int(each) for each in sums] == [1000 * i for i in range(20)]
    assert take_races() == ""


@pytest.mark.parametrize("waiter", ["here", "the other thread", "nobody"])
def test_threads_of_the_host_know_what_they_have_waited_for(waiter: str) -> None:
    stream, pinned, done = torch.cuda.Stream(), torch.zeros(10, pin_memory=True), threading.Event()
    with torch.cuda.stream(stream):
        pinned.copy_(torch.ones(10, device="cuda"), non_blocking=True)
        event = stream.record_event()
    if waiter == "here":
        event.synchronize()

    def read() -> None:
        if waiter == "the other thread":
            event.synchronize()
        pinned.sum()
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    done.wait()
    races = take_races()
    assert ("read after write: memcpy on stream" in races and "on the host's thread" in races) == (waiter == "nobody"), races
    pinned.sum()  # knows what the other thread did
    assert (take_races() == "") == (waiter != "nobody")
    thread.join()


def test_what_a_thread_has_waited_for_is_not_known_to_others() -> None:
    stream, pinned, go = torch.cuda.Stream(), torch.zeros(10, pin_memory=True), threading.Lock()
    with torch.cuda.stream(stream):
        pinned.copy_(torch.ones(10, device="cuda"), non_blocking=True)
        event = stream.record_event()
    go.acquire()

    def wait() -> None:
        event.synchronize()
        go.release()

    thread = threading.Thread(target=wait)
    thread.start()
    go.acquire()  # tells nothing: nobody sees locks
    pinned.sum()
    assert "read after write" in take_races()
    thread.join()


# ---------------------------------------------------------------------- offload and saves: each wait of the host is needed


def leave_out(patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    patch.setattr(owner, method, lambda *args: None)


def train_offloaded(patch: pytest.MonkeyPatch, left_out: str) -> None:
    if left_out == "settle":
        leave_out(patch, Streams, "synchronize")
    if left_out == "hook":
        leave_out(patch, ShardedGrads, "_arrive")
    model = shard_blocks(OddMLP(), offload_policy=shardrt.CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if left_out != "settle":  # which waits for what these have waited for already
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: param.grad.to_local().mul_(0.5))
    for step in range(3):
        loss_of(model, batch(step).float()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    if left_out == "evaluation":
        leave_out(patch, CudaStream, "synchronize")
    with torch.no_grad():
        model(batch(0).float())
        for param in model.parameters():
            param.mul_(0.5)


LEFT_OUT = {
    "nothing": "",
    "settle": "read after write: memcpy on stream",
    "hook": "write after write: memcpy on stream",
    "evaluation": "write after read: memcpy on stream",
}


@pytest.mark.parametrize("left_out", LEFT_OUT)
@on_ranks(1, 2)
def test_offload_waits_on_the_host(world: World, left_out: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        train_offloaded(patch, left_out)
    races = take_races()
    assert LEFT_OUT[left_out] in races if left_out != "nothing" else races == "", races
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save], ids=["save", "async_save"])
@on_ranks(1, 2)
def test_a_save_waits_on_the_host(world: World, save: Callable[..., checkpoint.AsyncSave | None], waits: bool) -> None:
    model = shard_blocks(OddMLP())
    loss_of(model, batch(0).float()).backward()
    with shared_folder(world) as folder, pytest.MonkeyPatch.context() as patch:
        if not waits:
            leave_out(patch, _CudaEvent, "synchronize")
            leave_out(patch, torch.cuda.Event, "synchronize")
        for step in range(2):
            saved = save(folder / f"step-{step}", {"model": model})
            if saved is not None:
                saved.wait()
    races = take_races()
    assert "read after write: memcpy on stream" in races if not waits else races == "", races
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_known", [True, False])
@on_ranks(2)
def test_a_step_waits_for_two_saves_that_copy(world: World, is_known: bool) -> None:
    """The copy of a run, and its checkpoint."""
    model = shard_blocks(OddMLP())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    copies, has_stepped, end = MemoryCopies(), threading.Event(), snapshots.Snapshot.end
    with shared_folder(world) as folder, pytest.MonkeyPatch.context() as patch:
        # Otherwise the thread may have waited for the copies on the host before the step.
        patch.setattr(snapshots.Snapshot, "end", lambda self: has_stepped.wait() and end(self))
        for step in range(2):
            has_stepped.clear()
            loss_of(model, batch(0).float()).backward()
            copies.take(f"step-{step}", {"model": model})
            if not is_known:
                snapshots.current = None
            saved = checkpoint.async_save(folder / f"step-{step}", {"model": model})
            optimizer.step()
            has_stepped.set()
            saved.wait()
            copies.finish()
    copies.close(delete=True)
    races = take_races()
    assert "write after read" in races if not is_known else races == "", races
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- devices


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@on_ranks(1, 2, 3)
def test_a_process_group_of_torch(world: World, is_async: bool) -> None:
    """Calls of tensors that streams of the caller's have just made, and messages that two ranks send to each other."""
    here = torch_distributed.init_process_group()
    try:
        assert here is world
        group = dist.new_group(list(reversed(range(world.size))))

        def done(work: dist.Work | None) -> None:
            if is_async:
                assert work is not None
                work.wait()

        for step in range(3):
            with torch.cuda.stream(torch.cuda.Stream()):
                tensor = torch.full((50_000,), world.rank + 1.0, device="cuda")
                done(dist.all_reduce(tensor, async_op=is_async))
                gathered = [torch.empty(7, 3, device="cuda").T for _ in range(world.size)]  # not contiguous
                done(dist.all_gather(gathered, tensor[:21].view(3, 7), group=group, async_op=is_async))
                future = dist.all_reduce(torch.full((9,), float(step), device="cuda"), async_op=True).get_future()
                received = torch.empty(40_000, device="cuda")
                ring = [
                    dist.P2POp(dist.isend, tensor[:40_000] + world.rank, (world.rank + 1) % world.size),
                    dist.P2POp(dist.irecv, received, (world.rank - 1) % world.size),
                ]
                for work in dist.batch_isend_irecv(ring) if world.size > 1 else ():
                    work.wait()
                total = world.size * (world.size + 1) / 2
                assert all(part.eq(total).all() for part in gathered)
                assert world.size == 1 or received.eq(total + (world.rank - 1) % world.size).all()
                assert future.wait()[0].eq(step * world.size).all()
        on_host = torch.ones(5)
        done(dist.all_reduce(on_host, async_op=is_async))
        assert on_host.tolist() == [world.size] * 5
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def lists_on(device: int) -> Iterator[tuple[torch.cuda.Stream, list[torch.Tensor], list[torch.Tensor]]]:
    """A stream of the device, current, and tensors there."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream, [torch.zeros(300, device="cuda") for _ in range(3)], [torch.ones(300, device="cuda") for _ in range(3)]


def test_cupy_launches_on_the_device_of_its_tensors() -> None:
    """Its arguments arrive as they were given, or `capsules` would raise; the device is the tensors', whatever is current."""
    assert torch.cuda.device_count() > 1, "expected run.py --gpus 2 or more"
    for device in (0, 1):
        with lists_on(device) as (_, out, inp):
            torch.cuda.set_device(1 - device)
            kernels.pack(out, inp, 2.0, False)
        assert [tensor.tolist() for tensor in out] == [[2.0] * 300] * 3


def test_a_launch_is_refused_while_another_device_is_current() -> None:
    with lists_on(1) as (stream, _, _):
        handle = kernels._Handle(stream.cuda_stream)
    kernel = kernels._kernel("copy<u32>")
    refused = pytest.raises(Exception, match="cudaErrorInvalidResourceHandle: invalid resource handle")
    with torch.cuda.device(0), kernels._cupys(handle, 1), refused:
        kernel((1,), (256,), (0, 0, 0))


def test_memory_of_another_device_is_refused() -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"aten.add.Tensor: expected all tensors to be on the same device, found .*0.*1"):
        here + there
    assert (there + there).device == there.device, "with device 0 current"
    assert (here + there.to("cuda:0")).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError):
        torch.cuda.set_device(torch.cuda.device_count())
    torch.cuda.synchronize(1)
    take_races()
    with torch.cuda.device(1):
        importlib.import_module("sitecustomize")._tell(here, "kernel", writes=True)
    assert "wrong device: kernel on stream" in take_races()


def test_an_event_is_recorded_on_streams_of_its_device_only() -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(0))
    with torch.cuda.device(1), pytest.raises(RuntimeError, match="device"):
        event.record(torch.cuda.Stream(1))


BIND = """
import shardrt, torch
world = shardrt.init("cuda")
print(f"rank {world.rank} takes {torch.cuda.get_device_properties(world.device).uuid}")
"""


def test_ranks_take_gpus_by_their_uuids() -> None:
    """Each its own, as the driver names it; with fewer GPUs than ranks, all ranks name those that would share one."""
    done = run_script(BIND, 4, code=0, FAKE_GPUS="4")
    expected = [f"rank {rank} takes 00000000-0000-0000-0000-{rank:012}" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected
    done = run_script(BIND, 4, FAKE_GPUS="2")
    assert done.returncode != 0, done.stdout
    for ranks, index in (("0, 2", 0), ("1, 3", 1)):
        named = f"share a GPU (cuda:{index}, UUID 00000000-0000-0000-0000-{index:012}): expected one for each rank"
        assert done.stderr.count(f"ranks {ranks} of host ") == done.stderr.count(named) == 4, done.stderr


# ---------------------------------------------------------------------- run.py


ADD = "import torch; print(torch.ones(2, device='cuda').sum())"


def test_two_runs_at_once_and_one_after_them(tmp_path: Path) -> None:
    """Both compile, neither sees what the other has not finished, and the third needs no compiler."""
    shutil.copytree(FOLDER, tmp_path / RUN_PY.parent, ignore=shutil.ignore_patterns("__pycache__"))
    plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "LD_LIBRARY_PATH", "FAKE_GPUS")}
    plain["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path and path != str(FOLDER))

    def start(**variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(tmp_path / RUN_PY), sys.executable, "-c", ADD]
        return subprocess.Popen(
            command, env=plain | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
        )

    def end(run: subprocess.Popen[str]) -> None:
        out, err = run.communicate(timeout=900)  # each compiles for ten seconds of a core that is free
        assert (run.returncode, out) == (0, "tensor(2., device='cuda:0')\n"), err

    first, second = start(), start()
    end(first)
    end(second)
    end(start(PATH="/nowhere"))
    (built,) = (tmp_path / "build" / "fake_cuda").iterdir()
    assert (built / "libcudart.so.13").exists()


# ---------------------------------------------------------------------- NCCL


@pytest.mark.parametrize("failing", [0, 1])
def test_an_asynchronous_error_of_nccl_ends_the_job(failing: int) -> None:
    """The kernel of the second all-reduce waits on both ranks; one of them is told why."""
    source = """
import torch
import shardrt
from shardrt.comm import ReduceOp

world = shardrt.init("cuda")
ones = torch.ones(4, device=world.device)
for _ in range(3):
    world.comm.all_reduce(ones, ones, ReduceOp.SUM, stream=world.stream).synchronize()
"""
    done = run_script(source, 2, FAKE_NCCL_ERROR=f"{failing}:1", SHARDRT_TIMEOUT="200")
    assert done.returncode != 0
    failed = (
        rf"^\[{failing}\] rank {failing}: NCCL failed in #\d+ all_reduce float32 4 sum on 'world': NCCL_ERROR_REMOTE_ERROR: "
        r"remote process exited or there was a network error \(net.cc:1 NCCL WARN Connection closed\); ending the job"
    )
    assert re.search(failed, done.stderr, re.MULTILINE), done.stderr
    assert "waited" not in done.stderr


def made_by(source: str, size: int) -> list[str]:
    """What a job makes of NCCL's communicators, a line for each on each rank."""
    done = run_script(source, size, code=0, FAKE_NCCL_LOG="1")
    return re.findall(r"^fake NCCL: (.*)$", done.stderr, re.MULTILINE)


def test_a_model_makes_one_communicator_and_splits_the_others_from_it() -> None:
    """For gathers, reductions, and world.comm. The losses are those of a world whose ranks all have the same batch."""
    source = """
import torch
import shardrt
from shardrt.comm import NcclPolicy

world = shardrt.init("cuda", nccl=NcclPolicy(max_ctas=8))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(world.device)
shardrt.fully_shard(model)
optimizer, inp = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 5, device=world.device)
for _ in range(2):
    loss = model(inp).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert torch.equal(world.mean(loss), loss.detach())
"""
    made = made_by(source, 2)
    assert sorted(made) == ["init 0 -2147483648 8 -2147483648"] * 2 + ["split"] * 4


def test_a_job_that_agrees_on_the_host_makes_no_communicator() -> None:
    source = """
import shardrt

world = shardrt.init("cuda")
assert world.mesh.exchange(world.rank) == [0, 1]
with world.comm.agree():
    pass
"""
    assert made_by(source, 2) == []


# ---------------------------------------------------------------------- NCCL's rules for memory


def test_memory_that_is_registered_on_some_ranks_only() -> None:
    source = """
import torch
import shardrt

world = shardrt.init("cuda")
buffers = world.comm.empty(8, torch.float32), torch.empty(8, device=world.device)
world.comm.broadcast(buffers[0], buffers[0], 0, stream=world.stream).synchronize()
world.comm.broadcast(buffers[world.rank], buffers[world.rank], 0, stream=world.stream).synchronize()
"""
    done = run_script(source, 2)
    assert done.returncode != 0
    assert "ncclBroadcast of 32: memory is registered on some ranks only" in done.stderr


def test_a_soak() -> None:
    """Sends and receives among its calls; ranks that each chose where their tensors lie broke that rule."""
    source = """
from shardrt.comm.stress.__main__ import main

main(["--soak", "20s", "--steps", "20"])
"""
    done = run_script(source, 2)
    assert ", 20 steps, " in done.stdout, done.stderr
    assert "#wrong: 0" in done.stdout

"""Accounts of memory: the parts are what tensors and buffers have, and add up to what the kernel measures."""

import itertools
import json
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import shardrt
from bench import peak
from observers import observing_memory
from ranks import on_ranks, refused
from shardrt.comm import World
from shardrt.fsdp.base.events import BufferKind
from shardrt.fsdp.memory import buffers as buffers_module
from shardrt.memory import account as account_module
from shardrt.memory import parts as parts_module
from shardrt.memory import process
from shardrt.memory import watch as watch_module
from shardrt.memory.account import MemoryAccount
from shardrt.memory.devices import CudaMemory, Measured, measuring
from shardrt.memory.live import LiveBytes
from shardrt.memory.parts import Claim, Use
from toys import OddMLP, batch, buckets_of, loss_of, shard_blocks, step_all

CPU = torch.device("cpu")


class EveryMoment:
    """In the place of a device: claims alone, at each event. What was in use before counts for nothing."""

    name = "peak of the claims"

    def __init__(self) -> None:
        self.ticks = itertools.count()
        self.seen = list[Measured]()

    def mark(self) -> tuple[int, int]:
        return next(self.ticks) << 20, 0

    def reset_peak(self) -> bool:
        return False

    def peak(self) -> int:
        raise AssertionError("it was not reset")

    def measure(self, claims: Iterable[Claim]) -> Measured:
        parts = dict.fromkeys(Use, 0)
        for part, _, nbytes in claims:
            parts[part] += nbytes
        self.seen.append(Measured(sum(parts.values()), parts))
        return self.seen[-1]

    def close(self) -> None: ...

    def most(self, part: Use) -> int:
        return max(measured.parts[part] for measured in self.seen)


@on_ranks(1, 2, 3)
@buckets_of(0)
def test_parts_by_hand(world: World) -> None:
    """Each part at its highest: in the claims of all moments of two steps, in float64."""
    model = shard_blocks(OddMLP(layers=2).double())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    groups = list(model.param_group.with_descendants())
    others = frozenset(buffers_module._buffers)

    def own_buffers() -> list[buffers_module.FlatBuffer]:
        return [buffer for buffer in list(buffers_module._buffers) if buffer not in others]

    device = EveryMoment()
    with pytest.MonkeyPatch.context() as patch:
        # Cost: models of other tests are alive in this process, and each moment would measure them.
        patch.setattr(watch_module, "gc", SimpleNamespace(get_objects=list))
        patch.setattr(parts_module, "allocated_buffers", lambda _: [buffer for buffer in own_buffers() if buffer._in_use])
        patch.setattr(account_module, "measuring", lambda _: device)
        # Other models of this process may have made a larger buffer, all of which would be claimed.
        patch.setattr(buffers_module, "_comm_buffers", WeakKeyDictionary())
        with MemoryAccount(model) as account:
            before = device.seen[0].parts
            for step in range(2):
                loss_of(model, batch(step).chunk(world.size)[world.rank]).backward()
                step_all(optimizer)
    local = sum(param.to_local().nbytes for param in model.parameters())
    shards = sum(group.gather.shard_nbytes for group in groups)
    steps = 4 * len(list(model.parameters()))  # a float32 each
    assert before[Use.SHARDS] == device.most(Use.SHARDS) == shards
    assert (before[Use.OPTIMIZER], device.most(Use.OPTIMIZER)) == (0, 2 * local + steps)
    assert local <= device.most(Use.TEMPORARIES) < 3 * local
    assert local <= device.most(Use.GRADIENTS) <= shards
    assert 0 == before[Use.GRADIENTS] == before[Use.ACTIVATIONS] < device.most(Use.ACTIVATIONS)
    counted = model.param_group.runtime.memory
    assert (world.size > 1) <= device.most(Use.GATHERED) + device.most(Use.PACKED) <= 2 * counted.peak  # one rank has neither
    assert counted.in_use == 0
    assert account.peak_nbytes == sum(account.parts.values())
    assert shardrt.memory_summary(model, account).endswith(account.table())


SCRIPT = """
import importlib, json, sys
import torch
import shardrt
from torch import nn

torch.set_num_threads(1)
with shardrt.MemoryAccount() as account:
    ballast = importlib.import_module("ballast")
    account.model = model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.ones(8, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps([account.peak_nbytes, account.unexplained_nbytes, dict(account.parts), account.at, account.table()]))
"""


def printed_by(script: str, *folders: str) -> Any:
    """The JSON that a process of its own prints: what other tests have left to malloc is not in its memory."""
    code = f"import sys; sys.path[:0] = {[*folders, *sys.path]!r}\n{script}"
    return json.loads(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.rest
def test_parts_of_a_process_add_up() -> None:
    """6 matrices of 4 MiB; the peak is in the optimizer, which has square roots of them all. A module brings 32 MiB along."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ballast.py").write_text("weight = bytes(range(256)) * (1 << 17)\n")
        nbytes, unexplained, parts, at, table = printed_by(SCRIPT, folder)
    assert abs(unexplained) < 0.03 * nbytes, table
    state = 2 * 24 * 2**20 + 6 * 4
    assert [parts["shards"], parts["gradients"], parts["optimizer state"]] == [24 * 2**20, 24 * 2**20, state]
    assert parts["optimizer temporaries"] >= 24 * 2**20
    assert parts["interpreter and libraries"] > 32 * 2**20
    assert at.startswith("in an optimizer's step, after aten._foreach_")
    assert table.splitlines()[1].split() == [
        "interpreter",
        "and",
        "libraries",
        f"{parts['interpreter and libraries'] / 2**20:.1f}",
    ]


def test_pages_that_were_never_touched_do_not_count() -> None:
    nbytes, page = 1 << 20, mmap.PAGESIZE
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        start = tensor.data_ptr()
        assert process.resident_within(start, nbytes) == 0
        tensor[: 10 * page] = 1
        assert process.resident_within(start, nbytes) == 10 * page
        assert process.resident_within(start + 64, nbytes - 64) == 10 * page - 64
        parts = measuring(CPU).measure([Claim(Use.ACTIVATIONS, start, nbytes)]).parts
        assert parts[Use.ACTIVATIONS] == 10 * page
        del tensor
    with mmap.mmap(-1, nbytes) as memory:  # shared, so in a window
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        assert process.mappings().is_shared(tensor.data_ptr())
        assert measuring(CPU).measure([Claim(Use.PACKED, tensor.data_ptr(), nbytes)]).parts[Use.PACKED] == 0
        del tensor


BLOCKS = """
import json
import torch
from shardrt.comm.startup import malloc
from shardrt.memory.devices import measuring
from shardrt.memory.parts import Claim, Use

memory = measuring(torch.device("cpu"))
malloc.return_freed_memory()  # so blocks have pages of their own
before = memory.measure(())
tensors = torch.ones(16 << 20), torch.empty(64 << 20)
found = []
for part in (Use.GRADIENTS, Use.ACTIVATIONS):
    after = memory.measure(Claim(part, tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    found.append((after.parts[part], after.parts[Use.PROCESS] - before.parts[Use.PROCESS], after.unknown - before.unknown))
print(json.dumps(found))
"""


def test_blocks_of_malloc_change_no_other_part() -> None:
    """Outside of the heap: one that is written, and one that is not."""
    for part, libraries, unknown in printed_by(BLOCKS):
        assert abs(part - (64 << 20)) < 1 << 20
        assert abs(libraries) < 4 << 20
        assert abs(unknown) < 4 << 20


def test_mappings_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A heap in three lines, as one page of it has other flags; private mappings of a file, and of nothing."""
    lines = [
        "1000-3000 rw-p 00000000 00:00 0 [heap]",
        "3000-4000 rw-p 00000000 00:00 0 [heap]",
        "4000-9000 rw-p 00000000 00:00 0 [heap]",
        "a000-b000 r--p 00000000 08:01 12 /a file",
        "c000-d000 rw-p 00000000 00:00 0",
        "e000-f000 rw-s 00000000 00:01 7 /dev/zero (deleted)",
    ]
    Path(tmp_path, "maps").write_text("\n".join(lines))
    monkeypatch.setattr(process, "_MAPS", Path(tmp_path, "maps"))
    found = process.mappings()
    assert found.heap == (0x1000, 0x9000)
    assert [address for address in range(0x800, 0x10000, 0x1000) if found.is_shared(address)] == [0xA800, 0xE800]


def test_tensors_without_a_storage_pass() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.LazyLinear(2))
    with MemoryAccount(model) as account:
        model(torch.tensor([1, 2])).sum().backward()
        assert model[0].weight.grad is not None
        refused("the memory account is not closed", account.table, RuntimeError)
    assert account.parts["shards"] > 0


def test_only_steps_make_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the forward and backward of a closure, nor what follows a step that raised."""
    device = EveryMoment()
    monkeypatch.setattr(account_module, "measuring", lambda _: device)
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(1024, 64)).relu().sum()
        loss.backward()
        return loss

    def fails() -> float:
        raise KeyError

    with MemoryAccount(model):
        with pytest.raises(KeyError):
            optimizer.step(fails)
        batch = torch.ones(1024, 64)
        assert device.most(Use.TEMPORARIES) == 0
        optimizer.step(closure)
        assert model.weight.nbytes <= device.most(Use.TEMPORARIES) < batch.nbytes
        torch.ones(1024, 64)
        assert device.most(Use.TEMPORARIES) < batch.nbytes


def test_observers_see_a_buffer_while_it_is_in_use() -> None:
    seen = list[tuple[int, bool]]()
    group = SimpleNamespace(name="group")
    memory = buffers_module.MemoryCounter()
    buffer = buffers_module.FlatBuffer(64, CPU, memory, BufferKind.PACKED, group)
    with observing_memory(lambda _, __, nbytes: seen.append((nbytes, buffer in buffers_module.allocated_buffers(CPU)))):
        buffer.seal()
        buffer.allocate()
        buffer.release()
    assert seen == [(64, True), (-64, False)]


@on_ranks(2)
def test_windows_are_a_part(world: World) -> None:
    memory = measuring(CPU)
    before = memory.measure(()).parts[Use.WINDOWS]
    window = world.comm.empty(8 << 20, torch.uint8)
    assert 8 << 20 <= memory.measure(()).parts[Use.WINDOWS] - before < 9 << 20
    memory.close()
    del window


def test_a_peak_that_is_reset_is_remembered() -> None:
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:  # not malloc's, which may keep it
        memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)
        highest = process.lifetime_peak()
    if not process.reset_peak():
        pytest.skip("the kernel does not let a process reset its mark")
    inexact = 16 << 20  # the kernel counts pages by CPU, and adds them up later
    assert process.lifetime_peak() > highest - inexact
    assert process.resident().peak < highest - inexact


def test_parts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double: 1000 bytes reserved, at most 1200, of which 700 are allocated; 300 in use beside, 50 of them a window."""
    stats = {"reserved_bytes": {"all": {"current": 1000, "peak": 1200}}, "allocated_bytes": {"all": {"current": 700}}}
    cuda = SimpleNamespace(
        memory_stats_as_nested_dict=lambda device: stats,
        mem_get_info=lambda device: (8700, 10000),
        reset_peak_memory_stats=lambda device: None,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    memory = CudaMemory(torch.device("cuda", 0))
    assert memory.reset_peak()
    measured = memory.measure([Claim(Use.SHARDS, 0, 400), Claim(Use.ACTIVATIONS, 4096, 290), Claim(Use.WINDOWS, 8192, 50)])
    parts = {part: nbytes for part, nbytes in measured.parts.items() if nbytes}
    assert parts == {
        Use.SHARDS: 400,
        Use.ACTIVATIONS: 290,
        Use.PROCESS: 250,
        Use.WINDOWS: 50,
        Use.HELD: 300,
    }
    assert (measured.total, measured.unknown, memory.peak(), memory.mark()) == (1300, 10, 1500, (1000, 700))


def test_storages_are_counted_until_they_die() -> None:
    changes = list[tuple[str, int]]()
    live = LiveBytes("cpu", lambda kind, nbytes: changes.append((kind, nbytes)))
    first = torch.empty(16)
    live.see([first, first[:4], torch.empty(3, device="meta")])
    live.kind = "others"
    second = torch.empty(4)
    live.see((second, first))
    assert {kind: storage.nbytes() for storage, kind in live.alive()} == {"activations": 64, "others": 16}
    del first
    assert [kind for _, kind in live.alive()] == ["others"]
    assert changes == [("activations", 64), ("others", 16), ("activations", -64)]
    changes.clear()
    third = torch.empty(8)
    for tensor in (second, third, third, torch.empty(3, device="meta")):  # the third was not shown
        live.relabel(tensor.untyped_storage(), "gradients")
    live.see(third)
    assert changes == [("others", -16), ("gradients", 16), ("gradients", 32)]


def test_one_account_at_a_time_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    finders = list(sys.meta_path)
    with MemoryAccount(nn.Linear(2, 2)) as account:
        assert len(sys.meta_path) == len(finders) + 1
        with pytest.raises(RuntimeError, match="close it before you open another"), MemoryAccount():
            pass
    assert sys.meta_path == finders
    assert account.peak_nbytes > 0
    refused("meta cannot be measured", lambda: measuring(torch.device("meta")), RuntimeError)
    monkeypatch.setattr(process, "_STATM", Path("/nowhere"))
    refused("Linux", lambda: measuring(CPU), RuntimeError)


@on_ranks(2)
def test_compiled_blocks_run_in_an_account(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].compile(backend="eager")
    shardrt.fully_shard(model[0])
    shardrt.fully_shard(model)
    with MemoryAccount(model) as account:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    assert account.parts["shards"] == 32


def test_the_benchmark_says_what_is_missing() -> None:
    parts = {"interpreter and libraries": 300 << 20, "shards": 100 << 20, "packed": 0}
    found = peak.Peak(410 << 20, parts, "in backward")
    assert found.adds_up
    assert not peak.Peak(420 << 20, parts, "").adds_up
    assert not peak.Peak(380 << 20, parts, "").adds_up
    forecast = SimpleNamespace(memory={"parameters": 100 << 20, "packed": 8 << 20}, peak_nbytes=108 << 20)
    rows = [line.split() for line in peak.table(found, forecast).splitlines()]
    assert rows[1:3] == [["shards", "100.0", "100.0"], ["packed", "0.0", "8.0"]]
    assert rows[3] == ["not", "explained", "10.0", "2.4%"]
    assert rows[4] == ["peak", "of", "the", "process", "410.0", "408.0", "in", "backward"]

"""Memory of buffers on the host: blocks of a pool, and what malloc does with freed memory."""

import gc
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt.comm import World
from shardrt.comm.startup import malloc
from shardrt.fsdp.base.events import BufferKind
from shardrt.fsdp.memory import buffers, host_memory
from shardrt.fsdp.memory.buffers import FlatBuffer, MemoryCounter
from shardrt.fsdp.memory.host_memory import POOL, SMALL, HostPool
from shardrt.fsdp.params.param import ShardedParam
from shardrt.tensor.placement.placement import Spec
from shardrt.torch_internals import no_swap_memory
from toys import OddMLP, shard_blocks, step_all

PAGE = 4096
MIB = 1 << 20


def block(memory: HostPool, nbytes: int) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(0)
    memory.allocate(storage, nbytes)
    assert (storage.nbytes(), storage.data_ptr() % PAGE) == (nbytes, 0)
    return storage


def test_blocks_use_the_pages_of_freed_ones_whatever_their_sizes() -> None:
    """The first range that is large enough; ranges beside each other join, in any order."""
    pool = HostPool()
    one, two, three = (block(pool, nbytes) for nbytes in (3 * PAGE, PAGE + 1, 5 * PAGE))
    start = one.data_ptr()
    assert [each.data_ptr() - start for each in (one, two, three)] == [0, 3 * PAGE, 5 * PAGE]
    pool.free(one)
    assert (one.nbytes(), one.data_ptr()) == (0, 0)
    assert block(pool, PAGE).data_ptr() == start  # freed at once: nothing refers to it
    pool.free(three)
    pool.free(two)
    whole = block(pool, 10 * PAGE)
    assert whole.data_ptr() == start
    one.resize_(8)  # an ordinary storage again
    pool.free(whole)
    assert block(pool, 11 * PAGE).data_ptr() == start


def test_views_follow() -> None:
    buffer = FlatBuffer(2 * MIB, torch.device("cpu"), MemoryCounter(), BufferKind.PACKED, SimpleNamespace(name=""))
    view = buffer.view(torch.float32, 16, (3,))
    buffer.seal()
    for value in (1.0, 2.0):
        buffer.allocate()
        view.fill_(value)
        assert view.tolist() == [value] * 3
        buffer.release()
        assert (view.untyped_storage().nbytes(), view.untyped_storage().data_ptr()) == (0, 0)


def test_a_storage_that_is_dropped_frees_its_block() -> None:
    pool = HostPool()
    first = block(pool, MIB)
    view = torch.empty(0).set_(first, 0, (4,), (1,))
    start = first.data_ptr()
    del first
    assert block(pool, MIB).data_ptr() != start
    del view
    assert block(pool, MIB).data_ptr() == start


def test_the_pool_grows_by_mappings_and_returns_unused_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardrt.fsdp.memory.host_memory._REGION", 4 * PAGE)
    pool = HostPool()
    small, large = block(pool, PAGE), block(pool, 8 * PAGE)
    pool.free(large)
    assert len(pool.mappings()) == 2
    pool.trim()
    assert len(pool.mappings()) == 1
    pool.free(small)
    pool.trim()
    assert pool.mappings() == []


def test_pages_between_blocks_in_use_go_back() -> None:
    """Also those of a model that is dropped, when the next one is sharded."""
    pool, size = HostPool(), 16 * MIB
    blocks = [block(pool, size) for _ in range(3)]
    views = [torch.empty(0, dtype=torch.uint8).set_(each, 0, (size,), (1,)).fill_(1) for each in blocks]
    pool.free(blocks[1])
    before = resident()
    pool.trim()
    assert before - resident() > 12 * MIB
    assert (views[0].sum().item(), views[2].sum().item()) == (size, size)


def test_a_mapping_has_room_for_the_next_large_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after smaller ones have taken the first place."""
    monkeypatch.setattr("shardrt.fsdp.memory.host_memory._REGION", 4 * PAGE)
    pool = HostPool()
    pool.free(block(pool, 9 * PAGE))
    small = block(pool, 8 * PAGE)
    assert block(pool, 9 * PAGE).data_ptr() == small.data_ptr() + 8 * PAGE


def test_little_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping of just the block; if that fails as well, torch's kind of error."""

    def limited(nbytes: int, make: Callable[[int], mmap.mmap] = host_memory._map) -> mmap.mmap:
        if nbytes > 8 * PAGE:
            raise OSError("no room")
        return make(nbytes)

    monkeypatch.setattr(host_memory, "_map", limited)
    pool = HostPool()
    pool.free(block(pool, 8 * PAGE))
    with pytest.raises(RuntimeError, match=r"a buffer of 36864 bytes, .* the 32768 bytes of .* no room; shard over more ranks"):
        block(pool, 9 * PAGE)


def test_threads_take_and_free_blocks() -> None:
    pool, wrong = HostPool(), list[int]()

    def work(number: int) -> None:
        view = torch.empty(0, dtype=torch.uint8)
        for _ in range(200):
            storage = block(pool, (number + 1) * PAGE)
            view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(number)
            wrong.extend(view[view != number].tolist())
            del view
            pool.free(storage)

    threads = [threading.Thread(target=work, args=(number,), name=f"blocks-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.trim()
    assert pool.mappings() == []


def test_which_buffers_take_which_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, and all of them on a torch that cannot exchange memory, take malloc's."""

    def made(nbytes: int, kind: BufferKind, device: str = "cpu") -> str:
        buffer = FlatBuffer(nbytes, torch.device(device), MemoryCounter(), kind, SimpleNamespace(name=""))
        buffer.seal()
        buffer.allocate()
        assert buffer._storage.nbytes() == nbytes
        buffer.release()
        return type(buffer._pool).__name__

    assert made(SMALL + 1, BufferKind.GATHERED) == "HostPool"
    assert made(SMALL + 1, BufferKind.PARTIAL) == "HostPool"
    assert made(SMALL, BufferKind.PACKED) == made(SMALL + 1, BufferKind.PACKED, "meta") == "NoneType"
    monkeypatch.setattr(buffers, "swap_memory", no_swap_memory)
    assert made(SMALL + 1, BufferKind.GATHERED) == "NoneType"
    with pytest.raises(RuntimeError, match=r"has no torch\.UntypedStorage\._swap_data_ptr_"):
        no_swap_memory(torch.UntypedStorage(0), torch.UntypedStorage(0))


@on_ranks(1, 2)
@pytest.mark.parametrize("one_group", [False, True])
def test_originals_are_freed_one_by_one(world: World, one_group: bool) -> None:
    """When a parameter is sharded its original is free, without the garbage collector."""
    model = OddMLP(layers=3)
    originals = [weakref.ref(param) for param in model.parameters()]
    alive: list[int] = []
    shard = ShardedParam.shard

    def counting(param: ShardedParam, spec: Spec, local: torch.Tensor) -> None:
        shard(param, spec, local)
        alive.append(sum(original() is not None for original in originals))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardedParam, "shard", counting)
            shardrt.fully_shard(model) if one_group else shard_blocks(model)
    finally:
        gc.enable()
    assert alive == list(reversed(range(len(originals))))


KEEPS = [("malloc_trim", (0,)), ("mallopt", (-3, 1 << 30)), ("mallopt", (-1, (1 << 31) - 1))]


@contextmanager
def glibc_calls(*refused: tuple[int, int]) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """What glibc is told. refused: arguments of mallopt."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    class Glibc:
        def __getattr__(self, name: str) -> Callable[..., bool]:
            def call(*args: int) -> bool:
                calls.append((name, args))
                return args not in refused

            return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(malloc, "_glibc", Glibc())
        yield calls
    malloc.keep_freed_memory()


@on_ranks(1)
@pytest.mark.parametrize("zero_grad", ["after the step", "after the forward", "to zeros"])
def test_large_blocks_go_back_to_the_system_until_the_gradients_were_used(world: World, zero_grad: str) -> None:
    """Then malloc keeps what is freed, however much was evaluated or accumulated before; at once if another model is sharded.

    An original of 1 MiB and more is returned when it is sharded.
    """
    x = torch.ones(1, 1 << 18)
    with glibc_calls() as calls:
        model = nn.Linear(1 << 18, 1)
        shardrt.fully_shard(model)
        assert calls == [("mallopt", (-3, MIB)), ("mallopt", (-1, MIB)), ("malloc_trim", (0,))]
        calls.clear()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.no_grad():
            for _ in range(2):
                model(x)
        for _ in range(3):
            model(x).sum().backward()
        optimizer.step()
        if zero_grad != "after the forward":
            optimizer.zero_grad(set_to_none=zero_grad == "after the step")
        assert calls == []
        for _ in range(2):
            model(x)
            assert calls == KEEPS
        calls.clear()
        shardrt.fully_shard(nn.Linear(2, 2))
        model(x)
        assert calls[2:] == KEEPS


@on_ranks(1, 2)
def test_large_blocks_go_back_to_the_system_while_gradients_are_accumulated(world: World) -> None:
    """Without synchronisation there are no sharded gradients yet, nor any state of an optimizer."""
    with glibc_calls() as calls:
        model: Any = nn.Linear(2, 2)
        shardrt.fully_shard(model)
        calls.clear()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 2)).sum().backward()
        assert calls == []
        step_all(optimizer)
        model(torch.ones(1, 2))
        assert calls == KEEPS


@on_ranks(1)
def test_large_blocks_go_back_to_the_system_until_nothing_is_trained(world: World) -> None:
    """After four forwards. A call that raises changes nothing."""
    with glibc_calls() as calls:
        model = shardrt.fully_shard(nn.Linear(2, 2))
        calls.clear()
        for _ in range(4):
            model(torch.ones(1, 2))
        assert calls == []
        model(torch.ones(1, 2))
        assert calls == KEEPS
        with pytest.raises(ValueError, match="ModuleList"):
            shardrt.fully_shard(nn.ModuleList())
        assert (calls, malloc.keeps) == (KEEPS, True)


def test_other_c_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.35, glibc refuses a large threshold, and keeps the one before. Others have no such function."""
    keeps = malloc.keeps
    with glibc_calls((-3, 1 << 30)) as calls:
        malloc.keep_freed_memory()
        assert calls == [("mallopt", (-3, 1 << 30)), ("mallopt", (-3, 1 << 25)), ("mallopt", (-1, (1 << 31) - 1))]
    with monkeypatch.context() as patch:
        patch.setattr(malloc, "_glibc", None)
        for function in (malloc.keep_freed_memory, malloc.return_freed_memory, malloc.trim):
            function()
    (malloc.keep_freed_memory if keeps else malloc.return_freed_memory)()


@on_ranks(1)
def test_sharding_returns_the_pages_of_a_model_that_is_gone(world: World) -> None:
    shardrt.fully_shard(nn.Linear(2, 2))  # the first call imports
    size = 16 * MIB
    storage = block(POOL, size)
    torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,)).fill_(1)
    POOL.free(storage)
    before = resident()
    shardrt.fully_shard(nn.Linear(2, 2))
    assert before - resident() > 12 * MIB


@on_ranks(2)
def test_the_system_gets_the_originals_memory(world: World) -> None:
    """32 MiB that were built in malloc's heap become 16 MiB of shards."""
    shardrt.fully_shard(nn.Linear(2, 2))  # the first call imports
    malloc.keep_freed_memory()
    model = nn.Sequential(*(nn.Linear(1 << 20, 1, bias=False) for _ in range(8)))
    for param in model.parameters():
        nn.init.ones_(param)
    before = resident()
    shardrt.fully_shard(model)
    assert before - resident() > 12 * MIB
    malloc.keep_freed_memory()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

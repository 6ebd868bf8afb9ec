"""Buffer memory: the peak equals a computed value, and no buffer stays allocated."""

import os
import re
import resource
import tempfile
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import shardrt
from observers import observing_gradients, observing_memory
from ranks import on_ranks, refused, with_copies
from shardrt.comm import Communicator, Event, Pool, World
from shardrt.comm.core.streams import InlineStream
from shardrt.fsdp.base.events import BufferKind
from shardrt.fsdp.memory import buffers
from shardrt.fsdp.memory.buffers import (
    CommBuffer,
    CommFlatBuffer,
    FlatBuffer,
    Handoff,
    MemoryCounter,
    allocated_buffers,
)
from shardrt.fsdp.memory.host_memory import POOL
from toys import OddMLP, batch, buckets_of, loss_of, overlapping, shard_blocks, step_all, uncompiled

Storage = weakref.ref[torch.UntypedStorage]


def train(model: torch.nn.Module, world: World, steps: int = 3) -> None:
    for step in range(steps):
        loss_of(model, batch(step).chunk(world.size)[world.rank]).backward()
        model.zero_grad()


@on_ranks(1, 2, 3, 4)
@buckets_of(0)
@overlapping()
@uncompiled()
@with_copies
def test_peak_of_the_default_schedule(world: World) -> None:
    """The root stays gathered. Beside it, in forward: one block in use, two gathered ahead; in backward: one in use, one ahead,
    and the newest packed gradients. A rank alone computes with its shards.
    """
    model = OddMLP(layers=5).double()
    shard_blocks(model)
    train(model, world)
    root, block = model.param_group, model.blocks[0].param_group
    memory = root.runtime.memory
    assert block.reduction is not None
    assert memory.peak == (root.layout.nbytes + 3 * block.layout.nbytes if world.size > 1 else 0)
    assert memory.in_use == 0


@on_ranks(2, 3)
@buckets_of(0)
@uncompiled()
def test_where_packed_gradients_lie_between_reductions(world: World) -> None:
    """On a GPU nowhere: their memory is torch's, and freed. On the host it stays, where the ranks of a node read it."""
    on_gpu, others = world.device.type == "cuda", allocated_buffers(world.device)  # of earlier tests
    with pytest.MonkeyPatch.context() as patch:
        made: list[int] = []
        empty, before = Communicator.empty, torch.cuda.memory_allocated() if on_gpu else 0

        def note(self: Communicator, numel: int, *args: object, **options: object) -> torch.Tensor:
            made.append(numel)
            return empty(self, numel, *args, **options)

        patch.setattr(Communicator, "empty", note)
        patch.setattr(buffers, "_comm_buffers", WeakKeyDictionary())
        model: Any = nn.Sequential(nn.Linear(301, 301), nn.Linear(301, 301))
        shard_blocks(model, "")
        for _ in range(3):
            model(torch.ones(2, 301)).square().mean().backward()
            model.zero_grad()
    assert len(made) == (0 if on_gpu else 1)
    assert [buffer for buffer in allocated_buffers(world.device) if buffer not in others] == []
    if on_gpu:
        layer = model[0].param_group
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < 2 * layer.gather.shard_nbytes + layer.nbytes // 2


@on_ranks(1, 2, 3, 4)
@overlapping()
@with_copies
def test_peak_in_buckets(world: World) -> None:
    """All groups of a bucket are gathered at once, and all their packed gradients are allocated at once."""
    model = OddMLP(layers=5).double()
    shard_blocks(model)
    root, block = model.param_group, model.blocks[0].param_group
    with buckets_of(3 * block.layout.nbytes):
        train(model, world)
    # Backward gathers blocks 4, 3 and 2, then, when 2 begins, 1 and 0. When 1 ends, the gradients of four blocks are pending,
    # one more than a bucket: they are packed while the root, 1 and 0 are gathered. The rest is packed when all blocks are
    # freed.
    assert root.runtime.memory.peak == (root.layout.nbytes + 6 * block.layout.nbytes if world.size > 1 else 0)
    assert root.runtime.memory.in_use == 0


class CountingPool(Pool):
    """Of the host's memory."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.taken.append(nbytes)
        storage.resize_(nbytes)

    def free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)


@on_ranks(2)
@buckets_of(0)
@with_copies
def test_gathered_parameters_come_from_a_pool(world: World) -> None:
    """All buffers but packed gradients come from the runtime's pool; one block is set to use its communicator's pool."""
    model = OddMLP(layers=3).double()
    shard_blocks(model)
    root, first, second, third = (module.param_group for module in (model, *model.blocks))
    model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    of_comm, of_root = CountingPool(), CountingPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(first.gather_comm), "pool", lambda comm: of_comm)
        patch.setattr(shardrt.comm, "new_pool", lambda device: of_root)
        train(model, world, steps=1)
    assert of_comm.taken == [first.layout.nbytes] * 2  # in forward and in backward
    assert of_root.taken == [group.layout.nbytes for group in (root, second, third, third, second)]  # the root stays gathered
    with pytest.raises(RuntimeError, match="call it before the first forward"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2, 3)
@uncompiled()
@buckets_of(0)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("shard", [shardrt.fully_shard, shardrt.replicate])
def test_nothing_but_the_parameters_holds_gradients(
    world: World, shard: Callable[..., torch.nn.Module], reduce_dtype: torch.dtype | None
) -> None:
    """A backward adds to gradients that are there, and makes others; `zero_grad()` frees them."""
    model = OddMLP(layers=2).double()
    for module in (*model.blocks, model):
        shard(module, mp_policy=shardrt.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    alive = list[Storage]()
    groups = len(list(model.param_group.with_descendants()))
    with observing_gradients(lambda _, storage: alive.append(weakref.ref(storage))):
        for step in range(3):
            loss_of(model, batch(step)).backward()
            expected = {name: 2 * param.grad.full_tensor() for name, param in model.named_parameters()}
            loss_of(model, batch(step)).backward()
            for name, param in model.named_parameters():
                torch.testing.assert_close(param.grad.full_tensor(), expected[name])
            assert [ref() is not None for ref in alive] == [False] * groups * step + [True] * groups
            model.zero_grad()
            assert [ref() for ref in alive] == [None] * groups * (step + 1)


@on_ranks(2, 3)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_a_kept_gradient_is_not_written(world: World, reduce_dtype: torch.dtype | None) -> None:
    """Who has a gradient, or a view of it, may read it after any number of steps."""
    model = shard_blocks(OddMLP(layers=2).double(), mp_policy=shardrt.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    block = model.blocks[0]
    weight = next(block.parameters())
    reduced: list[torch.Tensor] = []
    block.set_all_reduce_hook(lambda tensor: reduced.append(tensor))
    loss_of(model, batch(0)).backward()
    keep: list[Callable[[], torch.Tensor]] = [
        lambda: weight.grad,
        lambda: weight.grad.to_local(),
        lambda: weight.grad.detach(),
        lambda: reduced[-1] if reduce_dtype is None else weight.grad,  # of gradients to be cast, scratch
    ]
    for step, of_gradients in enumerate(keep):
        kept = of_gradients()
        reduced.clear()
        values = getattr(kept, "_local_tensor", kept).detach().clone()
        model.zero_grad()
        loss_of(model, batch(step + 1)).backward()
        assert torch.equal(getattr(kept, "_local_tensor", kept), values)


@on_ranks(1, 2)
def test_gradients_are_tensors_of_their_own(world: World) -> None:
    """To write to one is not to write to another that autograd has saved."""
    model = shard_blocks(OddMLP(layers=1).double())
    loss_of(model, batch(0)).backward()
    weight, other = [param.grad.to_local() for param in model.blocks[0].parameters()][:2]
    factor = torch.ones(weight.shape, dtype=weight.dtype, requires_grad=True)
    product = (factor * weight).sum()
    other.mul_(2)
    product.backward()
    assert torch.equal(factor.grad, weight)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](x)


@on_ranks(1, 2)
def test_a_part_of_the_gradients_takes_its_own_memory(world: World) -> None:
    """A group of which each backward reaches another parameter."""
    model = shardrt.fully_shard(Branches())
    for branch in range(4):
        model(torch.ones(2, 64), branch).sum().backward()
    parts = [part for part in (param.grad.to_local() for param in model.parameters()) if part.numel()]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert len(storages) == len(parts) >= 2
    assert sum(storages.values()) == sum(part.nbytes for part in parts)


@on_ranks(2)
@buckets_of(0)
@overlapping()
@pytest.mark.parametrize("replicates", [False, True])
def test_gradients_live_until_their_reduction_is_over(world: World, replicates: bool) -> None:
    """Also where a hook drops them, on a stream that still uses them: new ones, and those that are added to."""
    model = OddMLP(layers=2).double()
    shardrt.replicate(model) if replicates else shard_blocks(model)
    dropped, released, alive, drops = list[Storage](), list[Storage](), list[bool](), False
    release = Handoff.release

    def drop(param: torch.Tensor) -> None:
        if drops:
            dropped.append(weakref.ref(param.grad.to_local().untyped_storage()))
            param.grad = None

    def check(handoff: Handoff) -> None:
        alive.extend(ref() is not None for ref in dropped)
        release(handoff)
        released.extend(dropped)
        dropped.clear()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handoff, "release", check)
        for drops in (False, True, True):
            loss_of(model, batch(0)).backward()
            assert alive == [True] * len(list(model.parameters())) * drops
            assert not any(ref() for ref in released)
            alive.clear()


def test_a_comm_buffer_moves_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that takes the buffer over waits for the stream that had it: two roots may compute on different streams."""
    comm_buffer, memory = CommBuffer(torch.zeros(16, dtype=torch.uint8)), MemoryCounter()
    group = SimpleNamespace(name="group")
    first, second = (CommFlatBuffer(nbytes, comm_buffer, memory, BufferKind.PACKED, group) for nbytes in (16, 8))
    waits: list[tuple[str, Event]] = []

    class Named(InlineStream):
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> Event:
            event = events[self.name] = PastEvent()
            return event

        def wait(self, event: Event) -> None:
            waits.append((self.name, event))

    class PastEvent(Event):
        def query(self) -> bool:
            return True

        def synchronize(self) -> None: ...

    events: dict[str, Event] = {}
    for buffer, name in ((first, "one root's"), (second, "another's")):
        monkeypatch.setattr(buffers, "current_stream", lambda device, name=name: Named(name))
        buffer.allocate()
        buffer.release()
    assert waits == [("another's", events["one root's"])]


def test_who_writes_to_a_comm_buffer() -> None:
    """A loan lasts until a buffer occupies the memory, which ends it; what is out of order is refused."""
    comm_buffer, stream, recalls = CommBuffer(torch.zeros(16, dtype=torch.uint8)), InlineStream(), list[None]()

    def recall() -> None:
        recalls.append(None)
        comm_buffer.end_loan()

    for move in (comm_buffer.end_loan, lambda: comm_buffer.leave(stream)):
        with pytest.raises(AssertionError, match="comes first"):
            move()
    assert comm_buffer.lend(recall)
    assert not comm_buffer.lend(recall)
    comm_buffer.occupy(stream)
    assert len(recalls) == 1
    assert not comm_buffer.lend(recall)
    with pytest.raises(AssertionError, match="one buffer at a time"):
        comm_buffer.occupy(stream)
    comm_buffer.leave(stream)
    assert comm_buffer.lend(recall)
    comm_buffer.end_loan()
    comm_buffer.occupy(stream)
    assert len(recalls) == 1


def test_bytes_are_counted_and_observed() -> None:
    memory, group, seen = MemoryCounter(), SimpleNamespace(name="group"), list[tuple[str, str, int]]()
    full, packed = (
        FlatBuffer(nbytes, torch.device("cpu"), memory, kind, group)
        for nbytes, kind in ((64, BufferKind.GATHERED), (32, BufferKind.PACKED))
    )
    with observing_memory(lambda kind, group, nbytes: seen.append((kind.value, group.name, nbytes))):
        for each in (full, packed, full):  # the second time is a no-op
            each.allocate()
        assert (memory.in_use, memory.peak) == (96, 96)
        for each in (full, packed, full):
            each.release()
    full.allocate()  # nobody observes
    full.release()
    assert (memory.in_use, memory.peak) == (0, 96)
    assert seen == [
        ("gathered", "group", 64),
        ("packed", "group", 32),
        ("gathered", "group", -64),
        ("packed", "group", -32),
    ]


@on_ranks(2, 3)
@buckets_of(0)
@with_copies
def test_peak_without_resharding(world: World) -> None:
    """All groups stay gathered through forward; the first packed gradients are allocated before any group is freed."""
    model = OddMLP(layers=5).double()
    shard_blocks(model, reshard_after_forward=False)
    train(model, world)
    groups = list(model.param_group.with_descendants())
    block = model.blocks[0].param_group
    assert model.param_group.runtime.memory.peak == sum(g.layout.nbytes for g in groups) + block.layout.nbytes
    assert model.param_group.runtime.memory.in_use == 0


@on_ranks(2)
@buckets_of(0)
@overlapping()
@with_copies
def test_peak_with_bfloat16_compute(world: World) -> None:
    """Full buffers shrink with the compute dtype; packed gradients have the reduce dtype."""
    policy = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = OddMLP(layers=5)
    shard_blocks(model, mp_policy=policy)
    train(model, world)
    root, block = model.param_group, model.blocks[0].param_group
    packed = 2 * block.layout.nbytes
    assert root.runtime.memory.peak == root.layout.nbytes + 2 * block.layout.nbytes + packed


@on_ranks(2)
@with_copies
def test_a_gathered_block_has_its_storage_and_a_resharded_one_has_none(world: World) -> None:
    model = OddMLP()
    expected = [param.detach().clone() for param in model.parameters()]
    shard_blocks(model)
    model.unshard()
    for module in model.blocks:
        module.unshard()
    for param, value in zip(model.parameters(), expected, strict=True):
        assert isinstance(param, torch.nn.Parameter)
        assert not isinstance(param, shardrt.DTensor)
        assert torch.equal(param, value)
    memory = model.param_group.runtime.memory
    assert memory.in_use == sum(group.layout.nbytes for group in model.param_group.with_descendants())
    for module in (model, *model.blocks):
        module.reshard()
        module.reshard()
    assert memory.in_use == 0
    assert all(isinstance(param, shardrt.DTensor) for param in model.parameters())


@on_ranks(2)
def test_modifying_a_gathered_parameter_between_forward_and_backward_is_noticed(world: World) -> None:
    """Autograd ignores the writes of a gather to the same buffer, but still raises for a write by the user."""
    model = shard_blocks(OddMLP(), reshard_after_forward=False)
    loss = loss_of(model, batch(0).float())
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    refused("modified by an inplace operation", loss.backward, RuntimeError)
    model.reset_iter_state()


@on_ranks(2)
@buckets_of(0)
@with_copies
def test_summary(world: World) -> None:
    """By hand: a block has the bytes of its layout; the root holds inp and out, 5 * 13 + 13 + 13 * 3 + 3 elements."""
    model = shard_blocks(OddMLP(layers=1).double())
    refused("'Linear' is not sharded", lambda: shardrt.memory_summary(torch.nn.Linear(2, 2)))
    assert re.search(r"gradients: none yet\n(process|GPU): ", shardrt.memory_summary(model))
    train(model, world, steps=1)
    head, root, block, total, buffers, _ = shardrt.memory_summary(model).splitlines()
    assert head.split() == ["group", "ranks", "parameters", "shard", "gathered", "gradients", "padding", "now"]
    assert root.split()[:4] == ["OddMLP", "2", "120", f"{model.param_group.layout.segment_nbytes}"]
    assert block.split()[:3] == ["blocks.0", "2", "1,121"]  # norm 2 * 13, up 14 * 40, down 41 * 13, gate and scale 1 each
    assert block.split()[-1] == "sharded"
    assert total.split()[:2] == ["all", "1,241"]
    block_nbytes = model.blocks[0].param_group.nbytes
    peak = (model.param_group.nbytes + 2 * block_nbytes) / 1024  # the root, the block, the block's packed gradients
    assert buffers == f"buffers for gathered parameters and gradients: 0 B in use, {peak:.2f} KiB at most so far"


@on_ranks(2)
@with_copies
def test_a_summary_tells_what_is_in_use_from_what_the_allocator_holds(world: World) -> None:
    def held() -> float:
        found = re.search(r"of it ([\d.]+) (B|KiB|MiB|GiB) held", shardrt.memory_summary(model))
        assert found is not None
        return float(found[1]) * 1024.0 ** ("B", "KiB", "MiB", "GiB").index(found[2])

    model = shardrt.fully_shard(torch.nn.Linear(1 << 11, 1 << 11))  # 16 MiB
    POOL.trim()
    before = held()
    out = model(torch.ones(1, 1 << 11))
    assert held() < before + 8 * 2**20
    out.sum().backward()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@on_ranks(1, 3)
def test_optimizer_state_on_disk(world: World, options: dict[str, bool]) -> None:
    """The result is bitwise equal to state in memory; states of a page or more are in unlinked files."""
    with tempfile.TemporaryDirectory() as folder:
        models, optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(
                shard_blocks(OddMLP(width=41), shard_placement_fn=lambda p: shardrt.Shard(p.dim() - 1) if p.dim() else None)
            )
            optimizers.append(torch.optim.AdamW(models[-1].parameters(), **options))
        handle = shardrt.offload_state_to_disk(optimizers[1], folder)
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss_of(model, batch(step).float().chunk(world.size)[world.rank]).backward()
                step_all(optimizer)
        handle.remove()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
        state = [x for of in optimizers[1].state.values() for x in of.values() if isinstance(x, shardrt.DTensor)]
        on_disk = [x for x in state if x.to_local().untyped_storage().filename is not None]
        assert {id(x) for x in on_disk} == {id(x) for x in state if x.to_local().nbytes >= 4096}
        assert on_disk
        assert os.listdir(folder) == []


@on_ranks(1, 2)
@buckets_of(0)
def test_no_fresh_memory_in_the_steady_state(world: World) -> None:
    """Each step allocates and frees at least six buffers of 4 MiB, 1024 pages each, without a new page fault."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    shard_blocks(model, "")
    x = torch.ones(8, 1024)
    faults = []
    for _ in range(12):  # the heap of a process that has run other tests takes some steps to settle
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(x).sum().backward()
        model.zero_grad()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults[2:]) < 256, faults

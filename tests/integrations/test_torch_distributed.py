"""`torch.distributed` over shardrt's communicators: every call beside the same call on gloo, and what torch builds on them."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.testing._internal.two_tensor import TwoTensor

from ranks import FRESH, on_ranks, refused, run_script
from shardrt.comm import MismatchError, World
from shardrt.integrations import torch_distributed
from shardrt.integrations.torch_distributed.work import ProcessGroupWork

Group = dist.ProcessGroup
SIZES = [1, 7, 8192, 8193, 70_000, 300_000]  # on both sides of 32 KiB, and of the parts of an exchange; float32


@contextlib.contextmanager
def process_groups() -> Iterator[tuple[Group, Group]]:
    """The default group over shardrt, and one over gloo of the same ranks."""
    torch_distributed.init_process_group("cpu")
    try:
        gloo = dist.new_group(backend="gloo")
        assert dist.group.WORLD is not None
        yield dist.group.WORLD, gloo
    finally:
        dist.destroy_process_group()


def values(world: World, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Whole numbers that differ between ranks, so that sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(100 * seed + world.rank)
    return (
        torch.randint(-2, 3, (numel,), generator=generator).abs().to(dtype)
        if dtype is torch.uint8
        else torch.randint(-2, 3, (numel,), generator=generator).to(dtype)
    )


# ---------------------------------------------------------------------- each call beside gloo's

Call = Callable[[World, Group, int, bool], list[torch.Tensor]]


def finish(work: Any, is_async: bool) -> None:
    if is_async:
        work.wait()
        assert work.is_completed() or not isinstance(work, ProcessGroupWork)  # gloo's may say no


def all_reduces(world: World, group: Group, numel: int, is_async: bool) -> list[torch.Tensor]:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
            tensor = values(world, numel, dtype)
            finish(dist.all_reduce(tensor, op, group=group, async_op=is_async), is_async)
            results.append(tensor)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = values(world, numel, torch.int32)
        finish(dist.all_reduce(tensor, op, group=group, async_op=is_async), is_async)
        results.append(tensor)
    return results


def rooted(world: World, group: Group, numel: int, is_async: bool) -> list[torch.Tensor]:
    results = []
    for root in range(world.size):
        sent = values(world, numel, seed=root)
        finish(dist.broadcast(sent, group_src=root, group=group, async_op=is_async), is_async)
        reduced = values(world, numel, seed=root)
        finish(dist.reduce(reduced, group_dst=root, group=group, async_op=is_async), is_async)
        bits = values(world, numel, torch.int32, seed=root)
        finish(dist.reduce(bits, None, dist.ReduceOp.BXOR, group, is_async, group_dst=root), is_async)
        here = world.rank == root
        gathered = [torch.zeros(numel) for _ in range(world.size)] if here else None
        finish(dist.gather(values(world, numel), gathered, group_dst=root, group=group, async_op=is_async), is_async)
        scattered = torch.zeros(numel)
        parts = [values(world, numel, seed=part) for part in range(world.size)] if here else None
        finish(dist.scatter(scattered, parts, group_src=root, group=group, async_op=is_async), is_async)
        results += [sent, scattered, *(gathered or [])] + ([reduced, bits] if here else [])  # elsewhere, gloo changes it
    return results


def gathers(world: World, group: Group, numel: int, is_async: bool) -> list[torch.Tensor]:
    outs = [torch.zeros(numel) for _ in range(world.size)]
    finish(dist.all_gather(outs, values(world, numel), group=group, async_op=is_async), is_async)
    single = torch.zeros(world.size * numel)
    finish(dist.all_gather_single(single, values(world, numel, seed=1), group=group, async_op=is_async), is_async)
    blocks = torch.zeros(world.size, numel)
    finish(dist.reduce_scatter_single(blocks[0], values(world, world.size * numel), group=group, async_op=is_async), is_async)
    listed = torch.zeros(numel)
    parts = [values(world, numel, seed=part) for part in range(world.size)]
    finish(dist.reduce_scatter(listed, parts, group=group, async_op=is_async), is_async)
    results = [*outs, single, blocks, listed]
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        bits = torch.zeros(2, numel, dtype=torch.int32)
        terms = values(world, world.size * numel, torch.int32)
        finish(dist.reduce_scatter_single(bits[0], terms, op, group, is_async), is_async)
        finish(dist.reduce_scatter(bits[1], list(terms.split(numel)), op, group, is_async), is_async)
        results.append(bits)
    return results


def exchanges(world: World, group: Group, numel: int, is_async: bool) -> list[torch.Tensor]:
    equal = torch.zeros(world.size * numel)
    finish(dist.all_to_all_single(equal, values(world, world.size * numel), group=group, async_op=is_async), is_async)
    rows = [(world.rank + peer) % 3 for peer in range(world.size)]  # some are empty
    uneven = torch.zeros(sum(rows), numel)
    sent = values(world, sum(rows) * numel).view(sum(rows), numel)
    finish(dist.all_to_all_single(uneven, sent, rows, rows, group=group, async_op=is_async), is_async)
    outs = [torch.zeros(numel) for _ in rows]
    parts = [values(world, numel, seed=peer) for peer in range(world.size)]
    finish(dist.all_to_all(outs, parts, group=group, async_op=is_async), is_async)
    return [equal, uneven, *outs]


def messages(world: World, group: Group, numel: int, is_async: bool) -> list[torch.Tensor]:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.size == 1:
        return []
    first, second, third = (torch.zeros(numel) for _ in range(3))
    ops = [
        dist.P2POp(dist.isend, values(world, numel), group=group, group_peer=after),
        dist.P2POp(dist.irecv, first, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    sends = [dist.isend(values(world, numel, seed=tag), group_dst=after, group=group, tag=tag) for tag in (3, 5)]
    dist.barrier(group)  # messages do not wait for collectives, nor collectives for messages
    for tag, out in ((5, second), (3, third)):
        dist.recv(out, group_src=before, group=group, tag=tag)
    for work in sends:
        assert work is not None
        work.wait()
    return [first, second, third]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("call", [all_reduces, rooted, gathers, exchanges, messages], ids=lambda call: call.__name__)
@on_ranks(1, 2, 3, 4)
def test_calls_are_gloos(world: World, call: Call, is_async: bool) -> None:
    with process_groups() as (ours, gloo):
        for numel in SIZES:
            for found, expected in zip(call(world, ours, numel, is_async), call(world, gloo, numel, is_async), strict=True):
                assert torch.equal(found, expected), (numel, found, expected)


@on_ranks(2, 3)
def test_what_gloo_has_not(world: World) -> None:
    with process_groups() as (ours, _):
        mean = torch.full((5,), float(world.rank))
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == [(world.size - 1) / 2] * 5
        scaled = torch.ones(3)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        assert scaled.tolist() == [world.size / 2] * 3
        uneven = [torch.zeros(rank + 1) for rank in range(world.size)]
        dist.all_gather(uneven, torch.full((world.rank + 1,), float(world.rank)))
        assert [out.tolist() for out in uneven] == [[float(rank)] * (rank + 1) for rank in range(world.size)]
        part = torch.zeros(world.rank + 1)
        dist.reduce_scatter(part, [torch.full((rank + 1,), float(rank)) for rank in range(world.size)])
        assert part.tolist() == [float(world.rank * world.size)] * (world.rank + 1)
        received = [torch.zeros(world.rank + rank) for rank in range(world.size)]
        dist.all_to_all(received, [torch.full((world.rank + rank,), float(world.rank)) for rank in range(world.size)])
        assert [out.tolist() for out in received] == [[float(rank)] * (world.rank + rank) for rank in range(world.size)]
        column = torch.zeros(4, 3)[:, 1]  # not contiguous
        dist.broadcast(column.fill_(float(world.rank)), 1)
        assert column.tolist() == [1.0] * 4
        with dist._coalescing_manager(ours, async_ops=True) as works:
            tensors = [torch.full((size,), float(world.rank)) for size in (3, 9000)]
            for tensor in tensors:
                dist.all_reduce(tensor)
        works.wait()
        assert all((tensor == sum(range(world.size))).all() for tensor in tensors)


@on_ranks(2, 4)
def test_objects_and_groups(world: World) -> None:
    with process_groups() as (ours, _):
        found: list[Any] = [None] * world.size
        dist.all_gather_object(found, {"rank": world.rank, "text": "x" * world.rank})
        assert found == [{"rank": rank, "text": "x" * rank} for rank in range(world.size)]
        told = [{"from": 0}] if world.rank == 0 else [None]
        dist.broadcast_object_list(told, 0)
        assert told == [{"from": 0}]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(range(world.size)) if world.rank == 0 else None, 0)
        assert mine == [world.rank]
        pair = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
        local = dist.new_group(pair, use_local_synchronization=True)
        # Members alone make a group: the others go on at once.
        ends, middle = [0, world.size - 1], list(range(1, world.size))
        both = [dist.new_group(ranks) for ranks in (ends, middle)]
        for ranks, group in zip((ends, middle), both, strict=True):
            if world.rank in ranks:
                sums = torch.ones(3) * (world.rank + 1)
                dist.all_reduce(sums, group=group)
                assert sums.tolist() == [sum(rank + 1 for rank in ranks)] * 3
                assert dist.get_process_group_ranks(group) == ranks
        halves = ours.split_group(pair)
        for group in (local, halves):
            tensor = torch.tensor([float(world.rank)])
            assert group is not None
            group.allreduce([tensor]).wait()
            assert tensor.item() == sum(pair)
        assert halves is not None
        halves.shutdown()
        dist.destroy_process_group(local)
        dist.barrier()


@on_ranks(2)
def test_second_use_and_errors(world: World) -> None:
    for _ in range(2):
        with process_groups() as (ours, _):
            refused("has a default process group already", torch_distributed.init_process_group, RuntimeError)
            refused("divisible", lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)))
            with pytest.raises(ValueError, match="all_gather: expected an output of 2 \\* 4 elements"):
                dist.all_gather_single(torch.zeros(7), torch.zeros(4))
            refused("one for each rank", lambda: ours.allgather([[torch.zeros(2)]], [torch.zeros(2)]))
            refused("non-empty", lambda: ours.allreduce_coalesced([]))
            refused("invalid rank 2", lambda: ours.broadcast(torch.zeros(1), root=2))
            refused("to_dense", lambda: dist.all_reduce(torch.zeros(3).to_sparse()), NotImplementedError)
            with pytest.raises(MismatchError, match="rank 0: all_reduce float32 3 sum; rank 1: all_reduce float32 3 max"):
                dist.all_reduce(torch.zeros(3), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][world.rank])
            out = torch.zeros(world.rank + 1)  # of another size than is sent
            work = dist.isend(torch.zeros(3), 1 - world.rank)
            with pytest.raises(RuntimeError, match=f"recv float32 {world.rank + 1} from {1 - world.rank} tag 0"):
                dist.recv(out, 1 - world.rank)
            assert work is not None
            work.wait()
            dist.barrier()
        refused("was destroyed", lambda: ours.allreduce([torch.zeros(1)]), RuntimeError)


@on_ranks(2, 3)
def test_works_and_futures(world: World) -> None:
    with process_groups():
        if world.rank == 0:  # the others come later: the call does not wait for them
            tensor = torch.ones(70_000)
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            assert not work.is_completed()
            then = work.get_future().then(lambda done: done.value()[0] * 2)
            dist.send(torch.ones(1), 1)
            assert torch.equal(then.wait(), torch.full((70_000,), 2.0 * world.size))
        else:
            if world.rank == 1:
                dist.recv(torch.zeros(1), 0)
            tensor = torch.ones(70_000)
            dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((70_000,), float(world.size)))
        received = torch.zeros(5)
        if world.rank == 1:
            sources = {dist.recv(received, tag=4) for _ in range(world.size - 1)}
            assert sources == set(range(world.size)) - {1}
        else:
            dist.send(torch.ones(5), 1, tag=4)
        names = {thread.name for thread in threading.enumerate()}
        assert any(name.startswith("shardrt-torch.") for name in names) == (world.rank == 0)
    end = time.monotonic() + 5
    while time.monotonic() < end and any(t.name.startswith("shardrt-torch.") for t in threading.enumerate()):
        time.sleep(0.01)
    assert not any(thread.name.startswith("shardrt-torch.") for thread in threading.enumerate())


@on_ranks(2)
def test_what_follows_a_future_may_communicate(world: World) -> None:
    """As in torch's PowerSGD hook."""
    with process_groups():
        first, second = torch.ones(9000), torch.ones(20)

        def then(done: torch.futures.Future[Any]) -> torch.Tensor:
            work = dist.all_reduce(second, async_op=True)
            assert work is not None
            return work.get_future().wait()[0] + done.value()[0][0]

        if world.rank == 1:
            time.sleep(0.2)  # the other rank's is not done when it is asked for
        work = dist.all_reduce(first, async_op=True)
        assert work is not None
        assert work.get_future().then(then).wait().tolist() == [4.0] * 20
        received = torch.zeros(3)
        started = dist.irecv(received, 1 - world.rank)
        future = started.get_future()  # does not wait for the message
        dist.send(torch.full((3,), float(world.rank)), 1 - world.rank)
        assert future.wait()[0].tolist() == [1.0 - world.rank] * 3


@on_ranks(2)
def test_tensors_of_inference_mode(world: World) -> None:
    with process_groups():
        with torch.inference_mode():
            made = torch.ones(9000)
            rows = torch.ones(6, 5).t()  # not contiguous
            gathered = [torch.zeros(5, 6) for _ in range(world.size)]
            works = [dist.all_reduce(made, async_op=True), dist.all_gather(gathered, rows, async_op=True)]
            works += [dist.broadcast(torch.ones(6, 5).t(), 0, async_op=True)]
            started = dist.irecv(received := torch.zeros(6, 5).t(), 1 - world.rank)
            dist.send(rows + world.rank, 1 - world.rank)
        for work in (*works, started):  # outside of the mode
            assert work is not None
            work.wait()
        dist.all_reduce(made)
        assert made.eq(world.size**2).all()
        assert received.eq(2 - world.rank).all()
        assert all(each.eq(1).all() for each in gathered)
        dist.all_reduce(torch.ones(3), async_op=True)
        dist.barrier()


@on_ranks(2)
def test_what_torch_asks_of_a_group(world: World) -> None:
    with process_groups() as (ours, _):
        numbers = []
        for _ in range(3):
            numbers.append(ours._get_sequence_number_for_group())
            dist.all_reduce(torch.ones(3))
        assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
        ours.set_timeout(timedelta(seconds=1))
        ours._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
        for call in (dist.all_reduce, lambda tensor, op: dist.reduce(tensor, 0, op)):
            with pytest.raises(ValueError, match=r"reduce of torch\.float32 by .*BOR: expected integers or bool"):
                call(torch.ones(3), dist.ReduceOp.BOR)
        bits = torch.zeros(world.rank + 1, dtype=torch.int64)  # of sizes that differ
        parts = [torch.full((rank + 1,), 1 << world.rank) for rank in range(world.size)]
        dist.reduce_scatter(bits, parts, dist.ReduceOp.BOR)
        assert bits.eq(3).all()


@on_ranks(2)
def test_groups_that_end_badly(world: World) -> None:
    with process_groups() as (ours, _):
        assert ours._device_types == [torch.device("cpu")]
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
        group = dist.new_group()
        work = dist.all_reduce(torch.zeros(3), ops[world.rank], group=group, async_op=True)
        assert work is not None
        refused("different calls", work.get_future().wait, RuntimeError)
        refused("different calls", lambda: dist.all_reduce(torch.zeros(3), group=group), RuntimeError)
        dist.destroy_process_group(group)
        kept = torch.zeros(300_000)
        dist.irecv(kept, 1 - world.rank, tag=9)  # nobody sends
        if world.rank == 0:
            dist.isend(torch.ones(300_000), 1, tag=1)  # it is received while the group ends
        else:
            dist.recv(kept, 0, tag=1)
            assert kept.eq(1).all()


@on_ranks(2)
def test_functional_collectives(world: World) -> None:
    from torch.distributed import _functional_collectives as functional

    def calls(tensor: torch.Tensor, group: Group) -> torch.Tensor:
        gathered = functional.all_gather_single(tensor, 0, group)
        reduced = functional.reduce_scatter_single(gathered * 2, "sum", 0, group)
        swapped = functional.all_to_all_single(reduced, None, None, group)
        return functional.all_reduce(swapped + tensor, "sum", group)

    with process_groups() as (ours, gloo):
        inp = values(world, 8)
        expected = calls(inp, gloo)
        assert torch.equal(calls(inp, ours), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(torch.compile(calls, backend="aot_eager")(inp, ours), expected)


# ---------------------------------------------------------------------- what looks at calls


def every_call(world: World, group: Group) -> list[torch.Tensor]:
    """Each operator of torch's for collectives once, and messages."""
    inp, parts = values(world, 6), [torch.zeros(6) for _ in range(world.size)]
    rows, out = values(world, 6 * world.size, seed=1), torch.zeros(6 * world.size)
    is_first = world.rank == 0
    dist.all_reduce(inp, group=group)
    finish(dist.all_reduce(rows, group=group, async_op=True), is_async=True)
    dist.broadcast(inp, 0, group)
    dist.reduce(inp, 0, group=group)
    inp = inp.clone() if is_first else torch.ones(6)  # elsewhere, gloo changes it
    dist.all_gather(parts, inp, group)
    dist.all_gather_single(out, inp, group)
    dist.gather(inp, parts if is_first else None, 0, group)
    dist.scatter(inp, parts if is_first else None, 0, group)
    dist.reduce_scatter(inp, [part.clone() for part in parts], group=group)
    dist.reduce_scatter_single(inp, out.clone(), group=group)
    dist.all_to_all_single(out, rows, group=group)
    dist.barrier(group)
    if is_first:
        dist.send(inp, 1, group)
    else:
        dist.recv(inp, 0, group)
    return [inp, rows, out, *parts]


@on_ranks(2)
def test_what_looks_at_calls_sees_those_of_gloo(world: World) -> None:
    with process_groups() as groups:
        found, counts, names = [], [], []
        for group in groups:
            with CommDebugMode() as mode:
                found.append(every_call(world, group))
            counts.append(dict(mode.get_comm_counts()))
            with torch.profiler.profile() as profile:
                found.append(every_call(world, group))
            events: Any = profile.events()
            names.append({event.name for event in events if event.name.startswith(("shardrt:", "gloo:", "c10d::"))})
        assert counts[0] == counts[1]
        assert len(counts[0]) == 10
        expected = {name.replace("gloo:", "shardrt:") for name in names[1]}
        assert names[0] == expected | {"shardrt:reduce_scatter"}, names[0] ^ expected  # gloo gives that no range of its own
        for each in found:
            assert all(map(torch.equal, each, found[0]))


@on_ranks(2)
def test_tensors_that_are_not_plain(world: World) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with process_groups() as groups:
        for group in groups:
            with FakeTensorMode():
                every_call(world, group)
            dist.all_reduce(torch.ones(3, device="meta"), group=group)
            pair = TwoTensor(torch.ones(3), torch.zeros(3))
            dist.all_reduce(pair, group=group)
            assert (pair.a.tolist(), pair.b.tolist()) == ([2.0] * 3, [0.0] * 3)
            whole = distribute_tensor(torch.ones(4), DeviceMesh.from_group(group, "cpu"), [Shard(0)])
            with pytest.raises(NotImplementedError, match="allreduce_"):
                dist.all_reduce(whole, group=group)
        with torch.profiler.profile(), pytest.raises(ValueError, match="divisible"):
            dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
        dist.all_reduce(torch.ones(3), async_op=True)
        dist.barrier()


# ---------------------------------------------------------------------- what torch builds on them


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(33, 47), nn.GELU(), nn.Linear(47, 33))]
    return nn.Sequential(*layers).double()


def trained(world: World, wrap: Callable[[nn.Module, Group], nn.Module], group: Group) -> list[torch.Tensor]:
    """The losses of three steps, each rank with its own batch."""
    module = wrap(model(), group)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2, foreach=False)
    losses = []
    for step in range(3):
        inp = torch.randn(4, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + world.rank))
        loss = module(inp).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(mean / world.size)
    return losses


def ddp(module: nn.Module, group: Group) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, process_group=group)


def ddp_with_a_hook(module: nn.Module, group: Group) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = nn.parallel.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.01)
    wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
    return wrapped


def ddp_built_in(kind: str) -> Callable[[nn.Module, Group], nn.Module]:
    def wrap(module: nn.Module, group: Group) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.01)
        wrapped._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        return wrapped

    wrap.__name__ = f"built_in_{kind.lower()}"
    return wrap


def fsdp2(module: nn.Module, group: Group) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module:  # type: ignore[union-attr, unused-ignore]
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


WRAPS = [ddp, ddp_with_a_hook, ddp_built_in("ALLREDUCE"), ddp_built_in("FP16_COMPRESS"), fsdp2]


@pytest.mark.parametrize("wrap", range(len(WRAPS)), ids=[wrap.__name__ for wrap in WRAPS])
@on_ranks(2, 3)
def test_training_is_gloos(world: World, wrap: int) -> None:
    with process_groups() as (ours, gloo), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = trained(world, WRAPS[wrap], ours), trained(world, WRAPS[wrap], gloo)
        assert found[0] > found[2]
        # gloo adds float16 in another order, and rounds each sum.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8 if "FP16" in WRAPS[wrap].__name__.upper() else 1e-14)


@pytest.mark.parametrize("divides_by_initial", [False, True])
@on_ranks(1, 2, 3)
def test_ddp_with_uneven_inputs(world: World, divides_by_initial: bool) -> None:
    """Its reducer keeps torch's half of a work alone, waits for it in the backward, and then asks for the result."""

    def descend(module: nn.Module, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        module(torch.randn(4, 5, dtype=torch.float64, generator=generator)).square().mean().backward()

    expected = nn.Linear(5, 3).double()
    module = copy.deepcopy(expected)
    for step in range(1 + world.size):
        active = [rank for rank in range(world.size) if step < 2 + rank]
        for rank in active:
            descend(expected, rank, step)
        for param in expected.parameters():
            assert param.grad is not None
            param.data -= 0.1 * param.grad / (world.size if divides_by_initial else len(active))
            param.grad = None
    torch_distributed.init_process_group("cpu")
    wrapped = nn.parallel.DistributedDataParallel(module)
    with wrapped.join(divide_by_initial_world_size=divides_by_initial):
        for step in range(2 + world.rank):
            descend(wrapped, world.rank, step)
            for param in module.parameters():
                assert param.grad is not None
                param.data -= 0.1 * param.grad
                param.grad = None
    dist.destroy_process_group()
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=1e-14)


@on_ranks(2)
def test_works_that_are_dropped_do_not_pile_up(world: World) -> None:
    with process_groups():
        for _ in range(100):
            dist.all_reduce(torch.ones(9000), async_op=True)
            dist.all_reduce(torch.ones(9000))
        gc.collect()
        assert sum(isinstance(each, ProcessGroupWork) for each in gc.get_objects()) <= 70


@on_ranks(2, 4)
def test_dtensors(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with process_groups():
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("a", "b"))
        torch.manual_seed(0)
        left, right = torch.randn(7, 10, dtype=torch.float64), torch.randn(10, 5, dtype=torch.float64)
        for one in ([Shard(0), Replicate()], [Shard(1), Shard(1)]):
            for other in ([Replicate(), Replicate()], [Shard(0), Shard(1)]):
                product = distribute_tensor(left, mesh, one) @ distribute_tensor(right, mesh, other)
                torch.testing.assert_close(product.full_tensor(), left @ right, rtol=0, atol=1e-13)
                moved = distribute_tensor(left, mesh, one).redistribute(mesh, [Shard(1), Replicate()])
                assert torch.equal(moved.full_tensor(), left)


def pipelined(rank: int, size: int, kind: str, group: Group) -> list[torch.Tensor]:
    """The losses of the microbatches on the rank of the last stage."""
    from torch.distributed import pipelining

    schedules = {
        "gpipe": (pipelining.ScheduleGPipe, 1),
        "1f1b": (pipelining.Schedule1F1B, 1),
        "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
        "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    }
    schedule_class, of_each = schedules[kind]
    stages = size * of_each
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).double() for _ in range(stages)]
    mine = [
        pipelining.PipelineStage(layers[index], index, stages, torch.device("cpu"), group=group)
        for index in range(rank, stages, size)
    ]
    losses: list[torch.Tensor] = []
    given = mine[0] if of_each == 1 else mine
    schedule = schedule_class(given, 2 * size, loss_fn=nn.functional.mse_loss)
    inp = torch.randn(8 * size, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        if rank == 0:
            schedule.step(inp)
        elif rank == size - 1:
            schedule.step(target=torch.zeros_like(inp), losses=losses)
        else:
            schedule.step()
        for stage in mine:
            for param in stage.submod.parameters():
                assert param.grad is not None
                param.data -= 0.1 * param.grad
                param.grad = None
    return losses


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@on_ranks(2, 3)
def test_pipelines_are_gloos(world: World, kind: str) -> None:
    with process_groups() as (ours, gloo), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = pipelined(world.rank, world.size, kind, ours), pipelined(world.rank, world.size, kind, gloo)
        assert len(found) == (2 * world.size if world.rank == world.size - 1 else 0)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@on_ranks(2, 3)
def test_torchs_context_parallelism_is_gloos(world: World, rotate: str) -> None:
    """Its ring over the parts of a sequence, with rounds of head and tail. Its context has no rule for attention on the CPU."""
    forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    torch.manual_seed(world.rank)
    q, k, v, grad = torch.randn(4, 2, 3, 2 * 16, 8)
    found = []
    ring.set_rotate_method(rotate)
    with process_groups() as groups:
        for group in groups:
            out, lse, *_ = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
            given = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse, "is_causal": True, "dropout_p": 0.0}
            grads = ring._templated_ring_attention_backward(
                group, 2, backward, grad_out=grad, grad_out_name="grad_out", **given
            )
            found.append([out, lse, *grads[:3]])
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_checkpoints_of_torch(world: World, tmp_path: Any) -> None:
    import torch.distributed.checkpoint as dcp

    with process_groups() as (ours, gloo), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder: list[Any] = [str(tmp_path)]
        dist.broadcast_object_list(folder)
        module = fsdp2(model(), ours)
        dcp.save({"model": module.state_dict()}, checkpoint_id=folder[0])
        other = fsdp2(model(), gloo)
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        saved = dcp.async_save({"model": module.state_dict()}, checkpoint_id=folder[0] + "/async")
        saved.result()
        folder[0] += "/async"
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder[0])
        for found, expected in zip(other.parameters(), module.parameters(), strict=True):
            assert torch.equal(found.full_tensor(), expected.full_tensor())


# ---------------------------------------------------------------------- the job


@pytest.mark.rest
def test_a_rank_that_does_not_come_is_reported() -> None:
    source = """
import torch, torch.distributed as dist
from shardrt.integrations import torch_distributed
world = torch_distributed.init_process_group("cpu")
group = dist.new_group([0, 1])
if world.rank == 0:
    dist.recv(torch.zeros(3), 1, tag=7)
else:
    import time
    time.sleep(1000)
"""
    done = run_script(source, 3, FRESH, code=17, SHARDRT_TIMEOUT="2")
    assert "recv float32 3 from 1 tag 7 on 'torch.0.cpu'" in done.stderr, done.stderr
    assert "missing: rank 1" in done.stderr, done.stderr


@pytest.mark.rest
def test_a_future_of_a_message_that_does_not_come_is_reported() -> None:
    source = """
import torch, torch.distributed as dist
from shardrt.integrations import torch_distributed
world = torch_distributed.init_process_group("cpu")
if world.rank == 0:
    dist.irecv(torch.zeros(3), 1, tag=7).get_future().wait()
dist.barrier()
"""
    done = run_script(source, 2, FRESH, code=17, SHARDRT_TIMEOUT="2")
    assert "recv float32 3 from 1 tag 7 on 'torch.0.cpu'" in done.stderr, done.stderr


@pytest.mark.rest
def test_groups_end_with_the_job() -> None:
    source = """
import torch, torch.distributed as dist
from shardrt.integrations import torch_distributed
world = torch_distributed.init_process_group("cpu")
group = dist.new_group([0, 2])
work = dist.all_reduce(torch.ones(9000), async_op=True)
"""
    done = run_script(source, 3, FRESH, code=0)
    assert not done.stderr.strip(), done.stderr


# ---------------------------------------------------------------------- frameworks

FRAMEWORK = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
import shardrt
from shardrt.integrations import torch_distributed
world = shardrt.init("cpu")
if {ours}:
    torch_distributed.init_process_group()
else:
    dist.init_process_group("gloo", init_method="file://{store}", rank=world.rank, world_size=world.size)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
show = lambda loss: print(f"loss {{loss}}\\n", end="", flush=True)  # in one piece
data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + world.rank)) for step in range(6)]
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
assert (accelerator.num_processes, accelerator.process_index) == (world.size, world.rank)
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
assert type(net).__name__ == "DistributedDataParallel"
for inp in data:
    loss = net(inp).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    show(accelerator.reduce(loss.detach(), "mean").item())
"""
LIGHTNING = """
import lightning
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
os.environ |= dict(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size), GROUP_RANK="0")

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, inp, index):
        loss = self.net(inp).square().mean()
        self.log("mean", loss, sync_dist=True)
        show(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = lightning.Trainer(
    accelerator="cpu", devices=world.size, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))
show(trainer.callback_metrics["mean"].item())
"""


@pytest.mark.all
@pytest.mark.parametrize("program", [ACCELERATE, LIGHTNING], ids=["accelerate", "lightning"])
def test_strategies_of_frameworks_are_gloos(program: str, tmp_path: Any) -> None:
    losses = []
    for ours in (True, False):
        source = FRAMEWORK.format(ours=ours, store=tmp_path / "store") + program + "\ndist.destroy_process_group()\n"
        done = run_script(source, 2, FRESH, code=0, PYTHONWARNINGS="ignore")
        losses.append(sorted(line for line in done.stdout.splitlines() if line.startswith("loss")))
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 12

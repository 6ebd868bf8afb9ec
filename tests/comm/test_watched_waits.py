"""What waits for other ranks on the host is part of a call that hooks see, so the watchdog ends a job where it never ends."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardrt
import toys_ep
import toys_tp
from ranks import on_ranks, settings_of
from shardrt import checkpoint
from shardrt.comm import World
from shardrt.comm.backends.mpi import MpiBackend
from shardrt.comm.core.calls import CallList, Hook
from shardrt.comm.groups.control import hooked
from shardrt.parallel import context_parallel, context_parallel_unshard, parallelize_module
from toys import OddMLP, batch, loss_of, shard_blocks

WAITING = ("exchange", "compare", "swap_numbers", "rejoin", "split", "part", "empty", "node_memory", "close")  # of a backend


class Open(Hook):
    """Counts the calls that are under way, by communicator and thread."""

    def __init__(self) -> None:
        self.calls = Counter[tuple[str, int]]()
        self.seen = set[str]()  # the backend's methods that have waited

    def before(self, calls: CallList) -> None:
        self.calls[calls[0].comm.name, get_ident()] += 1

    def after(self, calls: CallList) -> None:
        self.calls[calls[0].comm.name, get_ident()] -= 1


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """In the block, a backend's method that waits outside of a call raises AssertionError."""
    found = Open()

    def checked(name: str) -> Callable[..., Any]:
        method = getattr(MpiBackend, name)

        def run(self: MpiBackend, *args: Any, **kwargs: Any) -> Any:
            assert found.calls[self.name, get_ident()], f"{name} on '{self.name}' waits where no hook sees it"
            found.seen.add(name)
            return method(self, *args, **kwargs)

        return run

    with monkeypatch.context() as patch, hooked(found):
        for name in WAITING:
            patch.setattr(MpiBackend, name, checked(name))
        yield found


def sharding(world: World, folder: str) -> None:
    model = shard_blocks(OddMLP().double())
    optimizer = torch.optim.AdamW(model.parameters())
    with shardrt.Run(folder + "/run", {"model": model, "optimizer": optimizer}, every=1) as run:
        for step in run.steps(2):
            loss_of(model, batch(step)).backward()
            shardrt.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    shardrt.check_replicas(model, optimizer)
    checkpoint.save(folder + "/saved", {"model": model})
    checkpoint.load(folder + "/saved", {"model": model})
    world.mean(1.0)


def skipping(world: World, folder: str) -> None:
    model: Any = shard_blocks(OddMLP().double())
    model.set_reduce_scatter_unused_params(True, skipped_modules=True)
    loss_of(model, batch(0)).backward()


def context(world: World, folder: str) -> None:
    mesh, x = world.mesh, torch.randn(1, 6, 7, 4)
    for method in ("ring", "all_gather", "ulysses"):
        with context_parallel(mesh, buffers=[part := x.clone()], buffer_seq_dims=[2], method=method):
            out = F.scaled_dot_product_attention(part, part, part, is_causal=True)
        context_parallel_unshard(mesh, [out], [2])


def tensors(world: World, folder: str) -> None:
    for plan in (toys_tp.plain_plan(), toys_tp.sequence_plan()):
        model = parallelize_module(toys_tp.Transformer().double(), world.mesh, plan)
        toys_tp.loss_of(model, toys_tp.tokens_of(0)).backward()


def experts(world: World, folder: str) -> None:
    mesh, model = toys_ep.mesh_of(world, world.size), toys_ep.MoEModel(6).double()
    toys_ep.loss_of(toys_ep.divide(model, mesh), toys_ep.batch_of(0, world.rank)).backward()


def meshes(world: World, folder: str) -> None:
    mesh = shardrt.DeviceMesh(world.comm, (world.size, 1), ("dp", "tp"))
    counts = [world.rank + 1] * world.size
    out = torch.empty(sum(range(1, world.size + 1)))
    stream = shardrt.comm.current_stream(world.device)
    world.comm.all_to_all(
        out, torch.ones(sum(counts)), [rank + 1 for rank in range(world.size)], counts, stream=stream
    ).synchronize()
    made = mesh["dp"].communicator("another")
    assert made.differing(1) is None
    with world.comm.agree():
        pass
    part = world.comm.part(list(range(world.size)), "all")
    part.close()


USES: list[Callable[[World, str], None]] = [sharding, skipping, context, tensors, experts, meshes]


@pytest.mark.parametrize("use", [use.__name__ for use in USES])
@pytest.mark.parametrize("node_memory", [True, False])
@on_ranks(2, 3)
def test_every_wait_is_seen(world: World, use: str, node_memory: bool) -> None:
    folder = world.comm.exchange(tempfile.mkdtemp())[0]
    with pytest.MonkeyPatch.context() as monkeypatch, watching(monkeypatch) as found:
        torch.manual_seed(0)
        with settings_of(world, node_memory=node_memory):
            {each.__name__: each for each in USES}[use](world, folder)
        assert "compare" in found.seen

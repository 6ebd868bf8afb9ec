"""A process group for torch.distributed that communicates by shardrt.comm, so that FSDP2 runs on shardrt's transport.

It has what a step of FSDP2 calls, and a barrier; torch raises a RuntimeError for the rest. CPU only. Calls are on the caller's
stream, and torch gets no work that still runs: what fails raises in the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import AllgatherOptions, BarrierOptions, HashStore, ReduceOp, ReduceScatterOptions, Work
from torch.distributed import ProcessGroup

from shardrt import World, comm

BACKEND = "shardrt"
OPS = {ReduceOp.SUM: comm.ReduceOp.SUM, ReduceOp.AVG: comm.ReduceOp.AVG}


class Done(Work):
    """A collective that is done."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class CommGroup(ProcessGroup):
    """All ranks of the world. Collectives have two names: torch 2.13 calls the first one, 2.11 the one that begins with `_`."""

    def __init__(self, world: World) -> None:
        super().__init__(world.rank, world.size)  # type: ignore[call-arg]  # for groups that Python implements
        self._world = world
        self._name = ""

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions | None = None) -> Work:
        self._world.comm.all_gather(output, input, stream=self._world.stream).synchronize()
        return Done()

    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: ReduceScatterOptions | None
    ) -> Work:
        requested = ReduceOp.SUM if opts is None else opts.reduceOp
        op = next((ours for theirs, ours in OPS.items() if requested == theirs), None)
        if op is None:
            found = getattr(requested, "op", requested)
            raise ValueError(f"reduce-scatter on {self._world.comm}: expected {' or '.join(map(str, OPS))}, found {found}")
        self._world.comm.reduce_scatter(outputTensor, inputTensor, op, stream=self._world.stream).synchronize()
        return Done()

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: BarrierOptions | timedelta | None = None) -> Work:
        self._world.barrier()
        return Done()

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name


@contextmanager
def comm_process_group(world: World) -> Iterator[None]:
    """torch.distributed on the ranks of `world`. Once in a process."""
    distributed.Backend.register_backend(BACKEND, lambda *_: CommGroup(world), devices=["cpu"])
    # The ranks have met already, and tell each other nothing through a store.
    distributed.init_process_group(BACKEND, store=HashStore(), rank=world.rank, world_size=world.size)
    yield
    distributed.destroy_process_group()

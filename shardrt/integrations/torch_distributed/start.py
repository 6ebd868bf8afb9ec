"""How the default process group of `torch.distributed` is made, and ends."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from ... import comm
from ...comm import DeviceMesh, World
from ...comm.startup.bootstrap import at_finalize
from . import comm_hooks
from .group import ProcessGroupShardrt
from .named import BACKEND

_LOOPBACK = "127.0.0.1"


def init_process_group(device: str | torch.device | None = None, *, timeout: timedelta | None = None) -> World:
    """Make the default process group of `torch.distributed` on this world's ranks. Collective. Returns the world.

    device: as of `shardrt.init`, which it calls. CPU tensors can be sent in either case.
    timeout: of the store, the small server on rank 0 through which torch's ranks name groups to each other; None: torch's
    default. Calls of the group have the watchdog's limit, SHARDRT_TIMEOUT.
    Ranks reach it by the loopback address if all are on one node; else by MASTER_ADDR, or rank 0's host name. Like torch's own
    it listens on all addresses of that host.
    `torch.distributed.new_group` and others then make further groups. All end with `destroy_process_group`, or `finalize`.
    When ranks are lost and the world is recovered, call `destroy_process_group` and this again.
    Raises, on every rank: RuntimeError if one of them has a default process group already, or rank 0 cannot open the store.
    """
    world = comm.init(device)
    has_group = world.comm.exchange(dist.is_initialized())
    if any(has_group):
        raise RuntimeError(
            f"init_process_group on rank {world.rank}: rank {has_group.index(True)} has a default process group already; call "
            "torch.distributed.destroy_process_group() first"
        )
    comm_hooks.install()
    given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    dist.init_process_group(BACKEND, store=_store(world, **given), rank=world.rank, world_size=world.size, **given)
    return world


def process_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A new process group of the ranks of `mesh`, in the order of their numbers in the world. Only they call it.

    For what needs torch's group along an axis of shardrt's mesh, such as a pipeline: `process_group(mesh["pp"])`. Ranks make
    their groups in the same order. Raises RuntimeError without a default group of shardrt's.
    """
    if not dist.is_initialized() or dist.get_backend() != BACKEND:
        raise RuntimeError(f"process_group({mesh}): call torch_distributed.init_process_group() first, on every rank")
    made: dist.ProcessGroup = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    return made


def _store(world: World, **given: Any) -> Store:
    """The store of all ranks, on a free port of rank 0. Collective."""
    host = os.environ.get("MASTER_ADDR") or world.node
    server, problem = None, ""
    if world.rank == 0:
        try:
            server = TCPStore(_LOOPBACK if world.nodes == 1 else host, 0, world.size, True, wait_for_workers=False, **given)
        except RuntimeError as error:
            problem = str(error)
    told = world.comm.exchange((host, 0 if server is None else server.port, problem))[0]
    if told[2]:
        raise RuntimeError(f"init_process_group on rank {world.rank}: rank 0 cannot open its store: {told[2]}")
    if server is not None:
        return server
    return TCPStore(_LOOPBACK if world.nodes == 1 else told[0], told[1], world.size, False, wait_for_workers=False, **given)


def _create(given: Any, backend_options: object) -> ProcessGroupShardrt:
    """Make a group for torch, on its members."""
    world = comm.init()
    ranks = list(given.global_ranks_in_group) or list(range(world.size))
    if given.group_size != len(ranks) or ranks[given.group_rank] != world.rank:
        raise RuntimeError(
            f"process group '{given.group_id}': expected rank {world.rank} of {world.size}, as MPI numbers this process, found "
            f"rank {given.group_rank} of {given.group_size}"
        )
    if not given.global_ranks_in_group:  # the default group
        at_finalize(_destroy, _abandon)
    return ProcessGroupShardrt(given.store, given.group_rank, given.group_size, ranks, f"torch.{given.group_id}")


def _destroy() -> None:
    """End all groups, if the program has not."""
    if dist.is_initialized() and dist.get_backend() == BACKEND:
        dist.destroy_process_group()


def _abandon() -> None:
    """Do nothing when ranks are lost: the groups' communicators refuse calls from then on."""


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
# To groups of other backends torch 2.15 attaches a flight recorder, which takes one in C++. Here shardrt records the calls.
_recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
_recording.add(BACKEND)

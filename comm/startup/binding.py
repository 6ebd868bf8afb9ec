"""Where a rank runs: its node, its number there, and its GPU, which no other rank takes."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..core.members import free, revocable
from ..ending.words import name_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"  # a variable of NCCL, since 2.30


class Location(NamedTuple):
    """Where a rank is. SHARDRT_RANKS_PER_NODE makes several nodes of one machine."""

    node: int  # the lowest rank of this rank's node
    local_rank: int  # among the ranks of the node
    machine_rank: int  # among the ranks of the machine
    has_cores: bool  # the node has a core for each of its ranks


class Gpu(NamedTuple):
    """The GPU that a rank takes. uuid: the driver's name for it, the same whatever GPUs a process sees."""

    host: str
    uuid: str
    device: torch.device
    may_be_shared: bool


class SharedGpuError(RuntimeError):
    """Ranks take the same GPU, which NCCL would refuse later. Every rank raises it."""


def locate(comm: MPI.Intracomm, per_node: int | None) -> Location:
    """Find this rank's place. Collective over all ranks.

    per_node: treat every so many consecutive ranks as a node, as in a job on several nodes.
    """
    from mpi4py import MPI

    shared = revocable(comm.Split_type(MPI.COMM_TYPE_SHARED))
    machine_rank = shared.Get_rank()
    if per_node is not None:
        # Where ranks have been lost, the others stay on their nodes.
        machine, shared = shared, revocable(shared.Split(MPI.COMM_WORLD.Get_rank() // per_node))
        free(machine)
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    ranks, cores_of_ranks = zip(*shared.allgather((comm.Get_rank(), cores)), strict=True)
    local_rank = shared.Get_rank()
    free(shared)
    return Location(ranks[0], local_rank, machine_rank, has_cores(cores_of_ranks))


def has_cores(cores_of_ranks: Sequence[int]) -> bool:
    """True if there is a core for each rank. cores_of_ranks: the cores that each may run on, as bits."""
    return reduce(or_, cores_of_ranks).bit_count() >= len(cores_of_ranks)


def bind_device(
    comm: MPI.Intracomm, requested: torch.device, place: Location, bound: torch.device | None = None
) -> torch.device:
    """The device of this rank, made current: NCCL binds a communicator to the current device. Collective over all ranks.

    bound: the one that this rank has had in another world, and keeps: ranks without one take GPUs that are free.
    Raises: SharedGpuError on every rank, before any has made a device current, if ranks take the same GPU.
    """
    if requested.type == "cpu":
        return requested
    # A launcher may make one GPU visible to each rank, whatever its number.
    everyone = comm.allgather((socket.gethostname(), None if bound is None else _uuid(bound.index)))
    if any(uuid is not None for _, uuid in everyone):
        own = _free_gpu(everyone, comm.Get_rank())
    else:
        own = place.machine_rank % torch.cuda.device_count()
    asked = (bound or requested).index
    index = asked if asked is not None else own
    device = torch.device("cuda", index)
    may_be_shared = os.environ.get(SHARING, "0") != "0"
    _check_shared(comm.allgather(Gpu(socket.gethostname(), _uuid(index), device, may_be_shared)))
    torch.cuda.set_device(index)
    return device


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _free_gpu(everyone: Sequence[tuple[str, str | None]], rank: int) -> int:
    """A GPU of this machine for this rank, which has none. everyone: each rank's host, and the UUID of the GPU that it has."""
    host, count = everyone[rank][0], torch.cuda.device_count()
    taken = {uuid for of, uuid in everyone if of == host}
    free = [index for index in range(count) if _uuid(index) not in taken] or list(range(count))
    before = sum(1 for of, uuid in everyone[:rank] if of == host and uuid is None)
    return free[before % len(free)]


def _check_shared(gpus: Sequence[Gpu]) -> None:
    """Raise SharedGpuError if ranks share one without permission. gpus: of all ranks, in their order."""
    takers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, gpu in enumerate(gpus):
        takers[gpu.host, gpu.uuid].append(rank)
    lines = []
    for (host, uuid), ranks in takers.items():
        if len(ranks) > 1 and not all(gpus[rank].may_be_shared for rank in ranks):
            names = " and ".join(sorted({str(gpus[rank].device) for rank in ranks}))
            lines.append(f"{name_ranks(ranks)} of host {host} share a GPU ({names}, UUID {uuid}): expected one for each rank")
    if lines:
        advice = (
            "Start at most as many ranks on a machine as it has GPUs, and call init('cuda') without the number of a device; "
            f"NCCL 2.30 and newer let ranks share a GPU if {SHARING}=1 is set on each of them"
        )
        raise SharedGpuError("\n".join([*lines, advice]))

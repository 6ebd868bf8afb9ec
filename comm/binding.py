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

from .ending.words import name_ranks
from .members import free, revocable

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


def bind_device(comm: MPI.Intracomm, requested: torch.device, place: Location) -> torch.device:
    """The device of this rank, made current: NCCL binds a communicator to the current device. Collective over all ranks.

    Raises: SharedGpuError on every rank, before any has made a device current, if ranks take the same GPU.
    """
    if requested.type == "cpu":
        return requested
    # A launcher may make one GPU visible to each rank, whatever its number.
    index = requested.index if requested.index is not None else place.machine_rank % torch.cuda.device_count()
    device = torch.device("cuda", index)
    uuid, may_be_shared = str(torch.cuda.get_device_properties(index).uuid), os.environ.get(SHARING, "0") != "0"
    _check_shared(comm.allgather(Gpu(socket.gethostname(), uuid, device, may_be_shared)))
    torch.cuda.set_device(index)
    return device


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

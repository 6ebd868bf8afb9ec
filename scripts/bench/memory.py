"""How much memory a rank of the step benchmark takes, in MiB.

On the CPU it is the rank's part of its node's memory: a page of shared memory counts once on the node, however many ranks have
it mapped, and however often; the part of a rank is its mappings' part of all. The kernel's resident sizes count such a page for
each mapping (RssShmem), its proportional ones once (Pss_Shmem); the difference is subtracted. It is read now, also for the
peak: shared memory that was mapped at the peak only, or is mapped since, is counted as the kernel does. Where the kernel has no
Pss_Shmem, nothing is subtracted.

Hazard: another rank that has unmapped shared memory, or has ended, leaves its part to the others. Meet after reading.
"""

from __future__ import annotations

from pathlib import Path

import torch

_PROC = Path("/proc/self")


def held_mb(device: str) -> float:
    """In use by this process; with CUDA, in use on the GPU."""
    if device == "cpu":
        return part_of_node_mb("VmRSS")
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def peaks_mb(device: str) -> tuple[float, float]:
    """The peak; the second figure includes the memory that torch's allocator cached, since a pool keeps its blocks.

    With CUDA, the memory outside torch's allocator is measured now, not at the peak.
    """
    if device == "cpu":
        return (part_of_node_mb("VmHWM"),) * 2
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return (most[0] + outside) / 2**20, (most[1] + outside) / 2**20


def part_of_node_mb(field: str, proc: Path = _PROC) -> float:
    """A resident size of the process of this folder, with pages of shared memory counted once on the node.

    field: VmRSS or VmHWM.
    """
    status, proportional = _fields(proc / "status"), _fields(proc / "smaps_rollup")
    counted_again = status["RssShmem"] - proportional["Pss_Shmem"] if "Pss_Shmem" in proportional else 0
    return (status[field] - counted_again) / 1024


def _fields(path: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file, if there is one."""
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[2:] == ["kB"]}

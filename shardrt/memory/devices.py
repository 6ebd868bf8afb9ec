"""Memory as the host's kernel and allocator measure it, and as torch's allocator of a GPU does."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from ..fsdp.memory.host_memory import POOL
from . import process
from .parts import Claim, Use


class Measured(NamedTuple):
    """The memory at one moment. total: bytes, of which `parts` are known."""

    total: int
    parts: dict[Use, int]

    @property
    def unknown(self) -> int:
        return self.total - sum(self.parts.values())


class Device(Protocol):
    """What measures memory."""

    name: str  # of its peak

    def mark(self) -> tuple[int, int]:
        """Rises with the memory: the first number is the peak's, the second tells moments apart that are equal in it. Cheap."""

    def reset_peak(self) -> bool:
        """Let the peak begin anew. False if that is not possible."""

    def peak(self) -> int:
        """The most bytes since `reset_peak`."""

    def measure(self, claims: Iterable[Claim]) -> Measured:
        """Measure the memory now."""

    def close(self) -> None:
        """Measure no more."""


class HostMemory:
    """This process's resident memory."""

    name = "peak of the process (VmHWM)"

    def __init__(self) -> None:
        self._size = process.open_size()

    def mark(self) -> tuple[int, int]:
        return process.size_of(self._size), 0

    def reset_peak(self) -> bool:
        return process.reset_peak()

    def peak(self) -> int:
        return process.resident().peak

    def measure(self, claims: Iterable[Claim]) -> Measured:
        mappings, resident, malloc = process.mappings(), process.resident(), process.malloc()
        start, end = mappings.heap or (0, 0)
        parts = dict.fromkeys(Use, 0)
        pool = POOL.mappings()
        pooled = sum(process.resident_within(*mapping) for mapping in pool)
        parts[Use.HELD] = pooled
        of_node = 0  # bytes of this rank's shards that are in memory of the node
        absent = mapped = outside = 0  # bytes of tensors: in the heap, not touched; with mappings of malloc's; these, touched
        for part, address, nbytes in claims:
            shared = mappings.is_shared(address)  # a window, or a file
            if shared and part is not Use.SHARDS:
                continue
            found = process.resident_within(address, nbytes)
            parts[part] += found
            if shared:
                of_node += found
                continue
            if start <= address < end:
                absent += nbytes - found
            elif any(first <= address < first + size for first, size in pool):
                parts[Use.HELD] -= found
            else:
                outside += found
                mapped += nbytes
        parts[Use.WINDOWS], parts[Use.PROCESS] = resident.shared - of_node, resident.files
        if malloc is not None:
            heap = process.resident_within(start, end - start)
            heap += max(0, malloc.arenas - (end - start))  # arenas of threads, which are small
            parts[Use.HELD] += max(0, heap - (malloc.in_use - absent))
            # What nobody got from malloc: Python's own arenas, stacks, data of libraries.
            parts[Use.PROCESS] += resident.anonymous - heap - pooled - outside - max(0, malloc.mapped - mapped)
        return Measured(resident.total, parts)

    def close(self) -> None:
        os.close(self._size)


class CudaMemory:
    """A GPU's memory: what torch's allocator has reserved, and what is in use beside it, of this process and of others."""

    name = "peak of the GPU"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> tuple[int, int]:
        stats = self._stats()
        return stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]["current"]

    def reset_peak(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    def peak(self) -> int:
        return int(self._stats()["reserved_bytes"]["all"]["peak"]) + self._beside()

    def measure(self, claims: Iterable[Claim]) -> Measured:
        reserved, allocated = self.mark()
        parts = dict.fromkeys(Use, 0)
        for part, _, nbytes in claims:
            parts[part] += nbytes
        beside = self._beside()
        parts[Use.PROCESS], parts[Use.HELD] = beside - parts[Use.WINDOWS], reserved - allocated
        return Measured(reserved + beside, parts)

    def _stats(self) -> dict[str, Any]:
        # Cost: `memory_stats` would sort hundreds of names at each operation.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats

    def _beside(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - self.mark()[0]

    def close(self) -> None:
        """Do nothing, since nothing is open."""


def measuring(device: torch.device) -> Device:
    """Raises RuntimeError where this device's memory cannot be measured."""
    if device.type == "cuda":
        return CudaMemory(device)
    if device.type != "cpu":
        raise RuntimeError(f"memory of {device} cannot be measured: expected cpu or cuda")
    try:
        return HostMemory()
    except OSError as error:
        raise RuntimeError("memory of the host is measured by Linux' /proc, which is not there") from error

"""The workers of scripts/bench/checkpoint.py: each saves and loads a state on one rank of a job, and measures it."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

BYTES_PER_PARAMETER = 12  # float32: the parameter and AdamW's two averages
WIDTH, LARGE_WIDTH, LARGE = 1024, 2048, 2000  # from LARGE megabytes on, layers are of LARGE_WIDTH
PIECE = 1 << 26  # bytes of one read or write of the floor


@dataclass(frozen=True, slots=True)
class Timing:
    """The measurements of one rank; lists have an entry for each repetition."""

    nbytes: int  # of this rank's state
    save_s: list[float]  # with fsync
    save_peak: list[float]  # peak resident memory during a save, divided by that before it
    stall_s: list[float]  # until the asynchronous save returns
    stall_mb: list[float]  # how much the resident memory grew by then, in MiB
    finish_s: list[float]  # until it is committed
    memcpy_s: list[float]  # of as many bytes, between two buffers that exist
    load_s: list[float]  # of files in the page cache
    write_s: list[float]  # of as many bytes from one buffer, with fsync; without shardrt empty
    read_s: list[float]  # of as many bytes of a file in the page cache; without shardrt empty
    loaded: bool  # whether the loaded state is the saved one


class Side(ABC):
    """One of the two: what is measured."""

    rank: int

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    @abstractmethod
    def async_save(self, folder: Path) -> Callable[[], object]:
        """Begin; returns what waits for the end."""

    @abstractmethod
    def load(self, folder: Path) -> None: ...


def build(megabytes: int) -> nn.Module:
    """Linear layers whose parameters and AdamW state take about so many megabytes (of 10^6 bytes), on the meta device."""
    width = LARGE_WIDTH if megabytes >= LARGE else WIDTH
    layers = max(1, round(megabytes * 1e6 / (BYTES_PER_PARAMETER * width * (width + 1))))
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def fill(model: nn.Module, rank: int, local: Callable[[torch.Tensor], torch.Tensor]) -> torch.optim.AdamW:
    """Give a sharded model its memory, values, and an optimizer with state."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        local(parameter.data).uniform_(generator=generator)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


# ---------------------------------------------------------------------- measuring


def timed(side: Side, action: Callable[[], object]) -> float:
    side.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def status_mb(field: str) -> float:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1024


def peak_of(action: Callable[[], object]) -> float:
    """The peak resident memory during `action`, divided by the memory before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_mb("VmRSS")
    action()
    return status_mb("VmHWM") / before


def measure(side: Side, tensors: list[torch.Tensor], folder: Path, repeats: int, *, floor: bool) -> Timing:
    """Measure every operation `repeats` times, after one that is not counted.

    tensors: this rank's state, local. floor: measure plain reads and writes too.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors)
    saves = measure_saves(side, folder, repeats)
    stalls = measure_stalls(side, folder, repeats)
    loaded, load_s = measure_loads(side, tensors, folder, repeats)
    memcpy_s, write_s, read_s = measure_floor(side, nbytes, folder, repeats, floor=floor)
    return Timing(nbytes, *saves, *stalls, memcpy_s, load_s, write_s, read_s, loaded)


def renew(side: Side, folder: Path) -> None:
    """Remove the last checkpoint: each goes into a new folder."""
    side.barrier()
    if side.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def measure_saves(side: Side, folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    seconds: list[float] = []
    peaks: list[float] = []
    for _ in range(1 + repeats):
        renew(side, folder)
        peaks.append(peak_of(lambda: seconds.append(timed(side, lambda: side.save(folder)))))
    return seconds[1:], peaks


def measure_stalls(side: Side, folder: Path, repeats: int) -> tuple[list[float], list[float], list[float]]:
    stalls, grown, ends = [], [], []
    wait: list[Callable[[], object]] = []
    for _ in range(1 + repeats):
        renew(side, folder)
        before = status_mb("VmRSS")
        stalls.append(timed(side, lambda: wait.append(side.async_save(folder))))
        grown.append(status_mb("VmRSS") - before)
        start = time.perf_counter()
        wait.pop()()
        ends.append(stalls[-1] + time.perf_counter() - start)
    return stalls[1:], grown, ends[1:]


def measure_loads(side: Side, tensors: list[torch.Tensor], folder: Path, repeats: int) -> tuple[bool, list[float]]:
    seconds, same = [], True
    sums = [tensor.view(torch.int32).sum() for tensor in tensors]
    for _ in range(1 + repeats):
        for tensor in tensors:
            tensor.zero_()
        seconds.append(timed(side, lambda: side.load(folder)))
        same = same and all(tensor.view(torch.int32).sum() == expected for tensor, expected in zip(tensors, sums, strict=True))
    return same, seconds[1:]


def measure_floor(
    side: Side, nbytes: int, folder: Path, repeats: int, *, floor: bool
) -> tuple[list[float], list[float], list[float]]:
    """A memcpy of as many bytes; a write with fsync and a read of them, from and into one buffer."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    memcpy = [timed(side, lambda: target.copy_(source)) for _ in range(1 + repeats)][1:]
    if not floor:
        return memcpy, [], []
    path = folder.with_name(f"plain-{side.rank}")
    view = memoryview((ctypes.c_char * nbytes).from_address(target.data_ptr())).cast("B")
    writes = [timed(side, lambda: write_plainly(path, view)) for _ in range(repeats)]
    reads = [timed(side, lambda: read_plainly(path, view)) for _ in range(repeats)]
    path.unlink()
    return memcpy, writes, reads


def write_plainly(path: Path, view: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(view), PIECE):
            os.pwrite(file.fileno(), view[start : start + PIECE], start)
        os.fsync(file.fileno())


def read_plainly(path: Path, view: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        for start in range(0, len(view), PIECE):
            os.preadv(file.fileno(), [view[start : start + PIECE]], start)


# ---------------------------------------------------------------------- the two sides


class Stock(Side):
    """torch's DCP, with its defaults, on a model of FSDP2.

    What is timed is DCP alone: the state dict is made before, and set_state_dict() is not called after.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch import distributed
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.rank = distributed.get_rank()
        self.state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def barrier(self) -> None:
        from torch import distributed

        distributed.barrier()

    def save(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.state, checkpoint_id=folder)

    def async_save(self, folder: Path) -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        future: Any = async_save(self.state, checkpoint_id=folder)
        return lambda: future.result()

    def load(self, folder: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.state, checkpoint_id=folder)


class Ours(Side):
    """shardrt.checkpoint, from the model and the optimizer on."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        import shardrt

        self.rank = shardrt.world().rank
        self.state = {"model": model, "optimizer": optimizer}

    def barrier(self) -> None:
        import shardrt

        shardrt.world().barrier()

    def save(self, folder: Path) -> None:
        import shardrt

        shardrt.checkpoint.save(folder, self.state)

    def async_save(self, folder: Path) -> Callable[[], object]:
        import shardrt

        return shardrt.checkpoint.async_save(folder, self.state).wait

    def load(self, folder: Path) -> None:
        import shardrt

        shardrt.checkpoint.load(folder, self.state)


def local_state(optimizer: torch.optim.Optimizer, local: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The local parts of the parameters and of AdamW's averages."""
    found = []
    for parameter, state in optimizer.state.items():
        found += [local(each) for each in (parameter.data, state["exp_avg"], state["exp_avg_sq"])]
    return found


def shardrt_worker(megabytes: int, folder: Path, repeats: int) -> tuple[int, Timing]:
    import shardrt

    world = shardrt.init("cpu")
    model = build(megabytes)
    for layer in model.children():
        shardrt.fully_shard(layer)
    shardrt.fully_shard(model)

    def local(tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, shardrt.DTensor)
        return tensor.to_local()

    optimizer = fill(model, world.rank, local)
    timing = measure(Ours(model, optimizer), local_state(optimizer, local), folder, repeats, floor=True)
    world.barrier()
    shardrt.finalize()
    return world.rank, timing


def stock_worker(megabytes: int, folder: Path, repeats: int) -> tuple[int, Timing]:
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = build(megabytes)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)

    def local(tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to_local()

    optimizer = fill(model, rank, local)
    timing = measure(Stock(model, optimizer), local_state(optimizer, local), folder, repeats, floor=False)
    distributed.barrier()
    distributed.destroy_process_group()
    return rank, timing


WORKERS = {"shardrt": shardrt_worker, "stock": stock_worker}

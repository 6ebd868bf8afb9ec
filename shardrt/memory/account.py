"""`MemoryAccount`: what the memory of a rank consists of at its peak."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import nn

from ..comm import world
from .devices import Device, measuring
from .parts import Use
from .watch import Watch


@dataclass(frozen=True, slots=True)
class _Peak:
    """The memory at the peak.   name: of the device that has it."""

    name: str
    nbytes: int
    parts: Mapping[str, int]
    at: str


class MemoryAccount:
    """Takes this rank's memory apart, in a `with` block, at the moment of its peak there.

        with shardrt.MemoryAccount(model, optimizer) as account:
            for batch in batches[:3]:
                train_step(batch)
        print(account.table())

    Each part is measured on its own, so the parts add up to less than the peak (or more) by what nothing explains, which the
    table says. On the host they are resident bytes: pages that were touched.

    | part                       | what it is                                                                                |
    |----------------------------|-------------------------------------------------------------------------------------------|
    | interpreter and libraries  | mapped files; what is not malloc's, as Python's objects; what malloc had given to others  |
    |                            | than tensors when the block began, and to modules imported in it                          |
    | shards                     | parameters, as the optimizer has them, and the model's buffers                            |
    | gradients                  | of these; they are no buffer in `memory_summary`                                          |
    | optimizer state            |                                                                                           |
    | optimizer temporaries      | made in a step of an optimizer, without autograd (so what its closure makes is not)       |
    | gathered, post-forward     | full parameters, and what `reshard_after_forward=k` keeps of them                         |
    | packed, partial            | gradients on their way to a reduction; those reduced within a replica only                |
    | scratch, codes             | what a reduction writes before it is converted; quantised values                          |
    | activations                | all other tensors: activations, gradients before they are packed, batches                 |
    | windows                    | shared memory that this process has touched: its own and that of other ranks of the node, |
    |                            | above all the parameters, which the node has once and each rank sees                      |
    | held by the allocator      | freed memory that glibc, or torch's allocator on a GPU, keeps for what is allocated next  |

    model, optimizer: may also be assigned in the block, which then may begin before they are made; until then their tensors are
    activations. An optimizer is also found at its first step.
    peak_nbytes, parts, unexplained_nbytes, at: once the block has ended: bytes, by the names above, and what ran at the peak.
    Before, and after a block that raised, they are RuntimeErrors.
    On a GPU the memory is that of the device: interpreter and libraries are what is used there beside torch's allocator.
    Cost: 30 us for each operation on the host (on a GPU it was not measured), some milliseconds for each new peak; nothing
    while no account is open. The peak that the kernel has measured begins anew (so does that of /usr/bin/time); on a GPU
    that of torch's allocator does (so does `max_memory_allocated()`). Temporary memory inside of an operation is not explained;
    compiled code is one operation.
    Raises RuntimeError while another account is open, and where memory cannot be measured: neither Linux nor a GPU.
    """

    model: nn.Module | None
    optimizer: torch.optim.Optimizer | None
    _found: _Peak | None  # once the block has ended
    _block: ExitStack

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer
        self._found = None
        self._block = ExitStack()

    def __enter__(self) -> Self:
        self._block.enter_context(self._watch())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._block.__exit__(kind, error, traceback)

    @property
    def peak_nbytes(self) -> int:
        return self._peak.nbytes

    @property
    def parts(self) -> Mapping[str, int]:
        return self._peak.parts

    @property
    def unexplained_nbytes(self) -> int:
        return self.peak_nbytes - sum(self.parts.values())

    @property
    def at(self) -> str:
        return self._peak.at

    @property
    def _peak(self) -> _Peak:
        if self._found is None:
            raise RuntimeError("the memory account is not closed: expected that its `with` block has ended, without an error")
        return self._found

    def table(self) -> str:
        """The parts that are not zero, in MiB, their sum, and the peak."""
        rows = [(name, f"{_mib(nbytes):9.1f}", "") for name, nbytes in self.parts.items() if nbytes]
        share = f"{self.unexplained_nbytes / self.peak_nbytes:.1%}"
        rows.append(("not explained", f"{_mib(self.unexplained_nbytes):9.1f}", share))
        rows.append((self._peak.name, f"{_mib(self.peak_nbytes):9.1f}", self.at))
        width = max(len(row[0]) for row in rows)
        return "\n".join([f"{'MiB':>{width + 11}}", *(f"{name:{width}}  {size}  {note}".rstrip() for name, size, note in rows)])

    @contextmanager
    def _watch(self) -> Iterator[None]:
        with _opened():
            self._found = None
            device = _device(self.model)
            with closing(measuring(device)) as memory:
                watch = Watch(self, memory, device)
                with watch.sources():
                    yield
                self._found = _conclude(watch, memory)


def _conclude(watch: Watch, memory: Device) -> _Peak:
    total, parts = watch.measured
    parts[Use.PROCESS] += watch.base + watch.loaded
    nbytes = max(memory.peak(), total) if watch.resets else total
    return _Peak(memory.name, nbytes, {part.value: size for part, size in parts.items()}, watch.at)


_one = threading.Lock()  # held while an account is open


@contextmanager
def _opened() -> Iterator[None]:
    if not _one.acquire(blocking=False):
        raise RuntimeError("a memory account is open: close it before you open another")
    try:
        yield
    finally:
        _one.release()


def _device(model: nn.Module | None) -> torch.device:
    """The device of the world; without a world, that of the model."""
    try:
        return world().device
    except RuntimeError:
        first = None if model is None else next(model.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def _mib(nbytes: int) -> float:
    return nbytes / 2**20

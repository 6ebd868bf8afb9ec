"""The communicator's contract: every collective, its meaning, and its checks, once for all backends.

Conventions: the out tensor comes first, then the in tensor, then `op` or `root`; `stream` is keyword-only and required, so
nothing lands on a default stream by accident. A call is enqueued on `stream` and returns a `Work`; tensors must stay alive
and untouched until it is done. Every rank of the communicator calls the same collectives in the same order.

Legend: N ranks, this one is r; sizes are in elements; out and in are contiguous, of one dtype, on the communicator's device.
Any dtype can be moved; float64, float32, float16, bfloat16 and the integers can be reduced (NCCL: all but int16).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn, TypeVar

import torch

from .streams import Event, Stream

T = TypeVar("T")

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


class ReduceOp(Enum):
    """How the ranks' values become one. Float16 and bfloat16 are reduced in float32 on the MPI backend."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True)
class Work:
    """A collective under way."""

    event: Event

    def wait(self, stream: Stream) -> None:
        """Let nothing submitted to `stream` from now on run before the collective is done. Does not block on CUDA."""
        stream.wait(self.event)

    def synchronize(self) -> None:
        """Block the caller until the collective is done."""
        self.event.synchronize()

    def is_done(self) -> bool:
        """True once the collective is done."""
        return self.event.query()


class Communicator(ABC):
    """A group of N ranks that can reach each other, all of which make the same calls in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, name: str) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.name = name
        self._closed = False

    # ------------------------------------------------------------------ collectives

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream) -> Work:
        """Every rank's `inp`, one after the other in rank order, on every rank.

        inp: n elements.   out: N * n elements.   In place when `inp` is `out[r * n : (r + 1) * n]`.
        Cost: (N - 1) * n elements received per rank.
        Raises: ValueError on sizes, dtypes, layout or device; RuntimeError after close().
        """
        self._check("all_gather", out, inp)
        self._expect(out, self.size * inp.numel(), "all_gather", "out.numel() == N * inp.numel()", inp)
        return self._launch(stream, self._all_gather, out, inp)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; rank r keeps block r.

        inp: N * n elements.   out: n elements.   In place when `out` is `inp[r * n : (r + 1) * n]`.
        Cost: (N - 1) * n elements received per rank. The MPI backend adds in rank order, so it is bitwise reproducible.
        Raises: as all_gather; also ValueError for an `op` that the dtype has not (AVG of integers).
        """
        self._check("reduce_scatter", out, inp, op)
        self._expect(inp, self.size * out.numel(), "reduce_scatter", "inp.numel() == N * out.numel()", out)
        return self._launch(stream, self._reduce_scatter, out, inp, op)

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; every rank keeps all of it.

        inp, out: n elements each.   In place when `out` is `inp`.
        Cost: 2 * (N - 1) / N * n elements received per rank (small ones: (N - 1) * n).
        Raises: as reduce_scatter.
        """
        self._check("all_reduce", out, inp, op)
        self._expect(out, inp.numel(), "all_reduce", "out.numel() == inp.numel()", inp)
        return self._launch(stream, self._all_reduce, out, inp, op)

    def broadcast(self, out: torch.Tensor, inp: torch.Tensor, root: int, *, stream: Stream) -> Work:
        """Rank `root`'s `inp`, in `out` on every rank.

        inp, out: n elements each (`inp` is read on the root only).   In place when `out` is `inp`.
        Cost: n elements received per rank.
        Raises: as all_gather; also ValueError for a root that is no rank.
        """
        self._check("broadcast", out, inp)
        self._expect(out, inp.numel(), "broadcast", "out.numel() == inp.numel()", inp)
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast on {self}: root {root} is no rank; expected 0 <= root < {self.size}")
        return self._launch(stream, self._broadcast, out, inp, root)

    def barrier(self, *, stream: Stream) -> Work:
        """Done once every rank's stream has come to its barrier. Synchronize the returned Work to block the caller."""
        self._check_open("barrier")
        return self._launch(stream, self._barrier)

    # ------------------------------------------------------------------ control plane (host, blocking)

    @abstractmethod
    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks the caller; for set-up, not for steps."""

    @abstractmethod
    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        """One new communicator for each colour, its ranks ordered by (key, old rank); None for a rank without a colour.

        Collective over the old communicator, which stays as it is. The new one is the caller's to close.
        """

    def close(self) -> None:
        """Give back what the communicator holds. Collective; idempotent; calls after it raise RuntimeError."""
        if not self._closed:
            self._closed = True
            self._close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}', rank {self.rank} of {self.size}, {self.device})"

    # ------------------------------------------------------------------ checks

    def _launch(self, stream: Stream, launch: Callable[..., None], *args: object) -> Work:
        launch(stream, *args)
        return Work(stream.record())

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"{call} on {self}: the communicator is closed")

    def _check(self, call: str, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp | None = None) -> None:
        # Cost: 1.5 us for a good call; what is wrong with a bad one is found out afterwards.
        same = out.dtype == inp.dtype and out.device == inp.device == self.device
        if self._closed or not same or not out.is_contiguous() or not inp.is_contiguous():
            self._refuse(call, out, inp)
        if op is not None and (op is ReduceOp.AVG or inp.dtype not in FLOATS):
            self._check_reducible(call, inp.dtype, op)

    def _refuse(self, call: str, out: torch.Tensor, inp: torch.Tensor) -> NoReturn:
        self._check_open(call)
        for role, tensor in (("out", out), ("inp", inp)):
            if tensor.device != self.device:
                raise ValueError(f"{call} on {self}: {role} is on {tensor.device}; move it to {self.device}")
            if not tensor.is_contiguous():
                layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                raise ValueError(f"{call} on {self}: {role} is not contiguous ({layout}); call .contiguous()")
        raise ValueError(f"{call} on {self}: out is {out.dtype}, inp is {inp.dtype}; expected one dtype")

    def _check_reducible(self, call: str, dtype: torch.dtype, op: ReduceOp) -> None:
        if dtype not in FLOATS and dtype not in INTEGERS:
            raise ValueError(f"{call} on {self}: {dtype} cannot be reduced; expected a real floating-point or integer dtype")
        if op is ReduceOp.AVG and dtype not in FLOATS:
            raise ValueError(f"{call} on {self}: AVG of {dtype} is not defined; use SUM, or a floating-point dtype")

    def _expect(self, tensor: torch.Tensor, numel: int, call: str, formula: str, other: torch.Tensor) -> None:
        if tensor.numel() != numel:
            sizes = f"{tensor.numel()} against {other.numel()} elements with N = {self.size}"
            raise ValueError(f"{call} on {self}: expected {formula}, found {sizes}")

    # ------------------------------------------------------------------ what a backend provides
    # Each enqueues its call on `stream`; the arguments have been checked.

    @abstractmethod
    def _all_gather(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _all_reduce(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None: ...

    @abstractmethod
    def _broadcast(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, root: int) -> None: ...

    @abstractmethod
    def _barrier(self, stream: Stream) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

"""What a collective is made of: dtypes, operations, the call, the work under way, what watches it, the errors all share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .streams import Event, Stream

if TYPE_CHECKING:
    from .communicator import Communicator
    from .fingerprint import Description
    from .monitor.status_table import StatusEntry

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8})
REDUCIBLE = FLOATS | INTEGERS | {torch.bool}


class ReduceOp(Enum):
    """How the ranks' values become one. Float16 and bfloat16 are reduced in float32 on the MPI backend."""

    __hash__ = object.__hash__  # Cost: an Enum's own is written in Python, and every call is looked up by its operation

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True)
class PreMulSum:
    """The sum of the ranks' values, each multiplied by `factor` first. For floating-point dtypes."""

    factor: float


Op = ReduceOp | PreMulSum

# Control calls: they block the caller, and run on its thread.
BLOCKING = frozenset({"create", "exchange", "split", "empty", "pool", "agree", "finalize"})


class Counts(NamedTuple):
    """The elements of an all-to-all that come from, and go to, each rank."""

    out: tuple[int, ...]
    inp: tuple[int, ...]


@dataclass(slots=True)
class Work:
    """A collective under way. Those of a group share one."""

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


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One collective, as this rank makes it."""

    comm: Communicator
    number: int  # of this communicator's collectives, from 0; a send or receive has that of the next one
    name: str
    launch: Callable[..., None]
    out: torch.Tensor | None
    inp: torch.Tensor | None
    how: tuple[object, ...]  # op, root, peer or counts
    stream: Stream
    # Of the first call of a list, for hooks: its words, once they have been worked out; where recorder and watchdog keep it.
    description: Description | None = None
    entry: list[Any] | None = None
    status: StatusEntry | None = None


class Hook:
    """Watches the calls of communicators from outside; see `Communicator.hooks`. A group is one list of calls.

    `called` runs on the caller's thread; `before` and `after` in the stream's order, around the calls (on CUDA: around their
    being enqueued; `work.event` tells when they have run). What `before` raises keeps the calls from running, and `after` from
    being told. What blocks the caller (`BLOCKING`) has a `before` and an `after` only.
    """

    def called(self, calls: Sequence[CollectiveCall], work: Work) -> None:
        """The calls were made; `work` will tell when they are done."""

    def before(self, calls: Sequence[CollectiveCall]) -> None:
        """The calls run next."""

    def after(self, calls: Sequence[CollectiveCall]) -> None:
        """The calls have run."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as it is told to the other ranks."""

    rank: int
    error: str
    trace: str


class SharedError(RuntimeError):
    """Every rank of `comm` raises it at once."""

    def __init__(self, message: str, comm: Communicator) -> None:
        super().__init__(message)
        self.comm = comm


class RemoteError(SharedError):
    """A rank raised in a block that all ranks agree on: see `Communicator.agree`. `failure` has its rank and traceback."""

    def __init__(self, failure: Failure, comm: Communicator) -> None:
        told = f"rank {failure.rank} raised {failure.error} (told rank {comm.rank} of '{comm.name}')\n{failure.trace}"
        super().__init__(told, comm)
        self.failure = failure

"""What a collective is made of: dtypes, operations, the call, its result, the hooks around it, shared errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import current_thread, local
from typing import NamedTuple, Protocol, TypeVar

import torch

from ..ending.words import name_ranks
from .fingerprint import OF_SOME_RANKS, Description, describe_call, join_descriptions
from .ranks import Ranks
from .streams import Event, Stream

T = TypeVar("T")

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8})
REDUCIBLE = FLOATS | INTEGERS | {torch.bool}


class ReduceOp(Enum):
    """How the ranks' values are combined. The MPI backend reduces float16 and bfloat16 in float32."""

    __hash__ = object.__hash__  # Cost: Enum's own hash is Python code, and every call is looked up by its operation

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


@dataclass(frozen=True, slots=True)
class PreMulSum:
    """The sum of the ranks' values, each multiplied by `factor` first. It is defined for floating-point dtypes."""

    factor: float

    @property
    def value(self) -> str:
        """The operation in words, as `ReduceOp.value`."""
        return f"sum times {self.factor}"


Op = ReduceOp | PreMulSum

# Control calls: they block the caller and run on its thread.
BLOCKING = OF_SOME_RANKS | {
    "exchange",
    "compare",
    "split",
    "empty",
    "node_memory",
    "pool",
    "agree",
    "rejoin",
    "close",
    "finalize",
}


class Counts(NamedTuple):
    """For each rank, the elements of an all-to-all that come from it (`out`) and go to it (`inp`)."""

    out: tuple[int, ...]
    inp: tuple[int, ...]


@dataclass(slots=True)
class Work:
    """A collective that has been called and may still run. The calls of a group share one."""

    event: Event

    def wait(self, stream: Stream) -> None:
        """Order `stream` after the collective: what is submitted to it from now on runs later. Does not block on CUDA."""
        stream.wait(self.event)

    def synchronize(self) -> None:
        """Block the caller until the collective is done."""
        self.event.synchronize()

    def is_done(self) -> bool:
        """True once the collective is done."""
        return self.event.query()


class Member(Protocol):
    """One rank's end of a communicator, as hooks and errors see it. `Communicator` documents the members."""

    name: str
    rank: int
    size: int
    ranks: Ranks
    is_async: bool
    hooks: tuple[Hook, ...]

    def compare_in_call(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None: ...

    def swap_numbers_in_call(self, numbers: Sequence[int]) -> list[int]: ...

    def align(self, numbers: Iterable[int]) -> None: ...

    def async_error(self) -> str | None: ...


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One collective, as this rank calls it."""

    comm: Member
    number: int  # of this communicator's collectives, from 0; a send or receive has the number of the next one
    name: str
    out: torch.Tensor | None
    inp: torch.Tensor | None
    args: tuple[object, ...]  # op, root, peer or counts
    stream: Stream
    subject: str = ""  # what it is for, in words: see `about`


class Subject(str):
    """What calls are for, in words. advice: what a user may do about ranks that make calls for different things."""

    __slots__ = ("advice",)
    advice: str

    def __new__(cls, words: str, advice: str) -> Subject:
        """Words with advice. Without, any string will do."""
        made = super().__new__(cls, words)
        made.advice = advice
        return made


class _Now(local):
    def __init__(self) -> None:
        self.thread = current_thread()
        self.subject = ""  # what its calls are for; written by `about` alone


now = _Now()  # of this thread


class about:
    """The calls that this thread makes in the `with` block are for `subject`, such as a group of parameters.

    subject: in words, the same on every rank; the innermost block's holds that has any. Calls of equal sizes match: where calls
    are compared, ranks that make them for different things raise MismatchError, with the words of each. Control calls have no
    subject: ranks that make a communicator together may want it for different things.
    Cost: 0.5 us.
    """

    __slots__ = ("_outer", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        self._outer = now.subject
        now.subject = self._subject or self._outer

    def __exit__(self, *error: object) -> None:
        now.subject = self._outer


class CallList(list[CollectiveCall]):
    """One call, or the calls of a group: what a backend launches at once, and what a hook is given.

    description: the calls in words, set by `describe` before hooks see them: several need it, and a group may be long.
    """

    __slots__ = ("description",)

    description: Description

    def describe(self) -> CallList:
        """Set `description`; returns the list itself."""
        self.description = _describe(self[0]) if len(self) == 1 else join_descriptions(tuple(map(_describe, self)))
        return self


def _describe(call: CollectiveCall) -> Description:
    tensor = call.out if call.inp is None or call.name == "scatter" else call.inp
    if tensor is not None:
        return describe_call(call.name, tensor.dtype, tensor.numel(), call.args, call.subject)
    if call.name == "empty":
        dtype, numel = call.args
        assert isinstance(dtype, torch.dtype)
        assert isinstance(numel, int)
        return describe_call(call.name, dtype, numel, ())
    args = call.args if call.name == "node_memory" or call.name in OF_SOME_RANKS else ()
    return describe_call(call.name, None, 0, args, call.subject)


class Hook:
    """Observes the calls of communicators; see `Communicator.hooks`. A group is one list of calls.

    `called` runs on the caller's thread; `before` and `after` run in the stream's order, around the calls (on CUDA: around
    enqueueing them; `work.event` passes when they have run). If a `before` raises, the calls do not run, and each `after` is
    called, maybe without its `before`. Control calls (`BLOCKING`) have `before` and `after` only.
    """

    def called(self, calls: CallList, work: Work) -> None:
        """The calls were made; `work` shows when they are done."""

    def before(self, calls: CallList) -> None:
        """The calls run next."""

    def after(self, calls: CallList) -> None:
        """The calls have run, or failed."""

    def cut_short(self, calls: CallList) -> None:
        """An exception, such as a signal handler's, takes this rank out of the calls; `after` comes next."""

    def failed(self, failure: Failure | None) -> None:
        """This rank has left the block of an `agree()` through an exception; None: the others have left it as well."""


class Interrupted(RuntimeError):
    """A call waits for ranks that make no more calls until an `agree()` has ended.

    They have left its block through an exception, which it raises; or an exception, such as a signal handler's, has taken them
    out of the middle of a call (`in_call`), and they have handled it.
    """

    def __init__(self, comm: str, ranks: Sequence[int], in_call: bool = False) -> None:
        self.in_call = in_call
        left = "left a call through an exception" if in_call else "left a block of agree() through an exception"
        super().__init__(f"{comm}: {name_ranks(ranks)} {left}, and made no call here; an agree() of all ranks ends this")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as it is sent to the other ranks. is_consequence: another rank's exception has caused it."""

    rank: int
    error: str
    trace: str
    is_consequence: bool

    @classmethod
    def of(cls, error: Exception, rank: int) -> Failure:
        """The exception that this rank is handling."""
        return cls(rank, f"{type(error).__name__}: {error}", traceback.format_exc(), any(map(_is_consequence, causes(error))))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the exception, then the one that it was raised from, or while that was handled, and so on."""
    seen = set[int]()  # they may form a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_consequence(error: BaseException) -> bool:
    return isinstance(error, Interrupted) or (isinstance(error, RemoteError) and error.failure.is_consequence)


class SharedError(RuntimeError):
    """An error that every rank of `comm` raises at once; None if only some of the ranks do."""

    def __init__(self, message: str, comm: Member | None) -> None:
        super().__init__(message)
        self.comm = comm


class MismatchError(SharedError):
    """The ranks have made different calls, none of which ran: every rank raises it, with every rank's call.

    Of a send and a recv that do not match, both ranks raise it; nothing was received.
    """


class RemoteError(SharedError):
    """A rank raised in a block that all ranks agree on: see `Communicator.agree`. `failure` has its rank and traceback."""

    def __init__(self, failure: Failure, comm: Member) -> None:
        message = f"rank {failure.rank} raised {failure.error} (reported on rank {comm.rank} of '{comm.name}')\n{failure.trace}"
        super().__init__(message, comm)
        self.failure = failure

    @classmethod
    def first(cls, failures: Iterable[Failure | None], comm: Member) -> RemoteError | None:
        """The error of the lowest rank that has failed by itself; of any that has failed, if none has; None if all are well."""
        failed = sorted(filter(None, failures), key=lambda failure: failure.is_consequence)
        return cls(failed[0], comm) if failed else None

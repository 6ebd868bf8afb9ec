"""What a rank waits for: its operation on each communicator, and for how long it has been in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ...core.calls import CallList, CollectiveCall, Member, Work
from ...ending.status_table import WHAT_NBYTES, Operation, StatusEntry
from ...recorder.recorder import is_past

NO_ANSWER = "the store does not answer; one whose requests may take longer needs a larger SHARDRT_TIMEOUT (docs/failures.md)"
AFTER_EXCEPTION = "agree, after an exception"  # `agree` of all ranks: this one makes no other call before they come there


@dataclass(frozen=True, slots=True)
class Wait:
    """An operation that this rank is waiting in."""

    comm: str
    ranks: tuple[int, ...]
    key: int
    number: int
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"#{self.number} {self.what} on '{self.comm}'"


class StoreWait(Wait):
    """A request to a store.   what: in words."""

    def __str__(self) -> str:
        return self.what


class Watched:
    """The status entry of a communicator, and for how long it has not changed."""

    def __init__(self, comm: Member, status: StatusEntry, key: int, has_everyone: bool) -> None:
        self.has_everyone = has_everyone  # whether it has all ranks of the job
        self.name, self.ranks, self.own, self.status, self.key = comm.name, comm.ranks, comm.rank, status, key
        self.pending: deque[tuple[int, str, Work]] = deque()  # what has been enqueued on a CUDA device and is not done
        self.peers: list[int] = []  # other ranks in sends and receives that come without a collective
        self.position = 0
        self.seconds = 0.0
        self.told = 0  # how often the wait has been told of

    def begin(self, calls: CallList) -> None:
        """This rank begins these calls."""
        what = calls.description
        self.peers = [] if what.shared else [peer for call in calls for peer in _peers(call)]
        failed = calls[0].name == "agree" and calls[0].args[0] is not None
        self.status.begin(calls[0].number, AFTER_EXCEPTION if failed and self.has_everyone else what.shared or what.text)

    def advance(self, elapsed: float) -> Wait | None:
        """Add `elapsed` seconds if the operation has not changed since the last call. Returns: the operation, as `wait`."""
        self._drop_past()
        position = self._position()
        if position != self.position:
            self.position, self.seconds, self.told = position, 0.0, 0
        else:
            self.seconds += elapsed
        return self.wait()

    def is_where_it_was(self) -> bool:
        """True if the operation that `advance` has seen has not come through."""
        self._drop_past()
        return self.wait() is not None and self._position() == self.position

    def wait(self) -> Wait | None:
        """The operation that this rank is in: on a CUDA device, the oldest that has been enqueued and is not done."""
        if (oldest := self._oldest()) is not None:
            number, what, _ = oldest
        elif self.status.ended != self.status.count:
            number, what = self.status.number, self.status.what
        else:
            return None
        members = {*self.peers, self.own} if self.peers else range(len(self.ranks))
        return Wait(self.name, tuple(self.ranks[m] for m in sorted(members)), self.key, number, what, self.seconds)

    def _drop_past(self) -> None:
        while self.pending and is_past(self.pending[0][2]):
            self.pending.popleft()

    def _position(self) -> int:
        return self.status.count if (oldest := self._oldest()) is None else id(oldest[2])

    def _oldest(self) -> tuple[int, str, Work] | None:
        with suppress(IndexError):  # the watchdog's thread may drop the last one
            return self.pending[0]
        return None


def _peers(call: CollectiveCall) -> tuple[int, ...]:
    """The ranks that a call of some ranks waits for, this one maybe among them."""
    waited_for = call.args[0]
    if isinstance(waited_for, tuple):
        return waited_for
    return (waited_for,) if isinstance(waited_for, int) else ()


@dataclass(frozen=True, slots=True)
class OverdueWait:
    """An operation of this rank that is overdue, and the ranks that have not reached it."""

    wait: Wait
    missing: list[int]
    is_under_way: Callable[[], bool]
    error: str | None = None  # an error of the communicator, because of which it cannot come through
    in_circle: bool = False  # the ranks that have not reached it wait, in the end, for this one

    @property
    def everyone_is_here(self) -> bool:
        """True if every rank has reached it."""
        return not self.missing


def has_reached(operation: Operation, wait: Wait) -> bool:
    """True if a rank whose newest operation on the communicator is `operation` has reached the one that is waited in."""
    if operation.key != wait.key:
        return False
    same = operation.what == wait.what[:WHAT_NBYTES] or {operation.what, wait.what} == {"agree", AFTER_EXCEPTION}
    return operation.number > wait.number or (operation.number == wait.number and same)

"""The control plane of a communicator: who its ranks are, and the calls that block the caller on the host.

Control calls stand in the order of the collectives: each begins when the collectives called before it are done (on the host; on
a GPU, have been enqueued), takes a number as they do, and is compared with the other ranks' calls.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self, TypeVar

import torch

from .backend import Backend
from .calls import CallList, CollectiveCall, Failure, Hook, RemoteError, SharedError
from .pool import Pool
from .streams import INLINE, PAST, Event, Stream

T = TypeVar("T")


class ControlPlane:
    """The base of `Communicator`, with all but the collectives."""

    def __init__(self, backend: Backend, hooks: Sequence[Hook] = ()) -> None:
        self.rank = backend.rank
        self.size = backend.size
        self.ranks = backend.ranks
        self.device = backend.device
        self.name = backend.name
        self.is_async = backend.device.type == "cuda"  # a call that has been enqueued may still run
        self.hooks = tuple(hooks)
        self.is_closed = False
        self.backend = backend
        self._called = [hook.called for hook in hooks if type(hook).called is not Hook.called]
        self._before = [hook.before for hook in hooks if type(hook).before is not Hook.before]
        self._after = [hook.after for hook in hooks if type(hook).after is not Hook.after]
        self._number = 0  # of the next call
        self._newest: tuple[Stream, Event] | None = None  # call
        self._newest_collective: Event = PAST
        self._pool: Pool | None = None
        self._needs_pool = backend.has_pool
        if backend.connects:
            with self.watched("create"):
                backend.connect()

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks the caller; for set-up, not for steps.

        Raises: RuntimeError after close(), or if a collective called before it has failed in its stream's thread;
        MismatchError, where calls are compared, if another rank makes another call. So do `split`, `empty` and `pool`.
        """
        with self._control_call("exchange"):
            return self.backend.exchange(value)

    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        """None if `fingerprint`, of 63 bits, is the same on every rank; else every rank's `describe()`, in rank order.

        `describe` returns something picklable. Blocks until every rank has called it; call it in the order of the collectives.
        """
        self.check_open("compare")
        return self.backend.compare(fingerprint, describe)

    def split(self, color: int | None, key: int, name: str) -> Self | None:
        """One new communicator for each colour, its ranks ordered by (key, old rank); None for a rank without a colour.

        Collective over the old communicator, which stays as it is. The caller closes the new one.
        """
        with self._control_call("split"):
            backend = self.backend.split(color, key, name)
            return None if backend is None else type(self)(backend, self.hooks)

    def empty(self, numel: int, dtype: torch.dtype, *, symmetric: bool = False) -> torch.Tensor:
        """A (numel,) buffer that this communicator's collectives access without a copy. Collective, with equal arguments.

        The memory is freed when the communicator is closed: allocate once, not per step.
        symmetric: a promise that a call which is given a part of it is given the same part on every rank, own blocks of calls
        in place aside. NCCL may then let the GPUs of a node read and write each other's memory (NCCL_WIN_COLL_SYMMETRIC).
        Hazard: the promise is not checked; if it is broken, results are wrong.
        """
        with self._control_call("empty", dtype, numel):
            return self.backend.empty(numel, dtype, symmetric)

    def pool(self) -> Pool | None:
        """A pool for buffers that come and go, accessed as those of `empty` are; None where plain memory is as good.

        Collective; returns the same pool every time.
        """
        if self.backend.has_pool:
            self.check_open("pool")
        if self._needs_pool:
            self._needs_pool = False
            with self._control_call("pool"):
                self._pool = self.backend.pool()
        return self._pool

    @contextmanager
    def agree(self) -> Iterator[None]:
        """An exception on any rank in the `with` block (or the decorated function) becomes a RemoteError on every rank.

        Blocks at the end of the block until every rank is there. Ranks that wait in a collective of the block, which the failed
        rank never calls, raise it as well if calls are compared across ranks (`comm.monitor.check`).
        """
        self.check_open("agree")
        own_failure, cause = None, None
        try:
            try:
                yield
            finally:
                if self._newest is not None:
                    self._newest[1].synchronize()
        except Exception as error:
            shared = error.__cause__ if isinstance(error.__cause__, SharedError) else error
            if isinstance(shared, SharedError) and shared.comm is self:  # every rank raises it
                raise shared from None
            own_failure, cause = Failure(self.rank, f"{type(error).__name__}: {error}", traceback.format_exc()), error
        with self.watched("agree", own_failure):
            answers = self.backend.exchange((own_failure, self._number))
        self.align(number for _, number in answers)
        for failure, _ in answers:
            if failure is not None:
                raise RemoteError(failure, self) from cause

    def align(self, numbers: Iterable[int]) -> None:
        """Continue from the highest of the ranks' call numbers: a rank that failed has made fewer calls."""
        self._number = max(numbers)

    @contextmanager
    def watched(self, name: str, *args: object) -> Iterator[None]:
        """Run the hooks around the `with` block, in which the caller waits for the other ranks. name: one of `BLOCKING`.

        It takes the next number, as a collective does.
        """
        calls = CallList((CollectiveCall(self, self._number, name, None, None, args, INLINE),)).describe()
        self._number += 1
        for before in self._before:
            before(calls)
        try:
            yield
        finally:
            for after in self._after:
                after(calls)

    def leave(self) -> None:
        """Wait for every rank to reach the end of its program. Collective, but never compared.

        If a rank ends while others wait for it in a collective, the watchdog reports it: it knows where that rank ended.
        """
        with self.watched("finalize"):
            self.backend.exchange(None)

    def close(self) -> None:
        """Free what the communicator holds. Collective; idempotent; calls after it raise RuntimeError."""
        if not self.is_closed:
            self.is_closed = True
            self.backend.close()

    def check_open(self, name: str) -> None:
        """Raise RuntimeError after close(). name: of the call, for the message."""
        if self.is_closed:
            raise RuntimeError(f"{name} on {self}: the communicator is closed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}', rank {self.rank} of {self.size}, {self.device})"

    def _control_call(self, name: str, *args: object) -> AbstractContextManager[None]:
        """`watched`, after the collectives called before are done."""
        self.check_open(name)
        if not self.is_async:
            # Hazard: without this, the stream's thread and the caller would compare at once, each with the other's fingerprint.
            # Sends and receives are not waited for: the other rank may make the matching call after this one.
            self._newest_collective.synchronize()
        return self.watched(name, *args)

"""The control plane of a communicator: who its ranks are, and the calls that block the caller on the host.

Control calls stand in the order of the collectives: each begins when the collectives called before it are done (on the host; on
a GPU, have been enqueued), takes a number as they do, and is compared with the other ranks' calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Event as Flag
from threading import _DummyThread, current_thread, get_ident
from threading import enumerate as enumerate_threads
from time import sleep
from typing import NamedTuple, NoReturn, Self, TypeVar

import torch

from . import members
from .backend import Backend, NodeMemory
from .calls import CallList, CollectiveCall, Failure, Hook, Interrupted, RemoteError, SharedError, causes, now
from .fingerprint import OF_SOME_RANKS, fingerprint_of
from .members import check_lost, raise_lost
from .pool import Pool
from .streams import INLINE, PAST, Event, Stream

T = TypeVar("T")

_POLL_S = 0.0002
_SIGNAL_S = 0.05  # for a signal to all ranks, such as Ctrl-C, to come here as well: its exception then comes first
_open: dict[ControlPlane, None] = {}  # this process's communicators that are not closed, in the order they were made
_left: set[ControlPlane] = set()  # communicators in a call of which an exception has cut this rank short, until it rejoins


class _End(NamedTuple):
    """What a rank says at the end of a block of `agree()`.

    depth: that of the block, 1 for the outermost.   has_left: whether an exception has taken it out of a call.
    """

    depth: int
    failure: Failure | None
    has_left: bool


class ControlPlane:
    """The base of `Communicator`, with all but the collectives."""

    def __init__(self, backend: Backend, hooks: Sequence[Hook] = ()) -> None:
        self.rank = backend.rank
        self.size = backend.size
        self.ranks = backend.ranks
        self.device = backend.device
        self.name = backend.name
        self.is_async = backend.device.type == "cuda"  # a call that has been enqueued may still run
        self.multiplies_terms = backend.multiplies_terms
        self.has_node_memory = backend.has_node_memory
        self.is_closed = False
        self.backend = backend
        self._set_hooks(hooks)
        self._number = 0  # the number of the next call
        self._depth = 0  # how many blocks of `agree()` this rank is in
        self._thread = 0  # the thread that makes a call now; 0 for none
        self._caller = now.thread  # that has made the newest call
        self._is_left = False  # whether a block of `agree()` has left it, until it rejoins
        self._is_aborted = False
        self._members = members.current
        self._ended = "is closed"  # why calls are refused, if they are
        self._newest: tuple[Stream, Event] | None = None  # the newest call's
        self._newest_collective: Event = PAST
        self._pool: Pool | None = None
        self._needs_pool = backend.has_pool
        _open[self] = None

    @property
    def number(self) -> int:
        """The number of the next collective or control call: the same on every rank."""
        return self._number

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks the caller; for set-up, not for steps.

        Raises: RuntimeError after close(), or if a collective called before it has failed in its stream's thread;
        MismatchError, where calls are compared, if another rank makes another call. So do `compare`, `split`, `empty`, `pool`.
        """
        with self._control_call("exchange"):
            return self.backend.exchange(value)

    def differing(self, value: T) -> list[T] | None:
        """Every rank's value, in rank order, on every rank, if any differ; None if all are equal.

        value: picklable, and such that its `repr` tells what is equal: of strings, numbers, tuples, lists.
        Blocks the caller, and raises, as exchange. Cost: a comparison of 63 bits while they agree.
        """
        with self._control_call("exchange"):
            return self.compare_in_call(fingerprint_of(repr(value)), lambda: value)

    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        """None if `fingerprint`, of 63 bits, is the same on every rank; else every rank's `describe()`, in rank order.

        `describe` returns something picklable. Blocks the caller, and raises, as exchange.
        """
        with self._control_call("compare"):
            return self.compare_in_call(fingerprint, describe)

    def compare_in_call(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        """`compare` for hooks, and for `watched` blocks: as part of the call that they belong to, which the watchdog sees."""
        self.check_open("compare")
        try:
            return self.backend.compare(fingerprint, describe)
        except BaseException as error:
            self._cut_short(error)
            raise

    def swap_numbers_in_call(self, numbers: Sequence[int]) -> list[int]:
        """Send each rank a number; returns those received, in rank order. For hooks, as `compare_in_call`."""
        self.check_open("swap_numbers")
        return self.backend.swap_numbers(numbers)

    def split(self, color: int | None, key: int, name: str) -> Self | None:
        """One new communicator for each colour, its ranks ordered by (key, old rank); None for a rank without a colour.

        Collective over the old communicator, which stays as it is. The caller closes the new one: one that is dropped instead
        is kept until the process ends, with its shared memory and hooks, and takes part in each `agree()` that fails.
        Cost: 512 KiB of shared memory for each of its ranks, where all are on one node.
        Raises: as exchange; RuntimeError, on every rank, if MPI makes no more communicators: MPICH has about 680.
        """
        with self._control_call("split"):
            backend = self.backend.split(color, key, name)
            return None if backend is None else type(self)(backend, self.hooks)

    def part(self, ranks: Sequence[int], name: str) -> Self:
        """A new communicator of these of its ranks, this one among them, in their order.

        Collective over the old communicator: every rank gives the part that it is in; parts that share a rank are the same.
        Otherwise as `split`, which needs only the colour of a part.
        """
        with self._control_call("split"):
            return type(self)(self.backend.part(ranks, name), self.hooks)

    def subset(self, ranks: Sequence[int], name: str, *, on_host: bool = False) -> Self:
        """A new communicator of these of its ranks, this one among them, in their order; only they call it.

        on_host: for CPU tensors, whatever this one is for.
        Collective over `ranks`: all of them give the same ranks and name. Subsets with ranks in common are made in one order.
        Hazard: this is not compared, and no error is told to the other ranks: if one does not come, the watchdog reports it.
        Raises: ValueError for ranks that are not distinct ranks of this communicator with this one among them; RuntimeError if
        MPI makes no more communicators.
        """
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ValueError(
                f"subset({list(ranks)}) of {self}: expected distinct ranks below {self.size}, with this rank, {self.rank}"
            )
        with self._control_call("subset", tuple(ranks), name):
            return type(self)(self.backend.subset(ranks, name, on_host=on_host), self.hooks)

    def empty(self, numel: int, dtype: torch.dtype, *, symmetric: bool = False) -> torch.Tensor:
        """A (numel,) buffer that this communicator's collectives access without a copy. Collective, with equal arguments.

        The memory is freed when the communicator is closed: allocate once, not per step. It is reserved at once: where a node
        has too little shared memory, its ranks get memory of their own, with a warning, and the collectives copy.
        Hazard: on GPUs, in one call, all ranks pass such buffers or none does (NCCL's manual, "User Buffer Registration");
        this is not checked, and otherwise results are wrong, or the call does not end.
        symmetric: a promise that a call which is given a part of it is given the same part on every rank, own blocks of calls
        in place aside. NCCL may then let the GPUs of a node read and write each other's memory (NCCL_WIN_COLL_SYMMETRIC).
        Hazard: the promise is not checked; if it is broken, results are wrong.
        """
        with self._control_call("empty", dtype, numel):
            return self.backend.empty(numel, dtype, symmetric)

    def node_memory(self, nbytes: int) -> NodeMemory | None:
        """Memory that all ranks map, on a communicator that `has_node_memory`; None, on every rank, if it cannot be had.

        Collective, with equal arguments. It lives as long as something refers to it or to a tensor in it.
        Raises: as exchange.
        """
        with self._control_call("node_memory", nbytes):
            return self.backend.node_memory(nbytes)

    def wait_for_readers(self, memory: NodeMemory) -> None:
        """Wait until no other rank reads what this one has read last, or before, in `memory`. Only this rank calls it.

        Cost: 0.2 us for each rank if nobody does.
        """
        for rank in memory.readers():
            with self.watched("wait_to_write", rank):
                memory.wait_for(rank)

    def pool(self) -> Pool | None:
        """A pool for buffers that come and go, accessed as those of `empty` are; None where plain memory is as good.

        Collective; returns the same pool every time.
        """
        self.check_open("pool")
        if self._needs_pool:
            self._needs_pool = False
            with self._control_call("pool"):
                self._pool = self.backend.pool()
        return self._pool

    @contextmanager
    def agree(self) -> Iterator[None]:
        """An exception on any rank in the `with` block (or the decorated function) becomes a RemoteError on every rank.

        Blocks at the end of the block until every rank is there. Ranks that wait in a call of the block which the failed rank
        never makes raise it as well, on this communicator or any other one of some of its ranks. Of collectives, this needs
        calls that are compared across ranks (`comm.monitor.check`), or pass through the node's shared memory; otherwise the
        watchdog ends the job. A stream whose thread was in such a call, or in a send or receive, has failed then:
        `Stream.recover` lets it go on.

        Communicators whose newest call on every rank was made by another thread, which has not ended, are left alone: that
        thread goes on. In a block, a rank makes the calls of all communicators that it needs on one thread.

        Blocks may be nested: the error is raised at the end of each, up to the outermost that a rank has failed in.
        An exception that takes a rank out of a call counts as well where the block handles it. If that was before the block,
        all ranks go on together at its end.
        """
        self.check_open("agree")
        failure, error, shared = None, None, None
        self._depth += 1
        depth, left = self._depth, _left_here()
        try:
            yield
            if _left and not _left_here() <= left:
                raise Interrupted(str(self), [self.rank], in_call=True)
            if self._newest is not None:
                self._newest[1].synchronize()
        except Exception as raised:
            raise_lost(raised, self._members)  # nobody waits at the end of the block
            error, failure, newest = raised, Failure.of(raised, self.rank), self._newest
            self._tell_hooks(failure)
            self._leave([part for part in self._parts() if not part._is_beside()])
            shared = self._shared_error(raised, newest)
            failure = shared.failure if isinstance(shared, RemoteError) else failure
        finally:
            self._depth -= 1
        failures = self._meet(depth, failure)
        if shared is not None:
            raise shared from (shared.__cause__ if shared in causes(error) else error)
        if (remote := RemoteError.first(failures, self)) is not None:
            raise remote from error

    def _meet(self, depth: int, failure: Failure | None) -> list[Failure | None]:
        """Wait for every rank at the end of a block, `depth` blocks deep; returns the ranks' failures.

        A rank that has failed in an outer block meets the others at the end of their inner ones first, once for each. Those
        raise its failure there, and so come to the end of the outer one.
        Raises: SharedError, if others have failed with it in a call of the block that this rank does not make.
        """
        shared = None
        while True:
            try:
                has_left = bool(_left) and not _left_here().isdisjoint((*self._parts(), self))
                ends = self._exchange_ends(_End(depth, failure, has_left))
            except SharedError as error:  # it takes the others to their ends of the block
                shared = shared or error
                continue
            if any(end.failure is not None or end.has_left for end in ends):
                self._rejoin_parts()
            outermost = min(end.depth for end in ends)
            if outermost < depth or all(end.depth == depth for end in ends):
                break
            self._tell_hooks(failure)
        failures = [end.failure for end in ends]
        if shared is not None and failure is None and any(failures):
            raise shared
        return failures

    def _exchange_ends(self, own: _End) -> list[_End]:
        # Cost: a plain tuple is pickled in a third of the time.
        try:
            with self.watched("agree", own.failure):
                return [_End._make(end) for end in self.backend.exchange(tuple(own))]
        except Interrupted as error:
            if not error.in_call:  # a rank has left the block of an agree() of a larger communicator
                raise
        with self.watched("rejoin"):
            return [_End._make(end) for end in self.backend.exchange(tuple(own))]

    def align(self, numbers: Iterable[int]) -> None:
        """Continue from the highest of the ranks' call numbers: a rank that failed has made fewer calls."""
        self.check_open("align")
        self._number = max(numbers)

    @contextmanager
    def watched(self, name: str, *args: object) -> Iterator[None]:
        """Run the hooks around the `with` block, in which the caller waits for the other ranks. name: one of `BLOCKING`.

        It takes the next number, as a collective does, unless only some ranks call it.
        """
        self.check_open(name)
        check_lost()
        calls = CallList((CollectiveCall(self, self._number, name, None, None, args, INLINE),)).describe()
        thread = get_ident()
        if self._thread:
            self._raise_in_use(name)
        self._thread = thread  # Python changes threads only in calls and loops: not since the line before
        self._caller = now.thread
        try:
            self._number += name not in OF_SOME_RANKS
            self._begin(calls)
            yield
        except Exception as error:
            raise_lost(error, self._members)
            raise
        finally:
            self._thread = 0
            for after in self._after:
                after(calls)

    def _raise_in_use(self, name: str) -> NoReturn:
        check_lost()
        if self._is_aborted:
            Flag().wait()  # the process ends
        names = {thread.ident: thread.name for thread in enumerate_threads()}
        raise RuntimeError(
            f"{name} on {self}: thread '{current_thread().name}' calls it while thread '{names.get(self._thread, '?')}' is in "
            "a call: a communicator is for one thread at a time, in the same order on every rank; give each thread its own, "
            "made by split()"
        )

    def _begin(self, calls: CallList) -> None:
        try:
            for before in self._before:
                before(calls)
        except BaseException as error:
            self._cut_short(error, calls)
            raise

    def leave(self) -> None:
        """Wait for every rank to reach the end of its program. Collective, but never compared.

        If a rank ends while others wait for it in a collective, the watchdog reports it: it knows where that rank ended.
        """
        with self.watched("finalize"):
            self.backend.exchange(None)

    def close(self) -> None:
        """Free what the communicator holds. Collective; idempotent; calls after it raise RuntimeError."""
        if not self.is_closed:
            self._drain()
            with self.watched("close"):
                self.backend.close()
            self.is_closed = True
            del _open[self]
            _left.discard(self)

    def async_error(self) -> str | None:
        """Say what has made calls fail on the GPU; None if nothing has, if it is not known, or after close(). Never blocks."""
        return None if self.is_closed else self.backend.async_error()

    def _abort(self) -> None:
        """End this rank's calls that are under way on the GPU, unless a thread is in a call: for a job that ends.

        From any thread. Whoever makes a call of this communicator afterwards waits until the process ends.
        """
        if self.is_async and not self._thread:
            self._thread, self._is_aborted = get_ident(), True
            self.backend.abort()

    def check_open(self, name: str) -> None:
        """Raise RuntimeError after close(). name: of the call, for the message."""
        if self.is_closed:
            raise RuntimeError(f"{name} on {self}: the communicator {self._ended}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}', rank {self.rank} of {self.size}, {self.device})"

    # Whoever waits for a rank that has left the block of agree() through an exception has to leave it as well, whatever
    # communicator it waits in. A rank that leaves therefore reaches the next comparison of each communicator that has no other
    # ranks than this one, which interrupts those that wait there, or come there later: none of them can complete, since this
    # rank takes part in no more calls. At the end of agree() all have left, and so have compared equally often.

    def _parts(self) -> list[ControlPlane]:
        """The other communicators that have only ranks of this one, in the order in which every rank has made them."""
        ranks = set(self.ranks)
        return [comm for comm in list(_open) if comm is not self and comm.size > 1 and ranks.issuperset(comm.ranks)]

    def _is_beside(self) -> bool:
        """Whether its calls are those of another thread of the program, which is in no block of this one.

        Autograd's threads, which Python has not started, make the calls of a block.
        """
        caller = self._caller
        return caller is not current_thread() and caller.is_alive() and not isinstance(caller, _DummyThread)

    def _parts_to_rejoin(self) -> list[ControlPlane]:
        """Those that are not beside on each of their ranks, or that a rank has left. Collective."""
        keyed = dict[tuple[object, ...], ControlPlane]()
        for part in self._parts():
            alike = sum(key[:2] == (part.name, tuple(part.ranks)) for key in keyed)
            keyed[part.name, tuple(part.ranks), alike] = part
        beside = [key for key, part in keyed.items() if part._is_beside() and not part._is_left]
        with self.watched("rejoin"):
            everyone = dict(zip(self.ranks, self.backend.exchange(beside), strict=True))
        return [part for key, part in keyed.items() if not all(key in everyone[rank] for rank in part.ranks)]

    def _leave(self, parts: Sequence[ControlPlane]) -> None:
        """Leave each of these parts as soon as this rank's threads make no more calls there.

        Hazard: these calls may wait for ranks that wait for this one in other parts, or in sends and receives.
        """
        staying = [*parts, self]
        for part in staying:
            part.backend.stop_transfers()
        while staying:
            for part in [part for part in staying if part._is_drained() and (part is self or not part._thread)]:
                part._drain()
                if part is not self:  # in agree(), the ranks compare once more
                    part.backend.leave()
                    part._is_left = True
                staying.remove(part)
            if staying:
                sleep(_POLL_S)

    def _cut_short(self, error: BaseException, calls: CallList | None = None) -> None:
        """An exception has taken this rank out of a call. It leaves, unless other ranks are the cause.

        Hazard: otherwise its next call would meet the one that the others are in, and they would take what it sends for that.
        Raises: RankLost, if a loss is the cause.
        """
        raise_lost(error, self._members)
        if isinstance(error, (Interrupted, SharedError)):
            sleep(_SIGNAL_S)
        elif self.size > 1:
            self.backend.stop_transfers()
            self.backend.leave(in_call=True)
            _left.add(self)
            if calls is not None:
                for hook in self.hooks:
                    hook.cut_short(calls)

    def _rejoin_parts(self) -> None:
        """Let the parts' ranks make their next call together. Collective: no rank is in the block any more."""
        parts = self._parts_to_rejoin()
        self._leave(parts)
        for part in (*parts, self):
            with part.watched("rejoin"):
                part.backend.rejoin()
                numbers = part.backend.exchange(part._number)
            part.align(numbers)
            part._is_left = False
            _left.discard(part)
        self._tell_hooks(None)

    def _set_hooks(self, hooks: Sequence[Hook]) -> None:
        # New lists: a stream's thread may be going through the old ones.
        self.hooks = tuple(hooks)
        self._called = [hook.called for hook in hooks if type(hook).called is not Hook.called]
        self._before = [hook.before for hook in hooks if type(hook).before is not Hook.before]
        self._after = [hook.after for hook in hooks if type(hook).after is not Hook.after]

    def _tell_hooks(self, failure: Failure | None) -> None:
        for hook in self.hooks:
            hook.failed(failure)

    def _shared_error(self, error: Exception, newest: tuple[Stream, Event] | None) -> SharedError | None:
        """The error that every rank raises: one that led to `error`, or that of the thread of this rank's newest call."""
        found = list(causes(error))
        if newest is not None and not self.is_async:
            try:
                newest[1].synchronize()
            except RuntimeError as failure:
                found += causes(failure)
        return next((each for each in found if isinstance(each, SharedError) and each.comm is self), None)

    def _is_drained(self) -> bool:
        """True if `_drain` does not wait."""
        return self._newest is None or self.is_async or self._newest[1].query()

    def _drain(self) -> None:
        """Wait until this rank's thread has run, or given up, the calls that were made. On a GPU they may never end."""
        if self._newest is not None and not self.is_async:
            with suppress(RuntimeError):  # the thread has failed: what it has not run does not run any more
                self._newest[1].synchronize()
            self._newest, self._newest_collective = None, PAST

    def _control_call(self, name: str, *args: object) -> AbstractContextManager[None]:
        """Run `watched` once the collectives that were called before are done."""
        if not self.is_async:
            # Hazard: without this, the stream's thread and the caller would compare at once, each with the other's fingerprint.
            # Sends and receives are not waited for: the other rank may make the matching call after this one.
            self._newest_collective.synchronize()
        return self.watched(name, *args)


def _left_here() -> set[ControlPlane]:
    """The communicators, without those of other threads, in a call of which an exception has cut this rank short."""
    return {comm for comm in list(_left) if not comm._is_beside()}


hooks_of_all: list[Hook] = []  # those of `hooked`, for a world that is made in its block, since ranks are lost


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """In the block, let `hook` observe the communicators that are open, those split from them, and those of later worlds.

    It comes before their other hooks: a comparison of the calls waits for the other ranks, and that is part of a call's time.
    """
    hooks_of_all.insert(0, hook)
    for comm in _open:
        comm._set_hooks((hook, *comm.hooks))
    try:
        yield
    finally:
        hooks_of_all.remove(hook)
        for comm in _open:
            comm._set_hooks([each for each in comm.hooks if each is not hook])


@contextmanager
def apart() -> Iterator[None]:
    """`agree()` of a communicator that was made before the `with` block, or in it, sees no communicator of the other side.

    Those made in the block are dropped at its end.
    """
    before = dict(_open)
    _open.clear()
    try:
        yield
    finally:
        _open.clear()
        _open.update(before)


def abandon_all(why: str) -> None:
    """Make no more calls on the communicators that are open, whose ranks cannot close them. why: what refused calls say."""
    for comm in _open:
        comm.is_closed, comm._ended = True, why
        comm._newest, comm._newest_collective = None, PAST
    _open.clear()
    _left.clear()


def abort_all() -> None:
    """End what runs on the GPU, for a job that ends: all communicators that are open, as far as they can be aborted."""
    for comm in list(_open):
        with suppress(Exception):  # where one cannot be aborted, the others still are
            comm._abort()


def remove_hooks() -> None:
    """Let the communicators that are open make their last calls without hooks: nothing observes them any more."""
    for comm in _open:
        comm._set_hooks(())

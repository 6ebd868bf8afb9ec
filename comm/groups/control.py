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
from typing import NoReturn, Self, TypeVar

import torch

from ..core import members
from ..core.backend import Backend, NodeMemory
from ..core.calls import CallList, CollectiveCall, Hook, Interrupted, SharedError, now
from ..core.fingerprint import OF_SOME_RANKS, fingerprint_of
from ..core.members import check_lost, raise_lost
from ..core.pool import Pool
from ..core.streams import INLINE, PAST, Event, Stream

T = TypeVar("T")

_SIGNAL_S = 0.05  # for a signal to all ranks, such as Ctrl-C, to come here as well: its exception then comes first


class Register:
    """This process's communicators that are not closed, in the order they were made, whoever has made them, and how they are.

    cut_short: an exception has cut this rank short in a call of these, until it rejoins.
    withdrawn: a block of `agree()` that has failed has withdrawn this rank from these, until it rejoins.
    hooks: observe all of them, and those of later worlds, see `hooked`.
    """

    def __init__(self) -> None:
        self.open: dict[ControlPlane, None] = {}
        self.cut_short: set[ControlPlane] = set()
        self.withdrawn: set[ControlPlane] = set()
        self.hooks: list[Hook] = []

    def remove(self, comm: ControlPlane) -> None:
        """Forget one that is closed."""
        del self.open[comm]
        self.rejoin(comm)

    def rejoin(self, comm: ControlPlane) -> None:
        """This rank makes calls again."""
        self.cut_short.discard(comm)
        self.withdrawn.discard(comm)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """`agree()` of a communicator that was made before the `with` block, or in it, sees no communicator of the other side.

        Those made in the block are dropped at its end.
        """
        before, self.open = self.open, {}
        try:
            yield
        finally:
            self.open = before

    def abandon(self, why: str) -> None:
        """Make no more calls on any of them: their ranks cannot close them. why: what refused calls say."""
        for comm in self.open:
            comm.is_closed, comm._ended = True, why
            comm._newest, comm._newest_collective = None, PAST
        self.open, self.cut_short, self.withdrawn = {}, set(), set()

    def abort(self) -> None:
        """End what runs on the GPU, for a job that ends: all of them, as far as they can be aborted."""
        for comm in list(self.open):
            with suppress(Exception):  # where one cannot be aborted, the others still are
                comm._abort()

    def remove_hooks(self) -> None:
        """Let them make their last calls without hooks: nothing observes them any more."""
        for comm in self.open:
            comm._set_hooks(())


register = Register()


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
        self._thread = 0  # the thread that makes a call now; 0 for none
        self._caller = now.thread  # that has made the newest call
        self._is_aborted = False
        self._members = members.current
        self._ended = "is closed"  # why calls are refused, if they are
        self._newest: tuple[Stream, Event] | None = None  # the newest call's
        self._newest_collective: Event = PAST
        self._pool: Pool | None = None
        self._needs_pool = backend.has_pool
        register.open[self] = None

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
            register.remove(self)

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

    def _is_beside(self) -> bool:
        """Whether its calls are those of another thread of the program, which is in no block of this one.

        Autograd's threads, which Python has not started, make the calls of a block.
        """
        caller = self._caller
        return caller is not current_thread() and caller.is_alive() and not isinstance(caller, _DummyThread)

    def _cut_short(self, error: BaseException, calls: CallList | None = None) -> None:
        """An exception has taken this rank out of a call. It withdraws from it, unless other ranks are the cause.

        Hazard: otherwise its next call would meet the one that the others are in, and they would take what it sends for that.
        Raises: RankLost, if a loss is the cause.
        """
        raise_lost(error, self._members)
        if isinstance(error, (Interrupted, SharedError)):
            sleep(_SIGNAL_S)
        elif self.size > 1:
            self.backend.stop_transfers()
            self.backend.stop_comparisons(in_call=True)
            register.cut_short.add(self)
            if calls is not None:
                for hook in self.hooks:
                    hook.cut_short(calls)

    def _set_hooks(self, hooks: Sequence[Hook]) -> None:
        # New lists: a stream's thread may be going through the old ones.
        self.hooks = tuple(hooks)
        self._called = [hook.called for hook in hooks if type(hook).called is not Hook.called]
        self._before = [hook.before for hook in hooks if type(hook).before is not Hook.before]
        self._after = [hook.after for hook in hooks if type(hook).after is not Hook.after]

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


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """In the block, let `hook` observe the communicators that are open, those split from them, and those of later worlds.

    It comes before their other hooks: a comparison of the calls waits for the other ranks, and that is part of a call's time.
    """
    register.hooks.insert(0, hook)
    for comm in register.open:
        comm._set_hooks((hook, *comm.hooks))
    try:
        yield
    finally:
        register.hooks.remove(hook)
        for comm in register.open:
            comm._set_hooks([each for each in comm.hooks if each is not hook])

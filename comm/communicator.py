"""The communicator's contract: every collective, its meaning, and its checks, once for all backends.

Conventions: the out tensor comes first, then the in tensor, then `op`, `root` or counts; `stream` is keyword-only and
required, so nothing lands on a default stream by accident. A call is enqueued on `stream` and returns a `Work`; tensors must
stay alive and untouched until it is done. Every rank of the communicator makes the same calls in the same order; calls on
several streams run one after the other, in the order they were made.

Legend: N ranks, this one is r; sizes are in elements; out and in are contiguous, of one dtype, on the communicator's device.
Any dtype can be moved, the fp8 types included; float64, float32, float16, bfloat16, the integers and bool (SUM and MAX: "or";
PRODUCT and MIN: "and") can be reduced, on NCCL all but the integers of 16 bits.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NoReturn, TypeVar

import torch

from .calls import (
    FLOATS,
    REDUCIBLE,
    CollectiveCall,
    Counts,
    Failure,
    Hook,
    Op,
    PreMulSum,
    ReduceOp,
    RemoteError,
    SharedError,
    Work,
)
from .pool import Pool
from .streams import INLINE, PAST, Event, Stream

T = TypeVar("T")


class Communicator(ABC):
    """A group of N ranks that can reach each other, all of which make the same calls in the same order.

    `hooks` watch the calls of this communicator and of those split from it afterwards.
    """

    ranks: tuple[int, ...]  # the members' ranks in the world

    def __init__(self, rank: int, size: int, device: torch.device, name: str, hooks: Sequence[Hook] = ()) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.is_async = device.type == "cuda"  # whether a call that has been enqueued may be under way yet
        self.name = name
        self.hooks = tuple(hooks)
        self._called = [hook.called for hook in hooks if type(hook).called is not Hook.called]
        self._before = [hook.before for hook in hooks if type(hook).before is not Hook.before]
        self._after = [hook.after for hook in hooks if type(hook).after is not Hook.after]
        self._closed = False
        self._number = 0
        self._newest: tuple[Stream, Event] | None = None  # call
        self._newest_collective: Event = PAST
        self._group: _Group | None = None

    # ------------------------------------------------------------------ collectives

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream) -> Work:
        """Every rank's `inp`, one after the other in rank order, on every rank.

        inp: n elements.   out: N * n elements.   In place when `inp` is `out[r * n : (r + 1) * n]`.
        Cost: (N - 1) * n elements received per rank.
        Raises: ValueError on sizes, dtypes, layout or device; RuntimeError after close().
        """
        self._check("all_gather", out, inp)
        self._expect("all_gather", out, inp, self.size * inp.numel(), "out.numel() == N * inp.numel()")
        return self._call(stream, "all_gather", self._all_gather, out, inp)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: Op, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; rank r keeps block r.

        inp: N * n elements.   out: n elements.   In place when `out` is `inp[r * n : (r + 1) * n]`.
        Cost: (N - 1) * n elements received per rank. The MPI backend adds in rank order, so it is bitwise reproducible.
        Raises: as all_gather; also ValueError for an `op` that the dtype has not (AVG of integers).
        """
        self._check("reduce_scatter", out, inp, op)
        self._expect("reduce_scatter", inp, out, self.size * out.numel(), "inp.numel() == N * out.numel()")
        return self._call(stream, "reduce_scatter", self._reduce_scatter, out, inp, op)

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor, op: Op, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; every rank keeps all of it.

        inp, out: n elements each.   In place when `out` is `inp`.
        Cost: 2 * (N - 1) / N * n elements received per rank (small ones: (N - 1) * n).
        Raises: as reduce_scatter.
        """
        self._check("all_reduce", out, inp, op)
        self._expect("all_reduce", out, inp, inp.numel(), "out.numel() == inp.numel()")
        return self._call(stream, "all_reduce", self._all_reduce, out, inp, op)

    def reduce(self, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; rank `root` keeps all of it.

        inp, out: n elements each (`out` on the root only; elsewhere it is not touched and may be None).
        In place when `out` is `inp`.   Cost: n elements received on the root and sent by every other rank, about twice.
        Raises: as reduce_scatter; also ValueError for a root that is no rank.
        """
        out = self._only_on(root, "reduce", "out", out)
        self._check("reduce", inp if out is None else out, inp, op)
        self._expect("reduce", out, inp, inp.numel(), "out.numel() == inp.numel()")
        return self._call(stream, "reduce", self._reduce, out, inp, op, root)

    def broadcast(self, out: torch.Tensor, inp: torch.Tensor, root: int, *, stream: Stream) -> Work:
        """Rank `root`'s `inp`, in `out` on every rank.

        inp, out: n elements each (`inp` is read on the root only).   In place when `out` is `inp`.
        Cost: n elements received per rank.
        Raises: as all_gather; also ValueError for a root that is no rank.
        """
        self._check_rank("broadcast", "root", root)
        self._check("broadcast", out, inp)
        self._expect("broadcast", out, inp, inp.numel(), "out.numel() == inp.numel()")
        return self._call(stream, "broadcast", self._broadcast, out, inp, root)

    def gather(self, out: torch.Tensor | None, inp: torch.Tensor, root: int, *, stream: Stream) -> Work:
        """Every rank's `inp`, one after the other in rank order, on rank `root`.

        inp: n elements.   out: N * n elements on the root; elsewhere it is not touched and may be None.
        In place when, on the root, `inp` is `out[r * n : (r + 1) * n]`.   Cost: (N - 1) * n elements received on the root.
        Raises: as broadcast.
        """
        out = self._only_on(root, "gather", "out", out)
        self._check("gather", inp if out is None else out, inp)
        self._expect("gather", out, inp, self.size * inp.numel(), "out.numel() == N * inp.numel()")
        return self._call(stream, "gather", self._gather, out, inp, root)

    def scatter(self, out: torch.Tensor, inp: torch.Tensor | None, root: int, *, stream: Stream) -> Work:
        """Block r of rank `root`'s `inp`, on rank r.

        out: n elements.   inp: N * n elements on the root; elsewhere it is not read and may be None.
        In place when, on the root, `out` is `inp[r * n : (r + 1) * n]`.   Cost: (N - 1) * n elements sent by the root.
        Raises: as broadcast.
        """
        inp = self._only_on(root, "scatter", "inp", inp)
        self._check("scatter", out, out if inp is None else inp)
        self._expect("scatter", inp, out, self.size * out.numel(), "inp.numel() == N * out.numel()")
        return self._call(stream, "scatter", self._scatter, out, inp, root)

    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
        *,
        stream: Stream,
    ) -> Work:
        """Block p of `inp` goes to rank p; block p of `out` came from rank p.

        inp: sum(in_counts) elements.   out: sum(out_counts) elements.   Counts: one for each rank, `in_counts[p]` here being
        `out_counts[r]` on rank p; given on all ranks or on none: without them all blocks are of one size.
        In place when `out` is `inp`, without counts.
        Cost: the elements of the other ranks' blocks received per rank; in place, a copy of `inp` as well.
        Raises: as all_gather; also ValueError for counts that do not add up.
        """
        self._check("all_to_all", out, inp)
        if out_counts is None and in_counts is None:
            self._expect("all_to_all", out, inp, inp.numel() // self.size * self.size, "out.numel() == inp.numel() == N * n")
            self._expect("all_to_all", inp, out, inp.numel() // self.size * self.size, "out.numel() == inp.numel() == N * n")
            return self._call(stream, "all_to_all", self._all_to_all, out, inp, None)
        counts = Counts(self._counts("out", out, out_counts), self._counts("in", inp, in_counts))
        return self._call(stream, "all_to_all", self._all_to_all, out, inp, counts)

    def send(self, inp: torch.Tensor, to: int, *, stream: Stream) -> Work:
        """Send `inp` to rank `to`, which receives it. What is to go both ways at once belongs in a `group()`.

        inp: n elements.   Cost: n elements sent.   Raises: as broadcast.
        """
        self._check_peer("send", "to", to)
        self._check("send", inp, inp)
        return self._call(stream, "send", self._send, None, inp, to)

    def recv(self, out: torch.Tensor, source: int, *, stream: Stream) -> Work:
        """Receive `out` from rank `source`, which sends it; messages between two ranks keep their order.

        out: n elements, as many as are sent.   Cost: n elements received.   Raises: as broadcast.
        """
        self._check_peer("recv", "source", source)
        self._check("recv", out, out)
        return self._call(stream, "recv", self._recv, out, None, source)

    def barrier(self, *, stream: Stream) -> Work:
        """Done once every rank's stream has come to its barrier. Synchronize the returned Work to block the caller."""
        self._check_open("barrier")
        return self._call(stream, "barrier", self._barrier, None, None)

    @contextmanager
    def group(self) -> Iterator[Work]:
        """Make the calls of the `with` block one: they are enqueued together at its end and share one `Work`.

        Sends and receives of a group go at once, in any order; its collectives must not depend on each other. One stream for
        all. If the block raises, none of its calls is made.
        """
        if self._group is not None:
            raise RuntimeError(f"group on {self}: a group is open already; end it first")
        group = self._group = _Group(Work(_Unlaunched(self)))
        try:
            yield group.work
        finally:
            self._group = None
        if group.calls:
            self._run(group.calls, group.work)

    # ------------------------------------------------------------------ control plane (host, blocking)
    # These calls stand in the order of the collectives: each begins when the collectives called before it are done (on the
    # host; on a GPU, have been enqueued), takes a number as they do, and is compared with the other ranks' calls.

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks the caller; for set-up, not for steps.

        Raises: RuntimeError after close(), or if a collective called before it has failed in its stream's thread;
        MismatchError, where calls are compared, if another rank makes another call. So do `split`, `empty` and `pool`.
        """
        with self._control_call("exchange"):
            return self._exchange(value)

    @abstractmethod
    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        """None if `fingerprint`, of 63 bits, is the same on every rank; else what each `describe`s (picklable), in rank order.

        Blocks until every rank has come; to be called in the order of the collectives.
        """

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        """One new communicator for each colour, its ranks ordered by (key, old rank); None for a rank without a colour.

        Collective over the old communicator, which stays as it is. The new one is the caller's to close.
        """
        with self._control_call("split"):
            return self._split(color, key, name)

    def empty(self, numel: int, dtype: torch.dtype, *, symmetric: bool = False) -> torch.Tensor:
        """A (numel,) buffer that this communicator's collectives reach without copying it. Collective; alike on every rank.

        It lives until the communicator is closed: make it once, not per step.
        symmetric: a promise that a call which is given a part of it is given the same part on every rank, own blocks of calls
        in place aside. NCCL may then let the GPUs of a node read and write each other's (NCCL_WIN_COLL_SYMMETRIC).
        Hazard: nobody checks, and a promise that is broken makes numbers wrong.
        """
        with self._control_call("empty", dtype, numel):
            return self._empty(numel, dtype, symmetric)

    def pool(self) -> Pool | None:
        """Where to take buffers that come and go, to be reached as those of `empty` are; None where plain memory is as good.

        Collective; the same one every time.
        """
        return None

    @contextmanager
    def agree(self) -> Iterator[None]:
        """An exception on any rank in the `with` block (or the decorated function) becomes a RemoteError on every rank.

        Blocks at the end of the block until every rank has come there. Ranks that wait in a collective of the block, which the
        failed rank will never make, are told as well, by the cross-rank check of calls where that is on (`comm.monitor.check`).
        """
        self._check_open("agree")
        told, cause = None, None
        try:
            try:
                yield
            finally:
                if self._newest is not None:
                    self._newest[1].synchronize()
        except Exception as error:
            shared = error.__cause__ if isinstance(error.__cause__, SharedError) else error
            if isinstance(shared, SharedError) and shared.comm is self:  # every rank has been told
                raise shared from None
            told, cause = Failure(self.rank, f"{type(error).__name__}: {error}", traceback.format_exc()), error
        with self.watched("agree", told):
            answers = self._exchange((told, self._number))
        self.align(number for _, number in answers)
        for failure, _ in answers:
            if failure is not None:
                raise RemoteError(failure, self) from cause

    def align(self, numbers: Iterable[int]) -> None:
        """Go on from the highest of the ranks' call numbers: one that failed has made fewer calls."""
        self._number = max(numbers)

    def _control_call(self, name: str, *how: object) -> AbstractContextManager[None]:
        """`watched`, when the collectives called before are done."""
        self._check_open(name)
        if not self.is_async:
            # Hazard: without this, the stream's thread and the caller would compare at once, each with the other's fingerprint.
            # Sends and receives are not waited for: what they are for may come after this call on the other rank.
            self._newest_collective.synchronize()
        return self.watched(name, *how)

    @contextmanager
    def watched(self, name: str, *how: object) -> Iterator[None]:
        """Let the hooks watch the `with` block, in which the caller waits for the other ranks: one of `BLOCKING`.

        It has the next number, as a collective does.
        """
        calls = [CollectiveCall(self, self._number, name, self._barrier, None, None, how, INLINE)]
        self._number += 1
        for tell in self._before:
            tell(calls)
        try:
            yield
        finally:
            for tell in self._after:
                tell(calls)

    def leave(self) -> None:
        """Wait for every rank to come to the end of its program. Collective, but never compared.

        A rank that ends while others wait for it in a collective is for the watchdog to report, which knows where it ended.
        """
        with self.watched("finalize"):
            self._exchange(None)

    def close(self) -> None:
        """Give back what the communicator holds. Collective; idempotent; calls after it raise RuntimeError."""
        if not self._closed:
            self._closed = True
            self._close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}('{self.name}', rank {self.rank} of {self.size}, {self.device})"

    # ------------------------------------------------------------------ calling

    def _call(
        self,
        stream: Stream,
        name: str,
        launch: Callable[..., None],
        out: torch.Tensor | None,
        inp: torch.Tensor | None,
        *how: object,
    ) -> Work:
        if stream.device != self.device:
            raise ValueError(
                f"{name} on {self}: expected a stream of {self.device}, found a {type(stream).__name__} on {stream.device}; "
                f"use new_stream(torch.device('{self.device}'), ...)"
            )
        # No gradient goes through a collective.
        out = out.detach() if out is not None and out.requires_grad else out
        inp = inp.detach() if inp is not None and inp.requires_grad else inp
        call = CollectiveCall(self, self._number, name, launch, out, inp, how, stream)
        self._number += name not in ("send", "recv")  # those are not made by all ranks alike
        if self._group is not None:
            return self._group.add(call)
        work = Work(PAST)
        self._run([call], work)
        return work

    def _run(self, calls: Sequence[CollectiveCall], work: Work) -> None:
        stream = calls[0].stream
        if self._newest is not None and self._newest[0] != stream:
            stream.wait(self._newest[1])
        for tell in self._called:
            tell(calls, work)
        if self.is_async:
            self._perform(calls)  # the backend's calls take the stream
        else:
            stream.submit(partial(self._perform, calls))
        work.event = stream.record()
        self._newest = stream, work.event
        if self._number > calls[0].number:  # it was not sends and receives only: those take no number
            self._newest_collective = work.event

    def _perform(self, calls: Sequence[CollectiveCall]) -> None:
        for tell in self._before:
            tell(calls)
        self._enqueue(calls[0].stream, calls)
        for tell in self._after:
            tell(calls)

    # ------------------------------------------------------------------ checks

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise RuntimeError(f"{name} on {self}: the communicator is closed")

    def _check(self, name: str, out: torch.Tensor, inp: torch.Tensor, op: Op | None = None) -> None:
        # Cost: 1.5 us for a good call; what is wrong with a bad one is found out afterwards.
        same = out.dtype == inp.dtype and out.device == inp.device == self.device
        if self._closed or not same or not out.is_contiguous() or not inp.is_contiguous():
            self._refuse(name, out, inp)
        if op is not None and (op is ReduceOp.AVG or inp.dtype not in FLOATS):
            self._check_reducible(name, inp.dtype, op)

    def _refuse(self, name: str, out: torch.Tensor, inp: torch.Tensor) -> NoReturn:
        self._check_open(name)
        for role, tensor in (("out", out), ("inp", inp)):
            if tensor.device != self.device:
                raise ValueError(f"{name} on {self}: {role} is on {tensor.device}; move it to {self.device}")
            if not tensor.is_contiguous():
                layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                raise ValueError(f"{name} on {self}: {role} is not contiguous ({layout}); call .contiguous()")
        raise ValueError(f"{name} on {self}: out is {out.dtype}, inp is {inp.dtype}; expected one dtype")

    def _check_reducible(self, name: str, dtype: torch.dtype, op: Op) -> None:
        if dtype not in REDUCIBLE:
            raise ValueError(f"{name} on {self}: {dtype} cannot be reduced; expected one of {_names(REDUCIBLE)}")
        if dtype not in FLOATS and (op is ReduceOp.AVG or isinstance(op, PreMulSum)):
            raise ValueError(f"{name} on {self}: {op} of {dtype} is not defined; use SUM, or one of {_names(FLOATS)}")

    def _expect(self, name: str, tensor: torch.Tensor | None, other: torch.Tensor, numel: int, formula: str) -> None:
        if tensor is not None and tensor.numel() != numel:
            sizes = f"{tensor.numel()} against {other.numel()} elements with N = {self.size}"
            raise ValueError(f"{name} on {self}: expected {formula}, found {sizes}")

    def _check_rank(self, name: str, role: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name} on {self}: {role} {rank} is no rank; expected 0 <= {role} < {self.size}")

    def _check_peer(self, name: str, role: str, rank: int) -> None:
        self._check_rank(name, role, rank)
        if rank == self.rank and self._group is None:
            raise ValueError(f"{name} on {self}: {role} is this rank itself, which waits for ever outside a group()")

    def _only_on(self, root: int, name: str, role: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """`tensor` on the root, which must have one; None elsewhere."""
        self._check_rank(name, "root", root)
        if self.rank == root and tensor is None:
            raise ValueError(f"{name} on {self}: this rank is the root, but {role} is None; give it a tensor")
        return tensor if self.rank == root else None

    def _counts(self, role: str, tensor: torch.Tensor, counts: Sequence[int] | None) -> tuple[int, ...]:
        counts = () if counts is None else counts
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != tensor.numel():
            raise ValueError(
                f"all_to_all on {self}: expected {self.size} {role}_counts, none below 0, that add up to the "
                f"{tensor.numel()} elements there; found {list(counts)}, which add up to {sum(counts)}"
            )
        return tuple(counts)

    # ------------------------------------------------------------------ what a backend provides
    # A collective runs in the order of `stream`, which NCCL is to be given; a control call on the caller's thread. The
    # arguments have been checked. Tensors that a rank has no use for are None.

    @abstractmethod
    def _exchange(self, value: T) -> list[T]: ...

    @abstractmethod
    def _split(self, color: int | None, key: int, name: str) -> Communicator | None: ...

    @abstractmethod
    def _empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor: ...

    @abstractmethod
    def _enqueue(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        """Launch one call, or those of a group."""

    @abstractmethod
    def _all_gather(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None: ...

    @abstractmethod
    def _all_reduce(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None: ...

    @abstractmethod
    def _reduce(self, stream: Stream, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int) -> None: ...

    @abstractmethod
    def _broadcast(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, root: int) -> None: ...

    @abstractmethod
    def _gather(self, stream: Stream, out: torch.Tensor | None, inp: torch.Tensor, root: int) -> None: ...

    @abstractmethod
    def _scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor | None, root: int) -> None: ...

    @abstractmethod
    def _all_to_all(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, counts: Counts | None) -> None: ...

    @abstractmethod
    def _send(self, stream: Stream, out: None, inp: torch.Tensor, to: int) -> None: ...

    @abstractmethod
    def _recv(self, stream: Stream, out: torch.Tensor, inp: None, source: int) -> None: ...

    @abstractmethod
    def _barrier(self, stream: Stream, out: None, inp: None) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class _Unlaunched(Event):
    """Where a group's event will be, once the group has ended."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError(f"waiting for a call of a group on {self._comm} that is still open: leave its `with` block first")


class _Group:
    """The calls of an open group."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.calls: list[CollectiveCall] = []

    def add(self, call: CollectiveCall) -> Work:
        if self.calls and self.calls[0].stream != call.stream:
            raise ValueError(f"{call.name} on {call.comm}: a group's calls share one stream; this one has another")
        self.calls.append(call)
        return self.work


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))

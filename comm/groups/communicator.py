"""The communicator: every collective, its meaning and its checks, the same for all backends.

Conventions: the out tensor comes first, then the in tensor, then `op`, `root` or counts; `stream` is keyword-only and
required, so nothing lands on a default stream by accident. A call is enqueued on `stream` and returns a `Work`; tensors must
stay alive and untouched until it is done. Every rank of the communicator makes the same calls in the same order; calls on
several streams run one after the other, in the order they were made.

Legend: N ranks, this one is r; sizes are in elements; out and in are contiguous, of one dtype, on the communicator's device.
Any dtype can be moved, the fp8 types included; float64, float32, float16, bfloat16, the integers and bool (SUM and MAX: "or";
PRODUCT and MIN: "and") can be reduced, on NCCL all but the integers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

import torch

from ..core.backend import Backend
from ..core.calls import FLOATS, CallList, CollectiveCall, Counts, Hook, Op, ReduceOp, Work, now
from ..core.members import check_lost
from ..core.streams import PAST, Event, Stream
from .agreement import Agreement
from .checks import (
    check_linear,
    check_peer,
    check_rank,
    check_reducible,
    checked_counts,
    plain,
    raise_bad_size,
    raise_bad_tensors,
    tensor_of_root,
)
from .control import ControlPlane

if TYPE_CHECKING:
    from contextlib import _GeneratorContextManager  # says that it decorates as well


class Communicator(ControlPlane):
    """A group of N ranks that can reach each other, all of which make the same calls in the same order.

    rank, size: of this rank, and N.   ranks: the members' in the world, a range or a tuple.   device: that of the tensors.
    name: in messages, where control characters are escaped.
    hooks: observe the calls of this communicator and of those split from it afterwards.
    """

    def __init__(self, backend: Backend, hooks: Sequence[Hook] = ()) -> None:
        super().__init__(backend, hooks)
        self._launch = backend.launch
        self._group: _OpenGroup | None = None
        self._agreement = Agreement(self)

    # ------------------------------------------------------------------ collectives

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, *, stream: Stream) -> Work:
        """Every rank's `inp`, one after the other in rank order, on every rank.

        inp: n elements.   out: N * n elements.   In place when `inp` is `out[r * n : (r + 1) * n]`.
        Cost: (N - 1) * n elements received per rank.
        Raises: ValueError on sizes, dtypes, layout or device; RuntimeError after close().
        """
        self._check("all_gather", out, inp)
        self._check_size("all_gather", out, inp, self.size * inp.numel(), "out.numel() == N * inp.numel()")
        return self._call(stream, "all_gather", out, inp)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: Op, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; rank r keeps block r.

        inp: N * n elements.   out: n elements.   In place when `out` is `inp[r * n : (r + 1) * n]`.
        Cost: (N - 1) * n elements received per rank. The MPI backend adds in rank order, so it is bitwise reproducible.
        Complex numbers are reduced as pairs of real ones, by SUM, AVG and PreMulSum.
        Raises: as all_gather; also ValueError for an `op` that is not defined for the dtype (AVG of integers).
        """
        if inp.is_complex() and out.is_complex():
            check_linear(self, "reduce_scatter", inp.dtype, op)
            out, inp = torch.view_as_real(out), torch.view_as_real(inp.resolve_conj())
        self._check("reduce_scatter", out, inp, op)
        self._check_size("reduce_scatter", inp, out, self.size * out.numel(), "inp.numel() == N * out.numel()")
        return self._call(stream, "reduce_scatter", out, inp, op)

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor, op: Op, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; every rank keeps all of it.

        inp, out: n elements each.   In place when `out` is `inp`.
        Cost: 2 * (N - 1) / N * n elements received per rank (small ones: (N - 1) * n).
        Raises: as reduce_scatter.
        """
        if inp.is_complex() and out.is_complex():
            check_linear(self, "all_reduce", inp.dtype, op)
            out, inp = torch.view_as_real(out), torch.view_as_real(inp.resolve_conj())
        self._check("all_reduce", out, inp, op)
        self._check_size("all_reduce", out, inp, inp.numel(), "out.numel() == inp.numel()")
        return self._call(stream, "all_reduce", out, inp, op)

    def reduce(self, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int, *, stream: Stream) -> Work:
        """Reduce `inp` over all ranks; rank `root` keeps all of it.

        inp, out: n elements each (`out` on the root only; elsewhere it is not touched and may be None).
        In place when `out` is `inp`.   Cost: n elements received on the root and sent by every other rank, about twice.
        Raises: as reduce_scatter; also ValueError for a root that is not a rank.
        """
        out = tensor_of_root(self, root, "reduce", "out", out)
        if inp.is_complex():
            check_linear(self, "reduce", inp.dtype, op)
            out, inp = None if out is None else torch.view_as_real(out), torch.view_as_real(inp.resolve_conj())
        self._check("reduce", inp if out is None else out, inp, op)
        self._check_size("reduce", out, inp, inp.numel(), "out.numel() == inp.numel()")
        return self._call(stream, "reduce", out, inp, op, root)

    def broadcast(self, out: torch.Tensor, inp: torch.Tensor, root: int, *, stream: Stream) -> Work:
        """Rank `root`'s `inp`, in `out` on every rank.

        inp, out: n elements each (`inp` is read on the root only).   In place when `out` is `inp`.
        Cost: n elements received per rank.
        Raises: as all_gather; also ValueError for a root that is not a rank.
        """
        check_rank(self, "broadcast", "root", root)
        self._check("broadcast", out, inp)
        self._check_size("broadcast", out, inp, inp.numel(), "out.numel() == inp.numel()")
        return self._call(stream, "broadcast", out, inp, root)

    def gather(self, out: torch.Tensor | None, inp: torch.Tensor, root: int, *, stream: Stream) -> Work:
        """Every rank's `inp`, one after the other in rank order, on rank `root`.

        inp: n elements.   out: N * n elements on the root; elsewhere it is not touched and may be None.
        In place when, on the root, `inp` is `out[r * n : (r + 1) * n]`.   Cost: (N - 1) * n elements received on the root.
        Raises: as broadcast.
        """
        out = tensor_of_root(self, root, "gather", "out", out)
        self._check("gather", inp if out is None else out, inp)
        self._check_size("gather", out, inp, self.size * inp.numel(), "out.numel() == N * inp.numel()")
        return self._call(stream, "gather", out, inp, root)

    def scatter(self, out: torch.Tensor, inp: torch.Tensor | None, root: int, *, stream: Stream) -> Work:
        """Block r of rank `root`'s `inp`, on rank r.

        out: n elements.   inp: N * n elements on the root; elsewhere it is not read and may be None.
        In place when, on the root, `out` is `inp[r * n : (r + 1) * n]`.   Cost: (N - 1) * n elements sent by the root.
        Raises: as broadcast.
        """
        inp = tensor_of_root(self, root, "scatter", "inp", inp)
        self._check("scatter", out, out if inp is None else inp)
        self._check_size("scatter", inp, out, self.size * out.numel(), "inp.numel() == N * out.numel()")
        return self._call(stream, "scatter", out, inp, root)

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
        Raises: as all_gather; also ValueError for counts that do not add up, and MismatchError, where calls are compared, for
        counts of two ranks that do not match.
        """
        self._check("all_to_all", out, inp)
        if out_counts is None and in_counts is None:
            whole, formula = inp.numel() // self.size * self.size, "out.numel() == inp.numel() == N * n"
            self._check_size("all_to_all", out, inp, whole, formula)
            self._check_size("all_to_all", inp, out, whole, formula)
            return self._call(stream, "all_to_all", out, inp, None)
        counts = Counts(checked_counts(self, "out", out, out_counts), checked_counts(self, "in", inp, in_counts))
        return self._call(stream, "all_to_all", out, inp, counts)

    def send(self, inp: torch.Tensor, to: int, *, stream: Stream) -> Work:
        """Send `inp` to rank `to`, which receives it. Two ranks that send to each other need a `group()`.

        inp: n elements.   Cost: n elements sent.   Raises: as broadcast; MismatchError, also a later call with this rank, if it
        receives another size or dtype. (With NCCL that is not found out.)
        """
        check_peer(self, "send", "to", to, self._group is not None)
        self._check("send", inp, inp)
        return self._call(stream, "send", None, inp, to)

    def recv(self, out: torch.Tensor, source: int, *, stream: Stream) -> Work:
        """Receive `out` from rank `source`, which sends it; messages between two ranks arrive in order.

        out: n elements, as many as are sent.   Cost: n elements received.   Raises: as send.
        """
        check_peer(self, "recv", "source", source, self._group is not None)
        self._check("recv", out, out)
        return self._call(stream, "recv", out, None, source)

    def barrier(self, *, stream: Stream) -> Work:
        """Done once every rank's stream has reached its barrier. Synchronize the returned Work to block the caller."""
        self.check_open("barrier")
        return self._call(stream, "barrier", None, None)

    @contextmanager
    def group(self) -> Iterator[Work]:
        """Launch the calls of the `with` block together, at its end; they share one `Work`.

        Sends and receives of a group run at once, in any order; its collectives must not depend on each other. All calls use
        one stream. If the block raises, none of its calls is made.
        """
        self.check_open("group")
        if self._group is not None:
            raise RuntimeError(f"group on {self}: a group is open already; close it first")
        group = self._group = _OpenGroup(Work(_Unlaunched(self)))
        try:
            yield group.work
        finally:
            self._group = None
        self.check_open("group")
        if group.calls:
            self._run(group.calls, group.work)

    def agree(self) -> _GeneratorContextManager[None]:
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
        return self._agreement.block()

    # ------------------------------------------------------------------ calling

    def _check(self, name: str, out: torch.Tensor, inp: torch.Tensor, op: Op | None = None) -> None:
        # Cost: 1.5 us for a good call; what is wrong with a bad one is found out afterwards.
        same = out.dtype == inp.dtype and out.device == inp.device == self.device
        if self.is_closed or not same or not out.is_contiguous() or not inp.is_contiguous():
            raise_bad_tensors(self, name, out, inp)
        if op is not None and (op is ReduceOp.AVG or inp.dtype not in FLOATS):
            check_reducible(self, name, inp.dtype, op)

    def _check_size(self, name: str, tensor: torch.Tensor | None, other: torch.Tensor, numel: int, formula: str) -> None:
        if tensor is not None and tensor.numel() != numel:
            raise_bad_size(self, name, tensor, other, formula)

    def _call(self, stream: Stream, name: str, out: torch.Tensor | None, inp: torch.Tensor | None, *args: object) -> Work:
        if stream.device != self.device:
            raise ValueError(
                f"{name} on {self}: expected a stream of {self.device}, found a {type(stream).__name__} on {stream.device}; "
                f"use new_stream(torch.device('{self.device}'), ...)"
            )
        out, inp = out if out is None else plain(out), inp if inp is None else plain(inp)
        call = CollectiveCall(self, self._number, name, out, inp, args, stream, now.subject)
        self._number += name not in ("send", "recv")  # not every rank makes those
        if self._group is not None:
            return self._group.add(call)
        work = Work(PAST)
        self._run(CallList((call,)), work)
        return work

    def _run(self, calls: CallList, work: Work) -> None:
        check_lost()
        thread = get_ident()
        if self._thread:
            self._raise_in_use(calls[0].name)
        self._thread = thread  # Python changes threads only in calls and loops, so not since the line before
        self._caller = now.thread
        try:
            stream = calls[0].stream
            if self._newest is not None and self._newest[0] != stream:
                stream.wait(self._newest[1])
            if self.hooks:
                calls.describe()
            for called in self._called:
                called(calls, work)
            if self.is_async:
                self._perform(calls)  # the backend's calls take the stream
            else:
                stream.submit(partial(self._perform, calls))
            work.event = stream.record()
            self._newest = stream, work.event
            if self._number > calls[0].number:  # not only sends and receives, which take no number
                self._newest_collective = work.event
        finally:
            self._thread = 0

    def _perform(self, calls: CallList) -> None:
        try:
            for before in self._before:
                before(calls)
            self._launch(calls[0].stream, calls)
        except BaseException as error:
            self._cut_short(error, calls)
            raise
        finally:
            for after in self._after:
                after(calls)


class _Unlaunched(Event):
    """The event of a group that is still open."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError(f"waiting for a call of a group on {self._comm} that is still open: leave its `with` block first")


class _OpenGroup:
    """The calls of an open group."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.calls = CallList()

    def add(self, call: CollectiveCall) -> Work:
        if self.calls and self.calls[0].stream != call.stream:
            raise ValueError(f"{call.name} on {call.comm}: a group's calls share one stream; this one has another")
        self.calls.append(call)
        return self.work

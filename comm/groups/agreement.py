"""How the ranks of a communicator come to one end of a block of `agree()`, whatever one of them raises in it.

Whoever waits for a rank that has left the block through an exception has to leave it as well, whatever communicator it waits
in. So that rank withdraws from each communicator that has no other ranks than this one: it reaches the next comparison of it,
which interrupts those that wait there, or come there later. None of them can complete, since the rank takes part in no more
calls. At the end of the block all have withdrawn, and so have compared equally often: they rejoin, and call together again.
A rank that an exception has cut short in a call has withdrawn as well, from that communicator alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import sleep
from typing import NamedTuple
from weakref import ref

from ..core.calls import Failure, Interrupted, RemoteError, SharedError, causes
from ..core.members import raise_lost
from ..core.streams import Event, Stream
from .control import ControlPlane, register

_POLL_S = 0.0002


class _BlockEnd(NamedTuple):
    """What a rank says at the end of a block.

    depth: that of the block, 1 for the outermost.   is_cut_short: whether an exception has taken it out of a call.
    """

    depth: int
    failure: Failure | None
    is_cut_short: bool


class Agreement:
    """The blocks of `agree()` of one communicator, which owns it. It goes through the parts: those that have only its ranks."""

    def __init__(self, comm: ControlPlane) -> None:
        self._owner = ref(comm)  # a communicator and its memory go with the last reference, not with a collection
        self._depth = 0  # how many blocks this rank is in

    @property
    def _comm(self) -> ControlPlane:
        comm = self._owner()
        assert comm is not None, "it has made the call"
        return comm

    @contextmanager
    def block(self) -> Iterator[None]:
        """See `Communicator.agree`."""
        comm = self._comm
        comm.check_open("agree")
        failure, error, shared = None, None, None
        self._depth += 1
        depth, before = self._depth, _cut_short_here()
        try:
            yield
            if register.cut_short and not _cut_short_here() <= before:
                raise Interrupted(str(comm), [comm.rank], in_call=True)
            if comm._newest is not None:
                comm._newest[1].synchronize()
        except Exception as raised:
            raise_lost(raised, comm._members)  # nobody waits at the end of the block
            error, failure, newest = raised, Failure.of(raised, comm.rank), comm._newest
            self._tell_hooks(failure)
            self._withdraw_from([part for part in self._parts() if not part._is_beside()])
            shared = self._shared_error(raised, newest)
            failure = shared.failure if isinstance(shared, RemoteError) else failure
        finally:
            self._depth -= 1
        failures = self._meet(depth, failure)
        if shared is not None:
            raise shared from (shared.__cause__ if shared in causes(error) else error)
        if (remote := RemoteError.first(failures, comm)) is not None:
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
                is_cut_short = bool(register.cut_short) and not _cut_short_here().isdisjoint((*self._parts(), self._comm))
                ends = self._exchange_ends(_BlockEnd(depth, failure, is_cut_short))
            except SharedError as error:  # it takes the others to their ends of the block
                shared = shared or error
                continue
            if any(end.failure is not None or end.is_cut_short for end in ends):
                self._rejoin()
            outermost = min(end.depth for end in ends)
            if outermost < depth or all(end.depth == depth for end in ends):
                break
            self._tell_hooks(failure)
        failures = [end.failure for end in ends]
        if shared is not None and failure is None and any(failures):
            raise shared
        return failures

    def _exchange_ends(self, own: _BlockEnd) -> list[_BlockEnd]:
        # Cost: a plain tuple is pickled in a third of the time.
        comm = self._comm
        try:
            with comm.watched("agree", own.failure):
                return [_BlockEnd._make(end) for end in comm.backend.exchange(tuple(own))]
        except Interrupted as error:
            if not error.in_call:  # a rank has left the block of an agree() of a larger communicator
                raise
        with comm.watched("rejoin"):
            return [_BlockEnd._make(end) for end in comm.backend.exchange(tuple(own))]

    def _withdraw_from(self, parts: Sequence[ControlPlane]) -> None:
        """Make no more calls in these parts, each as soon as this rank's threads make none there.

        Hazard: these calls may wait for ranks that wait for this one in other parts, or in sends and receives.
        """
        staying = [*parts, self._comm]
        for part in staying:
            part.backend.stop_transfers()
        while staying:
            for part in [part for part in staying if part._is_drained() and (part is self._comm or not part._thread)]:
                part._drain()
                if part is not self._comm:  # here, the ranks compare once more
                    part.backend.stop_comparisons()
                    register.withdrawn.add(part)
                staying.remove(part)
            if staying:
                sleep(_POLL_S)

    def _rejoin(self) -> None:
        """Let the ranks make their next call together, here and in the parts. Collective: no rank is in the block any more."""
        parts = self._parts_to_rejoin()
        self._withdraw_from(parts)
        for part in (*parts, self._comm):
            with part.watched("rejoin"):
                part.backend.rejoin()
                numbers = part.backend.exchange(part.number)
            part.align(numbers)
            register.rejoin(part)
        self._tell_hooks(None)

    def _parts(self) -> list[ControlPlane]:
        """In the order in which every rank has made them."""
        comm, ranks = self._comm, set(self._comm.ranks)
        return [each for each in list(register.open) if each is not comm and each.size > 1 and ranks.issuperset(each.ranks)]

    def _parts_to_rejoin(self) -> list[ControlPlane]:
        """Those that are not beside on each of their ranks, or that a rank has withdrawn from. Collective."""
        comm, keyed = self._comm, dict[tuple[object, ...], ControlPlane]()
        for part in self._parts():
            alike = sum(key[:2] == (part.name, tuple(part.ranks)) for key in keyed)
            keyed[part.name, tuple(part.ranks), alike] = part
        beside = [key for key, part in keyed.items() if part._is_beside() and part not in register.withdrawn]
        with comm.watched("rejoin"):
            everyone = dict(zip(comm.ranks, comm.backend.exchange(beside), strict=True))
        return [part for key, part in keyed.items() if not all(key in everyone[rank] for rank in part.ranks)]

    def _tell_hooks(self, failure: Failure | None) -> None:
        for hook in self._comm.hooks:
            hook.failed(failure)

    def _shared_error(self, error: Exception, newest: tuple[Stream, Event] | None) -> SharedError | None:
        """The error that every rank raises: one that led to `error`, or that of the thread of this rank's newest call."""
        found = list(causes(error))
        if newest is not None and not self._comm.is_async:
            try:
                newest[1].synchronize()
            except RuntimeError as failure:
                found += causes(failure)
        return next((each for each in found if isinstance(each, SharedError) and each.comm is self._comm), None)


def _cut_short_here() -> set[ControlPlane]:
    """The communicators in a call of which this rank was cut short, without those of other threads."""
    return {comm for comm in list(register.cut_short) if not comm._is_beside()}

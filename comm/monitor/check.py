"""Do all ranks make the same call? A fingerprint goes round before each collective; without it, numbers come out wrong.

On by default for CPU tensors (a meeting in shared memory: 1 us on 2 ranks), off for CUDA ones, where it would make the host
wait; SHARDRT_CHECK=0 or 1 says otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from ..calls import CollectiveCall, Failure, Hook, RemoteError, SharedError
from ..fingerprint import describe, name_ranks

Told = tuple[int, str, Failure | None]


class MismatchError(SharedError):
    """The ranks have made different calls. The message has every rank's; every rank raises it, and none of the calls ran."""


class CallCheck(Hook):
    """Raises MismatchError on every rank of a communicator when they have not all made the same call.

    Compared are name, dtype, elements, op and root; of an all-to-all, whose counts differ by rank, name and dtype. A send or
    receive is not compared. Control calls (exchange, split, empty, ...) are compared with collectives and with each other:
    each begins when the collectives before it are done, so that at most one call of a communicator is compared at a time.
    A rank that failed in `Communicator.agree` makes its error known here, as a RemoteError.
    """

    def before(self, calls: Sequence[CollectiveCall]) -> None:
        comm = calls[0].comm
        if comm.size == 1 or calls[0].name == "finalize":
            return
        made = calls[0].description or describe(calls)
        if made.shared and (rows := comm.compare(made.fingerprint, lambda: _told(calls[0], made.shared))) is not None:
            for hook in comm.hooks:
                hook.after(calls)
            _refuse(calls[0], rows)


def _told(call: CollectiveCall, made: str) -> Told:
    """The number of the next call, the one made, and what went wrong before."""
    failure = call.how[0] if call.name == "agree" else None
    return call.number + 1, made, failure if isinstance(failure, Failure) else None


def _refuse(call: CollectiveCall, rows: Sequence[Told]) -> NoReturn:
    """Tell what every rank has called."""
    call.comm.align(number for number, _, _ in rows)
    for _, _, failure in rows:
        if failure is not None:
            raise RemoteError(failure, call.comm)
    ranks = defaultdict(list)
    for rank, (_, made, _) in enumerate(rows):
        ranks[made].append(rank)
    raise MismatchError(
        f"the ranks of '{call.comm.name}' have made different calls at #{call.number}: "
        + "; ".join(f"{name_ranks(members)}: {made}" for made, members in ranks.items())
        + f" (told rank {call.comm.rank}). None of them ran. Every rank must make the same calls in the same order: look for "
        "a branch, a loop count or a shape that depends on the rank",
        call.comm,
    )

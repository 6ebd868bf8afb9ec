"""Check that all ranks make the same call: they compare a fingerprint before each collective. Without it, results are wrong.

On by default for CPU tensors (a barrier in shared memory: 1 us on 2 ranks), off for CUDA tensors, where it would make the host
wait; SHARDRT_CHECK=0 or 1 overrides the default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from ..calls import CallList, CollectiveCall, Failure, Hook, RemoteError, SharedError
from ..fingerprint import name_ranks

Answer = tuple[int, str, Failure | None]  # number of the rank's next call, the call it makes, an earlier failure


class MismatchError(SharedError):
    """The ranks have made different calls. Every rank raises it; the message lists every rank's call; none of the calls ran."""


class CallCheck(Hook):
    """Raises MismatchError on every rank of a communicator when they have not all made the same call.

    It compares name, dtype, elements, op and root; of an all-to-all, whose counts differ by rank, name and dtype. Sends and
    receives are not compared. Control calls (exchange, split, empty, ...) are compared with collectives and with each other:
    each begins when the collectives before it are done, so that at most one call of a communicator is compared at a time.
    If a rank has failed in `Communicator.agree`, every rank raises its error here, as a RemoteError.
    """

    def before(self, calls: CallList) -> None:
        comm = calls[0].comm
        if comm.size == 1 or calls[0].name == "finalize":
            return
        own = calls.description
        if own.shared and (answers := comm.compare(own.fingerprint, lambda: _answer(calls[0], own.shared))) is not None:
            for hook in comm.hooks:
                hook.after(calls)
            _raise_mismatch(calls[0], answers)


def _answer(call: CollectiveCall, shared: str) -> Answer:
    failure = call.args[0] if call.name == "agree" else None
    return call.number + 1, shared, failure if isinstance(failure, Failure) else None


def _raise_mismatch(call: CollectiveCall, answers: Sequence[Answer]) -> NoReturn:
    """Raise the error of a rank that has failed, or else MismatchError with the call of every rank."""
    call.comm.align(number for number, _, _ in answers)
    for _, _, failure in answers:
        if failure is not None:
            raise RemoteError(failure, call.comm)
    ranks = defaultdict(list)
    for rank, (_, shared, _) in enumerate(answers):
        ranks[shared].append(rank)
    raise MismatchError(
        f"the ranks of '{call.comm.name}' have made different calls at #{call.number}: "
        + "; ".join(f"{name_ranks(members)}: {shared}" for shared, members in ranks.items())
        + f" (reported on rank {call.comm.rank}). None of them ran. Every rank must make the same calls in the same order: "
        "look for a branch, a loop count or a shape that depends on the rank",
        call.comm,
    )

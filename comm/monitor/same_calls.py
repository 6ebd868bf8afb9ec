"""Check that all ranks make the same call: they compare a fingerprint before each collective. Without it, results are wrong.

On by default for CPU tensors (a barrier in shared memory: 1 us on 2 ranks), off for CUDA tensors, where it would make the host
wait; SHARDRT_CHECK=0 or 1 overrides the default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NoReturn

from ..core.calls import CallList, CollectiveCall, Counts, Failure, Hook, MismatchError, RemoteError, Subject
from ..ending.words import name_ranks

_NEVER_COMPARED = frozenset({"finalize", "rejoin"})
_SHOWN = 8  # pairs of ranks that a message names
Answer = tuple[int, str, Failure | None]  # number of the rank's next call, the call it makes, an earlier failure


class CallCheck(Hook):
    """Raises MismatchError on every rank of a communicator when they have not all made the same call.

    It compares name, dtype, elements, op, root, and what the call is for (`about`); of an all-to-all with counts, what each
    rank sends to each other one with what that one expects. Sends and receives are compared by the receiver
    (`backends/pairs.py`).

    Control calls (exchange, split, empty, ...) are compared with collectives and with each other: each begins when the
    collectives before it are done, so that at most one call of a communicator is compared at a time.
    If a rank has failed in `Communicator.agree`, every rank raises its error here, as a RemoteError. Calls of other
    communicators that wait for that rank are interrupted in the comparison, so that they can leave the block as well.
    """

    def before(self, calls: CallList) -> None:
        comm = calls[0].comm
        own = calls.description
        if comm.size == 1 or calls[0].name in _NEVER_COMPARED or not own.shared:
            return
        # The number is compared too: a rank that an exception has kept from making a call would make the same one again.
        answers = comm.compare_in_call(own.fingerprint ^ calls[0].number, lambda: _answer(calls[0], own.shared))
        if answers is not None:
            _raise_mismatch(calls[0], answers)
        for call in calls:
            if call.name == "all_to_all" and isinstance(call.args[0], Counts):
                _check_counts(call, call.args[0])


def _check_counts(call: CollectiveCall, counts: Counts) -> None:
    """Raise MismatchError, on every rank, unless the ranks expect what is sent to them.

    Cost: an all-to-all of a number for each rank, and a comparison.
    """
    comm = call.comm
    unexpected = [
        f"rank {source} sends {sent} elements to rank {comm.rank}, which expects {expected}"
        for source, (sent, expected) in enumerate(zip(comm.swap_numbers_in_call(counts.inp), counts.out, strict=True))
        if sent != expected
    ]
    found = comm.compare_in_call(comm.rank + 1 if unexpected else 0, lambda: unexpected)
    if found is None:
        return
    wrong = [text for texts in found for text in texts]
    raise MismatchError(
        f"the counts of all_to_all on '{call.comm.name}' at #{call.number} do not match: {'; '.join(wrong[:_SHOWN])}"
        f"{f'; and {len(wrong) - _SHOWN} more' if len(wrong) > _SHOWN else ''} (reported on rank {call.comm.rank}). Nothing "
        "was sent. in_counts[p] on rank r has to be out_counts[r] on rank p",
        call.comm,
    )


def _answer(call: CollectiveCall, shared: str) -> Answer:
    failure = call.args[0] if call.name == "agree" else None
    return call.number + 1, shared, failure if isinstance(failure, Failure) else None


def _raise_mismatch(call: CollectiveCall, answers: Sequence[Answer]) -> NoReturn:
    """Raise the error of a rank that has failed, or else MismatchError with the call of every rank."""
    call.comm.align(number for number, _, _ in answers)
    if (error := RemoteError.first((failure for _, _, failure in answers), call.comm)) is not None:
        raise error
    ranks = defaultdict(list)
    numbers = [number - 1 for number, _, _ in answers]
    for rank, (_, shared, _) in enumerate(answers):
        ranks[shared if len(set(numbers)) == 1 else f"#{numbers[rank]} {shared}"].append(rank)
    raise MismatchError(
        f"the ranks of '{call.comm.name}' have made different calls at #{min(numbers)}: "
        + "; ".join(f"{name_ranks(members)}: {shared}" for shared, members in ranks.items())
        + f" (reported on rank {call.comm.rank}). None of them ran. Every rank must make the same calls in the same order: "
        "look for a branch, a loop count, a shape or a handled exception that depends on the rank"
        + (f"; {call.subject.advice}" if isinstance(call.subject, Subject) else ""),
        call.comm,
    )

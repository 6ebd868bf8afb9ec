"""Do all ranks make the same call? A fingerprint goes round before each collective; without it, numbers come out wrong.

On by default for CPU tensors (2 us a call on 2 ranks), off for CUDA ones, where it would make the host wait; SHARDRT_CHECK=0
or 1 says otherwise.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import torch

from .calls import BLOCKING, Call, Failure, Hook, PreMulSum, RemoteError, SharedError
from .communicator import Communicator

_LENGTH_NBYTES = 8


class MismatchError(SharedError):
    """The ranks have made different calls. The message has every rank's; every rank raises it, and none of the calls ran."""


class CallCheck(Hook):
    """Raises MismatchError on every rank of a communicator when they have not all made the same call.

    Compared are name, dtype, elements, op and root; of an all-to-all, whose counts differ by rank, name and dtype. A send or
    receive is not compared. A rank that failed in `Communicator.agree` makes its error known here, as a RemoteError.
    """

    def before(self, calls: Sequence[Call]) -> None:
        comm = calls[0].comm
        if comm.size == 1 or (calls[0].name in BLOCKING and calls[0].name != "agree"):
            return
        text = describe_shared(calls)
        if not text:
            return
        mine = _fingerprint(text)
        if comm.exchange_bytes(mine) != mine * comm.size:
            for hook in comm.hooks:
                hook.after(calls)
            _refuse(calls[0], text)


def _refuse(call: Call, text: str) -> None:
    """Tell every rank what every rank has called, and raise."""
    failure = call.how[0] if call.name == "agree" else None
    rows = _exchange(call.comm, pickle.dumps((call.number + (call.name != "agree"), text, failure)))
    call.comm.align(number for number, _, _ in rows)
    for _, _, told in rows:
        if isinstance(told, Failure):
            raise RemoteError(told, call.comm)
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


def _exchange(comm: Communicator, row: bytes) -> list[tuple[int, str, Failure | None]]:
    """Every rank's pickled row, though they differ in length."""
    lengths = _cut(comm.exchange_bytes(len(row).to_bytes(_LENGTH_NBYTES)), comm.size)
    longest = max(int.from_bytes(length) for length in lengths)
    return [pickle.loads(padded) for padded in _cut(comm.exchange_bytes(row.ljust(longest)), comm.size)]


def _cut(rows: bytes, size: int) -> list[bytes]:
    width = len(rows) // size
    return [rows[rank * width : (rank + 1) * width] for rank in range(size)]


# ---------------------------------------------------------------------- in words


# Name, dtype, elements, and how: what is to be known of a call when its tensors are gone.
Signature = tuple[str, torch.dtype | None, int, tuple[object, ...]]


def signature(call: Call) -> Signature:
    """What describes the call."""
    tensor = call.out if call.inp is None or call.name == "scatter" else call.inp
    if tensor is None or call.name in BLOCKING:
        return call.name, None, 0, ()
    return call.name, tensor.dtype, tensor.numel(), call.how


def describe(calls: Sequence[Signature]) -> str:
    """The calls in words, such as "all_reduce float32 4096 sum"."""
    return _words(*calls[0]) if len(calls) == 1 else " + ".join(_words(*call) for call in calls)


def describe_shared(calls: Sequence[Call]) -> str:
    """What must be the same on every rank, in words: nothing of sends and receives, of an all-to-all name and dtype."""
    first = calls[0]
    if first.shared is None:  # several hooks ask, and a group may have hundreds of calls
        first.shared = " + ".join(words for call in calls if (words := _shared_words(*signature(call))))
    return first.shared


@lru_cache(maxsize=4096)
def _shared_words(name: str, dtype: torch.dtype | None, numel: int, how: tuple[object, ...]) -> str:
    if name in ("send", "recv"):
        return ""
    return _words(name, dtype, numel, how) if name != "all_to_all" else f"{name} {_short(dtype)}"


@lru_cache(maxsize=4096)
def _words(name: str, dtype: torch.dtype | None, numel: int, how: tuple[object, ...]) -> str:
    if dtype is None:
        return name
    words = [name, _short(dtype), str(numel)]
    for part in how:
        if isinstance(part, int):
            words += [{"send": "to", "recv": "from"}.get(name, "root"), str(part)]
        elif isinstance(part, PreMulSum):
            words.append(f"sum times {part.factor}")
        else:  # an operation, or an all-to-all's counts
            words.append(str(getattr(part, "value", part)))
    return " ".join(words)


@lru_cache(maxsize=4096)
def _fingerprint(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

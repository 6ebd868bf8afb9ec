"""Do all ranks make the same call? A fingerprint goes round before each collective; without it, numbers come out wrong.

On by default for CPU tensors (a meeting in shared memory: 1 us on 2 ranks), off for CUDA ones, where it would make the host
wait; SHARDRT_CHECK=0 or 1 says otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, NoReturn

import torch

from .calls import Call, Failure, Hook, PreMulSum, RemoteError, SharedError

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

    def before(self, calls: Sequence[Call]) -> None:
        comm = calls[0].comm
        if comm.size == 1 or calls[0].name == "finalize":
            return
        made = calls[0].description or describe(calls)
        if made.shared and (rows := comm.compare(made.mark, lambda: _told(calls[0], made.shared))) is not None:
            for hook in comm.hooks:
                hook.after(calls)
            _refuse(calls[0], rows)


def _told(call: Call, made: str) -> Told:
    """The number of the next call, the one made, and what went wrong before."""
    failure = call.how[0] if call.name == "agree" else None
    return call.number + 1, made, failure if isinstance(failure, Failure) else None


def _refuse(call: Call, rows: Sequence[Told]) -> NoReturn:
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


# ---------------------------------------------------------------------- in words


class Description(NamedTuple):
    """Calls in words, kept for calls that repeat."""

    words: str  # such as "all_reduce float32 4096 sum"
    shared: str  # what must be the same on every rank: nothing of sends and receives, of an all-to-all name and dtype
    mark: int  # a hash of that


def describe(calls: Sequence[Call]) -> Description:
    """The calls in words. Several hooks ask, and a group may have hundreds of calls."""
    first = calls[0]
    if first.description is None:
        if len(calls) == 1:
            first.description = _describe_one(first)
        else:
            first.description = _join(tuple(map(_describe_one, calls)))
    return first.description


def _describe_one(call: Call) -> Description:
    tensor = call.out if call.inp is None or call.name == "scatter" else call.inp
    if call.name == "empty":
        dtype, numel = call.how
        assert isinstance(dtype, torch.dtype)
        assert isinstance(numel, int)
        return _kept(call.name, dtype, numel, ())
    if tensor is None:
        return _kept(call.name, None, 0, ())
    return _kept(call.name, tensor.dtype, tensor.numel(), call.how)


@lru_cache(maxsize=4096)
def _kept(name: str, dtype: torch.dtype | None, numel: int, how: tuple[object, ...]) -> Description:
    words = _words(name, dtype, numel, how)
    if name in ("send", "recv"):
        return Description(words, "", 0)
    shared = words if name != "all_to_all" else f"{name} {_short(dtype)}"
    return Description(words, shared, _mark(shared))


@lru_cache(maxsize=256)
def _join(parts: tuple[Description, ...]) -> Description:
    shared = " + ".join(part.shared for part in parts if part.shared)
    return Description(" + ".join(part.words for part in parts), shared, _mark(shared))


def _mark(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


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


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

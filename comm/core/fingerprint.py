"""Describe calls in words, and hash what must be the same on every rank."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# Control calls that not every rank makes: they take no number. Their first argument is the rank, or ranks, waited for.
OF_SOME_RANKS = frozenset({"wait_to_write", "subset", "wait_for_message"})


class Description(NamedTuple):
    """What a call is, or the calls of a group."""

    text: str  # such as "all_reduce float32 4096 sum"
    # The part that must be the same on every rank, of an all-to-all its name and dtype, with what the call is for
    # (`calls.about`); "" if not all call it
    shared: str
    fingerprint: int  # a hash of `shared`, of 63 bits


@lru_cache(maxsize=16384)  # a few for each group of parameters
def describe_call(name: str, dtype: torch.dtype | None, numel: int, args: tuple[object, ...], subject: str = "") -> Description:
    """Describe one call. dtype: None for a call without a tensor.   args: an op, a root, a peer, counts.

    subject: what the call is for. Cost: a string keeps its hash, so that a call that repeats is found without hashing it.
    """
    text = _text(name, dtype, numel, args)
    if name in OF_SOME_RANKS or name in ("send", "recv"):
        return Description(text, "", 0)
    shared = text if name != "all_to_all" or args[0] is None else f"{name} {_short(dtype)} with counts"
    shared += f" of {subject}" if subject else ""
    return Description(text, shared, fingerprint_of(shared))


@lru_cache(maxsize=1024)
def join_descriptions(parts: tuple[Description, ...]) -> Description:
    """Describe a group by its calls."""
    shared = " + ".join(part.shared for part in parts if part.shared)
    return Description(" + ".join(part.text for part in parts), shared, fingerprint_of(shared))


def printable(text: str) -> str:
    """The text with what a terminal would act on, such as an escape sequence, written as in Python's source."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def fingerprint_of(text: str) -> int:
    """A hash of 63 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1


def _text(name: str, dtype: torch.dtype | None, numel: int, args: tuple[object, ...]) -> str:
    if name == "wait_to_write":
        return f"{name} what rank {args[0]} reads"
    if name == "wait_for_message":
        return str(args[1])
    if dtype is None:
        return " ".join(map(str, (name, *args)))
    words = [name, _short(dtype), str(numel)]
    for arg in args:
        if isinstance(arg, int):
            words += [{"send": "to", "recv": "from"}.get(name, "root"), str(arg)]
        elif arg is not None:  # an operation, or an all-to-all's counts
            words.append(str(getattr(arg, "value", arg)))
    return " ".join(words)


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")

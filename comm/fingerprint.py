"""Calls in words, and a hash of what must be the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from .calls import CollectiveCall, PreMulSum


class Description(NamedTuple):
    """Calls in words, kept for calls that repeat."""

    words: str  # such as "all_reduce float32 4096 sum"
    shared: str  # what must be the same on every rank: nothing of sends and receives, of an all-to-all name and dtype
    fingerprint: int  # a hash of that


def describe(calls: Sequence[CollectiveCall]) -> Description:
    """The calls in words. Several hooks ask, and a group may have hundreds of calls."""
    first = calls[0]
    if first.description is None:
        if len(calls) == 1:
            first.description = _describe_one(first)
        else:
            first.description = _join(tuple(map(_describe_one, calls)))
    return first.description


def _describe_one(call: CollectiveCall) -> Description:
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
    return Description(words, shared, _fingerprint(shared))


@lru_cache(maxsize=256)
def _join(parts: tuple[Description, ...]) -> Description:
    shared = " + ".join(part.shared for part in parts if part.shared)
    return Description(" + ".join(part.words for part in parts), shared, _fingerprint(shared))


def _fingerprint(text: str) -> int:
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

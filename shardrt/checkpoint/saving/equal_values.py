"""Plain values are saved once and loaded on all ranks: a rank that has another one would lose it, so they are compared.

So are plain tensors of integers, such as the indices of a sampler or the state of a generator.

Their bytes are compared first, and where these differ, the values: the order of sets and dicts does not count, nor whether a
number is an int or a float.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

import torch

from ...comm import Communicator
from ..disk.errors import CheckpointError, agreed
from ..state.objects import decode

_NAMED = 3  # names, and values of each, in an error
_SHOWN = 60  # characters of a value
_SENT = 1 << 16  # characters of a value that are sent, to find where values differ

Ranks = dict[object, list[int]]  # the mark of a value -> the ranks that have this value


def check_values(digests: Mapping[str, int], values: Mapping[str, torch.Tensor | bytes], comm: Communicator) -> None:
    """Raise CheckpointError on every rank if the ranks that have a value of one name have different ones. Collective.

    digests: of this rank's values.   values: tensors, and of others their bytes, as `torch.save` wrote them.
    """
    spelled = _differing(comm.exchange(digests))
    with agreed(comm):
        own = {name: _decoded(name, values[name]) for name in spelled if name in values}
        marks = {name: _mark(value) for name, value in own.items()}
    wrong = _differing(comm.exchange(marks))
    if not wrong:
        return
    named = list(wrong)[:_NAMED]
    shown = {name: _text(own[name]) for name in named if comm.rank in _firsts(wrong[name])}
    everyone = comm.exchange(shown)
    found = [f"{name!r} is {_listed(wrong[name], everyone, name)}" for name in named]
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    raise CheckpointError(
        f"values differ by rank, and would be saved once for all: {'; '.join(found)}{more}. Save each rank's own as "
        "checkpoint.PerRank(value), or give all ranks the same"
    )


def _decoded(name: str, value: torch.Tensor | bytes) -> Any:
    return decode(value, f"object '{name}'") if isinstance(value, bytes) else value.detach().cpu().clone()


def as_ranges(numbers: Iterable[int]) -> str:
    """Numbers as text, with ranges: 0, 1, 2, 5 as "0-2, 5"."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _differing(everyone: Iterable[Mapping[str, object]]) -> dict[str, Ranks]:
    """The names whose values are not the same on all ranks that have them."""
    found = dict[str, Ranks]()
    for rank, marks in enumerate(everyone):
        for name, mark in marks.items():
            found.setdefault(name, {}).setdefault(mark, []).append(rank)
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _mark(value: Any) -> bytes:
    """A hash of 16 bytes that is equal for equal values."""
    if isinstance(value, Mapping):
        return _digest(b"dict", *sorted(_mark(key) + _mark(item) for key, item in value.items()))
    if isinstance(value, set):
        return _digest(b"set", *sorted(map(_mark, value)))
    if isinstance(value, (list, tuple)):
        return _digest(b"list" if isinstance(value, list) else b"tuple", *map(_mark, value))
    if isinstance(value, (int, float)):
        return _digest(b"number", repr(int(value) if value == value // 1 else value).encode())
    if value is None or isinstance(value, (str, bytes)):
        return _digest(repr(value).encode())
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return _digest(buffer.getvalue())


def _digest(*parts: bytes) -> bytes:
    return blake2b(b"".join(parts), digest_size=16).digest()


def _text(value: Any) -> str:
    return " ".join(repr(value).split())[:_SENT]


def _firsts(ranks: Ranks) -> list[int]:
    """The first rank of each value that is shown."""
    return [own[0] for own in ranks.values()][:_NAMED]


def _listed(ranks: Ranks, everyone: Sequence[Mapping[str, str]], name: str) -> str:
    """The values of a name, each with its ranks; long ones are cut to where they differ."""
    texts = [everyone[rank][name] for rank in _firsts(ranks)]
    same = next((place for place, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    found = [
        f"{_cut(text, max(0, same - _SHOWN // 3))} on rank{'s' * (len(own) > 1)} {as_ranges(own)}"
        for text, own in zip(texts, ranks.values(), strict=False)
    ]
    return " and ".join(found) + (", and others" if len(ranks) > _NAMED else "")


def _cut(text: str, start: int) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{'...' if start else ''}{text[start : start + _SHOWN]}{'...' if len(text) > start + _SHOWN else ''}"

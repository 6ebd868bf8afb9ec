"""Which copies differ, and on which ranks: worked out on every rank alike, from what all of them have sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from .items import MODULUS, Copied, CopiedValue, Table

_SHOWN = 8  # differences in an error, and ranks in each


def differing(everyone: Iterable[Mapping[Copied, int]]) -> set[int]:
    """The keys of copies that differ.   everyone: the sums of each rank."""
    totals = dict[tuple[int, int, int], dict[int, tuple[int, int]]]()  # for each copy: ranks that have answered, and their sum
    for sums in everyone:
        for held, part in sums.items():
            copies = totals.setdefault((held.key, held.copies, held.parts), {})
            answered, total = copies.get(held.copy, (0, 0))
            copies[held.copy] = answered + 1, (total + part) % MODULUS
    return {
        key
        for (key, number, parts), copies in totals.items()
        if len(copies) < number or len({*copies.values()}) > 1 or next(iter(copies.values()))[0] < parts
    }


class Detail(NamedTuple):
    """An item of a rank, in few words.   cut: where this rank's part of the copy begins, and how many elements it has."""

    name: str
    key: int
    bits: int
    cut: tuple[int, int]
    shown: str
    is_number: bool

    @classmethod
    def of(cls, item: CopiedValue, bits: int) -> Detail:
        """What the other ranks have to know."""
        value, numel = item.value, 1
        if isinstance(value, torch.Tensor):
            numel = value.numel()
            value = value.item() if numel == 1 and item.held.parts == 1 else value
        is_number = not isinstance(value, torch.Tensor)
        return cls(item.name, item.held.key, bits, (item.start, numel), repr(value) if is_number else _in_hex(bits), is_number)


class _Difference(NamedTuple):
    """An item that is not everywhere the same.   found: what it is on which ranks, those first that are the fewest."""

    name: str
    found: list[tuple[str, list[int]]]

    @property
    def suspects(self) -> list[int]:
        """The ranks that differ from most; all, if most do not have the same."""
        everyone, most = [rank for _, ranks in self.found for rank in ranks], self.found[-1][1]
        return [rank for rank in everyone if rank not in most] if 2 * len(most) > len(everyone) else everyone

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(f'{shown} on {_listed(ranks)}' for shown, ranks in self.found)}"


def report(everyone: Mapping[int, tuple[Mapping[int, Table], Sequence[Detail]]]) -> str:
    """The error's text.   everyone: by ranks in the world, where copies are, and the items that have them."""
    items, tables = dict[tuple[int, str], dict[int, Detail]](), dict[int, Table]()
    for rank, (known, details) in everyone.items():
        tables.update(known)
        for each in details:
            items.setdefault((each.key, each.name), {})[rank] = each
    differences = list[_Difference]()
    # Numbers first: they may be the reason for the others.
    for (key, name), found in sorted(items.items(), key=lambda item: not next(iter(item[1].values())).is_number):
        if (kinds := _kinds(found, tables[key])) is not None:
            differences.append(_Difference(name, sorted(kinds, key=lambda kind: len(kind[1]))))
    suspects = {rank for each in differences for rank in each.suspects}
    ending = "s from most others" if len(suspects) == 1 else ""
    lines = [
        f"check_replicas: {len(differences)} of {len(items)} items differ between ranks that must have the same; "
        f"{_listed(suspects)} differ{ending}",
        *map(str, differences[:_SHOWN]),
    ]
    if len(differences) > _SHOWN:
        lines.append(f"and {len(differences) - _SHOWN} more")
    return "\n  ".join(lines)


def _kinds(found: Mapping[int, Detail], table: Table) -> list[tuple[str, list[int]]] | None:
    """What an item is on which ranks, for the first part that differs, or for whole copies if they are cut apart.

    None if it is the same.
    """
    parts = [[(rank, found.get(rank)) for rank in ranks] for ranks in zip(*table, strict=True)]
    if any(len({each.cut for _, each in ranks if each is not None}) > 1 for ranks in parts):
        return _kinds_of_copies(found, table)
    for ranks in parts:
        kinds = dict[int | None, tuple[str, list[int]]]()
        for rank, each in ranks:
            bits, shown = (None, "missing") if each is None else (each.bits, each.shown)
            kinds.setdefault(bits, (shown, []))[1].append(rank)
        if len(kinds) > 1:
            return list(kinds.values())
    return None


def _kinds_of_copies(found: Mapping[int, Detail], table: Table) -> list[tuple[str, list[int]]] | None:
    kinds = dict[int, tuple[str, list[int]]]()
    for ranks in table:
        total = sum(found[rank].bits for rank in ranks if rank in found) % MODULUS
        kinds.setdefault(total, (_in_hex(total), []))[1].extend(ranks)
    return list(kinds.values()) if len(kinds) > 1 else None


def _in_hex(bits: int) -> str:
    return f"digest {bits:016x}"


def _listed(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed[:_SHOWN]))}{more}"

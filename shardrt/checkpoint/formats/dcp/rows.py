"""Many equal pieces of a pickle, in which only integers differ, written and read as the rows of one byte matrix.

    template   h\\x00)\\x81}(h\\x01h\\x03 J[4 bytes] J[4 bytes] \\x86\\x85R ...
    rows       the template, once for each set of values: (rows, bytes) uint8

Cost: a few bytes of memory traffic for each byte, instead of some microseconds of Python for each piece.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

_DTYPES = {4: torch.int32, 8: torch.int64}
_FEW = 16  # fewer rows than these are faster without operations of torch


@dataclass(frozen=True)
class Template:
    """A row.   parts: bytes that every row has, and widths of the integers between: 4 or 8 bytes, little-endian, signed."""

    parts: tuple[bytes | int, ...]

    @cached_property
    def nbytes(self) -> int:
        """The length of a row."""
        return len(self._constant)

    def rows(self, count: int, values: Sequence[torch.Tensor]) -> bytearray:
        """`count` rows with these integers: a (count,) int64 tensor for each integer of the template."""
        if count < _FEW and values:
            return self._rows_of_few(values)
        out = bytearray(self._constant * count)
        if out:
            matrix = torch.frombuffer(out, dtype=torch.uint8).view(-1, self.nbytes)
            for (start, width), value in zip(self._fields, values, strict=True):
                matrix[:, start : start + width] = (
                    value.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(-1, 8)[:, :width]
                )
        return out

    def values(self, rows: bytes | bytearray) -> list[torch.Tensor] | None:
        """The inverse of `rows`: (rows,) int64 tensors. None if these are not rows of the template."""
        if len(rows) % self.nbytes:
            return None
        if len(rows) < _FEW * self.nbytes:
            return self._values_of_few(rows)
        matrix = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, self.nbytes)
        found = []
        for start, width in self._fields:
            field = matrix[:, start : start + width]
            found.append(field.clone(memory_format=torch.contiguous_format).view(_DTYPES[width]).view(-1).long())
            field.zero_()
        constant = torch.frombuffer(bytearray(self._constant), dtype=torch.uint8)
        return found if bool((matrix == constant).all()) else None

    def _rows_of_few(self, values: Sequence[torch.Tensor]) -> bytearray:
        """The same as `rows`, without an operation of torch for each integer."""
        out = bytearray()
        fields: list[bytes | int] = [0] * (2 * len(values) + 1)
        fields[::2] = self._between
        for row in zip(*(column.tolist() for column in values), strict=True):
            fields[1::2] = row
            out += self._struct.pack(*fields)
        return out

    def _values_of_few(self, rows: bytes | bytearray) -> list[torch.Tensor] | None:
        """The same as `values`, without an operation of torch for each integer."""
        few = list(self._struct.iter_unpack(rows))
        if any(row[::2] != self._between for row in few):
            return None
        columns = torch.tensor([row[1::2] for row in few], dtype=torch.int64).view(len(few), len(self._fields))
        return list(columns.unbind(1))

    @cached_property
    def _between(self) -> tuple[bytes, ...]:
        """The bytes before each integer, and after the last one; empty between two integers that are next to each other."""
        found = [b""]
        for part in self.parts:
            if isinstance(part, int):
                found.append(b"")
            else:
                found[-1] += part
        return tuple(found)

    @cached_property
    def _struct(self) -> struct.Struct:
        """The `struct` of a row: bytes and integers in turns."""
        codes = [{4: "i", 8: "q"}[width] for _, width in self._fields]
        return struct.Struct("<" + "".join(f"{len(b)}s{code}" for b, code in zip(self._between, [*codes, ""], strict=True)))

    @cached_property
    def _constant(self) -> bytes:
        return b"".join(bytes(part) if isinstance(part, int) else part for part in self.parts)

    @cached_property
    def _fields(self) -> list[tuple[int, int]]:
        """Where each integer begins, and its width."""
        found, place = [], 0
        for part in self.parts:
            if isinstance(part, int):
                found.append((place, part))
            place += part if isinstance(part, int) else len(part)
        return found

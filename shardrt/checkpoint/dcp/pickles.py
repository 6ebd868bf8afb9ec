"""Reading pickles of files that nobody vouches for: only the globals that the caller knows, and none of them by import."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pickletools import TAKEN_FROM_ARGUMENT1, TAKEN_FROM_ARGUMENT8U, UP_TO_NEWLINE, opcodes
from typing import Any

import torch

from ..errors import CheckpointError, DamagedCheckpointError

# Not by getattr, which imports modules of torch that are not loaded yet.
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
FindGlobal = Callable[[str, str], object]  # (module, name) -> what stands in its place; raises KeyError for others


class Sealed(type):
    """The class of the classes that stand in the place of globals: a pickle cannot set their attributes."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"attribute '{name}' of {cls}: a pickle may not change classes")


class Ignored(metaclass=Sealed):
    """In the place of a callable whose result is of no interest: paths, layouts, memory formats."""

    def __init__(self, *args: object) -> None: ...


def restricted_load(data: bytes, find: FindGlobal, where: str, persistent: Callable[[Any], object] | None = None) -> Any:
    """The object that `data` pickles, of plain containers, numbers, strings, and what `find` returns.

    where: the file, and what of it, for messages.   persistent: resolves persistent ids, which are refused without it.
    Raises CheckpointError that names the global for one that `find` does not know, and for anything that cannot be read.
    """
    try:
        _check_opcodes(data, where)
        return _Unpickler(io.BytesIO(data), find, where, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"{where}: not a pickle that can be read ({type(error).__name__}: {error}); the file is damaged or cut off, or of "
            "another format"
        ) from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, find: FindGlobal, where: str, persistent: Callable[[Any], object] | None) -> None:
        super().__init__(file)
        self._find, self._where, self._persistent = find, where, persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._find(module, name)
        except KeyError:
            raise DamagedCheckpointError(
                f"{self._where}: its pickle refers to {module}.{name}, which no checkpoint needs, and "
                "could run code of the file's author; refused, do not trust this file"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise DamagedCheckpointError(f"{self._where}: its pickle refers to a persistent object {pid!r}; expected none")
        return self._persistent(pid)


def _check_opcodes(data: bytes, where: str) -> None:
    """Refuse what the unpickler itself does before it looks at values: lengths and memo places beyond the data, extensions.

    Hazard: the unpickler allocates for a length or a memo place that a damaged file gives, however large; it finds registered
    extensions of copyreg without `find_class`.
    Cost: 0.1 us for each opcode, a tenth of what unpickling takes.
    """
    place, end = 0, len(data)
    while place < end:
        taken = _TAKEN[data[place]]
        place = place + taken if taken else _after(data, place, where)
    if place > end:
        raise ValueError(f"an opcode that ends at byte {place} of {end}")


def _after(data: bytes, place: int, where: str) -> int:
    """Where the opcode at `place` ends, for those whose length is not fixed, or that need a look."""
    code = data[place]
    if code in _WIDTHS:
        width = _WIDTHS[code]
        return place + 1 + width + int.from_bytes(data[place + 1 : place + 1 + width], "little")
    if code in b"ci":  # GLOBAL, INST: two lines
        return data.index(b"\n", data.index(b"\n", place) + 1) + 1
    if code in b"rp":  # LONG_BINPUT, PUT
        stop = place + 5 if code == ord("r") else data.index(b"\n", place) + 1
        number = int.from_bytes(data[place + 1 : stop], "little") if code == ord("r") else int(data[place + 1 : stop])
        if number > len(data):
            raise ValueError(f"memo place {number} of a pickle of {len(data)} bytes")
        return stop
    if code in _EXTENSIONS:
        raise DamagedCheckpointError(
            f"{where}: its pickle refers to copyreg's extension registry, which no checkpoint needs; refused"
        )
    if code == ord("."):
        return len(data)
    return data.index(b"\n", place) + 1


_EXTENSIONS = b"\x82\x83\x84"
_WIDTHS = {  # of the length that comes first, for opcodes with bytes of any number
    ord(opcode.code): {TAKEN_FROM_ARGUMENT1: 1, TAKEN_FROM_ARGUMENT8U: 8}.get(opcode.arg.n, 4)
    for opcode in opcodes
    if opcode.arg is not None and opcode.arg.n < 0 and opcode.arg.n != UP_TO_NEWLINE
}
_TAKEN = [1] * 256  # bytes of an opcode with its argument; 0: see `_after`
for _opcode in opcodes:
    _TAKEN[ord(_opcode.code)] = 1 if _opcode.arg is None else 1 + max(_opcode.arg.n, -1)
for _code in b"rp.\x82\x83\x84":
    _TAKEN[_code] = 0
for _code in _WIDTHS:
    _TAKEN[_code] = 0

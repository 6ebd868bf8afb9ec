"""Reads pickles of unknown origin: they may refer only to globals that the caller knows, and none of them is imported."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from ...disk.errors import DamagedCheckpointError, reason, shown

# Not by getattr, which would import modules of torch that are not loaded yet.
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
Global = tuple[str, str]  # module, name
GLOBAL_DTYPES: dict[Global, object] = {("torch", name): value for name, value in DTYPES.items()}
FindGlobal = Callable[[Global], object]  # what stands in for a global; raises KeyError for one that is not known

MOST_DIMS = 64
_MOST_FIELDS = 64  # of an object
_MOST_PARTS = 1000  # of a key of a dict
_KEY_BITS = 1024
_FOREIGN_CODE = (
    "which no checkpoint needs, and could run code of the file's author; refused. If the file is yours, save tensors, numbers, "
    "strings, lists and dicts in its place, as torch.save(model.state_dict(), path) does; else do not trust it"
)
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")  # in what torch says


class StandIn:
    """Stands in for an object whose class is not imported."""

    def __setstate__(self, state: Any) -> None: ...


class Ignored(StandIn):
    """Stands in for what is of no interest: paths, layouts, memory formats."""

    def __init__(self, *args: object) -> None: ...


class PickledRecord(StandIn):
    """Stands in for an object with fields, which become attributes."""

    def __setstate__(self, state: Any) -> None:
        # Hazard: one large dict may be the state of very many objects.
        if not isinstance(state, dict) or len(state) > _MOST_FIELDS:
            raise ValueError(f"{shown(state)} in the place of an object's fields")
        self.__dict__.update(state)


def new_dict() -> dict[Any, Any]:
    """Stands in for `OrderedDict`, which Python pickles without arguments: the pickle then puts items into it."""
    return {}


def integers(values: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets; stands in for `torch.Size` as well.

    Raises ValueError for anything but a tuple or list of at most 64 integers of 64 bits.
    """
    if (
        not isinstance(values, tuple | list)
        or len(values) > MOST_DIMS
        or any(type(value) is not int or value.bit_length() > 63 for value in values)
    ):
        raise ValueError(f"{shown(values)}, expected at most {MOST_DIMS} integers of 64 bits")
    return tuple(values)


def restricted_load(data: bytes, find: FindGlobal, where: str, persistent: Callable[[Any], object] | None = None) -> Any:
    """The object that `data` pickles, of plain containers, numbers, strings, and what `find` returns.

    where: the file, and the part of it, for messages.   persistent: resolves persistent ids, which are refused without it.
    Raises CheckpointError that names the global for one that `find` does not know, and for anything that cannot be read.
    Cost: some microseconds for each opcode; time and memory in proportion to the data.
    """
    try:
        return Unpickler(io.BytesIO(data), find, where, persistent).load()
    except DamagedCheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"{where}: not a pickle that can be read ({reason(error)}); the file is damaged or cut off, or of another format"
        ) from error


def refusal(error: Exception) -> str:
    """Why `torch.load(weights_only=True)` has refused a file, without torch's advice to load it with code of its author."""
    if not isinstance(error, pickle.UnpicklingError):
        return reason(error)
    if named := _REFUSED.search(str(error)):
        return f"its pickle refers to {shown(named[1])[1:-1]}, {_FOREIGN_CODE}"
    return "its pickle has what no file of tensors and plain values has"


def check_keys(keys: Iterable[object]) -> None:
    """Raise ValueError for a key that is a large number, or a tuple of many parts: its hash would visit all of them."""
    for key in keys:
        if type(key) is str:
            continue
        left, count = [key], 0
        while left:
            part, count = left.pop(), count + 1
            if isinstance(part, int) and part.bit_length() > _KEY_BITS:
                raise ValueError(f"a dict with the key {shown(part)}")
            if isinstance(part, tuple | frozenset):
                count += len(part)
                left += part if count <= _MOST_PARTS else ()
            if count > _MOST_PARTS:
                raise ValueError(f"a dict with the key {shown(key)}, of more than {_MOST_PARTS} parts")


def check_target(target: object) -> None:
    """Raise ValueError unless a pickle may set the fields of this object."""
    if not isinstance(target, StandIn):
        raise ValueError(f"fields of {shown(target)}: a pickle may not change classes or functions")


Load = Callable[[Any], None]  # what the unpickler does for an opcode
LOADS: dict[int, Load] = {**pickle._Unpickler.dispatch}


def checking(code: bytes, check: Callable[[Any], None]) -> dict[int, Load]:
    """The table entry of an opcode, with a check before it.   check: is called with the stack."""
    load = LOADS[code[0]]

    def checked(unpickler: Any) -> None:
        check(unpickler.stack)
        load(unpickler)

    return {code[0]: checked}


class Unpickler(pickle._Unpickler):
    """Python's own unpickler, the one that is written in Python, with checks.

    Hazard: the one in C allocates as much as a length or a memo place in the file says, however large, and hashes keys of dicts
    that are tuples of shared tuples, which takes forever.
    """

    dispatch: ClassVar[dict[int, Load]] = (
        LOADS
        | checking(pickle.DICT, lambda stack: check_keys(stack[::2]))
        | checking(pickle.SETITEM, lambda stack: check_keys(stack[-2:-1]))
        | checking(pickle.SETITEMS, lambda stack: check_keys(stack[::2]))
        | checking(pickle.BUILD, lambda stack: check_target(stack[-2]))
    )
    # Sets, whose items are hashed, and buffers, whose lengths are allocated, have no place in a checkpoint.
    for code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8):
        del dispatch[code[0]]

    def __init__(self, file: io.BytesIO, find: FindGlobal, where: str, persistent: Callable[[Any], object] | None) -> None:
        super().__init__(file)
        self._find, self._where, self._persistent = find, where, persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._find((module, name))
        except KeyError:
            what = f"{shown(module)[1:-1]}.{shown(name)[1:-1]}"
            raise DamagedCheckpointError(f"{self._where}: its pickle refers to {what}, {_FOREIGN_CODE}") from None

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise DamagedCheckpointError(f"{self._where}: its pickle refers to a persistent object {shown(pid)}; expected none")
        return self._persistent(pid)

    def get_extension(self, code: int) -> None:
        raise DamagedCheckpointError(
            f"{self._where}: its pickle refers to copyreg's extension registry, which no checkpoint needs; refused"
        )

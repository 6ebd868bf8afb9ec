"""Objects that torch.save wrote: what is verified of one before torch.load reads it."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, ClassVar

from ..errors import CheckpointError, DamagedCheckpointError
from ..shown import reason, shown
from .pickles import LOADS, Load, StandIn, Unpickler, check_keys, checking

_MOST_ARGUMENTS, _MOST_VALUES = 64, 1_000_000


def check_object(data: bytes, where: str) -> None:
    """Verify the checksums of an object, and what `check_archive` does.

    where: file and name, for messages.   Raises CheckpointError.
    """
    check_archive(io.BytesIO(data), where)
    with _damage_of(where), zipfile.ZipFile(io.BytesIO(data)) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of its record {shown(damaged)} differs")


def check_archive(file: IO[bytes], where: str) -> None:
    """Verify that torch.load will not take memory or time out of proportion to the bytes of a file of torch.save.

    Raises CheckpointError.   Cost: some microseconds for each opcode of its pickle, as torch.load takes.
    """
    with _damage_of(where), zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise CheckpointError(f"{where} is compressed; expected one that is stored as it is: use plain torch.save")
        # Hazard: records may lie on top of each other, each of them all of the bytes.
        if sum(record.file_size for record in records) > file.seek(0, io.SEEK_END):
            raise ValueError("records that overlap")
        for record in records:
            if record.filename.endswith("data.pkl"):
                pickled = archive.read(record)
                found = _Rehearsal(io.BytesIO(pickled), _find, where, _Anything).load()
                _check_shared(found, len(pickled))


@contextmanager
def _damage_of(where: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{where} is damaged: {reason(error)}; load an older checkpoint") from error


def _check_shared(root: object, nbytes: int) -> None:
    """Raise ValueError if what goes through all values, each as often as it is referred to, goes through very many."""
    counts, left = dict[int, int](), [(root, False)]
    while left:
        value, is_counted = left.pop()
        inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if is_counted:
            counts[id(value)] = min(1 + sum(counts.get(id(item), 1) for item in inside), _MOST_VALUES + nbytes + 1)
        elif inside and id(value) not in counts:
            counts[id(value)] = 1  # where it is inside of itself
            left += [(value, True), *((item, False) for item in inside)]
    if counts.get(id(root), 1) > _MOST_VALUES + nbytes:
        raise ValueError("values inside of each other, many times the same ones")


class _Anything(StandIn):
    """In the place of every object, and of every function's result: it takes arguments, state, and items."""

    def __init__(self, *args: object) -> None:
        if len(args) > _MOST_ARGUMENTS:
            raise ValueError(f"an object of {len(args)} arguments")

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """Of a deque."""

    def extend(self, values: object) -> None:
        """Of a deque."""


class _Hashing(_Anything):
    """In the place of a set or a dict: it hashes the items of a list."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        for arg in args:
            for item in arg if isinstance(arg, list | tuple) else ():
                check_keys(item if isinstance(item, list) else (item,))  # a key and its value


class _Bytes(_Anything):
    """In the place of a bytearray: it allocates as many bytes as a number says."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if any(isinstance(arg, int) for arg in args):
            raise ValueError(f"a bytearray of {shown(args)}")


def _find(module: str, name: str) -> type[_Anything]:
    if name in ("set", "frozenset", "dict", "OrderedDict", "defaultdict", "Counter"):
        return _Hashing
    return _Bytes if name == "bytearray" else _Anything


class _Rehearsal(Unpickler):
    """Reads a pickle as torch.load does, but makes nothing of it."""

    dispatch: ClassVar[dict[int, Load]] = (
        Unpickler.dispatch
        | {pickle.EMPTY_SET[0]: LOADS[pickle.EMPTY_SET[0]]}
        | checking(pickle.ADDITEMS, check_keys)
        | checking(pickle.FROZENSET, check_keys)
    )

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

_MOST_ARGUMENTS, _MOST_VALUES = 64, 10_000_000


def check_object(data: bytes, where: str) -> None:
    """Verify the checksums of an object, and that torch.load will take memory and time in proportion to its bytes.

    where: file and name, for messages.   Raises CheckpointError.
    Cost: some microseconds for each opcode of its pickle, as torch.load takes.
    """
    with _damage_of(where), zipfile.ZipFile(io.BytesIO(data)) as archive:
        check_records(archive, len(data), where)
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"the checksum of its record {shown(damaged)} differs")
        _rehearsed(archive, where)


def check_file(file: IO[bytes], where: str) -> None:
    """Verify the same of a file of torch.save, but for its checksums, and that it has not one value at very many places."""
    with _damage_of(where), zipfile.ZipFile(file) as archive:
        check_records(archive, file.seek(0, io.SEEK_END), where)
        _check_shared(_rehearsed(archive, where))


def check_records(archive: zipfile.ZipFile, nbytes: int, where: str) -> None:
    """Raise CheckpointError if an archive of so many bytes has compressed records, or ValueError for some that overlap."""
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError(f"{where} is compressed; expected one that is stored as it is: use plain torch.save")
    # Hazard: records may lie on top of each other, each of them all of the bytes.
    if sum(record.file_size for record in records) > nbytes:
        raise ValueError("records that overlap")


def _rehearsed(archive: zipfile.ZipFile, where: str) -> list[object]:
    """What its pickles have, of stand-ins."""
    pickles = [archive.read(record) for record in archive.infolist() if record.filename.endswith("data.pkl")]
    return [_Rehearsal(io.BytesIO(pickled), _find, where, _Anything).load() for pickled in pickles]


@contextmanager
def _damage_of(where: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(f"{where} is damaged: {reason(error)}; load an older checkpoint") from error


def _check_shared(root: object) -> None:
    """Raise ValueError if what goes through all values, each as often as it is referred to, goes through very many."""
    counts, left = dict[int, int](), [(root, False)]
    while left:
        value, is_counted = left.pop()
        inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if is_counted:
            counts[id(value)] = min(1 + sum(counts.get(id(item), 1) for item in inside), _MOST_VALUES + 1)
        elif inside and id(value) not in counts:
            counts[id(value)] = 1  # where it is inside of itself
            left += [(value, True), *((item, False) for item in inside)]
    if counts.get(id(root), 1) > _MOST_VALUES:
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

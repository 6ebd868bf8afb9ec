"""Refuses files of `torch.save` that would take far more memory than they have bytes, before torch unpickles them.

what grows                                              what is refused
compressed records, several names for the same bytes    records that have more bytes together than the file (`archive.py`)
storages                                                one that its record does not hold
what the pickle calls, as `bytearray(2**30)`            all but the calls that torch.save writes, with arguments that they have
these calls, with one large argument again and again    more than 64 bytes in all for each byte of the file
keys that are tuples of the same tuple, ...             those of very many parts, as `check_keys` has it
lists of the same list, of the same list, ...           more values, each as often as it is referred to, than 4 for each byte

The calls go to stand-ins, which add up the bytes that the real functions would copy.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from ...disk.errors import CheckpointError
from .archive import Archive
from .items import LEGACY_STORAGES
from .pickles import GLOBAL_DTYPES, Global, Ignored, StandIn, check_keys, restricted_load

_GROWTH = 64  # bytes that calls may make for each byte of the file
_SMALLEST = 1 << 16  # bytes that they may make in any case
_VALUES = 4  # values for each byte of the file, each counted as often as it is referred to
_FEWEST = 1 << 20  # values that the file may have in any case
_ENTRY = 64  # bytes of an item of a dict or set, about
_ELEMENT = 16  # bytes of the largest elements, those of complex128


def check_archive(archive: Archive, where: str, *, is_copied: bool = True) -> None:
    """Raise CheckpointError for a file that would take far more memory than it has bytes, or that torch.save has not written.

    where: its name in messages.   is_copied: whether the caller will go through all values, each as often as it is referred
    to. The data of tensors are not read.
    """
    data = archive.contents(archive.records[f"{archive.root}data.pkl"])
    storages = {name.removeprefix(f"{archive.root}data/"): record.nbytes for name, record in archive.records.items()}
    calls = _Calls(storages, max(_SMALLEST, _GROWTH * archive.length))
    found = restricted_load(data, calls.find, where, calls.storage)
    if is_copied and _count(found, {}) > max(_FEWEST, _VALUES * archive.length):
        raise CheckpointError(f"{where}: its containers refer to each other so often, or in a circle, that a copy has no end")


class _Made(StandIn):
    """Stands in for a tensor, a storage, or bytes.   nbytes: its size, as if each element had its own memory."""

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __setstate__(self, state: object) -> None:
        raise ValueError("state of a tensor, which torch.save writes otherwise")


class _Dict(dict[Any, Any], StandIn):
    """Stands in for dicts on which a pickle may set attributes."""


class _Calls:
    """Stand-ins for the globals of a pickle.

    storages: the bytes of each, by key.   left: bytes that calls may still make.
    """

    def __init__(self, storages: Mapping[str, int], left: int) -> None:
        self._storages, self._left = storages, left
        self._vouched = set(map(_full_name, torch.serialization.get_safe_globals()))
        self._known: dict[str, object] = {
            "_codecs.encode": self._encode,
            "builtins.bytearray": self._bytearray,
            "builtins.complex": complex,
            "builtins.set": self._set,
            "collections.Counter": self._dict,
            "collections.OrderedDict": self._dict,
            "torch.Size": self._size,
            "torch.device": _small,
            "torch.serialization._get_layout": _small,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
            "torch._utils._rebuild_tensor": _tensor,
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_tensor_v3": _tensor,
            "torch._utils._rebuild_parameter": _parameter,
            "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch._utils._rebuild_meta_tensor_no_storage": _small,
            "torch._utils._rebuild_wrapper_subclass": _small,
            "torch._utils._rebuild_nested_tensor": self._of_tensors,
            "torch._utils._rebuild_sparse_tensor": self._of_tensors,
            "torch._utils._rebuild_qtensor": self._quantised,
        }

    def find(self, found: Global) -> object:
        """What stands in for a global. Raises KeyError unless torch.save writes it, or the program vouches for it."""
        module, name = found
        # Pickles of protocol 2 have the names of Python 2.
        full = ".".join(NAME_MAPPING.get(found, (IMPORT_MAPPING.get(module, module), name)))
        if full in self._known:
            return self._known[full]
        if found in GLOBAL_DTYPES:
            return GLOBAL_DTYPES[found]
        return Ignored if full in self._vouched else _NAMES[full]

    def storage(self, pid: Any) -> _Made:
        """The stand-in for a storage. Raises ValueError if its record in the file is missing or has fewer bytes."""
        _, kind, key, _, numel = pid
        nbytes = numel * _ITEMSIZES[kind]
        if not 0 <= nbytes <= self._storages.get(str(key), -1):
            raise ValueError(f"storage {key!r} of {nbytes} bytes: its record has {self._storages.get(str(key))}")
        return _Made(nbytes)

    def _made(self, nbytes: int) -> _Made:
        self._left -= nbytes
        if nbytes < 0 or self._left < 0:
            raise ValueError("its calls would make far more bytes than it has")
        return _Made(nbytes)

    def _encode(self, text: Any, encoding: str) -> _Made:
        if encoding != "latin1":
            raise ValueError(f"bytes encoded as {encoding!r:.40}")
        return self._made(len(text))

    def _bytearray(self, value: Any = b"", encoding: str = "latin-1") -> _Made:
        if encoding != "latin-1" or isinstance(value, int):
            raise ValueError(f"a bytearray that is not made of bytes, but of {value!r:.40} and {encoding!r:.40}")
        return self._made(value.nbytes if isinstance(value, _Made) else len(value))

    def _set(self, items: Any = ()) -> tuple[Any, ...]:
        self._made(_ENTRY * len(items))
        check_keys(items)
        return tuple(items)

    def _dict(self, items: Any = ()) -> _Dict:
        self._made(_ENTRY * len(items))
        check_keys(items if isinstance(items, dict) else [key for key, _ in items])
        return _Dict(items)

    def _size(self, sizes: Any = ()) -> tuple[int, ...]:
        self._made(8 * len(sizes))
        return tuple(sizes)

    def _of_type(self, rebuild: Callable[..., object], kind: object, args: Any, state: object) -> object:
        return rebuild(*args)

    def _of_tensors(self, *args: object) -> _Made:
        tensors = [each for arg in args for each in (arg if isinstance(arg, tuple) else (arg,))]
        return self._made(sum(each.nbytes for each in tensors if isinstance(each, _Made)))

    def _quantised(self, storage: _Made, offset: int, sizes: Any, *rest: object) -> _Made:
        return self._made(4 * prod(sizes))


def _tensor(storage: _Made, offset: int, sizes: Any, *rest: object) -> _Made:
    """A view, which may have each element of the storage many times."""
    return _Made(_ELEMENT * prod(sizes))


def _parameter(tensor: _Made, *rest: object) -> _Made:
    return tensor


def _small(*args: object) -> _Made:
    return _Made(0)


def _count(value: object, known: dict[int, int]) -> int:
    """The values in a tree, each as often as it is referred to; very many if it contains itself.   known: results by `id`."""
    if not isinstance(value, (list, tuple, dict)):
        return 1
    if id(value) not in known:
        known[id(value)] = sys.maxsize
        inside = (*value, *value.values()) if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(each, known) for each in inside)
    return known[id(value)]


def _full_name(vouched: Any) -> str:
    return vouched[1] if isinstance(vouched, tuple) else f"{vouched.__module__}.{vouched.__qualname__}"


_ITEMSIZES = {f"torch.{name}": dtype.itemsize for dtype, name in LEGACY_STORAGES.items()} | {
    "torch.storage.UntypedStorage": 1,
    "torch.QInt8Storage": 1,
    "torch.QUInt8Storage": 1,
    "torch.QInt32Storage": 4,
    "torch.QUInt4x2Storage": 1,
    "torch.QUInt2x4Storage": 1,
}
_NAMES = {  # globals that are arguments of calls, and are not called
    name: name
    for name in (
        *_ITEMSIZES,
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch.per_tensor_affine",
        "torch.per_tensor_symmetric",
        "torch.per_channel_affine",
        "torch.per_channel_symmetric",
        "torch.per_channel_affine_float_qparams",
    )
}

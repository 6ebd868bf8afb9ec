"""Where the elements of a stored tensor lie in the archive that `items.py` or any `torch.save` wrote."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from ....fsdp.params.param import outermost_stride
from ...disk.errors import shown
from ..stored import ReadBytes, StoredItem
from .archive import Archive
from .items import BLOCK, BLOCK_CRCS, LEGACY_STORAGES, LOCAL, item_header, item_length
from .pickles import GLOBAL_DTYPES, Global, integers, new_dict, restricted_load

_LARGEST = 1 << 20  # the most bytes of the directory, and of the pickle, of one tensor
_MOST_ARGUMENTS, _MOST_CHARACTERS = 8, 100  # of a tensor; of a storage's key


class _StoragePickle(NamedTuple):
    key: str
    dtype: torch.dtype | None  # None: untyped


class _TensorPickle(NamedTuple):
    """What the pickle of a tensor says: it is a view of a storage."""

    storage: _StoragePickle
    dtype: torch.dtype
    offset: int  # in elements
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def rebuilt(cls, storage: _StoragePickle, offset: int, sizes: Any, strides: Any, *rest: Any) -> _TensorPickle:
        """Stands in for `torch._utils._rebuild_tensor_v2` and, with a dtype, `_v3`."""
        (offset,) = integers([offset])
        if not isinstance(storage, _StoragePickle) or len(rest) > _MOST_ARGUMENTS:
            raise ValueError(f"a tensor of {shown(storage)} and {len(rest)} more")
        _, _, *more = rest  # requires_grad, hooks
        dtype = storage.dtype
        if dtype is None:
            dtype, *more = more
        if any(more) or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor with {shown(more)}, expected a plain one with a dtype")
        return cls(storage, dtype, offset, integers(sizes), integers(strides))

    @classmethod
    def of_parameter(cls, tensor: _TensorPickle, *_: Any) -> _TensorPickle:
        """Stands in for `torch._utils._rebuild_parameter`."""
        return tensor


def find_item(read: ReadBytes, dtype: torch.dtype, sizes: tuple[int, ...], length: int, where: str) -> StoredItem:
    """Find a tensor of known dtype and sizes in an item of `length` bytes: by `known_item`, or else by `read_item`."""
    return known_item(read, dtype, sizes, length) or read_item(read, length, where)


def read_item(read: ReadBytes, length: int, where: str) -> StoredItem:
    """Find the tensor in an item of `length` bytes, by its first and last 1024 bytes, and more if it needs them.

    read: gives bytes of the item.   where: the file and the tensor's name, for messages.
    Raises CheckpointError for what is not an archive with one tensor in it, is damaged, compressed or encrypted.
    """
    return item_in(Archive(read, length, where, _LARGEST))


def item_in(archive: Archive) -> StoredItem:
    """The tensor in an archive. Raises as `read_item` does."""
    records, root = archive.records, archive.root
    for name, expected in (("byteorder", b"little"), (".data/byteorder", b"little")):
        if (record := records.get(root + name)) and (found := archive.contents(record)) != expected:
            raise archive.error(f"its byte order is {shown(found)}; only {expected!r} can be read")
    tensor = _tensor(archive, archive.contents(records[f"{root}data.pkl"]))
    name = f"{root}data/{tensor.storage.key}"
    if name not in records:
        raise archive.error(f"the archive has no record {shown(name)}, which its pickle refers to; the file is damaged")
    stored = records[name]
    itemsize, last = tensor.dtype.itemsize, sum((n - 1) * s for n, s in zip(tensor.sizes, tensor.strides, strict=True))
    if prod(tensor.sizes) and (tensor.offset + last + 1) * itemsize > stored.nbytes:
        raise archive.error(
            f"a tensor of shape {tensor.sizes} and strides {tensor.strides} at element {tensor.offset} of {tensor.dtype} needs "
            f"more than the {stored.nbytes} bytes that are stored; the file is damaged"
        )
    begin = archive.data_start(stored)
    crcs = records.get(root + BLOCK_CRCS)
    return StoredItem(
        tensor.dtype,
        tensor.sizes,
        tensor.strides,
        begin + tensor.offset * itemsize,
        begin,
        stored.nbytes,
        stored.crc if archive.has_crcs else None,
        None if crcs is None else archive.data_start(crcs),
    )


# ---------------------------------------------------------------------- the pickle


def _tensor(archive: Archive, data: bytes) -> _TensorPickle:
    where = archive.error("data.pkl").args[0]
    found = restricted_load(data, _GLOBALS.__getitem__, where, _storage)
    if not isinstance(found, _TensorPickle):
        raise archive.error(f"expected a tensor in the archive, found {type(found).__name__}")
    if len(found.sizes) != len(found.strides) or min(found.offset, *found.sizes, *found.strides, 0) < 0:
        raise archive.error(f"expected sizes and strides of a tensor, found {found.sizes} and {found.strides}")
    return found


def _storage(pid: Any) -> _StoragePickle:
    kind, dtype, key, *_ = pid
    is_key = isinstance(key, str) and len(key) <= _MOST_CHARACTERS
    if kind != "storage" or not (dtype is _UNTYPED or isinstance(dtype, torch.dtype)) or not is_key:
        raise ValueError(f"persistent id {shown(pid)}, expected that of a storage")
    return _StoragePickle(key, dtype if isinstance(dtype, torch.dtype) else None)


_UNTYPED = "torch.UntypedStorage"
_GLOBALS: dict[Global, object] = {
    **GLOBAL_DTYPES,
    **{("torch", name): dtype for dtype, name in LEGACY_STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _TensorPickle.rebuilt,
    ("torch._utils", "_rebuild_tensor_v3"): _TensorPickle.rebuilt,
    ("torch._utils", "_rebuild_parameter"): _TensorPickle.of_parameter,
    ("torch.storage", "UntypedStorage"): _UNTYPED,
    ("torch", "Size"): integers,
    ("collections", "OrderedDict"): new_dict,
}


# ---------------------------------------------------------------------- items of our own


_DESCRIPTOR = 24  # bytes after the memory: a signature of 4, its CRC-32, and twice its length
_CRCS = _DESCRIPTOR + LOCAL.size + len(f"archive/{BLOCK_CRCS}")  # from the end of the memory to the blocks' checksums


def known_item(read: ReadBytes, dtype: torch.dtype, sizes: tuple[int, ...], length: int) -> StoredItem | None:
    """The item, if `items.py` wrote it for a tensor that lies in memory with any one of its dims outermost; else None.

    read: gives bytes of the item.   length: of the item.
    Cost: a read of its header, and of 4 bytes more if it has no checksums of blocks.
    """
    nbytes = prod(sizes) * dtype.itemsize
    if not nbytes or length != item_length(dtype, len(sizes), nbytes):
        return None
    headers = _headers(dtype, sizes)
    start = len(next(iter(headers)))
    strides = headers.get(read(0, start))
    if strides is None:
        return None
    end = start + nbytes
    if nbytes > BLOCK:
        return StoredItem(dtype, sizes, strides, start, start, nbytes, None, end + _CRCS)
    return StoredItem(dtype, sizes, strides, start, start, nbytes, int.from_bytes(read(end + 4, 4), "little"), None)


@lru_cache(4096)
def _headers(dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[bytes, tuple[int, ...]]:
    """The headers that `known_item` recognises, all of one length, with the strides that each stands for."""
    orders = [outermost_stride(torch.Size(sizes), dim) for dim in range(max(1, len(sizes)))]
    return {item_header(dtype, sizes, strides): strides for strides in reversed(orders)}

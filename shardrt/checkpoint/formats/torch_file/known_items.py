"""Items that `items.py` wrote, recognised by their headers: nothing is parsed, and one end of the item is read only."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from ....fsdp.params.param import outermost_stride
from ..stored import ReadBytes, StoredItem
from .items import BLOCK, BLOCK_CRCS, LOCAL, item_header, item_length

_DESCRIPTOR = 24  # bytes after the memory: a signature of 4, its CRC-32, and twice its length
_CRCS = _DESCRIPTOR + LOCAL.size + len(f"archive/{BLOCK_CRCS}")  # from the end of the memory


def known_item(read: ReadBytes, dtype: torch.dtype, sizes: tuple[int, ...], length: int) -> StoredItem | None:
    """The item of a tensor that lies in memory with any one of its dims outermost; None for any other item.

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
    """The headers of such items, all of one length, with the strides that each stands for."""
    orders = [outermost_stride(torch.Size(sizes), dim) for dim in range(max(1, len(sizes)))]
    return {item_header(dtype, sizes, strides): strides for strides in reversed(orders)}

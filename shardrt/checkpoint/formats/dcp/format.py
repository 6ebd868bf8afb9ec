"""DCP's format as reading sees it: files with the marks of a save, and chunks that are archives."""

from __future__ import annotations

import torch

from ..stored import Format, ReadBytes, StoredItem
from ..torch_file.known_items import known_item
from ..torch_file.stored_items import read_item
from .marks import check_marks


def _find_item(read: ReadBytes, dtype: torch.dtype, sizes: tuple[int, ...], length: int, where: str) -> StoredItem:
    return known_item(read, dtype, sizes, length) or read_item(read, length, where)


DCP = Format("dcp", check_marks, _find_item, has_checksums=True)

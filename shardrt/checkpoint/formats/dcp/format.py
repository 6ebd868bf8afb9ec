"""DCP's format as reading sees it: files that have the marks of their save if shardrt wrote them, and chunks as archives."""

from __future__ import annotations

from ..stored import Format
from ..torch_file.stored_items import find_item
from .marks import check_marks

DCP = Format("dcp", check_marks, find_item, has_checksums=True)

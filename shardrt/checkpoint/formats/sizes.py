"""Sizes of files in words."""

from __future__ import annotations

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: int | str) -> int:
    """The bytes of a size such as "5GB", with decimal units as in huggingface_hub. Raises ValueError for anything else."""
    if isinstance(size, int):
        nbytes = float(size)
    else:
        text = size.strip()
        try:
            nbytes = float(text[:-2]) * _UNITS[text[-2:].upper()]
        except (KeyError, ValueError):
            nbytes = 0.0
    if not 1 <= nbytes < float("inf"):
        raise ValueError(f"max_shard_size={size!r}: expected a number of bytes, or such as '5GB' ({', '.join(_UNITS)})")
    return int(nbytes)

"""Progress bars of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, if tqdm is installed. Yields a function to call with how many units are just done."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", leave=unit == "B", disable=None) as bar:
        yield bar.update

"""Functions that are called, each for as long as a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Observer = TypeVar("Observer")


class Observers(Generic[Observer]):
    """Those whose blocks are open, in the order in which they were opened."""

    all: tuple[Observer, ...]  # another tuple after each change, so that a thread may go through it meanwhile

    def __init__(self) -> None:
        self.all = ()

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """In the block, `observer` is one of these."""
        self.all = (*self.all, observer)
        try:
            yield
        finally:
            self.all = tuple(each for each in self.all if each is not observer)

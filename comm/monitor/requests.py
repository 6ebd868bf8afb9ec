"""What this process waits for that is no other rank: requests to a store. The watchdog ends a job in which one never ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class StoreRequest:
    """what: it asks for, as "write 's3://...'".   seconds: that the watchdog has seen it under way."""

    __slots__ = ("is_under_way", "seconds", "what")

    def __init__(self, what: str) -> None:
        self.what, self.seconds, self.is_under_way = what, 0.0, True

    def __str__(self) -> str:
        return f"a request to a store, to {self.what}"


class StoreRequests:
    """Those under way, of all threads."""

    def __init__(self) -> None:
        self._under_way = dict[StoreRequest, None]()  # in their order

    @contextmanager
    def under_way(self, what: str) -> Iterator[None]:
        """The block is a request."""
        request = StoreRequest(what)
        self._under_way[request] = None
        try:
            yield
        finally:
            request.is_under_way = False
            del self._under_way[request]

    def advance(self, elapsed: float) -> StoreRequest | None:
        """Add `elapsed` seconds to each. Returns: the oldest."""
        found = list(self._under_way.copy())  # of other threads, which change it
        for request in found:
            request.seconds += elapsed
        return next(iter(found), None)


requests = StoreRequests()

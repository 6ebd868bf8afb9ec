"""Bytes of tensors that are alive, by kind, as weak references to their storages tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_META = torch.device("meta")


class _Storage(weakref.ref):  # type: ignore[type-arg]
    """A storage that may die."""

    __slots__ = ("kind", "nbytes")

    kind: str
    nbytes: int


class LiveBytes:
    """Counts the storages of meta tensors that it is shown, until they die.

    nbytes: by kind.   kind: of the storages that are new from now on.
    changed: called with each change, the kind and the bytes, negative for a storage that has died.
    """

    kind: str
    nbytes: dict[str, int]

    def __init__(self, changed: Callable[[str, int], None]) -> None:
        self.kind = "activations"
        self.nbytes = {}
        self._changed = changed
        self._alive: dict[int, _Storage] = {}  # by the identity of the storage, which it keeps while it is alive

    def see(self, made: Any) -> None:
        """Count what an operation has returned: a tensor, or several."""
        if isinstance(made, torch.Tensor):
            if made.device == _META:
                self._see(made.untyped_storage())
        elif isinstance(made, (tuple, list)):
            for each in made:
                self.see(each)

    def _see(self, storage: torch.UntypedStorage) -> None:
        identity = id(storage)
        known = self._alive.get(identity)
        if known is not None and known() is storage:
            return
        born = _Storage(storage, lambda died: self._gone(identity, died))
        born.kind, born.nbytes = self.kind, storage.nbytes()
        self._alive[identity] = born
        self._count(born.kind, born.nbytes)

    def _gone(self, identity: int, died: _Storage) -> None:
        if self._alive.get(identity) is died:
            del self._alive[identity]
        self._count(died.kind, -died.nbytes)

    def _count(self, kind: str, nbytes: int) -> None:
        self.nbytes[kind] = self.nbytes.get(kind, 0) + nbytes
        self._changed(kind, nbytes)

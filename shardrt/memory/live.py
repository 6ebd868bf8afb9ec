"""Bytes of tensors that are alive, by kind, as weak references to their storages tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None for one without: a wrapper, a sparse tensor, a parameter that is not initialised yet."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None


class _LiveStorage(weakref.ref):  # type: ignore[type-arg]
    """A storage that may die."""

    __slots__ = ("kind", "nbytes")

    kind: str
    nbytes: int


class LiveBytes:
    """Counts the storages that it is shown, of tensors on devices of one type, until they die.

    nbytes: by kind.   kind: of the storages that are new from now on.
    changed: called with each change, the kind and the bytes, negative for a storage that has died.
    """

    kind: str
    nbytes: dict[str, int]

    def __init__(self, device_type: str, changed: Callable[[str, int], None] | None = None) -> None:
        self.kind = "activations"
        self.nbytes = {}
        self._device_type = device_type
        self._changed = changed
        self._alive: dict[int, _LiveStorage] = {}  # by the identity of the storage, which it keeps while it is alive

    def see(self, made: Any) -> None:
        """Count what an operation has returned: a tensor, or several."""
        if isinstance(made, torch.Tensor):
            storage = storage_of(made) if made.device.type == self._device_type else None
            if storage is not None:
                self._see(storage, self.kind)
        elif isinstance(made, (tuple, list)):
            for each in made:
                self.see(each)

    def alive(self) -> Iterator[tuple[torch.UntypedStorage, str]]:
        """Each storage that is alive, and its kind."""
        for known in list(self._alive.values()):
            storage = known()
            if storage is not None:
                yield storage, known.kind

    def relabel(self, storage: torch.UntypedStorage, kind: str) -> None:
        """The storage is of this kind from now on, whether it was shown before or not. No-op on another type of device."""
        if storage.device.type != self._device_type:
            return
        known = self._see(storage, kind)
        if known.kind != kind:
            self._count(known.kind, -known.nbytes)
            known.kind = kind
            self._count(kind, known.nbytes)

    def _see(self, storage: torch.UntypedStorage, kind: str) -> _LiveStorage:
        identity = id(storage)
        known = self._alive.get(identity)
        if known is not None and known() is storage:
            return known
        born = _LiveStorage(storage, lambda died: self._gone(identity, died))
        born.kind, born.nbytes = kind, storage.nbytes()
        self._alive[identity] = born
        self._count(kind, born.nbytes)
        return born

    def _gone(self, identity: int, died: _LiveStorage) -> None:
        if self._alive.get(identity) is died:
            del self._alive[identity]
        self._count(died.kind, -died.nbytes)

    def _count(self, kind: str, nbytes: int) -> None:
        self.nbytes[kind] = self.nbytes.get(kind, 0) + nbytes
        if self._changed is not None:
            self._changed(kind, nbytes)

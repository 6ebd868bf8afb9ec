"""What happens to groups, and which collectives are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from shardrt.comm import Work
from shardrt.comm.core.calls import CallList, Hook
from shardrt.comm.groups.control import hooked
from shardrt.fsdp.base.events import BufferKind, HasName, Observer, observing


def observing_memory(told: Callable[[BufferKind, HasName, int], object]) -> AbstractContextManager[None]:
    """In the block, `told` is told of the kind, the group and the bytes of each buffer that is allocated, or, if negative,
    released."""
    observer = Observer()
    observer.memory_changed = told  # type: ignore[method-assign,assignment]
    return observing(observer)


def observing_gradients(told: Callable[[HasName, torch.UntypedStorage], object]) -> AbstractContextManager[None]:
    """In the block, `told` is told of the group and the storage of sharded gradients."""
    observer = Observer()
    observer.gradients_made = told  # type: ignore[method-assign,assignment]
    return observing(observer)


class _Names(Hook):
    def __init__(self) -> None:
        self.names: list[str] = []

    def called(self, calls: CallList, work: Work) -> None:
        self.names += [call.name for call in calls]


@contextmanager
def observing_calls() -> Iterator[list[str]]:
    """The names of the collectives that are called in the block."""
    watch = _Names()
    with hooked(watch):
        yield watch.names

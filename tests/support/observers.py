"""Functions that are told of what happens to groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

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

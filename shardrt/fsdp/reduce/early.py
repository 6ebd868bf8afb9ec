"""Gradients that autograd computes where `GradientReduction.pack` would copy them: in a buffer that has begun early.

| verb  | from    | to      | what is done                                                                         |
|-------|---------|---------|--------------------------------------------------------------------------------------|
| begin | nothing | begun   | a packed buffer is allocated, or is lent its memory until another buffer occupies it |
| give  | begun   | begun   | a tensor in a gradient's place is made: autograd computes and holds the gradient     |
| take  | either  | nothing | pack() writes the buffer, and is told which gradients are there                      |
| drop  | either  | nothing | gradients get memory of their own, and what was allocated is freed                   |

Only where all streams run on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...comm import Stream
from ..memory.buffers import CommFlatBuffer
from ..params.in_place import Given
from ..params.param import ShardedParam
from .packed_grads import Grads, PackBuffer


class EarlyGrads:
    """What autograd has computed of the gradients of these parameters in a packed buffer since the last pack()."""

    source: PackBuffer | None  # the buffer that has begun, None for nothing; written by the verbs
    stream: Stream  # the one that allocated it; written by begin()
    _given: Given  # tensors in it
    _params: Sequence[ShardedParam]

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params, self._given, self.source = params, Given(), None

    def begin(self, source: PackBuffer, stream: Stream) -> bool:
        """Let autograd write to `source` from now on. Returns: False, and does nothing, if another reduction has its memory."""
        assert self.source is None, "pack() or drop() ends what has begun"
        if isinstance(source.buffer, CommFlatBuffer):
            if not source.buffer.comm_buffer.lend(self.drop):
                return False
        elif source.buffer.available:
            stream.submit(source.buffer.allocate)
        else:
            return False
        self.source, self.stream = source, stream
        return True

    def give(self, position: int) -> torch.Tensor | None:
        """A tensor in the place of this gradient, in the parameter's shape. None: it was given away since begin()."""
        assert self.source is not None, "begin() comes first"
        return None if position in self._given else self._given.give(position, self.source.whole[position])

    def take(self, source: PackBuffer, grads: Grads, stream: Stream) -> frozenset[int]:
        """End what has begun, since pack() is about to write `source`. Returns: which of `grads` lie there already."""
        if self.source is not source:
            self.drop()
            return frozenset()
        self._end(source)
        return self._given.arrived(grads, source.whole, stream)

    def drop(self) -> None:
        """Undo what has begun, if anything has."""
        if (source := self.source) is not None:
            self._end(source)
            self.stream.submit(partial(self._given.copy_away, [param.unsharded.grad for param in self._params], source.whole))
            self.stream.submit(source.buffer.release)  # no-op if its memory was lent

    def _end(self, source: PackBuffer) -> None:
        self.source = None
        if isinstance(source.buffer, CommFlatBuffer):
            source.buffer.comm_buffer.end_loan()

"""Gradients of which each tensor-parallel rank has a term only, as those of a norm on its part of a sequence: their sums.

They are part of the packed gradients of a group, so one all-reduce adds up all of them, before the group's reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from ..comm import Communicator, DeviceMesh, ReduceOp, Stream
from ..kernels import pack_into
from .buffers import BufferKind, FlatBuffer, MemoryCounter
from .grad_layout import ReduceLayout
from .param import ShardedParam
from .ranges import Named
from .tensor_parallel import TERMS


class TermSum:
    """Adds up the pieces of a packed buffer of which each rank of `comm` has a term, through one flat buffer.

    The pieces lie in it one after the other, whole parameters in order, so ranks whose layouts differ agree on it.
    """

    _comm: Communicator
    _indices: list[int]  # of the pieces, by parameter
    _buffer: FlatBuffer  # allocated and released on the reduce stream
    _flat: torch.Tensor
    _views: list[torch.Tensor]

    def __init__(
        self,
        comm: Communicator,
        indices: list[int],
        pieces: list[torch.Tensor],
        dtype: torch.dtype,
        memory: MemoryCounter,
        group: Named,
    ) -> None:
        self._comm, self._indices = comm, indices
        *starts, numel = accumulate((piece.numel() for piece in pieces), initial=0)
        self._buffer = FlatBuffer(numel * dtype.itemsize, comm.device, memory, BufferKind.SCRATCH, group)
        self._flat = self._buffer.view(dtype, 0, (numel,))
        self._views = [
            self._buffer.view(dtype, start * dtype.itemsize, piece.shape, piece.stride())
            for start, piece in zip(starts, pieces, strict=True)
        ]
        self._buffer.seal()

    def run(self, pieces: list[torch.Tensor], stream: Stream) -> None:
        """pieces: all of the packed buffer."""
        mine = [pieces[index] for index in self._indices]
        stream.submit(self._buffer.allocate)
        stream.submit(partial(pack_into, self._views, mine))
        self._comm.all_reduce(self._flat, self._flat, ReduceOp.SUM, stream=stream)
        stream.submit(partial(pack_into, mine, self._views))
        stream.submit(self._buffer.release)

    def discard(self) -> None:
        """Free the memory, after a failure."""
        self._buffer.release()


def term_sums(
    params: Sequence[ShardedParam],
    layout: ReduceLayout,
    pieces: list[torch.Tensor],
    dtype: torch.dtype,
    memory: MemoryCounter,
    group: Named,
) -> list[TermSum]:
    """One sum for each mesh over which terms are added up. pieces: views of a packed buffer, as in `layout`."""
    indices: dict[DeviceMesh, list[int]] = {}
    # By parameter, not by the rank that keeps a piece: ranks of other columns cut elsewhere.
    for index, piece in sorted(enumerate(layout.pieces), key=lambda item: (item[1].position, item[1].start)):
        outer = params[piece.position].outer
        if outer is not None and outer.partial_mesh is not None:
            indices.setdefault(outer.partial_mesh, []).append(index)
    return [
        TermSum(mesh.communicator(TERMS), chosen, [pieces[index] for index in chosen], dtype, memory, group)
        for mesh, chosen in indices.items()
    ]

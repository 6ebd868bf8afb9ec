"""Where the bytes of a save come from: the tensors' own memory, pieces that pass through pinned buffers, or copies.

An asynchronous save copies tensors beside the work that runs next if everything that writes them waits (`snapshots.py` in
tensor/placement):

| tensors                                                                          | copied on                |
|----------------------------------------------------------------------------------|--------------------------|
| parameters that `fully_shard` has cut over several ranks                         | a stream of their own    |
| optimizers' sharded state                                                        | a stream of their own    |
| parameters with whose shards modules compute: one rank, tensor parallelism alone | the current stream       |
| buffers, plain tensors, and all else                                             | the current stream       |

A forward may write what is in the last two rows: statistics of batch normalization, for example.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch

from ...comm.core.streams import Stream, current_stream
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import owned
from ...tensor.placement import snapshots
from ...tensor.placement.snapshots import Snapshot, address
from ..disk.files import Bytes, Writer, bytes_of

_PINNED = 32 << 20  # bytes of a pinned buffer that pieces pass through
_BUFFER = 256 << 20  # bytes of a buffer for copies; a large state takes several
_ALIGNMENT = 64
_PIECE = 4 << 20  # bytes that are checked and written at a time: what the caches hold


Pieces = list[memoryview] | Iterator[memoryview]
PiecesOf = Callable[[torch.Tensor], Pieces]  # brings the memory of a tensor without gaps to the host, as it lies


class ItemSource(NamedTuple):
    """What is written for a tensor or an object.

    file: the name of its file.   pieces: places in the file, ascending, each with its bytes.
    is_passing: whether the bytes of a piece change when the next piece is asked for.
    """

    file: str
    pieces: Iterator[tuple[int, Bytes]]
    is_passing: bool = False

    def write(self, writer: Writer) -> None:
        """Hand all of it to the file's writer."""
        for place, piece in self.pieces:
            writer.write(place, [piece])
            if self.is_passing and isinstance(piece, memoryview):  # a header is no memoryview, and goes with what follows
                writer.flush()


def in_runs(pieces: Iterable[memoryview], starts: Iterable[int], nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Bytes that follow each other, with their places: runs of `nbytes` that begin at `starts`, cut to what the caches hold."""
    following, place, left = iter(starts), 0, 0
    for piece in pieces:
        done = 0
        while done < len(piece):
            if not left:
                place, left = next(following), nbytes
            part = piece[done : done + min(left, _PIECE)]
            yield place, part
            done, place, left = done + len(part), place + len(part), left - len(part)


class Direct:
    """Gives tensors of the host as they lie, and those of a GPU in pieces, through two pinned buffers of 32 MiB."""

    def __init__(self) -> None:
        self._pinned: list[torch.Tensor] = []

    def pieces(self, memory: torch.Tensor) -> Pieces:
        """The tensor's bytes, as views of host memory."""
        return [bytes_of(memory)] if memory.device.type == "cpu" else self._passing(memory)

    def _passing(self, memory: torch.Tensor) -> Iterator[memoryview]:
        """While the host reads one piece, the next one is on its way."""
        if not self._pinned:
            self._pinned = [torch.empty(_PINNED, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
        parts = _flat_bytes(memory).split(_PINNED)
        following = self._fetch(parts[0], 0)
        for index in range(len(parts)):
            here, arrived = following
            if index + 1 < len(parts):
                # Hazard: this overwrites piece `index - 1`; its reader was done with it when it asked for this piece.
                following = self._fetch(parts[index + 1], (index + 1) % 2)
            arrived.synchronize()
            yield bytes_of(here)

    def _fetch(self, part: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        here = self._pinned[half][: part.numel()]
        with torch.cuda.device(part.device):
            here.copy_(part, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return here, arrived


class Copies:
    """Copies of tensors in buffers that are kept: `restart` makes them free for other tensors.

    A GPU's tensors are copied on its current stream, so that what is submitted to it later cannot change the copies. But
    tensors whose writers all wait are copied on a stream of their own, so that what is submitted later runs beside the copies.
    """

    def __init__(self, stream: Stream) -> None:
        self._buffers = {False: _Buffers(is_pinned=False), True: _Buffers(is_pinned=True)}
        self._stream = stream
        self._aside = frozenset[int]()  # the storages of the tensors that are copied there
        self._pairs = list[tuple[torch.Tensor, torch.Tensor]]()  # (to, from), which `start` copies there

    def restart(self) -> None:
        """Give up the copies, not their memory."""
        self._aside, self._pairs = storages_with_known_writers(), []
        for buffers in self._buffers.values():
            buffers.restart()

    def pieces(self, memory: torch.Tensor) -> list[memoryview]:
        """The copy of a tensor, in several pieces if it lies in several buffers. Its bytes may be there only after `start`."""
        flat, pieces, is_aside = _flat_bytes(memory), [], address(memory) in self._aside
        buffers, left = self._buffers[memory.device.type != "cpu"], flat.numel()
        while left:
            here = buffers.take(left)
            start = flat.numel() - left
            source = flat[start : start + here.numel()]
            if is_aside:
                self._pairs.append((here, source))
            else:
                here.copy_(source, non_blocking=True)
            pieces.append(bytes_of(here))
            left -= here.numel()
        return pieces

    def start(self) -> Snapshot | None:
        """Start the copies on the stream of their own, after the current stream. Returns them; None if there are none.

        They end after those on the current stream.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return None
        self._stream.wait(current_stream(self._stream.device).record())
        if (before := snapshots.current) is not None:  # of another save
            self._stream.wait(before.copied)
        self._stream.submit(lambda: [here.copy_(source, non_blocking=True) for here, source in pairs])
        return Snapshot([source for _, source in pairs], self._stream.record())


class _Buffers:
    """Host memory that is handed out from its beginning, in buffers of 256 MiB."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._buffers: list[torch.Tensor] = []
        self._used = 0  # bytes of all of them, which are handed out one after the other

    def restart(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The next bytes of a buffer: (n,) uint8. n is nbytes, or what is left in the buffer if that is less."""
        index, start = divmod(self._used, _BUFFER)
        if index == len(self._buffers):
            self._buffers.append(self._allocate())
        here = self._buffers[index][start : start + nbytes]
        self._used += -(-here.numel() // _ALIGNMENT) * _ALIGNMENT
        return here

    def _allocate(self) -> torch.Tensor:
        if self._is_pinned:
            return torch.empty(_BUFFER, dtype=torch.uint8, device="cpu", pin_memory=True)
        # Cost: memory is taken page by page when it is first written; large pages make that three times as fast.
        memory = mmap.mmap(-1, _BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _flat_bytes(memory: torch.Tensor) -> torch.Tensor:
    """A view of memory without gaps as (bytes,) uint8, as it lies."""
    return memory.as_strided((memory.numel(),), (1,)).view(torch.uint8)


def storages_with_known_writers() -> frozenset[int]:
    """The storages' addresses of tensors whose writers all wait, of all models and optimizers; only those on a GPU."""
    # Hazard: a CUDA graph with an optimizer's step writes when it is replayed, and no hook runs then.
    if snapshots.captured_a_step:
        return frozenset()
    shards = [tensor._local_tensor for tensor in (*_parameters(), *_state())]
    return frozenset(snapshots.address(shard) for shard in shards if type(shard) is torch.Tensor and shard.is_cuda)


def _parameters() -> Iterator[DTensor]:
    for param, group in owned():
        if isinstance(param, DTensor) and group.mesh.size > 1:
            yield param


def _state() -> Iterator[DTensor]:
    for optimizer in snapshots.optimizers:
        for values in optimizer.state.values():
            if isinstance(values, dict):
                yield from (value for value in values.values() if isinstance(value, DTensor))

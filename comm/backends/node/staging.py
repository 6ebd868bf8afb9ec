"""Large collectives of one node between tensors in ordinary memory: chunk by chunk, through the node's shared memory.

A rank writes a chunk to its buffer of `SharedMemoryExchange`, meets the others, and reads theirs straight into its result, or
reduces them into it: what is written and read in between stays in the caches. It takes half to two thirds of the time of
messages (`docs/log.md`).

Ranks meet once for each chunk, which takes long if one of them waits for a core. After such a collective they make some by
messages. Each collective goes one way from its begin to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial
from itertools import pairwise
from math import inf
from time import perf_counter

import torch

from ...core.calls import Op
from .host_reduce import reduce_rows
from .shared_memory import SharedMemoryExchange, aligned_down

_Place = tuple[int, int]  # address and bytes: slicing tensors takes a tenth of the time of a chunk

_PATIENCE_S = 0.0005  # that a chunk may take, times the number of ranks: ten times as long as on idle cores
_PAUSE = 32  # calls by messages after one that took longer


class StagedCollectives:
    """Collectives through `exchange`, which it borrows: it takes no memory of its own.

    Each returns False, on every rank and having done nothing, if this call is to go by messages.
    Raises: Interrupted, if another rank has raised in the middle of the call, and so left `exchange`. Either one goes on after
    `agree()`.
    """

    def __init__(self, exchange: SharedMemoryExchange, rank: int, size: int) -> None:
        self._exchange, self._rank, self._size = exchange, rank, size
        # Each rank in another order, so that not all read from the same one at once.
        self._peers = [(rank + shift) % size for shift in range(1, size)]
        self._slot_nbytes = aligned_down(exchange.capacity // (size - 1))  # that a rank writes for one of the others
        self._pause = 0  # calls that return at once; the same number on every rank
        self._deadline = inf  # by which the next meeting has to be over

    def rejoin(self) -> None:
        """Start anew. Collective: every rank has left, maybe in the middle of a call."""
        self._pause = 0

    def gather(self, ranges: Sequence[torch.Tensor], own: torch.Tensor) -> bool:
        """Gather every rank's range. `own` is this rank's, in its place already or not."""
        places, step = _places(ranges), self._exchange.capacity
        return self._run(places, step, partial(self._gather_chunk, places, own.data_ptr(), step))

    def reduce(self, out: torch.Tensor, inp: torch.Tensor, bounds: Sequence[int], op: Op) -> bool:
        """Reduce range `bounds[r] : bounds[r + 1]` of every rank's `inp` into rank r's `out`."""
        ranges = _split(inp, bounds)
        places, own = _places(ranges), ranges[self._rank]
        return self._run(places, self._slot_nbytes, partial(self._reduce_chunk, out, own, places, op))

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor, bounds: Sequence[int], op: Op) -> bool:
        """Reduce each range on its rank and gather them in `out`, which may be `inp`. A chunk is gathered from the cache."""
        ranges, outs, step = _split(inp, bounds), _split(out, bounds), self._slot_nbytes
        places, out_places, own, own_out = _places(ranges), _places(outs), ranges[self._rank], outs[self._rank]

        def run(begin: int) -> None:
            self._reduce_chunk(own_out, own, places, op, begin)
            self._gather_chunk(out_places, own_out.data_ptr(), step, begin)

        return self._run(places, step, run)

    def _run(self, places: Sequence[_Place], step: int, run_chunk: Callable[[int], None]) -> bool:
        """Run chunks of `step` bytes, unless the ranks pause."""
        if self._pause:
            self._pause -= 1
            return False
        self._deadline = inf  # ranks may come to their first meeting at different times
        for begin in range(0, max(nbytes for _, nbytes in places), step):
            run_chunk(begin)
        return True

    def _meet(self) -> None:
        """Wait until every rank has written. All find out if one of them comes late."""
        now = perf_counter()
        is_late = now > self._deadline
        if not self._exchange.barrier(int(is_late)) or is_late:
            self._pause = _PAUSE
        self._deadline = (perf_counter() if self._deadline == inf else now) + _PATIENCE_S * self._size

    def _gather_chunk(self, places: Sequence[_Place], own: int, step: int, begin: int) -> None:
        """Gather a chunk of every rank's range. own: the address of this rank's."""
        exchange, (into, size) = self._exchange, places[self._rank]
        if begin < size:
            memmove(exchange.outgoing_address(), own + begin, min(step, size - begin))
            if own != into:
                memmove(into + begin, own + begin, min(step, size - begin))
        self._meet()
        for peer in self._peers:
            into, size = places[peer]
            if begin < size:
                memmove(into + begin, exchange.incoming_address(peer), min(step, size - begin))

    def _reduce_chunk(self, out: torch.Tensor, own: torch.Tensor, places: Sequence[_Place], op: Op, begin: int) -> None:
        """Reduce a chunk of each range on its rank. own: this rank's range of what it reduces."""
        exchange, step = self._exchange, self._slot_nbytes
        to = exchange.outgoing_address()
        for slot, peer in enumerate(self._peers):
            source, size = places[peer]
            if begin < size:
                memmove(to + slot * step, source + begin, min(step, size - begin))
        self._meet()
        first, last = begin // own.element_size(), (begin + step) // own.element_size()
        part = own[first:last]
        rows = [part if rank == self._rank else self._row(rank, part) for rank in range(self._size)]
        reduce_rows(rows, op, out[first:last], divisor=self._size)

    def _row(self, rank: int, own: torch.Tensor) -> torch.Tensor:
        """The part that `rank` has written for this rank, of the size of `own`."""
        slot = (self._rank - rank - 1) % self._size
        return self._exchange.row(rank, slot * self._slot_nbytes, own.dtype, len(own))


def _places(tensors: Sequence[torch.Tensor]) -> list[_Place]:
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def _split(tensor: torch.Tensor, bounds: Sequence[int]) -> list[torch.Tensor]:
    return [tensor[begin:end] for begin, end in pairwise(bounds)]

"""Large collectives on the host, node by node.

Ranks of one node read each other's memory if the tensors lie in buffers of `empty()`; otherwise they exchange them in chunks
(`staging.py`) if the communicator has one node, else in messages. Between nodes, ranks with the same local rank (their number
within the node) work together:

    all-gather       a rank exchanges its part with the ranks of its local rank on the other nodes; then the ranks of a node
                     share what each of them has received
    reduce-scatter   the rank with local rank l reduces what its node has for the ranks with local rank l on all nodes, starting
                     from the partial result of the previous node, and passes it on to the next node; the last node rounds the
                     results and sends them out
    all-reduce       a reduce-scatter of ranges of nearly equal size, then an all-gather of them (Rabenseifner's algorithm)

So a reduction is a left fold over the ranks in rank order, bitwise the same by every path. It requires nodes with equally many
ranks, numbered consecutively; any other job is treated as one node without shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby, pairwise
from struct import Struct

import torch
from mpi4py import MPI

from ...core.calls import Op
from ...core.members import free, revocable
from ..messages import copy, message, swap
from ..objects import gather_objects
from .host_reduce import reduce_rows, wide
from .shared_memory import NodeWindows, SharedMemoryExchange, WindowOffset
from .staging import StagedCollectives

Ranges = Sequence[tuple[int, int]]  # first and one past the last element, of a chunk of what each rank gets

# Cost: a reduction goes chunk by chunk, so that what was received is still in cache when it is added. 64 MB on 2 ranks: 8.6 ms,
# against 18.8 ms for one all-to-all of everything.
_CHUNK_NBYTES = 4 << 20
_WINDOW_OFFSET = Struct("qq")
_NO_WINDOW = (-1, 0)  # stands for None in messages of WindowOffsets between ranks


class NodeAlgorithms:
    """The nodes of a communicator, seen from one rank. Creating and `close()` are collective over `comm`, which it borrows.

    nodes: their number.   is_one_node: all ranks share memory.   windows: the node's shared memory, or None.
    ranks_per_node: if the ranks are numbered node by node, equally many on each; else None.
    """

    def __init__(self, comm: MPI.Comm, node: int) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        numbers = gather_objects(comm, node)
        self.nodes = len(set(numbers))
        self.is_one_node = self.nodes == 1
        regular = not self.is_one_node and _are_equal_runs(numbers)
        self._node = node if regular else None
        self.windows: NodeWindows | None = None
        self.use(comm)
        self._per_node = self._local.Get_size()
        self.ranks_per_node = self._per_node if self.is_one_node or regular else None
        self._local_rank = self._local.Get_rank()
        if self.is_one_node or regular:
            self.windows = NodeWindows(self._local)
        self._staged: StagedCollectives | None = None
        # Whom to send to and whom to receive from within the node, so that every rank pairs with every other in turn.
        shifts = range(1, self._per_node)
        self._partners = [((self._local_rank + s) % self._per_node, (self._local_rank - s) % self._per_node) for s in shifts]

    def use(self, comm: MPI.Comm) -> None:
        """Send messages over `comm` from now on; communicators that were made of another one stay open. Collective."""
        # The ranks of this node, and the ranks of this local rank on all nodes, in the order of their nodes.
        self._local, self._across = comm, None
        with ExitStack() as made:  # what it holds is undone if something fails
            if self._node is not None:
                self._local = revocable(comm.Split(self._node, self._rank))
                made.callback(free, self._local)
                self._across = revocable(comm.Split(self._local.Get_rank(), self._rank))
                made.callback(free, self._across)
            self._made = made.pop_all()
        if self.windows is not None:
            self.windows.use(self._local)

    def stage_in(self, exchange: SharedMemoryExchange) -> None:
        """Let large tensors in ordinary memory pass through this exchange of all ranks, which are on one node."""
        self._staged = StagedCollectives(exchange, self._rank, self._size)

    def rejoin(self) -> None:
        """See `Backend.rejoin`."""
        if self._staged is not None:
            self._staged.rejoin()

    def close(self) -> None:
        """Free the windows and communicators."""
        if self.windows is not None:
            self.windows.close()
        self._made.close()

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """See `Communicator.all_gather`. Tensors are 1-D, here and below."""
        self._gather_ranges(out, inp, [inp.numel() * rank for rank in range(self._size + 1)])

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        """See `Communicator.reduce_scatter`."""
        self.reduce_ranges(out, inp, [out.numel() * rank for rank in range(self._size + 1)], op)

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        """See `Communicator.all_reduce`."""
        bounds = self.near_equal_bounds(inp.numel())
        own = out[bounds[self._rank] : bounds[self._rank + 1]]
        # Hazard: in place, `own` overwrites a range of `inp` that no rank reads any more: only this rank reduces it.
        offsets = self._exchange_offsets(inp)
        if offsets is None and self._staged is not None and self._staged.all_reduce(out, inp, bounds, op):
            return
        self._reduce_chunks(own, inp, bounds, op, offsets)
        self._gather_ranges(out, own, bounds)

    def near_equal_bounds(self, numel: int) -> list[int]:
        """The bounds of a range for each rank, of nearly equal sizes, that cover `numel` elements."""
        width = -(-numel // self._size)
        return [min(width * rank, numel) for rank in range(self._size + 1)]

    def reduce_ranges(self, out: torch.Tensor, inp: torch.Tensor, bounds: list[int], op: Op) -> None:
        """Reduce range `bounds[r] : bounds[r + 1]` of every rank's `inp` into rank r's `out`, chunk by chunk."""
        offsets = self._exchange_offsets(inp)
        if offsets is None and self._staged is not None and self._staged.reduce(out, inp, bounds, op):
            return
        self._reduce_chunks(out, inp, bounds, op, offsets)

    def _reduce_chunks(
        self, out: torch.Tensor, inp: torch.Tensor, bounds: list[int], op: Op, offsets: Sequence[WindowOffset] | None
    ) -> None:
        chunks = list(_chunks(bounds, max(1, _CHUNK_NBYTES // inp.element_size())))
        outs = [
            out[begin - bounds[self._rank] : end - bounds[self._rank]] for begin, end in (chunk[self._rank] for chunk in chunks)
        ]
        if self._across is None:
            for chunk, into in zip(chunks, outs, strict=True):
                reduce_rows(self._rows(inp, chunk, offsets), op, into, divisor=self._size)
        else:
            self._reduce_along_nodes(self._across, chunks, outs, inp, op, offsets)
        if offsets is not None:
            self._local.Barrier()  # all ranks of the node have finished reading

    def _gather_ranges(self, out: torch.Tensor, own: torch.Tensor, bounds: list[int]) -> None:
        """Gather every rank's range of `out` on every rank. `own` is this rank's, in its place already or not."""
        ranges = [out[begin:end] for begin, end in pairwise(bounds)]
        offsets = None
        if self._across is None:
            offsets = self._exchange_offsets(own)
            if offsets is None and self._staged is not None and self._staged.gather(ranges, own):
                return
        copy(ranges[self._rank], own)
        if self._across is not None:
            column = ranges[self._local_rank :: self._per_node]
            swap(self._across, [ranges[self._rank]] * self.nodes, column)
            offsets = self._exchange_offsets(out)
        for first in range(0, self._size, self._per_node):
            on_node = ranges[first : first + self._per_node]
            if offsets is None:
                swap(self._local, [on_node[self._local_rank]] * self._per_node, on_node)
            else:
                starts = [0] * self._per_node if self._across is None else bounds[first:]
                self._copy_from_peers(on_node, offsets, starts)
        if offsets is not None:
            self._local.Barrier()  # all ranks of the node have finished reading

    def _copy_from_peers(self, parts: Sequence[torch.Tensor], offsets: Sequence[WindowOffset], starts: Sequence[int]) -> None:
        """Copy part p from local rank p's memory, `starts[p]` elements after its offset."""
        assert self.windows is not None, "an offset is in a window"
        for peer, _ in self._partners:
            part = parts[peer]
            part.copy_(self.windows.view(peer, offsets[peer], part.dtype, starts[peer], part.numel()))

    def _reduce_along_nodes(
        self,
        across: MPI.Comm,
        chunks: Sequence[Ranges],
        outs: Sequence[torch.Tensor],
        inp: torch.Tensor,
        op: Op,
        offsets: Sequence[WindowOffset] | None,
    ) -> None:
        node, last = across.Get_rank(), self.nodes - 1
        # Hazard: in place, a result overwrites a chunk of `inp` that this rank has added to it before.
        results = [] if node == last else [across.Irecv(message(into), last) for into in outs]
        for chunk, into in zip(chunks, outs, strict=True):
            for target in range(self.nodes):
                rows = self._rows(inp, chunk[target * self._per_node : (target + 1) * self._per_node], offsets)
                dtype = inp.dtype if node == last else wide(inp.dtype)
                total = into if node == target == last else torch.empty_like(rows[0], dtype=dtype)
                before = None
                if node > 0:
                    before = torch.empty_like(rows[0], dtype=wide(inp.dtype))
                    across.Recv(message(before), node - 1)
                reduce_rows(rows, op, total, before, divisor=self._size if node == last else 1)
                to = node + 1 if node < last else target
                if to != node:
                    across.Send(message(total), to)
        MPI.Request.Waitall(results)

    def _rows(self, inp: torch.Tensor, ranges: Ranges, offsets: Sequence[WindowOffset] | None) -> list[torch.Tensor]:
        """This rank's range of the `inp` of every rank of the node, while the other ranks get theirs."""
        begin, end = ranges[self._local_rank]
        if offsets is not None:
            assert self.windows is not None, "an offset is in a window"
            view = partial(self.windows.view, dtype=inp.dtype, first=begin, numel=end - begin)
            return [view(rank, offset) for rank, offset in enumerate(offsets)]
        rows = list(inp.new_empty((self._per_node - 1, end - begin)).unbind())
        rows.insert(self._local_rank, inp[begin:end])
        for to, source in self._partners:
            going, coming = message(inp[slice(*ranges[to])]), message(rows[source])
            self._local.Sendrecv(going, to, 0, coming, source, 0)
        return rows

    def _exchange_offsets(self, tensor: torch.Tensor) -> list[WindowOffset] | None:
        """The window offset of `tensor` on every rank of this node; None unless all of them lie in windows. Blocks."""
        if not self.windows:
            return None
        self.windows.fence()
        rows = bytearray(_WINDOW_OFFSET.size * self._per_node)
        own = self.windows.find(tensor) or _NO_WINDOW
        self._local.Allgather([_WINDOW_OFFSET.pack(*own), MPI.BYTE], [rows, MPI.BYTE])
        self.windows.fence()
        offsets = [WindowOffset(*row) for row in _WINDOW_OFFSET.iter_unpack(rows)]
        return None if _NO_WINDOW in offsets else offsets


def _are_equal_runs(nodes: Sequence[int]) -> bool:
    """True for ranks that are numbered node by node, equally many on each."""
    runs = [len(list(run)) for _, run in groupby(nodes)]
    return len(runs) == len(set(nodes)) and len(set(runs)) == 1


def _chunks(bounds: Sequence[int], step: int) -> Iterator[Ranges]:
    """The ranges between `bounds` in chunks of `step` elements: chunk by chunk, what it has of every range, maybe nothing."""
    ranges = list(pairwise(bounds))
    for first in range(0, max(end - begin for begin, end in ranges), step):
        yield [(min(begin + first, end), min(begin + first + step, end)) for begin, end in ranges]

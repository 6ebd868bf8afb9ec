"""CPU tensors over MPI.

MPI moves bytes, torch does the arithmetic (see `host_reduce.py`). A small collective is one exchange in the node's shared
memory (`shared_memory.py`), or one MPI call if its ranks are on several nodes; a large one goes node by node
(`node_algorithms.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import ClassVar, TypeVar
from weakref import WeakSet

import torch
from mpi4py import MPI

from ..core.backend import Backend
from ..core.calls import CollectiveCall, Counts, Op
from ..core.fingerprint import fingerprint_of
from ..core.members import free, revocable
from ..core.ranks import evenly_spaced
from ..core.streams import Stream
from ..ending.words import name_ranks
from .meeting import LEFT, QUIT, MessageMeeting
from .messages import copy, flat, memory, message, messages, start_receiving, start_sending, swap
from .node.host_reduce import reduce_rows
from .node.node_algorithms import NodeAlgorithms
from .node.node_memory import MemoryFile
from .node.shared_memory import SharedMemoryExchange, aligned_size
from .objects import gather_objects
from .pairs import Pairs

T = TypeVar("T")

# Up to this size a collective takes the small-message path; larger ones go node by node (all-gather of 2 MB on 2 ranks by
# messages: 0.33 ms, MPICH's own 0.87).
_SMALL_NBYTES = 1 << 15
# Small collectives of a group share exchanges: an exchange costs little on idle cores, and milliseconds where ranks share them.
_EXCHANGE_NBYTES = 1 << 18
# What a rank writes at least for each other one before they meet: with less (10 ranks and more), messages take less time.
_MIN_SLOT_NBYTES = 1 << 15
_TAGS = 1 << 15  # that every MPI has
_SMALL_COLLECTIVES = frozenset({"all_gather", "reduce_scatter", "all_reduce", "reduce"})


class MpiBackend(Backend):
    """A backend over an `mpi4py` communicator, which it owns. Creating is collective. `node` is the number of this rank's node.

    has_cores: each rank of the node has a core for itself.   world: the ranks that `ranks` are numbers of.
    nodes: how many nodes the ranks are on.
    ranks_per_node: if they are numbered node by node, equally many on each; else None.
    """

    library = "MPI"
    _open_count: ClassVar[int] = 0  # communicators that are open in this process

    def __init__(
        self, comm: MPI.Comm, name: str, node: int, has_cores: bool = True, world: MPI.Intracomm = MPI.COMM_WORLD
    ) -> None:
        super().__init__(name, comm.Get_rank(), comm.Get_size(), torch.device("cpu"))
        self.ranks = evenly_spaced(comm.group.Translate_ranks(None, world.group))
        self._comm, self._world = revocable(comm), world
        self._memories: WeakSet[MemoryFile] = WeakSet()
        self._was_cut_short = False  # an exception on this rank has taken it out of a call since the last `rejoin`
        with ExitStack() as made:  # what it holds is undone if something fails
            made.callback(lambda: free(self._comm))
            # Apart, so that the caller may use it while a stream's thread sends or receives.
            self._control = revocable(comm.Dup())
            made.callback(free, self._control)
            self._pairs = Pairs(self._control, name)  # its messages and control calls do not meet
            self._node, self._has_cores = node, has_cores
            self._algorithms = NodeAlgorithms(comm, node)
            made.callback(self._algorithms.close)
            self.nodes, self.ranks_per_node = self._algorithms.nodes, self._algorithms.ranks_per_node
            self._shared_memory: SharedMemoryExchange | None = None
            if self._algorithms.is_one_node and self.size > 1:
                self._shared_memory = SharedMemoryExchange.create(comm, _EXCHANGE_NBYTES, str(self))
            if self._shared_memory is not None:
                made.callback(self._shared_memory.close)
                if has_cores and _EXCHANGE_NBYTES // (self.size - 1) >= _MIN_SLOT_NBYTES:
                    self._algorithms.stage_in(self._shared_memory)
            self.has_node_memory = self._shared_memory is not None
            self._meeting: SharedMemoryExchange | MessageMeeting
            if self._shared_memory is not None:
                self._meeting = self._shared_memory
            else:
                self._meeting = MessageMeeting(comm, str(self))
                made.callback(self._meeting.close)
            self._made = made.pop_all()
        MpiBackend._open_count += 1

    def exchange(self, value: T) -> list[T]:
        return gather_objects(self._control, value)

    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        if self.size == 1:
            return None
        if self._meeting.barrier(fingerprint):
            return None
        # Hazard: an exception may have taken a rank out of its wait in the barrier when others had read its fingerprint.
        if self._shared_memory is not None:
            return self._shared_memory.exchange(describe())
        self._meeting.barrier(0)
        return gather_objects(self._comm, describe())

    def swap_numbers(self, numbers: Sequence[int]) -> list[int]:
        received = array("q", bytes(8 * self.size))
        self._comm.Alltoall((array("q", numbers), MPI.INT64_T), (received, MPI.INT64_T))
        return received.tolist()

    def stop_transfers(self) -> None:
        for each in self._memories:
            each.end_reading()
        self._pairs.leave()

    def stop_comparisons(self, *, in_call: bool = False) -> None:
        self._was_cut_short |= in_call
        self._meeting.leave(QUIT if in_call else LEFT)

    def rejoin(self) -> None:
        self._pairs.rejoin()
        self._algorithms.rejoin()
        reached, cut_short = zip(*self.exchange((self._meeting.reached, self._was_cut_short)), strict=True)
        self._meeting.rejoin(max(reached))
        if any(cut_short):
            # Hazard: a message of a call that was cut short may still come. MPI would take it for one of a later call, or of
            # another communicator that gets the number of one that is freed: those that were used stay open.
            self._comm = revocable(self._control.Dup())
            self._algorithms.use(self._comm)
            self._was_cut_short = False

    def split(self, color: int | None, key: int, name: str) -> MpiBackend | None:
        made, problem = None, ""
        try:
            comm = self._control.Split(MPI.UNDEFINED if color is None else color, key)
            made = None if comm == MPI.COMM_NULL else MpiBackend(comm, name, self._node, self._has_cores, self._world)
        except MPI.Exception as error:
            problem = str(error).splitlines()[-1]
        failed = {rank: found for rank, found in enumerate(self.exchange(problem)) if found}
        if failed:
            if made is not None:
                made.close()
            raise RuntimeError(
                f"split of {self} into '{name}': MPI makes no more communicators ({name_ranks(list(failed))}: "
                f"{next(iter(failed.values()))}); {MpiBackend._open_count} are open in this process. Close those that are not "
                "needed any more, with Communicator.close() or DeviceMesh.close()"
            )
        return made

    def subset(self, ranks: Sequence[int], name: str, *, on_host: bool) -> MpiBackend:
        assert isinstance(self._control, MPI.Intracomm), "no bridge between two groups"
        members = self._control.group.Incl(list(ranks))
        try:
            # The tag keeps apart what threads, or ranks in different orders, make at once.
            comm = self._control.Create_group(members, fingerprint_of(name) % _TAGS)
            return MpiBackend(comm, name, self._node, self._has_cores, self._world)
        except MPI.Exception as error:
            raise RuntimeError(
                f"subset of {self} as '{name}': MPI makes no more communicators ({error}); {MpiBackend._open_count} are open "
                "in this process. Close those that are not needed any more"
            ) from error
        finally:
            members.Free()

    def messages(self) -> MPI.Comm:
        """A communicator of MPI's for messages that are no part of calls. Collective; whoever calls it frees it."""
        return revocable(self._control.Dup())

    def empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
        windows = self._algorithms.windows
        shared = windows.allocate(numel * dtype.itemsize) if windows is not None else None
        return torch.empty(numel, dtype=dtype, device="cpu") if shared is None else shared.view(dtype)

    def node_memory(self, nbytes: int) -> MemoryFile | None:
        assert self._shared_memory is not None, "it has node memory"
        made = MemoryFile.create(self._comm, nbytes)
        if made is not None:
            self._memories.add(made)
        return made

    def close(self) -> None:
        for each in self._memories:
            each.close()
        self._made.close()
        MpiBackend._open_count -= 1

    # ------------------------------------------------------------------ launching

    def launch(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        """The sends and receives of a group run while its collectives do."""
        if len(calls) == 1:
            self._run_batch(calls)
            return
        sends = [(call.inp, _peer(call)) for call in calls if call.name == "send" and call.inp is not None]
        receives = [(call.out, _peer(call)) for call in calls if call.name == "recv" and call.out is not None]
        collectives = [call for call in calls if call.name not in ("send", "recv")]
        self._pairs.run(sends, receives, partial(self._run_batches, collectives))

    def _run_batches(self, calls: Sequence[CollectiveCall]) -> None:
        for batch in self._batches(calls):
            self._run_batch(batch)

    def _batches(self, calls: Sequence[CollectiveCall]) -> Iterator[list[CollectiveCall]]:
        """Small calls that share an exchange, and each of the others by itself, in order. One barrier does for all."""
        batch: list[CollectiveCall] = []
        taken, has_barrier = 0, False
        for call in calls:
            if call.name == "barrier":
                if has_barrier:
                    continue
                has_barrier = True
            small = self._shared_memory is not None and _takes_small_path(call)
            size = aligned_size(call.inp.nbytes) if small and call.inp is not None else _EXCHANGE_NBYTES + 1
            if batch and taken + size > _EXCHANGE_NBYTES:
                yield batch
                batch, taken = [], 0
            batch.append(call)
            taken += size
        if batch:
            yield batch

    def _run_batch(self, calls: Sequence[CollectiveCall]) -> None:
        call = calls[0]
        if self._shared_memory is not None and _takes_small_path(call):
            self._run_small(self._shared_memory, calls)
        else:
            getattr(self, call.name)(call.out, call.inp, *call.args)

    def _run_small(self, exchange: SharedMemoryExchange, calls: Sequence[CollectiveCall]) -> None:
        starts = exchange.swap([memory(call.inp) for call in calls if call.inp is not None])
        for start, call in zip(starts, calls, strict=True):
            out, inp = call.out, call.inp
            assert inp is not None, "every rank sends"
            if out is None:  # of a reduce, on another rank than the root
                continue
            if call.name == "all_gather":
                exchange.gather(memory(out), start, inp.nbytes)
                continue
            op = call.args[0]
            assert isinstance(op, Op), "a reduction"
            first = self.rank * out.numel() if call.name == "reduce_scatter" else 0
            reduce_rows(exchange.rows(start, inp.dtype, first, out.numel()), op, flat(out), divisor=self.size)

    # ------------------------------------------------------------------ collectives
    # Small tensors take these paths where there is no exchange in shared memory.

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        if not _is_small(inp):
            self._algorithms.all_gather(flat(out), flat(inp))
        else:
            in_place = inp.data_ptr() == out.data_ptr() + self.rank * inp.nbytes
            self._comm.Allgather(MPI.IN_PLACE if in_place else message(inp), message(out))

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        if not _is_small(inp):
            self._algorithms.reduce_scatter(flat(out), flat(inp), op)
            return
        received = inp.new_empty((self.size, out.numel()))
        self._comm.Alltoall(message(inp), message(received))
        reduce_rows(received.unbind(), op, flat(out), divisor=self.size)

    def all_reduce(self, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        if _is_small(inp):
            reduce_rows(self._gather_small(inp), op, flat(out), divisor=self.size)
        else:
            self._algorithms.all_reduce(flat(out), flat(inp), op)

    def reduce(self, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int) -> None:
        if not _is_small(inp):
            self._reduce_large(None if out is None else flat(out), flat(inp), op, root)
        else:
            rows = self._gather_small(inp)
            if out is not None:
                reduce_rows(rows, op, flat(out), divisor=self.size)

    def _gather_small(self, inp: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every rank's small `inp`, in rank order."""
        rows = inp.new_empty((self.size, inp.numel()))
        self._comm.Allgather(message(inp), message(rows))
        return rows.unbind()

    def _reduce_large(self, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int) -> None:
        bounds = self._algorithms.near_equal_bounds(inp.numel())
        begin, end = bounds[self.rank], bounds[self.rank + 1]
        own = inp.new_empty(end - begin) if out is None else out[begin:end]
        self._algorithms.reduce_ranges(own, inp, bounds, op)
        self._collect_ranges(out, own, bounds, root)

    def broadcast(self, out: torch.Tensor, inp: torch.Tensor, root: int) -> None:
        if self.rank == root and out.data_ptr() != inp.data_ptr():
            out.copy_(inp.view_as(out))
        for part in messages(out):
            self._comm.Bcast(part, root)

    def gather(self, out: torch.Tensor | None, inp: torch.Tensor, root: int) -> None:
        bounds = [inp.numel() * rank for rank in range(self.size + 1)]
        self._collect_ranges(None if out is None else flat(out), flat(inp), bounds, root)

    def _collect_ranges(self, out: torch.Tensor | None, own: torch.Tensor, bounds: list[int], root: int) -> None:
        """Every rank's range, on the root."""
        if out is None:
            MPI.Request.Waitall(list(start_sending(self._comm, own, root)))
            return
        ranges = [out[begin:end] for begin, end in pairwise(bounds)]
        others = [(rank, part) for rank, part in enumerate(ranges) if rank != root]
        requests = [request for rank, part in others for request in start_receiving(self._comm, part, rank)]
        copy(ranges[root], own)
        MPI.Request.Waitall(requests)

    def scatter(self, out: torch.Tensor, inp: torch.Tensor | None, root: int) -> None:
        if inp is None:
            MPI.Request.Waitall(list(start_receiving(self._comm, out, root)))
            return
        blocks = inp.view(self.size, -1).unbind()
        others = [(to, block) for to, block in enumerate(blocks) if to != root]
        requests = [request for to, block in others for request in start_sending(self._comm, block, to)]
        copy(flat(out), blocks[root])
        MPI.Request.Waitall(requests)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, counts: Counts | None) -> None:
        source = inp.clone() if inp.data_ptr() == out.data_ptr() else inp
        coming = flat(out).split(counts.out) if counts else flat(out).tensor_split(self.size)
        going = flat(source).split(counts.inp) if counts else flat(source).tensor_split(self.size)
        swap(self._comm, going, coming)

    def send(self, out: None, inp: torch.Tensor, to: int) -> None:
        self._pairs.run([(inp, to)], (), _nothing)

    def recv(self, out: torch.Tensor, inp: None, source: int) -> None:
        self._pairs.run((), [(out, source)], _nothing)

    def barrier(self, out: None, inp: None) -> None:
        if self._shared_memory is not None:
            self._shared_memory.barrier()
        else:
            self._comm.Barrier()


def _nothing() -> None:
    """What runs meanwhile, where nothing has to."""


def _peer(call: CollectiveCall) -> int:
    peer = call.args[0]
    assert isinstance(peer, int), "a send or a receive"
    return peer


def _takes_small_path(call: CollectiveCall) -> bool:
    return call.name in _SMALL_COLLECTIVES and call.inp is not None and _is_small(call.inp)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _SMALL_NBYTES

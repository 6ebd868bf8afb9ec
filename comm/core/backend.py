"""The seam between the communicator and the library that carries its bytes.

`Communicator` checks arguments, orders streams, numbers calls, and runs the hooks. A backend launches calls, and provides what
the control calls need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self, TypeVar

import torch

from .calls import REDUCIBLE, CollectiveCall
from .fingerprint import printable
from .pool import Pool
from .ranks import Ranks
from .streams import Stream

T = TypeVar("T")


class NodeMemory(ABC):
    """`nbytes` bytes of a node, zeros at first, that each rank maps twice.

    What a rank writes to a `part`, all see. `private` shows the same bytes; what a rank writes there, no other sees, and from
    then on it sees its own copy of that page, until `discard_writes`.
    Each rank tells the others what it reads now, by a number that rises as its program goes on, and is the same on all ranks at
    the same place. So a rank that is about to write knows whom it has to wait for: not for those that are ahead, which may wait
    for this one (`Communicator.wait_for_readers`).
    The memory is in no file system, and is freed when no rank has tensors in it any more.
    """

    private: torch.Tensor  # (nbytes,) uint8

    @abstractmethod
    def part(self, start: int, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8, the bytes from `start` on, with a storage of its own: to be written by one rank."""

    @abstractmethod
    def take_copy(self) -> None:
        """Let `private` be this rank's own copy, until `discard_writes`. Cost: 4 us for each page."""

    @abstractmethod
    def discard_writes(self, at: Sequence[int] | None = None) -> bool:
        """Let `private` show again what all ranks see, if it is found to have been written to. Returns: whether it was.

        at: look only at the pages of these bytes.   Cost: 1 us for each of them, or for 10 pages (and colder caches).
        """

    @abstractmethod
    def begin_reading(self, number: int) -> None:
        """This rank reads from now on. number: at least 1, and higher than before."""

    @abstractmethod
    def end_reading(self) -> None:
        """This rank reads nothing now."""

    @abstractmethod
    def readers(self) -> Iterator[int]:
        """The other ranks that read what this one has read last, or before, each again and again until it has ended."""

    @abstractmethod
    def wait_for(self, rank: int) -> None:
        """Wait until this rank is not one of `readers`."""


class Backend(ABC):
    """One rank's end of a connection between `size` ranks.

    name, rank, size, device: those of the communicator.   ranks: its members' ranks in the world.
    """

    library: ClassVar[str]  # the library's name in messages
    reducible: ClassVar[frozenset[torch.dtype]] = REDUCIBLE  # the dtypes that it reduces
    has_pool: ClassVar[bool] = False  # `pool` has work to do, which blocks
    has_node_memory: bool = False  # its ranks are on one node, and may map memory of it
    multiplies_terms: ClassVar[bool] = False  # for AVG and PreMulSum it multiplies each rank's values, rounded, and adds them

    ranks: Ranks

    def __init__(self, name: str, rank: int, size: int, device: torch.device) -> None:
        self.name = printable(name)  # a line end in it would forge lines of a report
        self.rank = rank
        self.size = size
        self.device = device

    def __repr__(self) -> str:
        return f"Communicator('{self.name}', rank {self.rank} of {self.size}, {self.device})"  # as users know it

    @abstractmethod
    def launch(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        """Launch one call, or those of a group, in the order of `stream`. NCCL gets the stream; on the host it is running.

        The arguments have been checked. Tensors that a rank has no use for are None.
        """

    @abstractmethod
    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order. Blocks the caller, as all control calls do."""

    @abstractmethod
    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        """See `Communicator.compare`. Raises Interrupted on every rank if one has left."""

    @abstractmethod
    def swap_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Send each rank a number; returns those received, in rank order."""

    @abstractmethod
    def stop_transfers(self) -> None:
        """Make no more sends and receives until `rejoin`, and read no node memory. Never blocks.

        Those that run raise Interrupted, and so do those of ranks that wait for this one.
        """

    @abstractmethod
    def stop_comparisons(self, *, in_call: bool = False) -> None:
        """Make no more comparisons until `rejoin`: ranks that wait for this one raise Interrupted. Never blocks.

        in_call: an exception has taken this rank out of the middle of a call.
        """

    @abstractmethod
    def rejoin(self) -> None:
        """Make calls again. Collective: every rank has left."""

    @abstractmethod
    def split(self, color: int | None, key: int, name: str) -> Self | None:
        """A backend for each colour; None for a rank without one. Collective."""

    def part(self, ranks: Sequence[int], name: str) -> Self:
        """A backend for these of its ranks, this one among them, in their order.

        Collective: every rank gives the part that it is in; parts that share a rank are the same.
        """
        made = self.split(ranks[0], ranks.index(self.rank), name)
        assert made is not None, "every rank gave a colour"
        return made

    @abstractmethod
    def subset(self, ranks: Sequence[int], name: str, *, on_host: bool) -> Backend:
        """A backend for these of its ranks, this one among them, which alone call it.   on_host: for CPU tensors."""

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
        """See `Communicator.empty`."""

    def node_memory(self, nbytes: int) -> NodeMemory | None:
        """See `Communicator.node_memory`, for a backend that `has_node_memory`. Collective."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Free the connection and its buffers. Collective; called once."""

    def async_error(self) -> str | None:
        """Say what has made launched calls fail; None if the library tells of nothing.

        Any thread may ask, beside a call of another one; it never blocks.
        """
        return None

    def abort(self) -> None:
        """End this rank's calls that are under way, on this rank alone: the job ends. Any thread may, if none is in a call."""
        return None

    def pool(self) -> Pool | None:
        """Make the pool of `Communicator.pool`, for a backend that `has_pool`. Collective; called once."""
        raise NotImplementedError

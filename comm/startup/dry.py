"""A dry world: N ranks of which only this one exists, on the meta device.

Its collectives move nothing, its streams have simulated clocks, and whatever compares the ranks finds that all did as this one.
So the code of a training run runs unchanged, on tensors without memory: it shows what it would allocate, send and wait for.

The simulation is online: what is launched on a stream moves its clock at once, and waiting for an event is the later of two
times. So the order in which the host issues work is the only schedule; nothing is replayed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch

from ..core.backend import Backend, NodeMemory
from ..core.calls import CollectiveCall
from ..core.ranks import Ranks, pick
from ..core.settings import EnvironmentSettings, read
from ..core.streams import Event, Stream, simulated
from ..groups.communicator import Communicator
from ..groups.mesh import DeviceMesh
from ..recorder.dumps import DumpFolder
from ..recorder.recorder import Recorder
from .bootstrap import World, inhabited

T = TypeVar("T")

META = torch.device("meta")
_RECORDED = 1 << 20  # calls and notes: all of a few steps


CallCosts = Callable[[Sequence[CollectiveCall]], float]  # the seconds that a call, or the calls of a group, take


@dataclass(slots=True)
class SimulatedClock:
    """Simulated seconds since the dry world began."""

    seconds: float = 0.0


class DryEvent(Event):
    """A time on a simulated clock."""

    def __init__(self, at: float, host: SimulatedClock) -> None:
        self.at = at
        self._host = host

    def query(self) -> bool:
        return self.at <= self._host.seconds

    def synchronize(self) -> None:
        self._host.seconds = max(self._host.seconds, self.at)


class DryStream(Stream):
    """A stream of which only the clock exists. What is submitted runs at once, on meta tensors.

    waited: seconds in which it communicated, or stood still for events of other streams.   busy: seconds in which it computed.
    """

    device = META
    waited: float
    busy: float

    def __init__(self, name: str, clock: SimulatedClock, host: SimulatedClock) -> None:
        self.name = name
        self.waited, self.busy = 0.0, 0.0
        self.clock = clock  # the host's own, for a stream that is the caller's thread
        self._host = host
        self.overlaps = clock is not host

    def submit(self, fn: Callable[[], object]) -> None:
        simulated.append(self)
        try:
            fn()
        finally:
            simulated.pop()

    def record(self) -> DryEvent:
        return DryEvent(self.now(), self._host)

    def wait(self, event: Event) -> None:
        if isinstance(event, DryEvent):
            # The stream waits for the host until the host has come here.
            self.waited += max(0.0, event.at - self._reached())
            self.clock.seconds = max(self.now(), event.at)
        else:
            event.synchronize()

    def now(self) -> float:
        return self.clock.seconds

    def run(self, seconds: float) -> None:
        """Compute for this time: work that the host issues now."""
        self.clock.seconds = self._reached() + seconds
        self.busy += seconds

    def communicate(self, seconds: float) -> None:
        """Spend this time on a collective that the host issues now."""
        self.clock.seconds = self._reached() + seconds
        self.waited += seconds

    def _reached(self) -> float:
        """The time at which this stream can begin what the host issues now."""
        return max(self.now(), self._host.seconds)


class DryBackend(Backend):
    """One rank's end of a connection to ranks that do not exist, and do as this one does."""

    library: ClassVar[str] = "a dry world"

    def __init__(self, name: str, rank: int, ranks: Ranks, costs: CallCosts, per_host: int) -> None:
        """per_host: how many ranks share the memory of a host, by their numbers in the world."""
        super().__init__(name, rank, len(ranks), META)
        self.ranks = ranks
        self.has_node_memory = len(ranks) > 1 and ranks[0] // per_host == ranks[-1] // per_host
        self._costs, self._per_host = costs, per_host

    def launch(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        assert isinstance(stream, DryStream), "of the dry world"
        stream.communicate(self._costs(calls))

    def exchange(self, value: T) -> list[T]:
        return [value] * self.size

    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        return None

    def swap_numbers(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def stop_transfers(self) -> None:
        """Do nothing: no transfer runs."""

    def stop_comparisons(self, *, in_call: bool = False) -> None:
        """Do nothing: nobody waits for this rank."""

    def rejoin(self) -> None:
        """Do nothing: nobody has left."""

    def split(self, color: int | None, key: int, name: str) -> DryBackend | None:
        return None if color is None else DryBackend(name, self.rank, self.ranks, self._costs, self._per_host)

    def part(self, ranks: Sequence[int], name: str) -> DryBackend:
        return DryBackend(name, ranks.index(self.rank), pick(self.ranks, ranks), self._costs, self._per_host)

    def subset(self, ranks: Sequence[int], name: str, *, on_host: bool) -> DryBackend:
        return self.part(ranks, name)

    def empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
        return uncounted(numel, dtype)

    def node_memory(self, nbytes: int) -> DryMemory:
        return DryMemory(nbytes)

    def close(self) -> None:
        """Do nothing: this backend holds nothing."""


def uncounted(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that no operation makes: who counts what operations make does not count it."""
    memory = torch.empty(0, dtype=dtype, device=META)
    memory.untyped_storage().resize_(numel * dtype.itemsize)
    return memory.as_strided((numel,), (1,))


class DryMemory(NodeMemory):
    """Memory of a node whose other ranks do not exist."""

    def __init__(self, nbytes: int) -> None:
        self.private = uncounted(nbytes, torch.uint8)

    def part(self, start: int, nbytes: int) -> torch.Tensor:
        return uncounted(nbytes, torch.uint8)

    def take_copy(self) -> None:
        """Do nothing: nobody writes."""

    def discard_writes(self, at: Sequence[int] | None = None) -> bool:
        return False

    def begin_reading(self, number: int) -> None:
        """Do nothing: nobody waits for this rank."""

    def end_reading(self) -> None:
        """Do nothing: nobody waits for this rank."""

    def readers(self) -> Iterator[int]:
        return iter(())

    def wait_for(self, rank: int) -> None:
        """Do nothing: no other rank reads."""


@dataclass(frozen=True, slots=True, eq=False)
class DryWorld(World):
    """The world of `dry_world`. Its streams' clocks stand at the simulated time.

    host: the clock of the caller's thread.   inline: communication is on that thread, and so is compute.
    """

    host: SimulatedClock
    inline: bool
    compute: DryStream
    streams: dict[str, DryStream] = field(default_factory=dict)  # by role

    @property
    def machine(self) -> str:
        return "cpu" if self.inline else "cuda"

    def stream_for(self, role: str) -> DryStream:
        if role not in self.streams:
            self.streams[role] = DryStream(role, self.host if self.inline else SimulatedClock(self.host.seconds), self.host)
        return self.streams[role]

    def advance(self, seconds: float) -> None:
        """Let so much time pass for the host and on all streams."""
        clocks = [self.host, self.compute.clock, *(stream.clock for stream in self.streams.values())]
        for clock in {id(clock): clock for clock in clocks}.values():
            clock.seconds += seconds


@contextmanager
def dry_world(
    ranks: int, *, rank: int = 0, ranks_per_node: int | None = None, inline: bool = False, costs: CallCosts | None = None
) -> Iterator[DryWorld]:
    """A world of `ranks` ranks, of which this is number `rank`: what `world()` returns within the `with` block.

    ranks_per_node: None for one node.   inline: all streams are the caller's thread, as on the host; otherwise compute and each
    role of communication run beside each other and beside the caller, as on a GPU.   costs: None: nothing takes time.
    A world that was there stays as it is; it must not be used within the block.
    Raises: ValueError for ranks that do not exist, and nodes without ranks.
    """
    per_node = ranks if ranks_per_node is None else ranks_per_node
    if not 0 <= rank < ranks or per_node < 1:
        given = f"dry_world({ranks}, rank={rank}, ranks_per_node={ranks_per_node})"
        raise ValueError(f"{given}: expected 0 <= rank < ranks, and 1 rank of a node or more")
    host = SimulatedClock()
    compute = DryStream("compute", host if inline else SimulatedClock(), host)
    recorder = Recorder(rank, ranks, DumpFolder(None, "dry", print), _RECORDED, compute.now)
    backend = DryBackend("world", rank, range(ranks), costs or (lambda calls: 0.0), per_node if inline else 1)
    with inhabited(lambda: _make(backend, recorder, per_node, host, inline, compute)) as world:
        simulated.append(compute)
        try:
            yield world
        finally:
            simulated.remove(compute)


def _make(
    backend: DryBackend, recorder: Recorder, per_node: int, host: SimulatedClock, inline: bool, compute: DryStream
) -> DryWorld:
    comm = Communicator(backend, [recorder])
    return DryWorld(
        rank=comm.rank,
        size=comm.size,
        local_rank=comm.rank % per_node,
        node=f"node-{comm.rank // per_node}",
        nodes=-(-comm.size // per_node),
        ranks_per_node=None if comm.size % per_node else per_node,
        device=META,
        comm=comm,
        mesh=DeviceMesh(comm),
        recorder=recorder,
        settings=_settings(per_node),
        host=host,
        inline=inline,
        compute=compute,
    )


def _settings(per_node: int) -> EnvironmentSettings:
    """The settings of a job without variables, in which nothing is watched; values cannot be compared."""
    usual, _ = read(
        dict.fromkeys(("SHARDRT_TIMEOUT", "SHARDRT_START_TIMEOUT", "SHARDRT_PATIENCE", "SHARDRT_STRAGGLER"), "0"), "cpu"
    )
    return replace(
        usual,
        device=META,
        check=False,
        check_batches=False,
        check_weights=False,
        recorded_calls=_RECORDED,
        ranks_per_node=per_node,
    )

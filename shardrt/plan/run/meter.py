"""What runs in a dry world takes: the time of operations and collectives on its clocks, and the bytes of memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ...comm.core.calls import CollectiveCall
from ...comm.core.streams import simulated
from ...comm.startup.dry import DryStream, DryWorld
from ...fsdp.base.events import BufferKind, HasName, Observer
from ...memory.live import LiveBytes
from ...torch_internals import OpOverload
from ..machine.cost import Bound, Costs
from ..machine.work import work_of
from ..program.forecast_result import Moment
from .history import History
from .operations import Cost, Operations


class CollectiveMeter:
    """What collectives take, as a dry world asks for it, and their sums."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.restart()

    def restart(self) -> None:
        """Add up from zero."""
        self.received_within = self.received_across = self.seconds = 0.0

    def collective(self, calls: Sequence[CollectiveCall]) -> float:
        """The seconds of the calls of a group."""
        seconds, traffic = self._costs.collective(calls), self._costs.traffic(calls)
        self.received_within += traffic.received_within
        self.received_across += traffic.received_across
        self.seconds += seconds
        return seconds


class Meter(Observer):
    """Sees a run: operations (as the observer of `Operations`), and the buffers and gradients of all groups.

    memory: bytes by kind, now.   peaks: of each kind since restart().
    history: is told each change of memory.
    host_kinds: are on the host, and so neither in the sum nor in the history.
    """

    def __init__(self, world: DryWorld, costs: Costs, history: History | None = None, host_kinds: Collection[str] = ()) -> None:
        self._world = world
        self._history = history
        self._host_kinds = host_kinds
        self._costs = costs
        self.live = LiveBytes("meta", self.add)
        self.memory = dict.fromkeys((kind.value for kind in BufferKind), 0)
        self._total = 0
        self._newest = ""  # the group whose buffer has changed last
        self._begun: set[str] = set()  # groups that this step has gathered
        self.restart()

    def restart(self) -> None:
        """A step begins: forget peaks, and what time was spent on."""
        self.peaks, self.peak_nbytes = dict(self.memory), self._total
        self._start = self._world.compute.now()
        self.peak_at = Moment(0.0, self._newest)
        self._begun.clear()
        self._costs.spent.update(dict.fromkeys(Bound, 0.0))
        if self._history is not None:
            self._history.restart(self._world.compute.now)

    # ------------------------------------------------------------------ time

    def cost_of(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> Cost:
        """What an operation of a new kind takes."""
        spent = self._costs.spent
        before = dict(spent)
        work = work_of(func, args, kwargs, out)
        seconds = self._costs.kernel(work)
        parts = tuple((bound, after - before[bound]) for bound, after in spent.items() if after != before[bound])
        spent.update(before)
        return Cost(seconds, work.flops, work.dtype, parts)

    def ran(self, cost: Cost, made: object) -> None:
        """Spend the time of an operation on the stream that it runs on, and count what it has made."""
        self._world.host.seconds += self._costs.launch_seconds
        stream = simulated[-1]
        assert isinstance(stream, DryStream), "in a dry world"
        stream.run(cost.seconds)
        if made is not None:
            self.live.see(made)

    def add_up(self, operations: Operations) -> None:
        """Tell the costs what the time of all operations since their `restart` was spent on."""
        for kind in operations.kinds:
            for bound, seconds in kind.cost.spent:
                self._costs.spent[bound] += kind.times * seconds

    # ------------------------------------------------------------------ memory

    def memory_changed(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        self._newest = group.name
        if kind is BufferKind.GATHERED:
            self._begin(group)
        self.add(kind.value, nbytes, group.name)

    def gradients_made(self, group: HasName, storage: torch.UntypedStorage) -> None:
        self._newest = group.name
        self._begin(group)
        self.live.relabel(storage, "gradients")

    def _begin(self, group: HasName) -> None:
        """Spend what a group costs the host, once in a step."""
        if group.name not in self._begun:
            self._begun.add(group.name)
            self._world.host.seconds += self._costs.sheet.overhead.group

    def add(self, kind: str, nbytes: int, group: str = "") -> None:
        """Count bytes, negative ones for memory that was freed. group: of the buffer, if it is one."""
        memory = self.memory
        memory[kind] = value = memory.get(kind, 0) + nbytes
        if kind not in self._host_kinds:
            self._total += nbytes
            if self._history is not None:
                self._history.add(kind, group, nbytes)
        if nbytes > 0:
            if value > self.peaks.get(kind, 0):
                self.peaks[kind] = value
            if self._total > self.peak_nbytes:
                self.peak_nbytes = self._total
                self.peak_at = Moment(self._world.compute.now() - self._start, self._newest)

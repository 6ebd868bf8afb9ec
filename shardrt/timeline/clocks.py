"""Clocks of several ranks made one: how far this rank's clock is from rank 0's, and times of a GPU's events.

Ranks compare their clocks around barriers. Each leaves a barrier after all have entered it, by any clock:

    left here >= entered on rank 0          and          left on rank 0 >= entered here

So each round bounds the difference of the two clocks from both sides, and the closest bounds of all rounds count. Ranks of one
host share its clock: a difference of 0 is taken wherever it is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..comm import World

ROUNDS = 8  # Cost: a barrier each


class Round(NamedTuple):
    """When a rank entered a barrier, and when it left it, by its own clock."""

    entered: float
    left: float


@dataclass(frozen=True, slots=True)
class Offset:
    """This rank's clock minus rank 0's, in seconds, when this rank's clock showed `at`. It is wrong by `error` at most."""

    at: float
    seconds: float
    error: float

    @classmethod
    def between(cls, mine: Sequence[Round], root: Sequence[Round]) -> Offset:
        """The offset by these rounds, of this rank and of rank 0."""
        pairs = list(zip(mine, root, strict=True))
        low = max(here.entered - there.left for here, there in pairs)
        high = min(here.left - there.entered for here, there in pairs)
        seconds = min(max(0.0, low), high)
        return cls(mine[-1].left, seconds, max(abs(seconds - low), abs(high - seconds)))


def measure(world: World) -> tuple[Offset, float]:
    """Measure this rank's offset. Returns also the time at which rank 0 had done so, by its clock. Collective."""
    stream, mine = world.stream, list[Round]()
    if world.device.type == "meta":  # one clock of a simulation, which no barrier may move
        return Offset(stream.now(), 0.0, 0.0), stream.now()
    for _ in range(ROUNDS):
        entered = stream.now()
        world.barrier()
        mine.append(Round(entered, stream.now()))
    rounds = torch.tensor(mine, dtype=torch.float64, device=world.device)
    world.comm.broadcast(rounds, rounds, 0, stream=stream).synchronize()
    root = [Round(*row) for row in rounds.tolist()]
    return Offset.between(mine, root), root[-1].left


Stamp = float | torch.cuda.Event  # a time by the host's clock, or an event that was made with enable_timing=True


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event of which the host's time is known."""

    event: torch.cuda.Event
    at: float


@dataclass(frozen=True, slots=True)
class AlignedClock:
    """Turns this rank's stamps into seconds since `opened`, a time of rank 0's clock.

    offsets, anchors: at the beginning, and at the end if the ranks came there together. Between the two clocks drift linearly.
    """

    opened: float
    offsets: Sequence[Offset]
    anchors: Sequence[Anchor] = ()

    def seconds(self, stamp: Stamp) -> float:
        """Seconds since `opened`."""
        at = stamp if isinstance(stamp, float) else self._host_time(stamp)
        return at - self._offset(at) - self.opened

    @property
    def error(self) -> float:
        """What is not known of the offset, in seconds."""
        return max(offset.error for offset in self.offsets)

    @property
    def drift(self) -> float:
        """Seconds that this rank's clock gains on rank 0's in a second."""
        first, last = self.offsets[0], self.offsets[-1]
        return (last.seconds - first.seconds) / (last.at - first.at) if last.at > first.at else 0.0

    def _offset(self, at: float) -> float:
        return self.offsets[0].seconds + self.drift * (at - self.offsets[0].at)

    def _host_time(self, event: torch.cuda.Event) -> float:
        first, last = self.anchors[0], self.anchors[-1]
        seconds_per_ms = (last.at - first.at) / first.event.elapsed_time(last.event)
        return first.at + seconds_per_ms * first.event.elapsed_time(event)

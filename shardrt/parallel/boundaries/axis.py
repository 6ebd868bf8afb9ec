"""The axis of ranks that one tensor-parallel mesh is: its communicators, and what its boundaries send.

Tensors here are plain local ones, without autograd: `relayout.py` has the differentiable functions. The collectives of
boundaries run on the caller's stream and the communicator "tp"; those beside a matmul on a stream of their own, and "tp_side".

A dim that is split has parts by the rule of `Shard`: ceil(total / N) rows on each rank, fewer or none on the last ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...comm import Communicator, DeviceMesh, Event, Stream, Work, current_stream, world
from ...tensor.placement.placement import Placement, Shard
from ...tensor.placement.redistribute import Change, and_wait
from .random import RandomRegions


@functools.lru_cache(maxsize=4096)
def parts(total: int, size: int) -> tuple[int, ...]:
    """How many of `total` rows each of `size` ranks has, by the rule of `Shard`."""
    return tuple(Shard(0).resolve(torch.Size((total,)), size).rows)


@dataclass(slots=True)
class Pending:
    """A collective on the side stream. `result()` orders the caller's stream after it.

    Invariant: `kept` lives until then, so that memory which the side stream uses is not given to others.
    """

    out: torch.Tensor
    done: Event
    kept: tuple[torch.Tensor, ...]
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None

    def result(self) -> torch.Tensor:
        current_stream(self.out.device).wait(self.done)
        self.kept = ()
        return self.out if self.unpack is None else self.unpack(self.out)


class Part(NamedTuple):
    """This rank's part of a tensor. shape: of the whole, if the caller knows it; where nothing is split, it is the part's."""

    local: torch.Tensor
    placement: Placement
    shape: torch.Size | None = None


class Axis:
    """One tensor-parallel mesh. Made by `axis_of`, the same for all modules on the mesh. Copies are the object itself."""

    mesh: DeviceMesh
    size: int
    rank: int
    comm: Communicator  # of boundaries, on the caller's stream
    side: Communicator  # of what runs beside a matmul
    partial: Communicator  # of gradients that are partial
    side_stream: Stream
    regions: RandomRegions
    depth: int  # of calls of parallelized modules that run now
    first: bool  # until the outermost module has run once, or a module outside of one twice

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.size, self.rank = int(mesh.size), mesh.rank
        self.comm, self.side, self.partial = (mesh.communicator(role) for role in ("tp", "tp_side", "tp_partial"))
        self.side_stream = world().stream_for("tp")
        self.regions = RandomRegions(mesh)
        self.depth, self.first = 0, True
        self.styles = 0  # how many were applied; written by AppliedStyle
        self._outside: set[object] = set()  # what has run outside, while `first`
        self.on_outside: list[Callable[[], None]] = []  # called once, when something runs outside and makes a graph
        self._totals: dict[int, int] = {}  # the newest total of which this rank's part has this size

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self

    def enter_region(self, placement: Placement) -> None:
        """Draw random numbers from here on as activations of this placement need them."""
        if isinstance(placement, Shard):
            self.regions.enter_sharded()
        else:
            self.regions.enter_replicated()

    def outside(self, boundary: object, *, training: bool) -> None:
        """Do for a boundary's module what the outermost module would do, which does not run: another method was called.

        Cost: a look at the probabilities in all parallelized models.
        """
        self.regions.outside(training=training)
        while self.on_outside and torch.is_grad_enabled():
            self.on_outside.pop()()
        if self.first and boundary in self._outside:
            self.first = False
            self._outside.clear()
        elif self.first:
            self._outside.add(boundary)

    # ------------------------------------------------------------------ sizes

    def shape(self, part: Part) -> torch.Size:
        """The shape of the whole tensor. Collective if the part does not know it, see `total`."""
        local, placement, shape = part
        if shape is not None or not isinstance(placement, Shard):
            return local.shape if shape is None else shape
        sizes = list(local.shape)
        sizes[placement.dim] = self.total(sizes[placement.dim])
        return torch.Size(sizes)

    def total(self, part: int) -> int:
        """The size of a dim of which this rank has `part` rows. Collective.

        The parts of one rank do not tell: of 7 and of 8 rows, the first of two ranks has 4.
        Cost: a comparison on the host, 5 us within a node, for each plain sharded tensor. It waits for the other ranks' hosts,
        never for a GPU. A DTensor knows its size.
        Raises ValueError on every rank for parts that are not those of `Shard`.
        """
        if self.size == 1:
            return part
        guess = self._totals.get(part, part * self.size)
        sizes = self.comm.compare(guess, lambda: part)
        if sizes is None:
            return guess
        total = sum(sizes)
        if tuple(sizes) != parts(total, self.size):
            raise ValueError(
                f"a tensor that is sharded over {self.mesh}: expected parts of {parts(total, self.size)} rows, by the rule of "
                f"Shard; found {tuple(sizes)}; split it by Shard's rule, or pass a DTensor"
            )
        self.remember(total)
        return total

    def remember(self, total: int) -> None:
        """Note the size of a dim that is split; alike on every rank."""
        self._totals[parts(total, self.size)[self.rank]] = total

    # ------------------------------------------------------------------ changes of placement

    def changed(self, part: Part, target: Placement, *, in_place: bool = False) -> torch.Tensor:
        """This rank's part by `target`, on the caller's stream: a new tensor. in_place: an all-reduce overwrites the part."""
        if self.size == 1:
            return part.local
        change = Change(self.comm, self.shape(part), part.placement, target)
        return change(part.local, functools.partial(and_wait, in_place=True) if in_place else None)

    def start(self, part: Part, target: Placement) -> Pending:
        """As `changed`, on the side stream, beside a matmul. An all-reduce overwrites the part."""
        return Change(self.side, self.shape(part), part.placement, target)(part.local, self._beside)

    def _beside(
        self,
        call: Callable[..., Work],
        out: torch.Tensor | None,
        inp: torch.Tensor,
        *args: object,
        unpack: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Pending:
        self.side_stream.wait(current_stream(inp.device).record())
        out = inp if out is None else out
        return Pending(out, call(out, inp, *args, stream=self.side_stream).event, (inp,), unpack)


def owned(made: torch.Tensor) -> torch.Tensor:
    """What an autograd Function made in its forward, as a tensor that may be written to: autograd refuses that for views."""
    return made.detach() if made._is_view() else made


@functools.cache
def axis_of(mesh: DeviceMesh) -> Axis:
    """The axis of a mesh. The first call for a mesh is collective over all ranks of the mesh that it is a part of."""
    return Axis(mesh)

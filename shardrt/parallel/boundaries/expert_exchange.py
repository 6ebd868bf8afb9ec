"""The exchange of expert parallelism: rows go to the ranks that have their experts, and results come back.

Legend   N ranks; E experts, of which each rank has L = E / N neighbours; S rows of width H here, sorted by expert; R rows come.

| step       | from -> to                                                      | cost                                         |
|------------|-----------------------------------------------------------------|----------------------------------------------|
| `plan`     | counts (E,) -> how many rows go to and come from each rank      | an all-to-all of 1 + L integers; a host sync |
| `exchange` | (S, H) -> (R, H), those of rank 0 first, each sorted by expert  | an all-to-all                                |
| and back   | (R, H) -> (S, H)                                                | an all-to-all                                |

The backward of an exchange is the exchange in the other direction. Nothing has a capacity: all rows arrive, and a rank may send
or receive none.

Scale: ranks of the mesh are data parallel ranks too, so the gradient of a loss is a mean over them. An expert's gradient is the
sum over the rows of all ranks; so gradients are divided by N on their way to the experts, and multiplied by N on the way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch

from ...comm import Communicator, DeviceMesh, current_stream
from ...comm.core.fingerprint import fingerprint_of


@dataclass(frozen=True, slots=True)
class Route:
    """How many rows go to each rank, and how many come from each."""

    comm: Communicator
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def reversed(self) -> Route:
        return Route(self.comm, self.received, self.sent)

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (sum(sent), H). Returns (sum(received), H), on the caller's stream."""
        width, stream = rows.shape[1], current_stream(rows.device)
        out = rows.new_empty((sum(self.received), width))
        counts = ([rank * width for rank in self.received], [rank * width for rank in self.sent])
        self.comm.all_to_all(out, rows.contiguous(), *counts, stream=stream).wait(stream)
        return out


class Request(NamedTuple):
    """What one rank asks of an exchange.

    counts: (E,) int64, its rows for each expert.   rows: how many it has in all.
    fits: () bool, whether the counts are to be believed.   problem: says in words what does not fit.
    kind: in words, what must be the same on all ranks.
    """

    counts: torch.Tensor
    rows: int
    fits: torch.Tensor
    kind: str
    problem: Callable[[], str]


class Planned(NamedTuple):
    """What all ranks' requests come to. counts: (N, L) int64, the rows from each rank for each expert here."""

    route: Route
    counts: torch.Tensor

    def local_experts(self) -> torch.Tensor:
        """The number, among this rank's experts, of each row that comes: (R,) int64. Cost: no host sync."""
        ranks, local = self.counts.shape
        numbers = torch.arange(local, device=self.counts.device).repeat(ranks)
        return numbers.repeat_interleave(self.counts.reshape(-1), output_size=sum(self.route.received))


class ExpertExchange:
    """The ranks among which the experts of one module are divided. Copies of the module share it.

    name: the module's, in the plan's root.   experts: E.   number: how many modules were divided over the mesh before.
    """

    _made: ClassVar[WeakKeyDictionary[DeviceMesh, int]] = WeakKeyDictionary()

    def __init__(self, mesh: DeviceMesh, name: str, experts: int) -> None:
        self.mesh, self.name, self.experts = mesh, name, experts
        self.size = int(mesh.size)
        self.local = experts // self.size
        self.comm = mesh.communicator("experts")
        self.number = self._made.get(mesh, 0)
        self._made[mesh] = self.number + 1

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertExchange:
        return self

    def plan(self, request: Request) -> Planned:
        """Tell every rank how many rows it gets; in a dry world, where rows have no values, as many as if choices were even.

        Collective. Raises ValueError on every rank of the mesh alike, before a row is sent, if a rank's request does not fit,
        differs in kind, or is of another module.
        """
        blocks = request.counts.new_empty((self.size, 1 + self.local))
        blocks[:, 0] = torch.where(request.fits, fingerprint_of(self._described(request)), -1)
        blocks[:, 1:] = request.counts.view(self.size, self.local)
        found, stream = torch.empty_like(blocks), current_stream(blocks.device)
        self.comm.all_to_all(found, blocks, stream=stream).wait(stream)
        if blocks.is_meta:
            return Planned(self._even(request.rows), found[:, 1:])
        # Cost: the host waits for the GPU here, once in each forward; sizes of tensors are the host's to know.
        mine, theirs = torch.stack((blocks, found)).tolist()
        if theirs[0][0] < 0 or any(mark != theirs[0][0] for mark, *_ in theirs):  # every rank sees the same marks
            self._refuse(request)
        sent, received = (tuple(sum(counts) for _, *counts in rows) for rows in (mine, theirs))
        return Planned(Route(self.comm, sent, received), found[:, 1:])

    def refuse(self, problem: str) -> NoReturn:
        """Raise ValueError on every rank of the mesh: this one cannot take part in what others plan. Collective, as `plan`."""
        counts = torch.zeros(self.experts, dtype=torch.int64, device=self.mesh.device)
        self.plan(Request(counts, 0, torch.zeros((), dtype=torch.bool, device=self.mesh.device), "", lambda: problem))
        raise AssertionError

    def _even(self, rows: int) -> Route:
        """The route of so many rows on each rank, if each expert gets as many as any other."""
        sent = tuple(rows // self.size + (rank < rows % self.size) for rank in range(self.size))
        return Route(self.comm, sent, (sent[self.mesh.rank],) * self.size)

    def _described(self, request: Request) -> str:
        """What must be the same on all ranks: numbers tell modules of one name apart."""
        return f"'{self.name}', number {self.number} over this mesh, with {request.kind}"

    def _refuse(self, request: Request) -> NoReturn:
        everyone = self.comm.exchange((None if request.fits.item() else request.problem(), self._described(request)))
        for rank, (problem, _) in enumerate(everyone):
            if problem is not None:
                raise ValueError(f"the experts '{self.name}' on {self.mesh}: rank {rank} of it has {problem}")
        first = everyone[0][1]
        rank, kind = next((rank, kind) for rank, (_, kind) in enumerate(everyone) if kind != first)
        raise ValueError(
            f"the experts on {self.mesh}: rank 0 of it has {first}, rank {rank} has {kind}; expected the same on every rank"
        )


# ---------------------------------------------------------------------- differentiable


def to_experts(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """(S, H) -> (R, H). Differentiable. Collective, also the backward."""
    made: torch.Tensor = _ExchangedRows.apply(rows, route, 1.0, float(len(route.sent)))
    return made


def from_experts(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """(R, H) -> (S, H), by the route that the rows came. Differentiable. Collective, also the backward."""
    made: torch.Tensor = _ExchangedRows.apply(rows, route.reversed(), 1.0, 1 / len(route.sent))
    return made


@dataclass(frozen=True, slots=True)
class SortedOrder:
    """An order of T * K rows, K copies of each of T.

    order: of each sorted row, its place before.   inverse: the other way.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    copies: int = 1

    @classmethod
    def of(cls, keys: torch.Tensor, copies: int = 1) -> SortedOrder:
        """The order that sorts `keys`, (T * K,); equal ones stay in their order."""
        order = torch.argsort(keys, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(order, inverse, copies)

    def sorted(self, rows: torch.Tensor) -> torch.Tensor:
        """(T, H) -> (T * K, H): the copies of all rows, sorted. Differentiable; the gradient is added up in a fixed order."""
        made: torch.Tensor = _SortedCopies.apply(rows, self)
        return made

    def restored(self, rows: torch.Tensor) -> torch.Tensor:
        """(T * K, H) -> (T, H): the sums of the copies of each row, in their order before. Differentiable."""
        made: torch.Tensor = _RestoredSums.apply(rows, self)
        return made


class _ExchangedRows(torch.autograd.Function):
    """factor: of what is sent.   back: of what the backward sends. A gradient's gradient is scaled as its tensor is."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route, factor: float, back: float) -> torch.Tensor:
        ctx.route, ctx.factor, ctx.back = route, factor, back
        sent = route.send(rows)
        return sent if factor == 1 else sent.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _ExchangedRows.apply(grad, ctx.route.reversed(), ctx.back, ctx.factor), None, None, None


class _SortedCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: SortedOrder) -> torch.Tensor:
        ctx.order = order
        return rows.index_select(0, order.order if order.copies == 1 else order.order // order.copies)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _RestoredSums.apply(grad, ctx.order), None


class _RestoredSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: SortedOrder) -> torch.Tensor:
        ctx.order = order
        restored = rows.index_select(0, order.inverse)
        return restored if order.copies == 1 else restored.unflatten(0, (-1, order.copies)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SortedCopies.apply(grad, ctx.order), None

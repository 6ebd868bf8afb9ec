"""The inputs and expected results of a call, computed from the documented semantics and never with a communicator.

Rank p's values repeat with a prime period, so that a result is computed for one period, whatever its size, and a block in the
wrong position shows. Legend: N ranks, this one is r; n is the elements of one rank's block.

| collective                           | inp of rank r      | out on rank r             | in place             |
|--------------------------------------|--------------------|---------------------------|----------------------|
| all_gather, gather (to the root)     | n                  | N blocks                  | inp is block r       |
| reduce_scatter, scatter (the root's) | N blocks           | n                         | out is block r       |
| all_reduce, reduce, broadcast        | n                  | n                         | out is inp           |
| all_to_all                           | N blocks           | N blocks                  | out is inp           |
| sendrecv (a ring, in a group)        | n, to rank r + 1   | n, from rank r - 1        | no                   |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .. import Communicator, PreMulSum, ReduceOp, Stream, Work
from ..core.calls import FLOATS, REDUCIBLE, Op
from . import names

REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
BLOCKED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in names.DTYPES}
OPS: dict[str, Op] = {name: PreMulSum(2.0) if name == "mulsum" else ReduceOp(name) for name in names.OPS}

_PERIOD = 8191
_POISON = 0xA5  # fills every byte at first; no expected value has this pattern
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMBINE: dict[Op, Callable[..., torch.Tensor]] = {
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One call, the same on every rank of a communicator.

    counts: for an all_to_all of uneven blocks, the elements from rank (row) to rank (column).
    rounding: values whose sums round, so that a result depends on the order; else small integers, exact in any order.
    """

    name: str
    size: int  # N
    n: int
    dtype: torch.dtype
    op: Op | None = None
    root: int = -1  # -1 where the collective has none
    counts: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0
    rounding: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the larger of `out` and `inp`, where blocks are of one size."""
        return self.n * self.dtype.itemsize * (self.size if self.name in BLOCKED else 1)

    @property
    def can_be_in_place(self) -> bool:
        return self.name != "sendrecv" and self.counts is None

    def place(
        self, rank: int, in_place: bool, allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's `out` and `inp`, filled: `inp` with its values, the rest with poison."""
        numels = [
            self.n * (self.size if self.name in ("all_gather", "gather", "all_to_all") else 1),
            self.n * (self.size if self.name in ("reduce_scatter", "scatter", "all_to_all") else 1),
        ]
        if self.counts is not None:
            numels = [sum(row[rank] for row in self.counts), sum(self.counts[rank])]
        if in_place:
            whole = _poisoned(allocate(max(numels), self.dtype))
            own = whole[rank * self.n : (rank + 1) * self.n]
            out, inp = (whole if numel == whole.numel() else own for numel in numels)
        else:
            out, inp = (_poisoned(allocate(numel, self.dtype)) for numel in numels)
        inp.copy_(_tile(self._values(rank), 0, inp.numel()))
        return out, inp

    def post(self, comm: Communicator, out: torch.Tensor, inp: torch.Tensor, stream: Stream) -> Work:
        """Make the call; a "sendrecv" is two calls, for a group."""
        if self.name == "sendrecv":
            comm.send(inp, (comm.rank + 1) % comm.size, stream=stream)
            return comm.recv(out, (comm.rank - 1) % comm.size, stream=stream)
        args: list[object] = [] if self.op is None else [self.op]
        if self.name in ROOTED:
            args.append(self.root)
        if self.counts is not None:
            args = [[row[comm.rank] for row in self.counts], self.counts[comm.rank]]
        work: Work = getattr(comm, self.name)(out, inp, *args, stream=stream)
        return work

    def launch(self, comm: Communicator, out: torch.Tensor, inp: torch.Tensor, stream: Stream) -> Work:
        """Make the call, in a group if it needs one."""
        if self.name != "sendrecv":
            return self.post(comm, out, inp, stream)
        with comm.group() as work:
            self.post(comm, out, inp, stream)
        return work

    def count_wrong(self, rank: int, in_place: bool, out: torch.Tensor, inp: torch.Tensor) -> int:
        """The number of wrong elements in `out` after the call; out of place, of changed elements in `inp` as well."""
        wanted, kept = self.place(rank, in_place, lambda numel, dtype: torch.empty(numel, dtype=dtype))
        if blocks := self._blocks(rank):
            wanted.copy_(torch.cat(blocks))
        return _differing(out, wanted) + (0 if in_place else _differing(inp, kept))

    def _blocks(self, rank: int) -> list[torch.Tensor]:
        """The blocks of the expected `out`; none if it is not written."""
        n, ranks = self.n, range(self.size)
        match self.name:
            case "gather" | "reduce" if rank != self.root:
                return []
            case "all_gather" | "gather":
                return [_tile(self._values(peer), 0, n) for peer in ranks]
            case "all_reduce" | "reduce":
                return [_tile(self._reduced(), 0, n)]
            case "reduce_scatter":
                return [_tile(self._reduced(), rank * n, n)]
            case "all_to_all":
                counts = self.counts or [[n] * self.size] * self.size
                return [_tile(self._values(peer), sum(counts[peer][:rank]), counts[peer][rank]) for peer in ranks]
        source = self.root if self.name in ROOTED else (rank - 1) % self.size
        return [_tile(self._values(source), rank * n if self.name == "scatter" else 0, n)]

    def _values(self, rank: int) -> torch.Tensor:
        return _values(self.seed, rank, self.size, self.dtype, self.op, self.rounding)

    def _reduced(self) -> torch.Tensor:
        """A left fold in rank order, in float32 for the halves, rounded once: as the MPI backend guarantees."""
        assert self.op is not None, "a reduction"
        wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        if self.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch does not add these; the values are small
            wide = torch.int64
        rows = [self._values(rank).to(wide) for rank in range(self.size)]
        if isinstance(self.op, PreMulSum):
            rows = [row * self.op.factor for row in rows]
        total = rows[0]
        for row in rows[1:]:
            total = _COMBINE.get(self.op, torch.add)(total, row)
        return (total / self.size if self.op is ReduceOp.AVG else total).to(self.dtype)


@lru_cache(maxsize=64)
def _values(seed: int, rank: int, size: int, dtype: torch.dtype, op: Op | None, rounding: bool) -> torch.Tensor:
    """One period of a rank's values, (_PERIOD,)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    if rounding:
        return torch.randn(_PERIOD, generator=generator).to(dtype)
    values = torch.randint(2 if dtype is torch.bool else 16, (_PERIOD,), generator=generator)
    if dtype is torch.bool or op in (None, ReduceOp.MIN, ReduceOp.MAX):
        return values.to(dtype)
    # However many ranks there are, at most 8 contribute to a sum and 4 to a product: it stays below 128, exact in bfloat16.
    turn = (torch.arange(_PERIOD) + rank) % (size + 3)
    if op is ReduceOp.PRODUCT:
        return torch.where(turn < 4, 1 + values % 2, 1).to(dtype)
    return torch.where(turn < 8, values % 4 * size if op is ReduceOp.AVG else values, 0).to(dtype)


def _tile(period: torch.Tensor, begin: int, numel: int) -> torch.Tensor:
    """Elements `begin : begin + numel` of the endless repetition of a period."""
    start = begin % _PERIOD
    return period.repeat(-(-(start + numel) // _PERIOD))[start : start + numel]


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.uint8).fill_(_POISON)
    return tensor


def _differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    bits = _BITS[wanted.element_size()]
    return int((found.view(bits).cpu() != wanted.view(bits)).sum())


def bus_factor(name: str, size: int) -> float:
    """Bus bandwidth by algorithm bandwidth: how often a byte of the collective's size crosses the busiest rank's link."""
    if name == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if name in BLOCKED else 1.0


def ops_for(name: str, dtype: torch.dtype, ops: Sequence[Op]) -> Sequence[Op | None]:
    """The operations of `ops` that are defined for the dtype; None alone for a collective that reduces nothing."""
    if name not in REDUCTIONS:
        return (None,)
    if dtype in FLOATS:
        return ops
    return [op for op in ops if dtype in REDUCIBLE and op is not ReduceOp.AVG and not isinstance(op, PreMulSum)]

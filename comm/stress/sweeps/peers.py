"""Other libraries for comparison, on the same buffers, out of place: MPI's and NCCL's own calls, torch.distributed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import distributed
from torch.distributed import TCPStore

from ... import ReduceOp, World
from ...core.calls import FLOATS, Op
from ..problem import Problem

_MPI_DTYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.int64: MPI.INT64_T, torch.int32: MPI.INT32_T}
_MPI_OPS: dict[Op | None, MPI.Op] = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PRODUCT: MPI.PROD,
}
_TORCH_OPS: dict[Op | None, distributed.ReduceOp] = {op: getattr(distributed.ReduceOp, op.name) for op in ReduceOp}


@dataclass(frozen=True, slots=True)
class Peer:
    """Another communication library: a function for each collective, and the dtypes and ops that it reduces."""

    calls: dict[str, Callable[[Problem, torch.Tensor, torch.Tensor], object]]  # takes a problem, out and inp
    dtypes: Collection[torch.dtype]
    ops: Collection[Op | None]
    close: Callable[[], None]

    def can(self, problem: Problem) -> bool:
        return problem.op is None or (problem.dtype in self.dtypes and problem.op in self.ops)

    def run(self, problem: Problem, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Run the call. Collectives that only move data move bytes: not every library has every dtype."""
        tensors = (out, inp) if problem.op is not None else (out.view(torch.uint8), inp.view(torch.uint8))
        self.calls[problem.name](problem, *tensors)


def make_peer(name: str, world: World) -> Peer:
    """Create a peer. Collective. Raises ValueError for a library that does not support the world's device."""
    if world.device.type != ("cuda" if name in ("nccl", "c10d-nccl") else "cpu"):
        raise ValueError(f"--peer {name} does not support tensors on {world.device}")
    if name == "nccl":
        return _nccl(world)
    return _mpi(world) if name == "mpi4py" else _torch(world, name.removeprefix("c10d-"))


def _mpi(world: World) -> Peer:
    comm, rank = MPI.COMM_WORLD.Dup(), world.rank
    after, before = (rank + 1) % world.size, (rank - 1) % world.size

    def of(problem: Problem, tensor: torch.Tensor) -> list[object]:
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, MPI.BYTE if problem.op is None else _MPI_DTYPES[problem.dtype]]

    def at_root(problem: Problem, tensor: torch.Tensor) -> list[object] | None:
        return of(problem, tensor) if rank == problem.root else None

    calls: dict[str, Callable[[Problem, torch.Tensor, torch.Tensor], object]] = {
        "all_gather": lambda p, out, inp: comm.Allgather(of(p, inp), of(p, out)),
        "all_reduce": lambda p, out, inp: comm.Allreduce(of(p, inp), of(p, out), _MPI_OPS[p.op]),
        "reduce_scatter": lambda p, out, inp: comm.Reduce_scatter_block(of(p, inp), of(p, out), _MPI_OPS[p.op]),
        "all_to_all": lambda p, out, inp: comm.Alltoall(of(p, inp), of(p, out)),
        "broadcast": lambda p, out, inp: comm.Bcast(of(p, out.copy_(inp) if rank == p.root else out), p.root),
        "reduce": lambda p, out, inp: comm.Reduce(of(p, inp), at_root(p, out), _MPI_OPS[p.op], p.root),
        "gather": lambda p, out, inp: comm.Gather(of(p, inp), at_root(p, out), p.root),
        "scatter": lambda p, out, inp: comm.Scatter(at_root(p, inp), of(p, out), p.root),
        "sendrecv": lambda p, out, inp: comm.Sendrecv(of(p, inp), after, 0, of(p, out), before, 0),
    }
    return Peer(calls, _MPI_DTYPES, _MPI_OPS, comm.Free)


def _nccl(world: World) -> Peer:
    """NCCL's calls through CuPy alone, on a communicator of their own. What has no call is sends and receives in a group."""
    from cupy.cuda import nccl

    from ...backends.nccl.nccl import DTYPES, OPS

    rank, size = world.rank, world.size
    comm = nccl.NcclCommunicator(size, world.comm.exchange(nccl.get_unique_id() if rank == 0 else None)[0], rank)
    dtypes = {dtype: DTYPES[dtype] for dtype in (*FLOATS, torch.uint8)}
    # Over one rank, NCCL before 2.29.7 leaves the end of an average unwritten.
    ops: dict[Op | None, int] = {op: code for op, code in OPS.items() if size > 1 or op is not ReduceOp.AVG}

    def stream() -> int:
        return torch.cuda.current_stream(world.device).cuda_stream

    def reduce(call: Callable[..., None], p: Problem, out: torch.Tensor, inp: torch.Tensor, *root: int) -> None:
        count = min(out.numel(), inp.numel())
        call(inp.data_ptr(), out.data_ptr(), count, dtypes[p.dtype], ops[p.op], *root, stream())

    def move(going: dict[int, torch.Tensor], coming: dict[int, torch.Tensor]) -> None:
        nccl.groupStart()
        for peer, block in going.items():
            comm.send(block.data_ptr(), block.numel(), nccl.NCCL_UINT8, peer, stream())
        for peer, block in coming.items():
            comm.recv(block.data_ptr(), block.numel(), nccl.NCCL_UINT8, peer, stream())
        nccl.groupEnd()

    def blocks(tensor: torch.Tensor, *, on: bool = True) -> dict[int, torch.Tensor]:
        return dict(enumerate(tensor.view(-1).tensor_split(size))) if on else {}

    calls: dict[str, Callable[[Problem, torch.Tensor, torch.Tensor], object]] = {
        "all_gather": lambda p, out, inp: comm.allGather(
            inp.data_ptr(), out.data_ptr(), inp.numel(), nccl.NCCL_UINT8, stream()
        ),
        "all_reduce": lambda p, out, inp: reduce(comm.allReduce, p, out, inp),
        "reduce_scatter": lambda p, out, inp: reduce(comm.reduceScatter, p, out, inp),
        "reduce": lambda p, out, inp: reduce(comm.reduce, p, out, inp, p.root),
        "broadcast": lambda p, out, inp: comm.broadcast(
            inp.data_ptr(), out.data_ptr(), inp.numel(), nccl.NCCL_UINT8, p.root, stream()
        ),
        "all_to_all": lambda p, out, inp: move(blocks(inp), blocks(out)),
        "gather": lambda p, out, inp: move({p.root: inp}, blocks(out, on=rank == p.root)),
        "scatter": lambda p, out, inp: move(blocks(inp, on=rank == p.root), {p.root: out}),
        "sendrecv": lambda p, out, inp: move({(rank + 1) % size: inp}, {(rank - 1) % size: out}),
    }
    return Peer(calls, dtypes, ops, comm.destroy)


def _torch(world: World, backend: str) -> Peer:
    """torch.distributed, on a process group of its own. It reduces in place: an out-of-place reduction starts with a copy."""
    rank = world.rank
    after, before = (rank + 1) % world.size, (rank - 1) % world.size
    host = "127.0.0.1" if world.nodes == 1 else socket.gethostname()
    server = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    host, port = world.comm.exchange((host, server.port if server else 0))[0]
    store = server or TCPStore(host, port)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world.size)

    # The second names are those before torch 2.13.
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def blocks(problem: Problem, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        return list(tensor.chunk(problem.size)) if rank == problem.root else None

    def sendrecv(problem: Problem, out: torch.Tensor, inp: torch.Tensor) -> None:
        there, back = distributed.P2POp(distributed.isend, inp, after), distributed.P2POp(distributed.irecv, out, before)
        for work in distributed.batch_isend_irecv([there, back]):
            work.wait()

    calls: dict[str, Callable[[Problem, torch.Tensor, torch.Tensor], object]] = {
        "all_gather": lambda p, out, inp: gather(out, inp),
        "all_reduce": lambda p, out, inp: distributed.all_reduce(out.copy_(inp), _TORCH_OPS[p.op]),
        "reduce_scatter": lambda p, out, inp: scatter(out, inp, _TORCH_OPS[p.op]),
        "all_to_all": lambda p, out, inp: distributed.all_to_all_single(out, inp),
        "broadcast": lambda p, out, inp: distributed.broadcast(out.copy_(inp) if rank == p.root else out, p.root),
        # Hazard: gloo overwrites the tensor on every rank.
        "reduce": lambda p, out, inp: distributed.reduce(
            out.copy_(inp) if rank == p.root else inp.clone(), p.root, _TORCH_OPS[p.op]
        ),
        "gather": lambda p, out, inp: distributed.gather(inp, blocks(p, out), p.root),
        "scatter": lambda p, out, inp: distributed.scatter(out, blocks(p, inp), p.root),
        "sendrecv": sendrecv,
    }
    ops = [op for op in ReduceOp if backend == "nccl" or op is not ReduceOp.AVG]  # gloo has no average
    return Peer(calls, FLOATS, ops, distributed.destroy_process_group)

"""CUDA tensors over NCCL, through CuPy's thin binding of it.

A collective is one NCCL call, or one NCCL group, on the stream it was given; the host does not wait. Only these are copied on
the way: a rank's own block in what is made of sends and receives (gather, scatter, all-to-all), the input of an all-to-all in
place, and that of a pre-multiplied sum where NCCL has none. What only moves data goes as bytes, so every dtype can; what
reduces needs a dtype that NCCL can add, which the integers of 16 bits are not. In place follows from the pointers, as the
contract words it.

Precision: NCCL reduces in the tensors' own dtype, in an order of its own choice. AVG and PreMulSum multiply every rank's values
by the factor, rounded to the dtype, before they are added: up to 0.2 % off in bfloat16 unless it is a power of two.

Hazard: a communicator runs its calls one after the other, even those on different streams; what is to overlap needs a
communicator each, called in the same order on every rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from ..calls import CollectiveCall, Counts, Hook, Op, ReduceOp
from ..communicator import Communicator
from ..pool import Pool
from ..streams import Stream
from .libnccl import Allocator, Buffer, Library

if TYPE_CHECKING:
    from .mpi import MpiCommunicator

# Hazard: torch first. It brings a libnccl of its own, and the one that is loaded first serves both.
try:
    from cupy.cuda import Device, nccl

    if not nccl.available:
        raise ImportError("CuPy is installed, but could not load libnccl.so.2")
except ImportError as error:
    raise ImportError(
        f"collectives of CUDA tensors need CuPy and NCCL (torch is built for CUDA "
        f"{torch.version.cuda}): pip install 'shardrt[cuda12]' or 'shardrt[cuda13]'"
    ) from error

T = TypeVar("T")

_log = logging.getLogger(__name__)

_DTYPES = {
    torch.float64: nccl.NCCL_FLOAT64,
    torch.float32: nccl.NCCL_FLOAT32,
    torch.float16: nccl.NCCL_FLOAT16,
    torch.bfloat16: nccl.NCCL_BFLOAT16,
    torch.int64: nccl.NCCL_INT64,
    torch.int32: nccl.NCCL_INT32,
    torch.int8: nccl.NCCL_INT8,
    torch.uint64: nccl.NCCL_UINT64,
    torch.uint32: nccl.NCCL_UINT32,
    torch.uint8: nccl.NCCL_UINT8,
    torch.bool: nccl.NCCL_UINT8,
}
_BYTE = nccl.NCCL_INT8  # NCCL itself turns every all-gather and broadcast into one of these
_OPS = {
    ReduceOp.SUM: nccl.NCCL_SUM,
    ReduceOp.AVG: nccl.NCCL_AVG,
    ReduceOp.MIN: nccl.NCCL_MIN,
    ReduceOp.MAX: nccl.NCCL_MAX,
    ReduceOp.PRODUCT: nccl.NCCL_PROD,
}
_OPS_OF_BOOL = _OPS | {ReduceOp.SUM: nccl.NCCL_MAX, ReduceOp.PRODUCT: nccl.NCCL_MIN}
# Hazard: over one rank, NCCL before 2.29.7 leaves the end of an AVG unwritten, which is a pre-multiplied sum. SUM is the same.
_OPS_OF_ONE_RANK = _OPS | {ReduceOp.AVG: nccl.NCCL_SUM}

_library = Library(str(sys.modules[nccl.NcclCommunicator.__module__].__file__), nccl.check_status)


class NcclCommunicator(Communicator):
    """One GPU per rank, and the host communicator over the same ranks, which it owns.

    The host communicator carries the unique id and the control calls, of which this one's hooks are told: it has none itself.
    Creating is collective over it, and makes `device`
    (with its index) the current one of torch and of CuPy: NCCL binds a communicator to the device that is current.
    Raises: RuntimeError when NCCL cannot connect the ranks.
    """

    def __init__(self, host: MpiCommunicator, device: torch.device, name: str, hooks: Sequence[Hook] = ()) -> None:
        super().__init__(host.rank, host.size, device, name, hooks)
        self.ranks = host.ranks
        self._host = host
        self._ops = _OPS if host.size > 1 else _OPS_OF_ONE_RANK
        self._has_pre_mul_sum = _library.has_pre_mul_sum and host.size > 1
        self._buffers: list[Buffer] = []
        self._pool: _RegisteredPool | None = None
        self._asked_for_pool = False
        # Hazard: a group's calls are launched at its end; until then, what they read must not be freed.
        self._temporaries: list[torch.Tensor] = []
        torch.cuda.set_device(device)
        Device(device.index).use()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: NCCL %s from %s", self, _version(nccl.get_version()), _library_paths())
        with self.watched("create"):
            mine = self._attempt("create", nccl.get_unique_id) if host.rank == 0 else None
            unique_id = host.exchange(mine)[0]
            self._nccl = self._attempt("create", nccl.NcclCommunicator, host.size, unique_id, host.rank)
        # What a barrier reduces. It has to outlive every barrier; its value is never read.
        self._token = torch.zeros(1, device=device)

    def _exchange(self, value: T) -> list[T]:
        return self._host.exchange(value)

    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        self._check_open("compare")
        return self._host.compare(fingerprint, describe)

    def _split(self, color: int | None, key: int, name: str) -> NcclCommunicator | None:
        host = cast("MpiCommunicator | None", self._host.split(color, key, name))
        return None if host is None else NcclCommunicator(host, self.device, name, self.hooks)

    def _empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        buffer = self._take(nbytes, symmetric) if nbytes > 0 and _library.has_registration else None
        if buffer is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        self._buffers.append(buffer)
        return torch.as_tensor(buffer, device=self.device).view(dtype)

    def _take(self, nbytes: int, symmetric: bool) -> Buffer | None:
        """Memory that NCCL knows on every rank; None on every rank if one has none."""
        with torch.cuda.device(self.device):
            buffer, everywhere = self._on_all(partial(self._attempt, "empty", self._allocate, nbytes))
            if buffer is not None and everywhere:
                _, everywhere = self._on_all(partial(self._attempt, "empty", self._make_known, buffer, symmetric))
            if buffer is not None and not everywhere:
                self._attempt("empty", _library.free, self._nccl.comm, buffer)
        return buffer if everywhere else None

    @staticmethod
    def _allocate(nbytes: int) -> Buffer:
        try:
            return _library.allocate(nbytes)
        except (nccl.NcclError, KeyError):
            torch.cuda.empty_cache()  # what torch keeps for later is out of NCCL's reach
            return _library.allocate(nbytes)

    def _make_known(self, buffer: Buffer, symmetric: bool) -> None:
        if symmetric and _library.has_windows:
            _library.make_window(self._nccl.comm, buffer)
        if buffer.window is None:
            buffer.handle = _library.register(self._nccl.comm, buffer.address, buffer.nbytes)
            if symmetric and self.rank == 0:
                _log.warning("%s: NCCL makes no symmetric windows here; the buffer is registered on each rank", self)

    def pool(self) -> Pool | None:
        self._check_open("pool")
        if not self._asked_for_pool:
            self._asked_for_pool = True
            with self._control_call("pool"):
                allocator, everywhere = self._on_all(_library.allocator)
            if allocator is not None and everywhere:
                register = partial(self._attempt, "pool", _library.register, self._nccl.comm)
                self._pool = _RegisteredPool(self.device, allocator, register)
        return self._pool

    def _on_all(self, make: Callable[[], T]) -> tuple[T | None, bool]:
        """What `make` makes, None if it fails, and whether it has made something on every rank. Collective.

        NCCL must not know the memory of some ranks only (so its manual): if one has none, plain memory does for all.
        """
        made, failure = None, None
        try:
            made = make()
        except (RuntimeError, OSError) as error:  # the latter from a folder for temporary files that runs nothing
            failure = f"rank {self.rank}: {error}"
        failures = [found for found in self._host.exchange(failure) if found is not None]
        if failures and self.rank == 0:
            _log.warning("%s takes its buffers from plain memory: %s", self, "; ".join(failures))
        return made, not failures

    def _close(self) -> None:
        # Hazard: a collective that still runs would lose its buffers.
        torch.cuda.synchronize(self.device)
        if self._pool is not None:
            for handle in filter(None, self._pool.handles):
                self._attempt("close", _library.deregister, self._nccl.comm, handle)
            self._pool = None  # its memory goes with the last buffer in it
        while self._buffers:
            self._attempt("close", _library.free, self._nccl.comm, self._buffers.pop())
        self._nccl.destroy()
        self._host.close()

    # ------------------------------------------------------------------ collectives

    def _enqueue(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        try:
            if len(calls) == 1:
                self._enqueue_call(stream, calls[0])
            else:
                self._attempt("group", self._enqueue_group, stream, calls)
        finally:
            self._temporaries.clear()

    def _enqueue_call(self, stream: Stream, call: CollectiveCall) -> None:
        self._attempt(call.name, call.launch, stream, call.out, call.inp, *call.how, call=call)

    def _enqueue_group(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        with _grouped():
            for call in calls:
                self._enqueue_call(stream, call)

    def _all_gather(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor) -> None:
        self._nccl.allGather(inp.data_ptr(), out.data_ptr(), _nbytes(inp), _BYTE, stream.handle)

    def _reduce_scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        self._reduce_by(self._nccl.reduceScatter, stream, out, inp, out.numel(), op)

    def _all_reduce(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        self._reduce_by(self._nccl.allReduce, stream, out, inp, inp.numel(), op)

    def _reduce(self, stream: Stream, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int) -> None:
        self._reduce_by(self._nccl.reduce, stream, out, inp, inp.numel(), op, root)

    def _broadcast(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, root: int) -> None:
        self._nccl.broadcast(inp.data_ptr(), out.data_ptr(), _nbytes(inp), _BYTE, root, stream.handle)

    def _gather(self, stream: Stream, out: torch.Tensor | None, inp: torch.Tensor, root: int) -> None:
        coming = {} if out is None else self._blocks(out)
        self._move(stream, coming, {root: inp.view(-1)})

    def _scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor | None, root: int) -> None:
        going = {} if inp is None else self._blocks(inp)
        self._move(stream, {root: out.view(-1)}, going)

    def _all_to_all(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, counts: Counts | None) -> None:
        source = self._temporary(stream, inp.clone) if inp.data_ptr() == out.data_ptr() else inp
        if _library.all_to_all is not None and counts is None:
            nbytes = _nbytes(inp) // self.size
            _library.all_to_all(source.data_ptr(), out.data_ptr(), nbytes, _BYTE, self._nccl.comm, stream.handle)
        else:
            self._move(stream, self._blocks(out, counts and counts.out), self._blocks(source, counts and counts.inp))

    def _send(self, stream: Stream, out: None, inp: torch.Tensor, to: int) -> None:
        if inp.numel() > 0:
            self._nccl.send(inp.data_ptr(), _nbytes(inp), _BYTE, to, stream.handle)

    def _recv(self, stream: Stream, out: torch.Tensor, inp: None, source: int) -> None:
        if out.numel() > 0:
            self._nccl.recv(out.data_ptr(), _nbytes(out), _BYTE, source, stream.handle)

    def _barrier(self, stream: Stream, out: None, inp: None) -> None:
        self._reduce_by(self._nccl.allReduce, stream, self._token, self._token, 1, ReduceOp.SUM)

    # ------------------------------------------------------------------ reducing

    def _check_reducible(self, name: str, dtype: torch.dtype, op: Op) -> None:
        super()._check_reducible(name, dtype, op)
        if dtype not in _DTYPES:
            raise ValueError(f"{name} on {self}: NCCL cannot reduce {dtype}; widen it first")

    def _reduce_by(
        self,
        launch: Callable[..., None],
        stream: Stream,
        out: torch.Tensor | None,
        inp: torch.Tensor,
        count: int,
        op: Op,
        *root: int,
    ) -> None:
        """`launch(send, receive, count, dtype, op, *root, stream)`; NCCL takes 0 for what a rank does not receive."""
        dtype, receive = _DTYPES[inp.dtype], 0 if out is None else out.data_ptr()
        if isinstance(op, ReduceOp):
            code = (_OPS_OF_BOOL if inp.dtype is torch.bool else self._ops)[op]
            launch(inp.data_ptr(), receive, count, dtype, code, *root, stream.handle)
        elif self._has_pre_mul_sum:
            with _library.pre_mul_sum(torch.tensor(op.factor, dtype=inp.dtype, device="cpu"), dtype, self._nccl.comm) as code:
                launch(inp.data_ptr(), receive, count, dtype, code, *root, stream.handle)
        else:
            product = self._temporary(stream, lambda: inp * op.factor)
            launch(product.data_ptr(), receive, count, dtype, nccl.NCCL_SUM, *root, stream.handle)

    # ------------------------------------------------------------------ sending

    def _blocks(self, tensor: torch.Tensor, counts: tuple[int, ...] | None = None) -> dict[int, torch.Tensor]:
        """By rank; of one size without counts."""
        flat = tensor.view(-1)
        return dict(enumerate(flat.split(counts) if counts else flat.tensor_split(self.size)))

    def _move(self, stream: Stream, coming: Mapping[int, torch.Tensor], going: Mapping[int, torch.Tensor]) -> None:
        """What comes from each rank, and what goes to each, all at once; the own block is in both or in neither."""
        if self.rank in coming and coming[self.rank].data_ptr() != going[self.rank].data_ptr():
            stream.submit(lambda: coming[self.rank].copy_(going[self.rank]))
        with _grouped():
            for peer in range(self.size):
                if peer != self.rank and peer in going:
                    self._send(stream, None, going[peer], peer)
                if peer != self.rank and peer in coming:
                    self._recv(stream, coming[peer], None, peer)

    def _temporary(self, stream: Stream, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        stream.submit(lambda: self._temporaries.append(make()))
        return self._temporaries[-1]

    # ------------------------------------------------------------------ calling NCCL

    def _attempt(self, name: str, fn: Callable[..., T], *args: object, call: CollectiveCall | None = None) -> T:
        try:
            return fn(*args)
        # CuPy names NCCL's codes up to 6; a later one (in progress, timeout) is a KeyError(code).
        except (nccl.NcclError, KeyError) as error:
            about = "" if call is None else _about(call)
            found = f"ncclResult_t {error}" if isinstance(error, KeyError) else str(error)
            raise RuntimeError(f"{name} on {self}{about}: NCCL failed: {found}") from error


class _RegisteredPool(Pool):
    """Of memory that NCCL gives; `register` is told of each block, the first time a buffer brings it."""

    def __init__(self, device: torch.device, allocator: Allocator, register: Callable[[int, int], int | None]) -> None:
        super().__init__(device, allocator.torchs)
        self._taken = allocator
        self._register = register
        self.handles: list[int | None] = []

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().resize(storage, nbytes)
        for block in self._taken.fresh():
            self.handles.append(self._register(*block))


@contextmanager
def _grouped() -> Iterator[None]:
    """NCCL launches what is called in the block together, at its end."""
    nccl.groupStart()
    try:
        yield
    except BaseException:
        # Hazard: a group left open would swallow every later call. What its end says follows from the error under way.
        with suppress(nccl.NcclError, KeyError):
            nccl.groupEnd()
        raise
    nccl.groupEnd()


def _about(call: CollectiveCall) -> str:
    tensors = [(role, tensor) for role, tensor in (("out", call.out), ("inp", call.inp)) if tensor is not None]
    if not tensors:
        return ""
    sizes = ", ".join(f"{role} {tensor.numel()}" for role, tensor in tensors)
    return f" ({sizes} elements, {tensors[0][1].dtype})"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _library_paths() -> str:
    """Every libnccl that this process has loaded; one, unless torch and CuPy disagree."""
    with open("/proc/self/maps") as maps:
        return ", ".join(sorted({line.split()[-1] for line in maps if "libnccl" in line}))

"""CUDA tensors over NCCL, through CuPy's thin binding of it.

A collective is one NCCL call, or one NCCL group, on the stream it was given; the host does not wait. Copies are made only of a
rank's own block in collectives made of sends and receives (gather, scatter, all-to-all), of the input of an all-to-all in
place, and of that of a pre-multiplied sum where NCCL has none. Collectives that only move data send bytes, so any dtype can be
moved; reductions need a dtype that NCCL can add, which 16-bit integers are not. NCCL detects calls in place by their pointers,
under the same rules as `Communicator`.

Precision: NCCL reduces in the tensors' own dtype, in an order of its own choice. AVG and PreMulSum multiply every rank's values
by the factor, rounded to the dtype, before they are added: up to 0.2 % off in bfloat16 unless it is a power of two.

A backend connects its ranks at its first collective: one over which only the host agrees has no NCCL communicator. The first
one over some ranks is made from a unique id, further ones over the same ranks by ncclCommSplit.

Hazard: a communicator runs its calls one after the other, even those on different streams; calls that are to overlap need
different communicators, called in the same order on every rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import torch

from ...core.backend import Backend
from ...core.calls import CollectiveCall, Counts, Op, ReduceOp
from ...core.nccl_policy import NcclPolicy
from ...core.pool import Pool
from ...core.streams import Stream, is_capturing
from .cuda_builds import loaded_nccls
from .libnccl import Library
from .nccl_config import Family, configure
from .nccl_memory import NcclMemory

if TYPE_CHECKING:
    from ..mpi import MpiBackend

# Hazard: import torch first. It has a libnccl of its own, and the one that is loaded first is used by both.
try:
    from cupy.cuda import Device, nccl

    if not nccl.available:
        raise ImportError("CuPy is installed, but could not load libnccl.so.2")
except ImportError as error:
    raise ImportError(
        f"collectives of CUDA tensors need CuPy and NCCL (torch is built for CUDA "
        f"{torch.version.cuda}): pip install cupy-cuda12x nvidia-nccl-cu12, or cupy-cuda13x nvidia-nccl-cu13"
    ) from error

T = TypeVar("T")

_log = logging.getLogger(__name__)

DTYPES = {
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
_IN_PROGRESS = 7  # ncclResult_t: no error
OPS = {
    ReduceOp.SUM: nccl.NCCL_SUM,
    ReduceOp.AVG: nccl.NCCL_AVG,
    ReduceOp.MIN: nccl.NCCL_MIN,
    ReduceOp.MAX: nccl.NCCL_MAX,
    ReduceOp.PRODUCT: nccl.NCCL_PROD,
}
_OPS_OF_BOOL = OPS | {ReduceOp.SUM: nccl.NCCL_MAX, ReduceOp.PRODUCT: nccl.NCCL_MIN}
# Hazard: over one rank, NCCL before 2.29.7 leaves the end of an AVG unwritten, which is a pre-multiplied sum. SUM is the same.
_OPS_OF_ONE_RANK = OPS | {ReduceOp.AVG: nccl.NCCL_SUM}

_library = Library(str(sys.modules[nccl.NcclCommunicator.__module__].__file__), nccl.check_status)


class NcclBackend(Backend):
    """One GPU per rank, and the host backend over the same ranks, which it owns.

    The host backend carries the unique id and the control calls. Creating makes `device` (with its index) the current one of
    torch and of CuPy.
    """

    library = "NCCL"
    reducible = frozenset(DTYPES)
    has_pool = True
    multiplies_terms = True

    _nccl: nccl.NcclCommunicator  # both by `_connect`, which sets `_asked` as well
    _memory: NcclMemory

    def __init__(self, host: MpiBackend, device: torch.device, name: str, family: Family | None = None) -> None:
        super().__init__(name, host.rank, host.size, device)
        self.ranks = host.ranks
        self._host = host
        self._family = family or Family(NcclPolicy())
        self._is_connected = False
        self._token: torch.Tensor | None = None  # what barriers reduce; it outlives them, and its value is never read
        self._ops = OPS if host.size > 1 else _OPS_OF_ONE_RANK
        self._has_pre_mul_sum = _library.has_pre_mul_sum and host.size > 1
        self._asked: nccl.NcclCommunicator | None = None  # what other threads use: the same, until it ends
        self._asking = Lock()
        # Hazard: a group's calls are launched at its end; until then, what they read must not be freed.
        self._temporaries: list[torch.Tensor] = []
        self._bind()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: NCCL %s from %s", self, _version(nccl.get_version()), ", ".join(loaded_nccls()))

    def _bind(self) -> None:
        """Make the device current in this thread: NCCL binds a communicator to the one that is."""
        torch.cuda.set_device(self.device)
        Device(self.device.index).use()

    def _connect(self) -> None:
        """Make the NCCL communicator, at the first call. Collective: every rank is in it, or the watchdog says which is not.

        Raises: RuntimeError when NCCL cannot connect the ranks, and where the call is captured in a CUDA graph.
        """
        if is_capturing():
            raise RuntimeError(
                f"{self}: its first call, which connects the ranks, is captured in a CUDA graph; make one before the capture"
            )
        self._bind()  # backward runs in a thread of its own
        first = self._family.first.get(tuple(self.ranks))
        self._nccl = self._init() if first is None else self._split_from(first)
        self._family.first.setdefault(tuple(self.ranks), self._nccl)
        label = str(self)
        self._memory = NcclMemory(_library, self._host, self._nccl.comm, self.device, label, partial(_attempt, label))
        self._asked, self._is_connected = self._nccl, True

    def _init(self) -> nccl.NcclCommunicator:
        own: bytes | RuntimeError | None = None
        if self.rank == 0:
            try:
                own = _attempt(self, "create", nccl.get_unique_id)
            except RuntimeError as error:
                own = RuntimeError(*error.args)
        unique_id = self._host.exchange(own)[0]
        if isinstance(unique_id, RuntimeError):
            raise unique_id
        config, policy = [], self._family.policy
        if policy != NcclPolicy():
            config = [nccl.NcclConfig(split_share=int(policy.share_resources))]
            configure(config[0], policy)
        return _attempt(self, "create", nccl.NcclCommunicator, self.size, unique_id, self.rank, *config)

    def _split_from(self, first: nccl.NcclCommunicator) -> nccl.NcclCommunicator:
        """A communicator with the configuration of the first one."""
        # Hazard: what the first one runs now may wait for a rank that waits in the split; so may what waits for that.
        torch.cuda.synchronize(self.device)
        return _attempt(self, "create", first.commSplit, 0, self.rank)

    def _check_first(self, calls: Sequence[CollectiveCall]) -> None:
        """Raise RuntimeError if the first call need not be one of all ranks. Every rank that makes such a call raises it."""
        if any(call.name not in ("send", "recv") for call in calls):
            return
        if self.size > 2 or {self.rank, *(call.args[0] for call in calls)} != set(range(self.size)):
            raise RuntimeError(
                f"{calls[0].name} on {self}: expected a call that all its ranks make first, such as barrier(), found sends and "
                "receives alone; the first call connects the ranks"
            )

    def async_error(self) -> str | None:
        # An error of the network, for example, is found by NCCL's own threads: the kernels that wait for it never end.
        # Cost: reads of two or three variables (ncclCommGetAsyncError of a blocking communicator, in NCCL's sources of 2.31).
        with self._asking:
            if self._asked is None:
                return None
            try:
                self._asked.check_async_error()
            except (nccl.NcclError, KeyError) as error:
                if isinstance(error, KeyError) and error.args == (_IN_PROGRESS,):
                    return None
                found, more = _describe(error), _library.last_error()
                return f"{found} ({more})" if more else found
        return None

    def abort(self) -> None:
        # Hazard: the kernels end as if they were done: what reads their results from now on reads wrong values.
        # The abort of a blocking communicator is best effort: it waits for NCCL's own threads.
        if self._asked is not None:
            self._withdraw()
            self._nccl.abort()

    def _withdraw(self) -> None:
        """Let no other thread use the communicator any more, since it ends."""
        with self._asking:
            self._asked = None

    def exchange(self, value: T) -> list[T]:
        return self._host.exchange(value)

    def compare(self, fingerprint: int, describe: Callable[[], T]) -> list[T] | None:
        return self._host.compare(fingerprint, describe)

    def swap_numbers(self, numbers: Sequence[int]) -> list[int]:
        return self._host.swap_numbers(numbers)

    def stop_transfers(self) -> None:
        self._host.stop_transfers()

    def stop_comparisons(self, *, in_call: bool = False) -> None:
        self._host.stop_comparisons(in_call=in_call)

    def rejoin(self) -> None:
        self._host.rejoin()

    def split(self, color: int | None, key: int, name: str) -> NcclBackend | None:
        host = self._host.split(color, key, name)
        return None if host is None else NcclBackend(host, self.device, name, self._family)

    def subset(self, ranks: Sequence[int], name: str, *, on_host: bool) -> Backend:
        host = self._host.subset(ranks, name, on_host=True)
        return host if on_host else NcclBackend(host, self.device, name, self._family)

    def empty(self, numel: int, dtype: torch.dtype, symmetric: bool) -> torch.Tensor:
        if not self._is_connected:
            self._connect()
        return self._memory.empty(numel, dtype, symmetric)

    def pool(self) -> Pool | None:
        if not self._is_connected:
            self._connect()
        return self._memory.pool()

    def close(self) -> None:
        if self._is_connected:
            # Hazard: a collective that still runs would lose its buffers.
            torch.cuda.synchronize(self.device)
            self._memory.close()
            self._withdraw()
            if self._family.first.get(tuple(self.ranks)) is self._nccl:
                del self._family.first[tuple(self.ranks)]
            self._nccl.destroy()
        self._host.close()

    # ------------------------------------------------------------------ collectives

    def launch(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        if not self._is_connected:
            self._check_first(calls)
            self._connect()
        try:
            if len(calls) == 1:
                self._launch_call(stream, calls[0])
            else:
                _attempt(self, "group", self._launch_group, stream, calls)
        finally:
            self._temporaries.clear()

    def _launch_call(self, stream: Stream, call: CollectiveCall) -> None:
        _attempt(self, call.name, getattr(self, call.name), stream, call.out, call.inp, *call.args, call=call)

    def _launch_group(self, stream: Stream, calls: Sequence[CollectiveCall]) -> None:
        with _grouped():
            for call in calls:
                self._launch_call(stream, call)

    def all_gather(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor) -> None:
        self._nccl.allGather(inp.data_ptr(), out.data_ptr(), inp.nbytes, _BYTE, stream.handle)

    def reduce_scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        self._reduce_by(self._nccl.reduceScatter, stream, out, inp, out.numel(), op)

    def all_reduce(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: Op) -> None:
        self._reduce_by(self._nccl.allReduce, stream, out, inp, inp.numel(), op)

    def reduce(self, stream: Stream, out: torch.Tensor | None, inp: torch.Tensor, op: Op, root: int) -> None:
        self._reduce_by(self._nccl.reduce, stream, out, inp, inp.numel(), op, root)

    def broadcast(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, root: int) -> None:
        self._nccl.broadcast(inp.data_ptr(), out.data_ptr(), inp.nbytes, _BYTE, root, stream.handle)

    def gather(self, stream: Stream, out: torch.Tensor | None, inp: torch.Tensor, root: int) -> None:
        coming = {} if out is None else _blocks(out, self.size)
        self._move(stream, coming, {root: inp.view(-1)})

    def scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor | None, root: int) -> None:
        going = {} if inp is None else _blocks(inp, self.size)
        self._move(stream, {root: out.view(-1)}, going)

    def all_to_all(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, counts: Counts | None) -> None:
        source = self._temporary(stream, inp.clone) if inp.data_ptr() == out.data_ptr() else inp
        if _library.all_to_all is not None and counts is None:
            nbytes = inp.nbytes // self.size
            _library.all_to_all(source.data_ptr(), out.data_ptr(), nbytes, _BYTE, self._nccl.comm, stream.handle)
        else:
            coming, going = _blocks(out, self.size, counts and counts.out), _blocks(source, self.size, counts and counts.inp)
            self._move(stream, coming, going)

    def send(self, stream: Stream, out: None, inp: torch.Tensor, to: int) -> None:
        if inp.numel() > 0:
            self._nccl.send(inp.data_ptr(), inp.nbytes, _BYTE, to, stream.handle)

    def recv(self, stream: Stream, out: torch.Tensor, inp: None, source: int) -> None:
        if out.numel() > 0:
            self._nccl.recv(out.data_ptr(), out.nbytes, _BYTE, source, stream.handle)

    def barrier(self, stream: Stream, out: None, inp: None) -> None:
        if self._token is None:
            stream.submit(self._make_token)
        assert self._token is not None, "a CUDA stream runs it at once"
        self._reduce_by(self._nccl.allReduce, stream, self._token, self._token, 1, ReduceOp.SUM)

    def _make_token(self) -> None:
        self._token = torch.zeros(1, device=self.device)

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
        dtype, receive = DTYPES[inp.dtype], 0 if out is None else out.data_ptr()
        if isinstance(op, ReduceOp):
            code = (_OPS_OF_BOOL if inp.dtype is torch.bool else self._ops)[op]
            launch(inp.data_ptr(), receive, count, dtype, code, *root, stream.handle)
        elif self._has_pre_mul_sum:
            with _library.pre_mul_sum(torch.tensor(op.factor, dtype=inp.dtype, device="cpu"), dtype, self._nccl.comm) as code:
                launch(inp.data_ptr(), receive, count, dtype, code, *root, stream.handle)
        else:
            product = self._temporary(stream, lambda: inp * op.factor)
            launch(product.data_ptr(), receive, count, dtype, nccl.NCCL_SUM, *root, stream.handle)

    def _move(self, stream: Stream, coming: Mapping[int, torch.Tensor], going: Mapping[int, torch.Tensor]) -> None:
        """Receive a block from each rank of `coming`, send one to each of `going`, at once. This rank is in both or neither."""
        if self.rank in coming and coming[self.rank].data_ptr() != going[self.rank].data_ptr():
            stream.submit(lambda: coming[self.rank].copy_(going[self.rank]))
        with _grouped():
            for peer in range(self.size):
                if peer != self.rank and peer in going:
                    self.send(stream, None, going[peer], peer)
                if peer != self.rank and peer in coming:
                    self.recv(stream, coming[peer], None, peer)

    def _temporary(self, stream: Stream, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        stream.submit(lambda: self._temporaries.append(make()))
        return self._temporaries[-1]


def _attempt(owner: object, name: str, fn: Callable[..., T], *args: object, call: CollectiveCall | None = None) -> T:
    """`fn(*args)`; an error of NCCL's becomes a RuntimeError that names the call and its owner."""
    try:
        return fn(*args)
    # CuPy names NCCL's codes up to 6; a later one (in progress, timeout) is a KeyError(code).
    except (nccl.NcclError, KeyError) as error:
        about = "" if call is None else _about(call)
        raise RuntimeError(f"{name} on {owner}{about}: NCCL failed: {_describe(error)}") from error


def _describe(error: nccl.NcclError | KeyError) -> str:
    return f"ncclResult_t {error}" if isinstance(error, KeyError) else str(error)


def _blocks(tensor: torch.Tensor, size: int, counts: tuple[int, ...] | None = None) -> dict[int, torch.Tensor]:
    """A block for each rank; without counts, all are of one size."""
    flat = tensor.view(-1)
    return dict(enumerate(flat.split(counts) if counts else flat.tensor_split(size)))


@contextmanager
def _grouped() -> Iterator[None]:
    """NCCL launches the calls of the block together, at its end."""
    nccl.groupStart()
    try:
        yield
    except BaseException:
        # Hazard: a group left open would swallow every later call. An error of its end follows from the error being raised.
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


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"

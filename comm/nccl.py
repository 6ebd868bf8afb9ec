"""CUDA tensors over NCCL, through CuPy's thin binding of it.

A collective is one NCCL call on the stream it was given: nothing is copied, cast or allocated on
the way, and the host does not wait. What only moves data (all-gather, broadcast) goes as bytes, so
every dtype can; what reduces needs a dtype that NCCL can add, which int16 is not. In place follows
from the pointers, as the contract words it.

Precision: NCCL reduces in the tensors' own dtype, in an order of its own choice. AVG multiplies
every rank's values by 1 / N, rounded to the dtype, before it adds them: up to 0.2 % off in bfloat16
unless N is a power of two.

Hazard: a communicator runs its calls one after the other, even those on different streams; what is
to overlap needs a communicator each, called in the same order on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from .communicator import Communicator, ReduceOp
from .streams import CudaStream, Stream

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
    torch.uint8: nccl.NCCL_UINT8,
}
_BYTE = nccl.NCCL_INT8  # NCCL itself turns every all-gather and broadcast into one of these
_OPS = {
    ReduceOp.SUM: nccl.NCCL_SUM,
    ReduceOp.AVG: nccl.NCCL_AVG,
    ReduceOp.MIN: nccl.NCCL_MIN,
    ReduceOp.MAX: nccl.NCCL_MAX,
    ReduceOp.PRODUCT: nccl.NCCL_PROD,
}
# Hazard: over one rank, NCCL before 2.29.7 leaves the end of an AVG unwritten. SUM is the same.
_OPS_OF_ONE_RANK = _OPS | {ReduceOp.AVG: nccl.NCCL_SUM}


class NcclCommunicator(Communicator):
    """One GPU per rank, and the host communicator over the same ranks, which it owns.

    The host communicator carries the unique id, `exchange` and `split`. Creating is collective over
    it, and makes `device` (with its index) the current one of torch and of CuPy: NCCL binds a
    communicator to the device that is current.
    Raises: RuntimeError when NCCL cannot connect the ranks.
    """

    def __init__(self, host: MpiCommunicator, device: torch.device, name: str) -> None:
        super().__init__(host.rank, host.size, device, name)
        self._host = host
        self._ops = _OPS if host.size > 1 else _OPS_OF_ONE_RANK
        torch.cuda.set_device(device)
        Device(device.index).use()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s: NCCL %s from %s", self, _version(nccl.get_version()), _library_paths())
        mine = self._attempt("create", nccl.get_unique_id) if host.rank == 0 else None
        unique_id = host.exchange(mine)[0]
        self._nccl = self._attempt("create", nccl.NcclCommunicator, host.size, unique_id, host.rank)
        # What a barrier reduces. It has to outlive every barrier; its value is never read.
        self._token = torch.zeros(1, device=device)

    def exchange(self, value: T) -> list[T]:
        self._check_open("exchange")
        return self._host.exchange(value)

    def split(self, color: int | None, key: int, name: str) -> NcclCommunicator | None:
        self._check_open("split")
        host = self._host.split(color, key, name)
        return None if host is None else NcclCommunicator(host, self.device, name)

    def _close(self) -> None:
        # Hazard: a collective that still runs would lose its buffers to destroy().
        torch.cuda.synchronize(self.device)
        self._nccl.destroy()
        self._host.close()

    def _all_gather(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor) -> None:
        launch = self._nccl.allGather
        self._enqueue("all_gather", launch, stream, out, inp, _nbytes(inp), _BYTE)

    def _reduce_scatter(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        codes = self._codes("reduce_scatter", inp.dtype, op)
        launch = self._nccl.reduceScatter
        self._enqueue("reduce_scatter", launch, stream, out, inp, out.numel(), *codes)

    def _all_reduce(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp) -> None:
        codes = self._codes("all_reduce", inp.dtype, op)
        launch = self._nccl.allReduce
        self._enqueue("all_reduce", launch, stream, out, inp, inp.numel(), *codes)

    def _broadcast(self, stream: Stream, out: torch.Tensor, inp: torch.Tensor, root: int) -> None:
        launch = self._nccl.broadcast
        self._enqueue("broadcast", launch, stream, out, inp, _nbytes(inp), _BYTE, root)

    def _barrier(self, stream: Stream) -> None:
        codes = self._codes("barrier", self._token.dtype, ReduceOp.SUM)
        launch = self._nccl.allReduce
        self._enqueue("barrier", launch, stream, self._token, self._token, 1, *codes)

    # ------------------------------------------------------------------ calling NCCL

    def _codes(self, call: str, dtype: torch.dtype, op: ReduceOp) -> tuple[int, int]:
        if dtype not in _DTYPES:
            raise ValueError(f"{call} on {self}: NCCL cannot reduce {dtype}; widen it first")
        return _DTYPES[dtype], self._ops[op]

    def _enqueue(
        self,
        call: str,
        launch: Callable[..., None],
        stream: Stream,
        out: torch.Tensor,
        inp: torch.Tensor,
        *args: int,
    ) -> None:
        """`launch(send, recv, *args, stream)`, the order that all of CuPy's collectives share."""
        # Handle 0 is a CUDA stream as well, torch's default one, when it is passed as a CudaStream:
        # that is a caller's choice. A host stream's 0 would put the call there by accident.
        if not isinstance(stream, CudaStream) or stream.device != self.device:
            raise ValueError(
                f"{call} on {self}: expected a stream of {self.device}, found a "
                f"{type(stream).__name__} on {stream.device}; use new_stream({self.device}, ...)"
            )
        pointers = (inp.data_ptr(), out.data_ptr())
        self._attempt(call, launch, *pointers, *args, stream.handle, tensors=(out, inp))

    def _attempt(
        self,
        call: str,
        fn: Callable[..., T],
        *args: object,
        tensors: tuple[torch.Tensor, ...] = (),
    ) -> T:
        try:
            return fn(*args)
        # CuPy names NCCL's codes up to 6; a later one (in progress, timeout) is a KeyError(code).
        except (nccl.NcclError, KeyError) as error:
            about = ""
            if tensors:
                out, inp = (tensor.numel() for tensor in tensors)
                about = f" (out {out}, inp {inp} elements, {tensors[0].dtype})"
            found = f"ncclResult_t {error}" if isinstance(error, KeyError) else str(error)
            raise RuntimeError(f"{call} on {self}{about}: NCCL failed: {found}") from error


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _library_paths() -> str:
    """Every libnccl that this process has loaded; one, unless torch and CuPy disagree."""
    with open("/proc/self/maps") as maps:
        return ", ".join(sorted({line.split()[-1] for line in maps if "libnccl" in line}))

"""The NCCL backend: what it tells NCCL, call by call, and on a GPU, what comes of it.

Without a GPU the real code runs against a double of CuPy's binding that records every call, and the
tensors are CPU tensors that say they are on a GPU. The double's signatures are compared with the
installed CuPy's, where there is one.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import shardrt.comm
from shardrt.comm.communicator import Communicator, ReduceOp, Work
from shardrt.comm.streams import CudaStream, InlineStream, Stream, current_stream, new_stream

DEVICE = torch.device("cuda", 1)
HANDLE = 0x5EED
UNIQUE_ID = bytes(range(128))

# The first line of CuPy's docstrings, which is the signature, without the class's name and `self`.
SIGNATURES = {
    "NcclCommunicator": "int ndev, bytes commId, int rank, NcclConfig config=None",
    "allGather": "intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, intptr_t stream",
    "allReduce": "intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, intptr_t stream",
    "broadcast": "intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int root, intptr_t stream",
    "destroy": "",
    "reduceScatter": "intptr_t sendbuf, intptr_t recvbuf, size_t recvcount, int datatype, int op, intptr_t stream",
}
DTYPES = {
    torch.int8: ("NCCL_INT8", 0),
    torch.uint8: ("NCCL_UINT8", 1),
    torch.int32: ("NCCL_INT32", 2),
    torch.int64: ("NCCL_INT64", 4),
    torch.float16: ("NCCL_FLOAT16", 6),
    torch.float32: ("NCCL_FLOAT32", 7),
    torch.float64: ("NCCL_FLOAT64", 8),
    torch.bfloat16: ("NCCL_BFLOAT16", 9),
}
OPS = {
    ReduceOp.SUM: ("NCCL_SUM", 0),
    ReduceOp.PRODUCT: ("NCCL_PROD", 1),
    ReduceOp.MAX: ("NCCL_MAX", 2),
    ReduceOp.MIN: ("NCCL_MIN", 3),
    ReduceOp.AVG: ("NCCL_AVG", 4),
}
BYTE = 0
CONSTANTS = dict(DTYPES.values()) | dict(OPS.values())
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if op is not ReduceOp.AVG or dtype.is_floating_point]


# ---------------------------------------------------------------------- the double


@dataclass
class Double:
    """CuPy's binding and the machine around it. `events` has everything that happened, in order."""

    events: list[tuple[object, ...]]
    module: ModuleType  # comm/nccl.py, loaded over the double
    failure: Exception | None = None  # what the next NCCL call raises

    def communicator(self, rank: int = 0, size: int = 2, name: str = "world") -> Any:
        host = Host(rank, size, self.events)
        comm = self.module.NcclCommunicator(host, DEVICE, name)
        self.events.clear()
        return comm

    def call(self, name: str, *args: object) -> dict[str, object] | None:
        """What the binding would do: match the arguments to the signature, then run or fail."""
        if self.failure is not None:
            raise self.failure
        parameters = [parameter.split() for parameter in SIGNATURES[name].split(", ") if parameter]
        required = [found for found in parameters if "=" not in found[-1]]
        assert len(required) <= len(args) <= len(parameters), f"{name}{args}"
        for (kind, _), value in zip(required, args, strict=True):
            assert type(value) is (bytes if kind == "bytes" else int), f"{name}: {kind}, {value!r}"
        self.events.append((name, *args))
        return None


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        names = {1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"}
        super().__init__(names[status])
        self.status = status


class Host:
    """The host communicator's part in it: rank 0's unique id reaches every rank."""

    def __init__(self, rank: int, size: int, events: list[tuple[object, ...]]) -> None:
        self.rank, self.size, self.events = rank, size, events

    def exchange(self, value: object) -> list[object]:
        self.events.append(("exchange", value))
        others: list[object] = [UNIQUE_ID] + [None] * (self.size - 1)
        return [value if rank == self.rank else others[rank] for rank in range(self.size)]

    def split(self, color: int | None, key: int, name: str) -> Host | None:
        self.events.append(("host split", color, key, name))
        return None if color is None else Host(0, 1, self.events)

    def close(self) -> None:
        self.events.append(("host close",))


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = DEVICE


class Event:
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class TorchStream:
    """As much of `torch.cuda.Stream` as `CudaStream` asks for."""

    def __init__(self, device: torch.device, handle: int) -> None:
        self.device, self.cuda_stream = device, handle

    def record_event(self) -> Event:
        return Event()


def cuda_stream(device: torch.device = DEVICE, handle: int = HANDLE) -> CudaStream:
    return CudaStream(cast(torch.cuda.Stream, TorchStream(device, handle)))


class NoHandle(InlineStream):
    """A host stream that says it is on the GPU: its handle, 0, would be the default stream."""

    device = DEVICE


def on_gpu(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(numel).to(dtype).as_subclass(OnGpu)


def load_backend() -> ModuleType:
    """comm/nccl.py as a module of its own, so that one over a double never meets the real one."""
    assert shardrt.comm.__file__ is not None
    path = Path(shardrt.comm.__file__).with_name("nccl.py")
    spec = importlib.util.spec_from_file_location("shardrt.comm._nccl_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    events: list[tuple[object, ...]] = []
    result = Double(events, ModuleType("to be loaded"))

    class NcclCommunicator:
        def __init__(self, *args: object) -> None:
            result.call("NcclCommunicator", *args)

        def __getattr__(self, name: str) -> Callable[..., object]:
            if name not in SIGNATURES:
                raise AttributeError(name)
            return lambda *args: result.call(name, *args)

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def use(self) -> None:
            events.append(("cupy device", self.index))

    def get_unique_id() -> bytes:
        events.append(("unique id",))
        return UNIQUE_ID

    nccl = ModuleType("cupy.cuda.nccl")
    vars(nccl).update(CONSTANTS, available=True, NcclError=NcclError)
    vars(nccl).update(NcclCommunicator=NcclCommunicator)
    vars(nccl).update(get_unique_id=get_unique_id, get_version=lambda: 22907)
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(Device=Device, nccl=nccl)
    cupy = ModuleType("cupy")
    vars(cupy).update(cuda=cuda)
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    zeros = torch.zeros

    def zeros_on_gpu(*size: int, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        return zeros(*size).as_subclass(OnGpu)

    monkeypatch.setattr(torch, "zeros", zeros_on_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: events.append(("torch device", d)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: events.append(("synchronize", d)))
    result.module = load_backend()
    return result


# ---------------------------------------------------------------------- the double is CuPy's


def test_double_has_the_signatures_and_constants_of_the_installed_cupy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            pytest.skip(f"CuPy cannot be imported here: {error}")
    if not nccl.available:
        pytest.skip("this CuPy found no NCCL library")
    for name, expected in SIGNATURES.items():
        is_class = name == "NcclCommunicator"
        target = nccl.NcclCommunicator if is_class else getattr(nccl.NcclCommunicator, name)
        first_line = inspect.cleandoc(target.__doc__).splitlines()[0]
        found = re.sub(r"^[\w.]+\((self(, )?)?|\)$", "", first_line)
        assert found == expected, name
    assert {name: getattr(nccl, name) for name in CONSTANTS} == CONSTANTS
    assert issubclass(nccl.NcclError, RuntimeError)
    assert callable(nccl.get_unique_id)
    assert callable(nccl.get_version)
    with pytest.raises((nccl.NcclError, KeyError)):
        nccl.check_status(7)


# ---------------------------------------------------------------------- creating


def test_rank_0_makes_the_unique_id_after_the_device_is_bound(double: Double) -> None:
    double.module.NcclCommunicator(Host(0, 2, double.events), DEVICE, "world")
    assert double.events == [
        ("torch device", DEVICE),
        ("cupy device", 1),
        ("unique id",),
        ("exchange", UNIQUE_ID),
        ("NcclCommunicator", 2, UNIQUE_ID, 0),
    ]


def test_other_ranks_receive_the_unique_id(double: Double) -> None:
    comm = double.module.NcclCommunicator(Host(1, 3, double.events), DEVICE, "world")
    assert double.events[2:] == [("exchange", None), ("NcclCommunicator", 3, UNIQUE_ID, 1)]
    assert (comm.rank, comm.size, comm.device, comm.name) == (1, 3, DEVICE, "world")
    assert isinstance(comm, Communicator)


def test_version_is_logged(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        double.communicator()
    assert "NCCL 2.29.7 from" in caplog.text


def test_without_cupy_the_error_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'shardrt\[cuda12\]' or 'shardrt\[cuda13\]"):
        load_backend()


def test_cupy_without_nccl_is_refused(double: Double) -> None:
    sys.modules["cupy.cuda.nccl"].available = False  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"shardrt\[cuda12\]"):
        load_backend()


# ---------------------------------------------------------------------- collectives


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16])
def test_all_gather_moves_bytes(double: Double, dtype: torch.dtype) -> None:
    comm, out, inp = double.communicator(), on_gpu(10, dtype), on_gpu(5, dtype)
    work = comm.all_gather(out, inp, stream=cuda_stream())
    nbytes = 5 * dtype.itemsize
    assert double.events == [("allGather", inp.data_ptr(), out.data_ptr(), nbytes, BYTE, HANDLE)]
    assert isinstance(work, Work)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16])
def test_broadcast_moves_bytes(double: Double, dtype: torch.dtype) -> None:
    comm, out, inp = double.communicator(), on_gpu(5, dtype), on_gpu(5, dtype)
    comm.broadcast(out, inp, 1, stream=cuda_stream())
    call = ("broadcast", inp.data_ptr(), out.data_ptr(), 5 * dtype.itemsize, BYTE, 1, HANDLE)
    assert double.events == [call]


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions_pass_dtype_and_op(double: Double, dtype: torch.dtype, op: ReduceOp) -> None:
    comm, long, short = double.communicator(), on_gpu(10, dtype), on_gpu(5, dtype)
    codes = DTYPES[dtype][1], OPS[op][1]
    comm.reduce_scatter(short, long, op, stream=cuda_stream())
    comm.all_reduce(short, short, op, stream=cuda_stream())
    assert double.events == [
        ("reduceScatter", long.data_ptr(), short.data_ptr(), 5, *codes, HANDLE),
        ("allReduce", short.data_ptr(), short.data_ptr(), 5, *codes, HANDLE),
    ]


def test_avg_over_one_rank_is_a_sum(double: Double) -> None:
    comm, tensor = double.communicator(size=1), on_gpu(5)
    comm.all_reduce(tensor, tensor, ReduceOp.AVG, stream=cuda_stream())
    comm.reduce_scatter(tensor, tensor, ReduceOp.AVG, stream=cuda_stream())
    comm.all_reduce(tensor, tensor, ReduceOp.MAX, stream=cuda_stream())
    assert [call[5] for call in double.events] == [0, 0, 2]


def test_in_place_views_keep_their_pointers(double: Double) -> None:
    comm, full = double.communicator(rank=1), on_gpu(10)
    comm.all_gather(full, full[5:], stream=cuda_stream())
    comm.reduce_scatter(full[5:], full, ReduceOp.SUM, stream=cuda_stream())
    start, mine = full.data_ptr(), full.data_ptr() + 20
    assert [call[1:3] for call in double.events] == [(mine, start), (start, mine)]


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter"])
def test_int16_reduction_is_refused(double: Double, call: str) -> None:
    comm, tensor = double.communicator(size=1), on_gpu(4, torch.int16)
    with pytest.raises(ValueError, match=f"{call} on Nccl.*'world'.* cannot reduce torch.int16"):
        getattr(comm, call)(tensor, tensor, ReduceOp.SUM, stream=cuda_stream())
    assert double.events == []


def test_barrier_reduces_one_lasting_element(double: Double) -> None:
    comm = double.communicator()
    comm.barrier(stream=cuda_stream())
    comm.barrier(stream=cuda_stream(handle=HANDLE + 1))
    token = double.events[0][1]
    rest = (token, token, 1, DTYPES[torch.float32][1], OPS[ReduceOp.SUM][1])
    assert double.events == [("allReduce", *rest, HANDLE), ("allReduce", *rest, HANDLE + 1)]


def all_calls(comm: Communicator, stream: Stream) -> list[Callable[[], Work]]:
    tensor, total = on_gpu(4), ReduceOp.SUM
    return [
        lambda: comm.all_gather(on_gpu(4 * comm.size), tensor, stream=stream),
        lambda: comm.reduce_scatter(tensor, on_gpu(4 * comm.size), total, stream=stream),
        lambda: comm.all_reduce(tensor, tensor, total, stream=stream),
        lambda: comm.broadcast(tensor, tensor, 0, stream=stream),
        lambda: comm.barrier(stream=stream),
    ]


@pytest.mark.parametrize("stream", [InlineStream(), NoHandle(), cuda_stream(torch.device("cuda", 0))])
def test_a_stream_that_is_not_this_devices_is_refused(double: Double, stream: Stream) -> None:
    for call in all_calls(double.communicator(), stream):
        with pytest.raises(ValueError, match=r"expected a stream of cuda:1, found a \w+ on "):
            call()
    assert double.events == []


def test_the_default_cuda_stream_can_be_asked_for(double: Double) -> None:
    for call in all_calls(double.communicator(), cuda_stream(handle=0)):
        call()
    assert [call[-1] for call in double.events] == [0] * 5


# ---------------------------------------------------------------------- control plane, end, errors


def test_exchange_is_the_hosts(double: Double) -> None:
    assert double.communicator(size=1).exchange("value") == ["value"]
    assert double.events == [("exchange", "value")]


def test_split_splits_the_host_first(double: Double) -> None:
    made = double.communicator().split(3, 7, "dp.gather")
    assert double.events == [
        ("host split", 3, 7, "dp.gather"),
        ("torch device", DEVICE),
        ("cupy device", 1),
        ("unique id",),
        ("exchange", UNIQUE_ID),
        ("NcclCommunicator", 1, UNIQUE_ID, 0),
    ]
    assert (made.rank, made.size, made.device, made.name) == (0, 1, DEVICE, "dp.gather")


def test_split_without_a_color_makes_nothing(double: Double) -> None:
    assert double.communicator().split(None, 0, "none") is None
    assert double.events == [("host split", None, 0, "none")]


def test_close_waits_then_destroys_once_then_closes_the_host(double: Double) -> None:
    comm = double.communicator()
    comm.close()
    comm.close()
    assert double.events == [("synchronize", DEVICE), ("destroy",), ("host close",)]


def test_nothing_runs_after_close(double: Double) -> None:
    comm = double.communicator()
    comm.close()
    double.events.clear()
    calls = all_calls(comm, cuda_stream())
    for call in (*calls, lambda: comm.exchange(0), lambda: comm.split(0, 0, "late")):
        with pytest.raises(RuntimeError, match="the communicator is closed"):
            call()
    assert double.events == []


def test_errors_name_the_call_the_communicator_and_the_tensors(double: Double) -> None:
    comm = double.communicator(rank=1)
    double.failure = NcclError(1)
    with pytest.raises(RuntimeError) as caught:
        comm.all_gather(on_gpu(10), on_gpu(5), stream=cuda_stream())
    assert str(caught.value) == (
        "all_gather on NcclCommunicator('world', rank 1 of 2, cuda:1) (out 10, inp 5 elements, "
        "torch.float32): NCCL failed: NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
    )
    assert caught.value.__cause__ is double.failure


@pytest.mark.parametrize("code", [7, 8])
def test_codes_that_cupy_cannot_name_are_reported_too(double: Double, code: int) -> None:
    comm = double.communicator()
    with pytest.raises(KeyError) as unnamed:
        NcclError(code)
    double.failure = unnamed.value
    with pytest.raises(RuntimeError, match=f"barrier on .*NCCL failed: ncclResult_t {code}"):
        comm.barrier(stream=cuda_stream())


def test_failing_to_connect_names_the_communicator(double: Double) -> None:
    double.failure = NcclError(1)
    host = Host(1, 2, double.events)
    with pytest.raises(RuntimeError, match=r"create on .*'dp.gather', rank 1 of 2.*NCCL failed"):
        double.module.NcclCommunicator(host, DEVICE, "dp.gather")


# ---------------------------------------------------------------------- on a GPU, one rank

NUMEL = 100_003  # odd, and enough for several thread blocks


def gpu_test(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
    return pytest.mark.gpu(skip(test))


@dataclass
class Gpu:
    """One rank's real communicator, and a stream of its own."""

    comm: Communicator
    stream: Stream

    def random(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(NUMEL, device=self.comm.device).to(dtype)
        return torch.randint(0, 100, (NUMEL,), device=self.comm.device).to(dtype)

    def run(self, call: Callable[..., Work], *args: object) -> None:
        """Launch after what the current stream has made ready, and wait for the result."""
        self.stream.wait(current_stream(self.comm.device).record())
        call(*args, stream=self.stream).synchronize()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    pytest.importorskip("cupy")
    from shardrt.comm.nccl import NcclCommunicator

    device = torch.device("cuda", 0)
    comm = NcclCommunicator(cast(Any, Host(0, 1, [])), device, "gpu test")
    yield Gpu(comm, new_stream(device, "gpu test"))
    comm.close()


@gpu_test
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int16])
def test_gpu_all_gather_and_broadcast(gpu: Gpu, dtype: torch.dtype) -> None:
    inp = gpu.random(dtype)
    for call, *root in ((gpu.comm.all_gather,), (gpu.comm.broadcast, 0)):
        out = torch.zeros_like(inp)
        gpu.run(call, out, inp, *root)
        assert torch.equal(out, inp)
        gpu.run(call, out, out, *root)  # in place
        assert torch.equal(out, inp)


@gpu_test
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_gpu_reductions_over_one_rank_copy(gpu: Gpu, dtype: torch.dtype, op: ReduceOp) -> None:
    inp = gpu.random(dtype)
    for call in (gpu.comm.reduce_scatter, gpu.comm.all_reduce):
        out = torch.zeros_like(inp)
        gpu.run(call, out, inp, op)
        assert torch.equal(out, inp)
        gpu.run(call, out, out, op)  # in place
        assert torch.equal(out, inp)


@gpu_test
def test_gpu_empty_tensors(gpu: Gpu) -> None:
    empty = torch.empty(0, device=gpu.comm.device)
    gpu.run(gpu.comm.all_gather, empty, empty)
    gpu.run(gpu.comm.reduce_scatter, empty, empty, ReduceOp.SUM)
    gpu.run(gpu.comm.all_reduce, empty, empty, ReduceOp.SUM)
    gpu.run(gpu.comm.broadcast, empty, empty, 0)


@gpu_test
def test_gpu_default_stream_barrier_split_and_close(gpu: Gpu) -> None:
    inp = gpu.random(torch.float32)
    out = torch.zeros_like(inp)
    stream = current_stream(gpu.comm.device)
    gpu.comm.all_reduce(out, inp, ReduceOp.SUM, stream=stream).synchronize()
    assert torch.equal(out, inp)
    gpu.run(gpu.comm.barrier)
    made = gpu.comm.split(0, 0, "gpu split")
    assert made is not None
    gpu.run(made.all_reduce, out, inp, ReduceOp.MAX)
    assert torch.equal(out, inp)
    made.close()
    made.close()
    gpu.run(gpu.comm.all_reduce, out, inp, ReduceOp.MIN)
    assert torch.equal(out, inp)

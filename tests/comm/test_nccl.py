"""The NCCL backend: each call that it makes to NCCL, and, on a GPU, the results.

Without a GPU the real code runs against a double of CuPy's binding, and of the C functions that the binding lacks. The double
records every call; the tensors are CPU tensors whose device is given as a GPU. The double's signatures are compared with the
installed CuPy's, and those of the C functions with the installed NCCL's header, where there is one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import logging
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import sizeof
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self, cast

import pytest
import torch

import shardrt.comm
from ranks import refused, skip_at_home
from shardrt.comm.backends.mpi import MpiBackend
from shardrt.comm.backends.nccl import libnccl, nccl_config
from shardrt.comm.core import streams
from shardrt.comm.core.calls import Hook, PreMulSum, ReduceOp, Work
from shardrt.comm.core.nccl_policy import CTA_POLICIES, NcclPolicy
from shardrt.comm.core.pool import Pool
from shardrt.comm.core.streams import CudaStream, InlineStream, Stream, current_stream, new_stream
from shardrt.comm.groups.communicator import Communicator
from shardrt.comm.groups.control import register
from shardrt.comm.recorder import recorder
from shardrt.comm.recorder.dumps import DumpFolder

DEVICE = torch.device("cuda", 1)
HANDLE = 0x7F5E_ED00_5EED
COMM = 0x7FC0_1111_0000  # the raw ncclComm_t
OPERATOR = 17  # the result of ncclRedOpCreatePreMulSum
REGISTRATION = 0x7FBE_AD00_BEAD  # the result of ncclCommRegister
WINDOW = 0x7FBE_AD00_3140  # the result of ncclCommWindowRegister
UNIQUE_ID = bytes(range(128))

# The first line of CuPy's docstrings, which is the signature, without the class's name and `self`.
SIGNATURES = {
    "NcclCommunicator": "int ndev, bytes commId, int rank, NcclConfig config=None",
    "allGather": "intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, intptr_t stream",
    "allReduce": "intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, intptr_t stream",
    "commSplit": "int color, int key, NcclConfig config=None",
    "abort": "",
    "check_async_error": "",
    "broadcast": "intptr_t sendbuff, intptr_t recvbuff, size_t count, int datatype, int root, intptr_t stream",
    "destroy": "",
    "groupEnd": "",
    "groupStart": "",
    "recv": "intptr_t recvbuf, size_t count, int datatype, int peer, intptr_t stream",
    "reduce": "intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, int root, intptr_t stream",
    "reduceScatter": "intptr_t sendbuf, intptr_t recvbuf, size_t recvcount, int datatype, int op, intptr_t stream",
    "send": "intptr_t sendbuf, size_t count, int datatype, int peer, intptr_t stream",
}
OF_MODULE = {"NcclCommunicator", "groupEnd", "groupStart"}
DTYPES = {
    torch.int8: ("NCCL_INT8", 0),
    torch.uint8: ("NCCL_UINT8", 1),
    torch.int32: ("NCCL_INT32", 2),
    torch.uint32: ("NCCL_UINT32", 3),
    torch.int64: ("NCCL_INT64", 4),
    torch.uint64: ("NCCL_UINT64", 5),
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
START, END = ("groupStart",), ("groupEnd",)
CONSTANTS = dict(DTYPES.values()) | dict(OPS.values())
MOVED = [*DTYPES, torch.int16, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
FLOATING = [dtype for dtype in DTYPES if dtype.is_floating_point]
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if op is not ReduceOp.AVG or dtype.is_floating_point]


# ---------------------------------------------------------------------- the double


@dataclass
class Double:
    """CuPy's binding, the C library and the machine around them. `events` has everything that happened, in order."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    library: SimpleNamespace = field(default_factory=SimpleNamespace)  # by name, the C functions that NCCL has
    failures: dict[str, Exception] = field(default_factory=dict)  # what a function of CuPy's raises
    codes: dict[str, int] = field(default_factory=dict)  # what a C function answers; else 0
    window: int | None = WINDOW  # what a symmetric window is made as
    last_error: bytes | None = None  # what ncclGetLastError returns
    memory: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)  # what ncclMemAlloc gave

    def communicator(self, rank: int = 0, size: int = 2, name: str = "world") -> Any:
        """One that is connected."""
        comm: Any = Communicator(load_backend().NcclBackend(Host(rank, size, self.events), DEVICE, name))
        comm.backend._connect()
        self.events.clear()
        return comm

    def call(self, name: str, *args: object) -> None:
        """What the binding would do: match the arguments to the signature, then run or fail."""
        if name in self.failures:
            raise self.failures[name]
        parameters = [parameter.split() for parameter in SIGNATURES[name].split(", ") if parameter]
        required = [found for found in parameters if "=" not in found[-1]]
        assert len(required) <= len(args) <= len(parameters), f"{name}{args}"
        for (kind, _), value in zip(required, args[: len(required)], strict=True):
            assert type(value) is (bytes if kind == "bytes" else int), f"{name}: {kind}, {value!r}"
        self.events.append((name, *args))

    def c_call(self, name: str, *args: Any) -> int:
        """What the C function would do, with the arguments as they came through ctypes."""
        seen: list[object] = list(args)
        if name == "ncclRedOpCreatePreMulSum":
            seen[:2] = [ctypes.string_at(args[1], 8 if args[2] == 8 else 4 if args[2] == 7 else 2)]
            args[0][0] = OPERATOR
        elif name == "ncclMemAlloc":
            self.memory.append(ctypes.create_string_buffer(args[1]))
            args[0][0] = ctypes.addressof(self.memory[-1])
            seen = [args[1]]
        elif name == "ncclCommRegister":
            args[3][0] = REGISTRATION
            seen.pop()
        elif name == "ncclCommWindowRegister":
            args[3][0] = self.window
            del seen[3]
        self.events.append((name, *seen))
        return self.codes.get(name, 0)


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        names = {1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error", 5: "NCCL_ERROR_INVALID_USAGE: invalid usage"}
        super().__init__(names[status])
        self.status = status


class Host:
    """The host communicator's part in it: rank 0's unique id reaches every rank."""

    def __init__(self, rank: int, size: int, events: list[tuple[object, ...]]) -> None:
        self.rank, self.size, self.events = rank, size, events
        self.ranks = tuple(range(size))
        self.others: list[object] = [UNIQUE_ID] + [None] * (size - 1)  # what the other ranks give

    def exchange(self, value: object) -> list[object]:
        self.events.append(("exchange", value))
        return [value if rank == self.rank else self.others[rank] for rank in range(self.size)]

    def compare(self, fingerprint: int, describe: Callable[[], object]) -> None:
        self.events.append(("compare", fingerprint))

    def split(self, color: int | None, key: int, name: str) -> Host | None:
        self.events.append(("host split", color, key, name))
        return None if color is None else Host(0, 1, self.events)

    def stop_transfers(self) -> None: ...

    def stop_comparisons(self, *, in_call: bool = False) -> None: ...

    def close(self) -> None:
        self.events.append(("host close",))


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = DEVICE


class Event:
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


CALLERS = -1  # the handle of the caller's stream


class TorchStream:
    """As much of `torch.cuda.Stream` as `CudaStream` asks for."""

    def __init__(self, device: torch.device, handle: int) -> None:
        self.device, self.cuda_stream = device, handle

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None: ...


def cuda_stream(device: torch.device = DEVICE, handle: int = HANDLE) -> CudaStream:
    return CudaStream(cast(torch.cuda.Stream, TorchStream(device, handle)))


def on_gpu(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(numel).to(dtype).as_subclass(OnGpu)


def in_group(comm: Communicator, *calls: Callable[[], Work]) -> None:
    with comm.group():
        for call in calls:
            call()


def load_backend() -> ModuleType:
    """comm/backends/nccl/nccl.py as a module of its own, so that one over a double never mixes with the real one."""
    assert shardrt.comm.__file__ is not None
    path = Path(shardrt.comm.__file__).parent / "backends" / "nccl" / "nccl.py"
    spec = importlib.util.spec_from_file_location("shardrt.comm.backends.nccl._nccl_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    result = Double()
    cuda = ModuleType("cupy.cuda")
    vars(cuda).update(Device=lambda index: SimpleNamespace(use=lambda: result.events.append(("cupy device", index))))
    vars(cuda).update(nccl=binding(result))
    cupy = ModuleType("cupy")
    vars(cupy).update(cuda=cuda)
    for module in (cupy, cuda, cuda.nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, arguments in libnccl._SIGNATURES.items():
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
        setattr(result.library, name, prototype(lambda *args, name=name: result.c_call(name, *args)))
    result.library.ncclGetLastError = partial(lambda comm: result.last_error)  # no callback of ctypes returns text
    monkeypatch.setattr(libnccl, "CDLL", lambda path: result.library if path == __file__ else ctypes.CDLL(path))
    patch_torch(monkeypatch, result.events)
    return result


def binding(double: Double) -> ModuleType:
    """As much of `cupy.cuda.nccl` as there is a signature for. Its communicator's module is this file."""

    class NcclCommunicator:
        comm = COMM

        def __init__(self, *args: object) -> None:
            double.call("NcclCommunicator", *args)

        def __getattr__(self, name: str) -> Callable[..., None]:
            if name not in SIGNATURES.keys() - OF_MODULE:
                raise AttributeError(name)
            return lambda *args: double.call(name, *args)

        def commSplit(self, *args: object) -> NcclCommunicator:
            double.call("commSplit", *args)
            return NcclCommunicator.__new__(NcclCommunicator)

    def get_unique_id() -> bytes:
        double.events.append(("unique id",))
        return UNIQUE_ID

    def check_status(code: int) -> None:
        if code != 0:
            raise NcclError(code)

    nccl = ModuleType("cupy.cuda.nccl")
    vars(nccl).update(CONSTANTS, available=True, NcclError=NcclError, NcclCommunicator=NcclCommunicator)
    vars(nccl).update(get_unique_id=get_unique_id, get_version=lambda: 22907, check_status=check_status)
    vars(nccl).update(groupStart=lambda: double.call("groupStart"), groupEnd=lambda: double.call("groupEnd"))
    return nccl


def patch_torch(monkeypatch: pytest.MonkeyPatch, events: list[tuple[object, ...]]) -> None:
    """What torch does with a GPU is recorded, and done on the CPU."""
    zeros = torch.zeros

    def zeros_on_gpu(*size: int, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        return zeros(*size).as_subclass(OnGpu)

    def set_stream(stream: TorchStream) -> None:
        events.append(("off stream",) if stream.cuda_stream == CALLERS else ("on stream", stream.cuda_stream))

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        yield

    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        found = memory.__cuda_array_interface__
        (nbytes,), (address, read_only) = found["shape"], found["data"]
        assert (found["typestr"], read_only, found["version"]) == ("|u1", False, 3)
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8).as_subclass(OnGpu)

    monkeypatch.setattr(torch, "zeros", zeros_on_gpu)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(streams, "_current", lambda device: cuda_stream(device, CALLERS))
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: events.append(("torch device", d)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: events.append(("synchronize", d)))


# ---------------------------------------------------------------------- the double is CuPy's


@pytest.fixture
def cupy_nccl() -> Any:
    """The installed CuPy's binding of the installed NCCL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            skip_at_home(f"CuPy cannot be imported here: {error}")
    if not nccl.available:
        skip_at_home("this CuPy found no NCCL library")
    return nccl


@pytest.fixture
def header(cupy_nccl: Any) -> str:
    """The text of the installed NCCL's header."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line}
    found = Path(paths.pop()).parent.parent / "include" / "nccl.h"
    if not found.exists():
        skip_at_home(f"no {found}")
    return found.read_text()


def test_double_has_the_signatures_and_constants_of_the_installed_cupy(cupy_nccl: Any) -> None:
    for name, expected in SIGNATURES.items():
        target = getattr(cupy_nccl if name in OF_MODULE else cupy_nccl.NcclCommunicator, name)
        first_line = inspect.cleandoc(target.__doc__).splitlines()[0]
        found = re.sub(r"^[\w.]+\((self(, )?)?|\)$", "", first_line)
        assert found == expected, name
    assert {name: getattr(cupy_nccl, name) for name in CONSTANTS} == CONSTANTS
    assert inspect.isgetsetdescriptor(cupy_nccl.NcclCommunicator.comm)
    assert issubclass(cupy_nccl.NcclError, RuntimeError)
    assert callable(cupy_nccl.get_unique_id)
    assert callable(cupy_nccl.get_version)
    with pytest.raises((cupy_nccl.NcclError, KeyError)):
        cupy_nccl.check_status(7)


def test_c_functions_are_those_of_the_library_that_cupy_has_loaded(cupy_nccl: Any) -> None:
    extension = sys.modules[cupy_nccl.NcclCommunicator.__module__].__file__
    assert extension is not None
    library, version = libnccl.Library(extension, cupy_nccl.check_status), ctypes.c_int()
    assert ctypes.CDLL(extension).ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == cupy_nccl.get_version()
    assert library.has_pre_mul_sum == (version.value >= 21100)
    assert library.has_registration == (version.value >= 21900)
    assert library.has_windows == (version.value >= 22700)
    assert (library.all_to_all is not None) == (version.value >= 22800)
    if library.has_pre_mul_sum:
        with pytest.raises(cupy_nccl.NcclError, match="NCCL_ERROR_INVALID_ARGUMENT"):  # no communicator
            library.pre_mul_sum(torch.tensor(0.5), DTYPES[torch.float32][1], 0).__enter__()
        assert "ncclRedOpCreatePreMulSum" in library.last_error()


def test_c_functions_have_the_signatures_of_the_installed_header(header: str) -> None:
    pointers = dict.fromkeys(("ncclComm_t", "ncclWindow_t", "cudaStream_t"), ctypes.c_void_p)
    kinds = {"size_t": ctypes.c_size_t, **pointers}
    for name, expected in libnccl._SIGNATURES.items():
        declared = re.search(rf"ncclResult_t\s+{name}\((.*?)\);", header, re.DOTALL)
        if declared is None:  # an older NCCL
            continue
        found: list[object] = []
        for parameter in declared[1].split(","):
            kind, stars = parameter.replace("const", "").split()[0].rstrip("*"), parameter.count("*")
            plain = kinds.get(kind, ctypes.c_void_p if kind == "void" and stars else ctypes.c_int)
            found.append(ctypes.POINTER(plain) if stars > (kind == "void") else plain)
        assert found == list(expected), name
    assert re.search(r"const char\*\s+ncclGetLastError\((const )?ncclComm_t comm\);", header)


# ---------------------------------------------------------------------- creating


BOUND = [("torch device", DEVICE), ("cupy device", 1)]


def unconnected(double: Double, rank: int = 0, size: int = 2, policy: NcclPolicy | None = None) -> Any:
    family = None if policy is None else nccl_config.Family(policy)
    comm = Communicator(load_backend().NcclBackend(Host(rank, size, double.events), DEVICE, "world", family))
    assert double.events == BOUND
    double.events.clear()
    return comm


def reduce_four(comm: Communicator) -> None:
    comm.all_reduce(on_gpu(4), on_gpu(4), ReduceOp.SUM, stream=cuda_stream())


def test_the_first_collective_connects_the_ranks(double: Double) -> None:
    comm = unconnected(double)
    reduce_four(comm)
    reduce_four(comm)
    made = [*BOUND, ("unique id",), ("exchange", UNIQUE_ID), ("NcclCommunicator", 2, UNIQUE_ID, 0)]
    assert double.events[:-2] == made
    assert [event[0] for event in double.events[-2:]] == ["allReduce"] * 2


@pytest.mark.parametrize("call", ["empty", "pool"])
def test_buffers_of_nccl_connect_the_ranks(double: Double, plain: list[int], call: str) -> None:
    del double.library.ncclCommRegister
    comm = unconnected(double)
    comm.empty(4, torch.float32) if call == "empty" else comm.pool()
    assert [event[0] for event in double.events[2:5]] == ["unique id", "exchange", "NcclCommunicator"]


def test_where_only_the_host_agrees_nccl_makes_nothing(double: Double) -> None:
    comm = unconnected(double)
    comm.exchange("value")
    assert comm.differing("value") is None
    assert comm.async_error() is None
    comm._abort()
    comm._thread = 0
    comm.close()
    assert {event[0] for event in double.events} == {"exchange", "compare", "host close"}


def test_other_ranks_receive_the_unique_id(double: Double) -> None:
    comm = unconnected(double, 1, 3)
    reduce_four(comm)
    assert double.events[2:-1] == [("exchange", None), ("NcclCommunicator", 3, UNIQUE_ID, 1)]
    assert (comm.rank, comm.size, comm.device, comm.name) == (1, 3, DEVICE, "world")
    assert comm.ranks == (0, 1, 2)


def test_a_rank_0_that_cannot_make_the_unique_id_fails_on_every_rank(double: Double) -> None:
    def fail() -> bytes:
        raise NcclError(1)

    vars(sys.modules["cupy.cuda.nccl"]).update(get_unique_id=fail)
    comm = unconnected(double)
    refused(r"create on .*rank 0 of 2.*unhandled cuda error", lambda: reduce_four(comm), RuntimeError)
    (_, told) = double.events[-1]
    double.events.clear()
    other = unconnected(double, 1)
    other.backend._host.others[0] = told
    refused(r"create on .*rank 0 of 2.*unhandled cuda error", lambda: reduce_four(other), RuntimeError)


def test_over_the_same_ranks_further_ones_are_split_from_the_first(double: Double) -> None:
    first = unconnected(double, size=1)
    second, third = (first.split(0, 0, name) for name in ("dp.gather", "dp.reduce"))
    reduce_four(second)  # the first to make a collective
    double.events.clear()
    reduce_four(first)
    split = [*BOUND, ("synchronize", DEVICE), ("commSplit", 0, 0)]
    assert double.events[:-1] == split
    first.close()
    double.events.clear()
    reduce_four(third)
    assert double.events[:-1] == split
    second.close()
    double.events.clear()
    fourth = third.split(0, 0, "late")
    reduce_four(fourth)  # nothing to split from
    assert ("NcclCommunicator", 1, UNIQUE_ID, 0) in double.events


def test_over_other_ranks_nothing_is_split(double: Double) -> None:
    comm = double.communicator()
    part = comm.split(0, 0, "of one rank")
    double.events.clear()
    reduce_four(part)
    assert ("NcclCommunicator", 1, UNIQUE_ID, 0) in double.events


@pytest.mark.parametrize(("rank", "size", "peer"), [(0, 3, 1), (1, 2, 1)])
def test_sends_and_receives_do_not_connect_ranks_that_may_not_come(double: Double, rank: int, size: int, peer: int) -> None:
    comm = unconnected(double, rank, size)
    send, recv = (partial(call, on_gpu(4), peer, stream=cuda_stream()) for call in (comm.send, comm.recv))
    with pytest.raises(RuntimeError, match=r"send on .*expected a call that all its ranks make first, such as barrier\(\)"):
        in_group(comm, send, recv)
    assert double.events == []
    with comm.group():
        send()
        comm.barrier(stream=cuda_stream())
    assert ("NcclCommunicator", size, UNIQUE_ID, rank) in double.events
    double.events.clear()
    unconnected(double).send(on_gpu(4), 1, stream=cuda_stream())  # two ranks
    assert ("NcclCommunicator", 2, UNIQUE_ID, 0) in double.events


def test_a_capture_connects_nothing(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = unconnected(double)
    monkeypatch.setitem(type(comm.backend)._connect.__globals__, "is_capturing", lambda: True)
    refused("its first call, which connects the ranks, is captured in a CUDA graph", lambda: reduce_four(comm), RuntimeError)
    assert double.events == []


def test_version_is_logged(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        double.communicator()
    assert "NCCL 2.29.7 from" in caplog.text


def test_without_cupy_the_error_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(r"pip install cupy-cuda12x nvidia-nccl-cu12, or cupy-cuda13x", load_backend, ImportError)


def test_cupy_without_nccl_is_refused(double: Double) -> None:
    sys.modules["cupy.cuda.nccl"].available = False  # type: ignore[attr-defined]
    refused("cupy-cuda12x nvidia-nccl-cu12", load_backend, ImportError)


# ---------------------------------------------------------------------- collectives


def test_every_backend_has_every_collective(double: Double) -> None:
    """With the same parameters, but for the stream."""
    public = [name for name in vars(Communicator) if not name.startswith("_")]
    parameters = {name: inspect.signature(getattr(Communicator, name)).parameters for name in public}
    collectives = [name for name in public if "stream" in parameters[name]]
    assert {"all_gather", "reduce_scatter", "send", "barrier"} <= set(collectives)
    for name in collectives:
        on_host, on_device = (
            list(inspect.signature(getattr(backend, name)).parameters) for backend in (MpiBackend, load_backend().NcclBackend)
        )
        assert on_device == ["self", "stream", *on_host[1:]], name


@pytest.mark.parametrize("dtype", MOVED)
def test_moves_are_of_bytes(double: Double, dtype: torch.dtype) -> None:
    comm, long, short, stream = double.communicator(), on_gpu(10, dtype), on_gpu(5, dtype), cuda_stream()
    work = comm.all_gather(long, short, stream=stream)
    comm.broadcast(long[:5], short, 1, stream=stream)
    comm.send(short, 1, stream=stream)
    comm.recv(short, 1, stream=stream)
    out, inp, nbytes = long.data_ptr(), short.data_ptr(), 5 * dtype.itemsize
    assert double.events == [
        ("allGather", inp, out, nbytes, BYTE, HANDLE),
        ("broadcast", inp, out, nbytes, BYTE, 1, HANDLE),
        ("send", inp, nbytes, BYTE, 1, HANDLE),
        ("recv", inp, nbytes, BYTE, 1, HANDLE),
    ]
    assert isinstance(work, Work)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reductions_pass_dtype_and_op(double: Double, dtype: torch.dtype, op: ReduceOp) -> None:
    comm, long, short = double.communicator(), on_gpu(10, dtype), on_gpu(5, dtype)
    codes = DTYPES[dtype][1], OPS[op][1]
    comm.reduce_scatter(short, long, op, stream=cuda_stream())
    comm.all_reduce(short, short, op, stream=cuda_stream())
    comm.reduce(short, long[:5], op, 0, stream=cuda_stream())
    comm.reduce(short, long[:5], op, 1, stream=cuda_stream())
    assert double.events == [
        ("reduceScatter", long.data_ptr(), short.data_ptr(), 5, *codes, HANDLE),
        ("allReduce", short.data_ptr(), short.data_ptr(), 5, *codes, HANDLE),
        ("reduce", long.data_ptr(), short.data_ptr(), 5, *codes, 0, HANDLE),
        ("reduce", long.data_ptr(), 0, 5, *codes, 1, HANDLE),  # nothing is received but on the root
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_bools_are_reduced_as_or_and_and(double: Double, size: int) -> None:
    comm, tensor = double.communicator(size=size), on_gpu(4, torch.bool)
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.MIN):
        comm.all_reduce(tensor, tensor, op, stream=cuda_stream())
    greatest, least = OPS[ReduceOp.MAX][1], OPS[ReduceOp.MIN][1]
    assert [call[4:6] for call in double.events] == [(1, greatest), (1, greatest), (1, least), (1, least)]


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


@pytest.mark.parametrize("call", ["all_reduce", "reduce_scatter", "reduce"])
def test_int16_reduction_is_refused(double: Double, call: str) -> None:
    comm, tensor = double.communicator(size=1), on_gpu(4, torch.int16)
    root = [0] if call == "reduce" else []
    wrong = partial(getattr(comm, call), tensor, tensor, ReduceOp.SUM, *root, stream=cuda_stream())
    with pytest.raises(ValueError, match=rf"{call} on Communicator.*'world'.* cannot reduce torch.int16"):
        in_group(comm, partial(comm.barrier, stream=cuda_stream()), wrong)  # nor is the barrier made
    assert double.events == []


def test_barrier_reduces_one_lasting_element(double: Double) -> None:
    comm = double.communicator()
    comm.barrier(stream=cuda_stream())
    comm.barrier(stream=cuda_stream(handle=HANDLE + 1))
    token = double.events[-1][1]
    rest = (token, token, 1, DTYPES[torch.float32][1], OPS[ReduceOp.SUM][1])
    made = [("on stream", HANDLE), ("off stream",)]
    assert double.events == [*made, ("allReduce", *rest, HANDLE), ("allReduce", *rest, HANDLE + 1)]


def all_calls(comm: Communicator, stream: Stream) -> list[Callable[[], Work]]:
    tensor, long, total = on_gpu(4), on_gpu(4 * comm.size), ReduceOp.SUM
    return [
        lambda: comm.all_gather(long, tensor, stream=stream),
        lambda: comm.reduce_scatter(tensor, long, total, stream=stream),
        lambda: comm.all_reduce(tensor, tensor, total, stream=stream),
        lambda: comm.reduce(tensor, tensor, PreMulSum(0.5), 0, stream=stream),
        lambda: comm.broadcast(tensor, tensor, 0, stream=stream),
        lambda: comm.gather(long, tensor, 0, stream=stream),
        lambda: comm.scatter(tensor, long, 0, stream=stream),
        lambda: comm.all_to_all(long, long, stream=stream),
        lambda: comm.send(tensor, 1, stream=stream),
        lambda: comm.recv(tensor, 1, stream=stream),
        lambda: comm.barrier(stream=stream),
    ]


@pytest.mark.parametrize("stream", [InlineStream(), cuda_stream(torch.device("cuda", 0))])
def test_a_stream_that_is_not_this_devices_is_refused(double: Double, stream: Stream) -> None:
    for call in all_calls(double.communicator(), stream):
        refused(r"expected a stream of cuda:1, found a \w+ on ", call)
    assert double.events == []


def test_the_default_cuda_stream_is_accepted(double: Double) -> None:
    for call in all_calls(double.communicator(), cuda_stream(handle=0)):
        call()
    launches = [event for event in double.events if event[0] in SIGNATURES.keys() - OF_MODULE or event[0] == "ncclAlltoAll"]
    assert [launch[-1] or 0 for launch in launches] == [0] * 11  # ctypes has None for a null pointer
    assert {event[1] for event in double.events if event[0] == "on stream"} == {0}


# ---------------------------------------------------------------------- policy


@pytest.mark.parametrize(
    ("policy", "share", "written"),
    [
        (NcclPolicy(share_resources=True), 1, (-1, -1, -1)),
        (NcclPolicy(cta_policy="zero", max_ctas=8), 0, (-1, 8, 2)),
        (NcclPolicy(min_ctas=2, max_ctas=2), 0, (2, 2, -1)),
    ],
)
def test_the_policy_is_that_of_the_first_communicator(
    double: Double, monkeypatch: pytest.MonkeyPatch, policy: NcclPolicy, share: int, written: tuple[int, int, int]
) -> None:
    """Those that are split from it take over its configuration."""
    inside = nccl_config.Config(size=sizeof(nccl_config.Config), minCTAs=-1, maxCTAs=-1, CTAPolicy=-1)
    vars(sys.modules["cupy.cuda.nccl"]).update(NcclConfig=lambda split_share: ("config", split_share))
    monkeypatch.setattr(nccl_config, "view", lambda made: inside)
    comm = unconnected(double, size=1, policy=policy)
    reduce_four(comm)
    assert ("NcclCommunicator", 1, UNIQUE_ID, 0, ("config", share)) in double.events
    assert (inside.minCTAs, inside.maxCTAs, inside.CTAPolicy) == written
    part = comm.split(0, 0, "dp.gather")
    reduce_four(part)
    assert ("commSplit", 0, 0) in double.events


@pytest.mark.parametrize(
    "wrong", [{"cta_policy": "fast"}, {"min_ctas": 0}, {"max_ctas": True}, {"max_ctas": 1.5}, {"min_ctas": 4, "max_ctas": 3}]
)
def test_wrong_policies_are_refused(wrong: dict[str, Any]) -> None:
    refused(r"NcclPolicy\(.*expected", lambda: NcclPolicy(**wrong))


def test_the_configuration_is_that_of_the_installed_cupy(cupy_nccl: Any) -> None:
    made = cupy_nccl.NcclConfig(split_share=1)
    inside = nccl_config.view(made)
    values = [getattr(inside, name) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs", "netName", "splitShare")]
    assert values == [*[nccl_config.UNDEFINED] * 4, None, 1]
    nccl_config.configure(made, NcclPolicy(max_ctas=8))
    assert (getattr(nccl_config.view(made), "maxCTAs"), made.split_share) == (8, 1)  # noqa: B009  # ctypes declares no types
    policy = NcclPolicy(cta_policy="efficiency")
    if cupy_nccl.get_build_version() >= 22700:
        nccl_config.configure(made, policy)
        assert getattr(nccl_config.view(made), "CTAPolicy") == 1  # noqa: B009
    else:
        refused("no CTAPolicy: expected NcclPolicy", lambda: nccl_config.configure(made, policy), RuntimeError)
    refused("does not hold NCCL's configuration as that of CuPy", lambda: nccl_config.view(object()), RuntimeError)


def test_the_configuration_is_that_of_the_installed_header(header: str) -> None:
    declared = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", re.sub(r"/\*.*?\*/", "", header), re.DOTALL)
    assert declared is not None
    kinds = {"size_t": ctypes.c_size_t, "unsigned int": ctypes.c_uint, "int": ctypes.c_int, "const char *": ctypes.c_char_p}
    fields = [re.fullmatch(r"\s*(.*?[ *])(\w+)\s*", line) for line in declared[1].split(";")[:-1]]
    found = [(match[2], kinds[match[1].strip()]) for match in fields if match]
    assert found[: len(nccl_config.Config._fields_)] == list(nccl_config.Config._fields_)
    for name, code in CTA_POLICIES.items():
        assert re.search(rf"#define NCCL_CTA_POLICY_{name.upper()} 0x0{code}\b", header)


# ---------------------------------------------------------------------- sends and receives, groups


@pytest.mark.parametrize(
    ("call", "moves", "other", "expected"),
    [("gather", "recv", "send", [0, 0, 0, 1, 0, 0]), ("scatter", "send", "recv", [2, 3])],
)
def test_a_root_moves_all_at_once_and_copies_its_own_block(
    double: Double, call: str, moves: str, other: str, expected: list[int]
) -> None:
    """Others send or receive one."""
    long, short = on_gpu(6), on_gpu(2)
    out, inp = (long.mul_(0), short) if call == "gather" else (short.mul_(0), long)
    getattr(double.communicator(rank=1, size=3), call)(out, inp, 1, stream=cuda_stream())
    start = long.data_ptr()
    each = [(moves, start, 8, BYTE, 0, HANDLE), (moves, start + 16, 8, BYTE, 2, HANDLE)]
    assert double.events == [("on stream", HANDLE), ("off stream",), START, *each, END]
    assert out.tolist() == expected
    given = (None, short) if call == "gather" else (short, None)
    getattr(double.communicator(size=3), call)(*given, 2, stream=cuda_stream())
    assert double.events == [START, (other, short.data_ptr(), 8, BYTE, 2, HANDLE), END]


def test_own_block_in_place_is_not_copied(double: Double) -> None:
    comm, full = double.communicator(), on_gpu(4)
    comm.gather(full, full[:2], 0, stream=cuda_stream())
    comm.scatter(full[:2], full, 0, stream=cuda_stream())
    assert [event[0] for event in double.events] == ["groupStart", "recv", "groupEnd", "groupStart", "send", "groupEnd"]


def test_all_to_all_is_ncclAlltoAll(double: Double) -> None:
    comm, out, inp = double.communicator(), on_gpu(6), on_gpu(6)
    comm.all_to_all(out, inp, stream=cuda_stream())
    assert double.events == [("ncclAlltoAll", inp.data_ptr(), out.data_ptr(), 12, BYTE, COMM, HANDLE)]


@pytest.mark.parametrize("counts", [[], [[2, 2], [2, 2]]], ids=["old library", "counts given"])
def test_all_to_all_by_sends_and_receives(double: Double, counts: list[list[int]]) -> None:
    """Also for counts that are all the same here: on another rank they may not be."""
    if not counts:
        del double.library.ncclAlltoAll
    comm, out, inp = double.communicator(), on_gpu(4) * 0, on_gpu(4)
    comm.all_to_all(out, inp, *counts, stream=cuda_stream())
    assert double.events == [
        *[("on stream", HANDLE), ("off stream",), START],
        ("send", inp.data_ptr() + 8, 8, BYTE, 1, HANDLE),
        ("recv", out.data_ptr() + 8, 8, BYTE, 1, HANDLE),
        END,
    ]
    assert out.tolist() == [0, 1, 0, 0]


def test_all_to_all_of_uneven_blocks(double: Double) -> None:
    comm, out, inp = double.communicator(rank=1, size=3), on_gpu(6) * 0, on_gpu(5)
    comm.all_to_all(out, inp, [0, 2, 4], [3, 2, 0], stream=cuda_stream())
    assert double.events[2:] == [
        START,
        ("send", inp.data_ptr(), 12, BYTE, 0, HANDLE),  # nothing to rank 2, and nothing from rank 0
        ("recv", out.data_ptr() + 8, 16, BYTE, 2, HANDLE),
        END,
    ]
    assert out.tolist() == [3, 4, 0, 0, 0, 0]


@pytest.mark.parametrize("native", [True, False])
def test_all_to_all_in_place_keeps_a_copy_until_it_is_enqueued(double: Double, native: bool) -> None:
    if not native:
        del double.library.ncclAlltoAll
    comm, tensor, kept = double.communicator(), on_gpu(4), list[int]()
    vars(sys.modules["cupy.cuda.nccl"]).update(groupEnd=lambda: kept.append(len(comm.backend._temporaries)))
    with comm.group():
        comm.all_to_all(tensor, tensor, stream=cuda_stream())
        comm.all_to_all(tensor, tensor, stream=cuda_stream())
    assert kept[-1] == 2
    assert comm.backend._temporaries == []
    assert double.events[:3] == [START, ("on stream", HANDLE), ("off stream",)]
    sent = next(event for event in double.events if event[0] in ("send", "ncclAlltoAll"))
    assert not tensor.data_ptr() <= cast(int, sent[1]) < tensor.data_ptr() + 16


def test_nothing_is_sent_for_no_elements(double: Double) -> None:
    comm, empty = double.communicator(), on_gpu(0)
    comm.send(empty, 1, stream=cuda_stream())
    comm.recv(empty, 1, stream=cuda_stream())
    comm.gather(empty, empty, 0, stream=cuda_stream())
    comm.scatter(empty, empty, 0, stream=cuda_stream())
    comm.all_to_all(empty, empty.clone(), [0, 0], [0, 0], stream=cuda_stream())
    assert {event[0] for event in double.events} <= {"groupStart", "groupEnd", "on stream", "off stream"}


def test_more_than_two_to_the_31_elements(double: Double) -> None:
    comm, nbytes = double.communicator(size=1), (2**31 + 1) * 4
    huge = torch.empty(1).as_strided((2**31 + 1,), (0,)).as_subclass(OnGpu)
    comm.backend.send(cuda_stream(), None, huge, 0)
    comm.backend.all_gather(cuda_stream(), huge, huge)
    assert double.events[0][2:] == (nbytes, BYTE, 0, HANDLE)
    assert double.events[1][3:] == (nbytes, BYTE, HANDLE)


def test_a_group_is_one_group_of_nccl(double: Double) -> None:
    comm, tensor = double.communicator(), on_gpu(4)
    with comm.group() as work:
        comm.send(tensor, 1, stream=cuda_stream())
        comm.recv(tensor, 1, stream=cuda_stream())
        comm.gather(None, tensor, 1, stream=cuda_stream())
        assert double.events == []
    names = [event[0] for event in double.events]
    assert names == ["groupStart", "send", "recv", "groupStart", "send", "groupEnd", "groupEnd"]
    assert work.is_done()
    with comm.group():
        comm.barrier(stream=cuda_stream())
    assert [event[0] for event in double.events[7:]] == ["on stream", "off stream", "allReduce"]


def test_a_call_that_fails_ends_its_group(double: Double) -> None:
    comm, tensor = double.communicator(), on_gpu(4)
    double.failures["recv"] = NcclError(1)
    with pytest.raises(RuntimeError, match=r"recv on .* \(out 4 elements, torch.float32\): NCCL failed: .*unhandled"):
        in_group(comm, *[partial(call, tensor, 1, stream=cuda_stream()) for call in (comm.send, comm.recv)])
    assert [event[0] for event in double.events] == ["groupStart", "send", "groupEnd"]
    double.failures["groupEnd"] = NcclError(5)  # NCCL repeats the error of a call, which is reported
    with pytest.raises(RuntimeError, match=r"gather on .* \(out 8, inp 4 elements.*unhandled"):
        comm.gather(on_gpu(8), tensor, 0, stream=cuda_stream())


def test_a_failure_at_the_end_of_a_group_names_the_group(double: Double) -> None:
    comm = double.communicator()
    double.failures["groupEnd"] = NcclError(5)
    with pytest.raises(RuntimeError, match=r"group on Communicator.*: NCCL failed: NCCL_ERROR_INVALID_USAGE"):
        in_group(comm, *[partial(comm.barrier, stream=cuda_stream())] * 2)


# ---------------------------------------------------------------------- by ctypes


@pytest.mark.parametrize("dtype", FLOATING)
def test_pre_multiplied_sum_is_nccls(double: Double, dtype: torch.dtype) -> None:
    comm, tensor, code = double.communicator(), on_gpu(4, dtype), DTYPES[dtype][1]
    with comm.group():
        comm.all_reduce(tensor, tensor, PreMulSum(0.75), stream=cuda_stream())
        comm.barrier(stream=cuda_stream())
    scalar = torch.tensor([0.75], dtype=dtype).view(torch.uint8).numpy().tobytes()
    assert double.events[1:4] == [
        ("ncclRedOpCreatePreMulSum", scalar, code, 1, COMM),
        ("allReduce", tensor.data_ptr(), tensor.data_ptr(), 4, code, OPERATOR, HANDLE),
        ("ncclRedOpDestroy", OPERATOR, COMM),
    ]


def test_operator_is_destroyed_when_the_call_fails(double: Double) -> None:
    comm = double.communicator()
    double.failures["reduce"] = NcclError(1)
    with pytest.raises(RuntimeError, match=r"reduce on .*NCCL failed"):
        comm.reduce(None, on_gpu(4), PreMulSum(2.0), 1, stream=cuda_stream())
    assert double.events[-1] == ("ncclRedOpDestroy", OPERATOR, COMM)


@pytest.mark.parametrize("reason", ["no function", "one rank"])
def test_pre_multiplied_sum_where_nccl_has_none(double: Double, reason: str) -> None:
    """NCCL before 2.29.7 leaves the end of one rank's result unwritten, as it does for AVG."""
    if reason == "no function":
        del double.library.ncclRedOpDestroy
    comm, inp, seen = double.communicator(size=1 if reason == "one rank" else 2), on_gpu(4), list[float]()
    launch = comm.backend._nccl.allReduce

    def all_reduce(send: int, *args: int) -> None:
        seen.extend((ctypes.c_float * 4).from_address(send))
        launch(send, *args)

    comm.backend._nccl.allReduce = all_reduce
    comm.all_reduce(inp, inp, PreMulSum(0.5), stream=cuda_stream())
    assert seen == [0, 0.5, 1, 1.5]
    assert inp.tolist() == [0, 1, 2, 3]
    assert double.events[:2] == [("on stream", HANDLE), ("off stream",)]
    (_, send, *rest) = double.events[2]
    assert send != inp.data_ptr()
    assert rest == [inp.data_ptr(), 4, DTYPES[torch.float32][1], OPS[ReduceOp.SUM][1], HANDLE]


def test_empty_is_registered_until_the_communicator_closes(double: Double) -> None:
    comm = double.communicator()
    buffer = comm.empty(6, torch.bfloat16)
    address = ctypes.addressof(double.memory[0])
    agreed = ("exchange", None)
    assert double.events == [("ncclMemAlloc", 12), agreed, ("ncclCommRegister", COMM, address, 12), agreed]
    assert (buffer.data_ptr(), buffer.shape, buffer.dtype) == (address, (6,), torch.bfloat16)
    comm.empty(3, torch.uint8)
    double.events.clear()
    comm.close()
    assert double.events == [
        ("synchronize", DEVICE),
        *[("ncclCommDeregister", COMM, REGISTRATION), ("ncclMemFree", ctypes.addressof(double.memory[1]))],
        *[("ncclCommDeregister", COMM, REGISTRATION), ("ncclMemFree", address)],
        ("destroy",),
        ("host close",),
    ]


def test_a_symmetric_window_is_of_all_ranks(double: Double) -> None:
    comm = double.communicator()
    comm.empty(6, torch.bfloat16, symmetric=True)
    address = ctypes.addressof(double.memory[0])
    made = [("ncclCommWindowRegister", COMM, address, 12, 1)]
    assert double.events == [("ncclMemAlloc", 12), ("exchange", None), *made, ("exchange", None)]
    double.events.clear()
    comm.close()
    assert double.events[1:3] == [("ncclCommWindowDeregister", COMM, WINDOW), ("ncclMemFree", address)]


@pytest.mark.parametrize("why", ["older", "out of reach"])
def test_without_symmetric_windows_the_buffer_is_registered(double: Double, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """NCCL answers with success, and no window, where the GPUs do not reach each other."""
    if why == "older":
        del double.library.ncclCommWindowRegister
    double.window = None
    comm = double.communicator()
    comm.empty(6, torch.bfloat16, symmetric=True)
    address = ctypes.addressof(double.memory[0])
    assert double.events[-2] == ("ncclCommRegister", COMM, address, 12)
    assert "NCCL makes no symmetric windows here" in caplog.text
    double.events.clear()
    comm.close()
    assert double.events[1:3] == [("ncclCommDeregister", COMM, REGISTRATION), ("ncclMemFree", address)]


def test_empty_without_registration_is_torchs(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, torch.dtype]] = []

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        made.append((numel, dtype))
        return on_gpu(numel, dtype)

    monkeypatch.setattr(torch, "empty", empty)
    double.communicator().empty(0, torch.int64)  # NCCL allocates no empty memory
    del double.library.ncclCommDeregister
    double.communicator().empty(3, torch.float32)
    assert made == [(0, torch.int64), (3, torch.float32)]
    assert double.events == []


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that torch was asked for; it frees its cache on request."""
    asked: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda numel, dtype, device: asked.append(numel))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return asked


@pytest.mark.parametrize("failing", ["ncclMemAlloc", "ncclCommRegister", "ncclCommWindowRegister"])
def test_memory_that_nccl_does_not_know_everywhere_is_torchs(
    double: Double, plain: list[int], caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    comm = double.communicator()
    double.codes[failing] = 5
    comm.empty(7, torch.float32, symmetric=failing == "ncclCommWindowRegister")
    assert plain == [7]
    assert re.search(r"allocates its buffers in plain memory: rank 0: empty on .*NCCL_ERROR_INVALID_USAGE", caplog.text)
    if failing == "ncclMemAlloc":
        assert [name for name, *_ in double.events] == ["ncclMemAlloc", "ncclMemAlloc", "exchange"]
    else:
        assert double.events[-1] == ("ncclMemFree", ctypes.addressof(double.memory[0]))
    double.events.clear()
    comm.close()
    assert double.events == [("synchronize", DEVICE), ("destroy",), ("host close",)]


def test_memory_is_freed_if_another_rank_has_none(double: Double, plain: list[int]) -> None:
    comm = double.communicator()
    comm.backend._host.others[1] = "rank 1: out of memory"
    comm.empty(7, torch.float32, symmetric=True)
    assert plain == [7]
    assert double.events == [("ncclMemAlloc", 28), ("exchange", None), ("ncclMemFree", ctypes.addressof(double.memory[0]))]


def test_allocation_is_tried_again_after_torch_has_emptied_its_cache(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    comm, double.codes["ncclMemAlloc"] = double.communicator(), 1
    monkeypatch.setattr(torch.cuda, "empty_cache", double.codes.clear)
    assert comm.empty(7, torch.float32).numel() == 7


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """torch's pools on the CPU: a resize in one asks its allocator, as the caching allocator may, for a larger block."""
    used: list[object] = []

    class Allocator:
        def __init__(self, path: str, *names: str) -> None:
            library = ctypes.CDLL(path)
            self.take, self.give_back = (getattr(library, name) for name in names)
            self.take.restype, self.take.argtypes = ctypes.c_void_p, (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            self.give_back.argtypes = (ctypes.c_void_p, *self.take.argtypes)

        def allocator(self) -> Self:
            return self

    @contextmanager
    def use_mem_pool(pool: Allocator | None, device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        used.append(pool)
        yield
        if pool is not None:
            used.append(pool.take(48, 1, None))

    monkeypatch.setattr(libnccl, "CUDAPluggableAllocator", Allocator)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: allocator)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    return used


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@needs_compiler
def test_a_pool_is_of_memory_that_nccl_knows(double: Double, pools: list[object]) -> None:
    comm, storage = double.communicator(), torch.UntypedStorage(0)
    pool = comm.pool()
    assert comm.pool() is pool
    for _ in range(2):
        pool.allocate(storage, 24)
        pool.free(storage)
    (allocator, first, _, second) = cast(list[Any], pools)
    assert [ctypes.addressof(memory) for memory in double.memory] == [first, second]
    blocks = [[("ncclMemAlloc", 48), ("ncclCommRegister", COMM, address, 48)] for address in (first, second)]
    assert double.events == [("exchange", None), *blocks[0], *blocks[1]]
    allocator.give_back(first, 48, 1, None)
    assert double.events[-1] == ("ncclMemFree", first)
    double.events.clear()
    comm.close()
    assert double.events == [
        ("synchronize", DEVICE),
        *[("ncclCommDeregister", COMM, REGISTRATION)] * 2,
        ("destroy",),
        ("host close",),
    ]


@needs_compiler
def test_torch_runs_out_of_memory_where_nccl_does(double: Double, pools: list[object]) -> None:
    """NULL is what the caching allocator takes for it."""
    comm, double.codes["ncclMemAlloc"] = double.communicator(), 2
    comm.pool().allocate(torch.UntypedStorage(0), 24)
    assert pools[-1] is None
    assert double.events == [("exchange", None), ("ncclMemAlloc", 48)]


def test_a_pool_asks_again_once_torch_has_freed_what_it_keeps(
    double: Double, pools: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a pool torch frees nothing of the others before it gives up."""
    full, storage = [True], torch.UntypedStorage(0)

    @contextmanager
    def use_mem_pool(pool: object, device: torch.device) -> Iterator[None]:
        if full[0]:
            raise torch.OutOfMemoryError
        yield

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: full.__setitem__(0, False))
    Pool(DEVICE).allocate(storage, 24)
    assert storage.nbytes() == 24
    full[0] = True
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        Pool(DEVICE).allocate(storage, 48)


def test_no_pool_without_a_compiler(double: Double, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    comm = double.communicator()
    monkeypatch.setenv("PATH", "")
    assert comm.pool() is None
    assert "allocates its buffers in plain memory: rank 0: memory that NCCL knows takes a C compiler" in caplog.text


def test_no_pool_without_registration(double: Double, caplog: pytest.LogCaptureFixture) -> None:
    del double.library.ncclCommRegister
    comm = double.communicator()
    assert (comm.pool(), comm.pool()) == (None, None)
    assert caplog.text.count("this NCCL registers no memory") == 1


@needs_compiler
def test_no_pool_where_another_rank_has_none(double: Double, pools: list[object]) -> None:
    comm = double.communicator()
    comm.backend._host.others[1] = "rank 1: no compiler"
    assert comm.pool() is None


@needs_compiler
def test_memory_of_a_pool_that_cannot_be_registered_ends_the_job(double: Double, pools: list[object]) -> None:
    """The other ranks have registered theirs."""
    comm, double.codes["ncclCommRegister"] = double.communicator(), 5
    refused(r"pool on .*NCCL_ERROR_INVALID_USAGE", lambda: comm.pool().allocate(torch.UntypedStorage(0), 24), RuntimeError)


@pytest.mark.parametrize("captured", [False, True])
def test_what_goes_into_a_cuda_graph_is_not_waited_for(
    double: Double, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, captured: bool
) -> None:
    """Asking after an event of a capture is an error of CUDA's."""
    monkeypatch.setattr(recorder, "is_capturing", lambda: captured)
    hook = recorder.Recorder(0, 2, DumpFolder(tmp_path, "job", print), 10)
    comm = Communicator(load_backend().NcclBackend(Host(0, 2, double.events), DEVICE, "world"), [hook])
    comm.all_gather(on_gpu(4), on_gpu(2), stream=cuda_stream())
    hook.poll()
    (call,) = json.loads(hook.dump().read_text())["calls"]
    assert (call["ended"] > 0) == (not captured)


@pytest.mark.parametrize(("code", "text"), [(1, "NCCL_ERROR_UNHANDLED_CUDA_ERROR"), (7, "ncclResult_t 7")])
def test_errors_of_c_functions_are_named_as_cupys(double: Double, code: int, text: str) -> None:
    comm = double.communicator()
    double.codes["ncclAlltoAll"] = code
    with pytest.raises(RuntimeError, match=rf"all_to_all on .* \(out 4, inp 4 elements, torch.float32\): NCCL failed: {text}"):
        comm.all_to_all(on_gpu(4), on_gpu(4), stream=cuda_stream())


# ---------------------------------------------------------------------- control plane, end, errors


def test_exchange_is_the_hosts(double: Double) -> None:
    comm = double.communicator(size=1)
    assert comm.exchange("value") == ["value"]
    assert comm.compare(7, lambda: "described") is None
    assert double.events == [("exchange", "value"), ("compare", 7)]


def test_split_splits_the_host_first(double: Double) -> None:
    comm = double.communicator()
    comm.hooks = (Hook(),)
    made = comm.split(3, 7, "dp.gather")
    assert double.events == [("host split", 3, 7, "dp.gather"), *BOUND]
    assert (made.rank, made.size, made.device, made.name) == (0, 1, DEVICE, "dp.gather")
    assert made.hooks == comm.hooks
    assert double.communicator().split(None, 0, "none") is None  # without a color nothing is made
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
    for call in (
        *calls,
        lambda: comm.exchange(0),
        lambda: comm.compare(0, lambda: None),
        lambda: comm.split(0, 0, "late"),
        lambda: comm.empty(1, torch.int8),
    ):
        refused("the communicator is closed", call, RuntimeError)
    assert double.events == []


def test_errors_name_the_call_the_communicator_and_the_tensors(double: Double) -> None:
    comm = double.communicator(rank=1)
    double.failures["allGather"] = NcclError(1)
    with pytest.raises(RuntimeError) as caught:
        comm.all_gather(on_gpu(10), on_gpu(5), stream=cuda_stream())
    assert str(caught.value) == (
        "all_gather on Communicator('world', rank 1 of 2, cuda:1) (out 10, inp 5 elements, "
        "torch.float32): NCCL failed: NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
    )
    assert caught.value.__cause__ is double.failures["allGather"]


@pytest.mark.parametrize("code", [7, 8])
def test_codes_that_cupy_cannot_name_are_reported_too(double: Double, code: int) -> None:
    comm = double.communicator()
    with pytest.raises(KeyError) as unnamed:
        NcclError(code)
    double.failures["allReduce"] = unnamed.value
    refused(f"barrier on .*NCCL failed: ncclResult_t {code}", lambda: comm.barrier(stream=cuda_stream()), RuntimeError)


def test_an_asynchronous_error_is_told_in_words(double: Double) -> None:
    comm, failures = double.communicator(), double.failures
    assert comm.async_error() is None
    assert double.events == [("check_async_error",)]
    failures["check_async_error"] = NcclError(1)
    assert comm.async_error() == "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
    double.last_error = b"\nsocket.cc:12 NCCL WARN Connection closed\n"
    assert comm.async_error() == (
        "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (socket.cc:12 NCCL WARN Connection closed)"
    )
    for code, text in ((7, None), (8, "ncclResult_t 8 (socket.cc:12 NCCL WARN Connection closed)")):
        failures["check_async_error"] = KeyError(code)  # 7: in progress
        assert comm.async_error() == text
    del double.library.ncclGetLastError
    failures["check_async_error"] = NcclError(5)
    assert double.communicator().async_error() == "NCCL_ERROR_INVALID_USAGE: invalid usage"


@pytest.mark.parametrize("ended", ["close", "_abort"])
def test_a_communicator_that_has_ended_is_asked_no_more(double: Double, ended: str) -> None:
    """Its memory is free."""
    comm = double.communicator()
    getattr(comm, ended)()
    double.events.clear()
    comm.backend.abort()
    assert (comm.async_error(), comm.backend.async_error()) == (None, None)
    assert double.events == []


def test_all_that_are_open_are_aborted_but_those_in_a_call(double: Double) -> None:
    """NCCL frees what a call of another thread still uses. One that fails leaves the others to be aborted."""
    with register.apart():
        first, closed, busy, _ = (double.communicator(name=name) for name in ("first", "closed", "busy", "last"))
        closed.close()
        busy._thread = 1
        vars(first.backend).update(abort=lambda: 1 / 0)
        double.events.clear()
        register.abort()
    assert double.events == [("abort",)]


def test_failing_to_connect_names_the_communicator(double: Double) -> None:
    double.failures["NcclCommunicator"] = NcclError(1)
    host = Host(1, 2, double.events)
    with pytest.raises(RuntimeError, match=r"create on .*'dp.gather', rank 1 of 2.*NCCL failed"):
        reduce_four(Communicator(load_backend().NcclBackend(host, DEVICE, "dp.gather")))


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
        if dtype in FLOATING:
            return torch.randn(NUMEL, device=self.comm.device).to(dtype)
        numbers = torch.randint(0, 100, (NUMEL,), device=self.comm.device)
        return numbers.to(torch.uint8).view(dtype) if dtype.itemsize == 1 and dtype != torch.bool else numbers.to(dtype)

    def run(self, call: Callable[..., Work], *args: object) -> None:
        """Launch after what the current stream has made ready, and wait for the result."""
        self.stream.wait(current_stream(self.comm.device).record())
        call(*args, stream=self.stream).synchronize()

    def check(self, call: Callable[..., Work], inp: torch.Tensor, expected: torch.Tensor, *args: object) -> None:
        """Out of place and in place, to the bit."""
        out, in_place = torch.zeros_like(inp), inp.clone()
        self.run(call, out, inp, *args)
        self.run(call, in_place, in_place, *args)
        for found in (out, in_place):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    pytest.importorskip("cupy")
    from shardrt.comm.backends.nccl.nccl import NcclBackend

    device = torch.device("cuda", 0)
    comm = Communicator(NcclBackend(cast(Any, Host(0, 1, [])), device, "gpu test"))
    yield Gpu(comm, new_stream(device, "gpu test"))
    comm.close()


@gpu_test
@pytest.mark.parametrize("dtype", MOVED)
def test_gpu_moves_over_one_rank_copy(gpu: Gpu, dtype: torch.dtype) -> None:
    comm, inp = gpu.comm, gpu.random(dtype)
    for call, *args in ((comm.all_gather,), (comm.broadcast, 0), (comm.gather, 0), (comm.scatter, 0), (comm.all_to_all,)):
        gpu.check(call, inp, inp, *args)
    gpu.check(comm.all_to_all, inp[1:], inp[1:], [NUMEL - 1], [NUMEL - 1])  # unaligned


@gpu_test
@pytest.mark.parametrize(("dtype", "op"), [*REDUCTIONS, *((torch.bool, op) for op in OPS if op is not ReduceOp.AVG)])
def test_gpu_reductions_over_one_rank_copy(gpu: Gpu, dtype: torch.dtype, op: ReduceOp) -> None:
    inp = gpu.random(dtype)
    for call, *root in ((gpu.comm.reduce_scatter,), (gpu.comm.all_reduce,), (gpu.comm.reduce, 0)):
        gpu.check(call, inp, inp, op, *root)


@gpu_test
@pytest.mark.parametrize("dtype", FLOATING)
def test_gpu_pre_multiplied_sum_over_one_rank(gpu: Gpu, dtype: torch.dtype) -> None:
    inp = gpu.random(dtype)
    gpu.check(gpu.comm.all_reduce, inp, inp * 0.5, PreMulSum(0.5))


@gpu_test
def test_gpu_send_to_itself_in_a_group(gpu: Gpu) -> None:
    inp, stream = gpu.random(torch.float32), current_stream(gpu.comm.device)
    out = torch.zeros_like(inp)
    total = inp.clone()
    with gpu.comm.group() as work:
        gpu.comm.send(inp, 0, stream=stream)
        gpu.comm.recv(out, 0, stream=stream)
        gpu.comm.all_to_all(total, total, stream=stream)
    work.synchronize()
    assert torch.equal(out, inp)
    assert torch.equal(total, inp)


@gpu_test
@pytest.mark.parametrize("symmetric", [False, True])
def test_gpu_buffers_of_empty(gpu: Gpu, symmetric: bool) -> None:
    made = gpu.comm.split(0, 0, "gpu buffers")
    assert made is not None
    inp, out = (made.empty(NUMEL, torch.float32, symmetric=symmetric) for _ in range(2))
    assert inp.device == gpu.comm.device
    assert made.empty(0, torch.float32).numel() == 0
    inp.normal_()
    gpu.run(made.all_reduce, out, inp, ReduceOp.SUM)
    assert torch.equal(out, inp)
    del inp, out
    made.close()


@gpu_test
def test_gpu_buffers_of_a_pool(gpu: Gpu) -> None:
    """They come and go, and are the same memory again."""
    made = gpu.comm.split(0, 0, "gpu pool")
    assert made is not None
    pool = made.pool()
    if pool is None:
        pytest.skip("no C compiler, or no NCCL with registered memory")
    storage, inp, addresses = torch.UntypedStorage(0, device=gpu.comm.device), gpu.random(torch.float32), set[int]()
    for _ in range(3):
        pool.allocate(storage, 4 * NUMEL)
        addresses.add(storage.data_ptr())
        out = torch.empty(0, device=gpu.comm.device).set_(storage, 0, (NUMEL,), (1,))
        out.zero_()
        gpu.run(made.all_reduce, out, inp, ReduceOp.SUM)
        assert torch.equal(out, inp)
        storage.resize_(0)
    assert len(addresses) == 1
    made.close()


@gpu_test
def test_gpu_empty_tensors(gpu: Gpu) -> None:
    empty, comm = torch.empty(0, device=gpu.comm.device), gpu.comm
    gpu.run(comm.all_gather, empty, empty)
    gpu.run(comm.all_to_all, empty, empty)
    gpu.run(comm.reduce_scatter, empty, empty, ReduceOp.SUM)
    gpu.run(comm.all_reduce, empty, empty, ReduceOp.SUM)
    gpu.run(comm.reduce, empty, empty, PreMulSum(0.5), 0)
    gpu.run(comm.broadcast, empty, empty, 0)
    gpu.run(comm.gather, empty, empty, 0)
    gpu.run(comm.scatter, empty, empty, 0)


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


@gpu_test
def test_gpu_events_and_waits_order_streams(gpu: Gpu) -> None:
    device = gpu.comm.device
    slow, other = gpu.stream, new_stream(device, "other")
    inp, out, seen = (torch.zeros(NUMEL, device=device) for _ in range(3))
    for stream in (slow, other):
        stream.wait(current_stream(device).record())
    slow.submit(lambda: torch.cuda._sleep(200_000_000))  # cycles, a tenth of a second
    slow.submit(lambda: inp.fill_(3))
    event = slow.record()
    assert not event.query()
    work = gpu.comm.all_reduce(out, inp, ReduceOp.SUM, stream=slow)
    work.wait(other)
    other.submit(lambda: seen.copy_(out))
    other.synchronize()
    assert event.query()
    assert work.is_done()
    assert torch.equal(seen, torch.full_like(seen, 3))

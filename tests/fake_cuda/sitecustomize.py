"""Imported by every Python that run.py starts: CUDA tensors are computed on the host, in memory that cudart.cpp allocates.

Each aten kernel for CUDA is replaced by the host's kernel, on tensors that share the memory. The replacement reports its reads
and writes to cudart.cpp, on torch's current stream. Copies between devices are torch's own. CuPy's binding of NCCL is the real
one, and so is its way to launch a kernel (capsules.py); its kernels are those of kernels.cu, run on the host. pinned.py reports
what the host reads and writes of pinned memory. Differences from a GPU: nothing runs late, so nothing overlaps; random numbers
differ; there is no torch.compile.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import capsules  # Hazard: has to come before CuPy
import cupy
import cupy.cuda.nccl
import numpy as np
import pinned
import torch
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parent.parent.parent
_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.fake_access.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)
_runtime.cudaStreamSynchronize.argtypes = (ctypes.c_void_p,)
# Operations on memory rather than values keep torch's own kernels.
KEPT = {"set_", "resize_", "record_stream", "is_pinned", "_pin_memory", "empty", "empty_strided"}
WIDTHS = {"u64": 8, "double": 8, "float": 4, "u32": 4, "u8": 1, "i8": 1, "e4m3": 1}  # bytes of kernels.cu's types; 2 of others
WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}  # operations that wait for the device
COPIES = {"copy_", "_foreach_copy_"}
# A backend for which nothing is registered: there, copy_ is torch's own, whatever the devices of its arguments.
_UNREPLACED = torch._C.DispatchKeySet(torch._C.DispatchKey.XPU)


def races() -> str:
    """The races since the last call, one per line."""
    text = ctypes.create_string_buffer(1 << 16)
    _runtime.fake_races(text, len(text))
    return text.value.decode()


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in memory that streams access: a GPU's, and the host's if it is pinned."""
    for each in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(each, torch.Tensor) and (_is_cuda(each) or each.is_pinned()):
            yield each


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor that shares the memory."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    shared = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return alias.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


def _tell(tensor: torch.Tensor, name: str, *, writes: bool) -> None:
    if tensor.numel() > 0:
        stream = torch.cuda.current_stream().cuda_stream
        _runtime.fake_access(stream, tensor.data_ptr(), pinned.extent(tensor), writes, name.encode())


def _device_of(name: str, given: dict[str, Any]) -> torch.device | None:
    """The one device of the CUDA tensors, or the one that is asked for; None: the current one."""
    found = {tensor.device for value in given.values() for tensor in _tensors(value) if _is_cuda(tensor)}
    if len(found) > 1:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {sorted(map(str, found))}")
    asked = given.get("device")
    return found.pop() if found else asked if asked is not None and asked.index is not None else None


def _hosts(value: object) -> object:
    if _is_cuda(value):
        return _on_host(value)  # type: ignore[arg-type]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) and value.device.type == "cuda" else value


def _hosts_generator(given: torch.Generator | None, tensor: object) -> torch.Generator:
    """A host generator, seeded by the state of the CUDA generator, which advances as under CUDA's kernels."""
    index = tensor.device.index if isinstance(tensor, torch.Tensor) else torch.cuda.current_device()
    of_device = torch.cuda.default_generators[index] if given is None else given
    if of_device.device.type == "cpu":
        return of_device
    offset = of_device.get_offset()
    of_device.set_offset(offset + 4)
    return torch.Generator().manual_seed((of_device.initial_seed() + 1_000_003 * offset) % 2**63)


def _crosses(into: Any, source: Any) -> bool:
    """Whether a copy, or one of several, is between devices."""
    if isinstance(into, torch.Tensor):
        return into.device != source.device
    return any(map(_crosses, into, source))


class HostKernel:
    """The host's kernel of an operation, for CUDA tensors."""

    def __init__(self, op: Any) -> None:
        self._op, self._name, self._arguments = op, str(op), op._schema.arguments
        self._writes = {arg.name: arg.alias_info is not None and arg.alias_info.is_write for arg in self._arguments}
        self._base = op._schema.name.removeprefix("aten::")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(self._boxed, args, self._arguments))
        given = dict(zip((arg.name for arg in self._arguments), args, strict=False)) | kwargs
        if self._base in COPIES and _crosses(given["self"], given["src"]):
            return self._copy(given["self"], given["src"], given.get("non_blocking", False))
        device = _device_of(self._name, given)
        with torch.cuda.device(device) if device is not None else contextlib.nullcontext():  # as the kernels of torch do
            return self._run(args, kwargs, given)

    def _copy(self, self_: Any, src: Any, non_blocking: bool = False) -> Any:
        if isinstance(self_, torch.Tensor):
            return self._op.redispatch(_UNREPLACED, self_, src, non_blocking)
        for into, from_ in zip(self_, src, strict=True):
            into.copy_(from_, non_blocking)
        return None

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]) -> Any:
        for value in given.values():
            for tensor in _tensors(value):
                _tell(tensor, self._name, writes=False)
        hosts = {name: tree_map(_hosts, value) for name, value in given.items()}
        keywords = {name: hosts[name] for name in kwargs}
        if "generator" in self._writes:
            keywords["generator"] = _hosts_generator(given.get("generator"), args[0])
        out = self._op(*[hosts[arg.name] for arg in self._arguments[: len(args)]], **keywords)
        for name in filter(self._writes.get, given):
            for tensor, alias in zip(_tensors(given[name]), _hosts_of(given[name], hosts[name]), strict=True):
                if _is_cuda(tensor) and tensor.shape != alias.shape:  # an `out` that was resized
                    _on_host(tensor.resize_(alias.shape)).copy_(alias)
                _tell(tensor, self._name, writes=True)
        if self._base in WAITING:
            _runtime.cudaStreamSynchronize(torch.cuda.current_stream().cuda_stream)
        written = [given[name] for name in self._writes if self._writes[name] and name in given]
        returns = self._op._schema.returns
        if len(returns) <= 1:
            return self._back(out, returns[0], written, given) if returns else None
        return tuple(self._back(one, info, written, given) for one, info in zip(out, returns, strict=True))

    @staticmethod
    def _boxed(value: Any, argument: Any) -> Any:
        """The value; a number in the place of a tensor becomes a tensor."""
        if isinstance(value, (bool, int, float)) and str(argument.type) == "Tensor":
            return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
        return value

    def _back(self, out: Any, info: Any, written: list[Any], given: dict[str, Any]) -> Any:
        if info.alias_info is not None:  # the argument that was written to
            return written.pop(0)
        if isinstance(out, (list, tuple)):
            return [self._back(each, info, written, given) for each in out]
        if not isinstance(out, torch.Tensor):
            return out
        devices = (tensor.device for value in given.values() for tensor in _tensors(value) if _is_cuda(tensor))
        device = next(devices, torch.device("cuda"))
        made = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=device)
        _on_host(made).copy_(out)
        _tell(made, self._name, writes=True)
        return made


def _hosts_of(value: Any, host: Any) -> Iterator[torch.Tensor]:
    pairs = zip(value, host, strict=True) if isinstance(value, (list, tuple)) else [(value, host)]
    return (alias for tensor, alias in pairs if any(True for _ in _tensors(tensor)))


def _replace_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")]
    for name in [*names, "copy_"]:  # copy_ has no registration for CUDA
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is None or base in KEPT:
            continue
        op = getattr(packet, overload or "default")
        if not any(each.alias_info and not each.alias_info.is_write for each in op._schema.returns):  # not a view
            library.impl(name, HostKernel(op), "CUDA")
    return library


# ---------------------------------------------------------------------- CuPy


class RawModule:
    """Replaces CuPy's module by the kernels of kernels.cu on the host."""

    _kernels: Any = None

    def __init__(self, code: str, *, backend: str, options: tuple[str, ...], name_expressions: tuple[str, ...]) -> None:
        self._names = name_expressions

    def get_function(self, name: str) -> Callable[..., None]:
        """The kernel, which reports its accesses when it runs."""
        assert name in self._names, "as CuPy would"
        if RawModule._kernels is None:
            sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
            from cuda_on_host import EVERY_KERNEL, Kernels

            source = (ROOT / "kernels" / "kernels.cu").read_text()
            RawModule._kernels = Kernels(source, EVERY_KERNEL, Path(tempfile.mkdtemp(prefix="kernels-")))

        def run(stream: int, blocks: int, threads: int, args: Sequence[Any]) -> None:
            for address, nbytes, writes in _touched(name, blocks, args):
                _runtime.fake_access(stream, address, nbytes, writes, name.encode())
            RawModule._kernels.launch(name, blocks, threads, args)

        return capsules.launcher(name, run)


def _touched(name: str, blocks: int, args: Sequence[Any]) -> Iterator[tuple[int, int, bool]]:
    """The accesses of a launch: address, bytes, and whether it writes them."""
    from cuda_on_host import LISTS

    base, _, types = name.rstrip(">").partition("<")
    widths = [WIDTHS.get(each, 2) for each in types.split(", ")[:2]]
    if base in ("encode", "decode_sum"):
        rows, n = (1, args[3]) if base == "encode" else args[3:]
        floats, code, scales = (args[2], args[0], args[1]) if base == "encode" else args[:3]
        yield floats, n * max(widths), base != "encode"
        yield code, rows * n, base == "encode"
        yield scales, 4 * rows * -(-n // 256), base == "encode"
        return
    fields = np.frombuffer(args[0], LISTS)[0]
    addresses, numels = fields["addresses"].tolist(), fields["elements"].tolist()
    for i, numel in enumerate(numels):  # 0 where there is no tensor
        if base in ("copy", "pack"):
            yield addresses[len(numels) + i], numel * (widths[1] if base == "pack" else widths[0]), False
        yield addresses[i], numel * widths[0], base != "squares"
    if base == "rescale":
        yield args[1], 8, False
    if base == "squares":
        yield from ((args[1], 16 * blocks, True), (args[2], 4, True), (args[3], 16, True))


warnings.filterwarnings("ignore", "Warning only once for all operators")
_library = _replace_kernels()
for enable in (
    torch.backends.cuda.enable_flash_sdp,
    torch.backends.cuda.enable_mem_efficient_sdp,
    torch.backends.cuda.enable_cudnn_sdp,
):
    enable(False)  # the host has no such kernels
pinned.watch()
cupy.RawModule = RawModule

"""What CuPy's binding of NCCL lacks, called in the very library that CuPy has loaded.

Functions are looked up through CuPy's own extension module: the linker then finds them in the libnccl which that module is
bound to, and loads no second one. NCCL has had the pre-multiplied sum since 2.11, registered memory since 2.19 and the
all-to-all since 2.28; what the loaded one has not is False, or None, in `Library`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, POINTER, byref, c_int, c_size_t, c_void_p

import torch

_SIGNATURES = {
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, c_void_p),  # op, scalar, dtype, residence, comm
    "ncclRedOpDestroy": (c_int, c_void_p),  # op, comm
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),  # address, bytes
    "ncclMemFree": (c_void_p,),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),  # comm, address, bytes, handle
    "ncclCommDeregister": (c_void_p, c_void_p),  # comm, handle
    "ncclAlltoAll": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),  # send, receive, count, dtype, comm, stream
}
_SCALAR_ON_HOST = 1  # read before ncclRedOpCreatePreMulSum returns


class Library:
    """NCCL as `extension`, the file of CuPy's binding, sees it. `check` raises for a result code that is not 0.

    `comm` is a raw ncclComm_t throughout, `dtype` an ncclDataType_t.
    """

    def __init__(self, extension: str, check: Callable[[int], object]) -> None:
        loaded = CDLL(extension)
        self._functions: dict[str, Callable[..., object]] = {}
        for name, arguments in _SIGNATURES.items():
            if hasattr(loaded, name):
                function = getattr(loaded, name)
                function.restype, function.argtypes = c_int, arguments
                function.errcheck = lambda code, *_: check(code)
                self._functions[name] = function
        self.has_pre_mul_sum = self._has("ncclRedOpCreatePreMulSum", "ncclRedOpDestroy")
        self.has_registration = self._has("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister")
        self.all_to_all = self._functions.get("ncclAlltoAll")  # of even blocks, not in place

    def _has(self, *names: str) -> bool:
        return all(name in self._functions for name in names)

    @contextmanager
    def pre_mul_sum(self, scalar: torch.Tensor, dtype: int, comm: int) -> Iterator[int]:
        """An operator for calls enqueued within the block. scalar: 0-dim, on the host, of the calls' dtype."""
        op = c_int()
        self._functions["ncclRedOpCreatePreMulSum"](byref(op), scalar.data_ptr(), dtype, _SCALAR_ON_HOST, comm)
        try:
            yield op.value
        finally:
            self._functions["ncclRedOpDestroy"](op, comm)

    def allocate(self, comm: int, nbytes: int) -> Buffer:
        """At least one byte on the current device, registered with `comm`."""
        address, handle = c_void_p(), c_void_p()
        self._functions["ncclMemAlloc"](byref(address), nbytes)
        assert address.value is not None, "NCCL reported success"
        try:
            self._functions["ncclCommRegister"](comm, address, nbytes, byref(handle))
        except Exception:
            self._functions["ncclMemFree"](address)
            raise
        return Buffer(address.value, nbytes, handle.value)

    def free(self, comm: int, buffer: Buffer) -> None:
        """End the registration and give the memory back."""
        self._functions["ncclCommDeregister"](comm, buffer.handle)
        self._functions["ncclMemFree"](buffer.address)


class Buffer:
    """Device memory that `torch.as_tensor` wraps, as bytes. handle: of its registration; None where NCCL has no use for one."""

    def __init__(self, address: int, nbytes: int, handle: int | None) -> None:
        self.address = address
        self.handle = handle
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

"""NCCL functions that CuPy's binding lacks, called in the library that CuPy has loaded.

Functions are looked up through CuPy's own extension module: the linker then finds them in the libnccl which that module is
linked to, and loads no second one. NCCL has had the pre-multiplied sum since 2.11, registered memory since 2.19, symmetric
windows since 2.27 and the all-to-all since 2.28; what the loaded library lacks is False, or None, in `Library`.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, POINTER, byref, c_char_p, c_int, c_size_t, c_void_p, cast
from pathlib import Path

import torch
from torch.cuda.memory import CUDAPluggableAllocator

_SIGNATURES = {
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, c_void_p),  # op, scalar, dtype, residence, comm
    "ncclRedOpDestroy": (c_int, c_void_p),  # op, comm
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),  # address, bytes
    "ncclMemFree": (c_void_p,),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),  # comm, address, bytes, handle
    "ncclCommDeregister": (c_void_p, c_void_p),  # comm, handle
    # comm, address, bytes, window, flags
    "ncclCommWindowRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p), c_int),
    "ncclCommWindowDeregister": (c_void_p, c_void_p),  # comm, window
    "ncclAlltoAll": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),  # send, receive, count, dtype, comm, stream
}
_SCALAR_ON_HOST = 1  # read before ncclRedOpCreatePreMulSum returns
_WINDOW_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC


class Library:
    """The NCCL that `extension`, the file of CuPy's binding, is linked to. `check` raises for a result code that is not 0.

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
        self._last_error: Callable[..., bytes | None] | None = None
        if hasattr(loaded, "ncclGetLastError"):
            loaded.ncclGetLastError.restype, loaded.ncclGetLastError.argtypes = c_char_p, (c_void_p,)
            self._last_error = loaded.ncclGetLastError
        self.has_pre_mul_sum = self._has("ncclRedOpCreatePreMulSum", "ncclRedOpDestroy")
        self.has_registration = self._has("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister")
        self.has_windows = self._has("ncclCommWindowRegister", "ncclCommWindowDeregister")
        self.all_to_all = self._functions.get("ncclAlltoAll")  # takes blocks of equal size, not in place

    def _has(self, *names: str) -> bool:
        return all(name in self._functions for name in names)

    def last_error(self) -> str:
        """NCCL's newest message in this process, in one line; empty if there is none. Any thread may ask."""
        text = None if self._last_error is None else self._last_error(None)
        return " ".join((text or b"").decode(errors="replace").split())

    @contextmanager
    def pre_mul_sum(self, scalar: torch.Tensor, dtype: int, comm: int) -> Iterator[int]:
        """An operator for calls enqueued within the block. scalar: 0-dim, on the host, of the calls' dtype."""
        op = c_int()
        self._functions["ncclRedOpCreatePreMulSum"](byref(op), scalar.data_ptr(), dtype, _SCALAR_ON_HOST, comm)
        try:
            yield op.value
        finally:
            self._functions["ncclRedOpDestroy"](op, comm)

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate `nbytes`, at least one, on the current device."""
        address = c_void_p()
        self._functions["ncclMemAlloc"](byref(address), nbytes)
        assert address.value is not None, "NCCL reported success"
        return Buffer(address.value, nbytes)

    def make_window(self, comm: int, address: int, nbytes: int) -> int | None:
        """Register memory as a symmetric window. Collective over `comm`, with the same size on every rank.

        Returns: the window, or None, on every rank, if the ranks cannot access each other's memory.
        """
        window = c_void_p()
        self._functions["ncclCommWindowRegister"](comm, address, nbytes, byref(window), _WINDOW_SYMMETRIC)
        return window.value

    def register(self, comm: int, address: int, nbytes: int) -> int | None:
        """Register memory; returns the handle, or None if NCCL needs no registration."""
        handle = c_void_p()
        self._functions["ncclCommRegister"](comm, address, nbytes, byref(handle))
        return handle.value

    def deregister(self, comm: int, handle: int) -> None:
        """End a registration."""
        self._functions["ncclCommDeregister"](comm, handle)

    def free(self, comm: int, buffer: Buffer) -> None:
        """End the buffer's registrations and free its memory."""
        if buffer.window is not None:
            self._functions["ncclCommWindowDeregister"](comm, buffer.window)
        if buffer.handle is not None:
            self.deregister(comm, buffer.handle)
        self._functions["ncclMemFree"](buffer.address)

    def allocator(self) -> Allocator:
        """An allocator of NCCL's memory for a pool of torch's. Raises RuntimeError without registration or a C compiler."""
        if not self.has_registration:
            raise RuntimeError("this NCCL registers no memory; 2.19 and newer do")
        return Allocator(*(cast(self._functions[name], c_void_p) for name in ("ncclMemAlloc", "ncclMemFree")))  # type: ignore[arg-type]


class Buffer:
    """Device memory that `torch.as_tensor` wraps, as bytes.

    window, handle: its symmetric window, or its registration, if there is one: `Library.free` ends it.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.window: int | None = None
        self.handle: int | None = None
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class Allocator:
    """An allocator for torch that lists its allocations.

    It is compiled: torch allocates in threads that must not wait for Python, and holds a lock meanwhile.
    """

    _SOURCE = """
        #include <stddef.h>
        enum { MOST = 4096 };
        static int (*mem_alloc)(void **, size_t);
        static int (*mem_free)(void *);
        static struct { void *address; size_t nbytes; } taken[MOST];
        static int count;
        void use(void *alloc, void *free) { mem_alloc = alloc; mem_free = free; }
        int taken_count(void) { return count; }
        void *taken_address(int i) { return taken[i].address; }
        size_t taken_nbytes(int i) { return taken[i].nbytes; }
        void *take(size_t nbytes, int device, void *stream) {
            void *address = NULL;
            if (mem_alloc(&address, nbytes) != 0) return NULL;
            if (count < MOST) { taken[count].address = address; taken[count].nbytes = nbytes; count++; }
            return address;
        }
        void give_back(void *address, size_t nbytes, int device, void *stream) { mem_free(address); }
    """

    def __init__(self, mem_alloc: c_void_p, mem_free: c_void_p) -> None:
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise RuntimeError("memory that NCCL knows takes a C compiler (cc, gcc or clang), and none is on the PATH")
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "allocator.c", Path(folder) / "allocator.so"
            source.write_text(self._SOURCE)
            done = subprocess.run(
                [compiler, "-O2", "-shared", "-fPIC", "-o", library, source], capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"{compiler} could not compile the allocator of memory that NCCL knows: {done.stderr}")
            self._library = CDLL(str(library))
            self._library.use(mem_alloc, mem_free)
            self.torchs = CUDAPluggableAllocator(str(library), "take", "give_back")
        self._library.taken_address.restype = c_void_p
        self._library.taken_nbytes.restype = c_size_t
        self._listed = 0

    def fresh(self) -> list[tuple[int, int]]:
        """Address and bytes of the allocations since the last call; it lists at most 4096 in all."""
        first, self._listed = self._listed, self._library.taken_count()
        return [(self._library.taken_address(i), self._library.taken_nbytes(i)) for i in range(first, self._listed)]

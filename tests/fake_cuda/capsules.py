"""CuPy without a driver: its own code runs, from a stream's `with` block to the call of cuLaunchKernel.

CuPy contains a CUDA runtime of its own, which only NVIDIA's driver can start. CuPy's modules find each other's C functions in
capsules, though. Those of its runtime that choose the device are exchanged here, before any other module of CuPy is imported.
The driver's functions are looked up in libcuda.so.1, which is cudart.cpp. What is left out: cupy.RawModule, which compiles.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cupy_backends.cuda.api import runtime

_runtime = ctypes.CDLL("libcudart.so.13")
_python = ctypes.pythonapi
_python.PyCapsule_GetName.argtypes, _python.PyCapsule_GetName.restype = (ctypes.py_object,), ctypes.c_void_p
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_python.PyCapsule_New.restype = ctypes.py_object
_kept: list[object] = []  # what C has the addresses of


def _exchange(name: str, returns: Any, *takes: Any, by: Callable[..., object]) -> None:
    """Make this the function that other modules of CuPy find in its runtime."""
    before = runtime.__pyx_capi__[name]
    function = ctypes.PYFUNCTYPE(returns, *takes)(by)
    address = ctypes.cast(function, ctypes.c_void_p)
    runtime.__pyx_capi__[name] = _python.PyCapsule_New(address, _python.PyCapsule_GetName(before), None)  # checked by name
    _kept.extend((before, function))


def _asking(function: Callable[..., int]) -> Callable[[int], int]:
    def ask(_: int) -> int:
        found = ctypes.c_int()
        function(ctypes.byref(found))
        return found.value

    return ask


def _set_device(index: int, _: int) -> None:
    if error := _runtime.cudaSetDevice(index):
        raise runtime.CUDARuntimeError(error)


_exchange("getDevice", ctypes.c_int, ctypes.c_int, by=_asking(_runtime.cudaGetDevice))
_exchange("getDeviceCount", ctypes.c_int, ctypes.c_int, by=_asking(_runtime.cudaGetDeviceCount))
_exchange("setDevice", ctypes.py_object, ctypes.c_int, ctypes.c_int, by=_set_device)
_exchange("_ensure_context", ctypes.py_object, by=lambda: None)


_calls = threading.local()  # of the launch that this thread is in: the bytes of its arguments, and what has arrived


def launcher(name: str, run: Callable[[int, int, int, Sequence[Any]], None]) -> Callable[..., None]:
    """A kernel, as CuPy's modules have it. run: called in its place, with the stream, blocks, threads and arguments.

    It raises what CuPy raises if the stream belongs to another device than the current one.
    """
    from cupy.cuda.function import Module

    module = Module()
    module.load(name.encode())
    function = module.get_function(name)

    def launch(grid: tuple[int], block: tuple[int], args: Sequence[Any]) -> None:
        _calls.expected = list(map(_bytes_of, args))
        function(grid, block, args)
        arrived, stream, found = _calls.arrived
        assert arrived == (name, grid[0], block[0]), f"CuPy has launched {arrived}"
        assert found == _calls.expected, f"CuPy has passed other arguments to {name}"
        run(stream, grid[0], block[0], args)

    return launch


def _bytes_of(argument: Any) -> bytes:
    """What a kernel gets: a pointer or i64, a double, or a struct."""
    if isinstance(argument, (int, float)):
        return struct.pack("d" if isinstance(argument, float) else "q", argument)
    return bytes(argument.tobytes())


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def _arrive(name: bytes, blocks: int, threads: int, stream: int | None, arguments: Any) -> None:
    found = [ctypes.string_at(arguments[i], len(given)) for i, given in enumerate(_calls.expected)]
    _calls.arrived = (name.decode(), blocks, threads), stream or 0, found


_runtime.fake_launcher(_arrive)

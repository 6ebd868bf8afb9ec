"""What the host reads and writes of pinned memory, and what its threads know of each other, for cudart.cpp.

| what                                     | how it is seen                                                          |
|------------------------------------------|-------------------------------------------------------------------------|
| operations of torch on the host          | a dispatch mode in every thread; autograd hands it to its own           |
| files that are read, written, verified   | os.preadv, os.pwritev and zlib.crc32 are replaced                       |
| a thread that waits for another          | Thread.start and join, Event and SimpleQueue are replaced               |

Not seen: access by address, as NumPy, tolist(), ctypes and MPI have it; locks, conditions and futures.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

UNREAD = {"is_pinned", "record_stream", "resize_", "set_"}  # operations that read no element, beside views and factories
_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.fake_host_access.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p)
_runtime.fake_send.argtypes = _runtime.fake_receive.argtypes = (ctypes.c_size_t,)


def watch() -> None:
    """Watch this process, from now on."""
    _watch_files()
    _watch_threads()
    HostOperations().__enter__()


def extent(tensor: torch.Tensor) -> int:
    """The bytes from the first element to the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class HostOperations(TorchDispatchMode):
    """Reports the accesses of operations whose tensors are all on the host. Others are the streams'."""

    sees_hooks = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler first, which takes ten seconds

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See TorchDispatchMode."""
        if any(each.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for each in types):  # type: ignore[attr-defined]
            return NotImplemented  # a subclass dispatches first, and comes back with what it holds
        given = kwargs or {}
        if all(map(_on_host, (*args, *given.values()))):
            _tell_inputs(op, args, given)
            out = op(*args, **given)
            if given.get("pin_memory") and "empty" not in op._schema.name:
                _tell(out, op, writes=True)
            return out
        return op(*args, **given)


def _on_host(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_on_host, value))
    device = value.device if isinstance(value, torch.Tensor) else value
    return not isinstance(device, torch.device) or device.type == "cpu"


def _tell_inputs(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    name = op._schema.name.removeprefix("aten::")
    if name in UNREAD or name.endswith("_like") or name.startswith("new_"):
        return
    if any(each.alias_info and not each.alias_info.is_write for each in op._schema.returns):  # a view
        return
    arguments = op._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    for argument in arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        _tell(given.get(argument.name), op, writes=writes)


def _tell(value: Any, op: Any, *, writes: bool) -> None:
    if isinstance(value, (list, tuple)):
        for each in value:
            _tell(each, op, writes=writes)
    elif isinstance(value, torch.Tensor) and value.layout == torch.strided and value.numel() > 0:
        _runtime.fake_host_access(value.data_ptr(), extent(value), writes, str(op).encode())


def _watch_files() -> None:
    for module, name, position, writes in ((os, "pwritev", 1, False), (os, "preadv", 1, True), (zlib, "crc32", 0, False)):
        setattr(module, name, _reporting(getattr(module, name), position, writes))


def _reporting(function: Callable[..., Any], position: int, writes: bool) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        given = args[position]
        for each in given if isinstance(given, list) else (given,):
            buffer = memoryview(each)
            if buffer.nbytes > 0 and not buffer.readonly:  # pinned memory is not
                address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                _runtime.fake_host_access(address, buffer.nbytes, writes, function.__name__.encode())
        return function(*args)

    return call


# ---------------------------------------------------------------------- threads


def _watch_threads() -> None:
    start, join = threading.Thread.start, threading.Thread.join
    set_, wait, is_set = threading.Event.set, threading.Event.wait, threading.Event.is_set

    def start_watched(self: threading.Thread) -> None:
        run, key = self.run, id(self)

        def run_watched() -> None:
            _runtime.fake_thread()
            _runtime.fake_receive(key)
            try:
                with HostOperations():
                    run()
            finally:
                _runtime.fake_send(key)

        self.run = run_watched  # type: ignore[method-assign]
        _runtime.fake_send(key)
        start(self)

    def join_watched(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        _received(self, not self.is_alive())

    def set_watched(self: threading.Event) -> None:
        _runtime.fake_send(id(self))
        set_(self)

    replaced: dict[Any, dict[str, Any]] = {
        threading.Thread: {"start": start_watched, "join": join_watched},
        threading.Event: {
            "set": set_watched,
            "wait": lambda self, timeout=None: _received(self, wait(self, timeout)),
            "is_set": lambda self: _received(self, is_set(self)),
        },
    }
    for owner, functions in replaced.items():
        for name, function in functions.items():
            setattr(owner, name, function)
    queue.SimpleQueue = SimpleQueue  # type: ignore[misc]


def _received(sender: object, has_arrived: bool) -> bool:
    if has_arrived:
        _runtime.fake_receive(id(sender))
    return has_arrived


class SimpleQueue(queue.SimpleQueue[Any]):
    """Who gets an item knows what those knew that have put items so far."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """See queue."""
        _runtime.fake_send(id(self))
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See queue."""
        item = super().get(block, timeout)
        _received(self, True)
        return item

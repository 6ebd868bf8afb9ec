"""Calls that pass through torch's dispatcher, where profilers, modes and subclasses of tensors see them, as those of gloo do.

Python code calls the methods of a group directly. torch's own groups call an operator, such as c10d::allreduce_, whose kernel
calls the backend. Here that way is taken only where something looks: a profiler runs, a mode is active (`CommDebugMode`,
`FakeTensorMode`), or a tensor has `__torch_dispatch__` or no values. The operator is called by a plain group of torch's, and
its kernel, at a dispatch key below modes and subclasses that is there in this call alone, makes the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from threading import local
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup, Work
from torch.library import Library, fallthrough_kernel

_P = ParamSpec("_P")

_KEY_NAME = "FPGA"  # above those of CPU and CUDA; torch has no kernels for it
_KEY: Any = torch._C._parse_dispatch_key(_KEY_NAME)
_OPS = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "barrier",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "_allgather_base_",
    "gather_",
    "scatter_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "_reduce_scatter_base_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
    "recv_any_source_",
)


class DispatchedGroup(Protocol):
    """A group that has a plain one of torch's beside it, of the same ranks, which calls the operators."""

    caller_of_ops: ProcessGroup


Group = TypeVar("Group", bound=DispatchedGroup)


class _OnItsWay(local):
    """The call of this thread that is on its way through the dispatcher."""

    call: Callable[[Iterable[Any]], Work] | None = None  # of the tensors that the kernel is given


_now = _OnItsWay()


def dispatched(
    title: str, tensors: int
) -> Callable[[Callable[Concatenate[Group, _P], Any]], Callable[Concatenate[Group, _P], Any]]:
    """Decorate a method of a group whose first `tensors` arguments are tensors or lists of them. title: in profiles."""

    def decorate(method: Callable[Concatenate[Group, _P], Any]) -> Callable[Concatenate[Group, _P], Any]:
        @functools.wraps(method)
        def call(self: Group, *args: Any, **given: Any) -> Any:
            if _now.call is not None or not _is_seen(args[:tensors]):
                return method(self, *args, **given)
            works = []  # Hazard: they keep what they are in Python, until torch's group has returned one

            def perform(found: Iterable[Any]) -> Work:
                with torch.profiler.record_function(f"shardrt:{title}"):
                    works.append(method(self, *list(found)[:tensors], *args[tensors:], **given))
                return works[-1]

            _now.call = perform
            try:
                with torch._C._IncludeDispatchKeyGuard(_KEY):
                    return getattr(self.caller_of_ops, method.__name__)(*args, **given)
            finally:
                _now.call = None

        return call

    return decorate


def _is_seen(args: Iterable[Any]) -> bool:
    # Cost: 1 us where nothing looks.
    return (
        torch._C._autograd._profiler_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(
            tensor.is_meta or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
            for tensor in _flat(args)
            if type(tensor) is not torch.Tensor or tensor.is_meta
        )
    )


def _flat(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _flat(arg)


def _kernel(op: Any) -> Callable[..., Any]:
    tensors = [argument.name for argument in op._schema.arguments].index("process_group")
    returns_tensors = len(op._schema.returns) > 1

    def run(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in _flat(args[:tensors])):
                return op(*args)  # torch's kernel for tensors without values
            assert _now.call is not None, "the key is there in a call alone"
            work = _now.call(args[:tensors]).boxed()
        return (args[0], work) if returns_tensors else work

    return run


_anything = Library("_", "IMPL")
_anything.fallback(fallthrough_kernel, _KEY_NAME)
_kernels = Library("c10d", "IMPL")
for _name in _OPS:
    _kernels.impl(_name, _kernel(getattr(torch.ops.c10d, _name).default), _KEY_NAME)

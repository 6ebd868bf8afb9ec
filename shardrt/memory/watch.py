"""What an account hears while it is open, and the composition of memory at the highest moment that it has seen.

The peak's size is known to the kernel, its moment to nobody. So memory is looked at wherever it can have grown: after each
operation, collective, and change of a buffer. What it consists of is measured at each new maximum.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm.core.calls import CallList, Hook
from ..comm.groups.control import hooked
from ..fsdp.base.events import BufferKind, HasName, Observer, observing
from ..torch_internals import OpOverload, TorchDispatchMode, in_backward
from .devices import Device, Measured
from .live import LiveBytes
from .parts import Use, claims

_FRACTION = 256  # memory is measured again when it is higher by this part of it


class Owners(Protocol):
    """The model and the optimizers whose tensors are known."""

    model: nn.Module | None
    optimizer: Optimizer | None


class Watch(Hook, Observer):
    """Measures the memory of a `device` while its sources run.

    base: bytes that were no tensor's when it began.   loaded: what imports have added to them.
    measured: at the highest moment.   at: what had run.
    """

    base: int
    loaded: int
    measured: Measured
    at: str
    resets: bool  # the device's peak is that since the beginning

    def __init__(self, owners: Owners, memory: Device, device: torch.device) -> None:
        self._owners = owners
        self._memory = memory
        self._device = device
        self._live = LiveBytes(device.type)
        self._live.kind = Use.ACTIVATIONS.value
        self._optimizers: dict[Optimizer, None] = {}  # those that have stepped
        self._stepping = 0  # steps of optimizers within each other
        self._autograd_ran = False  # since the last of them began
        self._before_import: int | None = None  # what was unknown when modules began to be imported
        self._measuring = threading.Lock()
        self._see_all()
        self.resets = memory.reset_peak()
        self._mark = memory.mark()
        self.measured, self.at = self._measure(), "the beginning"
        self.base, self.loaded = self.measured.unknown, 0

    def sources(self) -> ExitStack:
        """What calls this object, until the stack is closed."""
        with ExitStack() as stack:
            finder = _Finder(self)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
            stack.callback(register_optimizer_step_pre_hook(self._begin_optimizer).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_optimizer).remove)
            stack.enter_context(hooked(self))
            stack.enter_context(observing(self))
            stack.enter_context(_OperationWatch(self))
            return stack.pop_all()

    # ------------------------------------------------------------------ events

    def ran(self, func: OpOverload, made: object) -> None:
        """An operation has run."""
        if self._stepping:
            autograd = torch.is_grad_enabled() or in_backward()  # as in a closure, or after a step that has raised
            self._autograd_ran |= autograd
            self._live.kind = (Use.ACTIVATIONS if autograd else Use.TEMPORARIES).value
        self._live.see(made)
        self._look(func)

    def after(self, calls: CallList) -> None:
        self._look(calls[0].name)

    def memory_changed(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        self._look(kind.value)

    def gradients_made(self, group: HasName, storage: torch.UntypedStorage) -> None:
        self._live.relabel(storage, Use.GRADIENTS.value)

    def _begin_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self._optimizers[optimizer] = None
        self._stepping = 1 if self._autograd_ran else self._stepping + 1  # an earlier step may have raised
        self._autograd_ran = False
        self._live.kind = Use.TEMPORARIES.value

    def _end_optimizer(self, *_: object) -> None:
        self._stepping = max(0, self._stepping - 1)
        if not self._stepping:
            self._live.kind = Use.ACTIVATIONS.value

    def begin_import(self) -> None:
        """A module is looked for. What is loaded until the next event belongs to the libraries."""
        if self._before_import is None and not self._measuring.locked():
            self._before_import = self._measure().unknown

    # ------------------------------------------------------------------ measurements

    def _look(self, what: object) -> None:
        """Measure the memory, if it is higher than ever, or if modules were imported."""
        mark, last = self._memory.mark(), self._mark
        step = last[0] // _FRACTION
        highest = mark[0] > last[0] + step or (mark[0] >= last[0] and mark[1] > last[1] + step)
        if (not highest and self._before_import is None) or not self._measuring.acquire(blocking=False):
            return
        try:
            measured = self._measure()
            if self._before_import is not None:
                self.loaded += max(0, measured.unknown - self._before_import)
                self._before_import = None
            if highest:
                self._mark, self.measured, self.at = mark, measured, f"in {self._phase()}, after {what}"
        finally:
            self._measuring.release()

    def _phase(self) -> str:
        if self._live.kind == Use.TEMPORARIES.value:
            return "an optimizer's step"
        return "backward" if in_backward() else "forward"

    def _measure(self) -> Measured:
        optimizers = dict(self._optimizers)
        if self._owners.optimizer is not None:
            optimizers[self._owners.optimizer] = None
        return self._memory.measure(claims(self._owners.model, optimizers, self._live, self._device))

    def _see_all(self) -> None:
        """Count the tensors that Python knows already."""
        for found in gc.get_objects():
            if issubclass(type(found), torch.Tensor):
                self._live.see(found)


class _Finder:
    """Finds no module, but hears that one is looked for."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        self._watch.begin_import()
        return None


class _OperationWatch(TorchDispatchMode):
    """Shows all operations to the watch: of a subclass of tensors, those that it consists of."""

    supports_higher_order_operators = True
    sees_hooks = True  # `torch_internals.outside_modes`

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def _run(
        self,
        func: OpOverload,
        types: Iterable[type[torch.Tensor]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        self._watch.ran(func, made)
        return made


# Cost: a `__torch_dispatch__` that the class is made with is wrapped, so that torch.compile leaves it alone: that imports the
# compiler, 77 MiB.
_OperationWatch.__torch_dispatch__ = _OperationWatch._run  # type: ignore[assignment,method-assign]

"""Tensors that others read while training goes on. Only what writes them next waits.

A snapshot: a stream copies the tensors. Memory of the node: other ranks compute with the shards of this one.

| what writes                                                    | waits in                                              |
|----------------------------------------------------------------|-------------------------------------------------------|
| an optimizer                                                   | a hook before its step                                |
| an operation on `DTensor`s, or on views of them, in place      | the rule, or the method (`dispatch.py`, `views.py`)   |
| an assignment to `.data`                                       | `DTensor.data`                                        |
| the holder of the local tensor                                 | `DTensor.to_local`, when it is asked for              |
| loads, and what a user has written to a gathered parameter     | there                                                 |

So nobody has to wait by hand for tensors that nothing else writes: `checkpoint/saving/sources.py` says which these are. What is
not seen are writes to local tensors that were asked for earlier, and replays of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol
from weakref import WeakSet, ref

import torch
from torch.optim import Optimizer

from ...comm.core.streams import Event, current_stream, is_capturing


class Snapshot:
    """Copies of plain tensors of one device, which are under way until `copied` passes, as are those of the one before."""

    def __init__(self, tensors: Sequence[torch.Tensor], copied: Event) -> None:
        """From now on, what writes these tensors waits. copied: passes after that of the one under way."""
        global current
        # Hazard: of memory that is given back meanwhile, other tensors would be made before it is copied.
        self._tensors = tensors
        self.copied = copied
        self._device = tensors[0].device
        self._storages = frozenset(map(address, tensors))
        if (before := current) is not None:
            self._storages |= before._storages
        current = self

    def has_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether it copies one of these tensors, or others in the same storages; no subclasses, which may have no storage."""
        return any(type(tensor) is torch.Tensor and address(tensor) in self._storages for tensor in tensors)

    def wait(self) -> None:
        """Let what is submitted from now on to the current stream run after the copies."""
        # While a CUDA graph is captured there is nothing to wait for: torch has waited for the device before.
        if not is_capturing():
            current_stream(self._device).wait(self.copied)

    def end(self) -> None:
        """Block until the copies are there. Nobody waits any more."""
        global current
        self.copied.synchronize()
        self._tensors = ()
        if current is self:
            current = None


class ReadElsewhere(Protocol):
    """Memory of this rank that other ranks may read."""

    def wait_for_readers(self) -> bool:
        """Wait until they have read. False if this rank itself still reads what they do: then nobody can wait."""


# By the address of the storage; without those that are known to be read by nobody. Written by the readers.
read_elsewhere: dict[int, ref[ReadElsewhere]] = {}

current: Snapshot | None = None  # the one under way; written by Snapshot, in any thread
optimizers: WeakSet[Optimizer] = WeakSet()  # those that have stepped
captured_a_step = False  # a CUDA graph contains a step, and its replays run no hook


def address(tensor: torch.Tensor) -> int:
    """The address of the storage of a plain tensor."""
    return tensor.untyped_storage().data_ptr()


def wait_to_write(tensors: Iterable[torch.Tensor] | None = None) -> None:
    """Wait, on the current stream, for the snapshot under way if it copies one of these tensors. None: in any case.

    Also until other ranks have read them.
    """
    snapshot = current  # another thread may end it now
    if snapshot is None and not read_elsewhere:
        return
    tensors = None if tensors is None else list(tensors)
    if snapshot is not None and (tensors is None or snapshot.has_any(tensors)):
        snapshot.wait()
    _wait_for_readers(tensors)


def _wait_for_readers(tensors: Iterable[torch.Tensor] | None) -> None:
    """Wait until other ranks have read these tensors. None: all."""
    places = list(read_elsewhere) if tensors is None else {address(each) for each in tensors if type(each) is torch.Tensor}
    for place in places:
        if (found := read_elsewhere.get(place)) is None:
            continue
        if (memory := found()) is None:
            del read_elsewhere[place]  # its model is gone
        else:
            memory.wait_for_readers()


def wait_to_step(optimizer: Optimizer) -> None:
    """Called before each step, which may write the parameters and the state that are copied."""
    global captured_a_step
    optimizers.add(optimizer)
    captured_a_step |= is_capturing()
    if (snapshot := current) is not None:
        snapshot.wait()
    if read_elsewhere:
        params = (getattr(param, "_local_tensor", param) for group in optimizer.param_groups for param in group["params"])
        _wait_for_readers(params)

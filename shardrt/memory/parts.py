"""The parts of a process's memory, and what each tensor that is alive belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from ..fsdp.api.module import FSDPModule
from ..fsdp.memory.buffers import allocated_buffers
from ..fsdp.schedule.param_group import ParamGroup
from .live import LiveBytes, storage_of


class Use(Enum):
    """What memory is for. Those of buffers have the values of `BufferKind`."""

    __hash__ = object.__hash__  # Cost: Enum's own hash is Python code

    PROCESS = "interpreter and libraries"
    SHARDS = "shards"  # all parameters, and the model's buffers
    GRADIENTS = "gradients"  # of parameters as the optimizer sees them
    OPTIMIZER = "optimizer state"
    TEMPORARIES = "optimizer temporaries"  # made in a step of an optimizer
    GATHERED = "gathered"
    POST_FORWARD = "post-forward"
    PACKED = "packed"
    PARTIAL = "partial"
    SCRATCH = "scratch"
    CODES = "codes"
    ACTIVATIONS = "activations"  # and all other tensors
    WINDOWS = "windows"  # shared memory
    HELD = "held by the allocator"  # freed, and kept for what is allocated next


class Claim(NamedTuple):
    """A storage, and what it is for."""

    part: Use
    address: int
    nbytes: int


def claims(
    model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer], live: LiveBytes, device: torch.device
) -> Iterator[Claim]:
    """Each storage on `device` once, by the first that claims it."""
    seen = {0}
    for part, storage in _storages(model, optimizers, live, device):
        address = _address(storage)
        if address not in seen and storage.device.type == device.type and storage.nbytes():
            seen.add(address)
            # A GPU's memory that cannot be resized is not from torch's allocator, as that of `Communicator.empty`.
            ours = storage.device.type == "cpu" or storage.resizable()
            yield Claim(part if ours else Use.WINDOWS, address, storage.nbytes())


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # of a subclass that consists of other tensors
        return 0


def _storages(
    model: nn.Module | None, optimizers: Iterable[torch.optim.Optimizer], live: LiveBytes, device: torch.device
) -> Iterator[tuple[Use, torch.UntypedStorage]]:
    stepped = [(param, optimizer.state.get(param, {})) for optimizer in optimizers for param in _params(optimizer)]
    ours = [*_sharded(model), *(param for param, _ in stepped)]
    for param in ours:
        yield from ((Use.SHARDS, storage) for storage in _own(param))
    for param in ours:
        yield from ((Use.GRADIENTS, storage) for storage in _own(param.grad))
    for group in _groups(model):
        if group.gather.resident:
            yield Use.WINDOWS, group.gather.full.storage  # memory of the node, unless it is that of the shards
    for buffer in allocated_buffers(device):
        yield Use(buffer.kind.value), buffer.storage
    for _, state in stepped:
        yield from ((Use.OPTIMIZER, storage) for value in list(state.values()) for storage in _own(value))
    if model is not None:
        yield from ((Use.SHARDS, storage) for tensor in (*model.parameters(), *model.buffers()) for storage in _own(tensor))
    yield from ((Use(kind), storage) for storage, kind in live.alive())


def _sharded(model: nn.Module | None) -> Iterator[nn.Parameter]:
    """The sharded parameters of the model's groups, whatever its modules see now."""
    return (param.sharded for group in _groups(model) for param in group.params)


def _groups(model: nn.Module | None) -> Iterator[ParamGroup]:
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            yield from module.param_groups


def _params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _own(value: object) -> Iterator[torch.UntypedStorage]:
    """The storage of a tensor, if it has one: of a `DTensor` that of this rank's part."""
    local = getattr(value, "_local_tensor", value)
    if isinstance(local, torch.Tensor):
        storage = storage_of(local)
        if storage is not None:
            yield storage

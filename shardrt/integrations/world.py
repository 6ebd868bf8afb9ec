"""What every framework asks of its distributed backend: values of all ranks, sharding by blocks, whole states of one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm import ReduceOp
from ..fsdp.fully_shard import fully_shard
from ..fsdp.module import FSDPModule
from ..tensor.dtensor import DTensor
from ..tensor.local_optimizers import steps_locally
from ..tensor.optimizer_state import shard_optimizer_state


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor`, of shape (...): (N, ...), in rank order, on the device of `tensor`. Collective.

    All ranks pass the same shape and dtype. Not differentiable. Cost: one all-gather.
    """
    world = comm.world()
    sent = tensor.detach().to(world.device).contiguous()
    out = torch.empty((world.size, *sent.shape), dtype=sent.dtype, device=sent.device)
    world.comm.all_gather(out, sent, stream=world.stream).wait(world.stream)
    return out.to(tensor.device)


def reduce(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Every rank's `tensor` as one of the same shape, on its device; an average of integers is a float32. Collective.

    All ranks pass the same shape and dtype. Not differentiable. Cost: one all-reduce.
    """
    world = comm.world()
    sent = tensor.detach().to(world.device, copy=True, memory_format=torch.contiguous_format)
    if op is ReduceOp.AVG and not sent.is_floating_point():
        sent = sent.float()
    world.comm.all_reduce(sent, sent, op, stream=world.stream).wait(world.stream)
    return sent.to(tensor.device)


# ---------------------------------------------------------------------- sharding


def is_sharded(model: nn.Module) -> bool:
    """True if `fully_shard` was called on `model` or on a module in it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def refuse_unsharded(model: nn.Module) -> None:
    """Raise ValueError, on every rank alike, for a parameter that would train on this rank's batches alone."""
    for name, param in model.named_parameters():
        if param.requires_grad and not isinstance(param, DTensor):
            raise ValueError(
                f"parameter '{name}' of '{type(model).__name__}' on rank {comm.world().rank} is not sharded, so its gradient "
                "would not be averaged: call fully_shard on its blocks and then on the whole, before the optimizer is made"
            )


def shard_blocks(model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> None:
    """`fully_shard` each of `blocks`, the innermost first, then `model`. Collective.

    blocks: in the order of `model.modules()`.   options: as `fully_shard` takes them.
    """
    for block in reversed(list(dict.fromkeys(blocks))):  # those inside come after those around them
        if block is not model:
            fully_shard(block, **options)
    fully_shard(model, **options)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules with parameters of which an `nn.ModuleList` or `nn.Sequential` has several of one class; the outermost."""
    found: list[nn.Module] = []
    for child in model.children():
        listed = list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        blocks = [module for module in listed if any(True for _ in module.parameters())]
        count = Counter(type(module) for module in blocks)
        repeated = [module for module in blocks if count[type(module)] > 1]
        found += repeated or repeated_blocks(child)
    return found


@contextmanager
def no_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backwards accumulate gradients without reducing them, in every sharded module of `model`."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [module.param_group.settings.sync_gradients for module in sharded]
    for module in sharded:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module, sync in zip(sharded, before, strict=True):
            module.set_requires_gradient_sync(sync, recurse=False)


# ---------------------------------------------------------------------- whole states, as a single process has them


def full_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """`module.state_dict()` with whole tensors on the host where `keep` is true, and an empty one elsewhere. Collective.

    Parameters are gathered one at a time: a rank that keeps nothing needs memory for the largest of them.
    """
    return _whole(module.state_dict(keep_vars=True), keep=keep)


def full_optimizer_state(optimizer: torch.optim.Optimizer, *, keep: bool) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors on the host where `keep` is true, and an empty one elsewhere. Collective.

    One tensor at a time, as `full_state_dict`. Another number of ranks, or a single process, can load it.
    Raises RuntimeError for an optimizer that steps on the ranks' parts (`register_local_optimizer`).
    """
    if steps_locally(type(optimizer)):
        raise RuntimeError(
            f"the state of {type(optimizer).__name__} is each rank's own, since it steps on the ranks' parts, and cannot be "
            f"saved whole (rank {comm.world().rank}): save optimizer.state_dict() on every rank, and the checkpoint without it"
        )
    shard_optimizer_state(optimizer)
    state = optimizer.state_dict()
    whole = {number: _whole(entries, keep=keep) for number, entries in state["state"].items()}
    return {**state, "state": whole} if keep else {}


def load_full_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `full_optimizer_state` kept; every rank passes all of it and takes its part. No communication."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    owners = dict(zip(numbers, params, strict=True))
    parts = {
        number: {key: _part(owners[number], key, value) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": parts})


@torch.no_grad()
def _whole(state: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    seen: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for key, value in state.items():
        if isinstance(value, DTensor) and id(value) not in seen:
            whole = value.full_tensor()
            seen[id(value)] = whole.cpu() if keep else whole.new_empty(0)
        if keep:
            value = seen.get(id(value), value)
            kept[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return kept


@torch.no_grad()
def _part(param: torch.Tensor, key: str, value: Any) -> Any:
    """A state that has an element for each one of the parameter, cut as the parameter is."""
    if key == "step" or not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)

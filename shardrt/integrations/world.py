"""What every framework needs of its distributed backend: reductions, sharding by blocks, full state dicts in one file."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm import ReduceOp
from ..fsdp.api.fully_shard import fully_shard
from ..fsdp.api.module import FSDPModule
from ..tensor.dtensor.dtensor import DTensor
from ..tensor.optimizers.optimizer_state import shard_optimizer_state
from ..tensor.optimizers.other_optimizers import steps_locally


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's `tensor` of shape (...), stacked as (N, ...) in rank order, on the device of `tensor`. Collective.

    All ranks pass the same shape and dtype. Not differentiable. Cost: one all-gather.
    """
    world = comm.world()
    sent = tensor.detach().to(world.device).contiguous()
    out = torch.empty((world.size, *sent.shape), dtype=sent.dtype, device=sent.device)
    world.comm.all_gather(out, sent, stream=world.stream).wait(world.stream)
    return out.to(tensor.device)


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's rows of `tensor`, in rank order: (sum of rows, ...). A 0-dim tensor counts as one row. Collective.

    All ranks pass the same dtype, and the same shape but for dim 0.
    Cost: one all-gather of as many rows as the rank with the most has, after an exchange of the numbers of rows.
    """
    if tensor.dim() == 0:
        return gather(tensor)
    counts = comm.world().comm.exchange(tensor.size(0))
    padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
    padded[: tensor.size(0)] = tensor
    return torch.cat([part[:count] for part, count in zip(gather(padded), counts, strict=True)])


def reduce(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """`tensor` reduced over the ranks: same shape and device; an average of integers is float32. Collective.

    All ranks pass the same shape and dtype. Not differentiable. Cost: one all-reduce.
    """
    world = comm.world()
    sent = tensor.detach().to(world.device, copy=True, memory_format=torch.contiguous_format)
    if op is ReduceOp.AVG and not sent.is_floating_point():
        sent = sent.float()
    world.comm.all_reduce(sent, sent, op, stream=world.stream).wait(world.stream)
    return sent.to(tensor.device)


@torch.no_grad()
def broadcast(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """`tensor`, into which the values of rank `root`'s are written. Collective.

    All ranks pass the same shape and dtype. Not differentiable. Cost: one broadcast.
    Raises ValueError for a root that is not a rank.
    """
    world = comm.world()
    sent = tensor.detach().to(world.device).contiguous()
    world.comm.broadcast(sent, sent, root, stream=world.stream).wait(world.stream)
    return tensor.copy_(sent)


# ---------------------------------------------------------------------- sharding


def is_sharded(model: nn.Module) -> bool:
    """True if `fully_shard` was called on `model` or on a module in it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def check_sharded(model: nn.Module) -> None:
    """Raise ValueError, on every rank, for a parameter whose gradient would not be reduced over the ranks."""
    for name, param in model.named_parameters():
        if param.requires_grad and not isinstance(param, DTensor):
            raise ValueError(
                f"parameter '{name}' of '{type(model).__name__}' on rank {comm.world().rank} is not sharded, so its gradient "
                "would not be averaged: call fully_shard on its blocks and then on the model, before you create the optimizer"
            )


def shard_blocks(model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> None:
    """`fully_shard` each of `blocks`, the innermost first, then `model`. Collective.

    A block that shares a parameter with a module outside of it gets no group of its own: it is gathered with what is around it.
    blocks: in the order of `model.modules()`.   options: those of `fully_shard`.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            holders.setdefault(param, set()).add(module)
    alone = [block for block in dict.fromkeys(blocks) if _shares_nothing(block, holders)]
    for block in reversed(alone):  # inner modules come after those that contain them
        if block is not model:
            fully_shard(block, **options)
    fully_shard(model, **options)


def _shares_nothing(block: nn.Module, holders: Mapping[nn.Parameter, set[nn.Module]]) -> bool:
    inside = set(block.modules())
    return all(holders[param] <= inside for param in block.parameters())


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with parameters of whose class an `nn.ModuleList` or `nn.Sequential` has several."""
    found: list[nn.Module] = []
    for child in model.children():
        listed = list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else []
        blocks = [module for module in listed if any(True for _ in module.parameters())]
        count = Counter(type(module) for module in blocks)
        repeated = [module for module in blocks if count[type(module)] > 1]
        found += repeated or repeated_blocks(child)
    return found


@contextmanager
def gradient_sync(model: nn.Module, is_wanted: bool) -> Iterator[None]:
    """In the `with` block, backwards reduce the gradients of all sharded modules of `model`, or accumulate without reducing."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    before = [module.param_group.settings.sync_gradients for module in sharded]
    for module in sharded:
        module.set_requires_gradient_sync(is_wanted, recurse=False)
    try:
        yield
    finally:
        for module, sync in zip(sharded, before, strict=True):
            module.set_requires_gradient_sync(sync, recurse=False)


# ---------------------------------------------------------------------- optimizers made before the model was sharded


class Originals:
    """Where the parameters of a model are registered before it is sharded, for optimizers that were made of them."""

    def __init__(self, model: nn.Module) -> None:
        # Weak references: what no optimizer has is freed when it is sharded.
        self._places = {
            id(param): (weakref.ref(param), module, attribute)
            for module in model.modules()
            for attribute, param in module._parameters.items()
            if param is not None
        }

    def replace_in(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Give `optimizer` the sharded parameters of `model` instead of the originals, in place. No communication.

        Its parameter groups keep their order and hyperparameters. State is sharded as the parameters are: every rank has to
        have the same. Raises, before anything is changed, ValueError for a parameter that is none of the model's, RuntimeError
        for state of an optimizer that steps on local shards.
        """
        own = set(model.parameters())
        found: dict[torch.Tensor, nn.Parameter] = {}
        for number, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                found[param] = now = self._now(param)
                if now not in own:
                    kind = type(optimizer).__name__
                    raise ValueError(
                        f"parameter {position} of group {number} of {kind}, of shape {tuple(param.shape)}, on rank "
                        f"{comm.world().rank} is no parameter of the sharded '{type(model).__name__}', so that training would "
                        "not reach the model: make the optimizer after fully_shard, or leave the sharding to the trainer"
                    )
        moved = {param: now for param, now in found.items() if now is not param}
        _move_state(optimizer, moved)
        for group in optimizer.param_groups:
            group["params"][:] = [found[param] for param in group["params"]]

    def _now(self, param: torch.Tensor) -> Any:
        """What is registered where `param` was; itself if it never was."""
        reference, module, attribute = self._places.get(id(param), (None, None, ""))
        if reference is None or module is None or reference() is not param:
            return param
        return module._parameters[attribute]


def _move_state(optimizer: torch.optim.Optimizer, moved: Mapping[torch.Tensor, nn.Parameter]) -> None:
    with_state = [param for param in moved if optimizer.state.get(param)]
    if with_state and steps_locally(type(optimizer)):
        raise RuntimeError(
            f"{type(optimizer).__name__} on rank {comm.world().rank} has state of parameters that were sharded since, and "
            "steps on local shards, so that its state cannot be sharded; make the optimizer after fully_shard"
        )
    for param in with_state:
        optimizer.state[moved[param]] = optimizer.state.pop(param)
    shard_optimizer_state(optimizer)


# ---------------------------------------------------------------------- full state, as a single process has it


@torch.no_grad()
def full_state_dict(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """`module.state_dict()` with full tensors on the host if `keep` is true, otherwise an empty dict. Collective.

    Parameters are gathered one at a time: a rank with `keep` false needs memory for the largest parameter only.
    """
    kept: dict[str, Any] = {}
    seen: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, DTensor) and id(value) not in seen:
            full = value.full_tensor()
            seen[id(value)] = full.cpu() if keep else full.new_empty(0)
        if keep:
            value = seen.get(id(value), value)
            kept[key] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return kept

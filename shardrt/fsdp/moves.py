"""`to()`, `to_empty()`, `half()` and the like on sharded modules: what torch's `nn.Module._apply` does on plain ones.

Torch's own `_apply` moves buffers and the parameters that no group has. The groups' parameters are hidden from it: none of its
ways of replacing a parameter (`.data`, a new object, `swap_tensors`) works on shards. For them it depends on what `fn` returns:

| `fn(shard)`                            | done                                                                     |
|----------------------------------------|--------------------------------------------------------------------------|
| the shard itself                       | nothing                                                                  |
| another tensor, same dtype and device  | its values are copied into the shard                                     |
| another dtype or device                | the groups leave the runtime, and this one plans its layout again        |

Reduced gradients move with their parameters. Parameters lie in memory as the layout has planned, whatever `memory_format` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..tensor.dtensor import DTensor
from .param import ShardedParam
from .param_group import ParamGroup
from .registered import check_replacements

_log = logging.getLogger("shardrt")

Fn = Callable[[torch.Tensor], torch.Tensor]

# By module and attribute: buffers that got memory but no values, and their versions at that time.
_unwritten: WeakKeyDictionary[nn.Module, dict[str, tuple[torch.Tensor, int]]] = WeakKeyDictionary()


@contextmanager
def hidden(groups: Iterable[ParamGroup]) -> Iterator[None]:
    """Inside, the modules have none of these groups' parameters."""
    registered = [(owner, owner.registered) for group in groups for param in group.params for owner in param.owners]
    for owner, _ in registered:
        owner.registry[owner.attribute] = None
    try:
        yield
    finally:
        for owner, param in registered:
            owner.registry[owner.attribute] = param


def move(group: ParamGroup, modules: Iterable[nn.Module], fn: Fn) -> None:
    """Apply `fn` to those of the group's parameters that are registered in `modules`, and to their gradients.

    Hidden ones are left out: the `_apply` of a module around these has moved them already.
    Collective if the layout changes.   Raises RuntimeError as `ParamGroup.detach` does.
    """
    if group.ready is None:
        group.show_shards()
    check_replacements(group)
    holders, shards = set(modules), {}
    for param in group.params:
        registered = param.registered
        if registered is not None and any(owner.module in holders for owner in param.owners):
            shards[param] = param.sharded if group.installed else registered
    with torch.no_grad():
        moved = {param: fn(shard) for param, shard in shards.items()}
        if not all(_alike(shards[param], tensor) for param, tensor in moved.items()):
            _replace(group, shards, moved, fn)
            return
        for param, shard in shards.items():
            _write(shard, moved[param])
            if shard.grad is not None:
                _write(shard.grad, fn(shard.grad))


def _alike(shard: torch.Tensor, moved: torch.Tensor) -> bool:
    return isinstance(moved, DTensor) and (moved.dtype, moved.device) == (shard.dtype, shard.device)


def _write(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    if moved is not tensor:
        tensor.copy_(moved)


def _replace(
    group: ParamGroup, shards: dict[ShardedParam, nn.Parameter], moved: dict[ShardedParam, torch.Tensor], fn: Fn
) -> None:
    group.detach()
    for param, shard in shards.items():
        made = nn.Parameter(moved.pop(param), requires_grad=shard.requires_grad)
        if shard.grad is not None:
            made.grad = fn(shard.grad)
        for owner in param.owners:
            owner.registry[owner.attribute] = made
        param.sharded = shard  # another one, if it was replaced before the first forward: that one keeps its identity
    group.rebuild_after_apply()


def buffers_on_meta(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The modules' buffers on the meta device that are not in state dicts: holders and attributes."""
    return [
        (module, attribute)
        for module in modules
        for attribute, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and attribute in module._non_persistent_buffers_set
    ]


def note_unwritten(buffers: Sequence[tuple[nn.Module, str]]) -> None:
    """Remember those of these buffers that have left the meta device: they have memory now, but no values."""
    for module, attribute in buffers:
        buffer = module._buffers[attribute]
        if buffer is not None and not buffer.is_meta and not buffer.is_inference():
            _unwritten.setdefault(module, {})[attribute] = (buffer, buffer._version)


def warn_of_unwritten(names: dict[nn.Module, str]) -> None:
    """Log the full names of these modules' buffers that nobody has written to since they left the meta device; once each."""
    found = []
    for module, name in names.items():
        for attribute, (buffer, version) in _unwritten.pop(module, {}).items():
            if module._buffers.get(attribute) is buffer and buffer._version == version:
                found.append(f"{name}.{attribute}" if name else attribute)
    if found:
        _log.warning(
            "buffers without values: %s: to_empty() moved them from the meta device, which gives them memory only, and they "
            "are not persistent, so no state dict has them: write to them before the next forward (said once)",
            ", ".join(f"'{name}'" for name in found),
        )

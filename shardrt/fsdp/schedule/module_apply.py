"""`to()`, `to_empty()`, `half()` and the like on sharded modules: what torch's `nn.Module._apply` does on plain ones.

Torch's own `_apply` moves buffers and the parameters that no group has. The groups' parameters are hidden from it: none of its
ways of replacing a parameter (`.data`, a new object, `swap_tensors`) works on shards. For shards, the result of `fn` decides:

| `fn(shard)`                            | done                                                                     |
|----------------------------------------|--------------------------------------------------------------------------|
| the shard itself                       | nothing                                                                  |
| another tensor, same dtype and device  | its values are copied into the shard                                     |
| another dtype or device                | all groups leave the runtime, and this one plans its layout again        |

Reduced gradients move with their parameters. The layout decides how parameters are laid out in memory, not `memory_format`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ..base.autograd import GroupPhase
from ..memory.host_memory import POOL
from ..params.param import ShardedParam
from ..reduce.packed_grads import HeldGrads
from .param_group import ParamGroup
from .registered import check_replacements

Fn = Callable[[torch.Tensor], torch.Tensor]

# By module and attribute: what received memory but no values, and its versions at that time.
_unwritten: WeakKeyDictionary[nn.Module, dict[str, tuple[torch.Tensor, tuple[int, int]]]] = WeakKeyDictionary()


@contextmanager
def hidden(groups: Iterable[ParamGroup]) -> Iterator[None]:
    """Inside the block, the modules register none of these groups' parameters."""
    registered = [(owner, owner.registered) for group in groups for param in group.params for owner in param.owners]
    for owner, _ in registered:
        owner.registry[owner.attribute] = None
    try:
        yield
    finally:
        for owner, param in registered:
            owner.registry[owner.attribute] = param


@outside_inference_mode()
def move(group: ParamGroup, modules: Iterable[nn.Module], fn: Fn) -> None:
    """Apply `fn` to those of the group's parameters that are registered in `modules`, and to their gradients.

    Hidden parameters are left out: the `_apply` of a module around these has moved them already.
    Collective if the layout changes.   Raises RuntimeError in the middle of an iteration, or while there are gradients that
    are not reduced, if a dtype or device changes.
    """
    if not group.state.gathered:
        group.reshard_and_repair()
    check_replacements(group)
    holders, shards = set(modules), {}
    for param in group.params:
        registered = param.registered
        if registered is not None and any(owner.module in holders for owner in param.owners):
            shards[param] = param.sharded if group.state.shown else registered
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
    _check_between_iterations(group)
    runtime = group.root.runtime
    for each in group.root.with_descendants():
        each.detach()
    if runtime is not None:
        runtime.streams.gather.submit(POOL.trim)  # after what the groups have freed there
    for param, shard in shards.items():
        made = nn.Parameter(moved.pop(param), requires_grad=shard.requires_grad)
        if shard.grad is not None:
            made.grad = fn(shard.grad)
        for owner in param.owners:
            owner.registry[owner.attribute] = made
        param.replace_sharded(shard)  # another one, if it was replaced before the first forward: it keeps its identity
    _rebuild_after_apply(group)


def _check_between_iterations(group: ParamGroup) -> None:
    rank = group.mesh.rank
    for each in group.root.with_descendants():
        if each.calls.phase is not GroupPhase.IDLE:
            raise RuntimeError(
                f"'{each.name}' is running (rank {rank}): another dtype or device, by to(), half(), to_empty() "
                "and the like, comes between iterations; after an exception call reset_iter_state() on the root first"
            )
        is_left = each.runtime is not None and each.runtime.is_left
        if is_left or (each.reduction is not None and each.reduction.held is not HeldGrads.NOTHING):
            raise RuntimeError(
                f"'{each.name}' has accumulated gradients that are not reduced (rank {rank}): before another "
                "dtype or device, by to(), half(), to_empty() and the like, run a backward with "
                "set_requires_gradient_sync(True) (and set_requires_all_reduce(True)), or on the root finalize_backward(), or "
                "reset_iter_state()"
            )


def _rebuild_after_apply(group: ParamGroup) -> None:
    """Plan the layout of the parameters that are registered now, unless only some of them have left the meta device."""
    if len({param.registered.is_meta for param in group.params if param.registered is not None}) == 1:
        group.rebuild(group.params)


def buffers_on_meta(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The modules' buffers on the meta device that are not in state dicts: holders and attributes."""
    return [
        (module, attribute)
        for module in modules
        for attribute, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and attribute in module._non_persistent_buffers_set
    ]


def on_meta(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """The modules' parameters and buffers on the meta device: holders and attributes."""
    return [
        (module, attribute)
        for module in modules
        for table in (module._parameters, module._buffers)
        for attribute, tensor in table.items()
        if tensor is not None and tensor.is_meta
    ]


def note_unwritten(places: Sequence[tuple[nn.Module, str]]) -> None:
    """Remember what of these has left the meta device: it has memory now, but no values."""
    for module, attribute in places:
        tensor = _registered(module, attribute)
        if tensor is not None and not tensor.is_meta and not tensor.is_inference():
            _unwritten.setdefault(module, {})[attribute] = (tensor, _versions(tensor))


class Unwritten(NamedTuple):
    """Full names of what was not written to since it left the meta device.

    computed: buffers that no state dict has.   saved: parameters and other buffers.
    """

    computed: list[str]
    saved: list[str]


def unwritten(names: Mapping[nn.Module, str]) -> Unwritten:
    """What of these modules was not written to, each once."""
    found = Unwritten([], [])
    for module, name in names.items():
        for attribute, (tensor, versions) in _unwritten.pop(module, {}).items():
            if _registered(module, attribute) is tensor and _versions(tensor) == versions:
                computed = attribute in module._non_persistent_buffers_set
                (found.computed if computed else found.saved).append(f"{name}.{attribute}" if name else attribute)
    return found


def _registered(module: nn.Module, attribute: str) -> torch.Tensor | None:
    found = module._buffers.get(attribute)
    return module._parameters.get(attribute) if found is None else found


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._version, tensor._local_tensor._version if isinstance(tensor, DTensor) else 0

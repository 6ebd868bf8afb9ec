"""The class of a sharded module: how `fully_shard` gives it, and how `copy.deepcopy` makes another module of it.

A deep copy serves as an average of weights, a teacher or a snapshot.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn, cast
from weakref import ref

from torch import nn

from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ...torch_internals import hide_package_from_compiler
from ..base.autograd import GroupPhase
from ..params.param import ShardedParam
from ..schedule import registered
from ..schedule.param_group import GroupSettings, ParamGroup
from .module import FSDPModule, plain_class


def make_sharded(modules: Sequence[nn.Module], groups: Sequence[ParamGroup]) -> None:
    """Make `FSDPModule`s of the modules; the first group is the parent of the others, and of those of modules inside."""
    first, *others = groups
    inside = [
        group
        for module in modules
        for child in module.modules()
        if isinstance(child, FSDPModule)
        for group in child.param_groups
        if group.parent is None
    ]
    first.adopt(list(dict.fromkeys((*others, *inside))))
    _change_class(modules, groups)


def _change_class(modules: Sequence[nn.Module], groups: Sequence[ParamGroup]) -> None:
    for module in modules:
        module.__class__ = _sharded_class(cast(type, type(module)))
        cast(FSDPModule, module).param_groups = tuple(groups)


@functools.cache
def _sharded_class(kind: type) -> type:
    """The class of sharded modules of class `kind`, one for all: torch.compile compiles for each class, eight times at most."""
    hide_package_from_compiler()
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__deepcopy__": deepcopy, "__reduce_ex__": refuse_pickling})


# ---------------------------------------------------------------------- copies


@outside_inference_mode()
def deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A sharded module with the same settings whose parameters and buffers share nothing with this one's.

    Not copied: gradients of the sharded parameters, and the runtime, which the copy's first forward makes. The copy of a
    module inside another sharded one is a root of its own. All ranks must make the same copies.
    Cost: the memory of another copy of the shards.
    Raises RuntimeError during an iteration, and if only some of the modules that were sharded together would be copied.
    module: the outermost sharded one.   memo: that of `copy.deepcopy`.
    """
    inside = [child for child in module.modules() if isinstance(child, FSDPModule)]
    groups = list(dict.fromkeys(group for child in inside for group in child.param_groups))
    _check(groups, set(module.modules()))
    for group in groups:
        group.reshard_and_repair()
        registered.check_replacements(group)
        # Whatever refers to a group or a parameter, such as the hooks of `state_dict`, will refer to the copy.
        memo[id(group)] = ParamGroup.__new__(ParamGroup)
        for param in group.params:
            _alias(param, memo)
    with _as_plain(inside):
        made = copy.deepcopy(module, memo)
    calls = {tuple(group.modules): child.param_groups for child in inside for group in child.param_groups}
    for modules in sorted(calls, key=lambda modules: -_depth(calls[modules][0])):  # from the inside out, as they were sharded
        copies = tuple(memo[id(child)] for child in modules)
        _change_class(copies, [_set_up(group, copies, memo) for group in calls[modules]])
    for group in groups:  # a root inside of another stays one
        memo[id(group)].adopt([memo[id(child)] for child in group.children if id(child) in memo])  # others were removed
    return made


def refuse_pickling(module: FSDPModule, protocol: object) -> NoReturn:
    """Raise TypeError: for `torch.save` of a sharded module, or of one around it, and for `copy.copy`."""
    group = module.param_group
    raise TypeError(
        f"'{group.name}' is sharded and cannot be pickled, since rank {group.mesh.rank} holds only its shards, nor copied by "
        "copy.copy(): save a state dict, by shardrt.checkpoint.save(folder, {'model': model}), or whole, by torch.save() of "
        "shardrt.checkpoint.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on "
        "rank 0; copy it by copy.deepcopy()"
    )


def _check(groups: Sequence[ParamGroup], inside: set[nn.Module]) -> None:
    for group in groups:
        if not inside.issuperset(group.modules):
            kinds = ", ".join(type(module).__name__ for module in group.modules)
            raise RuntimeError(
                f"deepcopy of a part of '{group.name}' (rank {group.mesh.rank}): its modules ({kinds}) were sharded together, "
                "and not all of them are inside what is copied; copy a module that contains them all"
            )
        if group.calls.phase is not GroupPhase.IDLE:
            raise RuntimeError(
                f"deepcopy of '{group.name}' in its {group.calls.phase.name.lower()} (rank {group.mesh.rank}): copy it between "
                "iterations, or after reset_iter_state() if an exception cut one short"
            )


def _alias(param: ShardedParam, memo: dict[int, Any]) -> None:
    """Add the parameter of the copy to the memo. It shares the original's memory until its group is set up.

    The original is what is registered, which may have been replaced before the first forward.
    """
    found = param.registered
    source = found if isinstance(found, DTensor) else param.sharded
    if id(source) not in memo:  # an optimizer may have been copied before the module
        made = nn.Parameter(source, requires_grad=source.requires_grad)
        made.__dict__.update(source.__dict__)
        memo[id(source)] = made
    memo[id(param.sharded)] = memo[id(source)]


@contextmanager
def _as_plain(modules: Sequence[FSDPModule]) -> Iterator[None]:
    """Give the modules their original classes, so that deepcopy copies them as usual."""
    kinds = [type(module) for module in modules]
    for module, kind in zip(modules, kinds, strict=True):
        module.__class__ = plain_class(kind)
    try:
        yield
    finally:
        for module, kind in zip(modules, kinds, strict=True):
            module.__class__ = kind


def _set_up(group: ParamGroup, modules: Sequence[nn.Module], memo: dict[int, Any]) -> ParamGroup:
    made: ParamGroup = memo[id(group)]
    params, settings = [param.copied(memo) for param in group.params], _settings(group.settings, memo)
    options = (group.device_mesh, group.policies, settings, group.gather_kind)
    root_settings = None if group.root_settings is None else replace(group.root_settings, post_optim_event=None)
    holders = [(holder, attribute) for module, attribute in group.ignored if (holder := module()) is not None]
    ignored = frozenset((ref(copy.deepcopy(holder, memo)), attribute) for holder, attribute in holders)
    made.__init__(modules, params, *options, ignored=ignored, root_settings=root_settings)  # type: ignore[misc]
    return made


def _settings(settings: GroupSettings, memo: dict[int, Any]) -> GroupSettings:
    named = {
        name: groups and [memo[id(group)] for group in groups if id(group) in memo]
        for name, groups in (("forward_prefetch", settings.forward_prefetch), ("backward_prefetch", settings.backward_prefetch))
    }
    return replace(settings, **cast(dict[str, Any], named))


def _depth(group: ParamGroup) -> int:
    return 0 if group.parent is None else 1 + _depth(group.parent)

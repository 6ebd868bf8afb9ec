"""What is registered on the modules, compared with the parameters that the groups have registered there.

| when                     | what is registered                           | what is done                                   |
|--------------------------|----------------------------------------------|------------------------------------------------|
| before the first forward | a `DTensor` parameter on the group's mesh    | the group takes it (`follow`)                  |
|                          | a plain parameter, none, ties that changed   | an error, on every rank alike                  |
|                          | a local tensor with an all-gather extension  | it gets a group of its own (`split_hooked`)    |
| a forward                | anything but the group's parameters          | an error, before a gather (`check_registered`) |
| a forward of the root    | parameters that no group has                 | a warning, once (`UnknownParams`)              |
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...batch_norm import check_converted
from ...comm import DeviceMesh
from ...comm.ending.words import name_ranks
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import group_of
from ..base.policy import UNQUANTISED
from ..gather.extension import ExtensionGather, check_methods, local_of, methods_of
from ..params.param import Owner, ShardedParam, same_memory
from .param_group import ParamGroup
from .state_dicts import hook_state_dicts

_log = logging.getLogger("shardrt")
_COPY = "copy the values into it, as in `param.data = new` or load_state_dict() with assign=False"
_DISTRIBUTE = "nn.Parameter(shardrt.distribute_tensor(tensor, mesh, placements))"


def check_same_modules(mesh: DeviceMesh, what: str, description: list[str], error: Exception | None) -> None:
    """Raise on every rank if any rank has an error, or if the ranks describe different modules. Collective."""
    kept = type(error) if isinstance(error, (TypeError, ValueError)) else RuntimeError
    failure = None if error is None else (kept, str(error) or repr(error))
    answers = mesh.differing((description, failure)) or ([] if failure is None else [(description, failure)] * mesh.size)
    failed = {rank: theirs for rank, (_, theirs) in enumerate(answers) if theirs is not None}
    if failed:
        raised, message = next(iter(failed.values()))
        raise raised(f"{message} (on {name_ranks(sorted(failed))})") from error
    if not answers:
        return
    everyone = [theirs for theirs, _ in answers]
    lines = max(len(lines) for lines in everyone)
    padded = [lines_of + ["nothing"] * (lines - len(lines_of)) for lines_of in everyone]
    different = next(line for line in zip(*padded, strict=True) if len(set(line)) > 1)
    found = "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(different))
    raise ValueError(f"{what}: the ranks have different modules; the first difference is {found}")


# ---------------------------------------------------------------------- before the first forward


def follow(root: ParamGroup, groups: Sequence[ParamGroup]) -> None:
    """Take the parameters that have been registered since `fully_shard`, and give all parameters their full names.

    Collective: the ranks compare what was replaced; a `DTensor` with another placement than its group's is redistributed.
    Raises, on every rank alike, RuntimeError or ValueError for what is no `DTensor` of the same shape on the same mesh.
    """
    names = {module: name for name, module in root.modules[0].named_modules()}
    replaced: dict[ParamGroup, dict[ShardedParam, nn.Parameter]] = {}
    lines: list[str] = []
    error: Exception | None = None
    taken: dict[int, ShardedParam] = {}
    try:
        for group in groups:
            for param in group.params:
                param.rename(_full_name(names, param.owners[0]))
                found = _registered_for(group, param, names)
                if taken.setdefault(id(found), param) is not param:
                    raise RuntimeError(
                        f"parameters '{taken[id(found)].name}' and '{param.name}' have become one since fully_shard: expected "
                        "two, as they were; tie them before fully_shard"
                    )
                if found is not param.sharded:
                    replaced.setdefault(group, {})[param] = found
                    kind = f"{found.dtype}, {found.spec.placements}"  # type: ignore[attr-defined]
                    lines.append(f"{param.name}: replaced by {kind}, requires_grad {found.requires_grad}")
            _check_values(group, replaced.get(group, {}))
    except (RuntimeError, ValueError) as caught:
        error = caught
    check_same_modules(root.device_mesh, f"first forward of '{root.name}'", lines, error)
    for group, found_ones in replaced.items():
        for param, found in found_ones.items():
            param.replace_sharded(found)
        group.rebuild(group.params)


def _full_name(names: dict[nn.Module, str], owner: Owner) -> str:
    """The name under the root; the attribute alone if the module is no longer there."""
    module = owner.module
    prefix = None if module is None else names.get(module)
    return f"{prefix}.{owner.attribute}" if prefix else owner.attribute


def _registered_for(group: ParamGroup, param: ShardedParam, names: dict[nn.Module, str]) -> nn.Parameter:
    """The parameter that is registered wherever `param` was. Raises RuntimeError or ValueError if it cannot be taken."""
    first = param.owners[0].registered
    for owner in param.owners:
        found, name = owner.registered, _full_name(names, owner)
        if found is not param.sharded:
            _check_replacement(group, param, found, name)
        if found is not first and not same_memory(found, first):
            raise RuntimeError(
                f"parameters '{param.name}' and '{name}' were one when they were sharded and are two now: register the same "
                "nn.Parameter under both names, or untie them before fully_shard"
            )
    assert first is not None, "checked"
    return first


def _check_replacement(group: ParamGroup, param: ShardedParam, found: nn.Parameter | None, name: str) -> None:
    if found is not None and _in_functional_call():
        raise RuntimeError(_no_functional_call(name))
    if found is None:
        raise RuntimeError(f"parameter '{name}' was removed after fully_shard: remove it before")
    other = group_of(found)
    if other is not None and cast(ParamGroup, other).root is not group.root:
        raise RuntimeError(
            f"parameter '{name}' was replaced after fully_shard by one of '{other.name}', which has another root: register a "
            "copy of it, as in nn.Parameter(param.detach().clone())"
        )
    if not isinstance(found, DTensor):
        raise RuntimeError(
            f"parameter '{name}' was replaced after fully_shard by a plain {type(found).__name__}: replace it before, or "
            f"register a sharded one, {_DISTRIBUTE}"
        )
    expected = cast(DTensor, param.sharded)
    if found.shape != expected.shape:
        raise ValueError(
            f"parameter '{name}' was replaced after fully_shard by one of shape {tuple(found.shape)}; expected "
            f"{tuple(expected.shape)}: replace it before"
        )
    if found.device_mesh is not expected.device_mesh:
        raise ValueError(
            f"parameter '{name}' was replaced after fully_shard by a DTensor on {found.device_mesh}; expected one on the mesh "
            f"that it is sharded over, {expected.device_mesh}"
        )
    if type(found._local_tensor) is not type(param.local):
        raise ValueError(
            f"parameter '{name}' was replaced after fully_shard by a DTensor of {type(found._local_tensor).__name__} parts; "
            f"expected parts that are a {type(param.local).__name__}"
        )
    if not found.is_meta and found.device != group.gather.shard_device:
        raise ValueError(
            f"parameter '{name}' was replaced after fully_shard by a DTensor on {found.device}; expected "
            f"{group.gather.shard_device}"
        )


def _check_values(group: ParamGroup, replaced: dict[ShardedParam, nn.Parameter]) -> None:
    """Raise RuntimeError if, with these replacements, not all parameters of the group have values."""
    on_meta = [param.name for param in group.params if replaced.get(param, param.sharded).is_meta]
    if 0 < len(on_meta) < len(group.params):
        raise RuntimeError(
            f"'{group.name}' has values for some of its parameters, but none for {_listed(on_meta)}, on the meta device: call "
            "to_empty() on a module around all of them, or load all of them with assign=True"
        )
    if on_meta and group.mesh.device.type != "meta":
        raise RuntimeError(
            f"'{group.name}' runs while its parameters are on the meta device (rank {group.mesh.rank}): call to_empty() and "
            "initialise them, or load a state dict"
        )


def check_replacements(group: ParamGroup) -> None:
    """Raise for replaced parameters what the next forward would raise: called before they are moved or copied."""
    names = {module: name for top in group.root.modules for name, module in top.named_modules()}
    for param in group.params:
        for owner in param.owners:
            found = owner.registered
            if found is None or found is param.sharded or (group.runtime is not None and found is param.unsharded):
                continue  # None: hidden at the moment
            if group.runtime is not None:
                raise RuntimeError(f"{_replaced_too_late(group, found, _full_name(names, owner))} (rank {group.mesh.rank})")
            _check_replacement(group, param, found, _full_name(names, owner))


# ---------------------------------------------------------------------- methods of all-gather extensions, set after fully_shard


def split_hooked(root: ParamGroup) -> list[ParamGroup]:
    """Give each parameter on whose local tensor the methods were set since `fully_shard` a group of its own. Collective.

    Returns: all groups under `root`, the new ones included.

    Cost: the group that it leaves is planned anew; its other parameters are gathered once.
    Raises, on every rank alike: RuntimeError if the ranks differ, TypeError or ValueError for what cannot be gathered.
    """
    hooked = list(_hooked(root))
    _check_same_extensions(root, [f"{param.name}: {', '.join(methods_of(local_of(param)))}" for _, param in hooked])
    for _, param in hooked:
        check_methods(param.name, local_of(param))
        if param.dim != 0:
            raise ValueError(f"parameter '{param.name}' is cut along dim {param.dim}; an all-gather extension expects Shard(0)")
    for group in dict.fromkeys(group for group, _ in hooked):
        taken = [param for owner, param in hooked if owner is group]
        for param in taken:
            _split(group, param)
        group.rebuild([param for param in group.params if param not in taken])
    return list(root.with_descendants())


def _hooked(root: ParamGroup) -> Iterator[tuple[ParamGroup, ShardedParam]]:
    for group in root.with_descendants():
        if not isinstance(group.gather, ExtensionGather):
            yield from ((group, param) for param in group.params if methods_of(local_of(param)))


def _check_same_extensions(root: ParamGroup, hooked: list[str]) -> None:
    answers = root.device_mesh.differing(hooked)
    if answers is not None:
        found = "; ".join(f"rank {rank}: {names or 'none'}" for rank, names in enumerate(answers))
        raise RuntimeError(
            f"'{root.modules[0].__class__.__name__}': the local tensors with all-gather extensions are not the same on all "
            f"ranks; found {found}; set fsdp_pre_all_gather and fsdp_post_all_gather alike on all"
        )


def _split(group: ParamGroup, param: ShardedParam) -> None:
    options = (group.policies._replace(quantization=UNQUANTISED), group.settings, ExtensionGather)
    made = ParamGroup(group.modules, [param.clone_spec()], group.device_mesh, *options)
    made.rename(group.name)
    cast(Any, group.modules[0]).param_groups[0].adopt([made])
    for module in group.modules:
        cast(Any, module).param_groups += (made,)
    hook_state_dicts([param], made)


# ---------------------------------------------------------------------- at a forward


def check_registered(group: ParamGroup, *, runs: bool = True) -> None:
    """Raise RuntimeError, when a forward starts, if the modules register something else than this group's parameters.

    From then on the user cannot reach the gathered parameters; what was written to them is kept. runs: it is the group's own
    modules that run now. Inside of `unsharded`, others around them may use its parameters by hand.
    """
    if not group.visible.registered(unsharded=group.state.shown):
        _repair(group)
    if runs or not group.settings.user_has_unsharded:
        group.conceal()


def _repair(group: ParamGroup) -> None:
    """Register again what the modules should see, where they have the group's other parameters. Raise for anything else."""
    names = {module: name for top in group.root.modules for name, module in top.named_modules()}
    for param in group.params:
        for owner in param.owners:
            found = owner.registered
            if found is not param.sharded and found is not param.unsharded:
                raise RuntimeError(f"{_replaced_too_late(group, found, _full_name(names, owner))} (rank {group.mesh.rank})")
    group.visible.repair(unsharded=group.state.shown)


def _replaced_too_late(group: ParamGroup, found: torch.Tensor | None, name: str) -> str:
    if _in_functional_call():
        return _no_functional_call(name)
    now = "nothing" if found is None else f"a {type(found).__name__} of shape {tuple(found.shape)}"
    return (
        f"parameter '{name}' of '{group.name}' was replaced after the first forward, found {now}: register the DTensor that "
        f"was there again, and {_COPY}"
    )


def _no_functional_call(name: str) -> str:
    return (
        f"torch.func.functional_call with another '{name}': a sharded module computes with the parameters that it gathers, "
        f"its own; {_COPY}, or call a module that is not sharded"
    )


def _in_functional_call() -> bool:
    """Whether `functional_call` is running. Cost: a walk up the stack; only where parameters were replaced."""
    calls = (torch.func.functional_call, torch.nn.utils.stateless.functional_call)
    codes = {inspect.unwrap(call).__code__ for call in calls}
    frame = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


# ---------------------------------------------------------------------- parameters that no group has

_registrations = 0  # of parameters under new names and of modules, in this process
_reported: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()  # attributes that a warning has named


@functools.cache
def watch_registrations() -> None:
    """Count what is registered on modules from now on, so that a forward need not look for it."""
    torch_module.register_module_parameter_registration_hook(_count_parameter)
    torch_module.register_module_module_registration_hook(_count)


def _count(*_: object) -> None:
    global _registrations
    _registrations += 1


def _count_parameter(module: nn.Module, name: str, param: object) -> None:
    if module._parameters.get(name) is None:  # recurrent layers get theirs anew at every gather
        _count()


class UnknownParams:
    """Finds parameters under `root` that no group has. Cost: one comparison, unless something was registered."""

    _root: ParamGroup
    _seen: int  # registrations at the last search; written by warn()

    def __init__(self, root: ParamGroup) -> None:
        self._root = root
        self._seen = -1

    def warn(self) -> None:
        """Log such parameters, each once.

        Raises RuntimeError for a group's parameter under another name, ValueError for torch's `nn.SyncBatchNorm`.
        """
        if self._seen == _registrations:
            return
        groups = list(self._root.with_descendants())
        owners = [owner for group in groups for param in group.params for owner in param.owners]
        places = {(owner.reference, owner.attribute) for owner in owners if owner.module is not None}
        places.update(place for group in groups for place in group.ignored)
        own = {id(tensor): param for group in groups for param in group.params for tensor in (param.sharded, param.unsharded)}
        added = []
        for prefix, module in self._root.modules[0].named_modules():
            check_converted(prefix, module)
            for attribute, found in module._parameters.items():
                if found is None or (ref(module), attribute) in places or attribute in _reported.get(module, ()):
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                if id(found) in own:
                    raise RuntimeError(
                        f"parameter '{name}' has become one with '{own[id(found)].name}' since fully_shard (rank "
                        f"{self._root.mesh.rank}): tie them before fully_shard"
                    )
                if group_of(found) is None:  # else it is of a sharded module that was put in later, as a root
                    _reported.setdefault(module, set()).add(attribute)
                    added.append(name)
        self._seen = _registrations  # not before: what is refused once is refused at every forward
        if added and self._root.device_mesh.rank == 0:
            _log.warning(
                f"parameters registered after fully_shard of '{self._root.name}': {_listed(added)}; they are not sharded, and "
                "their gradients are not averaged over the ranks: register them before fully_shard (logged once)"
            )


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + rest

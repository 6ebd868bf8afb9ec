"""Loading of optimizer state by the names of parameters: in any order or grouping, also where the optimizer has none yet."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ...tensor.dtensor import DTensor
from ...tensor.local_optimizers import steps_locally
from ...tensor.optimizer_state import elementwise_keys
from ..errors import CheckpointError
from ..state.names import ParameterNames, Path, joined
from ..state.optimizers import OF_RANK, common_hyperparameters, rank_suffix, skips, split_flat
from ..state.trees import placed
from .contents import Contents

_FLAGS = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}  # any class may have
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}  # schedulers add these


class SavedOptimizer:
    """The entries of an optimizer in a checkpoint, of either form that torch's `get_optimizer_state_dict` writes.

    by groups: `state.<parameter>.<key>`, `param_groups.<index>.<key>`, with the names of parameters under the key "params"
    flat: `state.<parameter>.<key>`, `param_groups.<parameter>.<key>`, each a key of one dict
    """

    def __init__(self, path: Path, names: ParameterNames, contents: Contents) -> None:
        """path: of the optimizer in the state.   names: those of its parameters."""
        self.state: dict[str, list[tuple[Path, str]]] = {}  # parameter -> keys below it, and the entry's name
        self.groups: dict[str | int, list[tuple[Path, str]]] = {}  # index of a group, or parameter -> the same
        self.group_of: dict[str, str | int] = {}  # parameter -> key of `groups`
        self.unknown: list[str] = []  # entries that are of no known parameter
        renamed = _renamed_parameters(names, contents)
        known = {*names, *renamed, *_saved_parameters(names, contents)}
        for rest, name in contents.inside(path):
            old = contents.old.get(name)
            has_path = old is None and len(contents.stored.paths.get(name, ())) > 1 and len(rest) > 1
            keys = rest if has_path else split_flat(joined(rest), known)
            is_renamed = old is not None and not old.name.endswith(joined(rest))  # by key_map itself
            if keys:
                self._sort(keys, name, {} if is_renamed else renamed)
            elif len(joined(rest).split(".")) > 1:
                self.unknown.append(name)
        for index, entries in self.groups.items():
            if isinstance(index, str):
                self.group_of[index] = index
            for keys, name in entries:
                if keys[0] == "params":
                    new = (renamed.get(param, param) for param in contents.value(name))
                    self.group_of.update(dict.fromkeys((param for param in new if param is not None), index))

    @property
    def hyperparameters(self) -> set[str]:
        """The names of the hyperparameters of all groups."""
        return {str(keys[0]) for entries in self.groups.values() for keys, _ in entries} - {"params"}

    def _sort(self, keys: Path, name: str, renamed: Mapping[str, str | None]) -> None:
        if len(keys) < (2 if keys[:1] == ("state",) else 3):
            return
        kind, of, rest = keys[0], keys[1], keys[2:]
        param = renamed.get(str(of), of)
        if param is None:
            return
        if kind == "state":
            self.state.setdefault(str(param), []).append((rest, name))
        elif kind == "param_groups":
            self.groups.setdefault(param, []).append((rest, name))


def _saved_parameters(names: ParameterNames, contents: Contents) -> Iterator[str]:
    """The names of parameters that the state or the checkpoint has."""
    yield from names.of_modules
    for key, prefix in names.prefixes.items():
        yield from (prefix + joined(rest) for rest, _ in contents.inside(tuple(key.split("."))))


def _renamed_parameters(names: ParameterNames, contents: Contents) -> dict[str, str | None]:
    """The new names of parameters whose modules' names key_map changes, by the old ones."""
    return {
        prefix + old: None if new is None else prefix + new
        for key, prefix in names.prefixes.items()
        for old, new in contents.renamed_in(key).items()
    }


class _Target(NamedTuple):
    """A parameter whose state is loaded."""

    param: torch.Tensor
    name: str  # in the checkpoint
    is_local: bool  # whether the optimizer steps on the local shard
    on_device: bool  # whether counters are on the parameter's device
    stored_dtype: torch.dtype | None  # of the parameter, if the checkpoint has it


def load_optimizer(optimizer: Optimizer, path: Path, names: ParameterNames, modules: Iterable[str], contents: Contents) -> None:
    """Ask `contents` for the optimizer's state and hyperparameters.

    A parameter's state becomes what the checkpoint has, in the tensors that are there, or in new ones with the placements of
    the parameter. Hyperparameters are those of the saved group that the group's parameters were in.
    modules: the names of the state's modules, under one of which the checkpoint may have the parameters.
    """
    saved = SavedOptimizer(path, names, contents)
    is_other = _is_of_another_class(optimizer, joined(path), saved, contents)
    elementwise = _elementwise(names, saved, contents)
    for index, group in enumerate(optimizer.param_groups):
        loaded = _load_group(group, (*path, "param_groups", index), names, saved, contents)
        if is_other:
            loaded = {key: value for key, value in loaded.items() if key in group}
        hyper = {**group, **loaded}
        for param in group["params"]:
            name = next((name for name in names.of(param) if name in saved.state or name in saved.group_of), names[param])
            if name not in saved.state and name not in saved.group_of:
                contents.missing.append(joined((*path, "state", name)))
            elif not is_other:
                on_device = bool(hyper.get("capturable") or hyper.get("fused"))
                dtype = _stored_dtype(name, modules, contents)
                target = _Target(param, name, steps_locally(type(optimizer)), on_device, dtype)
                entries = [] if skips(optimizer, param) else saved.state.get(name, [])
                state = _state(target, entries, optimizer.state.get(param, {}), elementwise, contents)
                contents.finish.append(partial(_set_state, optimizer, param, state))
        contents.finish.append(partial(group.update, loaded))
    contents.unexpected += saved.unknown
    _load_others(optimizer, path, {*names, *names.of_modules}, modules, saved, contents)


def _is_of_another_class(optimizer: Optimizer, key: str, saved: SavedOptimizer, contents: Contents) -> bool:
    """Whether the saved optimizer and this one each have hyperparameters that the other lacks.

    If only one of them has more, it is of another version of the same class.
    """
    theirs, ours = saved.hyperparameters, {key for group in optimizer.param_groups for key in group}
    lacking, more = sorted(set(optimizer.defaults) - theirs - _FLAGS), sorted(theirs - ours - _FLAGS - _OF_SCHEDULERS)
    if not theirs or not (lacking or more):
        return False
    has, lacks = (", ".join(f"'{name}'" for name in each) for each in (more, lacking))
    if has and lacks:
        contents.other_classes.append(
            f"optimizer '{key}', a {type(optimizer).__name__}, is of another class than the saved one, which has the "
            f"hyperparameters {has}, and has not {lacks}"
        )
    elif has:
        contents.warnings.append(
            f"optimizer '{key}': the checkpoint has the hyperparameters {has}, which it lacks: it gets them"
        )
    else:
        contents.warnings.append(f"optimizer '{key}': the checkpoint lacks its hyperparameters {lacks}: it keeps its own")
    return bool(has and lacks)


def _load_others(
    optimizer: Optimizer, path: Path, known: set[str], modules: Iterable[str], saved: SavedOptimizer, contents: Contents
) -> None:
    """Load state that is no parameter's. That of a parameter in `known` is left: it is frozen, or another optimizer's."""
    table: dict[Any, Any] = optimizer.state
    for key in sorted(saved.state.keys() - known):
        full = (*path, "state", key)
        if key in saved.group_of or any(joined((module, key)) in contents for module in ("", *modules)):
            contents.unexpected.append(joined(full))
        else:
            contents.finish.append(partial(setitem, table, key, contents.tree(full, table.get(key))))


def _stored_dtype(name: str, modules: Iterable[str], contents: Contents) -> torch.dtype | None:
    """The dtype of a parameter in the checkpoint; None if the checkpoint does not have it."""
    tensors = contents.stored.tensors
    return next((tensors[full].dtype for key in modules if (full := joined((key, name))) in tensors), None)


def _set_state(optimizer: Optimizer, param: torch.Tensor, state: dict[str, Any]) -> None:
    optimizer.state.pop(param, None)
    if state:
        optimizer.state[param] = state


def _load_group(
    group: Mapping[str, Any], path: Path, names: ParameterNames, saved: SavedOptimizer, contents: Contents
) -> dict[str, Any]:
    """The saved hyperparameters of a group; none if its parameters come from groups with different ones.

    Parameters that have state, and no group, were those of another rank than the one that wrote the groups.
    """
    own = [name for param in group["params"] for name in names.of(param)]
    sources = {saved.group_of[name]: None for name in own if name in saved.group_of}
    if not sources and path[-1] in saved.groups and any(name in saved.state for name in own):
        sources = {path[-1]: None}
    with contents.at_once():
        found = [
            {keys: contents.value(name) for keys, name in saved.groups[source] if keys[0] != "params"} for source in sources
        ]
    hyper = common_hyperparameters(joined(path), group, found)
    made: dict[str, Any] = {}
    on_device = hyper.get(("capturable",))
    for keys, value in hyper.items():
        if isinstance(value, torch.Tensor):
            current = group.get(str(keys[0]))
            if isinstance(current, torch.Tensor) and current.shape == value.shape:
                contents.finish.append(partial(current.copy_, value))
                value = current
            elif on_device:
                value = value.to(group["params"][0].device)
        made = placed(made, keys, value, group)
    return made


def _elementwise(names: ParameterNames, saved: SavedOptimizer, contents: Contents) -> set[Hashable]:
    """Keys of tensors with one number for each element of the parameter."""
    tensors = contents.stored.tensors
    return elementwise_keys(
        (str(keys[0]), tensors[name].shape, param.shape)
        for param in names.params
        for alias in names.of(param)
        for keys, name in saved.state.get(alias, ())
        if len(keys) == 1 and name in tensors
    )


def _state(
    target: _Target, saved: list[tuple[Path, str]], current: Mapping[str, Any], elementwise: set[Hashable], contents: Contents
) -> dict[str, Any]:
    """The parameter's state, whose tensors are read later."""
    state: dict[str, Any] = {}
    for keys, name in _of_this_rank(target, saved):
        key = joined(keys[:1])
        present = current.get(key) if len(keys) == 1 else None
        if name in contents.stored.objects:
            value = contents.value(name)
        elif len(keys) == 1 and key in elementwise and not OF_RANK.fullmatch(name):
            value = _shaped(target, name, present, contents)
        else:
            value = _other(target, name, present, contents)
        state = placed(state, keys, value, current)
    return state


def _shaped(target: _Target, name: str, present: Any, contents: Contents) -> torch.Tensor:
    """A tensor with one number for each element of the parameter."""
    param, stored = target.param, contents.stored.tensors[name]
    local = param._local_tensor if isinstance(param, DTensor) else param
    if isinstance(present, DTensor) or (isinstance(present, torch.Tensor) and present.shape == local.shape):
        made = present
    else:
        # torch's optimizers give their state the parameter's dtype; state that had another one keeps it.
        follows = param.is_floating_point() and stored.dtype in (target.stored_dtype, param.dtype)
        dtype = param.dtype if follows else stored.dtype
        layout = torch.contiguous_format if target.is_local else torch.preserve_format
        made = torch.empty_like(local.detach(), dtype=dtype, memory_format=layout)
        if isinstance(param, DTensor) and not target.is_local:
            made = DTensor(made, param.spec)
    whole = DTensor(made, param.spec) if isinstance(param, DTensor) and not isinstance(made, DTensor) else made
    contents.read_into(name, whole)
    return made


def _other(target: _Target, name: str, present: Any, contents: Contents) -> torch.Tensor:
    """A counter, or a tensor of another shape, whole on every rank."""
    shape = tuple(contents.stored.tensors[name].shape)
    if isinstance(present, torch.Tensor) and (isinstance(present, DTensor) or tuple(present.shape) == shape):
        contents.read_into(name, present)
        return present
    return contents.fresh(name, target.param.device if shape or target.on_device else "cpu")


def _of_this_rank(target: _Target, saved: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """The saved entries without those of other ranks' shards. Raises CheckpointError if this rank's shard has none of a key."""
    if not (target.is_local and isinstance(target.param, DTensor)):
        return saved
    suffix, found, others = rank_suffix(target.param), [], dict[str, str]()
    for keys, name in saved:
        if match := OF_RANK.fullmatch(joined(keys[:1])):
            if match[2] != suffix:
                others[match[1]] = match[3]
                continue
            keys = (match[1], *keys[1:])
        found.append((keys, name))
    for key in others.keys() - {joined(keys[:1]) for keys, _ in found}:
        raise CheckpointError(
            f"the state '{key}' of parameter '{target.name}' was saved for the shards of {others[key]} ranks, since its values "
            f"depend on where a shard begins; this rank is {suffix[1:]}: load it on {others[key]} ranks"
        )
    return found

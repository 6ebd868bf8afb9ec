"""Loading of optimizer state by the names of parameters: in any order or grouping, also where the optimizer has none yet."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch.optim import Optimizer

from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import overwrite
from ...tensor.optimizers.optimizer_state import elementwise_keys
from ...tensor.optimizers.other_optimizers import steps_locally
from ..disk.errors import CheckpointError
from ..state.names import ParameterNames, Path, joined
from ..state.optimizers import OF_RANK, common_hyperparameters, rank_suffix, skips, split_flat
from ..state.trees import key_of, placed
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


class OptimizerLoader:
    """Asks `contents` for what the checkpoint has of one optimizer: state and hyperparameters.

    A parameter's state becomes what the checkpoint has, in the tensors that are there, or in new ones with the placements of
    the parameter. Hyperparameters are those of the saved group that the group's parameters were in.
    modules: the names of the state's modules, under one of which the checkpoint may have the parameters.
    """

    def __init__(
        self, optimizer: Optimizer, path: Path, names: ParameterNames, modules: Iterable[str], contents: Contents
    ) -> None:
        self._optimizer, self._path, self._names, self._modules, self._contents = optimizer, path, names, modules, contents
        self._steps_locally = steps_locally(type(optimizer))
        self._saved = SavedOptimizer(path, names, contents)
        self._elementwise = self._elementwise_keys()

    def load(self) -> None:
        """Ask for everything."""
        is_other = self._is_of_another_class()
        for index, group in enumerate(self._optimizer.param_groups):
            loaded = self._hyperparameters(group, index)
            if is_other:
                loaded = {key: value for key, value in loaded.items() if key in group}
            hyper = {**group, **loaded}
            for param in group["params"]:
                names = self._names.of(param)
                name = next((each for each in names if each in self._saved.state or each in self._saved.group_of), None)
                for other in [each for each in names if each in self._saved.state and each != name]:  # another name, if tied
                    self._contents.unexpected += (entry for _, entry in self._saved.state[other])
                if name is None:
                    self._contents.missing.append(joined((*self._path, "state", self._names[param])))
                elif not is_other:
                    self._load_state(param, name, on_device=bool(hyper.get("capturable") or hyper.get("fused")))
            self._contents.finish.append(partial(group.update, loaded))
        self._contents.unexpected += self._saved.unknown
        self._load_others()

    def _elementwise_keys(self) -> set[Hashable]:
        """Keys of tensors with one number for each element of the parameter."""
        tensors = self._contents.stored.tensors
        return elementwise_keys(
            (str(keys[0]), tensors[name].shape, param.shape)
            for param in self._names.params
            for alias in self._names.of(param)
            for keys, name in self._saved.state.get(alias, ())
            if len(keys) == 1 and name in tensors
        )

    def _is_of_another_class(self) -> bool:
        """Whether the saved optimizer and this one each have hyperparameters that the other lacks.

        If only one of them has more, it is of another version of the same class.
        """
        theirs, ours = self._saved.hyperparameters, {key for group in self._optimizer.param_groups for key in group}
        lacking, more = sorted(set(self._optimizer.defaults) - theirs - _FLAGS), sorted(theirs - ours - _FLAGS - _OF_SCHEDULERS)
        if not theirs or not (lacking or more):
            return False
        has, lacks = (", ".join(f"'{name}'" for name in each) for each in (more, lacking))
        what = f"optimizer '{joined(self._path)}'"
        if has and lacks:
            self._contents.other_classes.append(
                f"{what}, a {type(self._optimizer).__name__}, is of another class than the saved one, which has the "
                f"hyperparameters {has}, and has not {lacks}"
            )
        elif has:
            self._contents.warnings.append(
                f"{what}: the checkpoint has the hyperparameters {has}, which it lacks: it gets them"
            )
        else:
            self._contents.warnings.append(f"{what}: the checkpoint lacks its hyperparameters {lacks}: it keeps its own")
        return bool(has and lacks)

    def _load_others(self) -> None:
        """Load state that is no parameter's. That of another parameter is left: it is frozen, or another optimizer's."""
        table: dict[Any, Any] = self._optimizer.state
        for key in sorted(self._saved.state.keys() - {*self._names, *self._names.of_modules}):
            full = (*self._path, "state", key)
            if key in self._saved.group_of or any(joined((module, key)) in self._contents for module in ("", *self._modules)):
                self._contents.unexpected.append(joined(full))
            else:
                own = key_of(table, key)
                self._contents.finish.append(partial(setitem, table, own, self._contents.tree(full, table.get(own))))

    # ------------------------------------------------------------------ hyperparameters

    def _hyperparameters(self, group: Mapping[str, Any], index: int) -> dict[str, Any]:
        """The saved hyperparameters of a group; none if its parameters come from groups with different ones.

        Parameters that have state, and no group, were those of another rank than the one that wrote the groups.
        """
        own = [name for param in group["params"] for name in self._names.of(param)]
        sources = dict.fromkeys(self._saved.group_of[name] for name in own if name in self._saved.group_of)
        if not sources and index in self._saved.groups and any(name in self._saved.state for name in own):
            sources = {index: None}
        with self._contents.at_once():
            found = [
                {keys: self._contents.value(name) for keys, name in self._saved.groups[source] if keys[0] != "params"}
                for source in sources
            ]
        hyper = common_hyperparameters(joined((*self._path, "param_groups", index)), group, found)
        made: dict[str, Any] = {}
        on_device = hyper.get(("capturable",))
        for keys, value in hyper.items():
            if isinstance(value, torch.Tensor):
                current = group.get(str(keys[0]))
                if isinstance(current, torch.Tensor) and current.shape == value.shape:
                    self._contents.finish.append(partial(overwrite, current, value))
                    value = current
                elif on_device:
                    value = value.to(group["params"][0].device)
            made = placed(made, keys, value, group)
        return made

    # ------------------------------------------------------------------ state of parameters

    def _load_state(self, param: torch.Tensor, name: str, *, on_device: bool) -> None:
        """Ask for a parameter's state.   name: in the checkpoint.   on_device: whether counters are on its device."""
        contents, state, current = self._contents, dict[str, Any](), self._optimizer.state.get(param, {})
        for keys, entry in self._of_this_rank(param, name):
            key = joined(keys[:1])
            present = current.get(key) if len(keys) == 1 else None
            if entry in contents.stored.objects:
                value = contents.value(entry)
            elif len(keys) == 1 and key in self._elementwise and not OF_RANK.fullmatch(entry):
                value = self._shaped(param, name, entry, present)
            else:
                value = self._other(param, entry, present, on_device=on_device)
            state = placed(state, keys, value, current)
        contents.finish.append(partial(_set_state, self._optimizer, param, state))

    def _of_this_rank(self, param: torch.Tensor, name: str) -> list[tuple[Path, str]]:
        """A parameter's saved entries without those of other ranks' shards; none if the optimizer keeps no state of it here.

        Raises CheckpointError if this rank's shard has none of a key.
        """
        saved = [] if skips(self._optimizer, param) else self._saved.state.get(name, [])
        if not (self._steps_locally and isinstance(param, DTensor)):
            return saved
        suffix, found, others = rank_suffix(param), [], dict[str, str]()
        for keys, entry in saved:
            if match := OF_RANK.fullmatch(joined(keys[:1])):
                if match[2] != suffix:
                    others[match[1]] = match[3]
                    continue
                keys = (match[1], *keys[1:])
            found.append((keys, entry))
        for key in others.keys() - {joined(keys[:1]) for keys, _ in found}:
            raise CheckpointError(
                f"the state '{key}' of parameter '{name}' was saved for the shards of {others[key]} ranks, since its values "
                f"depend on where a shard begins; this rank is {suffix[1:]}: load it on {others[key]} ranks"
            )
        return found

    def _shaped(self, param: torch.Tensor, name: str, entry: str, present: Any) -> torch.Tensor:
        """A tensor with one number for each element of the parameter."""
        local = param._local_tensor if isinstance(param, DTensor) else param
        if isinstance(present, DTensor) or (isinstance(present, torch.Tensor) and present.shape == local.shape):
            made = present
        else:
            # torch's optimizers give their state the parameter's dtype; state that had another one keeps it.
            tensors = self._contents.stored.tensors
            of_param = (tensors[full].dtype for key in self._modules if (full := joined((key, name))) in tensors)
            follows = param.is_floating_point() and tensors[entry].dtype in (next(of_param, None), param.dtype)
            dtype = param.dtype if follows else tensors[entry].dtype
            layout = torch.contiguous_format if self._steps_locally else torch.preserve_format
            made = torch.empty_like(local.detach(), dtype=dtype, memory_format=layout)
            if isinstance(param, DTensor) and not self._steps_locally:
                made = DTensor(made, param.spec)
        whole = DTensor(made, param.spec) if isinstance(param, DTensor) and not isinstance(made, DTensor) else made
        self._contents.read_into(entry, whole)
        return made

    def _other(self, param: torch.Tensor, entry: str, present: Any, *, on_device: bool) -> torch.Tensor:
        """A counter, or a tensor of another shape, whole on every rank."""
        shape = tuple(self._contents.stored.tensors[entry].shape)
        if isinstance(present, torch.Tensor) and (isinstance(present, DTensor) or tuple(present.shape) == shape):
            self._contents.read_into(entry, present)
            return present
        return self._contents.fresh(entry, param.device if shape or on_device else "cpu")


def _set_state(optimizer: Optimizer, param: torch.Tensor, state: dict[str, Any]) -> None:
    optimizer.state.pop(param, None)
    if state:
        optimizer.state[param] = state

"""The user's state as entries of a checkpoint: what each value is called, and which tensors and objects it consists of.

| value                                   | entries under its key                                                          |
|-----------------------------------------|--------------------------------------------------------------------------------|
| module                                  | its `state_dict()` by the model's full names: `model.blocks.0.weight`          |
| module under the key ""                 | the same without a prefix, as torchtitan saves models                          |
| optimizer                               | `optimizer.state.<parameter>.exp_avg`, `optimizer.param_groups.0.lr`           |
| with `state_dict` and `load_state_dict` | its `state_dict()`: `scheduler.last_epoch`                                     |
| dict, list                              | those of its values, by keys and indices, if it holds tensors or containers    |
| dict with other keys than strings       | an object, unless there are tensors in it                                      |
| tensor                                  | itself                                                                         |
| `PerRank`                               | an object for each rank: `position.@rank3of8`                                  |
| anything else                           | an object: `objects.py`                                                        |

The names and paths are those that torch.distributed.checkpoint makes of torch's `get_state_dict` (its `_nested_dict.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm import Communicator, world
from ...tensor.dtensor.dtensor import DTensor
from ..disk.errors import CheckpointError, agreed
from ..formats.geometry import memory_of
from ..formats.stored import checked_keys, checked_name
from .names import ParameterNames, Path, clean_state, joined
from .objects import encode
from .optimizers import OF_RANK, NamesOfRank, Whole, optimizer_state
from .stateful import PerRank, has_state, has_to_agree, key_of_rank, mark_differing
from .trees import flattened, has_inside


class Entry(NamedTuple):
    """One name of a checkpoint: a tensor, or the bytes that torch.save has made of an object.

    is_shared: whether it has to be the same on all ranks that have it: a plain value, or a plain tensor of integers that is no
    module's.
    names: of `value`, if it is a list of names, of which ranks have different ones: what is saved are those of all ranks.
    """

    name: str
    value: torch.Tensor | bytes
    path: Path
    is_shared: bool = False
    names: tuple[str, ...] | None = None


def entries(state: Mapping[str, Any]) -> list[Entry]:
    """The entries of a state as this rank has it. No communication.

    Raises CheckpointError for an object that does not load with `weights_only=True`, for a name that two values have, for a
    tensor whose memory is not known, and for a parameter of an optimizer that no module has.
    """
    modules, found = modules_of(state), dict[str, Entry]()
    tree = _tree(state, (), modules)
    if isinstance(bare := tree.get(""), Mapping):  # as torchtitan saves models, without a key of their own
        if both := bare.keys() & tree.keys():
            raise CheckpointError(f"two values of the state have the name '{both.pop()}'; rename one of the keys")
        tree = {**bare, **{key: value for key, value in tree.items() if key}}
    for path, value in flattened(tree, ()):
        if not path:  # an empty state
            break
        if isinstance(value, PerRank):
            path, value = (*path, key_of_rank(world().rank, world().size)), Whole(value.state())
        name = joined(path)
        if name in found:
            raise CheckpointError(f"two values of the state have the name '{name}'; rename one of the keys")
        checked_name(name), checked_keys(path)  # `load` checks the same
        names = tuple(value.value) if isinstance(value, NamesOfRank) else None
        found[name] = Entry(name, _stored_form(name, value), path, _is_shared(name, value), names)
    return list(found.values())


def with_all_names(found: Sequence[Entry], comm: Communicator) -> Sequence[Entry]:
    """The entries, with all ranks' names in lists of which a rank has some, such as an optimizer's of one pipeline stage.

    Collective. The names of the first rank come first.
    """
    mine = {entry.name: entry.names for entry in found if entry.names is not None}
    if (everyone := comm.differing(mine)) is None:
        return found
    merged = {name: list(dict.fromkeys(chain.from_iterable(each.get(name, ()) for each in everyone))) for name in mine}
    return [entry._replace(value=encode(entry.name, merged[entry.name])) if entry.name in mine else entry for entry in found]


def modules_of(state: Mapping[str, Any]) -> dict[str, nn.Module]:
    """The modules of a state, by their names in checkpoints."""
    return {joined(path): value for path, value in members((), state) if isinstance(value, nn.Module)}


def optimizers_of(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    """The optimizers of a state, by their names in checkpoints."""
    return {joined(path): value for path, value in members((), state) if isinstance(value, Optimizer)}


def members(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The values in a state that have a `state_dict`, such as modules and optimizers, with their paths."""
    if has_state(value):
        yield path, value
    elif has_inside(value):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from members((*path, key if isinstance(value, list) else str(key)), item)


def _tree(value: Any, path: Path, modules: Mapping[str, nn.Module]) -> Any:
    """The state with the state dicts of its members in their places."""
    if isinstance(value, nn.Module):
        mark_differing((state := clean_state(value)).values())
        return state
    if isinstance(value, Optimizer):
        packed = optimizer_state(value, ParameterNames(joined(path), value, modules))
        for group in packed["param_groups"]:
            group["params"] = NamesOfRank(group["params"])
        return packed
    if has_state(value):
        return value.state_dict()
    if not has_inside(value):
        return value
    if isinstance(value, Mapping):
        return {key: _tree(item, (*path, str(key)), modules) for key, item in value.items()}
    return [_tree(item, (*path, index), modules) for index, item in enumerate(value)]


def _is_shared(name: str, value: Any) -> bool:
    if isinstance(value, (DTensor, Whole)):
        return False
    # A local optimizer's quantised state is a shard of each rank, under a name of its own.
    return not isinstance(value, torch.Tensor) or (has_to_agree(value) and OF_RANK.fullmatch(name) is None)


def _stored_form(name: str, value: Any) -> torch.Tensor | bytes:
    if isinstance(value, torch.Tensor):
        # Cost: detaching a DTensor goes through its dispatch; what writes it takes its local tensor, detached.
        return memory_of(name, value if isinstance(value, DTensor) else value.detach())
    return encode(name, value.value if isinstance(value, Whole) else value)


Folder = str | os.PathLike[str]

_FOLDER, _STATE = ("folder", "checkpoint_id"), ("state", "state_dict")


def folder_and_state(call: str, given: Sequence[object], named: Mapping[str, object]) -> tuple[Folder, dict[str, Any]]:
    """The folder and the state of a call: positional arguments are told apart by their types. Collective.

    Raises CheckpointError on every rank, with a TypeError as its reason, for other arguments on any of them.
    """
    with agreed(world().comm):
        folders: list[object] = [value for value in given if isinstance(value, (str, os.PathLike))]
        states: list[object] = [value for value in given if isinstance(value, Mapping)]
        folders += [named[name] for name in _FOLDER if named.get(name) is not None]
        states += [named[name] for name in _STATE if named.get(name) is not None]
        others = [type(value).__name__ for value in given if not isinstance(value, (str, os.PathLike, Mapping))]
        others += [f"{name}=" for name, value in named.items() if name not in (*_FOLDER, *_STATE) and value is not None]
        if len(folders) != 1 or len(states) != 1 or others:
            raise TypeError(
                f"{call}: expected a folder and a state, as in {call}('runs/a/step-100', state) or {call}(state, "
                f"checkpoint_id='runs/a/step-100'); found {len(folders)} folders, {len(states)} states"
                + (f", and {', '.join(others)}" if others else "")
            )
        (folder,), (state,) = folders, states
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"{call}: expected the folder as a string or path, found a {type(folder).__name__}: {folder!r}")
        if not isinstance(state, Mapping):
            raise TypeError(f"{call}: expected the state as a dict, found a {type(state).__name__}: as in {{'model': model}}")
    return folder, state  # type: ignore[return-value]

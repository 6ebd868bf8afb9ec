"""What saves and loads need of models: their tensors by name, memory for those on the meta device.

A tensor that has several names (tied weights) is stored once. The name is the one that `transformers` keeps: its modules'
`_tied_weights_keys` are the names, or patterns of names, that are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm import Communicator
from ...fsdp.schedule.module_apply import buffers_on_meta
from ..disk.errors import CheckpointError, first_of, listed
from .dtypes import Rounded, narrows
from .names import LoadedKeys, clean_state, cleaner


class NamedTensor(NamedTuple):
    """A tensor of a model.   aliases: its other names."""

    name: str
    tensor: torch.Tensor
    aliases: tuple[str, ...]


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """The tensors of the model's state dict, each once, in its order.

    Values that are not tensors, such as extra state, are left out.
    """
    clean, state = cleaner(model), clean_state(model, keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    patterns = [
        re.compile(f"{clean(prefix)}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    made = []
    for same in names.values():
        kept = [name for name in same if not any(pattern.search(name) for pattern in patterns)]
        name = kept[0] if kept else max(same)
        made.append(NamedTensor(name, tensors[name], tuple(other for other in same if other != name)))
    return made


class Match(NamedTuple):
    """What is loaded.

    found: the names under which tensors are given, by their names in the model.
    further: names in the model, and further names of the same tensor that are given as well.
    """

    found: dict[str, str]
    keys: LoadedKeys
    further: list[tuple[str, str]]
    rounded: list[Rounded]


def match(
    model: Iterable[NamedTensor],
    others: Iterable[str],
    given: Mapping[str, Any],
    what: str,
    comm: Communicator,
    *,
    strict: bool,
) -> Match:
    """Find the model's tensors among what is given, by the first of their names that is there. Collective.

    others: names of the model's values that are no tensors.   given: what may be loaded, by name; what has a dtype of torch,
    and a shape, counts as a tensor.   what: the name of `given` in messages.
    Raises CheckpointError for tensors of other shapes and, if strict, for names that one side lacks. What the models of other
    ranks have, such as other stages of a pipeline, is not unexpected.
    """
    wrong, names = list[str](), set(others)
    missing = [name for name in others if name not in given]
    made = Match({}, LoadedKeys(missing, []), [], [])
    for name, tensor, aliases in model:
        names.update((name, *aliases))
        sources = [each for each in (name, *aliases) if each in given]
        has = [_described(given[each]) for each in sources]
        shape = str(tuple(tensor.shape))
        wrong += [f"'{each}': expected shape {shape}, found {of}" for each, of in zip(sources, has, strict=True) if of != shape]
        if not sources:
            missing.append(name)
        elif has == [shape] * len(has):
            made.found[name] = sources[0]
            made.further.extend((name, each) for each in sources[1:])
            if narrows(stored := given[sources[0]].dtype, tensor.dtype):
                made.rounded.append(Rounded(name, stored, tensor.dtype))
    unexpected = made.keys.unexpected_keys
    elsewhere = chain.from_iterable(comm.differing(sorted(names)) or ())
    unexpected += sorted(given.keys() - names.union(elsewhere))
    problems = [first_of(wrong, "; ")] if wrong else []
    problems += [f"missing: {listed(missing)}"] if strict and missing else []
    problems += [f"unexpected: {listed(unexpected)}"] if strict and unexpected else []
    if problems:
        raise CheckpointError(
            f"{what} does not fit the model: {'. '.join(problems)}. strict=False leaves out what one side lacks"
        )
    return made


def _described(value: Any) -> str:
    """The shape of a tensor, or the type of another value."""
    return str(tuple(value.shape)) if isinstance(getattr(value, "dtype", None), torch.dtype) else f"a {type(value).__name__}"


def take_back(model: nn.Module, written: Iterable[NamedTensor]) -> None:
    """Load into the model those of its `named_tensors` that hooks of its state dict made. Call it once they are written."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if made := {name: tensor for name, tensor, _ in written if id(tensor) not in own}:
        clean = cleaner(model)
        model.load_state_dict({raw: made[clean(raw)] for raw in model.state_dict() if clean(raw) in made}, strict=False)


def materialise(module: nn.Module, device: torch.device, optimizers: Iterable[Optimizer] = ()) -> None:
    """Give memory to what is on the meta device, and the new parameters to the optimizers; the rest stays as it is.

    Tied tensors stay tied. Models of transformers also get the values of buffers that no checkpoint has.
    Collective if the module is sharded; for a failure on one rank to reach all, call it in `agreed(comm)`.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return
    before = [
        (table, key, tensor)
        for owner in module.modules()
        for table in (owner._parameters, owner._buffers)
        for key, tensor in table.items()
        if tensor is not None
    ]
    without_values = dict.fromkeys(owner for owner, _ in buffers_on_meta(module.modules()))
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    made: dict[torch.Tensor, Any] = {}
    for table, key, tensor in before:
        table[key] = made.setdefault(tensor, table[key])  # `_apply` makes a tensor for each name of a tied one
    initialise: Any = getattr(module, "_init_weights", None)
    for owner in without_values if initialise is not None else ():
        initialise(owner)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [made.get(param, param) for param in group["params"]]
        for param in [param for param in optimizer.state if param in made]:
            optimizer.state[made[param]] = optimizer.state.pop(param)

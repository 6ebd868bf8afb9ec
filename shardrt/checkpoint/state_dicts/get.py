"""State dicts of models and optimizers by full names, sharded or full, as torch's functions of these names return them.

Full tensors are gathered one at a time: a rank that does not keep them needs memory for the largest only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm import Communicator, world
from ...tensor.dtensor import DTensor
from ...tensor.local_optimizers import steps_locally
from ...tensor.optimizer_state import shard_optimizer_state
from ..state.names import ParameterNames, cleaner
from ..state.optimizers import OF_RANK, Whole, optimizer_state
from .options import StateDictOptions

Optimizers = Optimizer | Iterable[Optimizer]


def get_model_state_dict(
    model: nn.Module, *, submodules: Iterable[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The model's state dict by its names in the whole model, without what `torch.compile` and the like add. Collective.

    submodules: return what is in these modules only.   options: `StateDictOptions`, or torch's.
    Returns sharded tensors that share the model's memory. With full_state_dict or cpu_offload everything is a copy: neither
    training nor a change of extra state reaches it.
    Cost: with full_state_dict, an all-gather for each sharded tensor, tied ones once. The copies: on one rank, and of tensors
    that are on the host already, they take as much memory again.
    """
    chosen, clean = StateDictOptions.of(options), cleaner(model)
    state = {clean(name): value for name, value in model.state_dict(keep_vars=True).items()}
    if chosen.ignore_frozen_params:
        frozen = {clean(name) for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    if submodules is not None:
        state = dict(_inside(model, set(submodules), state, keep_prefixes=chosen.keep_submodule_prefixes))
    return _collected(state, chosen)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: Iterable[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The optimizers' state by the names of their parameters in the model. Collective.

    submodules: change nothing, as in torch's function.
    Returns {"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [{"lr": 0.1, ..., "params": [name, ...]}]}, or, with
    flatten_optimizer_state_dict, one flat dict. The state is what there is: unlike torch's function, no step makes it.
    options, and what is a copy: as for `get_model_state_dict`.
    Raises: CheckpointError for a parameter that is not the model's; RuntimeError, on every rank, for full_state_dict with
    state of a local optimizer (`shardrt.register_local_optimizer`) that depends on where shards begin.
    """
    chosen, listed = StateDictOptions.of(options), as_list(optimizers)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, optimizer in enumerate(listed):
        packed = _state_by_name(optimizer, ParameterNames(str(index), optimizer, {"": model}), full=chosen.full_state_dict)
        merged["state"].update(packed["state"])
        merged["param_groups"] += packed["param_groups"]
    return _collected(flat_form(merged) if chosen.flatten_optimizer_state_dict else merged, chosen)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: Iterable[nn.Module] | None = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`get_model_state_dict`, which `submodules` concerns, and `get_optimizer_state_dict`. Collective."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


def full_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """`optimizer.state_dict()` as a single process has it: full tensors, on the host. Collective.

    keep: whether this rank gets it. The others get an empty dict, and need memory for the largest tensor only.
    Any number of ranks (`load_full_optimizer_state`), or a single process, can load the result.
    Raises RuntimeError, on every rank, for state of a local optimizer that depends on where shards begin.
    """
    packed = _state_by_name(optimizer, ParameterNames("", optimizer, {"": numbered(optimizer)}), full=True)
    by_number = {int(number): values for number, values in packed["state"].items()}
    groups = [{**group, "params": [int(number) for number in group["params"]]} for group in packed["param_groups"]]
    state = {**optimizer.state_dict(), "state": by_number, "param_groups": groups}
    return _copied(state, full=True, offload=True, keep=keep)


def numbered(optimizer: Optimizer) -> nn.Module:
    """A module with the optimizer's parameters, whose names are their numbers in its own state dict."""
    holder = nn.Module()
    params = (param for group in optimizer.param_groups for param in group["params"])
    holder._parameters.update((str(number), param) for number, param in enumerate(params))
    return holder


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """One or several optimizers as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def flat_form(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as one dict, in which each parameter has the hyperparameters of its group."""
    flat: dict[str, Any] = {}
    for name, values in state["state"].items():
        flat.update((f"state.{name}.{key}", value) for key, value in _flat_keys(values))
    for group in state["param_groups"]:
        for name in group["params"]:
            flat.update((f"param_groups.{name}.{key}", value) for key, value in group.items() if key != "params")
    return flat


def _flat_keys(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", each) for inner, each in _flat_keys(value))
        else:
            yield str(key), value


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The nested dicts, lists and tuples with their leaves changed."""
    if isinstance(tree, Mapping):
        return {key: mapped(value, change) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(mapped(value, change) for value in tree)
    return change(tree)


def _inside(
    model: nn.Module, submodules: set[nn.Module], state: Mapping[str, Any], *, keep_prefixes: bool
) -> Iterator[tuple[str, Any]]:
    clean = cleaner(model)
    for prefix in (f"{clean(name)}." for name, module in model.named_modules() if module in submodules):
        for name, value in state.items():
            if name.startswith(prefix):
                yield name if keep_prefixes else name.removeprefix(prefix), value


def _collected(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """The state with tensors as the options want them. Collective if they are to be full."""
    full, offload = options.full_state_dict, options.cpu_offload
    if not (full or offload):
        return dict(mapped(state, _detached))
    return _copied(state, full=full, offload=offload, keep=not (full and offload) or world().rank == 0)


@torch.no_grad()
def _copied(state: dict[str, Any], *, full: bool, offload: bool, keep: bool) -> dict[str, Any]:
    """Copies of all values on the ranks that keep them, an empty dict on the others. Collective if tensors are to be full."""
    seen: dict[int, Any] = {}  # tied tensors stay tied

    def copy_of(value: Any) -> Any:
        key = id(value)  # the state keeps it alive
        if key not in seen:
            made = copied(value.value if isinstance(value, Whole) else value, full=full, offload=offload)
            seen[key] = made if keep else None
        return seen[key]

    collected: dict[str, Any] = mapped(state, copy_of)
    return collected if keep else {}


def _detached(value: Any) -> Any:
    if isinstance(value, Whole):
        value = value.value
    return value.detach() if isinstance(value, torch.Tensor) else value


# ---------------------------------------------------------------------- optimizers


def _state_by_name(optimizer: Optimizer, names: ParameterNames, *, full: bool) -> dict[str, Any]:
    """The state of one optimizer, sharded; with `full`, all of it has a full form. Collective for a local optimizer."""
    local = steps_locally(type(optimizer))
    if not local:
        shard_optimizer_state(optimizer)
    packed = optimizer_state(optimizer, names)
    if local and full:
        packed["state"] = _completed(packed["state"], names, world().comm)
    return packed


def _completed(state: Mapping[str, Any], names: ParameterNames, comm: Communicator) -> dict[str, Any]:
    """The state with that of parameters of which this rank has no elements: its optimizer skips them. Collective."""
    mine = {
        name: {key: value.dtype if isinstance(value, DTensor) else value for key, value in values.items()}
        for name, values in state.items()
    }
    everyone: dict[str, dict[str, Any]] = {}
    for theirs in comm.exchange(mine):
        for name, values in theirs.items():
            everyone.setdefault(name, {}).update(values)
    params = {names[param]: param for param in names.params}
    for name, values in everyone.items():
        if bound := [key for key in values if OF_RANK.fullmatch(str(key))]:
            full_name = getattr(params[name], "full_name", name)
            raise RuntimeError(
                f"the state '{bound[0]}' of parameter '{full_name}' depends on where the shards begin, so it has no full form "
                f"(rank {comm.rank}): save it with shardrt.checkpoint.save"
            )
    return {name: {**_without_elements(params[name], values), **state.get(name, {})} for name, values in everyone.items()}


def _without_elements(param: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter on a rank that has no elements of it.   values: those of other ranks, or their dtypes."""
    if not isinstance(param, DTensor):
        return dict(values)
    return {
        key: DTensor(torch.zeros_like(param._local_tensor, dtype=value), param.spec)
        if isinstance(value, torch.dtype)
        else value
        for key, value in values.items()
    }


def copied(value: Any, *, full: bool, offload: bool) -> Any:
    """A copy of one value. Collective for a sharded tensor that is to be full.

    Cost: a full tensor that was just gathered, or moved to the host, is not copied again.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    found = value.full_tensor() if full and isinstance(value, DTensor) else value
    made = found.detach().cpu() if offload else found.detach()
    return _clone(made) if _addresses(made) & _addresses(value) else made


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a tensor subclass consists of, by their attributes; none for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return {} if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}


def _addresses(tensor: torch.Tensor) -> set[int]:
    """Where the tensor's memory begins."""
    if isinstance(tensor, DTensor):
        return _addresses(tensor._local_tensor)
    if parts := _parts(tensor):
        return set[int]().union(*map(_addresses, parts.values()))
    return {tensor.untyped_storage().data_ptr()}


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. That of a tensor subclass is made of its parts: not every subclass has an operation `clone`."""
    if isinstance(tensor, DTensor):
        return DTensor(_clone(tensor._local_tensor), tensor.spec)
    if not (parts := _parts(tensor)):
        return tensor.clone()
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        {name: _clone(part) for name, part in parts.items()}, context, tensor.shape, tensor.stride()
    )
    return made

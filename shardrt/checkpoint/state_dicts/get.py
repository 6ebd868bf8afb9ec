"""State dicts of models and optimizers by full names, sharded or full, as torch's functions of these names return them.

Full tensors are gathered one at a time: a rank that does not keep them needs memory for the largest only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm import world
from ...comm.core.calls import about
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ..disk.errors import CheckpointError
from ..formats.geometry import inner_tensors
from ..state.fresh import fresh_state, is_fresh, mark_fresh
from ..state.names import ParameterNames, clean_state, cleaner
from ..state.optimizers import Whole, flat_form, numbered, state_by_name
from ..state.stateful import mark_differing
from ..state.trees import mapped

Optimizers = Optimizer | Iterable[Optimizer]


@outside_inference_mode()
def get_model_state_dict(
    model: nn.Module, *, submodules: Iterable[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The model's state dict by its names in the whole model, without what `torch.compile` and the like add. Collective.

    submodules: return what is in these modules only.   options: `StateDictOptions`, or torch's.
    Returns sharded tensors that share the model's memory. With full_state_dict or cpu_offload everything is a copy: neither
    training nor a change of extra state reaches it.
    Cost: with full_state_dict, an all-gather for each sharded tensor, tied ones once. Copies take as much memory again where
    nothing is gathered or moved: on one rank, and of tensors that are on the host already.
    """
    chosen, clean = StateDictOptions.of(options), cleaner(model)
    state = clean_state(model, keep_vars=True)
    if chosen.ignore_frozen_params:
        frozen = {clean(name) for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    if submodules is not None:
        state = dict(_inside(model, set(submodules), state, keep_prefixes=chosen.keep_submodule_prefixes))
    collected = _collected(state, chosen)
    mark_differing(collected.values())
    return collected


@outside_inference_mode()
def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: Iterable[nn.Module] | None = None, options: Any = None
) -> dict[str, Any]:
    """The optimizers' state by the names of their parameters in the model. Collective.

    submodules: change nothing, as in torch's function.
    Returns {"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [{"lr": 0.1, ..., "params": [name, ...]}]}, or, with
    flatten_optimizer_state_dict, one flat dict. For one of torch's optimizers without state, as after a start, the dict has the
    state with which its first step begins, for `load` to read into: no step makes it, and the optimizer itself stays without
    until `set_optimizer_state_dict`. Of other classes, and of frozen parameters, the state is what there is.
    options, and what is a copy: as for `get_model_state_dict`.
    Raises: CheckpointError for a parameter that is not the model's, or that two of the optimizers have; RuntimeError, on every
    rank, for full_state_dict with state of a local optimizer (`shardrt.register_local_optimizer`) that depends on where shards
    begin.
    """
    chosen, listed = StateDictOptions.of(options), as_list(optimizers)
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, optimizer in enumerate(listed):
        names = ParameterNames(str(index), optimizer, {"": model})
        packed = state_by_name(optimizer, names, full=chosen.full_state_dict)
        if twice := {name for group in merged["param_groups"] for name in group["params"]} & set(names):
            raise CheckpointError(
                f"parameter '{min(twice)}' is in optimizer {index} and in an earlier one: one of its states would be lost; get "
                "the state of each optimizer for itself"
            )
        merged["state"].update(packed["state"] or {names[param]: own for param, own in fresh_state(optimizer).items()})
        merged["param_groups"] += packed["param_groups"]
    return _collected(flat_form(merged) if chosen.flatten_optimizer_state_dict else merged, chosen)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: Iterable[nn.Module] | None = None, options: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of `get_model_state_dict`, for which `submodules` counts, and `get_optimizer_state_dict`. Collective."""
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


@outside_inference_mode()
def full_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """`optimizer.state_dict()` as a single process has it: full tensors, on the host. Collective.

    keep: whether this rank gets it. The others get an empty dict, and need memory for the largest tensor only.
    Any number of ranks (`load_full_optimizer_state`), or a single process, can load the result.
    Raises RuntimeError, on every rank, for state of a local optimizer that depends on where shards begin.
    """
    names = ParameterNames("", optimizer, {"": numbered(optimizer)})
    packed = state_by_name(optimizer, names, full=True)
    numbers = set(names)
    by_number = {int(name) if name in numbers else name: values for name, values in packed["state"].items()}
    groups = [{**group, "params": [int(number) for number in group["params"]]} for group in packed["param_groups"]]
    state = {**optimizer.state_dict(), "state": by_number, "param_groups": groups}
    return _copied(state, full=True, offload=True, keep=keep)


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """One or several optimizers as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


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

    def collect(name: str, tree: Any) -> Any:
        if isinstance(tree, Mapping):
            return {key: collect(f"{name}.{key}" if name else str(key), value) for key, value in tree.items()}
        with about(name):  # ranks that have the entries in another order are told so
            return mapped(tree, copy_of)

    collected: dict[str, Any] = collect("", state)
    return collected if keep else {}


def _detached(value: Any) -> Any:
    if isinstance(value, Whole):
        value = value.value
    if not isinstance(value, torch.Tensor):
        return value
    made = value.detach()
    if is_fresh(value):
        mark_fresh(made)
    return made


def copied(value: Any, *, full: bool, offload: bool) -> Any:
    """A copy of one value. Collective for a sharded tensor that is to be full.

    Cost: a full tensor that was just gathered, or moved to the host, is not copied again.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    found = value.full_tensor() if full and isinstance(value, DTensor) else value
    made = found.detach().cpu() if offload else found.detach()
    return _clone(made) if _addresses(made) & _addresses(value) else made


def _addresses(tensor: torch.Tensor) -> set[int]:
    """The addresses of the storages that the tensor consists of."""
    if isinstance(tensor, DTensor):
        return _addresses(tensor._local_tensor)
    if inner := inner_tensors(tensor):
        return set[int]().union(*map(_addresses, inner.values()))
    return {tensor.untyped_storage().data_ptr()}


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy. That of a tensor subclass is made of its inner tensors: not every subclass has an operation `clone`."""
    if isinstance(tensor, DTensor):
        return DTensor(_clone(tensor._local_tensor), tensor.spec)
    if not (inner := inner_tensors(tensor)):
        return tensor.clone()
    _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        {name: _clone(each) for name, each in inner.items()}, context, tensor.shape, tensor.stride()
    )
    return made


_FQN_MODIFIERS = "_fqn_modifiers"


@dataclass(frozen=True, slots=True)
class StateDictOptions:
    """What `get_state_dict` returns and `set_state_dict` takes, with torch's names and defaults.

    full_state_dict: full tensors, as a single process has them, in the place of sharded ones; copies.
    cpu_offload: copies of the tensors, on the host; with full_state_dict, rank 0 alone gets them, all others an empty dict.
    ignore_frozen_params: leave out parameters that do not require a gradient.
    keep_submodule_prefixes: with `submodules`, names in the whole model; False: names in the submodule.
    strict: raise for names that the model, the optimizer or the state dict lacks.
    broadcast_from_rank0: rank 0 gives the state dict, and sends each rank one full tensor at a time; needs full_state_dict.
    flatten_optimizer_state_dict: one dict with keys such as "state.out.weight.exp_avg" and "param_groups.out.weight.lr".

    Raises ValueError for broadcast_from_rank0 without full_state_dict.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError("StateDictOptions(broadcast_from_rank0=True): expected full_state_dict=True as well")

    @classmethod
    def of(cls, options: Any) -> StateDictOptions:
        """The options as a `StateDictOptions`; torch's have the same attributes. None: the defaults.

        Raises ValueError for torch's dsd_fqn_modifiers, which changes names.
        """
        if options is None or isinstance(options, cls):
            return options or cls()
        if (modifiers := getattr(options, "dsd_fqn_modifiers", _FQN_MODIFIERS)) != _FQN_MODIFIERS:
            raise ValueError(f"dsd_fqn_modifiers='{modifiers}': expected torch's default, '{_FQN_MODIFIERS}'; rename the keys")
        given: dict[str, Any] = {field.name: getattr(options, field.name, field.default) for field in fields(cls)}
        return cls(**given)

"""`state_dict()` and `load_state_dict()` of sharded modules, and other packages' helpers for checkpoints.

Loading that would have no effect, or would register plain parameters, is an error. Where `assign=True` has loaded a tied
parameter once for each of its names, one of these parameters is registered under all names.

The helpers are found in the call stack. Functions of `torch.distributed.checkpoint.state_dict` (`get_model_state_dict`,
`set_optimizer_state_dict` and so on) pass tensors of classes they do not know through unchanged. Sharded state dicts therefore
work in both directions, and whole ones can be loaded if every rank has them. Two options cannot work and raise an error that
names the function of `shardrt.checkpoint` which takes them: `full_state_dict=True` when getting, which would return sharded
tensors, and `broadcast_from_rank0=True`, which needs a process group.
`save_pretrained` of Hugging Face models writes what `state_dict()` returns, and needs whole tensors: an error says what
gathers them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...tensor.dtensor.dtensor import DTensor
from ...torch_internals import state_dict_helper
from ..params.param import ShardedParam, same_memory
from .param_group import ParamGroup


def hook_state_dicts(params: Iterable[ShardedParam], group: ParamGroup) -> None:
    """Have `state_dict()` and `load_state_dict()` of modules that hold these parameters of `group` see the shards."""
    modules = {owner.module for param in params for owner in param.owners}
    for holder in [module for module in modules if module is not None]:
        # Partials, not closures: a deepcopy of the module finds the group in them.
        holder.register_state_dict_pre_hook(functools.partial(_before_save, group))
        holder.register_load_state_dict_pre_hook(functools.partial(_before_load, group))
        holder.register_load_state_dict_post_hook(functools.partial(_after_load, group))


def _before_save(group: ParamGroup, *_: object) -> None:
    check_not_pretrained(group.root.name, group.mesh.rank, sys._getframe(1))
    group.reshard_and_repair()


def _before_load(
    group: ParamGroup, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    assign = metadata.get("assign_to_params_buffers", False)
    _check_load(group, module, state_dict, prefix, assign=assign)
    group.reshard_and_repair()
    for param in group.params if not assign else ():
        if param.outer is not None:
            _shard_loaded(param, module, state_dict, prefix)


def _after_load(group: ParamGroup, *_: object) -> None:
    """Tie again what `assign=True` has untied: it registers a parameter for each name.

    Hazard: an optimizer that is made before the first forward would have the parameter twice.
    """
    for param in group.params if group.runtime is None else ():
        first, *others = (owner.registered for owner in param.owners)
        if first is not param.sharded and others and all(_same_values(first, other) for other in others):
            for owner in param.owners:
                owner.registry[owner.attribute] = first


def _same_values(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two parameters have the same values here; where those of other ranks differ, the first forward is refused."""
    if one is other or same_memory(one, other):
        return True
    if not isinstance(one, DTensor) or not isinstance(other, DTensor) or one.spec != other.spec:
        return False
    parts = one._local_tensor, other._local_tensor
    if one.dtype != other.dtype or any(part.is_meta or type(part) is not torch.Tensor for part in parts):
        return False
    return torch.equal(*parts)


def _shard_loaded(param: ShardedParam, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Replace what is loaded into a tensor-parallel parameter by this rank's part of it. Collective for `DTensor`s."""
    for owner in param.owners:
        name = prefix + owner.attribute
        value = state_dict.get(name) if owner.module is module else None
        if isinstance(value, torch.Tensor) and value.shape == param.sharded.shape:  # else torch says what is wrong with it
            state_dict[name] = param.sharded_for_loading(value)


def _check_load(group: ParamGroup, module: nn.Module, state_dict: Mapping[str, object], prefix: str, *, assign: bool) -> None:
    """Raise RuntimeError if loading the parameters of `module` would have no effect, or would take them from their group."""
    mine = [owner.attribute for param in group.params for owner in param.owners if owner.module is module]
    for name in (prefix + attribute for attribute in mine):
        value = state_dict.get(name)
        if not isinstance(value, torch.Tensor) or (value.is_meta and not assign):
            continue
        way_out = "call to_empty() first, then load with assign=False" if group.gather.on_meta else "load with assign=False"
        if assign and group.runtime is not None:
            raise RuntimeError(
                f"load_state_dict(assign=True) of '{name}' after the first forward (rank {group.mesh.rank}): {way_out}"
            )
        if assign and not isinstance(value, DTensor):
            raise RuntimeError(
                f"load_state_dict(assign=True) of '{name}' with a whole tensor (rank {group.mesh.rank}): expected a DTensor, "
                f"such as shardrt.distribute_tensor(tensor, mesh, placements); or {way_out}, which takes whole tensors as well"
            )
        if group.gather.on_meta and not assign:
            raise RuntimeError(
                f"load_state_dict of '{name}', which is on the meta device and has no memory to load into (rank "
                f"{group.mesh.rank}): call to_empty() first, or load DTensors with assign=True"
            )


# ---------------------------------------------------------------------- helpers of other packages

_HUGGING_FACE = ("transformers.", "peft.", "diffusers.")


def check_state_dict_options(module: str, rank: int, caller: FrameType) -> None:
    """Raise RuntimeError if `caller`, which reads buffers, was called by a helper of torch with an option that cannot work."""
    if (found := state_dict_helper(caller)) is None:
        return
    options, function = found
    if options.broadcast_from_rank0:
        raise RuntimeError(
            f"{function}(broadcast_from_rank0=True) on the sharded module '{module}' (rank {rank}): the broadcast needs a "
            f"process group of torch.distributed; call shardrt.checkpoint.{function} with the same arguments"
        )
    if options.full_state_dict and function.startswith("get_"):
        raise RuntimeError(
            f"{function}(full_state_dict=True) on the sharded module '{module}' (rank {rank}): it would return sharded "
            f"tensors; call shardrt.checkpoint.{function} with the same arguments"
        )


def check_not_pretrained(module: str, rank: int, caller: FrameType) -> None:
    """Raise RuntimeError if `caller`, which reads a state dict, was called by `save_pretrained` of a Hugging Face model."""
    frame: FrameType | None = caller
    while frame is not None and not (
        frame.f_code.co_name == "save_pretrained" and frame.f_globals.get("__name__", "").startswith(_HUGGING_FACE)
    ):
        frame = frame.f_back
    if frame is not None:
        raise RuntimeError(
            f"save_pretrained of the sharded '{module}' (rank {rank}): its state dict has shards, not whole tensors; call "
            "shardrt.checkpoint.save_safetensors(model, folder) on every rank, and model.config.save_pretrained(folder); or "
            "shard the model with shardrt.integrations.transformers.shard_model, whose save_pretrained gathers"
        )

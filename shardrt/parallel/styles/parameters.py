"""Parameters of parallelized modules: split or replicated over the mesh, with one rank's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ...comm import DeviceMesh, current_stream
from ...tensor.dtensor.distribute import received
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import group_of
from ...tensor.dtensor.replaced import note_replaced, replacement
from ...tensor.dtensor.replicated import ParameterMark, marks_of, renew_marks
from ...tensor.placement.placement import Partial, Placement, Spec
from ..boundaries.axis import axis_of
from .state import state_of

PARTIAL_GRADIENT = (Partial(),)


class Split(NamedTuple):
    """How a style distributes one parameter.

    placement: `Shard(dim)` or `Replicate()`.   grad_placements: see `DTensor.grad_placements`.
    """

    module: nn.Module
    name: str
    placement: Placement
    grad_placements: tuple[Placement, ...] | None = None

    @property
    def param(self) -> nn.Parameter:
        param = self.module._parameters[self.name]
        assert param is not None
        return param


def split_parameter(split: Split, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Replace a parameter by a DTensor parameter on `mesh`. Collective, unless src_data_rank is None.

    src_data_rank: the rank whose values are taken; None: each rank's own.
    """
    (module, name, placement, grad_placements), param = split, split.param
    if (made := _made(split)) is None:  # else modules that shared the plain one share this
        spec = Spec.of(mesh, (placement,), param.shape)
        local = _local(param, spec, src_data_rank)
        made = cast(DTensor, nn.Parameter(DTensor(local, spec), requires_grad=param.requires_grad))
        made.grad_placements = grad_placements
        note_replaced(param, made)
    module._parameters[name] = made  # type: ignore[assignment]
    state = state_of(module)
    state.unstyled.pop(name, None)
    state.marks.pop(name, None)
    if not state.split:
        module.register_load_state_dict_pre_hook(_refuse_whole)
    state.split.add(name)
    if grad_placements is not None:
        state.marks[name] = ParameterMark(mesh, grad_placements)


def _refuse_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """RuntimeError if plain tensors would become the parameters, which each rank would take for its part."""
    for name in sorted(marks_of(module).split) if metadata.get("assign_to_params_buffers", False) else ():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise RuntimeError(
                f"load_state_dict(assign=True) of '{prefix}{name}' with a whole tensor: expected a DTensor, such as "
                "shardrt.distribute_tensor(tensor, mesh, placements); or load with assign=False, which takes whole tensors too"
            )


def _parallel(param: torch.Tensor) -> DTensor | None:
    """The parallel parameter that has replaced a plain one that other modules still have."""
    found = replacement(param)
    return None if found is None or group_of(found) is not None else found


def _made(split: Split) -> DTensor | None:
    """The parallel parameter that there is already, since another module shares it."""
    param = split.param
    if isinstance(param, DTensor) and split.name in marks_of(split.module).unstyled:
        return param
    return _parallel(param)


def mark_terms(owner: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Note that of the gradient of a parameter that is replicated over `mesh` each rank has a term."""
    state_of(owner).marks[name] = ParameterMark(mesh, PARTIAL_GRADIENT)
    renew_marks(owner)


def keep_ties(module: nn.Module) -> None:
    """Give modules without a style the parallel parameters in the place of those that they shared: they may get one later."""
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if param is not None and (made := _parallel(param)) is not None:
                owner._parameters[name] = made
                state_of(owner).unstyled[name] = f"{prefix}.{name}".lstrip(".")


def check_ties(module: nn.Module) -> None:
    """Raise ValueError if a module without a style would compute with a part of a parameter that it shares."""
    for owner in module.modules():
        for full_name in marks_of(owner).unstyled.values():
            raise ValueError(
                f"parameter '{full_name}' is shared with a module whose style splits it: give the module of '{full_name}' a "
                "style as well, such as RowwiseParallel for an embedding and ColwiseParallel for a head"
            )


def check_sharers(module: nn.Module, splits: Sequence[Split]) -> None:
    """Raise ValueError if a module whose parameters are not to be split shares one that is."""
    split = {id(each.param) for each in splits}
    styled = {(id(each.module), each.name) for each in splits}
    for prefix, owner in module.named_modules():
        for name, param in owner._parameters.items():
            if id(param) in split and (id(owner), name) not in styled:
                raise ValueError(
                    f"parameter '{f'{prefix}.{name}'.lstrip('.')}' is shared with a module whose style splits it: give its "
                    "module a style in the same plan, or a parameter of its own"
                )


def _local(param: torch.Tensor, spec: Spec, src_data_rank: int | None) -> torch.Tensor:
    mesh, full = spec.mesh, param.detach()
    if src_data_rank is None or full.is_meta or mesh.size == 1:
        device = full.device if full.is_meta else mesh.device
        return spec.local_shard(full).to(device, copy=True, memory_format=torch.contiguous_format)
    return received(full, spec, src_data_rank, "tp")


def check_shared(splits: Sequence[Split]) -> None:
    """Raise ValueError unless styled modules that share a parameter distribute it alike."""
    shared: dict[int, tuple[Any, Any]] = {}
    first = {(id(split.module), split.name): split for split in reversed(splits)}
    for split in first.values():
        asked = (split.placement,), split.grad_placements
        made = _made(split)
        found = shared.setdefault(id(split.param), asked if made is None else (made.spec.placements, made.grad_placements))
        if found != asked:
            raise ValueError(
                f"parameter '{split.name}' of a {type(split.module).__name__} is shared with another module, which has it as "
                f"{found[0]}: expected {asked[0]}; give both modules styles that split it alike"
            )


@torch.no_grad()
def make_equal(params: Sequence[torch.Tensor], mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Give plain parameters the values of one rank. Collective.

    Cost: a broadcast for each dtype.
    """
    axis = axis_of(mesh)
    if src_data_rank is None or axis.size == 1:
        return
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        if not param.is_meta:
            together.setdefault(param.dtype, []).append(param)
    stream = current_stream(mesh.device)
    for same in together.values():
        flat = torch.cat([param.detach().reshape(-1).to(mesh.device) for param in same])
        axis.comm.broadcast(flat, flat, src_data_rank, stream=stream).wait(stream)
        for param, values in zip(same, flat.split([param.numel() for param in same]), strict=True):
            param.copy_(values.view(param.shape))

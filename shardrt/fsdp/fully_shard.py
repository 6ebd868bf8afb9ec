"""`fully_shard`: checks its arguments, has the ranks compare them, and makes groups of parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .. import comm
from ..comm import DeviceMesh
from ..tensor.dtensor import DTensor
from ..tensor.group_registry import group_of, set_group
from ..tensor.placement import Shard
from ..tensor.replicated import renew_marks, replicas_mesh
from .extension import ExtensionGather, check_methods, has_methods
from .gather import FlatGather, Gather
from .module import FSDPModule
from .param import Owner, ShardedParam, registry
from .param_group import GroupSettings, ParamGroup
from .policy import (
    UNQUANTISED,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Policies,
    QuantizationPolicy,
    ShardPlacementResult,
)
from .registered import check_same_modules, hook_state_dicts, watch_registrations
from .sharded_class import make_sharded
from .tensor_parallel import DTensorExtensions, FSDPExtensions, OuterSharding

_log = logging.getLogger("shardrt")

ModuleOrModules = TypeVar("ModuleOrModules", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    extensions: FSDPExtensions | None = None,
    quantization_policy: QuantizationPolicy | None = None,
) -> ModuleOrModules:
    """Shard the parameters of `module` that no earlier `fully_shard` inside it has taken. In place.

    Call it bottom-up: on the blocks, then on the whole. The parameters form one group, but those on another mesh, quantised
    ones and those with an all-gather extension form groups of their own. Every rank keeps its segment of a group's layout; the
    rest is gathered for the module's forward and backward and freed after. Gradients are averaged over the mesh.

    module: several modules make one group, gathered when the first of them runs and freed when all have run.
    mesh: over which ranks (default: all of them). With two axes, parameters are sharded over the last one and replicated
        over the first (hybrid sharding). With a last axis of one rank they are replicated only (data parallel).
    reshard_after_forward: True: free the gathered parameters after forward and gather them again for backward. False: keep
        them. A number k: keep 1 / k of them on each of k neighbouring ranks, which gather them from each other. None: True,
        except for the root, whose backward follows at once, and for the groups with which the backward is expected to begin.
    shard_placement_fn: returns the dim along which to shard a parameter. It is then split between rows only, even if that
        needs much padding. A `ShardPlacementResult` gives a mesh as well, such as that of the experts. None, and the default:
        along dim 0, between elements where rows would need too much padding.
    mp_policy: dtypes of compute, reduction and outputs.
    offload_policy: a `CPUOffloadPolicy` keeps shards and gradients on the host.
    ignored_params: parameters that are not sharded or moved, and whose gradients are not reduced.
    dp_mesh_dims: the axes of `mesh`, which may then have more, to shard over and to replicate over. ValueError if it lacks
        them.
    extensions: how parameters that are tensor-parallel are sharded further (default: a `DTensorExtensions`).
    quantization_policy: which collectives send 8-bit codes (default: none). Parameters that it takes are gathered apart from
        the others, those of each dtype for themselves.
    A parameter that is a `DTensor` on another mesh is sharded inside of each part of it; so are parameters that
    `parallelize_module` has replicated. Both meshes must form a grid of ranks; gradients are averaged over `mesh` only.
    Parameters may be replaced until the first forward: by `DTensor`s of the same shape on the same mesh.
    Returns: the module, its class now `FSDP<class>`, an `FSDPModule`.
    Raises, on every rank alike: TypeError or ValueError for a module that cannot be sharded, or that is not the same on
    all ranks; both name the ranks that see it.
    """
    mesh = comm.world().mesh if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard(mesh={mesh!r}): expected a DeviceMesh, such as shardrt.world().mesh")
    if dp_mesh_dims is not None:
        mesh = dp_mesh_dims.of(mesh)
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    policies = Policies.of(mp_policy, offload_policy, quantization_policy)
    found: _Found = _Found({}, [], set())
    resolved: dict[nn.Parameter, Placed] = {}
    quantised: set[nn.Parameter] = set()
    error: Exception | None = None
    try:
        _check_mesh(mesh, reshard_after_forward)
        policies.check()
        found = _collect(modules, mesh, set(ignored_params or ()))
        given = shard_placement_fn, mesh, extensions or DTensorExtensions()
        resolved = {param: resolve_placement(owned[0][2], param, *given) for param, owned in found.owners.items()}
        whole = {param: wanted for param, wanted in resolved.items() if not has_methods(wanted.local)}
        quantised = {param for param, wanted in whole.items() if policies.takes(param, wanted.mesh, wanted.placement)}
    except Exception as caught:  # the user's function may raise anything, on one rank alone
        found, error = _Found({}, [], set()), caught
    kinds = _kinds(modules)
    options = repr((policies, reshard_after_forward))
    everyone = _everyone(found, resolved, mesh) if error is None else _everyone_after_error(modules, mesh)
    check_same_modules(everyone, f"fully_shard of '{kinds}'", [kinds, options, *_describe(found.owners, resolved)], error)
    _join_meshes(found, resolved)
    groups = []
    for group_mesh in dict.fromkeys([mesh, *(wanted.mesh for wanted in resolved.values())]):
        here = [param for param, wanted in resolved.items() if wanted.mesh is group_mesh]
        for index, (kind, quantization, params) in enumerate(_parts(here, resolved, quantised, policies)):
            if params or (index == 0 and group_mesh is mesh):
                about = (found, resolved, group_mesh, policies._replace(quantization=quantization), reshard_after_forward)
                groups.append(_make_group(kind, modules, params, *about))
    watch_registrations()
    for holder, attribute, buffer in found.buffers:
        if not buffer.is_meta:
            holder._buffers[attribute] = buffer.to(mesh.device)
    make_sharded(modules, groups)
    if isinstance(policies.offload, CPUOffloadPolicy) and not policies.offload.applies_to(mesh.device) and mesh.rank == 0:
        _log_nothing_to_offload()
    return module


def _state(module: nn.Module) -> tuple[ParamGroup, ...] | None:
    """The groups of a sharded module, of those sharded in a list with it as well; None for one that is not sharded."""
    return module.param_groups if isinstance(module, FSDPModule) else None


fully_shard.state = _state  # type: ignore[attr-defined]  # where FSDP2 has it


@functools.cache
def _log_nothing_to_offload() -> None:
    _log.warning("CPUOffloadPolicy on a CPU mesh: everything is on the host already, nothing to do (logged once)")


def _parts(
    params: Sequence[nn.Parameter], resolved: dict[nn.Parameter, Placed], quantised: set[nn.Parameter], policies: Policies
) -> Iterator[tuple[type[Gather], QuantizationPolicy, list[nn.Parameter]]]:
    """The groups that these parameters on one mesh form: those gathered whole, quantised ones by dtype, extensions."""
    others = [param for param in params if param not in quantised]
    yield FlatGather, UNQUANTISED, [param for param in others if not has_methods(resolved[param].local)]
    for dtype in dict.fromkeys(param.dtype for param in params if param in quantised):
        yield FlatGather, policies.quantization, [param for param in params if param in quantised and param.dtype is dtype]
    for param in others:
        if has_methods(resolved[param].local):
            yield ExtensionGather, UNQUANTISED, [param]


def _make_group(
    gather_kind: type[Gather],
    modules: tuple[nn.Module, ...],
    originals: list[nn.Parameter],
    found: _Found,
    resolved: dict[nn.Parameter, Placed],
    mesh: DeviceMesh,
    policies: Policies,
    reshard_after_forward: bool | int | None,
) -> ParamGroup:
    params = []
    for original in originals:
        owned, placed = found.owners[original], resolved[original]
        owners = [Owner(holder, attribute, registry(holder)) for holder, attribute, _ in owned]
        dim = 0 if placed.placement is None else placed.placement.dim % max(1, original.dim())
        rows_only = placed.placement is not None
        name, outer = owned[0][2], placed.outer
        params.append(ShardedParam(name, original, owners, dim, rows_only=rows_only, outer=outer, part=placed.local))
    settings, ignored = GroupSettings(reshard_after_forward), frozenset(found.ignored)
    mp_policy, offload_policy, quantization = policies
    group = ParamGroup(modules, params, mesh, mp_policy, offload_policy, settings, gather_kind, quantization, ignored=ignored)
    for original in originals:  # a module outside may still hold it
        set_group(original, group)
    hook_state_dicts({holder for original in originals for holder, *_ in found.owners[original]}, group)
    return group


def replicate(module: ModuleOrModules, *, mesh: DeviceMesh | None = None, **options: Any) -> ModuleOrModules:
    """Data parallel without sharding: every rank of the 1-D `mesh` has all of the parameters. Options as `fully_shard`.

    Raises ValueError for a mesh of several axes.
    """
    mesh = comm.world().mesh if mesh is None else mesh
    if len(mesh.shape) != 1:
        raise ValueError(f"replicate(mesh={mesh}): expected one axis; name it, as in mesh['{mesh.axis_names[-1]}']")
    name = mesh.axis_names[0]
    return fully_shard(module, mesh=mesh.unflatten((mesh.size, 1), (name, f"{name}_shard")), **options)


# ---------------------------------------------------------------------- set-up and checks

_Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]  # holder, attribute, full name; several if tied


class _Found(NamedTuple):
    """The parameters and buffers that a call takes, and where the ignored ones are registered."""

    owners: _Owners
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    ignored: set[tuple[nn.Module, str]]


def _check_mesh(mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> None:
    if len(mesh.shape) > 2:
        raise ValueError(
            f"fully_shard(mesh={mesh}): expected one axis to shard over, or two, of which the first replicates; name them, as "
            f"in mesh['{mesh.axis_names[-1]}']"
        )
    ranks, kept = mesh.shape[-1], reshard_after_forward
    if isinstance(kept, int) and not isinstance(kept, bool) and (kept < 1 or ranks % kept):
        raise ValueError(f"fully_shard(reshard_after_forward={kept}): expected a divisor of the {ranks} ranks sharded over")


def _collect(modules: tuple[nn.Module, ...], mesh: DeviceMesh, ignored: set[nn.Parameter]) -> _Found:
    """The parameters and buffers that this call takes: those of the modules outside of sharded modules in them."""
    found = _Found({}, [], set())
    if not modules:
        raise ValueError("fully_shard: expected a module, found an empty list")
    for module in modules:
        _check_module(module)
    _check_apart(modules)
    _check_inside(modules)
    for position, module in enumerate(modules):
        for name, holder in _outside_sharded(module, str(position) if len(modules) > 1 else ""):
            renew_marks(holder)
            for attribute, param in holder._parameters.items():
                if param in ignored:
                    found.ignored.add((holder, attribute))
                elif param is not None:
                    full_name = f"{name}.{attribute}" if name else attribute
                    _check_param(full_name, param, modules, mesh)
                    found.owners.setdefault(param, []).append((holder, attribute, full_name))
            found.buffers.extend((holder, key, buffer) for key, buffer in holder._buffers.items() if buffer is not None)
    devices = {param.device.type: owned[0][2] for param, owned in found.owners.items()}
    if len(devices) > 1:
        names = ", ".join(f"'{name}' on {device}" for device, name in sorted(devices.items()))
        raise ValueError(f"'{_kinds(modules)}' has parameters on several devices ({names}); move the module to one of them")
    return found


def _kinds(modules: tuple[nn.Module, ...]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _check_module(module: nn.Module) -> None:
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes an nn.Module or several, found {kind}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"'{kind}' is sharded already: call fully_shard once for each module")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"'{kind}' has no forward to gather parameters for: call fully_shard on the modules in it")


def _check_apart(modules: tuple[nn.Module, ...]) -> None:
    for position, module in enumerate(modules):
        kind = type(module).__name__
        if any(other is module for other in modules[:position]):
            raise ValueError(f"'{kind}' is in the list twice: leave one out")
        for outer in modules:
            if outer is not module and any(inner is module for inner in outer.modules()):
                raise ValueError(f"'{kind}' is inside '{type(outer).__name__}', which is in the same list: leave it out")


def _check_inside(modules: tuple[nn.Module, ...]) -> None:
    inside = {
        group: name
        for module in modules
        for name, child in module.named_modules()
        if isinstance(child, FSDPModule)
        for group in child.param_groups
    }
    for group, name in inside.items():
        if group.parent is not None and group.parent not in inside:
            raise ValueError(
                f"'{name}' in '{_kinds(modules)}' is part of '{group.root.name}' already, which was sharded around it: a "
                "sharded module has one root"
            )


def _outside_sharded(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """`module` and what is in it, with names, sharded modules inside left out. A module met twice comes twice (ties)."""
    yield name, module
    for child_name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside_sharded(child, f"{name}.{child_name}" if name else child_name)


def _check_param(name: str, param: nn.Parameter, modules: tuple[nn.Module, ...], mesh: DeviceMesh) -> None:
    group = group_of(param)
    if group is not None and any(module in modules for outer in group.modules for module in outer.modules()):
        kinds = _kinds(modules)
        raise ValueError(
            f"'{kinds}' is inside '{group.name}', which is sharded already, parameter '{name}' with it: call fully_shard "
            f"bottom-up, on '{kinds}' before '{group.name}'"
        )
    if group is not None:
        raise ValueError(
            f"parameter '{name}' is shared with '{group.name}', which is sharded already: tied parameters belong in one "
            "group; shard neither module on its own, so that the module around both takes the parameter"
        )
    if not param.is_meta and param.device not in (torch.device("cpu"), mesh.device):
        raise ValueError(f"parameter '{name}' is on {param.device}; expected the CPU or the mesh's device, {mesh.device}")
    check_methods(name, param)


class Placed(NamedTuple):
    """Where a parameter goes: along which dim (None: 0, between elements where need be) and over which mesh."""

    placement: Shard | None
    mesh: DeviceMesh
    local: torch.Tensor  # what is sharded: the parameter, or this rank's part of it by `outer`
    outer: OuterSharding | None


def resolve_placement(
    name: str,
    param: nn.Parameter,
    placement_fn: Callable[[nn.Parameter], Shard | ShardPlacementResult | None] | None,
    mesh: DeviceMesh,
    extensions: FSDPExtensions,
) -> Placed:
    """Where a parameter goes, as `placement_fn` and `extensions` say. TypeError or ValueError if it cannot lie so."""
    wanted = placement_fn(param) if placement_fn is not None else None
    if not isinstance(wanted, ShardPlacementResult):
        wanted = ShardPlacementResult(wanted, mesh)
    if type(wanted.placement) not in (Shard, type(None)) or not isinstance(wanted.mesh, DeviceMesh):
        raise TypeError(f"shard_placement_fn of '{name}': expected a Shard, a ShardPlacementResult or None, found {wanted!r}")
    if wanted.placement is not None and not -max(1, param.dim()) <= wanted.placement.dim < max(1, param.dim()):
        raise ValueError(f"shard_placement_fn of '{name}': {wanted.placement} of a parameter of shape {tuple(param.shape)}")
    _check_mesh(wanted.mesh, None)
    local: torch.Tensor = param
    outer: OuterSharding | None = None
    if not (isinstance(param, DTensor) and param.device_mesh is wanted.mesh):  # else it is sharded there, only elsewhere cut
        local, outer = OuterSharding.of(param, extensions)
    if outer is not None:
        outer.check(name, local)
    if has_methods(local) and wanted.placement not in (None, Shard(0)):
        raise ValueError(f"shard_placement_fn of '{name}': {wanted.placement} of a {type(local).__name__}; expected Shard(0)")
    return Placed(wanted.placement, wanted.mesh, local, outer)


def _everyone(found: _Found, resolved: dict[nn.Parameter, Placed], mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that must have the same modules: with tensor-parallel parameters, those of both meshes. Collective."""
    for param, placed in resolved.items():
        if placed.outer is not None:
            return _product(found.owners[param][0][2], placed.outer.spec.mesh, mesh)
    return mesh


def _everyone_after_error(modules: tuple[nn.Module, ...], mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks, as far as can be seen: those that are to hear of the error."""
    for param in [param for module in modules if isinstance(module, nn.Module) for param in module.parameters()]:
        outer = param.device_mesh if isinstance(param, DTensor) else replicas_mesh(param)
        if outer is not None and outer is not mesh and group_of(param) is None:
            return _product("unnamed", outer, mesh)
    return mesh


def _join_meshes(found: _Found, resolved: dict[nn.Parameter, Placed]) -> None:
    """Check that every parameter's two meshes fit, before anything is changed. Collective."""
    for param, placed in resolved.items():
        if placed.outer is not None:
            _product(found.owners[param][0][2], placed.outer.spec.mesh, placed.mesh)


def _product(name: str, outer: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Both meshes as one. Raises ValueError, on every rank alike, if they do not fit."""
    try:
        return outer.product(mesh)
    except ValueError as error:
        raise ValueError(
            f"parameter '{name}' is a DTensor on, or replicated over, {outer}, inside of which it cannot be sharded over "
            f"{mesh}: {error}; expected one on another axis of the same mesh, or a plain parameter, such as "
            "nn.Parameter(param.full_tensor())"
        ) from error


def _describe(owners: _Owners, resolved: dict[nn.Parameter, Placed]) -> list[str]:
    """What must be the same on every rank, a line for each parameter."""
    return [
        f"{', '.join(name for *_, name in owned)}: {tuple(param.shape)} {param.dtype}, {resolved[param].placement} over "
        f"{dict(zip(resolved[param].mesh.axis_names, resolved[param].mesh.shape, strict=True))}, "
        f"requires_grad {param.requires_grad}{_described(resolved[param].outer)}"
        for param, owned in owners.items()
    ]


def _described(outer: OuterSharding | None) -> str:
    if outer is None:
        return ""
    spec = outer.spec
    return f", inside of {dict(zip(spec.mesh.axis_names, spec.placements, strict=True))}, gradients {outer.grad_placements}"

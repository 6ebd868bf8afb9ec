"""`fully_shard`: checks its arguments, has the ranks compare them, and makes groups of parameters."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ... import comm
from ...comm import DeviceMesh
from ...comm.startup import malloc
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import group_of, set_group
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ...tensor.dtensor.replicated import marks_of, replicas_mesh
from ...tensor.placement.placement import Shard
from ..base.policy import (
    UNQUANTISED,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Policies,
    QuantizationPolicy,
    ShardPlacementResult,
)
from ..gather.extension import ExtensionGather, has_methods
from ..gather.gather import FlatGather, Gather
from ..memory.host_memory import POOL
from ..params.param import Owner, ShardedParam, Slot
from ..params.tensor_parallel import DTensorExtensions, FSDPExtensions, OuterSharding
from ..schedule.param_group import GroupSettings, ParamGroup
from ..schedule.registered import check_same_modules, watch_registrations
from ..schedule.state_dicts import hook_state_dicts
from . import functions as functions
from .collect import Found, Owners, check_mesh, collect, kinds_of
from .module import FSDPModule
from .sharded_class import make_sharded

_log = logging.getLogger("shardrt")

ModuleOrModules = TypeVar("ModuleOrModules", bound=nn.Module | Sequence[nn.Module])
PlacementFunction = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@outside_inference_mode()
def fully_shard(
    module: ModuleOrModules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFunction | None = None,
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
    dp_mesh_dims: which axes of `mesh` to shard over and which to replicate over; `mesh` may then have further axes.
        ValueError if it lacks one of them.
    extensions: how parameters that are tensor-parallel are sharded further (default: a `DTensorExtensions`).
    quantization_policy: which collectives send 8-bit codes (default: none). Parameters to which it applies are gathered apart
        from the others, in one group for each dtype.
    A parameter that is a `DTensor` on another mesh is sharded further, inside of each of its parts; so are parameters that
    `parallelize_module` has replicated. Both meshes must form a grid of ranks; gradients are averaged over `mesh` only.
    Parameters may be replaced until the first forward: by `DTensor`s of the same shape on the same mesh.
    Returns: the module, its class now `FSDP<class>`, an `FSDPModule`.
    Raises, on every rank alike: TypeError or ValueError for a module that cannot be sharded, or that is not the same on
    all ranks; the error names the ranks where it was found.
    """
    mesh = comm.world().mesh if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard(mesh={mesh!r}): expected a DeviceMesh, such as shardrt.world().mesh")
    if dp_mesh_dims is not None:
        mesh = dp_mesh_dims.of(mesh)
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    policies = Policies.of(mp_policy, offload_policy, quantization_policy)
    given = shard_placement_fn, mesh, extensions or DTensorExtensions()
    planned = _plan(modules, mesh, policies, reshard_after_forward, set(ignored_params or ()), given)
    malloc.return_freed_memory()
    POOL.trim()  # of models that are gone
    groups = []
    while planned.parts:
        groups.append(_make_group(modules, planned.parts.pop(0), policies, reshard_after_forward, planned.ignored))
    watch_registrations()
    for holder, attribute, buffer in planned.buffers:
        if not buffer.is_meta:
            holder._buffers[attribute] = buffer.to(mesh.device)
    make_sharded(modules, groups)
    if isinstance(policies.offload, CPUOffloadPolicy) and not policies.offload.applies_to(mesh.device) and mesh.rank == 0:
        _log_nothing_to_offload()
    return module


def _state(module: nn.Module) -> tuple[ParamGroup, ...] | None:
    """The groups of a sharded module, which modules sharded in one list share. None for a module that is not sharded."""
    return module.param_groups if isinstance(module, FSDPModule) else None


fully_shard.state = _state  # type: ignore[attr-defined]  # where FSDP2 has it


@functools.cache
def _log_nothing_to_offload() -> None:
    _log.warning("CPUOffloadPolicy on a CPU mesh: everything is on the host already, nothing to do (logged once)")


class _NewGroup(NamedTuple):
    """A group to be made. Its parameters hold the only references of this package to the originals."""

    kind: type[Gather]
    mesh: DeviceMesh
    quantization: QuantizationPolicy
    params: list[ShardedParam]


class _PlannedCall(NamedTuple):
    """What a call has found, and the ranks agree on. The first part is that of the given mesh, and may be empty."""

    parts: list[_NewGroup]
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    ignored: frozenset[Slot]


def _plan(
    modules: tuple[nn.Module, ...],
    mesh: DeviceMesh,
    policies: Policies,
    reshard_after_forward: bool | int | None,
    ignored: set[nn.Parameter],
    given: tuple[PlacementFunction | None, DeviceMesh, FSDPExtensions],
) -> _PlannedCall:
    """Find the parameters, and what becomes of them. Collective: raises on every rank alike, before anything is changed."""
    found, resolved, quantised = Found({}, [], set()), dict[nn.Parameter, Placed](), set[nn.Parameter]()
    error: Exception | None = None
    try:
        check_mesh(mesh, reshard_after_forward)
        policies.check()
        found = collect(modules, mesh, ignored)
        resolved = {param: resolve_placement(owned[0][2], param, *given) for param, owned in found.owners.items()}
        _check_not_parallelized(found.owners, resolved)
        whole = {param: wanted for param, wanted in resolved.items() if not has_methods(wanted.local)}
        quantised = {param for param, wanted in whole.items() if policies.takes(param, wanted.mesh, wanted.placement)}
    except Exception as caught:  # the user's function may raise anything, on one rank alone
        found, error = Found({}, [], set()), caught
    kinds = kinds_of(modules)
    options = repr((policies, reshard_after_forward))
    everyone = _everyone(found, resolved, mesh) if error is None else _everyone_after_error(modules, mesh)
    check_same_modules(everyone, f"fully_shard of '{kinds}'", [kinds, options, *_describe(found.owners, resolved)], error)
    _join_meshes(found, resolved)
    parts = []
    for group_mesh in dict.fromkeys([mesh, *(wanted.mesh for wanted in resolved.values())]):
        here = [param for param, wanted in resolved.items() if wanted.mesh is group_mesh]
        for index, (kind, quantization, params) in enumerate(_divide(here, resolved, quantised, policies)):
            if params or (index == 0 and group_mesh is mesh):
                made = [_sharded_param(param, found.owners[param], resolved[param]) for param in params]
                parts.append(_NewGroup(kind, group_mesh, quantization, made))
    return _PlannedCall(parts, found.buffers, frozenset(found.ignored))


def _divide(
    params: Sequence[nn.Parameter], resolved: dict[nn.Parameter, Placed], quantised: set[nn.Parameter], policies: Policies
) -> Iterator[tuple[type[Gather], QuantizationPolicy, list[nn.Parameter]]]:
    """The groups that these parameters on one mesh form: those gathered whole, quantised and complex ones by dtype, extensions.

    Real gradients beside complex ones would be reduced as complex numbers.
    """
    others = [param for param in params if param not in quantised]
    whole = [param for param in others if not has_methods(resolved[param].local)]
    yield FlatGather, UNQUANTISED, [param for param in whole if not param.is_complex()]
    for dtype in dict.fromkeys(param.dtype for param in whole if param.is_complex()):
        yield FlatGather, UNQUANTISED, [param for param in whole if param.dtype is dtype]
    for dtype in dict.fromkeys(param.dtype for param in params if param in quantised):
        yield FlatGather, policies.quantization, [param for param in params if param in quantised and param.dtype is dtype]
    for param in others:
        if has_methods(resolved[param].local):
            yield ExtensionGather, UNQUANTISED, [param]


def _sharded_param(original: nn.Parameter, owned: Sequence[tuple[nn.Module, str, str]], placed: Placed) -> ShardedParam:
    owners = [Owner.of(holder, attribute) for holder, attribute, _ in owned]
    dim = 0 if placed.placement is None else placed.placement.dim % max(1, original.dim())
    rows_only = placed.placement is not None
    return ShardedParam(owned[0][2], original, owners, dim, rows_only=rows_only, outer=placed.outer, part=placed.local)


def _make_group(
    modules: tuple[nn.Module, ...],
    part: _NewGroup,
    policies: Policies,
    reshard_after_forward: bool | int | None,
    ignored: frozenset[Slot],
) -> ParamGroup:
    """Shard the parameters of a part. Each original is free as soon as it is sharded, unless the caller holds it."""
    kind, mesh, quantization, params = part
    originals = [weakref.ref(param.original) for param in params]
    settings = GroupSettings(reshard_after_forward)
    given = policies._replace(quantization=quantization)
    group = ParamGroup(modules, params, mesh, given, settings, kind, ignored=ignored)
    for original in [original for reference in originals if (original := reference()) is not None]:
        set_group(original, group)
    hook_state_dicts(params, group)
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


class Placed(NamedTuple):
    """How a parameter is to be cut: along which dim (None: 0, between elements where need be) and over which mesh."""

    placement: Shard | None
    mesh: DeviceMesh
    local: torch.Tensor  # what is sharded: the parameter, or this rank's part of it by `outer`
    outer: OuterSharding | None


def resolve_placement(
    name: str,
    param: nn.Parameter,
    placement_fn: PlacementFunction | None,
    mesh: DeviceMesh,
    extensions: FSDPExtensions,
) -> Placed:
    """How a parameter is to be cut, as `placement_fn` and `extensions` say. Raises TypeError or ValueError if it cannot be."""
    wanted = placement_fn(param) if placement_fn is not None else None
    if not isinstance(wanted, ShardPlacementResult):
        wanted = ShardPlacementResult(wanted, mesh)
    if type(wanted.placement) not in (Shard, type(None)) or not isinstance(wanted.mesh, DeviceMesh):
        raise TypeError(f"shard_placement_fn of '{name}': expected a Shard, a ShardPlacementResult or None, found {wanted!r}")
    if wanted.placement is not None and not -max(1, param.dim()) <= wanted.placement.dim < max(1, param.dim()):
        raise ValueError(f"shard_placement_fn of '{name}': {wanted.placement} of a parameter of shape {tuple(param.shape)}")
    check_mesh(wanted.mesh, None)
    local: torch.Tensor = param
    outer: OuterSharding | None = None
    if not (isinstance(param, DTensor) and param.device_mesh is wanted.mesh):  # else it is on that mesh, only cut elsewhere
        local, outer = OuterSharding.of(param, extensions)
    if outer is not None:
        outer.check(name, local)
    if has_methods(local) and wanted.placement not in (None, Shard(0)):
        raise ValueError(f"shard_placement_fn of '{name}': {wanted.placement} of a {type(local).__name__}; expected Shard(0)")
    return Placed(wanted.placement, wanted.mesh, local, outer)


def _everyone(found: Found, resolved: dict[nn.Parameter, Placed], mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that must have the same modules: with tensor-parallel parameters, those of both meshes. Collective."""
    for param, placed in resolved.items():
        if placed.outer is not None:
            return _product(found.owners[param][0][2], placed.outer.spec.mesh, mesh)
    return mesh


def _everyone_after_error(modules: tuple[nn.Module, ...], mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that `_everyone` would give, as far as can be told after an error: they must hear of it. Collective."""
    for param in [param for module in modules if isinstance(module, nn.Module) for param in module.parameters()]:
        outer = param.device_mesh if isinstance(param, DTensor) else replicas_mesh(param)
        if outer is not None and outer is not mesh and group_of(param) is None:
            return _product("unnamed", outer, mesh)
    return mesh


def _check_not_parallelized(owners: Owners, resolved: dict[nn.Parameter, Placed]) -> None:
    """Raise ValueError for a parameter that a tensor-parallel style splits, if it cannot be sharded as well.

    It cannot be cut otherwise on the mesh of its style, nor be shared with a module that has no style.
    """
    for param, placed in resolved.items():
        if unstyled := [full for module, name, full in owners[param] if name in marks_of(module).unstyled]:
            raise ValueError(
                f"parameter '{unstyled[0]}' is shared with a module whose style splits it: give the module of "
                f"'{unstyled[0]}' a style as well, by parallelize_module before fully_shard"
            )
        on_own_mesh = placed.outer is None and isinstance(param, DTensor)
        if on_own_mesh and any(name in marks_of(module).split for module, name, _ in owners[param]):
            raise _misfit(owners[param][0][2], placed.mesh, placed.mesh, "it is parallelized over these ranks already")


def _join_meshes(found: Found, resolved: dict[nn.Parameter, Placed]) -> None:
    """Check that every parameter's two meshes fit, before anything is changed. Collective."""
    for param, placed in resolved.items():
        if placed.outer is not None:
            _product(found.owners[param][0][2], placed.outer.spec.mesh, placed.mesh)


def _product(name: str, outer: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """Both meshes as one. Raises ValueError, on every rank alike, if they do not fit."""
    try:
        return outer.product(mesh)
    except ValueError as error:
        raise _misfit(name, outer, mesh, str(error)) from error


def _misfit(name: str, outer: DeviceMesh, mesh: DeviceMesh, why: str) -> ValueError:
    return ValueError(
        f"parameter '{name}' is a DTensor on, or replicated over, {outer}, inside of which it cannot be sharded over "
        f"{mesh}: {why}; expected one on another axis of the same mesh (experts: fully_shard their module first, over the axis "
        "that remains), or a plain parameter, such as nn.Parameter(param.full_tensor())"
    )


def _describe(owners: Owners, resolved: dict[nn.Parameter, Placed]) -> list[str]:
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

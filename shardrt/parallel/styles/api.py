"""`parallelize_module`: applies a plan, a style for each of some modules, to a model on every rank of a mesh."""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple
from weakref import ref

from torch import nn

from ...comm import DeviceMesh
from ...fsdp.api.module import FSDPModule
from ...fsdp.gather.extension import has_methods
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import group_of
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ...tensor.dtensor.replicated import ParameterMark, renew_marks, replicas_mesh
from ...torch_internals import hide_package_from_compiler
from ..boundaries.axis import axis_of
from . import checks
from .modules import ParallelizedModule, give_class
from .parameters import Split, check_shared, check_sharers, keep_ties, make_equal
from .replicated import compare_outside
from .state import ParallelState, Slot, state_of
from .styles import ColwiseParallel, ParallelStyle

Plan = Mapping[str, Any]  # a style, or a plan for what lies inside


class _PlanEntry(NamedTuple):
    name: str
    module: nn.Module
    style: ParallelStyle


@outside_inference_mode()
def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = True,
) -> nn.Module:
    """Parallelize modules of a model over a mesh, by a plan. Returns the module, changed in place. Collective.

    device_mesh: 1-D, such as `mesh["tp"]`. Every rank of the mesh that it is a part of must call this, alike.
    parallelize_plan: a style for `module` itself; or a dict from names of submodules to styles, in which each part between dots
    may be a pattern of `fnmatch` ("layers.*.attention.w[qkv]"), and "" is `module` itself.
    src_data_rank: the rank of the mesh whose parameters all others take; None: each rank keeps its own, which must fit.
    strict: a key that matches no module is an error; False: a warning, as in torch.
    Parameters of styled modules become `DTensor`s on the mesh, also in other modules that share them: those need a style by the
    first forward, or `fully_shard`, which raise ValueError else; with `ExpertParallel`, in the same plan. All others stay
    plain, equal on all ranks of the mesh; with `ExpertParallel`, whose ranks have batches of their own, they are made equal
    only. Apply `fully_shard` afterwards.
    Raises, on every rank, before anything is changed: ValueError for a key that matches nothing, a mesh with several axes, a
    rank that is not in the mesh, modules that are sharded or parallelized already, parameters on another mesh, ranks with
    different models or plans; NotImplementedError for a module that its style does not support, and for parameters with
    all-gather extensions; TypeError for what is not a plan.
    """
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a plan does nothing: give parallelize_plan", stacklevel=2)
        return module
    if device_mesh is None:
        raise ValueError("parallelize_module without a mesh: give device_mesh, such as mesh['tp']")
    if device_mesh.ndim != 1:
        raise ValueError(f"parallelize_module on {device_mesh}: expected a mesh of one axis, such as mesh['tp']")
    axis = axis_of(device_mesh)  # first: a problem on one part of the mesh must not leave the others waiting for it here
    entries = _agreed(module, device_mesh, parallelize_plan, src_data_rank, strict)
    hide_package_from_compiler()
    made = _apply(module, device_mesh, entries, src_data_rank)
    keep_ties(made)
    make_equal([param for param in made.parameters() if not isinstance(param, DTensor)], device_mesh, src_data_rank)
    if not all(entry.style.one_batch for entry in entries):
        return made
    axis.regions.watch(made)
    axis.first = True
    give_class(made, ParallelizedModule)
    state = state_of(made)
    state.axis, state.first = axis, True
    _mark_others(made, state, device_mesh)
    axis.on_outside.append(functools.partial(compare_outside, ref(made)))
    return made


def _apply(module: nn.Module, mesh: DeviceMesh, entries: list[_PlanEntry], src_data_rank: int | None) -> nn.Module:
    root = module
    for name, child, style in entries:
        style.src_data_rank, style.name = src_data_rank, name or type(module).__name__
        made = style._apply(child, mesh)
        if made is child:
            continue
        if name == "":
            root = made
        else:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made)
    return root


def _mark_others(module: nn.Module, state: ParallelState, mesh: DeviceMesh) -> None:
    """Note that plain parameters stay equal on all ranks of the mesh, which work on one batch. state: of `module`."""
    for owner in module.modules():
        for name, other in owner._parameters.items():
            if other is not None and not isinstance(other, DTensor):
                mark = state_of(owner).marks.setdefault(name, ParameterMark(mesh))
                (state.undecided if mark.grad_placements is None else state.terms).append(Slot(owner, name))
        renew_marks(owner)


# ---------------------------------------------------------------------- the plan


def _agreed(
    module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | Plan, src_data_rank: int | None, strict: bool
) -> list[_PlanEntry]:
    """The plan's entries. Raises on every rank if one rank cannot apply it, or has another. Collective."""
    problem: Exception | None = None
    entries: list[_PlanEntry] = []
    try:
        if src_data_rank is not None and not 0 <= src_data_rank < mesh.size:
            raise ValueError(f"src_data_rank={src_data_rank} of {mesh}: expected a rank of it, or None")
        entries = _resolve(module, plan, strict)
        _check(module, entries, mesh)
    except Exception as error:
        problem = error
    error_text = None if problem is None else f"{type(problem).__name__}: {problem}"
    found = mesh.differing((error_text, f"src_data_rank={src_data_rank}", _described(module, entries)))
    if problem is not None:
        raise problem
    if found is None:
        return entries
    for rank, (text, *_) in enumerate(found):
        if text is not None:
            raise ValueError(f"parallelize_module on {mesh}: rank {rank} of it raised {text}")
    for rank, (_, source, described) in enumerate(found):
        _, first_source, first = found[0]
        mine, theirs = [first_source, *first], [source, *described]
        if mine != theirs:
            differ = next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), (len(mine), len(theirs)))
            raise ValueError(
                f"parallelize_module on {mesh}: rank 0 of it has {differ[0]}, rank {rank} has {differ[1]}; expected the same "
                "model and plan on every rank"
            )
    return entries


def _described(module: nn.Module, entries: list[_PlanEntry]) -> list[str]:
    """What must be the same on every rank."""
    styled = [f"'{name}': {re.sub(' at 0x[0-9a-fA-F]+', '', repr(style))}" for name, _, style in entries]  # no addresses
    params = [f"'{name}' {tuple(p.shape)} {p.dtype} meta={p.is_meta}" for name, p in module.named_parameters()]
    return styled + params


def _resolve(module: nn.Module, plan: ParallelStyle | Plan, strict: bool) -> list[_PlanEntry]:
    if isinstance(plan, ParallelStyle):
        return [_PlanEntry("", module, plan)]
    if not isinstance(plan, Mapping):
        raise TypeError(f"parallelize_plan: expected a style, or a dict from names to styles; found a {type(plan).__name__}")
    entries: list[_PlanEntry] = []
    for key, style in plan.items():
        matched = list(_matching(module, key.split("."))) if key else [("", module)]
        if not matched:
            _no_match(module, key, strict)
        for name, child in matched:
            inside = _resolve(child, style, strict)
            entries += [entry._replace(name=".".join(part for part in (name, entry.name) if part)) for entry in inside]
    return entries


def _matching(module: nn.Module, tokens: list[str], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if fnmatch(name, tokens[0]):
            if len(tokens) == 1:
                yield prefix + name, child
            else:
                yield from _matching(child, tokens[1:], f"{prefix}{name}.")


def _no_match(module: nn.Module, key: str, strict: bool) -> None:
    names = [name for name, _ in module.named_modules() if name]
    near = difflib.get_close_matches(key, names, 4, 0.5) or names[:4]
    text = f"the plan's key '{key}' matches no module of the {type(module).__name__}; near names: {', '.join(map(repr, near))}"
    if strict:
        raise ValueError(f"{text}. strict=False makes this a warning")
    warnings.warn(text, stacklevel=6)


def _check(module: nn.Module, entries: list[_PlanEntry], mesh: DeviceMesh) -> None:
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            raise ValueError(f"'{name}' is sharded already: call parallelize_module before fully_shard")
    for name, param in module.named_parameters():
        _check_parameter(name, param, mesh)
    if len({style.one_batch for *_, style in entries}) > 1:
        own = next(entry for entry in entries if not entry.style.one_batch)
        raise ValueError(
            f"the plan has {type(own.style).__name__} for '{own.name}', whose ranks have batches of their own, and styles "
            "whose ranks work on one batch together: expected a call for each kind, with a mesh of its own, on modules apart"
        )
    styled: set[int] = set()
    splits: list[Split] = []
    for name, child, style in entries:
        style.name, style.mesh = name or type(child).__name__, mesh
        if style.changes_parameters:
            if id(child) in styled or ("tp_state" in vars(child) and state_of(child).is_styled):
                raise ValueError(f"'{style.name}' is parallelized already, or by two keys of the plan: expected one style")
            styled.add(id(child))
        style.check(child)
        splits += style.splits(child)
        if isinstance(style, ColwiseParallel) and isinstance(child, nn.Linear) and name:
            checks.whole_heads(module.get_submodule(name.rpartition(".")[0]), name, child, mesh.size)
    check_shared(splits)
    if not all(style.one_batch for *_, style in entries):
        check_sharers(module, splits)


def _check_parameter(name: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    if (group := group_of(param)) is not None:
        raise ValueError(f"'{name}' is sharded already, by '{group.name}': call parallelize_module before fully_shard")
    if has_methods(param):
        raise NotImplementedError(
            f"'{name}', a {type(param).__name__}, defines what is gathered of it, which its parts would not: expected a plain "
            "parameter; set fsdp_pre_all_gather and fsdp_post_all_gather on the local tensors after fully_shard"
        )
    other = param.device_mesh if isinstance(param, DTensor) else replicas_mesh(param)
    if other is not None and other is not mesh:
        raise ValueError(f"'{name}' is parallelized already, over {other}: expected that mesh, found {mesh}")

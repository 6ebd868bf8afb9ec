"""The parameters and buffers that a call of `fully_shard` takes, and the modules and parameters that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...batch_norm import check_converted
from ...comm import DeviceMesh
from ...tensor.dtensor.group_registry import group_of
from ...tensor.dtensor.replicated import renew_marks
from ..gather.extension import check_methods
from ..params.param import Slot
from .module import FSDPModule

Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]  # holder, attribute, full name; several if tied


class Found(NamedTuple):
    """The parameters and buffers that a call takes, and where the ignored ones are registered."""

    owners: Owners
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    ignored: set[Slot]


def check_mesh(mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> None:
    if len(mesh.shape) > 2:
        raise ValueError(
            f"fully_shard(mesh={mesh}): expected one axis to shard over, or two, of which the first replicates; name them, as "
            f"in mesh['{mesh.axis_names[-1]}']"
        )
    ranks, kept = mesh.shape[-1], reshard_after_forward
    if isinstance(kept, int) and not isinstance(kept, bool) and (kept < 1 or ranks % kept):
        raise ValueError(f"fully_shard(reshard_after_forward={kept}): expected a divisor of the {ranks} ranks sharded over")


def collect(modules: tuple[nn.Module, ...], mesh: DeviceMesh, ignored: set[nn.Parameter]) -> Found:
    """The parameters and buffers that this call takes: those of the modules outside of sharded modules in them."""
    found = Found({}, [], set())
    if not modules:
        raise ValueError("fully_shard: expected a module, found an empty list")
    for module in modules:
        _check_module(module)
    _check_apart(modules)
    for position, module in enumerate(modules):
        for name, holder in _outside_sharded(module, str(position) if len(modules) > 1 else ""):
            check_converted(name, holder)
            _check_materialised(name, holder)
            renew_marks(holder)
            for attribute, param in holder._parameters.items():
                if param in ignored:
                    found.ignored.add((ref(holder), attribute))
                elif param is not None:
                    full_name = f"{name}.{attribute}" if name else attribute
                    _check_param(full_name, param, modules, mesh)
                    found.owners.setdefault(param, []).append((holder, attribute, full_name))
            found.buffers.extend((holder, key, buffer) for key, buffer in holder._buffers.items() if buffer is not None)
    devices = {param.device.type: owned[0][2] for param, owned in found.owners.items()}
    if len(devices) > 1:
        names = ", ".join(f"'{name}' on {device}" for device, name in sorted(devices.items()))
        raise ValueError(f"'{kinds_of(modules)}' has parameters on several devices ({names}); move the module to one of them")
    return found


def kinds_of(modules: tuple[nn.Module, ...]) -> str:
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


def _outside_sharded(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """`module` and what is in it, with names, sharded modules inside left out. A module met twice comes twice (ties)."""
    yield name, module
    for child_name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside_sharded(child, f"{name}.{child_name}" if name else child_name)


def _check_materialised(name: str, holder: nn.Module) -> None:
    """Raise ValueError for a lazy module, whose parameters and buffers get their shapes in its first forward."""
    for attribute, tensor in (*holder._parameters.items(), *holder._buffers.items()):
        if tensor is not None and is_lazy(tensor):
            full_name = f"{name}.{attribute}" if name else attribute
            raise ValueError(
                f"'{full_name}' of a {type(holder).__name__} has no shape yet: run a forward "
                "of the model before fully_shard, with the same shapes on every rank, or give the module its sizes"
            )


def _check_param(name: str, param: nn.Parameter, modules: tuple[nn.Module, ...], mesh: DeviceMesh) -> None:
    group = group_of(param)
    if group is not None and any(module in modules for outer in group.modules for module in outer.modules()):
        kinds = kinds_of(modules)
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

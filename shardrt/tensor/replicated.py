"""Plain parameters that are replicated over a mesh: every rank of it holds the same values, and makes the same gradient.

Tensor parallelism marks what it does not shard; `fully_shard` then knows over which ranks a parameter lies, and that its
gradient is not to be averaged over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import DeviceMesh
from .dtensor import DTensor
from .placement import Placement

_meshes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # torch.Tensor -> DeviceMesh


def mark_replicated(param: torch.Tensor, mesh: DeviceMesh) -> None:
    """Note that a plain parameter is the same on all ranks of `mesh`. The caller has made it so; no communication."""
    _meshes[param] = mesh


def replicas_mesh(param: torch.Tensor) -> DeviceMesh | None:
    """The mesh over which a plain parameter was marked as replicated; None if it was not."""
    found: DeviceMesh | None = _meshes.get(param)
    return found


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """What is known of a module's parameter, whichever tensor it is by now.

    grad_placements: see `DTensor.grad_placements`; None: the parameter is plain, and replicated over `mesh`.
    """

    mesh: DeviceMesh
    grad_placements: tuple[Placement, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterMark:
        return self


@dataclass(slots=True, eq=False)
class ModuleMarks:
    """What is known of a module's parameters, by their names; they may be other tensors by now, assigned, copied or made empty.

    split: the module computes with this rank's part.   unstyled: it shares a part with a module whose style splits it, and has
    no style itself; with the full names.
    """

    marks: dict[str, ParameterMark] = field(default_factory=dict)
    split: set[str] = field(default_factory=set)
    unstyled: dict[str, str] = field(default_factory=dict)


def marks_of(module: nn.Module) -> ModuleMarks:
    """What `shardrt.parallel` keeps with the module; nothing of others."""
    found: ModuleMarks | None = module.__dict__.get("tp_state")
    return ModuleMarks() if found is None else found


def renew_marks(module: nn.Module) -> None:
    """Mark the parameters that a module has now, which may have replaced those that were marked."""
    for name, mark in marks_of(module).marks.items():
        param: torch.Tensor | None = module._parameters.get(name)
        if isinstance(param, DTensor):
            if mark.grad_placements is not None and param.spec.mesh is mark.mesh:
                param.grad_placements = mark.grad_placements
        elif param is not None and mark.grad_placements is None:
            mark_replicated(param, mark.mesh)

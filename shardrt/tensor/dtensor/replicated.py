"""Plain parameters that are replicated over a mesh: every rank of it holds the same values.

Tensor parallelism marks what it does not shard; `fully_shard` then knows over which ranks a parameter lies, and that its
gradient, which is the same on each, or a term on each, is not to be averaged over them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...comm import DeviceMesh
from ..placement.placement import Placement
from .dtensor import DTensor


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """What is known of a module's parameter, whichever tensor it is by now.

    grad_placements: see `DTensor.grad_placements`; plain parameters, which are replicated over `mesh`, have them as well.
    """

    mesh: DeviceMesh
    grad_placements: tuple[Placement, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterMark:
        return self


_marks: WeakIdKeyDictionary = WeakIdKeyDictionary()  # torch.Tensor -> ParameterMark


def mark_replicated(param: torch.Tensor, mesh: DeviceMesh, grad_placements: tuple[Placement, ...] | None = None) -> None:
    """Note that a plain parameter is the same on all ranks of `mesh`. The caller has made it so; no communication.

    grad_placements: see `DTensor.grad_placements`; None: its gradient is the same as well.
    """
    _marks[param] = ParameterMark(mesh, grad_placements)


def replicas_mesh(param: torch.Tensor) -> DeviceMesh | None:
    """The mesh over which a plain parameter was marked as replicated; None if it was not."""
    found: ParameterMark | None = _marks.get(param)
    return None if found is None else found.mesh


def grad_placements_of(param: torch.Tensor) -> tuple[Placement, ...] | None:
    """Those of a DTensor, or those that a plain parameter was marked with; None: those of the parameter."""
    found: ParameterMark | DTensor | None = param if isinstance(param, DTensor) else _marks.get(param)
    return None if found is None else found.grad_placements


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
        elif param is not None:
            mark_replicated(param, mark.mesh, mark.grad_placements)

"""Which parameter group owns a parameter. `shardrt.fsdp` fills this registry; error messages and its own checks read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...comm import Communicator, DeviceMesh


class Group(Protocol):
    """The owner of sharded parameters."""

    name: str
    mesh: DeviceMesh

    @property
    def stages(self) -> Communicator | None:
        """The ranks that have the other stages, if the parameters are those of a stage of a pipeline."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Those that were sharded together."""


_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()  # torch.Tensor -> ReferenceType[Group]


def set_group(param: torch.Tensor, group: Group) -> None:
    """Register `group` as the owner of `param`. Both are referenced weakly."""
    _groups[param] = ref(group)


def group_of(param: torch.Tensor) -> Group | None:
    """The group that owns `param`, which is an original or a sharded parameter; None if it has no owner."""
    found: ReferenceType[Group] | None = _groups.get(param)
    return None if found is None else found()


def stages_of(params: Iterable[torch.Tensor]) -> Communicator | None:
    """The ranks that have the other stages of the pipeline that one of these parameters is in; None without one."""
    found = (group.stages for param in params if (group := group_of(param)) is not None)
    return next(filter(None, found), None)


def owned() -> Iterator[tuple[torch.Tensor, Group]]:
    """All parameters that have an owner, originals among them, with it."""
    for param in list(_groups):
        if (group := group_of(param)) is not None:
            yield param, group

"""Buffers that ranks have not alike, and what has memory without values on some of them: compared at a root's first forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ....comm.ending.words import name_ranks
from ..module_apply import Unwritten, unwritten
from ..param_group import ParamGroup

_log = logging.getLogger("shardrt")


class _SameBuffer(NamedTuple):
    """What has to be the same wherever there is a buffer.

    shape: (), if it is not persistent: such a buffer may be as large as the rank's batch.
    """

    name: str
    dtype: str
    is_meta: bool
    persistent: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        kind = f"of shape {self.shape}, persistent" if self.persistent else "not persistent"
        return f"{self.dtype}, {kind}{', on the meta device' * self.is_meta}"


def compare(root: ParamGroup, names: Mapping[nn.Module, str]) -> None:
    """Refuse buffers that differ, and log what has no values, once. Collective.

    names: of the root's modules.   Cost: an exchange of a number, once for each runtime.
    Raises ValueError on every rank alike.
    """
    mesh, own = root.device_mesh, (list(_buffers(root, names)), unwritten(names))
    everyone = mesh.differing(own) or [own]  # alike on all
    _check([buffers for buffers, _ in everyone], root.name)
    if mesh.rank == 0 and (listed := _listed([found for _, found in everyone])):
        _log.warning(
            f"without values: {', '.join(listed)}: to_empty() moved them from the meta device, which gives them memory only: "
            "write to them before the next forward; no state dict has buffers that are not persistent (logged once)"
        )


def _buffers(root: ParamGroup, names: Mapping[nn.Module, str]) -> Iterator[_SameBuffer]:
    """Those of the ranks' common modules: experts, on another mesh, may be others on each rank."""
    elsewhere = {
        module
        for group in root.with_descendants()
        if group.device_mesh is not root.device_mesh
        for top in group.modules
        for module in top.modules()
    }
    for module, prefix in names.items():
        for attribute, buffer in module._buffers.items() if module not in elsewhere else ():
            if buffer is not None:
                persistent = attribute not in module._non_persistent_buffers_set
                shape = tuple(buffer.shape) if persistent else ()
                yield _SameBuffer(_joined(prefix, attribute), str(buffer.dtype), buffer.is_meta, persistent, shape)


def _joined(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute


def _check(everyone: Sequence[Sequence[_SameBuffer]], root: str) -> None:
    firsts = dict[str, tuple[int, _SameBuffer]]()
    for rank, buffers in enumerate(everyone):
        for buffer in buffers:
            first, expected = firsts.setdefault(buffer.name, (rank, buffer))
            if buffer != expected:
                raise ValueError(
                    f"first forward of '{root}': buffer '{buffer.name}' is {expected} on rank {first}, and {buffer} on rank "
                    f"{rank}: build the same model on every rank, or load a state dict into it"
                )


def _listed(everyone: Sequence[Unwritten]) -> list[str]:
    """Names, and ranks if not all of them. What state dicts have is listed only if other ranks have values."""
    having = dict[str, list[int]]()
    for rank, found in enumerate(everyone):
        for name in (*found.computed, *found.saved):
            having.setdefault(name, []).append(rank)
    computed = {name for found in everyone for name in found.computed}
    return [
        f"'{name}'" if len(ranks) == len(everyone) else f"'{name}' ({name_ranks(ranks)})"
        for name, ranks in having.items()
        if name in computed or len(ranks) < len(everyone)
    ]

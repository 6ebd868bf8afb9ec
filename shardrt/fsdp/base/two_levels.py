"""The ranks of a mesh axis in two levels: neighbours reduce gradients in full precision, then exchange codes with others."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from ...comm import Communicator, DeviceMesh, world
from ...kernels.reference import BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevels:
    """The ranks of an axis in two levels.

    within: this rank and its neighbours, which reduce in full precision; None: this rank alone.
    across: the ranks in the same place among their neighbours, which exchange codes.
    """

    within: Communicator | None
    across: Communicator

    @classmethod
    def open(cls, mesh: DeviceMesh, neighbours: int, role: str) -> TwoLevels | None:
        """The levels of a 1-D mesh, with its communicators for `role`; None if all ranks are neighbours. Collective."""
        if neighbours == mesh.size:
            return None
        if neighbours == 1:
            return cls(None, mesh.communicator(role))
        (axis,) = mesh.axis_names
        across, within = f"{axis}_across", f"{axis}_within"
        split = mesh.unflatten((mesh.size // neighbours, neighbours), (across, within))
        return cls(split[within].communicator(role), split[across].communicator(role))


def neighbours(mesh: DeviceMesh, full_precision_ranks: int | None) -> tuple[int, int]:
    """How many neighbouring ranks reduce in full precision: along the last axis of `mesh`, and along the first of two (else 1).

    full_precision_ranks: their product. None: the ranks of a node, as far as they are equally many on each; (1, 1) if the whole
    mesh lies within a node. If `mesh` has no more ranks than this number, all of them reduce in full precision.
    Raises ValueError for a number that the axes cannot be cut into.
    """
    shards, replicas = mesh.shape[-1], prod(mesh.shape[:-1])
    if full_precision_ranks is None:
        found = _on_node(mesh, -1), _on_node(mesh, 0) if len(mesh.shape) > 1 else 1
        return (1, 1) if found == (shards, replicas) else (found[0], gcd(found[1], BLOCK))
    if full_precision_ranks >= shards * replicas:
        return shards, replicas
    if shards % full_precision_ranks == 0:
        return full_precision_ranks, 1
    outer = full_precision_ranks // shards
    if full_precision_ranks == outer * shards and replicas % outer == 0 and BLOCK % outer == 0:
        return shards, outer
    whole = f", or a multiple of them by a power of two that divides the {replicas} replicas" if replicas > 1 else ""
    raise ValueError(
        f"QuantizationPolicy(full_precision_ranks={full_precision_ranks}) on {mesh}: expected a divisor of the {shards} ranks "
        f"sharded over{whole}"
    )


def _on_node(mesh: DeviceMesh, axis: int) -> int:
    """How many neighbouring ranks along an axis are on one node, in any part of the mesh.

    Invariant: the result is the same on all ranks of the mesh's communicator, since they make communicators by it. So it is
    computed only from the communicator's first rank in the world and from the distance between neighbours: within the
    communicator, each line along the axis begins at a multiple of the axis's whole extent, plus less than that distance.
    """
    line, everyone, per_node = mesh[mesh.axis_names[axis]].ranks, mesh.comm.ranks, world().ranks_per_node
    if len(line) == 1 or per_node is None or not (isinstance(line, range) and isinstance(everyone, range)):
        return 1
    distance = line.step * everyone.step
    before, rest = divmod(everyone.start // everyone.step, line.step)
    return 1 if rest or per_node % distance else gcd(len(line), per_node // distance, before)

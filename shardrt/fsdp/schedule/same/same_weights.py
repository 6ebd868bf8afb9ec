"""An error where ranks have sharded different weights, as after a seed of their own: compared at a root's first forward.

`fully_shard` takes from each rank its part of that rank's own model, so that the sharded one would be a mixture. What is
written in between, as a checkpoint that is loaded, makes up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from ....comm import Communicator, DeviceMesh, world
from ....tensor.dtensor.dtensor import DTensor
from ...params.param import ShardedParam
from ..param_group import ParamGroup


class _FoundWeight(NamedTuple):
    """A parameter on one rank. kept: whether its shard is what that rank had; None if it has none."""

    digest: str | None
    kept: bool | None


def compare(root: ParamGroup, groups: Sequence[ParamGroup]) -> None:
    """Compare some elements of each parameter, over the ranks of the root's mesh; on another mesh, over those of its shards.

    Collective. Cost: a host sync, and an exchange of a number for each mesh, once.
    Raises ValueError on every rank alike if several ranks have parts of parameters that differed, and have not written them.
    """
    for mesh in dict.fromkeys(group.device_mesh for group in groups):
        params = [param for group in groups if group.device_mesh is mesh for param in group.params]
        # Hazard: no communicator may be made here, which ranks outside of the mesh would have to take part in.
        among = mesh if mesh is root.device_mesh else next(group for group in groups if group.device_mesh is mesh).gather_comm
        if among.size > 1 and world().settings.check_weights:
            _compare_among(among, params, root.name)
        for param in params:
            param.first = None


def _compare_among(among: DeviceMesh | Communicator, params: Sequence[ShardedParam], root: str) -> None:
    digests = [None if param.first is None else param.first.digest() for param in params]
    if among.differing(digests) is None:
        return
    everyone = among.exchange([_found(*each) for each in zip(params, digests, strict=True)])
    differ = [
        (param.name, found)
        for param, found in zip(params, zip(*everyone, strict=True), strict=True)
        if len({each.digest for each in found if each.digest is not None}) > 1
    ]
    givers = {rank for _, found in differ for rank, each in enumerate(found) if each.kept}
    if len(givers) > 1:
        name, found = differ[0]
        ranks = among.ranks if isinstance(among, Communicator) else among.mesh.flatten().tolist()
        (first, digest), *others = [(r, each.digest) for r, each in zip(ranks, found, strict=True) if each.digest is not None]
        other = next(rank for rank, another in others if another != digest)
        more = f", and {len(differ) - 1} more," if len(differ) > 1 else ""
        raise ValueError(
            f"first forward of '{root}': '{name}'{more} had other values on rank {other} than on rank {first} when "
            "fully_shard took each rank's part of its own, so that the model is a mixture: build the same model on every rank, "
            "with torch.manual_seed(...) of the same seed before it, or load weights into the sharded model: a checkpoint, or "
            "rank 0's by set_model_state_dict (docs/from_ddp.md; SHARDRT_CHECK_WEIGHTS=0 permits mixtures)"
        )


def _found(param: ShardedParam, digest: str | None) -> _FoundWeight:
    shard = cast(DTensor, param.sharded)._local_tensor
    return _FoundWeight(digest, None if param.first is None else param.first.is_kept(shard))

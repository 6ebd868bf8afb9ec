"""shardrt-stress: what `comm/stress` does, and two faults that need a model. `python -m shardrt.stress` is the same."""

from __future__ import annotations

import sys
from functools import partial

from .comm.stress.__main__ import main as main
from .comm.stress.faults.acts import Scene
from .comm.stress.faults.faults import FAULTS as FAULTS
from .comm.stress.faults.faults import Fault, When


def make_nan(scene: Scene) -> None:
    import torch  # as shardrt's functions: when it acts, not for --help

    from . import clip_grad_norm_, fully_shard

    model = torch.nn.Linear(4, 4).to(scene.world.device)
    fully_shard(model)
    model(torch.ones(2, 4, device=scene.world.device)).sum().backward()
    if scene.is_victim and model.weight.grad is not None:
        model.weight.grad.mul_(float("nan"))
    clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def diverge(scene: Scene) -> None:
    import torch

    from . import check_replicas

    model = torch.nn.Linear(4, 4, device=scene.world.device)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 2.0 if scene.is_victim else 1.0)
    check_replicas(model)


_call = partial(Fault, when=When.CALL, program="shardrt.stress")

for _fault in (
    _call(
        "nan",
        "has a gradient that is not finite, in `clip_grad_norm_(..., error_if_nonfinite=True)`",
        "raises on **every** rank, naming rank and parameters",
        make_nan,
        says=r"weight.* rank VICTIM\b",
    ),
    _call(
        "diverged",
        "has other values in a replica, in `check_replicas(model, optimizer)`",
        "raises on **every** rank, naming rank and parameter",
        diverge,
        says=r"rank VICTIM\b",
    ),
):
    FAULTS[_fault.name] = _fault


if __name__ == "__main__":
    sys.exit(main())

"""The experts of a GPT on several ranks: who has which, and what keeps their loads even."""

from __future__ import annotations

from torch import nn

from common.models import Mixture, MLPExperts
from shardrt.comm import DeviceMesh
from shardrt.parallel import ExpertParallel, expert_load, parallelize_module, update_expert_bias

RATE = 0.001  # of the biases that choose experts: DeepSeek-V3's, arXiv 2412.19437


def divide_experts(model: nn.Module, mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """Give each of `ep` neighbouring ranks some of the experts of each layer. Collective.

    mesh: the ranks with batches of their own, which share all other parameters.
    Returns: those with the same experts as this one, over which they are to be sharded.
    """
    axes = mesh.unflatten((int(mesh.size) // ep, ep), ("edp", "ep"))
    parallelize_module(model, axes["ep"], {"blocks.*.mixture.experts": ExpertParallel()})
    return axes["edp"]


def experts_of(model: nn.Module) -> list[MLPExperts]:
    """The modules of experts, one of each layer."""
    return [module for module in model.modules() if isinstance(module, MLPExperts)]


def even_out(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the experts that had few rows in this step get more in the next. Collective.

    mesh: the ranks with batches of their own. Cost: one all-reduce of the counts of all layers.
    """
    for name, load in expert_load(model, mesh).items():
        mixture = model.get_submodule(name.removesuffix(".experts"))
        assert isinstance(mixture, Mixture)
        update_expert_bias(mixture.bias, load, RATE)

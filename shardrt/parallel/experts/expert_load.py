"""How many rows each expert gets, and the bias that evens this out without a loss of its own."""

from __future__ import annotations

import torch
from torch import nn

from ...comm import DeviceMesh, ReduceOp, current_stream, world
from ...tensor.dtensor.replicated import marks_of
from ..styles.state import ParallelState


def expert_load(model: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, torch.Tensor]:
    """Rows for each expert since the last call, over all ranks, by the names of the modules with `ExpertParallel`. Collective.

    mesh: the ranks with batches of their own; None: all ranks.
    Rows are counted in forwards in training, a token once for each expert that it chose, and not again where a checkpoint
    computes activations again. Returns tensors (E,) of int64, on the mesh's device, the same on every rank.
    Cost: one all-reduce of the integers of all layers; no host sync.
    """
    mesh = world().mesh if mesh is None else mesh
    named = [(name, marks_of(module)) for name, module in model.named_modules()]
    states = {name: state for name, state in named if isinstance(state, ParallelState) and state.experts is not None}
    if not states:
        return {}
    sizes = [state.experts.experts for state in states.values() if state.experts is not None]
    zeros = torch.zeros(max(sizes), dtype=torch.int64, device=mesh.device)
    loads = [zeros[:size] if state.load is None else state.load for size, state in zip(sizes, states.values(), strict=True)]
    together, stream = torch.cat(loads), current_stream(mesh.device)
    mesh.communicator("experts").all_reduce(together, together, ReduceOp.SUM, stream=stream).wait(stream)
    for state in states.values():
        state.load = None
    return dict(zip(states, together.split(sizes), strict=True))


@torch.no_grad()
def update_expert_bias(bias: torch.Tensor, load: torch.Tensor, rate: float = 0.001) -> None:
    """Raise, in place, the bias of experts with less than the mean load by `rate`, and lower that of those with more.

    bias: (E,), what a router adds to the scores by which it chooses, not to the weights, such as `e_score_correction_bias` of
    transformers' DeepSeek-V3.   load: (E,), of `expert_load`, once for each optimizer step. Equal on every rank, no collective.
    The rule is that of Wang et al. (arXiv 2408.15664), and of DeepSeek-V3 (arXiv 2412.19437), whose rate was 0.001.
    Raises ValueError for another shape.
    """
    if bias.shape != load.shape:
        raise ValueError(
            f"update_expert_bias: a bias of shape {tuple(bias.shape)}, a load of shape {tuple(load.shape)}: expected the same"
        )
    below_mean = torch.sign(load.sum() - load * len(load))  # exact, in integers
    bias.add_(below_mean.to(bias.device, bias.dtype), alpha=rate)

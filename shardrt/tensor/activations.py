"""Operations on activations that are `DTensor`s. What would need other ranks' elements is refused: nobody asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_internals import tree_leaves, tree_map_only
from .dtensor import DTensor
from .placement import Replicate, Spec


def run_on_activations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], activations: Sequence[DTensor]) -> Any:
    """Run an operation on replicated activations, on the local tensors. No communication.

    The results are replicated activations; plain tensors if a plain tensor takes part.
    Raises NotImplementedError if one of `activations` is sharded or partial.
    """
    spec = activations[0].spec
    for activation in activations:
        if any(not isinstance(placement, Replicate) for placement in activation.spec.placements):
            raise NotImplementedError(
                f"{func} on an activation of shape {tuple(activation.shape)}, {activation.spec.placements}: its result needs "
                "elements of other ranks, and activations are not gathered unasked. Use .to_local() (use_local_output=True of "
                "the style) for this rank's part, or .redistribute([Replicate()]) first"
            )
    local_args, local_kwargs = tree_map_only(DTensor, lambda value: value._local_tensor, (args, kwargs))
    out = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return args[0]
    if any(type(value) is torch.Tensor and value.dim() for value in tree_leaves((args, kwargs))):
        return out
    return tree_map_only(torch.Tensor, lambda values: _replicated(values, spec), out)


def _replicated(values: torch.Tensor, like: Spec) -> DTensor:
    return DTensor(values, Spec(like.mesh, like.replicated, values.shape, gathers=False))

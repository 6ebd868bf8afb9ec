"""Many tensors into the views of one flat buffer, with cast: one call whatever their number.

The caller makes the views once; a step passes two lists. On CUDA the `_foreach_` operations are one launch per dtype pair.
"""

from __future__ import annotations

import torch


def pack_into(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Copy `tensors[i]` into `views[i]`, cast to its dtype. Shapes match pairwise; strides are free.

    Cost: every byte read once and written once.
    """
    if views:
        torch._foreach_copy_(views, tensors)


def add_into(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    """Add `tensors[i]` to `views[i]`, in the dtype of the view. Shapes match pairwise; strides are free.

    Cost: every view read and written once, every tensor read once.
    """
    if views:
        torch._foreach_add_(views, tensors)

"""Many tensors into the views of one flat buffer, with cast: one call whatever their number.

The caller makes the views once; a step passes two lists. On CUDA the `_foreach_` operations are one launch per dtype pair.
"""

from __future__ import annotations

import torch


def pack_into(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    """Copy `scale * tensors[i]` into `views[i]`, cast to its dtype. Shapes match pairwise; strides are free.

    scale: applied in the view's dtype.
    Cost: every byte read once and written once; with a scale on top, every view read and written once more.
    """
    if views:
        torch._foreach_copy_(views, tensors, non_blocking=True)
        if scale != 1.0:
            torch._foreach_mul_(views, scale)


def add_into(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    """Add `scale * tensors[i]` to `views[i]`, in the dtype of the view. Shapes match pairwise; strides are free.

    Cost: every view read and written once, every tensor read once.
    """
    if views:
        torch._foreach_add_(views, tensors, alpha=scale)

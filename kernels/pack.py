"""Many tensors into the views of one flat buffer, with cast: one call whatever their number; on CUDA one launch.

With the roles swapped the same calls unpack a flat buffer.
"""

from __future__ import annotations

import torch

from . import cuda, host


def pack_into(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    """Copy `scale * tensors[i]` into `views[i]`, cast to its dtype. Shapes match pairwise; strides are free.

    scale: applied in the wider of the two dtypes, at least float32, before the one rounding to the view's.
    Cost: every byte read once and written once; on the host a scaled view once more, unless the cast narrows.
    """
    _pack(views, tensors, scale, False)


def add_into(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    """Add `scale * tensors[i]` to `views[i]`, in the wider of the two dtypes. Shapes match pairwise; strides are free.

    Cost: every view read and written once, every tensor read once.
    """
    _pack(views, tensors, scale, True)


def _pack(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float, accumulate: bool) -> None:
    if views:
        (cuda if views[0].is_cuda else host).pack(views, tensors, scale, accumulate)

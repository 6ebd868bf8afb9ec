"""Copy many tensors into the views of a flat buffer, with casts, in one call: on CUDA one launch for each pair of dtypes.

With the arguments exchanged, the same calls unpack a flat buffer.
"""

from __future__ import annotations

import torch

from . import cuda, host
from .pairs import as_pairs


def pack_into(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    """Copy `scale * tensors[i]` into `views[i]`, cast to its dtype. Shapes must match pairwise; strides are arbitrary.

    scale: applied in the wider of the two dtypes, at least float32, before the only rounding, to the view's dtype.
    Cost: each byte is read and written once; on the host a scaled view once more, unless the cast narrows.
    """
    _pack(views, tensors, scale, False)


def add_into(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float = 1.0) -> None:
    """Add `scale * tensors[i]` to `views[i]`, in the wider of the two dtypes. Shapes must match; strides are arbitrary.

    Cost: each view is read and written once, each tensor read once.
    """
    _pack(views, tensors, scale, True)


def _pack(views: list[torch.Tensor], tensors: list[torch.Tensor], scale: float, accumulate: bool) -> None:
    if views and views[0].is_complex():  # then so are all: complex parameters have groups of their own
        views, tensors = as_pairs(views), as_pairs(tensors)
    if views:
        (cuda if views[0].is_cuda else host).pack(views, tensors, scale, accumulate)

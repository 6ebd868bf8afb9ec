"""The memory of a local shard as a storage: shards are views of larger buffers, whose storage others share."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack


def storage_of(local: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a plain tensor, from its first element to its last, as a storage that keeps it alive.

    None for a tensor without elements, and for a subclass, which has its memory elsewhere.
    """
    if type(local) is not torch.Tensor or not local.numel():
        return None
    if local.is_meta:
        return local.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    data = local.detach().as_strided((last + 1,), (1,)).view(torch.uint8)  # DLPack lacks some dtypes
    return from_dlpack(data).untyped_storage()

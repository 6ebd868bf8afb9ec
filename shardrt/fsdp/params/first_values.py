"""A few elements of a parameter as it was before `fully_shard`, to tell whether all ranks had the same."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Self

import torch
from torch import nn

from ...tensor.dtensor.dtensor import DTensor

_COUNT = 8  # of weights that are drawn, no two ranks have one alike


class FirstValues(NamedTuple):
    """What this rank had.

    whole: elements of the whole parameter, or of this rank's part of a tensor-parallel one.   shard: those of the shard that it
    took of them; other ones there now have been written since.
    """

    whole: torch.Tensor
    shard: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, shard: torch.Tensor, *, tensor_parallel: bool) -> Self | None:
        """None for what has no elements to read. Cost: 10 us, and 512 bytes at most, until the first forward."""
        whole = values._local_tensor if isinstance(values, DTensor) and tensor_parallel else values
        if type(whole) not in (torch.Tensor, nn.Parameter) or whole.is_meta or not whole.is_contiguous():
            return None
        return cls(_sample(whole), _sample(shard))

    def digest(self) -> str:
        """Of the whole parameter's elements."""
        return blake2b(bytes(self.whole.view(torch.uint8).tolist()), digest_size=8).hexdigest()

    def is_kept(self, shard: torch.Tensor) -> bool | None:
        """Whether the shard has not been written since; None if it has no elements."""
        now = _sample(shard)
        return torch.equal(now.view(torch.uint8), self.shard.view(torch.uint8)) if len(now) else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    count = min(_COUNT, tensor.numel())
    return tensor.detach().as_strided((count,), (tensor.numel() // max(1, count),)).clone()

"""Operations over many tensors at once. Knows nothing of communication or sharding."""

from .norm import rescale, squared_norm, total_norm
from .pack import add_into, pack_into

__all__ = ["add_into", "pack_into", "rescale", "squared_norm", "total_norm"]

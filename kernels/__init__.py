"""Multi-tensor operations on the host and on CUDA, independent of communication and sharding."""

from .norm import rescale, squared_norm, total_norm
from .pack import add_into, pack_into
from .quantize import decode_sum, encode, round_trip

__all__ = ["add_into", "decode_sum", "encode", "pack_into", "rescale", "round_trip", "squared_norm", "total_norm"]

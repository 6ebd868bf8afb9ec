"""Collectives on explicit streams: MPI for CPU tensors, NCCL through CuPy for CUDA tensors. Independent of sharding."""

from typing import TYPE_CHECKING

from .program.lazy import lazy

if TYPE_CHECKING:
    from .exports import *
else:
    __getattr__, __dir__ = lazy(__name__)

"""Checkpoints: in PyTorch's DCP format and as safetensors, saved atomically, loaded on any number of ranks."""

from typing import TYPE_CHECKING

from ..comm.program.lazy import lazy

if TYPE_CHECKING:
    from .exports import *
else:
    __getattr__, __dir__ = lazy(__name__)

"""Tensor and sequence parallelism: `torch.distributed.tensor.parallel`, for modules whose forward sees plain local tensors."""

from .api import parallelize_module
from .loss import loss_parallel
from .styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from .vocabulary import cross_entropy

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "cross_entropy",
    "loss_parallel",
    "parallelize_module",
]

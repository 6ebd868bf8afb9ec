"""Tensor, sequence and context parallelism, for modules whose forward sees plain local tensors.

The first two have the names of `torch.distributed.tensor.parallel`; `context/` has the third.
"""

from .api import parallelize_module
from .context import context_parallel, context_parallel_shard, context_parallel_unshard, tokens_per_rank
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
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "cross_entropy",
    "loss_parallel",
    "parallelize_module",
    "tokens_per_rank",
]

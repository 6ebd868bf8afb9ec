"""Tensor, sequence, context and expert parallelism, for modules whose forward sees plain local tensors.

Plans are those of `torch.distributed.tensor.parallel`; `context/` has what cuts sequences.
"""

from .boundaries.loss import loss_parallel
from .boundaries.vocabulary import cross_entropy
from .context import context_parallel, context_parallel_shard, context_parallel_unshard, flex_attention, tokens_per_rank
from .experts.expert_load import expert_load, update_expert_bias
from .experts.expert_style import ExpertParallel
from .styles.api import parallelize_module
from .styles.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    SummedGradients,
)

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "SummedGradients",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "cross_entropy",
    "expert_load",
    "flex_attention",
    "loss_parallel",
    "parallelize_module",
    "tokens_per_rank",
    "update_expert_bias",
]

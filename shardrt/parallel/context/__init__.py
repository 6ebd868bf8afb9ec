"""Context parallelism: attention over a sequence whose tokens are cut over the ranks of a mesh."""

from .flex import flex_attention
from .mode import context_parallel
from .sequences import context_parallel_shard, context_parallel_unshard, tokens_per_rank

__all__ = ["context_parallel", "context_parallel_shard", "context_parallel_unshard", "flex_attention", "tokens_per_rank"]

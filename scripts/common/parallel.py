"""The plan of the GPT for tensor parallelism: one for shardrt's styles and for torch's, which have the same names."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def gpt_plan(styles: ModuleType, placements: ModuleType, **linear: Any) -> dict[str, Any]:
    """The plan of a GPT with sequence parallelism: between the matrices, each rank has its part of the tokens.

    styles: `shardrt.parallel`, or `torch.distributed.tensor.parallel`.
    placements: the module with Shard and Replicate: `shardrt`, or `torch.distributed.tensor`.
    linear: more arguments of the blocks' matrices, such as async_tp.
    The logits are a DTensor in parts of the vocabulary.
    """
    whole, tokens = placements.Replicate(), placements.Shard(1)
    return {
        "tokens": styles.RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "positions": styles.RowwiseParallel(input_layouts=whole, output_layouts=placements.Shard(0)),  # (T, C)
        "blocks.*.*_norm": styles.SequenceParallel(),
        "blocks.*.attention": styles.PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole),
        "blocks.*.attention.qkv": styles.ColwiseParallel(**linear),
        "blocks.*.attention.out": styles.RowwiseParallel(output_layouts=tokens, **linear),
        "blocks.*.up": styles.ColwiseParallel(input_layouts=tokens, **linear),
        "blocks.*.down": styles.RowwiseParallel(output_layouts=tokens, **linear),
        "norm": styles.SequenceParallel(),
        "head": styles.ColwiseParallel(input_layouts=tokens, output_layouts=placements.Shard(-1), use_local_output=False),
    }

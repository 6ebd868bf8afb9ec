"""What a backward computes again instead of keeping it, by the real contexts of torch.utils.checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from ...torch_internals import OpOverload, aten_operator

Contexts = Callable[[], Any]  # the two of a block's forward, and of its recomputation

_MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
_ATTENTION = frozenset(
    aten_operator(f"_scaled_dot_product_{name}")
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)


def checkpoint_blocks(blocks: Sequence[nn.Module], again: bool | int | str) -> None:
    """Have blocks recompute what `Job.checkpoint_activations` says. Call it before `fully_shard`.

    A number n: every n-th block, from the n-th one on.
    """
    every = again if isinstance(again, int) else 1
    for block in blocks[every - 1 :: every] if again else ():
        checkpoint_block(block, selective_contexts if again == "op" else noop_context_fn)


def checkpoint_block(block: nn.Module, contexts: Contexts = noop_context_fn) -> None:
    """Keep only the inputs of a block, and what the contexts keep, and run its forward again in the backward.

    Call it before `fully_shard`.
    """
    inner = block.forward

    @functools.wraps(inner)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    block.forward = recomputed


def selective_contexts() -> Any:
    """Those that keep the results of fused attention, and of every second matrix multiplication from the first one on.

    That is the mode "op" of torchtitan, which counts `mm`; layers with a bias are an `addmm`, and are counted too.
    """
    counts = {False: 0, True: 0}  # matrix multiplications, when it runs first and when it runs again

    def policy(context: Any, func: OpOverload, *_: object, **__: object) -> CheckpointPolicy:
        is_kept = func.overloadpacket in _ATTENTION
        if func in _MATMULS:
            counts[context.is_recompute] += 1
            is_kept = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

"""FlexAttention in `context_parallel`: this rank's queries, the gathered keys and values, and masks of whole sequences.

A mask and a change of scores are functions of positions in the sequence. A rank's query q has another position there, which the
functions are given in its place; keys and values are gathered in the order of the sequence, and have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from ...torch_internals import left_mode, visible_to_compiler
from ..boundaries.axis import owned
from ..boundaries.relayout import AS_ARRIVES
from .agreement import agreed
from .call import AttentionCall
from .cut import SequenceCut
from .methods.kernels import wide
from .mode import current_context
from .transport import BlockLayout, Ring


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    kernel: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """torch's FlexAttention; in `context_parallel(method="all_gather")`, over the tokens of all ranks.

    query: (B, H, T, D), key (B, K, T, D) and value (B, K, T, E) of this rank's T tokens.   Returns (B, H, T, E),
    and what `options` ask for.
    score_mod, block_mask: as without context parallelism: of positions in the whole sequence of S tokens, (.., .., S, S).
    kernel: `torch.compile(torch.nn.attention.flex_attention.flex_attention)`, made once; None: torch's function as it is, which
    makes all T * S scores, and knows no gradients on the CPU.   options: more arguments for it.
    Outside of the context it is that function. Collective in it. Cost: keys and values of all S tokens on each rank, until the
    backward; the first call with a block_mask in a context looks at each of its T * S places, with some 20 bytes for each.
    Raises in it, on every rank before anything is sent: ValueError for sizes that do not fit, a rank without tokens, and what
    differs between ranks; NotImplementedError for another method, for document_ids, which a mask can tell as well, and for a
    mask of blocks alone; RuntimeError where a mask_mod failed on another rank.
    """
    run: Callable[..., Any] = kernel or torch_flex_attention
    context = current_context()
    if context is None:
        return run(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)
    ring, (cut, documents, method) = context.ring, context.settings

    def described() -> object:
        if method != "all_gather" or documents is not None:
            raise NotImplementedError(
                f"method={method!r}, {'no ' if documents is None else ''}document_ids: expected method='all_gather', and no "
                "document_ids: a mask_mod that compares them does the same"
            )
        if cut.total < ring.size * (2 if cut.balanced else 1):
            raise ValueError(f"a sequence of {cut.total} tokens on {ring.size} ranks: expected some on each rank")
        if block_mask is not None and tuple(block_mask.shape[-2:]) != (cut.total, cut.total):
            raise ValueError(
                f"block_mask of {tuple(block_mask.shape)}: expected (.., .., {cut.total}, {cut.total}), of the whole sequence"
            )
        if block_mask is not None and block_mask.mask_mod is noop_mask and block_mask.sparsity() > 0:
            raise NotImplementedError("block_mask of blocks alone, which ranks do not have whole: expected one with a mask_mod")
        call = AttentionCall(query, key, value, None, 0.0, False, scale, enable_gqa)
        found = call.described(ring, cut, documents, method), key.requires_grad or value.requires_grad, score_mod is None
        if block_mask is None:
            return found
        _local_mask(context.masks, block_mask, places)  # here, so that all ranks hear of it if a mask_mod fails
        return *found, tuple(block_mask.shape)

    with left_mode(context):  # which refuses torch's function, whose compiler looks at it
        places = context.places(query.device)
        agreed(ring, "flex_attention in context_parallel", described)
        context.local_calls.attended = True
        keys, values = _WholeSequence.apply(key, value, ring, cut)
        scores = None if score_mod is None else _local_scores(score_mod, places)
        mask = None if block_mask is None else _local_mask(context.masks, block_mask, places)
        return run(query, keys, values, scores, mask, scale, enable_gqa, **options)


def _local_scores(score_mod: Callable[..., torch.Tensor], places: torch.Tensor) -> Callable[..., torch.Tensor]:
    return visible_to_compiler(lambda score, row, head, query, key: score_mod(score, row, head, places[query], key))


def _local_mask(known: dict[int, tuple[Any, Any]], whole: BlockMask, places: torch.Tensor) -> BlockMask:
    """The rows of a mask at these places. known: masks and their rows, by the id of the mask, which stays as long."""
    if id(whole) not in known:
        (rows, heads, _, keys), mask_mod = whole.shape, whole.mask_mod
        local = create_block_mask(
            visible_to_compiler(lambda row, head, query, key: mask_mod(row, head, places[query], key)),
            *(rows, heads, len(places), keys),
            device=places.device,
            BLOCK_SIZE=whole.BLOCK_SIZE,
        )
        known[id(whole)] = whole, local
    made: BlockMask = known[id(whole)][1]
    return made


class _WholeSequence(torch.autograd.Function):
    """Keys (B, K, T, D) and values (B, K, T, E) of each rank -> those of all S tokens, in the order of the sequence."""

    @staticmethod
    def forward(
        ctx: Any, keys: torch.Tensor, values: torch.Tensor, ring: Ring, cut: SequenceCut
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.ring, ctx.cut, ctx.passes = ring, cut, AS_ARRIVES
        ctx.layout = layout = BlockLayout.of(keys, values, cut.longest)
        gathered = ring.start_gather(layout.packed(keys, values)).result()
        made = [part.new_empty((*part.shape[:2], cut.total, part.shape[3])) for part in (keys, values)]
        for place, part in _places(layout, cut, made, gathered):
            place.copy_(part)
        return owned(made[0]), owned(made[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        ring, cut, layout = ctx.ring, ctx.cut, ctx.layout
        terms = grads[0].new_zeros((ring.size, layout.numel), dtype=wide(grads[0].dtype))
        for place, part in _places(layout, cut, grads, terms):
            part.copy_(place)
        summed = ring.start_reduce_scatter(terms).result()
        keys, values = layout.views(summed, cut.length(ring.rank))
        return keys.to(grads[0].dtype), values.to(grads[1].dtype), None, None


def _places(
    layout: BlockLayout, cut: SequenceCut, whole: Sequence[torch.Tensor], blocks: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each chunk of tokens in the whole keys and values, and in the ranks' blocks (N, n)."""
    for owner, block in enumerate(blocks):
        for tensor, part in zip(whole, layout.views(block, cut.length(owner)), strict=True):
            sizes = [stop - start for start, stop in cut.chunks(owner)]
            for (start, stop), chunk in zip(cut.chunks(owner), part.split(sizes, 2), strict=True):
                yield tensor[:, :, start:stop], chunk

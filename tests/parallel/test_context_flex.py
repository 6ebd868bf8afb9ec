"""FlexAttention over a sequence that is cut over ranks, beside torch's own on one process, and beside the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from ranks import on_ranks
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import context_parallel, context_parallel_shard, context_parallel_unshard, flex_attention

HEADS, WIDTH = 4, 8
Index = torch.Tensor


def window(row: Index, head: Index, query: Index, key: Index) -> torch.Tensor:
    """The last nine tokens; on the second row and the first head, all earlier ones."""
    return (query >= key) & ((query - key < 9) | ((row == 1) & (head == 0)))


def slopes(score: torch.Tensor, row: Index, head: Index, query: Index, key: Index) -> torch.Tensor:
    """Scores fall with the distance, by head (ALiBi, arXiv 2108.12409)."""
    return score - (query - key) * 0.1 * (head + 1)


def by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """FlexAttention by matrices of scores, with gradients on every device; a kernel as `torch.compile` makes one."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    row, head, q, k = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    scores = scores if score_mod is None else score_mod(scores, row, head, q, k)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(row, head, q, k), -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


def mask_of(tokens: int, block: int = 128) -> BlockMask:
    return create_block_mask(window, 2, HEADS, tokens, tokens, device="cpu", BLOCK_SIZE=block)


def blocks_alone(tokens: int) -> BlockMask:
    """Blocks of 6 tokens, the first of which attend to each other alone."""
    number = torch.tensor([[[1, 2]]], dtype=torch.int32)
    return BlockMask.from_kv_blocks(number, torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32), BLOCK_SIZE=tokens // 2)


def mask_that_fails(tokens: int, *, fails: bool) -> BlockMask:
    mask = create_block_mask(window, 2, HEADS, tokens, tokens, device="cpu")
    if fails:

        def fail(*index: Index) -> torch.Tensor:
            raise IndexError("of the caller")

        mask.mask_mod = fail
    return mask


def inputs(tokens: int, heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(2, count, tokens, WIDTH, dtype=dtype) for count in (HEADS, heads, heads)]


def mesh_of(world: World) -> DeviceMesh:
    return DeviceMesh(world.comm, (world.size,), ("cp",))


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(
    ("masked", "scored", "heads"), [(True, True, 2), (True, False, 4), (False, True, 4), (False, False, 1)]
)
def test_as_torch_on_one_process(world: World, balanced: bool, masked: bool, scored: bool, heads: int) -> None:
    """An odd number of tokens; the block mask's blocks are not the ranks' parts."""
    tokens, mesh = 37, mesh_of(world)
    given = inputs(tokens, heads)
    mods: dict[str, Any] = {"score_mod": slopes if scored else None, "enable_gqa": heads != HEADS, "scale": 0.4}
    mask = mask_of(tokens, 16) if masked else None
    expected = torch_flex_attention(*given, block_mask=mask, **mods)
    assert torch.equal(flex_attention(*given, block_mask=mask, **mods), expected), "outside of the context it is torch's"
    parts = context_parallel_shard(mesh, given, [2] * 3, balanced=balanced)
    with context_parallel(mesh, seq_len=tokens, method="all_gather", balanced=balanced):
        out = [flex_attention(*parts, block_mask=mask, **mods) for _ in range(2)][1]
    (found,) = context_parallel_unshard(mesh, [out], [2], balanced=balanced)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.rest
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("balanced", [True, False])
def test_gradients_with_a_kernel_of_the_caller(world: World, balanced: bool, dtype: torch.dtype) -> None:
    tokens, mesh = 21, mesh_of(world)
    given, mask = inputs(tokens, 2), mask_of(tokens)
    whole = [tensor.clone().requires_grad_() for tensor in given]
    expected = by_formula(*whole, score_mod=slopes, block_mask=mask, enable_gqa=True)
    expected.square().sum().backward()
    parts = [part.to(dtype).requires_grad_() for part in context_parallel_shard(mesh, given, [2] * 3, balanced=balanced)]
    with context_parallel(mesh, seq_len=tokens, method="all_gather", balanced=balanced):
        out = flex_attention(*parts, score_mod=slopes, block_mask=mask, enable_gqa=True, kernel=by_formula)
        out.square().sum().backward()
    found = context_parallel_unshard(mesh, [out, *(part.grad for part in parts)], [2] * 4, balanced=balanced)
    tolerance = 1e-12 if dtype is torch.float64 else 0.1
    for mine, its in zip(found, (expected, *(tensor.grad for tensor in whole)), strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=tolerance, atol=tolerance)


@on_ranks(2, 3)
def test_what_is_refused(world: World) -> None:
    """On every rank; the context goes on."""
    tokens, mesh, last = 12, mesh_of(world), world.rank == world.size - 1
    parts = context_parallel_shard(mesh, inputs(tokens), [2] * 3)

    def attend(*args: Any, method: Any = "all_gather", documents: torch.Tensor | None = None, seq_len: int = tokens) -> None:
        with context_parallel(mesh, seq_len=seq_len, method=method, document_ids=documents):
            flex_attention(*args)

    for message, error, args, options in (
        ("method='ring', no document_ids: expected method='all_gather'", NotImplementedError, parts, {"method": "ring"}),
        ("document_ids: expected", NotImplementedError, parts, {"documents": torch.zeros(tokens, dtype=torch.int64)}),
        (r"block_mask of \(2, 4, 6, 6\): expected \(.., .., 12, 12\)", ValueError, (*parts, None, mask_of(6)), {}),
        ("expected one with a mask_mod", NotImplementedError, (*parts, None, blocks_alone(tokens)), {}),
        ("of the caller", Exception, (*parts, None, mask_that_fails(tokens, fails=last)), {}),
        ("expected the same on every rank", ValueError, [*parts[:2], parts[2].clone().requires_grad_(last)], {}),
        ("expected this rank's", ValueError, [part[:, :, :1] for part in parts], {}),
        ("expected the same on every rank", ValueError, (*parts, slopes if last else None), {}),
        ("2 tokens on . ranks: expected some on each rank", ValueError, parts, {"seq_len": 2}),
    ):
        with pytest.raises(error, match=message):
            attend(*args, **options)
    attend(*parts)

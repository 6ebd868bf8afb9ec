"""Attention over a sequence that is cut over ranks, beside torch's own on one process."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import CheckpointError, checkpoint

from ranks import on_ranks, refused
from shardrt.comm import Communicator, DeviceMesh, Work, World
from shardrt.comm.core.calls import CallList, Hook
from shardrt.comm.groups.control import hooked
from shardrt.parallel import context_parallel, context_parallel_shard, context_parallel_unshard, tokens_per_rank
from shardrt.parallel.context.cut import SequenceCut
from shardrt.parallel.context.methods.kernels import FORMULA, Attended, Block, kernel_for
from shardrt.parallel.context.transport import ring_of

METHODS = ("ring", "all_gather", "ulysses")
every_method = pytest.mark.parametrize("method", METHODS)


def cp_mesh(world: World) -> DeviceMesh:
    return DeviceMesh(world.comm, (world.size,), ("cp",))


def random(world: World, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).to(world.device)


def document_mask(ids: torch.Tensor) -> torch.Tensor:
    ids = ids if ids.dim() == 2 else ids[None]
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def compare_with_torch(
    mesh: DeviceMesh,
    tensors: list[torch.Tensor],
    tolerance: float,
    documents: torch.Tensor | None = None,
    balanced: bool = True,
    method: Any = "ring",
    in_memory: tuple[int, int] | None = None,
    **options: Any,
) -> None:
    """Attention and its gradients by all ranks, and by torch's own over the whole sequence, in float64.

    in_memory: two dims that are exchanged in the memory of the ranks' tensors.
    """
    *inputs, grad = tensors
    whole = [tensor.double().clone().requires_grad_() for tensor in inputs]
    reference = options | {"is_causal": False}
    mask = torch.ones(grad.shape[2], grad.shape[2], dtype=torch.bool, device=grad.device)
    mask = mask if documents is None else mask & document_mask(documents)
    mask = mask.tril() if options["is_causal"] else mask
    sign = 1
    if options.get("scale", 1) <= 0:
        # torch's own is nan where such a scale meets a mask.
        reference |= {"scale": -options["scale"] or 1.0}
        sign = -1 if options["scale"] else 0
    expected = F.scaled_dot_product_attention(whole[0] * sign, *whole[1:], attn_mask=mask, **reference)
    expected.backward(grad.double())

    exchanged = lambda x: x if in_memory is None else x.transpose(*in_memory).contiguous().transpose(*in_memory)  # noqa: E731
    parts = [exchanged(each).requires_grad_() for each in context_parallel_shard(mesh, inputs, [2] * 3, balanced=balanced)]
    assert all(part.is_contiguous() for part in parts) == (in_memory is None) or parts[0].shape[2] <= 1
    grad = grad.clone()
    with context_parallel(mesh, buffers=[grad], buffer_seq_dims=[2], document_ids=documents, balanced=balanced, method=method):
        out = F.scaled_dot_product_attention(*parts, **options)
        out.backward(exchanged(grad))
    assert out.dtype is inputs[0].dtype
    found = context_parallel_unshard(mesh, [out, *(part.grad for part in parts)], [2] * 4, balanced=balanced)
    for mine, its in zip(found, (expected, *(tensor.grad for tensor in whole)), strict=True):
        torch.testing.assert_close(mine.double(), its, rtol=tolerance, atol=tolerance)


@every_method
@pytest.mark.parametrize("causal", [True, False])
@on_ranks(1, 2, 3, 4)
def test_equal_to_one_process(world: World, causal: bool, method: str) -> None:
    """Over lengths that N and 2N do not divide, fewer tokens than ranks, and documents alike or not in the rows."""
    mesh = cp_mesh(world)
    for tokens, balanced, documents in itertools.product((1, 5, 24, 37), (True, False), (None, 1, 2)):
        ids = None
        if documents is not None:
            ids = torch.stack([torch.arange(tokens) * pieces // tokens for pieces in (3, 5)[:documents]]).to(world.device)
            ids = ids[0] if documents == 1 else ids
        tensors = [random(world, 2, 12, tokens, 6) for _ in range(4)]
        compare_with_torch(mesh, tensors, 1e-12, ids, balanced, method, is_causal=causal, scale=0.3)


@every_method
@on_ranks(2, 3)
def test_few_heads_of_keys_and_other_values(world: World, method: str) -> None:
    """enable_gqa, and values of another width, which torch's fused attention does not take."""
    mesh = cp_mesh(world)
    for width in (6, 4):
        torch.manual_seed(0)
        tensors = [random(world, 1, heads, 13, size) for heads, size in ((12, 6), (6, 6), (6, width), (12, width))]
        compare_with_torch(mesh, tensors, 1e-12, method=method, is_causal=True, enable_gqa=True)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@on_ranks(2, 3)
def test_dtypes(world: World, dtype: torch.dtype, method: str) -> None:
    """As close to the result in float64 as one process is: a rounding of the dtype."""
    tensors = [random(world, 2, 6, 50, 8, dtype=dtype) for _ in range(4)]
    compare_with_torch(cp_mesh(world), tensors, 1e-5 if dtype is torch.float32 else 3e-2, method=method, is_causal=True)


@every_method
@on_ranks(2)
def test_strides(world: World, method: str) -> None:
    """Channels that are not in a row, tokens before heads, and the gradient of a sum, which is one number in memory."""
    mesh = cp_mesh(world)
    for dims in ((2, 3), (1, 2)):
        tensors = [random(world, 2, 4, 13, 6) for _ in range(4)]
        compare_with_torch(mesh, tensors, 1e-12, method=method, in_memory=dims, is_causal=True)
    part = context_parallel_shard(mesh, [tensors[0]], [2])[0].requires_grad_()
    with context_parallel(mesh, seq_len=13, method=method):
        F.scaled_dot_product_attention(part, part, part, is_causal=True).sum().backward()
    whole = tensors[0].clone().requires_grad_()
    F.scaled_dot_product_attention(whole, whole, whole, is_causal=True).sum().backward()
    found = context_parallel_unshard(mesh, [part.grad], [2])[0]
    torch.testing.assert_close(found, whole.grad, rtol=1e-12, atol=1e-12)


class Sent(Hook):
    """The names of the collectives of one communicator, and the elements of their inputs."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.calls: list[tuple[str, int]] = []

    def called(self, calls: CallList, work: Work) -> None:
        self.calls += [(call.name, call.inp.numel()) for call in calls if call.comm is self.comm and call.inp is not None]


@on_ranks(2, 4)
def test_few_heads_travel(world: World) -> None:
    """The elements sent: keys and values with their own heads, padded to the longest part."""
    mesh = cp_mesh(world)
    parts = context_parallel_shard(mesh, [random(world, 1, heads, 21, 8) for heads in (8, 2, 2)], [2] * 3)
    sent = Sent(ring_of(mesh).comm)
    for method, expected in (("ring", "send"), ("all_gather", "all_gather")):
        sent.calls.clear()
        with hooked(sent), context_parallel(mesh, seq_len=21, method=method), torch.no_grad():
            F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        longest = max(SequenceCut(21, world.size, True).length(rank) for rank in range(world.size))
        assert sent.calls == [(expected, 2 * 2 * longest * 8)] * (world.size - 1 if method == "ring" else 1)
    mesh.close()


@pytest.mark.parametrize("total", [0, 1, 7, 16, 29])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_pair_of_tokens_is_in_one_piece(total: int, size: int) -> None:
    for balanced, causal in itertools.product((True, False), (True, False)):
        cut = SequenceCut(total, size, balanced)
        tokens = [[token for chunk in cut.chunks(rank) for token in range(*chunk)] for rank in range(size)]
        assert sorted(itertools.chain(*tokens)) == list(range(total))
        pairs = [
            (tokens[rank][query], tokens[owner][key])
            for rank, owner in itertools.product(range(size), repeat=2)
            for _, queries, keys, is_causal in cut.pieces(rank, owner, causal, None)
            for query, key in itertools.product(range(*queries), range(*keys))
            if not is_causal or query - queries[0] >= key - keys[0]
        ]
        assert sorted(pairs) == [(q, k) for q in range(total) for k in range(total) if k <= q or not causal]


def test_balanced_ranks_compute_as_much() -> None:
    """Within a chunk; in one run each, the last of four ranks computes seven times what the first does."""
    work = {}
    for balanced in (True, False):
        cut = SequenceCut(8 * 50, 4, balanced)
        work[balanced] = [
            sum((q[1] - q[0]) * (k[1] - k[0]) / (2 if causal else 1) for _, q, k, causal in pieces)
            for pieces in ([piece for owner in range(4) for piece in cut.pieces(rank, owner, True, None)] for rank in range(4))
        ]
    assert len(set(work[True])) == 1
    assert work[False][3] == 7 * work[False][0]


def test_the_formula_is_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it takes a few queries at a time."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, 9, 4, dtype=torch.float64) for heads in (4, 2, 2, 4))
    for scores, causal in itertools.product((2**24, 100), (True, False)):
        monkeypatch.setattr("shardrt.parallel.context.methods.kernels._SCORES", scores)
        block = Block(q, k, v, causal, 0.3)
        fused = kernel_for(q, v)
        assert fused is not FORMULA
        theirs, ours = fused.forward(block), FORMULA.forward(block)
        both = [*zip(ours, theirs, strict=True), *zip(FORMULA.backward(block, ours, grad), fused.backward(block, ours, grad))]  # noqa: B905
        for mine, its in both:
            torch.testing.assert_close(mine, its, rtol=1e-13, atol=1e-13)
    assert isinstance(ours, Attended)


# ---------------------------------------------------------------------- the context


@on_ranks(1, 3)
def test_buffers_are_cut_and_restored(world: World) -> None:
    mesh = cp_mesh(world)
    tokens, table = torch.arange(14, device=world.device).view(2, 7), torch.randn(7, 3, device=world.device)
    labels, before = tokens.t().clone().t(), table.clone()
    own = [token for chunk in SequenceCut(7, world.size, True).chunks(world.rank) for token in range(*chunk)]
    with context_parallel(mesh, buffers=[tokens, table, labels], buffer_seq_dims=[1, 0, -1], no_restore_buffers={labels}):
        assert tokens.tolist() == [own, [7 + token for token in own]]
        assert torch.equal(table, before[own])
    assert torch.equal(tokens.cpu(), torch.arange(14).view(2, 7))
    assert torch.equal(table, before)
    assert labels.tolist() == [own, [7 + token for token in own]]
    assert torch.equal(context_parallel_unshard(mesh, [labels], [1])[0], tokens)


@on_ranks(2)
def test_restored_after_an_exception(world: World) -> None:
    tokens = torch.arange(8)
    with pytest.raises(KeyError), context_parallel(cp_mesh(world), buffers=[tokens], buffer_seq_dims=[0]):
        raise KeyError
    assert tokens.tolist() == list(range(8))
    with context_parallel(cp_mesh(world), seq_len=8):
        pass


class Attending(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x * 3, is_causal=True)


@every_method
@on_ranks(2)
def test_recomputed_in_backward(world: World, method: str) -> None:
    """Inside of the context; outside, where attention would be another one, torch says so."""
    mesh = cp_mesh(world)
    x = random(world, 1, 2, 9, 4)
    whole = x.clone().requires_grad_()
    Attending()(whole).square().sum().backward()
    part = context_parallel_shard(mesh, [x], [2])[0].requires_grad_()
    with context_parallel(mesh, seq_len=9, method=method):
        checkpoint(Attending(), part, use_reentrant=False).square().sum().backward()
    found = context_parallel_unshard(mesh, [part.grad], [2])[0]
    torch.testing.assert_close(found, whole.grad, rtol=1e-12, atol=1e-12)

    with context_parallel(mesh, seq_len=9, method=method):
        loss = checkpoint(Attending(), part, use_reentrant=False).sum()
    with pytest.raises(CheckpointError):
        loss.backward()


@on_ranks(2)
def test_a_name_that_was_imported_before(world: World) -> None:
    """It is torch's own function, also in the context."""
    assert by_name is F.scaled_dot_product_attention
    x = random(world, 1, 2, 4, 8)
    with context_parallel(cp_mesh(world), seq_len=8):
        assert by_name is not F.scaled_dot_product_attention
        assert torch.equal(by_name(x, x, x, is_causal=True), F.scaled_dot_product_attention(x, x, x, is_causal=True))
    assert by_name is F.scaled_dot_product_attention


@every_method
@on_ranks(2)
def test_autocast(world: World, method: str) -> None:
    """In bfloat16, as torch's own on one process; gradients are in the dtype of the inputs."""
    mesh, kind = cp_mesh(world), world.device.type
    x = random(world, 1, 2, 12, 4, dtype=torch.float32)
    whole, part = x.clone().requires_grad_(), context_parallel_shard(mesh, [x], [2])[0].requires_grad_()
    with torch.autocast(kind, torch.bfloat16):
        expected = F.scaled_dot_product_attention(whole, whole.bfloat16(), whole, is_causal=True)
    with context_parallel(mesh, seq_len=12, method=method):
        with torch.autocast(kind, torch.bfloat16):
            out = F.scaled_dot_product_attention(part, part.bfloat16(), part, is_causal=True)
        out.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert out.dtype is torch.bfloat16
    assert part.grad.dtype is torch.float32
    found = context_parallel_unshard(mesh, [out, part.grad], [2, 2])
    for mine, its in zip(found, (expected, whole.grad), strict=True):
        torch.testing.assert_close(mine, its, rtol=3e-2, atol=3e-2)


@on_ranks(2)
def test_dropout_of_ulysses(world: World) -> None:
    """Each weight is dropped or multiplied by 1 / (1 - p), on each rank others; recomputed, the same; the generator moves."""
    mesh = cp_mesh(world)
    x, values = (
        torch.zeros(1, 2, 8, 16, device=world.device),
        torch.eye(16, device=world.device)[None, None].expand(1, 2, 16, 16),
    )
    part = context_parallel_shard(mesh, [values], [2])[0]
    with context_parallel(mesh, seq_len=16, method="ulysses"):
        seen = [F.scaled_dot_product_attention(x, x, part, dropout_p=0.5) for _ in range(2)]
        torch.manual_seed(0)
        again = F.scaled_dot_product_attention(x, x, part, dropout_p=0.5)
    weights = context_parallel_unshard(mesh, seen, [2, 2])
    assert set((weights[0] * 16).unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0][:, 0], weights[0][:, 1])
    assert torch.equal(again, seen[0])


# ---------------------------------------------------------------------- refused, on every rank


@on_ranks(2, 4)
def test_bad_contexts(world: World) -> None:
    mesh, tokens = cp_mesh(world), torch.arange(8)
    grid = DeviceMesh(world.comm, (world.size // 2, 2), ("dp", "cp"))

    def enter(mesh: DeviceMesh = mesh, **options: Any) -> None:
        with context_parallel(mesh, **options):
            pass

    refused(r"expected a mesh of one axis, such as mesh\['cp'\]", lambda: enter(grid, seq_len=8))
    refused("expected buffers, or the number of tokens", enter)
    refused(r"buffer 0 of shape \(8,\): its seq dim 1 is out of range", lambda: enter(buffers=[tokens], buffer_seq_dims=[1]))
    refused("found 1 and 2", lambda: enter(buffers=[tokens], buffer_seq_dims=[0, 0]))
    refused(r"the buffers have \[8, 7\] tokens", lambda: enter(buffers=[tokens, tokens[:7]], buffer_seq_dims=[0, 0]))
    with pytest.raises(ValueError, match="needs a gradient and cannot be cut in place"):
        enter(buffers=[torch.ones(8, requires_grad=True)], buffer_seq_dims=[0])
    refused("buffer 1 is given twice", lambda: enter(buffers=[tokens, tokens], buffer_seq_dims=[0, 0]))
    refused("not among the buffers", lambda: enter(buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers={tokens.clone()}))
    refused("expected one of", lambda: enter(seq_len=8, method="circle"))
    refused("a document has tokens in two places", lambda: enter(seq_len=4, document_ids=torch.tensor([0, 1, 1, 0])))
    refused("whole on every rank", lambda: enter(seq_len=4, document_ids=torch.tensor([0, 1])))
    with pytest.raises(ValueError, match="nested in another context_parallel"), context_parallel(mesh, seq_len=8):
        enter(seq_len=8)
    enter(seq_len=8)

    # On one rank alone.
    last = world.rank == world.size - 1
    with pytest.raises(ValueError, match=r"expected the same on every rank|expected one number"):
        enter(buffers=[tokens[: 7 if last else 8]], buffer_seq_dims=[0])
    refused("out of range", lambda: enter(buffers=[tokens], buffer_seq_dims=[1 if last else 0]))
    refused("expected the same on every rank", lambda: enter(seq_len=8, document_ids=torch.tensor([0] * 7 + [int(last)])))
    refused("expected parts of", lambda: context_parallel_unshard(mesh, [torch.arange(3 + 2 * last)], [0]))
    assert tokens.tolist() == list(range(8))


@on_ranks(2, 4)
def test_bad_attention(world: World) -> None:
    mesh, last = cp_mesh(world), world.rank == world.size - 1
    tokens = 4 * world.size
    x = random(world, 2, 3, 4, 8)

    def attend(*inputs: torch.Tensor, method: Any = "ring", documents: Any = None, **options: Any) -> None:
        with context_parallel(mesh, seq_len=tokens, method=method, document_ids=documents):
            F.scaled_dot_product_attention(*(inputs or (x, x, x)), **options)

    refused("attn_mask: expected none", lambda: attend(attn_mask=torch.ones(4, 4, dtype=torch.bool)), NotImplementedError)
    refused("use 'ulysses', or no dropout", lambda: attend(dropout_p=0.1), NotImplementedError)
    refused(f"'ulysses' expects multiples of {world.size}", lambda: attend(method="ulysses"))
    refused("expected this rank's 4 tokens in each", lambda: attend(x, x[:, :, :3], x))
    refused("expected equal numbers of heads", lambda: attend(x, x[:, :1], x[:, :1]))
    refused("expected one batch size and dtype", lambda: attend(x, x.float(), x))
    refused("expected .batch, heads, tokens, channels.", lambda: attend(x[0], x[0], x[0]), NotImplementedError)
    refused("document_ids has 3 rows", lambda: attend(documents=torch.zeros(3, tokens, dtype=torch.long)))
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().to(world.device)
    match = "multi_head_attention_forward in context_parallel"
    with pytest.raises(NotImplementedError, match=match), context_parallel(mesh, seq_len=tokens):
        attention(x[:, 0], x[:, 0], x[:, 0], need_weights=False)

    # On one rank alone, the others are told before anything is sent.
    refused("expected this rank's 4 tokens", lambda: attend(*([x[:, :, :3]] * 3 if last else [x] * 3)))
    refused("expected the same on every rank", lambda: attend(is_causal=last))
    attend()


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_torchs_flex_attention(world: World, compiled: bool) -> None:
    """By name, before its compiler sees it."""
    x = random(world, 2, 3, 4, 8)
    attend = torch.compile(torch_flex_attention, backend="eager") if compiled else torch_flex_attention
    match = "flex_attention in context_parallel .* or shardrt.parallel.flex_attention"
    with pytest.raises(NotImplementedError, match=match), context_parallel(cp_mesh(world), seq_len=8):
        attend(x, x, x)


@on_ranks(1, 2)
def test_arguments_of_another_kind(world: World) -> None:
    mesh, tokens = cp_mesh(world), torch.arange(8)

    def enter(mesh: Any = mesh, **options: Any) -> None:
        with context_parallel(mesh, **options):
            pass

    for call in (
        lambda: enter(None, seq_len=8),
        lambda: context_parallel_shard(None, [tokens], [0]),
        lambda: context_parallel_unshard(None, [tokens], [0]),
        lambda: tokens_per_rank(None, tokens),
    ):
        refused(r"mesh=None\): expected a shardrt.DeviceMesh", call, TypeError)
    nested: Any = [[tokens, tokens]]
    refused(r"buffers\[0\]: expected a Tensor, found a list", lambda: enter(buffers=nested, buffer_seq_dims=[0]))
    refused(r"buffers\[0\]: expected a Tensor, found a list", lambda: context_parallel_shard(mesh, nested, [0]))
    refused("buffers: expected a list of Tensor, found a Tensor", lambda: enter(buffers=tokens, buffer_seq_dims=[0]))
    refused("buffer_seq_dims: expected a list of int, found a int", lambda: enter(buffers=[tokens], buffer_seq_dims=0))
    with pytest.raises(ValueError, match=r"no_restore_buffers\[0\]: expected a Tensor, found a list"):
        enter(buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers=nested)
    refused("document_ids: expected a tensor of integers, found a list", lambda: enter(seq_len=8, document_ids=[0] * 8))
    refused("expected labels in a tensor, found a list", lambda: tokens_per_rank(mesh, [1, 2]), TypeError)
    last = world.rank == world.size - 1
    with pytest.raises(ValueError, match=r"buffers\[0\]: expected a Tensor, found a list"):
        enter(buffers=nested if last else [tokens], buffer_seq_dims=[0])
    assert tokens.tolist() == list(range(8))


# ---------------------------------------------------------------------- told at the end


@every_method
@pytest.mark.parametrize("scale", [-0.3, 0.0])
@on_ranks(1, 2, 3)
def test_scales_that_are_not_positive(world: World, scale: float, method: str) -> None:
    tensors = [random(world, 1, 6, 13, 8) for _ in range(4)]
    for causal in (True, False):
        compare_with_torch(cp_mesh(world), tensors, 1e-12, method=method, is_causal=causal, scale=scale)


@pytest.mark.parametrize("kept", [False, True])
@on_ranks(2)
def test_writes_into_buffers(world: World, kept: bool) -> None:
    """Told, unless the buffer is kept."""
    mesh = cp_mesh(world)
    read, table = torch.arange(8, device=world.device), torch.zeros(8, device=world.device)
    dropped = {table} if kept else None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with context_parallel(mesh, buffers=[read, table], buffer_seq_dims=[0, 0], no_restore_buffers=dropped):
            table.add_(read)
    assert len(seen) == (not kept)
    assert all("buffers [1] were written to in the block" in str(one.message) for one in seen)
    assert all(Path(one.filename).name == Path(__file__).name for one in seen)
    whole = context_parallel_unshard(mesh, [table], [0])[0] if kept else table
    assert whole.tolist() == [token * kept for token in range(8)]

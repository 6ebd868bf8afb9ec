"""Context parallelism beside what else replaces attention, recomputes, fails, or differs between ranks."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.utils.checkpoint import CheckpointError, checkpoint

from ranks import on_ranks, refused
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import context_parallel, context_parallel_shard, context_parallel_unshard, tokens_per_rank
from shardrt.parallel.context import mode
from shardrt.parallel.context.methods.ulysses import _drawn_seed
from shardrt.parallel.context.transport import Gathering, Rotation, Transport, ring_of

every_method = pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])


def cp_mesh(world: World) -> DeviceMesh:
    return DeviceMesh(world.comm, (world.size,), ("cp",))


def whole_input(world: World) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(1, 4, 9, 8, dtype=torch.float64).to(world.device)


def attend(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, is_causal=True)


def attend_by_name(x: torch.Tensor) -> torch.Tensor:
    return by_name(x, x * 2, x * 3, is_causal=True)


# ---------------------------------------------------------------------- what the context replaces


@on_ranks(2)
def test_attention_that_the_user_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's again at the end; in the block, with torch's own for the exchange of heads."""
    mesh, x = cp_mesh(world), whole_input(world)
    expected = attend(x)

    def replacement(*args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("not for the context to call")

    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    for method in ("ring", "ulysses"):
        with context_parallel(mesh, seq_len=9, method=method):
            part = attend(context_parallel_shard(mesh, [x], [2])[0])
        assert F.scaled_dot_product_attention is replacement
        torch.testing.assert_close(context_parallel_unshard(mesh, [part], [2])[0], expected, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_one_context_in_a_process(world: World) -> None:
    """A second one is refused in another thread as well, and leaves the first one as it is."""
    mesh, problems = cp_mesh(world), []

    def enter() -> None:
        try:
            with context_parallel(mesh, seq_len=8):
                pass
        except ValueError as error:
            problems.append(str(error))

    with context_parallel(mesh, seq_len=8):
        inside = F.scaled_dot_product_attention
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert F.scaled_dot_product_attention == inside
    assert len(problems) == 1
    assert "beside one of another thread" in problems[0]
    enter()
    assert len(problems) == 1


@pytest.mark.parametrize("place", ["taken", "set"])
@on_ranks(2)
def test_a_cut_that_fails(world: World, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers before it are as they were, also those that need not be restored."""
    mesh, original = cp_mesh(world), mode.taken
    buffers = [torch.arange(8, device=world.device), torch.arange(8, device=world.device), Unsettable(torch.arange(8))]
    count = [0]

    def failing(*args: Any) -> torch.Tensor:
        count[0] += 1
        if place == "taken" and count[0] == 3:
            raise MemoryError
        return original(*args)

    monkeypatch.setattr(mode, "taken", failing)
    error = MemoryError if place == "taken" else PermissionError
    with (
        pytest.raises(error),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0] * 3, no_restore_buffers={buffers[1]}),
    ):
        raise AssertionError("the block is not entered")
    assert all(buffer.tolist() == list(range(8)) for buffer in buffers)
    with context_parallel(mesh, seq_len=8):
        pass


class Unsettable(torch.Tensor):
    def set_(self, *source: Any) -> Any:
        raise PermissionError


@on_ranks(2)
def test_inference_tensors(world: World) -> None:
    mesh = cp_mesh(world)
    with torch.inference_mode():
        tokens = torch.arange(8, device=world.device)
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0]):
            assert tokens.numel() == 4
    first = torch.arange(8, device=world.device)
    match = "buffer 1 was made in inference mode"
    with pytest.raises(ValueError, match=match), context_parallel(mesh, buffers=[first, tokens], buffer_seq_dims=[0, 0]):
        pass
    assert first.tolist() == tokens.tolist() == list(range(8))


# ---------------------------------------------------------------------- recomputation, and outputs


@every_method
@on_ranks(2)
def test_reentrant_checkpoints_in_the_block(world: World, method: str) -> None:
    mesh, x = cp_mesh(world), whole_input(world)
    whole = x.clone().requires_grad_()
    attend(whole).square().sum().backward()
    part = context_parallel_shard(mesh, [x], [2])[0].requires_grad_()
    with context_parallel(mesh, seq_len=9, method=method):
        checkpoint(attend, part, use_reentrant=True).square().sum().backward()
    found = context_parallel_unshard(mesh, [part.grad], [2])[0]
    torch.testing.assert_close(found, whole.grad, rtol=1e-12, atol=1e-12)


@every_method
@on_ranks(2)
def test_a_checkpoint_that_calls_by_name(world: World, method: str) -> None:
    """torch recomputes where no mode sees the name: its check finds other tensors."""
    mesh = cp_mesh(world)
    part = context_parallel_shard(mesh, [whole_input(world)], [2])[0].requires_grad_()
    with context_parallel(mesh, seq_len=9, method=method):
        loss = checkpoint(attend_by_name, part, use_reentrant=False).sum()
        with pytest.raises(CheckpointError):
            loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputed_dropout_of_ulysses(world: World, reentrant: bool) -> None:
    """The gradient of the values has the weights that the forward had: with ones on the diagonal they are its output."""
    mesh = cp_mesh(world)
    x = torch.zeros(1, 2, 8, 16, dtype=torch.float64, device=world.device)
    values = torch.eye(16, dtype=torch.float64, device=world.device).expand(1, 2, 16, 16)
    grad = torch.randn(1, 2, 16, 16, dtype=torch.float64).to(world.device)
    part, grad_part = context_parallel_shard(mesh, [values, grad], [2, 2])
    part.requires_grad_()
    dropping = lambda v: F.scaled_dot_product_attention(x, x, v, dropout_p=0.5)  # noqa: E731
    with context_parallel(mesh, seq_len=16, method="ulysses"):
        out = checkpoint(dropping, part, use_reentrant=reentrant)
        torch.rand(3, device=world.device)  # the generator is elsewhere in the backward
        out.backward(grad_part)
    weights, found = context_parallel_unshard(mesh, [out, part.grad], [2, 2])
    assert set((weights * 16).unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(found, weights.transpose(-1, -2) @ grad, rtol=1e-12, atol=1e-12)


@every_method
@on_ranks(1, 2)
def test_outputs_can_be_written_to(world: World, method: str) -> None:
    """As torch's own: by what does not need them for gradients, or else with autograd's error in the backward."""
    mesh = cp_mesh(world)
    part = context_parallel_shard(mesh, [whole_input(world)], [2])[0].requires_grad_()
    with context_parallel(mesh, seq_len=9, method=method):
        attend(part).sum().backward()
        once = part.grad
        part.grad = None
        out = attend(part)
        out.mul_(2)
        if method == "ulysses" and world.size > 1:
            out.sum().backward()
            assert torch.equal(part.grad, 2 * once)
        elif method != "ulysses":
            refused("modified by an inplace operation", out.sum().backward, RuntimeError)


@every_method
@pytest.mark.parametrize("needed", ["q", "k", "v", "kv"])
@on_ranks(2)
def test_some_need_gradients(world: World, method: str, needed: str) -> None:
    mesh, x = cp_mesh(world), whole_input(world)
    whole = [x.clone().requires_grad_(name in needed) for name in "qkv"]
    parts = context_parallel_shard(mesh, [x] * 3, [2] * 3)
    for name, part in zip("qkv", parts, strict=True):
        part.requires_grad_(name in needed)
    F.scaled_dot_product_attention(*whole, is_causal=True).square().sum().backward()
    with context_parallel(mesh, seq_len=9, method=method):
        F.scaled_dot_product_attention(*parts, is_causal=True).square().sum().backward()
    for part, its in zip(parts, whole, strict=True):
        assert (part.grad is None) == (its.grad is None)
        if its.grad is not None:
            found = context_parallel_unshard(mesh, [part.grad], [2])[0]
            torch.testing.assert_close(found, its.grad, rtol=1e-12, atol=1e-12)


@every_method
@on_ranks(2)
def test_an_empty_batch(world: World, method: str) -> None:
    for width in (8, 4):  # fused, and by the formula
        x, values = (torch.randn(0, 2, 4, size, device=world.device, requires_grad=True) for size in (8, width))
        with context_parallel(cp_mesh(world), seq_len=8, method=method):
            F.scaled_dot_product_attention(x, x, values, is_causal=True).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


# ---------------------------------------------------------------------- memory, seeds, numbers of labels


@pytest.mark.parametrize(("transport", "forward", "backward"), [(Rotation, 2, 5), (Gathering, 5, 10)])
@on_ranks(4)
def test_blocks_that_a_rank_holds(world: World, transport: type[Transport], forward: int, backward: int) -> None:
    """As the table of transport.py has them, on four ranks, counted while a step runs and in blocks of one dtype."""
    ring, numel, most = ring_of(cp_mesh(world)), 1237, [0]

    def pack() -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.float64, device=world.device)

    def count() -> None:
        storages = {
            each.data_ptr(): each.nbytes() // (8 * numel)
            for tensor in gc.get_objects()
            if type(tensor) is torch.Tensor and tensor.dtype is torch.float64 and tensor.numel() and tensor.numel() % numel == 0
            for each in [tensor.untyped_storage()]
        }
        most[0] = max(most[0], sum(storages.values()))

    def terms(owner: int, block: torch.Tensor) -> torch.Tensor:
        made = torch.ones_like(block)
        count()
        return made

    transport.visit(ring, pack, lambda owner, block: count())
    assert most[0] == forward
    most[0] = 0
    assert transport.gradients(ring, pack, terms).unique().tolist() == [4.0]
    assert most[0] == backward


def test_seeds_of_a_gpu() -> None:
    """By the device's generator, in which tensor parallel ranks differ, and other ones for each call."""
    seen = set()
    for seed in (1, 2):
        state = {"offset": 0}
        generator: Any = SimpleNamespace(
            device=torch.device("cuda"),
            initial_seed=lambda seed=seed: seed,
            get_offset=lambda state=state: state["offset"],
            set_offset=lambda offset, state=state: state.update(offset=offset),
        )
        seen |= {_drawn_seed(generator) for _ in range(3)}
        assert state["offset"] == 12
    assert len(seen) == 6


@on_ranks(1, 3)
def test_the_dtype_of_a_loss(world: World) -> None:
    """A loss in float32, bfloat16 or float64 divided by the number of labels; ranks have 2, 3 and 4."""
    mesh = cp_mesh(world)
    labels = torch.tensor([5] * (2 + world.rank) + [-100, -100], device=world.device)
    for dtype, expected in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        loss = torch.ones((), dtype=dtype, device=world.device)
        assert (loss / tokens_per_rank(mesh, labels)).dtype is expected
    assert tokens_per_rank(mesh, labels, dtype=torch.float64).item() == (3.0 if world.size == 3 else 2.0)


# ---------------------------------------------------------------------- refused, on every rank


@on_ranks(2, 3)
def test_what_one_rank_alone_gives(world: World) -> None:
    mesh, last = cp_mesh(world), world.rank == world.size - 1
    tokens = torch.arange(3 * world.size, device=world.device)
    part, same = tokens[:3], "expected the same on every rank"

    ids: Any = [0, 1] if last else None
    with (
        pytest.raises(ValueError, match="expected a tensor of integers, found a list"),
        context_parallel(mesh, seq_len=8, document_ids=ids),
    ):
        pass
    x = torch.zeros(1, 1, 3, 4, device=world.device)
    scale: Any = "no number" if last else None
    with pytest.raises(ValueError, match=same), context_parallel(mesh, seq_len=3 * world.size, balanced=False):
        F.scaled_dot_product_attention(x, x, x, scale=scale)

    refused(same, lambda: context_parallel_shard(mesh, [tokens], [0], balanced=last))
    refused(same, lambda: context_parallel_unshard(mesh, [part], [0], balanced=last))
    refused(same, lambda: context_parallel_unshard(mesh, [part.float() if last else part], [0]))
    refused(same, lambda: context_parallel_unshard(mesh, [torch.zeros(3, 4 + last)], [0]))
    refused(same, lambda: context_parallel_unshard(mesh, [torch.zeros(3, 3)], [int(last)]))
    refused(same, lambda: context_parallel_unshard(mesh, [part] * (1 + last), [0] * (1 + last)))
    assert torch.equal(context_parallel_unshard(mesh, [part + 3 * world.rank], [0], balanced=False)[0], tokens)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attend(x @ self.weight)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2)
def test_compiled_models(world: World, backend: str, method: Any) -> None:
    mesh, x = cp_mesh(world), whole_input(world)
    whole, model = Plain().to(world.device), Plain().to(world.device)
    expected = whole(x)
    expected.square().sum().backward()
    part = context_parallel_shard(mesh, [x], [2])[0]
    with context_parallel(mesh, seq_len=9, method=method):
        out = torch.compile(model, backend=backend)(part)
        out.square().sum().backward()
    torch.testing.assert_close(context_parallel_unshard(mesh, [out], [2])[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(mesh.exchange(model.weight.grad)), whole.weight.grad, rtol=1e-12, atol=1e-12)

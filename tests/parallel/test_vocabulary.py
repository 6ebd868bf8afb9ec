"""Embeddings and cross-entropy on vocabulary shards, compared with torch's on one process."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ranks import on_ranks, refused
from shardrt import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import cross_entropy, loss_parallel
from shardrt.parallel.boundaries.vocabulary import masked_embedding

VOCABULARIES = (1, 3, 7, 16, 101)
ROWS = 6


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def classes(*shape: int, total: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(total, shape, generator=torch.Generator().manual_seed(seed))


def own(world: World, full: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """A leaf with this rank's shard by torch's rule for uneven sizes."""
    return Shard(dim).resolve(full.shape, world.size).local_shard(full, world.rank).clone().requires_grad_()


@contextmanager
def calls(world: World) -> Iterator[list[str]]:
    """The collectives of the block, as the recorder names them."""
    since, found = time.time(), list[str]()
    yield found
    with tempfile.TemporaryDirectory() as folder:
        dump = json.loads(world.recorder.dump(Path(folder) / "dump.json").read_text())
    found += [call["what"].split("(")[0].split()[0] for call in dump["calls"] if call["called"] > since]


# ---------------------------------------------------------------------- embeddings


def embedded(world: World, table: torch.Tensor, tokens: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the ranks' terms, and the gradient of the table, whole."""
    weight = own(world, table)
    first = Shard(0).resolve(table.shape, world.size).rows[: world.rank]
    term = masked_embedding(tokens, weight, sum(first), table.shape[0], **options)
    (term * torch.arange(1.0, 1 + term.numel()).view(term.shape)).sum().backward()
    assert weight.grad is not None
    whole = DTensor.from_local(term.detach(), world.mesh, [Partial()]).full_tensor()
    return whole, DTensor.from_local(weight.grad, world.mesh, [Shard(0)], table.shape).full_tensor()


@on_ranks(1, 2, 3, 4)
def test_the_terms_of_an_embedding_add_up(world: World) -> None:
    for total, dtype in itertools.product(VOCABULARIES, (torch.float64, torch.bfloat16)):
        table = drawn(total, 5, dtype=dtype)
        for padding_idx, kind in ((None, torch.int64), (0, torch.int32), (total - 1, torch.int64), (-1, torch.int64)):
            for shape in ((), (4,), (2, 3), (0, 3)):
                tokens = classes(*shape, total=total).to(kind)
                expected = table.clone().requires_grad_()
                out = F.embedding(tokens, expected, padding_idx)
                (out * torch.arange(1.0, 1 + out.numel()).view(out.shape)).sum().backward()
                found, grad = embedded(world, table, tokens, padding_idx=padding_idx)
                assert found.dtype == dtype
                assert torch.equal(found, out)
                assert expected.grad is not None
                assert torch.equal(grad, expected.grad), (total, padding_idx, shape)


@on_ranks(1, 3)
def test_tokens_outside_of_the_table(world: World) -> None:
    table = drawn(7, 5)
    for bad in (7, -1, 2**40):
        with pytest.raises(IndexError, match=f"embedding of 7 rows is out of range: expected 0 to 6, found {bad}"):
            embedded(world, table, torch.tensor([[3, bad]]))


# ---------------------------------------------------------------------- cross-entropy


def check(world: World, logits: torch.Tensor, target: torch.Tensor, tolerance: float = 1e-12, **options: Any) -> None:
    """Compare the loss and the gradient with torch's. logits: (..., classes), whole."""
    whole = logits.double().clone().requires_grad_()
    rows = whole.reshape(-1, whole.shape[-1])
    doubles: dict[str, Any] = {
        key: value.double() if isinstance(value, torch.Tensor) else value for key, value in options.items()
    }
    expected = F.cross_entropy(rows, target.reshape(-1), **doubles)
    mine = own(world, logits, logits.dim() - 1)
    found = cross_entropy(mine, target, world.mesh, **options)
    assert found.dtype == logits.dtype
    torch.testing.assert_close(found.double(), expected.view(found.shape), atol=tolerance, rtol=tolerance, equal_nan=True)
    seeds = torch.arange(1.0, 1 + found.numel(), dtype=torch.float64)
    (expected * seeds.view(expected.shape)).sum().backward()
    (found * seeds.view(found.shape)).sum().backward()
    assert whole.grad is not None
    assert mine.grad is not None
    grad = own(world, whole.grad, logits.dim() - 1).detach()
    torch.testing.assert_close(mine.grad.double(), grad, atol=tolerance, rtol=tolerance, equal_nan=True)


@on_ranks(1, 3, more=(2, 4))
def test_cross_entropy_is_torchs(world: World) -> None:
    for total, reduction, smoothing in itertools.product(VOCABULARIES, ("none", "sum", "mean"), (0.0, 0.1, 1.0)):
        for weighted, shape in ((False, ()), (True, (5,)), (False, (2, 3)), (True, (2, 1, 3))):
            target = classes(*shape, total=total)
            options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            options["weight"] = drawn(total, seed=3).abs() + 0.1 if weighted else None
            check(world, 50 + drawn(*shape, total), target, **options)
            if target.numel() > 2:
                target.view(-1)[::2] = -100
                check(world, drawn(*shape, total), target, **options)
                target = classes(*shape, total=total)
                target.view(-1)[::2] = total - 1
                check(world, drawn(*shape, total), target, ignore_index=total - 1, **options)
                check(world, drawn(*shape, total), torch.full_like(target, 9), ignore_index=9, **options)


@on_ranks(1, 2, 3)
def test_cross_entropy_of_other_dtypes(world: World) -> None:
    """The statistics are float32: the loss is off by its rounding alone."""
    target = classes(40, total=101)
    for smoothing in (0.0, 0.1):
        check(world, drawn(40, 101).float(), target, 1e-5, label_smoothing=smoothing)
        check(world, drawn(40, 101).bfloat16(), target, 2**-7, reduction="none", label_smoothing=smoothing)
        check(world, drawn(40, 101).half(), target, 2**-10, reduction="none", label_smoothing=smoothing)
    local = own(world, drawn(40, 101).bfloat16(), 1)
    with torch.autocast(world.device.type, torch.bfloat16):
        assert cross_entropy(local, target, world.mesh).dtype == torch.float32
    assert cross_entropy(local, target.to(torch.uint8), world.mesh).dtype == torch.bfloat16


@on_ranks(1, 2, 3)
def test_large_and_infinite_logits_and_many_blocks(world: World) -> None:
    logits = drawn(9, 7)
    logits[0] = 1e300
    logits[1, 2:5] = -torch.inf
    logits[2] -= 1e5
    check(world, logits, torch.arange(9).clamp(max=6).masked_fill(torch.arange(9) == 3, 5), reduction="none")
    check(world, drawn(601, 2003), classes(601, total=2003))  # blocks of rows, the last one shorter
    check(world, drawn(0, 7), classes(0, total=7), reduction="sum")
    strided = drawn(5, 9, 4).transpose(0, 1)
    check(world, strided[:, ::2], classes(9, 3, total=4))


@on_ranks(2, 3)
def test_shards_of_any_size(world: World) -> None:
    """The columns of each rank are exchanged with the maxima. DTensors with counts of their own, and with no columns."""
    logits, target = drawn(ROWS, 8), classes(ROWS, total=8)
    for counts in ((0, 8, 0), (5, 0, 3), (1, 1, 6)):
        rows = (*counts[: world.size - 1], sum(counts[world.size - 1 :]))
        tensor = distribute_tensor(logits, world.mesh, [RaggedShard(1, rows)]).requires_grad_()
        whole = logits.clone().requires_grad_()
        loss, expected = cross_entropy(tensor, target), F.cross_entropy(whole, target)
        loss.backward()
        expected.backward()
        assert type(loss) is torch.Tensor
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
        assert isinstance(tensor.grad, DTensor)
        torch.testing.assert_close(tensor.grad.full_tensor(), whole.grad)


@on_ranks(1, 2, 3)
def test_two_collectives_forward_and_none_backward(world: World) -> None:
    local, target = own(world, drawn(ROWS, 7), 1), classes(ROWS, total=7)
    cross_entropy(local, target, world.mesh)
    for options in ({}, {"label_smoothing": 0.1, "weight": torch.ones(7), "reduction": "sum"}):
        with calls(world) as forward:
            loss = cross_entropy(local, target, world.mesh, **options)
        with calls(world) as backward:
            loss.backward()
        assert forward == ["all_reduce"] * 2
        assert backward == []


@on_ranks(2, 3)
def test_what_cross_entropy_keeps(world: World) -> None:
    """For its backward it keeps the logits, which exist already, and a few numbers for each row."""
    local, target = own(world, drawn(ROWS, 70), 1), classes(ROWS, total=70)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cross_entropy(local, target, world.mesh)
    large = [tensor for tensor in saved if tensor.numel() > 2 * ROWS]
    assert [tensor.data_ptr() for tensor in large] == [local.data_ptr()]


@on_ranks(1, 2)
def test_bad_arguments_of_cross_entropy(world: World) -> None:
    local, target, mesh = own(world, drawn(ROWS, 8), 1), classes(ROWS, total=8), world.mesh
    for bad in (8, -1):
        with pytest.raises(IndexError, match=f"a target of cross_entropy is out of range: expected 0 to 7, found {bad}"):
            cross_entropy(local, target.masked_fill(target == target[0], bad), mesh)
    with pytest.raises(NotImplementedError, match=r"a target of torch\.float32, which are probabilities"):
        cross_entropy(local, local.float(), mesh)
    with pytest.raises(ValueError, match=r"with a target of shape \(5,\): expected floating-point logits \(..., classes\)"):
        cross_entropy(local, target[1:], mesh)
    refused("expected the mesh of one axis", lambda: cross_entropy(local, target))
    refused("expected the mesh of one axis", lambda: cross_entropy(local, target, mesh.unflatten((1, world.size), ("a", "b"))))
    for options in ({"reduction": "max"}, {"label_smoothing": 1.5}):
        with pytest.raises(ValueError, match="expected 'none', 'sum' or 'mean', and a number from 0 to 1"):
            cross_entropy(local, target, mesh, **options)
    refused(r"with a weight of shape \(3,\): expected \(8,\)", lambda: cross_entropy(local, target, mesh, weight=torch.ones(3)))
    for placement in (Shard(0), Replicate(), FlatShard(1, (ROWS * 8,) + (0,) * (world.size - 1))):
        with pytest.raises(ValueError, match="expected their last dim to be sharded, over one axis"):
            cross_entropy(distribute_tensor(drawn(ROWS, 8), mesh, [placement]), target)
    with pytest.raises(ValueError, match=r"expected the same target on every rank \(Replicate\)"):
        cross_entropy(local, distribute_tensor(target, mesh, [Shard(0)]), mesh)
    expected = cross_entropy(local, target, mesh)
    assert cross_entropy(local, distribute_tensor(target, mesh, [Replicate()]), mesh) == expected


# ---------------------------------------------------------------------- loss_parallel

Steps = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
V = 11


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As causal language models of transformers did: slices, then rows."""
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, V), labels[..., 1:].contiguous().view(-1))


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As they do today: labels shifted, logits in float32, the sum divided by a number of items."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1).to(logits.device), reduction="sum") / 7


def in_parts(logits: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = zip(logits, labels, strict=True)
    return torch.stack([F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in parts]).sum()


STEPS: dict[str, Steps] = {
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1)),
    "torch.flatten": lambda x, y: nn.CrossEntropyLoss()(torch.flatten(x, end_dim=1), y.view(-1)),
    "view": lambda x, y: nn.CrossEntropyLoss(reduction="sum")(x.view(-1, x.size(-1)), y.view(-1)),
    "view of a size": lambda x, y: F.cross_entropy(x.view(torch.Size((15, V))), y.view(-1)),
    "reshape": lambda x, y: F.cross_entropy(torch.reshape(x, (15, -1)), y.reshape(-1), label_smoothing=0.1),
    "transpose": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="none").sum(),
    "permute": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, weight=torch.arange(1.0, 1 + V, dtype=torch.float64)),
    "swap and slice": lambda x, y: F.cross_entropy(torch.transpose(x[:2], -1, -2).float(), y[:2]),
    "one row": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "mask": lambda x, y: F.cross_entropy(x[y > 3], y[y > 3]),
    "none and integer": lambda x, y: F.cross_entropy(x[None, :, 2].flatten(0, 1), y[:, 2]),
    "list": lambda x, y: F.cross_entropy(x[[0, 2]].view(-1, V), y[[0, 2]].view(-1)),
    "softcap": lambda x, y: F.cross_entropy((30 * torch.tanh(x / 30)).flatten(0, 1), y.view(-1)),
    "split": lambda x, y: in_parts(x.split(2, dim=1), y.split(2, dim=1)),
    "chunk": lambda x, y: in_parts(torch.chunk(x, 2, 1), y.chunk(2, 1)),
    "shifted": shifted,
    "padded": padded,
}


@on_ranks(3, more=(1, 2))
def test_loss_parallel_on_the_usual_ways_to_a_loss(world: World) -> None:
    logits, labels = drawn(3, 5, V), classes(3, 5, total=V)
    world.mesh.communicator("tp")
    for name, steps in STEPS.items():
        whole = logits.clone().requires_grad_()
        expected = steps(whole, labels)
        expected.backward()
        tensor = distribute_tensor(logits, world.mesh, [Shard(2)]).requires_grad_()
        with loss_parallel(), calls(world) as made:
            loss = steps(tensor, labels)
        losses = 3 if name == "split" else 2 if name == "chunk" else 1
        assert made == ["all_reduce"] * 2 * losses, name
        loss.backward()
        assert type(loss) is torch.Tensor, name
        single = loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6 if single else 1e-13, atol=0, msg=name)
        assert isinstance(tensor.grad, DTensor)
        assert tensor.grad.placements == (Shard(2),)
        torch.testing.assert_close(
            tensor.grad.full_tensor(), whole.grad, rtol=1e-5 if single else 1e-12, atol=1e-7 if single else 1e-14, msg=name
        )


@on_ranks(1, 2, 3)
def test_loss_parallel_of_classes_in_dim_1(world: World) -> None:
    """As torch has them in logits of several dims; in dim 0 if there is no other."""
    for shape, target_shape, dim in (((7,), (), 0), ((4, 7), (4,), 1), ((4, 7, 3), (4, 3), 1), ((2, 7, 3, 2), (2, 3, 2), 1)):
        logits, target = drawn(*shape), classes(*target_shape, total=7)
        for reduction in ("none", "sum", "mean"):
            whole = logits.clone().requires_grad_()
            tensor = distribute_tensor(logits, world.mesh, [Shard(dim)]).requires_grad_()
            expected = F.cross_entropy(whole, target, ignore_index=3, reduction=reduction)
            with loss_parallel():
                loss = F.cross_entropy(tensor, target, ignore_index=3, reduction=reduction)
            torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0, equal_nan=True)
            expected.sum().backward()
            loss.sum().backward()
            assert isinstance(tensor.grad, DTensor)
            torch.testing.assert_close(tensor.grad.full_tensor(), whole.grad, equal_nan=True)


@on_ranks(2)
def test_the_context_of_loss_parallel(world: World) -> None:
    """Nested, left by an exception, plain and other tensors, and what stays refused."""
    logits, labels = drawn(4, V), classes(4, total=V)
    outside = vars(DTensor)["__torch_function__"]
    tensor = distribute_tensor(logits, world.mesh, [Shard(1)])
    with pytest.raises(KeyError), loss_parallel(), loss_parallel():
        raise KeyError
    assert vars(DTensor)["__torch_function__"] is outside
    with loss_parallel():
        with loss_parallel():
            pass
        found = F.cross_entropy(tensor, labels)
        assert F.cross_entropy(logits, labels) == F.cross_entropy(logits.clone(), labels)
        replicated = distribute_tensor(logits, world.mesh, [Replicate()])
        torch.testing.assert_close(F.cross_entropy(replicated, labels), found)
        with pytest.raises(NotImplementedError, match="with size_average or reduce: use reduction"):
            F.cross_entropy(tensor, labels, size_average=True)
        refused("which are probabilities", lambda: F.cross_entropy(tensor, logits.softmax(-1)), NotImplementedError)
        assert torch.equal(tensor.view(2, 2, V)[0, :, 3], logits.view(2, 2, V)[0, :, 3])  # gathered, as outside
        assert torch.equal(tensor.view(-1), logits.view(-1))
        assert torch.equal(tensor.flatten(), logits.flatten())
        doubled = tensor * 2
        assert isinstance(doubled, DTensor)
        assert torch.equal(doubled.full_tensor(), logits * 2)
    assert vars(DTensor)["__torch_function__"] is outside
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))


@pytest.mark.rest
@on_ranks(4, more=(2,))
def test_logits_on_a_mesh_of_several_axes(world: World) -> None:
    """Classes over one axis, rows over the other or whole there; the sums are those over all rows, and nothing is gathered."""
    classes_at = {"tp": 1, "dp": 0}
    mesh = DeviceMesh(world.comm, (world.size // 2, 2), ("dp", "tp"))
    for name, role in itertools.product(mesh.axis_names, ("tp", "loss")):
        mesh[name].communicator(role)
    for shape, rows_dim, dim in (((6, V), 0, 1), ((3, V, 2), 0, 1), ((3, V, 4), 2, 1), ((2, V), None, 1)):
        for axis in classes_at.values():
            for reduction in ("none", "sum", "mean"):
                given: list[Any] = [Shard(dim), Shard(dim)]
                given[1 - axis] = Replicate() if rows_dim is None else Shard(rows_dim)
                logits, target = drawn(*shape), classes(*shape[:1], *shape[2:], total=V)
                target[0] = -100
                options: dict[str, Any] = {"reduction": reduction}
                if axis:
                    options |= {"weight": torch.linspace(0.5, 2, V, dtype=torch.float64), "label_smoothing": 0.1}
                whole = logits.clone().requires_grad_()
                expected = F.cross_entropy(whole, target, **options)
                tensor = distribute_tensor(logits, mesh, given).requires_grad_()
                rows = [Replicate() if p == Shard(dim) else p for p in given]
                rows = [Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) else p for p in rows]
                labels = distribute_tensor(target, mesh, rows)
                with loss_parallel():
                    with calls(world) as made:
                        loss = F.cross_entropy(input=tensor, target=labels, **options)
                    again = F.cross_entropy(tensor, target, **options)
                batch = mesh.shape[1 - axis] if rows_dim is not None else 1
                assert made == ["all_reduce"] * (2 if batch == 1 or reduction == "none" else 3), (made, shape, axis)
                for found in (loss, again):
                    assert (type(found) is DTensor) is (reduction == "none" and rows_dim is not None)
                    found = found.full_tensor() if isinstance(found, DTensor) else found
                    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
                scale = drawn(*expected.shape, seed=4)
                if isinstance(loss, DTensor):
                    (loss * distribute_tensor(scale, mesh, rows)).sum().backward()
                else:
                    (loss * scale).sum().backward()
                (expected * scale).sum().backward()
                assert isinstance(tensor.grad, DTensor)
                assert tensor.grad.placements == tuple(given)
                torch.testing.assert_close(tensor.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-14)
    mesh.close()


@on_ranks(4)
def test_logits_on_a_mesh_of_several_axes_that_are_refused(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "tp"))
    logits, target = drawn(4, V), classes(4, total=V)
    tensor = distribute_tensor(logits, mesh, [Shard(0), Shard(1)])
    with loss_parallel():
        refused(r"expected a DTensor of .*Shard.*or the whole target", lambda: F.cross_entropy(tensor, target[:2]))
        with pytest.raises(ValueError, match=r"expected a DTensor of .*Shard.*or the whole target"):
            F.cross_entropy(tensor, distribute_tensor(target, mesh, [Replicate(), Shard(0)]))
        with pytest.raises(ValueError, match="expected their last dim to be sharded, over one axis"):
            F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1), Shard(1)]), target)
    mesh.close()

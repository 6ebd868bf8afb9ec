"""torch's functions on `DTensor`s, forward and backward, beside plain tensors: right, or refused by name in the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from placements import drawn, uneven
from ranks import on_ranks
from shardrt import DTensor, FlatShard, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import World
from shardrt.parallel.boundaries.axis import Part, axis_of
from shardrt.parallel.boundaries.relayout import as_dtensor
from shardrt.tensor import Placement

Function = Callable[[torch.Tensor], torch.Tensor]

ACTIVATION_FUNCTIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu softplus
    softshrink softsign tanh tanhshrink
"""
IN_PLACE = "celu elu hardswish hardtanh leaky_relu mish relu relu6 selu silu"
UNARY = """
    abs acos acosh asin asinh atan atanh ceil clone cos cosh deg2rad digamma double erf erfc erfinv exp exp2 expm1 float
    floor frac i0 lgamma log log10 log1p log2 logit nan_to_num neg reciprocal round rsqrt sgn sign sin sinc sinh sqrt square
    tan trunc
"""
BINARY = """
    add atan2 copysign div float_power fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum mul pow remainder sub xlogy
"""
LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss mse_loss
    poisson_nll_loss smooth_l1_loss soft_margin_loss
"""


def in_place(name: str) -> Function:
    return lambda x: getattr(F, name)(x * 1, inplace=True)


def of_two(name: str) -> Function:
    return lambda x: getattr(torch, name)(x, 0.3 + x / 2)


def loss(name: str, reduction: str) -> Function:
    return lambda x: getattr(F, name)(x, 0.9 * x.detach(), reduction=reduction)


def elementwise() -> dict[str, Function]:
    """Functions that no placement needs communication for."""
    found: dict[str, Function] = {name: getattr(F, name) for name in ACTIVATION_FUNCTIONS.split()}
    found |= {f"{name} in place": in_place(name) for name in IN_PLACE.split()}
    found |= {name: getattr(torch.Tensor, name) for name in UNARY.split()}
    found |= {f"{name} of two": of_two(name) for name in BINARY.split()}
    found |= {f"{name}, {how}": loss(name, how) for name in LOSSES.split() for how in ("none", "mean", "sum")}
    found |= {
        "threshold": lambda x: F.threshold(x, 0.1, 0.2),
        "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
        "prelu": lambda x: F.prelu(x - 0.5, torch.tensor([0.25], dtype=x.dtype)),
        "where": lambda x: torch.where(x > 0.5, x, x * 2),
        "lerp": lambda x: torch.lerp(x, x * 2, x),
        "addcdiv": lambda x: torch.addcdiv(x, x, x + 2, value=0.5),
        "in place": lambda x: (x * 1).mul_(2).add_(x).sigmoid_(),
        "two leaves": lambda x: x + x.detach().clone().requires_grad_(),
        "weighted": lambda x: F.binary_cross_entropy_with_logits(x, x / 2, weight=x.detach(), pos_weight=drawn(6).exp()),
        "sum": lambda x: x.sum() * x,
    }
    return found


# Along the last dim, or the first. On activations these run where that dim is not split.
LAST: dict[str, Function] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "layer_norm with weights": lambda x: F.layer_norm(x, (6,), drawn(6), drawn(6, seed=1)),
    "rms_norm": lambda x: F.rms_norm(x, (6,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, 2 * x.detach() + 1, dim=1),
    "sum": lambda x: x.sum(1, keepdim=True) * x,
    "mean": lambda x: x.mean(1),
    "norm": lambda x: x.norm(dim=1),
    "amax": lambda x: x.amax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "std": lambda x: x.std(1),
    "var": lambda x: x.var(1),
}
FIRST: dict[str, Function] = {
    "softmax": lambda x: x.softmax(0),
    "mean": lambda x: x.mean(0),
    "amin": lambda x: x.amin(0),
    "logsumexp": lambda x: x.logsumexp(0, keepdim=True),
}
VIEWS: dict[str, Function] = {
    "transposed": lambda x: x.t() * 2,
    "permuted": lambda x: x.permute(1, 0) * 2,
    "unsqueezed": lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1) * 2,
    "expanded": lambda x: x.expand(3, 5, 6) * 2,
    "sum": lambda x: x.sum(0),  # partial where it is split
}
# Refused on activations that are sharded.
WHOLE: dict[str, Function] = {
    "glu": lambda x: F.glu(x, -1),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2, 1, 2]), x),
    "a mask": lambda x: x[x.detach() > 0.5],
    "a plain mask": lambda x: x[torch.arange(5) > 1],
    "masked_select": lambda x: x.masked_select(x.detach() > 0.5),
    "indices": lambda x: x[torch.tensor([0, 2, 2])],
    "a row": lambda x: x[1] * 2,
    "flattened": lambda x: x.flatten() * 2,
    "a matrix product": lambda x: x @ x.t(),
    "linear": lambda x: F.linear(torch.ones(3, 6, dtype=x.dtype), x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 1, 0])),
    "cat": lambda x: torch.cat([x, x]),
    "all of layer_norm": lambda x: F.layer_norm(x, (5, 6)),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "prod": lambda x: x.prod(),
}


def gradient(function: Function, leaf: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The whole result of a function of `seen`, and the gradient of a weighted sum of it by `leaf`."""
    out = function(seen)
    out = out.full_tensor() if isinstance(out, DTensor) else out
    weights = drawn(*out.shape, seed=2).to(out.dtype)
    leaf.grad = None
    (out * weights).sum().backward()
    return out.detach(), leaf.grad


def check(function: Function, world: World, placement: Placement, activation: bool, refused: bool) -> None:
    """Compare with the plain function. refused: instead, expect it to raise in the forward."""
    whole = (drawn(5, 6).sigmoid() * 0.8 + 0.1).requires_grad_()
    expected, expected_grad = gradient(function, whole, whole)
    leaf: Any = distribute_tensor(whole.detach(), world.mesh, [placement]).requires_grad_()
    seen = leaf
    if activation:
        leaf = leaf.to_local().detach().clone().requires_grad_()
        assert isinstance(placement, (Replicate, Shard))
        seen = as_dtensor(axis_of(world.mesh), Part(leaf, placement, whole.shape))
    if refused:
        with pytest.raises(NotImplementedError, match=r"activations are not gathered unasked|is not defined on sharded"):
            function(seen)
        return
    found, grad = gradient(function, leaf, seen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, equal_nan=True)
    if activation:
        grad = DTensor.from_local(grad, world.mesh, [placement], whole.shape)
    assert isinstance(grad, DTensor)
    assert grad.placements == distribute_tensor(whole.detach(), world.mesh, [placement]).placements
    torch.testing.assert_close(grad.full_tensor(), expected_grad, rtol=1e-10, atol=1e-12, equal_nan=True)


def cuts(size: int) -> list[Placement]:
    return [Replicate(), Shard(0), Shard(1), RaggedShard(0, uneven(5, size)), FlatShard(0, uneven(30, size))]


@on_ranks(3)
def test_elementwise_functions(world: World) -> None:
    for name, function in elementwise().items():
        for placement in (Shard(1), FlatShard(0, uneven(30, world.size))):
            try:
                check(function, world, placement, isinstance(placement, Shard), refused=False)
            except Exception as error:
                raise AssertionError(f"{name} on {placement}") from error


@on_ranks(3)
def test_functions_along_a_dim(world: World) -> None:
    """On parameters all; on activations those along dims that are not split."""
    groups = [(LAST, {1}), (FIRST, {0}), (VIEWS, set()), (WHOLE, {0, 1})]
    for functions, along in groups:
        for name, function in functions.items():
            for placement in cuts(world.size):
                try:
                    check(function, world, placement, False, refused=False)
                    if placement in (Replicate(), Shard(0), Shard(1)):
                        split = placement.dim if isinstance(placement, Shard) else None
                        check(function, world, placement, True, refused=split in along)
                except BaseException as error:
                    raise AssertionError(f"{name} on {placement}") from error


@on_ranks(2, 3)
def test_operands_that_lie_differently(world: World) -> None:
    """What is replicated is cut where the other is sharded; both get gradients that lie as they do, and others are refused."""
    mesh = world.mesh
    for shape in ((5, 6), (6,), (5, 1), (1, 6), ()):
        for cut in (Shard(0), Shard(1), RaggedShard(0, uneven(5, world.size))):
            for swapped in (False, True):
                one, two = drawn(5, 6).requires_grad_(), drawn(*shape, seed=1).requires_grad_()
                (one * two + two).sigmoid().sum().backward()
                mine = distribute_tensor(one.detach(), mesh, [cut]).requires_grad_()
                other = distribute_tensor(two.detach(), mesh, [Replicate()]).requires_grad_()
                product = other * mine if swapped else mine * other
                assert product.placements == mine.placements
                (product + other).sigmoid().sum().backward()
                for leaf, plain in ((mine, one), (other, two)):
                    assert isinstance(leaf.grad, DTensor)
                    assert leaf.grad.placements == leaf.placements
                    torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)
    sharded, replicated = (distribute_tensor(drawn(5, 6), mesh, [cut]) for cut in (Shard(0), Replicate()))
    sharded.copy_(replicated * 2)
    assert torch.equal(sharded.full_tensor(), 2 * drawn(5, 6))
    for mixed in (lambda: replicated.add_(sharded), lambda: sharded + distribute_tensor(drawn(5, 6), mesh, [Shard(1)])):
        with pytest.raises(ValueError, match="on tensors with different placements"):
            mixed()


@on_ranks(2)
def test_activations_with_replicated_weights(world: World) -> None:
    """A bias, and the weights of a norm, get the sum of all ranks' terms; plain weights with gradients are refused."""
    mesh, whole = world.mesh, drawn(5, 6).requires_grad_()
    weights = [drawn(6, seed=seed).requires_grad_() for seed in (1, 2, 3)]
    (F.layer_norm(whole + weights[2], (6,), *weights[:2]) ** 2).sum().backward()
    local = distribute_tensor(whole.detach(), mesh, [Shard(0)]).to_local().requires_grad_()
    x = as_dtensor(axis_of(mesh), Part(local, Shard(0), whole.shape))
    sharded = [distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_() for weight in weights]
    (F.layer_norm(x + sharded[2], (6,), *sharded[:2]) ** 2).sum().backward()
    for found, weight in zip(sharded, weights, strict=True):
        assert isinstance(found.grad, DTensor)
        torch.testing.assert_close(found.grad.to_local(), weight.grad, rtol=1e-12, atol=1e-12)
    grad = DTensor.from_local(local.grad, mesh, [Shard(0)], (5, 6))
    torch.testing.assert_close(grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match=r"plain weights that require gradients.*SequenceParallel"):
        F.layer_norm(x, (6,), weights[0])

"""Gradients of gradients through tensor parallelism, in float64, against one process: gradient penalties."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ranks import on_ranks
from shardrt import DTensor, Partial, Replicate, Shard, init_device_mesh
from shardrt.comm import World
from shardrt.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    cross_entropy,
    parallelize_module,
)
from shardrt.parallel.boundaries.axis import Part, axis_of, parts
from shardrt.parallel.boundaries.relayout import relayout
from toys import shard_blocks, warns_of_create_graph
from toys_tp import (
    Transformer,
    check_close,
    compare,
    data,
    full,
    linear,
    local_of,
    loss_of,
    part,
    plain_plan,
    sequence_plan,
    tokens_of,
)

R, S0, S1, LAST = Replicate(), Shard(0), Shard(1), Shard(-1)


def close(found: torch.Tensor, expected: torch.Tensor, *about: object) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{about}: {text}")


def grad_of(tensor: Any) -> torch.Tensor:
    return tensor.grad


@pytest.mark.parametrize("outer", ["linear", "cubic"])
@on_ranks(2, more=(1, 3))
def test_penalties_through_linear_layers(world: World, outer: str) -> None:
    """Every layout. The loss is linear in the output, so that no gradient from outside has a graph, or not."""
    for style in (ColwiseParallel, RowwiseParallel):
        for given in (R, S0, S1, LAST):
            for target in (R, S0, S1, LAST):
                for async_tp in (False, True) if outer == "cubic" else (False,):
                    check_linear(world, style, given, target, outer == "cubic", async_tp)


def check_linear(world: World, style: Any, given: Any, target: Any, cubic: bool, async_tp: bool) -> None:
    whole, x, weights = linear(5, 7), data(3, 8, 5), data(3, 8, 7, seed=1).detach()
    layer = copy.deepcopy(whole)
    parallelize_module(layer, world.mesh, style(input_layouts=given, output_layouts=target, async_tp=async_tp))
    local = local_of(x, given, world)

    def penalty(module: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = module(x)
        loss = ((y.pow(3) if cubic else y) * weights).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return grad.square().sum()

    expected = penalty(whole, x, weights)
    found = penalty(layer, local, local_of(weights, target, world))
    expected.backward()
    found.backward()
    if isinstance(given, Replicate):
        close(found, expected, style, given, target)
    for (name, param), wanted in zip(layer.named_parameters(), whole.parameters(), strict=True):
        if wanted.grad is not None and bool((wanted.grad != 0).any()):
            check_close(grad_of(param), grad_of(wanted), 1e-11, f"{style} {given} {target} {name}")
    if cubic:
        close(grad_of(local), local_of(grad_of(x), given, world), style, given, target)


@on_ranks(2, 3)
def test_every_change_of_a_boundary_twice(world: World) -> None:
    """The gradient of a boundary is a boundary: the second derivative of the cube of what comes through."""
    axis = axis_of(world.mesh)
    x, v = data(5, 4, 7), data(5, 4, 7, seed=2).detach()
    for source in (R, S0, S1, Shard(2)):
        for target in (R, S0, S1, Shard(2)):
            local = local_of(x, source, world)
            out = relayout(axis, Part(local, source), target).local
            (grad,) = torch.autograd.grad(out.pow(3).sum(), local, create_graph=True)
            (grad * local_of(v, source, world)).sum().backward()
            close(grad_of(local), local_of(6 * x.detach() * v, source, world), source, target)
    total = sum(range(1, world.size + 1))
    for target in (R, S0, S1):
        term = (x.detach() * (world.rank + 1)).requires_grad_()
        out = relayout(axis, Part(term, Partial()), target).local
        (grad,) = torch.autograd.grad(out.pow(3).sum(), term, create_graph=True)
        # What reads a gradient of a term has, on each rank, a term of the gradient.
        (grad * v / world.size).sum().backward()
        close(grad_of(term), 6 * total * x.detach() * v, target)


@pytest.mark.parametrize("plan", ["plain", "sequence", "async"])
@on_ranks(1, 2, 3)
def test_a_penalty_on_a_transformer(world: World, plan: str) -> None:
    """On the gradient of the embedded tokens, added to the loss; twice, the second time without a penalty."""
    torch.manual_seed(1)
    whole = Transformer().double()
    plans = {"plain": plain_plan, "sequence": sequence_plan, "async": lambda: sequence_plan(async_tp=True)}
    model = parallelize_module(copy.deepcopy(whole), world.mesh, plans[plan]())
    sequence = plan != "plain" and world.size > 1
    for step in range(2):
        tokens = tokens_of(step)
        found, expected = penalised(model, tokens, step == 0), penalised(whole, tokens, step == 0)
        if not sequence:
            close(found.detach(), expected.detach())
    compare(whole, model)


def penalised(model: Any, tokens: torch.Tensor, penalty: bool) -> torch.Tensor:
    embedded: list[torch.Tensor] = []
    handle = model.tokens.register_forward_hook(lambda module, args, out: embedded.append(out))
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(model, tokens)
    handle.remove()
    if penalty:
        (grad,) = torch.autograd.grad(loss, embedded[0], create_graph=True)
        loss = loss + grad.square().sum() * 100
    loss.backward()
    return loss


class Attention(nn.Module):
    """What it is given is read by two modules with split weights, and by other code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(6, 6), linear(6, 6)
        self.out = linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.a(x)) * self.b(x)) * x.square().sum(-1, keepdim=True)


@on_ranks(1, 2, 3)
def test_a_gathered_tensor_that_several_read(world: World) -> None:
    for gathered in (True, False):
        whole, x, weights = Attention(), data(2, 5, 6), data(2, 5, 4, seed=1).detach()
        plan = {"a": ColwiseParallel(), "b": ColwiseParallel(), "out": RowwiseParallel()}
        layout = S1 if gathered else R
        prepare = PrepareModuleInput(input_layouts=layout, desired_input_layouts=R, use_local_output=True)
        module = parallelize_module(copy.deepcopy(whole), world.mesh, {**plan, "": prepare})
        local = local_of(x, layout, world)
        for inp, model in ((x, whole), (local, module)):
            (grad,) = torch.autograd.grad((model(inp) * weights).sum(), inp, create_graph=True)
            (grad.square().sum() + (model(inp).square() * weights).sum()).backward()
        compare(whole, module)
        close(grad_of(local), local_of(grad_of(x), layout, world), gathered)


@on_ranks(1, 2, 3)
def test_sequence_parallel_norms(world: World) -> None:
    for local_output in (True, False):
        whole, x, weights = nn.LayerNorm(6).double(), data(2, 5, 6), data(2, 5, 6, seed=1).detach()
        layer = parallelize_module(copy.deepcopy(whole), world.mesh, SequenceParallel(use_local_output=local_output))
        local = local_of(x, S1, world)
        out = layer(local) if local_output else layer(local).to_local()
        for y, inp, factor in ((whole(x), x, weights), (out, local, local_of(weights, S1, world))):
            (grad,) = torch.autograd.grad((y * factor).sum(), inp, create_graph=True)
            grad.square().sum().backward()
        close(grad_of(local), part(grad_of(x), 1, world))
        check_close(grad_of(layer.weight), grad_of(whole.weight), 1e-11, "weight")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@on_ranks(1, 2, 3)
def test_cross_entropy(world: World, smoothing: float) -> None:
    """Classes on all ranks but some without any; weights, ignored targets, all reductions."""
    target = torch.tensor([0, 3, -100, 1, 2])
    for total in (7, 4, 1):
        for reduction in ("mean", "sum", "none"):
            for weight in (None, torch.linspace(0.5, 2.0, total, dtype=torch.float64)):
                options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
                logits, x = data(5, total), target % total if total < 4 else target
                x = x.masked_fill(target == -100, -100)
                local, factor = part(logits, 1, world), data(5, seed=3).detach() if reduction == "none" else torch.tensor(1.5)
                for inp, loss in (
                    (logits, F.cross_entropy(logits, x, **options)),
                    (local, cross_entropy(local, x, world.mesh, **options)),
                ):
                    (grad,) = torch.autograd.grad((loss * factor).sum(), inp, create_graph=True)
                    (grad.square() + grad).sum().backward()
                close(grad_of(local), part(grad_of(logits), 1, world), total, reduction)


@on_ranks(1, 2)
def test_second_derivatives_by_the_loss(world: World) -> None:
    """The gradient of the gradient by what comes from outside: a loss of several losses, whose weights are learned."""
    logits, target = data(5, 7), torch.tensor([0, 3, 6, 1, 2])
    local = part(logits, 1, world)
    found = []
    for inp, losses in (
        (logits, F.cross_entropy(logits, target, reduction="none")),
        (local, cross_entropy(local, target, world.mesh, reduction="none")),
    ):
        scale = data(5, seed=2)
        (grad,) = torch.autograd.grad((losses * scale).sum(), inp, create_graph=True)
        weights = torch.linspace(1, 2, 7, dtype=torch.float64)
        weights = weights if inp is logits else weights.split(parts(7, world.size))[world.rank]
        (grad.square() * weights).sum().backward()
        found.append(grad_of(scale))
    close(found[1], found[0])


@on_ranks(4)
def test_under_fully_shard(world: World) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    whole = Transformer().double()
    model: Any = parallelize_module(copy.deepcopy(whole), mesh["tp"], sequence_plan())
    shard_blocks(model, "layers", mesh=mesh["dp"], reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    penalised(whole, tokens_of(0), True)
    penalised(model, tokens_of(0), True)
    compare(whole, model)


@on_ranks(2)
def test_gradients_of_some_tensors_leave_nothing_behind(world: World) -> None:
    """A backward that computes a layer's weights' gradients only, before the one of all."""
    whole, x = Attention(), data(2, 5, 6)
    plan = {"a": ColwiseParallel(), "b": ColwiseParallel(), "out": RowwiseParallel()}
    module = parallelize_module(copy.deepcopy(whole), world.mesh, plan)
    weights = {name: param * 1.0 for name, param in module.named_parameters()}
    local = local_of(x, R, world)
    loss = torch.func.functional_call(module, weights, local).square().sum()
    torch.autograd.grad(loss, [weights["a.weight"], weights["b.weight"]], retain_graph=True)
    loss.backward()
    whole(x).square().sum().backward()
    close(grad_of(local), grad_of(x))
    compare(whole, module)


@on_ranks(2)
def test_gradients_of_parameters_have_no_graph(world: World) -> None:
    layer = parallelize_module(linear(4, 6), world.mesh, ColwiseParallel())
    with warns_of_create_graph():
        layer(data(3, 4)).pow(2).sum().backward(create_graph=True)
    grad = grad_of(layer.weight)
    assert isinstance(grad, DTensor)
    assert not grad._local_tensor.requires_grad
    assert full(grad).shape == (6, 4)

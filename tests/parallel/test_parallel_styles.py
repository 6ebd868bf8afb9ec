"""Styles of tensor parallelism against one process, in float64, and what each communicates."""

import copy
import gc
from functools import partialmethod
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks, refused, settings_of
from shardrt import DTensor, Partial, Replicate, Shard
from shardrt.comm import DeviceMesh, MismatchError, World
from shardrt.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardrt.parallel.boundaries.axis import Axis, Part, Pending, axis_of, parts
from shardrt.parallel.boundaries.relayout import as_dtensor, relayout
from shardrt.tensor.placement.placement import Placement
from toys import shard_blocks, step_all
from toys_tp import (
    Transformer,
    compare,
    counted,
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


@pytest.mark.parametrize("outputs", [7, pytest.param(1, marks=pytest.mark.all)])
@on_ranks(2, 3, more=(1, 4))
def test_layouts_of_linear_layers(world: World, outputs: int) -> None:
    """Every input and output layout, plain and as DTensors, with sizes that do not divide, some ranks with nothing.

    Outputs may be written to in place.
    """
    for style in (ColwiseParallel, RowwiseParallel):
        for given in (R, S0, S1, LAST):
            for target in (R, S0, S1, LAST):
                for as_dtensors, async_tp in ((False, False), (True, False), (False, True)):
                    check_linear(world, style, given, target, outputs, as_dtensors, async_tp)


def check_linear(world: World, style: Any, given: Any, target: Any, outputs: int, as_dtensors: bool, async_tp: bool) -> None:
    whole, x, weights = linear(5, outputs), data(3, 8, 5), data(3, 8, outputs, seed=1).detach()
    layer = copy.deepcopy(whole)
    layouts = {"input_layouts": given, "output_layouts": target, "use_local_output": not as_dtensors, "async_tp": async_tp}
    parallelize_module(layer, world.mesh, style(**layouts))
    local = local_of(x, given, world)
    shape = x.shape
    out = layer(DTensor.from_local(local, world.mesh, [given], shape) if as_dtensors else local)
    if as_dtensors:
        assert out.shape == (3, 8, outputs), (style, given, target)
        out = out.to_local()
    else:
        out *= 1.5
    expected = whole(x) * (1.0 if as_dtensors else 1.5)
    torch.testing.assert_close(out, local_of(expected, target, world), rtol=1e-12, atol=1e-12)
    (expected * weights).sum().backward()
    (out * local_of(weights, target, world)).sum().backward()
    compare(whole, layer)
    expected_grad = x.grad if isinstance(given, Replicate) else part(x.grad, given.dim % 3, world)
    torch.testing.assert_close(local.grad, expected_grad, rtol=1e-12, atol=1e-12)


@on_ranks(2, 3)
def test_collectives_of_linear_layers(world: World) -> None:
    x = data(2 * world.size, 8, 6)
    for style, options, forward, backward in (
        (ColwiseParallel, {}, {}, {"all_reduce": 1}),
        # The gathered input is not kept for the backward.
        (ColwiseParallel, {"input_layouts": S0}, {"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
        (RowwiseParallel, {}, {"all_reduce": 1}, {}),
        (RowwiseParallel, {"output_layouts": S1}, {"reduce_scatter": 1}, {"all_gather": 1, "all_reduce": 1}),  # of the bias
    ):
        layer = linear(6, 6)
        parallelize_module(layer, world.mesh, style(**options))
        default = LAST if style is RowwiseParallel else R
        local = local_of(x, options.get("input_layouts", default), world)
        with counted(world.mesh) as counts:
            out = layer(local)
        assert dict(counts) == forward, (style, options)
        with counted(world.mesh) as counts:
            out.sum().backward()
        assert dict(counts) == backward, (style, options)


@on_ranks(1, 2, 3, 4)
def test_embeddings(world: World) -> None:
    tokens = torch.tensor([[0, 3, 6], [1, 1, 4]])
    moved = ({"all_to_all": 1}, {"all_to_all": 1})
    scattered = ({"reduce_scatter": 1}, {"all_gather": 1})
    for rows, style, expected in (
        (7, ColwiseParallel, {R: ({"all_gather": 1}, {}), S1: moved, LAST: ({}, {})}),
        (7, RowwiseParallel, {R: ({"all_reduce": 1}, {}), S1: scattered, LAST: scattered}),
    ):
        for target in (R, S1, LAST):
            forward, backward = expected[target] if world.size > 1 else ({}, {})
            whole = nn.Embedding(rows, 5, padding_idx=1).double()
            with torch.no_grad():
                world.comm.broadcast(whole.weight.data, whole.weight.data, 0, stream=world.stream).synchronize()
            layer = copy.deepcopy(whole)
            parallelize_module(layer, world.mesh, style(input_layouts=R, output_layouts=target))
            with counted(world.mesh) as counts:
                out = layer(tokens)
            assert dict(counts) == forward, (style, target)
            weights = data(2, 3, 5).detach()
            torch.testing.assert_close(out, local_of(whole(tokens), target, world))
            with counted(world.mesh) as counts:
                (out * local_of(weights, target, world)).sum().backward()
            assert dict(counts) == backward, (style, target)
            (whole(tokens) * weights).sum().backward()
            compare(whole, layer)


class Scaled(nn.Linear):
    """Calls torch's forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(2 * x))


class OwnForward(nn.Linear):
    """Computes with its weight itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 0.5, self.bias)


class Decorated(Scaled):
    """The forward of its base, in a wrapper."""

    forward = torch.enable_grad()(Scaled.forward)


class Wrapped(nn.Linear):
    """A forward that is not a function."""

    forward = partialmethod(OwnForward.forward)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3.0


@on_ranks(2, 3)
def test_subclasses_with_a_forward_of_their_own(world: World) -> None:
    x = data(4, 5)
    for kind, style, kwargs in (
        (Scaled, ColwiseParallel(output_layouts=R), {}),
        (OwnForward, ColwiseParallel(output_layouts=R), {}),
        (Scaled, RowwiseParallel(input_layouts=R), {}),
        (Decorated, RowwiseParallel(input_layouts=R), {}),
        (Wrapped, ColwiseParallel(output_layouts=R), {}),
    ):
        torch.manual_seed(0)
        whole = kind(5, 7, **kwargs).double()
        layer = parallelize_module(copy.deepcopy(whole), world.mesh, style)
        assert isinstance(layer, kind)
        local = x.detach().clone().requires_grad_()
        torch.testing.assert_close(layer(local), whole(x))
        torch.testing.assert_close(layer(x=local), whole(x))
        layer(local).sum().backward()
        whole(x).sum().backward()
        torch.testing.assert_close(local.grad, x.grad)
        compare(whole, layer)
        x.grad = None
    torch.manual_seed(0)
    whole = ScaledEmbedding(7, 5)
    layer = parallelize_module(copy.deepcopy(whole), world.mesh, RowwiseParallel(input_layouts=R))
    torch.testing.assert_close(layer(torch.arange(7)), whole(torch.arange(7)))
    with pytest.raises(NotImplementedError, match=r"does not call super\(\).forward"):
        parallelize_module(OwnForward(5, 5), world.mesh, RowwiseParallel())


class RMSNorm(nn.Module):
    """As transformers' LlamaRMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@on_ranks(1, 2, 3, 4)
def test_sequence_parallel(world: World) -> None:
    x, weights = data(2, 5, 6), data(2, 5, 6, seed=1).detach()
    for kind in (nn.LayerNorm, RMSNorm):
        for local_output in (True, False):
            whole = kind(6).double()
            layer = parallelize_module(copy.deepcopy(whole), world.mesh, SequenceParallel(use_local_output=local_output))
            assert isinstance(layer, kind)
            local = local_of(x, S1, world)
            given = local if local_output else DTensor.from_local(local, world.mesh, [S1], x.shape).redistribute([R])
            out = layer(given)
            by_name = layer(**{"input" if kind is nn.LayerNorm else "x": given})
            assert torch.equal(*(y if local_output else y.to_local() for y in (by_name, out)))
            assert type(out) is (torch.Tensor if local_output else DTensor)
            out = out if local_output else out.to_local()
            (out * local_of(weights, S1, world)).sum().backward()
            (whole(x) * weights).sum().backward()
            torch.testing.assert_close(local.grad, part(x.grad, 1, world))
            compare(whole, layer)
            x.grad = None
    wider = parallelize_module(nn.Sequential(nn.Linear(6, 4).double()), world.mesh, SequenceParallel(use_local_output=False))
    out = wider(DTensor.from_local(local_of(x, S1, world), world.mesh, [S1], x.shape))
    assert (out.shape, out.full_tensor().shape) == ((2, 5, 4), (2, 5, 4))
    dropout = parallelize_module(nn.Dropout(0.5), world.mesh, SequenceParallel(use_local_output=True))
    assert isinstance(dropout, nn.Dropout)
    assert dropout(local_of(x, S1, world)).shape == local_of(x, S1, world).shape


class Two(nn.Module):
    """Several arguments, a keyword, several results; `seen` holds what its forward was given."""

    def forward(self, a: Any, b: Any, *, key: Any = None) -> Any:
        self.seen = a.clone(), b, key
        a *= 2
        return a, b, key


@on_ranks(2, 3)
def test_preparations(world: World) -> None:
    x = data(4, 7)
    both = PrepareModuleInputOutput(
        input_layouts=(S1, None),
        desired_input_layouts=(R, None),
        input_kwarg_layouts={"key": R},
        desired_input_kwarg_layouts={"key": S0},
        use_local_input=True,
        output_layouts=(R, None, S0),
        desired_output_layouts=(S1, None, R),
        use_local_output=False,
    )
    module = parallelize_module(Two(), world.mesh, both)
    local = local_of(x, S1, world)
    a, b, key = module(local, "b", key=x.detach())
    assert module.seen[1] == b == "b"
    assert torch.equal(module.seen[0], x)
    assert torch.equal(module.seen[2], part(x, 0, world))
    assert isinstance(a, DTensor)
    assert a.placements == (S1,)
    assert a.shape == x.shape
    assert torch.equal(key.to_local(), x)
    a.to_local().sum().backward()
    torch.testing.assert_close(local.grad, torch.full_like(local, 2.0))
    refused(r"the inputs of 'PreparedTwo|the inputs of 'Two': expected 2", lambda: module(local, "b", "c"))
    refused("expected as many desired layouts", lambda: PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=R))
    with pytest.raises(ValueError, match="expected the same names"):
        PrepareModuleInput(input_kwarg_layouts={"a": R}, desired_input_kwarg_layouts={"b": R})


@on_ranks(2, 3)
def test_every_change_of_a_boundary_is_differentiable(world: World) -> None:
    axis, x, weights = axis_of(world.mesh), data(5, 4, 7), data(5, 4, 7, seed=1).detach()
    axis.first = True
    for source in (R, S0, S1, Shard(2)):
        for target in (R, S0, S1, Shard(2)):
            local = local_of(x, source, world)
            out = relayout(axis, Part(local, source), target).local
            assert torch.equal(out, local_of(x, target, world)), (source, target)
            if out is not local:  # a tensor of its own, which may be written to
                out += 1.0
                assert torch.equal(local, local_of(x, source, world)), (source, target)
            (out * local_of(weights, target, world)).sum().backward()
            assert torch.equal(local.grad, local_of(weights, source, world)), (source, target)
    total = sum(range(1, world.size + 1))
    for target in (R, S0, S1):
        term = (x.detach() * (world.rank + 1)).requires_grad_()
        out = relayout(axis, Part(term, Partial()), target).local
        torch.testing.assert_close(out, local_of(x.detach() * total, target, world))
        (out * local_of(weights, target, world)).sum().backward()
        torch.testing.assert_close(term.grad, weights)
    with pytest.raises(NotImplementedError, match="expected Shard, Replicate, or Partial, a sum"):
        relayout(axis, Part(x, Partial("avg")), R)


@on_ranks(2, 3)
def test_the_size_of_a_dim_that_was_sharded_by_the_caller(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first uneven size may come after many even ones, also where the collectives run on a GPU."""
    axis = axis_of(world.mesh)
    monkeypatch.setattr(axis.comm, "is_async", True)
    axis.first = False
    axis._totals.clear()
    for total in (12, 11, 12, 7, 1, 0, 6):
        assert axis.total(parts(total, world.size)[world.rank]) == total
    refused("by the rule of Shard", lambda: axis.total(world.rank))


@on_ranks(2, 3)
def test_modules_that_read_one_tensor_share_one_reduction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the forward uses the tensor in other ways, changes it in place, or leaves a module's result unused.

    It starts before the gradient of the last weight, unless a result is unused.
    """
    axis = axis_of(world.mesh)
    early: list[torch.Tensor] = []

    def start(part: Part, target: Placement) -> Pending:
        early.append(part.local)
        return Axis.start(axis, part, target)

    monkeypatch.setattr(axis, "start", start)

    class Readers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = linear(6, 6), linear(6, 5), linear(6, 4)

        def forward(self, x: torch.Tensor, way: str) -> Any:
            x = x * 1.5
            a, b = self.a(x), self.b(x)
            c = checkpoint(self.c, x, use_reentrant=False) if way == "recomputed" else None if way == "in place" else self.c(x)
            if way == "in place":
                x = x.mul_(2.0)
                c = self.c(x)
            extra = x.sin().sum() if way == "other use" else 0.0
            return extra, a, c, None if way == "unused" else b

    whole, x = Readers(), data(3, 6)
    for way, reductions in (("plain", 1), ("other use", 1), ("in place", 2), ("unused", 1), ("recomputed", 1)):
        whole.zero_grad(set_to_none=True)
        x.grad = None
        model = copy.deepcopy(whole)
        parallelize_module(model, world.mesh, {"?": ColwiseParallel(output_layouts=R)})
        local = x.detach().clone().requires_grad_()
        if way == "in place":  # torch refuses a backward through a saved tensor that has changed; so is it here
            for module, given in ((whole, x), (model, local)):
                outs = module(given, way)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    sum(out.sum() for out in outs[1:] if out is not None).backward()
            early.clear()
            continue
        for module, given in ((whole, x), (model, local)):
            outs = module(given, way)
            loss = outs[0] + sum((out**2).sum() for out in outs[1:] if out is not None)
            with counted(world.mesh) as counts:
                loss.backward()
            assert counts["all_reduce"] == (reductions if module is model else 0), way
        torch.testing.assert_close(local.grad, x.grad)
        compare(whole, model)
        assert len(early) == (way != "unused"), way
        early.clear()


@on_ranks(2)
def test_activations_are_freed_without_the_garbage_collector(world: World) -> None:
    model = Transformer().double()
    seen: list[ref[torch.Tensor]] = []

    def note(_: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> None:
        local, *_ = getattr(inputs[0], "tp_local", inputs)
        seen.append(ref(local.tp_twin[0]))

    for layer in model.layers:
        layer.attention.q.register_forward_hook(note)
    gc.disable()
    try:
        for plan in (plain_plan(), sequence_plan()):
            made = parallelize_module(copy.deepcopy(model), world.mesh, plan)
            for backward in (True, False):
                loss = loss_of(made, tokens_of(0))
                if backward:
                    loss.backward()
                assert any(tensor() is not None for tensor in seen) is not backward
                del loss
                assert len(seen) == 2
                assert all(tensor() is None for tensor in seen)
                seen.clear()
    finally:
        gc.enable()


@on_ranks(2)
def test_collectives_of_an_attention_block(world: World) -> None:
    model = Transformer().double().layers[0].attention
    plan = {
        "": PrepareModuleInput(input_layouts=S1, desired_input_layouts=R),
        "[qkv]": ColwiseParallel(),
        "o": RowwiseParallel(output_layouts=S1),
    }
    model.o.bias = None
    parallelize_module(model, world.mesh, plan)
    x = part(data(2, 8, 12), 1, world)
    with counted(world.mesh) as counts:
        out = model(x)
    assert dict(counts) == {"all_gather": 1, "reduce_scatter": 1}
    with counted(world.mesh) as counts:
        out.sum().backward()
    assert dict(counts) == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("plan", ["plain", "sequence", "pieces", "threads"])
@on_ranks(1, 2, 3)
def test_a_transformer_trains_as_on_one_process(world: World, plan: str) -> None:
    """With replicated activations, sequence parallel, pieces of matmuls, and those on a thread for communication."""
    mesh = DeviceMesh(world.comm, (world.size,), ("tp",))
    with settings_of(world, host_streams="threaded" if plan == "threads" else None):
        axis_of(mesh)  # which takes the stream
    whole = Transformer().double()
    model = copy.deepcopy(whole)
    torch.manual_seed(world.rank)
    if world.rank:
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()  # all take those of rank 0
    made = plain_plan() if plan == "plain" else sequence_plan(async_tp=plan in ("pieces", "threads"))
    parallelize_module(model, mesh, made)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, model)]
    for step in range(3):
        losses = [loss_of(m, tokens_of(step)) for m in (whole, model)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
        for loss in losses:
            loss.backward()
        compare(whole, model)
        step_all(*optimizers)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@on_ranks(2)
def test_optimizers_over_parameters_that_no_style_names(world: World, options: dict[str, bool]) -> None:
    whole = Transformer(tied=False).double()
    model = copy.deepcopy(whole)
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, world.mesh, plan)
    assert type(model.tokens.weight) is nn.Parameter
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, **options) for m in (whole, model)]
    for step in range(3):
        for m, optimizer in zip((whole, model), optimizers, strict=True):
            loss_of(m, tokens_of(step)).backward()
            if m is model:
                with counted(world.mesh) as counts:
                    optimizer.step()
                assert not counts
            else:
                optimizer.step()
        compare(whole, model)
        for optimizer in optimizers:
            optimizer.zero_grad()


@on_ranks(2, 3)
def test_frozen_parameters_accumulation_and_recomputation(world: World) -> None:
    for frozen in ("norm", "attention", "up", "tokens", "bias"):
        torch.manual_seed(0)
        whole = Transformer(tied=False).double()
        for name, param in whole.named_parameters():
            param.requires_grad_(frozen not in name)
        model = parallelize_module(copy.deepcopy(whole), world.mesh, sequence_plan())
        for m in (whole, model):
            if frozen == "up":
                for layer in m.layers:
                    recompute(layer)
            for micro in range(2):
                loss_of(m, tokens_of(micro)).backward()
        compare(whole, model)


def recompute(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


@on_ranks(2)
def test_gradients_are_the_callers_and_hooks_are_called(world: World) -> None:
    """A gradient that is kept is not written to by a later backward; deep copies are independent."""
    model = parallelize_module(Transformer().double(), world.mesh, sequence_plan())
    called = []
    weight = model.layers[0].up.weight
    weight.register_post_accumulate_grad_hook(lambda param: called.append(param))
    loss_of(model, tokens_of(0)).backward()
    assert called == [weight]
    kept, values = weight.grad, weight.grad.to_local().clone()
    model.zero_grad()
    loss_of(model, tokens_of(1)).backward()
    assert torch.equal(kept.to_local(), values)
    other = copy.deepcopy(model)
    model.zero_grad()
    other.zero_grad()
    loss_of(other, tokens_of(0)).backward()
    assert weight.grad is None
    torch.testing.assert_close(other.layers[0].up.weight.grad.to_local(), values)


class Tied(nn.Module):
    """Reads the table of its embedding as a function's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.down = nn.Embedding(11, 4), nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        return F.linear(x + self.down(self.up(x)), self.tokens.weight)


@on_ranks(2)
def test_a_weight_that_a_function_gathers(world: World) -> None:
    whole = Tied().double()
    model = copy.deepcopy(whole)
    plan = {"tokens": RowwiseParallel(input_layouts=R), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, world.mesh, plan)
    for m in (whole, model):
        for step in range(2):
            loss_of(m, tokens_of(step)).backward()
    compare(whole, model)


@on_ranks(2)
def test_after_a_backward_that_failed(world: World) -> None:
    """What it has left is dropped, also if the next forwards are those of submodules."""
    whole = Transformer(tied=False).double()
    model = parallelize_module(copy.deepcopy(whole), world.mesh, plain_plan())
    for m in (whole, model):
        x = data(2, 3, 12)
        hidden = x * 1
        hidden.register_hook(fail)
        with pytest.raises(ArithmeticError):
            m.layers[0](hidden).sum().backward()
        m.zero_grad()
        for _ in range(2):
            m.layers[0](x).square().sum().backward()
    compare(whole, model)


def fail(grad: torch.Tensor) -> None:
    raise ArithmeticError


@on_ranks(2)
def test_activations_as_dtensors(world: World) -> None:
    """Elementwise operations and redistribute work; what would gather is refused; on replicated ones everything runs."""
    axis, x = axis_of(world.mesh), data(2, 5, 4)
    sharded = as_dtensor(axis, Part(local_of(x, S1, world), S1, x.shape))
    assert ((sharded * 2 + sharded).redistribute([R]).to_local() == 3 * x).all()
    for operation in (lambda t: t.view(-1, 4), lambda t: t @ t.new_ones(4, 4), lambda t: t.softmax(1), lambda t: t[0]):
        with pytest.raises(NotImplementedError, match="needs elements of other ranks"):
            operation(sharded)
    layer, replicated = nn.Linear(4, 3).double(), as_dtensor(axis, Part(x, R))
    out = layer(replicated.view(10, 4).sin())
    assert type(out) is torch.Tensor
    out.sum().backward()
    assert type(layer.weight.grad) is torch.Tensor
    torch.testing.assert_close(x.grad, (layer.weight.sum(0) * x.cos()).detach())


@on_ranks(2)
def test_autocast(world: World) -> None:
    whole = Transformer().float()
    model = parallelize_module(copy.deepcopy(whole), world.mesh, sequence_plan())
    for m in (whole, model):
        with torch.autocast(world.device.type, torch.bfloat16):
            out = m(tokens_of(0))
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
    for expected, found in zip(whole.parameters(), model.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        torch.testing.assert_close(full(found.grad), expected.grad, rtol=0.1, atol=0.02)
    both = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    parallelize_module(both, world.mesh, {"*": ColwiseParallel()})
    expected = full(both[0].weight).sum(0).expand(2, 4)
    x = data(2, 4).detach().float().requires_grad_()
    y = x * 1
    exact = both[0](y)
    with torch.autocast(world.device.type, torch.bfloat16):
        rounded = both[1](y)
    (exact.sum() + 0 * rounded.sum()).backward()
    torch.testing.assert_close(x.grad, expected)


@on_ranks(2)
def test_casts(world: World) -> None:
    """`float()` and the like keep the parameters, and what optimizers and ties know of them; gradients are cast as well."""
    whole = Transformer().double()
    model = parallelize_module(copy.deepcopy(whole), world.mesh, sequence_plan())
    before, tokens = list(model.parameters()), tokens_of(0)
    for step, cast in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float32)):
        for m in (whole, model):
            m.to(cast)
            assert all(param.dtype == cast for param in m.parameters())
            assert all(param.grad.dtype == cast for param in m.parameters() if step)
            m.zero_grad(set_to_none=step != 1)
            loss_of(m, tokens).backward()
        compare(whole, model, {torch.float64: 1e-6, torch.float32: 1e-4}.get(cast, 0.1))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        optimizer.step()
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.to_local().dtype == torch.float32


@on_ranks(4)
def test_two_dimensions(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "tp"))
    for plan in (plain_plan(), sequence_plan()):
        torch.manual_seed(0)
        whole = Transformer().double()
        model = parallelize_module(copy.deepcopy(whole), mesh["tp"], plan)
        shard_blocks(model, "layers", mesh=mesh["dp"])
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, model)]
        for step in range(3):
            tokens = tokens_of(step, rows=4)
            loss_of(whole, tokens).backward()
            loss_of(model, tokens.chunk(2)[mesh.coordinates[0]]).backward()
            compare(whole, model)
            step_all(*optimizers)


@on_ranks(2)
def test_functional_calls_and_modes_without_gradients(world: World) -> None:
    whole = Transformer(tied=False).double()
    model = parallelize_module(copy.deepcopy(whole), world.mesh, sequence_plan())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(tokens_of(0)), whole(tokens_of(0)))
    for m in (whole, model):
        doubled = {name: param * 2 for name, param in m.named_parameters()}
        torch.func.functional_call(m, doubled, (tokens_of(0),)).square().mean().backward()
    compare(whole, model)


@on_ranks(2)
def test_hooks_of_parameters_change_their_gradients(world: World) -> None:
    """Of split and replicated parameters, registered before or after; on gradients from before as well."""
    whole = Transformer().double()
    model = copy.deepcopy(whole)
    for m in (whole, model):
        m.layers[1].up.weight.register_hook(lambda grad: grad * 3)
    parallelize_module(model, world.mesh, sequence_plan())
    for m in (whole, model):
        m.layers[0].down.weight.register_hook(lambda grad: grad * 2)
        m.norm.weight.register_hook(lambda grad: grad * 2)
        for step in range(2):
            loss_of(m, tokens_of(step)).backward()
    compare(whole, model)


@on_ranks(2)
def test_ranks_that_skip_different_blocks(world: World) -> None:
    """Blocks of one size whose names in their plans are the same."""
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)]
    for block in blocks:
        parallelize_module(block, world.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = torch.ones(2, 4)
    blocks[0](x)
    with pytest.raises(MismatchError, match=r"all_reduce .* of '1' \(style \d+\).*all_reduce .* of '1' \(style \d+\)"):
        blocks[1 + world.rank](x)

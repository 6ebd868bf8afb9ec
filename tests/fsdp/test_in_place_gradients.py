"""Gradients of linear layers' weights that are computed where they are packed: the same bits, in fewer bytes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, settings_of
from shardrt.comm import DeviceMesh, World
from shardrt.fsdp.params import in_place
from shardrt.fsdp.params.in_place import Given, LinearWeight
from shardrt.fsdp.params.param import RunningParameter
from shardrt.fsdp.reduce.reduce import GradientReduction
from shardrt.plan.program.recomputation import checkpoint_block, selective_contexts
from toys import OddMLP, TiedGPT, UsedTwice, batch, buckets_of, loss_of, shard_blocks, tokens, uncompiled

pytestmark = pytest.mark.skipif(os.environ.get("SHARDRT_TEST_DEVICE") == "cuda", reason="nothing has a place on a GPU")

# ---------------------------------------------------------------------- the operation


def weight_of(rows: int, columns: int, place: torch.Tensor | None, dim: int = 0) -> Any:
    """A weight, laid out with `dim` outermost, with a place for its gradient."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    made: Any = nn.Parameter(values.t().contiguous().t() if dim else values)
    made.__class__ = LinearWeight
    made.given = given = Given()
    made.place = lambda weight: None if place is None or 0 in given else given.give(0, place)
    return made


class Marked(torch.Tensor):
    """With torch's own way of keeping the class."""


def test_activations_keep_their_class() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    grads = []
    for kind in (LinearWeight, nn.Parameter):
        weight = weight_of(7, 5, torch.empty(7, 5))
        weight.__class__ = kind
        out = F.linear(x.as_subclass(Marked), weight)
        assert (type(out), type(weight)) == (Marked, kind)
        out.square().sum().backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (1, 2, 3, 5), (0, 5)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_same_bits_and_saved_tensors_as_torch(shape: tuple[int, ...], biased: bool, dim: int) -> None:
    """The gradient lies in its place; what saved-tensor hooks see has the order, shapes and strides of torch's."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    results = []
    for place in (None, torch.empty_like(weight_of(7, 5, None, dim).data)):
        saved: list[tuple[Any, ...]] = []
        weight, bias = weight_of(7, 5, place, dim), nn.Parameter(torch.ones(7)) if biased else None
        if place is None:
            weight.__class__ = nn.Parameter
        inp = x.clone().requires_grad_()

        def keep(tensor: torch.Tensor, saved: list[tuple[Any, ...]] = saved) -> torch.Tensor:
            saved.append((tensor.shape, tensor.stride()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = F.linear(inp, weight, bias) if bias is not None else F.linear(inp, weight)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
        assert weight.grad is not None
        assert place is None or weight.grad.data_ptr() == place.data_ptr()
        results.append((out, inp.grad, weight.grad, None if bias is None else bias.grad, saved))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_who_might_keep_a_gradient_gets_an_ordinary_one() -> None:
    place = torch.empty(7, 5)
    kept: list[torch.Tensor] = []
    x = torch.randn(6, 5)
    expected = x.sum(0).expand(7, 5)

    weight = weight_of(7, 5, place)
    (grad,) = torch.autograd.grad(F.linear(x, weight).sum(), [weight])
    assert grad.data_ptr() != place.data_ptr()
    handle = weight.register_hook(kept.append)
    F.linear(x, weight).sum().backward()
    assert kept[0].data_ptr() != place.data_ptr()
    handle.remove()
    weight.grad = None
    F.linear(x, weight).square().sum().backward(create_graph=True)
    assert weight.grad is not None
    assert weight.grad.requires_grad
    weight.grad = None
    out: Any = F.linear(x, weight)
    accumulates = out.grad_fn.next_functions[1][0]
    F.linear(x, weight).sum().backward(inputs=[weight])
    assert weight.grad.data_ptr() == place.data_ptr()
    torch.testing.assert_close(weight.grad, expected)
    accumulates.register_prehook(lambda grads: kept.append(grads[0]))  # which nobody can know of
    weight.grad = None
    weight.given.give_up()
    F.linear(x, weight).sum().backward()
    weight.given.give_up()
    place.fill_(0.0)
    torch.testing.assert_close(kept[-1], expected)


def test_second_derivatives() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
    weight.__class__ = LinearWeight
    assert torch.autograd.gradgradcheck(lambda x, weight: F.linear(x, weight).sin(), (x, weight))


def test_unused_derivatives_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 5, requires_grad=True), weight_of(7, 5, None)
    called: list[int] = []
    monkeypatch.setattr(in_place, "_weight_grad", lambda *args: called.append(1))
    torch.autograd.grad(F.linear(x, weight).sum(), [x])
    assert not called


UNUSUAL: dict[str, Callable[[torch.Tensor, LinearWeight], object]] = {
    "a vector": lambda x, weight: F.linear(x[0], weight),
    "not contiguous": lambda x, weight: F.linear(x.t().contiguous().t(), weight),
    "by name": lambda x, weight: F.linear(x, weight=weight),
    "a parameter": lambda x, weight: F.linear(nn.Parameter(x), weight),
    "without gradients": lambda x, weight: torch.no_grad()(F.linear)(x, weight),
    "vmap": lambda x, weight: torch.vmap(lambda row: F.linear(row[None], weight))(x),
    "other operations": lambda x, weight: [x @ weight.t(), weight.sum(), weight.shape, copy.deepcopy(weight)],
}


def run_with_tangent(x: torch.Tensor, weight: LinearWeight) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(F.linear(dual, weight)).tangent is not None


def run_in_autocast(x: torch.Tensor, weight: LinearWeight) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's forward-mode AD calls it
@pytest.mark.parametrize("call", [*UNUSUAL.values(), run_with_tangent, run_in_autocast])
def test_torch_alone_runs_what_is_unusual(call: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_linear", None)
    call(torch.randn(6, 5), weight_of(7, 5, None))


# ---------------------------------------------------------------------- sharded modules


@contextmanager
def ordinary() -> Iterator[None]:
    """In the block, no gradient has a place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReduction, "has_place", lambda self, position: False)
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many gradients each pack has found in their places."""
    counts: list[int] = []
    arrived = Given.arrived

    def count(self: Given, *args: Any) -> frozenset[int]:
        found = arrived(self, *args)
        counts.append(len(found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Given, "arrived", count)
        yield counts


class InnerCheckpoint(OddMLP):
    """Each block recomputes a part of itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class Reentrant(OddMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.out(x)


class Selective(OddMLP):
    """Its blocks keep every second product. Their linear layers have no bias, and more than one dim of rows."""

    def __init__(self) -> None:
        super().__init__()
        width = self.inp.out_features
        layers = [[nn.Linear(width, width, bias=False) for _ in range(3)] for _ in self.blocks]
        self.blocks = nn.ModuleList(nn.Sequential(*each, nn.Tanh()) for each in layers)
        for block in self.blocks:
            checkpoint_block(block, selective_contexts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.out(x[:, 0])


def by_columns(param: nn.Parameter) -> shardrt.Shard | None:
    return shardrt.Shard(1) if param.dim() == 2 else None


def results(world: World, build: Callable[[], Any], shard: Callable[[nn.Module], object], syncs: bool) -> list[Any]:
    """Losses and gradients of three steps of two microbatches each, the last step with unequal losses on the way."""
    torch.manual_seed(0)
    model: Any = build()
    shard(model)
    found: list[Any] = []
    with buckets_of(0):
        for step in range(3):
            x = tokens(step) if isinstance(model, TiedGPT) else batch(step).float()
            for index, micro in enumerate(x.chunk(world.size)[world.rank].chunk(2)):
                model.set_requires_gradient_sync(syncs or index == 1)
                loss = loss_of(model, micro)
                loss.backward()
                found.append(loss.detach())
            found += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
            model.zero_grad()
    runtime = model.param_group.runtime
    runtime.streams.synchronize()
    assert runtime.memory.in_use == 0
    return found


MODELS = {"mlp": OddMLP, "used twice": UsedTwice, "tied": TiedGPT, "checkpoint": InnerCheckpoint, "reentrant": Reentrant}
MODELS["selective"] = Selective


@pytest.mark.parametrize("build", list(MODELS.values()), ids=list(MODELS))
@on_ranks(2, more=(3,))
@uncompiled()
def test_the_same_bits_as_with_ordinary_gradients(world: World, build: Callable[[], Any]) -> None:
    with settings_of(world, host_streams="inline"):
        with counted() as counts:
            found = results(world, build, shard_blocks, True)
        with ordinary():
            expected = results(world, build, shard_blocks, True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # The two linear layers of a block; attention calls `F.linear` out of sight.
    assert max(counts) == (3 if build is Selective else 2)


@pytest.mark.parametrize("streams", ["inline", "threaded"])
@pytest.mark.parametrize("kind", ["accumulates", "by columns", "replicas", "replicated", "bfloat16"])
@on_ranks(2, more=(4,))
@uncompiled()
def test_the_same_bits_in_other_settings(world: World, kind: str, streams: str) -> None:
    options: dict[str, Any] = {}
    if kind == "by columns":
        options["shard_placement_fn"] = by_columns
    if kind == "replicas":
        options["mesh"] = world.mesh.unflatten((2, world.size // 2), ("replicate", "shard"))
    if kind == "bfloat16":
        options["mp_policy"] = shardrt.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def shard(model: nn.Module) -> None:
        if kind == "replicated":
            for block in model.get_submodule("blocks").children():
                shardrt.replicate(block)
            shardrt.replicate(model)
        else:
            shard_blocks(model, **options)

    with settings_of(world, host_streams=streams):
        with counted() as counts:
            found = results(world, OddMLP, shard, kind != "accumulates")
        with ordinary():
            expected = results(world, OddMLP, shard, kind != "accumulates")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert max(counts, default=0) == (2 if streams == "inline" else 0), "where streams overlap, nothing has a place"


@on_ranks(2)
@uncompiled()
@buckets_of(0)
def test_what_is_not_packed_is_freed(world: World) -> None:
    """A backward that throws away a gradient, one that fails, and the weight's class in each phase."""
    model: Any = shard_blocks(OddMLP().double())
    up, seen = model.blocks[1].up, []
    up.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    x = batch(0)
    loss_of(model, x).backward()
    with torch.no_grad():
        model(x)
    assert seen == [LinearWeight, RunningParameter]  # the latter in the first forwards only
    handle = model.blocks[1].norm.register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, x).backward()
    handle.remove()
    model.reset_iter_state()
    memory = model.param_group.runtime.memory
    assert memory.in_use == 0
    model.zero_grad()
    expected = copy.deepcopy(model)
    loss_of(model, x).backward()
    with ordinary():
        loss_of(expected, x).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())


@contextmanager
def sources() -> Iterator[list[bool]]:
    """Of each group that is packed, whether that is into the communicator's buffer."""
    found: list[bool] = []
    prepare = GradientReduction._prepare

    def note(self: GradientReduction, *args: Any) -> Any:
        packed = prepare(self, *args)
        found.append(packed.source is self._in_comm_buffer)
        return packed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReduction, "_prepare", note)
        yield found


@on_ranks(2)
@uncompiled()
@buckets_of(0)
def test_all_ranks_reduce_from_the_same_kind_of_memory(world: World) -> None:
    """Whatever each has computed in place; and what one has, a group that is packed before takes away."""
    with settings_of(world, host_streams="inline"):
        model: Any = shard_blocks(OddMLP().double())
        x = batch(0)
        loss_of(model, x)
        model.reset_iter_state()
        reduction = model.blocks[0].param_group.reduction
        made: list[torch.Tensor | None] = []

        def take(*_: object) -> None:  # before the last block is packed
            made.append(reduction.place(min(reduction._ordinary.whole), model.param_group.runtime.streams.compute))
            if made[0] is not None:
                made[0].fill_(3.0)

        found: list[Any] = []
        for places in (ordinary, nullcontext, nullcontext):
            handle = model.out.register_full_backward_hook(take) if world.rank == 0 and len(found) == 2 else None
            with places(), sources() as kinds:
                loss_of(model, x).backward()
            found.append((kinds, [param.grad.to_local().clone() for param in model.parameters()]))
            model.zero_grad()
            if handle is not None:
                handle.remove()
        assert found[0][0] == found[1][0] == found[2][0]
        for _, grads in found[1:]:
            assert all(torch.equal(one, other) for one, other in zip(grads, found[0][1], strict=True))
        assert found[0][0] == [True] * 4
        for early in made:
            assert early is not None
            assert early.eq(3.0).all()
        position = min(reduction._ordinary.whole)
        weight = reduction.params[position].unsharded
        weight.grad = reduction.place(position, model.param_group.runtime.streams.compute).fill_(2.0)
        weight.grad = weight.grad.detach()  # as autograd does
        comm_buffer = reduction._in_comm_buffer.buffer.comm_buffer
        comm_buffer.occupy(model.param_group.runtime.streams.compute)
        comm_buffer.memory.zero_()
        assert weight.grad.eq(2.0).all()
        comm_buffer.leave(model.param_group.runtime.streams.compute)
        weight.grad = None


@on_ranks(2)
@uncompiled()
@buckets_of(0)
def test_gradients_are_in_place_after_partial_ones(world: World) -> None:
    """Those of a microbatch that was not reduced over the replicas are added to the new gradients, in their place."""
    whole: Any = OddMLP().double()
    model: Any = shard_blocks(copy.deepcopy(whole), mesh=DeviceMesh(world.comm, (2, 1), ("replicate", "shard")))
    moved, given = list[int](), list[int]()
    copy_away, give = Given.copy_away, Given.give

    def note(self: Given, *args: Any) -> None:
        moved.extend(self._given)
        copy_away(self, *args)

    def note_given(self: Given, position: int, view: torch.Tensor) -> torch.Tensor:
        given.append(position)
        return give(self, position, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Given, "copy_away", note)
        patch.setattr(Given, "give", note_given)
        for reduces in (False, True):
            given.clear()
            model.set_requires_all_reduce(reduces)
            loss_of(model, batch(world.rank)).backward()
            assert given
    assert not moved
    for rank in range(2):
        loss_of(whole, batch(rank)).backward()  # twice, and half of it each time
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), expected.grad, atol=1e-12)


@on_ranks(2)
@buckets_of(0)
def test_an_early_buffer_is_freed(world: World) -> None:
    model: Any = shard_blocks(OddMLP().double())
    loss_of(model, batch(0))
    reduction, runtime = model.blocks[0].param_group.reduction, model.param_group.runtime
    position = min(reduction._ordinary.whole)
    for syncs in (True, False):
        model.set_requires_gradient_sync(syncs)
        model.reset_iter_state()
        before = runtime.memory.in_use
        assert reduction.place(position, runtime.streams.compute) is not None
        assert (runtime.memory.in_use > before) == (not syncs)
        reduction.early.drop()
        assert runtime.memory.in_use == before
        assert reduction.place(position, runtime.streams.compute) is not None
        with pytest.raises(AssertionError, match="ends what has begun"):
            reduction.early.begin(reduction._ordinary, runtime.streams.compute)
        model.reset_iter_state()
        assert runtime.memory.in_use == before
        with pytest.raises(AssertionError, match=r"begin\(\) comes first"):
            reduction.early.give(position)


@on_ranks(2)
@uncompiled()
@buckets_of(0)
def test_what_has_a_place_can_be_pickled_and_is_freed(world: World) -> None:
    """A weight is pickled in a forward as a plain parameter; nothing refers to it once the model is of another dtype."""
    model: Any = shard_blocks(OddMLP())
    up, x = model.blocks[1].up, batch(0).float()
    loads: list[nn.Parameter] = []
    handle = up.register_forward_pre_hook(lambda module, args: loads.append(pickle.loads(pickle.dumps(module.weight))))
    loss_of(model, x).backward()
    with torch.no_grad():
        model(x)
    handle.remove()
    assert [(type(made), made.__dict__) for made in loads] == [(nn.Parameter, {})] * 2
    group = model.blocks[1].param_group
    assert len(group.visible.linear) == 2
    model.zero_grad()
    old = [weakref.ref(group.reduction), weakref.ref(group.params[0].unsharded)]
    gc.collect()
    gc.disable()
    try:
        model.double()
        assert [each() for each in old] == [None, None]
    finally:
        gc.enable()
    loss_of(model, batch(0)).backward()


def fail(*_: object) -> None:
    raise RuntimeError("on purpose")


class Seen(TorchDispatchMode):
    """Remembers the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3), (2, 2, 5, 3), (0, 3)])
def test_the_operations_are_those_of_torch(shape: tuple[int, ...]) -> None:
    """A recomputation, whose operations a checkpoint compares, may run torch's own."""
    for bias, wants_grad in ((nn.Parameter(torch.ones(4)), True), (None, True), (None, False)):
        x, weight, seen = torch.ones(shape, requires_grad=wants_grad), nn.Parameter(torch.ones(4, 3)), []
        for kind in (nn.Parameter, LinearWeight):
            weight.__class__ = kind
            with Seen() as mode:
                out = nn.functional.linear(x, weight, bias)
            seen.append((sorted(mode.names), out._is_view()))
        assert seen[0] == seen[1]

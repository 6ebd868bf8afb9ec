"""A single shard rank: it computes with its shards, and its gradients are those that autograd has made."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
import toys_tp
from observers import observing_calls, observing_memory
from ranks import on_ranks, refused
from shardrt.comm import Communicator, Event, Stream, Work, World
from shardrt.fsdp.base.events import BufferKind
from shardrt.parallel import parallelize_module
from toys import OddMLP, TiedGPT, UsedTwice, batch, buckets_of, loss_of, paired, shard_blocks, tokens, warns_of_create_graph


@contextmanager
def watched() -> Iterator[tuple[list[str], dict[BufferKind, int]]]:
    """The collectives of the block, and the most bytes that buffers of each kind have had at a time."""
    now, most = dict.fromkeys(BufferKind, 0), dict.fromkeys(BufferKind, 0)

    def changed(kind: BufferKind, group: object, nbytes: int) -> None:
        now[kind] += nbytes
        most[kind] = max(most[kind], now[kind])

    with observing_memory(changed), observing_calls() as names:
        yield names, most


def train(model: nn.Module, rows: Callable[[int], torch.Tensor], microbatches: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        for index, micro in enumerate(rows(step).chunk(microbatches)):
            if isinstance(model, shardrt.FSDPModule):
                model.set_requires_gradient_sync(index == microbatches - 1)
            loss_of(model, micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def local_of(param: nn.Parameter) -> torch.Tensor:
    return param._local_tensor.detach()


def equal(sharded: nn.Module, whole: nn.Module) -> bool:
    return all(torch.equal(p.full_tensor(), q) for p, q in zip(sharded.parameters(), whole.parameters(), strict=True))


def last_dim(param: nn.Parameter) -> shardrt.Shard | None:
    return shardrt.Shard(param.dim() - 1) if param.dim() else None


def frozen(model: nn.Module) -> nn.Module:
    model.blocks[1].requires_grad_(False)
    model.blocks[0].up.weight.requires_grad_(False)
    return model


def recomputed(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "default": (OddMLP, {}),
    "reshard": (OddMLP, {"reshard_after_forward": True}),
    "keep": (OddMLP, {"reshard_after_forward": False}),
    "keep a part": (OddMLP, {"reshard_after_forward": 1}),
    "other dims": (OddMLP, {"shard_placement_fn": last_dim}),
    "frozen": (lambda: frozen(OddMLP()), {}),
    "used twice": (UsedTwice, {}),
    "tied": (TiedGPT, {}),
}


@on_ranks(1)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("case", MODELS)
def test_nothing_is_gathered_packed_or_sent(world: World, case: str, microbatches: int) -> None:
    """Parameters are bitwise those of the plain model, unless they lie otherwise; there is no collective, and no buffer."""
    make, options = MODELS[case]
    whole = make().double()
    model = copy.deepcopy(whole)
    rows = tokens if case == "tied" else batch
    train(whole, rows, microbatches)
    shard_blocks(model, **options)
    with watched() as (calls, most):
        train(model, rows, microbatches)
    if case == "other dims":
        for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)
    else:
        assert equal(model, whole)
    assert calls == []
    assert not any(most.values())
    assert model.param_group.runtime.memory.peak == 0


@on_ranks(1)
def test_recomputed_and_compiled_blocks(world: World) -> None:
    for prepare in (recomputed, lambda model: [block.compile(backend="eager") for block in model.blocks]):
        whole = OddMLP().double()
        model = copy.deepcopy(whole)
        train(whole, batch)
        shard_blocks(model)
        prepare(model)
        train(model, batch)
        assert equal(model, whole)
        assert model.param_group.runtime.memory.peak == 0


@on_ranks(2)
def test_replicas_pack_into_the_sharded_gradients(world: World) -> None:
    """Without a buffer, and with one all-reduce for each group."""
    for mesh in (None, world.mesh.unflatten((2, 1), ("replica", "shard"))):
        whole = OddMLP().double()
        model = copy.deepcopy(whole)
        for module in (*model.blocks, model):
            shardrt.replicate(module) if mesh is None else shardrt.fully_shard(module, mesh=mesh)
        loss_of(whole, batch(0)).backward()
        with watched() as (calls, most), buckets_of(0):
            loss_of(model, batch(0).chunk(2)[world.rank]).backward()
        assert calls == ["all_reduce"] * 4
        assert not any(most.values())
        for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_a_dtype_policy_casts_once(world: World) -> None:
    """One buffer in the compute dtype, filled without a collective; gradients are cast as they are packed."""
    whole = OddMLP(layers=1)
    model = copy.deepcopy(whole)
    shard_blocks(model, mp_policy=shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x = batch(0).bfloat16()
    whole.bfloat16()
    for _ in range(2):
        with watched() as (calls, most):
            out = model(x)
            out.sum().backward()
        expected = whole(x)
        assert torch.equal(out, expected)
        expected.sum().backward()
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(param.grad.full_tensor(), other.grad.float())
        assert calls == []
        assert most[BufferKind.GATHERED] == sum(group.nbytes for group in model.param_group.with_descendants())
        assert most[BufferKind.PACKED] == most[BufferKind.SCRATCH] == 0
        model.zero_grad()
        whole.zero_grad()


# ---------------------------------------------------------------------- the parameters


def assert_resident(model: nn.Module) -> None:
    """The gathered parameters lie where the shards do."""
    shards = [local_of(param) for param in model.parameters()]
    model.unshard()
    for block in model.blocks:
        block.unshard()
    assert [param.data_ptr() for param in model.parameters()] == [shard.data_ptr() for shard in shards]
    for block in (*model.blocks, model):
        block.reshard()


@on_ranks(1)
def test_the_parameters_follow_their_shards(world: World) -> None:
    """When these get other memory: by another dtype, from the meta device, from a state dict, in a copy."""
    whole, model = paired(OddMLP())
    assert_resident(model)
    model.double()
    whole.double()
    assert_resident(model)
    train(model, batch)
    train(whole, batch)
    assert equal(model, whole)
    copied = copy.deepcopy(model)
    assert_resident(copied)
    assert local_of(copied.inp.weight).data_ptr() != local_of(model.inp.weight).data_ptr()
    train(copied, batch)
    assert equal(model, whole)
    for assign in (False, True):
        with torch.device("meta"):
            empty = OddMLP().double()
        shard_blocks(empty)
        if not assign:
            empty.to_empty(device="cpu")
        empty.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(empty(batch(0)), whole(batch(0)))
        empty.reset_iter_state()
        assert_resident(empty)


@on_ranks(1)
def test_writes_to_exposed_parameters_are_writes_to_the_shards(world: World) -> None:
    model = shard_blocks(OddMLP(), reshard_after_forward=False)
    weight = model.blocks[0].up.weight
    version = weight._version
    x = batch(0).float()
    with torch.no_grad():
        model(x)
    model(x)
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(2)
    model.blocks[0].down.weight.data = torch.full_like(model.blocks[0].down.weight, 3)
    model.reshard()
    model.blocks[0].reshard()
    assert torch.equal(local_of(weight), torch.full((40, 13), 2.0))
    assert torch.equal(local_of(model.blocks[0].down.weight), torch.full((13, 40), 3.0))
    assert weight._version > version
    model.reset_iter_state()
    loss = loss_of(model, x)
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1)
    refused("modified by an inplace operation", loss.backward, RuntimeError)
    model.reset_iter_state()
    loss_of(model, x).backward()


@on_ranks(1)
@pytest.mark.parametrize("reshard", [False, True])
def test_a_backward_sees_what_was_written_to_the_shards_after_the_forward(world: World, reshard: bool) -> None:
    model = shardrt.fully_shard(nn.Linear(3, 2, bias=False), reshard_after_forward=reshard)
    x = torch.ones(1, 3, requires_grad=True)
    out = model(x)
    with torch.no_grad():
        model.param_group.params[0].sharded.fill_(5)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((1, 3), 10.0))


class ReturnsItsWeight(nn.Linear):
    returns = False

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return (out, self.weight) if self.returns else out


@on_ranks(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_module_must_not_return_a_parameter(world: World, steps: int, dtype: torch.dtype | None) -> None:
    """As on several ranks, where the memory would be freed, now or once the backward has used it."""
    policy = shardrt.MixedPrecisionPolicy(dtype)
    model: Any = nn.Sequential(shardrt.fully_shard(ReturnsItsWeight(5, 5), mp_policy=policy))
    shardrt.fully_shard(model, mp_policy=policy)
    for _ in range(steps):
        model(batch(0).float()).sum().backward()
    model[0].returns = True
    refused("returns a parameter or a view of one", lambda: model(batch(0).float()), RuntimeError)


class CountingGather:
    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        self.calls += 1
        return comm.all_gather(out, inp, stream=stream)


@on_ranks(1)
@buckets_of(0)
def test_a_custom_all_gather_is_called(world: World) -> None:
    model, gather = shard_blocks(OddMLP().double()), CountingGather()
    model.blocks[0].set_custom_all_gather(gather)
    train(model, batch)
    assert gather.calls == 6


@on_ranks(1)
def test_beside_tensor_parallelism(world: World) -> None:
    """The modules see DTensors on the tensor-parallel mesh, in the shards' memory."""
    mesh = world.mesh.unflatten((1, 1), ("dp", "tp"))
    models = [toys_tp.Transformer(tied=False).double()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        parallelize_module(model, mesh["tp"], toys_tp.sequence_plan())
    shard_blocks(models[1], "layers", mesh=mesh["dp"])
    x = tokens(0)[:, :4] % 8
    with watched() as (_, most):
        outputs = [model(x) for model in models]
        for out in outputs:
            out.sum().backward()
    assert torch.equal(*outputs)
    assert most[BufferKind.GATHERED] == 0
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        expected = one.grad.full_tensor() if isinstance(one.grad, shardrt.DTensor) else one.grad
        torch.testing.assert_close(other.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_compute_waits_for_the_optimizer_of_another_stream(world: World) -> None:
    """`set_post_optim_event` is what gathers wait for; here compute reads the shards."""
    model = shard_blocks(OddMLP())
    model(batch(0).float())
    waited = []

    class Later(Event):
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited.append(True)

    model.set_post_optim_event(Later())
    model(batch(0).float())
    assert len(waited) == 2  # the gather stream and compute


# ---------------------------------------------------------------------- the gradients


@on_ranks(1)
def test_gradients_are_those_that_autograd_made(world: World) -> None:
    """Their memory is autograd's; zero_grad() frees it, and a gradient that is kept stays as it is."""
    model = shard_blocks(OddMLP().double())
    made = dict[str, int]()
    block = model.blocks[0]
    weight = block.up.weight

    def note(module: nn.Module, inputs: object) -> None:
        seen = module.weight
        if not seen._backward_hooks:
            seen.register_hook(lambda grad: made.update(weight=grad.data_ptr()))

    block.up.register_forward_pre_hook(note)
    loss_of(model, batch(0)).backward()
    kept, values = weight.grad, weight.grad.to_local().clone()
    assert kept.to_local().data_ptr() == made["weight"]
    model.zero_grad()
    loss_of(model, batch(1)).backward()
    assert weight.grad is not kept
    assert torch.equal(kept.to_local(), values)
    gc.disable()
    died = weakref.ref(weight.grad.to_local())
    model.zero_grad()
    gone = died() is None
    gc.enable()
    assert gone


@on_ranks(1)
def test_gradients_add_up(world: World) -> None:
    """Over backwards with and without synchronisation; post-accumulate hooks are called where gradients are published."""
    whole, model = paired(OddMLP().double())
    called: list[torch.Tensor] = []
    model.inp.weight.register_post_accumulate_grad_hook(lambda param: called.append(param.grad.full_tensor().clone()))
    for step, sync in enumerate((True, False, False, True, True)):
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(sync)
        loss_of(whole, batch(step)).backward()
        before = None if model.inp.weight.grad is None else model.inp.weight.grad.full_tensor().clone()
        loss_of(model, batch(step)).backward()
        if sync:
            assert all(
                torch.equal(p.grad.full_tensor(), q.grad) or torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-13)
                for p, q in zip(model.parameters(), whole.parameters(), strict=True)
            )
        else:
            assert torch.equal(model.inp.weight.grad.full_tensor(), before)
    assert len(called) == 3
    torch.testing.assert_close(called[-1], whole.inp.weight.grad)
    model.zero_grad(set_to_none=False)
    loss_of(model, batch(7)).backward()
    whole.zero_grad()
    loss_of(whole, batch(7)).backward()
    assert torch.equal(model.inp.weight.grad.full_tensor(), whole.inp.weight.grad)
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(8)).backward()
    refused("has accumulated gradients that are not reduced", model.float, RuntimeError)
    model.reset_iter_state()  # drops what was kept
    model.set_requires_gradient_sync(True)
    loss_of(model, batch(7)).backward()
    assert torch.equal(model.inp.weight.grad.full_tensor(), whole.inp.weight.grad)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], float]] = {
    "a factor": (lambda model: model.set_gradient_divide_factor(2.0), 0.5),
    "a hook": (lambda model: model.set_all_reduce_hook(lambda grads: grads.mul_(3)), 3.0),
    "sums only": (lambda model: model.set_force_sum_reduction_for_comms(True), 1.0),
    "zeros": (lambda model: model.set_reduce_scatter_unused_params(True), 1.0),
}


@on_ranks(1)
@pytest.mark.parametrize("case", CHANGES)
def test_gradients_that_something_is_done_to(world: World, case: str) -> None:
    """From one backward on, with an earlier gradient, and with others that are kept from a backward without synchronisation."""
    change, factor = CHANGES[case]
    whole, model = paired(OddMLP().double())
    grads = []
    for step in range(3):
        whole.zero_grad()
        loss_of(whole, batch(step)).backward()
        grads.append(whole.inp.weight.grad.clone())
    loss_of(model, batch(0)).backward()
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(1)).backward()
    model.set_requires_gradient_sync(True)
    change(model)
    loss_of(model, batch(2)).backward()
    torch.testing.assert_close(
        model.inp.weight.grad.full_tensor(), grads[0] + factor * (grads[1] + grads[2]), rtol=1e-12, atol=1e-12
    )


@on_ranks(1)
def test_a_graph_of_gradients_is_not_published(world: World) -> None:
    """backward(create_graph=True) gives gradients with a graph; the sharded ones have none, and memory of their own."""
    whole, model = paired(OddMLP().double())
    loss_of(whole, batch(0)).backward()
    with warns_of_create_graph():
        loss_of(model, batch(0)).backward(create_graph=True)
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert not param.grad.requires_grad
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_the_summary_has_no_gathered_bytes(world: World) -> None:
    model = shard_blocks(OddMLP(layers=2))
    model.blocks[0].set_custom_all_gather(CountingGather())
    _, root, first, second, *_ = shardrt.memory_summary(model).splitlines()
    assert " 0 B " in root
    assert " 0 B " in second
    assert " 0 B " not in first

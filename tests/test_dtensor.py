"""What people do with `DTensor`s outside of training: look at them, copy them, initialise them; and mixed with plain ones."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from toys import batch, loss_of


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values that are the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------- lists of tensors


@on_ranks(2)
def test_only_elementwise_operations_on_lists_run_on_the_parts(world: World) -> None:
    whole = drawn(5, 6).float()
    tensor = distribute_tensor(whole, world.mesh, [Shard(0)])
    for refused in (
        lambda: torch.ops.aten._fused_dropout(tensor, 0.5),
        lambda: torch._foreach_max([tensor]),
        lambda: torch._foreach_powsum([tensor], 2),
    ):
        with pytest.raises(NotImplementedError, match=r"aten\._f\w+.* is not defined on sharded tensors"):
            refused()
    with pytest.raises(ValueError, match="expected a 0-dim tensor or one of the same shape"):  # torch takes it apart on a CPU
        torch.ops.aten._fused_rms_norm(tensor, [6], None, None)
    (found,) = torch._foreach_lerp([tensor], [tensor.neg()], 0.25)
    assert torch.equal(found.full_tensor(), torch.lerp(whole, -whole, 0.25))


MIXED = [
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "lr": 0.1}),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9, "lr": 0.1}),
]


@pytest.mark.parametrize(("make", "options"), MIXED, ids=str)
@on_ranks(2)
def test_plain_and_sharded_parameters_in_one_step(world: World, make: type[torch.optim.Optimizer], options: object) -> None:
    """Plain first, in the middle and last, one of them with a sharded gradient."""
    wholes = [nn.Parameter(drawn(4, 3, seed=index)) for index in range(5)]
    params = [
        nn.Parameter(
            distribute_tensor(whole.detach(), world.mesh, [FlatShard(0, (11, 1))]) if index % 2 else whole.detach().clone()
        )
        for index, whole in enumerate(wholes)
    ]
    optimizers = [make(tensors, **options) for tensors in (wholes, params)]
    for step in range(3):
        for index, (whole, param) in enumerate(zip(wholes, params, strict=True)):
            whole.grad = drawn(4, 3, seed=10 * step + index)
            sharded = isinstance(param, DTensor) or index == 2
            lies = param.placements if isinstance(param, DTensor) else [Shard(1)]
            param.grad = distribute_tensor(whole.grad, world.mesh, lies) if sharded else whole.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for whole, param in zip(wholes, params, strict=True):
            found = param.full_tensor() if isinstance(param, DTensor) else param
            torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    sums = torch._foreach_add(params, params)
    assert [type(value) for value in sums] == [torch.Tensor, DTensor, torch.Tensor, DTensor, torch.Tensor]


# ---------------------------------------------------------------------- GradScaler


SCALED = {
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("axes", [("dp",), ("replicate", "shard")], ids=len)
@on_ranks(4)
def test_grad_scaler(world: World, axes: tuple[str, ...], name: str) -> None:
    """An infinity in one rank's part of a gradient skips the step on all ranks and halves the scale, as in one process."""
    mesh = DeviceMesh(world.comm, (4,) if len(axes) == 1 else (2, 2), axes)
    whole = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    sharded = shardrt.fully_shard(copy.deepcopy(whole), mesh=mesh)
    plain = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    models = (whole, sharded)
    optimizers = [SCALED[name]([extra, *model.parameters()]) for extra, model in zip(plain, models, strict=True)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=2) for _ in models]
    for step in range(6):
        x = batch(step)
        parts = (x, x.chunk(4)[world.rank])
        for model, extra, mine, optimizer, scaler in zip(models, plain, parts, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(lambda x, m=model, e=extra: m(x) * e.detach(), mine)).backward()
            extra.grad = torch.full((3,), 2.0, dtype=torch.float64)
        if step in (1, 4):  # one element, on one rank (and its replica) alone
            whole[0].weight.grad[-1, -1] = float("inf") if step == 1 else float("nan")
            bad = distribute_tensor(whole[0].weight.grad, mesh, sharded[0].weight.placements)
            sharded[0].weight.grad.to_local().copy_(bad.to_local())
        if step == 3:
            for optimizer, scaler in zip(optimizers, scalers, strict=True):
                scaler.unscale_(optimizer)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        compare_parameters(whole, sharded)
        assert torch.equal(*plain)
    assert scalers[1].get_scale() == 2.0**6
    mesh.close()


@on_ranks(4)
def test_what_one_mesh_found_reaches_all(world: World) -> None:
    """Gradients on crossing meshes, plain ones among them; parts without elements; float16."""
    mesh = DeviceMesh(world.comm, (2, 2), ("a", "b"))
    for bad_rank in range(4):
        grads = [distribute_tensor(torch.ones(4), mesh[axis], [RaggedShard(0, (4, 0))]).half() for axis in ("a", "b")]
        grads.append(torch.ones(2, dtype=torch.float16))
        grads[bad_rank % 2].to_local().fill_(float("inf") if world.rank == 0 else 1)
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
        assert found == 1, bad_rank
        assert (grads[2] == 0.5).all()
    mesh.close()
    partial = DTensor.from_local(torch.ones(2), world.mesh, [Partial()])
    with pytest.raises(NotImplementedError, match="is not defined on sharded tensors"):
        torch._amp_foreach_non_finite_check_and_unscale_([partial], torch.zeros(()), torch.tensor(0.5))


def compare_parameters(whole: nn.Module, sharded: nn.Module) -> None:
    for expected, param in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- copies


@on_ranks(2)
def test_deepcopy(world: World) -> None:
    """Of tensors, parameters and state dicts: the parts are copied, what is shared among them stays shared."""
    model = shardrt.fully_shard(nn.Linear(7, 5).double())
    model(torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    model.weight.note = ["mine"]
    copied = copy.deepcopy({"a": model.weight, "again": model.weight, **model.state_dict()})
    for name, original in {"a": model.weight, **model.state_dict()}.items():
        found = copied[name]
        assert (type(found), found.spec) == (DTensor, original.spec)
        assert torch.equal(found.full_tensor(), original.full_tensor())
        assert found.to_local().data_ptr() != original.to_local().data_ptr() or not original.to_local().numel()
    assert copied["a"] is copied["again"]
    assert isinstance(copied["a"], nn.Parameter)
    assert not isinstance(copied["weight"], nn.Parameter)
    assert copied["a"].requires_grad
    assert copied["a"].note == ["mine"]
    assert copied["a"].note is not model.weight.note
    assert torch.equal(copied["a"].grad.full_tensor(), model.weight.grad.full_tensor())
    before = model.weight.full_tensor()
    with torch.no_grad():
        copied["a"].add_(1)
        copied["a"].grad.zero_()
    assert torch.equal(model.weight.full_tensor(), before)
    assert model.weight.grad.full_tensor().all()
    frozen = copy.deepcopy(distribute_tensor(torch.ones(4), world.mesh, [Partial()]))
    assert torch.equal(frozen.full_tensor(), torch.ones(4))
    with pytest.raises(
        RuntimeError, match=r"deepcopy of a DTensor of shape \(5, 7\) that autograd computed: detach\(\) it first"
    ):
        copy.deepcopy(model.weight * 2)


@on_ranks(2)
def test_pickling_is_refused_in_a_line(world: World) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), world.mesh, [Shard(0)])
    for refused in (lambda: pickle.dumps(tensor), lambda: torch.save({"weight": nn.Parameter(tensor)}, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"of shape \(4, 2\), cannot be pickled.*full_tensor\(\).*torch\.save") as caught:
            refused()
        assert len(str(caught.value)) < 250


# ---------------------------------------------------------------------- names of torch's DTensor


@on_ranks(4)
def test_names_and_arguments_of_torch(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    whole = drawn(5, 6)
    lies = [Replicate(), RaggedShard(0, (2, 3))]
    tensor = distribute_tensor(whole, device_mesh=mesh, placements=lies)
    assert isinstance(tensor.placements[1], Shard)
    assert tensor.placements[1] != Shard(0)
    for moved in (tensor.redistribute(mesh, [Shard(0), Shard(1)]), tensor.redistribute(placements=[Shard(0), Shard(1)])):
        assert moved.placements == (Shard(0), Shard(1))
        assert torch.equal(moved.redistribute(device_mesh=mesh).to_local(), whole)
    with pytest.raises(ValueError, match=r"redistribute to DeviceMesh\(replicate=2, rank.*expected its own mesh"):
        tensor.redistribute(mesh["replicate"], [Shard(0)])
    local = tensor.to_local().clone()
    again = DTensor.from_local(local, mesh, lies, run_check=True, shape=whole.size(), stride=whole.stride())
    assert torch.equal(again.full_tensor(), whole)
    with pytest.raises(ValueError, match=r"stride \(1, 5\) of shape \(5, 6\): expected a contiguous tensor's"):
        DTensor.from_local(local, mesh, lies, shape=(5, 6), stride=(1, 5))
    if world.rank == 3:
        local[-1, -1] += 1
    with pytest.raises(ValueError, match=r"run_check: replicas of Spec.*hold different values"):  # on every rank
        DTensor.from_local(local, mesh, lies, (5, 6), run_check=True)
    mesh.close()

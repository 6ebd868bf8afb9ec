"""`DTensor`s outside of training: reading, writing, copying and initialising them, and mixing them with plain tensors."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import shardrt
from placements import drawn, sample_placements
from ranks import on_ranks
from shardrt import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from shardrt.tensor.operations.dispatch import FOREACH_AND_FUSED
from subclasses import Narrow
from toys import batch, loss_of

# ---------------------------------------------------------------------- lists of tensors


def foreach_and_fused() -> list[torch._ops.OpOverload]:
    """Every overload of `aten::_foreach_*` and `aten::_fused_*` that this torch has."""
    names = (name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_f"))
    split = (name.partition(".") for name in sorted(names) if name.startswith(("_foreach_", "_fused_")))
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in split]


def arguments_of(op: torch._ops.OpOverload, tensors: Iterator[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that fit the schema: `tensors` for lists and for a first tensor, plain scalars for other tensors."""
    by_type: dict[str, Callable[[], Any]] = {
        "Tensor": lambda: torch.tensor(0.25, dtype=torch.float64),
        "List[Tensor]": lambda: [next(tensors), next(tensors)],
        "List[number]": lambda: [0.25, 0.5],
        "List[int]": lambda: [6],
        "List[bool]": lambda: [True, True],
        "number": lambda: 0.25,
        "float": lambda: 0.25,
        "int": lambda: 1,
        "bool": lambda: False,
    }
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for index, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if argument.name == "state_steps":
            value: Any = [torch.tensor(3.0), torch.tensor(4.0)]
        elif argument.name == "amsgrad":
            value = True
        elif argument.name == "scalars":
            value = torch.tensor([0.25, 0.5], dtype=torch.float64) if kind == "Tensor" else [0.25, 0.5]
        elif kind == "Tensor" and index == 0:
            value = next(tensors)
        else:
            value = by_type.get(kind, lambda: None)()  # None for what is optional
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


@on_ranks(2)
def test_every_foreach_and_fused_operation_is_elementwise_or_refused(world: World) -> None:
    """What runs yields the values of the full tensors, in its results and in its arguments."""
    ran, rejected = set(), set()
    for op in foreach_and_fused():
        fulls = [drawn(5, 6, seed=seed).abs() / 4 + 0.1 for seed in range(12)]
        plain_args, plain_kwargs = arguments_of(op, iter([full.clone() for full in fulls]))
        sharded = [distribute_tensor(full, world.mesh, [(Shard(0), Shard(1))[index % 2]]) for index, full in enumerate(fulls)]
        args, kwargs = arguments_of(op, iter(sharded))
        name = op._schema.name.removeprefix("aten::")
        if name not in FOREACH_AND_FUSED or (name == "_foreach_norm" and "out" in kwargs):
            if name != "_fused_rms_norm":  # composed of other operations
                with pytest.raises(NotImplementedError, match=rf"aten\.{name}\.\w+ is not defined on sharded tensors"):
                    op(*args, **kwargs)
                rejected.add(name)
            continue
        found, expected = op(*args, **kwargs), op(*plain_args, **plain_kwargs)
        ran.add(name)
        for one, other in zip(
            tree_leaves((found, args, kwargs)), tree_leaves((expected, plain_args, plain_kwargs)), strict=True
        ):
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(whole(one), other, rtol=1e-12, atol=1e-12, equal_nan=True, msg=str(op))
    assert [name for name in FOREACH_AND_FUSED - ran if hasattr(torch.ops.aten, name)] == []
    assert rejected >= {"_foreach_max", "_foreach_powsum", "_fused_adam", "_fused_adamw", "_fused_dropout", "_fused_sgd"}


@on_ranks(2)
def test_fused_operations_by_value(world: World) -> None:
    full = drawn(5, 6).float()
    tensor = distribute_tensor(full, world.mesh, [Shard(0)])
    norm = torch.ops.aten._fused_rms_norm
    for found, expected in zip(norm(tensor, [6], None, None), norm(full, [6], None, None), strict=True):
        assert torch.equal(whole(found), expected)  # composed of other operations, which gather
    with pytest.raises(NotImplementedError, match=r"aten\._fused_dropout\.default is not defined on sharded tensors"):
        torch.ops.aten._fused_dropout(tensor, 0.5)
    assert torch.equal(tensor.full_tensor(), full)
    half = full.bfloat16()
    sharded = distribute_tensor(half, world.mesh, [Shard(0)])
    for found, expected in zip(
        torch._foreach_norm([sharded, sharded], 2, torch.float64),
        torch._foreach_norm([half, half], 2, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@on_ranks(2)
def test_operations_that_are_not_in_the_table_are_refused(world: World) -> None:
    """Unknown operations, outputs that a rule does not write, and random operations that torch calls pointwise."""
    full = drawn(5, 6)
    tensor, out = distribute_tensor(full, world.mesh, [Shard(0)]), torch.empty((), dtype=torch.float64)
    aten = torch.ops.aten
    for wrong in (
        lambda: aten.native_group_norm(tensor, None, None, 5, 6, 1, 1, 1e-5),
        lambda: aten.native_dropout(tensor, 0.5, True),
        lambda: aten.rrelu_with_noise(tensor, torch.empty_like(tensor), 0.1, 0.3, True),
        lambda: aten.linalg_vector_norm.out(tensor, 2, out=out),
        lambda: aten._foreach_norm.Scalar_out([tensor], 2, out=[out]),
        lambda: aten.rand_like.out(tensor, out=torch.empty(5, 6)),
        lambda: aten.new_empty.out(tensor, [5, 6], out=torch.empty(5, 6)),
        lambda: aten.clone.out(tensor, out=torch.empty(5, 6)),
        lambda: aten._amp_foreach_non_finite_check_and_unscale([tensor], out, torch.tensor(0.5)),
    ):
        with pytest.raises(NotImplementedError, match=r"aten\.\w+\.\w+ is not defined on sharded tensors"):
            wrong()
    first, second = (torch.rand_like(tensor, generator=torch.Generator().manual_seed(3)).full_tensor() for _ in range(2))
    assert torch.equal(first, second)


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
    """An infinity in one rank's shard of a gradient makes all ranks skip the step and halve the scale, as in one process."""
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
def test_found_inf_propagates_between_meshes(world: World) -> None:
    """Gradients on crossing meshes, with plain ones, empty shards, and float16."""
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
    """Of tensors, parameters and state dicts: local shards are copied, shared objects stay shared."""
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
    with pytest.raises(RuntimeError, match=r"deepcopy of a DTensor of shape \(5, 7\) that is not a leaf: detach\(\) it first"):
        copy.deepcopy(model.weight * 2)


@on_ranks(2)
def test_pickling_raises_a_short_error(world: World) -> None:
    tensor = distribute_tensor(torch.ones(4, 2), world.mesh, [Shard(0)])
    for wrong in (lambda: pickle.dumps(tensor), lambda: torch.save({"weight": nn.Parameter(tensor)}, io.BytesIO())):
        with pytest.raises(
            RuntimeError, match=r"of shape \(4, 2\)\) cannot be pickled.*full_tensor\(\).*torch\.save"
        ) as caught:
            wrong()
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
    with pytest.raises(ValueError, match=r"stride \(1, 6\) of a tensor of shape \(5, 6\): expected that of a dense one, such"):
        DTensor.from_local(local, mesh, lies, shape=(5, 6), stride=(1, 6))
    if world.rank == 3:
        local[-1, -1] += 1
    with pytest.raises(ValueError, match=r"run_check: replicas of Spec.*hold different values"):  # on every rank
        DTensor.from_local(local, mesh, lies, (5, 6), run_check=True)
    mesh.close()


# ---------------------------------------------------------------------- looking at tensors

Look = Callable[[torch.Tensor, torch.Tensor], Any]  # of a sharded tensor, and of the full tensor
LOOKS: dict[str, Look] = {
    "row": lambda w, p: w[0],
    "slice": lambda w, p: w[1:3, ::2],
    "indices": lambda w, p: w[torch.tensor([0, 3])],
    "sharded mask": lambda w, p: w[w > 0],
    "plain mask": lambda w, p: w[p > 0],
    "element": lambda w, p: w[0, 0].item(),
    "tolist": lambda w, p: w.tolist(),
    "tolist of a row": lambda w, p: w[0].tolist(),
    "iteration": lambda w, p: list(w),
    "std": lambda w, p: (w.std(), w.std(0)),
    "var": lambda w, p: w.var(1, keepdim=True),
    "amax, amin": lambda w, p: (w.amax(), w.amax(1), w.amin(0), w.aminmax()),
    "argmax, argmin": lambda w, p: (w.argmax(), w.argmin(1)),
    "max, min": lambda w, p: (*w.max(0), *w.min(1)),
    "all, any": lambda w, p: ((w > 0).all(1), (w > 0).any(0)),
    "topk, kthvalue": lambda w, p: (*w.topk(2), *w.flatten().kthvalue(3)),
    "sort": lambda w, p: (*w.sort(), w.argsort(0)),
    "median, quantile, mode": lambda w, p: (w.median(), *w.median(0), w.quantile(0.3), w.nanquantile(0.3), *w.round().mode(0)),
    "split, chunk, unbind": lambda w, p: (*w.split(2), *w.split([1, 4]), *w.chunk(3, dim=1), *w.unbind(), *w.tensor_split(2)),
    "stack, cat": lambda w, p: (torch.stack([w, p]), torch.cat([w, w], 1), torch.vstack([p, w])),
    "shapes": lambda w, p: (
        w.unsqueeze(0),
        w.unsqueeze(0).squeeze(),
        w.flatten(),
        w.reshape(3, 10),
        w.view_as(p),
        w.expand(2, 5, 6),
    ),
    "dims": lambda w, p: (w.T, w.mT, w.movedim(0, 1), w.permute(1, 0), torch.select(w, 0, 1), w.narrow(1, 2, 3)),
    "diagonals": lambda w, p: (w.diagonal(), w.diag(), w.tril(), w.triu(1), w[:5, :5].trace()),
    "softmax": lambda w, p: (w.softmax(-1), w.log_softmax(0), w.logsumexp(1)),
    "allclose": lambda w, p: (torch.allclose(w, p), torch.allclose(p, w + 1e-12), torch.allclose(w, w + 1)),
    "isclose": lambda w, p: torch.isclose(w, p),
    "count_nonzero": lambda w, p: (w.count_nonzero(), (w > 0).count_nonzero(1), (w > 0).nonzero()),
    "histogram, unique": lambda w, p: (w.histc(4, -1, 1), *torch.histogram(w, 3), w.sign().unique()),
    "cumsum, prod": lambda w, p: (w.cumsum(0), w.prod(), w.nansum(), w.diff()),
    "flip, roll, repeat": lambda w, p: (w.flip(0), w.roll(1), w.repeat(2, 1), w.rot90()),
    "norms": lambda w, p: (
        w.norm(dim=1),
        torch.linalg.matrix_norm(w, "nuc"),
        torch.linalg.svdvals(w),
        torch.linalg.matrix_rank(w),
    ),
    "products": lambda w, p: (w @ w.T, w.T @ p, w @ p[0], torch.einsum("ij,kj->ik", w, w), torch.outer(w[0], w[1])),
    "inverse": lambda w, p: (torch.linalg.inv(w[:5, :5]), torch.linalg.det(w[:5, :5]), torch.linalg.pinv(w)),
    "rows and columns": lambda w, p: (w - w.mean(0), w / w.norm(dim=1, keepdim=True), nn.functional.normalize(w, dim=1)),
    "similarity": lambda w, p: (torch.cosine_similarity(w, w.flip(0)), torch.cov(w), torch.dist(w, p.flip(0))),
    "gather": lambda w, p: (w.gather(1, torch.zeros(5, 1, dtype=torch.long)), w.index_select(0, torch.tensor([1, 2]))),
    "two results": lambda w, p: torch.frexp(w),
    "text": lambda w, p: str(w[0]),
    "numpy": lambda w, p: torch.from_numpy(w[0].numpy().copy()),
}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


@on_ranks(3)
def test_reads(world: World) -> None:
    """The results equal those of the full tensor on every rank."""
    plain = drawn(5, 6)
    for placement in (RaggedShard(1, (4, 0, 2)), FlatShard(0, (0, 7, 23))):
        tensor = distribute_tensor(plain, world.mesh, [placement])
        for name, look in LOOKS.items():
            found, expected = tree_leaves(look(tensor, plain)), tree_leaves(look(plain, plain))
            assert len(found) == len(expected), name
            for one, other in zip(found, expected, strict=True):
                if isinstance(other, torch.Tensor):
                    torch.testing.assert_close(whole(one) + 0, other + 0, msg=f"{name} {placement}")
                else:
                    assert one == other, name
        assert torch.equal(tensor.full_tensor(), plain)


@on_ranks(2)
def test_views_keep_their_values_and_read_without_communication(world: World) -> None:
    plain = drawn(5, 6)
    tensor = distribute_tensor(plain, world.mesh, [Shard(0)])
    row = tensor[4]
    tensor.zero_()
    if world.rank == 0:  # no communication
        assert torch.equal(row + 0, plain[4])
        assert type(row + 0) is torch.Tensor
        assert row.sum() == plain[4].sum()
        assert row[2:].tolist() == plain[4, 2:].tolist()
    for copied in (copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row.clone()):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, plain[4])
    with pytest.raises(ValueError, match="read-only"):
        row.numpy()[0] = 1
    partial = DTensor.from_local(plain, world.mesh, [Partial()])
    assert torch.equal(partial[0] + 0, 2 * plain[0])
    with pytest.raises(NotImplementedError, match=r"aten.fill_.\w+ is not defined on sharded tensors"):
        partial[0] = 1
    layer = shardrt.fully_shard(nn.Linear(6, 5).double())
    weight = layer.weight
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):  # as of a plain parameter
        weight[0] = 1
    with pytest.raises(NotImplementedError, match=r"aten.mul.Tensor on parameter 'weight' of the sharded module 'Linear'"):
        weight[1] * plain[0]  # data may differ between ranks, and nothing would reduce the gradients
    row = weight[1]
    row.square().sum().backward()
    zeros = torch.zeros(5, 6, dtype=torch.float64)
    assert torch.equal(whole(weight.grad), zeros.index_copy(0, torch.tensor([1]), 2 * row.detach()[None] + 0))


# ---------------------------------------------------------------------- writes to a tensor


def swap(w: torch.Tensor) -> None:
    w[[0, 1]] = w[[1, 0]]


def set_to(*key: Any, value: Any) -> Callable[[torch.Tensor, torch.Tensor], object]:
    return lambda w, p: w.__setitem__(key if len(key) > 1 else key[0], value)


def two_views(w: torch.Tensor, p: torch.Tensor) -> None:
    first, second = w[0], w[1]
    first.fill_(1)
    second.mul_(2)


def old_views(w: torch.Tensor, p: torch.Tensor) -> None:
    row, column = w[0], w[:, 1]
    w.add_(1)
    row.mul_(2)
    column.cumsum_(0)


def turned_in_place(w: torch.Tensor, p: torch.Tensor) -> None:
    square, row = w[:, :5], w[1]
    square.t_()
    square[0].zero_()
    row.unsqueeze_(0)
    assert row.shape == (1, 6)
    row.add_(1)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "row": set_to(0, value=1),
    "row of values": set_to(0, value=torch.arange(6.0)),
    "element": set_to(1, 2, value=7),
    "slice": set_to(slice(1, 3), slice(None, None, 2), value=4),
    "indices": set_to(torch.tensor([0, 3]), value=2),
    "pairs of indices": set_to(torch.tensor([0, 3]), torch.tensor([1, 2]), value=torch.tensor([8.0, 9.0], dtype=torch.float64)),
    "indices and a column": set_to(torch.tensor([0, 3]), 2, value=5),
    "sharded mask": lambda w, p: w.__setitem__(w > 0, 0),
    "plain mask": lambda w, p: w.__setitem__(p > 0, 0),
    "swapped rows": lambda w, p: swap(w),
    "everything": lambda w, p: w.__setitem__(..., p * 2),
    "fill_": lambda w, p: w[0].fill_(3),
    "data": lambda w, p: w.data[0].zero_(),
    "detach": lambda w, p: w.detach()[0].zero_(),
    "view_as": lambda w, p: w.view_as(p).copy_(p + 1),
    "flatten": lambda w, p: w.flatten()[3:5].mul_(2),
    "t": lambda w, p: w.t().add_(1),
    "chunk": lambda w, p: [part.mul_(index) for index, part in enumerate(w.chunk(2))],
    "unbind": lambda w, p: [part.mul_(index) for index, part in enumerate(w.unbind())],
    "two views": two_views,
    "old views": old_views,
    "turned in place": turned_in_place,
    "lists of views": lambda w, p: torch._foreach_add_([w[0], w[1]], 1.0),
    "copy among rows": lambda w, p: w[0].copy_(w[1]),
    "diagonal": lambda w, p: w.diagonal().fill_(9),
    "out": lambda w, p: torch.add(p, 1, out=w),
    "out is a view": lambda w, p: torch.add(p[0], 1, out=w[2]),
    "clamp_": lambda w, p: w[2:].clamp_(min=0),
    "cumsum_": lambda w, p: w.cumsum_(0),
    "tril_, triu_": lambda w, p: w.tril_().triu_(-1),
    "fill_diagonal_": lambda w, p: w.fill_diagonal_(4),
    "index_add_": lambda w, p: w.index_add_(0, torch.tensor([1, 1]), p[:2]),
    "index_copy_": lambda w, p: w.index_copy_(0, torch.tensor([1]), p[:1]),
    "index_fill_": lambda w, p: w.index_fill_(0, torch.tensor([1]), 5.0),
    "scatter_": lambda w, p: w.scatter_(1, torch.zeros(5, 1, dtype=torch.long), 3.0),
    "masked_fill_": lambda w, p: w.masked_fill_(p > 0, 3.0),
    "masked_scatter_": lambda w, p: w.masked_scatter_(p > 0, p.sort()[0]),
    "smaller operand": lambda w, p: w.sub_(p[0]),
}


@on_ranks(2, 3)
def test_writes(world: World) -> None:
    for placement in sample_placements((5, 6), world.size):
        for name, write in WRITES.items():
            expected, values = drawn(5, 6), drawn(5, 6, seed=1)
            tensor = distribute_tensor(expected, world.mesh, [placement])
            write(expected, values)
            before = tensor._version
            write(tensor, values)
            assert torch.equal(tensor.full_tensor(), expected), f"{name} {placement}"
            assert tensor._version > before or name == "data", f"{name}: unnoticed"  # torch's .data has a version of its own


DRAWN: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "rows": lambda w, draw: w.__setitem__(draw(5) > 0.5, 2),
    "rows by number": lambda w, draw: w.__setitem__(draw(3).mul(5).long(), 2),
    "columns by number": lambda w, draw: w.__setitem__((slice(None), draw(3).mul(6).long()), 2),
    "elements": lambda w, draw: w.__setitem__(draw(5, 6) > 0.5, 2),
    "elements of a row": lambda w, draw: w[1].__setitem__(draw(6) > 0.5, 2),
    "numbers in a column": lambda w, draw: w.__setitem__((draw(3).mul(5).long(), 2), 2),
    "tensor": lambda w, draw: w.__setitem__(draw(5) > 0.5, torch.tensor(2.0).double()),
    "index_fill_": lambda w, draw: w.index_fill_(1, draw(3).mul(6).long(), 2),
    "masked_fill_": lambda w, draw: w.masked_fill_(draw(5, 1) > 0.5, 2),
}


@on_ranks(2, 3)
def test_writes_at_drawn_places(world: World) -> None:
    """Ranks that draw other indices take those of rank 0."""
    for placement in sample_placements((5, 6), world.size):
        for name, write in DRAWN.items():
            expected = drawn(5, 6)
            tensor = distribute_tensor(expected, world.mesh, [placement])
            write(expected, lambda *shape: torch.rand(shape, generator=torch.Generator().manual_seed(9)))
            write(tensor, lambda *shape: torch.rand(shape, generator=torch.Generator().manual_seed(9 + world.rank)))
            assert torch.equal(tensor.full_tensor(), expected), f"{name} {placement}"
            replicated = isinstance(placement, Replicate)
            assert not replicated or torch.equal(tensor.to_local(), expected), f"{name} {placement}"


@on_ranks(4)
def test_views_on_two_axes(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("a", "b"))
    for placements in ((Shard(0), Shard(1)), (Shard(1), FlatShard(0, (7, 8))), (Replicate(), Shard(0)), (Shard(0), Shard(0))):
        expected = drawn(5, 6)
        tensor = distribute_tensor(expected, mesh, placements)
        for w in (tensor, expected):
            w[1] += 1
            w[:, 2].cumsum_(0)
            w[torch.tensor([0, 4]), 3] = 2
        assert torch.equal(tensor.full_tensor(), expected), placements
    mesh.close()


# ---------------------------------------------------------------------- initialisation


def embedding_with_padding(w: torch.Tensor) -> None:
    """An initialisation that models contain."""
    w.data.normal_()
    w.data[2].zero_()


INITS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], object]]] = {
    "eye_": ((5, 6), nn.init.eye_),
    "dirac_ 1d": ((6, 4, 3), nn.init.dirac_),
    "dirac_ 2d": ((6, 2, 3, 3), lambda w: nn.init.dirac_(w, 3)),
    "dirac_ 3d": ((3, 2, 1, 2, 3), nn.init.dirac_),
    "orthogonal_ wide": ((5, 6), nn.init.orthogonal_),
    "orthogonal_ tall": ((6, 5), lambda w: nn.init.orthogonal_(w, 2.0)),
    "orthogonal_ convolution": ((6, 2, 3), nn.init.orthogonal_),
    "sparse_": ((5, 6), lambda w: nn.init.sparse_(w, 0.5)),
    "embedding": ((5, 6), embedding_with_padding),
    "part": ((5, 6), lambda w: nn.init.uniform_(w[1:3])),
    "trunc_normal_ of tails": ((5, 6), lambda w: nn.init.trunc_normal_(w[1:], 0.0, 1.0, 1.5, 2.0)),
    "trunc_normal_ of a part": ((5, 6), lambda w: nn.init.trunc_normal_(w[:, 2:], std=2.0)),
    "orthogonal_ of parts": ((8, 4), lambda w: [nn.init.orthogonal_(part) for part in w.chunk(2)]),
    "rand_like": ((5, 6), lambda w: w.add_(torch.rand_like(w)).add_(torch.randn_like(w)).add_(torch.randint_like(w, 2, 9))),
    "randint_like": ((5, 6), lambda w: w.copy_(torch.randint_like(w, 9, dtype=torch.long))),
    "rand_like of a part": ((5, 6), lambda w: w[1].copy_(torch.rand_like(w[1]))),
}


@on_ranks(2, 3)
def test_initialisation_is_that_of_one_rank(world: World) -> None:
    """For every placement and with different seeds on the ranks; the values have the properties that torch documents."""
    alone = world.comm.split(world.rank, 0, "alone")
    assert alone is not None
    for name, (shape, init) in INITS.items():
        torch.manual_seed(7)
        expected = distribute_tensor(torch.full(shape, 0.5), DeviceMesh(alone), [Shard(0)])
        with torch.no_grad():
            init(expected)
        for placement in sample_placements(shape, world.size):
            tensor = distribute_tensor(torch.full(shape, 0.5), world.mesh, [placement])
            torch.manual_seed(7 + world.rank)
            with torch.no_grad():
                init(tensor)
            # Elements are drawn in the order of the sharded dim; for an operation on the full tensor the order is fixed.
            if getattr(placement, "dim", 0) == 0 or not draws_elements(name):
                assert torch.equal(tensor.full_tensor(), expected.full_tensor()), f"{name} {placement}"
        check_init(name, expected.full_tensor())
    alone.close()


def draws_elements(name: str) -> bool:
    return name in ("sparse_", "embedding", "rand_like", "randint_like")


@on_ranks(2)
def test_local_shards_of_a_subclass(world: World) -> None:
    """Local shards of a subclass that keeps its values in other memory."""
    model = nn.Linear(4, 5, bias=False).double()
    model.weight = nn.Parameter(Narrow(model.weight.detach().clone()))
    expected = model.weight.detach().data64
    weight = shardrt.fully_shard(model).weight.detach()
    assert (weight > 0).any() == (expected > 0).any()
    assert weight.max() == expected.max()
    assert torch.equal(weight.full_tensor() + 0, expected)
    assert torch.equal(weight[3] + 0, expected[3])
    torch.manual_seed(3)
    plain = nn.init.trunc_normal_(distribute_tensor(expected, world.mesh, [Shard(0)]))
    torch.manual_seed(3)
    assert torch.equal(nn.init.trunc_normal_(weight).full_tensor() + 0, plain.full_tensor())
    assert type(weight.to_local()) is Narrow


def check_init(name: str, found: torch.Tensor) -> None:
    """Compare deterministic values, and check the properties of random ones."""
    if name.startswith(("eye_", "dirac_")):
        plain = torch.empty_like(found)
        INITS[name][1](plain)
        assert torch.equal(found, plain), name
    elif name.startswith("orthogonal_"):
        parts = found.chunk(2) if name == "orthogonal_ of parts" else [found]
        for matrix in (part.flatten(1) for part in parts):
            wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T
            gain = 4.0 if name == "orthogonal_ tall" else 1.0
            torch.testing.assert_close(wide @ wide.T, gain * torch.eye(len(wide)))
    elif name == "sparse_":
        assert (found == 0).sum(0).tolist() == [3] * 6
    elif name == "embedding":
        assert (found[2] == 0).all()
        assert found[3].all()


@pytest.mark.parametrize("first", ["view", "model"])
@on_ranks(2, 3)
def test_gradients_through_views_add_to_those_of_the_model(world: World, first: str) -> None:
    """A view's gradient is the full one: this rank's shard of it and the gradient of the model are added."""
    whole = nn.Linear(4, 3).double()
    model = copy.deepcopy(whole)
    shardrt.fully_shard(model)
    x = torch.randn(2 * world.size, 4, dtype=torch.float64)
    losses = [lambda: model.weight.view(-1).pow(2).sum(), lambda: model(x.chunk(world.size)[world.rank]).pow(2).mean()]
    for loss in losses if first == "view" else reversed(losses):
        loss().backward()
    (whole.weight.pow(2).sum() + whole(x).pow(2).mean()).backward()
    assert isinstance(model.weight.grad, shardrt.DTensor)
    torch.testing.assert_close(model.weight.grad.full_tensor(), whole.weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_reductions_at_the_edges(world: World) -> None:
    """A rank without elements, sums out of range, shapes that only expand, and arguments that a scalar has not."""
    row = distribute_tensor(torch.tensor([[1.0, 2.0]]), world.mesh, [Shard(0)])
    assert (row > 0).max()
    assert not (row > 1).min()
    large = distribute_tensor(torch.full((6,), 60000.0, dtype=torch.float16), world.mesh, [Shard(0)])
    assert large.mean() == 60000
    assert large.float().norm(dim=0, keepdim=True).shape == (1,)
    ones = distribute_tensor(torch.ones(4, 2), world.mesh, [Shard(0)])
    assert not torch.equal(ones, torch.ones(1, 2))
    ones[distribute_tensor(torch.tensor([True, False, False, True]), world.mesh, [Shard(0)])] = 0
    assert torch.equal(whole(ones), torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))

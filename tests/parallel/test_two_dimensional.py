"""Sharding of tensor-parallel parameters: training in two and three dimensions beside the plain model on one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from placements import Log
from ranks import on_ranks
from shardrt import Partial, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from shardrt.tensor.dtensor.replicated import mark_replicated
from toys import compare, shard_blocks, step_all
from toys_2d import Block, Toy, Transformer, loss_of, meshes, parallelize, shard, train, words


@pytest.mark.parametrize("hidden", [3, 16, 17])
@on_ranks(2, 4, more=(1, 3))
def test_training(world: World, hidden: int) -> None:
    for tp in [size for size in (1, 2, 3) if world.size % size == 0]:
        model = train(*meshes(world, tp), Toy(hidden).double())
        assert model.param_group.runtime.memory.in_use == 0
        weight = model.blocks[0].down.weight
        assert weight.shape == (7, hidden)
        assert weight.device_mesh.axis_names == ("tp", "dp")


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(4)
def test_three_dimensions(world: World, replicas: int) -> None:
    model = train(*meshes(world, 2, replicas), Toy().double(), microbatches=3)
    assert model.blocks[0].up.weight.device_mesh.axis_names == ("tp", "replicate", "shard")
    assert isinstance(model.blocks[0].up.weight.placements[1], shardrt.Replicate)
    assert torch.is_tensor(model.head.weight)


@on_ranks(4)
def test_accumulation_and_unused(world: World) -> None:
    dp, tp = meshes(world, 2)
    train(dp, tp, Toy().double(), microbatches=3)

    def prepare(model: nn.Module) -> None:
        if isinstance(model, shardrt.FSDPModule):
            model.set_reduce_scatter_unused_params(True)

    train(dp, tp, Toy().double(), prepare=prepare)


@on_ranks(2, 4)
def test_one_sum_for_each_group(world: World) -> None:
    """Terms of gradients: one all-reduce for each group and synchronised backward, none for groups without, or to step."""
    dp, tp = meshes(world, 2)
    model = shard(parallelize(Toy().double(), tp), dp)
    log, others = Log(), Log()
    tp.communicator("terms")._called.append(log.called)
    for role in tp._communicators.keys() - {"terms", "test"}:
        tp._communicators[role]._called.append(others.called)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for synchronised in (True, False, True):
        model.set_requires_gradient_sync(synchronised)
        log.calls.clear()
        loss_of(model, words(0).chunk(dp.size)[dp.rank]).backward()
        assert log.calls == [("tp", "all_reduce", 7 + 7 + 7 + 1)] * (2 if synchronised else 0)
        if synchronised:
            log.calls.clear()
            optimizer.step()
            assert log.calls == []
    assert others.calls == []
    copied = copy.deepcopy(model.inp.weight)
    assert copied.spec is model.inp.weight.spec
    tp.close()


@on_ranks(4)
def test_reduce_scatter_only(world: World) -> None:
    """Hybrid sharding: backwards without the all-reduce add up terms of gradients as well."""
    dp, tp = meshes(world, 2, 2)
    whole = Toy().double()
    model = shard(parallelize(copy.deepcopy(whole), tp), dp)
    for step in range(3):
        x = words(step)
        loss_of(whole, x).backward()
        model.set_requires_all_reduce(step == 2)
        loss_of(model, x.chunk(2)[dp.rank]).backward()
    compare(whole, model, 1e-12, "")


def freeze(*names: str) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in names))

    return apply


@pytest.mark.parametrize("frozen", [("up",), ("norm.weight", "embed"), ("down.bias", "inp"), ("norm", "down.bias")], ids=str)
@on_ranks(4)
def test_frozen_parameters(world: World, frozen: tuple[str, ...]) -> None:
    train(*meshes(world, 2), Toy().double(), prepare=freeze(*frozen))


@on_ranks(4)
def test_mixed_precision(world: World) -> None:
    """Terms are added up in the reduce dtype."""
    policy = shardrt.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    train(*meshes(world, 2), Toy().double(), mp_policy=policy, tolerance=1e-5)


@on_ranks(2, 4)
def test_offload(world: World) -> None:
    """With GPUs the shards and the sums of terms go to the host; one rank of data parallel has all of its part there."""
    policy = shardrt.CPUOffloadPolicy(pin_memory=False)
    train(*meshes(world, 2), Toy().double(), offload_policy=policy, max_norm=0.1)


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(3, 4)
def test_shard_dims(world: World, dim: int) -> None:
    """Along the dim that is cut already, or another one."""
    tp = 3 if world.size == 3 else 2
    train(*meshes(world, tp), Toy(16).double(), shard_placement_fn=lambda param: Shard(dim) if param.dim() > dim else None)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True),
    "for loop": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_optimizers_and_clipping(world: World, name: str) -> None:
    """The norm counts each element once, however a parameter lies."""
    for replicas in (0, 2):
        train(*meshes(world, 2, replicas), Toy().double(), optimizer=OPTIMIZERS[name], max_norm=0.1)


@on_ranks(3)
def test_clipping_in_other_norms(world: World) -> None:
    dp, tp = meshes(world, 3)
    whole = Toy().double()
    model = shard(parallelize(copy.deepcopy(whole), tp), dp)
    for each in (whole, model):
        loss_of(each, words(0)).backward()
    for clip in (shardrt.clip_grad_norm_, nn.utils.clip_grad_norm_):
        for order in (1.0, 2.0, 3.0, float("inf")):
            for max_norm in (0.5, 0.3):
                expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, order)
                torch.testing.assert_close(clip(model.parameters(), max_norm, order), expected)
        compare(whole, model, 1e-12, "clipped")


@on_ranks(4)
def test_after_an_exception(world: World) -> None:
    """`reset_iter_state` drops what was packed, terms of sums included."""
    dp, tp = meshes(world, 2)
    whole = Toy().double()
    model = shard(parallelize(copy.deepcopy(whole), tp), dp, reshard_after_forward=2)
    x = words(0).chunk(2)[dp.rank]

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    handle = model.inp.register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, x).backward()
    handle.remove()
    model.reset_iter_state()
    assert model.param_group.runtime.memory.in_use == 0
    loss_of(whole, words(0)).backward()
    loss_of(model, x).backward()
    compare(whole, model, 1e-12, "")


@on_ranks(3, 4)
def test_plain_gradients_of_users(world: World) -> None:
    """Of the global shape, as `param.grad = ...` demands: the backward adds to them."""
    dp, tp = meshes(world, 3 if world.size == 3 else 2)
    for cut in (by_styles, without_sequence):
        whole = Transformer().double()
        model = shard(cut(copy.deepcopy(whole), tp), dp)
        for index, (mine, expected) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
            torch.manual_seed(index)
            given = torch.randn(expected.shape, dtype=torch.float64)
            mine.grad, expected.grad = given.clone(), given
        loss_of(whole, words(0)).backward()
        loss_of(model, words(0).chunk(dp.size)[dp.rank]).backward()
        compare(whole, model, 1e-12, "")


@on_ranks(4)
def test_changes_on_three_axes(world: World) -> None:
    """From each column's own cut to every other, and back."""
    for replicas in (1, 2):
        dp, tp = meshes(world, 2, replicas)
        model = shard(parallelize(Toy().double(), tp), dp)
        for name, param in model.named_parameters():
            full = param.full_tensor()
            for target in itertools.product((Shard(0), Shard(max(0, param.dim() - 1)), Replicate()), repeat=3):
                moved = param.detach().redistribute(target)
                assert torch.equal(moved.to_local(), moved.spec.local_shard(full)), (name, target)
                assert torch.equal(moved.redistribute(param.placements).to_local(), param.to_local()), (name, target)


@on_ranks(4)
def test_a_copy_and_casts(world: World) -> None:
    """A deep copy, `to()` and replaced parameters keep the outer placements and what is summed."""
    dp, tp = meshes(world, 2)
    whole = Toy().double()
    first = shard(parallelize(copy.deepcopy(whole), tp), dp)
    model = copy.deepcopy(first.to(torch.float32).to(torch.float64))
    whole.to(torch.float32).to(torch.float64)
    for step in range(2):
        x = words(step)
        loss_of(whole, x).backward()
        loss_of(model, x.chunk(2)[dp.rank]).backward()
        compare(whole, model, 1e-12, f"step {step}")
    assert model.blocks[0].norm.weight.grad_placements == (Partial(),)
    replaced = shard(parallelize(Toy().double(), tp), dp)
    for name, param in model.named_parameters():
        holder, _, attribute = name.rpartition(".")
        setattr(replaced.get_submodule(holder), attribute, nn.Parameter(param.detach().redistribute([Replicate()] * 2)))
    replaced.head.weight = replaced.embed.weight
    for each in (whole, replaced):
        each.zero_grad()
        loss_of(each, words(3) if each is whole else words(3).chunk(2)[dp.rank]).backward()
    compare(whole, replaced, 1e-12, "replaced")


@on_ranks(4)
def test_what_users_write(world: World) -> None:
    """Between forward and backward the parameters are this rank's parts: writes to them, and `.data`, reach the shards."""
    dp, tp = meshes(world, 2)
    whole = Toy().double()
    model = shard(parallelize(copy.deepcopy(whole), tp), dp, reshard_after_forward=False)
    loss_of(model, words(0).chunk(2)[dp.rank])
    up, down, inp = model.blocks[0].up.weight, model.blocks[1].down.weight, model.inp.weight
    assert (up.shape, down.shape, inp.shape) == (((9, 8)[tp.rank], 7), (7, (9, 8)[tp.rank]), (7, 7))
    with torch.no_grad():
        up.mul_(2)
        inp.add_(1)
    down.data = torch.full_like(down, 3.0)
    for module in (*model.blocks, model):
        module.reshard()
    with torch.no_grad():
        whole.blocks[0].up.weight.mul_(2)
        whole.inp.weight.add_(1)
        whole.blocks[1].down.weight.fill_(3)
    compare(whole, model, 0.0, "written")
    with shardrt.unsharded(model), torch.no_grad():
        model.blocks[0].up.bias.zero_()
    whole.blocks[0].up.bias.data.zero_()
    compare(whole, model, 0.0, "written while gathered")


@on_ranks(3, 4)
def test_replicas_stay_equal(world: World) -> None:
    """What all tensor-parallel ranks have stays the same on them, bit for bit, though they cut it otherwise."""
    dp, tp = meshes(world, 3 if world.size == 3 else 2)
    model = shard(parallelize(Toy().double(), tp), dp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        loss_of(model, words(step).chunk(dp.size)[dp.rank]).backward()
        shardrt.clip_grad_norm_(model.parameters(), 0.1)
        step_all(optimizer)
    mine = {name: param.full_tensor() for name, param in model.named_parameters()}
    for theirs in world.comm.exchange(mine):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@on_ranks(4)
def test_optimizer_state(world: World) -> None:
    """A state of whole tensors, as one process has it, is loaded."""
    dp, tp = meshes(world, 2)
    whole = Toy().double()
    model = shard(parallelize(copy.deepcopy(whole), tp), dp)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (whole, model)]
    for step in range(4):
        if step == 2:
            optimizers[1].load_state_dict(optimizers[0].state_dict())
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            shardrt.shard_optimizer_state(optimizers[1])
        for each, x in ((whole, words(step)), (model, words(step).chunk(2)[dp.rank])):
            loss_of(each, x).backward()
        if step != 1:
            step_all(*optimizers)
        compare(whole, model, 1e-12, f"step {step}")


@on_ranks(2, 3, 4)
def test_state_dicts(world: World) -> None:
    """Names and shapes are those of the plain model; whole tensors and `DTensor`s of several meshes are loaded."""
    size = 3 if world.size == 3 else 2
    dp, tp = meshes(world, size)
    torch.manual_seed(1)
    other = Toy().double()
    source = shard(parallelize(copy.deepcopy(other), tp), dp).state_dict()
    expected = other.state_dict()
    assert {key: value.shape for key, value in source.items()} == {key: value.shape for key, value in expected.items()}
    for state in (
        expected,
        source,
        {key: distribute_tensor(value, tp, [Shard(0)]) for key, value in expected.items()},
        {key: distribute_tensor(value, dp, [Shard(0)]) for key, value in expected.items()},
        {key: distribute_tensor(value, world.mesh, [Shard(0)]) for key, value in expected.items()},
    ):
        model = shard(parallelize(Toy().double(), tp), dp)
        model.load_state_dict(state)
        compare(other, model, 0.0, "loaded")


@on_ranks(3, 4)
def test_state_dicts_after_styles(world: World) -> None:
    """Names and global shapes of the plain model; in either order of the axes the tensors are whole and can be loaded."""
    dp, tp = meshes(world, 3 if world.size == 3 else 2)
    for cut in (by_styles, without_sequence):
        torch.manual_seed(1)
        expected = Transformer().double().state_dict()
        torch.manual_seed(1)
        state = shard(cut(Transformer().double(), tp), dp).state_dict()
        assert [(key, value.shape) for key, value in state.items()] == [(key, value.shape) for key, value in expected.items()]
        assert state["head.weight"].placements[0] == Shard(0)
        orders = {
            "tp, dp": state,
            "dp, tp": {
                key: distribute_tensor(value, dp.product(tp), [Shard(0), Shard(max(0, value.dim() - 1))])
                for key, value in expected.items()
            },
        }
        for order, given in orders.items():
            for key, value in given.items():
                assert ", ".join(value.device_mesh.axis_names) == order
                assert torch.equal(value.full_tensor(), expected[key]), (order, key)
                for target in itertools.product((Shard(0), Replicate()), repeat=2):
                    moved = value.detach().redistribute(target)
                    assert torch.equal(moved.to_local(), moved.spec.local_shard(expected[key])), (order, key, target)
                    again = moved.redistribute(value.placements).to_local()
                    assert torch.equal(again, value.to_local()), (order, key, target)
            model = shard(cut(Transformer().double(), tp), dp)
            assert model.load_state_dict(given) == ([], [])
            for key, value in model.state_dict().items():
                assert torch.equal(value.full_tensor(), expected[key]), (order, key)


@on_ranks(1, 2, 3, 4)
def test_initialised_on_meta_as_on_one_process(world: World) -> None:
    """Random values do not depend on how many ranks there are along any axis."""
    size = {1: 1, 2: 2, 3: 3, 4: 2}[world.size]
    dp, tp = meshes(world, size)
    with torch.device("meta"):
        model = Toy(130).double()
    shard(parallelize(model, tp), dp)
    model.to_empty(device="cpu")
    alone = Toy(130).double()
    single = DeviceMesh(own_communicator(world), (1,), ("alone",))
    shard_blocks(alone, mesh=single)
    for each in (model, alone):
        torch.manual_seed(3)
        with torch.no_grad():
            for param in dict(each.named_parameters()).values():
                param.normal_()
    for (name, mine), (_, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), expected.full_tensor()), name
    loss_of(model, words(0)).backward()


def own_communicator(world: World) -> Any:
    return world.comm.split(world.rank, 0, "alone")


@pytest.mark.parametrize("mode", ["recomputed", pytest.param("compiled", marks=pytest.mark.all)])
@on_ranks(4)
def test_recomputed_and_compiled_blocks(world: World, mode: str) -> None:
    dp, tp = meshes(world, 2)
    whole = Toy().double()
    model = parallelize(copy.deepcopy(whole), tp)
    for index, block in enumerate(model.blocks):
        if mode == "recomputed":
            model.blocks[index] = Recomputed(block)
        else:
            block.compile(backend="aot_eager")
    shard(model, dp)
    for step in range(2):
        loss_of(whole, words(step)).backward()
        loss_of(model, words(step).chunk(2)[dp.rank]).backward()
    mine = {name.replace("inner.", ""): param for name, param in model.named_parameters()}
    for name, param in whole.named_parameters():
        torch.testing.assert_close(mine[name].grad.full_tensor(), param.grad, rtol=1e-12, atol=1e-12, msg=name)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def refused(world: World, pattern: str, call: Callable[[], object]) -> None:
    """Every rank raises a ValueError with the name."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        message = str(error)
    else:
        message = ""
    answers = world.comm.exchange(message)
    assert all(pattern in answer for answer in answers), answers


@on_ranks(4)
def test_bad_meshes_are_refused(world: World) -> None:
    dp, tp = meshes(world, 2)
    overlapping = DeviceMesh(world.comm, (2, 2), ("a", "b"))["b"]  # pairs, as tp
    for mark in (False, True):
        model = nn.Linear(4, 6)
        if mark:
            mark_replicated(model.weight, overlapping)
        else:
            distribute_weight(model, overlapping, Shard(0))
        refused(world, "parameter 'weight' is a DTensor on, or replicated", lambda m=model: shardrt.fully_shard(m, mesh=tp))
    model = distribute_weight(nn.Linear(4, 6), DeviceMesh(own_communicator(world), (1,), ("alone",)), Shard(0))
    refused(world, "expected meshes of one communicator", lambda: shardrt.fully_shard(model, mesh=dp))
    partial = nn.Linear(4, 6)
    partial.weight = nn.Parameter(shardrt.DTensor.from_local(partial.weight.detach(), tp, [Partial()]))
    refused(world, "expected it sharded between rows, or replicated", lambda: shardrt.fully_shard(partial, mesh=dp))


@on_ranks(2, 4)
def test_the_mesh_that_parameters_are_parallelized_over_is_refused(world: World) -> None:
    """Cut by a style or whole under one, and plain beside them; before anything is changed."""
    _, tp = meshes(world, 2)
    for plan in ({"up": ColwiseParallel()}, {"norm": SequenceParallel()}, {"down": RowwiseParallel()}):
        for name in ("up", "norm", "down"):
            model = parallelize_module(Block(4, 6), tp, plan)
            child = model.get_submodule(name)
            before = dict(child.named_parameters())
            refused(world, "parameter 'weight' is a DTensor on, or repl", lambda c=child: shardrt.fully_shard(c, mesh=tp))
            refused(world, "expected one on another axis of the same mesh", lambda c=child: shardrt.fully_shard(c, mesh=tp))
            assert not isinstance(child, shardrt.FSDPModule)
            assert all(param is before[key] for key, param in child.named_parameters())
    moved = distribute_weight(nn.Linear(4, 6), tp, Shard(1))  # by the caller, who cuts it otherwise: no style is in the way
    shardrt.fully_shard(moved, mesh=tp)
    assert moved.weight.placements != (Shard(1),)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


@on_ranks(4)
def test_a_head_that_reads_a_part_of_the_sequence(world: World) -> None:
    """Refused by name without a style, since its gradients would be terms; with those that the message names it trains."""
    dp, tp = meshes(world, 2)
    torch.manual_seed(1)
    whole, x = Headed().double(), torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole(x).square().mean().backward()
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    column = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    for style in (None, SequenceParallel(use_local_output=True), column, gathered):
        plan = {"norm": SequenceParallel()} if style is None else {"norm": SequenceParallel(), "head": style}
        model = parallelize_module(copy.deepcopy(whole), tp, plan)
        shardrt.fully_shard(model.head, mesh=dp)
        shardrt.fully_shard(model, mesh=dp)
        model.zero_grad()
        part = x.chunk(2)[dp.rank].chunk(2, 1)[tp.rank]
        if style is None:
            with pytest.raises(NotImplementedError, match=r"in the forward of 'head' \(\w*Linear\).*SequenceParallel\(\) if"):
                model(part)
            continue
        loss = model(part).square().mean() / (2 if isinstance(style, SequenceParallel) else 1)
        loss.backward()
        compare(whole, model, 1e-12, "")


@on_ranks(4)
def test_what_one_rank_does_wrong_all_ranks_hear(world: World) -> None:
    """Also those of the other columns."""
    dp, tp = meshes(world, 2)
    for wrong in range(4):
        model = parallelize(Block(4, 6), tp)

        def place(param: nn.Parameter, wrong: int = wrong) -> Shard | None:
            return Shard(7) if world.rank == wrong else None

        refused(world, "shard_placement_fn of", lambda m=model, f=place: shardrt.fully_shard(m, mesh=dp, shard_placement_fn=f))
        model = parallelize(Block(4, 6), tp)
        if world.rank == wrong:
            model.up.bias.requires_grad_(False)
        refused(world, "the ranks have different modules", lambda m=model: shardrt.fully_shard(m, mesh=dp))


def distribute_weight(module: nn.Module, mesh: DeviceMesh, placement: Shard) -> nn.Module:
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))
    return module


# ---------------------------------------------------------------------- with the styles of shardrt.parallel


def by_styles(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Megatron's cuts, activations between them split along the sequence."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm?": SequenceParallel(use_local_output=True),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, plan)


def without_sequence(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Megatron's cuts; norms are not named, so they are replicated."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, plan)


@pytest.mark.parametrize("hidden", [*(pytest.param(hidden, marks=pytest.mark.all) for hidden in (3, 16)), 17])
@on_ranks(4, more=(2, 3))
def test_a_transformer(world: World, hidden: int) -> None:
    tp = 3 if world.size == 3 else 2
    for cut in (by_styles, without_sequence):
        train(*meshes(world, tp), Transformer(hidden).double(), cut=cut, microbatches=2, max_norm=0.5)


@on_ranks(3)
def test_ranks_with_nothing(world: World) -> None:
    """Hidden layers of one and four features on three ranks: the last has none of them, in two dimensions or one."""
    for hidden in (1, 4):
        for cut in (by_styles, without_sequence):
            model = train(*meshes(world, 3), Transformer(hidden).double(), steps=range(2), cut=cut, max_norm=0.5)
            up = model.blocks[0].up.weight
            assert up.shape == (hidden, 12)
            assert world.comm.exchange(up.to_local().shape[0]) == ([1, 0, 0] if hidden == 1 else [2, 2, 0])


@on_ranks(4)
def test_a_transformer_in_three_dimensions(world: World) -> None:
    for replicas in (1, 2):
        train(*meshes(world, 2, replicas), Transformer().double(), cut=by_styles)


@on_ranks(4)
def test_a_transformer_from_the_meta_device(world: World) -> None:
    dp, tp = meshes(world, 2)
    whole = Transformer().double()
    with torch.device("meta"):
        model = Transformer().double()
    shard(by_styles(model, tp), dp)
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    for step in range(2):
        loss_of(whole, words(step)).backward()
        loss_of(model, words(step).chunk(2)[dp.rank]).backward()
    compare(whole, model, 1e-12, "")


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=pytest.mark.all) for mode in ("recomputed", "compiled")), "both"])
@on_ranks(4)
def test_transformer_blocks_recomputed_and_compiled(world: World, mode: str) -> None:
    def cut(model: nn.Module, tp: DeviceMesh) -> nn.Module:
        by_styles(model, tp)
        for block in model.blocks:
            if mode != "recomputed":
                block.compile(backend="aot_eager")
            if mode != "compiled":
                block.forward = recomputed(block.forward)
        return model

    train(*meshes(world, 2), Transformer().double(), cut=cut)


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)

"""A sharded model that nobody refers to is freed, with its shards, whatever it has done: the next one needs the memory."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
import toys_2d
import toys_tp
from ranks import on_ranks
from shardrt.comm import World
from shardrt.parallel import parallelize_module
from toys import Elsewhere, OddMLP, Skipping, batch, buckets_of, loss_of, paired, shard_blocks, step_all


def train(model: nn.Module, *, inputs_want_grad: bool = False) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        loss_of(model, batch(step).requires_grad_(inputs_want_grad)).backward()
        step_all(optimizer)
    return model


def sharded(**options: Any) -> nn.Module:
    return shard_blocks(OddMLP().double(), **options)


def after_a_forward(world: World) -> nn.Module:
    model = sharded()
    model(batch(0))
    return model


def while_gradients_accumulate(world: World) -> nn.Module:
    model = sharded()
    model.set_requires_gradient_sync(False)
    loss_of(model, batch(0)).backward()
    return model


def with_an_unused_block(world: World) -> nn.Module:
    model = shard_blocks(Skipping().double())
    model.skip = True
    return train(model)


def while_gathered(world: World) -> nn.Module:
    model = train(sharded())
    with shardrt.unsharded(model):
        model(batch(0))
    model.unshard()
    return model


def with_a_copy(world: World) -> nn.Module:
    model = train(sharded())
    model.shadow = [train(copy.deepcopy(model))]  # in a list: not a submodule
    return model


def with_two_roots(world: World) -> nn.Module:
    first, second = sharded(), shard_blocks(OddMLP().double())
    first.second = [second]
    (first(batch(0)).sum() + second(batch(0)).sum()).backward()
    return first


def with_its_loss(world: World) -> nn.Module:
    """The module refers to the graph, whose hooks refer to the group of the module."""
    model = sharded()
    model.blocks[1].loss = loss_of(model, batch(0))
    return model


def with_a_recurrent_layer(world: World) -> nn.Module:
    model = shardrt.fully_shard(nn.LSTM(5, 7).double())
    model.last = model(batch(0))[0].sum()
    model.last.backward()
    return model


def tensor_parallel(world: World) -> nn.Module:
    model = toys_tp.Transformer()
    mesh = shardrt.init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, toys_tp.sequence_plan())
    toys_tp.loss_of(model, toys_tp.tokens_of(0)).backward()
    return model


def in_two_dimensions(world: World) -> nn.Module:
    dp, tp = toys_2d.meshes(world, world.size)
    model = toys_tp.Transformer()
    parallelize_module(model, tp, toys_tp.sequence_plan())
    shard_blocks(model, "layers", mesh=dp)
    toys_tp.loss_of(model, toys_tp.tokens_of(0)).backward()
    return model


MADE: list[Callable[[World], nn.Module]] = [
    after_a_forward,
    while_gradients_accumulate,
    with_an_unused_block,
    while_gathered,
    with_a_copy,
    with_two_roots,
    with_its_loss,
    with_a_recurrent_layer,
    tensor_parallel,
    in_two_dimensions,
]
TRAINED: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"offload_policy": Elsewhere(pin_memory=False)},
    {"mp_policy": shardrt.MixedPrecisionPolicy(param_dtype=torch.float32)},
]


@pytest.mark.parametrize("bucket", [0, 1 << 20])
@on_ranks(1, 2)
def test_models_are_freed(world: World, bucket: int) -> None:
    makers = [*MADE, *(lambda _, options=options: train(sharded(**options)) for options in TRAINED)]
    makers.append(lambda _: train(sharded(), inputs_want_grad=True))
    seen: list[tuple[int, str, weakref.ref[Any]]] = []
    for index, make in enumerate(makers):
        with buckets_of(bucket):
            model = make(world)
        seen += [(index, name, weakref.ref(param)) for name, param in model.named_parameters()]
        seen += [(index, "group", weakref.ref(group)) for m in model.modules() for group in getattr(m, "param_groups", ())]
        seen.append((index, "model", weakref.ref(model)))
        del model
    gc.collect()
    assert not [(index, name) for index, name, reference in seen if reference() is not None], makers


@on_ranks(2)
def test_a_backward_outlives_its_model(world: World) -> None:
    """The graph keeps what it needs of a model: gradients of its inputs are those of one process."""
    for bucket in (0, 1 << 20):
        whole, model = paired(OddMLP().double(), reshard_after_forward=True)
        expected, found = batch(0).requires_grad_(), batch(0).requires_grad_()
        with buckets_of(bucket):
            losses = loss_of(whole, expected), loss_of(model, found)
            model = None
            gc.collect()
            for loss in losses:
                loss.backward()
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_modules_that_are_left(world: World) -> None:
    """A block goes on without the model around it, and a model without one of its blocks."""
    for bucket in (0, 1 << 20):
        with buckets_of(bucket):
            model = train(sharded())
            block = model.blocks[0]
            del model.blocks[2]
            gc.collect()
            train(model)
            train(copy.deepcopy(model))
            del model
            gc.collect()
            block(torch.zeros(2, 13, dtype=torch.float64)).sum().backward()
            assert all(param.grad is not None for param in block.parameters())
            assert set(block.state_dict()) == {name for name, _ in block.named_parameters()}
            copy.deepcopy(block)(torch.zeros(2, 13, dtype=torch.float64))

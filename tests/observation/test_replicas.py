"""Ranks that have gone apart: `check_replicas` finds what and where, and clipping names gradients that are not finite."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import parallelize_module
from shardrt.replicas.differences import Detail, differing, report
from shardrt.replicas.items import Copied, CopiedValue, Table, digests_of, sums_of
from shardrt.tensor.placement.digest import digest
from toys import OddMLP, batch, loss_of, shard_blocks, step_all
from toys_tp import Transformer, sequence_plan, tokens_of
from toys_tp import loss_of as loss_of_tokens

# ---------------------------------------------------------------------- digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex128], ids=str)
def test_digests_of_parts_add_up_and_every_bit_counts(dtype: torch.dtype) -> None:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = int(digest(values))
    cuts = (0, 1, 1, 33_000, 70_001)
    parts = [int(digest(values[begin:end], begin)) for begin, end in itertools.pairwise(cuts)]
    assert (sum(parts) - whole) % 2**64 == 0
    as_bytes = values.view(torch.uint8)
    for place in (0, 7, len(as_bytes) - 1):
        for bit in (1, 128) if dtype is not torch.bool else (1,):
            as_bytes[place] ^= bit
            assert int(digest(values)) != whole
            as_bytes[place] ^= bit
    assert int(digest(values)) == whole


def test_digests_tell_order_and_kinds_of_nan_and_zero() -> None:
    found = [
        int(digest(torch.tensor(values)))
        for values in ([0.0, 1.0], [1.0, 0.0], [-0.0, 1.0], [float("nan"), 1.0], [-float("nan"), 1.0])
    ]
    assert len(set(found)) == len(found)
    assert int(digest(torch.empty(0))) == 0
    matrix = torch.randn(5, 6)
    assert int(digest(matrix.t().reshape(-1))) == int(digest(matrix.t().contiguous().view(-1)))


# ---------------------------------------------------------------------- who differs, without ranks


def answers(table: Table, values: dict[int, dict[str, Any]], starts: dict[int, int] | None = None) -> str | None:
    """The report of ranks that have these items; None if they agree."""
    items = {
        rank: [CopiedValue(name, Copied.of(table, rank), value, (starts or {}).get(rank, 0)) for name, value in own.items()]
        for rank, own in values.items()
    }
    digests = {rank: digests_of(own) for rank, own in items.items()}
    wrong = differing(sums_of(own, digests[rank]) for rank, own in items.items())
    if not wrong:
        return None
    key = Copied.of(table, table[0][0]).key
    details = {rank: list(map(Detail.of, own, digests[rank])) for rank, own in items.items()}
    return report({rank: ({key: table} if own else {}, own) for rank, own in details.items()})


def test_one_of_three_differs_from_most() -> None:
    values = {rank: {"lr": 0.1, "seed": 3} for rank in (0, 4, 9)}
    table = [[0], [4], [9]]
    assert answers(table, values) is None
    values[4]["lr"] = 0.2
    text = answers(table, values)
    assert text is not None
    assert "1 of 2 items differ" in text
    assert "rank 4 differs from most others" in text
    assert text.endswith("\n  lr: 0.2 on rank 4; 0.1 on ranks 0, 9")


def test_of_two_both_are_named_and_numbers_come_first() -> None:
    tensors = {rank: {"w": torch.arange(4.0) + rank, "step": torch.tensor([10.0 - rank])} for rank in (0, 1)}
    text = answers([[0], [1]], tensors)
    assert text is not None
    first, second, third = text.splitlines()
    assert first.endswith("2 of 2 items differ between ranks that must have the same; ranks 0, 1 differ")
    assert second.strip() in ("step: 10.0 on rank 0; 9.0 on rank 1", "step: 9.0 on rank 1; 10.0 on rank 0")
    assert re.fullmatch(r" *w: digest [0-9a-f]{16} on rank 0; digest [0-9a-f]{16} on rank 1", third)


def test_what_a_rank_lacks_is_missing_there() -> None:
    values: dict[int, dict[str, Any]] = {rank: {"step": torch.zeros(1)} for rank in range(3)}
    values[2] = {}
    text = answers([[0], [1], [2]], values)
    assert text is not None
    assert text.endswith("step: missing on rank 2; 0.0 on ranks 0, 1")


def test_copies_that_are_cut_elsewhere() -> None:
    """Their digests add up; if they differ, both copies are named."""
    whole, table = torch.randn(10), [[0, 1], [2, 3]]
    cuts = {0: (0, 3), 1: (3, 10), 2: (0, 6), 3: (6, 10)}
    starts = {rank: begin for rank, (begin, _) in cuts.items()}
    values = {rank: {"w": whole[begin:end].clone()} for rank, (begin, end) in cuts.items()}
    assert answers(table, values, starts) is None
    values[3]["w"][0] += 1
    text = answers(table, values, starts)
    assert text is not None
    assert re.search(r"w: digest \w+ on ranks 0, 1; digest \w+ on ranks 2, 3", text)


def test_long_reports_are_cut() -> None:
    values: dict[int, dict[str, Any]] = {rank: {f"v{index}": rank for index in range(20)} for rank in range(20)}
    text = answers([[rank] for rank in range(20)], values)
    assert text is not None
    assert text.endswith("and 12 more")
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more differ" in text


# ---------------------------------------------------------------------- on ranks


def trained(
    world: World,
    shard: Callable[[nn.Module], object] = lambda model: model,
    make: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    skip: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after two steps; with `skip`, the last rank leaves the second one out."""
    model = OddMLP(layers=1).double()
    shard(model)
    optimizer = make(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        if not (skip and step == 1 and world.rank == world.size - 1):
            optimizer.step()
    return model, optimizer


def replicated(model: nn.Module) -> object:
    for block in model.get_submodule("blocks").children():
        shardrt.replicate(block)
    return shardrt.replicate(model)


def error_on_all(world: World, check: Callable[[], object]) -> str:
    """The error of `check`, which must be the same on every rank."""
    with pytest.raises(RuntimeError) as caught:
        check()
    texts = world.comm.exchange(str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def flip_a_bit(tensor: torch.Tensor) -> None:
    local = tensor.detach().to_local() if isinstance(tensor, shardrt.DTensor) else tensor.detach()
    local.view(-1)[-1:].view(torch.uint8)[0] ^= 1


@pytest.mark.mpi
@on_ranks(2, more=(3,))
def test_replicas_that_have_gone_apart(world: World) -> None:
    last = world.size - 1
    model, optimizer = trained(world, replicated)
    found = shardrt.check_replicas(model, optimizer, step=2, seed=0)
    params = len(list(model.parameters()))
    assert found.tensors == 4 * params, "parameters, two averages and the step of each"
    assert found.unique == 0
    assert found.values > 3, "step, seed, hyperparameters"

    if world.rank == last:
        flip_a_bit(model.blocks[0].up.weight)
    text = error_on_all(world, lambda: shardrt.check_replicas(model, optimizer))
    assert "check_replicas: 1 of " in text
    assert re.search(rf"parameter 'blocks.0.up.weight': .*digest \w+ on rank {last}", text)
    if world.rank == last:
        flip_a_bit(model.blocks[0].up.weight)
        flip_a_bit(optimizer.state[model.inp.weight]["exp_avg"])
        optimizer.param_groups[0]["lr"] = 0.2
    text = error_on_all(world, lambda: shardrt.check_replicas(model, optimizer, step=2 + (world.rank == last), seed=world.rank))
    assert re.search(rf"parameter group 0: lr: .*0.2 on rank {last}", text)
    assert re.search(r"state of 'inp.weight': exp_avg: ", text)
    assert re.search(rf"\n  step: .*3 on rank {last}", text)
    assert re.search(r"\n  seed: 0 on rank 0; 1 on rank 1", text)


@on_ranks(2)
def test_tensors_within_containers(world: World) -> None:
    """Their elements count, all of them, and nothing else: not what a `repr` shows of them, such as the device."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9, requires_grad=world.rank == 1), 0.999)
    optimizer.state[weight] = {"kept": [torch.zeros(2000)], "hook": print}
    found = shardrt.check_replicas(nn.Linear(2, 2), optimizer, x=[{"y": torch.ones(2)}, "text", torch.float32])
    assert found.tensors == 5
    optimizer.state[weight]["kept"][0][1000] = world.rank
    text = error_on_all(world, lambda: shardrt.check_replicas(nn.Module(), optimizer))
    assert re.search(r": 1 of .*\n  state of '0 of group 0': kept\[0\]: digest \w+ on rank 0; digest \w+ on rank 1$", text)
    for value in ({"a", "b"}, [torch.ones(1), object()]):
        with pytest.raises(TypeError, match=r"expected numbers, strings, tensors, .*; x(\[1\])? is a (set|object)$"):
            shardrt.check_replicas(nn.Module(), x=value)


@on_ranks(2, more=(3,))
def test_a_step_that_one_rank_skips(world: World) -> None:
    """Seen in the optimizer's steps although every parameter has one copy; with SGD, only in what the caller gives."""
    last = world.size - 1
    for shard in (shard_blocks, replicated):
        model, optimizer = trained(world, shard, skip=True)
        text = error_on_all(world, lambda m=model, o=optimizer: shardrt.check_replicas(m, o))
        assert re.search(rf"state of 'inp.weight': step: .*1.0 on rank {last}", text)
    model, optimizer = trained(world, shard_blocks, torch.optim.SGD, skip=True)
    found = shardrt.check_replicas(model, optimizer)
    assert (found.tensors, found.unique) == (0, len(list(model.parameters())))
    assert "have no copies" in str(found)
    text = error_on_all(world, lambda: shardrt.check_replicas(model, optimizer, step=1 + (world.rank < last)))
    assert re.search(rf"\n  step: .*1 on rank {last}", text)


@on_ranks(2, more=(1, 3))
def test_another_seed_before_the_model_is_sharded(world: World) -> None:
    torch.manual_seed(world.rank == 1)
    model = OddMLP(layers=1)
    if world.size == 1:
        assert shardrt.check_replicas(model).tensors == 0
        return
    text = error_on_all(world, lambda: shardrt.check_replicas(model))
    assert "parameter 'inp.weight': " in text
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model(torch.randn(4, 3) + world.rank)
    text = error_on_all(world, lambda: shardrt.check_replicas(model))
    assert "parameter" not in text
    assert "buffer '1.running_mean'" in text
    assert shardrt.check_replicas(model, buffers=False).tensors == 4


@on_ranks(2)
def test_what_cannot_be_compared(world: World) -> None:
    """One rank's error is one on all. Ignored parameters are the caller's, and so is a mesh of fewer ranks."""
    with pytest.raises(
        (TypeError, RuntimeError), match=r"^(check_replicas: rank 1 raised TypeError: )?check_replicas: expected"
    ):
        shardrt.check_replicas(OddMLP(), "AdamW" if world.rank == 1 else None)
    model = OddMLP(layers=1)
    shardrt.fully_shard(model, ignored_params={model.inp.weight})
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(world.rank).float()).backward()
    optimizer.step()
    assert shardrt.check_replicas(model, optimizer).tensors == len(list(model.parameters())) - 1, "the steps"
    alone = DeviceMesh(world.comm, (2, 1), ("a", "b"))["b"]
    with pytest.raises(ValueError, match="give a mesh of all ranks"):
        shardrt.check_replicas(model, mesh=alone)
    assert shardrt.check_replicas(OddMLP(), mesh=alone, step=world.rank).tensors == 0


@on_ranks(4)
def test_hybrid_sharding_and_tensor_parallelism(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    model, optimizer = trained(world, lambda model: shard_blocks(model, mesh=mesh))
    params = len(list(model.parameters()))
    assert shardrt.check_replicas(model, optimizer)[::2] == (4 * params, 0)
    weight = model.inp.weight
    if world.rank == 3:
        flip_a_bit(weight)
    text = error_on_all(world, lambda: shardrt.check_replicas(model, optimizer))
    assert re.search(r"1 of .*parameter 'inp.weight': digest \w+ on rank 1; digest \w+ on rank 3$", text, re.DOTALL)
    mesh.close()

    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "tp"))
    shardrt.manual_seed(0)
    whole = Transformer()
    whole.layers[0].register_module("dropout", nn.Dropout(0.1))
    cut = parallelize_module(copy.deepcopy(whole), mesh["tp"], sequence_plan())
    shard_blocks(cut, "layers", mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(cut.parameters())
    for step in range(2):
        loss_of_tokens(cut, tokens_of(step)).backward()
        step_all(optimizer)
    found = shardrt.check_replicas(cut, optimizer)
    assert found.tensors > 0
    assert found.unique > 0
    own = {name: param for name, param in cut.named_parameters() if shardrt.Replicate() in param.placements}
    name = world.comm.exchange([name for name, param in own.items() if param.to_local().numel()])[3][0]
    if world.rank == 3:
        flip_a_bit(own[name])
        torch.manual_seed(7)
    text = error_on_all(world, lambda: shardrt.check_replicas(cut, optimizer))
    assert re.search(rf"parameter '{name}': digest \w+ on ranks? [02, ]+; digest \w+ on ranks? [13, ]+\b", text)
    assert re.search(r"random numbers of tensor-parallel ranks: \d+ on rank 2; None on rank 3", text)
    shardrt.manual_seed(0)
    mesh.close()


# ---------------------------------------------------------------------- gradients that are not finite


@pytest.mark.mpi
@on_ranks(2, more=(3, 4))
def test_clipping_names_gradients_that_are_not_finite(world: World) -> None:
    model = OddMLP(layers=1).double()
    shard_blocks(model)
    loss_of(model, batch(0)).backward()
    before = world.mesh.communicator("tensor")._number
    norm = shardrt.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert norm.isfinite()
    assert world.mesh.communicator("tensor")._number == before + 2, "of the norm, and of whether it is finite"
    grads = {name: param.grad.to_local() for name, param in model.named_parameters()}
    plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
    plain.grad = torch.ones(3, dtype=torch.float64)
    last = world.size - 1
    name = world.comm.exchange([name for name, grad in grads.items() if grad.numel()])[last][0]
    for order in (2.0, float("inf")):
        for value in (float("nan"), float("inf")):
            kept = {key: grad.clone() for key, grad in grads.items()}
            if world.rank == last:
                grads[name].view(-1)[-1] = value
            params = [*model.parameters(), plain]
            text = error_on_all(world, lambda p=params, o=order: shardrt.clip_grad_norm_(p, 1.0, o, error_if_nonfinite=True))
            assert text.endswith(f"that are infinite or NaN: '{name}' on rank {last}; none has been scaled")
            for key, grad in grads.items():
                if key != name:
                    assert torch.equal(grad, kept[key])
                grad.copy_(kept[key])
            if world.rank == last:
                plain.grad[0] = value  # of one rank: the others hear of it
            text = error_on_all(world, lambda p=params, o=order: shardrt.clip_grad_norm_(p, 1.0, o, error_if_nonfinite=True))
            assert f"parameter {len(params) - 1} of shape (3,) on rank {last};" in text
            plain.grad.fill_(1.0)
    for grad in grads.values():
        grad.fill_(1e200)  # finite, but not their squares
    text = error_on_all(world, lambda: shardrt.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
    assert "overflows" in text
    for grad in grads.values():
        grad.fill_(float("nan"))
    text = error_on_all(world, lambda: shardrt.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
    assert "more on rank 0" in text


@on_ranks(4)
def test_clipping_hears_of_ranks_with_other_shards(world: World) -> None:
    """Of another replica, and of experts."""
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    model, _ = trained(world, lambda model: shard_blocks(model, mesh=mesh))
    name = next(name for name, param in model.named_parameters() if param.grad.to_local().numel())
    if world.rank == 3:
        model.get_parameter(name).grad.to_local().fill_(float("nan"))
    for order in (2.0, float("inf")):
        text = error_on_all(world, lambda p=order: shardrt.clip_grad_norm_(model.parameters(), 1.0, p, error_if_nonfinite=True))
        assert text.endswith(f"that are infinite or NaN: '{name}' on rank 3; none has been scaled")
    mesh.close()
    mesh = DeviceMesh(world.comm, (2, 2), ("rest", "expert"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardrt.fully_shard(model[0], mesh=mesh["expert"])
    shardrt.fully_shard(model[1])
    (model[1](model[0](torch.ones(2, 4)))).sum().backward()
    if world.rank == 3:
        model[0].weight.grad.to_local().fill_(float("inf"))
    text = error_on_all(world, lambda: shardrt.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
    assert "'weight' on rank 3;" in text
    mesh.close()

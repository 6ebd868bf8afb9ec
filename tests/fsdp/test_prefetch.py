"""Prefetch: gathers follow the recorded order in forward and backward, and adapt to a changed order."""

import copy
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import World
from shardrt.comm.recorder.merge_dumps import merge, parse
from shardrt.fsdp.reduce.packed_grads import HeldGrads
from toys import (
    Branching,
    OddBlock,
    OddMLP,
    Skipping,
    batch,
    buckets_of,
    compare,
    gathers_of,
    logged,
    overlapping,
    paired,
    shard_blocks,
    tokens,
    train_side_by_side,
)


def second_step(model: nn.Module, events: list[str]) -> str:
    """The `gathers_of` a step whose order is known, blocks by their numbers."""
    for _ in range(2):
        events.clear()
        model(batch(0).float()).sum().backward()
    return " ".join(events).replace("blocks.", "")


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_both_ways(world: World) -> None:
    model = shard_blocks(OddMLP())
    events = gathers_of(model)
    model(batch(0).float()).sum().backward()
    on_demand = "OddMLP blocks.0 -blocks.0 blocks.1 -blocks.1 blocks.2 -blocks.2"
    backward = "blocks.2 blocks.1 -blocks.2 blocks.0 -blocks.1 -blocks.0 -OddMLP"
    assert events == f"{on_demand} {backward}".split()
    events.clear()
    model(batch(0).float()).sum().backward()
    # Two groups ahead. The last block is not freed, since the backward begins with it.
    ahead = "OddMLP blocks.0 blocks.1 blocks.2 -blocks.0 -blocks.1"
    backward = "blocks.1 -blocks.2 blocks.0 -blocks.1 -blocks.0 -OddMLP"
    assert events == f"{ahead} {backward}".split()


@on_ranks(2)
@buckets_of(0)
def test_nothing_is_gathered_ahead_on_the_callers_thread(world: World) -> None:
    """Unless a policy says so."""
    if world.stream_for("gather").overlaps:  # as on a GPU
        return
    model = shard_blocks(OddMLP())
    events = gathers_of(model)
    for policy, forward, backward in (
        (shardrt.PrefetchPolicy(), "OddMLP 0 -0 1 -1 2", "-2 1 -1 0 -0 -OddMLP"),
        (shardrt.PrefetchPolicy(max_groups=1), "OddMLP 0 1 -0 2 -1", "1 -2 0 -1 -0 -OddMLP"),
    ):
        model.set_prefetch_policy(policy)
        assert second_step(model, events) == f"{forward} {backward}", policy


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_the_recorder_lists_the_events_of_a_step(world: World) -> None:
    """All events of the groups in the second step, whose order is recorded, and their lines in a dump."""
    model = shard_blocks(OddMLP())
    model(batch(0).float()).sum().backward()
    since = time.time()
    model(batch(0).float()).sum().backward()
    resumed = ("gather OddMLP", "gather blocks.2") if model.param_group.gather.resident else ()
    expected = [
        # forward
        *("gather OddMLP", "gather blocks.0", "gather blocks.1", "gather blocks.2", "free blocks.0", "free blocks.1"),
        *resumed,  # the ranks meet again before what was kept is used
        *("gather blocks.1", "reduce blocks.2", "free blocks.2"),
        *("gather blocks.0", "reduce blocks.1", "free blocks.1", "reduce blocks.0", "free blocks.0"),
        *("reduce OddMLP", "free OddMLP"),
    ]
    assert world.recorder.notes(since) == expected
    with tempfile.TemporaryDirectory() as folder:
        dump = json.loads(world.recorder.dump(Path(folder) / "dump.json").read_text())
    assert [what for _, what in dump["notes"]][-len(expected) :] == expected
    dumps = [parse(json.dumps(dump | {"rank": rank, "size": 2}).encode()) for rank in (0, 1)]
    assert "last noted by ranks 0, 1: free OddMLP" in merge(dumps)


@on_ranks(2)
@overlapping()
def test_small_groups_in_buckets(world: World) -> None:
    """The root and block 0 are a bucket, then pairs of blocks. Two buckets ahead in forward, one in backward; two stay."""
    model = shard_blocks(OddMLP(layers=8))
    events = gathers_of(model)
    with buckets_of(2 * model.blocks[0].param_group.layout.nbytes):
        found = second_step(model, events)
    forward = "OddMLP 0 1 2 3 4 -0 5 6 -1 -2 7 -3 -4"
    backward = "-7 4 3 -6 -5 2 1 -4 -3 0 -2 -1 -0 -OddMLP"
    assert found == f"{forward} {backward}"


@on_ranks(2)
@overlapping()
def test_a_prefetch_policy(world: World) -> None:
    """The policy limits the groups and bytes gathered ahead, also to zero, in forward and backward."""
    block = "blocks.0"
    for policy, forward, backward in (
        (shardrt.PrefetchPolicy(max_groups=0), "OddMLP 0 -0 1 -1 2 -2 3 -3", "3 -3 2 -2 1 -1 0 -0 -OddMLP"),
        (shardrt.PrefetchPolicy(max_groups=3), "OddMLP 0 1 2 3 -0", "0 -3 -2 -1 -0 -OddMLP"),
        (shardrt.PrefetchPolicy(max_bytes=1), "OddMLP 0 1 -0 2 -1 3 -2", "2 -3 1 -2 0 -1 -0 -OddMLP"),
    ):
        model = shard_blocks(OddMLP(layers=4))
        if policy.max_bytes is not None:  # enough for one block, not for two
            nbytes = model.get_submodule(block).param_group.layout.nbytes
            policy = shardrt.PrefetchPolicy(max_bytes=2 * nbytes - 1)
        model.set_prefetch_policy(policy)
        events = gathers_of(model)
        with buckets_of(0):
            assert second_step(model, events) == f"{forward} {backward}", policy


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_named_modules_are_gathered_ahead(world: World) -> None:
    model = shard_blocks(OddMLP(layers=4), reshard_after_forward=True)
    blocks = list(model.blocks)
    model.set_modules_to_forward_prefetch([blocks[2]])
    blocks[0].set_modules_to_forward_prefetch([])
    blocks[3].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    blocks[2].set_modules_to_backward_prefetch([])
    events = gathers_of(model)
    for _ in range(2):
        events.clear()
        with torch.no_grad():
            model(batch(0).float())
    assert " ".join(events).replace("blocks.", "") == "OddMLP 2 0 -0 1 3 -1 -2 -3 -OddMLP"
    events.clear()
    model(batch(0).float()).sum().backward()
    backward = "OddMLP 3 1 0 -3 2 -2 -1 -0 -OddMLP"
    assert " ".join(events).replace("blocks.", "").endswith(backward)


@on_ranks(1, 2)
@buckets_of(0)
def test_a_module_whose_backward_reads_no_parameters(world: World) -> None:
    """An embedding gets its gradient without being gathered for its backward."""
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 3)).double()
    whole = copy.deepcopy(model)
    for module in model:
        shardrt.fully_shard(module)
    shardrt.fully_shard(model, reshard_after_forward=True)
    model[0].set_unshard_in_backward(False)
    events = gathers_of(model)
    x = tokens(0)
    for _ in range(2):
        events.clear()
        for module in (model, whole):
            module.zero_grad()
            module(x).square().mean().backward()
        compare(whole, model, 1e-12, "")
    assert events.count("0") == 1  # in forward


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_a_changed_order_is_gathered_on_demand_and_recorded(world: World) -> None:
    model = shard_blocks(Skipping())
    events = gathers_of(model)
    for _ in range(2):
        model(batch(0).float()).sum().backward()
    model.skip = True
    events.clear()
    with logged() as lines:
        model(batch(0).float()).sum().backward()
    # blocks.1 was gathered ahead but not used; the end of the forward frees it, and the backward does not gather it.
    forward = "Skipping blocks.0 blocks.1 blocks.2 -blocks.0 -blocks.2 -blocks.1"
    assert events == f"{forward} blocks.2 blocks.0 -blocks.2 -blocks.0 -Skipping".split()
    events.clear()
    with logged() as more:
        model(batch(0).float()).sum().backward()
        assert events == ["Skipping", "blocks.0", "blocks.2", "-blocks.0", "blocks.0", "-blocks.2", "-blocks.0", "-Skipping"]
        model.skip = False
        model(batch(0).float()).sum().backward()
    expected = "the order of use changed: expected 'blocks.1', found 'blocks.2'"
    assert [line.startswith(expected) for line in lines] == [True] * (world.rank == 0)
    assert more == []  # logged once


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_a_root_that_ends_with_its_last_child(world: World) -> None:
    """Both share the output's autograd node; the child's backward starts first, and prefetch continues after it."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    shard_blocks(model, "")
    events = gathers_of(model)
    model(batch(0).float()).sum().backward()
    gathered = [event for event in events if event != "Sequential"]  # the root, which has no parameters of its own
    assert gathered[-8:] == ["3", "2", "-3", "1", "-2", "0", "-1", "-0"]


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_branches_are_freed_in_time(world: World) -> None:
    """Blocks 4 and 2 share their input with others: its own backward frees each, before that input's gradient is complete.

    Block 3 waits for the gradient of an input that it does not use, and that never comes, till the end.
    """
    model = shard_blocks(Branching())
    events = gathers_of(model)
    model(batch(0).float()).sum().backward()
    backward = events[events.index("-blocks.4") + 1 :]
    first, then = "blocks.4 blocks.3 -blocks.4 blocks.2 blocks.1 -blocks.2", "blocks.0 -blocks.1 -blocks.0 -Branching -blocks.3"
    assert backward == f"{first} {then}".split()


class PassingOn(OddBlock):
    """Returns its input together with its output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Passing(OddMLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PassingOn(13) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x, before = block(x)
            x = x + before
        return self.out(x)


@on_ranks(2)
@buckets_of(0)
@overlapping()
def test_an_input_that_is_passed_on(world: World) -> None:
    """An input among the outputs does not start the module's backward a second time."""
    model = shard_blocks(Passing(), reshard_after_forward=True)
    events = gathers_of(model)
    for _ in range(2):
        events.clear()
        model(batch(0).float()).sum().backward()
    backward = "OddMLP 2 1 -2 0 -1 -0 -OddMLP".replace("OddMLP", "Passing")
    assert " ".join(events).replace("blocks.", "").endswith(backward)
    train_side_by_side(world, Passing().double(), map(batch, range(3)))


@on_ranks(1)
def test_late_sharding_is_refused(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    shardrt.fully_shard(model[0])
    model[0](torch.zeros(2, 5))
    shardrt.fully_shard(model)
    refused("'0' ran as a root of its own before 'Sequential'", lambda: model(torch.zeros(2, 5)), RuntimeError)


def forward_lists(model: Any, blocks: list[Any]) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])


def backward_lists(model: Any, blocks: list[Any]) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])


def circles(model: Any, blocks: list[Any]) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch([blocks[(index + 1) % 4], blocks[(index + 2) % 4]])
        block.set_modules_to_backward_prefetch([blocks[index - 1], blocks[index - 2]])


def everything(model: Any, blocks: list[Any]) -> None:
    """Also itself, the root, and some twice; and a module of another root, which never runs or has run once."""
    others = [shardrt.fully_shard(OddBlock(13).double()) for _ in range(2)]
    others[0](torch.zeros(1, 13, dtype=torch.float64))
    for module in (model, *blocks):
        module.set_modules_to_forward_prefetch([model, *blocks, *others, *blocks])
        module.set_modules_to_backward_prefetch([*others, *blocks[::-1], model, *blocks])


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@on_ranks(2, more=(1, 3))
def test_lists_of_modules_that_stay_gathered(world: World, reshard_after_forward: bool | None) -> None:
    """Of small groups, which are resumed and gathered in one go; with an evaluation, or an accumulation, in between."""
    whole = OddMLP(layers=4).double()
    for lists, way in itertools.product(
        (forward_lists, backward_lists, circles, everything), ("usual", "evaluates", "by hand", "frozen", "changes")
    ):
        plain = copy.deepcopy(whole)
        model: Any = shard_blocks(copy.deepcopy(whole), reshard_after_forward=reshard_after_forward)
        lists(model, list(model.blocks))
        for step in range(3):
            model.set_requires_gradient_sync(step > 0)
            for each in (plain, model):
                each.blocks[1].requires_grad_(way != "frozen" or step == 2)
            if way == "by hand":
                model.blocks[step].unshard(async_op=step == 1)
            if way == "changes":
                model.set_reshard_after_forward(step % 2 == 0)
            loss = model(batch(step).chunk(world.size)[world.rank]).square().mean()
            if way == "evaluates":
                with torch.no_grad():
                    model(batch(0))
            loss.backward()
            plain(batch(step)).square().mean().backward()
            if step:
                compare(plain, model, 1e-12, f"{lists.__name__}, {way}, step {step}")
                for each in (plain, model):
                    torch.optim.SGD(each.parameters(), 0.1).step()
                    each.zero_grad()


@on_ranks(1)
def test_a_list_with_a_module_that_is_not_sharded(world: World) -> None:
    model: Any = shard_blocks(OddMLP())
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        refused(f"{name} on 'OddMLP': 'Linear' is not sharded", lambda name=name: getattr(model, name)([model.out]))


class Halves(nn.Module):
    """Two networks in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OddMLP(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@on_ranks(1, 2, 3)
def test_halves_that_take_turns_accumulate_gradients(world: World) -> None:
    """As two optimizers of a GAN do: what one half holds goes on into the next reduction, of whichever half."""
    whole = Halves().double()
    model = shardrt.fully_shard(copy.deepcopy(whole))
    for turn, sync in enumerate((False, False, True, True)):
        for each in (whole, model):
            each.first.requires_grad_(turn % 2 == 0)
            each.second.requires_grad_(turn % 2 == 1)
        whole(batch(turn)).square().mean().backward()
        model.set_requires_gradient_sync(sync)
        model(batch(turn).chunk(world.size)[world.rank]).square().mean().backward()
        if turn == 1:
            refused("accumulated gradients that are not reduced", model.float, RuntimeError)
            model.requires_grad_(True)
            with torch.no_grad():
                model(batch(turn))
    compare(whole, model, 1e-12, "at the end")
    assert model.param_group.reduction.held is HeldGrads.NOTHING
    model.requires_grad_(False)
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    for half in (model.first, model.second):
        half.requires_grad_(True)
        model(batch(0)).square().mean().backward()
        half.requires_grad_(False)
    model.reset_iter_state()
    assert model.param_group.reduction.held is HeldGrads.NOTHING


@on_ranks(2, 3)
def test_accumulated_gradients_are_reduced_without_new_ones(world: World) -> None:
    """A block that does not run in the backward with sync still reduces the gradients that it accumulated before."""
    whole, sharded = paired(Skipping().double())
    for index, skip in enumerate((False, True)):
        whole.skip = sharded.skip = skip
        whole(batch(index)).square().mean().backward()
        sharded.set_requires_gradient_sync(skip)
        sharded(batch(index).chunk(world.size)[world.rank]).square().mean().backward()
    compare(whole, sharded, 1e-12, "accumulated")
    assert sharded.param_group.runtime.memory.in_use == 0

"""One copy per node: the ranks of a node compute with each other's shards. Nothing is gathered, and nobody writes too early."""

import copy
import io
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import shardrt
from observers import observing_calls, observing_memory
from ranks import on_ranks, run_script, settings_of
from shardrt.comm import Work, World
from shardrt.fsdp.gather.gather import FlatGather
from shardrt.fsdp.gather.mapped import MappedGather
from toys import OddMLP, Skipping, batch, buckets_of, loss_of, shard_blocks, step_all


def groups_of(model: nn.Module) -> list[Any]:
    return list(model.param_group.with_descendants())


def rows(world: World, step: int, microbatch: int = 0) -> torch.Tensor:
    return batch(10 * step + microbatch).chunk(world.size)[world.rank]


def full(model: nn.Module) -> list[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, shardrt.FSDPModule):
            module.reshard()
    return [param.full_tensor() for param in model.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# ---------------------------------------------------------------------- what is gathered: nothing


@on_ranks(2, 3, more=(4,))
@pytest.mark.parametrize("dtypes", [(None, None), (torch.bfloat16, torch.float32), (torch.float64, None)])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}])
def test_the_bits_of_ranks_with_copies(
    world: World, dtypes: tuple[torch.dtype | None, torch.dtype | None], options: dict[str, bool]
) -> None:
    """Losses and parameters are those of ranks that gather, which move bytes; these move none, and have no buffer for any."""
    first = OddMLP()
    policy = shardrt.MixedPrecisionPolicy(*dtypes)
    results = []
    for node_memory in (True, False):
        model = copy.deepcopy(first)
        gathered = [0]
        with (
            settings_of(world, node_memory=node_memory),
            buckets_of(0),
            observing_memory(lambda kind, _, nbytes, seen=gathered: seen.append(nbytes) if kind.value == "gathered" else None),
            observing_calls() as names,
        ):
            shard_blocks(model, mp_policy=policy, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(4):
                loss = model(rows(world, step).float()).float().square().mean()
                loss.backward()
                step_all(optimizer)
                losses.append(loss.item())
        assert all(type(group.gather) is (MappedGather if node_memory else FlatGather) for group in groups_of(model))
        assert all(group.gather.resident is node_memory for group in groups_of(model))
        assert ("all_gather" in names) is not node_memory
        assert ("barrier" in names) is node_memory
        assert any(gathered) is not node_memory
        results.append((losses, full(model)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@on_ranks(2)
@pytest.mark.parametrize("bucket", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_how_often_the_ranks_meet(world: World, bucket: int, dtype: torch.dtype | None) -> None:
    """For each group, or for all groups of a bucket at once."""
    model = shard_blocks(OddMLP(), mp_policy=shardrt.MixedPrecisionPolicy(dtype))
    exchange = world.mesh.communicator("gather").backend._shared_memory
    groups = len(groups_of(model))
    with buckets_of(bucket):
        with torch.no_grad():
            model(rows(world, 0).float())
            before = exchange.reached
            with observing_calls() as names:
                model(rows(world, 0).float())
        assert names == ["barrier"] * groups
        times = groups if bucket == 0 else 2  # the root's, and its bucket's
        assert exchange.reached - before == 2 * times  # each after a comparison of the calls


# ---------------------------------------------------------------------- the order of reads and writes

PAUSE_S = 0.004


class Paused(nn.Module):
    """Stands still before and after each use of its weight, in forward and in backward, for a random time."""

    def __init__(self, inner: nn.Module, random: Random) -> None:
        super().__init__()
        self.inner = inner
        self.random: Any = random

    def pause(self, *_: object) -> None:
        if self.random is not None and self.random.random() < 0.5:
            time.sleep(self.random.random() * PAUSE_S)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pause()
        made = self.inner(x)
        self.pause()
        if made.requires_grad:
            made.register_hook(self.pause)
        return made


def paused(model: OddMLP, random: Random) -> OddMLP:
    for block in model.blocks:
        block.up, block.down = Paused(block.up, random), Paused(block.down, random)
    model.inp, model.out = Paused(model.inp, random), Paused(model.out, random)
    return model


def pauses(model: nn.Module) -> None:
    next(module for module in model.modules() if isinstance(module, Paused)).pause()


class WithMomentum(nn.Module):
    """Two encoders, of which one follows the other in forward: before its own use, and after it (as MoCo and BYOL do)."""

    def __init__(self, online: OddMLP, target: OddMLP, *, after: bool) -> None:
        super().__init__()
        self.online, self.target, self.after = online, target, after

    def follow(self) -> None:
        with torch.no_grad():
            for target, online in zip(self.target.blocks.parameters(), self.online.blocks.parameters(), strict=True):
                target.mul_(0.9).add_(online, alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.after:
            self.follow()
        with torch.no_grad():
            expected = self.target(x)
        if self.after:
            self.follow()
        return self.online(x) - expected


Act = Callable[[World, nn.Module, torch.optim.Optimizer, int], list[float]]


def step_plainly(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    pauses(model)
    loss = model(rows(world, step)).square().mean()
    pauses(model)
    loss.backward()
    pauses(model)
    optimizer.step()
    pauses(model)
    optimizer.zero_grad()
    return [loss.item()]


def evaluate_and_write(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    losses = step_plainly(world, model, optimizer, step)
    with torch.no_grad():
        losses.append(model(rows(world, step)).sum().item())
        for param in model.parameters():
            param.mul_(1.01)
        losses.append(model(rows(world, step)).sum().item())
        for param in model.parameters():
            param.to_local().mul_(0.99)
    return losses


def forward_without_backward(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    loss = model(rows(world, step)).square().mean()
    loss.backward()
    other = model(rows(world, step, 1)).sum().item()
    step_all(optimizer)
    return [loss.item(), other]


def accumulate(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    losses = []
    for microbatch in range(3):
        model.set_requires_gradient_sync(microbatch == 2)
        loss = model(rows(world, step, microbatch)).square().mean()
        loss.backward()
        losses.append(loss.item())
    step_all(optimizer)
    return losses


def two_backwards(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    loss = model(rows(world, step)).square().mean()
    loss.backward(retain_graph=True)
    pauses(model)
    loss.backward()
    step_all(optimizer)
    return [loss.item()]


def two_forwards(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    first, second = (model(rows(world, step, turn)).square().mean() for turn in range(2))
    (first + second).backward()
    step_all(optimizer)
    return [first.item(), second.item()]


def leave_out(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    """A block is not used in some steps, and then is."""
    model.skip = step % 2 == 1
    return step_plainly(world, model, optimizer, step)


def write_the_last_first(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    """After forwards, and after a backward that reduces nothing; none of these keeps the ranks together."""
    params = list(model.parameters())[::-1]
    losses = []
    for turn in range(3):
        with torch.no_grad():
            losses.append(model(rows(world, step, turn)).sum().item())
    with torch.no_grad():
        for param in params:
            param.mul_(1.01)
    x = rows(world, step).requires_grad_()
    model(x).square().sum().backward()
    with torch.no_grad():
        for param in params:
            param.mul_(0.98)
    optimizer.zero_grad()
    return [*losses, x.grad.sum().item()]


def normalise(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    """What is written to gathered parameters depends on all of them."""
    losses = step_plainly(world, model, optimizer, step)
    with torch.no_grad(), shardrt.unsharded(model):
        for param in model.parameters():
            pauses(model)
            param.div_(param.norm() + 0.1)
    return losses


def write_by_other_means(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    """After a backward, to local tensors that were asked for before the first forward."""
    loss = model(rows(world, step)).square().mean()
    loss.backward()
    for local, param in zip(model.locals, model.parameters(), strict=True):
        pauses(model)
        local.sub_(param.grad.to_local(), alpha=0.01)
    optimizer.zero_grad()
    return [loss.item()]


def generate(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> list[float]:
    """Each rank by itself, another number of times."""
    losses = step_plainly(world, model, optimizer, step)
    with torch.no_grad(), shardrt.unsharded(model):
        losses += [model(rows(world, step, turn)).sum().item() for turn in range(1 + (step + world.rank) % 3)]
    return losses


ACTS: dict[str, Act] = {
    "plain": step_plainly,
    "evaluation": evaluate_and_write,
    "no backward": forward_without_backward,
    "accumulation": accumulate,
    "two backwards": two_backwards,
    "two forwards": two_forwards,
    "unused": leave_out,
    "last first": write_the_last_first,
    "last first, kept": write_the_last_first,
    "normalised": normalise,
    "other means": write_by_other_means,
    "generation": generate,
}


def recompute(model: OddMLP) -> OddMLP:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def in_backward(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer for each parameter, which steps as soon as the gradient is there; the one returned has nothing to do."""
    optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))])


def frozen(model: OddMLP) -> OddMLP:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return model


def run(world: World, case: str, seed: int | None, dtype: torch.dtype | None) -> tuple[list[float], list[torch.Tensor]]:
    """Train; seed: of the pauses, None for none."""
    random: Any = None if seed is None else Random(1000 * seed + world.rank)
    torch.manual_seed(3)
    model: Any = paused((Skipping if case == "unused" else OddMLP)().double(), random)
    if case.startswith("last first"):  # no parameters of the root come first, and none needs a gradient
        layers = (model.inp, *(nn.Sequential(block.up, nn.GELU(), block.down) for block in model.blocks), model.out)
        model = nn.Sequential(*layers).requires_grad_(False)
        for layer in model:
            shardrt.fully_shard(layer, mp_policy=shardrt.MixedPrecisionPolicy(dtype), reshard_after_forward="kept" not in case)
        shardrt.fully_shard(model, mp_policy=shardrt.MixedPrecisionPolicy(dtype))
    elif case.startswith("momentum"):
        target = paused(OddMLP().double(), random).requires_grad_(False)
        shard_blocks(target, mp_policy=shardrt.MixedPrecisionPolicy(dtype))
        model = WithMomentum(model, target, after=case == "momentum after")
        shard_blocks(model.online, mp_policy=shardrt.MixedPrecisionPolicy(dtype))
        shardrt.fully_shard(model, mp_policy=shardrt.MixedPrecisionPolicy(dtype))
    else:
        model = {"recomputation": recompute, "frozen": frozen}.get(case, lambda each: each)(model)
        shard_blocks(
            model, mp_policy=shardrt.MixedPrecisionPolicy(dtype), reshard_after_forward=False if case == "kept" else None
        )
    model.locals = [param.to_local() for param in model.parameters()]
    trainable = [param for param in model.parameters() if param.requires_grad] or [nn.Parameter(torch.zeros(1))]
    optimizer = in_backward(model) if case == "in backward" else torch.optim.AdamW(trainable, lr=1e-2)
    losses = []
    for step in range(4):
        losses += ACTS.get(case, step_plainly)(world, model, optimizer, step)
    return losses, full(model)


CASES = [*ACTS, "kept", "recomputation", "frozen", "in backward", "momentum before", "momentum after"]


@on_ranks(2, more=(3, 4))
@pytest.mark.parametrize(("bucket", "dtype"), [(0, None), (1 << 20, None), (0, torch.float32)])
@pytest.mark.parametrize("case", CASES)
def test_under_a_random_schedule(world: World, case: str, bucket: int, dtype: torch.dtype | None) -> None:
    """Ranks stand still at any moment, for any time: losses and parameters are those of ranks with copies, to the bit.

    Their programs write parameters where a program may: a rank that did so while another still reads would change its bits.
    """
    with buckets_of(bucket):
        with settings_of(world, node_memory=False):
            expected = run(world, case, None, dtype)
        for seed in range(3):
            losses, params = run(world, case, seed, dtype)
            assert losses == expected[0]
            assert same(params, expected[1])


@on_ranks(2)
@pytest.mark.parametrize("case", ["momentum before", "momentum after"])
@pytest.mark.parametrize("node_memory", [True, False])
def test_what_forward_writes_is_gathered(world: World, case: str, node_memory: bool) -> None:
    """Also if it was gathered ahead, in a bucket with what came before."""
    results = []
    for bucket in (0, 1 << 20):
        with settings_of(world, node_memory=node_memory), buckets_of(bucket):
            results.append(run(world, case, None, None))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


class WritesAndUnshards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor, pause: float) -> torch.Tensor:
        time.sleep(pause)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)
        self.inner.unshard()
        return self.inner(x)


@on_ranks(2, 3)
def test_a_forward_that_writes_and_then_unshards(world: World) -> None:
    torch.manual_seed(5)
    model = WritesAndUnshards().double()
    weight, bias = model.inner.weight.detach().clone(), model.inner.bias.detach().clone()
    shardrt.fully_shard(model.inner)
    shardrt.fully_shard(model)
    x = batch(0).repeat(1, 2)[:, :9]
    for step in range(1, 5):
        out = model(x, 0.02 * ((world.rank + step) % world.size))
        assert torch.equal(out, nn.functional.linear(x, weight * 0.5**step, bias))
        out.sum().backward()


@on_ranks(2, 3)
def test_two_roots_that_take_turns(world: World) -> None:
    """Each is the other's critic: its gradients flow through the other, whose parameters stay as they are."""

    def play(seed: int | None) -> list[list[torch.Tensor]]:
        random: Any = None if seed is None else Random(1000 * seed + world.rank)
        torch.manual_seed(4)
        players = [shard_blocks(paused(OddMLP().double(), random)) for _ in range(2)]
        optimizers = [torch.optim.AdamW(player.parameters(), lr=1e-2) for player in players]
        for step in range(4):
            for turn, optimizer in enumerate(optimizers):
                made = players[turn](rows(world, step))
                players[1 - turn](torch.cat([made, made], 1)[:, :5]).square().mean().backward()
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()
        return [full(player) for player in players]

    with settings_of(world, node_memory=False):
        expected = play(None)
    for seed in range(3):
        assert all(map(same, play(seed), expected))


@on_ranks(2)
def test_what_happens_where_nobody_waits(world: World) -> None:
    """Without the waits the test above fails, so its pauses are long enough."""
    with settings_of(world, node_memory=False):
        expected = run(world, "evaluation", None, None)
    with mock.patch.object(MappedGather, "wait_for_readers", return_value=True):
        found = [run(world, "evaluation", seed, None)[0] == expected[0] for seed in range(5)]
    assert not all(all(of_rank) for of_rank in world.comm.exchange(found))


@on_ranks(2)
def test_an_optimizer_of_another_model_steps_between_forward_and_backward(world: World) -> None:
    """A rank that is ahead, in its backward, waits there for this one, which must not wait for it."""
    model = shard_blocks(OddMLP())
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for step in range(3):
        loss = loss_of(model, rows(world, step).float())
        if world.rank == 0:
            time.sleep(0.05)
        other.step()
        loss.backward()
    assert all(group.gather.wait_for_readers() for group in groups_of(model))


# ---------------------------------------------------------------------- what users do with parameters


class Clamps(nn.Linear):
    """Writes to its weight in forward, so that no version counter shows it."""

    bound = 0.01

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bound:
            self.weight.data.clamp_(-self.bound, self.bound)
        return super().forward(x)


@on_ranks(2, 3)
@pytest.mark.parametrize("width", [7, 90])
def test_a_write_in_forward_reaches_the_shards(world: World, width: int) -> None:
    model = shardrt.fully_shard(Clamps(width, width, bias=False))
    before = model.weight.full_tensor()
    x = torch.ones(2, width)
    with torch.no_grad():
        assert torch.equal(model(x), nn.functional.linear(x, before.clamp(-0.01, 0.01)))
        world.barrier()
        assert torch.equal(model.weight.full_tensor(), before.clamp(-0.01, 0.01))
        model.bound = 0
        assert torch.equal(model(x), nn.functional.linear(x, before.clamp(-0.01, 0.01)))


@on_ranks(2, 3)
def test_a_write_to_a_gathered_parameter_counts_once(world: World) -> None:
    """Between a forward and the next, in `unsharded()`, and after `unshard()`: each rank makes it, and it is made once."""
    model = shard_blocks(OddMLP().double(), reshard_after_forward=False)
    weight = model.blocks[0].up.weight
    expected = weight.full_tensor()
    x = batch(0)
    for case in range(4):
        time.sleep(0.01 * ((world.rank + case) % world.size))
        if case == 0:
            model(x)
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
        elif case == 1:
            with shardrt.unsharded(model), torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
        elif case == 2:
            model(x)
            model.blocks[0].up.weight.data = 2 * model.blocks[0].up.weight.data
        else:
            model.blocks[0].unshard()
            with torch.no_grad():
                model.blocks[0].up.weight.mul_(2)
            model.blocks[0].reshard()
        out = model(x)
        expected = expected * 2
        assert torch.equal(weight.full_tensor(), expected)
        whole = OddMLP().double()
        whole.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
        torch.testing.assert_close(out, whole(x))
        model.reset_iter_state()


@on_ranks(2)
def test_copies_and_other_dtypes_have_memory_of_their_own(world: World) -> None:
    model = shard_blocks(OddMLP())
    model(batch(0).float())
    before = full(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert same(full(model), before)
    copied(batch(0).float())
    model.double()
    out = model(batch(0))
    assert out.dtype == torch.float64
    assert all(group.gather.resident for model_ in (model, copied) for group in groups_of(model_))
    assert not any(each.any() for each in full(copied))


@on_ranks(2)
def test_a_local_tensor_is_saved_without_the_others(world: World) -> None:
    model = shardrt.fully_shard(nn.Linear(256, 256, bias=False))
    with torch.no_grad():
        model(torch.ones(1, 256))
    file = io.BytesIO()
    torch.save(model.weight.to_local(), file)
    assert file.tell() < 256 * 256 * 4 / 2 + 4096


@on_ranks(2)
def test_aliases_of_shards_follow(world: World) -> None:
    """Local tensors that were asked for before the first forward, which moves the shards."""
    model = shardrt.fully_shard(nn.Linear(5, 5, bias=False))
    alias, view = model.weight.to_local(), model.weight.to_local().view(-1)[:3]
    model(torch.ones(1, 5)).sum().backward()
    alias.fill_(3)
    assert view.eq(3).all()
    assert torch.equal(model.weight.full_tensor(), torch.full((5, 5), 3.0))


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@on_ranks(2)
def test_workers_of_a_data_loader(world: World) -> None:
    model = shard_blocks(OddMLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(batch(0).float())
    for _ in range(2):
        for x in DataLoader(data, 2, num_workers=1, collate_fn=lambda each: double(torch.stack(each))):
            loss_of(model, x).backward()
            step_all(optimizer)


@on_ranks(2)
def test_replicas_of_nodes_share_within_a_node(world: World) -> None:
    for shape in ((1, 2), (2, 1)):
        mesh = world.mesh.unflatten(shape, ("replica", "shard"))
        model = OddMLP()
        shard_blocks(model, mesh=mesh)
        loss_of(model, batch(0).float().chunk(2)[world.rank]).backward()
        assert all(group.gather.resident for group in groups_of(model))


@on_ranks(2)
def test_a_custom_all_gather_gathers(world: World) -> None:
    class Gathers:
        used = 0

        def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

        def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Any, stream: Any) -> Work:
            self.used += 1
            return comm.all_gather(out, inp, stream=stream)

    whole = OddMLP()
    model, gathers = shard_blocks(copy.deepcopy(whole)), Gathers()
    for custom in (False, True, False):  # groups that keep their parameters leave the runtime, and come again
        model.blocks[0].double().float()
        model.set_custom_all_gather(gathers if custom else None)
        used = gathers.used
        for _ in range(2):
            loss_of(model, rows(world, 0).float()).backward()
        assert (gathers.used > used) is custom
        assert model.param_group.gather.resident is not custom
        with torch.no_grad():
            for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
                param.add_(1)
                expected.add_(1)
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)


@on_ranks(2)
def test_where_the_node_has_no_such_memory(world: World) -> None:
    """Ranks gather copies: also if only one of them cannot map it."""
    from shardrt.comm.backends.node import node_memory

    model = shard_blocks(OddMLP())
    with mock.patch.object(node_memory, "_shows_writes", return_value=world.rank == 0), observing_calls() as names:
        loss_of(model, rows(world, 0).float()).backward()
    assert "all_gather" in names
    assert not any(group.gather.resident for group in groups_of(model))


def test_ranks_of_several_nodes_gather_and_memory_may_be_asked_for() -> None:
    source = """
import torch, shardrt
world = shardrt.init("cpu")
model = shardrt.fully_shard(torch.nn.Linear(3, 3))
model(torch.ones(1, 3)).sum().backward()
print(model.param_group.gather.resident)
"""
    for name, value in (("", ""), ("SHARDRT_NODE_MEMORY", "0"), ("SHARDRT_RANKS_PER_NODE", "1")):
        done = run_script(source, 2, **({name: value} if name else {}), code=0)
        assert done.stdout.count(str(not name)) == 2
    done = run_script(source, 2, SHARDRT_NODE_MEMORY="maybe")
    assert "SHARDRT_NODE_MEMORY='maybe'" in done.stderr

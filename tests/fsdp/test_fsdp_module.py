"""The methods of `FSDPModule`, its settings, lists of modules, forward methods, custom collectives, offload."""

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused, settings_of, with_copies, with_settings
from shardrt.comm import Communicator, Stream, Work, World
from shardrt.fsdp.api.fully_shard import _log_nothing_to_offload
from shardrt.fsdp.gather.gather_state import GatherState, Verb
from shardrt.fsdp.schedule.param_group import ParamGroup
from subclasses import Narrow
from toys import (
    Elsewhere,
    OddMLP,
    UsedTwice,
    batch,
    buckets_of,
    check_backward,
    compare,
    gathers_of,
    logged,
    loss_of,
    paired,
    shard_blocks,
    step_all,
    train_side_by_side,
    uncompiled,
)


@on_ranks(1, 2)
def test_slices_of_a_sharded_container_are_plain(world: World) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    shardrt.fully_shard(model)
    assert type(model[1:3]) is nn.Sequential
    assert model[1:3][0] is model[1]
    assert type(type(model)(nn.ReLU())) is nn.Sequential
    with shardrt.disable_fsdp_module_new_init():
        bare = type(model)(nn.ReLU())
    assert type(bare) is nn.Sequential
    assert not hasattr(bare, "_modules")


class Chunked(nn.Module):
    """Computes the loss in chunks; the head shares a group with the norm before it."""

    chunks = 3

    def __init__(self) -> None:
        super().__init__()
        self.body = OddMLP()
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 7)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(x))
        return torch.stack([self.head(part).square().sum() for part in hidden.chunk(self.chunks)]).sum() / x.shape[0]


def shard_chunked(model: nn.Module) -> None:
    shard_blocks(model.body)
    shardrt.fully_shard([model.norm, model.head, model.unused])
    shardrt.fully_shard(model)


@pytest.mark.parametrize("reshard", [None, True])
@on_ranks(1, 2, 3)
@buckets_of(0)
def test_a_list_of_modules_is_one_group(world: World, reshard: bool | None) -> None:
    """The group is gathered once per forward and once per backward, however often its modules run."""
    whole = Chunked().double()
    model = copy.deepcopy(whole)
    shard_chunked(model)
    if reshard is not None:
        model.head.set_reshard_after_forward(reshard)
    assert model.norm.param_group is model.head.param_group is model.unused.param_group
    events = gathers_of(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, model)]
    for step in range(3):
        events.clear()
        check_backward(world, whole, model, batch(step), loss=lambda each, x: each(x))
        assert events.count("norm, head, unused") == 1
        step_all(*optimizers)
    assert model.body.param_group.root is model.param_group
    with torch.no_grad():
        model(batch(0))
    assert model.param_group.runtime.memory.in_use == 0


@on_ranks(2)
def test_modules_without_parameters(world: World) -> None:
    """An empty group: as a root, as a block, and in a list."""
    x = batch(0)
    relu = shardrt.fully_shard(nn.ReLU(), ignored_params=None)
    for _ in range(2):
        wanting = x.clone().requires_grad_()
        relu(wanting).sum().backward()
        assert torch.equal(wanting.grad, (x > 0).to(x.dtype))

    def shard(model: nn.Module) -> None:
        shardrt.fully_shard(model[1])
        shardrt.fully_shard([model[2], model[3]])
        shardrt.fully_shard([model[4], model[5]])
        shardrt.fully_shard(model)

    layers = (nn.Linear(5, 7), nn.Tanh(), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Identity())
    train_side_by_side(world, nn.Sequential(*layers).double(), map(batch, range(3)), shard=shard)


def reach(state: GatherState) -> ParamGroup:
    """A group in this state, by what brings one there."""
    model = shard_blocks(OddMLP(), reshard_after_forward=1)
    group: ParamGroup = model.blocks[0].param_group
    loss = loss_of(model, batch(0).float())
    assert group.state is GatherState.PART
    if state is GatherState.SHARDED:
        loss.backward()
    elif state is GatherState.GATHERED:
        model.blocks[0].unshard(async_op=True)
    elif state is not GatherState.PART:
        model.blocks[0].unshard()
        if state is GatherState.SHOWN:
            group.conceal()
    assert group.state is state
    return group


@pytest.mark.parametrize("verb", Verb)
@on_ranks(2)
@with_copies
def test_a_group_moves_by_the_table_alone(world: World, verb: Verb) -> None:
    """Any other move is an error that names the group, its state and the verb, and changes nothing."""
    for state in GatherState:
        group, do = reach(state), mock.Mock()
        if state in verb.origins:
            group._move(verb, do)
            assert group.state is verb.to
            do.assert_called_once_with()
            continue
        word = verb.name.lower().replace("_", " ")
        with pytest.raises(RuntimeError, match=f"cannot {word} 'blocks.0' while it is {state.name} \\(rank {world.rank}\\)"):
            group._move(verb, do)
        assert group.state is state
        do.assert_not_called()


@on_ranks(1, 2)
def test_what_is_not_shown_is_not_exposed(world: World) -> None:
    model = shard_blocks(OddMLP())
    loss_of(model, batch(0).float()).backward()
    group = model.blocks[0].param_group
    for step in (group.expose, group.hide):
        refused(f"cannot {step.__name__} 'blocks.0' while it is SHARDED", step, RuntimeError)
    group.conceal()
    group.reshard()
    group.wait_unsharded()
    assert group.state is GatherState.SHARDED


@on_ranks(2)
def test_a_list_needs_a_root_around_it(world: World) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    shardrt.fully_shard([first, second])
    refused(r"'Linear'.*sharded in a list.*the module that calls them", lambda: first(torch.zeros(2, 3)), RuntimeError)


@on_ranks(1, 3)
def test_unshard_ahead(world: World) -> None:
    model = shard_blocks(OddMLP().double())
    events = gathers_of(model)
    for block in model.blocks:
        block.unshard(async_op=True)
    assert events == ["OddBlock"] * 3 or events == ["blocks.0", "blocks.1", "blocks.2"]
    with torch.no_grad():
        model(batch(0))
        assert [event for event in events[3:] if not event.startswith("-")] == ["OddMLP"]
        model.blocks[1].unshard()
        model.blocks[1].up.weight  # noqa: B018
        model.blocks[1].reshard()
        model.set_reshard_after_forward(False)
        model(batch(0))
        for param in model.blocks[1].param_group.params:
            param.sharded.zero_()
        model.blocks[1].unshard()  # gathers the current shards
        assert not model.blocks[1].up.weight.any()
    model = shard_blocks(OddMLP().double())
    expected = model.blocks[1].up.weight.full_tensor()
    handle = model.blocks[1].unshard(async_op=True)
    assert isinstance(model.blocks[1].up.weight, shardrt.DTensor)
    handle.wait()
    handle.wait()
    assert torch.equal(model.blocks[1].up.weight, expected)
    model.blocks[1].reshard()
    second = model.blocks[1].unshard(async_op=True)
    model.blocks[1].reshard()
    for over in (handle, second):
        over.wait()  # for nothing: the shards are what there is
        assert isinstance(model.blocks[1].up.weight, shardrt.DTensor)
        assert model.blocks[1].param_group.state is GatherState.SHARDED
    assert model.blocks[0].unshard() is None
    for block in model.blocks:
        block.reshard()
    assert model.param_group.runtime.memory.in_use == 0


class Generator(OddMLP):
    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.cat([x[:, 1:], self(x)[:, :1]], dim=1)
        return x

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.inp(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(2 * x)


@on_ranks(1, 2)
def test_other_methods_as_forwards(world: World) -> None:
    whole = Generator().double()
    model = copy.deepcopy(whole)
    shard_blocks(model)
    shardrt.register_fsdp_forward_method(model, "embed")
    shardrt.register_fsdp_forward_method(whole, "embed")  # not sharded: no effect
    refused("'FSDPGenerator' has no method 'imagine'", lambda: shardrt.register_fsdp_forward_method(model, "imagine"))
    for step in range(2):
        check_backward(world, whole, model, batch(step), loss=lambda each, x: each.embed(x).square().mean())
    shardrt.register_fsdp_forward_method(model, "twice")  # calls the forward itself
    check_backward(world, whole, model, batch(3), loss=lambda each, x: each.twice(x).square().mean())
    with torch.inference_mode():
        assert torch.equal(model.generate(batch(5), 4), whole.generate(batch(5), 4))
    assert model.param_group.runtime.memory.in_use == 0


@on_ranks(2, 3)
def test_ignored_parameters_stay_whole(world: World) -> None:
    model = OddMLP().double()
    ignored = {model.inp.weight, model.blocks[0].gate}
    whole = copy.deepcopy(model)
    shard_blocks(model, ignored_params=ignored)
    assert {param for param in model.parameters() if not isinstance(param, shardrt.DTensor)} == ignored
    loss_of(model, batch(0).chunk(world.size)[world.rank]).backward()
    loss_of(whole, batch(0)).backward()
    for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        if param not in ignored:
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-12, atol=1e-12, msg=name)
        else:
            assert not torch.equal(param.grad, expected.grad)  # the gradient of this rank's rows only


class Choosy(OddMLP):
    """Each rank uses other parameters of the blocks."""

    rank = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            block.plain = index % 2 == self.rank % 2
            x = block(x)
        return self.out(x)


class Optional(nn.Module):
    plain = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.always = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return x if self.plain else x + self.sometimes(x)


@pytest.mark.parametrize("bucket", [0, 1 << 20])
@on_ranks(2, 3)
def test_parameters_unused_on_some_ranks(world: World, bucket: int) -> None:
    """On every rank they get the gradient of the ranks that use them, averaged with zeros of the other ranks."""
    whole = Choosy().double()
    whole.blocks = nn.ModuleList(Optional(13).double() for _ in range(3))
    whole.blocks.append(Optional(13).double().requires_grad_(False))
    whole.blocks.append(nn.Sequential(Optional(13).double()))
    whole.blocks.append(whole.blocks[0])  # runs again: its gradient is complete after the second run
    model = copy.deepcopy(whole)
    shardrt.fully_shard(model.blocks[4][0])
    for block in list(model.blocks)[:5]:
        shardrt.fully_shard(block)
    shardrt.fully_shard(model)
    model.rank = world.rank
    model.set_reduce_scatter_unused_params(True)
    with buckets_of(bucket):
        for step in range(3):
            loss_of(model, batch(step).chunk(world.size)[world.rank]).backward()
            for rank in range(world.size):
                whole.rank = rank
                (loss_of(whole, batch(step).chunk(world.size)[rank]) / world.size).backward()
            compare(whole, model, 1e-12, f"step {step}")
            if step == 1:
                for m in (whole, model):
                    m.zero_grad()
    assert model.param_group.runtime.memory.in_use == 0


@pytest.mark.parametrize("in_flight", [1, 2, 5])
@on_ranks(2)
@uncompiled()
@buckets_of(0)
@with_settings(node_memory=False, host_streams="threaded")
def test_reductions_in_flight(world: World, in_flight: int) -> None:
    """The setting limits the packed buffers beside one that is filled: the peak of a model that stays gathered shows it."""
    whole, model = paired(OddMLP(layers=4).double(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_reduce_scatter_max_input_buffers(in_flight)
    check_backward(world, whole, model, batch(0))
    groups = list(model.param_group.with_descendants())
    block = model.blocks[0].param_group
    packed = min(in_flight, 4) * block.nbytes + (model.param_group.nbytes if in_flight > 4 else 0)
    assert model.param_group.runtime.memory.peak == sum(group.nbytes for group in groups) + packed
    for wrong, kind in ((0, ValueError), (True, TypeError)):
        with pytest.raises(kind, match="set_reduce_scatter_max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(wrong)


@on_ranks(2)
@uncompiled()
@buckets_of(0)
@with_settings(node_memory=False, host_streams="threaded")
def test_reductions_in_flight_by_group(world: World) -> None:
    """The maximum of the groups' settings holds for all groups of the root."""
    model = shard_blocks(OddMLP(layers=4).double(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.blocks[1].set_reduce_scatter_max_input_buffers(2)
    model.set_reduce_scatter_max_input_buffers(1, recurse=False)
    gathered = sum(group.nbytes for group in model.param_group.with_descendants())
    for expected in (2, 1):
        if model.param_group.runtime is not None:
            model.param_group.runtime.memory.peak = 0
        loss_of(model, batch(0).chunk(world.size)[world.rank]).backward()
        assert model.param_group.runtime.memory.peak == gathered + expected * model.blocks[0].param_group.nbytes
        model.set_reduce_scatter_max_input_buffers(1)
        model.zero_grad()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@on_ranks(1, 2)
def test_parameters_stay_gathered_between_microbatches(world: World, options: dict[str, bool]) -> None:
    """They stay gathered until an optimizer has changed them, also after a forward without a backward."""
    whole, model = paired(OddMLP().double(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    events = gathers_of(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3, **options) for m in (whole, model)]
    for step in range(3):
        if step == 2:
            model(batch(0))
        events.clear()
        for micro in range(3):
            x = batch(3 * step + micro)
            model.blocks[micro].set_is_last_backward(micro == 2)  # for all under the root
            loss_of(whole, x).backward()
            loss_of(model, x.chunk(world.size)[world.rank]).backward()
        gathered = [event for event in events if not event.startswith("-")]
        assert sorted(gathered) == ([] if step == 2 else ["OddMLP", "blocks.0", "blocks.1", "blocks.2"])
        compare(whole, model, 1e-12, f"step {step}")
        step_all(*optimizers)


@pytest.mark.parametrize(("reduce_dtype", "stays"), [(None, False), (torch.float32, False), (None, True)])
@on_ranks(1, 2, 3)
def test_optimizer_in_backward(world: World, reduce_dtype: torch.dtype | None, stays: bool) -> None:
    """A hook per sharded parameter steps and deletes the gradient as soon as it is reduced.

    stays: parameters stay gathered.
    """
    whole = OddMLP().double()
    policy = shardrt.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = shard_blocks(copy.deepcopy(whole), mp_policy=policy, reshard_after_forward=False if stays else None)
    model.set_reshard_after_backward(not stays)
    owners = {param: torch.optim.AdamW([param], lr=1e-2, eps=1e-3) for param in model.parameters()}
    expected = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)

    def step(param: torch.Tensor) -> None:
        owners[param].step()
        param.grad = None

    for param in owners:
        param.register_post_accumulate_grad_hook(step)
    for number in range(3):
        loss_of(whole, batch(number)).backward()
        loss_of(model, batch(number).chunk(world.size)[world.rank]).backward()
        step_all(expected)
        compare(whole, model, 1e-12 if reduce_dtype is None else 1e-6, f"step {number}")


class Halves:
    """A custom all-gather that uses its own output in a second step; all memory comes from one pool."""

    def __init__(self) -> None:
        self.pool, self.used = torch.zeros(1 << 20, dtype=torch.uint8), 0

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.used += nbytes
        return self.pool[self.used - nbytes : self.used]

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        gathered = self.allocate(out.numel(), out.device)
        comm.all_gather(gathered, inp, stream=stream)
        stream.submit(lambda: out.copy_(gathered))
        return comm.barrier(stream=stream)


@on_ranks(1, 2)
def test_a_custom_all_gather_of_several_steps(world: World) -> None:
    gather = Halves()

    def shard(model: nn.Module) -> None:
        shard_blocks(model)
        for block in model.blocks:
            block.set_custom_all_gather(gather)

    train_side_by_side(world, OddMLP().double(), map(batch, range(4)), shard=shard)
    assert gather.used > 0
    wrong = shard_blocks(OddMLP())
    wrong.set_custom_all_gather(Wrong())
    refused(r"allocate.. of a custom collective of 'OddMLP': expected", lambda: wrong(batch(0).float()))


class Wrong(Halves):
    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return self.pool[: nbytes + 16]


class Counting:
    """A custom collective that equals the default, allocates its own memory, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.memory: list[torch.Tensor] = []

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        self.memory.append(torch.full((nbytes,), 255, dtype=torch.uint8, device=device))  # NaNs
        return self.memory[-1]

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, *args: object) -> Work:
        self.calls += 1
        assert any(memory.untyped_storage().data_ptr() in self.storages(out, inp) for memory in self.memory)
        if len(args) == 2:
            comm, stream = args
            assert isinstance(comm, Communicator)
            assert isinstance(stream, Stream)
            return comm.all_gather(out, inp, stream=stream)
        op, comm, stream = args
        assert inp.isfinite().all(), "its padding is zero"
        return comm.reduce_scatter(out, inp, op, stream=stream)

    @staticmethod
    def storages(*tensors: torch.Tensor) -> list[int]:
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]


@on_ranks(1, 2)
def test_custom_collectives(world: World) -> None:
    gather, reduce = Counting(), Counting()

    def shard(model: nn.Module) -> None:
        shard_blocks(model)
        model.blocks[0].set_custom_all_gather(gather)
        model.blocks[1].set_custom_reduce_scatter(reduce)

    model = train_side_by_side(world, OddMLP().double(), map(batch, range(3)), shard=shard, microbatches=2)
    assert (len(gather.memory), len(reduce.memory)) == (1, 1)
    assert gather.calls >= 3
    assert reduce.calls == 3
    with pytest.raises(RuntimeError, match=r"'blocks.0': call it before the first forward"):
        model.blocks[0].set_custom_all_gather(gather)


@on_ranks(1, 2)
def test_two_roots_take_turns(world: World) -> None:
    """Two stages of a pipeline with two microbatches: forward, forward, backward, backward."""
    whole = [OddMLP().double(), OddMLP().double()]
    stages = [shard_blocks(copy.deepcopy(stage)) for stage in whole]
    shardrt.share_comm_ctx(stages)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (*whole, *stages)]

    def microbatches(models: list[nn.Module], xs: list[torch.Tensor]) -> None:
        ends = []
        for x in xs:
            middle = models[0](x)
            inner = middle.detach().requires_grad_()
            ends.append((middle, inner, models[1](torch.cat([inner, inner[:, :2]], dim=1)).square().mean()))
        for middle, inner, loss in ends:
            loss.backward()
            middle.backward(inner.grad)

    for step in range(3):
        xs = [batch(2 * step), batch(2 * step + 1)]
        microbatches(whole, xs)
        microbatches(stages, [x.chunk(world.size)[world.rank] for x in xs])
        for expected, stage in zip(whole, stages, strict=True):
            for param in expected.parameters():  # the mean over the ranks of the means over a stage's rows
                assert param.grad is not None
            compare(expected, stage, 1e-12, f"step {step}")
        step_all(*optimizers)
    assert all(stage.param_group.runtime.memory.in_use == 0 for stage in stages)
    refused("'Linear' is not sharded", lambda: shardrt.share_comm_ctx([nn.Linear(2, 2)]))


class Recomputed(UsedTwice):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in (*self.blocks, self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(1, 2, 3)
def test_a_module_called_twice_and_recomputed(world: World, reentrant: bool) -> None:
    model = Recomputed().double()
    model.reentrant = reentrant
    train_side_by_side(world, model, map(batch, range(4)), microbatches=2)


class Around(nn.Module):
    """Calls a module that others call as well."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 13)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.linear(x)))


class Sharing(OddMLP):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13))
        self.blocks = nn.ModuleList([Around(shared), Around(shared), *self.blocks, Around(shared)])


@pytest.mark.parametrize("reshard", [None, True, False])
@on_ranks(1, 2)
def test_a_sharded_module_inside_of_several_sharded_ones(world: World, reshard: bool | None) -> None:
    def shard(model: nn.Module) -> None:
        shardrt.fully_shard(model.blocks[0].shared, reshard_after_forward=reshard)
        shard_blocks(model, reshard_after_forward=reshard)

    model = train_side_by_side(world, Sharing().double(), map(batch, range(3)), shard=shard, microbatches=2)
    x = batch(4)
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x), rtol=0, atol=0)
    assert len(list(model.param_group.with_descendants())) == 8


class Layered(nn.Linear):
    def param_groups(self) -> list[dict[str, object]]:
        """As some models have it, for their optimizer."""
        return [{"params": [self.weight]}, {"params": [self.bias], "weight_decay": 0.0}]


@on_ranks(1, 2)
def test_a_submodule_with_param_groups_of_its_own(world: World) -> None:
    head = Layered(5, 3)
    model = shardrt.fully_shard(nn.Sequential(nn.Linear(4, 5), head))
    assert model(torch.ones(2, 4, device=world.device)).shape == (2, 3)
    assert len(head.param_groups()) == 2


def doubled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def negated(grad: torch.Tensor) -> None:
    grad.neg_()


HOOKED: list[dict[str, object]] = [
    {},
    {"mp_policy": shardrt.MixedPrecisionPolicy(reduce_dtype=torch.float64)},  # parameters of float32: cast after the reduction
    {"offload_policy": "elsewhere"},
]


@pytest.mark.parametrize("options", HOOKED)
@on_ranks(1, 2, 3)
def test_hooks_of_parameters(world: World, options: dict[str, object]) -> None:
    """Those of `register_hook` change the sharded gradient: registered before or after sharding, with gradients from before."""
    options = {name: Elsewhere(pin_memory=False) if name == "offload_policy" else value for name, value in options.items()}
    dtype, tolerance = (torch.float32, 1e-5) if "mp_policy" in options else (torch.float64, 1e-12)
    for bucket in (0, 1 << 20):
        whole = OddMLP().to(dtype)
        copied = copy.deepcopy(whole)
        handles = [model.inp.bias.register_hook(doubled) for model in (whole, copied)]
        calls: list[torch.Tensor] = []
        copied.out.bias.register_post_accumulate_grad_hook(calls.append)
        sharded = shard_blocks(copied, **options)
        for model in (whole, sharded):
            for param in (model.blocks[0].up.weight, model.blocks[1].scale, model.out.weight):
                param.register_hook(doubled)
                param.register_hook(negated)
        with buckets_of(bucket):
            for step in range(4):
                for model in (whole, sharded):
                    loss_of(model, batch(step).to(dtype)).backward()
                compare(whole, sharded, tolerance, f"step {step}, {options}, buckets of {bucket}")
                if step == 1:
                    whole.zero_grad()
                    sharded.zero_grad()
                if step == 2:
                    for handle in handles:
                        handle.remove()
        assert len(calls) == 4
        assert calls[0] is sharded.out.bias


@on_ranks(1, 2)
def test_hooks_that_return_something_else(world: World) -> None:
    model = shard_blocks(OddMLP().double())
    model.out.weight.register_hook(lambda grad: grad.to_local())
    with pytest.raises(TypeError, match=rf"hook of 'out.weight'.*Tensor \(rank {world.rank}\); expected None or a DTensor"):
        loss_of(model, batch(0)).backward()
    model.reset_iter_state()


@on_ranks(2)
def test_attributes_of_parameters(world: World) -> None:
    """What users mark parameters with, such as for an optimizer's groups, is on the sharded and the gathered ones as well."""
    model = OddMLP().double()
    model.inp.bias._no_weight_decay = True
    shard_blocks(model)
    seen = []
    model.inp.register_forward_pre_hook(lambda module, args: seen.append(module.bias._no_weight_decay))
    model(batch(0))
    model.reset_iter_state()
    model.float()
    assert seen == [True]
    assert [name for name, param in model.named_parameters() if getattr(param, "_no_weight_decay", False)] == ["inp.bias"]


class InPlace(nn.Module):
    """Writes to what sharded modules return, or, in them, to what they are given."""

    def __init__(self, write: Callable[[torch.Tensor], object], *, inside: bool) -> None:
        super().__init__()
        self.write, self.inside = write, inside
        self.inp = nn.Linear(5, 13)
        self.blocks = nn.ModuleList(WritesInput(write) if inside else nn.Linear(13, 13) for _ in range(3))
        self.out = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            if not self.inside:
                self.write(x)
        return self.out(x)


class WritesInput(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.linear = nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        return self.linear(x)


@pytest.mark.parametrize("inside", [False, True])
@on_ranks(1, 2)
def test_operations_in_place_between_sharded_modules(world: World, inside: bool) -> None:
    """A linear layer returns a view if its input has three dims: an operation in place takes its node out of the graph."""
    writes: list[Callable[[torch.Tensor], object]] = [
        torch.relu_,
        lambda x: x.mul_(2),
        lambda x: x[..., 1:4].mul_(3),
        lambda x: x.view(-1, 13)[0].add_(1),
    ]
    for index, write in enumerate(writes):
        for shape in ((4, 5), (2, 2, 5)):
            x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
            whole, sharded = paired(InPlace(write, inside=inside).double(), reshard_after_forward=True)
            for bucket in (0, 1 << 20):
                with buckets_of(bucket):
                    for model in (whole, sharded):
                        model(x).square().mean().backward()
                compare(whole, sharded, 1e-12, f"{index}, {shape}, buckets of {bucket}")
                whole.zero_grad()
                sharded.zero_grad()


@on_ranks(1, 2, 3)
def test_moved_and_cast_after_sharding(world: World) -> None:
    """To double and other dtypes with other layouts: ties are kept; parameters are new objects."""
    whole, model = paired(OddMLP())
    loss_of(model, batch(0).float()).backward()
    model.zero_grad()
    first = model.inp.weight
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.1)):
        whole.to(dtype)
        model.to(dtype)
        compare(whole, model, 0.0, "cast")
        assert {param.dtype for param in model.parameters()} == {dtype}
        for m in (whole, model):
            x = batch(1).to(dtype)
            loss_of(m, x if m is whole else x.chunk(world.size)[world.rank]).backward()
        compare(whole, model, tolerance, "trained")
        whole.zero_grad()
        model.zero_grad()
    assert model.inp.weight is not first
    kept = list(model.parameters())
    assert model.to("cpu") is model
    assert all(one is other for one, other in zip(kept, model.parameters(), strict=True))
    with torch.no_grad():
        kept[0].zero_()
    assert not model.unshard()
    assert not model.inp.weight.any()


@pytest.mark.parametrize("runs_again", [False, True])
@on_ranks(1, 2)
def test_moved_between_forward_and_backward(world: World, runs_again: bool) -> None:
    """The graph refers to parameters that are gone, also where a later forward has gathered the new ones."""
    model = shard_blocks(OddMLP())
    loss = loss_of(model, batch(0).float())
    model.double()
    if runs_again:
        loss_of(model, batch(0)).backward()
    refused(r"have moved to another dtype or device since the forward; run the forward again", loss.backward, RuntimeError)


@on_ranks(2)
def test_offload_is_free_on_the_cpu(world: World) -> None:
    _log_nothing_to_offload.cache_clear()  # another test of this job may have been the first
    shard: Callable[[nn.Module], object] = lambda m: shard_blocks(m, offload_policy=shardrt.CPUOffloadPolicy())  # noqa: E731
    with logged() as lines:
        train_side_by_side(world, OddMLP().double(), map(batch, range(2)), shard=shard)
    assert [line for line in lines if "CPUOffloadPolicy" in line] == [
        "CPUOffloadPolicy on a CPU mesh: everything is on the host already, nothing to do (logged once)"
    ] * (world.rank == 0)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@on_ranks(1, 2, 3)
def test_the_copies_of_an_offload(world: World, dtype: torch.dtype | None) -> None:
    """As on a GPU, shards are copied into the buffer, with a cast or without, and then gathered."""
    mp_policy = shardrt.MixedPrecisionPolicy(dtype, dtype)
    shard: Callable[[nn.Module], object] = lambda m: shard_blocks(  # noqa: E731
        m, offload_policy=Elsewhere(pin_memory=False), mp_policy=mp_policy
    )
    model = OddMLP().double()
    if dtype is None:
        model = train_side_by_side(world, model, map(batch, range(3)), shard=shard, microbatches=2)
    else:
        shard(model)
        loss_of(model, batch(0)).backward()
    assert all(group.offloads for group in model.param_group.with_descendants())
    assert model.param_group.runtime.memory.in_use == 0


@pytest.mark.parametrize("offload_policy", [None, Elsewhere(pin_memory=False)])
@on_ranks(1, 2)
def test_the_default_device_is_left_to_the_user(world: World, offload_policy: Elsewhere | None) -> None:
    """Inside `with torch.device(...)` the runtime still allocates its tensors on the right device."""
    whole, x = OddMLP().double(), batch(0)
    sharded = copy.deepcopy(whole)
    loss_of(whole, x).backward()
    with torch.device("meta"):
        shard_blocks(sharded, offload_policy=offload_policy)
        loss_of(sharded, x.chunk(world.size)[world.rank]).backward()
        shardrt.clip_grad_norm_(sharded.parameters(), 1.0)
    nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    compare(whole, sharded, 1e-7, "clipped")


@on_ranks(1, 2)
def test_gathers_wait_for_a_given_event(world: World) -> None:
    model = shard_blocks(OddMLP().double())
    for _ in range(2):
        model.set_post_optim_event(world.stream.record())
        loss_of(model, batch(0)).backward()
        assert model.param_group.root_settings.post_optim_event is None


@on_ranks(2, 3)
def test_parameters_that_are_not_contiguous(world: World) -> None:
    def strided(model: OddMLP) -> OddMLP:
        model.inp.weight = nn.Parameter(model.inp.weight.detach().t().contiguous().t())
        model.out.weight = nn.Parameter(model.out.weight.detach().repeat(1, 2)[:, ::2].clone().as_strided((3, 13), (1, 3)))
        return model

    model = strided(OddMLP().double())
    assert not model.inp.weight.is_contiguous()
    train_side_by_side(world, model, map(batch, range(3)))


@pytest.mark.parametrize("reshard", [True, False, 1])
@on_ranks(1, 2, 3)
def test_a_parameter_with_an_all_gather_extension(world: World, reshard: bool | int) -> None:
    """Gradient, optimizer step and gather equal those of a plain parameter rounded to float32; odd sizes."""
    whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model = copy.deepcopy(whole)
    model[0].weight = nn.Parameter(Narrow(model[0].weight.detach().clone()))
    shardrt.fully_shard(model[0], reshard_after_forward=reshard)
    shardrt.fully_shard(model)
    assert len(model[0].param_groups) == 2
    assert type(model[0].weight.to_local()) is Narrow
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for step in range(3):
        (whole(batch(step)) - 1).square().mean().backward()
        (model(batch(step).chunk(world.size)[world.rank]) - 1).square().mean().backward()
        for (name, expected), param in zip(whole.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6, msg=name)
        step_all(*optimizers)
    assert model.param_group.runtime.memory.in_use == 0
    other = nn.Sequential(nn.Linear(5, 7))
    other[0].weight = nn.Parameter(Narrow(other[0].weight.detach().clone()))
    with pytest.raises(ValueError, match=r"'0.weight': Shard.dim=1. of a Narrow; expected Shard"):
        shardrt.fully_shard(other, shard_placement_fn=lambda param: shardrt.Shard(param.dim() - 1))


@on_ranks(1, 2, 3)
def test_the_same_batch_on_every_rank_is_reported(world: World) -> None:
    """Once for each root, by rank 0, in the first forward in training; not if any rank has other values or none to compare."""

    def first_steps(inputs: list[object], **options: object) -> list[str]:
        """What is logged in forwards on these inputs and their backwards, of a new model."""
        model = shardrt.fully_shard(Taking(), **options)
        with mock.patch("shardrt.fsdp.schedule.same.same_batches._log.warning") as warning:
            with torch.no_grad():
                model(same)
            model.eval()(same)
            model.train()
            for given in inputs:
                model(given).backward()
            model.to(torch.float32)(same).backward()
        return [str(call.args[0]) for call in warning.mock_calls]

    same, other = batch(0), batch(world.rank)
    reports = world.rank == 0 and world.size > 1
    for given in (same, {"x": [same], "labels": torch.arange(3)}, (torch.tensor(True), same[:, ::2].t())):
        found = first_steps([given, same, same])
        assert len(found) == reports
        assert not reports or f"all {world.size} data-parallel ranks of 'Taking' got the same batch" in found[0]
    differ = [
        other,
        [same, other.long()],
        [same] * world.rank,
        same[world.rank :],
        same.to([torch.float64, torch.float32][0])[:0],
    ]
    for given in (*differ, 3.0, same.to("meta"), torch.eye(3).to_sparse(), None):
        assert not first_steps([given, same]) or world.size == 1
    assert not first_steps([same if world.rank else same.to_sparse()])
    mesh = shardrt.DeviceMesh(world.comm).unflatten((world.size, 1), ("replicate", "shard"))
    assert len(first_steps([same], mesh=mesh)) == reports
    with settings_of(world, check_batches=False):
        assert not first_steps([same])


class Taking(nn.Linear):
    """Takes anything."""

    def __init__(self) -> None:
        super().__init__(3, 3, dtype=torch.float64)

    def forward(self, given: object) -> torch.Tensor:
        return super().forward(torch.ones(2, 3, dtype=self.weight.dtype)).sum()


@on_ranks(4)
def test_tensor_parallel_ranks_share_a_batch(world: World) -> None:
    """Only the data-parallel ranks are compared: each of the two columns, which have the same rows here."""
    mesh = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for step, warned in ((0, True), (mesh["dp"].rank, False)):
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)).double()
        plan = {"0": shardrt.parallel.ColwiseParallel(), "1": shardrt.parallel.RowwiseParallel()}
        shardrt.parallel.parallelize_module(model, mesh["tp"], plan)
        shardrt.fully_shard(model, mesh=mesh["dp"])
        with mock.patch("shardrt.fsdp.schedule.same.same_batches._log.warning") as warning:
            model(batch(step)).sum().backward()
        assert warning.called == (warned and mesh["dp"].rank == 0)

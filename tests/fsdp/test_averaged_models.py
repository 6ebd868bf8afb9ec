"""Copies of sharded modules, and averages of weights: torch's `AveragedModel` and timm's moving average."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import World
from toys import OddMLP, TiedGPT, batch, check_backward, compare, loss_of, paired, shard_blocks, tokens, train_side_by_side


class WithBuffers(OddMLP):
    """Normalises its output, counts calls in a buffer; has another method, and an RNN, which keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.norm = nn.BatchNorm1d(3)
        self.rnn = nn.RNN(3, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.rnn(self.norm(super().forward(x)))[0][:, :3]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.inp(x)


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        yield tensor.to_local() if isinstance(tensor, shardrt.DTensor) else tensor


def stepped(model: nn.Module, x: torch.Tensor, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss_of(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2, 3)
def test_copy_trains_as_another_model_would(world: World) -> None:
    whole, model = paired(TiedGPT().double(), reshard_after_forward=False)
    loss_of(model, tokens(0)).backward()
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert copied.head.weight is copied.tokens.weight
    assert all(param.grad is None for param in copied.parameters())
    assert all(param.grad is not None for param in model.parameters())
    assert not {x.data_ptr() for x in tensors_of(model) if x.numel()} & {x.data_ptr() for x in tensors_of(copied)}
    model.zero_grad()
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    kept = copy.deepcopy(copied)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, copied)]
    for step in range(2):
        check_backward(world, whole, copied, tokens(step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(whole, copied, 1e-12, f"step {step}")
    copied(tokens(0))
    assert all(isinstance(value, shardrt.DTensor) for value in copied.state_dict().values())  # its hooks show its shards
    for unchanged in (model, kept):
        assert all(torch.equal(value.full_tensor(), before[name]) for name, value in unchanged.state_dict().items())
    train_side_by_side(world, TiedGPT().double(), [tokens(0)], shard=lambda new: adopt_as(new, copied))


def adopt_as(new: nn.Module, sharded: nn.Module) -> None:
    """Make `new` a copy of `sharded` that keeps its own values."""
    values = new.state_dict()
    made = copy.deepcopy(sharded)
    made.load_state_dict(values)
    new.__class__, new.__dict__ = type(made), {**made.__dict__, "stands_for": [made]}  # to which its groups refer weakly


@on_ranks(2)
def test_copy_keeps_settings_and_methods(world: World) -> None:
    policy = shardrt.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    model = WithBuffers()
    model.inp.weight.requires_grad = False
    shardrt.fully_shard(model.blocks[0], mp_policy=policy, reshard_after_forward=2)
    shardrt.fully_shard(model.blocks[1], mp_policy=policy)
    shardrt.fully_shard([model.inp, model.out], mp_policy=policy)
    shardrt.fully_shard(model, mp_policy=policy)
    shardrt.register_fsdp_forward_method(model, "first")
    model.set_prefetch_policy(shardrt.PrefetchPolicy(max_groups=3))
    model.blocks[1].set_modules_to_forward_prefetch([model.blocks[0]])
    model.inp.weight.kind = "frozen"
    x = batch(0).float()
    model.first(x)
    holder = nn.ModuleDict({"copied": model, "again": model.blocks[0]})
    made = copy.deepcopy(holder)
    copied = made["copied"]
    assert made["again"] is copied.blocks[0]
    assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [param.requires_grad for param in copied.parameters()] == [param.requires_grad for param in model.parameters()]
    assert copied.inp.weight.kind == "frozen"
    assert copied.param_group.mp_policy == policy
    assert copied.param_group.root_settings.prefetch == shardrt.PrefetchPolicy(max_groups=3)
    assert copied.blocks[0].param_group.settings.reshard_after_forward == 2
    assert copied.blocks[1].param_group.settings.forward_prefetch == [copied.blocks[0].param_group]
    assert copied.inp.param_group is copied.out.param_group
    assert {group.root for group in copied.param_group.with_descendants()} == {copied.param_group}
    assert all(group.runtime is None for group in copied.param_group.with_descendants())
    with torch.no_grad():
        copied.inp.bias.fill_(7.0)
        copied.rnn.weight_ih_l0.fill_(0.5)
        assert (copied.first(x) - model.first(x)).min() > 6  # each uses its own parameters
    assert torch.equal(copied.rnn._flat_weights[0].full_tensor(), torch.full((4, 3), 0.5))
    loss_of(copied, x).backward()
    assert copied.inp.bias.grad is not None
    assert model.inp.bias.grad is None
    assert int(copied.seen) == 1
    assert int(model.seen) == 0


@on_ranks(2, 3)
def test_what_cannot_be_copied(world: World) -> None:
    model = OddMLP()
    shardrt.fully_shard([model.inp, model.out])
    shardrt.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"deepcopy of a part of 'Linear' .*Linear, FSDPLinear.* not all of them are inside"):
        copy.deepcopy(model.inp)
    seen: list[str] = []

    def inside(module: nn.Module, args: object) -> None:
        try:
            copy.deepcopy(model)
        except RuntimeError as error:
            seen.append(str(error))

    model.blocks[0].register_forward_pre_hook(inside)
    model(batch(0).float())
    assert "deepcopy of 'OddMLP' in its forward" in seen[0]
    block = copy.deepcopy(shard_blocks(OddMLP()).blocks[0])  # a block of a sharded model: the copy is a root
    block(torch.ones(2, 13)).sum().backward()
    assert block.scale.grad is not None


@on_ranks(1, 2)
def test_what_cannot_be_pickled(world: World) -> None:
    """`torch.save` of a sharded module, or of one around it; a shallow copy, which would be a plain module."""
    model: Any = shard_blocks(OddMLP())
    for whole, name in ((model, "OddMLP"), (nn.ModuleDict({"net": model.blocks[1]}), "OddBlock")):
        with pytest.raises(TypeError, match=rf"'{name}' is sharded and cannot be pickled.* rank {world.rank} "):
            torch.save(whole, io.BytesIO())
    refused(r"nor copied by copy.copy.*copy.deepcopy", lambda: copy.copy(model), TypeError)
    model(batch(0).float())
    refused(r"'blocks.1' is sharded and cannot be pickled", lambda: torch.save(model.blocks[1], io.BytesIO()), TypeError)
    refused(r"DeviceMesh\(dp=.* cannot be pickled", lambda: torch.save(world.mesh, io.BytesIO()), TypeError)


def timm_update(average: nn.Module, model: nn.Module, decay: float, foreach: bool) -> None:
    """The update of timm's `ModelEmaV3`."""
    pairs = list(zip(average.state_dict().values(), model.state_dict().values(), strict=True))
    with torch.no_grad():
        floating = [(mine, theirs) for mine, theirs in pairs if mine.is_floating_point()]
        if foreach:
            torch._foreach_lerp_(*map(list, zip(*floating, strict=True)), weight=1.0 - decay)
        for mine, theirs in pairs:
            if not mine.is_floating_point():
                mine.copy_(theirs)
            elif not foreach:
                mine.lerp_(theirs, weight=1.0 - decay)


def averages(model: nn.Module, kind: str) -> Any:
    if kind == "ema":
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    if kind == "function":
        return AveragedModel(model, avg_fn=lambda mine, theirs, seen: (mine * seen + theirs) / (seen + 1))
    return AveragedModel(model) if kind == "mean" else copy.deepcopy(model).eval()


@on_ranks(3, more=(2,))
@pytest.mark.parametrize("kind", ["mean", "function", "ema", "timm", "timm foreach"])
def test_averages_are_those_of_a_plain_model(world: World, kind: str) -> None:
    whole = WithBuffers().double()
    models = (whole, shard_blocks(copy.deepcopy(whole)))
    kept = [averages(model, kind) for model in models]
    for step in range(3):
        for model, average in zip(models, kept, strict=True):
            stepped(model, batch(step))
            if isinstance(average, AveragedModel):
                average.update_parameters(model)
            else:
                timm_update(average, model, 0.8, foreach=kind.endswith("foreach"))
            average.eval()
        with torch.no_grad():
            outputs = [average(batch(9)) for average in kept]  # with the averages just written
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    plain, sharded = [getattr(average, "module", average) for average in kept]
    compare(plain, sharded, 1e-12, kind)
    for (name, expected), found in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_copies_keep_what_belongs_together(world: World) -> None:
    """A copied optimizer belongs to the copied model, also if it is copied first; a root inside a root stays a root."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
    shardrt.fully_shard(model[0])
    shardrt.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper, copied = copy.deepcopy((optimizer, model))
    assert {id(p) for p in stepper.param_groups[0]["params"]} == {id(p) for p in copied.parameters()}
    model.teacher = copy.deepcopy(model)
    x = torch.randn(2, 4, dtype=torch.float64)
    expected = model.teacher(x)
    twice = copy.deepcopy(model)
    assert torch.equal(twice.teacher(x), expected)
    assert twice.teacher[0].param_group.root is twice.teacher.param_group

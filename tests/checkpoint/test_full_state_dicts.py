"""Full and sharded state dicts of models and optimizers, beside those of plain models and of torch's own functions."""

from __future__ import annotations

import copy
import dataclasses
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions as TorchOptions
from torch.testing._internal.two_tensor import TwoTensor

import shardrt
import toys_tp
from checkpoints import shared_folder, whole
from ranks import on_ranks, refused
from shardrt import checkpoint
from shardrt.checkpoint import (
    CheckpointError,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardrt.checkpoint.state_dicts.get import full_optimizer_state
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import parallelize_module
from toys import OddMLP, TiedGPT, logged, paired, shard_blocks, step_all

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def grads_of(step: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a step, the same on every rank."""
    torch.manual_seed(step)
    return {name: torch.randn(param.shape, dtype=param.dtype) for name, param in model.named_parameters()}


def make_step(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    grads = grads_of(step, model)
    for name, param in model.named_parameters():
        set_grad(param, grads[name])
    step_all(optimizer)


def set_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    param.grad = grad
    if isinstance(param, shardrt.DTensor):
        param.grad = shardrt.distribute_tensor(grad, param.device_mesh, param.placements)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, the first without weight decay."""
    params = list(model.parameters())
    flat, rest = ([param for param in params if (param.dim() < 2) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": rest, "lr": 0.03}], lr=0.1)


def check_equal(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested state dicts, bit by bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            check_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            check_equal(one, other, f"{where}.{index}")
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor, where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def small() -> nn.Module:
    return OddMLP(layers=1)


def on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


class Live:
    """Full tensors that exist."""

    def __init__(self) -> None:
        self._tensors: WeakSet[torch.Tensor] = WeakSet()
        self.most = 0

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._tensors.add(tensor)
        self.most = max(self.most, len([each for each in self._tensors if each.numel()]))
        return tensor


@contextmanager
def counted() -> Iterator[Live]:
    live, full_tensor = Live(), shardrt.DTensor.full_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardrt.DTensor, "full_tensor", lambda self: live.add(full_tensor(self)))
        yield live


@pytest.mark.parametrize("kind", [small, TiedGPT])
@on_ranks(1, 3)
def test_full_ones_continue_in_a_plain_process(world: World, kind: Callable[[], nn.Module]) -> None:
    """What rank 0 saves with torch.save, a plain model and AdamW load with torch's functions, and step bitwise alike."""
    whole, model = paired(kind())
    optimizers = [adamw(each) for each in (whole, model)]
    for step in range(2):
        make_step(step, whole, optimizers[0])
        make_step(step, model, optimizers[1])
    with counted() as live:
        state, optimizer_state = get_state_dict(model, optimizers[1], options=ON_RANK_0)
    if world.rank:
        assert not state
        assert not optimizer_state
        assert live.most == 1
    else:
        buffer = io.BytesIO()
        torch.save((state, optimizer_state), buffer)
        buffer.seek(0)
        plain = kind()
        optimizer = adamw(plain)
        state, optimizer_state = torch.load(buffer, weights_only=True)
        check_equal(state, dict(whole.state_dict()))
        check_equal(optimizer_state, torchs.get_optimizer_state_dict(whole, optimizers[0]))
        plain.load_state_dict(state)
        torchs.set_optimizer_state_dict(plain, optimizer, optimizer_state)
        make_step(2, plain, optimizer)
        make_step(2, whole, optimizers[0])
        check_equal(dict(plain.state_dict()), dict(whole.state_dict()))
    world.barrier()


@pytest.mark.parametrize("kind", [small, TiedGPT])
@on_ranks(2, more=(4,))
def test_plain_ones_continue_on_ranks(world: World, kind: Callable[[], nn.Module]) -> None:
    """From rank 0 onto a meta model, from every rank, and sharded otherwise; in one dict too, and in other groups."""
    whole = kind()
    optimizer = adamw(whole)
    make_step(0, whole, optimizer)
    state, optimizer_state = copy.deepcopy(torchs.get_state_dict(whole, optimizer))
    flat_form = TorchOptions(flatten_optimizer_state_dict=True)
    flat = copy.deepcopy(torchs.get_optimizer_state_dict(whole, optimizer, options=flat_form))
    make_step(1, whole, optimizer)
    replicas = 2 if world.size % 2 == 0 else 1
    hybrid = DeviceMesh(world.comm, (replicas, world.size // replicas), ("replicate", "shard"))
    for options, given, mesh in ((BROADCAST, optimizer_state, None), (FULL, flat, hybrid), (BROADCAST, flat, None)):
        models = [shard_blocks(on_meta(kind), mesh=each) for each in (mesh, hybrid if mesh is None else None)]
        optimizers = [adamw(model) for model in models]
        mine = options is FULL or world.rank == 0
        of_model, of_optimizer = (state, given) if mine else ({}, {})
        for model, made in zip(models, optimizers, strict=True):
            keys = set_state_dict(model, made, model_state_dict=of_model, optim_state_dict=of_optimizer, options=options)
            assert keys == ([], [])
            options, (of_model, of_optimizer) = StateDictOptions(), get_state_dict(model, made)
            assert any(isinstance(value, shardrt.DTensor) for value in of_model.values())
        for model, made in zip(models, optimizers, strict=True):
            make_step(1, model, made)
            check_equal(get_model_state_dict(model, options=FULL), dict(whole.state_dict()))
            check_equal(get_optimizer_state_dict(model, made, options=FULL), torchs.get_optimizer_state_dict(whole, optimizer))


@on_ranks(1, 2)
def test_options_are_those_of_torch(world: World) -> None:
    """Names and values are those that torch's functions return for a plain model; its options are taken as well."""
    whole = OddMLP()
    whole.inp.requires_grad_(False)
    model = shard_blocks(copy.deepcopy(whole))
    optimizers = [torch.optim.SGD(each.get_submodule("blocks").parameters(), lr=0.1, momentum=0.9) for each in (whole, model)]
    for each, optimizer in zip((whole, model), optimizers, strict=True):
        for name, grad in grads_of(0, each).items():
            if each.get_parameter(name).requires_grad:
                set_grad(each.get_parameter(name), grad)
        optimizer.step()
    choices: list[dict[str, Any]] = [
        {},
        {"ignore_frozen_params": True},
        {"flatten_optimizer_state_dict": True},
        {"cpu_offload": True},
    ]
    for chosen in choices:
        options = TorchOptions(full_state_dict=True, **chosen)
        expected = torchs.get_state_dict(whole, optimizers[0], options=options)
        found = get_state_dict(model, optimizers[1], options=options)
        if world.rank == 0 or not options.cpu_offload:
            check_equal(list(found), list(expected))
    for keep in (True, False):
        options = TorchOptions(keep_submodule_prefixes=keep)
        with pytest.warns(FutureWarning, match="submodules"):
            names = torchs.get_model_state_dict(whole, submodules={whole.get_submodule("blocks.1")}, options=options).keys()
        assert get_model_state_dict(model, submodules={model.get_submodule("blocks.1")}, options=options).keys() == names
    sharded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(isinstance(value, shardrt.DTensor) and value.device.type == "cpu" for value in sharded.values())
    assert get_optimizer_state_dict(model, optimizers[1], submodules={model.get_submodule("blocks.1")})["state"]
    with pytest.raises(ValueError, match="dsd_fqn_modifiers='other': expected torch's default"):
        get_model_state_dict(model, options=TorchOptions(dsd_fqn_modifiers="other"))
    refused(r"broadcast_from_rank0=True.: expected full_state_dict=True", lambda: StateDictOptions(broadcast_from_rank0=True))


@on_ranks(4)
def test_tensor_parallel(world: World) -> None:
    """From and to models that are split over a plane of ranks, each otherwise."""
    whole = toys_tp.Transformer()

    def split(model: nn.Module, tp: int) -> nn.Module:
        mesh = DeviceMesh(world.comm, (world.size // tp, tp), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], toys_tp.plain_plan())
        return shard_blocks(model, "layers", mesh=mesh["dp"])

    model, other = split(copy.deepcopy(whole), 2), split(on_meta(toys_tp.Transformer), 4)
    optimizers = [adamw(each) for each in (model, other)]
    make_step(0, model, optimizers[0])
    expected = get_state_dict(model, optimizers[0], options=FULL)
    for options in (BROADCAST, FULL):
        given = expected if options is FULL or world.rank == 0 else ({}, {})
        set_state_dict(other, optimizers[1], model_state_dict=given[0], optim_state_dict=given[1], options=options)
        check_equal(get_state_dict(other, optimizers[1], options=FULL), expected)
    plain = adamw(whole)
    make_step(0, whole, plain)
    check_equal(expected, (dict(whole.state_dict()), torchs.get_optimizer_state_dict(whole, plain)))


class WithExtra(OddMLP):
    step = 0

    def get_extra_state(self) -> Any:
        return {"step": self.step}

    def set_extra_state(self, state: Any) -> None:
        self.step = state["step"]


class Compiled(nn.Module):
    """Has the names that `torch.compile` gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


@on_ranks(2)
def test_wrappers_leave_names_as_they_are_and_extra_state_is_sent(world: World) -> None:
    whole = WithExtra()
    whole.step = 3
    model = shard_blocks(copy.deepcopy(whole))
    state = get_model_state_dict(Compiled(model), options=FULL)
    check_equal(state, dict(whole.state_dict()))
    other = shard_blocks(on_meta(WithExtra))
    set_model_state_dict(nn.Sequential(Compiled(other)), {f"0.{k}": v for k, v in state.items()}, options=BROADCAST)
    assert other.step == 3
    check_equal(get_model_state_dict(other, options=FULL), dict(whole.state_dict()))


class WithEverything(OddMLP):
    """Beside sharded parameters: a plain one, buffers of which one has two names, a scalar parameter, and extra state."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.plain, self.scalar = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(2.0))
        mean = torch.zeros(4)
        self.register_buffer("mean", mean)
        self.register_buffer("same", mean)
        self.extra: dict[str, Any] = {"seen": [1], "scale": torch.ones(2), "names": {"a"}}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def change_in_place(value: Any) -> None:
    """Change whatever can be changed of nested values."""
    if isinstance(value, dict):
        for each in value.values():
            change_in_place(each)
    elif isinstance(value, set):
        value.add("changed")
    elif isinstance(value, list):
        for each in value:
            change_in_place(each)
        value.append("changed")
    elif isinstance(value, torch.Tensor):
        value.detach().add_(1)


def snapshot(state: Any) -> Any:
    """A copy of nested values, with the shards of sharded tensors."""
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [snapshot(value) for value in state]
    local = state.to_local() if isinstance(state, shardrt.DTensor) else state
    return local.clone() if isinstance(local, torch.Tensor) else copy.deepcopy(local)


@pytest.mark.parametrize("chosen", ["full_state_dict", "cpu_offload", "full_state_dict cpu_offload"])
@on_ranks(1, 2)
def test_full_and_offloaded_state_dicts_are_copies(world: World, chosen: str) -> None:
    """Nothing that happens to the model and the optimizer afterwards changes them."""
    whole = WithEverything()
    model = shard_blocks(whole, ignored_params={whole.plain})
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["of_user"] = [0.9, 0.99], {"history": [0.1]}
    make_step(0, model, optimizer)
    options = StateDictOptions(**dict.fromkeys(chosen.split(), True))
    flat = dataclasses.replace(options, flatten_optimizer_state_dict=True)
    states = [*get_state_dict(model, optimizer, options=options), get_optimizer_state_dict(model, optimizer, options=flat)]
    if states[0]:
        assert states[0]["mean"] is states[0]["same"]
    before = [snapshot(state) for state in states]
    make_step(1, model, optimizer)
    change_in_place([each for group in optimizer.param_groups for key, each in group.items() if key != "params"])
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if isinstance(tensor, shardrt.DTensor) else tensor).add_(1)
    change_in_place(whole.extra)
    for state, expected in zip(states, before, strict=True):
        check_equal(snapshot(state), expected)


@on_ranks(1)
def test_the_copy_of_a_tensor_subclass_is_one_too(world: World) -> None:
    """State of 8-bit optimizers is of this kind; not every such class has an operation `clone`."""
    parts = torch.ones(2), torch.zeros(2)
    model = nn.Linear(2, 2)
    codes: Any = TwoTensor(*parts)
    model.register_buffer("codes", codes)
    copied = get_model_state_dict(model, options=ON_RANK_0)["codes"]
    for part in parts:
        part.add_(3)
    assert type(copied) is TwoTensor
    check_equal([copied.a, copied.b], [torch.ones(2), torch.zeros(2)])


@on_ranks(1, 2)
def test_what_does_not_fit_is_listed_on_all_ranks(world: World) -> None:
    model = shard_blocks(OddMLP())
    before = get_model_state_dict(model, options=FULL)
    state = {name: torch.zeros_like(value) for name, value in before.items()}
    state["extra"] = state.pop("inp.bias")
    optimizer = adamw(model)
    make_step(0, model, optimizer)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=FULL)
    for options in (FULL, BROADCAST):
        mine = state if options is FULL or world.rank == 0 else {}
        with pytest.raises(
            CheckpointError, match=r"the state dict does not fit the model: missing: 'inp.bias'. unexpected: 'extra'"
        ):
            set_model_state_dict(model, mine, options=options)
        foreign = {**mine, **{f"foreign.{number}": torch.ones(1) for number in range(3000)}} if mine else {}
        with pytest.raises(CheckpointError, match=r"unexpected: 'extra', 'foreign.0', .*, and 2981 more.") as caught:
            set_model_state_dict(model, foreign, options=options)
        assert len(str(caught.value)) < 1000
        wrong = {**mine, "inp.bias": torch.ones(3)} if mine else {}
        with pytest.raises(CheckpointError, match=r"'inp.bias': expected shape \(13,\), found \(3,\)"):
            set_model_state_dict(model, wrong, options=options)
        lacking = {**of_optimizer, "state": {}, "param_groups": of_optimizer["param_groups"][1:]}
        with pytest.raises(CheckpointError, match=r"the optimizer's state dict lacks .*blocks.0.norm.weight"):
            set_optimizer_state_dict(model, optimizer, lacking if mine else {}, options=options)
    keys = set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    assert keys == (["inp.bias"], ["extra"])
    with pytest.raises(CheckpointError, match="TypeError: broadcast_from_rank0 of a sharded tensor"):
        set_model_state_dict(model, model.state_dict(), options=BROADCAST)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.5),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}


@pytest.mark.parametrize("name", [*OPTIMIZERS])
@on_ranks(1, 2)
def test_a_new_optimizer_is_resumed_by_its_state_dict(world: World, name: str) -> None:
    """As in torch's recipe: get the state dicts of what is new, load into them, and set them."""
    made = [shard_blocks(OddMLP()) for _ in range(2)]
    saved, new = (OPTIMIZERS[name](model.parameters()) for model in made)
    grads = grads_of(0, made[0])
    del grads["inp.bias"]  # has no gradient, and no state
    for param_name, grad in grads.items():
        set_grad(made[0].get_parameter(param_name), grad)
    saved.step()
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        before, numbers = {k: v.clone() for k, v in get_model_state_dict(made[1], options=FULL).items()}, torch.get_rng_state()
        of_optimizer = get_optimizer_state_dict(made[1], new, options=options)
        assert torch.equal(numbers, torch.get_rng_state())
        assert not new.state
        assert all(param.grad is None for param in made[1].parameters())
        check_equal(get_model_state_dict(made[1], options=FULL), before)
        if not flat and name != "SGD":
            assert bool((whole(of_optimizer["state"]["inp.weight"]["step"]) == 0).all())
        with shared_folder(world) as folder:
            checkpoint.save(folder / "saved", {"optimizer": get_optimizer_state_dict(made[0], saved, options=options)})
            checkpoint.load(folder / "saved", {"optimizer": of_optimizer})
        set_optimizer_state_dict(made[1], new, of_optimizer)
        expected, found = (get_optimizer_state_dict(*pair, options=FULL) for pair in ((made[0], saved), (made[1], new)))
        found["state"].pop("inp.bias", None)
        check_equal(found, expected)
        new = OPTIMIZERS[name](made[1].parameters())


@on_ranks(1)
def test_a_parameter_in_two_optimizers(world: World) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="parameter 'bias' is in optimizer 1 and in an earlier one"):
        get_optimizer_state_dict(model, [adamw(model), torch.optim.SGD([model.bias])])


@pytest.mark.parametrize("form", ["full", "broadcast", "sharded"])
@on_ranks(1, 2)
def test_a_tied_parameter_with_two_values(world: World, form: str) -> None:
    """The values of one name would be lost; a warning names it where the load is not strict."""
    loose = TiedGPT()
    loose.head.weight = nn.Parameter(loose.head.weight.detach() + 1)
    model, before = shard_blocks(TiedGPT()), loose.state_dict()
    for other in (shard_blocks(loose), model) if form == "sharded" else (None,):
        given = before if other is None else get_model_state_dict(other)
        options = {"full": FULL, "broadcast": BROADCAST}.get(form, StateDictOptions())
        mine = given if form != "broadcast" or world.rank == 0 else {}
        if other is model:  # one tensor under both names
            set_model_state_dict(model, mine, options=options)
            break
        with pytest.raises(CheckpointError, match=r"'tokens.weight' and 'head.weight' have different values"):
            set_model_state_dict(model, mine, options=options)
        loosely = dataclasses.replace(options, strict=False)
        with logged() as said:
            set_model_state_dict(model, mine, options=loosely)
        assert len(said) == (world.rank == 0)
        assert all("those of 'head.weight' are lost" in text for text in said)
        expected = whole(before["tokens.weight"].detach())
        assert torch.equal(whole(model.get_parameter("head.weight").detach()), expected)


@on_ranks(1)
def test_hyperparameters_that_are_almost_equal(world: World) -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [param], "lr": torch.tensor(lr)} for param, lr in zip(model.parameters(), (0.7, 0.70001), strict=True)]
    state = get_optimizer_state_dict(model, torch.optim.SGD(groups))
    other = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    set_optimizer_state_dict(model, other, state)
    check_equal(other.param_groups[0]["lr"], torch.tensor(0.1))


class WithoutMemory(OddMLP):
    def _init_weights(self, module: nn.Module) -> None:
        if shardrt.world().rank == 1:
            raise RuntimeError("out of memory")


@on_ranks(2)
def test_memory_that_one_rank_lacks_is_an_error_on_all(world: World) -> None:
    state = OddMLP().state_dict()
    model = on_meta(WithoutMemory)
    model.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    refused("rank 1 raised RuntimeError: out of memory", lambda: set_model_state_dict(model, state), CheckpointError)


@on_ranks(2)
def test_a_plain_meta_model_stays_tied(world: World) -> None:
    whole = TiedGPT()
    optimizer = adamw(whole)
    make_step(0, whole, optimizer)
    state, optimizer_state = get_state_dict(whole, optimizer)
    model = on_meta(TiedGPT)
    made = adamw(model)
    set_state_dict(model, made, model_state_dict=state, optim_state_dict=optimizer_state)
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")
    make_step(1, model, made)
    make_step(1, whole, optimizer)
    check_equal(dict(model.state_dict()), dict(whole.state_dict()))


@on_ranks(2)
def test_optimizers_are_set_from_a_generator_by_other_names_and_with_tensors_as_hyperparameters(world: World) -> None:
    model = TiedGPT()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor([0.7]), foreach=False)
    make_step(0, model, optimizer)
    state, saved = get_state_dict(model, optimizer, options=FULL)
    saved["state"]["head.weight"] = saved["state"].pop("tokens.weight")
    names = saved["param_groups"][0]["params"]
    names[names.index("tokens.weight")] = "head.weight"
    other = torch.optim.Adam([model.tokens.weight], lr=torch.tensor([0.1]), foreach=False)
    mine = (state, saved) if world.rank == 0 else ({}, {})
    set_state_dict(model, (each for each in [other]), model_state_dict=mine[0], optim_state_dict=mine[1], options=BROADCAST)
    check_equal(other.param_groups[0]["lr"], torch.tensor([0.7]))
    check_equal(other.state[model.tokens.weight], saved["state"]["head.weight"])


@on_ranks(2)
def test_optimizer_state_of_a_wrong_shape_on_one_rank(world: World) -> None:
    model = OddMLP()
    optimizer = adamw(model)
    make_step(0, model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    if world.rank == 1:
        state["state"]["out.weight"]["exp_avg"] = torch.zeros(7, 7)
    with pytest.raises(CheckpointError, match=r"'exp_avg' of parameter 'out.weight': expected shape \(3, 13\), found \(7, 7\)"):
        set_optimizer_state_dict(model, optimizer, state)


@on_ranks(2)
def test_hyperparameters_of_other_groups(world: World) -> None:
    """A group takes those of the saved group that its parameters were in; of several different ones it takes none."""
    model = shard_blocks(OddMLP())
    saved = adamw(model)
    make_step(0, model, saved)
    state = get_optimizer_state_dict(model, saved, options=FULL)
    names = dict(model.named_parameters())
    groups = [[names["out.weight"]], [param for name, param in names.items() if name != "out.weight"]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=7.0)
    with logged() as records:
        set_optimizer_state_dict(model, optimizer, state, options=FULL)
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 7.0]
    assert re.search(
        r"param_groups.1: its parameters were in saved groups with different hyper.*keeps its own \(lr=7.0", records[0]
    )
    loaded = get_optimizer_state_dict(model, optimizer, options=FULL)
    check_equal(loaded["state"], state["state"])


class Momentum(torch.optim.Optimizer):
    """Steps on plain tensors only, and counts in blocks if `blocks` is set."""

    def __init__(self, params: Any, *, blocks: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.blocks = blocks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(param, memory_format=torch.contiguous_format))
                param -= 0.1 * momentum.mul_(0.9).add_(param.grad)
                if self.blocks:
                    state.setdefault("norms", torch.zeros(3))


@on_ranks(1, 2, 3)
def test_optimizers_that_step_on_local_shards(world: World) -> None:
    """Their state is full too, unless it depends on where shards begin; some ranks have no elements of a parameter."""
    whole = OddMLP()
    model, other = shard_blocks(copy.deepcopy(whole)), shard_blocks(copy.deepcopy(whole))
    plain = Momentum(whole.parameters())
    make_step(0, whole, plain)
    shardrt.register_local_optimizer(Momentum)
    optimizers = [Momentum(each.parameters()) for each in (model, other)]
    make_step(0, model, optimizers[0])
    state, optimizer_state = get_state_dict(model, optimizers[0], options=FULL)
    check_equal(optimizer_state, torchs.get_optimizer_state_dict(whole, plain))
    check_equal(full_optimizer_state(optimizers[0], keep=True), plain.state_dict())
    set_state_dict(other, optimizers[1], model_state_dict=state, optim_state_dict=optimizer_state, options=FULL)
    make_step(1, whole, plain)
    make_step(1, other, optimizers[1])
    check_equal(get_model_state_dict(other, options=FULL), dict(whole.state_dict()))
    blocks = Momentum(model.parameters(), blocks=True)
    make_step(1, model, blocks)
    with pytest.raises(RuntimeError, match=r"'norms@rank\d+of\d+' of parameter '.*' depends on where the shards begin"):
        get_optimizer_state_dict(model, blocks, options=FULL)

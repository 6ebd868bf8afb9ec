"""Steps of torch's elementwise optimizers: the bits of a step on `DTensor`s, without dispatching operations on them."""

import copy
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardrt
from ranks import on_ranks
from shardrt.comm import World
from shardrt.tensor.optimizers.elementwise_optimizers import _exchanging, is_elementwise
from shardrt.torch_internals import exchange_step
from toys import OddMLP, batch, loss_of, shard_blocks, without_scalars

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    "adamw by default": (torch.optim.AdamW, {}),
    "adamw": (torch.optim.AdamW, {"foreach": True, "maximize": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adamw with a tensor": (torch.optim.AdamW, {"foreach": False, "lr": torch.tensor(1e-2)}),
    "adamax": (torch.optim.Adamax, {"foreach": True}),
    "asgd": (torch.optim.ASGD, {"foreach": True}),
    "nadam": (torch.optim.NAdam, {"foreach": True}),
    "radam": (torch.optim.RAdam, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"foreach": True, "momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "momentum": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "momentum fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
}


class DispatchedOperations(TorchDispatchMode):
    """Collects the names of the operations on `DTensor`s."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if shardrt.DTensor in types:
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def dispatched(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer with an `_init_group` of its own, which therefore runs on the `DTensor`s."""
    init_group = kind._init_group
    return type("Dispatched", (kind,), {"_init_group": lambda self, *lists: init_group(self, *lists)})


def sharded_model() -> nn.Module:
    torch.manual_seed(0)
    by_columns = lambda param: shardrt.Shard(1) if param.shape == (3, 13) else None  # noqa: E731
    return shard_blocks(without_scalars(OddMLP().double()), shard_placement_fn=by_columns)


def backward(world: World, model: nn.Module, plain: nn.Parameter, step: int, *, late: bool) -> None:
    loss_of(model, batch(step).chunk(world.size)[world.rank]).backward()
    plain.grad = torch.full_like(plain, step + 1.0)
    if late and step == 0:  # some state is made later
        model.get_submodule("out").bias.grad = None


def bits(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters and their state, local."""
    found = []
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        for value in (param.detach(), *(optimizer.state[param][key] for key in sorted(optimizer.state[param]))):
            sharded = isinstance(value, shardrt.DTensor)
            assert not sharded or value.spec == param.spec
            assert sharded == (isinstance(param, shardrt.DTensor) and value.shape == param.shape)
            found.append(value.to_local() if sharded else value)
    return found


@pytest.mark.parametrize("name", KINDS)
@on_ranks(1, 2, more=(3,))
def test_the_bits_of_a_step_on_dtensors(world: World, name: str) -> None:
    """Odd sizes, empty shards, columns, a plain parameter in the list, a state dict loaded on the way."""
    kind, options = KINDS[name]
    models = [sharded_model() for _ in range(2)]
    plain = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in models]
    make: list[Callable[..., torch.optim.Optimizer]] = [kind, dispatched(kind)]
    optimizers = [f([*m.parameters(), p], **options) for f, m, p in zip(make, models, plain, strict=True)]
    for step in range(4):
        for model, extra in zip(models, plain, strict=True):
            backward(world, model, extra, step, late=name != "momentum fused")  # for which torch has no late state
        before = [param._version for param in models[0].parameters()]
        with DispatchedOperations() as seen:
            optimizers[0].step()
        optimizers[1].step()
        changed = [param._version > old for param, old in zip(models[0].parameters(), before, strict=True)]
        assert changed == [param.grad is not None for param in models[0].parameters()]
        if step > 1:  # all state is there
            assert seen.names <= {"aten::detach"}, seen.names
        for mine, expected in zip(*map(bits, optimizers), strict=True):
            assert torch.equal(mine, expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@on_ranks(2)
def test_hooks_closures_and_interruptions(world: World) -> None:
    """Users see sharded parameters in every hook, and what a hook or a closure changes counts."""
    model, reference = sharded_model(), sharded_model()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=9.0), torch.optim.SGD(reference.parameters(), lr=0.1)
    seen: list[nn.Parameter] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.extend(param for group in optimizer.param_groups for param in group["params"])
        for param in model.parameters():
            param.grad = None
        optimizer.param_groups[0]["lr"] = 0.1

    def closure() -> torch.Tensor:
        loss = loss_of(model, batch(0).chunk(world.size)[world.rank])
        loss.backward()
        return loss

    def failing() -> torch.Tensor:
        raise KeyError("the loss")

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.extend(optimizer.param_groups[0]["params"]))
    with pytest.raises(KeyError):
        optimizer.step(failing)
    optimizer.step(closure)
    loss_of(reference, batch(0).chunk(world.size)[world.rank]).backward()
    expected.step()
    assert [id(param) for param in seen] == [id(param) for param in model.parameters()] * 3
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(param, shardrt.DTensor)
        assert torch.equal(param.to_local(), other.to_local())


def test_which_optimizers_are_elementwise() -> None:
    class Named(torch.optim.AdamW):
        pass

    adamw: Any = torch.optim.AdamW

    class OwnLists(torch.optim.AdamW):
        @functools.wraps(adamw._init_group)
        def _init_group(self, *lists: Any) -> Any:
            return adamw._init_group(self, *lists)

    plain = [nn.Parameter(torch.ones(3))]
    for made in (torch.optim.AdamW, Named, OwnLists):
        made(plain)  # torch wraps the class's step now
    assert is_elementwise(Named)
    assert is_elementwise(torch.optim.Adam)
    for kind in (OwnLists, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon):
        assert not is_elementwise(kind)


@on_ranks(1)
def test_subclasses_and_hooks_see_the_optimizer(world: World) -> None:
    """A step of the user's own around torch's, and hooks with torch's arguments, which they may change."""

    wraps_step: Any = functools.wraps(torch.optim.AdamW.step)

    class Logged(torch.optim.AdamW):
        @wraps_step
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = sharded_model()
    optimizer = Logged(model.parameters())
    seen: list[object] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        args[0].param_groups[0]["lr"] = 0.0
        args[0].param_groups[0]["weight_decay"] = 0.0
        seen.append(args[0])
        return args, kwargs

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(args[0]))
    for step in range(3):
        loss_of(model, batch(step)).backward()
        old = [param.to_local().clone() for param in model.parameters()]
        with DispatchedOperations() as operations:
            optimizer.step()
        assert all(torch.equal(a, b.to_local()) for a, b in zip(old, model.parameters(), strict=True))
        optimizer.zero_grad()
    assert operations.names <= {"aten::detach"}
    assert seen
    assert all(each is optimizer for each in seen)


def test_a_class_that_torch_has_hooked_already() -> None:
    """Its hooks stay outermost, and are called once; what holds the step follows."""

    class Hooked(torch.optim.Optimizer):
        step = FunctionType(_step.__code__, {**globals(), "__name__": "torch.optim.hooked"}, "_step", (None,))

    _seen.clear()
    optimizer = Hooked([nn.Parameter(torch.ones(3))], {})
    optimizer.register_step_pre_hook(lambda *args: _seen.append("before"))
    held, hooked = optimizer.step, Hooked.step
    exchange_step(Hooked, _exchanging)
    assert Hooked.step is hooked
    Hooked([nn.Parameter(torch.ones(3))], {})
    optimizer.step()
    held()
    assert _seen == ["before", "step"] * 2
    with_exchange = [cell.cell_contents for cell in hooked.__closure__ or () if isinstance(cell.cell_contents, FunctionType)]
    assert [each.__name__ for each in with_exchange] == ["_step"]
    assert with_exchange[0].__wrapped__.__code__ is _step.__code__


_seen: list[str] = []


def _step(optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
    _seen.append("step")


def test_a_step_that_others_have_put_into_the_class_is_left_alone() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    raw = vars(Mine)["step"]
    exchange_step(Mine, _exchanging)
    assert vars(Mine)["step"] is raw
    Mine([nn.Parameter(torch.ones(3))], lr=0.1)
    hooked = Mine.step

    @functools.wraps(hooked)  # it says that it is hooked, too
    def around(self: Any, *args: Any) -> Any:
        return hooked(self, *args)

    Mine.step = around
    exchange_step(Mine, _exchanging)
    assert Mine.step is around
    assert [cell.cell_contents for cell in hooked.__closure__ or () if isinstance(cell.cell_contents, FunctionType)] == [raw]


@on_ranks(1)
def test_compiled_steps(world: World) -> None:
    """The compiler traces torch's class."""
    model, reference = (shardrt.fully_shard(nn.Linear(4, 4)) for _ in range(2))
    with torch.no_grad():
        for param in (*model.parameters(), *reference.parameters()):
            param.fill_(0.1)
    optimizer, expected = (torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (model, reference))
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(2):
        for each in (model, reference):
            each(torch.full((2, 4), step + 1.0)).sum().backward()
        compiled()
        expected.step()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.to_local(), other.to_local())

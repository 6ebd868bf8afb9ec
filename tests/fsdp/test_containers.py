"""What a sharded module does to its arguments: to lists, dicts and other containers, and to tensors themselves."""

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused
from shardrt import MixedPrecisionPolicy
from shardrt.comm import World
from toys import buckets_of, compare, shard_blocks

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    seen: list[torch.Tensor]
    made: int = 0
    y: Any = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    seen: list[torch.Tensor]


class Pair(NamedTuple):
    x: torch.Tensor
    seen: list[torch.Tensor]


class Named(tuple[Any, ...]):
    """With a constructor and attributes of its own."""

    def __new__(cls, label: str, *items: Any) -> Any:
        made = super().__new__(cls, items)
        made.label = label
        return made


class Counted(dict[str, Any]):
    def __init__(self, count: int, x: torch.Tensor) -> None:
        super().__init__(x=x)
        self.count = count


def change_list(seen: Any, y: torch.Tensor) -> None:
    seen.append(y.square())
    seen[0] = seen[0] + y
    seen.append(y)


def move_in_list(seen: Any, y: torch.Tensor) -> None:
    seen.insert(0, y)
    seen.append(seen.pop(1))
    del seen[2:4]


def change_dict(state: Any, y: torch.Tensor) -> None:
    state["y"] = y * state["x"]
    state["old"] = state.pop("x")
    state["x"] = y + state["old"]
    state.setdefault("all", []).append(y)


def change_nested(state: Any, y: torch.Tensor) -> None:
    for item in (state["list"], state["tuple"][1]["deep"]):
        item.append(y)
    state["list"][0] = (y, state["list"][0])
    del state["gone"][0]


def change_fields(state: Any, y: torch.Tensor) -> None:
    if isinstance(state, Fields):
        state.x, state.y = state.x + y, y.sin()
    state.seen.append(y * state.x)


def change_label(state: Any, y: torch.Tensor) -> None:
    assert state.label == "a label"
    state.seen = [*getattr(state, "seen", []), y]


def change_counted(state: Any, y: torch.Tensor) -> None:
    state.count += 1
    state["y"] = y


CASES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.Tensor], None]]] = {
    "nothing": (lambda x: [x, {"x": x}], lambda state, y: None),
    "empty list": (lambda x: [], lambda state, y: state.append(y * 2)),
    "list": (lambda x: [x, x * 2], change_list),
    "order": (lambda x: [x, x * 2, None, x * 3], move_in_list),
    "deque": (lambda x: deque([x, x * 2], maxlen=5), change_list),
    "dict": (lambda x: {"x": x, "n": 3}, change_dict),
    "user's dict": (lambda x: UserDict(x=x), change_dict),
    "nested": (lambda x: {"list": [x], "tuple": (x, {"deep": deque([x])}), "gone": [1] * 5}, change_nested),
    "dataclass": (lambda x: Fields(x, [x]), change_fields),
    "frozen": (lambda x: Frozen(x, [x]), change_fields),
    "named tuple": (lambda x: Pair(x, [x]), change_fields),
    "subclass of tuple": (lambda x: Named("a label", x, [x]), change_label),
    "subclass of dict": (lambda x: Counted(0, x), change_counted),
}


class Block(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], None], wide: int) -> None:
        super().__init__()
        self.lin, self.wide, self.change = nn.Linear(5, 5), nn.Linear(wide, 5), change

    def forward(self, x: torch.Tensor, state: Any, *, other: Any = None) -> torch.Tensor:
        assert other is None or other is state
        y: torch.Tensor = self.lin(x).tanh()
        self.change(state, y)
        return y + self.wide(x.new_ones(self.wide.in_features))


class Blocks(nn.Module):
    def __init__(self, case: str, wide: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(CASES[case][1], wide) for _ in range(3))
        self.recomputes = False

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, state, use_reentrant=False) if self.recomputes else block(x, state, other=state)
        return x


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list, deque)):
        items = [*value, *(vars(value).values() if isinstance(value, Named) else ())]
        return [type(value), *(leaf for item in items for leaf in leaves(item))]
    if isinstance(value, (dict, UserDict)):
        items = [*value.items(), *(vars(value).items() if isinstance(value, Counted) else ())]
        return [type(value), *(leaf for key, item in items for leaf in (key, *leaves(item)))]
    if dataclasses.is_dataclass(value):
        return [type(value), *leaves(vars(value))]
    return [value]


def run(model: nn.Module, case: str, x: torch.Tensor) -> list[Any]:
    """Steps of the loss of all that the model returns and leaves in its arguments. Returns: the latter, of the last step."""
    for _ in range(2):
        given = x.clone().requires_grad_()
        x_in = given * 1
        state = CASES[case][0](x_in)
        found = [model(x_in, state), *leaves(state)]
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        if torch.is_grad_enabled():
            sum((leaf.double().square().sum() for leaf in tensors), torch.zeros(())).backward()
            found.append(given.grad)
    return [*found, *(leaf is x_in for leaf in found)]


def assert_alike(found: list[Any], expected: list[Any], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype or tolerance > 1e-3
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, check_dtype=False)
        else:
            assert one == other


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["usual", "kept", "large", "no gradients", "recomputed", "cast", "cast, no gradients"])
def test_containers_are_the_callers(world: World, how: str) -> None:
    """What a module does to them, the caller sees, as in one process, and gradients flow through it; nothing else changes."""
    for case in CASES:
        torch.manual_seed(0)
        whole = Blocks(case, wide=70_000 if how == "large" and case == "list" else 5).double()
        model = copy.deepcopy(whole)
        policy = BFLOAT16 if "cast" in how else MixedPrecisionPolicy()
        shard_blocks(model, reshard_after_forward=how != "kept", mp_policy=policy)
        model.recomputes = whole.recomputes = how == "recomputed" and case not in ("order", "nested")
        x = torch.randn(2, 5, dtype=torch.float64)
        with torch.set_grad_enabled("no gradients" not in how):
            assert_alike(run(model, case, x), run(whole, case, x), 0.2 if "cast" in how else 1e-12)
        if how in ("usual", "kept", "large", "recomputed"):
            compare(whole, model, 1e-12, case)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, state: dict[str, Any]) -> torch.Tensor:
        state["more"] = self.lin(state["x"][0])
        raise ValueError("it fails")


@on_ranks(1, 2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BFLOAT16])
def test_a_forward_that_fails_leaves_the_callers_tensors(world: World, policy: MixedPrecisionPolicy) -> None:
    model = shardrt.fully_shard(nn.Sequential(shardrt.fully_shard(Fails(), mp_policy=policy)), mp_policy=policy)
    x = torch.ones(2, 5, requires_grad=True) * 2
    state = {"x": [x]}
    refused("it fails", lambda: model(state))
    assert state["x"][0] is x
    assert list(state) == ["x", "more"]


class Same(nn.Module):
    """Compares its arguments, and writes attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, again: Any, *, mask: torch.Tensor) -> Any:
        assert again[0] is again[1]["x"] is x
        assert x.mark == 3
        x.seen, mask.seen = True, True
        if x.requires_grad:
            x.retain_grad()
        y = self.lin(x)
        return y, {"y": y, "all": Pair(y, [y])}


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_tensor_stays_one_and_keeps_its_attributes(world: World, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(dtype, output_dtype=None if dtype is None else torch.float32)
    model = shardrt.fully_shard(Same(), mp_policy=policy)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            x: Any = torch.ones(2, 5, requires_grad=True) * 2
            mask: Any = torch.ones(5)
            x.mark = 3
            if grad:
                y, more = model(x, (x, {"x": x}), mask=mask)
                (y.sum() + x.sum()).backward()
                assert torch.allclose(x.grad, 1 + model.lin.weight.full_tensor().sum(0).expand(2, 5), atol=0.02)
            else:
                y, more = model(x, [x, {"x": x}], mask=mask)
            assert x.seen
            assert mask.seen
            assert y is more["y"] is more["all"].x is more["all"].seen[0]
            assert y.dtype == torch.float32


class Once(nn.Module):
    """Returns a dataclass, given one."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, given: Fields) -> Any:
        assert given.made == 1
        return Fields(self.lin(given.x), given.seen), Named("a label", self.lin(given.x)), torch.max(self.lin(given.x), 0)


@on_ranks(2)
def test_classes_of_outputs_that_are_cast(world: World) -> None:
    """Constructors do not run again."""
    model = shardrt.fully_shard(Once(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    given = Fields(torch.ones(2, 5), [])
    fields, named, most = model(given)
    assert (given.made, fields.made, fields.seen is given.seen) == (1, 1, True)
    assert (type(named), named.label, type(most)) == (Named, "a label", torch.return_types.max)
    assert {each.dtype for each in (fields.x, named[0], most.values)} == {torch.float32}


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[0] = self.lin(x)[0]
        return cache.sum()


@on_ranks(1, 2)
@pytest.mark.parametrize("grad", [True, False])
def test_a_write_to_an_input_that_is_cast(world: World, grad: bool) -> None:
    """It reaches the caller's tensor, whose other elements keep their precision."""
    model = shardrt.fully_shard(Caches(), mp_policy=BFLOAT16)
    cache = torch.full((3, 5), 1 / 3)
    with torch.set_grad_enabled(grad):
        model(torch.ones(2, 5), cache)
        assert torch.equal(cache[1:], torch.full((2, 5), 1 / 3))
        assert (cache[0] != 1 / 3).all()
        if grad:
            cache.sum().backward()
            assert torch.equal(model.lin.bias.grad.full_tensor(), torch.ones(5))


class ReadOnly(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("it is read-only")


@on_ranks(1, 2)
def test_containers_that_cannot_be_changed(world: World) -> None:
    model = nn.Sequential(Block(lambda state, y: None, 5))
    shard_blocks(model, "")
    x = torch.ones(2, 5, requires_grad=True)
    state, first = ReadOnly(x=x), [x]
    both = (first, state)
    refused("'Sequential' is given, or returns, a ReadOnly, .*it is read-only", lambda: model(both), TypeError)
    assert first[0] is x
    model.reset_iter_state()


@on_ranks(2)
def test_a_parameter_that_is_added_to_an_argument(world: World) -> None:
    """Its memory is about to be freed, as that of one which is returned."""
    with buckets_of(0):
        model = nn.Sequential(Block(lambda state, y: None, 5))
        model[0].change = lambda state, y: state.append(model[0].wide.bias)
        shardrt.fully_shard(model[0])
        root = shardrt.fully_shard(Root(model[0]))
        refused("returns a parameter or a view of one", lambda: root(torch.ones(2, 5, requires_grad=True), []), RuntimeError)


class Root(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        result: torch.Tensor = self.block(x, state)
        return result


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 5)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        result: torch.Tensor = checkpoint(lambda given: self.lin(given["x"]), given, use_reentrant=False)
        return result


@on_ranks(1, 2)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BFLOAT16])
def test_a_recomputation_reads_what_the_module_was_given(world: World, policy: MixedPrecisionPolicy) -> None:
    """Also when the caller has its tensors again, which are of another dtype."""
    model = shardrt.fully_shard(Recomputes(), mp_policy=policy)
    x = torch.ones(2, 5, requires_grad=True)
    model({"x": x}).sum().backward()
    assert torch.equal(model.lin.bias.grad.full_tensor(), torch.full((5,), 2.0))
    assert x.grad is not None

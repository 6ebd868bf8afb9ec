"""What a state is called in a checkpoint, beside torch's own functions, and which parts of a tensor a rank has."""

from __future__ import annotations

import io
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardrt
from ranks import on_ranks, refused
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, load, save
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.formats.geometry import intersect, narrowed, parts, parts_of, runs
from shardrt.checkpoint.state.entries import entries
from shardrt.checkpoint.state.names import joined
from shardrt.comm import World
from shardrt.tensor.placement.placement import Box, FlatShard, Placement, RaggedShard, Replicate, Spec
from toys import OddMLP, TiedGPT, logged


class Counting(nn.Module):
    """Buffers, persistent or not, a frozen parameter, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("left_out", torch.ones(4), persistent=False)
        self.steps = 5

    def get_extra_state(self) -> Any:
        return {"steps": self.steps, "values": torch.tensor([1.0, 2.0])}

    def set_extra_state(self, state: Any) -> None:
        self.steps, self.values = state["steps"], state["values"]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    return optimizer


def torch_names(state: dict[str, Any]) -> dict[str, Any]:
    """Names, paths and values of what torch's own functions would save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint import _nested_dict as nested
        from torch.distributed.checkpoint import state_dict as stock

        model, optimizer = stock.get_state_dict(state["model"], state["optimizer"])
    flat, paths = nested.flatten_state_dict(cast(Any, {**state, "model": model, "optimizer": optimizer}))
    return {name: (paths[name], value) for name, value in flat.items()}


@pytest.mark.parametrize("kind", [OddMLP, TiedGPT, Counting])
@pytest.mark.parametrize("momentum", [False, True], ids=["adam", "momentum"])
def test_names_are_those_of_torch(kind: type[nn.Module], momentum: bool) -> None:
    model = kind()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:1], "lr": 0.5}, {"params": params[1:]}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9) if momentum else torch.optim.AdamW(groups, lr=torch.tensor(0.1))
    values = {"step": 3, "nested": {"list": [1, {"a": torch.ones(2)}], "plain": [1, 2], 5: None}}
    state = {"model": model, "optimizer": stepped(model, optimizer), **values}
    expected, found = torch_names(state), {entry.name: (entry.path, entry.value) for entry in entries(state)}
    assert found.keys() == expected.keys()
    for name, (path, value) in expected.items():
        assert found[name][0] == path
        got = found[name][1]
        loaded = got if isinstance(got, torch.Tensor) else torch.load(io.BytesIO(got), weights_only=True)
        assert torch.equal(loaded, value) if isinstance(value, torch.Tensor) else loaded == value, name


def compiled(module: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(module, backend="eager"))


def test_wrappers_leave_no_trace() -> None:
    """Compiled, checkpointed and data-parallel modules, around each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    model = OddMLP()
    state = {"model": model, "optimizer": stepped(model, torch.optim.AdamW(model.parameters()))}
    expected = [entry.name for entry in entries(state)]
    model.blocks[0] = compiled(model.blocks[0])
    model.blocks[1] = checkpoint_wrapper(compiled(checkpoint_wrapper(model.blocks[1])))
    model.out = nn.DataParallel(model.out)
    for wrapped in (model, compiled(model), nn.DataParallel(checkpoint_wrapper(model))):
        assert [entry.name for entry in entries({**state, "model": wrapped})] == expected


def test_parameters_of_several_modules() -> None:
    """An optimizer's names are those of the one module that has them all; else they begin with the modules' keys."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    for param in (*one.parameters(), *two.parameters()):
        param.grad = torch.ones_like(param)
    both.step()
    second = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    second.step()
    state = {"modules": {"one": one, "two": two}, "both": both, "second": second}
    names = {entry.name for entry in entries(state)}
    assert {"both.state.modules.one.weight.momentum_buffer", "both.state.modules.two.bias.momentum_buffer"} <= names
    assert "second.state.weight.momentum_buffer" in names
    with pytest.raises(CheckpointError, match=r"optimizer 'both': its parameter 0, of shape \(2, 2\), is in no module"):
        entries({"two": two, "both": both})


class Wrapper(torch.Tensor):
    """A tensor subclass around one tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner.detach())
        raise NotImplementedError(str(func))


def test_what_cannot_be_saved() -> None:
    inner = torch.ones(3)
    (entry,) = entries({"a": Wrapper(inner)})
    assert isinstance(entry.value, torch.Tensor)
    assert entry.value.data_ptr() == inner.data_ptr()
    refused("tensor 'a' is a TwoTensor of 2 tensors", lambda: entries({"a": TwoTensor(inner, inner.clone())}), CheckpointError)
    with pytest.raises(
        CheckpointError, match=r"'a\.b' is a pathlib.PosixPath, which would not load without running its code: use str\(x\)"
    ):
        entries({"a": {"b": Path()}})
    refused(r"two values of the state have the name 'a\.b'", lambda: entries({"a": {"b": 1}, "a.b": 2}), CheckpointError)
    assert entries({}) == []


# ---------------------------------------------------------------------- objects with state, and modules of other packages


class Position:
    """A data position whose state changes its form."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


@on_ranks(1, 2)
def test_objects_with_state(world: World, tmp_path: Path) -> None:
    """Keys that are numbers stay numbers where they were there, empty dicts and lists stay, tensors may change their shape."""
    full = {"seen": {0: 5, 1: torch.ones(2)}, "queue": [torch.ones(3), torch.zeros(1)], "none": {}, "text": ["a"], "list": []}
    save(tmp_path / "saved", {"position": Position(full), "outer": [Position({"n": 1}), {"again": Position({"n": (1, 2)})}]})
    position = Position(
        {"seen": {0: 0, 1: torch.zeros(2)}, "queue": [torch.ones(1)], "none": {"x": 1}, "text": [], "list": [2]}
    )
    outer: list[Any] = [Position({"n": 0}), {"again": Position({"n": 0})}]
    load(tmp_path / "saved", {"position": position, "outer": outer})
    assert position.state["seen"][0] == 5
    assert torch.equal(position.state["seen"][1], torch.ones(2))
    assert [tensor.tolist() for tensor in position.state["queue"]] == [[1.0, 1.0, 1.0], [0.0]]
    assert (position.state["none"], position.state["text"], position.state["list"]) == ({}, ["a"], [])
    assert (outer[0].state, outer[1]["again"].state) == ({"n": 1}, {"n": (1, 2)})
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'position\.more'"):
        load(tmp_path / "saved", {"position": Position({"more": 1})})


@on_ranks(1, 2)
def test_arguments_in_the_order_of_dcp(world: World, tmp_path: Path) -> None:
    """A folder and a state are told apart by their types and names; anything else is refused on every rank."""
    folder, calls = tmp_path / "step-1", (checkpoint.save, lambda *a, **k: checkpoint.async_save(*a, **k).result())
    for call in calls:
        for value, (given, named) in enumerate(
            [
                (lambda state: (str(folder), state), {}),
                (lambda state: (folder,), {"state": 1}),
                (lambda state: (state,), {"checkpoint_id": folder}),
                (lambda state: (), {"state_dict": 1, "checkpoint_id": str(folder), "process_group": None}),
            ]
        ):
            state, loaded = {"value": value}, {"value": -1}
            filled = [{name: each if item == 1 else item for name, item in named.items()} for each in (state, loaded)]
            call(*given(state), **filled[0])
            checkpoint.load(*given(loaded), **filled[1])
            assert loaded == state
    usage = "expected a folder and a state, as in {call}.'runs/a/step-100', state. or {call}.state, checkpoint_id="
    for call in (checkpoint.save, checkpoint.async_save, checkpoint.load):
        start = usage.format(call=call.__name__)
        for given, named, found in (
            ((), {}, "0 folders, 0 states"),
            ((folder,), {}, "1 folders, 0 states"),
            (({},), {}, "0 folders, 1 states"),
            ((folder, {}), {"checkpoint_id": folder}, "2 folders, 1 states"),
            (({}, {}), {}, "0 folders, 2 states"),
            ((folder, {}, 3), {}, "1 folders, 1 states, and int"),
            (({},), {"checkpoint_id": folder, "planner": object()}, "1 folders, 1 states, and planner="),
        ):
            with pytest.raises(CheckpointError, match=rf"TypeError: {call.__name__}: {start}.*found {found}"):
                call(*given, **named)
        with pytest.raises(CheckpointError, match="expected the state as a dict, found a list"):
            call(folder, state=[])
    if world.size > 1:
        with pytest.raises(CheckpointError, match=r"rank 1 raised TypeError: save: .*found 0 folders, 1 states"):
            checkpoint.save({}, checkpoint_id=None if world.rank else folder)


@on_ranks(1)
def test_what_the_state_lacks(world: World, tmp_path: Path) -> None:
    """Values go into dicts without members of their own, which are filled later; tensors are an error, if strict."""
    model = nn.Linear(2, 2)
    data = {"at": 5, "more": {"x": 1.0}, "by number": {0: 5}, "tensor": torch.ones(2)}
    save(tmp_path / "saved", {"data": data, "app": {"model": model, "step": 3}, "none": {}})
    for before in ({}, {"at": 0, "more": {}, "by number": {}}):
        kept: dict[str, Any] = dict(before)
        state: dict[str, Any] = {"data": kept, "app": {"model": model}}
        with pytest.raises(CheckpointError, match=r"the state has no place for 'data\.tensor'; .*strict=False"):
            load(tmp_path / "saved", state)
        assert kept == before
        with logged() as said:
            load(tmp_path / "saved", state, strict=False)
        assert len(said) == 1
        assert "the state has no place for 'data.tensor'; the rest is loaded" in said[0]
        assert state["data"] is kept
        assert kept == {"at": 5, "more": {"x": 1.0}, "by number": {0: 5}}
        assert [*state, *state["app"]] == ["data", "app", "model"]


@on_ranks(1)
def test_keys_that_are_numbers(world: World, tmp_path: Path) -> None:
    """They stay numbers, in classes of dicts that load, also where nothing was there, and other keys were."""
    seen, counts = {0: {"a": [1]}, (1, 2): 7}, Counter({2: 1, 4: 1})
    save(tmp_path / "saved", {"position": Position({"seen": seen, "counts": counts, "more": defaultdict(int, {3: 4})})})
    for before in ({}, {"seen": {5: 5}, "counts": Counter({3: 1}), "more": {}}):
        position = Position(before)
        load(tmp_path / "saved", {"position": position})
        assert position.state == {"seen": seen, "counts": counts, "more": {3: 4}}
        assert type(position.state["counts"]) is Counter
    save(tmp_path / "by keys", {"position": {"counts": {"2": 1, "4": 1}}})  # as stock DCP saves them
    position = Position({"counts": {3: 1}})
    load(tmp_path / "by keys", {"position": position})
    assert position.state == {"counts": {2: 1, 4: 1}}


class Aliased(nn.Module):
    """Two names for one buffer, of which the first is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(4), persistent=False)
        self.register_buffer("second", self.first)


@on_ranks(1)
def test_a_first_name_that_is_not_saved(world: World, tmp_path: Path) -> None:
    model, other = Aliased(), Aliased()
    model.second.fill_(3)
    save(tmp_path / "saved", {"model": model})
    load(tmp_path / "saved", {"model": other})
    assert torch.equal(other.second, model.second)


@on_ranks(1, 2)
def test_extra_state_and_buffers(world: World, tmp_path: Path) -> None:
    model, other = Counting(), Counting()
    model.norm(torch.randn(4, 3))
    model.steps = 7
    save(tmp_path / "saved", {"model": model})
    other.left_out.zero_()
    load(tmp_path / "saved", {"model": shardrt.fully_shard(other)})
    assert (other.steps, other.values.tolist()) == (7, [1.0, 2.0])
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert other.norm.num_batches_tracked == 1
    assert not other.left_out.any()


class Bytes(nn.Module):
    """Extra state in a tensor whose length changes, and in a dict."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("key", ["model", ""])
@on_ranks(1)
def test_extra_state_of_another_size(world: World, tmp_path: Path, key: str) -> None:
    made = nn.Sequential(Bytes(torch.arange(5)), Bytes({"a": 1, "b": torch.ones(2)}), Bytes({0: 5}))
    save(tmp_path / "saved", {key: made})
    others = [Bytes(torch.zeros(3)), Bytes({}), Bytes({})]
    load(tmp_path / "saved", {key: nn.Sequential(*others)})
    tensor, values, numbered = (other.value for other in others)
    assert torch.equal(tensor, torch.arange(5))
    assert (values["a"], values["b"].tolist(), numbered) == (1, [1.0, 1.0], {0: 5})


@on_ranks(2)
def test_a_transformer_in_wrappers(world: World, tmp_path: Path) -> None:
    """A Llama of transformers with compiled and checkpointed layers: clean names, which the bare model loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31, "max_position_embeddings": 16}
    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    bare = LlamaForCausalLM(config)
    expected = {name: value.clone() for name, value in bare.state_dict().items()}
    layers = bare.model.layers
    layers[0], layers[1] = compiled(layers[0]), checkpoint_wrapper(compiled(layers[1]))
    for layer in layers:
        shardrt.fully_shard(layer)
    save(tmp_path / "saved", {"model": compiled(shardrt.fully_shard(bare))})
    assert {f"model.{name}" for name in expected} == set(read_stored(tmp_path / "saved").tensors)
    with torch.device("meta"):
        other = LlamaForCausalLM(config)
    shardrt.fully_shard(other)
    load(tmp_path / "saved", {"model": other})
    for name, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), expected[name]), name


# ---------------------------------------------------------------------- geometry


class Mesh:
    """What a spec asks of its mesh, for any rank."""

    def __init__(self, shape: Sequence[int], coordinates: Sequence[int]) -> None:
        self.shape, self.coordinates, self.rank = tuple(shape), tuple(coordinates), 0
        self.axis_names = tuple(f"axis {number}" for number in range(len(shape)))

    def __getitem__(self, names: object) -> Mesh:
        return self


def cuts(rng: random.Random, total: int, count: int) -> tuple[int, ...]:
    places = [0, *sorted(rng.randint(0, total) for _ in range(count - 1)), total]
    return tuple(stop - start for start, stop in pairwise(places))


def random_specs(count: int) -> Iterator[Spec]:
    """Specs of up to 3 dims on up to 2 axes, cut anywhere."""
    rng = random.Random(0)
    for _ in range(count):
        local = shape = torch.Size(rng.randint(1, 5) for _ in range(rng.randint(0, 3)))
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]
        coordinates = [rng.randrange(size) for size in sizes]
        placements: list[Placement] = []
        for size, rank in zip(sizes, coordinates, strict=True):
            dim = rng.randrange(max(1, len(local)))
            rows = local[dim] if local else 1
            ragged, flat = RaggedShard(dim, cuts(rng, rows, size)), FlatShard(dim, cuts(rng, local.numel(), size))
            placements.append(rng.choice([ragged, flat, Replicate()]))
            local = placements[-1].shard_shape(local, rank)
        yield Spec(cast(Any, Mesh(sizes, coordinates)), tuple(placements), shape)


def test_parts_and_runs() -> None:
    """Parts are views of the local memory that hold the box's elements; runs find them in an array of any order of dims."""
    rng = random.Random(1)
    for spec in random_specs(600):
        whole = torch.arange(spec.shape.numel()).view(spec.shape)
        local = spec.local_shard(whole).clone()
        everything = Box((0,) * whole.dim(), tuple(whole.shape))
        found = parts_of(local, spec)
        assert sum(part.memory.numel() for part in found) == local.numel()
        for box, memory in found:
            assert memory.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert torch.equal(memory, at(whole, box)), (spec, box)
            order = rng.sample(range(whole.dim()), whole.dim())
            stored = whole.permute(order).contiguous()
            strides = stored.permute([order.index(dim) for dim in range(whole.dim())]).stride()
            where = runs(box, everything, strides)
            elements = [stored.view(-1)[start + i].item() for start in where.starts for i in range(where.numel)]
            assert elements == at(whole, box).permute(where.order).reshape(-1).tolist()


def at(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]


def test_boxes_that_meet() -> None:
    a, b = Box((0, 2), (3, 4)), Box((1, 0), (5, 3))
    assert intersect(a, b) == intersect(b, a) == Box((1, 2), (2, 1))
    assert intersect(a, Box((3, 2), (1, 1))) is None
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    (part,) = parts(torch.arange(12).view(3, 4))
    assert narrowed(part, Box((1, 2), (2, 1))).tolist() == [[6], [10]]
    assert parts(torch.empty(3, 0)) == []
    assert joined(("a", 0, "b")) == "a.0.b"

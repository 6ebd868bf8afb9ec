"""What a checkpoint has and the state has not, or the other way round: refused, or named in one warning; and other names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import shared_folder, whole
from ranks import on_ranks
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, StateDictOptions, get_optimizer_state_dict, load, save
from shardrt.comm import World
from toys import OddMLP, logged, shard_blocks, step_all

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.5)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def stepped(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = adamw) -> dict[str, Any]:
    """A model and its optimizer after a step on random gradients."""
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.randn_like(param)
    step_all(optimizer)
    return {"model": model, "optimizer": optimizer}


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer, whole, by names. Collective."""
    names = {param: name for name, param in state["model"].named_parameters()}
    found = dict(state["model"].state_dict())
    for param, own in state["optimizer"].state.items():
        found |= {f"{names[param]}.{key}": value for key, value in own.items()}
    return {name: whole(value.detach()).clone() for name, value in found.items()}


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def refused(folder: Path, state: dict[str, Any], *texts: str) -> None:
    """A strict load is an error with these texts, and loads nothing."""
    before = values(state) if "optimizer" in state and "model" in state else {}
    with pytest.raises(CheckpointError) as caught:
        load(folder, state)
    for text in texts:
        assert text in str(caught.value), str(caught.value)
    assert "strict=False" in str(caught.value)
    if before:
        check_equal(values(state), before)


def tolerated(world: World, folder: Path, state: dict[str, Any], *texts: str) -> None:
    """With strict=False it loads, and one warning on rank 0 has these texts."""
    with logged() as found:
        load(folder, state, strict=False)
    if world.rank:
        assert found == []
    else:
        assert len(found) == 1, found
        for text in texts:
            assert text in found[0]


# ---------------------------------------------------------------------- too much, or too little


@pytest.mark.parametrize("form", ["groups", "flat", "bare"])
@on_ranks(2, more=(1, 3))
def test_a_model_with_fewer_layers(world: World, form: str) -> None:
    key = "" if form == "bare" else "model"
    large, small = stepped(shard_blocks(OddMLP(layers=3))), stepped(shard_blocks(OddMLP(layers=2)))
    state = {key: large["model"], "optimizer": large["optimizer"], "epoch": 3}
    if form != "groups":
        state["optimizer"] = get_optimizer_state_dict(large["model"], large["optimizer"], options=FLAT)
    prefix = f"{key}." if key else ""
    with shared_folder(world) as folder:
        save(folder / "saved", state)
        texts = (f"'{prefix}blocks.2.up.weight'", "'optimizer.state.blocks.2.up.weight", "the state has no place for")
        target = {key: small["model"], "optimizer": small["optimizer"]}
        before = values(small)
        refused(folder / "saved", target, *texts)
        check_equal(values(small), before)
        tolerated(world, folder / "saved", target, *texts)
        expected = values(large)
        check_equal(values(small), {name: expected[name] for name in before})


@on_ranks(1, 2)
def test_a_model_with_more_layers(world: World) -> None:
    """What is missing stays as it is: parameters, optimizer state, values, and values of objects with state."""
    small, large = (stepped(shardrt.fully_shard(nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers))))) for layers in (1, 2))
    before = values(large)
    scheduler = torch.optim.lr_scheduler.StepLR(small["optimizer"], 3)
    del scheduler.gamma
    with shared_folder(world) as folder:
        save(folder / "saved", {**small, "scheduler": scheduler, "epoch": 3, "data": {"at": 1}})
        target = {
            **large,
            "scheduler": torch.optim.lr_scheduler.StepLR(large["optimizer"], 7, gamma=0.25),
            "other": torch.optim.lr_scheduler.StepLR(large["optimizer"], 5),
            "epoch": 0,
            "late": [1, 2],
            "data": {"at": 0, "more": {"x": 5}},
            "tensor": torch.ones(2),
        }
        texts = (
            "'model.1.weight'",
            "'optimizer.state.1.weight'",
            "'scheduler.gamma'",
            "'late'",
            "'data.more.x'",
        )
        refused(folder / "saved", target, *texts, "'tensor'", "'other.step_size'")
        tolerated(world, folder / "saved", target, *texts, "'tensor'", "'other.step_size'")
        check_equal(values(large), before | values(small))
        assert (target["epoch"], target["late"], target["data"]) == (3, [1, 2], {"at": 1, "more": {"x": 5}})
        assert (target["scheduler"].step_size, target["scheduler"].gamma, target["other"].step_size) == (3, 0.25, 5)


@on_ranks(2)
def test_shapes_have_to_fit_always(world: World) -> None:
    with shared_folder(world) as folder:
        save(folder / "saved", {"model": nn.Linear(3, 4), "more": 1})
        for strict in (True, False):
            with pytest.raises(CheckpointError, match=r"'model\.weight': expected shape \(5, 3\), found \(4, 3\)"):
                load(folder / "saved", {"model": nn.Linear(3, 5)}, strict=strict)


@pytest.mark.parametrize("flat", [False, True], ids=["groups", "flat"])
@on_ranks(1, 2)
def test_an_optimizer_of_another_class(world: World, flat: bool) -> None:
    """Its hyperparameters tell. With strict=False those that both have are loaded, and no state."""
    for source, target in ((adamw, momentum), (momentum, adamw)):
        saved, other = stepped(shard_blocks(OddMLP()), source), stepped(shard_blocks(OddMLP()), target)
        state = dict(saved)
        if flat:
            state["optimizer"] = get_optimizer_state_dict(saved["model"], saved["optimizer"], options=FLAT)
        with shared_folder(world) as folder:
            save(folder / "saved", state)
            theirs, ours = (("betas", "momentum"), ("momentum", "betas"))[source is momentum]
            texts = ("optimizer 'optimizer'", type(other["optimizer"]).__name__, f"'{theirs}'", f"'{ours}'")
            refused(folder / "saved", other, *texts)
            before = values(other)
            tolerated(world, folder / "saved", other, *texts)
        check_equal(values(other), before | {name: whole(value) for name, value in saved["model"].state_dict().items()})
        group = other["optimizer"].param_groups[0]
        assert group["lr"] == saved["optimizer"].param_groups[0]["lr"]
        assert group.keys() == target([nn.Parameter(torch.ones(1))]).param_groups[0].keys()


# ---------------------------------------------------------------------- what is no error


@on_ranks(2)
def test_what_is_not_unexpected(world: World) -> None:
    """Loads that take a part of a checkpoint, none of which says a word."""
    full = stepped(shard_blocks(OddMLP()))
    with shared_folder(world) as folder, logged() as found:
        save(folder / "saved", {**full, "scheduler": torch.optim.lr_scheduler.StepLR(full["optimizer"], 3), "epoch": 1})
        load(folder / "saved", {"model": shard_blocks(OddMLP())})
        bare = OddMLP()
        save(folder / "bare", {"": full["model"], "optimizer": full["optimizer"], "data": {"layers": torch.ones(3)}})
        load(folder / "bare", {"": bare})
        model = shard_blocks(OddMLP())
        load(folder / "saved", {"model": model, "optimizer": adamw(model.parameters())})  # its state is made
        plain = OddMLP()  # no momentum: no state at all
        save(folder / "sgd", {"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), lr=0.5)})
        load(folder / "sgd", {"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), lr=0.1)})
        save(folder / "keys", {"a": {"b": plain, "c": 1}, "d": 2})
        load(folder / "keys", {"a": {"b": plain}})
        assert found == []


@on_ranks(1, 2)
def test_an_optimizer_over_a_part_of_the_model(world: World) -> None:
    """State of frozen parameters, and of those of another optimizer, is left."""
    full = stepped(shard_blocks(OddMLP()))
    part = shard_blocks(OddMLP())
    for name, param in part.named_parameters():
        param.requires_grad_(not name.startswith("blocks.0"))
    flat = get_optimizer_state_dict(full["model"], full["optimizer"], options=FLAT)
    with shared_folder(world) as folder:
        for form in (full["optimizer"], flat):
            state = stepped(part)
            save(folder / "saved", {"model": full["model"], "optimizer": form})
            load(folder / "saved", state)
            names = {name for name, param in part.named_parameters() if param.requires_grad}
            assert {name for name, param in part.named_parameters() if param in state["optimizer"].state} == names
            expected = values(full)
            check_equal(values(state), {name: expected[name] for name in values(state)})


class Cached(nn.Module):
    """A buffer that is computed, and one that is saved."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("cache", torch.zeros(3), persistent=persistent)


@on_ranks(1, 2)
def test_buffers_and_tied_weights(world: World) -> None:
    tied, loose = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with shared_folder(world) as folder, logged() as found:
        save(folder / "cached", {"model": Cached(True)})
        load(folder / "cached", {"model": Cached(False)})
        save(folder / "tied", {"model": tied})
        load(folder / "tied", {"model": loose})
        assert torch.equal(loose.state_dict()["1.weight"], tied.state_dict()["0.weight"])
        save(folder / "loose", {"model": loose})
        load(folder / "loose", {"model": tied})
        assert found == []
        save(folder / "cached", {"model": Cached(False)})
        refused(folder / "cached", {"model": Cached(True)}, "the checkpoint lacks 'model.cache'")


class TwoEnds(nn.Module):
    """An embedding and a head, of one parameter or of two; several of them are cut elsewhere."""

    def __init__(self, tied: bool, value: float = 2.0) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False)
        nn.init.constant_(self.emb.weight, 1.0)
        nn.init.constant_(self.head.weight, value)
        if tied:
            self.head.weight = self.emb.weight


def as_module(model: nn.Module) -> Any:
    return model


def as_dict(model: nn.Module) -> Any:
    return checkpoint.get_model_state_dict(model)


@pytest.mark.parametrize("form", [as_module, as_dict])
@on_ranks(1, 2, 3)
def test_two_tensors_into_one(world: World, form: Callable[[nn.Module], Any]) -> None:
    """Several names of one tensor, saved with other values: an error on all ranks, if strict."""
    with shared_folder(world) as folder:
        for name, value in (("other", 2.0), ("same", 1.0), ("few", 1.0)):
            model = shardrt.fully_shard(TwoEnds(False, value))
            if name == "few" and world.rank == world.size - 1:  # one element, of one rank
                model.head.weight.detach().to_local().view(-1)[-1:] = 3.0
            save(folder / name, {"model": model})
        for name in ("other", "few"):
            model = shardrt.fully_shard(TwoEnds(True, 5.0))
            before = whole(model.emb.weight.detach()).clone()
            refused(folder / name, {"model": form(model)}, "'model.emb.weight' and 'model.head.weight' have different values")
            assert torch.equal(whole(model.emb.weight.detach()), before)
        tolerated(world, folder / "other", {"model": form(model)}, "those of 'model.head.weight' are lost; the rest is loaded")
        assert bool((whole(model.head.weight.detach()) == 1.0).all())
        with logged() as found:
            load(folder / "same", {"model": form(model)})
        assert found == []


@on_ranks(1, 2)
def test_moments_of_two_tensors_into_one(world: World) -> None:
    saved, tied = stepped(TwoEnds(False)), stepped(TwoEnds(True))
    with shared_folder(world) as folder:
        save(folder / "saved", saved)
        text = "the state has no place for 'optimizer.state.head.weight.step', 'optimizer.state.head.weight.exp_avg'"
        refused(folder / "saved", {"model": tied["model"], "optimizer": tied["optimizer"]}, text)
        state = get_optimizer_state_dict(saved["model"], saved["optimizer"])
        with pytest.raises(CheckpointError, match=r"state of head\.weight, which the model has no parameter for, or"):
            checkpoint.set_optimizer_state_dict(tied["model"], tied["optimizer"], state)


class OwnMomentum(torch.optim.Optimizer):
    """Not one of torch's classes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("mean", torch.zeros_like(param)).add_(param.grad)


@pytest.mark.parametrize("options", [FLAT, None], ids=["flat", "groups"])
@on_ranks(2)
def test_the_state_dict_of_an_optimizer_without_state(world: World, options: StateDictOptions | None) -> None:
    """What is saved of parameters that its groups have is not left out; of others it is."""
    saved, (model, part) = stepped(OddMLP(), OwnMomentum), (OddMLP(), OddMLP())

    def of(model: nn.Module, params: Any) -> dict[str, Any]:
        return get_optimizer_state_dict(model, OwnMomentum(params), options=options)

    with shared_folder(world) as folder:
        state = get_optimizer_state_dict(saved["model"], saved["optimizer"], options=options)
        save(folder / "nested", {"optimizer": state})
        save(folder / "bare", state)
        for name, wrapped in (("nested", lambda state: {"optimizer": state}), ("bare", lambda state: state)):
            text = "state.inp.bias.mean"
            refused(folder / name, wrapped(of(model, model.parameters())), text, "give the optimizer itself")
            tolerated(world, folder / name, wrapped(of(model, model.parameters())), text)
            if options is FLAT:
                load(folder / name, wrapped({k: v for k, v in of(part, [part.inp.bias]).items() if "inp.bias" not in k}))
        optimizer = OwnMomentum(model.parameters())
        load(folder / "nested", {"model": model, "optimizer": optimizer}, strict=False)
        assert torch.equal(optimizer.state[model.inp.bias]["mean"], saved["optimizer"].state[saved["model"].inp.bias]["mean"])


@on_ranks(1, 2)
def test_narrower_dtypes_are_named(world: World) -> None:
    model = nn.Linear(3, 2).double()
    wide = {"model": model, "seen": torch.tensor([1, 2]), "near": torch.tensor([1])}
    with shared_folder(world) as folder:
        save(folder / "wide", wide)
        narrow = {
            "model": nn.Linear(3, 2),
            "seen": torch.zeros(2, dtype=torch.int32),
            "near": torch.zeros(1, dtype=torch.int64),
        }
        tolerated(
            world,
            folder / "wide",
            narrow,
            f"load of '{folder / 'wide'}': 3 tensors go into narrower dtypes (rank 0): 'model.weight' from torch.float64 to "
            "torch.float32, 'model.bias' from torch.float64 to torch.float32, 'seen' from torch.int64 to torch.int32",
        )
        save(folder / "narrow", narrow)
        with logged() as found:
            load(folder / "narrow", wide)
            checkpoint.set_model_state_dict(model, narrow["model"].state_dict())
        assert found == []
        with logged() as found:
            checkpoint.set_model_state_dict(narrow["model"], model.state_dict())
        assert [text.startswith("load of the state dict: 2 tensors go into narrower") for text in found] == [True] * (
            not world.rank
        )


@on_ranks(1, 2)
def test_hyperparameters_of_another_version(world: World) -> None:
    """Those of one side only: a warning; flags of the implementation and what schedulers add: none."""
    old, new = stepped(OddMLP()), stepped(OddMLP())
    torch.optim.lr_scheduler.OneCycleLR(old["optimizer"], 0.2, total_steps=9)
    for flag in ("foreach", "fused", "decoupled_weight_decay"):
        del old["optimizer"].param_groups[0][flag]
    with shared_folder(world) as folder:
        save(folder / "saved", old)
        with logged() as found:
            load(folder / "saved", new)
        assert found == []
        assert new["optimizer"].param_groups[0]["max_lr"] == 0.2
        del old["optimizer"].param_groups[0]["amsgrad"]
        save(folder / "saved", old)
        new = stepped(OddMLP())
        with logged() as found:
            load(folder / "saved", new)
        check_equal(values(new), values(old))
        assert len(found) == (world.rank == 0)
        assert all("optimizer 'optimizer': the checkpoint lacks its hyperparameters 'amsgrad'" in text for text in found)
        old = stepped(OddMLP())
        old["optimizer"].param_groups[0]["group name"] = "all"
        save(folder / "saved", old)
        with logged() as found:
            load(folder / "saved", new)
        assert all("has the hyperparameters 'group name', which it lacks" in text for text in found)
        assert len(found) == (world.rank == 0)
        assert new["optimizer"].param_groups[0]["group name"] == "all"


class Stage(nn.Module):
    """One of the stages that the ranks have under one key."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(rank): nn.Linear(3, 3)})


@on_ranks(2, 3)
def test_stages_of_the_ranks_under_one_key(world: World) -> None:
    """Each rank has modules and parameters of its own, by names that no other rank has; what no rank has is unexpected."""
    saved, loaded = stepped(Stage(world.rank), momentum), stepped(Stage(world.rank), momentum)
    loaded["optimizer"].param_groups[0]["lr"] = 9.0
    with shared_folder(world) as folder:
        save(folder / "saved", saved)
        load(folder / "saved", loaded)
        check_equal(values(loaded), values(saved))
        assert loaded["optimizer"].param_groups[0]["lr"] == 0.3
        more = Stage(world.rank)
        if world.rank == world.size - 1:
            more.layers["9"] = nn.Linear(3, 3)
        save(folder / "more", {"model": more})
        refused(folder / "more", {"model": Stage(world.rank)}, "'model.layers.9.weight'")


@on_ranks(1)
def test_what_stock_dcp_saved(world: World, tmp_path: Path) -> None:
    large, small = stepped(OddMLP(layers=3)), stepped(OddMLP(layers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint import state_dict as stock
        from torch.distributed.checkpoint.state_dict_saver import save as stock_save

        for flat in (False, True):
            options = stock.StateDictOptions(flatten_optimizer_state_dict=flat)
            model, optimizer = stock.get_state_dict(large["model"], large["optimizer"], options=options)
            stock_save({"model": model, "optimizer": optimizer, "step": 1}, checkpoint_id=tmp_path / f"{flat}", no_dist=True)
    for flat in (False, True):
        refused(tmp_path / f"{flat}", small, "'model.blocks.2.up.weight'", "'optimizer.state.blocks.2.up.weight")
        again = stepped(OddMLP(layers=3))
        load(tmp_path / f"{flat}", again)
        check_equal(values(again), values(large))


# ---------------------------------------------------------------------- other names


class Renamed(nn.Module):
    """`OddMLP` with other names."""

    def __init__(self) -> None:
        super().__init__()
        inner = OddMLP(layers=2)
        self.first, self.layers, self.out = inner.inp, inner.blocks, inner.out


def renamed(name: str) -> str:
    return name.replace("inp.", "first.").replace("blocks.", "layers.")


def by_function(name: str) -> str | None:
    return None if "extra" in name else renamed(name)


def by_names() -> dict[str, str | None]:
    """Of the model's names; the optimizer's follow them."""
    return {f"model.{name}": f"model.{renamed(name)}" for name in OddMLP(layers=2).state_dict()} | {"model.extra": None}


MAPS: dict[str, Any] = {
    "pairs": [(r"\binp\b", "first"), (r"\bblocks\b", "layers")],
    "pairs of the model": [(r"^model\.inp\b", "model.first"), (r"^model\.blocks\b", "model.layers")],
    "function": by_function,
    "dict": by_names(),
}


@pytest.mark.parametrize("flat", [False, True], ids=["groups", "flat"])
@pytest.mark.parametrize("kind", MAPS)
@on_ranks(1, 2)
def test_other_names_of_modules(world: World, kind: str, flat: bool) -> None:
    """The state of optimizers follows the names of parameters, and so do their groups. None leaves out."""
    model = OddMLP(layers=2)
    if not kind.startswith("pairs"):
        model.extra = nn.Parameter(torch.ones(5))
    saved, target = stepped(shard_blocks(model)), stepped(Renamed())
    target["optimizer"].param_groups[0]["lr"] = 9.0
    state = dict(saved)
    if flat:
        state["optimizer"] = get_optimizer_state_dict(saved["model"], saved["optimizer"], options=FLAT)
    with shared_folder(world) as folder:
        save(folder / "saved", state)
        refused(folder / "saved", target, "the checkpoint lacks", "key_map")
        load(folder / "saved", target, key_map=MAPS[kind])
    expected = {renamed(name): value for name, value in values(saved).items() if not name.startswith("extra")}
    check_equal(values(target), expected)
    assert target["optimizer"].param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("form", ["groups", "flat", "bare"])
@on_ranks(1, 2)
def test_names_that_are_exchanged(world: World, form: str) -> None:
    """Two layers change places, by each kind of map; the optimizer's state does as well."""

    def make() -> dict[str, Any]:
        return stepped(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))

    saved, prefix = make(), "" if form == "bare" else "model."
    state: dict[str, Any] = {prefix[:-1]: saved["model"], "optimizer": saved["optimizer"]}
    if form != "groups":
        state["optimizer"] = get_optimizer_state_dict(saved["model"], saved["optimizer"], options=FLAT)
    names = {f"{prefix}{a}.{kind}": f"{prefix}{b}.{kind}" for a, b in ("01", "10") for kind in ("weight", "bias")}
    pairs = [(rf"^{prefix}0\.", "tmp."), (rf"^{prefix}1\.", f"{prefix}0."), (r"^tmp\.", f"{prefix}1.")]
    turned = {"0": "1", "1": "0"}
    expected = {turned[name[0]] + name[1:]: value for name, value in values(saved).items()}
    with shared_folder(world) as folder:
        save(folder / "saved", state)
        for key_map in (names, lambda name: names.get(name, name), pairs):
            target = make()
            load(folder / "saved", {prefix[:-1]: target["model"], "optimizer": target["optimizer"]}, key_map=key_map)
            check_equal(values(target), expected)


@on_ranks(1, 2)
def test_other_keys_of_the_state(world: World) -> None:
    """Of a module and an optimizer, of values in dicts and lists, and of what each rank has of its own."""
    saved = stepped(shard_blocks(OddMLP()))
    data = {"old": {"seen": [torch.ones(2), 5], "at": 3}, "own": checkpoint.PerRank(world.rank)}
    with shared_folder(world) as folder:
        save(folder / "saved", {"net": saved["model"], "optim": saved["optimizer"], "epoch": 4, "data": data})
        target, position = stepped(shard_blocks(OddMLP())), checkpoint.PerRank(-1)
        state = {**target, "count": 0, "data": {"new": {"seen": [torch.zeros(2), 0], "at": 0}, "position": position}}
        pairs = [(r"^net\.", "model."), (r"^optim\.", "optimizer."), (r"\.old\.", ".new."), ("^epoch$", "count")]
        load(folder / "saved", state, key_map=[*pairs, (r"\.own$", ".position")])
        check_equal(values(target), values(saved))
        assert (state["count"], state["data"]["new"]["at"], position.value) == (4, 3, world.rank)
        assert (state["data"]["new"]["seen"][0].tolist(), state["data"]["new"]["seen"][1]) == ([1.0, 1.0], 5)
        deeper: dict[str, Any] = {"a": {"b": {"seen": [torch.zeros(2), 0]}}}
        load(folder / "saved", deeper, key_map=lambda name: name.replace("data.old.", "a.b.") if "seen" in name else None)
        assert (deeper["a"]["b"]["seen"][0].tolist(), deeper["a"]["b"]["seen"][1]) == ([1.0, 1.0], 5)


@on_ranks(2)
def test_maps_that_are_refused_on_every_rank(world: World) -> None:
    last = world.rank == world.size - 1
    with shared_folder(world) as folder:
        save(folder / "saved", {"a": 1, "b": 2, "c": 3})
        refused: tuple[tuple[Any, str], ...] = (
            ({"a": "b"}, r"rank 1 raised .*key_map gives '[ab]' and '[ab]' the same name 'b'"),
            ([("(", "")], "rank 1 raised PatternError|rank 1 raised error"),
            ({"a": None}, "rank 1 raised .*the checkpoint lacks 'a'"),
            (lambda name: 1 / 0, "rank 1 raised ZeroDivisionError"),
        )
        for key_map, text in refused:
            with pytest.raises(CheckpointError, match=text):
                load(folder / "saved", {"a": 0}, key_map=key_map if last else None)
        with pytest.raises(CheckpointError, match=r"rank 1 raised TypeError: load: expected .*, and planner="):
            load(folder / "saved", {"a": 0}, **({"planner": 1} if last else {}))

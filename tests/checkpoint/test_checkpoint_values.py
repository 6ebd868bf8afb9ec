"""Plain values of a state: those that differ by rank are refused, or saved for each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import Holder, shared_folder, stock_load
from ranks import job, on_ranks
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, async_save, load, save
from shardrt.comm import World


class Loader:
    """A data loader with a position of its own, as torchdata's StatefulDataLoader."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.seen = at, torch.arange(at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "workers": {0: {"seen": self.seen}}, "steps": [self.at, {"epoch": 1}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["steps"] == [state["at"], {"epoch": 1}]
        self.at, self.seen = state["at"], state["workers"][0]["seen"]


# ---------------------------------------------------------------------- values that differ


def differing(rank: int) -> dict[str, tuple[dict[str, Any], str]]:
    """States whose last rank has another value, and the text about them."""
    long = list(range(1000))
    return {
        "top": ({"position": 5 + rank}, r"'position' is 5 on ranks? 0"),
        "nested": ({"data": {"more": [{"at": 5 + rank}]}}, r"'data\.more\.0\.at' is 5 on ranks? 0"),
        "list": ({"seen": [1, rank]}, r"'seen' is \[1, 0\] on ranks? 0"),
        "object": ({"data": Holder(rank)}, r"'data\.inside' is 0 on ranks? 0"),
        "numbers": ({"data": {0: "a", 1: rank}}, r"'data' is \{0: 'a', 1: 0\} on ranks? 0"),
        "class": ({"best": float("inf") if rank else None}, r"'best' is None on ranks? 0"),
        "text": ({"a\nb": "x\x1b[31m" * (1 + rank)}, r"'a\\nb' is 'x\\x1b\[31m' on ranks? 0"),
        "long": ({"seen": [*long, rank, *long]}, r"'seen' is \.\.\.[^.]*999, 0, 0, 1, 2.{,60}\.\.\. on ranks? 0"),
        "tensor": ({"pair": (1, torch.tensor([1, rank]))}, r"'pair' is \(1, tensor\(\[1, 0\]\)\) on ranks? 0"),
    }


@on_ranks(2, 3)
def test_values_that_differ_are_refused_on_every_rank(world: World) -> None:
    """The text names the key, the ranks and their values, and what to do; nothing is written."""
    last = world.size - 1
    with shared_folder(world) as folder:
        for call in (save, async_save):
            for state, text in differing(int(world.rank == last)).values():
                with pytest.raises(CheckpointError, match=rf"{text}.* on rank {last}.*PerRank\(value\)") as caught:
                    call(folder / "step-1", {"epoch": 3, **state})
                assert len(str(caught.value)) < 400
                assert len(set(world.comm.exchange(str(caught.value)))) == 1
        with pytest.raises(CheckpointError, match=r"'a' is 1 on ranks? 0.*'c' is 1 on.*; and 97 more"):
            save(folder / "step-1", {name: 1 + (world.rank == last) for name in ("a", "b", "c", *map(str, range(97)))})
        assert not list(folder.iterdir())
        save(folder / "step-1", {"epoch": 3})
        assert [path.name for path in folder.iterdir()] == ["step-1"]


@on_ranks(4)
def test_ranks_with_equal_values_are_named_together(world: World) -> None:
    with shared_folder(world) as folder:
        with pytest.raises(CheckpointError, match=r"'x' is 0 on ranks 0, 2 and 1 on ranks 1, 3\."):
            save(folder / "step-1", {"x": world.rank % 2})
        with pytest.raises(CheckpointError, match="'x' is 0 on rank 0 and 1 on rank 1 and 2 on rank 2, and others; 'y'"):
            save(folder / "step-1", {"x": world.rank, "y": world.rank})


@on_ranks(2, 3)
def test_equal_values_that_are_spelled_in_another_way(world: World) -> None:
    """Order of sets and dicts, shared strings, 1 and 1.0, and NaN; also where ranks have names of their own."""
    words = [f"word {number}" for number in range(50)]
    turned = words if world.rank == 0 else words[::-1]
    one, other = "shared", "".join(["sha", "red"])
    state = {
        "set": set(turned),
        "numbered": {number: {word} for number, word in sorted(enumerate(words), reverse=bool(world.rank))},
        "named": dict.fromkeys(turned, 1),
        "pair": [one, one] if world.rank else [one, other],
        "float": [1.0 if world.rank else 1, math.nan, True],
        "tensors": (torch.ones(3), {0: torch.ones(2)}),
    }
    with shared_folder(world) as folder:
        for step, own in enumerate(({}, {f"of {world.rank}": world.rank}, {})):
            save(folder / f"step-{step}", {**state, **own})
            loaded: dict[str, Any] = {**dict.fromkeys(state), "named": {}, "tensors": ()}
            load(folder / f"step-{step}", loaded)
            assert loaded["set"] == set(words)
            assert loaded["numbered"] == {number: {word} for number, word in enumerate(words)}
            assert (loaded["named"], loaded["pair"]) == (dict.fromkeys(words, 1), ["shared", "shared"])


@on_ranks(2)
def test_states_that_differ_by_rank_and_may(world: World) -> None:
    """Tensors of statistics, buffers, random numbers, and names that only some ranks have."""
    torch.manual_seed(world.rank)
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(world.rank)
    model.num_batches_tracked.fill_(world.rank)
    state = {"model": model, "random": checkpoint.RandomState(), "tensor": torch.tensor(1.0 + world.rank)}
    with shared_folder(world) as folder:
        for step, given in enumerate((model, checkpoint.get_model_state_dict(model))):
            own = {} if world.rank else {"late": 1, "number": torch.tensor(1)}
            save(folder / f"step-{step}", {**state, "model": given, **own})
        load(folder / "step-1", state)
        assert (model.running_mean.tolist(), model.num_batches_tracked.item()) == ([0.0, 0.0, 0.0], 0)


def by_rank(rank: int) -> dict[str, tuple[dict[str, Any], str]]:
    """States with tensors of integers, of which rank 1 has others, and the text about them."""
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param])
    optimizer.state[param] = {"count": torch.tensor(4 + rank)}
    generator = torch.Generator().manual_seed(rank)
    model = nn.Module()
    model.weight = param
    return {
        "indices": (
            {"sampler": {"indices": torch.arange(5) + rank}},
            r"'sampler\.indices' is tensor\(\[0, 1, 2, 3, 4\]\) on rank 0",
        ),
        "large": ({"seen": torch.arange(100_000) * (1 + rank)}, r"'seen' is tensor\(\[ "),
        "generator": ({"loader": Holder({"rng": generator.get_state()})}, r"'loader\.inside\.rng' is tensor\(\[0,"),
        "count": ({"done": [torch.tensor(3), torch.tensor(7 - rank)]}, r"'done\.1' is tensor\(7\) on rank 0 and tensor\(6\)"),
        "mask": ({"mask": torch.tensor([True, rank > 0])}, r"'mask' is tensor\(\[ True, False\]\) on rank 0"),
        "optimizer": ({"model": model, "optimizer": optimizer}, r"'optimizer\.state\.weight\.count' is tensor\(4\) on rank 0"),
    }


@pytest.mark.parametrize("kind", ["indices", "large", "generator", "count", "mask", "optimizer"])
@on_ranks(2)
def test_integers_in_tensors_that_differ_are_refused(world: World, kind: str) -> None:
    with shared_folder(world) as folder:
        state, text = by_rank(world.rank)[kind]
        for call in (save, async_save):
            with pytest.raises(CheckpointError, match=rf"{text}.*PerRank\(value\)"):
                call(folder / "step-1", state)
        save(folder / "step-1", by_rank(0)[kind][0])


@on_ranks(2)
def test_what_torch_keeps_is_the_same_on_all_ranks(world: World) -> None:
    """Schedulers of every kind, a loss scale, averaged weights, and hyperparameters after steps."""
    from torch.optim import lr_scheduler as kinds
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

    model = shardrt.fully_shard(nn.Linear(4, 3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts: list[Any] = [kinds.LinearLR(optimizer), kinds.ExponentialLR(optimizer, 0.9)]
    schedulers = [
        kinds.LambdaLR(optimizer, lambda step: 0.9**step),
        kinds.OneCycleLR(optimizer, 0.2, total_steps=9),
        kinds.CosineAnnealingWarmRestarts(optimizer, 3),
        kinds.MultiStepLR(optimizer, [1, 3]),
        kinds.SequentialLR(optimizer, parts, [2]),
        SWALR(optimizer, 0.05),
    ]
    plateau = kinds.ReduceLROnPlateau(optimizer, patience=0)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(3):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        for scheduler in schedulers:
            scheduler.step()
        plateau.step(float(step))
    state = {"model": model, "optimizer": optimizer, "schedulers": [*schedulers, plateau], "scaler": scaler, "ema": average}
    with shared_folder(world) as folder:
        save(folder / "step-1", state)
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.param_groups[0]["lr"], schedulers[0].last_epoch, plateau.best = 7.0, 0, 5.0
        load(folder / "step-1", state)
        assert [group["lr"] for group in optimizer.param_groups] == rates
        assert (schedulers[0].last_epoch, plateau.best) == (3, 0.0)


# ---------------------------------------------------------------------- a value for each rank


def first(values: list[Any]) -> Any:
    return values[0]


def all_of(values: list[Any]) -> Any:
    return (shardrt.world().rank, values)


def per_rank(rank: int, size: int, convert: Callable[[list[Any]], Any] | None = None) -> dict[str, Any]:
    """A state with values of one rank in every place; rank -1 for values that will be loaded."""

    def own(value: Any) -> Any:
        return checkpoint.PerRank(value, convert)

    return {
        "at": own(10 * size + rank),
        "data": {"position": own({"at": rank, "x": torch.full((2,), rank)}), "plain": 7},
        "list": [own((rank, "x" * 100 * (rank + 1))), 8, own(None)],
        "loader": own(Loader(rank + 2)),
        "holder": Holder([own(rank), own({0: rank}), 9]),
    }


@on_ranks(1, 2, 3)
def write_per_rank(world: World, folder: Path) -> None:
    model = shardrt.fully_shard(nn.Linear(5, 3))
    save(folder / f"{world.size}", {**per_rank(world.rank, world.size), "model": model, "step": 1})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("per rank")
    for size in (1, 2, 3):
        job(size).run(__name__, "write_per_rank", {"folder": folder})
    return folder


@on_ranks(1, 2, 3)
def test_each_rank_gets_its_own(world: World, written: Path) -> None:
    rank, size = world.rank, world.size
    state = per_rank(-1, -1)
    kept, loader = state["at"], state["loader"].value
    load(written / f"{size}", state)
    assert state["at"] is kept
    assert kept.value == 10 * size + rank
    assert (state["data"]["position"].value["at"], state["data"]["position"].value["x"].tolist()) == (rank, [rank, rank])
    assert [state["list"][0].value, state["list"][1], state["list"][2].value] == [(rank, "x" * 100 * (rank + 1)), 8, None]
    assert state["loader"].value is loader
    assert (loader.at, loader.seen.tolist()) == (rank + 2, list(range(rank + 2)))
    inside = state["holder"].state
    assert [inside[0].value, inside[1].value, inside[2]] == [rank, {0: rank}, 9]


@on_ranks(1, 2, 3)
def test_plain_places_get_their_own_as_well(world: World, written: Path) -> None:
    """Values that are not in a PerRank, and dicts that lack them."""
    state: dict[str, Any] = {"at": 0, "data": {}, "list": [0, 0, 0]}
    load(written / f"{world.size}", state)
    assert (state["at"], state["list"][0]) == (10 * world.size + world.rank, (world.rank, "x" * 100 * (world.rank + 1)))
    assert (state["data"]["position"]["at"], state["data"]["plain"]) == (world.rank, 7)


@pytest.mark.parametrize("saved", [1, 2, 3])
@on_ranks(1, 2, 3)
def test_another_number_of_ranks(world: World, written: Path, saved: int) -> None:
    """A function gets the values of all ranks, in their order; without one the load fails and says so."""
    if saved == world.size:
        return
    state = per_rank(-1, -1, all_of)
    del state["loader"]
    load(written / f"{saved}", state)
    assert state["at"].value == (world.rank, [10 * saved + rank for rank in range(saved)])
    _, positions = state["data"]["position"].value
    assert [position["at"] for position in positions] == list(range(saved))
    assert state["list"][2].value == (world.rank, [None] * saved)
    assert state["holder"].state[1].value == (world.rank, [{0: rank} for rank in range(saved)])
    loader = checkpoint.PerRank(Loader(), first)
    load(written / f"{saved}", {"loader": loader})
    assert loader.value.at == 2
    text = rf"'{{}}' was saved by each of {saved} ranks, .*{world.size}.*PerRank\(value, convert\)"
    for name, target in (
        ("at", {"at": checkpoint.PerRank(0)}),
        ("at", {"at": 0}),
        ("data.position", {"data": {}}),
        ("loader", {"loader": checkpoint.PerRank(Loader())}),
    ):
        with pytest.raises(CheckpointError, match=text.format(re.escape(name))):
            load(written / f"{saved}", target)
    load(written / f"{saved}", {"step": 0})


@on_ranks(2)
def test_values_for_each_rank_in_a_run(world: World) -> None:
    def position() -> dict[str, Any]:
        return {"model": nn.Linear(2, 2), "position": checkpoint.PerRank(0), "loader": checkpoint.PerRank(Loader())}

    with shared_folder(world) as folder:
        state = position()
        with shardrt.Run(folder, state, every=2) as run:
            for step in run.steps(5):
                state["position"].value += 1 + world.rank
                state["loader"].value.at = 10 * world.rank + step
                state["loader"].value.load_state_dict(Loader(10 * world.rank + step).state_dict())
        again = position()
        with shardrt.Run(folder, again, every=2) as run:
            assert (run.done, again["position"].value) == (5, 5 * (1 + world.rank))
            assert again["loader"].value.at == 10 * world.rank + 4


@on_ranks(2)
def test_what_was_saved_before_it_was_for_each_rank(world: World) -> None:
    """A plain value, or state, of a checkpoint is every rank's; and one that the checkpoint lacks is named."""
    with shared_folder(world) as folder:
        save(folder / "step-1", {"at": 5, "loader": Loader(4)})
        at, loader = checkpoint.PerRank(0), checkpoint.PerRank(Loader())
        load(folder / "step-1", {"at": at, "loader": loader})
        assert (at.value, loader.value.at, loader.value.seen.tolist()) == (5, 4, [0, 1, 2, 3])
        with pytest.raises(CheckpointError, match="the checkpoint lacks 'other'"):
            load(folder / "step-1", {"other": checkpoint.PerRank(0)})


@on_ranks(2)
def test_values_of_some_ranks(world: World) -> None:
    """Ranks that have none save and load none; a value that is plain elsewhere is refused."""
    with shared_folder(world) as folder:
        save(folder / "step-1", {"data": {"at": checkpoint.PerRank(3)} if world.rank else {}, "step": 1})
        state: dict[str, Any] = {"data": {}}
        load(folder / "step-1", state)
        assert state["data"] == ({"at": 3} if world.rank else {})
        with pytest.raises(CheckpointError, match=r"rank 0 raised .*the checkpoint lacks 'data\.at'"):
            load(folder / "step-1", {"data": {"at": checkpoint.PerRank(0)}})
        with pytest.raises(CheckpointError, match="'at' is a PerRank on rank 1, and an object on rank 0"):
            save(folder / "step-2", {"at": checkpoint.PerRank(3) if world.rank else 3})
        with pytest.raises(CheckpointError, match=r"'at\.@rank1of2' has a \S+Holder at \['holder'\].*alone into a PerRank"):
            save(folder / "step-2", {"at": checkpoint.PerRank({"holder": Holder(1) if world.rank else 1})})
        assert [path.name for path in folder.iterdir()] == ["step-1"]


@on_ranks(3)
def test_stock_dcp_loads_what_each_rank_saved(world: World, written: Path) -> None:
    if world.rank == 0:
        found = stock_load(written / "3")
        assert [found[f"at.@rank{rank}of3"] for rank in range(3)] == [30, 31, 32]
        assert [found[f"list.0.@rank{rank}of3"][0] for rank in range(3)] == [0, 1, 2]
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(written / "3", written / "3.pt")
        tree = torch.load(written / "3.pt", weights_only=True)
        assert tree["at"] == {f"@rank{rank}of3": 30 + rank for rank in range(3)}
        assert tree["list"][1] == 8

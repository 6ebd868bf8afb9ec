"""What is no tensor: values of numpy, what is refused, and lists, dicts and sets that are loaded where they are."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import pathlib
from collections import Counter, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from checkpoints import Holder, assert_holds, shared_folder, small_state, stock_load, tensors_of, train
from ranks import on_ranks
from shardrt.checkpoint import CheckpointError, DamagedCheckpointError, PerRank, async_save, load, save, save_safetensors
from shardrt.checkpoint.__main__ import main
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.state.entries import entries
from shardrt.checkpoint.state.objects import decode, encode
from shardrt.comm import World


class Flat(Holder):
    """The state itself."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)


# ---------------------------------------------------------------------- numpy


SCALARS = [
    np.float64(0.1),
    np.float32(0.1),
    np.float16(2),
    np.int64(-(2**62)),
    np.uint8(7),
    np.bool_(True),
    np.complex64(1 + 2j),
]
ARRAYS = [
    np.arange(6).reshape(2, 3).astype(dtype)
    for dtype in ("float64", "float32", "float16", "int64", "int8", "uint8", "uint16", "uint64", "bool", "complex128")
] + [np.array(3.5), np.empty((0, 3)), np.arange(12.0).reshape(3, 4).T, np.arange(10)[::-2]]


def as_numpy() -> dict[str, Any]:
    """Scalars and arrays in every kind of place."""
    return {
        "best": np.float32(0.5),
        "order": np.arange(5),
        "nested": {"pair": (np.int64(3), np.ones(2)), "list": [np.float64(1.5), {"deep": np.zeros((2, 2), dtype="int8")}]},
        "numbered": {np.int64(4): np.bool_(True), 5: np.arange(2)},
        "holder": Holder(("MT19937", np.arange(624, dtype="uint32"), 3)),
        "own": PerRank({"order": np.arange(3)}),
    }


@on_ranks(1, 2)
def test_numpy_comes_back(world: World) -> None:
    """Scalars as Python's numbers, arrays as arrays, also where the state has nothing of the kind."""
    with shared_folder(world) as folder:
        saved = as_numpy() | {f"scalar {i}": value for i, value in enumerate(SCALARS)}
        saved |= {f"array {i}": value for i, value in enumerate(ARRAYS)}
        save(folder / "saved", saved)
        state: dict[str, Any] = {**dict.fromkeys(saved), "nested": {}, "holder": Holder(()), "own": PerRank(None)}
        load(folder / "saved", state)
        assert (state["best"], type(state["best"])) == (0.5, float)
        nested = state["nested"]
        assert (nested["pair"][0], nested["pair"][1].tolist()) == (3, [1.0, 1.0])
        assert nested["list"][0] == 1.5
        assert nested["list"][1]["deep"].dtype == np.int8
        assert (state["numbered"][4], state["numbered"][5].tolist()) == (True, [0, 1])
        assert state["own"].value["order"].tolist() == [0, 1, 2]
        np.random.RandomState().set_state(state["holder"].state)
        for i, scalar in enumerate(SCALARS):
            found = state[f"scalar {i}"]
            assert found == scalar
            assert type(found) in (int, float, bool, complex)
        for i, expected in enumerate(ARRAYS):
            found = state[f"array {i}"]
            assert type(found) is np.ndarray
            assert (found.dtype, found.shape, found.flags.writeable) == (expected.dtype, expected.shape, True)
            assert np.array_equal(found, expected)
        if world.size > 1:
            with pytest.raises(CheckpointError, match=r"'order' is array\(\[0, 1\]\) on rank 0"):
                save(folder / "refused", {"order": np.array([world.rank, 1])})


@on_ranks(1)
def test_everybody_reads_numpy(world: World, tmp_path: Path) -> None:
    """Each object loads with weights_only=True; stock DCP gets tensors for arrays."""
    state = as_numpy()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.25))
    save(tmp_path / "saved", {**state, "model": model, "optimizer": optimizer})
    found = stock_load(tmp_path / "saved")
    assert found["optimizer.param_groups.0.lr"] == 0.25
    assert torch.equal(found["order"]["numpy.ndarray"], torch.arange(5))
    stored = read_stored(tmp_path / "saved").objects
    for name, item in stored.items():
        data = (tmp_path / "saved" / item.file).read_bytes()[item.offset : item.offset + item.length]
        torch.load(io.BytesIO(data), weights_only=True)
        assert b"numpy.ndarray" in data or name not in ("order", "nested.pair", "own.@rank0of1")


@on_ranks(1)
def test_arrays_are_loaded_where_they_are(world: World, tmp_path: Path) -> None:
    save(tmp_path / "saved", {"a": np.arange(4), "b": np.arange(4), "c": np.arange(4), "h": Holder({"x": np.arange(4)})})
    held, other, wide = np.zeros(4, dtype="int64"), np.zeros(3, dtype="int64"), np.zeros(4)
    inside = Holder({"x": np.zeros(4), "more": {}})
    state: dict[str, Any] = {"a": held, "b": other, "c": wide, "h": inside}
    load(tmp_path / "saved", state)
    assert state["a"] is held
    assert (held.tolist(), other.tolist(), wide.tolist()) == ([0, 1, 2, 3], [0, 0, 0], [0.0, 0.0, 0.0, 0.0])
    assert (state["b"].tolist(), state["c"].dtype) == ([0, 1, 2, 3], np.int64)
    assert inside.state["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'h\.more'"):
        load(tmp_path / "saved", {"h": Flat({"more": np.zeros(4), "inside": {"x": np.zeros(4)}})})


# ---------------------------------------------------------------------- what is refused


class Kind(enum.Enum):
    ONE = 1


@dataclass
class Config:
    a: int = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "found", "advice"),
    [
        (decimal.Decimal("0.5"), "is a decimal.Decimal", r"use float\(x\)"),
        (np.longdouble(0.5), "is a numpy.longdouble", r"use float\(x\)"),
        (np.array(["a"]), "is a numpy.ndarray of <U1", r"use x.tolist\(\)"),
        (np.datetime64("2020-01-01"), "is a numpy.datetime64", r"use str\(x\)"),
        (np.ma.masked_array([1]), r"is a numpy.ma(.core)?.MaskedArray of int64", r"use x.tolist\(\)"),
        ({"a": [1, (2, pathlib.Path("/tmp"))]}, r"has a pathlib.PosixPath at \[1\]\[1\]", r"use str\(x\)"),
        ([{0: {"x": Kind.ONE}}], r"has a test_checkpoint_objects.Kind at \[0\]\[0\]\['x'\]", r"use x.value"),
        (Config(), "is a test_checkpoint_objects.Config", r"use dataclasses.asdict\(x\)"),
        ((Pair(1, 2),), r"has a test_checkpoint_objects.Pair at \[0\]", r"use tuple\(x\)"),
        (frozenset([1]), "is a frozenset", r"use set\(x\)"),
        (range(3), "is a range", r"use list\(x\)"),
        (datetime.datetime(2020, 1, 1), "is a datetime.datetime", r"use str\(x\)"),
        (len, "is a builtin_function_or_method", "leave it out"),
        (torch.Generator(), "is a torch._C.Generator", r"use x.get_state\(\)"),
        ({Kind.ONE: 1}, r"has a test_checkpoint_objects.Kind among its keys", "x.value"),
        (Ellipsis, "is a ellipsis", "save what it consists of"),
    ],
)
def test_refusals_are_one_line(value: Any, found: str, advice: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^'value.*?' ?.*({found}).*{advice}") as caught:
        entries({"value": value})
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 250


# ---------------------------------------------------------------------- lists, dicts and sets


@on_ranks(1, 2)
def test_containers_are_loaded_where_they_are(world: World) -> None:
    """Whoever holds a list, dict or set of the state sees the values of the checkpoint, more or fewer of them."""
    saved = {
        "plain": [1, 2, 3],
        "empty": [],
        "in dict": {"deep": [[1], [2]], "numbers": {0: "a", 1: "b"}, "set": {1, 2}},
        "history": [{"loss": 1.0}, {"loss": 0.5, "at": [7]}, {"loss": 0.25}],
        "mixed": [1, {"a": 2}, [3]],
        "counter": Counter({2: 5}),
        "tensors": [torch.ones(2), 4],
    }
    with shared_folder(world) as folder:
        save(folder / "saved", saved)
        befores: tuple[dict[str, Any], ...] = (
            {"plain": [0], "empty": [1], "history": [{"loss": 9.0}], "mixed": [0, {}, []], "set": {5}, "numbers": {7: "x"}},
            {"plain": [], "empty": [], "history": [], "mixed": [], "set": set(), "numbers": {}},
        )
        for before in befores:
            inner: dict[str, Any] = {"deep": [9], "numbers": before["numbers"], "set": before["set"]}
            state: dict[str, Any] = {**{key: before[key] for key in ("plain", "empty", "history", "mixed")}, "in dict": inner}
            state |= {"counter": Counter({1: 1}), "tensors": [torch.zeros(2), 0]}
            held = {key: value for key, value in state.items() if key != "in dict"} | inner
            load(folder / "saved", state)
            for key, value in held.items():
                found = (state if key in state else inner)[key]
                assert found is value, key
                if key != "tensors":
                    assert value == (saved if key in saved else saved["in dict"])[key], key
            assert (state["tensors"][0].tolist(), state["tensors"][1]) == ([1.0, 1.0], 4)
            assert type(state["counter"]) is Counter
        kind: dict[str, Any] = {"in dict": {"numbers": defaultdict(list)}}
        load(folder / "saved", kind)
        assert kind["in dict"]["numbers"] == {0: "a", 1: "b"}
        assert type(kind["in dict"]["numbers"]) is defaultdict


@on_ranks(1)
def test_conversions_keep_arrays(world: World, tmp_path: Path) -> None:
    """To a file of torch.save that loads with weights_only=True, and back, and to another folder."""
    saved = {"order": np.arange(4), "own": PerRank((np.float64(2), np.ones(2))), "plain": [1, 2]}
    save(tmp_path / "saved", saved)
    for source, target, kind in (("saved", "file.pt", "torch"), ("file.pt", "again", "dcp"), ("saved", "copy", "dcp")):
        assert main(["convert", str(tmp_path / source), str(tmp_path / target), "--to", kind]) == 0
    torch.load(tmp_path / "file.pt", weights_only=True)
    for name in ("again", "copy"):
        state: dict[str, Any] = {"order": np.zeros(2), "own": PerRank(None), "plain": []}
        load(tmp_path / name, state)
        assert state["order"].tolist() == [0, 1, 2, 3]
        assert (state["own"].value[0], state["own"].value[1].tolist(), state["plain"]) == (2.0, [1.0, 1.0], [1, 2])


# ---------------------------------------------------------------------- inference mode


@on_ranks(1, 2)
def test_inside_of_inference_mode(world: World) -> None:
    """An evaluation that saves, exports and loads; what is made there is trained afterwards."""
    with shared_folder(world) as folder:
        state, fresh = small_state(2), small_state(0)
        expected = tensors_of(state)
        with torch.inference_mode():
            save(folder / "saved", state)
            async_save(folder / "copied", state).wait()
            save_safetensors(state["model"], folder / "exported")
            load(folder / "saved", fresh)
        async_save(folder / "again", fresh).wait()
        if world.rank == 0:
            for name in ("saved", "copied", "again"):
                assert_holds(folder / name, expected, step=2)
        train(state)
        train(fresh)
        after = tensors_of(state)
        assert all(torch.equal(value, after[name]) for name, value in tensors_of(fresh).items())


@on_ranks(1)
def test_models_that_were_made_in_inference_mode(world: World, tmp_path: Path) -> None:
    with torch.inference_mode():
        saved, loaded = nn.Linear(3, 3), nn.Linear(3, 3)
        save(tmp_path / "saved", {"model": saved, "tensor": torch.ones(2)})
        load(tmp_path / "saved", {"model": loaded})
        assert torch.equal(saved.weight, loaded.weight)
    save(tmp_path / "again", {"model": saved})


TREE = {"lr": 0.1, "betas": (0.9, 0.99), "order": torch.arange(3), "names": ["a", {1: "b"}]}


def flipped(data: bytes, step: int) -> Iterator[bytes]:
    for place in range(0, len(data) * 8, step):
        found = bytearray(data)
        found[place // 8] ^= 1 << place % 8
        yield bytes(found)


def test_a_flipped_bit_anywhere_in_an_object_is_damage() -> None:
    """Or it is in the mark of the checksum, and changes no value. A run goes on from an earlier checkpoint."""
    data, sound = encode("x", TREE), 0
    for bad in flipped(data, 1):
        with suppress(DamagedCheckpointError):
            assert repr(decode(bad, "x")) == repr(TREE)
            sound += 1
    assert sound < 8 * 20


def test_a_flipped_bit_in_an_object_of_others_raises_nothing_else() -> None:
    """An object of stock DCP, or of an earlier version, has checksums of its records alone."""
    file = io.BytesIO()
    torch.save(TREE, file)
    assert repr(decode(file.getvalue(), "x")) == repr(TREE)
    for bad in flipped(file.getvalue(), 7):
        with suppress(DamagedCheckpointError):
            decode(bad, "x")


def test_verify_finds_a_flipped_bit_in_an_objects_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": TREE}, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "saved"), "--to", "dcp"]) == 0
    found, file = read_stored(tmp_path / "saved").objects["x.lr"], tmp_path / "saved" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[found.offset + 10] ^= 1  # the time of a record
    file.write_bytes(data)
    assert main(["verify", str(tmp_path / "saved")]) == 1
    assert "object 'x.lr': item at" in capsys.readouterr().out

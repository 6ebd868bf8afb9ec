"""Safetensors files: the format beside the package `safetensors`, models in and out, and exports that fail."""

from __future__ import annotations

import copy
import errno
import importlib
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import checkpoints
import shardrt
import toys_tp
from ranks import on_ranks, refused, run_script
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError, async_save_safetensors, latest, load_safetensors, save, save_safetensors
from shardrt.checkpoint.disk import files, folders
from shardrt.checkpoint.disk.drafts import Draft, folder_of, this_machine
from shardrt.checkpoint.formats import geometry
from shardrt.checkpoint.formats.safetensors import TensorInfo, encode_header, read_arrays, split_into_files
from shardrt.checkpoint.formats.sizes import parse_size
from shardrt.checkpoint.saving import safetensors as saving
from shardrt.checkpoint.saving.sources import Direct, ItemSource
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import parallelize_module
from toys import OddMLP, TiedGPT, batch, shard_blocks

Shards = Callable[[nn.Module], nn.Module]

# ---------------------------------------------------------------------- the format, without ranks

MIXED = {
    "b.weight": torch.arange(6.0).view(2, 3),
    "a.weight": torch.arange(5, dtype=torch.float64),
    "scalar": torch.tensor(3, dtype=torch.int16),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False, True]),
    "half.ü": torch.ones(3, dtype=torch.bfloat16),
    "byte": torch.zeros(3).to(torch.float8_e4m3fn),
}


def test_a_header_is_that_of_the_reference(tmp_path: Path) -> None:
    save_file(MIXED, tmp_path / "x.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "x.safetensors").read_bytes()
    header, offsets = encode_header({name: TensorInfo(t.dtype, t.shape) for name, t in MIXED.items()}, {"format": "pt"})
    assert written.startswith(header)
    arrays = read_arrays(tmp_path / "x.safetensors")
    assert {name: array.offset for name, array in arrays.items()} == offsets
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in MIXED.items()
    }


def test_tensors_are_split_as_by_huggingface_hub() -> None:
    split = importlib.import_module("huggingface_hub").split_torch_state_dict_into_shards  # slow to import, on ranks too
    choose = random.Random(0)
    for _ in range(50):
        tensors = {f"t{index}": torch.empty(choose.randrange(60)) for index in range(choose.randrange(1, 12))}
        limit = choose.randrange(1, 400)
        expected = split(tensors, max_shard_size=limit, filename_pattern="model{suffix}.safetensors")
        infos = {name: TensorInfo(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        assert split_into_files(infos, limit) == expected.filename_to_tensors


def test_sizes_have_units() -> None:
    assert [parse_size(size) for size in ("5GB", "1.5 mb", "20KB", "1TB", 7)] == [5 * 10**9, 1500000, 20000, 10**12, 7]
    for wrong in ("5GiB", "GB", "", 0, -1, "nanGB"):
        with pytest.raises(ValueError, match="expected a number of bytes, or such as '5GB'"):
            parse_size(wrong)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"x": entry(shape=[3])}, r"'x' of shape \(3,\) and torch.float32 has 8 bytes, not 12"),
        ({"x": entry(offsets=[4, 12])}, "a hole before 'x'"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, "an overlap with 'y'"),
        ({"x": entry(shape=[1], offsets=[0, 4])}, "its tensors end at byte .*, the file at"),
        ({"x": entry(shape=[4], offsets=[0, 16])}, "its tensors end at byte .*, the file at"),
        ({"x": entry(offsets=[8, 0])}, "data_offsets"),
        ({"x": entry(shape=[-2])}, "integers >= 0"),
        ({"x": entry(shape=[True])}, "integers >= 0"),
        ({"x": entry(shape=[2**40, 2**40, 2**40])}, "has 8 bytes, not"),
        ({"x": entry(dtype="F4")}, "tensor 'x' has the dtype 'F4'"),
        ({"x": entry(dtype=[])}, "tensor 'x' has the dtype"),
        ({"x": {"dtype": "F32"}}, "the entry of 'x'"),
        ({"x": entry(), "__metadata__": {"step": 3}}, "strings to strings"),
        ([], "no object"),
        (b'{"x": 1, "x": 2}', "'x' comes twice"),
        (b"{" * 100_000, "JSON"),
        (b'{"x"', "JSON"),
        (b"\xff", "JSON"),
        (b" {}", "no object"),
        ((1 << 62).to_bytes(8, "little"), "a header of"),
        (b"abc", "a header of"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, header: Any, message: str) -> None:
    file = tmp_path / "bad.safetensors"
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = text if message == "a header of" else len(text).to_bytes(8, "little") + text + bytes(8)
    file.write_bytes(whole)
    refused(f"(?s)bad.safetensors'.*{message}", lambda: read_arrays(file), CheckpointError)


def test_a_bad_folder_is_refused_by_name(tmp_path: Path) -> None:
    refused(r"has no model.safetensors and no", lambda: read_arrays(tmp_path), CheckpointError)
    with pytest.raises(CheckpointError, match=r"cannot open .*gone.safetensors'.*No such file"):
        read_arrays(tmp_path / "gone.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, message in (
        ({"x": "model-00001-of-00001.safetensors", "y": "model-00001-of-00001.safetensors"}, "says that 'y' is in"),
        ({"x": "../model.safetensors"}, "is no file of the folder"),
        ({"x": 3}, "expected a 'weight_map'"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(f"(?s)index.json'.*{message}", lambda: read_arrays(tmp_path), CheckpointError)


# ---------------------------------------------------------------------- on ranks


# In memory if possible: other jobs may keep the disk busy.
shared_folder = partial(checkpoints.shared_folder, within="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def on_meta(model: nn.Module) -> nn.Module:
    """The model without values; ties break."""
    return copy.deepcopy(model).to("meta")


def made_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def check_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Compare every tensor of the model, bit by bit. Collective."""
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, shardrt.DTensor) else tensor
        assert full.dtype == expected[name].dtype
        assert torch.equal(full, expected[name]), name


def files_in(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files, by the reference; the index has to say where they are."""
    files = sorted(folder.glob("*.safetensors"))
    found = {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in found.values())
    return {name: tensor for name, (_, tensor) in found.items()}


def by_columns(model: nn.Module) -> nn.Module:
    """Shards along the last dim: their runs in a file are short."""
    return shard_blocks(model, shard_placement_fn=lambda param: shardrt.Shard(max(0, param.dim() - 1)))


def replicated(model: nn.Module) -> nn.Module:
    shardrt.replicate(model)
    return model


def plain(model: nn.Module) -> nn.Module:
    return model


def hybrid(model: nn.Module) -> nn.Module:
    size = shardrt.world().size
    replicas = 2 if size % 2 == 0 else 1
    return shard_blocks(model, mesh=DeviceMesh(shardrt.world().comm, (replicas, size // replicas), ("replicate", "shard")))


LAYOUTS: list[Shards] = [shard_blocks, by_columns, hybrid, replicated, plain]


class Counting(files.Reader):
    nbytes_in_all = 0

    def close(self) -> None:
        Counting.nbytes_in_all += self.nbytes
        super().close()


@on_ranks(2, 3, more=(1, 4))
def test_saved_and_loaded_in_any_layout(world: World) -> None:
    """Files equal the model by the reference; each rank reads its bytes only, and writes them once."""
    whole = OddMLP(layers=1).double()
    whole.register_buffer("mask", torch.tensor([True, False, True]))
    expected = whole.state_dict()
    with shared_folder(world) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "reader", Counting)
        patch.setattr(geometry, "PIECE_NBYTES", 100)
        for index, layout in enumerate(LAYOUTS):
            save_safetensors(layout(copy.deepcopy(whole)), folder / "out", max_shard_size="2KB" if index % 2 else "5GB")
            assert sorted(os.listdir(folder)) == ["out"]
            found = files_in(folder / "out")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            model = LAYOUTS[index - 1](on_meta(whole))
            Counting.nbytes_in_all = 0
            assert load_safetensors(model, folder / "out") == ([], [])
            check_equal(model, expected)
            local = [t._local_tensor if isinstance(t, shardrt.DTensor) else t for t in model.state_dict().values()]
            assert Counting.nbytes_in_all == sum(tensor.nbytes for tensor in local)
            world.barrier()


@on_ranks(1, 3)
def test_dtypes_are_converted_and_metadata_kept(world: World) -> None:
    whole = OddMLP()
    whole.register_buffer("count", torch.tensor([1, 2, 1 << 40]))
    whole.register_buffer("scaled", torch.ones(3).to(torch.float8_e5m2))
    with shared_folder(world) as folder:
        save_safetensors(shard_blocks(copy.deepcopy(whole)), folder, dtype=torch.bfloat16, metadata={"step": "7"})
        with safe_open(folder / "model.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "step": "7"}
        kept = {"count", "scaled"}
        expected = {k: v if k in kept else v.bfloat16() for k, v in whole.state_dict().items()}
        assert all(
            torch.equal(tensor.float(), expected[k].float()) for k, tensor in load_file(folder / "model.safetensors").items()
        )
        model = shard_blocks(on_meta(whole).double())
        load_safetensors(model, folder / "model.safetensors")
        check_equal(model, {k: v if k in kept - {"scaled"} else v.double() for k, v in expected.items()})


@on_ranks(2, 3)
def test_tied_tensors_are_stored_once(world: World) -> None:
    whole = TiedGPT()
    for keys in (None, {"head.weight": "tokens.weight"}, [r"tokens\.\w+"]):
        setattr(whole, "_tied_weights_keys", keys)  # noqa: B010
        with shared_folder(world) as folder:
            save_safetensors(shard_blocks(copy.deepcopy(whole)), folder)
            (left_out,) = whole.state_dict().keys() - load_file(folder / "model.safetensors").keys()
            assert left_out == ("head.weight" if not isinstance(keys, list) else "tokens.weight")
            for layout in (shard_blocks, plain):
                model = layout(made_on_meta(TiedGPT))
                load_safetensors(model, folder)
                check_equal(model, whole.state_dict())
                assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")


@on_ranks(1, 2)
def test_a_tied_parameter_with_two_values(world: World) -> None:
    whole = TiedGPT()
    values = {name: value.detach().clone() for name, value in whole.state_dict().items()}
    model = shard_blocks(copy.deepcopy(whole))
    with shared_folder(world) as folder:
        for name, more in (("same", 0), ("other", 1)):
            if world.rank == 0:
                (folder / name).mkdir()
                save_file({**values, "head.weight": values["head.weight"] + more}, folder / name / "model.safetensors")
        world.barrier()
        load_safetensors(model, folder / "same")
        with pytest.raises(CheckpointError, match=r"'tokens.weight' and 'head.weight' have different values"):
            load_safetensors(model, folder / "other")
        load_safetensors(model, folder / "other", strict=False)
        check_equal(model, whole.state_dict())


@on_ranks(2)
def test_a_gathered_model_is_saved_and_loaded(world: World) -> None:
    """Parameters that stay gathered after the forward are gathered again after a load."""
    whole, other = OddMLP().double(), OddMLP().double()
    model = shard_blocks(copy.deepcopy(whole), reshard_after_forward=False)
    with shared_folder(world) as folder:
        save_safetensors(other, folder)
        with torch.no_grad():
            assert torch.equal(model(batch(0)), whole(batch(0)))
            load_safetensors(model, folder)
            assert torch.equal(model(batch(0)), other(batch(0)))
            save_safetensors(model, folder)
        check_equal(other, load_file(folder / "model.safetensors"))


def save_doubled(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2


def load_halved(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    if f"{prefix}weight" in state:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


@on_ranks(2)
def test_hooks_of_state_dicts_run(world: World) -> None:
    whole = OddMLP()
    models = [shard_blocks(copy.deepcopy(whole)), shard_blocks(OddMLP())]
    for model in models:
        model.get_submodule("out").register_state_dict_post_hook(save_doubled)
        model.get_submodule("out").register_load_state_dict_pre_hook(load_halved)
    with shared_folder(world) as folder:
        save_safetensors(models[0], folder)
        assert torch.equal(load_file(folder / "model.safetensors")["out.weight"], 2 * whole.out.weight)
        load_safetensors(models[1], folder)
        expected = {**whole.state_dict(), "out.weight": 2 * whole.out.weight.detach()}
        check_equal(models[1], expected)
        checkpoint.set_model_state_dict(models[1], expected)
        check_equal(models[1], expected)


@on_ranks(1, 2)
def test_names_are_mapped(world: World) -> None:
    whole = OddMLP()
    with shared_folder(world) as folder:
        if world.rank == 0:
            renamed = {f"net.{k.replace('blocks', 'layers')}": v for k, v in whole.state_dict().items()}
            save_file({**renamed, "old": torch.ones(1)}, folder / "model.safetensors")
        world.barrier()
        table = {f"net.{k.replace('blocks', 'layers')}": k for k in whole.state_dict()}
        maps: list[Any] = [
            lambda name: table.get(name),
            {**table, "old": None},
            [(r"^net\.", ""), (r"\blayers\b", "blocks")],
        ]
        for key_map in maps:
            model = shard_blocks(OddMLP())
            loaded = load_safetensors(model, folder, key_map=key_map, strict=not isinstance(key_map, list))
            assert loaded == ([], ["old"] if isinstance(key_map, list) else [])
            check_equal(model, whole.state_dict())
        with pytest.raises(CheckpointError, match=r"key_map gives 'net.\S+' and 'net.\S+' the same name 'x'"):
            load_safetensors(model, folder, key_map=lambda name: "x")


@on_ranks(1, 2)
def test_what_does_not_fit_is_listed(world: World) -> None:
    model = shard_blocks(OddMLP())
    before = {name: tensor.full_tensor().clone() for name, tensor in model.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    state["out.weight"] = torch.zeros(3, 14)
    state["extra"] = state.pop("inp.bias")
    with shared_folder(world) as folder:
        if world.rank == 0:
            save_file(state, folder / "model.safetensors")
        world.barrier()
        with pytest.raises(
            CheckpointError,
            match=r"'out.weight': expected shape \(3, 13\), found \(3, 14\).*missing: 'inp.bias'.*unexpected: 'extra'",
        ):
            load_safetensors(model, folder)
        check_equal(model, before)
        del state["out.weight"]
        world.barrier()
        if world.rank == 0:
            save_file(state, folder / "model.safetensors")
        world.barrier()
        assert load_safetensors(model, folder, strict=False) == (["inp.bias", "out.weight"], ["extra"])
        check_equal(model, {name: before[name] if name in ("inp.bias", "out.weight") else state[name] for name in before})
        if world.rank == 0:
            with open(folder / "model.safetensors", "r+b") as file:
                file.truncate(200)
        world.barrier()
        refused(r"model.safetensors' is no safetensors file", lambda: load_safetensors(model, folder), CheckpointError)


@on_ranks(2, 3)
def test_a_failed_export_leaves_the_older_one(world: World) -> None:
    """A full disk on one rank is an error on all; other files of the folder stay, and so do those of an export that fails."""
    model = shard_blocks(OddMLP())
    with shared_folder(world) as parent, pytest.MonkeyPatch.context() as patch:
        folder = parent / "out"
        if world.rank == 0:
            (folder / "nested").mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            (folder / "nested" / "model.safetensors").write_text("mine")
            (folder / "model-00009-of-00009.safetensors").write_text("of an older export")
            killed = folder_of(folder, this_machine(), 32 * "a", ".safetensors") / "out"
            killed.mkdir(parents=True)
            (killed / "model.safetensors").write_text("half")
            (killed / "late.json").write_text("{}")
        world.barrier()
        save_safetensors(model, folder)
        others = ["config.json", "late.json", "model.safetensors", "nested"]
        assert sorted(os.listdir(folder)) == others
        assert (folder / "nested" / "model.safetensors").read_text() == "mine"
        kept = (folder / "model.safetensors").read_bytes()

        def full_disk(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        world.barrier()
        with torch.no_grad():
            model.get_parameter("inp.weight").zero_()
        if world.rank == 1:
            patch.setattr(os, "pwritev", full_disk)
        with pytest.raises(CheckpointError, match=r"cannot write .*\.safetensors'.*No space left on device; free"):
            save_safetensors(model, folder)
        world.barrier()
        patch.undo()
        patch.setattr(saving, "exchange", full_disk)
        with pytest.raises(
            CheckpointError, match=r"CheckpointError: cannot rename .*.safetensors.tmp/out'.*No space left on device"
        ):
            save_safetensors(model, folder)
        assert (folder / "model.safetensors").read_bytes() == kept
        world.barrier()
        assert sorted(os.listdir(parent)) == ["out"]
        patch.undo()
        save_safetensors(model, folder, max_shard_size="1KB")
        assert {*others} - {"model.safetensors"} < {*os.listdir(folder)}
        assert not (folder / "model.safetensors").exists()
        assert not files_in(folder)["inp.weight"].any()


@on_ranks(1, 2)
def test_two_jobs_export_into_one_folder(world: World) -> None:
    """The second one begins while the first one writes: each puts its own files there, whole."""
    models = [OddMLP(), OddMLP()]
    sharded = [shard_blocks(copy.deepcopy(model)) for model in models]  # every rank writes
    with shared_folder(world) as parent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "begin", lambda prepare, is_copied: prepare())
        begun: list[Any] = [async_save_safetensors(sharded[0], parent / "out")]

        def items(job: int) -> Iterator[ItemSource]:
            prepared, found = begun[job]
            for item in found:
                yield prepared.source(item, Direct().pieces)
                if len(begun) == 1:
                    begun.append(async_save_safetensors(sharded[1], parent / "out"))

        for job, model in enumerate(models):
            begun[job][0].write(items(job))
            world.barrier()
            begun[job][0].commit()
            world.barrier()
            found = files_in(parent / "out")
            assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
            world.barrier()
        assert os.listdir(parent) == ["out"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_into_a_folder_while_it_is_exported_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """Also if it cannot be moved: then the export is there, and the next one moves it."""
    target, beside = tmp_path / "out", folder_of(tmp_path / "out", this_machine(), 32 * "a", ".safetensors")
    exchange, rename = saving.exchange, os.rename

    def late(folder: Path, of: Path) -> None:
        (of / "late.json").write_text("mine")
        (of / "nested" / "deep" / "model.safetensors").write_text("mine as well")
        exchange(folder, of)

    def denied(old: Path, new: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    (target / "nested" / "deep").mkdir(parents=True)
    (target / "model.safetensors").write_text("old")
    draft = Draft(target, beside)
    (beside / "out").mkdir()
    (beside / "out" / "model.safetensors").write_text("new")
    monkeypatch.setattr(saving, "exchange", late)
    if fails:
        monkeypatch.setattr(os, "rename", denied)
    saving.PreparedExport(target, beside / "out", draft).commit()
    monkeypatch.setattr(os, "rename", rename)
    assert (target / "model.safetensors").read_text() == "new"
    assert ("has the new files, but: cannot delete" in caplog.text) == fails
    if fails:
        assert (beside / "out" / "late.json").read_text() == "mine"
        saving._clean(target)
    assert (target / "late.json").read_text() == "mine"
    assert (target / "nested" / "deep" / "model.safetensors").read_text() == "mine as well"
    assert not beside.exists()


def test_a_folder_that_appears_at_the_end_gets_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "out", os.rename

    def late(old: Path, new: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("mine")
        rename(old, new)

    draft = Draft(target, folder_of(target, this_machine(), 32 * "a", ".safetensors"))
    (draft.folder / "out").mkdir()
    (draft.folder / "out" / "model.safetensors").write_text("new")
    monkeypatch.setattr(os, "rename", late)
    saving.PreparedExport(target, draft.folder / "out", draft).commit()
    assert {path.name: path.read_text() for path in target.iterdir()} == {"model.safetensors": "new", "config.json": "mine"}
    assert os.listdir(tmp_path) == ["out"]


@on_ranks(2)
def test_ranks_may_see_a_folder_at_different_places(world: World) -> None:
    """As where links, or what is mounted, differ between machines."""
    model = shard_blocks(OddMLP())
    with shared_folder(world) as parent, pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            (parent / "link").symlink_to(parent)
        world.barrier()
        if world.rank == 1:
            patch.setattr(os.path, "realpath", lambda path: str(parent / "link" / "out"))
        save_safetensors(model, parent / "out")
        assert files_in(parent / "out").keys() == model.state_dict().keys()


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_on_all_ranks(world: World) -> None:
    model = OddMLP()
    with shared_folder(world) as folder:
        with pytest.raises(CheckpointError, match=r"'inp.weight' \(rank 0\) is on the meta device"):
            save_safetensors(shard_blocks(on_meta(model)), folder)
        with pytest.raises(CheckpointError, match="ValueError: max_shard_size='5 apples'"):
            save_safetensors(model, folder, max_shard_size="5 apples")
        if world.rank == 1:
            model.out.weight = nn.Parameter(torch.ones(3, 14))
        with pytest.raises(CheckpointError, match=r"'out.weight' is .*\(3, 13\).* on rank 0, and .*\(3, 14\).* on rank 1"):
            save_safetensors(model, folder)
        term = shardrt.DTensor.from_local(torch.ones(3, 13), world.mesh, [shardrt.Partial()])
        model.out.weight = nn.Parameter(term)
        with pytest.raises(CheckpointError, match=r"'out.weight' \(rank 0\) is Partial.*, a term of a reduction"):
            save_safetensors(model, folder)
        with pytest.raises(CheckpointError, match=r"the ranks save in different folders: .*float64.*float32"):
            save_safetensors(OddMLP(), folder, dtype=(torch.float64, torch.float32)[world.rank])
        refused("expected a folder that is no mount point", lambda: save_safetensors(model, "/proc"), CheckpointError)
        assert not os.listdir(folder)


@on_ranks(3)
def test_ranks_may_have_different_tensors(world: World) -> None:
    """As the stages of a pipeline: the files have those of all ranks."""
    stages = nn.ModuleDict({str(stage): nn.Linear(3, stage + 1) for stage in range(3)})
    expected = copy.deepcopy(stages.state_dict())
    for stage in range(3):
        if stage not in (world.rank, world.rank - 1):
            del stages[str(stage)]
    with shared_folder(world) as folder:
        save_safetensors(stages, folder, max_shard_size=40)
        found = files_in(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(2, 4)
def test_tensor_parallel(world: World, tp: int) -> None:
    """From a tensor-parallel and sharded model to files, and from files to another split."""
    whole = toys_tp.Transformer()

    def split(model: nn.Module, tp: int, *, sharded: bool) -> nn.Module:
        mesh = DeviceMesh(world.comm, (world.size // tp, tp), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], toys_tp.plain_plan())
        if sharded:
            shard_blocks(model, "layers", mesh=mesh["dp"])
        return model

    with shared_folder(world) as folder:
        for sharded in (False, True):
            save_safetensors(split(copy.deepcopy(whole), tp, sharded=sharded), folder, max_shard_size="1KB")
            found = files_in(folder)
            assert {**found, "head.weight": found["tokens.weight"]}.keys() == whole.state_dict().keys()
            assert all(torch.equal(found[name], whole.state_dict()[name]) for name in found)
            model = split(
                copy.deepcopy(whole) if not sharded else made_on_meta(toys_tp.Transformer), world.size // tp, sharded=True
            )
            with torch.no_grad():
                for param in model.parameters():
                    if not param.is_meta:
                        param.zero_()
            load_safetensors(model, folder)
            check_equal(model, whole.state_dict())


@on_ranks(1, 2, 4)
def test_exports_in_the_background(world: World) -> None:
    """What is written are the values at the call; other saves come before and after."""
    whole = OddMLP(layers=1).double()
    with shared_folder(world) as folder:
        for layout in LAYOUTS:
            model = layout(copy.deepcopy(whole))
            for dtype in (None, torch.bfloat16):
                saving = async_save_safetensors(model, folder / "out", dtype=dtype, max_shard_size="2KB")
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                saving.wait()
                found = files_in(folder / "out")
                assert all(torch.equal(found[k], v.to(dtype or v.dtype)) for k, v in whole.state_dict().items())
                world.barrier()
                load_safetensors(model, folder / "out")
                model = layout(copy.deepcopy(whole))
        saving = async_save_safetensors(model, folder / "first")
        save(folder / "step-1", {"model": model})
        assert saving.poll()
        assert latest(folder) == folder / "step-1"
        assert files_in(folder / "first").keys() == whole.state_dict().keys()


@on_ranks(2, 4)
def test_replicas_share_an_export(world: World) -> None:
    """Each writes about as much as the others, and every byte is written once."""
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
    nbytes, write = [0], os.pwritev

    def counted(fd: int, buffers: Any, offset: int) -> int:
        nbytes[0] += sum(map(len, buffers))
        return write(fd, buffers, offset)

    replicas = DeviceMesh(world.comm, (2, world.size // 2), ("replicate", "shard"))
    layouts: list[Shards] = [plain, replicated, lambda model: shardrt.fully_shard(model, mesh=replicas)]
    for layout in layouts:
        with shared_folder(world) as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", counted)
            nbytes[0] = 0
            save_safetensors(layout(copy.deepcopy(model)), folder / "out")
            patch.undo()
            everyone, total = world.comm.exchange(nbytes[0]), (folder / "out" / "model.safetensors").stat().st_size
            assert sum(everyone) == total
            assert max(everyone) < 1.2 * total / world.size
            expected = model.state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in files_in(folder / "out").items())


KILLED = """
import os, pathlib, signal, torch, shardrt
from shardrt.checkpoint.saving import safetensors as saving
from shardrt.checkpoint.saving.sources import Direct, ItemSource
world = shardrt.init("cpu")
folder = pathlib.Path({folder!r})
model = shardrt.fully_shard(torch.nn.Linear(64, 64))
shardrt.checkpoint.save_safetensors(model, folder / "out")
with torch.no_grad():
    model.weight.zero_()
place = {place!r}
def kill(*args):
    if world.rank == 0:
        print("killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
if place == "written":
    saving.PreparedExport.commit = kill
elif place == "linked":
    saving.exchange = kill
else:
    saving.PreparedExport.write = kill
shardrt.checkpoint.async_save_safetensors(model, folder / "out").wait()
"""


@pytest.mark.parametrize("place", ["begun", "written", "linked"])
def test_a_kill_in_the_middle_leaves_the_older_export(tmp_path: Path, place: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    done = run_script(KILLED.format(folder=str(tmp_path), place=place), 2)
    assert done.returncode != 0
    assert "killed" in done.stdout
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].any()
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


# ---------------------------------------------------------------------- models of transformers, in jobs of their own

TRANSFORMERS = """
import pathlib, shardrt, test_safetensors
world = shardrt.init("cpu")
test_safetensors.exchange_with_transformers(world, pathlib.Path({folder!r}))
shardrt.finalize()
"""


@pytest.mark.rest
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.all)])
def test_models_of_transformers(tmp_path: Path, size: int) -> None:
    run_script(TRANSFORMERS.format(folder=str(tmp_path)), size, code=0)


def exchange_with_transformers(world: World, folder: Path) -> None:
    """`from_pretrained` loads what ranks have saved, and ranks what `save_pretrained` has: the logits are equal bit by bit."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    llama = transformers.LlamaConfig(
        hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, **sizes
    )
    gpt2 = transformers.GPT2Config(n_embd=36, n_layer=2, n_head=4, n_positions=32, **sizes)
    make: Any = transformers.AutoModelForCausalLM
    x = torch.arange(20).view(2, 10)
    for config, blocks, dtype in ((llama, "model.layers", torch.bfloat16), (gpt2, "transformer.h", torch.float32)):
        torch.manual_seed(0)
        whole = make.from_config(config, dtype=dtype).eval()
        out = folder / f"{config.model_type}-{dtype}"
        model = shard_blocks(copy.deepcopy(whole), blocks)
        if world.rank == 0:
            config.save_pretrained(out)
        world.barrier()
        save_safetensors(model, out, max_shard_size="30KB")
        if world.rank == 0:
            loaded, info = make.from_pretrained(out, output_loading_info=True, dtype=dtype)
            assert not any(info.values()), info
            assert torch.equal(loaded.eval()(x).logits, whole(x).logits)
            whole.save_pretrained(folder / "theirs", max_shard_size="20KB")
        world.barrier()
        model = shard_blocks(made_on_meta(lambda: make.from_config(config, dtype=dtype).eval()), blocks)  # noqa: B023
        load_safetensors(model, folder / "theirs")
        assert torch.equal(model(x).logits, whole(x).logits)
        world.barrier()

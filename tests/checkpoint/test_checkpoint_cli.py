"""`python -m shardrt.checkpoint` on checkpoints of stock DCP, safetensors and torch.save: inspect, verify, convert."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as load_by_stock
from torch.distributed.checkpoint.state_dict_saver import save as save_by_stock

from ranks import rank_environment, refused
from shardrt.checkpoint.__main__ import main


def tree(seed: int = 0) -> dict[str, Any]:
    """Nested dicts and lists, several dtypes, scalars, an empty tensor, views, and objects."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(7, 5, generator=generator), torch.randn(300, 100, generator=generator).bfloat16()
    return {
        "model": {"inp.weight": weight, "inp.bias": bias, "none": torch.empty(0, 3)},
        "optimizer": {
            "state": {"inp.weight": {"step": torch.tensor(12.0), "exp_avg": weight.t().contiguous()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["inp.weight"]}],
        },
        "list": [torch.arange(3), {"deep": torch.tensor(True)}],
        "epoch": 3,
    }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by names."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for inner, item in items for key, leaf in flat(item, f"{name}.{inner}").items()}
    return {name: value}


def assert_same(found: Any, expected: Any) -> None:
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """What stock DCP writes of `tree()`."""
    with pytest.warns(UserWarning, match="single process"):
        save_by_stock(tree(), checkpoint_id=tmp_path / "stock")
    return tmp_path / "stock"


def call(*arguments: object) -> int:
    return main([str(each) for each in arguments])


# ---------------------------------------------------------------------- inspect


def test_inspect_a_checkpoint_of_stock_dcp(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("inspect", stock) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0]: re.split(r"  +", line)[1:] for line in lines}
    assert cells["model.inp.weight"] == ["(7, 5)", "float32", "140", "0"]
    assert cells["model.inp.bias"] == ["(300, 100)", "bfloat16", "60,000", "0"]
    assert cells["optimizer.param_groups.0.betas"] == ["(object)"]
    tensors = [value for value in flat(tree()).values() if isinstance(value, torch.Tensor)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors):,} elements" in lines
    assert any(line.startswith(f"{nbytes:,} bytes (float32 ") for line in lines)
    assert lines[-2:] == ["written by ranks 0", "step 12"]


def test_inspect_for_programs(stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.torch.save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert call("inspect", "--json", tmp_path / "x.safetensors") == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(tmp_path / "x.safetensors"),
        "kind": "safetensors",
        "save": None,
        "step": None,
        "nbytes": 12,
        "tensors": {"a": {"shape": [2, 3], "dtype": "bfloat16", "nbytes": 12, "ranks": []}},
        "objects": [],
    }
    assert call("inspect", "--json", stock) == 0
    found = json.loads(capsys.readouterr().out)
    assert call("inspect", stock) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*found["tensors"], *found["objects"]))
    assert found["nbytes"] == sum(each["nbytes"] for each in found["tensors"].values())
    assert {rank for each in found["tensors"].values() for rank in each["ranks"]} == {0}


def test_inspect_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(tree(), tmp_path / "saved.pt")
    safetensors.torch.save_file({"a": torch.ones(2, 3)}, tmp_path / "a.safetensors")
    assert call("inspect", tmp_path / "saved.pt") == call("inspect", tmp_path / "a.safetensors") == 0
    out = capsys.readouterr().out
    assert "saved.pt: torch\n7 tensors" in out
    assert "a.safetensors: safetensors\n1 tensors, 6 elements\n24 bytes (float32 24); 0 objects\n" in out


def test_inspect_a_step_that_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"run": {"step": [3]}}, tmp_path / "saved.pt")
    assert call("inspect", tmp_path / "saved.pt") == 0
    assert "step 3" not in capsys.readouterr().out


def test_inspect_takes_the_step_of_an_optimizer_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"schedule.step": torch.tensor(7), "states.step": torch.tensor(8)}
    torch.save({"model": model}, tmp_path / "model.pt")
    torch.save({"model": model, "optimizer": tree()["optimizer"]}, tmp_path / "both.pt")
    assert call("inspect", tmp_path / "model.pt") == 0
    assert "\nstep" not in capsys.readouterr().out
    assert call("inspect", tmp_path / "both.pt") == 0
    assert capsys.readouterr().out.endswith("\nstep 12\n")


# ---------------------------------------------------------------------- verify


def test_verify_names_what_is_damaged(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", stock) == 0
    assert re.search(r"stock: \d+ items are sound; [\d,]+ bytes read\n", capsys.readouterr().out)
    (file,) = stock.glob("*.distcp")
    data = bytearray(file.read_bytes())
    place = data.find(bytes(tree()["model"]["inp.bias"].view(torch.uint8).flatten().tolist()))
    assert place > 0
    data[place + 77] ^= 4
    file.write_bytes(data)
    assert call("verify", stock) == 1
    damage, summary = capsys.readouterr().out.splitlines()
    assert re.match(r"__0_0.distcp: tensor 'model.inp.bias': item at \d+ is damaged: .* record 'archive/data/0' is", damage)
    assert re.search(r": 1 of \d+ items are damaged; ", summary)


def test_verify_reports_short_and_missing_files(stock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = stock.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-2000])
    assert call("verify", stock) == 1
    assert "__0_0.distcp" in capsys.readouterr().out
    file.unlink()
    assert call("verify", stock) == 1
    *damage, summary = capsys.readouterr().out.splitlines()
    assert len(damage) == int(re.findall(r"(\d+) of \1 items are damaged", summary)[0])


def test_verify_items_without_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.warns(UserWarning, match="single process"):
            save_by_stock({"a": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    finally:
        torch.serialization.set_crc32_options(True)
    assert call("verify", tmp_path / "a") == 0
    assert "1 items are sound; 1 have no checksum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("boxes", "size", "message"),
    [
        ([], 8, "lacks 8 of the 8 elements"),
        ([(0, 4), (2, 6)], 8, "chunks of the checkpoint overlap"),
        ([(0, 4), (2, 4)], 8, "chunks of the checkpoint overlap"),
        ([(0, 8)], 2**62, "larger than any memory"),
    ],
)
def test_verify_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], boxes: list[tuple[int, int]], size: int, message: str
) -> None:
    """Those of a `.metadata` that do not make up the tensor."""
    with pytest.warns(UserWarning, match="single process"):
        save_by_stock({"a": torch.ones(8)}, checkpoint_id=tmp_path)
    stored = FileSystemReader(tmp_path).read_metadata()
    tensor: Any = stored.state_dict_metadata["a"]
    tensor.size = torch.Size([size])
    tensor.chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([numel])) for start, numel in boxes]
    (info,) = stored.storage_data.values()
    stored.storage_data = {MetadataIndex("a", torch.Size([start])): info for start, _ in boxes}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(stored))
    assert call("verify", tmp_path) == 1
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------- convert


def test_convert_deletes_nothing(stock: Path, tmp_path: Path) -> None:
    """A folder that has the name of what was to be written, and `.tmp` behind it."""
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "precious").touch()
    assert call("convert", stock, tmp_path / "out", "--to", "dcp") == 0
    assert (tmp_path / "out.tmp" / "precious").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.tmp", "stock"]


def test_every_kind_becomes_every_other(stock: Path, tmp_path: Path) -> None:
    """DCP -> torch -> DCP -> torch -> and, of the model alone, safetensors -> DCP and torch."""
    assert call("convert", stock, tmp_path / "one.pt", "--to", "torch") == 0
    assert_same(torch.load(tmp_path / "one.pt"), tree())
    assert call("convert", tmp_path / "one.pt", tmp_path / "two", "--to", "dcp") == 0
    assert call("verify", tmp_path / "two") == 0
    assert call("convert", tmp_path / "two", tmp_path / "two.pt", "--to", "torch") == 0
    assert_same(torch.load(tmp_path / "two.pt"), tree())
    target = tmp_path / "three.safetensors"
    assert call("convert", tmp_path / "two", target, "--to", "safetensors", "--only", "model") == 0
    assert_same(safetensors.torch.load_file(target), tree()["model"])
    assert call("convert", target, tmp_path / "four", "--to", "dcp") == 0
    assert call("convert", tmp_path / "four", tmp_path / "four.pt", "--to", "torch") == 0
    assert_same(torch.load(tmp_path / "four.pt"), tree()["model"])
    assert not list(tmp_path.glob("*.tmp"))


def test_stock_dcp_loads_what_was_converted(tmp_path: Path) -> None:
    torch.save(tree(), tmp_path / "saved.pt")
    assert call("convert", tmp_path / "saved.pt", tmp_path / "made", "--to", "dcp") == 0
    found = tree(1)
    with pytest.warns(UserWarning, match="single process"):
        load_by_stock(found, checkpoint_id=tmp_path / "made")
    assert_same(found, tree())


def test_safetensors_in_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(tree(), tmp_path / "saved.pt")
    arguments = ("convert", tmp_path / "saved.pt", tmp_path / "made", "--to", "safetensors", "--max-shard-size", "60KB")
    assert call(*arguments) == 0
    assert "left out, as safetensors has tensors only: 4 objects: " in capsys.readouterr().err
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    tensors = {name.removeprefix("."): value for name, value in flat(tree()).items() if isinstance(value, torch.Tensor)}
    assert_same(found, tensors)
    assert call("convert", tmp_path / "made", tmp_path / "again.pt", "--to", "torch") == 0
    assert_same(torch.load(tmp_path / "again.pt"), tensors)


# ---------------------------------------------------------------------- errors


def test_errors_are_one_line(stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-3").symlink_to(stock)
    torch.save(tree(), tmp_path / "saved.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "saved.pt").read_bytes()[:1000])
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path / "complex.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"123")
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "twice.pt")
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    cases = {
        ("inspect", tmp_path / "none"): "no file or folder",
        ("inspect", tmp_path / "no"): "is no checkpoint",
        ("inspect", tmp_path / "run"): "the newest checkpoint in it is '.*run/step-3'",
        ("verify", tmp_path / "no"): r"\.metadata",
        ("verify", tmp_path / "saved.pt"): r"\.metadata: .*; a folder is a checkpoint once its save has ended",
        ("verify", tmp_path / "run"): "the newest in '.*run' is '.*run/step-3'",
        ("inspect", tmp_path / "cut.pt"): "no zip archive ends here",
        ("inspect", tmp_path / "cut.safetensors"): "cut.safetensors",
        ("convert", tmp_path / "twice.pt", tmp_path / "x", "--to", "dcp"): "two values of the name 'a.b'",
        ("convert", stock, tmp_path / "no", "--to", "dcp"): "exists: name another target",
        ("convert", stock, tmp_path / "x", "--to", "torch", "--only", "modle"): "no name begins with 'modle.'",
        (
            "convert",
            tmp_path / "complex.pt",
            tmp_path / "x",
            "--to",
            "safetensors",
        ): "tensor 'a' has the dtype torch.compl",
    }
    for arguments, message in cases.items():
        assert call(*arguments) == 1, arguments
        out, err = capsys.readouterr()
        assert re.fullmatch(rf"error: .*{message}.*\n", err), err
        assert not out
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_a_file_with_foreign_objects_is_told(is_zip: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How to save it again, and not how to load it without protection."""
    state = {"model": {"w": torch.ones(2)}, "args": Namespace(lr=0.1)}
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=is_zip)
    assert call("convert", tmp_path / "old.pt", tmp_path / "new", "--to", "dcp") == 1
    err = capsys.readouterr().err
    assert re.search(
        r"'.*/old.pt'.* its pickle refers to argparse\.Namespace, .*; refused\. If the file is yours, save", err
    ), err
    assert "weights_only" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("convert", "a", "b"), "the following arguments are required: --to"),
        (("convert", "a", "b", "--to", "dcp", "--max-shard-size", "5parsecs"), "argument --max-shard-size: .*5parsecs.*"),
    ],
)
def test_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused("2", lambda: call(*arguments), SystemExit)
    assert re.fullmatch(rf"shardrt-checkpoint( \w+)?: error: {message}\n", capsys.readouterr().err)


@pytest.mark.rest
def test_the_module_starts_no_mpi(stock: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['x', 'inspect', sys.argv[1]]\n"
        "try:\n    runpy.run_module('shardrt.checkpoint', run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, 'mpi4py.MPI' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, os.fspath(stock)]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    assert not done.stderr

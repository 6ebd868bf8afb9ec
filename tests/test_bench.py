"""The step benchmark runs and its losses agree; the feature table names existing tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import parity
from bench import forecast, step
from bench.checkpoint_metadata import simulate
from common.models import CASES
from shardrt.plan.hardware import load_sheet

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "scripts" / "bench" / "step.py"
FORECAST = BENCH.with_name("forecast.py")


def run_script(script: Path, *options: str) -> dict[str, Any]:
    """The JSON of the last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.all
def test_last_line_is_json_and_the_losses_agree() -> None:
    summary = run_script(BENCH, "--models", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "2")
    (result,) = summary["results"]
    assert (result["model"], result["ranks"], result["agreement"]) == ("tiny", 2, "bitwise")
    assert result["ratio_fsdp2"] == result["ms"]["shardrt"] / result["ms"]["fsdp2"]
    assert min(*result["ms"].values(), *result["peak_mb"].values(), summary["host"]["median_us"]) > 0


@pytest.mark.all
def test_tensor_parallel_losses_agree_with_those_of_torch() -> None:
    summary = run_script(BENCH, "--tp", "2", "--ranks", "2", "--rounds", "1", "--steps", "1")
    (result,) = summary["results"]
    assert (result["model"], result["ranks"], result["tp"], result["ratio_floor"]) == ("gpt-512", 2, 2, None)
    assert not result["agreement"].startswith("DIFFER"), result["agreement"]


@pytest.mark.all
def test_forecasts_are_compared_with_steps() -> None:
    (result,) = run_script(FORECAST, "--models", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "5")["results"]
    assert (result["model"], result["ranks"]) == ("tiny", 2)
    assert result["ratio"] == result["forecast_ms"] / result["measured_ms"]
    assert 0.1 < result["ratio"] < 10, "other load may be heavy, but not the wrong unit"


def test_the_model_of_a_forecast_is_the_one_that_is_measured() -> None:
    case = CASES["mlp"]
    found = forecast.forecast_step(case, 2, load_sheet("h100"))
    numels = [parameter.numel() for parameter in case.build().parameters()]
    assert sum(group.numel for group in found.groups) == sum(numels)
    assert len(found.groups) == 13
    matrices = sum(numel for numel in numels if numel > 1024)
    first = 1024 * 1024  # its input needs no gradient
    assert found.flops == 8 * (6 * matrices - 2 * first) + 8 * 6 * 1024, "and the head"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "2", "--ranks", "3"), "--ranks 3 does not divide by --tp 2"),
        (("--tp", "2", "--models", "mlp"), "--tp 2: model mlp has no plan, use a GPT"),
    ],
)
def test_bad_options_of_the_step_benchmark(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["step.py", *options])
    with pytest.raises(SystemExit, match="2"):
        step.main()
    assert capfd.readouterr().err == f"step.py: error: {message}\n"


def test_host_time_of_a_block() -> None:
    us = run_script(BENCH.with_name("parallel.py"), "--rounds", "2")["host_us"]
    assert {name.split(",")[0] for name in us} == {"plain", "shardrt", "torch"}
    assert min(us.values()) > 0


@pytest.mark.all
def test_checkpoints_beside_those_of_torch(tmp_path: Path) -> None:
    options = ("--megabytes", "30", "--rounds", "1", "--repeats", "1", "--metadata-ranks", "1000", "--metadata-blocks", "2")
    summary = run_script(BENCH.with_name("checkpoint.py"), *options, "--folder", str(tmp_path))
    (result,) = summary["results"]
    assert result["ratio_load"] == result["load_s"]["shardrt"] / result["load_s"]["stock"]
    assert min(*result["save_s"].values(), *result["stall_s"].values(), *result["save_peak"].values(), result["read_s"]) > 0
    assert summary["metadata"]["tensors"] == 20
    assert not list(tmp_path.iterdir())


def test_the_metadata_of_many_ranks(tmp_path: Path) -> None:
    made = simulate(ranks=300, blocks=2, folder=tmp_path)
    assert made.chunks >= 2 * 300
    assert made.nbytes == (tmp_path / ".metadata").stat().st_size


def test_scripts_look_for_the_checkout_before_they_import_shardrt() -> None:
    """In a bare checkout, shardrt cannot be imported before `common.checkout`; sorted imports may change their order."""
    found = []
    for path in (ROOT / "scripts").rglob("*.py"):
        lines = path.read_text().splitlines()
        first = next(
            (n for n, line in enumerate(lines) if line.startswith(("import common.checkout", "from common import checkout"))),
            None,
        )
        if first is not None:
            found.append(path.name)
            assert not [line for line in lines[:first] if line.startswith(("import shardrt", "from shardrt"))], path
    benches = {"step.py", "overlap.py", "padding.py", "parallel.py", "checkpoint.py"}
    benches |= {"quantized_gather.py", "quantized_training.py", "forecast.py", "growth.py", "peak.py"}
    assert benches | {"train.py", "gpu_check.py", "table.py"} == set(found)


def test_feature_table(capsys: pytest.CaptureFixture[str]) -> None:
    parity.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["row", "feature", "FSDP2", "shardrt", "test"]
    assert {row.split()[0] for row in rows} >= {
        *(f"A{n}" for n in range(1, 14)),
        *(f"B{n}" for n in range(1, 10)),
        "C1",
        "C2",
        "C3",
    }

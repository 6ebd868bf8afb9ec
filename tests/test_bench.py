"""The step benchmark runs and its losses agree; the feature table names existing tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import parity

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "scripts" / "bench" / "step.py"


def test_last_line_is_json_and_the_losses_agree() -> None:
    options = ["--models", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(BENCH), *options], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    (result,) = summary["results"]
    assert (result["model"], result["ranks"], result["agreement"]) == ("tiny", 2, "bitwise")
    assert result["ratio_fsdp2"] == result["ms"]["shardrt"] / result["ms"]["fsdp2"]
    assert min(*result["ms"].values(), *result["peak_mb"].values(), summary["host"]["median_us"]) > 0


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
    assert {"train.py", "gpu_check.py", "step.py", "overlap.py", "padding.py", "table.py"} == set(found)


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

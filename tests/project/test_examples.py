"""scripts/examples: each is short, runs on real ranks, and prints what its task promises."""

from __future__ import annotations

import difflib
import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from ranks import rank_environment, start

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
FSDP2, FROM_FSDP2 = EXAMPLES / "fsdp2_original.py", EXAMPLES / "from_fsdp2.py"
DCP, FROM_DCP = EXAMPLES / "dcp_original.py", EXAMPLES / "from_dcp.py"
ALONE, FROM_ALONE = EXAMPLES / "one_process.py", EXAMPLES / "from_one_process.py"
PAIRS = {"fsdp2": (FSDP2, FROM_FSDP2, 10), "dcp": (DCP, FROM_DCP, 12), "one process": (ALONE, FROM_ALONE, 19)}
SHORT = sorted(set(EXAMPLES.glob("*.py")) - {path for original, ours, _ in PAIRS.values() for path in (original, ours)})


def run_example(path: Path, *options: str, ranks: int = 2) -> str:
    process = start(ranks, [str(path), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=120.0)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    return out


def run_original(path: Path, *options: str) -> list[float]:
    port, ranks = free_port(), []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        arguments = [os.fspath(path), *options]
        ranks.append(start(0, arguments, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=120.0) for process in ranks]
    found = losses(outputs[0][0])
    # Not the exit codes: gloo's threads may abort a process ("terminate called ...") when its program has ended.
    assert found, outputs
    return found


def free_port() -> str:
    """A port that the kernel gives to no connection before the ranks take it."""
    with socket.socket() as free:
        for port in random.sample(range(20000, 32000), 100):
            with suppress(OSError):
                free.bind(("127.0.0.1", port))
                return str(port)
    raise OSError("100 ports are taken")


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", out)]


# ---------------------------------------------------------------------- from FSDP2, DCP and one process


@pytest.mark.parametrize(("original", "ours", "count"), PAIRS.values(), ids=PAIRS)
def test_as_many_lines_differ_as_the_documents_say(original: Path, ours: Path, count: int) -> None:
    changes = list(difflib.ndiff(original.read_text().splitlines(), ours.read_text().splitlines()))
    assert max(sum(line.startswith(sign) for line in changes) for sign in "-+") == count


def test_from_fsdp2_trains_as_the_original(tmp_path: Path) -> None:
    saved = os.fspath(tmp_path / "saved.pt")
    expected = run_original(FSDP2, "--steps", "4")
    assert len(expected) == 4
    first = losses(run_example(FROM_FSDP2, "--steps", "2", "--save", saved))
    assert first + losses(run_example(FROM_FSDP2, "--steps", "4", "--load", saved)) == expected


@pytest.mark.all
def test_from_dcp_resumes_from_the_checkpoints_of_the_original(tmp_path: Path) -> None:
    """The last checkpoint is of step 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    expected = run_original(DCP, os.fspath(folder), "--steps", "5")
    assert len(expected) == 5
    assert losses(run_example(FROM_DCP, os.fspath(folder), "--steps", "5")) == expected[4:]
    assert losses(run_example(FROM_DCP, os.fspath(tmp_path / "ours"), "--steps", "3")) == expected[:3]


def test_from_one_process_trains_as_the_original(tmp_path: Path) -> None:
    """The same losses as printed, and weights that a plain process loads."""
    files = tmp_path / "alone.pt", tmp_path / "sharded.pt"
    alone = run_example(ALONE, os.fspath(files[0]), ranks=0)
    found = losses(run_example(FROM_ALONE, os.fspath(files[1])))
    assert found == pytest.approx(losses(alone), abs=2e-4)
    assert len(found) == 22
    assert found[-1] < found[0] / 1.5
    expected, saved = (torch.load(file) for file in files)
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-3)


def test_the_page_for_ddp_trains(tmp_path: Path) -> None:
    """Its example: the loss falls, and rank 0's file has the whole model."""
    page = (ROOT / "docs" / "from_ddp.md").read_text()
    script, saved = tmp_path / "train.py", tmp_path / "model.pt"
    script.write_text(page.split("```python\n")[1].split("```")[0].replace('"model.pt"', repr(str(saved))))
    found = [float(loss) for loss in re.findall(r"epoch \d: (\S+)", run_example(script))]
    assert len(found) == 3
    assert found[2] < found[0]
    assert torch.load(saved)["4.weight"].shape == (1, 16)


# ---------------------------------------------------------------------- the first hour


@pytest.mark.rest
def test_the_first_hour_is_as_the_page_says(tmp_path: Path) -> None:
    """Each command of the table exits with 0 and prints what the second column quotes, one after another."""
    page = (ROOT / "docs" / "getting_started.md").read_text()
    rows = [row.split(" | ")[:2] for row in page.splitlines() if row.startswith("| `")]
    assert len(rows) == 10
    assert rows.pop()[0] == "| `python3 scripts/dev.py test`"
    by_dev = "python3 scripts/dev.py train", ".venv/bin/python -m shardrt.launch -n 2 scripts/train.py --steps 2"
    for typed, seen in rows:
        command = typed.removeprefix("| ").strip("`").replace(*by_dev).replace("scripts/", f"{ROOT}/scripts/")
        arguments = command.replace(".venv/bin", os.path.dirname(sys.executable)).split()
        words = [word for word in re.findall("`(.*?)`", seen) if not word.endswith((".py", ".pt"))]
        run = subprocess.run(arguments, cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, (command, run.stdout, run.stderr)
        assert [word for word in words if word not in run.stdout + run.stderr] == [], (command, run.stdout)
    assert (tmp_path / "model.pt").exists()


# ---------------------------------------------------------------------- the notebook

CELLS = """
import json, sys
cells = json.load(open(sys.argv[1]))["cells"]
names = {"__name__": "__main__"}
for number, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
"""


@pytest.mark.rest
def test_the_notebook_runs() -> None:
    """In one process, which starts a job of two ranks at the end."""
    command = [sys.executable, "-c", CELLS, os.fspath(EXAMPLES / "ten_minutes.ipynb")]
    ran = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=240.0, check=False)
    assert ran.returncode == 0, ran.stderr
    first, last = (float(loss) for loss in re.findall(r"^loss (\S+) -> (\S+)$", ran.stdout, re.MULTILINE)[0])
    assert last < first / 2
    assert "rank 0 of 1 on cpu" in ran.stdout
    assert "step 30 with the same parameters: True" in ran.stdout
    shards = re.findall(r"rank \d: step 30, (\d+) of 16801 elements", ran.stdout)
    assert len(shards) == 2
    assert sum(map(int, shards)) == 16801


# ---------------------------------------------------------------------- one task each


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_every_example_is_run() -> None:
    assert {path.stem for path in SHORT} == {"minimal", "comm_alone", "resume", "checkpoint", *PRINTED}


def test_minimal_trains_as_one_process_does() -> None:
    sharded, alone = (losses(run_example(EXAMPLES / "minimal.py", ranks=ranks)) for ranks in (2, 1))
    assert len(alone) == 20
    assert alone[-1] < alone[0] / 2
    assert sharded == pytest.approx(alone, abs=2e-4)  # as printed: sums in another order


@pytest.mark.all  # runs that go on are in test_runs.py and test_train_script.py
def test_resume_goes_on_with_other_ranks(tmp_path: Path) -> None:
    path, folder = EXAMPLES / "resume.py", str(tmp_path / "run")
    first = losses(run_example(path, folder, "7"))
    found = first + losses(run_example(path, folder, "10", ranks=1))
    assert found == pytest.approx(losses(run_example(path, str(tmp_path / "alone"), "10", ranks=1)), abs=2e-4)
    assert (len(first), len(found)) == (7, 10)


@pytest.mark.all
def test_checkpoint_is_loaded_by_more_ranks(tmp_path: Path) -> None:
    path, parent = EXAMPLES / "checkpoint.py", tmp_path / "run"
    out = run_example(path, str(parent)) + run_example(path, str(parent), ranks=3)
    assert re.findall(r"step (\d+)", out) == [str(step) for step in range(20)]
    found = losses(out)
    assert found[10] < found[0] / 2  # it has not begun anew
    assert sorted(folder.name for folder in parent.iterdir()) == ["step-15", "step-20"]


# The number of ranks, and what is printed besides the losses.
PRINTED = {
    "hsdp": (4, r"a weight of \(32, 32\) lies in shards of \[(\d+), (\d+), \1, \2\] elements"),
    "mixed_precision_accumulation": (2, r"shards are in \{torch\.float32\}"),
    "meta_device": (2, r"4257 parameters in shards of \[2132, 2125\]"),
    "cpu_offload": (2, r"shards and optimizer state are on \{'cpu'\}"),
    "tensor_parallel": (4, r"up.weight \(128, 32\) \(Shard\(dim=0\), RaggedShard\(dim=0"),
    "expert_parallel": (4, r"rows of the first experts \[\d+, \d+, \d+, \d+\]"),
    "pipeline": (4, r"^step 19 loss"),
    "custom_collective": (2, r"[5-9]\S* gathers and 1[78]\d{3}\S* bytes per step"),
}


_MARKS: dict[str, list[pytest.MarkDecorator]] = {"tensor_parallel": [], "custom_collective": [], "pipeline": [pytest.mark.rest]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS.get(name, [pytest.mark.all])) for name in PRINTED])
def test_a_task_in_training(name: str) -> None:
    ranks, line = PRINTED[name]
    out = run_example(EXAMPLES / f"{name}.py", ranks=ranks)
    found = losses(out)
    assert len(found) == 20
    assert found[-1] < found[0] / 2
    assert re.search(line, out, re.MULTILINE), out


def test_comm_alone() -> None:
    out = run_example(EXAMPLES / "comm_alone.py").splitlines()
    ones, twos = [1.0] * 4, [2.0] * 4
    assert out == [f"gathered {ones + twos}, largest {twos}, received {twos}", "rank 0 caught RemoteError"]
